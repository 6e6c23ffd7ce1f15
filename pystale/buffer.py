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
from typing import Any

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
from pystale.policy import Order
from pystale.readiness import Waiter, Waiters
from pystale.saving import SaveJob, load
from pystale.staleness import StalenessRule, checked_int
from pystale.state import Status, as_status
from pystale.store import AGEING_BITS, Record, Store, status_bits, write_masks

__all__ = ["ReplayBuffer"]

logger = logging.getLogger("pystale")

OnRelease = Callable[[list[tuple[Any, dict[str, Any]]]], Awaitable[None] | None]
OUTCOMES = ("trained", "failed", "filtered", "lost")


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

    Raises
    ------
    TypeError, ValueError
        For a setting that is none of the above.

    Warns
    -----
    UserWarning
        If a task has a token rule and no re-rollout.

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
        self.max_rerolls = max_rerolls
        self.on_release = on_release
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._saves: list[SaveJob] = []
        self._new_store = functools.partial(Store, rules, triggers, self.order, missing_version, max_rerolls)
        self._store = self._new_store()
        self._store.before_change = self._preserve
        _warn_of_discards(rules, triggers)
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
        status, cleared = self._put(group, task_name, model_step, train_step)
        await self._release(cleared)
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
        moved, cleared = self._refresh(train_step, statuses)
        await self._release(cleared)
        return moved

    async def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """Hand out up to `n` groups of a pool, in order, for continuation or re-rollout.

        They are in flight until they are put again, settled or rejected. Groups from the EXPIRED pool count one
        re-roll more.
        """
        return self._get(n, task_name, status)

    async def take_batch(self, sizes: Sizes, *, status: Any = Status.COMPLETED) -> TrainBatch:
        """Take ``sizes[task]`` groups of each task as they are, all or nothing; they count as trained."""
        return self._take_batch(sizes, status)

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
            batch, cleared = self._take_train_batch(sizes, train_step)
            if batch is not None:
                return batch
            # Taking waits until what the refresh released is freed: there is no await after the groups are out,
            # so that a cancelled call cannot take them along.
            await self._release(cleared)

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
        await self._release(self._reject(group, task_name, outcome))

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
            for group in given:
                self._store.task_handed_out(group)
            for read in arriving:
                self._store.settle(read, outcome)

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

    async def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the groups, their order and the account to `directory`, which is created if absent.

        What is written is the state at the call; other operations go on meanwhile. An earlier checkpoint there is
        replaced in one step at the end, and survives a save that fails or is cancelled. The format is described in
        :mod:`pystale.checkpoint`.

        Raises
        ------
        TypeError
            For a payload that cannot be written, naming field and type.
        OSError
            If the file system refuses.
        """
        job = self._start_save(directory)
        running = asyncio.get_running_loop().run_in_executor(None, self._run_save, job)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            job.cancel()
            await asyncio.wait([running])
            raise

    async def resume(self, directory: str | os.PathLike[str]) -> None:
        """Load what :meth:`save` wrote into this buffer, which must be empty and have the same order.

        Rules and triggers may differ: deadlines are made anew. Groups that were in flight when the checkpoint was
        written are not in it; their tokens are booked as lost, and they keep arrival and re-rolls when they are put.

        Raises
        ------
        CheckpointError
            A ValueError that names the file and what is wrong with it; nothing is loaded.
        ValueError
            If the buffer is not empty, the order differs, or a stored task has no rule here.
        """
        cancelled = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(None, self._resume, directory, cancelled)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([running])
            raise

    def __len__(self) -> int:
        with self._lock:
            return len(self._store.records)

    # What both faces share: everything here runs to its end without waiting

    def _put(
        self, group: Sequence[Any], task_name: str, model_step: int | None, train_step: int | None
    ) -> tuple[Status, Cleared]:
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
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            status = self._store.put(arriving, train_step, cleared)
            ready = self._waiters.pop_ready(self._short) if status is Status.COMPLETED else []
        _wake(ready)
        return status, cleared

    def _refresh(self, train_step: int, statuses: Iterable[Any] | None) -> tuple[dict[str, int], Cleared]:
        train_step = checked_int("train_step", train_step, at_least=1)
        bits = AGEING_BITS if statuses is None else status_bits({as_status(s) for s in statuses}.intersection(AGEING))
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            return self._store.refresh(train_step, bits, cleared), cleared

    def _get(self, n: int, task_name: str, status: Any) -> list[Group]:
        n, status = checked_int("n", n, at_least=0), as_status(status)
        with self._lock:
            self._store.settings(checked_task_name(task_name))
            records = self._store.hand_out(task_name, status, n)
            tickets = [self._store.lend(record) for record in records]
        for record, ticket in zip(records, tickets, strict=True):
            ticket.remember(record.states)
        return [record.states for record in records]

    def _take_batch(self, sizes: Sizes, status: Any) -> TrainBatch:
        sizes, status = self._checked_sizes(sizes), as_status(status)
        with self._lock:
            claimed = self._claim(sizes, status)
        return self._train(sizes, claimed, None)

    def _take_train_batch(self, sizes: Sizes, train_step: int) -> tuple[TrainBatch | None, Cleared]:
        """The batch, or None with what the refresh released, which has to be freed before trying again."""
        sizes = self._checked_sizes(sizes)
        train_step = checked_int("train_step", train_step, at_least=1)
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            self._store.refresh(train_step, AGEING_BITS, cleared)
            if cleared.states:
                return None, cleared
            claimed = self._claim(sizes, Status.COMPLETED)
        cleared.free()
        return self._train(sizes, claimed, train_step), cleared

    def _claim(self, sizes: Sizes, status: Status) -> list[Record]:
        """Records of a batch, taken out of the store; none when a task is short. Called under the lock."""
        if self._short(sizes, status):
            return []
        return [record for task_name, n in sizes.items() for record in self._store.hand_out(task_name, status, n)]

    def _train(self, sizes: Sizes, claimed: list[Record], train_step: int | None) -> TrainBatch:
        """Turn claimed records into a batch. Masks cost what responses are long, so they are made without the lock."""
        if not claimed and any(sizes.values()):
            return TrainBatch({}, {})
        try:
            masks = [self._store.masks(record, train_step) for record in claimed]
            write_masks(claimed, masks)
        except BaseException:
            with self._lock:
                for record in claimed:
                    self._store.give_back(record)
                ready = self._waiters.pop_ready(self._short)
            _wake(ready)
            raise
        groups: dict[str, list[Group]] = {task_name: [] for task_name in sizes}
        tokens = dict.fromkeys(sizes, 0)
        with self._lock:
            for record, taken in zip(claimed, masks, strict=True):
                groups[record.task.name].append(record.states)
                tokens[record.task.name] += self._store.train(record, taken)
        return TrainBatch(groups, tokens)

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

    def _reject(self, group: Sequence[Any], task_name: str, outcome: str) -> Cleared:
        checked_outcome(outcome, OUTCOMES[1:])
        self._store.settings(checked_task_name(task_name))
        arriving = read_group(group, task_name)
        cleared = Cleared(self.on_release is not None)
        with self._lock:
            self._store.reject(arriving, outcome, cleared)
        return cleared

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

    def _start_save(self, directory: str | os.PathLike[str]) -> SaveJob:
        with self._lock:
            job = SaveJob(directory, self._store, self._lock)
            self._saves.append(job)
            return job

    def _run_save(self, job: SaveJob) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._saves.remove(job)

    def _resume(self, directory: str | os.PathLike[str], cancelled: threading.Event | None = None) -> None:
        self._refuse_resume()
        store = load(directory, self._new_store)
        with self._lock:
            if cancelled is not None and cancelled.is_set():
                return
            self._refuse_resume()
            store.before_change = self._preserve
            self._store = store
            ready = self._waiters.pop_ready(self._short)
        _wake(ready)

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
