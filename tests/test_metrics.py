import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import group

from pystale import ReplayBuffer, StalenessRule, Status, off_policy_metrics
from pystale.metrics import ledger_metrics, pool_metrics, translate
from pystale.off_policy import OffPolicyAccumulator

P = "training/off_policy"


def test_span_and_both_ages_of_a_batch():
    metrics = off_policy_metrics([7, 9], [9, 9], train_step=11)
    assert metrics == {
        f"{P}/trajectory_spans/mean": 2.0,
        f"{P}/trajectory_spans/max": 3.0,
        f"{P}/trajectory_spans/min": 1.0,
        f"{P}/trajectory_staleness/mean": 1.0,
        f"{P}/trajectory_staleness/max": 1.0,
        f"{P}/trajectory_staleness/min": 1.0,
        f"{P}/trajectory_staleness_worst/mean": 2.0,
        f"{P}/trajectory_staleness_worst/max": 3.0,
        f"{P}/trajectory_staleness_worst/min": 1.0,
    }


@pytest.mark.parametrize("junk", [0, 10**6, -1, -(2**62)])
def test_padding_rows_count_for_nothing_whatever_they_hold(junk):
    padded = off_policy_metrics(
        [7, 9, junk, junk], [9, 9, -junk, junk], train_step=11, padding_mask=[False, False, True, True]
    )
    assert padded == off_policy_metrics([7, 9], [9, 9], train_step=11)


@pytest.mark.parametrize("junk", [float("nan"), None, "pad", 2**70, 0.5])
def test_padding_rows_of_a_list_need_not_even_hold_integers(junk):
    for rows in (list, tuple):
        low, high = rows([7, junk, 9]), rows([junk, 9, 9])
        assert off_policy_metrics(low, high, train_step=11, padding_mask=[True, True, False]) == off_policy_metrics(
            [9], [9], train_step=11
        )
    with pytest.raises(TypeError, match="max_model_step must hold integers"):
        off_policy_metrics([7, 9, 9], [junk, 9, 9], train_step=11, padding_mask=[False, True, False])


def test_the_newest_token_says_the_least_age_and_the_oldest_the_worst():
    metrics = off_policy_metrics([3], [8], train_step=9)
    assert metrics[f"{P}/trajectory_spans/mean"] == 6
    assert metrics[f"{P}/trajectory_staleness/mean"] == 0
    assert metrics[f"{P}/trajectory_staleness_worst/mean"] == 5


def test_a_padding_row_may_hold_what_no_step_can_be():
    low, high = np.array([7, 2**63], dtype=np.uint64), np.array([9, 0], dtype=np.uint64)
    assert off_policy_metrics(low, high, train_step=11, padding_mask=[0, 1]) == off_policy_metrics(
        [7], [9], train_step=11
    )


@pytest.mark.parametrize("rows", [[], [4]])
def test_without_a_real_row_there_are_no_values_and_no_exception(rows):
    assert off_policy_metrics(rows, rows, train_step=9, padding_mask=[True] * len(rows)) == {}


def test_rows_without_a_version_are_left_out_and_reported_as_coverage():
    metrics = off_policy_metrics([7, -1, 9, 0], [9, -1, 9, 0], train_step=11, padding_mask=[0, 0, 0, 1])
    assert metrics[f"{P}/coverage"] == pytest.approx(2 / 3)
    assert metrics[f"{P}/trajectory_spans/mean"] == 2.0
    assert off_policy_metrics([-1], [-1], train_step=3) == {f"{P}/coverage": 0.0}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.booleans()), max_size=30), st.integers(1, 70))
def test_worst_minus_least_age_is_the_span_minus_one(rows, train_step):
    low = np.array([r[0] for r in rows], dtype=np.int32)
    high = np.array([r[0] + r[1] for r in rows], dtype=np.int64)
    padding = np.array([r[2] for r in rows], dtype=bool)
    metrics = off_policy_metrics(low, high, train_step=train_step, padding_mask=padding, prefix="x")
    if padding.all():
        assert metrics == {}
        return
    real = ~padding
    assert metrics["x/trajectory_spans/mean"] == pytest.approx(np.mean((high - low + 1)[real]))
    assert metrics["x/trajectory_staleness/max"] == np.max((train_step - 1 - high)[real])
    assert metrics["x/trajectory_staleness_worst/mean"] - metrics["x/trajectory_staleness/mean"] == pytest.approx(
        metrics["x/trajectory_spans/mean"] - 1
    )


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([1, 2], [1], 3), ValueError, "2 entries.*1"),
        (([1.5], [2], 3), TypeError, "min_model_step"),
        (([True], [True], 3), TypeError, "min_model_step"),
        (([[1]], [[1]], 3), ValueError, "1-D"),
        (([1], [1], 0), ValueError, "train_step"),
        (([4, 5], [4, 3], 9), ValueError, "row 1"),
        ((np.array([2**63], dtype=np.uint64), [1], 3), ValueError, "index 0"),
        (([1, 1], np.array([1, 2**63], dtype=np.uint64), 3), ValueError, "max_model_step.*index 1"),
    ],
)
def test_wrong_input_is_refused(arguments, error, match):
    low, high, train_step = arguments
    with pytest.raises(error, match=match):
        off_policy_metrics(low, high, train_step=train_step)


@pytest.mark.parametrize(("padding", "error"), [([True, False], ValueError), ([0.5], TypeError)])
def test_a_wrong_padding_mask_is_refused(padding, error):
    with pytest.raises(error, match="padding_mask"):
        off_policy_metrics([1], [1], train_step=3, padding_mask=padding)


# The token account


def taken_with_masks():
    """A buffer that trained a response of five tokens, masked two of them, and holds and lost others."""
    buffer = ReplayBuffer(StalenessRule(max_staleness=4, max_token_staleness=1), tail_batch_trigger_size=0)
    buffer.sync.put(group([5, 5, 7, 7, 7], response_mask=[0, 1, 1, 1, 1]), train_step=8)
    buffer.sync.take_train_batch({"default": 1}, train_step=8)
    buffer.sync.put(group([7, 7]), train_step=8)
    buffer.sync.reject(group([7, 7, 7]), outcome="filtered")
    return buffer


def test_the_token_account_is_flat_and_adds_up():
    buffer = taken_with_masks()
    metrics = ledger_metrics(buffer.ledger())
    assert metrics == {
        "training/tokens/produced": 10.0,
        "training/tokens/trained": 3.0,
        "training/tokens/masked_stale": 1.0,
        "training/tokens/masked_semantic": 1.0,
        "training/tokens/stored": 2.0,
        "training/tokens/in_flight": 0.0,
        "training/tokens/discarded/filtered": 3.0,
        "training/tokens/masked_stale_fraction": 0.25,
    }
    fraction = metrics.pop("training/tokens/masked_stale_fraction")
    assert metrics.pop("training/tokens/produced") == sum(metrics.values())
    assert all(type(value) is float for value in (fraction, *metrics.values()))


def test_between_two_accounts_flows_are_differences_and_levels_are_as_of_now():
    buffer = taken_with_masks()
    before = buffer.ledger()
    buffer.sync.get(1)
    buffer.sync.reject(group([7]), outcome="failed")
    assert ledger_metrics(buffer.ledger(), since=before, prefix="t") == {
        "t/produced": 1.0,
        "t/trained": 0.0,
        "t/masked_stale": 0.0,
        "t/masked_semantic": 0.0,
        "t/stored": 0.0,
        "t/in_flight": 2.0,
        "t/discarded/failed": 1.0,
        "t/discarded/filtered": 0.0,
    }


def test_an_account_that_is_none_is_refused():
    ledger = taken_with_masks().ledger()
    later = ledger | {"trained": 7}
    more_lost = ledger | {"discarded": {"lost": 1}}
    for wrong, since, error, match in (
        (ledger, later, ValueError, "since is the earlier account"),
        (ledger, more_lost, ValueError, "lost"),
        ({"produced": 3}, None, ValueError, "no 'trained'"),
        (ledger | {"discarded": 5}, None, ValueError, "discarded must map"),
        (ledger | {"stored": 1.5}, None, TypeError, "stored"),
        ([], None, TypeError, "ReplayBuffer.ledger"),
    ):
        with pytest.raises(error, match=match):
            ledger_metrics(wrong, since=since)


# What is stored


def test_pools_are_summed_over_tasks():
    buffer = taken_with_masks()
    counts = asyncio.run(buffer.count_statuses(["default", "other"], [Status.COMPLETED, Status.EXPIRED]))
    assert pool_metrics(counts) == {"training/pools/completed": 1.0, "training/pools/expired": 0.0}
    assert pool_metrics({"a": {"ABORTED": 2}, "b": {Status.ABORTED: 3}}, prefix="p") == {"p/aborted": 5.0}
    assert pool_metrics({}) == {}


@pytest.mark.parametrize("counts", [{"a": {"gone": 1}}, {"a": {Status.INIT: -1}}, {"a": {Status.INIT: 1.0}}])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises((TypeError, ValueError)):
        pool_metrics(counts)


# Names


def everything():
    accumulator = OffPolicyAccumulator()
    accumulator.add_groups([group([3, 3, 8], [None])], train_step=11, token_stale_threshold=3)
    accumulator.add_evicted([4, 6])
    buffer = taken_with_masks()
    accumulator.add_ledger(buffer.ledger())
    counts = asyncio.run(buffer.count_statuses(["default"], list(Status)))
    return accumulator.metrics() | ledger_metrics(buffer.ledger()) | pool_metrics(counts)


@pytest.mark.parametrize("project", ["verl", "xtuner", "prime-rl"])
def test_translating_keeps_every_number_and_what_has_no_other_name(project):
    metrics = everything()
    translated = translate(metrics, project)
    assert list(translated.values()) == list(metrics.values())
    assert translated is not metrics
    assert translate({"loss": 0.5, f"{P}/coverage": 1.0}, project) == {"loss": 0.5, f"{P}/coverage": 1.0}


@pytest.mark.parametrize(
    ("project", "names"),
    [
        ("verl", {}),
        ("xtuner", {f"training/pools/{n}": f"async/{n}_samples" for n in ("init", "completed", "aborted", "expired")}),
        (
            "prime-rl",
            {
                f"{P}/trajectory_staleness_worst/mean": "off_policy/mean",
                f"{P}/trajectory_staleness_worst/max": "off_policy/max",
                f"{P}/in_flight/mean": "off_policy/in_flight/mean",
                f"{P}/in_flight/max": "off_policy/in_flight/max",
                f"{P}/in_queue/mean": "off_policy/in_queue/mean",
                f"{P}/in_queue/max": "off_policy/in_queue/max",
                f"{P}/evicted_samples": "off_policy/dropped",
            },
        ),
    ],
)
def test_names_of_another_project_are_those_it_logs(project, names):
    metrics = everything()
    translated = translate(metrics, project)
    assert set(translated) == (set(metrics) - set(names)) | set(names.values())
    assert all(translated[theirs] == metrics[ours] for ours, theirs in names.items())


def test_a_name_that_is_taken_is_not_written_over():
    metrics = {f"{P}/evicted_samples": 1.0, "off_policy/dropped": 2.0}
    for order in (list, reversed):
        with pytest.raises(ValueError, match="already"):
            translate(dict(order(metrics.items())), "prime-rl")


def test_an_unknown_project_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"verl, xtuner, prime-rl, got 'trl'"):
        translate({}, "trl")
