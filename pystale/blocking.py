"""The buffer's operations for code without an event loop."""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pystale.arguments import Sizes
from pystale.batch import TrainBatch
from pystale.group import Group
from pystale.saving import Resumed
from pystale.state import Status

if TYPE_CHECKING:
    from pystale.buffer import ReplayBuffer

__all__ = ["BlockingReplayBuffer"]


class BlockingReplayBuffer:
    """The operations of a :class:`ReplayBuffer` as plain blocking calls; its attribute ``sync``.

    Same names, arguments, results and errors. For code without an event loop, or in a thread beside one.
    """

    def __init__(self, buffer: "ReplayBuffer") -> None:
        self._buffer = buffer

    def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """See :meth:`ReplayBuffer.put`."""
        status, effects = self._buffer._put(group, task_name, model_step, train_step)
        self._buffer._finish_blocking(effects)
        return status

    def refresh_staleness(self, train_step: int, *, statuses: Iterable[Any] | None = None) -> dict[str, int]:
        """See :meth:`ReplayBuffer.refresh_staleness`."""
        moved, effects = self._buffer._refresh(train_step, statuses)
        self._buffer._finish_blocking(effects)
        return moved

    def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """See :meth:`ReplayBuffer.get`."""
        return self._buffer._get(n, task_name, status)

    def take_batch(self, sizes: Sizes, *, status: Any = Status.COMPLETED) -> TrainBatch:
        """See :meth:`ReplayBuffer.take_batch`."""
        return self._buffer._hand_over_blocking(self._buffer._claim_batch(sizes, status))

    def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """See :meth:`ReplayBuffer.take_train_batch`."""
        while True:
            claim, effects = self._buffer._claim_train_batch(sizes, train_step)
            if claim is not None:
                return self._buffer._hand_over_blocking(claim)
            self._buffer._finish_blocking(effects)

    def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """See :meth:`ReplayBuffer.wait_ready`."""
        ready = threading.Event()
        waiter = self._buffer._enlist(sizes, timeout, ready.set)
        if waiter is None:
            return True
        try:
            # A longer wait overflows the clock.
            return ready.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self._buffer._dismiss(waiter)

    def is_ready(self, sizes: Sizes) -> bool:
        """See :meth:`ReplayBuffer.is_ready`."""
        return self._buffer._is_ready(sizes)

    def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """See :meth:`ReplayBuffer.count`."""
        return self._buffer._count(task_name, status)

    def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """See :meth:`ReplayBuffer.count_statuses`."""
        return self._buffer._count_statuses(task_names, statuses)

    def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """See :meth:`ReplayBuffer.reject`."""
        self._buffer._finish_blocking(self._buffer._reject(group, task_name, outcome))

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`ReplayBuffer.settle`."""
        self._buffer.settle(groups, outcome)
        self._buffer._flush()

    def ledger(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.ledger`."""
        return self._buffer.ledger()

    def save(self, directory: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
        """See :meth:`ReplayBuffer.save`."""
        self._buffer._run_save(self._buffer._start_save(directory, extra))

    def resume(self, directory: str | os.PathLike[str] | None, *, undo_takes: bool = False) -> Resumed:
        """See :meth:`ReplayBuffer.resume`."""
        return self._buffer._resume(directory, undo_takes)

    def flush(self) -> None:
        """See :meth:`ReplayBuffer.flush`."""
        self._buffer._flush()

    def close(self) -> None:
        """See :meth:`ReplayBuffer.close`."""
        self._buffer._close()

    def __len__(self) -> int:
        return len(self._buffer)
