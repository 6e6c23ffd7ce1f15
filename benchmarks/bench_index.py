"""StalenessIndex beside plain Python that scans every group, on the same summaries.

``pytest benchmarks/bench_index.py`` compares within each group; ``--benchmark-disable`` only checks the answers.
Groups have 8 members; 100 groups share a model step.
"""

import bisect
import functools
import heapq
import itertools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pystale._core import StalenessIndex

STALE = 3
MEMBERS = 8
PER_STEP = 100
COMPLETED = 1
ALL = (1 << 7) - 1
SIZES = (10_000, 100_000, 1_000_000)

Row = tuple[int, int, list[int]]  # (key, arrival, oldest step per member)
Due = list[tuple[int, list[int]]]


def rows(start: int, stop: int) -> list[Row]:
    steps: list[list[int]] = [[step] * MEMBERS for step in range(stop // PER_STEP + 1)]
    return [(i // PER_STEP, i, steps[i // PER_STEP]) for i in range(start, stop)]


def insert(index: StalenessIndex, row: Row) -> int:
    key, arrival, oldest = row
    return index.insert(0, COMPLETED, key, arrival, oldest, oldest)


@functools.lru_cache(maxsize=1)
def index_of(n: int) -> StalenessIndex:
    """Each benchmark leaves it with n groups; the first group's id is 0, as its arrival."""
    index = StalenessIndex()
    index.add_task(STALE, None)
    for row in rows(0, n):
        insert(index, row)
    return index


@functools.lru_cache(maxsize=1)
def list_of(n: int) -> list[Row]:
    return rows(0, n)


def scan(groups: list[Row], train_step: int) -> Due:
    """Plain Python: every member of every group, at every refresh."""
    due: Due = []
    for _, arrival, oldest in groups:
        members = [i for i, step in enumerate(oldest) if train_step - step - 1 >= STALE]
        if members:
            due.append((arrival, members))
    return due


@pytest.mark.parametrize("n", SIZES)
class TestNothingDue:
    """Flat in the number of groups."""

    def test_after(self, benchmark: BenchmarkFixture, n: int) -> None:
        benchmark.group = f"due: nothing of {n:,}"
        index = index_of(n)
        assert benchmark.pedantic(index.due, (STALE, ALL), rounds=50, iterations=1_000, warmup_rounds=1) == []

    def test_before_scan(self, benchmark: BenchmarkFixture, n: int) -> None:
        benchmark.group = f"due: nothing of {n:,}"
        assert benchmark.pedantic(scan, (list_of(n), STALE), rounds=3) == []


@pytest.mark.parametrize("k", [100, 1_000, 10_000])
class TestSomeDue:
    """Linear in what is due."""

    def test_after(self, benchmark: BenchmarkFixture, k: int) -> None:
        benchmark.group = f"due: {k:,} of 100,000"
        index = index_of(100_000)
        due = benchmark(index.due, STALE + k // PER_STEP, ALL)
        assert due == [(i, [*range(MEMBERS)]) for i in range(k)]

    def test_before_scan(self, benchmark: BenchmarkFixture, k: int) -> None:
        benchmark.group = f"due: {k:,} of 100,000"
        due = benchmark.pedantic(scan, (list_of(100_000), STALE + k // PER_STEP), rounds=3)
        assert due == [(i, [*range(MEMBERS)]) for i in range(k)]


class TestInsert:
    """1,000 groups, as they arrive, into 100,000."""

    group = "insert: 1,000 into 100,000"
    n = 100_000
    added = rows(n, n + 1_000)

    def test_after(self, benchmark: BenchmarkFixture) -> None:
        benchmark.group = self.group
        index = index_of(self.n)
        ids: list[int] = []

        def empty_again() -> None:
            for id_ in ids:
                index.remove(id_)
            ids.clear()

        def insert_all() -> None:
            ids.extend([insert(index, row) for row in self.added])

        benchmark.pedantic(insert_all, setup=empty_again, rounds=100)
        assert len(index) == self.n + 1_000
        assert index.deadline(ids[-1]) == 1 + self.added[-1][0] + STALE
        empty_again()

    def test_before_sorted_list_and_dict(self, benchmark: BenchmarkFixture) -> None:
        benchmark.group = self.group
        order = rows(0, self.n)
        by_deadline: dict[int, list[int]] = {}

        def empty_again() -> None:
            del order[self.n :]
            by_deadline.clear()

        def insert_all() -> None:
            for row in self.added:
                bisect.insort(order, row)
                by_deadline.setdefault(1 + min(row[2]) + STALE, []).append(row[1])

        benchmark.pedantic(insert_all, setup=empty_again, rounds=100)
        assert len(order) == self.n + 1_000
        assert by_deadline[1 + self.added[-1][0] + STALE][-1] == self.added[-1][1]


@pytest.mark.parametrize("n", [2_000, 100_000])
class TestTake:
    """The 64 stalest groups, which then come back for the next round."""

    def test_after(self, benchmark: BenchmarkFixture, n: int) -> None:
        benchmark.group = f"take: 64 of {n:,}"
        index = StalenessIndex()
        index.add_task(STALE, None)
        stored = rows(0, n)
        for row in stored:
            insert(index, row)
        came_back = itertools.count()

        def come_back() -> None:
            if next(came_back):
                for row in stored[:64]:
                    insert(index, row)

        benchmark.pedantic(index.take, (0, COMPLETED, 64), setup=come_back, rounds=1_000)
        assert len(index) == n - 64
        assert index.arrival(index.first(0, COMPLETED, 1)[0]) == 64

    def test_before_scan(self, benchmark: BenchmarkFixture, n: int) -> None:
        benchmark.group = f"take: 64 of {n:,}"
        groups = {row[1]: row for row in rows(0, n)}
        taken: list[Row] = []

        def come_back() -> None:
            groups.update((row[1], row) for row in taken)
            taken.clear()

        def take() -> None:
            taken.extend(heapq.nsmallest(64, groups.values()))
            for _, arrival, _ in taken:
                del groups[arrival]

        benchmark.pedantic(take, setup=come_back, rounds=20)
        assert len(groups) == n - 64
        assert taken == rows(0, 64)
