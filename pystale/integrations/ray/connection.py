"""The connection of one process to the actor, and what both faces of the buffer do over it."""

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from pystale.arguments import OUTCOMES, Sizes, checked_group_id, checked_outcome, checked_sizes, checked_task_name
from pystale.batch import TrainBatch
from pystale.group import Group
from pystale.integrations.ray.batch import BatchRefs, GroupRefs
from pystale.integrations.ray.bookings import Call
from pystale.integrations.ray.calls import IN_EVENT_LOOP, Answers, Together
from pystale.integrations.ray.keeper import PayloadsLost, keeper_of
from pystale.integrations.ray.reserved import Told
from pystale.policy import GroupMode
from pystale.reservations import Reservation, Reservations
from pystale.staleness import StalenessRule, checked_int
from pystale.state import RolloutState, Status
from pystale.summary import assembled, payloads_of, read_rollouts, summaries_of, task_of
from pystale.writing import write_arrival

__all__ = ["Client", "Methods"]

logger = logging.getLogger("pystale")


class Client:
    """The connection of a process: its id, its calls, what was handed out to it, and what it has in flight."""

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
        self.wait_for_stragglers: bool = settings["wait_for_stragglers"]
        self.straggler_timeout_s: float = settings["straggler_timeout_s"]
        self.max_groups: int | Mapping[str, int] | None = settings["max_groups"]
        self.keepers: dict[str, Any] = settings["keepers"]
        here = keeper_of(ray.get_runtime_context().get_node_id())
        # A node that came later has none; any other does, and then payloads cross the network once more.
        self.keeper = here if here in self.keepers else min(self.keepers)
        self.leases: dict[tuple[str, Any], str] = {}
        self.together: WeakKeyDictionary[Any, tuple[Together, Together]] = WeakKeyDictionary()  # by event loop
        self._numbers = itertools.count()
        self._open: dict[int, None] = {}
        self._lock = threading.Lock()
        self._reserved = Reservations()
        self._told: dict[Reservation, Told] = {}  # what the actor has to know of it
        self._messages = itertools.count()
        self._untold = False  # whether more was said than that nothing is in flight, since that was said
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
        self._keep_in_touch()

    def reserve(self, group_id: Any, task_name: str, model_step: int) -> Reservation:
        """A group is in flight, and the actor is told so, without waiting for it."""
        task_name, group_id = checked_task_name(task_name), checked_group_id(group_id)
        model_step = checked_int("model_step", model_step, at_least=0)
        self.rule(task_name)
        bounded = self.max_groups.get(task_name) if isinstance(self.max_groups, Mapping) else self.max_groups
        if group_id is None and bounded:
            raise ValueError(
                f"task {task_name!r} has room for max_groups={bounded}; a group in flight needs a group_id there, by "
                "which its put is let in when a take waits for it"
            )
        reservation = Reservation(task_name, group_id, model_step, time.monotonic(), self._release)
        with self._lock:
            self._reserved.add(reservation)
            told = self._told[reservation] = Told(next(self._numbers), task_name, group_id, model_step)
            self._untold = True
            self._tell([told], [])
        self._keep_in_touch()
        return reservation

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            if self._reserved.discard(reservation):
                self._tell([], [self._told.pop(reservation).number])

    def land(self, name: tuple[str, Any]) -> None:
        """A group has come to the actor: it is neither lent nor in flight any more."""
        self.leases.pop(name, None)
        with self._lock:
            reservation = self._reserved.land(*name)
            if reservation is not None:
                self._tell([], [self._told.pop(reservation).number])

    def _tell(self, new: Sequence[Told], over: Sequence[int], *, whole: bool = False) -> None:
        """Say what is in flight. Under the lock, so that messages leave in the order of their numbers."""
        import ray

        if self.closed or not ray.is_initialized():
            return
        try:
            self.actor.in_flight.remote(self.id, next(self._messages), new, over, whole)
        except Exception:
            logger.exception("the actor was not told what is in flight; it is with the next beat")
            self._untold = True

    def reserved(self) -> dict[int, Reservation]:
        """What this process has in flight, by number."""
        with self._lock:
            return {told.number: reservation for reservation, told in self._told.items()}

    def _keep_in_touch(self) -> None:
        if not self._beating.is_set():
            self._beating.set()
            threading.Thread(target=self._beat, name="pystale-ray-client", daemon=True).start()

    def _beat(self) -> None:
        import ray

        while not self._closed.wait(self._lease_s / 4):
            if not ray.is_initialized():
                continue
            try:
                if self.leases:
                    self.actor.heard.remote(self.id)
            except Exception:
                logger.exception("the actor was not told that this process is alive; it is with the next beat")
            with self._lock:
                if self._told or self._untold:
                    # What has been said since, down to that nothing is left, is said once more.
                    self._untold = bool(self._told)
                    self._tell(list(self._told.values()), [], whole=True)

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
        client.land((task_name, group_id))
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
        waited = 0.0
        while True:
            found = await self.call("take", client.trainer, sizes, train_step, client.acknowledge)
            if found is not None:
                break
            # Not within the call, which is done once and to its end also for a caller that gives up meanwhile.
            waited += await self.ask("wait_for_stragglers", sizes, train_step, waited)
        groups, tokens = found
        refs = iter(await self._refs([group for of_task in groups.values() for group in of_task]))
        by_task = {name: [GroupRefs(group, *next(refs)) for group in of_task] for name, of_task in groups.items()}
        return BatchRefs(by_task, train_step, tokens, rules, waited)

    async def stragglers(self, sizes: Sizes, train_step: int) -> list[Reservation]:
        sizes, train_step = checked_sizes(sizes), checked_int("train_step", train_step, at_least=1)
        for task_name in sizes:
            self.client.rule(task_name)
        found = await self.ask("stragglers", sizes, train_step)
        ours, now = self.client.reserved(), time.monotonic()
        return [
            ours[told.number]
            if owner == self.client.id
            else Reservation(told.task_name, told.group_id, told.model_step, now - seconds, _not_ours)
            for owner, told, seconds in found
            if owner != self.client.id or told.number in ours  # else it has ended meanwhile
        ]

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
            self.client.land((task_name, summaries[0].group_id))

    async def reject(self, group: Sequence[Any], task_name: str, outcome: str) -> None:
        checked_outcome(outcome, OUTCOMES[1:])
        arriving = read_rollouts(group, checked_task_name(task_name))
        summaries = summaries_of(arriving, None)
        await self.call("reject", task_name, summaries, outcome)
        self.client.land((task_name, summaries[0].group_id))


def _not_ours(reservation: Reservation) -> None:
    raise ValueError(f"{reservation} is of another process, which has to release it")
