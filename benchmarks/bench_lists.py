"""Lists of int read in place, against converting them and against plain Python."""

from typing import Any

import numpy as np
import pytest

from pystale import ModelSteps, _reference, effective_mask, has_trainable_token

TOKENS = 32_768
ARGUMENTS = {"train_step": 10_000, "token_stale_threshold": 1}


def stamped() -> list[int]:
    """As stamping makes them: one object for every token of a weight version."""
    return list(ModelSteps.from_runs([(500, 10_000), (501, 12_768), (502, 10_000)]))


def distinct() -> list[int]:
    """As decoding JSON makes them: an object for every token."""
    return [int(str(500 + at // 11_000)) for at in range(TOKENS)]


LISTS = {"stamped": stamped, "distinct": distinct}


@pytest.mark.benchmark(group="has_trainable_token on a list without fresh tokens, 32k tokens")
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_scan(benchmark: Any, kind: str, how: str) -> None:
    steps = LISTS[kind]()
    if how == "before numpy":
        result = benchmark(lambda: bool((10_000 - 1 - np.asarray(steps) < 1).any()))
    else:
        function = _reference.has_trainable_token if how == "before reference" else has_trainable_token
        result = benchmark(function, steps, **ARGUMENTS)
    assert result is False


@pytest.mark.benchmark(group="has_trainable_token on a list with a fresh tail")
@pytest.mark.parametrize("tokens", [64, TOKENS, 1 << 20])
@pytest.mark.parametrize("how", ["before reference", "after"])
def test_fresh_tail(benchmark: Any, tokens: int, how: str) -> None:
    function = _reference.has_trainable_token if how == "before reference" else has_trainable_token
    assert benchmark(function, [500] * (tokens - 1) + [9_999], **ARGUMENTS) is True


@pytest.mark.benchmark(group="effective_mask of a list, 32k tokens")
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_mask(benchmark: Any, kind: str, how: str) -> None:
    steps, mask = LISTS[kind](), [1] * TOKENS
    arguments = {"train_step": 503, "token_stale_threshold": 2, "response_mask": mask}
    if how == "before numpy":
        result = benchmark(lambda: (503 - 1 - np.asarray(steps) < 2) & (np.asarray(mask) != 0))
    else:
        function = _reference.effective_mask if how == "before reference" else effective_mask
        result = benchmark(function, steps, **arguments)
    assert result.tolist() == [int(step >= 501) for step in steps]


@pytest.mark.benchmark(group="ModelSteps.from_list, 32k tokens")
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("how", ["before reference", "after"])
def test_encode(benchmark: Any, kind: str, how: str) -> None:
    steps = LISTS[kind]()
    result = benchmark(_reference.runs if how == "before reference" else ModelSteps.from_list, steps)
    assert (result if how == "before reference" else result.runs()) == _reference.runs(steps)
