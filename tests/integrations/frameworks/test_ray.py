"""The buffer on a Ray cluster, with real processes, some of which are killed."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status

ray = pytest.importorskip("ray")
from pystale.integrations.ray import RayReplayBuffer  # noqa: E402

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
