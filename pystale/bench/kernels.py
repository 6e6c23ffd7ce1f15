"""Masks, and the question whether a token is left to train: arrays, lists and runs."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from pystale import ModelSteps, effective_mask, has_trainable_token
from pystale.bench.comparison import OURS, Side

__all__ = [
    "mask_of_a_batch",
    "mask_of_a_list",
    "mask_of_an_array",
    "mask_of_runs",
    "no_token_left",
    "token_left",
]

RESPONSE = 32_768
BATCH = 1 << 24
TRAIN_STEP, THRESHOLD = 10, 2
ARGUMENTS: Any = {"train_step": TRAIN_STEP, "token_stale_threshold": THRESHOLD}


def three_versions(tokens: int) -> ModelSteps:
    """Steps of a response that lived through three weight versions, the last of which is fresh."""
    third = tokens // 3
    return ModelSteps.from_runs([(5, third), (6, third), (9, tokens - 2 * third)])


def some_mask(tokens: int) -> Any:
    """A semantic mask with holes, as tool calls leave them."""
    return np.random.default_rng(0).integers(0, 2, tokens, np.uint8)


def comprehension(steps: Iterable[int], mask: Iterable[int]) -> list[int]:
    """The mask as a trainer without pystale writes it."""
    return [1 if flag and TRAIN_STEP - step - 1 < THRESHOLD else 0 for step, flag in zip(steps, mask, strict=True)]


def with_numpy(steps: Any, mask: Any) -> Any:
    """The same in NumPy."""
    return (TRAIN_STEP - 1 - steps < THRESHOLD) & (mask != 0)


def mask_of_an_array(tokens: int = RESPONSE) -> list[Side]:
    """A response as int32, with a place for the mask."""
    steps, mask, out = np.asarray(three_versions(tokens), dtype=np.int32), some_mask(tokens), np.zeros(tokens, np.uint8)
    step_list, mask_list = steps.tolist(), mask.tolist()
    return [
        Side("list comprehension", lambda: comprehension(step_list, mask_list)),
        Side("NumPy", lambda: with_numpy(steps, mask)),
        Side(OURS, lambda: effective_mask(steps, response_mask=mask, out=out, **ARGUMENTS)),
    ]


def mask_of_a_list(tokens: int = RESPONSE) -> list[Side]:
    """A response in Python lists, which NumPy has to convert first."""
    steps, mask = list(three_versions(tokens)), some_mask(tokens).tolist()
    return [
        Side("list comprehension", lambda: comprehension(steps, mask)),
        Side("NumPy", lambda: with_numpy(np.asarray(steps), np.asarray(mask))),
        Side(OURS, lambda: effective_mask(steps, response_mask=mask, **ARGUMENTS)),
    ]


def mask_of_runs(tokens: int = RESPONSE) -> list[Side]:
    """A response as `ModelSteps`, beside its steps as an array in NumPy and in pystale."""
    steps, mask, out = three_versions(tokens), some_mask(tokens), np.zeros(tokens, np.uint8)
    array = np.asarray(steps, dtype=np.int32)
    return [
        Side("NumPy, int32", lambda: with_numpy(array, mask)),
        Side("pystale, int32", lambda: effective_mask(array, response_mask=mask, out=out, **ARGUMENTS)),
        Side(OURS, lambda: effective_mask(steps, response_mask=mask, out=out, **ARGUMENTS)),
    ]


def mask_of_a_batch(tokens: int = BATCH) -> list[Side]:
    """More than the caches hold, beside a copy of as many bytes: what the memory allows."""
    rng = np.random.default_rng(0)
    steps, mask = rng.integers(0, TRAIN_STEP, tokens, np.int32), some_mask(tokens)
    out = np.zeros(tokens, np.uint8)
    # The mask reads 4 + 1 bytes a token and writes 1. A copy of 3 bytes a token reads 3 and writes 3.
    source, target = np.zeros(3 * tokens, np.uint8), np.ones(3 * tokens, np.uint8)
    expected = with_numpy(steps, mask)
    return [
        Side("NumPy", lambda: with_numpy(steps, mask)),
        # A copy has no mask to compare; it stands for the one that it takes as long as.
        Side("copy of as many bytes", lambda: np.copyto(target, source), answer=lambda _: expected),
        Side(OURS, lambda: effective_mask(steps, response_mask=mask, out=out, **ARGUMENTS)),
    ]


def token_left(sizes: Iterable[int] = (64, RESPONSE, 1 << 20)) -> list[Side]:
    """Stale tokens, and one fresh one at the end, where fresh tokens are."""
    return [side for tokens in sizes for side in _token_left(tokens)]


def _token_left(tokens: int) -> list[Side]:
    steps, mask, of = np.zeros(tokens, np.int32), np.ones(tokens, np.uint8), f"{tokens:,}"
    steps[-1] = TRAIN_STEP - 1
    return [
        Side("NumPy", lambda: bool(with_numpy(steps, mask).any()), of),
        Side(OURS, lambda: has_trainable_token(steps, response_mask=mask, **ARGUMENTS), of),
    ]


def no_token_left(tokens: int = RESPONSE) -> list[Side]:
    """A list without a fresh token, so that all of it must be read; one int object per version, as stamping makes."""
    steps = list(ModelSteps.from_runs([(3, tokens // 2), (4, tokens - tokens // 2)]))
    array = np.asarray(steps)
    return [
        Side("list loop", lambda: any(TRAIN_STEP - step - 1 < THRESHOLD for step in steps)),
        Side("NumPy, converted", lambda: bool((TRAIN_STEP - 1 - np.asarray(steps) < THRESHOLD).any())),
        Side("NumPy, int64", lambda: bool((TRAIN_STEP - 1 - array < THRESHOLD).any())),
        Side(OURS, lambda: has_trainable_token(steps, **ARGUMENTS)),
    ]
