"""The manager that produces in the background: running ahead, weight updates, waits that can and cannot end."""

import asyncio
import functools
import itertools

import pytest
from agent_loops import ScriptedLoop, come_back, fail, finish, in_turn, until_cancelled, until_paused
from production_site import BackgroundSite, Controller, ids
from rollouts import balance, group
from virtual_clock import run

from pystale import (
    AsyncProduceStrategyConfig,
    DisaggAgentLoopManager,
    DisaggAsyncProduceStrategyConfig,
    ProduceBatchStatus,
    ReplayBuffer,
    Status,
)
from pystale.production import ProductionStalled
from pystale.sampler import PromptsExhausted

C, A, E, F, X = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED, Status.FILTERED
NORMAL = ProduceBatchStatus.NORMAL
UPDATE = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
EXPIRED = ProduceBatchStatus.EXPIRED_BATCH


def play(site, trainer, batch_size=2):
    """Run a trainer beside the site's production, then shut production down."""

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(batch_size))
        try:
            return await trainer(site.manager)
        finally:
            await site.manager.shutdown()
            await asyncio.wait([producing])
            if not producing.cancelled():
                producing.exception()

    return run(main())


async def settled():
    """Let everything happen that needs no time to pass."""
    await asyncio.sleep(0.001)


# Settings


def test_the_settings_are_those_of_the_colocated_producer():
    assert DisaggAsyncProduceStrategyConfig().model_dump() == AsyncProduceStrategyConfig().model_dump()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_staleness", True),
        ("max_staleness", -1),
        ("max_token_staleness", 1.0),
        ("over_sample_threshold", float("nan")),
        ("tail_batch_trigger_size", -2),
        ("max_retries", -1),
        ("max_rerolls", "1"),
        ("stale_threshold", 1),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        DisaggAsyncProduceStrategyConfig(**{name: value})


@pytest.mark.parametrize(
    ("max_staleness", "interval", "train_step", "expired"),
    [
        (0, 1, 1, False),
        (0, 1, 2, True),
        (1, 1, 2, False),
        (1, 1, 3, True),
        (0, 2, 2, False),
        (1, 2, 4, False),
        (1, 2, 5, True),
    ],
)
def test_weights_are_expired_once_all_they_generate_would_be_too_old(max_staleness, interval, train_step, expired):
    strategy = DisaggAsyncProduceStrategyConfig(max_staleness=max_staleness).build(interval)
    assert strategy.model_expired(train_step, 0) is expired
    assert strategy.model_expired(train_step + 7, 7) is expired


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model_step": -1}, ValueError, "model_step must be at least 0"),
        ({"model_step": True}, TypeError, "model_step must be an int"),
        ({"train_step": 0}, ValueError, "train_step must be at least 1"),
        ({"model_step": 5, "train_step": 5}, ValueError, "model_step=5 is in the future of train_step=5"),
    ],
)
def test_steps_out_of_range_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        BackgroundSite(manager=arguments)


def test_a_batch_size_or_model_step_out_of_range_is_refused():
    site = BackgroundSite()
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        run(site.manager.produce_loop(0))
    with pytest.raises(ValueError, match="model_step must be at least 0"):
        run(site.manager.continue_produce(-1))
    assert site.manager.status is NORMAL


# Running ahead


@pytest.mark.parametrize(("max_staleness", "interval", "batches"), [(0, 1, 1), (1, 1, 2), (0, 3, 3), (1, 2, 4)])
def test_production_runs_ahead_until_its_weights_would_be_too_old_and_stops(max_staleness, interval, batches):
    site = BackgroundSite(max_staleness=max_staleness, interval=interval)

    async def trainer(manager):
        await asyncio.sleep(100)
        return manager.status, site.stored()

    assert play(site, trainer) == (EXPIRED, {C: 2 * batches})


def test_training_step_by_step_uses_only_what_the_newest_weights_generated_at_staleness_zero():
    site = BackgroundSite(max_staleness=0)

    async def trainer(manager):
        steps = []
        for train_step in range(1, 6):
            result = await manager.get_batch(2, train_step)
            steps.append({member.min_model_step for g in result.groups for member in g})
            await manager.pause_produce()
            await manager.continue_produce(train_step)
        return steps

    assert play(site, trainer) == [{0}, {1}, {2}, {3}, {4}]


def test_what_runs_when_a_step_is_done_goes_on_and_counts_for_the_next():
    site = BackgroundSite(
        ScriptedLoop(finish(after=1), {2: finish(after=5)}), over_sample_threshold=0.5, max_staleness=1
    )

    async def trainer(manager):
        first = ids(await manager.get_batch(2, 1))
        await asyncio.sleep(50)
        return first, site.stored()

    assert play(site, trainer) == ([0, 1], {C: 3})
    assert site.loop.calls == [0, 1, 2, 3, 4]  # two for each of two steps, and one more


def test_groups_that_expire_while_they_wait_are_made_up_for():
    site = BackgroundSite(max_staleness=1, tail_batch_trigger_size=0)

    async def trainer(manager):
        await asyncio.sleep(1)
        await site.buffer.put(group([0], [0], group_id="old"), "default", train_step=1)
        for train_step in range(1, 5):
            result = await manager.get_batch(2, train_step)
            assert len(result.groups) == 2
            await manager.pause_produce()
            await manager.continue_produce(train_step)
        return True

    assert play(site, trainer)


def test_the_trainer_gets_an_empty_batch_when_it_has_newer_weights_than_stopped_production():
    site = BackgroundSite(max_staleness=0, interval=2)

    async def trainer(manager):
        first = await manager.get_batch(2, 1)
        await asyncio.sleep(10)
        empty = await manager.get_batch(2, 2)
        stored = site.stored()
        await manager.pause_produce()
        await manager.continue_produce(1)
        return first, empty, stored, await manager.get_batch(2, 2)

    first, empty, stored, second = play(site, trainer)
    assert (empty.status, empty.groups, stored) == (EXPIRED, [], {C: 2})
    assert empty.leftover[C] == 2
    assert (len(first.groups), len(second.groups)) == (2, 2)


def test_a_batch_that_is_there_is_trained_though_production_has_stopped():
    site = BackgroundSite(max_staleness=0)

    async def trainer(manager):
        await asyncio.sleep(10)
        return await manager.get_batch(2, 1)

    result = play(site, trainer)
    assert (result.status, len(result.groups)) == (EXPIRED, 2)


def test_stopped_with_neither_newer_weights_nor_a_batch_is_an_error_with_the_whole_state():
    site = BackgroundSite(max_staleness=0)

    async def trainer(manager):
        await asyncio.sleep(10)
        with pytest.raises(ProductionStalled) as caught:
            await manager.get_batch(5, 1)
        return str(caught.value)

    message = play(site, trainer)
    for part in (
        "no batch for train_step 1: production has stopped since its weights are too old",
        "Wanted: {'default': 5}",
        "stored: 'default': COMPLETED 2",
        "consumed so far: {'default': 0}",
        "Status EXPIRED_BATCH, model_step 0, produced for step 2, next step to consume 1",
    ):
        assert part in message


def test_surplus_still_running_when_production_has_stopped_is_waited_for():
    site = BackgroundSite(ScriptedLoop(finish(after=1), {2: finish(after=9)}), over_sample_threshold=0.5)

    async def trainer(manager):
        await asyncio.sleep(2)
        assert manager.status is EXPIRED
        return await manager.get_batch(3, 1), asyncio.get_running_loop().time()

    result, time = play(site, trainer)
    assert (ids(result), time) == ([0, 1, 2], 9)


def test_surplus_that_ends_without_filling_the_batch_ends_the_wait():
    async def slow_failure(_loop, _members):
        await asyncio.sleep(9)
        raise RuntimeError("broken")

    site = BackgroundSite(ScriptedLoop(finish(after=1), {2: slow_failure}), over_sample_threshold=0.5, max_retries=0)

    async def trainer(manager):
        await asyncio.sleep(2)
        with pytest.raises(ProductionStalled, match="broken"):
            await manager.get_batch(3, 1)
        return asyncio.get_running_loop().time()

    assert play(site, trainer) == 9


def test_weights_whose_tokens_could_not_be_trained_any_more_stop_production_too():
    """Otherwise it would generate for ever what expires as it is put."""
    site = BackgroundSite(
        ScriptedLoop(finish(after=1)), max_staleness=3, max_token_staleness=0, tail_batch_trigger_size=0
    )

    async def trainer(manager):
        await manager.get_batch(2, 1)
        await asyncio.sleep(100)
        result = await manager.get_batch(2, 2)
        generated = len(site.loop.calls)
        await asyncio.sleep(100)
        assert len(site.loop.calls) == generated
        return result.status, result.groups, manager.status

    assert play(site, trainer) == (EXPIRED, [], EXPIRED)


def test_steps_that_the_trainer_skips_are_not_produced_for():
    site = BackgroundSite(max_staleness=0, manager={"model_step": 100})

    async def trainer(manager):
        first = await manager.get_batch(2, 101)
        await manager.pause_produce()
        await manager.continue_produce(200)
        second = await manager.get_batch(2, 201)
        await settled()
        return {m.min_model_step for g in first.groups + second.groups for m in g}, len(site.loop.calls)

    steps, generated = play(site, trainer)
    assert steps == {100, 200}
    assert generated <= 6


# Weight updates


def test_a_weight_update_interrupts_production_and_loses_nothing():
    site = BackgroundSite(
        ScriptedLoop(
            finish(after=1), {0: in_turn(until_paused(2), finish(1)), 1: in_turn(until_cancelled(4), finish(1))}
        ),
        enable_partial_rollout=True,
        max_staleness=1,
        pause_repeat_s=2,
        pause_limit_s=5,
    )

    async def trainer(manager):
        await asyncio.sleep(3)
        seconds = await manager.pause_produce()
        paused = manager.status, site.stored(), site.buffer.ledger()["in_flight"]
        await manager.continue_produce(1)
        result = await manager.get_batch(2, 2)
        return seconds, paused, result

    seconds, paused, result = play(site, trainer)
    assert (seconds, paused) == (5, (UPDATE, {A: 2}, 0))
    assert result.timing.pause_s == 5
    assert {tuple(m.response_model_steps) for g in result.groups for m in g} == {(0, 0, 1), (0, 0, 0, 0, 1)}
    assert result.produced_tokens == 2 + 4 + 1 + 1


def test_a_second_round_counts_only_its_new_tokens():
    site = BackgroundSite(
        ScriptedLoop(acts={0: in_turn(until_paused(5), finish(4))}), enable_partial_rollout=True, max_staleness=2
    )

    async def trainer(manager):
        await settled()
        await manager.pause_produce()
        await manager.continue_produce(0)
        return (await manager.get_batch(1, 1)).produced_tokens

    assert play(site, trainer, 1) == 5 + 4


def test_tokens_are_stamped_with_the_version_served_when_they_were_begun():
    """Also where new weights are taken without a pause."""
    site = BackgroundSite(ScriptedLoop(finish(after=5)), max_staleness=4)

    async def trainer(manager):
        await asyncio.sleep(1)
        await manager.continue_produce(3)
        result = await manager.get_batch(2, 4)
        return [list(m.response_model_steps) for g in result.groups for m in g]

    assert play(site, trainer) == [[0, 0, 0], [0, 0, 0]]


def test_engines_are_stopped_before_the_update_and_started_after_it():
    site = BackgroundSite(controller=Controller(), max_staleness=1)

    async def trainer(manager):
        await manager.get_batch(2, 1)
        await manager.pause_produce()
        assert site.controller.asked == ["pause"]
        await manager.continue_produce(1)
        return list(site.controller.asked)

    assert play(site, trainer) == ["pause", "continue"]
    assert site.controller.asked == ["pause", "continue", "pause"]  # the last one by the shutdown


def test_nothing_is_begun_while_production_is_paused():
    site = BackgroundSite(max_staleness=3)

    async def trainer(manager):
        await manager.pause_produce()
        begun = len(site.loop.calls)
        await asyncio.sleep(100)
        return begun, len(site.loop.calls)

    begun, later = play(site, trainer)
    assert begun == later


def test_a_group_drawn_while_the_pause_came_is_kept_and_not_begun():
    site = BackgroundSite(max_staleness=3)
    sample = site.samplers["default"].sample

    async def slowly(task_name, statuses):
        await asyncio.sleep(5)
        return await sample(task_name, statuses)

    site.samplers["default"].sample = slowly

    async def trainer(manager):
        await asyncio.sleep(1)
        await manager.pause_produce()
        time = asyncio.get_running_loop().time()
        return time, site.loop.calls, site.stored(), site.buffer.ledger()["in_flight"]

    assert play(site, trainer) == (5, [], {A: 1}, 0)


def test_a_sampler_that_hangs_does_not_hold_the_update_for_ever():
    site = BackgroundSite(max_staleness=3, pause_limit_s=20)
    sample = site.samplers["default"].sample
    asked = itertools.count()

    async def hanging(task_name, statuses):
        if next(asked) == 1:
            await asyncio.Event().wait()
        return await sample(task_name, statuses)

    site.samplers["default"].sample = hanging

    async def trainer(manager):
        await asyncio.sleep(1)
        seconds = await manager.pause_produce()
        await manager.continue_produce(1)
        return seconds, len((await manager.get_batch(2, 2)).groups)

    assert play(site, trainer) == (20, 2)


def test_a_wait_for_a_batch_survives_a_weight_update_beside_it():
    site = BackgroundSite(ScriptedLoop(finish(after=5)), max_staleness=2)

    async def trainer(manager):
        waiting = asyncio.ensure_future(manager.get_batch(2, 1))
        await asyncio.sleep(1)
        await manager.pause_produce()
        await asyncio.sleep(1)
        await manager.continue_produce(0)
        return len((await waiting).groups)

    assert play(site, trainer) == 2


# Waits that cannot end


def test_asking_a_paused_producer_for_what_is_not_there_is_an_error():
    site = BackgroundSite(ScriptedLoop(finish(after=5)))

    async def trainer(manager):
        await manager.pause_produce()
        with pytest.raises(ProductionStalled, match="production is paused; call continue_produce first"):
            await manager.get_batch(2, 1)
        return True

    assert play(site, trainer)


def test_asking_without_production_is_an_error_unless_the_batch_is_there():
    site = BackgroundSite()

    async def main():
        with pytest.raises(ProductionStalled, match="produce_loop has not been started"):
            await site.manager.get_batch(2, 1)
        for group_id in "ab":
            await site.buffer.put(group([0], group_id=group_id), "default", train_step=1)
        return await site.manager.get_batch(2, 1)

    assert ids(run(main())) == ["a", "b"]


def test_production_may_be_started_and_asked_in_any_order():
    site = BackgroundSite()

    async def main():
        asking = asyncio.ensure_future(site.manager.get_batch(2, 1))
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        result = await asking
        await site.manager.shutdown()
        await producing
        return len(result.groups)

    assert run(main()) == 2


def test_an_all_failing_source_ends_production_and_the_wait_with_the_last_reason():
    site = BackgroundSite(ScriptedLoop(fail("no route to host")), max_retries=0)

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        with pytest.raises(ProductionStalled, match=r"produce_loop has ended with ProductionStalled.*no route to host"):
            await site.manager.get_batch(2, 1)
        with pytest.raises(ProductionStalled, match="no route to host"):
            await producing

    run(main())
    assert len(site.buffer) == 0


def test_when_prompts_run_out_what_is_there_is_trained_first():
    site = BackgroundSite(max_staleness=9, prompts=5)

    async def trainer(manager):
        await settled()
        first, second = await manager.get_batch(2, 1), await manager.get_batch(2, 2)
        with pytest.raises(PromptsExhausted, match=r"no batch for train_step 3: task 'default'.*stored: COMPLETED 1"):
            await manager.get_batch(2, 3)
        return ids(first) + ids(second)

    assert play(site, trainer) == [0, 1, 2, 3]


def test_groups_that_expire_after_prompts_ran_out_are_generated_anew():
    site = BackgroundSite(max_staleness=1, prompts=4, tail_batch_trigger_size=9)

    async def trainer(manager):
        await settled()
        taken = ids(await manager.get_batch(2, 1))
        await manager.pause_produce()
        await manager.continue_produce(1)
        await settled()
        await manager.pause_produce()
        await manager.continue_produce(2)
        result = await manager.get_batch(2, 3)
        return taken, ids(result), {m.min_model_step for g in result.groups for m in g}

    assert play(site, trainer) == ([0, 1], [2, 3], {2})


def test_one_task_without_prompts_ends_the_wait_though_others_go_on():
    tasks = {
        "math": (1, ScriptedLoop(finish(after=1000)), {}),
        "code": (1, ScriptedLoop(come_back(X)), {}),
    }
    site = BackgroundSite(tasks=tasks, prompts=3)

    async def trainer(manager):
        with pytest.raises(PromptsExhausted, match=r"task 'code'.*3 filtered"):
            await manager.get_batch(2, 1)
        return asyncio.get_running_loop().time()

    assert play(site, trainer) < 1


# Several tasks


def test_every_task_delivers_its_share_and_reports_what_it_did():
    tasks = {"math": (1, ScriptedLoop(finish(2)), {}), "code": (2, ScriptedLoop(finish(5)), {})}
    site = BackgroundSite(tasks=tasks, max_staleness=1)

    async def trainer(manager):
        return await manager.get_batch(6, 1)

    result = play(site, trainer, 6)
    assert {name: len(own.groups) for name, own in result.task_results.items()} == {"math": 2, "code": 4}
    assert {name: own.trainable_tokens for name, own in result.task_results.items()} == {"math": 4, "code": 20}


def test_all_tasks_stop_when_the_weights_are_too_old_for_one():
    tasks = {"math": (1, ScriptedLoop(), {"max_staleness": 0}), "code": (1, ScriptedLoop(), {"max_staleness": 5})}
    site = BackgroundSite(tasks=tasks)

    async def trainer(manager):
        await asyncio.sleep(10)
        return site.stored("math"), site.stored("code"), manager.status

    assert play(site, trainer) == ({C: 1}, {C: 1}, EXPIRED)


# Ends


def test_shutdown_keeps_what_is_running_and_ends_production():
    site = BackgroundSite(ScriptedLoop(until_paused(2)), enable_partial_rollout=True)

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        await asyncio.sleep(1)
        await site.manager.shutdown()
        return producing.done()

    assert run(main())
    assert site.stored() == {A: 2}
    run(site.manager.produce_loop(2))
    assert len(site.loop.calls) == 2


def test_shutdown_ends_a_wait_with_an_empty_result_and_lets_batches_be_taken():
    site = BackgroundSite(ScriptedLoop(finish(after=5)), max_staleness=1)

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        await asyncio.sleep(6)
        waiting = asyncio.ensure_future(site.manager.get_batch(4, 1))
        await asyncio.sleep(1)
        site.manager.shutdown()
        empty = await waiting
        await producing
        return empty, await site.manager.get_batch(2, 1)

    empty, result = run(main())
    assert (empty.groups, empty.status) == ([], NORMAL)
    assert ids(result) == [0, 1]


def test_a_loop_runs_once_at_a_time_and_again_after_it_was_cancelled():
    site = BackgroundSite(ScriptedLoop(until_cancelled(2)), enable_partial_rollout=True, max_staleness=1)

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        await asyncio.sleep(1)
        with pytest.raises(RuntimeError, match="produce_loop is running already"):
            await site.manager.produce_loop(2)
        producing.cancel()
        await asyncio.wait([producing])
        stored = producing.cancelled(), site.stored()
        with pytest.raises(ProductionStalled, match="produce_loop has ended"):
            await site.manager.get_batch(2, 1)
        site.loop.default = finish(1)
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        result = await site.manager.get_batch(2, 1)
        await site.manager.shutdown()
        await producing
        return stored, ids(result)

    assert run(main()) == ((True, {A: 2}), [0, 1])


def test_a_batch_is_not_lost_when_the_wait_is_cancelled_while_references_are_freed():
    freed = []

    async def on_release(pairs):
        await asyncio.sleep(5)
        freed.extend(state.group_id for state, _ in pairs)

    site = BackgroundSite(max_staleness=1, on_release=on_release)

    async def main():
        await site.buffer.put(group([0], group_id="old"), "default")
        await site.buffer.put(group([0], group_id="older"), "default")
        result = await site.manager.get_batch(1, 2)  # the other one is too old at step 3
        time = asyncio.get_running_loop().time()
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        await asyncio.sleep(0)
        await site.manager.shutdown()
        await producing
        return ids(result), time

    assert run(main()) == (["old"], 0)
    assert freed == ["older"]


@pytest.mark.parametrize("what", ["waiting", "producing", "pausing"])
def test_cancelling_at_any_moment_loses_no_group_and_leaves_no_task(what):
    for steps in itertools.count():

        async def valid(g):
            await asyncio.sleep(0)
            return g[0].group_id != 3

        async def on_release(_released):
            await asyncio.sleep(0)

        site = BackgroundSite(
            ScriptedLoop(
                finish(),
                {
                    0: in_turn(fail(), finish()),
                    1: fail(),
                    2: in_turn(come_back(A, 1), finish()),
                    5: in_turn(until_paused(), finish()),
                },
            ),
            group_size=2,
            max_staleness=1,
            max_retries=1,
            over_sample_threshold=0.5,
            is_valid_sample_fn=valid,
            on_release=on_release,
            enable_partial_rollout=True,
            controller=Controller(),
        )

        async def main(site=site, steps=steps):
            manager, buffer = site.manager, site.buffer
            producing = asyncio.ensure_future(manager.produce_loop(4))
            if what == "producing":
                target = producing
            else:
                await asyncio.sleep(0)
                target = asyncio.ensure_future(
                    manager.get_batch(4, 1) if what == "waiting" else manager.pause_produce()
                )
            for _ in range(steps):
                await asyncio.sleep(0)
            target.cancel()
            await asyncio.wait([target])
            cancelled = target.cancelled()
            if what == "producing":
                assert asyncio.all_tasks() == {asyncio.current_task()}
                assert buffer.ledger()["in_flight"] == 0
                producing = asyncio.ensure_future(manager.produce_loop(4))
            elif what == "pausing":
                await manager.pause_produce()
                assert buffer.ledger()["in_flight"] == 0
                await manager.continue_produce(0)
            results = [] if what != "waiting" or cancelled else [target.result()]
            if not results:
                results = [await manager.get_batch(4, 1)]
            await manager.shutdown()
            await producing
            assert buffer.ledger()["in_flight"] == 0
            assert len(set(balance(buffer.ledger()))) == 1
            drawn = site.samplers["default"].state_dict()["drawn"]
            gone = sum(n in site.loop.calls for n in (1, 3))
            assert drawn - len(results[0].groups) - len(buffer) in range(gone + 1)
            return cancelled

        if not run(main()):
            break
        if steps > 150:
            assert what == "producing"  # which never ends by itself
            break
    assert steps > (10 if what != "pausing" else 3)


def test_what_is_running_is_put_before_an_error_of_the_buffer_goes_on():
    site = BackgroundSite(ScriptedLoop(finish(), {1: until_paused(2)}), enable_partial_rollout=True)
    put = site.buffer.put
    broken = itertools.count()

    async def fail_once(*args, **steps):
        if next(broken) == 0:
            raise OSError("disk full")
        return await put(*args, **steps)

    site.buffer.put = fail_once

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        with pytest.raises(ProductionStalled, match="OSError: disk full"):
            await site.manager.get_batch(2, 1)
        with pytest.raises(OSError, match="disk full"):
            await producing

    run(main())
    assert site.stored() == {A: 1}


def test_a_manager_goes_on_after_a_restart_from_two_numbers():
    site = BackgroundSite(max_staleness=1)

    async def trainer(manager):
        for train_step in (1, 2, 3):
            await manager.get_batch(2, train_step)
            await manager.pause_produce()
            await manager.continue_produce(train_step)
        await manager.pause_produce()

    play(site, trainer)
    stored = len(site.buffer)
    site.manager = DisaggAgentLoopManager(site.specs, site.buffer, model_step=3)

    async def further(manager):
        result = await manager.get_batch(2, 4)
        await settled()
        return len(result.groups), site.stored()

    assert play(site, further) == (2, {C: 2})
    assert stored <= 4


def test_a_batch_that_waits_for_the_journal_is_not_produced_twice(tmp_path):
    """Between leaving the buffer and being on disk its groups are neither stored nor lost."""
    site = BackgroundSite(max_staleness=9, buffer_class=functools.partial(ReplayBuffer, journal=tmp_path))

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        for train_step in (1, 2, 3):
            await site.manager.get_batch(2, train_step)
            await asyncio.sleep(0.05)
        await site.manager.shutdown()
        await producing
        await site.buffer.close()
        return len(site.loop.calls)

    assert asyncio.run(main()) <= 2 * (10 + 3)


def test_a_batch_whose_journal_entry_is_cancelled_is_there_again(tmp_path):
    site = BackgroundSite(buffer_class=functools.partial(ReplayBuffer, journal=tmp_path, journal_delay=0.5))

    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(2))
        await site.buffer.wait_ready({"default": 2})
        waiting = asyncio.ensure_future(site.manager.get_batch(2, 1))
        await asyncio.sleep(0)
        out = site.stored()
        waiting.cancel()
        await asyncio.wait([waiting])
        state = waiting.cancelled(), out, site.stored(), dict(site.manager.progress.consumed)
        result = await site.manager.get_batch(2, 1)
        await site.manager.shutdown()
        await producing
        await site.buffer.close()
        return state, ids(result)

    assert asyncio.run(main()) == ((True, {}, {C: 2}, {"default": 0}), [0, 1])
