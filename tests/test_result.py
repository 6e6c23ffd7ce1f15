"""What a trainer is told about a batch: timing, counts, several tasks together; and how far production is."""

import math

import numpy as np
import pytest

from pystale import ProduceBatchResult, ProduceBatchStatus, Status
from pystale.progress import Progress
from pystale.report import ProduceReport, score
from pystale.result import GroupTiming, build_result

NORMAL, EXPIRED = ProduceBatchStatus.NORMAL, ProduceBatchStatus.EXPIRED_BATCH


# Timing


def test_times_are_those_of_the_groups_that_came_back(rng):
    seconds = rng.exponential(3, 101).tolist()
    timing = GroupTiming.of(seconds, pause_s=2.0)
    assert timing.count == 101
    assert timing.mean_s == pytest.approx(np.mean(seconds))
    assert timing.p50_s == sorted(seconds)[50]
    assert timing.p99_s == sorted(seconds)[99]
    assert timing.ratio == timing.p99_s / timing.p50_s
    assert timing.pause_s == 2.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([], (0, 0.0, 0.0, 0.0, 1.0)),
        ([4.0], (1, 4.0, 4.0, 4.0, 1.0)),
        ([0.0, 0.0], (2, 0.0, 0.0, 0.0, 1.0)),
    ],
)
def test_no_groups_one_group_and_groups_that_took_no_time(seconds, expected):
    timing = GroupTiming.of(seconds)
    assert (timing.count, timing.mean_s, timing.p50_s, timing.p99_s, timing.ratio) == expected


def test_the_ratio_over_a_median_of_zero_is_infinite():
    assert GroupTiming.of([0.0, 0.0, 5.0]).ratio == math.inf


# Rewards


@pytest.mark.parametrize(
    ("reward", "number"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        ({"score": 2, "length": 7}, 2.0),
        ({"length": 7}, None),
        ({"score": None}, None),
        (None, None),
        ("good", None),
        (math.nan, None),
        (math.inf, None),
    ],
)
def test_a_reward_is_a_finite_number_or_has_one_as_its_score(reward, number):
    assert score(reward) == number


# Results of several tasks


def report(name, **counts):
    return ProduceReport(name, 0, 1, 0, **counts)


def test_a_result_adds_up_its_tasks():
    reports = [
        report(
            "math",
            group_s=[1.0, 3.0],
            produced_samples=4,
            produced_tokens=40,
            failed_samples=1,
            raw_reward_sum=1.5,
            raw_reward_count=3,
            produce_s=7.0,
            pause_s=1.0,
        ),
        report("code", group_s=[2.0], produced_samples=2, produced_tokens=5, filtered_samples=2, produce_s=9.0),
    ]
    result = build_result(
        reports,
        groups={"math": [["m1"], ["m2"]], "code": [["c1"]]},
        trainable_tokens={"math": 30, "code": 4},
        leftover={"math": {Status.COMPLETED: 1, Status.ABORTED: 2}, "code": {Status.COMPLETED: 3}},
        status=EXPIRED,
        pause_s=1.25,
    )
    assert result.groups == [["m1"], ["m2"], ["c1"]]
    assert result.status is EXPIRED
    assert result.trainable_tokens == 34
    assert result.leftover == {Status.COMPLETED: 4, Status.ABORTED: 2}
    assert (result.failed_samples, result.filtered_samples) == (1, 2)
    assert (result.raw_reward_sum, result.raw_reward_count, result.mean_raw_reward) == (1.5, 3, 0.5)
    assert (result.produced_samples, result.produced_tokens, result.produce_time_s) == (6, 45, 9.0)
    assert (result.timing.count, result.timing.p50_s, result.timing.pause_s) == (3, 2.0, 1.25)
    math_result, code_result = result.task_results["math"], result.task_results["code"]
    assert (math_result.groups, math_result.produced_tokens, math_result.timing.pause_s) == ([["m1"], ["m2"]], 40, 1.0)
    assert (code_result.groups, code_result.trainable_tokens, code_result.produce_time_s) == ([["c1"]], 4, 9.0)


def test_a_task_that_took_no_part_is_in_the_result_with_nothing():
    result = build_result([report("math")], groups={}, trainable_tokens={}, leftover={}, status=NORMAL, pause_s=0.0)
    assert result.task_results == {"math": ProduceBatchResult()}
    assert result.mean_raw_reward is None


# Progress


def test_targets_count_what_was_consumed_and_a_share_for_every_step_after_it():
    progress = Progress(["math"], train_step=1, model_step=0)
    assert progress.target("math", 4) == 4
    progress.advance(1)
    assert (progress.future_step, progress.target("math", 4)) == (2, 8)
    progress.consume({"math": 4}, 1)
    assert (progress.next_train_step, progress.target("math", 4)) == (2, 8)


def test_a_batch_taken_before_it_was_asked_for_leaves_the_next_one_to_be_produced():
    """Surplus of one step may fill the next one whole."""
    progress = Progress(["math"], train_step=1, model_step=0)
    for train_step in (1, 2):
        progress.consume({"math": 4}, train_step)
    assert (progress.future_step, progress.target("math", 4)) == (3, 12)


@pytest.mark.parametrize("skip", ["by the trainer", "by the weights"])
def test_steps_that_were_skipped_are_not_wanted(skip):
    progress = Progress(["math"], train_step=1, model_step=0)
    progress.consume({"math": 4}, 1)
    if skip == "by the trainer":
        progress.reach(50)
    else:
        progress.publish(49)
    assert (progress.next_train_step, progress.future_step, progress.target("math", 4)) == (50, 50, 8)


def test_production_for_a_step_that_is_over_moves_nothing_back():
    progress = Progress(["math"], train_step=1, model_step=0)
    progress.reach(9)
    progress.advance(1)
    assert progress.future_step == 9


def test_groups_are_put_at_the_step_that_takes_them_but_never_before_their_weights():
    progress = Progress(["math"], train_step=7, model_step=6)
    progress.reach(3)  # as after a resume
    assert (progress.next_train_step, progress.put_step) == (3, 7)
