"""The buffer as producers and trainers see it: the methods of ReplayBuffer, wherever in the cluster they are called."""

import asyncio
import itertools
import os
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from pystale.arguments import OUTCOMES, Sizes, checked_outcome, checked_sizes, checked_task_name
from pystale.batch import TrainBatch
from pystale.group import Arriving, Group, read_group
from pystale.integrations.ray.actor import ReplayBufferActor, checked_settings
from pystale.integrations.ray.batch import BatchRefs, GroupRefs
from pystale.integrations.ray.bookings import Call
from pystale.integrations.ray.calls import IN_EVENT_LOOP, ON_THREAD, Answers, Together
from pystale.integrations.ray.keeper import PayloadKeeper, PayloadsLost
from pystale.staleness import StalenessRule, checked_int
from pystale.state import RolloutState, Status
from pystale.summary import assembled, payloads_of, summaries_of
from pystale.waiting import finished
from pystale.writing import write_arrival

__all__ = ["BlockingRayReplayBuffer", "RayReplayBuffer"]

Buffer = TypeVar("Buffer", bound="RayReplayBuffer")

# Thousands of producers may wait for room at once, and none of them may keep a take from coming in.
CALLS_AT_ONCE = 100_000


def keeper_of(node_id: str) -> str:
    """Name of the keeper of a node: short, since every payload is named after it."""
    return node_id[:12]


class _Client:
    """The connection of a process: its id, its calls, and what was handed out to it."""

    def __init__(self, actor: Any, trainer: str, acknowledge: bool) -> None:
        import ray

        self.actor = actor
        self.trainer = trainer
        self.acknowledge = acknowledge
        self.id = uuid.uuid4().hex[:16]
        settings = ray.get(actor.settings.remote())
        self.rules: StalenessRule | Mapping[str, StalenessRule] = settings["rule"]
        self.triggers: int | Mapping[str, int] = settings["tail_batch_trigger_size"]
        self.order = settings["order"]
        self.max_rerolls: int | None = settings["max_rerolls"]
        self.keepers: dict[str, Any] = settings["keepers"]
        here = keeper_of(ray.get_runtime_context().get_node_id())
        # A node that came later has none; any other does, and then payloads cross the network once more.
        self.keeper = here if here in self.keepers else min(self.keepers)
        self.leases: dict[tuple[str, Any], str] = {}
        self.together: WeakKeyDictionary[Any, tuple[Together, Together]] = WeakKeyDictionary()  # by event loop
        self._numbers = itertools.count()
        self._open: dict[int, None] = {}
        self._lock = threading.Lock()
        self._lease_s: float = settings["lease_s"]
        self._beating = threading.Event()
        self._closed = threading.Event()

    def begin(self) -> Call:
        with self._lock:
            number = next(self._numbers)
            self._open[number] = None
            return Call(self.id, number, next(iter(self._open)))

    def end(self, call: Call) -> None:
        with self._lock:
            self._open.pop(call.number, None)

    def rule(self, task_name: str) -> StalenessRule:
        rule = self.rules if isinstance(self.rules, StalenessRule) else self.rules.get(task_name)
        if rule is None:
            known = ", ".join(sorted(self.rules))  # type: ignore[arg-type]
            raise ValueError(f"task {task_name!r} has no rule; tasks with one are: {known}")
        return rule

    def lend(self, name: tuple[str, Any], lease: str) -> None:
        """A group is in this process now, which has to be heard of until it is back."""
        self.leases[name] = lease
        if not self._beating.is_set():
            self._beating.set()
            threading.Thread(target=self._beat, name="pystale-ray-client", daemon=True).start()

    def _beat(self) -> None:
        import ray

        while not self._closed.wait(self._lease_s / 4):
            if self.leases and ray.is_initialized():
                self.actor.heard.remote(self.id)

    def close(self) -> None:
        self._closed.set()


class _Methods:
    """What both faces do, as coroutines that wait for answers in the way they are given."""

    def __init__(self, client: _Client, answers: Answers) -> None:
        self.client = client
        self.answers = answers

    async def call(self, method: str, *arguments: Any) -> Any:
        """A call that changes something: it is done once, though Ray may send it again."""
        call = self.client.begin()
        try:
            return await self.answers.one(getattr(self.client.actor, method).remote(call, *arguments))
        finally:
            self.client.end(call)

    async def ask(self, method: str, *arguments: Any) -> Any:
        return await self.answers.one(getattr(self.client.actor, method).remote(*arguments))

    async def put(self, group: Sequence[Any], task_name: str, model_step: int | None, train_step: int | None) -> Status:
        client = self.client
        checked_task_name(task_name)
        client.rule(task_name)
        if train_step is not None:
            train_step = checked_int("train_step", train_step, at_least=1)
        arriving = _read(group, task_name, model_step, train_step)
        for position, member in enumerate(arriving.members):
            if not member.versioned:
                raise ValueError(
                    f"member {position}: {member.tokens} response tokens have no model step; give "
                    "response_model_steps or model_step"
                )
        call = client.begin()
        try:
            name = f"{client.keeper}/{call.token}"
            summaries = summaries_of(arriving, name)
            if arriving.group_id is None:
                for summary in summaries:
                    summary.group_id = call.token  # the same when the call is sent again
            prompts, responses = payloads_of(arriving)
            lease = client.leases.get((task_name, summaries[0].group_id))
            status, group_id = await self._store(
                (name, prompts, responses), (call, task_name, summaries, train_step, lease)
            )
        finally:
            client.end(call)
        client.leases.pop((task_name, group_id), None)
        write_arrival(arriving, group_id, arriving.rerolls, train_step)
        result: Status = status
        return result

    async def _store(self, payload: tuple[Any, ...], put: tuple[Any, ...]) -> tuple[Status, Any]:
        """Payloads first, so that a summary never stands for nothing."""
        keeper, actor = self.client.keepers[self.client.keeper], self.client.actor
        answer: tuple[Status, Any] | None = None
        if self.answers is IN_EVENT_LOOP:
            keeping, putting = self._together()
            await keeping.call(payload)
            answer = await putting.call(put)
        else:
            await self.answers.one(keeper.keep.remote(*payload))
        if answer is None:
            answer = await self.answers.one(actor.put.remote(*put))
        return answer

    def _together(self) -> tuple[Together, Together]:
        """For the calls of the running event loop: those to the keeper, and those to the actor."""
        loop = asyncio.get_running_loop()
        found = self.client.together.get(loop)
        if found is None:
            keeper, actor = self.client.keepers[self.client.keeper], self.client.actor

            async def keep(payloads: list[Any]) -> list[Any]:
                await self.answers.one(keeper.keep_many.remote(payloads))
                return [(False, None)] * len(payloads)

            async def put(puts: list[Any]) -> list[Any]:
                answers: list[Any] = await self.answers.one(actor.put_many.remote(puts))
                return answers

            found = self.client.together[loop] = (Together(keep, 8), Together(put))
        return found

    async def get(self, n: int, task_name: str, status: Any) -> list[Group]:
        handed_out = await self.call("get", checked_int("n", n, at_least=0), task_name, status)
        groups = [summaries for summaries, _ in handed_out]
        if not groups:
            return []
        refs = await self._refs(groups)
        payloads = iter(await self._values([ref for pair in refs for ref in pair if ref is not None]))
        states = []
        for (summaries, lease), (_, responses) in zip(handed_out, refs, strict=True):
            prompts = next(payloads)
            states.append(assembled(summaries, prompts, None if responses is None else next(payloads)))
            self.client.lend((task_name, summaries[0].group_id), lease)
        return states

    async def take_refs(self, sizes: Sizes, train_step: int) -> BatchRefs:
        client = self.client
        sizes = checked_sizes(sizes)
        rules = {task_name: client.rule(task_name) for task_name in sizes}
        train_step = checked_int("train_step", train_step, at_least=1)
        groups, tokens = await self.call("take", client.trainer, sizes, train_step, client.acknowledge)
        refs = iter(await self._refs([group for of_task in groups.values() for group in of_task]))
        found = {name: [GroupRefs(group, *next(refs)) for group in of_task] for name, of_task in groups.items()}
        return BatchRefs(found, train_step, tokens, rules)

    async def fetch(self, batch: BatchRefs, rank: int = 0, world_size: int = 1) -> TrainBatch:
        return batch.assembled(await self._values(batch.refs(rank, world_size)), rank, world_size)

    async def _refs(self, groups: Sequence[list[RolloutState]]) -> list[tuple[Any, Any]]:
        """References to the payloads of groups: of the prompts, and of the responses where a member has one."""
        wanted: dict[str, list[str]] = {}
        pairs = []
        for group in groups:
            response = next((state.response for state in group if state.response), None)
            pairs.append((group[0].mm_info, response))
            for name in filter(None, pairs[-1]):
                wanted.setdefault(name.rpartition("/")[0], []).append(name)
        found: dict[str | None, Any] = {None: None}
        for keeper, names in wanted.items():
            found.update(
                zip(names, await self.answers.one(self.client.keepers[keeper].refs.remote(names)), strict=True)
            )
        missing = [name for name, ref in found.items() if name is not None and ref is None]
        if missing:
            raise PayloadsLost(f"{len(missing)} payloads are gone with their keeper, the first is {missing[0]!r}")
        return [(found[prompts], found[responses]) for prompts, responses in pairs]

    async def _values(self, refs: list[Any]) -> list[Any]:
        from ray.exceptions import ObjectLostError

        try:
            return await self.answers.all(refs)
        except ObjectLostError as error:
            raise PayloadsLost(f"a payload is gone with the process or the node that had it: {error}") from None

    async def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES)
        given = []
        for group in groups:
            task_name = self._task_of(group)
            given.append((task_name, summaries_of(_read(group, task_name), None)))
        await self.call("settle", given, outcome)
        for task_name, summaries in given:
            self.client.leases.pop((task_name, summaries[0].group_id), None)

    def _task_of(self, group: Sequence[Any]) -> str:
        task_name, group_id = group[0].task_name, group[0].group_id
        names = [known for known, lent in self.client.leases if lent == group_id]
        return names[0] if task_name not in names and len(names) == 1 else str(task_name or "default")

    async def reject(self, group: Sequence[Any], task_name: str, outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES[1:])
        arriving = _read(group, checked_task_name(task_name))
        summaries = summaries_of(arriving, None)
        await self.call("reject", task_name, summaries, outcome)
        self.client.leases.pop((task_name, summaries[0].group_id), None)


def _read(
    group: Sequence[Any], task_name: str, model_step: int | None = None, train_step: int | None = None
) -> Arriving:
    arriving = read_group(group, task_name, model_step=model_step, train_step=train_step)
    for position, state in enumerate(arriving.states):
        if type(state) is not RolloutState:
            raise TypeError(
                f"member {position} is a {type(state).__name__}; this buffer takes RolloutState objects only"
            )
    return arriving


class RayReplayBuffer:
    """A replay buffer for a whole Ray cluster, with the methods of :class:`~pystale.ReplayBuffer`.

    Made by :meth:`start` in one process and :meth:`connect` in others; one that is sent to another process connects
    there. Tokens go to the keeper of the node, and from there to the trainer; the actor sees summaries.

    What differs from a buffer in the same process:

    - The states put are not those stored. They may be changed, or forgotten, once ``put`` has returned.
    - A put of a COMPLETED group waits while its task has ``max_groups`` of them.
    - :meth:`take_train_batch` acknowledges the batches of earlier steps: their payloads are released. A trainer that is
      started again, and asks for a step whose batch it had taken before, gets the same batch.
    - :meth:`ledger`, :meth:`settle` and ``len()`` block, as they have to ask the actor.

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
        self._client = _Client(actor, trainer, acknowledge)
        self._methods = _Methods(self._client, IN_EVENT_LOOP)
        self.sync = BlockingRayReplayBuffer(self._client)
        self._started: list[Any] = []
        self.order = self._client.order
        self.max_rerolls = self._client.max_rerolls

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
        TypeError, ValueError
            For a setting that is not allowed.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        checked_settings(rule, settings)  # here, where the caller sees what is wrong
        namespace = namespace or ray.get_runtime_context().namespace
        prefix = name or f"pystale-{uuid.uuid4().hex[:12]}"
        started: list[Any] = []
        keepers = {}
        nodes: Any = ray.nodes
        for node in nodes():
            if node["Alive"]:
                keeper = keeper_of(node["NodeID"])
                keepers[keeper] = f"{prefix}-keeper-{keeper}"
                started.append(
                    ray.remote(PayloadKeeper)
                    .options(
                        num_cpus=0,
                        max_restarts=-1,
                        max_task_retries=-1,
                        lifetime=lifetime,
                        name=keepers[keeper],
                        namespace=namespace,
                        # Soft: a keeper whose node is gone starts empty somewhere else, and calls to it get an answer.
                        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=True),
                    )
                    .remote()
                )
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
        import ray

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

        if not self._client._closed.is_set():
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
        await self._methods.ask("acknowledge", self._client.trainer, checked_int("train_step", train_step, at_least=1))

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

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`ReplayBuffer.settle`."""
        self.sync.settle(groups, outcome)

    def ledger(self) -> dict[str, Any]:
        """See :meth:`ReplayBuffer.ledger`."""
        return self.sync.ledger()

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
        if not self._client._closed.is_set():
            self._client.close()
            await self._methods.ask("leave", self._client.id)

    def __len__(self) -> int:
        return len(self.sync)


def _connected(actor: Any, trainer: str, acknowledge: bool) -> RayReplayBuffer:
    return RayReplayBuffer(actor, trainer=trainer, acknowledge=acknowledge)


class BlockingRayReplayBuffer:
    """The operations of a :class:`RayReplayBuffer` as plain blocking calls; its attribute ``sync``."""

    def __init__(self, client: _Client) -> None:
        self._methods = _Methods(client, ON_THREAD)

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
        finished(self._methods.ask("acknowledge", self._methods.client.trainer, train_step))

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

    def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        """See :meth:`RayReplayBuffer.settle`."""
        finished(self._methods.settle(groups, outcome))

    def ledger(self) -> dict[str, Any]:
        """See :meth:`RayReplayBuffer.ledger`."""
        account: dict[str, Any] = finished(self._methods.ask("ledger"))
        return account

    def save(self, *, extra: Mapping[str, Any] | None = None) -> None:
        """See :meth:`RayReplayBuffer.save`."""
        finished(self._methods.ask("save", None if extra is None else dict(extra)))

    def __len__(self) -> int:
        size: int = finished(self._methods.ask("size"))
        return size
