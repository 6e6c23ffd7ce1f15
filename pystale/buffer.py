"""The replay buffer: a lock, an event-driven wait, and two faces (async and blocking) on the store."""

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pystale.arguments import (
    Rules,
    Sizes,
    Triggers,
    checked_outcome,
    checked_rules,
    checked_sizes,
    checked_task_name,
    checked_triggers,
)
from pystale.batch import TrainBatch
from pystale.blocking import BlockingReplayBuffer
from pystale.disposal import Cleared
from pystale.group import AGEING, Group, read_group
from pystale.history import Changes
from pystale.journal import Journal
from pystale.payload import DumpRef, EncodedGroup, LoadRef
from pystale.policy import Order
from pystale.readiness import Waiter, Waiters
from pystale.saving import Resumed, SaveJob, encode, encode_arriving, load
from pystale.staleness import StalenessRule, checked_int
from pystale.state import Status, as_status
from pystale.store import AGEING_BITS, Record, Store, Taken, status_bits, unwrite_masks, write_masks
from pystale.ticket import copied

__all__ = ["ReplayBuffer"]

logger = logging.getLogger("pystale")

OnRelease = Callable[[list[tuple[Any, dict[str, Any]]]], Awaitable[None] | None]
OUTCOMES = ("trained", "failed", "filtered", "lost")


class Effects(NamedTuple):
    """What is left to do after an operation: wait for its journal entry, then release what it cleared."""

    cleared: Cleared
    entry: int | None = None  # number of the journal entry to wait for


class Claim(NamedTuple):
    """Groups taken out of the store for training, and what they train with."""

    records: list[Record]
    masks: list[list[Taken]]
    written: list[tuple[Any, Any]]  # states that got a mask, and the masks they had
    batch: TrainBatch
    entry: int | None = None  # number of the journal entry to wait for


class ReplayBuffer:
    """Rollout groups that wait to be trained, and age while they wait.

    Every operation is atomic and may be called from several threads and event loops at once. One mutex guards the
    store; it is held for microseconds, never across an await, I/O or a callback. A call that is cancelled before it
    took effect changes nothing, and no cancelled call takes groups along.

    The buffer owns the groups it stores: change their states only after they are handed out.

    Parameters
    ----------
    rule : StalenessRule or mapping of str to StalenessRule
        One rule for every task, or a rule per task; then no other task is accepted.
    order : {"stalest_first", "oldest_prompt_first", "freshest_first", "fifo"}, default "stalest_first"
        Order of handing out. It never changes with the train step.
    tail_batch_trigger_size : int or mapping of str to int, default -1
        -1 discards expired groups for good. From 0 on they wait in the EXPIRED pool for re-rollout: to be taken at
        once (0), or when N of them wait (N > 0), which is up to the producer.
    missing_version : {"error", "oldest", "newest"}, default "error"
        What to do with response tokens that have no model step: refuse them, or store them and order their group as
        the oldest or the newest. Neither staleness rule applies to them.
    max_rerolls : int, optional
        Discard a group that expires again after this many re-rollouts.
    on_release : callable, optional
        ``on_release(released)``, plain or async, gets the list of ``(state, {field: old value})`` that an operation
        reset or discarded, once per operation and outside the lock, so that references in them can be freed.
        What it raises is logged; the operation stands.
    journal : path, optional
        Directory of a journal, created if absent, of which this buffer is the only user. See Notes.
    journal_delay : float, default 0.005
        Seconds between two syncs of the journal, at least: what comes meanwhile shares one. A lone put does not wait.
    dump_ref, load_ref : callable, optional
        For external references in a state, such as objects of a Ray cluster. ``dump_ref(value)`` is called with every
        value a checkpoint or the journal cannot hold, and returns what to write in its place: anything they can hold,
        such as bytes, an array or a dict; None refuses. ``load_ref`` makes the reference of it again. Each object is
        written once per group. Both or neither. They are called from any thread, outside the lock.

    Raises
    ------
    TypeError, ValueError
        For a setting that is none of the above, or a journal that another buffer uses.

    Warns
    -----
    UserWarning
        If a task has a token rule and no re-rollout.

    Notes
    -----
    With a journal, what a call that returned has done survives a crash, and is not done twice:

    - `put`, `reject`, `take_batch`, `take_train_batch` and a `refresh_staleness` that moved groups return, and release,
      once their entry is on disk. Groups are seen by others before that; whatever is built on them is in a later entry.
    - A crash between entry and return: the put is stored, the batch is taken. `resume` names the groups taken since the
      checkpoint, so that a trainer that keeps count can tell which it never got.
    - `get` writes nothing: until a group is put back, settled or rejected, a crash brings it back as it was handed out.
    - `settle` does not wait in its async form; :meth:`flush` does, and so does ``buffer.sync.settle``.
    - A call cancelled while it waits: a put stays put, a take gives its groups back.
    - Where the journal cannot be written, for example on a full disk, calls that wait raise OSError: a put group is
      then in memory only, a batch is given back. Later calls that change something raise it before they do, until
      :meth:`save` has written a checkpoint, which needs no journal.
    - A buffer whose journal was used before accepts only :meth:`resume`; everything else is a ValueError.

    Examples
    --------
    >>> import asyncio
    >>> from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
    >>> async def main():
    ...     buffer = ReplayBuffer(StalenessRule(max_staleness=1, max_token_staleness=0), tail_batch_trigger_size=0)
    ...     state = RolloutState(response_ids=[11, 12, 13], response_model_steps=[3, 4, 4], status=Status.COMPLETED)
    ...     await buffer.put([state], train_step=5)
    ...     batch = await buffer.take_train_batch({"default": 1}, train_step=5)
    ...     return batch.trainable_tokens, state.response_mask.tolist()
    >>> asyncio.run(main())
    (2, [0, 1, 1])
    """

    def __init__(
        self,
        rule: StalenessRule | Mapping[str, StalenessRule],
        order: str | Order = Order.STALEST_FIRST,
        tail_batch_trigger_size: int | Mapping[str, int] = -1,
        missing_version: str = "error",
        max_rerolls: int | None = None,
        on_release: OnRelease | None = None,
        journal: str | os.PathLike[str] | None = None,
        journal_delay: float = 0.005,
        dump_ref: DumpRef | None = None,
        load_ref: LoadRef | None = None,
    ) -> None:
        rules = checked_rules(rule)
        triggers = checked_triggers(tail_batch_trigger_size, rules)
        try:
            self.order = Order(order)
        except ValueError:
            raise ValueError(f"order must be one of {', '.join(o.value for o in Order)}, got {order!r}") from None
        if missing_version not in ("error", "oldest", "newest"):
            raise ValueError(f"missing_version must be 'error', 'oldest' or 'newest', got {missing_version!r}")
        if max_rerolls is not None:
            max_rerolls = checked_int("max_rerolls", max_rerolls, at_least=0, remedy="None sets no bound")
        if on_release is not None and not callable(on_release):
            raise TypeError(f"on_release must be callable, got {type(on_release).__name__}")
        for name, hook in (("dump_ref", dump_ref), ("load_ref", load_ref)):
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} must be callable, got {type(hook).__name__}")
        if (dump_ref is None) != (load_ref is None):
            raise ValueError("dump_ref and load_ref come together: what one writes the other has to read")
        if isinstance(journal_delay, bool) or not isinstance(journal_delay, (int, float)):
            raise TypeError(f"journal_delay must be a number of seconds, got {type(journal_delay).__name__}")
        if not 0 <= journal_delay < float("inf"):
            raise ValueError(f"journal_delay must be at least 0 seconds and finite, got {journal_delay}")
        self.max_rerolls = max_rerolls
        self.on_release = on_release
        self._dump_ref = dump_ref
        self._load_ref = load_ref
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._saves: list[SaveJob] = []
        self._new_store = functools.partial(Store, rules, triggers, self.order, missing_version, max_rerolls)
        _warn_of_discards(rules, triggers)
        self._journal = None if journal is None else Journal(journal, self.order.value, journal_delay)
        self._use(self._new_store())
        self.sync = BlockingReplayBuffer(self)

    # Settings

    def rule(self, task_name: str = "default") -> StalenessRule:
        """Rule of a task; ValueError when it has none."""
        return self._store.settings(task_name)[0]

    def tail_batch_trigger_size(self, task_name: str = "default") -> int:
        """Tail batch trigger of a task; ValueError when the task has no rule."""
        return self._store.settings(task_name)[1]

    # Operations

    async def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """Store a group, unless it has expired for good.

        Parameters
        ----------
        group : sequence of RolloutState or alike
            Members, which share a ``group_id``; where it is None the buffer gives them a fresh one. A group that
            :meth:`get` handed out keeps its arrival and its count of re-rolls.
        task_name : str, default "default"
            Task it belongs to.
        model_step : int, optional
            Version to stamp on response tokens that have none.
        train_step : int, optional
            Step it is produced for. Without it the life cycle runs at the latest step the buffer knows, if any.

        Returns
        -------
        Status
            Pool the group is stored in. EXPIRED means it waits for re-rollout, or, where re-rollout is off, that
            nothing was stored.

        Raises
        ------
        TypeError, ValueError
            For an empty group, lengths that differ, a missing or future version, a task without a rule, a group that
            is stored already. Nothing has changed then.
        """
        status, effects = self._put(group, task_name, model_step, train_step)
        await self._finish(effects)
        return status

    async def refresh_staleness(self, train_step: int, *, statuses: Iterable[Status] | None = None) -> dict[str, int]:
        """Expire what is too old at `train_step`.

        The cost is that of the groups that expire, whatever is stored. Calling it again changes nothing, and
        `train_step` may go back after a resume; what has expired stays so.

        Parameters
        ----------
        train_step : int
            Trainer step that consumes next, from 1.
        statuses : iterable of Status, optional
            Pools to look at; all that age (COMPLETED, ABORTED, EXPIRED) by default.

        Returns
        -------
        dict of str to int
            For every task that had groups stored, how many entered EXPIRED or left during this call.
        """
        moved, effects = self._refresh(train_step, statuses)
        await self._finish(effects)
        return moved

    async def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """Hand out up to `n` groups of a pool, in order, for continuation or re-rollout.

        They are in flight until they are put again, settled or rejected. Groups from the EXPIRED pool count one
        re-roll more.
        """
        return self._get(n, task_name, status)

    async def take_batch(self, sizes: Sizes, *, status: Any = Status.COMPLETED) -> TrainBatch:
        """Take ``sizes[task]`` groups of each task as they are, all or nothing; they count as trained."""
        return await self._hand_over(self._claim_batch(sizes, status))

    async def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """Take ``sizes[task]`` COMPLETED groups of each task for training at `train_step`, all or nothing.

        Refreshes first, so that nothing too old is handed to training. Where the token rule applies, or a response
        holds tokens no model produced, the effective mask replaces ``response_mask``: a list stays a list, anything
        else becomes a uint8 array.

        Returns
        -------
        TrainBatch
            Empty when a task is short; then nothing was taken, but what is too old has expired.
        """
        while True:
            claim, effects = self._claim_train_batch(sizes, train_step)
            if claim is not None:
                return await self._hand_over(claim)
            # Taking waits until what the refresh released is freed: nothing but the journal is waited for after the
            # groups are out, so that a cancelled call cannot take them along.
            await self._finish(effects)

    async def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """Wait until every task has ``sizes[task]`` COMPLETED groups; woken by `put`, never by polling.

        Parameters
        ----------
        sizes : mapping of str to int
            Groups wanted by task.
        timeout : float, optional
            Seconds; without it the wait has no end.

        Returns
        -------
        bool
            False at the timeout.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve)

        waiter = self._enlist(sizes, timeout, wake)
        if waiter is None:
            return True
        try:
            done, _ = await asyncio.wait([future], timeout=timeout)
            return bool(done)
        finally:
            self._dismiss(waiter)

    async def is_ready(self, sizes: Sizes) -> bool:
        """Whether every task has ``sizes[task]`` COMPLETED groups now."""
        return self._is_ready(sizes)

    async def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """Groups of a task in a pool."""
        return self._count(task_name, status)

    async def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """Groups of several tasks in several pools, at one moment."""
        return self._count_statuses(task_names, statuses)

    async def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """Release and count a group that is not put: ``failed``, ``filtered`` or ``lost``.

        For groups that were generated and never stored, and for groups handed out by :meth:`get`. Their fields are
        cleared, but for the ids, the prompt and the status.
        """
        await self._finish(self._reject(group, task_name, outcome))

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """Say what became of groups handed out by :meth:`get` that are not put back.

        Parameters
        ----------
        groups : iterable of groups
            They are only counted; their fields stay.
        outcome : {"trained", "failed", "filtered", "lost"}
            How their tokens are booked.

        Raises
        ------
        ValueError
            For a group that is not handed out; then none of them is settled.
        """
        checked_outcome(outcome, OUTCOMES)
        given = [list(group) for group in groups]
        with self._lock:
            names = [self._store.task_handed_out(group) for group in given]
        arriving = [read_group(group, name) for group, name in zip(given, names, strict=True)]
        known = {(read.task_name, read.group_id) for read in arriving}
        if len(known) < len(arriving):
            raise ValueError("a group is given twice; it can be settled once")
        with self._lock:
            self._check_journal()
            for group in given:
                self._store.task_handed_out(group)
            for read in arriving:
                self._store.settle(read, outcome)
            self._record("settle")

    def ledger(self) -> dict[str, Any]:
        """Account of response tokens.

        Returns
        -------
        dict
            ``produced``, ``trained``, ``masked_stale``, ``masked_semantic``, ``discarded`` (a Counter by reason:
            expired, failed, filtered, restarted, max_rerolls, lost), ``stored`` and ``in_flight``. At every moment
            ``produced`` is the sum of all others.
        """
        with self._lock:
            return self._store.ledger.as_dict()

    async def save(self, directory: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
        """Write the groups, their order and the account to `directory`, which is created if absent.

        What is written is the state at the call; other operations go on meanwhile. An earlier checkpoint there is
        replaced in one step at the end, and survives a save that fails or is cancelled. Groups that are handed out are
        written as they were then. A journal is emptied of what the checkpoint holds. The format is described in
        :mod:`pystale.checkpoint`.

        Parameters
        ----------
        directory : path
            Where the checkpoint goes.
        extra : mapping, optional
            Kept with it, for :meth:`resume` to return: progress, the cursor of a sampler. Plain data, no arrays.

        Raises
        ------
        TypeError
            For a payload that cannot be written, naming field and type.
        OSError
            If the file system refuses.
        """
        job = self._start_save(directory, extra)
        running = asyncio.get_running_loop().run_in_executor(None, self._run_save, job)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            job.cancel()
            await asyncio.wait([running])
            raise

    async def resume(self, directory: str | os.PathLike[str] | None, *, undo_takes: bool = False) -> Resumed:
        """Load what :meth:`save` wrote into this buffer, which must be empty and have the same order.

        A journal is played back after it. Rules and triggers may differ: deadlines are made anew, but what has expired
        stays so. Groups that were handed out are stored again, in the pool they came from and as they were, to be
        handed out once more.

        Parameters
        ----------
        directory : path or None
            Where the checkpoint is. A buffer with a journal that holds all from the start may be given None, or a
            directory in which no save was finished yet.
        undo_takes : bool, default False
            Store again what was taken for training after the checkpoint: for a trainer whose weights have gone back to
            the checkpoint, too, so that what they have not learnt is trained.

        Returns
        -------
        Resumed
            What was kept with the checkpoint, and which groups came and were taken after it.

        Raises
        ------
        CheckpointError
            A ValueError that names the file and what is wrong with it; nothing is loaded.
        ValueError
            If the buffer is not empty, the order differs, a stored task has no rule here, or the journal does not
            continue the checkpoint.
        """
        cancelled = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(None, self._resume, directory, undo_takes, cancelled)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([running])
            raise

    async def flush(self) -> None:
        """Return once everything done so far is in the journal, on disk. At once without a journal."""
        if self._journal is not None:
            await self._journal.durable(self._journal.last)

    async def close(self) -> None:
        """Write the journal to its end and let another buffer use it; this one refuses to change from then on."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def __len__(self) -> int:
        with self._lock:
            return len(self._store.records)

    # What both faces share: everything here runs to its end without waiting

    def _put(
        self, group: Sequence[Any], task_name: str, model_step: int | None, train_step: int | None
    ) -> tuple[Status, Effects]:
        checked_task_name(task_name)
        if train_step is not None:
            train_step = checked_int("train_step", train_step, at_least=1)
        # Reading is the part that costs what the responses are long; it needs no lock.
        self._store.settings(task_name)
        arriving = read_group(
            group,
            task_name,
            model_step=model_step,
            train_step=train_step,
            versions_required=self._store.missing_version == "error",
        )
        encoded = None if self._journal is None else encode_arriving(arriving, self._dump_ref)
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            self._check_journal()
            status = self._store.put(arriving, train_step, cleared)
            entry = self._record("put", encoded)
            ready = self._waiters.pop_ready(self._short) if status is Status.COMPLETED else []
        _wake(ready)
        return status, Effects(cleared, entry)

    def _refresh(self, train_step: int, statuses: Iterable[Any] | None) -> tuple[dict[str, int], Effects]:
        train_step = checked_int("train_step", train_step, at_least=1)
        bits = AGEING_BITS if statuses is None else status_bits({as_status(s) for s in statuses}.intersection(AGEING))
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            self._check_journal()
            moved = self._store.refresh(train_step, bits, cleared)
            return moved, Effects(cleared, self._record("refresh"))

    def _get(self, n: int, task_name: str, status: Any) -> list[Group]:
        n, status = checked_int("n", n, at_least=0), as_status(status)
        with self._lock:
            self._check_journal()
            self._store.settings(checked_task_name(task_name))
            records = self._store.hand_out(task_name, status, n)
        try:
            # As long as the responses are, and so not under the mutex.
            copies = [copied(record.states) for record in records]
        except BaseException:
            self._give_back(records)
            raise
        with self._lock:
            for record, of_record in zip(records, copies, strict=True):
                self._store.lend(record, of_record)
        return [record.states for record in records]

    def _claim_batch(self, sizes: Sizes, status: Any) -> Claim:
        sizes, status = self._checked_sizes(sizes), as_status(status)
        with self._lock:
            self._check_journal()
            claimed = self._claim(sizes, status)
        return self._train(sizes, claimed, None)

    def _claim_train_batch(self, sizes: Sizes, train_step: int) -> tuple[Claim | None, Effects]:
        """The claim, or None with what the refresh released, which has to be freed before trying again."""
        sizes = self._checked_sizes(sizes)
        train_step = checked_int("train_step", train_step, at_least=1)
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            self._check_journal()
            self._store.refresh(train_step, AGEING_BITS, cleared)
            effects = Effects(cleared, self._record("refresh"))
            if cleared.states:
                return None, effects
            claimed = self._claim(sizes, Status.COMPLETED)
        cleared.free()
        claim = self._train(sizes, claimed, train_step)
        return (claim if claimed else claim._replace(entry=effects.entry)), effects

    def _claim(self, sizes: Sizes, status: Status) -> list[Record]:
        """Records of a batch, taken out of the store; none when a task is short. Called under the lock."""
        if self._short(sizes, status):
            return []
        return [record for task_name, n in sizes.items() for record in self._store.hand_out(task_name, status, n)]

    def _train(self, sizes: Sizes, claimed: list[Record], train_step: int | None) -> Claim:
        """Book claimed records as a batch. Masks cost what responses are long, so they are made without the lock."""
        if not claimed and any(sizes.values()):
            return Claim([], [], [], TrainBatch({}, {}))
        groups: dict[str, list[Group]] = {task_name: [] for task_name in sizes}
        tokens = dict.fromkeys(sizes, 0)
        try:
            masks = [self._store.masks(record, train_step) for record in claimed]
            with self._lock:
                for record in claimed:
                    self._preserve(record, True)
                written = write_masks(claimed, masks)
                for record, taken in zip(claimed, masks, strict=True):
                    groups[record.task.name].append(record.states)
                    tokens[record.task.name] += self._store.train(record, taken)
                entry = self._record("take")
        except BaseException:
            self._give_back(claimed)
            raise
        return Claim(claimed, masks, written, TrainBatch(groups, tokens), entry)

    def _give_back(self, claimed: list[Record]) -> None:
        """Store records again that were claimed and that nobody got."""
        with self._lock:
            for record in claimed:
                self._store.give_back(record)
            ready = self._waiters.pop_ready(self._short)
        _wake(ready)

    async def _hand_over(self, claim: Claim) -> TrainBatch:
        """Give a batch to the caller once the journal says that it is taken."""
        if claim.entry is not None and self._journal is not None:
            try:
                await self._journal.durable(claim.entry)
            except BaseException:
                self._take_back(claim)
                raise
        return claim.batch

    def _hand_over_blocking(self, claim: Claim) -> TrainBatch:
        if claim.entry is not None and self._journal is not None:
            try:
                self._journal.wait(claim.entry)
            except BaseException:
                self._take_back(claim)
                raise
        return claim.batch

    def _take_back(self, claim: Claim) -> None:
        """Undo a take whose caller gave up, or whose entry could not be written."""
        unwrite_masks(claim.written)
        encoded: list[EncodedGroup | None] = [None] * len(claim.records)
        for position, record in enumerate(claim.records):
            try:
                group = encode(record, self._dump_ref)
                encoded[position] = group if self._dump_ref is None else group.dump_references(self._dump_ref)
            except Exception:
                logger.exception("group %r is lost: it was taken, and cannot be given back", record.group_id)
        with self._lock:
            for record, masks, again in zip(claim.records, claim.masks, encoded, strict=True):
                if again is not None:
                    self._store.untrain(record, masks)
                    self._record("take back", again)
            ready = self._waiters.pop_ready(self._short)
        _wake(ready)

    def _checked_sizes(self, sizes: Any) -> dict[str, int]:
        checked = checked_sizes(sizes)
        for task_name in checked:
            self._store.settings(task_name)  # here, and not when a put looks who can go on
        return checked

    def _short(self, sizes: Sizes, status: Status = Status.COMPLETED) -> bool:
        return any(self._store.count(task_name, status) < n for task_name, n in sizes.items())

    def _is_ready(self, sizes: Sizes) -> bool:
        sizes = self._checked_sizes(sizes)
        with self._lock:
            return not self._short(sizes)

    def _enlist(self, sizes: Sizes, timeout: float | None, wake: Callable[[], None]) -> Waiter | None:
        """A waiter that `wake` is called for once `sizes` are there; None when they are there now."""
        sizes = self._checked_sizes(sizes)
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
                raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__} {timeout!r}")
            if not timeout >= 0:
                raise ValueError(f"timeout must be at least 0 seconds, got {timeout}; None waits without end")
        with self._lock:
            if self._journal is not None:
                self._journal.check_open()
            return self._waiters.add(sizes, wake) if self._short(sizes) else None

    def _dismiss(self, waiter: Waiter) -> None:
        with self._lock:
            self._waiters.discard(waiter)

    def _count(self, task_name: str, status: Any) -> int:
        status = as_status(status)
        with self._lock:
            return self._store.count(task_name, status)

    def _count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        pools = [as_status(status) for status in statuses]
        with self._lock:
            return {name: {status: self._store.count(name, status) for status in pools} for name in task_names}

    def _reject(self, group: Sequence[Any], task_name: str, outcome: str) -> Effects:
        checked_outcome(outcome, OUTCOMES[1:])
        self._store.settings(checked_task_name(task_name))
        arriving = read_group(group, task_name)
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            self._check_journal()
            self._store.reject(arriving, outcome, cleared)
            return Effects(cleared, self._record("reject"))

    # The journal

    def _check_journal(self) -> None:
        """Raise, before anything changes, where what changes could not be recorded. Called under the lock."""
        if self._journal is not None:
            self._journal.check()

    def _record(self, op: str, group: EncodedGroup | None = None) -> int | None:
        """Append what the store was told to do since the last call; the one place where that happens.

        Called under the lock, so that entries have the order of what they tell. Returns the number of an entry that
        has to be on disk before the caller is answered.
        """
        changes, journal = self._store.changes, self._journal
        if changes is None or journal is None:
            return None
        done = changes.envelope(op, self._store)
        if done is None:
            return None
        envelope, has_group, waits = done
        number = journal.append(envelope, group if has_group else None)
        return number if waits else None

    async def _finish(self, effects: Effects) -> None:
        if effects.entry is None or self._journal is None:
            await self._release(effects.cleared)
        elif not effects.cleared.states:
            effects.cleared.free()
            await self._journal.durable(effects.entry)
        else:
            # A task of its own: what was cleared is released after its entry is on disk, also when the caller is gone.
            await asyncio.shield(asyncio.ensure_future(self._release_recorded(effects)))

    async def _release_recorded(self, effects: Effects) -> None:
        try:
            if self._journal is not None and effects.entry is not None:
                await self._journal.durable(effects.entry)
        finally:
            await self._release(effects.cleared)

    def _finish_blocking(self, effects: Effects) -> None:
        try:
            if effects.entry is not None and self._journal is not None:
                self._journal.wait(effects.entry)
        finally:
            self._release_blocking(effects.cleared)

    def _flush(self) -> None:
        if self._journal is not None:
            self._journal.wait(self._journal.last)

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _use(self, store: Store) -> None:
        store.before_change = self._preserve
        if self._journal is not None:
            store.changes = Changes(store.train_step)
        self._store = store

    # Releasing

    async def _release(self, cleared: Cleared) -> None:
        pending = self._call_on_release(cleared)
        if pending is not None:
            # Shielded: a caller that is cancelled here must not keep references from being freed.
            await asyncio.shield(asyncio.ensure_future(_logged(pending)))

    def _release_blocking(self, cleared: Cleared) -> None:
        pending = self._call_on_release(cleared)
        if pending is not None:
            # In a loop of its own thread, since one may be running in this thread.
            thread = threading.Thread(target=lambda: asyncio.run(_logged(pending)), name="pystale-release")
            thread.start()
            thread.join()

    def _call_on_release(self, cleared: Cleared) -> Awaitable[None] | None:
        cleared.free()
        if not cleared.states or self.on_release is None:
            return None
        try:
            result = self.on_release(cleared.states)
        except Exception:
            logger.exception("on_release failed on %d states", len(cleared.states))
            return None
        return result if inspect.isawaitable(result) else None

    # Saving

    def _preserve(self, record: Record, leaving: bool) -> None:
        """Called under the lock before a record changes or leaves: running saves write it as it was."""
        for job in self._saves:
            job.preserve(record, leaving)

    def _start_save(self, directory: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> SaveJob:
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra must be a mapping, got {type(extra).__name__}")
        with self._lock:
            if self._journal is not None:
                self._journal.check_open()
            job = SaveJob(directory, self._store, self._lock, self._dump_ref, self._journal, extra)
            self._saves.append(job)
            return job

    def _run_save(self, job: SaveJob) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._saves.remove(job)

    def _resume(
        self,
        directory: str | os.PathLike[str] | None,
        undo_takes: bool = False,
        cancelled: threading.Event | None = None,
    ) -> Resumed:
        self._refuse_resume()
        store, resumed, reading = load(
            directory, self._new_store, load_ref=self._load_ref, journal=self._journal, undo_takes=undo_takes
        )
        if reading is not None:
            self._refuse_resume()
            reading.finish()
        with self._lock:
            if cancelled is not None and cancelled.is_set():
                return resumed
            self._refuse_resume()
            self._use(store)
            if reading is not None:
                reading.open()
            if undo_takes and store.changes is not None:
                store.changes.undo_takes()
            entry = self._record("resume")
            ready = self._waiters.pop_ready(self._short)
        _wake(ready)
        if entry is not None and self._journal is not None:
            self._journal.wait(entry)
        return resumed

    def _refuse_resume(self) -> None:
        store = self._store
        if store.records or store.tickets or store.ledger.produced:
            raise ValueError("resume needs a buffer that has never held a group; make a new one")


def _wake(ready: list[Waiter]) -> None:
    for waiter in ready:
        waiter.wake()


async def _logged(pending: Awaitable[None]) -> None:
    try:
        await pending
    except Exception:
        logger.exception("on_release failed")


def _warn_of_discards(rules: Rules, triggers: Triggers) -> None:
    """Warn where token expiry throws whole groups away."""
    for name, rule in {"": rules}.items() if isinstance(rules, StalenessRule) else rules.items():
        trigger = triggers if isinstance(triggers, int) else triggers.get(name, -1)
        if rule.token_stale_threshold is not None and trigger < 0:
            warnings.warn(
                f"tail_batch_trigger_size=-1{name and f' of task {name!r}'} with max_token_staleness="
                f"{rule.max_token_staleness}: a group is discarded for good, fresh members too, as soon as one member "
                "has no trainable token left; 0 or more keeps it for re-rollout",
                stacklevel=3,
            )
