"""A recorded run, read and measured once, to be played to any number of stores."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from pystale._objects import Member, ModelSteps, measure
from pystale.collector import collector_paused
from pystale.ledger import Ledger
from pystale.state import Status
from pystale.trace_lines import (
    Account,
    Arrival,
    Get,
    Groups,
    Header,
    Leg,
    Lost,
    MemberLine,
    Refresh,
    Resume,
    Sync,
    Take,
    TraceError,
    Undo,
)
from pystale.trace_reader import TraceReader

__all__ = ["Came", "Happened", "History", "Lives", "State", "read_history"]

# A group of the run, from its first put until it is trained or gone. Its id may be used again for another.
Life = int
Lives = tuple[tuple[str, Life], ...]
# Lines between two reports of progress.
STRIDE = 2_000


class State:
    """A rollout as the store needs it: versions and mask as runs, and what the life cycle writes."""

    __slots__ = (
        "group_id",
        "rerolls",
        "response_ids",
        "response_mask",
        "response_model_steps",
        "seq_staleness",
        "status",
    )

    def __init__(self, life: Life, status: Status, steps: Any, mask: Any, ids: Any) -> None:
        self.group_id = life
        self.status = status
        self.response_ids = ids
        self.response_model_steps = steps
        self.response_mask = mask
        self.rerolls = 0
        self.seq_staleness = 0


class Came(NamedTuple):
    """A group that came, measured: its members' numbers do not depend on the settings."""

    line: Arrival
    life: Life
    members: tuple[Member, ...]
    steps: tuple[Any, ...]
    masks: tuple[Any, ...]
    ids: tuple[Any, ...]

    def states(self) -> list[State]:
        """New states, as they were when the group came."""
        return [
            State(self.life, member.status, steps, mask, ids)
            for member, steps, mask, ids in zip(self.line.members, self.steps, self.masks, self.ids, strict=True)
        ]


class HandedOut(NamedTuple):
    """Groups that were handed out of a pool."""

    pool: Status
    groups: Lives


class Taken(NamedTuple):
    """A batch that was asked for."""

    line: Take
    groups: Lives  # empty where a task was short


class Undone(NamedTuple):
    """Groups that came back as if they had never left."""

    groups: Lives


class Happened(NamedTuple):
    """A line of the trace that changes, or tells, what is in the store."""

    number: int
    event: Came | Refresh | HandedOut | Taken | Undone | Account | Resume


class History:
    """What happened in a recorded run.

    Attributes
    ----------
    header : Header
        The recorded settings.
    events : list of Happened
    undone : set of int
        Lives that an undo names.
    rollouts, groups : int
        Responses, and groups of them, that came; one that comes back is not counted again.
    legs : int
        Requests to the engine, where producers noted them.
    leg_tokens : Counter
        Tokens of these by finish reason.
    syncs : int
        Weight syncs noted.
    accounts : int
        Accounts of the run to compare with.
    lost : int
        Lines left out when the trace was written.
    skipped : int
        Lines left out when it was read.
    damaged : list of str
        What was wrong with them.
    seconds : float
        From the first line to the last.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.events: list[Happened] = []
        self.undone: set[Life] = set()
        self.rollouts = 0
        self.groups = 0
        self.legs = 0
        self.leg_tokens: Counter[str] = Counter()
        self.syncs = 0
        self.accounts = 0
        self.lost = 0
        self.skipped = 0
        self.damaged: list[str] = []
        self.seconds = 0.0
        self._lives: dict[tuple[str, int | str], Life] = {}
        self._resumed = False

    def skip(self, why: str) -> None:
        """Count a line that is left out."""
        self.skipped += 1
        if len(self.damaged) < 100:
            self.damaged.append(why)

    @property
    def complete(self) -> bool:
        """Whether every line of the run is here."""
        return not self.lost and not self.skipped

    def add(self, number: int, event: Any) -> None:
        """Take in a line.

        Raises
        ------
        TypeError, ValueError
            If it contradicts the lines before it.
        """
        if isinstance(event, Leg):
            self.legs += 1
            self.leg_tokens[event.reason] += event.tokens
        elif isinstance(event, Sync):
            self.syncs += 1
        elif isinstance(event, Lost):
            self.lost += event.lines
        else:
            self.events.append(Happened(number, self._happened(event)))

    def _happened(self, event: Any) -> Any:
        if isinstance(event, Arrival):
            return self._came(event)
        if isinstance(event, Get):
            return HandedOut(event.pool, self._named(event.groups))
        if isinstance(event, Take):
            for task in event.sizes:
                self._check_task(task)
            return Taken(event, self._named(event.groups))
        if isinstance(event, Undo):
            groups = self._named(event.groups)
            self.undone.update(life for _, life in groups)
            return Undone(groups)
        if isinstance(event, Account):
            self.accounts += 1
        if isinstance(event, Resume):
            Ledger.after_restart(event.account.ledger, event.account.ledger["stored"])
            self._lives.clear()
            self._resumed = True
        return event

    def _came(self, line: Arrival) -> Came:
        name = (line.task, line.group)
        self._check_task(line.task)
        if line.back and name not in self._lives:
            if not self._resumed:
                raise ValueError(f"group {line.group!r:.40} of task {line.task!r:.40} comes back, and never came")
            line = line._replace(back=False)  # an earlier process handed it out
        if any(position >= len(line.members) for position in line.restarted):
            raise ValueError(f"restarted names member {max(line.restarted)} of {len(line.members)}")
        measured = [_measured(member) for member in line.members]
        if not line.back:
            self.rollouts += len(measured)
            self.groups += 1
            self._lives[name] = self.groups
        return Came(line, self._lives[name], *map(tuple, zip(*measured, strict=True)))

    def _check_task(self, task: str) -> None:
        if isinstance(self.header.rules, dict) and task not in self.header.rules:
            raise ValueError(f"task {task!r:.40} has no rule in the header")

    def _named(self, groups: Groups) -> Lives:
        for task, group in groups:
            if (task, group) not in self._lives:
                raise ValueError(f"group {group!r:.40} of task {task!r:.40} never came")
        return tuple((name[0], self._lives[name]) for name in groups)


def _measured(line: MemberLine) -> tuple[Member, Any, Any, Any]:
    """Numbers of a member, its steps, its mask, and what stands for its tokens where they have no steps."""
    steps = None if line.steps is None else ModelSteps.from_runs(line.steps)
    mask = None if line.mask is None else ModelSteps.from_runs((int(value != 0), n) for value, n in line.mask)
    ids = range(line.tokens) if steps is None and line.tokens else None
    state = State(0, line.status, steps, mask, ids)
    return measure(state, steps), steps, mask, ids


def read_history(
    path: str | os.PathLike[str],
    *,
    skip_damaged: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> History:
    """Read a trace.

    Parameters
    ----------
    path : path
    skip_damaged : bool, default False
        Leave out lines that cannot be read or contradict the others, and count them.
    progress : callable, optional
        ``progress(done, of)`` is called with bytes now and then.

    Raises
    ------
    OSError
        If the file cannot be read.
    TraceError
        If it is not a trace, or holds a line that cannot be right.
    """
    with collector_paused(), TraceReader(path, skip_damaged=skip_damaged) as reader:
        history = History(reader.header)
        for count, line in enumerate(reader):
            try:
                history.add(line.number, line.event)
            except TraceError:
                raise
            except (TypeError, ValueError) as fault:
                reader.refuse(line.number, str(fault))
            if line.at is not None:
                history.seconds = max(history.seconds, line.at)
            if progress is not None and not count % STRIDE:
                progress(reader.position, reader.size)
        if progress is not None:
            progress(reader.size, reader.size)
        history.skipped, history.damaged = reader.skipped, reader.damaged
    return history
