"""What the buffer does, under its mutex: every operation up to the point where it has something to wait for.

An operation comes back with its result and its :class:`~pystale.effects.Effects`; the faces of the buffer, and what
else is built on it, wait for these in their own way.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pystale.arguments import (
    OUTCOMES,
    Sizes,
    checked_outcome,
    checked_sizes,
    checked_task_name,
)
from pystale.batch import TrainBatch
from pystale.buffer_report import BufferReport
from pystale.collector import collector_delayed
from pystale.effects import Effects, OnRelease
from pystale.group import AGEING, Group, read_group
from pystale.history import Changes
from pystale.in_flight import InFlight, Wanted
from pystale.journal import Journal
from pystale.lengths import LengthAccumulator
from pystale.masks import counts_of, masks_of, write_masks
from pystale.payload import DumpRef, EncodedGroup, LoadRef
from pystale.readiness import Waiter, Waiters
from pystale.record import Record
from pystale.reservations import Reservation
from pystale.saving import Resumed, SaveJob, encode, encode_arriving, load
from pystale.staleness import checked_int
from pystale.state import Status, as_status
from pystale.store import AGEING_BITS, Store, status_bits
from pystale.take import Claim
from pystale.ticket import copied
from pystale.trace import Trace, members_of, stored_lines
from pystale.writing import Writes

__all__ = ["Operations"]

logger = logging.getLogger("pystale")


class Operations:
    """The operations of one buffer: its store, the mutex that guards it, who waits, and what is kept on disk.

    Every method is atomic, may be called from any thread, and runs to its end without waiting, but for those that
    read and write checkpoints. The mutex is held for microseconds, never across I/O or a callback.

    Parameters
    ----------
    new_store : callable
        Makes an empty store.
    on_release, journal, dump_ref, load_ref, write_masks, wait_for_stragglers, straggler_timeout_s
        See :class:`~pystale.ReplayBuffer`.
    trace : Trace, optional
        Told of everything, in the order in which it happens.
    """

    def __init__(
        self,
        new_store: Callable[[], Store],
        *,
        on_release: OnRelease | None = None,
        journal: Journal | None = None,
        dump_ref: DumpRef | None = None,
        load_ref: LoadRef | None = None,
        write_masks: bool = True,
        wait_for_stragglers: bool = False,
        straggler_timeout_s: float = 0.0,
        trace: Trace | None = None,
    ) -> None:
        self.journal = journal
        self.trace = trace
        self.lock = threading.Lock()
        self.waiters: Waiters[Sizes] = Waiters()
        self.saves: list[SaveJob] = []
        # By identity: batches that are booked as taken, and whose callers do not have them yet.
        self._on_their_way: dict[int, list[Record]] = {}
        self._new_store = new_store
        self._effects = functools.partial(Effects, journal, on_release)
        self._dump_ref = dump_ref
        self._load_ref = load_ref
        self._write_masks = write_masks
        self.wait_for_stragglers = wait_for_stragglers
        self.straggler_timeout_s = straggler_timeout_s
        self.in_flight = InFlight(self)
        self._lengths = LengthAccumulator()
        self._use(new_store())

    def _use(self, store: Store) -> None:
        store.before_change = self._preserve
        store.lengths = self._lengths
        if self.journal is not None:
            store.changes = Changes(store.train_step)
        self.store = store

    # Storing and ageing

    def put(
        self,
        group: Sequence[Any],
        task_name: str,
        model_step: int | None,
        train_step: int | None,
        note: Any = None,
    ) -> tuple[Status, Effects]:
        """`note`, here and elsewhere: plain data to keep with the journal's entry, which `resume` gives back."""
        checked_task_name(task_name)
        if train_step is not None:
            train_step = checked_int("train_step", train_step, at_least=1)
        # Reading is the part that costs what the responses are long; it needs no lock.
        self.store.settings(task_name)
        arriving = read_group(
            group,
            task_name,
            model_step=model_step,
            train_step=train_step,
            versions_required=self.store.missing_version == "error",
        )
        encoded = None if self.journal is None else encode_arriving(arriving, self._dump_ref)
        traced = b"" if self.trace is None else members_of(arriving)
        effects = self._effects()
        with self.lock:
            self._check_journal()
            group_id = self.store.tickets.group_id(arriving.states, task_name)
            status = self.store.put(arriving, train_step, effects.cleared)
            if self.trace is not None:
                self.trace.put(self.store, arriving, traced, train_step)
            effects.entry = self._record("put", encoded, note=note)
            self.in_flight.land([(task_name, group_id)])
            ready = self._ready()
        _wake(ready)
        return status, effects

    def refresh(self, train_step: int, statuses: Iterable[Any] | None = None) -> tuple[dict[str, int], Effects]:
        train_step = checked_int("train_step", train_step, at_least=1)
        if isinstance(statuses, (str, Status)):
            raise TypeError(f"statuses must be an iterable of statuses, got {statuses!r}; for one, give [{statuses!r}]")
        pools = set(AGEING) if statuses is None else {as_status(s) for s in statuses}.intersection(AGEING)
        with collector_delayed(), self.lock:
            done = self._refresh(train_step, status_bits(pools))
            if self.trace is not None:
                self.trace.refresh(train_step, pools)
            return done

    def _refresh(self, train_step: int, bits: int) -> tuple[dict[str, int], Effects]:
        self._check_journal()
        effects = self._effects()
        moved = self.store.refresh(train_step, bits, effects.cleared)
        effects.entry = self._record("refresh")
        return moved, effects

    # Handing out for continuation, and settling

    def get(self, n: int, task_name: str, status: Any) -> list[Group]:
        return self.lend(self.claim(n, task_name, status))

    def claim(self, n: int, task_name: str, status: Any) -> list[Record]:
        """What :meth:`get` hands out, taken out of the store: for :meth:`lend`, or :meth:`give_back` in its place."""
        n, status = checked_int("n", n, at_least=0), as_status(status)
        with self.lock:
            self._check_journal()
            self.store.settings(checked_task_name(task_name))
            records = self.store.hand_out(task_name, status, n)
            if self.trace is not None:
                self.trace.get(records)
            return records

    def get_group(self, task_name: str, group_id: Any) -> Group | None:
        """Hand out one group, whatever its pool and place; None where it is not stored."""
        with self.lock:
            self._check_journal()
            record = self.store.hand_out_group(task_name, group_id)
            if self.trace is not None and record is not None:
                self.trace.get([record])
        return None if record is None else self.lend([record])[0]

    def lend(self, records: list[Record]) -> list[Group]:
        """Hand out what :meth:`claim` gave."""
        try:
            # As long as the responses are, and so not under the mutex.
            copies = [copied(record.states) for record in records]
        except BaseException:
            self.give_back(records)
            raise
        with self.lock:
            for record, of_record in zip(records, copies, strict=True):
                self.store.lend(record, of_record)
        return [record.states for record in records]

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str, note: Any = None) -> int | None:
        """Returns the number of the journal's entry."""
        checked_outcome(outcome, OUTCOMES)
        given = [list(group) for group in groups]
        with self.lock:
            names = [self.store.name_handed_out(group) for group in given]
        arriving = [
            read_group(group, task_name)._replace(group_id=group_id)
            for group, (task_name, group_id) in zip(given, names, strict=True)
        ]
        if len(set(names)) < len(names):
            raise ValueError("a group is given twice; it can be settled once")
        traced = [b"" if self.trace is None else members_of(read) for read in arriving]
        with self.lock:
            self._check_journal()
            for group in given:
                self.store.name_handed_out(group)
            for read, members in zip(arriving, traced, strict=True):
                self.store.settle(read, outcome)
                if self.trace is not None:
                    self.trace.close_account("settle", self.store, read, members, outcome)
            entry = self._record("settle", note=note)
            self.in_flight.land(names)
            ready = self._ready()
        _wake(ready)
        return entry

    def reject(self, group: Sequence[Any], task_name: str, outcome: str, note: Any = None) -> Effects:
        checked_outcome(outcome, OUTCOMES[1:])
        self.store.settings(checked_task_name(task_name))
        arriving = read_group(group, task_name)
        traced = b"" if self.trace is None else members_of(arriving)
        effects = self._effects()
        with self.lock:
            self._check_journal()
            group_id = self.store.tickets.group_id(arriving.states, task_name)
            self.store.reject(arriving, outcome, effects.cleared)
            if self.trace is not None:
                self.trace.close_account("reject", self.store, arriving, traced, outcome)
            effects.entry = self._record("reject", note=note)
            self.in_flight.land([(task_name, group_id)])
            ready = self._ready()
        _wake(ready)
        return effects

    # Taking for training

    def claim_batch(self, sizes: Sizes, status: Any, note: Any = None) -> Claim:
        sizes, status = self._checked_sizes(sizes), as_status(status)
        with self.lock:
            self._check_journal()
            claimed = self._claim(sizes, status, None)
        return self._train(sizes, claimed, None, None, note)

    def claim_train_batch(self, sizes: Sizes, train_step: int, note: Any = None) -> tuple[Claim | None, Effects]:
        """The claim, or None with what has to be waited for before trying again.

        That is what the refresh released, or work in flight.
        """
        sizes = self._checked_sizes(sizes)
        train_step = checked_int("train_step", train_step, at_least=1)
        with collector_delayed(), self.lock:
            _, effects = self._refresh(train_step, AGEING_BITS)
            if effects.cleared.states:
                if self.trace is not None:
                    self.trace.refresh(train_step, AGEING)
                return None, effects
            if (
                self.wait_for_stragglers
                and not self._short(sizes)
                and self.in_flight.straggling(Wanted(sizes, train_step))
            ):
                effects.straggling = True
                if self.trace is not None:
                    self.trace.refresh(train_step, AGEING)
                return None, effects
            claimed = self._claim(sizes, Status.COMPLETED, train_step)
        effects.cleared.free()
        return self._train(sizes, claimed, train_step, effects.entry, note), effects

    def _claim(self, sizes: Sizes, status: Status, train_step: int | None) -> list[Record]:
        """Records of a batch, taken out of the store; none when a task is short. Called under the lock."""
        claimed = []
        if not self._short(sizes, status):
            claimed = [record for name, n in sizes.items() for record in self.store.hand_out(name, status, n)]
        if self.trace is not None:
            self.trace.take(sizes, status, train_step, claimed)
        return claimed

    def _train(
        self, sizes: Sizes, claimed: list[Record], train_step: int | None, entry: int | None, note: Any
    ) -> Claim:
        """Book claimed records as a batch. Masks cost what responses are long, so they are made without the lock.

        `entry` is the journal's of what came before; that of the batch itself, if there is one, comes later.
        """
        if not claimed and any(sizes.values()):
            return Claim(TrainBatch({}, {}), [], [], Writes(), self._arrived, self._take_back, self.journal, entry)
        groups: dict[str, list[Group]] = {task_name: [] for task_name in sizes}
        tokens = dict.fromkeys(sizes, 0)
        left_out = dict.fromkeys(sizes, 0)
        try:
            trains_with = masks_of if self._write_masks else counts_of
            taken = [trains_with(record, train_step) for record in claimed]
            with self.lock:
                if self.saves:
                    for record in claimed:
                        self._preserve(record, True)
                writes = write_masks(claimed, taken)
                for record, of_record in zip(claimed, taken, strict=True):
                    name = record.task.name
                    # Summaries keep their places: what they stand for is found by them.
                    groups[name].append(record.trained_states if self._write_masks else record.states)
                    tokens[name] += self.store.train(record, of_record)
                    left_out[name] += record.left_out
                entry = self._record("take", note=note) if claimed else entry
                if self.trace is not None and not self.store.claimed:
                    self.trace.account(self.store)
                if entry is not None:
                    self._on_their_way[id(claimed)] = claimed
        except BaseException:
            self.give_back(claimed)
            raise
        batch = TrainBatch(groups, tokens, left_out)
        return Claim(batch, claimed, taken, writes, self._arrived, self._take_back, self.journal, entry)

    def _arrived(self, claim: Claim) -> None:
        with self.lock:
            self._on_their_way.pop(id(claim.records), None)

    def give_back(self, claimed: list[Record]) -> None:
        """Store records again that were claimed and that nobody got."""
        with self.lock:
            for record in claimed:
                self.store.give_back(record)
            if self.trace is not None:
                self.trace.undo(claimed)
            ready = self._ready()
        _wake(ready)

    def _take_back(self, claim: Claim) -> None:
        """Undo a take whose caller gave up, or whose entry could not be written."""
        claim.writes.undo()
        encoded: list[EncodedGroup | None] = [None] * len(claim.records)
        for position, record in enumerate(claim.records):
            try:
                group = encode(record, self._dump_ref)
                encoded[position] = group if self._dump_ref is None else group.dump_references(self._dump_ref)
            except Exception:
                logger.exception("group %r is lost: it was taken, and cannot be given back", record.group_id)
        with self.lock:
            self._on_their_way.pop(id(claim.records), None)
            for record, taken, again in zip(claim.records, claim.taken, encoded, strict=True):
                if again is not None:
                    self.store.untrain(record, taken)
                    if self.trace is not None:
                        self.trace.undo([record])
                    self._record("take back", again)
            ready = self._ready()
        _wake(ready)

    # Waiting and counting

    def _ready(self) -> list[Waiter[Any]]:
        """Those who waited for what is there now, to be woken once the mutex is free. Called under it."""
        return [*self.waiters.pop_ready(self._short), *self.in_flight.ready()]

    def _checked_sizes(self, sizes: Any) -> dict[str, int]:
        checked = checked_sizes(sizes)
        for task_name in checked:
            self.store.settings(task_name)  # here, and not when a put looks who can go on
        return checked

    def _short(self, sizes: Sizes, status: Status = Status.COMPLETED) -> bool:
        return any(self.store.count(task_name, status) < n for task_name, n in sizes.items())

    def is_ready(self, sizes: Sizes) -> bool:
        sizes = self._checked_sizes(sizes)
        with self.lock:
            return not self._short(sizes)

    def enlist(self, sizes: Sizes, timeout: float | None, wake: Callable[[], None]) -> Waiter[Sizes] | None:
        """A waiter that `wake` is called for once `sizes` are there; None when they are there now."""
        sizes = self._checked_sizes(sizes)
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
                raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__} {timeout!r}")
            if not timeout >= 0:
                raise ValueError(f"timeout must be at least 0 seconds, got {timeout}; None waits without end")
        with self.lock:
            if self.journal is not None:
                self.journal.check_open()
            return self.waiters.add(sizes, wake) if self._short(sizes) else None

    def dismiss(self, waiter: Waiter[Sizes]) -> None:
        with self.lock:
            self.waiters.discard(waiter)

    def count(self, task_name: str, status: Any) -> int:
        status = as_status(status)
        with self.lock:
            return self.store.count(task_name, status)

    def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        pools = [as_status(status) for status in statuses]
        with self.lock:
            return {name: {status: self.store.count(name, status) for status in pools} for name in task_names}

    def ledger(self) -> dict[str, Any]:
        with self.lock:
            return self.store.ledger.as_dict()

    def stragglers(self, sizes: Sizes, train_step: int) -> list[Reservation]:
        wanted = Wanted(self._checked_sizes(sizes), checked_int("train_step", train_step, at_least=1))
        with self.lock:
            return self.in_flight.stragglers(wanted)

    def report(self) -> BufferReport:
        with self.lock:
            return BufferReport(
                dict(self.store.left_out),
                self.in_flight.reserved.counts(),
                self.in_flight.waited_s,
                self._lengths.copy(),
            )

    def __len__(self) -> int:
        with self.lock:
            return len(self.store.records)

    # The journal

    def _check_journal(self) -> None:
        """Raise, before anything changes, where what changes could not be recorded. Called under the lock."""
        if self.journal is not None:
            self.journal.check()

    def annotate(self, note: Any) -> int | None:
        """Keep a note in an entry of its own. Returns the number of the entry."""
        with self.lock:
            self._check_journal()
            return self._record("note", note=note)

    def _record(self, op: str, group: EncodedGroup | None = None, *, note: Any = None) -> int | None:
        """Append what the store was told to do since the last call; the one place where that happens.

        Called under the lock, so that entries have the order of what they tell. Returns the number of an entry that
        has to be on disk before the caller is answered.
        """
        changes, journal = self.store.changes, self.journal
        if changes is None or journal is None:
            return None
        done = changes.envelope(op, self.store, note)
        if done is None:
            return None
        envelope, has_group, waits = done
        number = journal.append(envelope, group if has_group else None)
        return number if waits else None

    def close(self) -> None:
        """Blocks until journal and trace are written."""
        try:
            if self.journal is not None:
                self.journal.close()
        finally:
            if self.trace is not None:
                self._trace_account(self.trace)
                self.trace.close()

    def flush_trace(self) -> None:
        """Blocks until the trace is written, the account as it is now included."""
        if self.trace is not None:
            self._trace_account(self.trace)
            self.trace.flush()

    def _trace_account(self, trace: Trace) -> None:
        with self.lock:
            if not self.store.claimed:  # else groups are between the buffer and who takes them
                trace.account(self.store, always=True)

    # Checkpoints

    def _preserve(self, record: Record, leaving: bool) -> None:
        """Called under the lock before a record changes or leaves: running saves write it as it was."""
        for job in self.saves:
            job.preserve(record, leaving)

    def start_save(self, directory: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> SaveJob:
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra must be a mapping, got {type(extra).__name__}")
        with self.lock:
            if self.journal is not None:
                self.journal.check_open()
            on_their_way = [record for batch in self._on_their_way.values() for record in batch]
            job = SaveJob(directory, self.store, self.lock, self._dump_ref, self.journal, extra, on_their_way)
            self.saves.append(job)
            return job

    def run_save(self, job: SaveJob) -> None:
        """Blocks until the checkpoint is written."""
        try:
            job.run()
        finally:
            with self.lock:
                self.saves.remove(job)

    def resume(
        self, directory: str | os.PathLike[str] | None, undo_takes: bool, cancelled: Callable[[], bool]
    ) -> Resumed:
        """Blocks until all is read. Loads nothing if it is `cancelled` by then."""
        self._refuse_resume()
        store, resumed, reading = load(
            directory, self._new_store, load_ref=self._load_ref, journal=self.journal, undo_takes=undo_takes
        )
        if reading is not None:
            self._refuse_resume()
            reading.finish()
        traced = [] if self.trace is None else stored_lines(store)
        with self.lock:
            if cancelled():
                return resumed
            self._refuse_resume()
            self._use(store)
            if self.trace is not None:
                self.trace.resume(store, traced)
            if reading is not None:
                reading.open()
            if undo_takes and store.changes is not None:
                store.changes.undo_takes()
            entry = self._record("resume")
            ready = self._ready()
        _wake(ready)
        if entry is not None and self.journal is not None:
            self.journal.wait(entry)
        return resumed

    def _refuse_resume(self) -> None:
        store = self.store
        if store.records or store.tickets or store.ledger.produced:
            raise ValueError("resume needs a buffer that has never held a group; make a new one")


def _wake(ready: Iterable[Waiter[Any]]) -> None:
    for waiter in ready:
        waiter.wake()
