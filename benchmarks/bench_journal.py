"""What durability costs: puts with and without a journal, saves, and resumes.

``pytest benchmarks/bench_journal.py`` compares within each group; ``--benchmark-disable`` only checks the answers.
``PYSTALE_BENCH_GROUPS`` sets how many groups are saved and resumed, ``PYSTALE_BENCH_MEMBERS`` the members of each.
"""

import asyncio
import gc
import os
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status
from pystale._objects import pack_lists

Group = list[RolloutState]
GROUPS = int(os.environ.get("PYSTALE_BENCH_GROUPS", "100000"))
MEMBERS = int(os.environ.get("PYSTALE_BENCH_MEMBERS", "1"))


def group(number: int, tokens: int, members: int = 1, *, arrays: bool = False) -> Group:
    """A group whose members have objects of their own, as generation makes them: none is in a cache already."""
    states = []
    for member in range(members):
        ids = np.arange(1000 + member, 1000 + member + tokens)
        logprobs = -1 / ids
        states.append(
            RolloutState(
                rollout_id=number * members + member,
                group_id=number,
                prompt_ids=[1, 2, 3],
                response_ids=ids.astype(np.int32) if arrays else ids.tolist(),
                response_model_steps=ModelSteps.from_runs([(8, tokens)]) if arrays else [8] * tokens,
                logprobs=logprobs.astype(np.float32) if arrays else logprobs.tolist(),
                reward=1.0,
                status=Status.COMPLETED,
            )
        )
    return states


def make(journal: Path | None) -> ReplayBuffer:
    return ReplayBuffer(StalenessRule(max_staleness=4), tail_batch_trigger_size=0, journal=journal)


@pytest.mark.parametrize(("tokens", "members"), [(16, 1), (4096, 8)], ids=["1 x 16 tokens", "8 x 4,096 tokens"])
@pytest.mark.parametrize("arrays", [False, True], ids=["lists", "arrays"])
@pytest.mark.parametrize("journal", [False, True], ids=["without", "with journal"])
@pytest.mark.benchmark(group="64 puts at one time, by response")
def test_puts_at_one_time(
    benchmark: BenchmarkFixture, tmp_path: Path, journal: bool, arrays: bool, tokens: int, members: int
) -> None:
    rounds = 10
    buffer = make(tmp_path / "journal" if journal else None)
    numbers = iter(range(64 * (rounds + 1)))

    async def puts(groups: list[Group]) -> None:
        await asyncio.gather(*(buffer.put(g, train_step=9) for g in groups))

    def setup() -> tuple[tuple[list[Group]], dict[str, int]]:
        return ([group(next(numbers), tokens, members, arrays=arrays) for _ in range(64)],), {}

    benchmark.pedantic(lambda groups: asyncio.run(puts(groups)), setup=setup, rounds=rounds)
    assert len(buffer) >= 64


@pytest.mark.parametrize("journal", [False, True], ids=["without", "with journal"])
@pytest.mark.benchmark(group="one put after the other, 1 x 16 tokens")
def test_one_put(benchmark: BenchmarkFixture, tmp_path: Path, journal: bool) -> None:
    buffer = make(tmp_path / "journal" if journal else None)
    numbers = iter(range(10_000))

    def setup() -> tuple[tuple[Group], dict[str, int]]:
        return (group(next(numbers), 16),), {}

    benchmark.pedantic(lambda members: buffer.sync.put(members, train_step=9), setup=setup, rounds=50)
    assert buffer.sync.count() == next(numbers)


@pytest.mark.parametrize("read", ["pack_lists", "array", "numpy"])
@pytest.mark.parametrize("field", ["response_ids", "response_model_steps", "logprobs"])
@pytest.mark.benchmark(group="a list of 4,096 numbers as bytes, by field")
def test_list(benchmark: BenchmarkFixture, field: str, read: str) -> None:
    values = getattr(group(0, 4096)[0], field)
    code = "d" if field == "logprobs" else "q"
    reads: dict[str, Callable[[], bytes]] = {
        "pack_lists": lambda: packed(values),
        "array": lambda: array(code, values).tobytes(),
        "numpy": lambda: np.asarray(values).tobytes(),
    }
    assert benchmark(reads[read]) == array(code, values).tobytes()


def packed(values: list[Any]) -> bytes:
    found = pack_lists([values])
    return b"" if found is None else found[1]


async def longest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """Longest time in seconds that a heartbeat of 1 ms was late while `work` went on.

    On a busy machine that is the machine's: look at it where nothing else runs.
    """
    gc.collect()  # what filling the buffer left to the collector is no part of it
    running = asyncio.ensure_future(work())
    longest, last = 0.0, time.perf_counter()
    while not running.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await running
    return longest


def size(directory: Path) -> float:
    """Megabytes of a directory."""
    return sum(path.stat().st_size for path in directory.iterdir()) / 1e6


@pytest.mark.benchmark(group=f"save of {GROUPS} groups")
def test_save(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    buffer = make(None)
    for number in range(GROUPS):
        buffer.sync.put(group(number, 16, MEMBERS), train_step=9)
    gap = benchmark.pedantic(lambda: asyncio.run(longest_gap(lambda: buffer.save(tmp_path / "checkpoint"))), rounds=1)
    benchmark.extra_info.update(gap_ms=round(gap * 1e3, 1), megabytes=round(size(tmp_path / "checkpoint"), 1))
    print(f"longest gap {gap * 1e3:.1f} ms, {size(tmp_path / 'checkpoint'):.1f} MB")


@pytest.mark.benchmark(group=f"resume of {GROUPS} groups")
def test_resume_checkpoint(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    buffer = make(None)
    for number in range(GROUPS):
        buffer.sync.put(group(number, 16, MEMBERS), train_step=9)
    buffer.sync.save(tmp_path)
    other = make(None)
    gap = benchmark.pedantic(lambda: asyncio.run(longest_gap(lambda: other.resume(tmp_path))), rounds=1)
    benchmark.extra_info.update(gap_ms=round(gap * 1e3, 1))
    print(f"longest gap {gap * 1e3:.1f} ms")
    assert len(other) == GROUPS


@pytest.mark.benchmark(group=f"resume of {GROUPS} groups")
def test_resume_journal(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    buffer = make(tmp_path / "journal")

    async def puts() -> None:
        for first in range(0, GROUPS, 1000):
            await asyncio.gather(
                *(buffer.put(group(n, 16, MEMBERS), train_step=9) for n in range(first, min(first + 1000, GROUPS)))
            )
        await buffer.close()

    asyncio.run(puts())
    other = make(tmp_path / "journal")
    gap = benchmark.pedantic(lambda: asyncio.run(longest_gap(lambda: other.resume(None))), rounds=1)
    benchmark.extra_info.update(gap_ms=round(gap * 1e3, 1), megabytes=round(size(tmp_path / "journal"), 1))
    print(f"longest gap {gap * 1e3:.1f} ms, {size(tmp_path / 'journal'):.1f} MB")
    assert len(other) == GROUPS
