"""ModelSteps of three runs, against arrays and a bare copy of the mask."""

from typing import Any

import numpy as np
import pytest

from pystale import ModelSteps, _reference, effective_mask, has_trainable_token, refresh_batch, seq_staleness

TOKENS = 32_768
RUNS = [(5, 10_000), (6, 12_768), (9, 10_000)]
ARGUMENTS = {"train_step": 10, "token_stale_threshold": 4}


@pytest.fixture(scope="module")
def mask() -> Any:
    return np.random.default_rng(0).integers(0, 2, TOKENS, np.uint8)


@pytest.mark.benchmark(group="effective_mask of ModelSteps, 3 runs, 32k tokens, against a copy of the mask")
@pytest.mark.parametrize("how", ["before copy of the mask", "before numpy", "before int32 array", "after"])
def test_mask(benchmark: Any, mask: Any, how: str) -> None:
    steps = ModelSteps.from_runs(RUNS)
    array = np.asarray(steps, dtype=np.int32)
    out = np.zeros(TOKENS, np.uint8)
    expected = _reference.effective_mask(array, response_mask=mask, **ARGUMENTS)
    if how == "before copy of the mask":
        benchmark(np.copyto, out, mask)
        assert np.array_equal(out, mask)
        return
    if how == "before numpy":
        result = benchmark(lambda: (10 - 1 - array < 4) & (mask != 0))
    else:
        given = steps if how == "after" else array
        result = benchmark(effective_mask, given, response_mask=mask, out=out, **ARGUMENTS)
    assert np.array_equal(result, expected)


@pytest.mark.benchmark(group="has_trainable_token of ModelSteps without fresh tokens, 32k tokens")
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_scan(benchmark: Any, mask: Any, how: str) -> None:
    steps = ModelSteps.from_runs(RUNS)
    array = np.asarray(steps)
    arguments = {"train_step": 20, "token_stale_threshold": 4, "response_mask": mask}
    if how == "before numpy":
        result = benchmark(lambda: bool(((20 - 1 - array < 4) & (mask != 0)).any()))
    elif how == "before reference":
        result = benchmark(_reference.has_trainable_token, list(steps), **arguments)
    else:
        result = benchmark(has_trainable_token, steps, **arguments)
    assert result is False


@pytest.mark.benchmark(group="seq_staleness of ModelSteps, 32k tokens")
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_age(benchmark: Any, how: str) -> None:
    steps = ModelSteps.from_runs(RUNS)
    array = np.asarray(steps)
    if how == "before numpy":
        result = benchmark(lambda: 10 - int(array.min()) - 1)
    elif how == "before reference":
        result = benchmark(_reference.seq_staleness, list(steps), train_step=10)
    else:
        result = benchmark(seq_staleness, steps, train_step=10)
    assert result == 4


@pytest.mark.benchmark(group="refresh_batch of ModelSteps, 512 responses of 512 tokens")
@pytest.mark.parametrize("how", ["before int32 array", "after"])
def test_refresh_batch(benchmark: Any, how: str) -> None:
    steps = ModelSteps.from_runs([(response % 8 + version, 256) for response in range(512) for version in range(2)])
    array = np.asarray(steps, dtype=np.int32)
    offsets = np.arange(0, len(steps) + 1, 512)
    arguments = {"train_step": 10, "stale_threshold": 9, "token_stale_threshold": 4}
    result = benchmark(refresh_batch, steps if how == "after" else array, offsets, **arguments)
    expected = [9 - response % 8 for response in range(512)]
    assert result[0].tolist() == expected
    assert result[1].tolist() == [staleness >= 9 or staleness - 1 >= 4 for staleness in expected]


@pytest.mark.benchmark(group="decode 32k tokens, 3 runs")
@pytest.mark.parametrize("how", ["before np.repeat", "after as array", "after as list"])
def test_decode(benchmark: Any, how: str) -> None:
    steps = ModelSteps.from_runs(RUNS)
    if how == "before np.repeat":
        values, lengths = zip(*RUNS, strict=True)
        result = benchmark(lambda: np.repeat(values, lengths))
    else:
        result = benchmark(np.asarray if how == "after as array" else list, steps)
    assert steps == result
