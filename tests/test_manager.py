"""The colocated manager: shares of several tasks, what a batch brings, and how a round of several tasks ends."""

import asyncio
import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
from agent_loops import ScriptedLoop, add_tokens, fail, finish, in_turn, until_cancelled, until_paused
from hypothesis import given
from hypothesis import strategies as st
from production_site import BackgroundSite, Controller, Site, ids
from rollouts import balance, group
from virtual_clock import run

from pystale import (
    AgentLoopManager,
    DisaggAgentLoopManager,
    ProduceBatchStatus,
    ReplayBuffer,
    StalenessRule,
    Status,
    SyncProduceStrategyConfig,
    TaskSpec,
)
from pystale.production import ProductionStalled
from pystale.sampler import PromptsExhausted
from pystale.tasks import task_batch_sizes

C, A, E, F, X = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED, Status.FILTERED
MANAGERS = [Site, BackgroundSite]


def weighted(**weights):
    return {name: (weight, ScriptedLoop(), {}) for name, weight in weights.items()}


# Shares


def shares(weights, batch_size):
    strategy = SyncProduceStrategyConfig().build()
    tasks = [TaskSpec(str(i), None, None, strategy, weight) for i, weight in enumerate(weights)]
    return list(task_batch_sizes(tasks, batch_size).values())


@pytest.mark.parametrize(
    ("weights", "batch_size", "expected"),
    [
        ([1], 8, [8]),
        ([1, 1, 1], 8, [3, 3, 2]),
        ([1, 2], 8, [3, 5]),
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),
        ([0.3, 0.3, 0.3], 100, [34, 33, 33]),
        ([1, 0, 1], 5, [3, 0, 2]),
        ([0.01, 1], 8, [0, 8]),
        ([Fraction(1, 3), Fraction(2, 3)], 3, [1, 2]),
        ([1e-300, 1e300], 4, [0, 4]),
        ([2**70, 2**70], 3, [2, 1]),
    ],
)
def test_a_batch_is_shared_by_weight_with_the_largest_remainders_first(weights, batch_size, expected):
    assert shares(weights, batch_size) == expected


@given(
    st.lists(st.decimals(min_value=0, max_value=100, places=2), min_size=1, max_size=6).filter(any),
    st.integers(1, 500),
)
def test_shares_add_up_are_less_than_one_off_and_ignore_how_weights_are_written(weights, batch_size):
    fractions = [Fraction(weight) for weight in weights]
    total = sum(fractions)
    result = shares(fractions, batch_size)
    assert sum(result) == batch_size
    for share, weight in zip(result, fractions, strict=True):
        assert abs(share - batch_size * weight / total) < 1
    assert shares([float(weight) for weight in weights], batch_size) == result
    assert shares([weight * 7 for weight in fractions], batch_size) == result


# What both managers refuse


@pytest.mark.parametrize("site_class", MANAGERS)
@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (-1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
    ],
)
def test_a_weight_that_is_no_finite_number_is_refused(site_class, weight, error):
    with pytest.raises(error, match="weight of task 'b'"):
        site_class(tasks=weighted(a=1, b=weight))


@pytest.mark.parametrize("site_class", MANAGERS)
def test_tasks_that_do_not_fit_each_other_are_refused(site_class):
    site = site_class(tasks=weighted(a=1, b=1))
    make = site.manager_class
    with pytest.raises(ValueError, match="tasks is empty"):
        make([], site.buffer)
    with pytest.raises(ValueError, match="two tasks have the name 'a'"):
        make([site.specs[0], site.specs[0]], site.buffer)
    with pytest.raises(TypeError, match="a task is a TaskSpec, got str"):
        make(["a"], site.buffer)
    with pytest.raises(ValueError, match="all tasks have weight 0"):
        site_class(tasks=weighted(a=0, b=0))
    with pytest.raises(TypeError, match="a task name is a str"):
        TaskSpec(5, site.loop, site.samplers["a"], site.strategy)


def test_a_strategy_of_the_other_kind_or_not_built_is_refused():
    one, other = Site(), BackgroundSite()
    with pytest.raises(ValueError, match="task 'default' has a DisaggAsyncProduceStrategy; this manager runs"):
        AgentLoopManager(other.specs, other.buffer)
    with pytest.raises(ValueError, match="task 'default' has a AsyncProduceStrategy; this manager runs"):
        DisaggAgentLoopManager(one.specs, one.buffer)
    with pytest.raises(TypeError, match="must be a built strategy, got SyncProduceStrategyConfig; call build"):
        TaskSpec("default", one.loop, one.samplers["default"], SyncProduceStrategyConfig())


@pytest.mark.parametrize("site_class", MANAGERS)
def test_a_buffer_with_other_settings_is_refused_when_the_manager_is_made(site_class):
    site = site_class(max_staleness=1)
    with pytest.raises(ValueError, match="stale_threshold of task 'default' is 1 in the buffer and 2"):
        site.manager_class(site.specs, ReplayBuffer(StalenessRule()))
    with pytest.raises(ValueError, match="task 'default' has no rule"):
        site.manager_class(site.specs, ReplayBuffer({"math": site.strategy.rule}))


@pytest.mark.parametrize("site_class", MANAGERS)
@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (True, TypeError), (1.0, TypeError)])
def test_starvation_steps_out_of_range_are_refused(site_class, steps, error):
    with pytest.raises(error, match="starvation_steps"):
        site_class(manager={"starvation_steps": steps})


@pytest.mark.parametrize("site_class", MANAGERS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1), ValueError, "batch_size must be at least 1"),
        ((True, 1), TypeError, "batch_size must be an int"),
        ((2.0, 1), TypeError, "batch_size must be an int"),
        ((2, 0), ValueError, "train_step must be at least 1"),
        ((2, 1.5), TypeError, "train_step must be an int"),
        ((2, True), TypeError, "train_step must be an int"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_starts(site_class, arguments, error, message):
    site = site_class()
    ask = site.manager.get_batch if site_class is BackgroundSite else site.manager.produce_batch
    steps = {} if site_class is BackgroundSite else {"model_step": 0}
    with pytest.raises(error, match=message):
        run(ask(*arguments, **steps))
    assert site.loop.calls == []


@pytest.mark.parametrize(
    ("model_step", "error", "message"),
    [
        (5, ValueError, "model_step=5 is in the future of train_step=5"),
        (2, ValueError, "model_step=2 are 2 steps old at train_step=5"),
        (-1, ValueError, "model_step must be at least 0"),
        (None, TypeError, "model_step must be an int"),
    ],
)
def test_weights_of_the_future_or_too_old_are_refused(model_step, error, message):
    site = Site(max_staleness=1)
    with pytest.raises(error, match=message):
        run(site.manager.produce_batch(2, 5, model_step=model_step))
    assert site.loop.calls == []


# Batches


def test_a_batch_of_one_task_is_produced_and_taken():
    site = Site(max_staleness=1)
    result = run(site.manager.produce_batch(4, 1, model_step=0))
    assert ids(result) == [0, 1, 2, 3]
    assert result.status is ProduceBatchStatus.NORMAL
    assert (result.trainable_tokens, site.stored()) == (12, {})


def test_every_task_delivers_its_share():
    site = Site(tasks=weighted(math=1, code=3))
    result = run(site.manager.produce_batch(8, 1, model_step=0))
    assert {name: len(own.groups) for name, own in result.task_results.items()} == {"math": 2, "code": 6}
    assert [g[0].task_name for g in result.groups] == ["math"] * 2 + ["code"] * 6


def test_a_task_without_a_share_is_left_alone():
    site = Site(tasks=weighted(math=1, code=0))
    result = run(site.manager.produce_batch(4, 1, model_step=0))
    assert site.loops["code"].calls == []
    assert (len(result.groups), result.task_results["code"].groups) == (4, [])


def test_masks_are_written_by_each_tasks_own_rule():
    strict = {"max_token_staleness": 0, "tail_batch_trigger_size": 0}
    site = Site(tasks={"math": (1, ScriptedLoop(), {}), "code": (1, ScriptedLoop(), strict)}, max_staleness=3)

    async def main():
        for name in ("math", "code"):
            await site.buffer.put(group([1, 2], group_id="old"), name, train_step=3)
        return await site.manager.produce_batch(2, 3, model_step=2)

    result = run(main())
    masks = {g[0].task_name: g[0].response_mask for g in result.groups}
    assert masks["math"] is None
    assert list(masks["code"]) == [0, 1]
    assert {name: own.trainable_tokens for name, own in result.task_results.items()} == {"math": 2, "code": 1}


def test_surplus_and_aborted_groups_are_reported_as_left_over_and_used_first():
    site = Site(
        ScriptedLoop(acts={4: in_turn(until_paused(), finish())}),
        over_sample_threshold=0.25,
        max_staleness=4,
        enable_partial_rollout=True,
    )

    async def main():
        first = await site.manager.produce_batch(4, 1, model_step=0)
        return first, await site.manager.produce_batch(4, 2, model_step=1)

    first, second = run(main())
    assert {status: n for status, n in first.leftover.items() if n} == {A: 1}
    assert site.loop.calls[5] == 4
    assert (first.produced_tokens, second.produced_tokens) == (4 * 3 + 2, 3 + 4 * 3)


def test_a_group_that_expires_at_the_step_is_generated_anew_before_prompts():
    site = Site(max_staleness=1, tail_batch_trigger_size=0)

    async def main():
        await site.buffer.put(group([0, 0], [1, 1], group_id="old"), "default", train_step=2)
        return await site.manager.produce_batch(2, 3, model_step=2)

    result = run(main())
    assert site.loop.calls == ["old", 0]
    assert (result.produced_samples, len(site.loop.generated)) == (2, 2)  # one of the old group's two members


def test_a_batch_that_is_there_already_starts_nothing():
    site = Site(max_staleness=1)

    async def main():
        for group_id in "ab":
            await site.buffer.put(group([0], group_id=group_id), "default", train_step=1)
        return await site.manager.produce_batch(2, 1, model_step=0)

    assert ids(run(main())) == ["a", "b"]
    assert site.loop.calls == []


def test_the_synchronous_strategy_trains_exactly_what_the_newest_weights_generated():
    site = Site(config_class=SyncProduceStrategyConfig)

    async def main():
        return [await site.manager.produce_batch(3, step, model_step=step - 1) for step in (1, 2, 3)]

    for step, result in enumerate(run(main()), 1):
        assert {member.min_model_step for g in result.groups for member in g} == {step - 1}
        assert not any(result.leftover.values())
    assert len(site.loop.calls) == 9


def test_a_round_told_to_stop_early_gives_what_is_there():
    site = Site(
        ScriptedLoop(finish(after=1), {3: until_paused()}),
        should_continue_fn=lambda completed, batch_size: completed < batch_size - 1,
    )
    assert ids(run(site.manager.produce_batch(4, 1, model_step=0))) == [0, 1, 2]


def test_a_round_told_to_stop_with_nothing_is_an_error():
    site = Site(should_continue_fn=lambda completed, batch_size: False)
    with pytest.raises(ProductionStalled, match=r"there is nothing to take.*should_continue_fn ended the round"):
        run(site.manager.produce_batch(4, 1, model_step=0))


def test_what_failed_and_what_was_filtered_is_counted_in_samples_by_task():
    tasks = {
        "math": (1, ScriptedLoop(acts={0: fail()}), {"max_retries": 0}),
        "code": (1, ScriptedLoop(), {"is_valid_sample_fn": lambda group: group[0].group_id != 0}),
    }
    result = run(Site(tasks=tasks, group_size=3).manager.produce_batch(2, 1, model_step=0))
    counts = {name: (own.failed_samples, own.filtered_samples) for name, own in result.task_results.items()}
    assert counts == {"math": (3, 0), "code": (0, 3)}
    assert (result.failed_samples, result.filtered_samples, result.produced_samples) == (3, 3, 12)


def test_rewards_are_summed_before_the_filter():
    rewards = {0: 1.0, 1: {"score": 0.5, "length": 9}, 2: None, 3: math.nan, 4: 2}

    async def act(_loop, members):
        for member in members:
            add_tokens(member, 2)
            member.status, member.reward = C, rewards[member.group_id]

    site = Site(ScriptedLoop(act), is_valid_sample_fn=lambda group: group[0].group_id != 4, prompts=5)
    result = run(site.manager.produce_batch(4, 1, model_step=0))
    assert (result.raw_reward_sum, result.raw_reward_count) == (1.5, 4 - 2)
    assert result.mean_raw_reward == 0.75


def test_times_of_groups_round_and_pause_are_reported():
    site = Site(
        ScriptedLoop(finish(after=2), {1: finish(after=4), 2: until_cancelled()}),
        over_sample_threshold=0.5,
        pause_limit_s=10,
    )
    result = run(site.manager.produce_batch(2, 1, model_step=0))
    assert (result.produce_time_s, result.timing.pause_s) == (4, 10)
    assert (result.timing.count, result.timing.p50_s) == (3, 4)


# The engines that tasks share


def test_engines_are_switched_on_before_and_off_after_every_round():
    site = Site(controller=Controller())

    async def main():
        for step in (1, 2):
            await site.manager.produce_batch(2, step, model_step=step - 1)

    run(main())
    assert site.controller.asked == ["continue", "pause"] * 2


def test_a_task_that_has_its_share_is_not_paused_while_others_have_not():
    asked = []

    class Loop(ScriptedLoop):
        async def pause(self):
            asked.append(asyncio.get_running_loop().time())
            await super().pause()

    tasks = {
        "fast": (1, Loop(acts={1: until_paused()}), {"over_sample_threshold": 1.0}),
        "slow": (1, Loop(finish(after=9)), {}),
    }
    site = Site(tasks=tasks)
    run(site.manager.produce_batch(2, 1, model_step=0))
    assert asked == [9]


def test_engines_that_do_not_answer_are_an_error_once_everything_is_collected():
    class Deaf(Controller):
        async def pause_generation(self):
            await asyncio.Event().wait()

    site = Site(controller=Deaf(), pause_limit_s=10, over_sample_threshold=0.5)
    with pytest.raises(TimeoutError, match="pause_generation has not answered within 10 s"):
        run(site.manager.produce_batch(2, 1, model_step=0))
    assert site.stored() == {C: 3}


def test_an_error_of_the_engines_is_raised_once_everything_is_collected():
    class Broken(Controller):
        def pause_generation(self):
            raise ConnectionError("no route to host")

    site = Site(ScriptedLoop(acts={2: until_paused()}), controller=Broken(), over_sample_threshold=0.5)
    with pytest.raises(ConnectionError, match="no route to host"):
        run(site.manager.produce_batch(2, 1, model_step=0))
    assert site.stored() == {C: 2, A: 1}


# Ends that are no batch


def test_a_task_whose_every_group_fails_ends_the_round_and_the_others_are_kept():
    tasks = {
        "math": (1, ScriptedLoop(until_paused(2)), {"enable_partial_rollout": True}),
        "code": (1, ScriptedLoop(fail("no such sandbox")), {"max_retries": 0}),
    }
    site = Site(tasks=tasks)
    with pytest.raises(ProductionStalled, match=r"task 'code'.*no such sandbox"):
        run(site.manager.produce_batch(4, 1, model_step=0))
    assert site.stored("math") == {A: 2}


def test_running_out_of_prompts_names_the_task():
    site = Site(tasks=weighted(math=1, code=1), prompts=3)
    with pytest.raises(PromptsExhausted, match=r"task 'math'.*Wanted 4 COMPLETED groups, stored: COMPLETED 3"):
        run(site.manager.produce_batch(8, 1, model_step=0))


def test_a_second_batch_at_the_same_time_is_refused():
    site = Site(ScriptedLoop(finish(after=5)))

    async def main():
        first = asyncio.ensure_future(site.manager.produce_batch(2, 1, model_step=0))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="a batch is being produced already"):
            await site.manager.produce_batch(2, 1, model_step=0)
        return await first

    assert len(run(main()).groups) == 2


@pytest.mark.parametrize("partial", [False, True])
def test_cancelling_at_any_moment_loses_no_group_leaves_no_task_and_the_manager_usable(partial):
    for steps in itertools.count():
        tasks = {
            "math": (1, ScriptedLoop(finish(), {2: in_turn(until_paused(1), finish())}), {}),
            "code": (2, ScriptedLoop(finish(), {1: fail(), 4: in_turn(until_paused(1), finish())}), {"max_retries": 1}),
        }

        async def on_release(_released):
            await asyncio.sleep(0)

        site = Site(
            tasks=tasks,
            over_sample_threshold=0.5,
            enable_partial_rollout=partial,
            max_staleness=3,
            on_release=on_release,
            controller=Controller(),
        )

        async def main(site=site, steps=steps):
            producing = asyncio.ensure_future(site.manager.produce_batch(6, 1, model_step=0))
            for _ in range(steps):
                await asyncio.sleep(0)
            producing.cancel()
            await asyncio.wait([producing])
            cancelled = producing.cancelled()
            ledger = site.buffer.ledger()
            drawn = {name: sampler.state_dict()["drawn"] for name, sampler in site.samplers.items()}
            stored = len(site.buffer)
            again = await site.manager.produce_batch(6, 1, model_step=0)
            return cancelled, ledger, drawn, stored, again

        cancelled, ledger, drawn, stored, again = run(main())
        assert len(again.groups) == 6
        assert ledger["in_flight"] == 0
        assert len(set(balance(ledger))) == 1
        if not cancelled:
            break
        assert sum(drawn.values()) - stored in (0, 1), f"cancelled after {steps} steps of the event loop"
    assert steps > 20


# Starvation


def test_a_task_that_delivers_nothing_for_many_batches_is_warned_of_once_per_so_many(caplog):
    site = Site(tasks=weighted(math=1, code=0.01, off=0), manager={"starvation_steps": 3})

    async def main():
        for step in range(1, 8):
            await site.manager.produce_batch(4, step, model_step=step - 1)

    run(main())
    warned = [record.getMessage() for record in caplog.records if "has delivered nothing" in record.getMessage()]
    assert len(warned) == 2
    assert warned[0].startswith("task 'code' has delivered nothing for 3 batches, up to train_step 3: with weight 0.01")


def test_a_task_that_delivers_now_and_then_is_not_warned_of(caplog):
    site = Site(tasks=weighted(math=1, code=1), manager={"starvation_steps": 2})

    async def main():
        for step in range(1, 8):
            await site.manager.produce_batch(1 + step % 2, step, model_step=step - 1)

    run(main())
    assert not caplog.records


def test_weights_need_nothing_but_what_a_spec_has():
    tasks = [SimpleNamespace(task_name="a", exact_weight=Fraction(1)), SimpleNamespace(task_name="b", exact_weight=0)]
    assert task_batch_sizes(tasks, 3) == {"a": 3, "b": 0}
