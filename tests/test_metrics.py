import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pystale import off_policy_metrics

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


def test_the_newest_token_says_the_least_age_and_the_oldest_the_worst():
    metrics = off_policy_metrics([3], [8], train_step=9)
    assert metrics[f"{P}/trajectory_spans/mean"] == 6
    assert metrics[f"{P}/trajectory_staleness/mean"] == 0
    assert metrics[f"{P}/trajectory_staleness_worst/mean"] == 5


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
