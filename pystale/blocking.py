"""The buffer's face for code without an event loop."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pystale.arguments import Sizes
from pystale.batch import TrainBatch
from pystale.buffer_report import BufferReport
from pystale.effects import flush
from pystale.group import Group
from pystale.operations import Operations
from pystale.readiness import wait_ready
from pystale.reservations import Reservation
from pystale.saving import Resumed
from pystale.state import Status
from pystale.take import claim_train_batch
from pystale.waiting import ON_THREAD, finished

__all__ = ["BlockingReplayBuffer"]


class BlockingReplayBuffer:
    """The operations of a :class:`ReplayBuffer` as plain blocking calls; its attribute ``sync``.

    Same names, arguments, results and errors. For code without an event loop, or in a thread beside one.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """See :meth:`ReplayBuffer.put`."""
        status, effects = self._operations.put(group, task_name, model_step, train_step)
        finished(effects.finish(ON_THREAD))
        return status

    def refresh_staleness(self, train_step: int, *, statuses: Iterable[Any] | None = None) -> dict[str, int]:
        """See :meth:`ReplayBuffer.refresh_staleness`."""
        moved, effects = self._operations.refresh(train_step, statuses)
        finished(effects.finish(ON_THREAD))
        return moved

    def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """See :meth:`ReplayBuffer.get`."""
        return self._operations.get(n, task_name, status)

    def take_batch(self, sizes: Sizes, *, status: Any = Status.COMPLETED) -> TrainBatch:
        """See :meth:`ReplayBuffer.take_batch`."""
        return finished(self._operations.claim_batch(sizes, status).hand_over(ON_THREAD))

    def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """See :meth:`ReplayBuffer.take_train_batch`."""
        claim = finished(claim_train_batch(self._operations, sizes, train_step, ON_THREAD))
        return finished(claim.hand_over(ON_THREAD))

    def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """See :meth:`ReplayBuffer.wait_ready`."""
        return finished(wait_ready(self._operations, sizes, timeout, ON_THREAD))

    def is_ready(self, sizes: Sizes) -> bool:
        """See :meth:`ReplayBuffer.is_ready`."""
        return self._operations.is_ready(sizes)

    def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """See :meth:`ReplayBuffer.count`."""
        return self._operations.count(task_name, status)

    def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """See :meth:`ReplayBuffer.count_statuses`."""
        return self._operations.count_statuses(task_names, statuses)

    def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """See :meth:`ReplayBuffer.reject`."""
        finished(self._operations.reject(group, task_name, outcome).finish(ON_THREAD))

    def reserve(self, group_id: Any, task_name: str = "default", *, model_step: int) -> Reservation:
        """See :meth:`ReplayBuffer.reserve`."""
        return self._operations.in_flight.reserve(group_id, task_name, model_step)

    def stragglers(self, sizes: Sizes, *, train_step: int) -> list[Reservation]:
        """See :meth:`ReplayBuffer.stragglers`."""
        return self._operations.stragglers(sizes, train_step)

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`ReplayBuffer.settle`."""
        self._operations.settle(groups, outcome)
        finished(flush(self._operations.journal, ON_THREAD))

    def ledger(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.ledger`."""
        return self._operations.ledger()

    def report(self) -> BufferReport:
        """See :meth:`ReplayBuffer.report`."""
        return self._operations.report()

    def save(self, directory: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
        """See :meth:`ReplayBuffer.save`."""
        self._operations.run_save(self._operations.start_save(directory, extra))

    def resume(self, directory: str | os.PathLike[str] | None, *, undo_takes: bool = False) -> Resumed:
        """See :meth:`ReplayBuffer.resume`."""
        return self._operations.resume(directory, undo_takes, lambda: False)

    def flush(self) -> None:
        """See :meth:`ReplayBuffer.flush`."""
        finished(flush(self._operations.journal, ON_THREAD))
        self._operations.flush_trace()

    def close(self) -> None:
        """See :meth:`ReplayBuffer.close`."""
        self._operations.close()

    def __len__(self) -> int:
        return len(self._operations)
