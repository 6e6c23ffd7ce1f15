"""Whole runs of trainer, production and engine, in an order and with delays that a seed decides.

Responses take random times on a clock that jumps; groups abort, fail, raise, hang and are filtered; weights are
published at random moments, waits and production are cancelled and taken up again; and whatever is ready at the same
time runs in random order. After every operation of the buffer the token account balances, every group is in one place,
and what is taken is fresh (see `WatchedBuffer`). The clock notices when nothing can happen any more, and when a task is
left at the end.
"""

import asyncio
import random

import pytest
from agent_loops import clear
from production_site import BackgroundSite, Site
from virtual_clock import run
from watched_buffer import IN_FLIGHT, WatchedBuffer

from pystale import ProduceBatchStatus, Status
from pystale.production import ProductionStalled
from pystale.sampler import PromptSampler, PromptsExhausted

LAST_STEP = 6


class Engine:
    """Generates with the weights of `version`."""

    def __init__(self, rng):
        self.rng = rng
        self.version = 0
        self.generating = True
        self.requests = 0

    async def pause_generation(self):
        await asyncio.sleep(self.rng.choice((0, 0, 2)))
        self.generating = False

    async def continue_generation(self):
        await asyncio.sleep(self.rng.choice((0, 0, 2)))
        self.generating = True


class RandomAgentLoop:
    """Agent loop that takes its time and ends in any way."""

    def __init__(self, rng, engine):
        self.rng, self.engine = rng, engine
        self.running = set()
        self.pauses = 0

    async def generate_group(self, group, *, enable_partial_rollout):
        name = group[0].task_name, group[0].group_id
        assert name not in self.running, "handed out twice"
        self.running.add(name)
        self.engine.requests += 1
        try:
            members = [member for member in group if member.status is not Status.COMPLETED]
            for member in members:
                if not enable_partial_rollout:
                    clear(member)
                member.extra_fields["version"] = self.engine.version
            for member in members:
                await self.generate(member)
            return group
        finally:
            self.engine.requests -= 1
            self.running.discard(name)

    async def generate(self, member):
        rng, pauses = self.rng, self.pauses
        how = rng.choices(
            ("complete", "abort", "fail", "raise", "filter", "cancel", "hang", "deaf", "skip"),
            (60, 3, 2, 2, 2, 1, 2, 1, 1),
        )[0]
        reports_versions = rng.random() < 0.5
        for _ in range(rng.randrange(1, 4)):
            await asyncio.sleep(rng.choice((0, 0, 0.1, 1, 4)))
            if how != "deaf" and self.pauses > pauses:
                how = "abort"
                break
            n = rng.randrange(1, 4)
            member.response_ids = [*member.response_ids, *range(n)]
            if reports_versions:
                missing = len(member.response_ids) - len(member.response_model_steps)
                member.response_model_steps = [*member.response_model_steps, *[self.engine.version] * missing]
        if how == "complete":
            member.status, member.reward = Status.COMPLETED, rng.random()
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
            for _ in range(10):
                if self.pauses == pauses:
                    await asyncio.sleep(3)
            member.status = Status.ABORTED
        elif how == "deaf":
            await asyncio.sleep(100)

    async def pause(self):
        await asyncio.sleep(self.rng.choice((0, 0, 1, 10)))
        if self.rng.random() < 0.1:
            raise ConnectionError
        self.pauses += 1


class WatchedSampler(PromptSampler):
    """Tells the buffer of new prompts, and takes its time before it draws."""

    def __init__(self, *args, rng):
        super().__init__(*args)
        self.rng = rng

    async def sample(self, task_name, statuses):
        await asyncio.sleep(self.rng.choice((0, 0, 0, 0.1)))
        group = await super().sample(task_name, statuses)
        name = task_name, group[0].group_id
        if name not in self.buffer.places:
            self.buffer.draw(name)
        assert self.buffer.places[name] is IN_FLIGHT
        return group


class Run:
    """One run: what is in it, and what happens, as the seed says."""

    def __init__(self, seed, site_class):
        self.rng = rng = random.Random(seed)
        self.engine = Engine(rng)
        self.interval = rng.choice((1, 1, 2, 3))
        self.finite = rng.random() < 0.15
        self.ends = (PromptsExhausted,) if self.finite else ()
        self.batch_size = rng.randrange(1, 6)
        self.trained = []
        names = ("math", "code", "chat")[: rng.choice((1, 1, 2, 3))]
        run_of = self

        class RandomSite(site_class):
            def sampler(self, prompts, group_size):
                return WatchedSampler([[n] for n in range(prompts)], self.buffer, group_size, rng=run_of.rng)

        async def valid(group):
            await asyncio.sleep(rng.choice((0, 0, 1)))
            return rng.random() < 0.95

        async def on_release(_released):
            await asyncio.sleep(rng.choice((0, 0, 0.5)))

        def settings():
            return {
                "over_sample_threshold": rng.choice((0.0, 0.3, 1.0)),
                "enable_partial_rollout": rng.random() < 0.6,
                "max_staleness": rng.randrange(3),
                "max_token_staleness": rng.choice((None, None, 0, 1)),
                "tail_batch_trigger_size": rng.choice((-1, 0, 0, 2)),
                "spare_aborted": rng.random() < 0.3,
                "max_retries": rng.randrange(3),
                "is_valid_sample_fn": valid if rng.random() < 0.5 else None,
            }

        self.site = RandomSite(
            tasks={name: (rng.choice((1, 2, 0.5)), RandomAgentLoop(rng, self.engine), settings()) for name in names},
            prompts=rng.randrange(5, 40) if self.finite else 3000,
            group_size=rng.randrange(1, 3),
            interval=self.interval,
            buffer_class=WatchedBuffer,
            on_release=on_release,
            controller=self.engine if rng.random() < 0.5 else None,
            max_rerolls=rng.choice((None, None, 2)),
            **rng.choice(({}, {}, {"group_mode": "members"}, {"group_mode": "members", "min_fresh": 2})),
            buffer={"wait_for_stragglers": rng.random() < 0.4},
            pause_repeat_s=3,
            pause_limit_s=20,
        )
        self.manager, self.buffer = self.site.manager, self.site.buffer

    async def cancelled_or(self, call, likely):
        """Result of a call; sometimes it is cancelled at a random moment and made again, until one was not."""
        while self.rng.random() < likely:
            task = asyncio.ensure_future(call())
            await asyncio.wait([task], timeout=self.rng.choice((0, 0.05, 1, 5)))
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                return task.result()
        return await call()

    def check_idle(self):
        """Nothing is running, and no group is anywhere but stored, trained or gone."""
        assert self.engine.requests == 0
        assert IN_FLIGHT not in self.buffer.places.values()
        assert not self.buffer.report().reserved
        assert self.buffer.ledger()["in_flight"] == 0

    def check_batch(self, result, train_step):
        assert len(result.groups) == self.batch_size
        assert sum(len(own.groups) for own in result.task_results.values()) == self.batch_size
        assert result.produced_tokens >= 0
        self.trained.append(train_step)


class ColocatedRun(Run):
    def __init__(self, seed):
        super().__init__(seed, Site)

    async def play(self):
        for train_step in range(1, LAST_STEP + 1):
            self.engine.version = model_step = (train_step - 1) // self.interval * self.interval

            async def call(train_step=train_step, model_step=model_step):
                return await self.manager.produce_batch(self.batch_size, train_step, model_step=model_step)

            try:
                result = await self.cancelled_or(call, 0.3)
            except (*self.ends, ProductionStalled):
                self.check_idle()
                break
            self.check_idle()
            self.check_batch(result, train_step)
        return self.buffer.log


class BackgroundRun(Run):
    def __init__(self, seed):
        super().__init__(seed, BackgroundSite)
        self.producing = None
        self.published = 0

    async def produce(self):
        """Start production. It is running when this returns: what is ready runs before time passes."""
        self.producing = asyncio.ensure_future(self.manager.produce_loop(self.batch_size))
        await asyncio.sleep(0.001)

    async def restart(self):
        """Cancel production at some moment, and run it again."""
        await asyncio.sleep(self.rng.choice((0, 0.3, 2)))
        self.producing.cancel()
        await asyncio.wait([self.producing])
        self.check_idle()
        await self.produce()

    async def publish(self, model_step):
        await self.cancelled_or(self.manager.pause_produce, 0.2)
        self.check_idle()
        await asyncio.sleep(self.rng.choice((0, 1)))
        self.engine.version = self.published = model_step
        await self.cancelled_or(lambda: self.manager.continue_produce(model_step), 0.1)

    async def play(self):
        rng, manager = self.rng, self.manager
        await self.produce()
        train_step = 1
        while train_step <= LAST_STEP:
            if rng.random() < 0.1:
                await self.restart()
            if rng.random() < 0.1:
                await self.publish(self.published)  # engines idle for something else
            call = lambda step=train_step: manager.get_batch(self.batch_size, step)  # noqa: E731
            try:
                result = await self.cancelled_or(call, 0.2)
            except (*self.ends, ProductionStalled):
                break
            expired = result.status is ProduceBatchStatus.EXPIRED_BATCH
            if result.groups:
                self.check_batch(result, train_step)
                await asyncio.sleep(rng.choice((0, 0.5, 3, 10)))
                train_step += 1
            else:
                assert expired
                assert train_step - 1 > self.published
            if expired or train_step - 1 - self.published >= self.interval:
                await self.publish(train_step - 1)
        how = rng.randrange(3)
        if how == 0:
            await manager.shutdown()
        elif how == 1:
            manager.shutdown()
        else:
            self.producing.cancel()
        await asyncio.wait([self.producing])
        if not self.producing.cancelled() and self.producing.exception() is not None:
            assert isinstance(self.producing.exception(), ProductionStalled)
        self.check_idle()
        return self.buffer.log


def simulate(kind, seed):
    played = kind(seed)
    return played, run(played.play(), played.rng)


@pytest.mark.parametrize("seed", range(100))
def test_a_colocated_run_keeps_all_it_promises(seed):
    simulate(ColocatedRun, seed)


@pytest.mark.parametrize("seed", range(100))
def test_a_run_in_the_background_keeps_all_it_promises(seed):
    simulate(BackgroundRun, seed)


@pytest.mark.parametrize("kind", [ColocatedRun, BackgroundRun])
def test_the_same_seed_gives_the_same_run(kind):
    first, second = simulate(kind, 7), simulate(kind, 7)
    assert first[1] == second[1]
    assert len(first[1]) > 20


@pytest.mark.parametrize("kind", [ColocatedRun, BackgroundRun])
def test_most_runs_get_to_their_last_step(kind):
    """Or the checks above would check little."""
    finished = sum(simulate(kind, seed)[0].trained[-1:] == [LAST_STEP] for seed in range(1000, 1010))
    assert finished >= 7


@pytest.mark.long
@pytest.mark.parametrize("kind", [ColocatedRun, BackgroundRun])
@pytest.mark.parametrize("hundred", range(1, 21))
def test_thousands_of_runs_keep_all_they_promise(kind, hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        try:
            simulate(kind, seed)
        except BaseException as error:
            raise AssertionError(f"{kind.__name__}({seed}): {error!r}") from error
