"""The buffer as producers and trainers see it: the methods of ReplayBuffer, wherever in the cluster they are called."""

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pystale.arguments import Sizes
from pystale.batch import TrainBatch
from pystale.buffer_report import BufferReport
from pystale.group import Group
from pystale.integrations.ray.actor import ReplayBufferActor, checked_settings
from pystale.integrations.ray.batch import BatchRefs
from pystale.integrations.ray.blocking import BlockingRayReplayBuffer
from pystale.integrations.ray.calls import IN_EVENT_LOOP
from pystale.integrations.ray.connection import Client, Methods
from pystale.integrations.ray.framework import ray_module
from pystale.integrations.ray.keeper import start_keepers
from pystale.reservations import Reservation
from pystale.staleness import StalenessRule
from pystale.state import Status

__all__ = ["RayReplayBuffer"]

Buffer = TypeVar("Buffer", bound="RayReplayBuffer")

# Thousands of producers may wait for room at once, and none of them may keep a take from coming in.
CALLS_AT_ONCE = 100_000


class RayReplayBuffer:
    """A replay buffer for a whole Ray cluster, with the methods of :class:`~pystale.ReplayBuffer`.

    Made by :meth:`start` in one process and :meth:`connect` in others; one that is sent to another process connects
    there. Tokens go to the keeper of the node, and from there to the trainer; the actor sees summaries.

    What differs from a buffer in the same process:

    - The states put are not those stored. They may be changed, or forgotten, once ``put`` has returned.
    - A put of a COMPLETED group waits while its task has ``max_groups`` of them, unless the group was in flight when a
      take began to wait for stragglers.
    - :meth:`take_train_batch` acknowledges the batches of earlier steps: their payloads are released. A trainer that is
      started again, and asks for a step whose batch it had taken before, gets the same batch.
    - :meth:`reserve` tells the actor, and does not wait for it. What a process has in flight is forgotten when nothing
      is heard of it for ``lease_s`` seconds, and told again to an actor that was started anew within a quarter of that.
    - :meth:`ledger`, :meth:`report`, :meth:`settle` and ``len()`` block, as they have to ask the actor.

    Parameters
    ----------
    actor : ActorHandle
        Of a :class:`ReplayBufferActor`.
    trainer : str, default "trainer"
        Name of the trainer, the same when it is started again; trainers that train different models have different
        ones.
    acknowledge : bool, default True
        False: only :meth:`acknowledge` does, for a trainer that goes back to its last checkpoint when it is killed, and
        wants the batches since then once more.
    """

    def __init__(self, actor: Any, *, trainer: str = "trainer", acknowledge: bool = True) -> None:
        self._client = Client(actor, trainer, acknowledge)
        self._methods = Methods(self._client, IN_EVENT_LOOP)
        self.sync = BlockingRayReplayBuffer(self._client)
        self._started: list[Any] = []
        self.order = self._client.order
        self.max_rerolls = self._client.max_rerolls
        self.group_mode, self.min_fresh = self._client.group_mode, self._client.min_fresh
        self.wait_for_stragglers = self._client.wait_for_stragglers
        self.straggler_timeout_s = self._client.straggler_timeout_s

    def __reduce__(self) -> Any:
        return _connected, (self._client.actor, self._client.trainer, self._client.acknowledge)

    @classmethod
    def start(
        cls: type[Buffer],
        rule: StalenessRule | Mapping[str, StalenessRule],
        *,
        directory: str | os.PathLike[str],
        name: str | None = None,
        namespace: str | None = None,
        lifetime: str | None = None,
        actor_options: Mapping[str, Any] | None = None,
        trainer: str = "trainer",
        acknowledge: bool = True,
        **settings: Any,
    ) -> Buffer:
        """Start the actor, and a keeper on every node that is alive now.

        Parameters
        ----------
        rule : StalenessRule or mapping of str to StalenessRule
        directory : path
            Where the actor keeps checkpoint and journal. What is there is resumed.
        name, namespace : str, optional
            For :meth:`connect`.
        lifetime : {None, "detached"}
            Detached, actor and keepers outlive the process that started them, until :meth:`shutdown`.
        actor_options : mapping, optional
            For the actor, such as ``num_cpus`` (1 by default). It is pinned to the node that calls, since the directory
            is there; give ``scheduling_strategy="DEFAULT"`` where every node has it.
        trainer, acknowledge
            See :class:`RayReplayBuffer`.
        **settings
            Of :class:`ReplayBufferActor`.

        Raises
        ------
        ImportError
            If Ray is not installed.
        TypeError, ValueError
            For a setting that is not allowed.
        """
        ray = ray_module()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        checked_settings(rule, settings)  # here, where the caller sees what is wrong
        namespace = namespace or ray.get_runtime_context().namespace
        prefix = name or f"pystale-{uuid.uuid4().hex[:12]}"
        keepers, started = start_keepers(prefix, namespace, lifetime)
        here = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 1,
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": CALLS_AT_ONCE,
            "lifetime": lifetime,
            "name": name,
            "namespace": namespace,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
            **(actor_options or {}),
        }
        actor = (
            ray.remote(ReplayBufferActor)
            .options(**options)
            # Keepers by name: a handle would be an object in the store, and the actor could not be started anew once
            # this process is gone.
            .remote(os.path.abspath(directory), keepers, namespace, rule, **settings)
        )
        buffer = cls(actor, trainer=trainer, acknowledge=acknowledge)
        buffer._started = started  # an actor that is not detached ends with the handle it was made with
        return buffer

    @classmethod
    def connect(
        cls: type[Buffer],
        name: str,
        namespace: str | None = None,
        *,
        trainer: str = "trainer",
        acknowledge: bool = True,
    ) -> Buffer:
        """A buffer that another process started under this name."""
        ray = ray_module()
        return cls(ray.get_actor(name, namespace), trainer=trainer, acknowledge=acknowledge)

    def shutdown(self) -> None:
        """End the actor and the keepers; all payloads are gone then. The directory stays."""
        import ray

        self.close_client()
        ray.kill(self._client.actor)
        for keeper in self._client.keepers.values():
            ray.kill(keeper)

    def close_client(self) -> None:
        """Leave: groups handed out to this process and not put back are stored again."""
        import ray

        if not self._client.closed:
            self._client.close()
            ray.get(self._client.actor.leave.remote(self._client.id))

    @property
    def actor(self) -> Any:
        """Handle of the actor."""
        return self._client.actor

    @property
    def client_id(self) -> str:
        """What the actor knows this process by."""
        return self._client.id

    @property
    def keepers(self) -> Mapping[str, Any]:
        """Handles of the keepers by node."""
        return self._client.keepers

    def rule(self, task_name: str = "default") -> StalenessRule:
        """See :meth:`ReplayBuffer.rule`."""
        return self._client.rule(task_name)

    def tail_batch_trigger_size(self, task_name: str = "default") -> int:
        """See :meth:`ReplayBuffer.tail_batch_trigger_size`."""
        self._client.rule(task_name)
        triggers = self._client.triggers
        return triggers if isinstance(triggers, int) else triggers.get(task_name, -1)

    async def put(
        self,
        group: Sequence[Any],
        task_name: str = "default",
        *,
        model_step: int | None = None,
        train_step: int | None = None,
    ) -> Status:
        """Store a group; see :meth:`ReplayBuffer.put`. Waits for room where there is a bound.

        Raises
        ------
        TypeError, ValueError
            As there, and for states that are not RolloutState, or that have tokens without a step.
        """
        return await self._methods.put(group, task_name, model_step, train_step)

    async def refresh_staleness(self, train_step: int, *, statuses: Iterable[Status] | None = None) -> dict[str, int]:
        """See :meth:`ReplayBuffer.refresh_staleness`."""
        moved: dict[str, int] = await self._methods.ask(
            "refresh", train_step, None if statuses is None else list(statuses)
        )
        return moved

    async def get(self, n: int, task_name: str = "default", status: Any = Status.COMPLETED) -> list[Group]:
        """Hand out groups for continuation; see :meth:`ReplayBuffer.get`.

        A process that is not heard of for ``lease_s`` seconds has its groups stored again, as they were.
        """
        return await self._methods.get(n, task_name, status)

    async def take_refs(self, sizes: Sizes, *, train_step: int) -> BatchRefs:
        """Take a batch and leave its tokens where they are; :meth:`fetch` brings them."""
        return await self._methods.take_refs(sizes, train_step)

    async def fetch(self, batch: BatchRefs, rank: int = 0, world_size: int = 1) -> TrainBatch:
        """Bring the tokens of a batch, or of the share of a rank, and write the effective masks.

        Raises
        ------
        PayloadsLost
            If they are gone.
        """
        return await self._methods.fetch(batch, rank, world_size)

    async def take_train_batch(self, sizes: Sizes, *, train_step: int) -> TrainBatch:
        """Take a batch for training, tokens and masks; see :meth:`ReplayBuffer.take_train_batch`."""
        return await self._methods.fetch(await self._methods.take_refs(sizes, train_step))

    async def acknowledge(self, train_step: int) -> None:
        """The batches up to a step are trained for good: their payloads are released."""
        await self._methods.acknowledge(train_step)

    async def unacknowledged(self) -> list[int]:
        """Steps of the batches that this trainer, or an earlier process of it, took and has not acknowledged."""
        steps: list[int] = await self._methods.ask("unacknowledged", self._client.trainer)
        return steps

    async def wait_ready(self, sizes: Sizes, *, timeout: float | None = None) -> bool:
        """See :meth:`ReplayBuffer.wait_ready`."""
        ready: bool = await self._methods.ask("wait_ready", dict(sizes), timeout)
        return ready

    async def is_ready(self, sizes: Sizes) -> bool:
        """See :meth:`ReplayBuffer.is_ready`."""
        ready: bool = await self._methods.ask("is_ready", dict(sizes))
        return ready

    async def count(self, task_name: str = "default", status: Any = Status.COMPLETED) -> int:
        """See :meth:`ReplayBuffer.count`."""
        n: int = await self._methods.ask("count", task_name, status)
        return n

    async def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Status, int]]:
        """See :meth:`ReplayBuffer.count_statuses`."""
        counts: dict[str, dict[Status, int]] = await self._methods.ask(
            "count_statuses", list(task_names), list(statuses)
        )
        return counts

    async def reject(self, group: Sequence[Any], task_name: str = "default", outcome: str = "failed") -> None:
        """Count a group that is not put; see :meth:`ReplayBuffer.reject`. Its fields stay as they are."""
        await self._methods.reject(group, task_name, outcome)

    def reserve(self, group_id: Any, task_name: str = "default", *, model_step: int) -> Reservation:
        """Say that a group is in flight; see :meth:`ReplayBuffer.reserve`. Does not wait for the actor.

        So a group that is stored, or that another process has in flight, is not refused; the actor ignores it.

        Raises
        ------
        TypeError, ValueError
            For a group that this process has in flight already, a task without a rule, or a group without an id where
            ``max_groups`` bounds its task.
        """
        return self._client.reserve(group_id, task_name, model_step)

    async def stragglers(self, sizes: Sizes, *, train_step: int) -> list[Reservation]:
        """See :meth:`ReplayBuffer.stragglers`; also of other processes, which alone can release what is theirs."""
        return await self._methods.stragglers(sizes, train_step)

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`ReplayBuffer.settle`."""
        self.sync.settle(groups, outcome)

    def ledger(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.ledger`."""
        return self.sync.ledger()

    def report(self) -> BufferReport:
        """See :meth:`ReplayBuffer.report`."""
        return self.sync.report()

    async def save(self, *, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint to the actor's directory; `extra` is kept with it and with later ones."""
        await self._methods.ask("save", None if extra is None else dict(extra))

    async def extra(self) -> dict[str, Any]:
        """What the last :meth:`save` was given to keep."""
        extra: dict[str, Any] = await self._methods.ask("extra")
        return extra

    async def flush(self) -> None:
        """See :meth:`ReplayBuffer.flush`."""
        await self._methods.ask("flush")

    async def close(self) -> None:
        """As :meth:`close_client`; the actor goes on for others."""
        if not self._client.closed:
            self._client.close()
            await self._methods.ask("leave", self._client.id)

    def __len__(self) -> int:
        return len(self.sync)


def _connected(actor: Any, trainer: str, acknowledge: bool) -> RayReplayBuffer:
    return RayReplayBuffer(actor, trainer=trainer, acknowledge=acknowledge)
