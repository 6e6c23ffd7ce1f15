"""Playing a recorded run to a store under settings that may be other than the recorded ones.

The store is the buffer's own: what expires, what is masked, in which order groups are taken and how tokens are booked
is decided by the code that decided it in the run. Under the recorded settings the counts are therefore the run's own.
Under others, what happened in the run can only be followed as far as it makes sense there: see :data:`ASSUMPTIONS`.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pystale._objects import Member, ModelSteps, measure
from pystale.collector import collector_paused
from pystale.disposal import Cleared
from pystale.group import Arriving
from pystale.ledger import Ledger
from pystale.masks import Taken as Masks
from pystale.masks import counts_of
from pystale.record import Record
from pystale.replay.history import Came, HandedOut, Happened, History, State, Taken, Undone
from pystale.replay.outcome import Batch, Outcome
from pystale.replay.whatif import RECORDED, WhatIf
from pystale.staleness import StalenessRule
from pystale.state import Status
from pystale.store import AGEING_BITS, Store, status_bits
from pystale.ticket import Copy, Ticket
from pystale.trace_lines import Account, Refresh, Resume

__all__ = ["ASSUMPTIONS", "Reference", "replay"]

ASSUMPTIONS = (
    "The trainer asks for the same batches at the same steps, and generation brings the same groups at the same time.",
    "A batch that finds too few groups waits; it is taken, before any later one, once the groups that follow suffice.",
    "A recorded re-roll of a group that did not expire here, or is gone, is not put.",
    "A recorded continuation of a group that expired here is its re-roll: as long, and written by the newest version.",
    "A group that expires here and did not in the run is not generated anew: nobody recorded what would have come.",
)

# Begins no response: a member that was restarted in the run is taken for restarted here.
NO_BEGINNING = [None]
STRIDE = 1_000

# What the members of groups were when they were handed out, by line of their comeback: status and tokens.
Reference = dict[int, tuple[tuple[Status, int], ...]]


def replay(
    history: History,
    setting: WhatIf = RECORDED,
    reference: Reference | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Outcome, Reference]:
    """Play a run under a setting.

    Parameters
    ----------
    history : History
    setting : WhatIf
        By default the recorded settings.
    reference : dict, optional
        What the replay under the recorded settings returned; needed for every other.
    progress : callable, optional
        ``progress(events)`` is called with the number of events played, now and then.

    Returns
    -------
    Outcome
    reference : dict
    """
    player = _Player(history, setting, reference)
    with collector_paused():
        for done, happened in enumerate(history.events):
            player.play(happened)
            if progress is not None and not done % STRIDE:
                progress(done)
    if progress is not None:
        progress(len(history.events))
    return player.outcome(), player.reference


class _Player:
    def __init__(self, history: History, setting: WhatIf, reference: Reference | None) -> None:
        header = history.header
        self._rules = setting.rules(header.rules)
        self._new_store = functools.partial(
            Store,
            self._rules,
            header.triggers,
            header.order,
            header.missing_version,
            header.max_rerolls,
            header.min_fresh,
        )
        self._store = self._new_store()
        self._exact = setting.recorded
        self._undone = history.undone
        self._recorded = reference or {}
        self.reference: Reference = {}
        self._cleared = Cleared(wanted=False)
        self._lent: dict[int, Record] = {}
        self._trained: dict[int, tuple[Record, Masks]] = {}
        self._waiting: deque[Taken] = deque()
        self._outcome = Outcome(setting)
        self._line = 0

    def play(self, happened: Happened) -> None:
        self._line, event = happened.number, happened.event
        if isinstance(event, Came):
            self._come(event)
        elif isinstance(event, Refresh):
            self._refresh(event.train_step, AGEING_BITS if event.pools is None else status_bits(event.pools))
        elif isinstance(event, HandedOut):
            self._hand_out(event)
        elif isinstance(event, Taken):
            self._ask(event)
        elif isinstance(event, Undone):
            self._undo(event)
        elif isinstance(event, Resume):
            self._resume(event)
        else:
            self._compare(event)

    def _refresh(self, train_step: int, bits: int) -> None:
        self._store.refresh(train_step, bits, self._cleared)
        self._cleared.free()

    # Groups that come

    def _come(self, came: Came) -> None:
        line, store = came.line, self._store
        if line.op == "stored":
            self._load(came)
            return
        restarted = list(line.restarted)
        states, members = came.states(), list(came.members)
        if line.back:
            record = self._lent.pop(came.life, None)
            if record is None:
                self._outcome.not_put += 1
                self._differ("a group comes back that was not handed out")
                return
            ticket = store.tickets[line.task, came.life]
            restarted = self._reconcile(came, record, ticket, states, members)
            for position in restarted:
                if position < len(ticket.held):
                    ticket.held[position] = (ticket.held[position][0], NO_BEGINNING)
        steps = [state.response_model_steps for state in states]
        statuses = [state.status for state in states]
        arriving = Arriving(
            line.task,
            came.life,
            states,
            steps,
            members,
            statuses,
            line.agentic,
            line.prompt_model_step,
            line.rerolls,
        )
        if line.op == "put":
            store.put(arriving, line.train_step, self._cleared)
            self._serve()
        elif line.op == "settle" and line.back:  # what an earlier process handed out is only counted
            store.settle(arriving, str(line.outcome))
        else:
            store.reject(arriving, str(line.outcome), self._cleared)
        self._cleared.free()

    def _load(self, came: Came) -> None:
        """Store a group that a checkpoint held."""
        line, store = came.line, self._store
        arriving = Arriving(
            line.task,
            came.life,
            came.states(),
            list(came.steps),
            list(came.members),
            [member.status for member in line.members],
            line.agentic,
            line.prompt_model_step,
            line.rerolls,
        )
        pool = Status.COMPLETED if line.pool is None else line.pool
        store.admit(arriving, came.life, pool, store.arrivals, line.key, line.rerolls, None)
        store.arrivals += 1

    def _reconcile(
        self, came: Came, record: Record, ticket: Ticket, states: list[State], members: list[Member]
    ) -> list[int]:
        """Make of a recorded comeback what it would have been here; returns the members that were restarted."""
        here = tuple((state.status, tokens) for state, (tokens, _) in zip(record.states, ticket.held, strict=True))
        restarted = set(came.line.restarted)
        if self._exact:
            self.reference[self._line] = here
            return sorted(restarted)
        there = self._recorded.get(self._line, here)
        if here == there or not len(here) == len(there) == len(states):
            return sorted(restarted)
        newest = _newest(came)
        for position, (now, then) in enumerate(zip(here, there, strict=True)):
            if now == then:
                continue
            if now[0] is Status.COMPLETED:  # asks for no generation
                states[position], members[position] = record.states[position], record.members[position]
            elif now[0] is Status.EXPIRED and then[0] is not Status.EXPIRED:
                state = states[position]
                state.response_model_steps = _by(newest, state.response_model_steps)
                members[position] = measure(state, state.response_model_steps)
            elif now[0] is not Status.EXPIRED and then[0] is Status.EXPIRED:
                restarted.add(position)
        return sorted(restarted)

    # Groups that go

    def _hand_out(self, event: HandedOut) -> None:
        for name in event.groups:
            number = self._store.numbers.get(name)
            pool = None if number is None else self._store.records[number].status
            if pool is not event.pool:
                self._differ(f"a group was handed out of {event.pool.name} and is {_called(pool)}")
            if pool is event.pool or {pool, event.pool} == {Status.ABORTED, Status.EXPIRED}:
                record = self._store.hand_out_group(*name)
                if record is not None:
                    self._store.lend(record, [Copy(state, None) for state in record.states])
                    self._lent[name[1]] = record
            else:
                self._outcome.not_handed_out += 1

    def _ask(self, event: Taken) -> None:
        line = event.line
        if line.train_step is not None:
            self._refresh(line.train_step, AGEING_BITS)
        short = self._short(event)
        asked = bool(event.groups) or not line.known
        if asked and not self._waiting and not short:
            self._take(event)
        elif asked:
            self._outcome.waited += 1
            self._waiting.append(event)
            if line.known:
                self._differ("a batch finds too few groups")
        elif any(line.sizes.values()) and not short:
            self._differ("a batch that found too few groups finds enough")

    def _serve(self) -> None:
        """Take the batches that wait and find enough now."""
        while self._waiting and not self._short(self._waiting[0]):
            if self._store.train_step is not None:
                self._refresh(self._store.train_step, AGEING_BITS)
            if not self._short(self._waiting[0]):
                self._take(self._waiting.popleft())

    def _short(self, event: Taken) -> bool:
        return any(self._store.count(task, event.line.pool) < n for task, n in event.line.sizes.items())

    def _take(self, event: Taken) -> None:
        store, line, outcome = self._store, event.line, self._outcome
        train_step = None if line.train_step is None else max(line.train_step, store.train_step or 0)
        records = [record for task, n in line.sizes.items() for record in store.hand_out(task, line.pool, n)]
        taken = tuple((record.task.name, record.group_id) for record in records)
        if line.known and taken != event.groups:
            self._differ("other groups are taken")
        tokens, masked, age = 0, store.ledger.masked_stale, 0
        for record in records:
            masks = counts_of(record, train_step)
            tokens += store.train(record, masks)
            if record.group_id in self._undone:
                self._trained[record.group_id] = (record, masks)
            if train_step is not None:
                age += self._count_staleness(record, train_step)
        masked = store.ledger.masked_stale - masked
        mean = age / tokens if tokens and train_step is not None else None
        outcome.batches.append(Batch(train_step, tokens, masked, mean))

    def _count_staleness(self, record: Record, train_step: int) -> int:
        """Count tokens and responses of a group taken; returns the sum of the staleness of its tokens in the loss."""
        age, threshold = 0, record.task.rule.token_stale_threshold
        tokens, responses = self._outcome.token_staleness, self._outcome.response_staleness
        for state, member in zip(record.states, record.members, strict=True):
            if member.oldest >= 0:
                responses[train_step - member.oldest - 1] += 1
            if not member.tokens or not member.versioned:
                continue
            masks = record.masks_tokens and member.newest_trainable >= 0 and threshold is not None
            for step, length in in_loss(state.response_model_steps.runs(), state.response_mask):
                staleness = train_step - step - 1
                if step >= 0 and not (masks and threshold is not None and staleness >= threshold):
                    tokens[staleness] += length
                    age += staleness * length
        return age

    def _undo(self, event: Undone) -> None:
        for task, life in event.groups:
            if life in self._trained:
                record, masks = self._trained.pop(life)
                self._store.untrain(record, masks)
            elif life in self._lent:
                record = self._lent.pop(life)
                ticket = self._store.tickets.take_back((task, life))
                if ticket.status is Status.EXPIRED:
                    record.rerolls -= 1
                    self._store.group_counts["rerolled"] -= 1
                self._store.give_back(record)
            else:
                self._differ("a group is given back that was not taken")

    # The recorded account

    def _resume(self, event: Resume) -> None:
        self._store = self._new_store()
        self._store.train_step = event.train_step
        ledger = event.account.ledger
        self._store.ledger = Ledger.after_restart(ledger, ledger["stored"])
        self._lent.clear()
        self._trained.clear()
        self._waiting.clear()

    def _compare(self, event: Account) -> None:
        ledger = self._store.ledger.as_dict()
        for name, recorded in event.ledger.items():
            if ledger[name] != recorded:
                self._differ(f"{name} tokens are {_plain(ledger[name])}, recorded are {_plain(recorded)}")
        for name, recorded in event.group_counts.items():
            if self._store.group_counts[name] != recorded:
                self._differ(f"groups {name} are {self._store.group_counts[name]}, recorded are {recorded}")

    def _differ(self, why: str) -> None:
        if self._exact and not self._outcome.differs:
            self._outcome.differs = f"line {self._line}: {why}"

    def outcome(self) -> Outcome:
        """Counts so far."""
        store, outcome = self._store, self._outcome
        rules = {"": self._rules} if isinstance(self._rules, StalenessRule) else self._rules
        outcome.max_staleness = {name: rule.max_staleness for name, rule in rules.items()}
        outcome.max_token_staleness = {name: rule.max_token_staleness for name, rule in rules.items()}
        outcome.ledger = store.ledger.as_dict()
        for name, count in store.group_counts.items():
            setattr(outcome, name, count)
        outcome.unrolled = sum(store.count(name, Status.EXPIRED) for name in store.tasks)
        outcome.unfilled = len(self._waiting)
        return outcome


def in_loss(steps: Sequence[tuple[int, int]], mask: ModelSteps | None) -> Iterator[tuple[int, int]]:
    """Runs of the tokens that a mask lets into the loss."""
    if mask is None:
        yield from steps
        return
    runs = iter(mask.runs())
    value, left = next(runs, (0, 0))
    for step, length in steps:
        while length:
            part = min(length, left)
            if value and part:
                yield step, part
            length, left = length - part, left - part
            if not left:
                value, left = next(runs, (0, length))


def _newest(came: Came) -> int:
    """Newest version that wrote a token of a group."""
    return max((step for steps in came.steps if steps is not None for step, _ in steps.runs()), default=-1)


def _by(model_step: int, steps: ModelSteps | None) -> ModelSteps | None:
    """Steps of a response that one version wrote; tokens that no model wrote stay so."""
    if steps is None:
        return None
    return ModelSteps.from_runs((step if step < 0 else model_step, length) for step, length in steps.runs())


def _called(pool: Status | None) -> str:
    return "not stored" if pool is None else pool.name


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
