"""The actor: a buffer of summaries, with a journal, for callers that send a call again when they got no answer."""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pystale.arguments import Sizes, checked_seconds, checked_sizes, checked_task_name
from pystale.buffer import ReplayBuffer
from pystale.buffer_report import BufferReport
from pystale.checkpoint import DOCUMENT
from pystale.in_flight import Wanted, wait_for_stragglers
from pystale.integrations.ray.bookings import Bookings, Call, Name, TakenBatch, status_of
from pystale.integrations.ray.payloads import Payloads
from pystale.integrations.ray.reserved import Reserved, Told
from pystale.integrations.ray.room import Room, checked_bound
from pystale.policy import GroupMode
from pystale.saving import Resumed
from pystale.staleness import StalenessRule, checked_int
from pystale.state import RolloutState, Status, as_status
from pystale.summary import names_of
from pystale.waiting import IN_EVENT_LOOP

__all__ = ["ReplayBufferActor"]

logger = logging.getLogger("pystale")

Summaries = list[RolloutState]
# Puts that came in one message are answered in one, but for those that take longer, since they wait for room.
ANSWERED_TOGETHER_S = 0.05
_KEPT = "pystale.ray"  # where the bookings are in the checkpoint's extra


def checked_settings(rule: Any, settings: Mapping[str, Any]) -> None:
    """Raise what the actor would raise for its settings.

    Raises
    ------
    TypeError, ValueError
        For a setting that is unknown or not allowed.
    """
    of_buffer = dict(settings)
    checked_bound(of_buffer.pop("max_groups", None), of_buffer.pop("batch_groups", None))
    checked_int("checkpoint_entries", of_buffer.pop("checkpoint_entries", 1), at_least=1)
    for name in ("lease_s", "grace_s"):
        checked_seconds(name, of_buffer.pop(name, 1.0), positive=True)
    known = {"order", "tail_batch_trigger_size", "max_rerolls", "journal_delay", "group_mode", "min_fresh"}
    known |= {"wait_for_stragglers", "straggler_timeout_s"}
    unknown = of_buffer.keys() - known
    if unknown:
        raise TypeError(f"unknown settings: {', '.join(sorted(unknown))}; see ReplayBufferActor for those there are")
    ReplayBuffer(rule, **of_buffer)


class ReplayBufferActor:
    """Ray actor that holds a :class:`~pystale.ReplayBuffer` of summaries; :meth:`RayReplayBuffer.start` starts it.

    Its methods are called by :class:`RayReplayBuffer`, whose methods say what they do.

    Parameters
    ----------
    directory : path
        Of the checkpoint and, in ``journal``, the journal. What is there is resumed. It has to be there, too, where
        the actor is started anew.
    keepers : mapping of str to str
        Names of the keepers' actors.
    namespace : str
        Where these names are known.
    max_groups : int or mapping of str to int, optional
        Bound on the COMPLETED groups of a task. A put of one more waits until there is room.
    batch_groups : int or mapping of str to int, optional
        Groups of a task that are ever taken at once, to be checked against the bound here.
    checkpoint_entries : int, default 20_000
        A checkpoint is made after so many entries of the journal.
    lease_s : float, default 60
        Groups handed out to a client of which nothing was heard for so many seconds are stored again, and nothing of it
        is waited for. Clients that have any are heard of four times as often.
    grace_s : float, default 600
        Payloads are let go when their put has not come for so many seconds.
    **settings
        Of the buffer: ``rule``, ``order``, ``tail_batch_trigger_size``, ``max_rerolls``, ``group_mode``, ``min_fresh``,
        ``journal_delay``, ``wait_for_stragglers``, ``straggler_timeout_s``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keepers: Mapping[str, str],
        namespace: str,
        rule: StalenessRule | Mapping[str, StalenessRule],
        *,
        max_groups: int | Mapping[str, int] | None = None,
        batch_groups: int | Mapping[str, int] | None = None,
        checkpoint_entries: int = 20_000,
        lease_s: float = 60.0,
        grace_s: float = 600.0,
        **settings: Any,
    ) -> None:
        import ray

        self._directory = Path(directory)
        self._payloads = Payloads({key: ray.get_actor(name, namespace) for key, name in keepers.items()})
        self._lease_s, self._grace_s = lease_s, grace_s
        self._room = Room(self._count_completed, checked_bound(max_groups, batch_groups), self._awaited)
        self._bookings = Bookings()
        self._lent: dict[Name, Summaries] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._heard: dict[str, float] = {}
        self._user_extra: dict[str, Any] = {}
        self._saving: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._checkpoint_entries = checked_int("checkpoint_entries", checkpoint_entries, at_least=1)
        self._buffer = ReplayBuffer(
            rule, on_release=self._payloads.released, journal=self._directory / "journal", write_masks=False, **settings
        )
        self._operations = self._buffer.operations
        journal = self._operations.journal
        if journal is None:
            raise RuntimeError("the buffer was made without its journal")
        self._journal = journal
        self._saved_at = 0
        self._reserved = Reserved(self._buffer)
        self._waits: dict[object, tuple[Wanted, float]] = {}  # takes that wait for stragglers, and since when
        self._settings = {
            "rule": rule,
            "order": self._buffer.order,
            "tail_batch_trigger_size": settings.get("tail_batch_trigger_size", -1),
            "max_rerolls": self._buffer.max_rerolls,
            "group_mode": self._buffer.group_mode,
            "min_fresh": self._buffer.min_fresh,
            "wait_for_stragglers": self._buffer.wait_for_stragglers,
            "straggler_timeout_s": self._buffer.straggler_timeout_s,
            "max_groups": max_groups,
            "lease_s": lease_s,
        }
        if journal.used or (self._directory / DOCUMENT).exists():
            self._resume()

    # Starting anew

    def _resume(self) -> None:
        resumed = self._buffer.sync.resume(self._directory)
        self._restore(resumed)
        for group in self._all_groups():
            self._payloads.hold(group)
        for batch in self._bookings.batches:
            self._payloads.hold(batch.states)
        self._write_off(self._payloads.settle_up())
        logger.warning(
            "the buffer in %r was started anew: %d groups are stored, %d are handed out, %d batches are not "
            "acknowledged",
            str(self._directory),
            len(self._buffer),
            len(self._lent),
            len(self._bookings.batches),
        )

    def _restore(self, resumed: Resumed) -> None:
        extra = dict(resumed.extra)
        kept = extra.pop(_KEPT, None)
        self._user_extra = extra
        if kept is not None:
            self._bookings = Bookings.from_dict(kept)
        for note, result in resumed.notes:
            self._bookings.play(note, result)
        for name, token in list(self._bookings.lent.items()):
            group = self._operations.get_group(*name)
            if group is None:
                del self._bookings.lent[name]
                continue
            self._lent[name] = group
            self._heard[token.rpartition("-")[0]] = time.monotonic()

    def _all_groups(self) -> list[Summaries]:
        stored = [record.states for record in self._operations.store.records.values()]
        return stored + list(self._lent.values())

    # Payloads that are gone

    async def _write_off_with(self, missing: set[str]) -> None:
        """Write off all that is lost together with some payloads: whatever else the same keepers have no more."""
        self._write_off(missing | await self._payloads.missing_with(missing))

    def _write_off(self, missing: set[str]) -> None:
        """Book stored groups whose payloads are gone as lost."""
        lost = [
            (record.task.name, record.group_id)
            for record in self._operations.store.records.values()
            if not missing.isdisjoint(names_of(record.states))
        ]
        for task_name, group_id in lost:
            group = self._operations.get_group(task_name, group_id)
            if group is None:
                continue
            self._operations.settle([group], "lost")
            self._payloads.let_go(names_of(group))
        if lost:
            logger.error(
                "%d groups are lost, since their payloads are gone with the keeper or the node they were on; their "
                "tokens are booked as lost, and none of them is trained. The first is %r of task %r",
                len(lost),
                lost[0][1],
                lost[0][0],
            )

    # Calls

    async def _once(self, call: Call, work: Callable[[], Awaitable[Any]]) -> Any:
        """Result of a call, which runs to its end once, however often it comes."""
        self._hear(call.client)
        running = self._running.get(call.token)
        if running is None:
            running = self._running[call.token] = asyncio.ensure_future(work())
            running.add_done_callback(lambda _: self._running.pop(call.token, None))
        return await asyncio.shield(running)

    def _hear(self, client: str) -> None:
        """A client is alive."""
        self._heard[client] = time.monotonic()
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watch())

    async def settings(self) -> dict[str, Any]:
        return {**self._settings, "keepers": self._payloads.keepers}

    async def put(self, call: Call, task_name: str, group: Summaries, train_step: int | None, lease: str | None) -> Any:
        return await self._once(call, functools.partial(self._put, call, task_name, group, train_step, lease))

    async def put_many(self, puts: Sequence[tuple[Any, ...]]) -> list[tuple[bool, Any] | None]:
        """Several puts: for each ``(failed, status or exception)``; None for one that waits, to be asked for again."""
        tasks = [asyncio.ensure_future(self.put(*arguments)) for arguments in puts]
        await asyncio.wait(tasks, timeout=ANSWERED_TOGETHER_S)
        answers: list[tuple[bool, Any] | None] = []
        for task in tasks:
            if not task.done():
                task.cancel()  # only of this wait for it
                answers.append(None)
            elif (error := task.exception()) is not None:
                known = isinstance(error, (TypeError, ValueError, OSError))
                answers.append((True, error if known else RuntimeError(repr(error))))
            else:
                answers.append((False, task.result()))
        return answers

    async def _put(
        self, call: Call, task_name: str, group: Summaries, train_step: int | None, lease: str | None
    ) -> Any:
        answer = self._bookings.answered(call)
        if answer is not None:
            await self._buffer.flush()  # it may have been interrupted while the entry was on its way
            return status_of(answer)
        name: Name = (checked_task_name(task_name), group[0].group_id)
        self._payloads.hold(group)
        try:
            statuses = {state.status for state in group}
            completed = statuses == {Status.COMPLETED} or (
                self._buffer.group_mode is GroupMode.MEMBERS and statuses == {Status.COMPLETED, Status.EXPIRED}
            )
            async with self._room.of(*name) if completed else _nothing():
                if lease is not None and self._bookings.lent.get(name) != lease:
                    logger.warning(
                        "group %r of task %r came back late: it was handed out anew meanwhile; this one is dropped",
                        name[1],
                        task_name,
                    )
                    self._payloads.let_go(names_of(group))
                    return Status.EXPIRED, name[1]
                note = self._bookings.note("put", call, *name)
                status, effects = self._operations.put(group, task_name, None, train_step, note)
                self._bookings.put(call, name, status.name)
        except BaseException:
            self._payloads.let_go(names_of(group))
            self._room.let_in()
            raise
        before = self._lent.pop(name, None)
        try:
            await effects.finish(IN_EVENT_LOOP)
        finally:
            if before is not None:
                self._payloads.let_go(names_of(before))
            self._after()
        return status, group[0].group_id

    async def get(self, call: Call, n: int, task_name: str, status: Any) -> list[tuple[Summaries, str]]:
        groups: list[tuple[Summaries, str]] = await self._once(
            call, functools.partial(self._get, call, n, task_name, status)
        )
        return groups

    async def _get(self, call: Call, n: int, task_name: str, status: Any) -> list[tuple[Summaries, str]]:
        answer = self._bookings.answered(call)
        if answer is None:
            while True:
                groups = self._operations.get(n, task_name, status)
                names = [(task_name, group[0].group_id) for group in groups]
                self._lent.update(zip(names, groups, strict=True))
                self._bookings.lend(call, names)
                entry = None
                if names:
                    note = self._bookings.note("get", call, task_name, [group_id for _, group_id in names])
                    entry = self._operations.annotate(note)
                missing = await self._payloads.missing(groups)
                if not missing:
                    break
                for name in names:  # back, to be written off with what else is lost
                    self._give_back(name)
                await self._write_off_with(missing)
            if entry is not None:
                await self._journal.durable(entry)
            self._after()
            answer = names
        return [(self._lent[tuple(name)], call.token) for name in answer if tuple(name) in self._lent]

    async def settle(self, call: Call, groups: list[tuple[str, Summaries]], outcome: str) -> None:
        await self._once(call, functools.partial(self._settle, call, groups, outcome))

    async def _settle(self, call: Call, groups: list[tuple[str, Summaries]], outcome: str) -> None:
        if self._bookings.answered(call) is None:
            names = [(task_name, group[0].group_id) for task_name, group in groups]
            note = self._bookings.note("done", call, [list(name) for name in names])
            self._operations.settle([group for _, group in groups], outcome, note)
            self._settled(call, names)
        await self._buffer.flush()

    async def reject(self, call: Call, task_name: str, group: Summaries, outcome: str) -> None:
        await self._once(call, functools.partial(self._reject, call, task_name, group, outcome))

    async def _reject(self, call: Call, task_name: str, group: Summaries, outcome: str) -> None:
        if self._bookings.answered(call) is None:
            names: list[Name] = [(task_name, group[0].group_id)]
            note = self._bookings.note("done", call, [list(name) for name in names])
            effects = self._operations.reject(group, task_name, outcome, note)
            self._settled(call, names)
            await effects.finish(IN_EVENT_LOOP)
        await self._buffer.flush()

    def _settled(self, call: Call, names: Sequence[Name]) -> None:
        self._bookings.settled(call, names)
        for name in names:
            before = self._lent.pop(name, None)
            if before is not None:
                self._payloads.let_go(names_of(before))
        self._after()

    async def take(
        self, call: Call, trainer: str, sizes: Sizes, train_step: int, acknowledge: bool
    ) -> tuple[dict[str, list[Summaries]], dict[str, int]] | None:
        """A batch and its tokens in the loss; empty when a task is short, None when it has to wait for stragglers."""
        work = functools.partial(self._take, call, trainer, checked_sizes(sizes), train_step, acknowledge)
        batch: TakenBatch | bool = await self._once(call, work)
        if isinstance(batch, TakenBatch):
            return batch.groups, batch.tokens
        return ({}, {}) if not batch else None

    async def _take(
        self, call: Call, trainer: str, sizes: dict[str, int], train_step: int, acknowledge: bool
    ) -> TakenBatch | bool:
        """The batch; else whether it has to wait for stragglers."""
        checked_int("train_step", train_step, at_least=1)
        self._room.check(sizes)
        batch = self._bookings.batch_of(call)
        if batch is None and (batch := self._bookings.batch_of_step(call.client, trainer, train_step)) is not None:
            if batch.sizes != sizes:
                raise ValueError(
                    f"train_step {train_step} has taken {batch.sizes} before, and asks for {sizes} now; take the same "
                    "again, or acknowledge that step first"
                )
            logger.warning("the batch of train_step %d is handed out again, to trainer %r", train_step, trainer)
            self._operations.annotate(self._bookings.note("adopt", call, batch.client, batch.number))
            self._bookings.adopt(call, batch)
        if batch is not None:
            await self._buffer.flush()
            return batch
        if acknowledge:
            await self._acknowledge(trainer, train_step - 1)
        while True:
            note = self._bookings.note("take", call, trainer, train_step, sizes)
            claim, effects = self._operations.claim_train_batch(sizes, train_step, note)
            if claim is None:
                await effects.finish(IN_EVENT_LOOP)
                self._after()
                if effects.straggling:
                    return True
                continue
            if not claim.batch:
                await claim.hand_over(IN_EVENT_LOOP)
                self._after()
                return False
            batch = self._bookings.take(call, trainer, train_step, sizes, claim.batch)
            try:
                missing = await self._payloads.missing(group for groups in batch.groups.values() for group in groups)
            except BaseException:
                claim.take_back(claim)
                self._untake(call)
                raise
            if missing:
                claim.take_back(claim)
                self._untake(call)
                await self._write_off_with(missing)
                continue
            try:
                await claim.hand_over(IN_EVENT_LOOP)
            except BaseException:
                self._bookings.untake(call)
                raise
            self._after()
            return batch

    def _untake(self, call: Call) -> None:
        self._bookings.untake(call)
        self._operations.annotate(self._bookings.note("untake", call))

    async def acknowledge(self, trainer: str, train_step: int) -> None:
        """Release what a trainer has trained, up to a step."""
        await self._acknowledge(trainer, train_step)

    async def _acknowledge(self, trainer: str, train_step: int) -> None:
        done = self._bookings.acknowledge(trainer, train_step)
        if done:
            entry = self._operations.annotate(["acknowledge", "", 0, 0, trainer, train_step])
            if entry is not None:
                await self._journal.durable(entry)
            self._payloads.let_go([name for batch in done for name in names_of(batch.states)])

    async def unacknowledged(self, trainer: str) -> list[int]:
        return [batch.train_step for batch in self._bookings.batches if batch.trainer == trainer]

    # What needs no care when it comes twice

    async def refresh(self, train_step: int, statuses: Sequence[Status] | None) -> dict[str, int]:
        moved, effects = self._operations.refresh(train_step, statuses)
        await effects.finish(IN_EVENT_LOOP)
        self._after()
        return moved

    async def wait_ready(self, sizes: Sizes, timeout: float | None) -> bool:
        self._room.check(checked_sizes(sizes))
        return await self._buffer.wait_ready(sizes, timeout=timeout)

    async def is_ready(self, sizes: Sizes) -> bool:
        return self._operations.is_ready(sizes)

    async def count_statuses(self, task_names: Sequence[str], statuses: Sequence[Any]) -> dict[str, dict[Status, int]]:
        return self._operations.count_statuses(task_names, statuses)

    async def count(self, task_name: str, status: Any) -> int:
        return self._operations.count(task_name, as_status(status))

    async def size(self) -> int:
        return len(self._buffer)

    async def ledger(self) -> dict[str, Any]:
        return self._operations.ledger()

    async def buffer_report(self) -> BufferReport:
        return self._operations.report()

    async def flush(self) -> None:
        await self._buffer.flush()

    async def save(self, extra: Mapping[str, Any] | None) -> None:
        if extra is not None:
            self._user_extra = dict(extra)
        await self._save()

    async def extra(self) -> dict[str, Any]:
        return self._user_extra

    async def heard(self, client: str) -> None:
        """A client is alive."""
        self._hear(client)

    async def in_flight(self, client: str, message: int, new: Sequence[Told], over: Sequence[int], whole: bool) -> None:
        """A client says what it has in flight; see :meth:`Reserved.hear`."""
        self._hear(client)
        self._reserved.hear(client, message, new, over, whole)
        self._room.let_in(stragglers=bool(self._waits))

    async def wait_for_stragglers(self, sizes: Sizes, train_step: int, waited: float) -> float:
        """Until a take need not wait any more; seconds it took."""
        operations, wanted, this = self._operations, Wanted(checked_sizes(sizes), train_step), object()
        self._waits[this] = wanted, time.monotonic()
        self._room.let_in(stragglers=True)
        try:
            limit = operations.straggler_timeout_s
            return await wait_for_stragglers(operations.in_flight, wanted, limit, waited, IN_EVENT_LOOP)
        finally:
            del self._waits[this]

    def _awaited(self, task_name: str, group_id: Any) -> bool:
        """Whether a take waits that this group may hold up: it was in flight before.

        Also where it is no straggler itself: a producer may put one group after the other. What has been begun since
        waits for room as ever.
        """
        if not self._waits:
            return False
        reservation = self._operations.in_flight.reserved.find(task_name, group_id)
        return reservation is not None and any(
            wanted.sizes.get(task_name) and reservation.since <= since for wanted, since in self._waits.values()
        )

    async def stragglers(self, sizes: Sizes, train_step: int) -> list[tuple[str, Told, float]]:
        return self._reserved.told(self._operations.stragglers(sizes, train_step))

    async def leave(self, client: str) -> None:
        """A client goes: what was handed out to it is stored again."""
        self._forget(client)
        await self._buffer.flush()

    async def report(self) -> dict[str, Any]:
        """For tests and people: process, and what it holds."""
        return {
            "pid": os.getpid(),
            "cpu_s": time.process_time(),
            "payloads": len(self._payloads),
            "lent": len(self._lent),
            "batches": len(self._bookings.batches),
            "waiting": self._room.waiting,
            "takes_waiting": len(self._waits),
            "journal_entries": self._journal.last,
        }

    # In between

    def _count_completed(self, task_name: str) -> int:
        return self._operations.count(task_name, Status.COMPLETED)

    def _after(self) -> None:
        """What may follow from any operation: room for puts, and a checkpoint."""
        self._room.let_in(stragglers=bool(self._waits))
        if self._saving is None and self._journal.last - self._saved_at >= self._checkpoint_entries:
            self._saving = asyncio.ensure_future(self._save())
            self._saving.add_done_callback(self._checkpoint_made)

    def _checkpoint_made(self, saving: "asyncio.Task[None]") -> None:
        self._saving = None
        if not saving.cancelled() and saving.exception() is not None:
            logger.error("a checkpoint could not be written; the journal goes on", exc_info=saving.exception())

    async def _save(self) -> None:
        self._saved_at = self._journal.last
        # At one moment: save takes the state down before it waits for anything.
        await self._buffer.save(self._directory, extra={**self._user_extra, _KEPT: self._bookings.as_dict()})

    def _give_back(self, name: Name) -> None:
        """Store a group again that was handed out, as it was then."""
        group = self._lent.pop(name, None)
        token = self._bookings.lent.pop(name, None)
        if group is None or token is None:
            return
        _, effects = self._operations.put(group, name[0], None, None, ["back", "", 0, 0, *name])
        self._payloads.in_background(effects.finish(IN_EVENT_LOOP))

    def _forget(self, client: str) -> None:
        self._heard.pop(client, None)
        names = [name for name, token in self._bookings.lent.items() if token.rpartition("-")[0] == client]
        for name in names:
            self._give_back(name)
        if names:
            logger.warning("client %s is gone: %d groups it was generating are stored again", client, len(names))
        self._bookings.answers.pop(client, None)
        self._reserved.forget(client)
        self._after()

    async def _watch(self) -> None:
        """Notice clients that are gone, and payloads whose put never came."""
        swept = time.monotonic()
        while True:
            await asyncio.sleep(min(self._lease_s, self._grace_s) / 4)
            try:
                self._forget_those_unheard()
                if time.monotonic() - swept >= self._grace_s / 2:
                    swept = time.monotonic()
                    await self._payloads.sweep(self._grace_s)
            except Exception:  # such as a full disk; it may be over the next time
                logger.exception("clients and payloads could not be looked after")

    def _forget_those_unheard(self) -> None:
        since = time.monotonic() - self._lease_s
        lent_to = {token.rpartition("-")[0] for token in self._bookings.lent.values()}
        for client in lent_to.union(self._reserved.clients):
            if self._heard.setdefault(client, time.monotonic()) < since:
                self._forget(client)


@contextlib.asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield
