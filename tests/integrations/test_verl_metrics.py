"""Off-policy metrics from the tags of a batch."""

import numpy as np
import pytest

from pystale.integrations.verl import off_policy_metrics_from_tags
from pystale.integrations.verl.eviction import FILTERED_REWARD_COUNTS, EvictionMetrics, Reasons
from pystale.integrations.verl.groups import Group

P = "training/off_policy"


def tag(low, high):
    return {"min_global_steps": low, "max_global_steps": high}


def test_the_nine_values_are_verls_formulas(rng):
    for _ in range(50):
        low = rng.integers(0, 9, size=rng.integers(1, 9))
        high = low + rng.integers(0, 4, size=low.size)
        step = int(rng.integers(1, 20))
        padding = np.arange(low.size) >= rng.integers(1, low.size + 1)
        tags = [tag(int(a), int(b)) for a, b in zip(low, high, strict=True)]
        a, b = low[~padding], high[~padding]
        rows = {
            "trajectory_spans": b - a + 1,
            "trajectory_staleness": (step - 1) - b,
            "trajectory_staleness_worst": (step - 1) - a,
        }
        assert off_policy_metrics_from_tags(tags, ~padding, step) == pytest.approx(
            {
                f"{P}/{name}/{how}": getattr(values, how)()
                for name, values in rows.items()
                for how in ("mean", "max", "min")
            }
        )


@pytest.mark.parametrize("padding", [{"is_padding": True}, {"is_padding": True, **tag(None, None)}, tag(0, 99)])
def test_padding_rows_are_left_out_whatever_they_hold(padding):
    expected = off_policy_metrics_from_tags([tag(2, 3)], [True], 5)
    assert off_policy_metrics_from_tags([padding, tag(2, 3)], np.array([False, True]), 5) == expected


def test_without_a_mask_the_tags_say_what_is_padding():
    tags = [tag(2, 3), {"is_padding": True, **tag(0, 0)}]
    assert off_policy_metrics_from_tags(tags, None, 5) == off_policy_metrics_from_tags(tags, [True, False], 5)


def test_missing_versions_are_left_out_and_reported():
    metrics = off_policy_metrics_from_tags([tag(2, 3), tag(None, None), {}], [True] * 3, 5)
    assert metrics[f"{P}/trajectory_spans/mean"] == 2
    assert metrics[f"{P}/coverage"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("tags", [[], [{"is_padding": True}]])
def test_a_batch_of_nothing_has_no_metrics(tags):
    assert off_policy_metrics_from_tags(tags, None, 5) == {}


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [([True], ValueError, r"shape \(1,\), there are 2 tags"), ([1, 0], TypeError, "must be boolean, got dtype int64")],
)
def test_a_mask_that_is_none_is_refused(mask, error, message):
    with pytest.raises(error, match=message):
        off_policy_metrics_from_tags([tag(1, 1), tag(1, 1)], mask, 5)


# Evictions


def test_reasons_may_overlap_and_evict_once():
    a, b, c = map(Group, "abc")
    assert Reasons(stale=[a, b], filtered={b: 1.0}, failed=[c]).union() == [a, b, c]


def test_metrics_add_up_over_polls():
    a, b, c = map(Group, "abc")
    metrics = EvictionMetrics("train")
    metrics.add(Reasons(stale=[a, b], filtered={b: 1.0}), [6, 3])
    metrics.add(Reasons(stale=[c], failed=[c]), [3])
    metrics.add(Reasons(filtered={a: 0.0}), [])
    metrics.add_surplus(2)
    assert metrics.to_dict() == {
        "training/off_policy/evicted_samples": 3,
        "training/off_policy/evicted_samples_staleness/mean": 4.0,
        "training/off_policy/evicted_samples_staleness/max": 6.0,
        "training/off_policy/evicted_samples_staleness/min": 3.0,
        "training/filter_groups/evicted_samples": 2,
        "training/rollout_failure/evicted_samples": 1,
        "training/filter_groups/discarded_surplus_samples": 2,
        FILTERED_REWARD_COUNTS: {1.0: 1, 0.0: 1},
    }


def test_nothing_evicted_is_nothing_logged():
    metrics = EvictionMetrics("val")
    metrics.add(Reasons(), [])
    assert metrics.to_dict() == {}
