"""What one actor on Ray does in a second, and what a group costs it. Run: python benchmarks/bench_ray.py [--groups N]

Starts a cluster of its own on this machine. Rates are those of this machine with everything on it: producers, actor,
keeper, trainer and Ray. Every part prints one line as it is done, and checks what it did.
"""

import argparse
import asyncio
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pystale import ModelSteps, RolloutState, StalenessRule, Status

RULE = StalenessRule(max_staleness=4, max_token_staleness=2)
SIZE = 8  # responses per group
CONCURRENT = 16  # puts a producer has under way
BATCH = 16


def group_of(number: int, tokens: int) -> list[RolloutState]:
    half = tokens // 2
    return [
        RolloutState(
            rollout_id=number * SIZE + i,
            group_id=number,
            prompt_ids=np.arange(64),
            response_ids=np.arange(tokens, dtype=np.int32),
            response_model_steps=ModelSteps.from_runs([(3, half), (4, tokens - half)]),
            logprobs=np.zeros(tokens, np.float32),
            status=Status.COMPLETED,
            reward=0.5,
        )
        for i in range(SIZE)
    ]


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Producer:
    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    async def put(self, first: int, count: int, tokens: int) -> None:
        numbers = iter(range(first, first + count))

        async def puts() -> None:
            for number in numbers:
                await self.buffer.put(group_of(number, tokens), train_step=5)

        await asyncio.gather(*[puts() for _ in range(CONCURRENT)])

    def prepare(self, first: int, count: int) -> None:
        self.prepared = list(summaries(range(first, first + count), 1024))

    async def put_summaries(self) -> None:
        from pystale.integrations.ray.bookings import Call

        groups = iter(enumerate(self.prepared))

        async def puts() -> None:
            for number, group in groups:
                call = Call(self.buffer.client_id, 10**6 + number, 10**6 + max(0, number - 2 * CONCURRENT))
                await self.buffer.actor.put.remote(call, "default", group, 5, None)

        await asyncio.gather(*[puts() for _ in range(CONCURRENT)])


def percentiles(seconds: list[float]) -> str:
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def actor_alone(ray: Any, start: Any, groups: int) -> None:
    """Puts of summaries that were made before, without payloads: what the actor itself can take."""
    buffer = start()
    producers = [ray.remote(Producer).options(num_cpus=0).remote(buffer) for _ in range(2)]
    ray.get([producer.prepare.remote(10**8 * (i + 1), groups) for i, producer in enumerate(producers)])
    cpu_s, began = ray.get(buffer.actor.report.remote())["cpu_s"], time.perf_counter()
    ray.get([producer.put_summaries.remote() for producer in producers])
    seconds = time.perf_counter() - began
    cpu_s = ray.get(buffer.actor.report.remote())["cpu_s"] - cpu_s
    if len(buffer) != 2 * groups:
        raise RuntimeError(f"{len(buffer)} groups are stored")
    print(
        f"the actor alone: {2 * groups / seconds:7.0f} puts/s, {cpu_s / 2 / groups * 1e3:.2f} ms of its CPU each",
        flush=True,
    )
    for producer in producers:
        ray.kill(producer)
    buffer.shutdown()


def rates(ray: Any, start: Any, groups: int) -> None:
    for n in (1, 2, 4):
        buffer = start()
        producers = [ray.remote(Producer).options(num_cpus=0).remote(buffer) for _ in range(n)]
        ray.get([producer.put.remote(10**6 * (i + 1), CONCURRENT, 16) for i, producer in enumerate(producers)])
        cpu_s = ray.get(buffer.actor.report.remote())["cpu_s"]
        began, share = time.perf_counter(), groups // n
        ray.get([producer.put.remote(10**8 * (i + 1), share, 1024) for i, producer in enumerate(producers)])
        put_s = time.perf_counter() - began
        put_cpu_s = ray.get(buffer.actor.report.remote())["cpu_s"] - cpu_s
        stored = len(buffer)
        if stored != share * n + n * CONCURRENT:
            raise RuntimeError(f"{stored} groups are stored")
        referenced, fetched = [], []
        began = time.perf_counter()
        taken = 0
        for step in range(stored // BATCH):
            before = time.perf_counter()
            batch = buffer.sync.take_refs({"default": BATCH}, train_step=5 + step % 2)
            referenced.append(time.perf_counter() - before)
            full = buffer.sync.fetch(batch)
            fetched.append(time.perf_counter() - before)
            taken += len(full["default"])
        take_s = time.perf_counter() - began
        print(
            f"{n} producers: {share * n / put_s:5.0f} puts/s, {put_cpu_s / share / n * 1e3:.2f} ms of the actor's CPU "
            f"each; {taken / take_s:5.0f} groups taken/s; take of {BATCH}: "
            f"{percentiles(referenced)}, with tokens {percentiles(fetched)}",
            flush=True,
        )
        for producer in producers:
            ray.kill(producer)
        buffer.shutdown()


def summaries(numbers: range, tokens: int) -> Iterator[list[RolloutState]]:
    from pystale.group import read_group
    from pystale.summary import summaries_of

    for number in numbers:
        yield summaries_of(read_group(group_of(number, tokens), "default"), f"{'0' * 56}/{'0' * 16}-{number}")


def bytes_of_a_group() -> None:
    from pystale.integrations.ray.bookings import Call

    for tokens in (1024, 32768):
        (group,) = summaries(range(7, 8), tokens)
        sent = len(pickle.dumps((Call("0" * 16, 7, 7), "default", group, 5, None), protocol=5))
        payload = len(pickle.dumps(group_of(7, tokens), protocol=5))
        print(f"{SIZE} responses of {tokens:6} tokens: {sent} bytes through the actor, {payload} bytes in payloads")


def memory(groups: int) -> None:
    """Of the actor's buffer and bookkeeping, in this process."""
    from collections import Counter

    from pystale import ReplayBuffer
    from pystale.summary import names_of

    with tempfile.TemporaryDirectory() as directory:
        buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0, journal=directory, write_masks=False)
        holders: Counter[str] = Counter()
        wire = [pickle.dumps(group, protocol=5) for group in summaries(range(groups), 1024)]
        before, began = resident(), time.perf_counter()
        for data in wire:
            group = pickle.loads(data)
            holders.update(names_of(group))
            buffer.operations.put(group, "default", None, 5, ["put", "0" * 16, 1, 1, "default", group[0].group_id])
        seconds = time.perf_counter() - began
        used = resident() - before
        if len(buffer) != groups:
            raise RuntimeError(f"{len(buffer)} groups are stored")
        print(
            f"{groups} groups of {SIZE}: {used / 2**20:.0f} MiB, {used / groups / SIZE:.0f} bytes per rollout; stored "
            f"by the buffer alone at {groups / seconds:.0f} groups/s"
        )
        buffer.sync.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=400, help="groups put in each part")
    parser.add_argument("--stored", type=int, default=100_000, help="groups for the memory")
    given = parser.parse_args()
    bytes_of_a_group()
    memory(given.stored)

    import ray

    from pystale.integrations.ray import RayReplayBuffer

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=400 << 20)
    try:
        with tempfile.TemporaryDirectory() as directory:
            number = iter(range(10))

            def start() -> RayReplayBuffer:
                return RayReplayBuffer.start(RULE, directory=f"{directory}/{next(number)}", tail_batch_trigger_size=0)

            actor_alone(ray, start, given.groups)
            rates(ray, start, given.groups)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
