"""The connection of one process to the actor, and what both faces of the buffer do over it."""

import asyncio
import itertools
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from pystale.arguments import OUTCOMES, Sizes, checked_outcome, checked_sizes, checked_task_name
from pystale.batch import TrainBatch
from pystale.group import Group
from pystale.integrations.ray.batch import BatchRefs, GroupRefs
from pystale.integrations.ray.bookings import Call
from pystale.integrations.ray.calls import IN_EVENT_LOOP, Answers, Together
from pystale.integrations.ray.keeper import PayloadsLost, keeper_of
from pystale.policy import GroupMode
from pystale.staleness import StalenessRule, checked_int
from pystale.state import RolloutState, Status
from pystale.summary import assembled, payloads_of, read_rollouts, summaries_of, task_of
from pystale.writing import write_arrival

__all__ = ["Client", "Methods"]


class Client:
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
        self.group_mode: GroupMode = settings["group_mode"]
        self.min_fresh: int = settings["min_fresh"]
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

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()


class Methods:
    """What both faces do, as coroutines that wait for answers in the way they are given."""

    def __init__(self, client: Client, answers: Answers) -> None:
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
        arriving = read_rollouts(group, task_name, model_step, train_step)
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

    async def acknowledge(self, train_step: int) -> None:
        await self.ask("acknowledge", self.client.trainer, checked_int("train_step", train_step, at_least=1))

    async def settle(self, groups: Iterable[Sequence[Any]], outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES)
        given = []
        for group in groups:
            task_name = task_of(group, self.client.leases)
            given.append((task_name, summaries_of(read_rollouts(group, task_name), None)))
        await self.call("settle", given, outcome)
        for task_name, summaries in given:
            self.client.leases.pop((task_name, summaries[0].group_id), None)

    async def reject(self, group: Sequence[Any], task_name: str, outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES[1:])
        arriving = read_rollouts(group, checked_task_name(task_name))
        summaries = summaries_of(arriving, None)
        await self.call("reject", task_name, summaries, outcome)
        self.client.leases.pop((task_name, summaries[0].group_id), None)
