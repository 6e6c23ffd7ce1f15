"""The colocated producer: settings, what a round schedules, what becomes of groups, how a round ends."""

import asyncio
import itertools
import math
import subprocess
import sys
import warnings
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_loops import (
    ScriptedLoop,
    add_tokens,
    come_back,
    fail,
    finish,
    in_turn,
    until_cancelled,
    until_paused,
)
from production_line import Line
from rollouts import balance, group
from virtual_clock import Deadlock, run

from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.producer import AsyncProduceStrategyConfig
from pystale.production import ProductionStalled, oversampled, pools_to_draw_from
from pystale.sampler import PromptsExhausted

C, A, E, F, X = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED, Status.FILTERED


# Settings


def test_the_defaults_accept_only_what_the_current_weights_generate():
    assert AsyncProduceStrategyConfig().model_dump() == {
        "over_sample_threshold": 0.0,
        "enable_partial_rollout": False,
        "max_staleness": 0,
        "max_token_staleness": None,
        "tail_batch_trigger_size": -1,
        "spare_aborted": False,
        "max_rerolls": None,
        "group_mode": "all",
        "min_fresh": 1,
        "max_retries": 3,
        "is_valid_sample_fn": None,
        "should_continue_fn": None,
    }


def test_a_strategy_shows_what_a_buffer_must_agree_on():
    config = AsyncProduceStrategyConfig(
        max_staleness=2, max_token_staleness=0, tail_batch_trigger_size=4, spare_aborted=True, max_rerolls=5
    )
    strategy = config.build(sync_weights_interval=3)
    assert strategy.rule == StalenessRule(2, 0, 3, True)
    assert (strategy.stale_threshold, strategy.token_stale_threshold) == (9, 3)
    assert (strategy.tail_batch_trigger_size, strategy.max_rerolls) == (4, 5)


COUNTS = ("max_staleness", "max_token_staleness", "tail_batch_trigger_size", "max_rerolls", "max_retries")
WRONG = [
    *itertools.product(COUNTS, [True, False, 1.0, "1", math.nan, math.inf, -2, 2**63, [1]]),
    *itertools.product(("max_staleness", "tail_batch_trigger_size", "max_retries"), [None]),
    *itertools.product(("max_staleness", "max_token_staleness", "max_rerolls", "max_retries"), [-1]),
    *itertools.product(("over_sample_threshold",), [True, "0.5", math.nan, math.inf, -math.inf, -0.1, None]),
    *itertools.product(("enable_partial_rollout", "spare_aborted"), [1, 0, "true", None]),
    *itertools.product(("is_valid_sample_fn", "should_continue_fn"), [True, 1, "len"]),
    *itertools.product(("group_mode",), ["some", None, 1]),
    *itertools.product(("min_fresh",), [0, True, 2]),  # 2 says nothing of whole groups
    ("max_stalenes", 1),
    ("stale_threshold", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        AsyncProduceStrategyConfig(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"sync_weights_interval": 0}, ValueError),
        ({"sync_weights_interval": True}, TypeError),
        ({"sync_weights_interval": 1.0}, TypeError),
        ({"pause_repeat_s": 0}, ValueError),
        ({"pause_repeat_s": True}, TypeError),
        ({"pause_limit_s": math.nan}, ValueError),
        ({"pause_limit_s": math.inf}, ValueError),
        ({"pause_limit_s": "60"}, TypeError),
    ],
)
def test_a_strategy_is_not_built_from_numbers_out_of_range(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        AsyncProduceStrategyConfig().build(**arguments)


def test_settings_are_checked_in_optimised_mode_too(tmp_path: Path):
    code = (
        "from pystale.producer import AsyncProduceStrategyConfig as Config\n"
        "refused = 0\n"
        "nan = float('nan')\n"
        "for wrong in ({'max_staleness': True}, {'over_sample_threshold': nan}, {'max_retries': -1}, {'x': 1}):\n"
        "    try:\n"
        "        Config(**wrong)\n"
        "    except ValueError:\n"
        "        refused += 1\n"
        "try:\n"
        "    Config().build(sync_weights_interval=0)\n"
        "except ValueError:\n"
        "    refused += 1\n"
        "print(refused)\n"
    )
    # Away from the checkout, whose pystale folder, first on the path of `python -c`, holds no compiled modules.
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "5"


@pytest.mark.parametrize(
    ("settings", "consequence"),
    [
        ({"max_token_staleness": 0}, "a group is discarded for good"),
        (
            {"max_token_staleness": 0, "enable_partial_rollout": True, "tail_batch_trigger_size": 0},
            "every aborted response is reset at the next weight sync",
        ),
        ({"max_token_staleness": 1, "tail_batch_trigger_size": 0}, "the token limit has no effect"),
    ],
)
def test_building_a_strategy_warns_once_of_what_it_throws_away(settings, consequence):
    with pytest.warns(UserWarning, match=consequence) as caught:
        AsyncProduceStrategyConfig(**settings).build()
    assert len(caught) == 1


def test_a_warning_names_the_line_that_builds():
    with pytest.warns(UserWarning, match="discarded for good") as caught:
        AsyncProduceStrategyConfig(max_token_staleness=0).build()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_token_staleness": 0, "tail_batch_trigger_size": 0},
        {
            "max_token_staleness": 0,
            "tail_batch_trigger_size": 0,
            "enable_partial_rollout": True,
            "spare_aborted": True,
        },
        {"max_staleness": 1, "max_token_staleness": 1, "tail_batch_trigger_size": 4, "enable_partial_rollout": True},
    ],
)
def test_settings_without_a_surprise_do_not_warn(settings):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AsyncProduceStrategyConfig(**settings).build()


# What is refused before anything starts


def refused(line, error, message, **arguments):
    """The call is refused, and nothing was drawn, asked or changed."""
    with pytest.raises(error, match=message):
        run(line.produce(**arguments))
    assert line.loop.calls == []
    assert line.sampler.state_dict()["drawn"] == 0


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rule": StalenessRule(2, 0)}, "stale_threshold"),
        ({"rule": StalenessRule(1, None)}, "token_stale_threshold"),
        ({"rule": StalenessRule(1, 1)}, "token_stale_threshold"),
        ({"rule": StalenessRule(1, 0, 2)}, "stale_threshold"),
        ({"rule": StalenessRule(1, 0, 1, True)}, "spare_aborted"),
        ({"tail_batch_trigger_size": 4}, "tail_batch_trigger_size"),
        ({"max_rerolls": None}, "max_rerolls"),
        ({"group_mode": "members"}, "group_mode"),
    ],
)
def test_a_buffer_with_other_settings_is_refused(settings, name):
    line = Line(max_staleness=1, max_token_staleness=0, tail_batch_trigger_size=0, max_rerolls=2)
    own = {"rule": line.strategy.rule, "tail_batch_trigger_size": 0, "max_rerolls": 2}
    other = ReplayBuffer(**{**own, **settings})
    refused(line, ValueError, f"{name} of task 'default' is .* in the buffer", buffer=other)


def test_a_rule_that_says_the_same_in_other_words_is_accepted():
    line = Line(max_staleness=3)
    run(line.produce(buffer=ReplayBuffer(StalenessRule(1, sync_weights_interval=2))))


def test_a_task_without_a_rule_is_refused():
    line = Line()
    other = ReplayBuffer({"math": line.strategy.rule})
    refused(line, ValueError, "task 'default' has no rule", buffer=other)


def test_a_task_is_held_against_its_own_settings():
    line = Line(max_staleness=1, tail_batch_trigger_size=3)
    other = ReplayBuffer(
        {"math": line.strategy.rule, "code": StalenessRule()}, tail_batch_trigger_size={"math": 3, "code": 0}
    )
    assert run(line.produce(buffer=other, task_name="math")).completed == 2
    with pytest.raises(ValueError, match="stale_threshold of task 'code'"):
        run(line.produce(buffer=other, task_name="code"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": True}, TypeError, "batch_size must be an int"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an int"),
        ({"train_step": 0, "model_step": 0}, ValueError, "train_step must be at least 1"),
        ({"train_step": 1.5, "model_step": 0}, TypeError, "train_step must be an int"),
        ({"train_step": 1, "model_step": -1}, ValueError, "model_step must be at least 0"),
        ({"train_step": 1, "model_step": False}, TypeError, "model_step must be an int"),
        ({"train_step": 5, "model_step": 5}, ValueError, "model_step=5 is in the future of train_step=5"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, error, message):
    refused(Line(), error, message, **arguments)


def test_weights_whose_every_token_would_be_too_old_are_refused_instead_of_generating_for_ever():
    line = Line(max_staleness=1)
    refused(line, ValueError, "model_step=3 are 2 steps old at train_step=6, and the rule keeps less than 2",
            train_step=6, model_step=3)  # fmt: skip
    assert run(line.produce(train_step=6, model_step=4)).completed == 2


# How much is scheduled


@pytest.mark.parametrize(
    ("threshold", "batch", "more"),
    [
        (0.0, 8, 0),
        (0.2, 8, 2),
        (0.07, 100, 7),
        (0.1, 30, 3),
        (0.29, 100, 29),
        (1.1, 10, 11),
        (0.001, 1, 1),
        (3.0, 4, 12),
    ],
)
def test_oversampling_rounds_the_exact_product_up(threshold, batch, more):
    assert oversampled(batch, threshold, batch) == batch + more


def test_oversampling_is_exact_on_a_grid_of_hundredths():
    for hundredths, batch in itertools.product(range(0, 301, 7), range(1, 130)):
        expected = -(-Fraction(hundredths, 100) * batch // 1)
        assert oversampled(7, hundredths / 100, batch) == 7 - -expected


@pytest.mark.parametrize("threshold", [1e-9, 1e-300, 5e-324, 1e16, 12345.678])
def test_oversampling_understands_every_way_to_write_a_number(threshold):
    assert oversampled(0, threshold, 10) == max(1, math.ceil(Fraction(repr(threshold)) * 10))


@pytest.mark.parametrize(
    ("trigger", "expired", "pools", "scheduled"),
    [
        (-1, 0, (A,), 10),
        (0, 0, (A,), 10),
        (4, 3, (A,), 10),
        (0, 3, (E, A), 10),
        (4, 4, (E, A), 8),
        (4, 9, (E, A), 8),
        (1, 0, (A,), 10),
        (1, 1, (E, A), 8),
    ],
)
def test_expired_groups_come_first_at_once_or_from_a_trigger_on_which_also_stops_oversampling(
    trigger, expired, pools, scheduled
):
    line = Line(max_staleness=2, tail_batch_trigger_size=trigger, over_sample_threshold=0.2)
    asked = []

    class Recording:
        async def sample(self, task_name, statuses):
            asked.append(tuple(statuses))
            return await line.sampler.sample(task_name, statuses)

    async def main():
        for group_id in range(expired):
            await line.buffer.put(group([1], status=E, group_id=f"old {group_id}"))
        return await line.produce(8, train_step=5, sampler=Recording())

    report = run(main())
    assert pools_to_draw_from(trigger, expired) == (pools, scheduled == 8)
    assert set(asked) == {pools}
    assert (report.scheduled, report.spawned, report.tail_batch) == (scheduled, scheduled, scheduled == 8)
    first = [n for n in line.loop.calls if isinstance(n, str)]
    assert line.loop.calls[: len(first)] == first
    assert len(first) == (min(expired, 8) if E in pools else 0)


def test_the_mode_is_decided_once_from_the_pool_at_the_start_of_the_round():
    """A group that expires during the round does not change what the round draws from; the next round sees it."""
    too_old = come_back(C, tokens=1, response_model_steps=[0])
    line = Line(ScriptedLoop(acts={0: in_turn(too_old, finish())}), max_staleness=1, tail_batch_trigger_size=1)

    async def main():
        before = await line.produce(train_step=3)
        await line.take(2, train_step=3)
        return before, await line.produce(train_step=4)

    before, after = run(main())
    assert (before.tail_batch, before.expired, after.tail_batch) == (False, 1, True)
    assert line.loop.calls == [0, 1, 2, 0, 3]


def test_a_group_that_expires_as_the_round_begins_counts_for_its_mode():
    line = Line(max_staleness=1, tail_batch_trigger_size=1, over_sample_threshold=1.0)

    async def main():
        await line.buffer.put(group([1], group_id="old"), train_step=2)
        return await line.produce(train_step=4)

    report = run(main())
    assert (report.refreshed, report.tail_batch, report.scheduled) == (1, True, 2)


def test_only_what_the_current_weights_generate_is_enough_to_fill_a_batch():
    line = Line(max_staleness=0)
    report = run(line.produce(4, train_step=13, model_step=12))
    assert (report.spawned, report.completed) == (4, 4)
    taken = run(line.buffer.take_train_batch({"default": 4}, train_step=13))
    assert [member.seq_staleness for g in taken["default"] for member in g] == [0, 0, 0, 0]


def test_what_is_stored_already_is_not_generated_again():
    line = Line(max_staleness=4)

    async def main():
        for group_id in range(100, 103):
            await line.buffer.put(group([0], group_id=group_id))
        some = await line.produce(5)
        none = await line.produce(5)
        return some, none

    some, none = run(main())
    assert (some.spawned, none.spawned) == (2, 0)


def test_surplus_groups_wait_for_the_next_round():
    line = Line(ScriptedLoop(finish()), over_sample_threshold=0.25, max_staleness=4)

    async def main():
        first = await line.produce(8)
        taken = await line.take(8)
        left = line.stored()
        return first, taken, left, await line.produce(8, train_step=2)

    first, taken, left, second = run(main())
    assert (first.spawned, first.completed, len(taken), left) == (10, 10, 8, {C: 2})
    assert (second.scheduled, second.spawned) == (10, 8)


def test_aborted_groups_are_taken_up_before_new_prompts_and_every_group_is_accounted_for():
    line = Line(
        ScriptedLoop(acts={4: in_turn(until_paused(), finish()), 5: in_turn(until_paused(), finish())}),
        over_sample_threshold=0.5,
        enable_partial_rollout=True,
        max_staleness=4,
    )

    async def main():
        first = await line.produce(4)
        trained = await line.take(4)
        stored = line.stored()
        second = await line.produce(4, train_step=2)
        return first, trained, stored, second

    first, trained, stored, second = run(main())
    assert (first.spawned, first.completed, first.aborted) == (6, 4, 2)
    assert (trained, stored) == ([0, 1, 2, 3], {A: 2})
    assert second.spawned == 6
    assert line.loop.calls[6:] == [4, 5, 6, 7, 8, 9]
    assert line.sampler.state_dict()["drawn"] == len(trained) + len(line.buffer)


def test_what_leaves_the_round_is_replaced_at_once():
    line = Line(ScriptedLoop(finish(after=9), {0: fail(), 1: come_back(X)}), max_retries=0)

    async def main():
        producing = asyncio.ensure_future(line.produce(3))
        await asyncio.sleep(1)
        running = list(line.loop.calls)
        await producing
        return running

    assert run(main()) == [0, 1, 2, 3, 4]


# Retries and failures


def test_a_group_that_always_raises_is_tried_four_times_and_the_batch_fills_without_it():
    line = Line(ScriptedLoop(acts={0: fail()}))
    report = run(line.produce(2))
    assert line.loop.calls.count(0) == 4
    assert (report.failed, report.retried, report.completed, report.spawned) == (1, 3, 2, 3)
    assert report.last_error == "RuntimeError: the engine is on fire"
    assert run(line.take(2)) == [1, 2]
    assert len(line.buffer) == 0


@pytest.mark.parametrize("max_retries", [0, 1, 5])
def test_the_number_of_retries_can_be_set(max_retries):
    line = Line(ScriptedLoop(acts={0: fail()}), max_retries=max_retries)
    assert run(line.produce()).failed == 1
    assert line.loop.calls.count(0) == max_retries + 1


def test_a_group_that_raises_at_first_is_generated_in_the_end():
    line = Line(ScriptedLoop(acts={0: in_turn(fail(), fail(), finish())}))
    report = run(line.produce(2))
    assert (report.failed, report.retried, report.completed, report.spawned) == (0, 2, 2, 2)


def test_a_retry_does_not_generate_finished_members_again():
    async def one_of_two(_loop, members):
        add_tokens(members[0], 2)
        members[0].status = C
        raise RuntimeError

    line = Line(ScriptedLoop(acts={0: in_turn(one_of_two, finish())}), group_size=2)
    run(line.produce(1))
    assert line.loop.generated == [0, 1, 1]


@pytest.mark.parametrize("source", [5, itertools.count()])
def test_a_source_of_which_every_group_fails_ends_with_the_last_reason(source):
    prompts = source if isinstance(source, int) else ([n] for n in source)
    line = Line(ScriptedLoop(fail("no route to host")), prompts=prompts)
    with pytest.raises(ProductionStalled) as caught:
        run(line.produce(2, train_step=7))
    for part in ("task 'default'", "train_step 7", "model_step 6", "Wanted 2", "0 completed", "no route to host"):
        assert part in str(caught.value)
    assert len(line.buffer) == 0


@pytest.mark.parametrize("act", [come_back(A), come_back(E), fail(error=asyncio.CancelledError)])
def test_groups_that_keep_coming_back_with_nothing_end_the_round(act):
    line = Line(ScriptedLoop(act), tail_batch_trigger_size=0)
    with pytest.raises(ProductionStalled, match="came back empty"):
        run(line.produce(2))
    assert len(line.buffer) == line.sampler.state_dict()["drawn"] > 0


def test_a_filter_that_lets_nothing_through_ends_the_round():
    line = Line(prompts=([n] for n in itertools.count()), is_valid_sample_fn=lambda group: False)
    with pytest.raises(ProductionStalled, match="came back COMPLETED and valid"):
        run(line.produce(2))


def test_fast_failures_do_not_end_a_round_while_slower_groups_may_succeed():
    """As with one broken worker that fails at once whatever it is given."""
    line = Line(ScriptedLoop(fail(), {0: finish(after=60), 100: finish()}), max_retries=0)
    acts = line.loop.acts

    async def main():
        producing = asyncio.ensure_future(line.produce(2))
        await asyncio.sleep(30)
        drawn = len(line.loop.calls)
        for n in range(drawn, 1000):
            acts[n] = finish()
        return drawn, await producing

    drawn, report = run(main())
    assert drawn < 20
    assert (report.completed, report.failed) == (2, drawn - 1)


def test_a_group_returned_as_failed_is_final():
    line = Line(ScriptedLoop(acts={0: come_back(F, tokens=2, error_msg="context overflow")}))
    report = run(line.produce(2))
    assert line.loop.calls.count(0) == 1
    assert (report.failed, report.retried, report.last_error) == (1, 0, "context overflow")
    assert line.buffer.ledger()["discarded"] == {"failed": 2}


def test_a_group_the_filter_refuses_is_counted_and_its_references_released():
    released = []
    line = Line(
        is_valid_sample_fn=lambda group: group[0].group_id != 0,
        on_release=lambda pairs: released.extend(state.group_id for state, _ in pairs),
    )
    report = run(line.produce(2))
    assert (report.filtered, report.completed, released) == (1, 2, [0])
    assert line.buffer.ledger()["discarded"] == {"filtered": 3}
    assert run(line.take(2)) == [1, 2]


def test_the_filter_is_asked_of_completed_groups_only():
    asked = []
    line = Line(
        ScriptedLoop(finish(after=1), {2: until_paused(), 3: come_back(F)}),
        over_sample_threshold=1.0,
        is_valid_sample_fn=lambda group: asked.append(group[0].group_id) or True,
    )
    run(line.produce(2))
    assert asked == [0, 1, 4]


def test_a_filter_that_raises_fails_the_group_without_generating_it_again():
    def broken(group):
        return 1 / group[0].group_id

    line = Line(is_valid_sample_fn=broken)
    report = run(line.produce(2))
    assert (report.failed, report.retried) == (1, 0)
    assert report.last_error == "is_valid_sample_fn raised ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (5, "generate_group returned 5"),
        ([], "a sequence of at least one state is required"),
        ("group", "generate_group returned 'group'"),
        ([RolloutState(group_id=77, status=C)], "generate_group returned group 77 for group 0"),
        ([RolloutState(group_id=0, status=Status.ARCHIVED)], "as ARCHIVED, which says nothing of its outcome"),
        ([SimpleNamespace(group_id=0, status="odd")], "unknown status 'odd'"),
    ],
)
def test_what_is_no_answer_counts_as_a_try_that_failed(returned, reason):
    async def act(_loop, _members):
        return returned

    line = Line(ScriptedLoop(acts={0: act}))
    report = run(line.produce(2))
    assert (report.failed, report.retried) == (1, 3)
    assert reason in report.last_error


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_mask": [1]}, "response_mask has 1 entries, response_ids has 3"),
        ({"response_model_steps": [0] * 9}, "response_model_steps has 9 entries"),
        ({"response_model_steps": [0, 0, 8]}, "model step 8 is in the future of train_step 1"),
        ({"response_model_steps": [0.5] * 3}, "member 0"),
    ],
)
def test_a_group_the_buffer_refuses_is_counted_as_failed(fields, reason):
    line = Line(ScriptedLoop(acts={0: come_back(C, tokens=3, **fields)}))
    report = run(line.produce(2))
    assert (report.failed, report.completed) == (1, 2)
    assert reason in report.last_error
    assert line.buffer.ledger()["discarded"] == {"failed": 3}


@pytest.mark.parametrize(
    "written",
    [
        {"group_id": 999},
        {"group_id": None},
        {"group_id": 1.5},
        {"status": None},
        {"status": 7},
        {"rerolls": "x"},
        {"rerolls": -1},
        {"prompt_model_step": -5},
        {"prompt_model_step": "new"},
        {"response_ids": "abc"},
        {"response_ids": 5},
        {"response_ids": {1: 2}},
        {"logprobs": 0.5},
        {"logprobs": "abc"},
        {"response_model_steps": "abc"},
        {"response_mask": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("from_a_pool", [False, True])
def test_whatever_an_agent_loop_writes_into_a_group_it_is_counted_and_the_round_goes_on(written, member, from_a_pool):
    """The first member's group_id says which group came back, so writing that counts as a try that failed."""

    async def act(_loop, members):
        for state in members:
            state.response_ids, state.response_model_steps, state.status = [7, 7], [0, 0], C
        for name, value in written.items():
            setattr(members[member], name, value)

    number = "old" if from_a_pool else 0
    line = Line(ScriptedLoop(acts={number: act}), group_size=2, max_staleness=4, enable_partial_rollout=True)

    async def main():
        if from_a_pool:
            await line.buffer.put(group([0, 0, 0], [0], status=A, group_id="old"), train_step=1)
        return await line.produce(2)

    report = run(main())
    assert (report.failed, report.completed, line.stored()) == (1, 2, {C: 2})
    ledger = line.buffer.ledger()
    assert ledger["in_flight"] == 0
    assert ledger["stored"] == 2 * 2 * 3
    assert len(set(balance(ledger))) == 1


@pytest.mark.parametrize("ending", ["failed", "filtered", "refused"])
def test_a_group_from_the_pools_that_ends_badly_is_settled(ending):
    """Its tokens are not left in flight, and the buffer forgets it."""
    acts = {"failed": fail(), "filtered": come_back(X), "refused": come_back(C, tokens=2, response_mask=[1])}
    line = Line(ScriptedLoop(acts={"old": acts[ending]}), max_staleness=4, enable_partial_rollout=True)

    async def main():
        await line.buffer.put(group([0, 0, 0], status=A, group_id="old"))
        await line.produce(2)

    run(main())
    ledger = line.buffer.ledger()
    assert ledger["in_flight"] == 0
    assert set(ledger["discarded"]) <= {"failed", "filtered", "restarted"}
    assert len(set(balance(ledger))) == 1


def test_unfinished_members_come_back_aborted_so_that_they_are_drawn_again():
    async def nothing_done(_loop, _members):
        await asyncio.sleep(0)

    line = Line(ScriptedLoop(acts={0: in_turn(nothing_done, finish())}))
    report = run(line.produce(2))
    assert line.loop.calls == [0, 1, 0]
    assert (report.aborted, report.completed) == (1, 2)


def test_an_aborted_group_ages_from_its_first_token_and_is_reset_when_its_deadline_comes():
    cut_off = until_paused(0)
    line = Line(
        ScriptedLoop(acts={"slow": in_turn(cut_off, cut_off, cut_off, finish())}),
        max_staleness=2,
        enable_partial_rollout=True,
        tail_batch_trigger_size=0,
        over_sample_threshold=1.0,
    )
    members = group([1, 1], status=A, group_id="slow")
    seen = []

    async def main():
        await line.buffer.put(members)
        for train_step in (2, 3, 4, 5):
            await line.buffer.refresh_staleness(train_step)
            if train_step == 5:
                seen.append((members[0].seq_staleness, members[0].status, members[0].response_ids))
            await line.produce(1, train_step=train_step)
            if train_step < 5:
                seen.append((members[0].seq_staleness, members[0].status, members[0].response_ids))
            await line.take(1, train_step=train_step)

    run(main())
    assert seen == [(0, A, [100, 101]), (1, A, [100, 101]), (2, A, [100, 101]), (3, E, [])]
    assert (members[0].rerolls, list(members[0].response_model_steps)) == (1, [4, 4, 4])


def test_a_rollout_cancelled_inside_is_stored_as_aborted_with_its_tokens():
    async def cancelled(_loop, members):
        add_tokens(members[0], 2)
        raise asyncio.CancelledError

    line = Line(ScriptedLoop(acts={0: in_turn(cancelled, finish(1))}), enable_partial_rollout=True)
    report = run(line.produce(2))
    assert (report.aborted, report.completed, report.failed) == (1, 2, 0)
    taken = run(line.buffer.take_train_batch({"default": 2}, train_step=1))
    assert sorted(len(g[0].response_ids) for g in taken["default"]) == [3, 3]


def test_a_wrong_sampler_stops_the_round_and_what_ran_is_kept():
    line = Line(ScriptedLoop(until_paused()), enable_partial_rollout=True)

    class Broken:
        calls = 0

        def sample(self, task_name, statuses):
            self.calls += 1
            if self.calls == 3:
                return None
            return line.sampler.sample(task_name, statuses)

    with pytest.raises(TypeError, match="the sampler gave None"):
        run(line.produce(4, sampler=Broken()))
    assert line.stored() == {A: 2}


# Exhaustion


def test_expired_groups_below_the_trigger_are_generated_when_prompts_run_out():
    line = Line(prompts=1, tail_batch_trigger_size=5)

    async def main():
        for group_id in ("a", "b"):
            await line.buffer.put(group([1], status=E, group_id=group_id))
        return await line.produce(3)

    report = run(main())
    assert line.loop.calls == [0, "a", "b"]
    assert not report.tail_batch


def test_running_out_of_prompts_says_all_there_is_to_know():
    line = Line(ScriptedLoop(acts={1: come_back(X)}), prompts=3)
    with pytest.raises(PromptsExhausted) as caught:
        run(line.produce(4, train_step=3))
    assert str(caught.value) == (
        "task 'default', train_step 3, model_step 2: prompts are exhausted, no pool has a group left to generate, and "
        "nothing is running. Wanted 4 COMPLETED groups, stored: COMPLETED 2. This round drew 3: 2 completed, "
        "0 aborted, 0 expired, 0 failed, 1 filtered, 0 retries. Last error: none"
    )


def test_running_out_of_prompts_to_oversample_with_is_no_error():
    line = Line(prompts=4, over_sample_threshold=0.5)
    report = run(line.produce(4))
    assert (report.scheduled, report.spawned, report.completed) == (6, 4, 4)


def test_a_group_aborted_after_the_last_prompt_is_drawn_again():
    line = Line(ScriptedLoop(acts={0: in_turn(come_back(A, tokens=1), finish())}), prompts=2)
    assert run(line.produce(2)).completed == 2


# Ending


def test_a_round_may_be_told_to_stop_before_its_batch_is_there():
    line = Line(
        ScriptedLoop(finish(after=1), {3: until_paused()}),
        should_continue_fn=lambda completed, batch_size: completed < 1,
    )
    report = run(line.produce(4))
    assert (report.completed, report.aborted) == (3, 1)


def test_a_round_may_be_told_to_go_on_past_its_batch():
    line = Line(should_continue_fn=lambda completed, batch_size, **kwargs: completed < 2 * batch_size + 1)
    report = run(line.produce(2))
    assert report.completed == 6


def test_a_round_told_to_go_on_ends_with_its_batch_when_prompts_run_out():
    line = Line(prompts=3, should_continue_fn=lambda completed, batch_size: True)
    assert run(line.produce(2)).completed == 3


def test_an_error_in_a_callback_is_raised_once_all_is_put():
    def broken(completed, batch_size):
        if completed:
            raise LookupError("no such setting")
        return True

    line = Line(ScriptedLoop(acts={1: until_paused()}), should_continue_fn=broken)
    with pytest.raises(LookupError, match="no such setting"):
        run(line.produce(2))
    assert line.stored() == {C: 1, A: 1}


def test_plain_functions_do_as_well_as_async_ones():
    class Plain:
        def __init__(self):
            self.asked = 0

        def generate_group(self, group, *, enable_partial_rollout):
            for member in group:
                add_tokens(member, 2)
                member.status = C
            return group

        def pause(self):
            self.asked += 1

    class PlainSampler:
        def __init__(self):
            self.numbers = itertools.count()

        def sample(self, task_name, statuses):
            return [RolloutState(group_id=next(self.numbers), response_ids=[])]

    line = Line(
        Plain(),
        is_valid_sample_fn=lambda group: group[0].group_id != 1,
        should_continue_fn=lambda completed, batch_size: completed < batch_size,
    )
    report = run(line.produce(2, sampler=PlainSampler()))
    assert (report.completed, report.filtered) == (2, 1)


def test_async_callbacks_are_awaited():
    async def valid(group):
        await asyncio.sleep(1)
        return group[0].group_id != 1

    async def going_on(completed, batch_size):
        await asyncio.sleep(1)
        return completed < batch_size

    report = run(Line(is_valid_sample_fn=valid, should_continue_fn=going_on).produce(2))
    assert (report.completed, report.filtered) == (2, 1)


def test_async_filters_of_several_groups_run_at_the_same_time():
    async def valid(_group):
        await asyncio.sleep(10)
        return True

    async def main():
        await Line(is_valid_sample_fn=valid).produce(8)
        return asyncio.get_running_loop().time()

    assert run(main()) == 10


def test_states_of_another_class_pass_through():
    class Theirs:
        def __init__(self, group_id):
            self.group_id, self.status = group_id, "init"
            self.response_ids, self.response_model_steps, self.response_mask = [], [], None

    class TheirLoop:
        async def generate_group(self, group, *, enable_partial_rollout):
            for member in group:
                member.response_ids, member.status = [1, 2], "completed" if member.group_id else "failed"
            return group

        def pause(self):
            pass

    class TheirSampler:
        numbers = itertools.count()

        def sample(self, task_name, statuses):
            return [Theirs(next(self.numbers))]

    line = Line(TheirLoop())
    report = run(line.produce(2, sampler=TheirSampler()))
    assert (report.completed, report.failed, line.stored()) == (2, 1, {C: 2})


# Tokens


def test_a_continued_response_counts_only_the_tokens_it_gained():
    line = Line(
        ScriptedLoop(acts={2: in_turn(until_paused(5), finish(4))}),
        over_sample_threshold=0.5,
        enable_partial_rollout=True,
        max_staleness=4,
    )

    async def main():
        first = await line.produce(2)
        await line.take(2)
        return first.produced_tokens, (await line.produce(2, train_step=2)).produced_tokens

    assert run(main()) == (3 + 3 + 5, 4 + 3 + 3)


def test_a_restarted_response_counts_all_of_its_tokens():
    line = Line(ScriptedLoop(acts={1: in_turn(until_paused(5), finish(4))}), over_sample_threshold=1.0, max_staleness=4)

    async def main():
        await line.produce(1)
        await line.take(1)
        return (await line.produce(1, train_step=2)).produced_tokens

    assert run(main()) == 4 + 3
    assert line.buffer.ledger()["discarded"] == {"restarted": 5}


def test_preserved_members_of_an_expired_group_do_not_count_again():
    line = Line(ScriptedLoop(finish(4)), max_staleness=1, tail_batch_trigger_size=0)

    async def main():
        await line.buffer.put(group([0, 0], [1, 1, 1], group_id="old"), train_step=2)
        return await line.produce(1, train_step=3)

    report = run(main())
    assert (report.produced_tokens, report.refreshed, len(line.loop.generated)) == (4, 1, 1)


def test_tokens_without_a_step_get_the_one_that_was_served():
    line = Line(ScriptedLoop(acts={1: come_back(C, tokens=2, response_model_steps=[3, 4])}), max_staleness=2)
    run(line.produce(2, train_step=6, model_step=4))
    taken = run(line.buffer.take_train_batch({"default": 2}, train_step=6))
    assert sorted(list(g[0].response_model_steps) for g in taken["default"]) == [[3, 4], [4, 4, 4]]


def test_a_prompt_remembers_the_step_it_was_first_dispatched_at():
    line = Line(
        ScriptedLoop(acts={0: in_turn(come_back(A, tokens=1), come_back(A, tokens=1), finish())}), max_staleness=9
    )

    async def main():
        await line.produce(1, train_step=3)
        return (await line.buffer.get(1))[0][0].prompt_model_step

    assert run(main()) == 2


# Pausing


def test_what_runs_when_the_batch_is_there_is_paused_once_and_kept():
    line = Line(ScriptedLoop(acts={2: until_paused(2)}), over_sample_threshold=0.5, enable_partial_rollout=True)
    report = run(line.produce(2))
    assert line.loop.requests_to_pause == 1
    assert (report.completed, report.aborted, report.pause_s) == (2, 1, 0)
    assert line.stored() == {C: 2, A: 1}


def test_nothing_running_means_nothing_to_pause():
    line = Line()
    run(line.produce(2))
    assert line.loop.requests_to_pause == 0


def test_what_finishes_while_the_pause_is_under_way_is_kept_as_surplus():
    async def finish_at_the_pause(loop, members):
        await loop.paused.wait()
        await finish()(loop, members)

    line = Line(ScriptedLoop(acts={2: finish_at_the_pause}), over_sample_threshold=0.5)
    assert run(line.produce(2)).completed == 3
    assert line.stored() == {C: 3}


class Unanswered(ScriptedLoop):
    """Does not answer the first requests to pause, each in its own way."""

    def __init__(self, how, unanswered=2):
        super().__init__(acts={1: until_paused(2)})
        self.how, self.unanswered = how, unanswered
        self.open = 0

    async def pause(self):
        self.requests_to_pause += 1
        if self.requests_to_pause > self.unanswered:
            self.paused.set()
        elif self.how == "hangs":
            self.open += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.open -= 1
        elif self.how == "raises":
            raise ConnectionError("try again")


@pytest.mark.parametrize("how", ["ignores", "hangs", "raises"])
def test_a_request_to_pause_without_effect_is_repeated(how):
    line = Line(Unanswered(how), over_sample_threshold=1.0, pause_repeat_s=4)
    report = run(line.produce(1))
    assert (line.loop.requests_to_pause, report.pause_s, report.aborted) == (3, 8, 1)
    if how == "hangs":
        assert line.loop.open == 0


def test_an_answer_that_does_not_come_after_all_groups_have_is_not_waited_for_long():
    class Hanging(ScriptedLoop):
        async def pause(self):
            await super().pause()
            await asyncio.Event().wait()

    line = Line(Hanging(acts={1: until_paused(2)}), over_sample_threshold=1.0, pause_repeat_s=4)
    assert run(line.produce(1)).pause_s == 4


def test_what_does_not_stop_in_time_is_cancelled_and_kept():
    line = Line(
        ScriptedLoop(acts={1: until_cancelled(2), 2: until_cancelled(2)}),
        over_sample_threshold=2.0,
        pause_repeat_s=4,
        pause_limit_s=10,
        enable_partial_rollout=True,
    )
    report = run(line.produce(1))
    assert (line.loop.requests_to_pause, report.pause_s, report.aborted) == (3, 10, 2)
    assert (report.produced_tokens, line.stored()) == (3 + 2 + 2, {C: 1, A: 2})


def test_what_does_not_even_end_when_cancelled_is_given_up():
    async def deaf(_loop, members):
        for _ in range(100):
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                add_tokens(members[0], 1)

    line = Line(ScriptedLoop(acts={1: deaf}), over_sample_threshold=1.0, pause_repeat_s=4, pause_limit_s=10)

    async def main():
        report = await line.produce(1)
        ledger = line.buffer.ledger()
        await asyncio.sleep(200)  # what it still does is of no consequence
        return report, ledger

    report, ledger = run(main())
    assert report.last_error == "it did not end within 10 s of being cancelled"
    assert (report.failed, report.completed, report.pause_s) == (1, 1, 20)
    assert line.stored() == {C: 1}
    assert ledger == line.buffer.ledger()


def test_what_raises_because_of_the_pause_is_kept_and_not_retried():
    async def broken_by_the_pause(loop, members):
        add_tokens(members[0], 2)
        await loop.paused.wait()
        raise ConnectionError("connection closed")

    line = Line(ScriptedLoop(acts={1: broken_by_the_pause}), over_sample_threshold=1.0, enable_partial_rollout=True)
    report = run(line.produce(1))
    assert (line.loop.calls, report.aborted, report.failed, report.retried) == ([0, 1], 1, 0, 0)
    assert line.stored() == {C: 1, A: 1}


def test_an_unfinished_re_rollout_does_not_use_up_its_bound():
    """It comes back ABORTED; as EXPIRED it would be discarded by a buffer that allows one re-rollout."""
    line = Line(
        ScriptedLoop(acts={"old": until_paused(0)}),
        max_staleness=1,
        tail_batch_trigger_size=0,
        max_rerolls=1,
        over_sample_threshold=1.0,
    )
    members = group([0, 0], [2], group_id="old")

    async def main():
        await line.buffer.put(members)
        await line.produce(1, train_step=3)

    run(main())
    assert line.stored() == {C: 1, A: 1}
    assert [(m.rerolls, m.status) for m in members] == [(1, A), (1, C)]


# Cancelling


def kept(line):
    """Every group drawn is stored, or was counted on its way out."""
    drawn = line.sampler.state_dict()["drawn"]
    return drawn == len(line.buffer) and line.buffer.ledger()["in_flight"] == 0


async def cancel_after(producing, seconds):
    await asyncio.sleep(seconds)
    producing.cancel()
    await asyncio.wait([producing])
    return producing.cancelled()


@pytest.mark.parametrize("seconds", [0, 1])
def test_cancelling_while_groups_are_generated_keeps_what_they_have(seconds):
    line = Line(ScriptedLoop(until_cancelled(2)), enable_partial_rollout=True)

    async def main():
        return await cancel_after(asyncio.ensure_future(line.produce(3)), seconds)

    assert run(main())
    assert line.stored() in ({A: 3}, {})
    assert kept(line)
    assert line.loop.requests_to_pause == 0


def test_cancelling_while_a_group_is_drawn_takes_none_along():
    class Slow:
        async def sample(self, task_name, statuses):
            await asyncio.sleep(1)
            return await line.sampler.sample(task_name, statuses)

    line = Line(ScriptedLoop(until_cancelled(2)))

    async def main():
        return await cancel_after(asyncio.ensure_future(line.produce(9, sampler=Slow())), 3.5)

    assert run(main())
    assert line.stored() == {A: 3}
    assert kept(line)


def test_cancelling_while_a_group_is_judged_waits_for_the_verdict():
    async def valid(group):
        await asyncio.sleep(5)
        return group[0].group_id == 1

    line = Line(is_valid_sample_fn=valid)

    async def main():
        return await cancel_after(asyncio.ensure_future(line.produce(2)), 1), asyncio.get_running_loop().time()

    assert run(main()) == (True, 5)
    assert line.stored() == {C: 1}
    assert line.buffer.ledger()["discarded"] == {"filtered": 3}


def test_cancelling_while_references_are_released_finishes_releasing():
    released = []

    async def on_release(pairs):
        await asyncio.sleep(5)
        released.extend(state.group_id for state, _ in pairs)

    line = Line(is_valid_sample_fn=lambda group: group[0].group_id > 0, on_release=on_release)

    async def main():
        return await cancel_after(asyncio.ensure_future(line.produce(3)), 1), list(released)

    assert run(main()) == (True, [0])
    assert line.stored() == {C: 2}


def test_cancelling_while_pausing_cancels_what_has_not_stopped():
    line = Line(ScriptedLoop(acts={1: until_cancelled(2)}), over_sample_threshold=1.0, enable_partial_rollout=True)

    async def main():
        return await cancel_after(asyncio.ensure_future(line.produce(1)), 5), asyncio.get_running_loop().time()

    assert run(main()) == (True, 5)
    assert line.stored() == {C: 1, A: 1}


def test_a_loop_that_turns_the_cancellation_into_an_error_of_its_own_is_not_retried():
    async def disguise(_loop, members):
        add_tokens(members[0], 2)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("closed by the client") from None

    line = Line(ScriptedLoop(disguise))

    async def main():
        return await cancel_after(asyncio.ensure_future(line.produce(2)), 1), asyncio.get_running_loop().time()

    assert run(main()) == (True, 1)
    assert line.loop.calls == [0, 1]
    assert line.stored() == {A: 2}


def test_cancelling_again_while_that_is_under_way_changes_nothing():
    async def slow_to_end(_loop, members):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(2)
            add_tokens(members[0], 7)

    line = Line(ScriptedLoop(slow_to_end))

    async def main():
        producing = asyncio.ensure_future(line.produce(2))
        for _ in range(4):
            await asyncio.sleep(0.4)
            producing.cancel()
        await asyncio.wait([producing])
        return producing.cancelled(), line.buffer.ledger()["stored"]

    assert run(main()) == (True, 14)


def scenario(**settings):
    """A line in which everything that can happen to a group happens, every step of it with an await."""

    async def pause_slowly(loop, members):
        add_tokens(members[0], 1)
        await loop.paused.wait()
        await asyncio.sleep(0)
        members[0].status = A

    async def valid(group):
        await asyncio.sleep(0)
        return group[0].group_id != 3

    async def on_release(_pairs):
        await asyncio.sleep(0)

    return Line(
        ScriptedLoop(
            finish(),
            {
                0: in_turn(fail(), finish()),
                1: fail(),
                2: in_turn(come_back(A, tokens=1), finish()),
                6: pause_slowly,
                7: pause_slowly,
            },
        ),
        group_size=2,
        is_valid_sample_fn=valid,
        on_release=on_release,
        over_sample_threshold=0.5,
        **settings,
    )


@pytest.mark.parametrize("partial", [False, True])
def test_cancelling_at_any_moment_loses_no_group_and_leaves_no_task(partial):
    ended_by_itself = False
    for steps in itertools.count():
        line = scenario(enable_partial_rollout=partial, max_retries=1)

        async def main(line=line, steps=steps):
            producing = asyncio.ensure_future(line.produce(4))
            for _ in range(steps):
                await asyncio.sleep(0)
            producing.cancel()
            await asyncio.wait([producing])
            return not producing.cancelled()

        ended_by_itself = run(main())
        ledger = line.buffer.ledger()
        rejected = [n for n in (1, 3) if line.loop.calls.count(n)]
        lost = line.sampler.state_dict()["drawn"] - len(line.buffer)
        assert 0 <= lost <= len(rejected), f"cancelled after {steps} steps of the event loop"
        assert ledger["in_flight"] == 0
        assert len(set(balance(ledger))) == 1
        if ended_by_itself:
            break
    assert steps > 20


def test_a_deadlock_would_be_noticed():
    """The clock of these tests fails a wait that nothing can end, instead of waiting."""
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())
