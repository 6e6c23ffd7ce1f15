"""What a question about a response allocates does not grow with the response."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pystale import ModelSteps, _objects, effective_mask, has_trainable_token, seq_staleness

TOKENS = 200_000
# Generous for one call: an int, a tuple, a few frames of the measurement itself. A byte per token would be 200 kB.
BYTES = 4096
BLOCKS = 64


def distinct(n: int) -> list[int]:
    return [10**6 + i for i in range(n)]


FORMS: dict[str, Callable[[int], Any]] = {
    "list of one object": lambda n: [3] * n,
    "list of distinct ints": distinct,
    "tuple": lambda n: tuple([3] * n),
    "list of NumPy scalars": lambda n: [np.int64(3)] * n,
    "int32": lambda n: np.full(n, 3, np.int32),
    "int64": lambda n: np.full(n, 3, np.int64),
    "strided": lambda n: np.full(2 * n, 3, np.int16)[::2],
    "big-endian": lambda n: np.full(n, 3, ">i8"),
    "ModelSteps": lambda n: ModelSteps.from_runs([(3, n)]),
}
MASKS: dict[str, Callable[[int], Any]] = {
    "no mask": lambda n: None,
    "list mask": lambda n: [1] * n,
    "bool mask": lambda n: np.ones(n, np.bool_),
    "int64 mask": lambda n: np.ones(n, np.int64),
}


def peak_bytes(call: Callable[[], Any]) -> int:
    call()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def blocks_kept(call: Callable[[], Any]) -> int:
    call()
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        kept = [call() for _ in range(3)]
        return sys.getallocatedblocks() - before - len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_asking_for_a_trainable_token_allocates_nothing_proportional(
    form: Callable[[int], Any], mask: Callable[[int], Any]
) -> None:
    steps, response_mask = form(TOKENS), mask(TOKENS)

    def ask() -> bool:
        return has_trainable_token(steps, train_step=10**7, token_stale_threshold=1, response_mask=response_mask)

    assert ask() is False  # the whole response was read
    assert peak_bytes(ask) < BYTES
    assert blocks_kept(ask) < BLOCKS


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_age_and_summary_allocate_nothing_proportional(form: Callable[[int], Any]) -> None:
    steps = form(TOKENS)
    for ask in (lambda: seq_staleness(steps, train_step=10**7), lambda: _objects.summarise(steps)):
        assert peak_bytes(ask) < BYTES
        assert blocks_kept(ask) < BLOCKS


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_mask_allocates_its_result_and_nothing_else(form: Callable[[int], Any], mask: Callable[[int], Any]) -> None:
    steps, response_mask = form(TOKENS), mask(TOKENS)
    out = np.empty(TOKENS, np.uint8)

    def write(out: Any) -> Any:
        return effective_mask(steps, train_step=10**7, token_stale_threshold=1, response_mask=response_mask, out=out)

    assert peak_bytes(lambda: write(None)) < TOKENS + BYTES
    assert peak_bytes(lambda: write(out)) < BYTES


def test_encoding_a_list_allocates_its_runs_only() -> None:
    steps = [3] * TOKENS
    assert peak_bytes(lambda: ModelSteps.from_list(steps)) < BYTES
