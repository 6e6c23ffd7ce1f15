"""Random histories of producing and training: where every group is, after every event.

Generation takes random times on a clock that jumps, ends in every way there is, and rounds are cancelled at random
moments. At any time a group drawn is in flight, stored, trained or gone, and in one of these places only.
"""

import asyncio
import random

import pytest
from agent_loops import add_tokens, clear
from production_line import Line
from rollouts import balance
from virtual_clock import run

from pystale import ReplayBuffer, Status
from pystale.production import ProductionStalled
from pystale.sampler import PromptSampler, PromptsExhausted

IN_FLIGHT, STORED, TRAINED, GONE = "in flight", "stored", "trained", "gone"


class Watched(ReplayBuffer):
    """Buffer that follows every group through its places and checks the sums after every operation."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **{**settings, "on_release": self.released})
        self.places = {}
        self.log = []

    def move(self, group_id, here, there):
        assert self.places.get(group_id) == here, f"group {group_id} goes from {here} to {there}"
        self.places[group_id] = there
        self.log.append((group_id, there))

    def check(self):
        assert list(self.places.values()).count(STORED) == len(self)
        produced, accounted_for = balance(self.ledger())
        assert produced == accounted_for

    def released(self, pairs):
        for group_id in {state.group_id for state, _ in pairs if state.response_ids is None}:
            if self.places[group_id] is not GONE:
                self.places[group_id] = GONE  # discarded, not merely reset
                self.log.append((group_id, GONE))

    async def get(self, n, task_name="default", status=Status.COMPLETED):
        groups = await super().get(n, task_name, status)
        for members in groups:
            self.move(members[0].group_id, STORED, IN_FLIGHT)
        self.check()
        return groups

    async def put(self, group, *args, **steps):
        group_id = group[0].group_id
        status = await super().put(group, *args, **steps)
        if self.places[group_id] is not GONE:
            self.move(group_id, IN_FLIGHT, STORED)
        self.check()
        return status

    async def reject(self, group, *args):
        self.move(group[0].group_id, IN_FLIGHT, GONE)
        await super().reject(group, *args)
        self.check()

    async def refresh_staleness(self, train_step, **pools):
        moved = await super().refresh_staleness(train_step, **pools)
        self.check()
        return moved

    async def take_train_batch(self, sizes, *, train_step):
        batch = await super().take_train_batch(sizes, train_step=train_step)
        for members in batch.get("default", []):
            self.move(members[0].group_id, STORED, TRAINED)
        self.check()
        return batch


class WatchedSampler(PromptSampler):
    async def sample(self, task_name, statuses):
        group = await super().sample(task_name, statuses)
        if group[0].group_id not in self.buffer.places:
            self.buffer.move(group[0].group_id, None, IN_FLIGHT)
        assert self.buffer.places[group[0].group_id] is IN_FLIGHT
        return group


class RandomLoop:
    """Agent loop that takes its time and ends in any way."""

    def __init__(self, rng):
        self.rng = rng
        self.model_step = 0
        self.running = set()
        self.paused = asyncio.Event()

    async def generate_group(self, group, *, enable_partial_rollout):
        group_id = group[0].group_id
        assert group_id not in self.running, "handed out twice"
        self.running.add(group_id)
        try:
            members = [member for member in group if member.status is not Status.COMPLETED]
            if not enable_partial_rollout:
                for member in members:
                    clear(member)
            self.paused.clear()
            for member in members:
                await self.generate(member)
            return group
        finally:
            self.running.discard(group_id)

    async def generate(self, member):
        how = self.rng.choices(
            ("complete", "abort", "fail", "raise", "filter", "cancel", "hang", "deaf", "skip"),
            (30, 3, 2, 3, 2, 1, 3, 1, 1),
        )[0]
        for _ in range(self.rng.randrange(4)):
            if how != "deaf" and self.paused.is_set():
                how = "abort"
                break
            add_tokens(member, self.rng.randrange(1, 4), self.model_step)
            await asyncio.sleep(self.rng.choice((0, 0.1, 1, 7)))
        if how == "complete":
            member.status, member.reward = Status.COMPLETED, self.rng.random()
        elif how == "abort":
            member.status = Status.ABORTED
        elif how == "fail":
            member.status = Status.FAILED
        elif how == "filter":
            member.status = Status.FILTERED
        elif how == "raise":
            raise RuntimeError("bad luck")
        elif how == "cancel":
            raise asyncio.CancelledError
        elif how == "hang":
            for _ in range(50):
                if not self.paused.is_set():
                    await asyncio.sleep(1)
            member.status = Status.ABORTED
        elif how == "deaf":
            await asyncio.sleep(300)

    async def pause(self):
        await asyncio.sleep(self.rng.choice((0, 1, 10)))
        if self.rng.random() < 0.2:
            raise ConnectionError
        self.paused.set()


async def history(seed):
    """Play one history; return the order of its events."""
    rng = random.Random(seed)
    partial = rng.random() < 0.5
    interval = rng.randrange(1, 3)
    line = Line(
        RandomLoop(rng),
        prompts=rng.choice((20, 1000)),
        group_size=1,
        interval=interval,
        buffer_class=Watched,
        pause_limit_s=20,
        over_sample_threshold=rng.choice((0.0, 0.3, 1.5)),
        enable_partial_rollout=partial,
        max_staleness=rng.randrange(3),
        max_token_staleness=rng.choice((None, 0, 1)),
        tail_batch_trigger_size=rng.choice((-1, 0, 1, 3)),
        spare_aborted=rng.random() < 0.5,
        max_rerolls=rng.choice((None, 0, 1)),
        max_retries=rng.randrange(3),
        is_valid_sample_fn=rng.choice((None, lambda group: group[0].group_id % 7 != 0)),
    )
    line.sampler = WatchedSampler(line.sampler._prompts, line.buffer, rng.randrange(1, 4))
    buffer = line.buffer
    for train_step in range(1, 12):
        model_step = (train_step - 1) // interval * interval
        line.loop.model_step = model_step
        batch_size = rng.randrange(1, 5)
        producing = asyncio.ensure_future(line.produce(batch_size, train_step=train_step, model_step=model_step))
        if rng.random() < 0.3:
            await asyncio.wait([producing], timeout=rng.choice((0, 0.05, 1, 3, 8)))
            producing.cancel()
        await asyncio.wait([producing])
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert IN_FLIGHT not in buffer.places.values()
        assert buffer.ledger()["in_flight"] == 0
        assert not line.loop.running
        if not producing.cancelled() and producing.exception() is None:
            assert await buffer.count() >= batch_size
        elif not producing.cancelled():
            assert isinstance(producing.exception(), (PromptsExhausted, ProductionStalled))
        batch = await buffer.take_train_batch({"default": batch_size}, train_step=train_step)
        for members in batch.get("default", []):
            assert {member.status for member in members} == {Status.COMPLETED}
            for member in members:
                oldest = member.min_model_step
                assert oldest is None or train_step - oldest - 1 < line.strategy.stale_threshold
    return buffer.log


@pytest.mark.parametrize("seed", range(100))
def test_every_group_is_in_one_place_after_every_event(seed):
    run(history(seed))


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_order_of_events(seed):
    assert run(history(seed)) == run(history(seed))
