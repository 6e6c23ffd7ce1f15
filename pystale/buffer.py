"""The replay buffer: what its operations mean, and its face for an event loop."""

import functools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pystale.arguments import (
    Sizes,
    checked_group_mode,
    checked_hooks,
    checked_missing_version,
    checked_order,
    checked_rules,
    checked_seconds,
    checked_triggers,
    warn_of_discards,
    warn_of_order,
)
from pystale.batch import TrainBatch
from pystale.blocking import BlockingReplayBuffer
from pystale.buffer_report import BufferReport
from pystale.effects import OnRelease, flush
from pystale.group import Group
from pystale.journal import Journal
from pystale.operations import Operations
from pystale.payload import DumpRef, LoadRef
from pystale.policy import GroupMode, Order
from pystale.readiness import wait_ready
from pystale.reservations import Reservation
from pystale.saving import Resumed
from pystale.staleness import StalenessRule, checked_int
from pystale.state import Status
from pystale.store import Store
from pystale.take import claim_train_batch
from pystale.trace import Trace, trace_header
from pystale.waiting import IN_EVENT_LOOP

__all__ = ["OnRelease", "ReplayBuffer"]


class ReplayBuffer:
    """Rollout groups that wait to be trained, and age while they wait.

    Every operation is atomic and may be called from several threads and event loops at once. One mutex guards the
    store; it is held for microseconds, never across an await, I/O or a callback. A call that is cancelled before it
    took effect changes nothing, and no cancelled call takes groups along.

    The buffer owns the groups it stores: change their states only after they are handed out. A call that is cancelled
    while it waits for an async ``on_release`` raises CancelledError, but what it did stands, and the release goes on.
    A group whose state refuses what resetting it has to write (None, an empty list, the prompt) cannot be re-rolled; it
    is discarded when it expires, with an error in the log, and the others are not affected.

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
    group_mode : {"all", "members"}, default "all"
        What becomes of a finished group some of whose members have expired. "all": it is re-rolled, or discarded.
        "members": it is trained without them, as long as `min_fresh` are left. See :class:`~pystale.GroupMode` for what
        that does to a group-normalised baseline.
    min_fresh : int, default 1
        Members that a group is trained with at least, for "members".
    wait_for_stragglers : bool, default False
        Have :meth:`take_train_batch` wait for work in flight that later batches could not train in time, so that it is
        not dropped for being slow: see Notes. Work in flight is what was reserved with :meth:`reserve`, as the
        producers of pystale do then.
    straggler_timeout_s : float, default 600.0
        Seconds after which such a wait is an error.
    on_release : callable, optional
        ``on_release(released)``, plain or async, gets the list of ``(state, {field: old value})`` that an operation
        reset or discarded, once per operation and outside the lock, so that references in them can be freed.
        What it raises is logged; the operation stands. KeyboardInterrupt and SystemExit go on to the caller.
    journal : path, optional
        Directory of a journal, created if absent, of which this buffer is the only user. See Notes.
    journal_delay : float, default 0.005
        Seconds between two syncs of the journal, at least: what comes meanwhile shares one. A lone put does not wait.
    dump_ref, load_ref : callable, optional
        For external references in a state, such as objects of a Ray cluster. ``dump_ref(value)`` is called with every
        value a checkpoint or the journal cannot hold, and returns what to write in its place: anything they can hold,
        such as bytes, an array or a dict; None refuses. ``load_ref`` makes the reference of it again. Each object is
        written once per group. Both or neither. They are called from any thread, outside the lock.
    write_masks : bool, default True
        False: `take_train_batch` counts the tokens in the loss and leaves ``response_mask`` as it is. For a buffer of
        summaries, whose steps and masks are runs and whose tokens are elsewhere: nothing is expanded then. Members
        left out stay in their groups, as EXPIRED, so that every summary keeps its place; whoever has the tokens drops
        them.
    trace : path, optional
        File to record every operation in, for ``pystale replay``; it must not exist. It holds versions, masks and
        counts, no tokens. Writing it never holds up the buffer; see :mod:`pystale.trace`.

    Raises
    ------
    TypeError, ValueError
        For a setting that is none of the above, or a journal that another buffer uses.
    OSError
        For a journal or a trace that cannot be created.

    Warns
    -----
    UserWarning
        If a task has a token rule and no re-rollout, or for `wait_for_stragglers` with another order than
        "stalest_first".

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

    With `wait_for_stragglers` a take of n groups for step T waits while work is in flight that would be too old for
    step T + 1, which is verl's rule (``wait``). It also waits while more than ``(D - T) * n`` groups are in flight that
    may be trained at step D at the latest, since batches for the steps after T could not train all of them, until it
    can fill itself with groups that are as old. So nothing is dropped for the age of its oldest token, and no take
    waits longer than that needs, as long as

    - no more is begun than can be trained in time: by version v no more than v + stale_threshold batches. What is
      beyond that expires as ever, as with oversampling. Unfinished work in the ABORTED pool is not in flight;
    - batches are of one size, and ``order`` is "stalest_first". Others may leave behind what was waited for. So may
      groups that go first for another reason than the age of their tokens: those without versions where
      `missing_version` is "oldest", and those with members left out.

    The token rule is not part of it: a response that lands in time without a fresh token still expires by that.
    ``report().lengths`` shows what was dropped, and whether it was the long responses.

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
        write_masks: bool = True,
        group_mode: str | GroupMode = GroupMode.ALL,
        min_fresh: int = 1,
        wait_for_stragglers: bool = False,
        straggler_timeout_s: float = 600.0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        rules = checked_rules(rule)
        triggers = checked_triggers(tail_batch_trigger_size, rules)
        self.order = checked_order(order)
        missing_version = checked_missing_version(missing_version)
        if max_rerolls is not None:
            max_rerolls = checked_int("max_rerolls", max_rerolls, at_least=0, remedy="None sets no bound")
        self.max_rerolls = max_rerolls
        checked_hooks(on_release=on_release, dump_ref=dump_ref, load_ref=load_ref)
        journal_delay = checked_seconds("journal_delay", journal_delay)
        self.group_mode, self.min_fresh = checked_group_mode(group_mode, min_fresh)
        if not isinstance(wait_for_stragglers, bool):
            raise TypeError(f"wait_for_stragglers must be a bool, got {type(wait_for_stragglers).__name__}")
        self.wait_for_stragglers = wait_for_stragglers
        self.straggler_timeout_s = checked_seconds("straggler_timeout_s", straggler_timeout_s, positive=True)
        fewest = self.min_fresh if self.group_mode is GroupMode.MEMBERS else None
        if fewest is None:
            warn_of_discards(rules, triggers)
        if wait_for_stragglers:
            warn_of_order(self.order)
        kept = None if journal is None else Journal(journal, self.order.value, journal_delay)
        header = trace_header(rules, triggers, self.order.value, missing_version, max_rerolls, fewest)
        self.trace = None if trace is None else Trace(trace, header)
        # What all faces of the buffer share, for modules of pystale that need it before anything is waited for.
        self.operations = Operations(
            functools.partial(Store, rules, triggers, self.order, missing_version, max_rerolls, fewest),
            on_release=on_release,
            journal=kept,
            dump_ref=dump_ref,
            load_ref=load_ref,
            write_masks=write_masks,
            trace=self.trace,
            wait_for_stragglers=wait_for_stragglers,
            straggler_timeout_s=self.straggler_timeout_s,
        )
        self.sync = BlockingReplayBuffer(self.operations)

    # Settings

    def rule(self, task_name: str = "default") -> StalenessRule:
        """Rule of a task; ValueError when it has none."""
        return self.operations.store.settings(task_name)[0]

    def tail_batch_trigger_size(self, task_name: str = "default") -> int:
        """Tail batch trigger of a task; ValueError when the task has no rule."""
        return self.operations.store.settings(task_name)[1]

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
            Members, which share a ``group_id``, an int or a str; where it is None the buffer gives them a fresh one. A
            group that :meth:`get` handed out keeps its arrival and its count of re-rolls. States of a class without
            ``group_id`` are then recognised as the objects they are.
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
            nothing was stored. With ``group_mode="members"`` a group may be COMPLETED without some of its members;
            those that come EXPIRED count among these.

        Raises
        ------
        TypeError, ValueError
            For an empty group, lengths that differ, a missing or future version, a task without a rule, a group or
            a state that is stored already. Nothing has changed then.
        """
        status, effects = self.operations.put(group, task_name, model_step, train_step)
        await effects.finish(IN_EVENT_LOOP)
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
        moved, effects = self.operations.refresh(train_step, statuses)
        await effects.finish(IN_EVENT_LOOP)
        return moved

    async def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """Hand out up to `n` groups of a pool, in order, for continuation or re-rollout.

        They are in flight until they are put again, settled or rejected. Groups from the EXPIRED pool count one
        re-roll more. Members left out of a COMPLETED group are handed out with it, EXPIRED and empty.
        """
        return self.operations.get(n, task_name, status)

    async def take_batch(self, sizes: Sizes, *, status: Any = Status.COMPLETED) -> TrainBatch:
        """Take ``sizes[task]`` groups of each task as they are, all or nothing; they count as trained.

        Members left out of a COMPLETED group are not in it.
        """
        return await self.operations.claim_batch(sizes, status).hand_over(IN_EVENT_LOOP)

    async def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """Take ``sizes[task]`` COMPLETED groups of each task for training at `train_step`, all or nothing.

        Refreshes first, so that nothing too old is handed to training. Where the token rule applies, or a response
        holds tokens no model produced, the effective mask replaces ``response_mask``: a list stays a list, anything
        else becomes a uint8 array.

        With ``wait_for_stragglers`` a batch that is there is handed over once there are no :meth:`stragglers`. It is
        taken as it is then, in the order of the buffer, stragglers that have landed included. A wait that is cancelled
        takes nothing.

        Returns
        -------
        TrainBatch
            Empty when a task is short; then nothing was taken, but what is too old has expired.

        Raises
        ------
        StragglersOverdue
            A TimeoutError: work in flight has not landed within ``straggler_timeout_s``. Nothing was taken.
        """
        claim = await claim_train_batch(self.operations, sizes, train_step, IN_EVENT_LOOP)
        return await claim.hand_over(IN_EVENT_LOOP)

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
        return await wait_ready(self.operations, sizes, timeout, IN_EVENT_LOOP)

    async def is_ready(self, sizes: Sizes) -> bool:
        """Whether every task has ``sizes[task]`` COMPLETED groups now."""
        return self.operations.is_ready(sizes)

    async def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """Groups of a task in a pool."""
        return self.operations.count(task_name, status)

    async def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """Groups of several tasks in several pools, at one moment."""
        return self.operations.count_statuses(task_names, statuses)

    async def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """Release and count a group that is not put: ``failed``, ``filtered`` or ``lost``.

        For groups that were generated and never stored, and for groups handed out by :meth:`get`. Their fields are
        cleared, but for the ids, the prompt and the status.
        """
        await self.operations.reject(group, task_name, outcome).finish(IN_EVENT_LOOP)

    def reserve(self, group_id: Any, task_name: str = "default", *, model_step: int) -> Reservation:
        """Say that a group is in flight: a producer is about to generate it.

        It is until the group is put, rejected or settled, or what is returned is released. Nothing of it is stored
        meanwhile, so nothing of it can expire. Reservations live in this process; no checkpoint holds them.

        Parameters
        ----------
        group_id : int, str or None
            Of the group. With None, or for states without ``group_id``, only releasing it ends it.
        task_name : str, default "default"
            Task it belongs to.
        model_step : int
            Version it is as old as: that it is generated with, or the oldest of the tokens it keeps.

        Returns
        -------
        Reservation
            To be released where the group does not come to the buffer. Used in a ``with`` statement it always is.

        Raises
        ------
        TypeError, ValueError
            For a group that is stored or in flight already, or a task without a rule.

        Examples
        --------
        >>> from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
        >>> buffer = ReplayBuffer(StalenessRule(), wait_for_stragglers=True)
        >>> with buffer.reserve(7, model_step=4):
        ...     state = RolloutState(group_id=7, response_ids=[1], response_model_steps=[4], status=Status.COMPLETED)
        ...     buffer.report().reserved, buffer.sync.put([state], train_step=5), buffer.report().reserved
        ({'default': 1}, <Status.COMPLETED: 'completed'>, {})
        """
        return self.operations.in_flight.reserve(group_id, task_name, model_step)

    async def stragglers(self, sizes: Sizes, *, train_step: int) -> list[Reservation]:
        """Work in flight that a take of `sizes` for `train_step` would wait for now, if the batch was there.

        That is work that later batches of this size could not train in time: see Notes of :class:`ReplayBuffer`.
        Groups stored are taken as they are; a take refreshes first. The answer does not depend on
        ``wait_for_stragglers``, so that who asks may wait by himself, or have it finished first.

        Parameters
        ----------
        sizes : mapping of str to int
            Groups to be taken by task.
        train_step : int
            Step they would be taken for, from 1 on.

        Returns
        -------
        list of Reservation
            By task, in the order in which they were reserved.

        Examples
        --------
        >>> from pystale import ReplayBuffer, StalenessRule
        >>> buffer = ReplayBuffer(StalenessRule(max_staleness=1))
        >>> for group_id, model_step in enumerate([4, 5, 5, 5]):
        ...     reservation = buffer.reserve(group_id, model_step=model_step)
        >>> buffer.sync.stragglers({"default": 3}, train_step=6)  # the others may be trained at step 7
        [Reservation('default', 0, model_step=4)]
        >>> len(buffer.sync.stragglers({"default": 2}, train_step=6))  # where a batch of 2 has no room for all of them
        4
        """
        return self.operations.stragglers(sizes, train_step)

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
        self.operations.settle(groups, outcome)

    def ledger(self) -> dict[str, Any]:
        """Account of response tokens.

        Returns
        -------
        dict
            ``produced``, ``trained``, ``masked_stale``, ``masked_semantic``, ``discarded`` (a Counter by reason:
            expired, failed, filtered, restarted, max_rerolls, lost), ``stored`` and ``in_flight``. At every moment
            ``produced`` is the sum of all others.
        """
        return self.operations.ledger()

    def report(self) -> BufferReport:
        """What the buffer has done to groups, beside the account of tokens."""
        return self.operations.report()

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
        job = self.operations.start_save(directory, extra)
        await IN_EVENT_LOOP.computed(functools.partial(self.operations.run_save, job), job.cancel)

    async def resume(self, directory: str | os.PathLike[str] | None, *, undo_takes: bool = False) -> Resumed:
        """Load what :meth:`save` wrote into this buffer, which must be empty and have the same order.

        A journal is played back after it. Rules and triggers may differ: deadlines are made anew, but what has expired
        stays so: a group that had members left out is trained without them, whatever `group_mode` is now. Groups that
        were handed out are stored again, in the pool they came from and as they were, to be handed out once more.

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
        return await IN_EVENT_LOOP.computed(
            functools.partial(self.operations.resume, directory, undo_takes, cancelled.is_set), cancelled.set
        )

    async def flush(self) -> None:
        """Return once everything done so far is in the journal, on disk, and in the trace.

        At once without a journal and a trace.
        """
        await flush(self.operations.journal, IN_EVENT_LOOP)
        if self.trace is not None:
            await IN_EVENT_LOOP.computed(self.operations.flush_trace, lambda: None)

    async def close(self) -> None:
        """Write the journal to its end and let another buffer use it; this one refuses to change from then on.

        A trace is written to its end, too; what the buffer does later is not in it.
        """
        await IN_EVENT_LOOP.computed(self.operations.close, lambda: None)

    def __len__(self) -> int:
        return len(self.operations)
