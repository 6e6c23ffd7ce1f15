"""A replay buffer whose payloads are in TransferQueue."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pystale.arguments import Sizes
from pystale.batch import TrainBatch
from pystale.buffer_report import BufferReport
from pystale.group import Group
from pystale.integrations.transfer_queue.batch import KeyBatch
from pystale.integrations.transfer_queue.service import Service
from pystale.integrations.transfer_queue.work import Work
from pystale.policy import GroupMode, Order
from pystale.reservations import Reservation
from pystale.saving import Resumed
from pystale.staleness import StalenessRule
from pystale.state import Status
from pystale.waiting import IN_EVENT_LOOP

__all__ = ["BlockingTransferQueueStore", "TransferQueueStore"]


class TransferQueueStore:
    """A replay buffer with the methods of :class:`~pystale.ReplayBuffer`, whose payloads are in TransferQueue.

    The buffer holds summaries: of every rollout its status, and its versions and semantic mask as runs. Tokens, masks,
    log-probabilities and all else are rows of TransferQueue, see :mod:`pystale.integrations.transfer_queue.rows`. Every
    decision, the account and the journal are those of the buffer. It belongs to one process, whose tasks and threads
    share it; TransferQueue may be on any node of its Ray cluster.

    What differs from a buffer that holds the rollouts:

    - The states put are not those stored. They may be changed, or forgotten, once ``put`` has returned. States that are
      handed out are new objects with the same ids, whose per-token fields are arrays; log-probabilities are float32.
    - Every response token needs a model step.
    - :meth:`take_train_batch` writes the effective masks to the rows, too, and :meth:`take_keys` hands out nothing but
      the keys, for trainers whose ranks read TransferQueue themselves.
    - Rows are cleared after the buffer has let go of them: when a member is reset or a group discarded, settled or
      rejected, and for a batch when it is acknowledged.
    - A call that TransferQueue does not answer raises :class:`TransferQueueGone`, and has not happened. The next one
      connects again. To a service that was started anew, it compares what is there: groups whose rows are lost are
      booked as ``lost``, and never handed out.

    Parameters
    ----------
    rule : StalenessRule or mapping of str to StalenessRule
    partition_id : str, default "pystale"
        Partition of TransferQueue, of which this store is the only one.
    timeout : float, default 20.0
        Seconds that an operation of TransferQueue may take.
    acknowledge : bool, default True
        Taking a batch for a step clears the rows of what was taken for earlier ones. False: only :meth:`acknowledge`
        does.
    keep_until_save : bool, default False
        Clear nothing before the next :meth:`save` is done. For a trainer that goes back to its last checkpoint, and
        resumes with ``undo_takes``: TransferQueue has what was taken since then still.
    order, tail_batch_trigger_size, max_rerolls, group_mode, min_fresh, wait_for_stragglers, straggler_timeout_s, \
    journal, journal_delay
        See :class:`~pystale.ReplayBuffer`.

    Raises
    ------
    ImportError
        If Ray, torch or TransferQueue is not installed.
    TypeError, ValueError
        For a setting that is not allowed.
    """

    def __init__(
        self,
        rule: StalenessRule | Mapping[str, StalenessRule],
        *,
        partition_id: str = "pystale",
        timeout: float = 20.0,
        acknowledge: bool = True,
        keep_until_save: bool = False,
        order: str | Order = Order.STALEST_FIRST,
        tail_batch_trigger_size: int | Mapping[str, int] = -1,
        max_rerolls: int | None = None,
        group_mode: str | GroupMode = GroupMode.ALL,
        min_fresh: int = 1,
        wait_for_stragglers: bool = False,
        straggler_timeout_s: float = 600.0,
        journal: str | os.PathLike[str] | None = None,
        journal_delay: float = 0.005,
    ) -> None:
        if not isinstance(partition_id, str):
            raise TypeError(f"partition_id must be a str, got {type(partition_id).__name__} {partition_id!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout must be a number of seconds, got {type(timeout).__name__} {timeout!r}")
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be more than 0 seconds and finite, got {timeout}")
        self._work = Work(
            rule,
            partition_id,
            float(timeout),
            acknowledge=acknowledge,
            keep_until_save=keep_until_save,
            settings={
                "order": order,
                "tail_batch_trigger_size": tail_batch_trigger_size,
                "max_rerolls": max_rerolls,
                "group_mode": group_mode,
                "min_fresh": min_fresh,
                "wait_for_stragglers": wait_for_stragglers,
                "straggler_timeout_s": straggler_timeout_s,
                "journal": journal,
                "journal_delay": journal_delay,
            },
        )
        self._service: Service = self._work.service
        self._buffer = self._work.buffer
        self.sync = BlockingTransferQueueStore(self._work)
        self.partition_id = partition_id
        self.order = self._buffer.order
        self.max_rerolls = max_rerolls
        self.group_mode, self.min_fresh = self._buffer.group_mode, self._buffer.min_fresh
        self.wait_for_stragglers = wait_for_stragglers
        self.straggler_timeout_s = self._buffer.straggler_timeout_s

    # Settings

    def rule(self, task_name: str = "default") -> StalenessRule:
        """See :meth:`ReplayBuffer.rule`."""
        return self._buffer.rule(task_name)

    def tail_batch_trigger_size(self, task_name: str = "default") -> int:
        """See :meth:`ReplayBuffer.tail_batch_trigger_size`."""
        return self._buffer.tail_batch_trigger_size(task_name)

    # Operations

    async def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """Write a group to TransferQueue, and store its summary; see :meth:`ReplayBuffer.put`.

        Raises
        ------
        TransferQueueGone
            If TransferQueue does not answer; the group is not stored then.
        TypeError, ValueError
            As for the buffer, and for a value that rows cannot hold, naming the field.
        """
        return await self._service.run(self._work.put(group, task_name, model_step, train_step))

    async def refresh_staleness(self, train_step: int, *, statuses: Iterable[Status] | None = None) -> dict[str, int]:
        """See :meth:`ReplayBuffer.refresh_staleness`. Needs nothing of TransferQueue; rows are cleared afterwards."""
        return await self._service.run(self._buffer.refresh_staleness(train_step, statuses=statuses))

    async def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """Hand out up to `n` groups of a pool for continuation or re-rollout, with their payloads.

        Raises
        ------
        TransferQueueGone
            If TransferQueue does not answer; nothing is handed out then.
        """
        return await self._service.run(self._work.get(n, task_name, status), self._work.unget)

    async def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """Take a batch with its payloads; see :meth:`ReplayBuffer.take_train_batch`.

        Raises
        ------
        TransferQueueGone
            If TransferQueue does not answer; nothing is taken then.
        """
        return (await self._service.run(self._work.take(sizes, train_step), self._work.untake))[0]

    async def take_keys(self, sizes: Sizes, *, train_step: int) -> KeyBatch:
        """Take a batch and leave its payloads where they are; its effective masks are there, too.

        Returns
        -------
        KeyBatch
            Empty when a task is short. Its rows are there until it is acknowledged.

        Raises
        ------
        TransferQueueGone
            If TransferQueue does not answer; nothing is taken then.
        """
        return (await self._service.run(self._work.take_keys(sizes, train_step), self._work.untake))[0]

    async def acknowledge(self, train_step: int) -> None:
        """Clear the rows of the batches taken up to `train_step`: they have been trained."""
        await self._service.run(self._work.acknowledged(train_step))

    async def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """See :meth:`ReplayBuffer.wait_ready`."""
        return await self._buffer.wait_ready(sizes, timeout=timeout)

    async def is_ready(self, sizes: Sizes) -> bool:
        """See :meth:`ReplayBuffer.is_ready`."""
        return await self._buffer.is_ready(sizes)

    async def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """See :meth:`ReplayBuffer.count`."""
        return await self._buffer.count(task_name, status)

    async def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """See :meth:`ReplayBuffer.count_statuses`."""
        return await self._buffer.count_statuses(task_names, statuses)

    async def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """Count a group that is not put, and clear its rows if it was handed out; its states are left alone."""
        await self._service.run(self._work.reject(group, task_name, outcome))

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`ReplayBuffer.settle`. Their rows are cleared. Waits for the journal, if there is one."""
        self.sync.settle(groups, outcome)

    def report(self) -> BufferReport:
        """See :meth:`ReplayBuffer.report`."""
        return self._buffer.report()

    def reserve(self, group_id: Any, task_name: str = "default", *, model_step: int) -> Reservation:
        """See :meth:`ReplayBuffer.reserve`."""
        return self._buffer.reserve(group_id, task_name, model_step=model_step)

    async def stragglers(self, sizes: Sizes, *, train_step: int) -> list[Reservation]:
        """See :meth:`ReplayBuffer.stragglers`."""
        return await self._buffer.stragglers(sizes, train_step=train_step)

    def ledger(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.ledger`."""
        return self._buffer.ledger()

    async def save(self, directory: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
        """Write the summaries, their order and the account; see :meth:`ReplayBuffer.save`.

        Payloads stay in TransferQueue, which keeps them in memory.
        """
        await self._service.run(self._work.save(directory, extra))

    async def resume(self, directory: str | os.PathLike[str] | None, *, undo_takes: bool = False) -> Resumed:
        """Load what :meth:`save` wrote, and compare it with what TransferQueue has; see :meth:`ReplayBuffer.resume`.

        Groups whose rows are lost are booked as ``lost``; rows of this partition that belong to no group are cleared.

        Raises
        ------
        TransferQueueGone
            If TransferQueue does not answer; nothing is loaded then.
        ValueError
            As for the buffer, and for ``undo_takes`` without ``keep_until_save``.
        """
        return await self._service.run(self._work.resume(directory, undo_takes))

    async def flush(self) -> None:
        """Return once all done so far is in the journal, and what was to be cleared has been."""
        await self._service.run(self._work.flush())

    async def close(self) -> None:
        """Write the journal to its end, and disconnect. Rows stay; only `resume` finds them again."""
        await self._buffer.close()
        await IN_EVENT_LOOP.computed(self._service.close, lambda: None)

    def __len__(self) -> int:
        return len(self._buffer)


class BlockingTransferQueueStore:
    """The operations of a :class:`TransferQueueStore` as plain blocking calls; its attribute ``sync``.

    Same names, arguments, results and errors.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._service = work.service
        self._buffer = work.buffer

    def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """See :meth:`TransferQueueStore.put`."""
        return self._service.wait(self._work.put(group, task_name, model_step, train_step))

    def refresh_staleness(self, train_step: int, *, statuses: Iterable[Status] | None = None) -> dict[str, int]:
        """See :meth:`TransferQueueStore.refresh_staleness`."""
        return self._service.wait(self._buffer.refresh_staleness(train_step, statuses=statuses))

    def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """See :meth:`TransferQueueStore.get`."""
        return self._service.wait(self._work.get(n, task_name, status))

    def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """See :meth:`TransferQueueStore.take_train_batch`."""
        return self._service.wait(self._work.take(sizes, train_step))[0]

    def take_keys(self, sizes: Sizes, *, train_step: int) -> KeyBatch:
        """See :meth:`TransferQueueStore.take_keys`."""
        return self._service.wait(self._work.take_keys(sizes, train_step))[0]

    def acknowledge(self, train_step: int) -> None:
        """See :meth:`TransferQueueStore.acknowledge`."""
        self._service.wait(self._work.acknowledged(train_step))

    def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """See :meth:`TransferQueueStore.wait_ready`."""
        return self._buffer.sync.wait_ready(sizes, timeout=timeout)

    def is_ready(self, sizes: Sizes) -> bool:
        """See :meth:`TransferQueueStore.is_ready`."""
        return self._buffer.sync.is_ready(sizes)

    def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """See :meth:`TransferQueueStore.count`."""
        return self._buffer.sync.count(task_name, status)

    def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """See :meth:`TransferQueueStore.count_statuses`."""
        return self._buffer.sync.count_statuses(task_names, statuses)

    def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """See :meth:`TransferQueueStore.reject`."""
        self._service.wait(self._work.reject(group, task_name, outcome))

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`TransferQueueStore.settle`."""
        self._service.wait(self._work.settle(groups, outcome))

    def report(self) -> BufferReport:
        """See :meth:`TransferQueueStore.report`."""
        return self._buffer.report()

    def reserve(self, group_id: Any, task_name: str = "default", *, model_step: int) -> Reservation:
        """See :meth:`TransferQueueStore.reserve`."""
        return self._buffer.reserve(group_id, task_name, model_step=model_step)

    def stragglers(self, sizes: Sizes, *, train_step: int) -> list[Reservation]:
        """See :meth:`TransferQueueStore.stragglers`."""
        return self._buffer.sync.stragglers(sizes, train_step=train_step)

    def ledger(self) -> dict[str, Any]:
        """See :meth:`TransferQueueStore.ledger`."""
        return self._buffer.ledger()

    def save(self, directory: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
        """See :meth:`TransferQueueStore.save`."""
        self._service.wait(self._work.save(directory, extra))

    def resume(self, directory: str | os.PathLike[str] | None, *, undo_takes: bool = False) -> Resumed:
        """See :meth:`TransferQueueStore.resume`."""
        return self._service.wait(self._work.resume(directory, undo_takes))

    def flush(self) -> None:
        """See :meth:`TransferQueueStore.flush`."""
        self._service.wait(self._work.flush())

    def close(self) -> None:
        """See :meth:`TransferQueueStore.close`."""
        self._buffer.sync.close()
        self._service.close()

    def __len__(self) -> int:
        return len(self._buffer)
