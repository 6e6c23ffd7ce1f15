"""The demo's buffer on Ray: the same run, with an actor where the buffer was."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from pystale.demo.record import Record
from pystale.demo.settings import TASK
from pystale.integrations.ray import RayReplayBuffer
from pystale.staleness import StalenessRule
from pystale.state import Status

__all__ = ["DemoBuffer", "start_on_ray"]


class DemoBuffer(RayReplayBuffer):
    """A buffer that tells the record what has expired, and ends with the run."""

    record: Record
    directory: str
    owns_cluster: bool

    async def refresh_staleness(self, train_step: int, *, statuses: Iterable[Status] | None = None) -> dict[str, int]:
        moved = await super().refresh_staleness(train_step, statuses=statuses)
        self.record.groups_expired += moved.get(TASK, 0)
        return moved

    async def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        status = await super().put(group, task_name, model_step=model_step, train_step=train_step)
        self.record.groups_expired += status is Status.EXPIRED
        return status

    async def close(self) -> None:
        import ray

        await super().close()
        self.shutdown()
        if self.owns_cluster:
            ray.shutdown()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_on_ray(record: Record, rule: StalenessRule, tail_batch_trigger_size: int) -> DemoBuffer:
    """Start the demo's buffer on the cluster that RAY_ADDRESS names, or on a new one."""
    import ray

    owns_cluster = not ray.is_initialized()
    if owns_cluster:
        address = os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
        ray.init(logging_level=logging.WARNING, log_to_driver=False, **options)
    directory = tempfile.mkdtemp(prefix="pystale-demo-")
    buffer = DemoBuffer.start(
        rule,
        directory=directory,
        tail_batch_trigger_size=tail_batch_trigger_size,
        actor_options={"num_cpus": 0},
    )
    buffer.record, buffer.directory, buffer.owns_cluster = record, directory, owns_cluster
    return buffer
