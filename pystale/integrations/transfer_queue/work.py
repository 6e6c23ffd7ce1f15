"""What a store does: a buffer of summaries, and the rows of TransferQueue that they stand for."""

import asyncio
import itertools
import logging
import os
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pystale.arguments import OUTCOMES, Sizes, checked_outcome, checked_task_name
from pystale.batch import TrainBatch
from pystale.buffer import ReplayBuffer
from pystale.group import Group
from pystale.integrations.transfer_queue.batch import KeyBatch
from pystale.integrations.transfer_queue.framework import framework
from pystale.integrations.transfer_queue.rows import (
    READ_COLUMNS,
    is_own,
    mask_rows,
    name_of,
    new_name,
    rows_of,
    states_of,
    summarised,
)
from pystale.integrations.transfer_queue.service import Service
from pystale.masks import masks_of
from pystale.record import Record
from pystale.saving import Resumed
from pystale.staleness import StalenessRule, checked_int
from pystale.state import RolloutState, Status
from pystale.summary import names_of, read_rollouts, task_of
from pystale.take import Claim, claim_train_batch
from pystale.waiting import IN_EVENT_LOOP
from pystale.writing import write_arrival

__all__ = ["Taken", "Work"]

logger = logging.getLogger("pystale")

Name = tuple[str, Any]  # task and group_id
Found = dict[str, dict[str, Any]]  # rows by key


@dataclass(slots=True, eq=False)
class Taken:
    """A batch that is being trained."""

    train_step: int
    keys: list[str]
    claim: Claim


class Work:
    """What a store does, as coroutines for the loop of its service.

    Rows are written before the buffer hears of their group, and cleared after it has let go of it, on disk where it
    has a journal. So whatever the buffer has is in TransferQueue, unless TransferQueue has lost it; and what a crash
    leaves behind is in TransferQueue only, to be found by :meth:`resume`.
    """

    def __init__(
        self,
        rule: StalenessRule | Mapping[str, StalenessRule],
        partition_id: str,
        timeout: float,
        *,
        acknowledge: bool,
        keep_until_save: bool,
        settings: Mapping[str, Any],
    ) -> None:
        self.buffer = ReplayBuffer(rule, on_release=self._released, write_masks=False, **settings)
        self.operations = self.buffer.operations
        for module in ("ray", "torch", "tensordict", "transfer_queue"):
            framework(module)
        self.service = Service(partition_id, timeout)
        self._acknowledges = acknowledge
        self._keeps = keep_until_save
        self._id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._identity: tuple[str, ...] | None = None
        self._comparing = asyncio.Lock()
        self._writing: set[str] = set()  # names of puts that the buffer has not heard of
        self._lent: dict[Name, list[RolloutState]] = {}
        self._taken: deque[Taken] = deque()
        self._background: set[asyncio.Future[None]] = set()
        self._kept: dict[str, None] = {}  # keys to be cleared once a save is done

    # Letting go

    def _released(self, released: list[tuple[Any, dict[str, Any]]]) -> None:
        self._let_go(old[field] for _, old in released for field in ("response", "mm_info") if field in old)

    def _let_go(self, keys: Iterable[str]) -> None:
        if self._keeps:
            self._kept.update(dict.fromkeys(keys))
        else:
            self.service.clear_soon(keys)

    # Putting

    async def put(self, group: Sequence[Any], task_name: str, model_step: int | None, train_step: int | None) -> Status:
        self.buffer.rule(checked_task_name(task_name))
        if train_step is not None:
            train_step = checked_int("train_step", train_step, at_least=1)
        arriving = read_rollouts(group, task_name, model_step, train_step)
        for position, member in enumerate(arriving.members):
            if not member.versioned:
                raise ValueError(
                    f"member {position}: {member.tokens} response tokens have no model step; give "
                    "response_model_steps or model_step"
                )
        name = new_name(self._id, next(self._numbers))
        rows = rows_of(arriving, name)
        summaries = summarised(arriving, name)
        self._writing.add(name)
        try:
            await self.ready()
            await self.service.put(rows, {"task": task_name, "group": str(arriving.group_id)})
            status, effects = self.operations.put(summaries, task_name, None, train_step)
        except BaseException:
            self.service.clear_soon(rows.keys)
            raise
        finally:
            self._writing.discard(name)
        group_id = summaries[0].group_id
        before = self._lent.pop((task_name, group_id), None)
        try:
            await effects.finish(IN_EVENT_LOOP)
        finally:
            if before is not None:
                self._let_go(names_of(before))
        write_arrival(arriving, group_id, arriving.rerolls, train_step)
        return status

    # Handing out

    async def get(self, n: int, task_name: str, status: Any) -> list[Group]:
        await self.ready()
        while True:
            records = self.operations.claim(n, task_name, status)
            try:
                found = await self.service.get(_keys(records), READ_COLUMNS)
                if found is not None:
                    groups = [states_of(record.states, found) for record in records]
                    break
                lost = await self._lost(records)
            except BaseException:
                self.operations.give_back(records)
                raise
            self.operations.give_back(records)
            self._write_off(lost)
        for summaries, group in zip(self.operations.lend(records), groups, strict=True):
            self._lent[task_name, summaries[0].group_id] = summaries
            for summary, state in zip(summaries, group, strict=True):
                state.rerolls = summary.rerolls
        return groups

    def unget(self, groups: list[Group]) -> None:
        """Store groups again whose caller gave up and never got them."""
        names = [(task_name, gone) for group in groups for task_name, gone in self._lent if gone == group[0].group_id]
        for name in names:
            _, effects = self.operations.put(self._lent.pop(name), name[0], None, None)
            self._background.add(finishing := asyncio.ensure_future(effects.finish(IN_EVENT_LOOP)))
            finishing.add_done_callback(self._background.discard)

    async def take_keys(self, sizes: Sizes, train_step: int) -> tuple[KeyBatch, Taken]:
        claim, _ = await self._claim(sizes, train_step, fetch=False)
        batch, taken = await self._hand_over(claim, train_step)
        keys = {
            name: [[state.response for state in group if state.status is not Status.EXPIRED] for group in groups]
            for name, groups in batch.items()
        }
        tokens, left_out = batch.trainable_tokens_by_task, batch.left_out_by_task
        return KeyBatch(self.service.partition_id, keys, train_step, tokens, left_out, batch.straggler_s), taken

    async def take(self, sizes: Sizes, train_step: int) -> tuple[TrainBatch, Taken]:
        claim, groups = await self._claim(sizes, train_step, fetch=True)
        batch, taken = await self._hand_over(claim, train_step)
        states: dict[str, list[Group]] = {task_name: [] for task_name in batch}
        for record, group in zip(claim.records, groups, strict=True):
            # A summary keeps its place in its group; what had expired has no response, and is left out here.
            states[record.task.name].append([state for state in group if state.status is not Status.EXPIRED])
        result = TrainBatch(states, batch.trainable_tokens_by_task, batch.left_out_by_task)
        result.straggler_s = batch.straggler_s
        return result, taken

    def untake(self, result: tuple[Any, Taken]) -> None:
        """Store a batch again whose caller gave up and never got it."""
        _, taken = result
        if taken in self._taken:
            self._taken.remove(taken)
            taken.claim.take_back(taken.claim)

    async def _claim(self, sizes: Sizes, train_step: int, *, fetch: bool) -> tuple[Claim, list[Group]]:
        """A batch taken out of the buffer, whose masks are in TransferQueue, and its states if wanted.

        A claim that fails is taken back: nobody got its groups.
        """
        await self.ready()
        if self._acknowledges:
            self.acknowledge(checked_int("train_step", train_step, at_least=1) - 1)
        while True:
            claim = await claim_train_batch(self.operations, sizes, train_step, IN_EVENT_LOOP)
            try:
                masks = [masks_of(record, train_step).masks for record in claim.records]
                written, found = await asyncio.gather(
                    self.service.update(mask_rows(claim.records, masks)),
                    self.service.get(_keys(claim.records) if fetch else [], READ_COLUMNS),
                )
                if written and found is not None:
                    return claim, _masked(claim.records, masks, found) if fetch else []
                lost = await self._lost(claim.records)
            except BaseException:
                claim.take_back(claim)
                raise
            claim.take_back(claim)
            self._write_off(lost)

    async def _hand_over(self, claim: Claim, train_step: int) -> tuple[TrainBatch, Taken]:
        batch = await claim.hand_over(IN_EVENT_LOOP)
        taken = Taken(train_step, _keys(claim.records), claim)
        if claim.records:
            self._taken.append(taken)
        return batch, taken

    def acknowledge(self, train_step: int) -> None:
        """Clear the rows of what was taken up to a step, which has been trained."""
        for taken in [taken for taken in self._taken if taken.train_step <= train_step]:
            self._taken.remove(taken)
            self._let_go(taken.keys)

    async def acknowledged(self, train_step: int) -> None:
        self.acknowledge(checked_int("train_step", train_step, at_least=0))

    async def flush(self) -> None:
        await self.buffer.flush()
        await self.service.cleared()

    # What is not coming back

    async def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES)
        names, summaries = [], []
        for group in groups:
            task_name = task_of(group, self._lent)
            summaries.append(summarised(read_rollouts(group, task_name), None))
            names.append((task_name, group[0].group_id))
        self.operations.settle(summaries, outcome)
        await self._returned(names)

    async def reject(self, group: Sequence[Any], task_name: str, outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES[1:])
        arriving = read_rollouts(group, checked_task_name(task_name))
        effects = self.operations.reject(summarised(arriving, None), task_name, outcome)
        await effects.finish(IN_EVENT_LOOP)
        await self._returned([(task_name, arriving.group_id)])

    async def _returned(self, names: Iterable[Name]) -> None:
        gone = [self._lent.pop(name) for name in names if name in self._lent]
        await self.buffer.flush()
        for summaries in gone:
            self._let_go(names_of(summaries))

    # What TransferQueue has lost, and what is left there

    async def ready(self) -> None:
        """Connect where that is necessary; to a service that was started anew, compare what is there."""
        identity = await self.service.connected()
        if identity == self._identity:
            return
        async with self._comparing:
            if identity != self._identity:
                if self._identity is not None:
                    logger.warning("TransferQueue was started anew; comparing what it has with what is stored")
                    await self._compare(None)
                self._identity = identity

    async def _compare(self, listed: set[str] | None) -> None:
        """Write off groups whose rows are lost, and clear rows that belong to nothing.

        `listed` is what the partition holds, where that is known already.
        """
        with self.operations.lock:
            records = list(self.operations.store.records.values())
        # Rows are there before their group is stored: what was stored before the listing must be in it.
        stored = [(record, list(names_of(record.states))) for record in records]
        if listed is None:
            listed = await self.service.keys()
        self._write_off([record for record, keys in stored if not listed.issuperset(keys)])
        with self.operations.lock:
            records = [*self.operations.store.records.values(), *self.operations.store.claimed.values()]
        known = set(_keys(records)).union(*(names_of(group) for group in self._lent.values()), self._kept)
        known.update(key for taken in self._taken for key in taken.keys)
        orphans = [key for key in listed - known if is_own(key) and name_of(key) not in self._writing]
        if orphans:
            logger.warning("%d rows in TransferQueue belong to no group and are cleared", len(orphans))
            self.service.clear_soon(orphans)

    async def _lost(self, records: Sequence[Record]) -> list[Record]:
        """Which of these groups TransferQueue has no longer, at least one."""
        lost = [record for record in records if await self.service.get(_keys([record]), READ_COLUMNS) is None]
        if not lost:
            raise RuntimeError(
                f"TransferQueue gives the rows of {len(records)} groups one by one, but not together; try again"
            )
        return lost

    def _write_off(self, lost: Sequence[Record]) -> None:
        """Book stored groups as lost."""
        if lost:
            logger.error("the rows of %d groups are no longer in TransferQueue; they are booked as lost", len(lost))
        for record in lost:
            group = self.operations.get_group(record.task.name, record.group_id)
            if group is not None:  # it may have been taken out meanwhile
                self.operations.settle([group], "lost")
                self._let_go(names_of(group))

    # Checkpoints

    async def save(self, directory: str | os.PathLike[str], extra: Mapping[str, Any] | None) -> None:
        kept = list(self._kept)
        await self.buffer.save(directory, extra=extra)
        for key in kept:
            self._kept.pop(key, None)
        self.service.clear_soon(kept)

    async def resume(self, directory: str | os.PathLike[str] | None, undo_takes: bool) -> Resumed:
        if undo_takes and not self._keeps:
            raise ValueError(
                "undo_takes=True stores again what was taken since the checkpoint, and its rows were cleared; make "
                "the store with keep_until_save=True, in the run that is resumed too"
            )
        await self.ready()
        listed = await self.service.keys()
        resumed = await self.buffer.resume(directory, undo_takes=undo_takes)
        await self._compare(listed)
        return resumed


def _keys(records: Iterable[Record]) -> list[str]:
    """Keys of all rows of groups, each once."""
    return list(dict.fromkeys(names_of(state for record in records for state in record.states)))


def _masked(records: Sequence[Record], masks: Sequence[Sequence[Any]], found: Found) -> list[Group]:
    """States of groups with the masks they train with."""
    groups: list[Group] = []
    for record, of_record in zip(records, masks, strict=True):
        groups.append(states_of(record.states, found))
        for state, mask in zip(groups[-1], of_record, strict=True):
            if mask is not None:
                state.response_mask = mask
    return groups
