"""What groups cost on their way through TransferQueue. Run: python benchmarks/bench_transfer_queue.py [--groups N]

Starts Ray and TransferQueue on this machine, and stops them. Prints one line per length of a response: bytes of a group
in TransferQueue, milliseconds of a put (one at a time, and N at once) and of taking a group (with its payloads, and as
keys with its masks written), and for comparison of TransferQueue alone, putting and getting the same rows in turn with
them. Every part checks what it did.
"""

import argparse
import asyncio
import os
import statistics
import time
import warnings

import numpy as np

from pystale import ModelSteps, RolloutState, StalenessRule, Status

os.environ.setdefault("TQ_NUM_THREADS", "2")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

SIZE = 8  # responses per group
RULE = StalenessRule(max_staleness=4, max_token_staleness=0)


def group_of(number: int, tokens: int) -> list[RolloutState]:
    half = tokens // 2
    return [
        RolloutState(
            rollout_id=number * SIZE + i,
            group_id=number,
            prompt_ids=np.arange(64),
            response_ids=np.arange(tokens),
            response_model_steps=ModelSteps.from_runs([(3, half), (4, tokens - half)]),
            logprobs=np.zeros(tokens, np.float32),
            status=Status.COMPLETED,
            reward=0.5,
        )
        for i in range(SIZE)
    ]


async def measured(tokens: int, groups: int) -> None:
    import transfer_queue

    from pystale.group import read_group
    from pystale.integrations.transfer_queue import TransferQueueStore
    from pystale.integrations.transfer_queue.rows import READ_COLUMNS, rows_of, tensors_of

    store = TransferQueueStore(RULE, partition_id=f"bench-{tokens}", tail_batch_trigger_size=0)
    expected = SIZE * (tokens - tokens // 2)
    singly, taking, keys, alone_put, alone_get = [], [], [], [], []
    for number in range(groups):
        group = group_of(number, tokens)
        began = time.perf_counter()
        await store.put(group, train_step=5)
        singly.append(time.perf_counter() - began)
        rows = rows_of(read_group(group, "default"), f"alone-{number}")
        began = time.perf_counter()
        await asyncio.to_thread(transfer_queue.kv_batch_put, rows.keys, "alone", tensors_of(rows))
        alone_put.append(time.perf_counter() - began)
    several = [group_of(number, tokens) for number in range(groups, 2 * groups)]
    began = time.perf_counter()
    await asyncio.gather(*[store.put(group, train_step=5) for group in several])
    together = (time.perf_counter() - began) / groups
    for number in range(groups):
        began = time.perf_counter()
        batch = await store.take_train_batch({"default": 1}, train_step=5)
        taking.append(time.perf_counter() - began)
        if batch.trainable_tokens != expected:
            raise RuntimeError(f"{batch.trainable_tokens} tokens in the loss, {expected} expected")
        rows = rows_of(read_group(group_of(number, tokens), "default"), f"alone-{number}")
        began = time.perf_counter()
        await asyncio.to_thread(transfer_queue.kv_batch_get, rows.keys, "alone", list(READ_COLUMNS))
        alone_get.append(time.perf_counter() - began)
        await asyncio.to_thread(transfer_queue.kv_clear, rows.keys, "alone")
    for _ in range(groups):
        began = time.perf_counter()
        taken = await store.take_keys({"default": 1}, train_step=5)
        keys.append(time.perf_counter() - began)
        if taken.trainable_tokens != expected:
            raise RuntimeError(f"{taken.trainable_tokens} tokens in the loss, {expected} expected")
    await store.acknowledge(5)
    await store.flush()
    await store.close()
    size = rows_of(read_group(group_of(0, tokens), "default"), "name").nbytes
    timed = (singly, alone_put, taking, alone_get, keys)
    put, put_alone, took, got_alone, handed = (1e3 * statistics.median(times) for times in timed)
    print(
        f"{SIZE} x {tokens:>6,} tokens: {size:>10,} bytes; "
        f"put {put:6.1f} ms ({put / put_alone:.1f} x TransferQueue alone), "
        f"{1e3 * together:6.1f} ms each of {groups} at once; "
        f"take {took:6.1f} ms ({took / got_alone:.1f} x a get alone); take keys {handed:6.1f} ms",
        flush=True,
    )


def main() -> None:
    import ray
    import transfer_queue

    from pystale.integrations.transfer_queue import start_transfer_queue

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=20)
    groups = parser.parse_args().groups
    warnings.simplefilter("ignore")
    ray.init(num_cpus=8, include_dashboard=False, logging_level="error", object_store_memory=200 << 20)
    try:
        start_transfer_queue()
        for tokens in (512, 8192):
            asyncio.run(measured(tokens, groups))
        transfer_queue.close()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
