"""The buffer on a Ray cluster, with real processes, some of which are killed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import memory_summary

from pystale import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    DisaggAgentLoopManager,
    DisaggAsyncProduceStrategyConfig,
    ModelSteps,
    PromptSampler,
    ReplayBuffer,
    RolloutState,
    StalenessRule,
    Status,
    StragglersOverdue,
    TaskSpec,
)
from pystale.group import read_group
from pystale.integrations.ray import RayReplayBuffer
from pystale.integrations.ray.bookings import Call
from pystale.summary import payloads_of, summaries_of

pytestmark = pytest.mark.filterwarnings("default")

RULE = StalenessRule(max_staleness=2, max_token_staleness=0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, logging_level="warning", object_store_memory=200 << 20)
    yield
    ray.shutdown()


@pytest.fixture
def start(cluster: None, tmp_path: Path) -> Iterator[Any]:
    """Starts buffers, and ends them after the test."""
    started: list[RayReplayBuffer] = []

    def start(rule: Any = RULE, **settings: Any) -> RayReplayBuffer:
        settings = {"directory": tmp_path / "buffer", "tail_batch_trigger_size": 0, "journal_delay": 0.0, **settings}
        started.append(RayReplayBuffer.start(rule, **settings))
        return started[-1]

    yield start
    for buffer in started:
        buffer.shutdown()


@pytest.fixture(scope="session")
def shared(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayReplayBuffer]:
    """A buffer for tests that leave it as it was."""
    buffer = RayReplayBuffer.start(RULE, directory=tmp_path_factory.mktemp("shared"), tail_batch_trigger_size=0)
    yield buffer
    buffer.shutdown()


def group_of(number: int, steps: list[int], *, size: int = 2, **fields: Any) -> list[RolloutState]:
    return [
        RolloutState(
            rollout_id=number * size + i,
            group_id=number,
            prompt_ids=[1, 2, number],
            response_ids=list(range(len(steps))),
            response_model_steps=list(steps),
            logprobs=[-0.5] * len(steps),
            status=Status.COMPLETED,
            reward=1.0,
            **fields,
        )
        for i in range(size)
    ]


def report(buffer: RayReplayBuffer) -> dict[str, Any]:
    return ray.get(buffer.actor.report.remote())


def payloads(buffer: RayReplayBuffer) -> int:
    return sum(ray.get([keeper.count.remote() for keeper in buffer.keepers.values()]))


def becomes(value: Any, of: Any, seconds: float = 30.0) -> bool:
    """Whether `of()` is `value` before long."""
    end = time.monotonic() + seconds
    while of() != value:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def balanced(ledger: dict[str, Any]) -> bool:
    uses = ("trained", "masked_stale", "masked_semantic", "stored", "in_flight")
    return ledger["produced"] == sum(ledger[name] for name in uses) + sum(ledger["discarded"].values())


def objects_of_ray() -> int:
    """Objects in the object store, by Ray's own report."""
    found = re.search(
        r"Plasma memory usage [^,]*, (\d+) objects",
        memory_summary(ray.get_runtime_context().gcs_address, stats_only=True),
    )
    if found is None:
        raise RuntimeError("Ray's report says nothing of its object store")
    return int(found[1])


def kill_actor(buffer: RayReplayBuffer) -> None:
    os.kill(report(buffer)["pid"], signal.SIGKILL)


def test_a_batch_comes_back_with_its_tokens_and_effective_masks(start: Any) -> None:
    buffer = start()
    for number in range(3):
        assert buffer.sync.put(group_of(number, [3, 4, 4]), train_step=5) is Status.COMPLETED
    batch = buffer.sync.take_train_batch({"default": 2}, train_step=5)
    assert [state.group_id for state in batch.responses] == [0, 0, 1, 1]
    assert [state.response_ids for state in batch.responses] == [[0, 1, 2]] * 4
    assert [list(state.response_mask) for state in batch.responses] == [[0, 1, 1]] * 4
    assert batch.trainable_tokens == 8
    assert buffer.ledger()["trained"] == 8
    assert buffer.ledger()["masked_stale"] == 4
    assert balanced(buffer.ledger())


def test_it_does_what_a_buffer_in_the_process_does(start: Any, rng: np.random.Generator) -> None:
    """The same random history in both: every answer, every mask, the account."""
    remote, local = start(), ReplayBuffer(RULE, tail_batch_trigger_size=0)
    number, train_step = 0, 3
    for _ in range(40):
        action = rng.integers(5)
        if action <= 1:
            steps = np.sort(rng.integers(train_step - 3, train_step, size=int(rng.integers(1, 9)))).clip(0)
            mask = rng.integers(0, 2, len(steps)).tolist() if rng.random() < 0.5 else None
            both = [group_of(number, steps.tolist(), response_mask=mask) for _ in range(2)]
            number += 1
            answers = [b.sync.put(g, train_step=train_step) for b, g in zip((remote, local), both, strict=True)]
            assert answers[0] is answers[1]
        elif action == 2:
            train_step += 1
            assert remote.sync.refresh_staleness(train_step) == local.sync.refresh_staleness(train_step)
        elif action == 3:
            groups = [b.sync.get(1, "default", Status.EXPIRED) for b in (remote, local)]
            assert [[s.group_id for s in g] for g in groups[0]] == [[s.group_id for s in g] for g in groups[1]]
            for b, of_buffer in zip((remote, local), groups, strict=True):
                for group in of_buffer:
                    for state in group:
                        if state.status is not Status.COMPLETED:
                            assert list(state.tokens) == list(state.prompt_ids)
                            state.response_ids, state.status = [7, 8], Status.COMPLETED
                            state.response_model_steps = ModelSteps.from_runs([(train_step - 1, 2)])
                    b.sync.put(group, train_step=train_step)
        else:
            batches = [b.sync.take_train_batch({"default": 2}, train_step=train_step) for b in (remote, local)]
            assert batches[0].trainable_tokens == batches[1].trainable_tokens
            for mine, theirs in zip(batches[0].responses, batches[1].responses, strict=True):
                assert (mine.rollout_id, list(mine.response_ids)) == (theirs.rollout_id, list(theirs.response_ids))
                masks = [s.response_mask if s.response_mask is None else list(s.response_mask) for s in (mine, theirs)]
                assert masks[0] == masks[1]
        assert remote.ledger() == local.ledger()
    assert len(remote) == len(local)


def test_members_that_expired_are_left_out_of_a_batch_also_after_a_kill(start: Any) -> None:
    buffer = start(StalenessRule(1), group_mode="members", min_fresh=2)
    for number in range(2):
        group = group_of(number, [4, 5], size=3)
        group[1].response_model_steps = [3, 5]
        assert buffer.sync.put(group, train_step=6) is Status.COMPLETED
    batch = buffer.sync.take_train_batch({"default": 1}, train_step=6)
    kill_actor(buffer)
    batch_after = buffer.sync.take_train_batch({"default": 1}, train_step=6)
    for number, taken in enumerate((batch, batch_after)):
        assert [[s.rollout_id, list(s.response_model_steps)] for s in taken["default"][0]] == [
            [3 * number, [4, 5]],
            [3 * number + 2, [4, 5]],
        ]
        assert (taken.left_out, taken.trainable_tokens) == (1, 4)
    assert buffer.report().left_out == {"default": 2}
    assert balanced(buffer.ledger())
    assert buffer.ledger()["discarded"] == {"expired": 4}
    buffer.sync.acknowledge(6)
    assert becomes(0, lambda: payloads(buffer))


def test_a_group_is_masked_as_it_was_counted_though_its_agentic_member_is_left_out(start: Any) -> None:
    buffer = start(StalenessRule(2, 0), group_mode="members")
    group = group_of(1, [4, 5])
    group[0].response_model_steps, group[0].input_ids = [2, 5], [1, 2]
    assert buffer.sync.put(group, train_step=6) is Status.COMPLETED
    batch = buffer.sync.take_train_batch({"default": 1}, train_step=6)
    # The token rule does not apply to the group, also to what is left of it.
    assert (batch.left_out, batch.trainable_tokens, batch.responses[0].response_mask) == (1, 2, None)


def test_references_are_released_once_nobody_needs_them(start: Any) -> None:
    buffer = start()
    buffer.sync.put(group_of(0, [3, 3]), train_step=4)
    buffer.sync.put(group_of(1, [9, 9]), train_step=10)
    assert buffer.sync.refresh_staleness(10) == {"default": 1}
    assert becomes(3, lambda: payloads(buffer)), "the response that expired is gone, its prompt is kept"
    buffer.sync.take_train_batch({"default": 1}, train_step=10)
    assert payloads(buffer) == 3, "a batch that is taken may be asked for again"
    buffer.sync.acknowledge(10)
    assert becomes(1, lambda: payloads(buffer))
    (group,) = buffer.sync.get(1, "default", Status.EXPIRED)
    buffer.sync.reject(group, outcome="failed")
    assert becomes(0, lambda: payloads(buffer))
    assert report(buffer)["payloads"] == 0


def test_an_actor_that_is_killed_knows_all_it_has_acknowledged(start: Any) -> None:
    buffer = start()
    for number in range(6):
        buffer.sync.put(group_of(number, [3, 4]), train_step=5)
    buffer.sync.take_train_batch({"default": 2}, train_step=5)
    before = buffer.ledger()
    pid = report(buffer)["pid"]
    kill_actor(buffer)
    assert buffer.ledger() == before
    assert report(buffer)["pid"] != pid
    assert buffer.sync.unacknowledged() == [5]
    batch = buffer.sync.take_train_batch({"default": 4}, train_step=5)
    assert [group[0].group_id for group in batch["default"]] == [2, 3, 4, 5]
    assert len(buffer) == 0


def test_a_state_of_the_actor_survives_a_kill_after_a_checkpoint(start: Any) -> None:
    buffer = start()
    for number in range(4):
        buffer.sync.put(group_of(number, [3, 4]), train_step=5)
    taken = buffer.sync.take_train_batch({"default": 1}, train_step=5)
    (lent,) = buffer.sync.get(1)
    buffer.sync.save(extra={"mine": [1, "two"]})
    buffer.sync.put(group_of(9, [4, 4]), train_step=5)
    kill_actor(buffer)
    assert len(buffer) == 3
    assert asyncio.run(buffer.extra()) == {"mine": [1, "two"]}
    assert report(buffer)["lent"] == 1
    assert buffer.sync.put(lent, train_step=5) is Status.COMPLETED, "what was handed out comes back all the same"
    again = RayReplayBuffer(buffer.actor).sync.take_train_batch({"default": 1}, train_step=5)
    assert [s.rollout_id for s in again.responses] == [s.rollout_id for s in taken.responses]
    assert balanced(buffer.ledger())
    assert buffer.ledger()["in_flight"] == 0


class Process:
    """A producer or trainer in a process of its own; an actor of Ray."""

    def __init__(self, buffer: RayReplayBuffer) -> None:
        self.buffer = buffer

    def pid(self) -> int:
        return os.getpid()

    def put(self, first: int, count: int, train_step: int = 5) -> int:
        for number in range(first, first + count):
            self.buffer.sync.put(group_of(number, [3, 4]), train_step=train_step)
        return count

    def take_all(self, n: int) -> list[Any]:
        seen: list[Any] = []
        while batch := self.buffer.sync.take_train_batch({"default": n}, train_step=5):
            for (group,) in zip(batch["default"], strict=True):
                if any(state.prompt_ids[2] != state.group_id for state in group):
                    raise RuntimeError(f"group {group[0].group_id} has the payload of another")
                seen.append(group[0].group_id)
        return seen

    def get(self, n: int, status: Status) -> list[Any]:
        self.held = self.buffer.sync.get(n, "default", status)
        return [group[0].group_id for group in self.held]

    def client(self) -> str:
        return self.buffer.client_id

    def put_back(self, train_step: int) -> list[Status]:
        return [self.buffer.sync.put(group, train_step=train_step) for group in self.held]

    def reserve(self, numbers: list[int], model_step: int) -> None:
        for number in numbers:
            self.buffer.reserve(number, model_step=model_step)

    def put_one(self, number: int, steps: list[int], train_step: int) -> Status:
        return self.buffer.sync.put(group_of(number, steps), train_step=train_step)

    def take(self, n: int, train_step: int) -> list[Any]:
        self.batch = self.buffer.sync.take_train_batch({"default": n}, train_step=train_step)
        return [state.rollout_id for state in self.batch.responses]


@pytest.fixture
def process(cluster: None) -> Iterator[Any]:
    """Starts processes with a client of a buffer, and ends them after the test."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    started: list[Any] = []

    def process(buffer: RayReplayBuffer) -> Any:
        started.append(ray.remote(Process).options(num_cpus=0).remote(buffer))
        return started[-1]

    yield process
    for handle in started:
        ray.kill(handle)


def kill(handle: Any) -> None:
    os.kill(ray.get(handle.pid.remote()), signal.SIGKILL)


def test_puts_go_on_through_kills_of_the_actor_and_none_is_lost_or_twice(start: Any, process: Any) -> None:
    buffer = start(checkpoint_entries=40)
    objects = objects_of_ray()
    producers = [process(buffer) for _ in range(2)]
    puts = [producer.put.remote(100 * i, 60) for i, producer in enumerate(producers)]
    for _ in range(2):
        stored = len(buffer)
        assert becomes(True, lambda stored=stored: len(buffer) > min(stored + 10, 119))
        kill_actor(buffer)
    assert ray.get(puts) == [60, 60]
    assert len(buffer) == 120
    assert buffer.ledger()["produced"] == buffer.ledger()["stored"] == 480
    taking = process(buffer).take_all.remote(4)
    for left in (100, 60):
        assert becomes(True, lambda left=left: len(buffer) <= left)
        kill_actor(buffer)
    assert sorted(ray.get(taking)) == [*range(60), *range(100, 160)]
    assert balanced(buffer.ledger())
    assert buffer.ledger()["trained"] == 240
    buffer.sync.acknowledge(5)
    assert becomes(0, lambda: payloads(buffer))
    assert becomes(objects, objects_of_ray), "nothing is left in Ray's object store"


def test_the_payloads_of_a_killed_producer_are_there(start: Any, process: Any) -> None:
    buffer = start()
    producer = process(buffer)
    ray.get(producer.put.remote(0, 3))
    kill(producer)
    batch = buffer.sync.take_train_batch({"default": 3}, train_step=5)
    assert [state.response_ids for state in batch.responses] == [[0, 1]] * 6


def test_what_a_killed_producer_was_generating_is_stored_again(start: Any, process: Any) -> None:
    buffer = start(lease_s=2.0)
    ray.get(process(buffer).put.remote(0, 2))
    buffer.sync.refresh_staleness(7)
    producer = process(buffer)
    assert ray.get(producer.get.remote(2, Status.EXPIRED)) == [0, 1]
    assert len(buffer) == 0
    time.sleep(3.0)
    assert len(buffer) == 0, "a producer that lives keeps what it has"
    kill(producer)
    assert becomes(2, lambda: buffer.sync.count("default", Status.EXPIRED))
    assert balanced(buffer.ledger())
    groups = buffer.sync.get(2, "default", Status.EXPIRED)
    assert [group[0].rerolls for group in groups] == [2, 2]


def test_what_is_handed_out_comes_back_though_the_actor_was_killed_meanwhile(start: Any, process: Any) -> None:
    buffer = start()
    buffer.sync.put(group_of(0, [3, 4]), train_step=5)
    producer = process(buffer)
    assert ray.get(producer.get.remote(1, Status.COMPLETED)) == [0]
    kill_actor(buffer)
    assert ray.get(producer.put_back.remote(5)) == [Status.COMPLETED]
    assert len(buffer) == 1
    assert balanced(buffer.ledger())


def test_a_group_that_comes_back_after_it_was_given_to_another_is_dropped(start: Any, process: Any) -> None:
    buffer = start()
    buffer.sync.put(group_of(0, [3, 4]), train_step=5)
    slow = process(buffer)
    assert ray.get(slow.get.remote(1, Status.COMPLETED)) == [0]
    buffer.actor.leave.remote(ray.get(slow.client.remote()))  # as if nothing was heard of it
    assert becomes(1, lambda: len(buffer))
    (group,) = buffer.sync.get(1)
    assert ray.get(slow.put_back.remote(5)) == [Status.EXPIRED]
    assert len(buffer) == 0
    assert buffer.sync.put(group, train_step=5) is Status.COMPLETED
    assert buffer.ledger()["produced"] == 4
    assert becomes(2, lambda: payloads(buffer))


def test_a_trainer_killed_between_take_and_train_gets_the_same_batch(start: Any, process: Any) -> None:
    buffer = start(StalenessRule(max_staleness=5))
    ray.get(process(buffer).put.remote(0, 4))
    trainer = process(buffer)
    taken = ray.get(trainer.take.remote(2, 5))
    kill(trainer)
    trainer = process(buffer)
    assert ray.get(trainer.take.remote(2, 5)) == taken
    following = ray.get(trainer.take.remote(2, 6))
    assert not set(following) & set(taken)
    assert buffer.sync.unacknowledged() == [6]
    assert balanced(buffer.ledger())


def test_groups_whose_keeper_was_killed_are_booked_as_lost_and_never_trained(start: Any) -> None:
    buffer = start()
    for number in range(3):
        buffer.sync.put(group_of(number, [3, 4]), train_step=5)
    (keeper,) = buffer.keepers.values()
    os.kill(ray.get(keeper.pid.remote()), signal.SIGKILL)
    assert not buffer.sync.take_train_batch({"default": 1}, train_step=5)
    assert buffer.ledger()["discarded"] == {"lost": 12}
    assert buffer.ledger()["trained"] == 0
    assert balanced(buffer.ledger())
    buffer.sync.put(group_of(7, [4, 4]), train_step=5)
    assert buffer.sync.take_train_batch({"default": 1}, train_step=5).trainable_tokens == 4


def test_puts_wait_for_room_and_takes_make_it(start: Any, process: Any) -> None:
    buffer = start(max_groups=2, batch_groups=2)
    putting = process(buffer).put.remote(0, 6)
    assert becomes(1, lambda: report(buffer)["waiting"])
    assert len(buffer) == 2
    for train_step in (5, 6, 7):
        assert buffer.sync.wait_ready({"default": 2}, timeout=60)
        batch = buffer.sync.take_train_batch({"default": 2}, train_step=5)
        assert len(batch["default"]) == 2, train_step
    assert ray.get(putting) == 6
    with pytest.raises(ValueError, match="a batch of 3 groups of task 'default' is never there"):
        buffer.sync.take_train_batch({"default": 3}, train_step=5)


def waiting(start: Any, **settings: Any) -> RayReplayBuffer:
    """A buffer whose takes wait for stragglers, with a group of step 4 for step 5."""
    buffer: RayReplayBuffer = start(StalenessRule(1), wait_for_stragglers=True, lease_s=2.0, **settings)
    buffer.sync.put(group_of(0, [4]), train_step=5)
    return buffer


def reserved(buffer: RayReplayBuffer) -> int:
    return buffer.sync.report().reserved.get("default", 0)


def test_a_take_waits_for_what_another_process_has_in_flight(start: Any, process: Any) -> None:
    buffer = waiting(start)
    producer, trainer = process(buffer), process(buffer)
    producer.reserve.remote([1, 2], 3)  # too old for step 6
    assert becomes(2, lambda: reserved(buffer))
    taking = trainer.take.remote(1, 5)
    assert ray.wait([taking], timeout=3.0)[0] == [], "it waits, though nothing was heard of the lease but beats"
    assert ray.get(producer.put_one.remote(1, [3], 5)) is Status.COMPLETED
    assert ray.wait([taking], timeout=0.5)[0] == []
    ray.get(producer.put_one.remote(2, [3], 5))
    assert ray.get(taking) == [2, 3]  # the members of group 1, which is older than group 0 and came before group 2
    assert reserved(buffer) == 0
    assert 3.0 < buffer.report().straggler_s < 60.0


def test_what_a_killed_producer_had_in_flight_is_not_waited_for(start: Any, process: Any) -> None:
    buffer = waiting(start)
    producer = process(buffer)
    producer.reserve.remote([1, 2], 3)
    assert becomes(2, lambda: reserved(buffer))
    kill(producer)
    batch = buffer.sync.take_train_batch({"default": 1}, train_step=5)
    assert [state.group_id for state in batch.responses] == [0, 0]
    assert 1.0 < batch.straggler_s < 30.0
    assert reserved(buffer) == 0


def test_an_actor_that_was_killed_hears_again_of_what_is_in_flight(start: Any) -> None:
    buffer = waiting(start)
    held = [buffer.reserve(number, model_step=3) for number in (1, 2, None)]
    assert becomes(3, lambda: reserved(buffer))
    kill_actor(buffer)
    assert becomes(3, lambda: reserved(buffer))
    buffer.sync.put(group_of(1, [3]), train_step=5)
    assert reserved(buffer) == 2
    for reservation in held:
        reservation.release()
    assert becomes(0, lambda: reserved(buffer))
    time.sleep(1.0)  # longer than until it is told again
    assert reserved(buffer) == 0


def test_a_take_that_is_given_up_takes_nothing(start: Any) -> None:
    buffer = waiting(start)

    async def main() -> list[Any]:
        reservation = buffer.reserve(1, model_step=3)
        taking = asyncio.ensure_future(buffer.take_train_batch({"default": 1}, train_step=5))
        await asyncio.sleep(1.0)
        assert not taking.done()
        taking.cancel()
        await asyncio.wait([taking])
        reservation.release()
        await asyncio.sleep(0.5)
        assert await buffer.count() == 1
        batch = await buffer.take_train_batch({"default": 1}, train_step=5)
        return [state.group_id for state in batch.responses]

    assert asyncio.run(main()) == [0, 0]
    assert balanced(buffer.ledger())


def test_a_wait_for_stragglers_has_an_end(start: Any, process: Any) -> None:
    buffer = waiting(start, straggler_timeout_s=1.0)
    process(buffer).reserve.remote([1], 3)
    assert becomes(1, lambda: reserved(buffer))
    ours = buffer.reserve(2, model_step=3)
    with pytest.raises(StragglersOverdue, match=r"has not landed within 1.0 s.*2 in flight: group 1 of task 'default'"):
        buffer.sync.take_train_batch({"default": 1}, train_step=5)
    theirs, found = buffer.sync.stragglers({"default": 1}, train_step=5)
    assert found is ours
    assert (theirs.group_id, theirs.model_step) == (1, 3)
    with pytest.raises(ValueError, match=r"Reservation\('default', 1, model_step=3\) is of another process"):
        theirs.release()
    assert asyncio.run(buffer.stragglers({"default": 2}, train_step=4)) == []  # both may be trained at step 5
    assert len(buffer) == 1


def test_a_straggler_that_is_waited_for_needs_no_room(start: Any, process: Any) -> None:
    buffer = waiting(start, max_groups=1)
    producer, trainer = process(buffer), process(buffer)
    producer.reserve.remote([1], 3)
    assert becomes(1, lambda: reserved(buffer))
    putting = producer.put_one.remote(1, [3], 5)
    assert becomes(1, lambda: report(buffer)["waiting"])
    assert ray.get(trainer.take.remote(1, 5)) == [2, 3]
    assert ray.get(putting) is Status.COMPLETED
    # One that begins to wait for room when a take waits already; group 0 is still there.
    producer.reserve.remote([2, 3], 4)
    assert becomes(2, lambda: reserved(buffer))
    taking = trainer.take.remote(1, 6)
    assert ray.wait([taking], timeout=0.5)[0] == []
    ray.get([producer.put_one.remote(number, [4], 6) for number in (2, 3)])
    assert ray.get(taking) == [0, 1]


def test_back_pressure_holds_for_what_is_begun_while_a_take_waits(start: Any, process: Any) -> None:
    buffer = waiting(start, max_groups=2)
    straggler = buffer.reserve(1, model_step=3)
    taking = process(buffer).take.remote(1, 5)
    assert becomes(1, lambda: report(buffer)["takes_waiting"])
    producer = process(buffer)
    producer.reserve.remote([2, 3, 4], 4)
    assert becomes(4, lambda: reserved(buffer))
    putting = [producer.put_one.remote(number, [4], 5) for number in (2, 3, 4)]
    assert becomes(1, lambda: report(buffer)["waiting"])
    assert len(buffer) == 2
    buffer.sync.put(group_of(1, [3]), train_step=5)
    assert ray.get(taking) == [2, 3]
    assert (straggler.group_id, len(buffer)) == (1, 2)
    batch = buffer.sync.take_train_batch({"default": 1}, train_step=6)  # for which all of them are the last chance
    assert [state.group_id for state in batch.responses] == [0, 0]
    assert ray.get(putting) == [Status.COMPLETED] * 3
    assert len(buffer) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, "default", 3), ValueError, "group 1 of task 'default' is reserved already"),
        ((1.5, "default", 3), TypeError, "group_id must be an int, a str or None"),
        ((2, "default", -1), ValueError, "model_step must be at least 0"),
        ((2, "default", None), TypeError, "model_step must be an int"),
        ((2, 5, 3), TypeError, "a task name is a str"),
    ],
)
def test_what_cannot_be_in_flight_is_refused(shared: Any, arguments: Any, error: Any, message: str) -> None:
    group_id, task_name, model_step = arguments
    with shared.reserve(1, model_step=3), pytest.raises(error, match=message):
        shared.reserve(group_id, task_name, model_step=model_step)


def test_where_puts_wait_for_room_a_group_in_flight_has_an_id(start: Any) -> None:
    buffer = start(max_groups={"a": 1, "b": 1})
    with pytest.raises(ValueError, match="task 'a' has room for max_groups=1; a group in flight needs a group_id"):
        buffer.reserve(None, "a", model_step=3)
    buffer.reserve(None, "c", model_step=3).release()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_groups": 7, "batch_groups": 8}, "max_groups is 7, and a batch holds 8 groups"),
        ({"max_groups": {"a": 9, "b": 3}, "batch_groups": {"a": 8, "b": 4}}, "max_groups of task 'b' is 3"),
        ({"max_groups": 0}, "max_groups must be at least 1"),
        ({"lease_s": 0}, "lease_s must be above 0 and finite"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    start: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start(**settings)


def test_a_payload_whose_put_never_came_is_let_go(start: Any) -> None:
    buffer = start(grace_s=1.0)
    (keeper,) = buffer.keepers.values()
    buffer.sync.put(group_of(0, [3, 4]), train_step=5)
    ray.get(keeper.keep.remote("nobody/0", [], []))
    assert payloads(buffer) == 4
    assert becomes(2, lambda: payloads(buffer))
    assert len(buffer.sync.take_train_batch({"default": 1}, train_step=5)["default"]) == 1


def test_what_cannot_be_put_is_said_and_leaves_no_payload(start: Any) -> None:
    buffer = start()
    buffer.sync.put(group_of(0, [3, 4]), train_step=5)
    with pytest.raises(ValueError, match="group 0 of task 'default' is stored already"):
        buffer.sync.put(group_of(0, [3, 4]), train_step=5)
    with pytest.raises(ValueError, match="model step 4 is in the future of train_step 4"):
        buffer.sync.put(group_of(1, [3, 4]), train_step=4)
    with pytest.raises(ValueError, match="2 response tokens have no model step"):
        buffer.sync.put([RolloutState(response_ids=[1, 2], status=Status.COMPLETED)])
    assert becomes(2, lambda: payloads(buffer))


def test_a_wait_is_woken_by_a_put(start: Any) -> None:
    buffer = start()

    async def main() -> tuple[bool, bool]:
        early = await buffer.wait_ready({"default": 1}, timeout=0.05)
        waiting = asyncio.ensure_future(buffer.wait_ready({"default": 1}))
        await asyncio.sleep(0.2)
        await buffer.put(group_of(0, [3, 4]), train_step=5)
        return early, await waiting

    assert asyncio.run(main()) == (False, True)


def test_ranks_fetch_their_share_of_a_batch(start: Any) -> None:
    buffer = start()
    for number in range(4):
        buffer.sync.put(group_of(number, [3, 4]), train_step=5)
    batch = buffer.sync.take_refs({"default": 4}, train_step=5)
    shares = [buffer.sync.fetch(batch, rank, 2) for rank in range(2)]
    assert [[group[0].group_id for group in share["default"]] for share in shares] == [[0, 2], [1, 3]]
    assert sum(share.trainable_tokens for share in shares) == batch.trainable_tokens


def test_a_call_that_comes_twice_is_done_once(start: Any) -> None:
    buffer = start()
    call = Call(buffer.client_id, 10**6, 10**6)
    (keeper,) = buffer.keepers
    name = f"{keeper}/{call.token}"
    arriving = read_group(group_of(0, [3, 4]), "default")
    ray.get(buffer.keepers[keeper].keep.remote(name, *payloads_of(arriving)))
    put = (call, "default", summaries_of(arriving, name), 5, None)
    take = (Call(buffer.client_id, 10**6 + 1, 10**6), "trainer", {"default": 1}, 5, True)
    first = ray.get(buffer.actor.put.remote(*put))
    assert ray.get(buffer.actor.put.remote(*put)) == first == (Status.COMPLETED, 0)
    taken = ray.get(buffer.actor.take.remote(*take))
    kill_actor(buffer)
    assert ray.get(buffer.actor.put.remote(*put)) == first, "though it has been taken since"
    assert len(buffer) == 0
    again = ray.get(buffer.actor.take.remote(*take))
    assert [state.rollout_id for state in again[0]["default"][0]] == [
        state.rollout_id for state in taken[0]["default"][0]
    ]
    assert again[1] == taken[1] == {"default": 2}
    assert buffer.ledger()["trained"] == 2
    assert payloads(buffer) == 2


def test_many_puts_at_once_each_get_their_answer(start: Any) -> None:
    buffer = start(max_groups=12, batch_groups=12)

    async def main() -> list[Any]:
        puts = [asyncio.ensure_future(buffer.put(group_of(n, [3, 4]), train_step=5)) for n in range(24)]
        seen: list[Any] = []
        for _ in range(2):
            await buffer.wait_ready({"default": 12})
            seen += [
                group[0].group_id for group in (await buffer.take_train_batch({"default": 12}, train_step=5))["default"]
            ]
        assert await asyncio.gather(*puts) == [Status.COMPLETED] * 24
        with pytest.raises(ValueError, match="is stored already"):
            await asyncio.gather(*[buffer.put(group_of(90, [3, 4]), train_step=5) for _ in range(2)])
        return seen

    assert sorted(asyncio.run(main())) == list(range(24))


class Echo:
    """An agent loop that answers with the prompt, twice."""

    async def generate_group(self, group: list[RolloutState], *, enable_partial_rollout: bool) -> list[RolloutState]:
        for state in group:
            if state.status is not Status.COMPLETED:
                await asyncio.sleep(0.01)
                prompt: Any = state.prompt_ids
                state.response_ids, state.status, state.reward = list(prompt) * 2, Status.COMPLETED, 1.0
        return group

    async def pause(self) -> None:
        pass


@pytest.mark.parametrize("wait", [False, True])
def test_a_colocated_manager_runs_on_it(start: Any, wait: bool) -> None:
    strategy = AsyncProduceStrategyConfig(max_staleness=1, tail_batch_trigger_size=0, over_sample_threshold=0.5).build()
    buffer = start(strategy.rule, wait_for_stragglers=wait)
    sampler = PromptSampler(([n, n] for n in range(1000)), buffer, group_size=2)
    manager = AgentLoopManager(TaskSpec("echo", Echo(), sampler, strategy), buffer)

    async def main() -> None:
        for train_step in range(1, 6):
            result = await manager.produce_batch(4, train_step, model_step=train_step - 1)
            assert len(result.groups) == 4
            assert result.trainable_tokens == 32
            assert all(state.response_ids == [*state.prompt_ids] * 2 for group in result.groups for state in group)

    asyncio.run(main())
    assert buffer.ledger()["trained"] == 160
    assert balanced(buffer.ledger())


@pytest.mark.parametrize("wait", [False, True])
def test_a_disaggregated_manager_runs_on_it(start: Any, wait: bool) -> None:
    strategy = DisaggAsyncProduceStrategyConfig(max_staleness=1, tail_batch_trigger_size=0).build()
    buffer = start(strategy.rule, wait_for_stragglers=wait)
    sampler = PromptSampler(([n, n] for n in range(1000)), buffer, group_size=2)
    manager = DisaggAgentLoopManager(TaskSpec("echo", Echo(), sampler, strategy), buffer)

    async def main() -> list[Any]:
        producing = asyncio.create_task(manager.produce_loop(4))
        trained: list[Any] = []
        for train_step in range(1, 6):
            result = await manager.get_batch(4, train_step)
            assert len(result.groups) == 4
            trained += [group[0].group_id for group in result.groups]
            await manager.pause_produce()
            await manager.continue_produce(train_step)
        await manager.shutdown()
        await producing
        return trained

    trained = asyncio.run(main())
    assert len(set(trained)) == 20
    assert buffer.ledger()["trained"] == 160
    assert becomes(0, lambda: reserved(buffer))
    assert balanced(buffer.ledger())


@pytest.mark.parametrize("mode", [pytest.param("colocated", marks=pytest.mark.long), "disaggregated"])
def test_the_demo_runs_on_it(mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pystale", "demo", "--engine", "ray", "--mode", mode, "--steps", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, "--group-size", "2"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout
    assert "balances" in done.stdout


def test_the_example_of_the_readme_runs(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```py\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    (example,) = [example for example in examples if "RayReplayBuffer" in example]
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
