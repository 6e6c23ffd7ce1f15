"""The blocking face of the buffer on a cluster."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pystale.arguments import Sizes
from pystale.batch import TrainBatch
from pystale.buffer_report import BufferReport
from pystale.group import Group
from pystale.integrations.ray.batch import BatchRefs
from pystale.integrations.ray.calls import ON_THREAD
from pystale.integrations.ray.connection import Client, Methods
from pystale.reservations import Reservation
from pystale.state import Status
from pystale.waiting import finished

__all__ = ["BlockingRayReplayBuffer"]


class BlockingRayReplayBuffer:
    """The operations of a :class:`RayReplayBuffer` as plain blocking calls; its attribute ``sync``."""

    def __init__(self, client: Client) -> None:
        self._methods = Methods(client, ON_THREAD)

    def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """See :meth:`RayReplayBuffer.put`."""
        return finished(self._methods.put(group, task_name, model_step, train_step))

    def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """See :meth:`RayReplayBuffer.get`."""
        return finished(self._methods.get(n, task_name, status))

    def refresh_staleness(self, train_step: int, *, statuses: Iterable[Status] | None = None) -> dict[str, int]:
        """See :meth:`RayReplayBuffer.refresh_staleness`."""
        asked = self._methods.ask("refresh", train_step, None if statuses is None else list(statuses))
        moved: dict[str, int] = finished(asked)
        return moved

    def take_refs(self, sizes: Sizes, *, train_step: int) -> BatchRefs:
        """See :meth:`RayReplayBuffer.take_refs`."""
        return finished(self._methods.take_refs(sizes, train_step))

    def fetch(self, batch: BatchRefs, rank: int = 0, world_size: int = 1) -> TrainBatch:
        """See :meth:`RayReplayBuffer.fetch`."""
        return finished(self._methods.fetch(batch, rank, world_size))

    def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """See :meth:`RayReplayBuffer.take_train_batch`."""
        return self.fetch(self.take_refs(sizes, train_step=train_step))

    def acknowledge(self, train_step: int) -> None:
        """See :meth:`RayReplayBuffer.acknowledge`."""
        finished(self._methods.acknowledge(train_step))

    def unacknowledged(self) -> list[int]:
        """See :meth:`RayReplayBuffer.unacknowledged`."""
        steps: list[int] = finished(self._methods.ask("unacknowledged", self._methods.client.trainer))
        return steps

    def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """See :meth:`RayReplayBuffer.wait_ready`."""
        ready: bool = finished(self._methods.ask("wait_ready", dict(sizes), timeout))
        return ready

    def is_ready(self, sizes: Sizes) -> bool:
        """See :meth:`RayReplayBuffer.is_ready`."""
        ready: bool = finished(self._methods.ask("is_ready", dict(sizes)))
        return ready

    def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """See :meth:`RayReplayBuffer.count`."""
        n: int = finished(self._methods.ask("count", task_name, status))
        return n

    def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """See :meth:`RayReplayBuffer.reject`."""
        finished(self._methods.reject(group, task_name, outcome))

    def reserve(self, group_id: Any, task_name: str = "default", *, model_step: int) -> Reservation:
        """See :meth:`RayReplayBuffer.reserve`."""
        return self._methods.client.reserve(group_id, task_name, model_step)

    def stragglers(self, sizes: Sizes, *, train_step: int) -> list[Reservation]:
        """See :meth:`RayReplayBuffer.stragglers`."""
        return finished(self._methods.stragglers(sizes, train_step))

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`RayReplayBuffer.settle`."""
        finished(self._methods.settle(groups, outcome))

    def ledger(self) -> dict[str, Any]:
        """See :meth:`RayReplayBuffer.ledger`."""
        account: dict[str, Any] = finished(self._methods.ask("ledger"))
        return account

    def report(self) -> BufferReport:
        """See :meth:`RayReplayBuffer.report`."""
        report: BufferReport = finished(self._methods.ask("buffer_report"))
        return report

    def save(self, *, extra: Mapping[str, Any] | None = None) -> None:
        """See :meth:`RayReplayBuffer.save`."""
        finished(self._methods.ask("save", None if extra is None else dict(extra)))

    def __len__(self) -> int:
        size: int = finished(self._methods.ask("size"))
        return size
