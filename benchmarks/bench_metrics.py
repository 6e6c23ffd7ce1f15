"""Staleness of a batch, token by token in plain Python and run by run.

The batch is 64 groups of 8 responses of 8,192 tokens that lived through three weight versions.
"""

import functools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pystale import ModelSteps, RolloutState
from pystale.off_policy import OffPolicyAccumulator

GROUPS, MEMBERS, TOKENS = 64, 8, 8192
TRAIN_STEP, THRESHOLD = 12, 2
LENGTHS = {9: TOKENS // 2, 10: TOKENS // 4, 11: TOKENS // 4}

Batch = list[list[RolloutState]]


@functools.lru_cache(maxsize=1)
def batch(form: str) -> Batch:
    runs = ModelSteps.from_runs(LENGTHS.items())
    return [
        [RolloutState(response_model_steps=runs.copy() if form == "runs" else list(runs)) for _ in range(MEMBERS)]
        for _ in range(GROUPS)
    ]


def by_token(groups: Batch) -> tuple[float, int]:
    """Mean staleness of all tokens, and how many reach the threshold."""
    ages = [TRAIN_STEP - step - 1 for group in groups for state in group for step in state.response_model_steps or ()]
    return sum(ages) / len(ages), sum(age >= THRESHOLD for age in ages)


def by_run(groups: Batch) -> tuple[float | None, int]:
    accumulator = OffPolicyAccumulator()
    accumulator.add_groups(groups, train_step=TRAIN_STEP, token_stale_threshold=THRESHOLD)
    return accumulator.token_staleness.mean, accumulator.stale_tokens


EXPECTED = (1.25, GROUPS * MEMBERS * TOKENS // 2)


@pytest.mark.benchmark(group="off-policy metrics of 4M tokens in lists")
def test_lists_before(benchmark: BenchmarkFixture) -> None:
    assert benchmark.pedantic(by_token, (batch("lists"),), rounds=3, iterations=1) == EXPECTED


@pytest.mark.benchmark(group="off-policy metrics of 4M tokens in lists")
def test_lists_after(benchmark: BenchmarkFixture) -> None:
    assert benchmark(by_run, batch("lists")) == EXPECTED


@pytest.mark.benchmark(group="off-policy metrics of 4M tokens in ModelSteps")
def test_runs_before(benchmark: BenchmarkFixture) -> None:
    assert benchmark.pedantic(by_token, (batch("runs"),), rounds=3, iterations=1) == EXPECTED


@pytest.mark.benchmark(group="off-policy metrics of 4M tokens in ModelSteps")
def test_runs_after(benchmark: BenchmarkFixture) -> None:
    assert benchmark(by_run, batch("runs")) == EXPECTED
