import itertools

import numpy as np
import pytest
from rollouts import group

from pystale import ReplayBuffer, StalenessRule


def expires(rule: StalenessRule, train_step: int, model_step: int) -> bool:
    return train_step - model_step - 1 >= rule.stale_threshold


def grid(settings):
    """Every (train step, model step that exists by then, setting)."""
    for train_step, setting in itertools.product(range(1, 15), settings):
        for model_step in range(train_step):
            yield train_step, model_step, setting


def test_a_rule_accepts_by_default_only_what_the_current_period_produced():
    rule = StalenessRule()
    assert (rule.stale_threshold, rule.token_stale_threshold) == (1, None)


@pytest.mark.parametrize(
    ("max_staleness", "interval", "stale_threshold"), [(0, 1, 1), (1, 2, 4), (2, 1, 3), (0, 5, 5), (3, 4, 16)]
)
def test_thresholds_count_sync_periods_in_trainer_steps(max_staleness, interval, stale_threshold):
    rule = StalenessRule(max_staleness, 0, interval)
    assert rule.stale_threshold == stale_threshold
    assert rule.token_stale_threshold == interval


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"max_staleness": -1}, ValueError),
        ({"max_staleness": True}, TypeError),
        ({"max_staleness": 1.0}, TypeError),
        ({"max_staleness": float("nan")}, TypeError),
        ({"max_staleness": None}, TypeError),
        ({"max_staleness": "1"}, TypeError),
        ({"max_staleness": 2**63}, ValueError),
        ({"max_staleness": 2**63 - 1}, ValueError),
        ({"max_staleness": 2**62, "sync_weights_interval": 4}, ValueError),
        ({"max_staleness": 2**62, "max_token_staleness": 2**61, "sync_weights_interval": 2}, ValueError),
        ({"max_token_staleness": -1}, ValueError),
        ({"max_token_staleness": False}, TypeError),
        ({"sync_weights_interval": 0}, ValueError),
        ({"sync_weights_interval": -3}, ValueError),
        ({"sync_weights_interval": True}, TypeError),
        ({"spare_aborted": 1}, TypeError),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, error):
    with pytest.raises(error, match=next(iter(settings))):
        StalenessRule(**settings)


def test_a_token_limit_looser_than_the_sequence_limit_warns_of_having_no_effect():
    with pytest.warns(UserWarning, match="no effect"):
        StalenessRule(max_staleness=1, max_token_staleness=2)


def test_verl_drops_by_the_span_from_dispatch():
    for train_step, model_step, threshold in grid(range(1, 6)):
        dispatched = model_step + 1
        dropped = train_step - dispatched + 1 > threshold
        assert expires(StalenessRule.from_verl(threshold), train_step, model_step) == dropped


def test_nemo_rl_keeps_a_window_of_versions():
    for train_step, start, window in grid(range(0, 6)):
        version = train_step - 1
        kept = version - window <= start <= version
        assert expires(StalenessRule.from_nemo_rl(window), train_step, start) == (not kept)


def test_prime_rl_bounds_the_dispatch_version():
    for train_step, dispatched, steps in grid(range(0, 6)):
        kept = dispatched >= (train_step - 1) - steps
        assert expires(StalenessRule.from_prime_rl(steps), train_step, dispatched) == (not kept)


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_trl_counts_syncs_from_one(interval):
    for train_step, model_step, limit in grid(range(0, 5)):
        if model_step % interval:
            continue  # weights are published at syncs only
        version = (train_step - 1) // interval + 1
        sample_version = model_step // interval + 1
        dropped = version - sample_version > limit
        assert expires(StalenessRule.from_trl(limit, weight_sync_steps=interval), train_step, model_step) == dropped


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: StalenessRule.from_verl(0), "max_off_policy_threshold"),
        (lambda: StalenessRule.from_nemo_rl(-1), "max_staleness_versions"),
        (lambda: StalenessRule.from_prime_rl(-1), "max_off_policy_steps"),
        (lambda: StalenessRule.from_trl(-1), "max_staleness"),
        (lambda: StalenessRule.from_trl(1, weight_sync_steps=0), "weight_sync_steps"),
    ],
)
def test_a_foreign_setting_that_allows_nothing_is_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64])
def test_settings_of_numpy_do_not_wrap_around(kind):
    most = np.iinfo(kind).max // (2 if kind is np.int64 else 1)
    rule = StalenessRule(kind(most), kind(most), kind(1))
    assert rule.stale_threshold == rule.token_stale_threshold == int(most) + 1
    assert type(rule.stale_threshold) is int
    assert rule == StalenessRule(int(most), int(most))


def test_the_largest_rule_is_one_a_buffer_can_use():
    buffer = ReplayBuffer(StalenessRule(2**63 - 2), tail_batch_trigger_size=0).sync
    buffer.put(group([0]), train_step=2**63 - 1)
    assert buffer.count(status="completed") == 1
