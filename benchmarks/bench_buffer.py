"""The replay buffer beside plain Python that reads every token of every group, as buffers without an index do.

``pytest benchmarks/bench_buffer.py`` compares within each group; ``--benchmark-disable`` only checks the answers.
"""

import asyncio
import functools
import statistics
import time
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status

Group = list[RolloutState]
RULE = StalenessRule(max_staleness=4, max_token_staleness=1)
TRAIN_STEP = 9


def group(number: int, steps: list[int] | ModelSteps, members: int) -> Group:
    ids = list(range(len(steps)))
    return [
        RolloutState(
            group_id=number, prompt_ids=[1], response_ids=ids, response_model_steps=steps, status=Status.COMPLETED
        )
        for _ in range(members)
    ]


def filled(groups: int, steps: list[int] | ModelSteps, members: int = 1, rule: StalenessRule = RULE) -> ReplayBuffer:
    buffer = ReplayBuffer(rule, tail_batch_trigger_size=0)
    for number in range(groups):
        buffer.sync.put(group(number, steps, members), train_step=TRAIN_STEP)
    return buffer


def scan(groups: list[Group], train_step: int) -> int:
    """What a refresh costs without an index: the age and the mask of every response, by list comprehension."""
    expired = 0
    for members in groups:
        for member in members:
            steps = member.response_model_steps
            too_old = train_step - min(steps) - 1 >= RULE.stale_threshold  # type: ignore[arg-type,operator]
            mask = [int(train_step - step - 1 < RULE.token_stale_threshold) for step in steps]  # type: ignore[operator,union-attr]
            expired += too_old or not any(mask)
    return expired


@functools.lru_cache(maxsize=1)
def long_groups() -> list[Group]:
    steps = [7] * 4096 + [8] * 4096
    return [group(number, steps, 8) for number in range(256)]


@pytest.mark.benchmark(group="refresh of 256 groups x 8 x 8,192 tokens, nothing due")
def test_refresh_before(benchmark: BenchmarkFixture) -> None:
    expired = benchmark.pedantic(scan, (long_groups(), TRAIN_STEP), rounds=1)
    assert expired == 0


@pytest.mark.benchmark(group="refresh of 256 groups x 8 x 8,192 tokens, nothing due")
def test_refresh_after(benchmark: BenchmarkFixture) -> None:
    buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0)
    for members in long_groups():
        buffer.sync.put(members, train_step=TRAIN_STEP)
    assert benchmark(buffer.sync.refresh_staleness, TRAIN_STEP) == {"default": 0}


@pytest.mark.benchmark(
    group="600 refreshes through the async API, nothing due, of 10,000, 100,000 and 1,000,000 groups"
)
def test_refresh_is_flat(benchmark: BenchmarkFixture) -> None:
    sizes = (100, 1_000) if benchmark.disabled else (10_000, 100_000, 1_000_000)
    buffers = {groups: filled(groups, [8]) for groups in sizes}
    seconds: dict[int, list[float]] = {groups: [] for groups in sizes}

    async def in_turn() -> None:
        """Calls inside a running loop; the sizes take turns, so that they see the same machine."""
        for _ in range(200):
            for groups, buffer in buffers.items():
                began = time.perf_counter()
                moved = await buffer.refresh_staleness(TRAIN_STEP)
                seconds[groups].append(time.perf_counter() - began)
                assert moved == {"default": 0}

    benchmark.pedantic(lambda: asyncio.run(in_turn()), rounds=5)
    for groups, measured in seconds.items():
        benchmark.extra_info[f"us per call, {groups:,} groups"] = round(statistics.median(measured) * 1e6, 2)


@pytest.mark.parametrize("due", [10, 100, 1_000, 10_000])
@pytest.mark.benchmark(group="refresh of 20,000 groups, by groups due")
def test_refresh_is_linear(benchmark: BenchmarkFixture, due: int) -> None:
    def setup() -> tuple[tuple[ReplayBuffer], dict[str, int]]:
        buffer = filled(20_000 - due, [8])
        for number in range(due):
            buffer.sync.put(group(20_000 + number, [7], 1), train_step=TRAIN_STEP)
        return (buffer,), {}

    def refresh(buffer: ReplayBuffer) -> dict[str, int]:
        return buffer.sync.refresh_staleness(TRAIN_STEP + 1)

    assert benchmark.pedantic(refresh, setup=setup, rounds=3) == {"default": due}


@pytest.mark.parametrize("members", [1, 8])
@pytest.mark.parametrize("groups", [2_000, 100_000])
@pytest.mark.benchmark(group="take_train_batch(64), 3-token responses, by groups stored")
def test_take_does_not_grow(benchmark: BenchmarkFixture, groups: int, members: int) -> None:
    buffer = filled(2_000 if benchmark.disabled else groups, [7, 8, 8], members)

    def take() -> int:
        return buffer.sync.take_train_batch({"default": 64}, train_step=TRAIN_STEP).trainable_tokens

    assert benchmark.pedantic(take, rounds=20) == 64 * 3 * members


@pytest.mark.benchmark(group="put of 8 x 8,192 tokens in lists")
def test_put_before(benchmark: BenchmarkFixture) -> None:
    members = group(0, [7] * 4096 + [8] * 4096, 8)
    assert benchmark(scan, [members], TRAIN_STEP) == 0


@pytest.mark.benchmark(group="put of 8 x 8,192 tokens in lists")
def test_put_after(benchmark: BenchmarkFixture) -> None:
    members = group(0, [7] * 4096 + [8] * 4096, 8)
    buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0)

    def put() -> Status:
        status = buffer.sync.put(members, train_step=TRAIN_STEP)
        buffer.sync.take_batch({"default": 1})
        return status

    assert benchmark(put) is Status.COMPLETED


@pytest.mark.benchmark(group="from put until a waiting take has its batch")
def test_put_wakes_a_waiting_take(benchmark: BenchmarkFixture) -> None:
    async def wake(rounds: int) -> list[float]:
        buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0)
        seconds = []
        for number in range(rounds):
            waiting = asyncio.create_task(buffer.wait_ready({"default": 1}))
            await asyncio.sleep(0)
            began = time.perf_counter()
            await buffer.put(group(number, [8], 1), train_step=TRAIN_STEP)
            await waiting
            await buffer.take_train_batch({"default": 1}, train_step=TRAIN_STEP)
            seconds.append(time.perf_counter() - began)
        return seconds

    median = benchmark.pedantic(lambda: statistics.median(asyncio.run(wake(200))), rounds=3)
    benchmark.extra_info["median of one wake-up in us"] = round(median * 1e6, 1)
    assert benchmark.disabled or median < 1e-3  # seconds; buffers that poll take one or two


def gaps_while(work: Callable[[ReplayBuffer], object], buffer: ReplayBuffer) -> float:
    """Longest time a task that sleeps 10 ms was not back, in seconds, while `work` ran."""

    async def main() -> float:
        longest, done = 0.0, asyncio.Event()

        async def heartbeat() -> None:
            nonlocal longest
            while not done.is_set():
                began = time.perf_counter()
                await asyncio.sleep(0.01)
                longest = max(longest, time.perf_counter() - began - 0.01)

        beat = asyncio.create_task(heartbeat())
        await asyncio.sleep(0.02)
        await work(buffer)  # type: ignore[misc]
        await asyncio.sleep(0.02)
        done.set()
        await beat
        return longest

    return asyncio.run(main())


@pytest.mark.parametrize("work", ["refresh", "save"])
@pytest.mark.benchmark(group="longest event-loop gap, 500 groups x 4 x 4,096 tokens in lists")
def test_the_event_loop_stays_free(benchmark: BenchmarkFixture, work: str, tmp_path_factory) -> None:
    buffer = filled(500, [7] * 2048 + [8] * 2048, 4)
    directory = tmp_path_factory.mktemp("checkpoint")

    def run(buffer: ReplayBuffer):
        return buffer.save(directory) if work == "save" else buffer.refresh_staleness(TRAIN_STEP)

    longest = benchmark.pedantic(gaps_while, (run, buffer), rounds=3)
    benchmark.extra_info["longest gap in ms"] = round(longest * 1e3, 1)
    assert benchmark.disabled or longest < 0.05  # seconds


@pytest.mark.benchmark(group="bookkeeping of 64 x 8 responses of 32,768 tokens and 3 versions")
def test_bookkeeping_per_token(benchmark: BenchmarkFixture) -> None:
    def nbytes() -> float:
        steps = ModelSteps()
        for step in (6, 7, 8):
            steps.append(step, 10_923)
        return steps.nbytes / len(steps)

    per_token = benchmark(nbytes)
    benchmark.extra_info["bytes per token"] = per_token
    assert per_token <= 0.1
