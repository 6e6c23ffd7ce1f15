"""Stored groups and their one life cycle.

The store is the buffer without its lock: plain, synchronous, and changed by one caller at a time. It keeps the objects;
the two integers per member that decide everything are in the compiled :class:`~pystale._core.StalenessIndex`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pystale._core import StalenessIndex
from pystale._objects import Member
from pystale.disposal import Cleared
from pystale.group import AGEING, Arriving, Group
from pystale.handed_out import HandedOut
from pystale.history import Changes
from pystale.ledger import Ledger
from pystale.lengths import LengthAccumulator
from pystale.masks import Taken
from pystale.policy import NEWEST_KEY, OLDEST_KEY, Order
from pystale.record import Record, Task
from pystale.staleness import StalenessRule
from pystale.state import FieldsRefused, Status, as_status, discard, group_status, reset
from pystale.ticket import Copy, Ticket
from pystale.writing import write_arrival, write_staleness

__all__ = ["AGEING_BITS", "Record", "Store", "status_bits"]

logger = logging.getLogger("pystale")

# A pool's number in the index is the position of its status here.
number_of = tuple(Status).index
# Group ids the buffer gives out itself start here, out of the way of the ids its users count up.
FIRST_OWN_GROUP_ID = 2**62


def status_bits(statuses: Iterable[Status]) -> int:
    """Bit mask of pools, as the index takes it."""
    return sum(1 << number_of(status) for status in statuses)


AGEING_BITS = status_bits(AGEING)


class Came(NamedTuple):
    """What the store found out about a group that came."""

    group_id: Any
    returned: bool = False  # it had been handed out
    restarted: Sequence[int] = ()  # members that do not go on with the response they had then


class Store:
    """Groups, their index, what is handed out, and the account of tokens."""

    def __init__(
        self,
        rules: StalenessRule | Mapping[str, StalenessRule],
        triggers: int | Mapping[str, int],
        order: Order,
        missing_version: str,
        max_rerolls: int | None,
        min_fresh: int | None = None,
    ) -> None:
        self.rules = rules
        self.triggers = triggers
        self.order = order
        self.missing_version = missing_version
        self.max_rerolls = max_rerolls
        self.min_fresh = min_fresh  # members that a group is trained with at least; None: all it has
        self.index = StalenessIndex()
        self.tasks: dict[str, Task] = {}
        self.records: dict[int, Record] = {}
        self.numbers: dict[tuple[str, Any], int] = {}  # (task, group id) -> id in the index
        self._stored_states: set[int] = set()  # identities: no object is in two groups
        self.claimed: dict[int, Record] = {}  # by arrival: taken out, and not yet in anybody's hands
        self.tickets = HandedOut()
        self.ledger = Ledger()
        # "expired": how often members of a group expired, also of one that waits for its re-roll already.
        self.group_counts = Counter(dict.fromkeys(("trained", "expired", "rerolled", "discarded"), 0))
        self.came = Came(None)  # the latest group that was put, settled or rejected
        self.lengths = LengthAccumulator()  # what became of responses since this process made the buffer
        self.left_out: Counter[str] = Counter()  # by task: members that groups were trained without
        self.train_step: int | None = None  # the latest T of a put, refresh or take
        self.arrivals = 0
        self.own_group_ids = 0
        # Told of a record about to change, and whether it is handed out.
        self.before_change: Callable[[Record, bool], None] | None = None
        self.changes: Changes | None = None  # told what was done, where a journal is kept

    # Settings

    def settings(self, task_name: str) -> tuple[StalenessRule, int]:
        """Rule and tail batch trigger of a task.

        Raises
        ------
        ValueError
            When rules are per task and this task has none.
        """
        rule = self.rules if isinstance(self.rules, StalenessRule) else self.rules.get(task_name)
        if rule is None:
            known = ", ".join(sorted(self.rules))  # type: ignore[arg-type]
            raise ValueError(f"task {task_name!r} has no rule; tasks with one are: {known}")
        trigger = self.triggers if isinstance(self.triggers, int) else self.triggers.get(task_name, -1)
        return rule, trigger

    def task(self, name: str) -> Task:
        task = self.tasks.get(name)
        if task is None:
            rule, trigger = self.settings(name)
            number = self.index.add_task(rule.stale_threshold, rule.token_stale_threshold)
            task = self.tasks[name] = Task(name, number, rule, trigger)
        return task

    def _key(self, arriving: Arriving, ticket: Ticket | None) -> int | None:
        """Order key of a group from its tokens; one without tokens keeps the key it had."""
        measured = [m for m in arriving.members if m.tokens]
        if not measured and ticket is not None and ticket.key is not None:
            return ticket.key
        steps = [m.oldest for m in measured if m.oldest >= 0]
        if self.missing_version != "error" and any(not m.versioned for m in measured):
            steps.append(OLDEST_KEY if self.missing_version == "oldest" else NEWEST_KEY)
        return self.order.key(min(steps, default=None), arriving.prompt_model_step)

    # Storing

    def put(self, arriving: Arriving, train_step: int | None, cleared: Cleared) -> Status:
        """Store a group that :meth:`read` accepted and run the life cycle on it.

        Returns
        -------
        Status
            Pool it is stored in; EXPIRED without being stored where expired groups are not retried.
        """
        # Read again: another thread may have put the same states since, and given them their id.
        group_id = self.tickets.group_id(arriving.states, arriving.task_name)
        name = (arriving.task_name, group_id)
        if group_id is not None and name in self.numbers:
            raise ValueError(
                f"group {group_id!r} of task {arriving.task_name!r} is stored already; "
                "take it out before putting it again"
            )
        self._refuse_stored_states(arriving)
        ticket = self.tickets.get(name)
        status = self._pool_for(arriving.statuses)
        if group_id is None:
            group_id = self._own_group_id(arriving.task_name)
        now = self.train_step if train_step is None else train_step
        record = self.admit(
            arriving,
            group_id,
            status,
            self.arrivals if ticket is None else ticket.arrival,
            self._key(arriving, ticket),
            arriving.rerolls if ticket is None else ticket.rerolls,
            now,
        )
        if self.changes is not None:
            self.changes.put(record, returned=ticket is not None and bool(ticket.states))
        self.train_step = now
        tokens = record.tokens
        if ticket is None:
            self.arrivals += 1
            self.ledger.produced += tokens
            self.came = Came(group_id)
        else:
            self.came = Came(group_id, True, self._take_back(self.tickets.take_back(name), arriving))
        self.ledger.stored += tokens

        if status not in AGEING:
            return status
        expired = [i for i, member_status in enumerate(arriving.statuses) if member_status is Status.EXPIRED]
        if now is not None:
            expired += self.index.due_members(record.number, now)
        if expired:
            self._expire(record, expired, cleared)
        return record.status

    def _pool_for(self, statuses: Sequence[Status]) -> Status:
        """Pool of an arriving group before the life cycle has seen it.

        Members that come EXPIRED count as left out, where the others are finished and enough.
        """
        finished = statuses.count(Status.COMPLETED)
        others = len(statuses) - finished - statuses.count(Status.EXPIRED)
        if self.min_fresh is not None and finished >= self.min_fresh and not others:
            return Status.COMPLETED
        return group_status(statuses)

    def admit(
        self,
        arriving: Arriving,
        group_id: Any,
        status: Status,
        arrival: int,
        key: int | None,
        rerolls: int,
        train_step: int | None,
    ) -> Record:
        """Enter a group that :meth:`read` accepted, and write to its states what that says of them.

        Raises
        ------
        TypeError
            When a state refuses to be written to. Nothing has changed then.
        """
        write_arrival(arriving, group_id, rerolls, train_step)
        record = self.record(arriving, group_id, status, arrival, key, rerolls)
        self.insert(record, arriving.statuses)
        return record

    def record(
        self, arriving: Arriving, group_id: Any, status: Status, arrival: int, key: int | None, rerolls: int
    ) -> Record:
        """Record of a group that :meth:`read` accepted, not entered anywhere yet."""
        task = self.task(arriving.task_name)
        masks_tokens = task.rule.token_stale_threshold is not None and not arriving.agentic
        return Record(task, group_id, arriving.states, arriving.members, status, arrival, key, rerolls, masks_tokens)

    def insert(self, record: Record, statuses: Sequence[Status]) -> None:
        """Enter a record into the index; members EXPIRED or unfinished have no deadline."""
        oldest, newest = [-1] * len(statuses), [-1] * len(statuses)
        spared = Status.ABORTED if record.task.rule.spare_aborted else None
        if record.status in AGEING:
            for position, (member, status) in enumerate(zip(record.members, statuses, strict=True)):
                if status is Status.EXPIRED or status is Status.INIT:
                    continue
                oldest[position] = member.oldest
                if record.masks_tokens and status is not spared:
                    newest[position] = member.newest_trainable
        record.number = self.index.insert(
            record.task.number, number_of(record.status), record.key, record.arrival, oldest, newest
        )
        record.left_out = statuses.count(Status.EXPIRED) if record.status is Status.COMPLETED else 0
        self.records[record.number] = record
        self.numbers[record.task.name, record.group_id] = record.number
        self._stored_states.update(map(id, record.states))

    def _own_group_id(self, task_name: str) -> int:
        """An id that no group of the task has, not even one whose user counts up from where these ids start."""
        while True:
            self.own_group_ids += 1
            name = (task_name, FIRST_OWN_GROUP_ID + self.own_group_ids)
            if name not in self.numbers and name not in self.tickets:
                return name[1]

    # The life cycle

    def refresh(self, train_step: int, bits: int, cleared: Cleared) -> dict[str, int]:
        """Run the life cycle at `train_step` over what has come due in the pools of `bits`.

        Returns
        -------
        dict of str to int
            Groups that entered EXPIRED or left, with a key for every task that had a group stored.
        """
        self.train_step = train_step
        moved = {name: 0 for name, task in self.tasks.items() if any(self.index.counts(task.number))}
        for number, members in self.index.due(train_step, bits):
            record = self.records[number]
            moved[record.task.name] += self._expire(record, members, cleared)
        return moved

    def _expire(self, record: Record, expired: list[int], cleared: Cleared) -> bool:
        """The life cycle of one group whose members at `expired`, at least one, are EXPIRED or have come due.

        Returns
        -------
        bool
            Whether the group entered the EXPIRED pool or left the store.
        """
        self._announce(record, leaving=False)
        self.group_counts["expired"] += 1
        if self._goes_on_without(record, expired):
            return not self._take_away(record, expired, Status.COMPLETED, cleared)
        exhausted = self.max_rerolls is not None and record.rerolls >= self.max_rerolls
        if not record.task.retries or exhausted:
            self._discard(record, "max_rerolls" if record.task.retries else "expired", cleared)
            return True
        entered = record.status is not Status.EXPIRED
        return not self._take_away(record, expired, Status.EXPIRED, cleared) or entered

    def _goes_on_without(self, record: Record, expired: list[int]) -> bool:
        """Whether a group stays COMPLETED without the members at `expired` and those it has lost before."""
        if self.min_fresh is None or record.status is not Status.COMPLETED:
            return False
        gone = set(expired)
        gone.update(i for i, state in enumerate(record.states) if as_status(state.status) is Status.EXPIRED)
        return len(record.states) - len(gone) >= self.min_fresh

    def _take_away(self, record: Record, expired: list[int], pool: Status, cleared: Cleared) -> bool:
        """Reset the members at `expired`; False where a state refuses, and the group is discarded."""
        try:
            self.reset_members(record, expired, cleared, pool)
        except Exception:
            logger.exception(
                "group %r of task %r is discarded: it has expired, and a member cannot be reset; "
                "its class must accept None, an empty list or the prompt where reset writes them",
                record.group_id,
                record.task.name,
            )
            self._discard(record, "expired", cleared)
            return False
        if self.changes is not None:
            self.changes.expire(record, expired)
        return True

    def _discard(self, record: Record, reason: str, cleared: Cleared) -> None:
        """Have a stored group leave for good."""
        self.remove(record)
        self.group_counts["discarded"] += 1
        if self.changes is not None:
            self.changes.leave(record)
        self.ledger.stored -= record.tokens
        self.ledger.discard(reason, record.tokens)
        self._count_lengths(reason, record.members)
        record.status = Status.EXPIRED
        _discard_states(record.states, cleared)

    def reset_members(self, record: Record, expired: list[int], cleared: Cleared, pool: Status) -> None:
        """Take the responses of the members at `expired` away; the group is in `pool` then, EXPIRED or COMPLETED.

        Raises
        ------
        FieldsRefused
            If a state cannot be reset. The account is right then, and the group still stored.
        """
        record.status = pool
        self.index.expire(record.number, expired, number_of(pool))
        train_step, tokens = self.train_step, record.tokens
        try:
            for position in expired:
                state, member = record.states[position], record.members[position]
                record.members[position] = Member()
                record.tokens -= member.tokens
                self.lengths.add("expired", member.tokens)
                if train_step is not None:
                    state.seq_staleness = member.seq_staleness(train_step)
                try:
                    cleared.add(state, reset(state))
                except FieldsRefused as refused:
                    cleared.add(state, refused.cleared)
                    raise
        finally:
            gone = sum(as_status(state.status) is Status.EXPIRED for state in record.states)
            record.left_out = gone if pool is Status.COMPLETED else 0
            tokens -= record.tokens
            self.ledger.stored -= tokens
            self.ledger.discard("expired", tokens)

    # Handing out

    def count(self, task_name: str, status: Status) -> int:
        task = self.tasks.get(task_name)
        if task is None:
            self.settings(task_name)
            return 0
        return self.index.count(task.number, number_of(status))

    def count_keys(self, task_name: str, status: Status, first: int, last: int) -> int:
        """Groups of a pool with a key from `first` to `last`, which are oldest model steps for stalest first."""
        task = self.tasks.get(task_name)
        return 0 if task is None else self.index.count_keys(task.number, number_of(status), first, last)

    def hand_out(self, task_name: str, status: Status, n: int) -> list[Record]:
        """Take the first `n` records of a pool, in order; their tokens are in flight.

        They are claimed until :meth:`lend`, :meth:`train` or :meth:`give_back`.
        """
        task = self.tasks.get(task_name)
        if task is None:
            return []
        return [self._claim(self.records[number]) for number in self.index.first(task.number, number_of(status), n)]

    def hand_out_group(self, task_name: str, group_id: Any) -> Record | None:
        """As :meth:`hand_out`, for one group of whatever pool; None where it is not stored."""
        number = self.numbers.get((task_name, group_id))
        return None if number is None else self._claim(self.records[number])

    def _claim(self, record: Record) -> Record:
        self._announce(record, leaving=True)
        self.remove(record)
        self.claimed[record.arrival] = record
        if self.train_step is not None:
            write_staleness(record.states, record.members, self.train_step)
        self.ledger.stored -= record.tokens
        self.ledger.in_flight += record.tokens
        return record

    def give_back(self, record: Record) -> None:
        """Store a record again that :meth:`hand_out` gave, as if it had never left."""
        self.claimed.pop(record.arrival, None)
        self.insert(record, [as_status(state.status) for state in record.states])
        self.ledger.stored += record.tokens
        self.ledger.in_flight -= record.tokens

    def lend(self, record: Record, copies: list[Copy]) -> Ticket:
        """Remember a record handed out for continuation, of which these are copies."""
        self._announce(record, leaving=True)
        self.claimed.pop(record.arrival, None)
        if record.status is Status.EXPIRED:
            record.rerolls += 1
            self.group_counts["rerolled"] += 1
            for state in record.states:
                _write_rerolls(state, record.rerolls)
        ticket = Ticket.of(record, copies)
        self.tickets.lend(ticket, record.states)
        return ticket

    def train(self, record: Record, taken: Taken) -> int:
        """Book a record handed out as trained with these masks. Returns its tokens in the loss."""
        self._announce(record, leaving=True)
        self.claimed.pop(record.arrival, None)
        shares = self.ledger.train(record.members, record.tokens, taken.tokens)
        self.group_counts["trained"] += 1
        self.count_left_out(record, 1)
        self._count_lengths("trained", record.members)
        if self.changes is not None:
            self.changes.take(record, shares)
        return shares[0]

    def count_left_out(self, record: Record, sign: int) -> None:
        """Count the members that a group is trained without, or no more where `sign` is -1."""
        if record.left_out:
            self.left_out[record.task.name] += sign * record.left_out
            self.left_out += Counter()  # without tasks at 0

    def untrain(self, record: Record, taken: Taken) -> None:
        """Store a record again that :meth:`train` booked, as if it had never left."""
        self.ledger.untrain(record.members, record.tokens, taken.tokens)
        self.group_counts["trained"] -= 1
        self.count_left_out(record, -1)
        self._count_lengths("trained", record.members, -1)
        self.give_back(record)
        if self.changes is not None:
            self.changes.put(record, returned=False)

    def settle(self, arriving: Arriving, outcome: str) -> None:
        """Close the account of a group that was handed out and does not come back."""
        ticket = self.tickets.take_back((arriving.task_name, arriving.group_id))
        if self.changes is not None:
            self.changes.settle(ticket)
        self.came = Came(arriving.group_id, True, self._take_back(ticket, arriving))
        self.ledger.close(arriving.members, outcome)
        self._count_lengths(outcome, arriving.members)

    def _take_back(self, ticket: Ticket, arriving: Arriving) -> list[int]:
        """Book what became of the tokens a group had when it was handed out; returns members that started again."""
        restarted = self.ledger.take_back(ticket, arriving)
        for tokens, _ in ticket.held[len(arriving.states) :]:
            self.lengths.add("lost", tokens)
        return restarted

    def _count_lengths(self, outcome: str, members: Iterable[Member], sign: int = 1) -> None:
        self.lengths.add(outcome, *[member.tokens for member in members], sign=sign)

    def reject(self, arriving: Arriving, outcome: str, cleared: Cleared) -> None:
        """Count and release a group that will not be stored."""
        arriving = arriving._replace(group_id=self.tickets.group_id(arriving.states, arriving.task_name))
        if (arriving.task_name, arriving.group_id) in self.numbers:
            raise ValueError(f"group {arriving.group_id!r} of task {arriving.task_name!r} is stored; take it out first")
        self._refuse_stored_states(arriving)
        if (arriving.task_name, arriving.group_id) in self.tickets:
            self.settle(arriving, outcome)
        else:
            if self.changes is not None:
                self.changes.finish(arriving.task_name, arriving.group_id)
            self.came = Came(arriving.group_id)
            self.ledger.produced += arriving.tokens
            self.ledger.close(arriving.members, outcome)
            self._count_lengths(outcome, arriving.members)
        statuses = [state.status for state in arriving.states]
        _discard_states(arriving.states, cleared)
        for state, status in zip(arriving.states, statuses, strict=True):
            state.status = status

    def name_handed_out(self, group: Sequence[Any]) -> tuple[str, Any]:
        """Task and id of a group that is handed out; ValueError for any other."""
        return self.tickets.name(group, self.numbers)

    # Helpers

    def _announce(self, record: Record, *, leaving: bool) -> None:
        if self.before_change is not None:
            self.before_change(record, leaving)

    def remove(self, record: Record) -> None:
        self.index.remove(record.number)
        del self.records[record.number]
        del self.numbers[record.task.name, record.group_id]
        self._stored_states.difference_update(map(id, record.states))

    def _refuse_stored_states(self, arriving: Arriving) -> None:
        """Raise where a state is stored already, as a member of whatever group."""
        if self._stored_states.isdisjoint(map(id, arriving.states)):
            return
        for position, state in enumerate(arriving.states):
            for record in self.records.values():
                if any(other is state for other in record.states):
                    raise ValueError(
                        f"member {position} is stored already, as a state of group {record.group_id!r} of task "
                        f"{record.task.name!r}; every member is an object of its own"
                    )


def _discard_states(states: Group, cleared: Cleared) -> None:
    """Clear the states of a group that leaves; one that refuses keeps what it cannot let go of."""
    for state in states:
        try:
            cleared.add(state, discard(state))
        except FieldsRefused as refused:
            cleared.add(state, refused.cleared)
            logger.warning("a state that leaves the buffer keeps some of what it holds: %s", refused)


def _write_rerolls(state: Any, rerolls: int) -> None:
    if getattr(state, "rerolls", rerolls) != rerolls:
        state.rerolls = rerolls
