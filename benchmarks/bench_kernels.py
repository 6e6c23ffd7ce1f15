"""Kernels on arrays, against their plain-Python meaning and plain NumPy.

``pytest benchmarks/bench_kernels.py`` compares within each group; ``--benchmark-disable`` only checks the answers.
"""

from typing import Any

import numpy as np
import pytest

from pystale import _objects, _reference, effective_mask, has_trainable_token, refresh_batch, seq_staleness

TRAIN_STEP, THRESHOLD = 10, 4
RESPONSE = 32_768
BATCH = 1 << 24


@pytest.fixture(scope="module")
def response() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "int32": rng.integers(0, 10, RESPONSE).astype(np.int32),
        "int64": rng.integers(0, 10, RESPONSE),
        "mask": rng.integers(0, 2, RESPONSE).astype(np.uint8),
        "out": np.zeros(RESPONSE, np.uint8),
    }


def numpy_mask(steps: Any, mask: Any) -> Any:
    return (TRAIN_STEP - 1 - steps < THRESHOLD) & (mask != 0)


@pytest.mark.benchmark(group="effective_mask, int32, 32k tokens")
@pytest.mark.parametrize(
    "how", ["before reference", "before list comprehension", "before numpy", "after", "after in place"]
)
def test_effective_mask_of_a_response(benchmark: Any, response: dict[str, Any], how: str) -> None:
    steps, mask, out = response["int32"], response["mask"].copy(), response["out"]
    expected = numpy_mask(steps, mask)
    arguments = {"train_step": TRAIN_STEP, "token_stale_threshold": THRESHOLD}
    if how == "before reference":
        result = benchmark(_reference.effective_mask, steps, response_mask=mask, **arguments)
    elif how == "before list comprehension":
        step_list, mask_list = steps.tolist(), mask.tolist()
        result = benchmark(
            lambda: [
                1 if flag and TRAIN_STEP - step - 1 < THRESHOLD else 0
                for step, flag in zip(step_list, mask_list, strict=True)
            ]
        )
    elif how == "before numpy":
        result = benchmark(numpy_mask, steps, mask)
    else:
        out = out if how == "after" else mask
        result = benchmark(effective_mask, steps, response_mask=mask, out=out, **arguments)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.benchmark(group="effective_mask, int32, 16M tokens, against a copy of as many bytes", min_rounds=7)
@pytest.mark.parametrize("how", ["before copy", "before numpy", "after"])
def test_effective_mask_of_a_batch(benchmark: Any, how: str) -> None:
    rng = np.random.default_rng(0)
    if how == "before copy":
        # The mask reads 4 + 1 bytes a token and writes 1; a copy of 3 bytes a token reads 3 and writes 3.
        source, target = rng.integers(0, 2, 3 * BATCH, np.uint8), np.zeros(3 * BATCH, np.uint8)
        benchmark(np.copyto, target, source)
        assert np.array_equal(target, source)
        return
    steps, mask = rng.integers(0, 10, BATCH, np.int32), rng.integers(0, 2, BATCH, np.uint8)
    out = np.zeros(BATCH, np.uint8)
    arguments = {"train_step": TRAIN_STEP, "token_stale_threshold": THRESHOLD}
    if how == "before numpy":
        result = benchmark(numpy_mask, steps, mask)
    else:
        result = benchmark(effective_mask, steps, response_mask=mask, out=out, **arguments)
    assert np.array_equal(result, numpy_mask(steps, mask))


@pytest.mark.benchmark(group="effective_mask, other dtypes and strides, 32k tokens")
@pytest.mark.parametrize("dtype", ["i1", "i2", "i8", "u1", "u2", "u4", "u8", ">i4"])
@pytest.mark.parametrize("stride", [1, 2, 3, -1])
@pytest.mark.parametrize("how", ["before numpy", "after"])
def test_effective_mask_of_other_layouts(
    benchmark: Any, response: dict[str, Any], dtype: str, stride: int, how: str
) -> None:
    steps = np.repeat(response["int64"].astype(dtype), abs(stride))[::stride]
    arguments = {"train_step": TRAIN_STEP, "token_stale_threshold": THRESHOLD}
    if how == "before numpy":
        # In the equivalent form that does not wrap around for unsigned steps.
        result = benchmark(lambda: steps >= TRAIN_STEP - THRESHOLD)
    else:
        result = benchmark(effective_mask, steps, **arguments)
    np.testing.assert_array_equal(result, steps.astype(np.int64) >= TRAIN_STEP - THRESHOLD)


@pytest.mark.benchmark(group="seq_staleness, int32, 32k tokens")
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_seq_staleness(benchmark: Any, response: dict[str, Any], how: str) -> None:
    steps = response["int32"]
    if how == "before numpy":
        result = benchmark(lambda: TRAIN_STEP - int(steps.min()) - 1)
    else:
        function = _reference.seq_staleness if how == "before reference" else seq_staleness
        result = benchmark(function, steps, train_step=TRAIN_STEP)
    assert result == 9


@pytest.mark.benchmark(group="has_trainable_token, fresh tail")
@pytest.mark.parametrize("tokens", [64, RESPONSE, 1 << 20])
@pytest.mark.parametrize("how", ["before numpy", "after"])
def test_fresh_tail(benchmark: Any, tokens: int, how: str) -> None:
    steps, mask = np.zeros(tokens, np.int32), np.ones(tokens, np.uint8)
    steps[-1] = 9
    if how == "before numpy":
        result = benchmark(lambda: bool(((TRAIN_STEP - 1 - steps < 1) & (mask != 0)).any()))
    else:
        result = benchmark(
            has_trainable_token, steps, train_step=TRAIN_STEP, token_stale_threshold=1, response_mask=mask
        )
    assert result is True


@pytest.mark.benchmark(group="summarise, int64, 32k tokens")
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_summarise(benchmark: Any, response: dict[str, Any], how: str) -> None:
    steps, mask = response["int64"], response["mask"]

    def with_numpy() -> tuple[int, int, int, int]:
        model = steps >= 0
        trainable = model & (mask != 0)
        return int(steps[model].min()), int(steps[trainable].max()), int(trainable.sum()), int(model.sum())

    function = {"before reference": _reference.summarise, "after": _objects.summarise}.get(how)
    result = benchmark(function, steps, mask) if function else benchmark(with_numpy)
    assert result == with_numpy()


@pytest.mark.benchmark(group="trainable_mask, 3 tokens")
@pytest.mark.parametrize("how", ["before reference", "after"])
@pytest.mark.parametrize("form", [list, np.array], ids=["list", "array"])
def test_trainable_mask_of_a_tiny_response(benchmark: Any, how: str, form: Any) -> None:
    function = _reference.trainable_mask if how == "before reference" else _objects.trainable_mask
    mask, ones = benchmark(function, form([5, 6, 8]), form([1, 1, 1]), TRAIN_STEP, THRESHOLD)
    assert (mask.tolist(), ones) == ([0, 1, 1], 2)


@pytest.mark.benchmark(group="refresh_batch, 8 x 64 responses of 512 tokens")
@pytest.mark.parametrize("how", ["before reference", "before numpy", "after"])
def test_refresh_batch(benchmark: Any, how: str) -> None:
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 512 * 512 + 1, 512)
    # Responses of different ages, so that each of the rules expires some.
    steps = (np.repeat(rng.integers(0, 6, 512), 512) + rng.integers(0, 4, 512 * 512)).astype(np.int32)
    mask = rng.integers(0, 2, len(steps), np.uint8)

    def with_numpy() -> tuple[Any, Any]:
        fresh = numpy_mask(steps, mask)
        staleness = TRAIN_STEP - 1 - np.minimum.reduceat(steps, offsets[:-1]).astype(np.int64)
        return staleness, (staleness >= 9) | ~np.logical_or.reduceat(fresh, offsets[:-1])

    arguments = {"train_step": TRAIN_STEP, "stale_threshold": 9, "token_stale_threshold": THRESHOLD}
    if how == "before numpy":
        result = benchmark(with_numpy)
    elif how == "before reference":
        result = benchmark.pedantic(
            _reference.refresh_batch, (steps, offsets), {"response_mask": mask, **arguments}, rounds=3
        )
    else:
        result = benchmark(refresh_batch, steps, offsets, response_mask=mask, **arguments)
    for column, expected in zip(result, with_numpy(), strict=True):
        np.testing.assert_array_equal(column, expected)
    assert 0 < result[1].sum() < 512
