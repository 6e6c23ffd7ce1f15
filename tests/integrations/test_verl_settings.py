"""What the buffer may be told, and what is said about the rest."""

import subprocess
import sys

import pytest

from pystale.integrations.verl.settings import Settings


def settings(mode="colocate_async", threshold=8, strategy="drop", kwargs=None, refill_fn=print, **arguments):
    return Settings.checked(
        trainer_mode=mode,
        max_off_policy_threshold=threshold,
        max_off_policy_strategy=strategy,
        sampler_kwargs=kwargs,
        refill_fn=refill_fn,
        arguments=arguments,
    )


def test_choices_that_verl_lacks_are_off_by_default():
    default = settings()
    assert not default.by_tokens
    assert default.filter_groups_metric is None
    assert default.poll_interval == 2.0


@pytest.mark.parametrize(
    ("mode", "threshold", "strategy", "drops", "waits"),
    [
        ("separate_async", 1, "drop", True, False),
        ("colocate_async", 1, "wait", False, True),
        ("colocate_async", None, "drop", False, False),
        ("colocate_async", None, "wait", False, False),
        ("sync", 1, "drop", False, False),
        ("sync", 1, "wait", False, False),
    ],
)
def test_age_counts_in_asynchronous_modes_with_a_threshold(mode, threshold, strategy, drops, waits):
    made = settings(mode, threshold, strategy)
    assert (made.drops, made.waits) == (drops, waits)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"threshold": 0}, ValueError, "max off policy threshold .* must be at least 1, got 0; null turns"),
        ({"threshold": 0}, AssertionError, "max off policy threshold"),
        ({"threshold": True}, TypeError, "must be an int, got bool"),
        ({"threshold": 2.0}, TypeError, "must be an int, got float"),
        ({"strategy": "bogus"}, ValueError, "must be one of drop, wait, got 'bogus'"),
        ({"strategy": "bogus"}, AssertionError, "max off policy strategy"),
        ({"mode": None}, TypeError, "trainer_mode must be the name"),
        ({"refill_fn": 3}, TypeError, "refill_fn must be callable, got int"),
        ({"kwargs": [1]}, TypeError, "sampler_kwargs must be a mapping, got list"),
        (
            {"kwargs": {"stalenes": "tokens"}},
            ValueError,
            "unknown keys 'stalenes'; known are staleness, missing_version",
        ),
        ({"kwargs": {"staleness": "token"}}, ValueError, "staleness must be one of prompt, tokens, got 'token'"),
        (
            {"kwargs": {"staleness": "tokens", "missing_version": 1}},
            ValueError,
            "one of prompt, drop, keep, error, got 1",
        ),
        ({"kwargs": {"missing_version": "drop"}}, ValueError, "needs staleness='tokens'"),
        ({"kwargs": {"poll_interval": 0}}, ValueError, "poll_interval must be above 0"),
        ({"kwargs": {"poll_interval": float("nan")}}, ValueError, "poll_interval must be above 0 and finite"),
        ({"kwargs": {"poll_interval": "1"}}, TypeError, "poll_interval must be a number of seconds, got str"),
        ({"kwargs": {"filter_groups_metric": 1}}, TypeError, "filter_groups_metric must be the name"),
        ({"kwargs": {"filter_groups_metric": "acc"}, "refill_fn": None}, ValueError, "requires refill_fn"),
        ({"kwargs": {"sync_refill_failed_groups": True}, "refill_fn": None}, ValueError, "requires refill_fn"),
        ({"kwargs": {"sync_refill_failed_groups": "yes"}}, TypeError, "must be true or false, got str"),
        ({"kwargs": {"max_inflight_gen_batches": 0}}, ValueError, "max_inflight_gen_batches .* at least 1, got 0"),
        ({"mode": "sync", "kwargs": {"filter_groups_metric": "acc"}}, ValueError, "requires train_batch_size"),
        (
            {"mode": "sync", "kwargs": {"sync_refill_failed_groups": True, "gen_batch_size": 2}},
            ValueError,
            "requires gen_batch_size=1, got 2",
        ),
        ({"kwargs": {"poll_interval": 1}, "poll_interval": 2}, ValueError, "2 as an argument and 1 in sampler_kwargs"),
    ],
)
def test_what_cannot_be_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        settings(**given)


def test_arguments_of_verls_own_buffer_count_like_sampler_kwargs():
    assert settings(poll_interval=0.5) == settings(kwargs={"poll_interval": 0.5})


def test_the_module_is_imported_without_any_framework(tmp_path):
    code = (
        "import sys, pystale.integrations.verl as v\n"
        "loaded = {'verl', 'transfer_queue', 'ray', 'torch', 'omegaconf'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "sys.modules['transfer_queue'] = None\n"
        "try:\n"
        "    v.StalenessReplayBuffer('sync', {}, 8, 'drop', {})\n"
        "except ImportError as error:\n"
        "    assert 'pystale[verl]' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no ImportError')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
