"""Groups of a task by pool, in XTuner's order, and what of them has come due.

XTuner gives a group a staleness when it is put, and a new one at every refresh that covers its pool; it hands out by
that number, whatever step it is from. So a group stands in one of three places:

- SETTLED: its pool was refreshed, at the step the pool remembers, and its staleness is one less than that step minus
  its oldest model step. The order of these is that of their oldest steps, and no refresh changes it.
- CARRIED: its staleness is a number it carries, until the next refresh of its pool settles it.
- EMPTY: settled, and no member has a token: its staleness is 0.

Each place is a task of the compiled index, which knows nothing of the others: a refresh asks it what has come due, and
only what was put or has expired since the last refresh is gone through.
"""

import enum
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pystale._core import StalenessIndex
from pystale.integrations.xtuner.members import STEP_LIMIT, Tokens
from pystale.state import Status, as_status

__all__ = ["AGEING", "POOLS", "Place", "Pools", "Record", "group_status"]

# The index takes a negative step for none and a threshold of at least 1; XTuner counts -1 as a step. So all are lifted.
_LIFT = STEP_LIMIT
# The threshold of a sequence rule that is off: no deadline fits.
_NO_THRESHOLD = 2**63 - 1

AGEING = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
"""Groups in these pools age."""

# A pool's number in the index is the position of its status here.
POOLS = tuple(Status)
_NUMBER = {status: number for number, status in enumerate(POOLS)}


class Place(enum.IntEnum):
    """Where the staleness of a group comes from; see the module."""

    SETTLED = 0
    CARRIED = 1
    EMPTY = 2


@dataclass(slots=True, eq=False)
class Record:
    """A stored group.

    Attributes
    ----------
    group : list
        The very list that was put.
    tokens : list of Tokens
        By member.
    expired : list of bool
        By member: whether it is EXPIRED.
    arrival : int
        XTuner's ``uid`` and ``timestamp_id``.
    staleness : int
        The staleness it carries; without meaning in other places.
    written_at : int or None
        Train step of the ``seq_staleness`` that its states show, None where it is what they came with.
    unreset : bool
        Whether an EXPIRED member still waits for its reset, at the next refresh.
    """

    task: "Pools"
    group: list[Any]
    tokens: list[Tokens]
    expired: list[bool]
    status: Status
    arrival: int
    staleness: int
    written_at: int | None
    unreset: bool
    place: Place = Place.CARRIED
    number: int = -1  # its id in the index

    def write_staleness(self, train_step: int) -> None:
        """Write to the states how stale they are at a train step."""
        for state, tokens in zip(self.group, self.tokens, strict=True):
            state.seq_staleness = tokens.seq_staleness(train_step)
        self.written_at = train_step


def group_status(statuses: Iterable[Any]) -> Status:
    """XTuner's status of a group: unlike pystale's, a group that is unfinished or archived counts as COMPLETED."""
    present = {as_status(status) for status in statuses}
    for status in (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED):
        if status in present:
            return status
    return Status.COMPLETED


@dataclass(slots=True, eq=False)
class Pools:
    """One task's groups.

    Parameters
    ----------
    index : StalenessIndex
        Shared by the tasks of a buffer.
    fifo : bool
        Hand out by arrival; otherwise the stalest first.
    """

    index: StalenessIndex
    fifo: bool
    records: dict[int, Record]  # of all tasks, by their id in the index
    thresholds: tuple[int | None, int | None]
    refreshed: dict[Status, int] = field(default_factory=dict)  # train step that the settled groups of a pool are of
    tasks: list[int] = field(init=False)  # by place: number of the task of the index

    def __post_init__(self) -> None:
        self.tasks = [self.index.add_task(*_lifted(*self.thresholds)) for _ in Place]

    def set_thresholds(self, stale_threshold: int | None, token_stale_threshold: int | None) -> None:
        """Thresholds of the questions to come; deadlines are computed again only if they are new."""
        if self.thresholds == (stale_threshold, token_stale_threshold):
            return
        for task in self.tasks:
            self.index.set_thresholds(task, *_lifted(stale_threshold, token_stale_threshold))
        self.thresholds = (stale_threshold, token_stale_threshold)

    def count(self, status: Status) -> int:
        number = _NUMBER[status]
        return sum(self.index.count(task, number) for task in self.tasks)

    # Storing

    def add(self, record: Record) -> None:
        """Store a group whose staleness is what it carries, or, where `written_at` says so, of that train step."""
        if record.written_at is not None and not self.count(record.status):
            self.refreshed[record.status] = record.written_at
        if record.written_at is not None and self.refreshed.get(record.status) == record.written_at:
            self.settle(record)
        else:
            self._insert(record, Place.CARRIED)

    def settle(self, record: Record) -> None:
        """Store a group whose staleness is that of the step its pool was refreshed at."""
        train_step = self.refreshed[record.status]
        steps = [tokens.oldest for tokens in record.tokens if tokens.oldest is not None]
        if not steps:
            self._insert(record, Place.EMPTY)
        elif len(steps) < len(record.tokens) and min(steps) >= train_step:
            # Of a future version, and a member without tokens counts 0: the group's staleness stands still.
            record.staleness = 0
            record.write_staleness(train_step)
            self._insert(record, Place.CARRIED)
        else:
            self._insert(record, Place.SETTLED)

    def _insert(self, record: Record, place: Place) -> None:
        # Members that are EXPIRED have no tokens, or expire anyway at the next refresh.
        ageing = record.status in AGEING
        oldest = [t.oldest + _LIFT if ageing and t.oldest is not None else -1 for t in record.tokens]
        newest = [t.newest + _LIFT if ageing and t.newest is not None else -1 for t in record.tokens]
        record.place = place
        record.number = self.index.insert(
            self.tasks[place], _NUMBER[record.status], self._key(record), record.arrival, oldest, newest
        )
        self.records[record.number] = record

    def _key(self, record: Record) -> int:
        if self.fifo or record.place is Place.EMPTY:
            return 0
        if record.place is Place.CARRIED:
            return -record.staleness
        return min(tokens.oldest for tokens in record.tokens if tokens.oldest is not None)

    def remove(self, record: Record) -> None:
        self.index.remove(record.number)
        del self.records[record.number]

    # Reading

    def staleness(self, record: Record) -> int:
        """XTuner's staleness of a group: the largest of its members' at the last refresh of its pool."""
        if record.place is Place.CARRIED:
            return record.staleness
        train_step = self.refreshed[record.status]
        return max(tokens.seq_staleness(train_step) for tokens in record.tokens)

    def show_staleness(self, record: Record) -> None:
        """Bring the ``seq_staleness`` of the states up to date, which refreshes leave undone."""
        train_step = self.refreshed.get(record.status)
        if record.place is not Place.CARRIED and train_step is not None and record.written_at != train_step:
            record.write_staleness(train_step)

    def take(self, n: int, status: Status) -> list[Record]:
        """Remove up to `n` groups of a pool, in order."""
        taken = [self.records[number] for number in self._first(n, status)]
        for record in taken:
            self.show_staleness(record)
            self.remove(record)
        return taken

    def _first(self, n: int, status: Status) -> list[int]:
        found = [self.index.first(task, _NUMBER[status], n) for task in self.tasks]
        filled = [numbers for numbers in found if numbers]
        if len(filled) < 2:
            return filled[0] if filled else []
        key: Callable[[int], Any] = self._by_arrival if self.fifo else self._by_staleness
        return [number for _, number in zip(range(n), heapq.merge(*filled, key=key), strict=False)]

    def _by_arrival(self, number: int) -> int:
        return self.records[number].arrival

    def _by_staleness(self, number: int) -> tuple[int, int]:
        record = self.records[number]
        return -self.staleness(record), record.arrival

    def all_of(self, status: Status, *places: Place) -> list[Record]:
        """The groups of a pool, by place."""
        return [
            self.records[number]
            for place in places or Place
            for number in self.index.first(self.tasks[place], _NUMBER[status], len(self.records))
        ]

    # Ageing

    def due(self, train_step: int, statuses: Iterable[Status]) -> list[tuple[Record, list[int]]]:
        """Groups that expire at a train step, by arrival, with the positions of the members that do."""
        bits = sum(1 << _NUMBER[status] for status in statuses)
        due = {
            number: positions
            for task in self.tasks
            for number, positions in self.index.due(train_step + 2 * _LIFT, bits, task)
        }
        for status in statuses:
            for record in self.all_of(status, Place.CARRIED):
                if record.unreset:
                    due.setdefault(record.number, [])
        found = [(self.records[number], positions) for number, positions in due.items()]
        return sorted(found, key=lambda entry: entry[0].arrival)

    def refresh(self, train_step: int, statuses: Iterable[Status], leave: Iterable[Record]) -> None:
        """Settle the groups of these pools at a train step, but for some that are about to expire."""
        leaving = {id(record) for record in leave}
        for status in statuses:
            before = self.refreshed.get(status)
            moving = self.all_of(status, Place.CARRIED)
            if before is not None and train_step < before:
                # Back in time: what was stale may be of a future version now.
                moving += [r for r in self.all_of(status, Place.SETTLED) if any(t.oldest is None for t in r.tokens)]
            self.refreshed[status] = train_step
            for record in moving:
                if id(record) not in leaving:
                    self.remove(record)
                    self.settle(record)


def _lifted(stale_threshold: int | None, token_stale_threshold: int | None) -> tuple[int, int | None]:
    return (
        _NO_THRESHOLD if stale_threshold is None else stale_threshold + _LIFT,
        None if token_stale_threshold is None else token_stale_threshold + _LIFT,
    )
