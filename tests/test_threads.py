"""Kernels that run at the same time, without the GIL, over the same arrays."""

import threading
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pystale import ModelSteps, _objects, effective_mask, has_trainable_token, refresh_batch
from pystale import seq_staleness as staleness_of

THREADS = 2
TOKENS = _objects.GIL_RELEASE_TOKENS + 1
PATTERN = np.array([-1, 3, 3, 4, 7, 7, 9, 12], np.int64)

pytestmark = pytest.mark.threads


def repeated(dtype: str) -> Any:
    return np.resize(PATTERN, TOKENS).astype(dtype)


STEPS: dict[str, Callable[[], Any]] = {
    "int64": lambda: repeated("i8"),
    "int16": lambda: repeated("i2"),
    "big-endian": lambda: repeated(">i4"),
    "uint64": lambda: np.abs(repeated("i8")).astype("u8"),
    "strided": lambda: np.repeat(repeated("i4"), 2)[::2],
}
MASKS: dict[str, Callable[[], Any]] = {
    "no mask": lambda: None,
    "bool mask": lambda: np.resize([True, True, False], TOKENS),
    "int32 mask": lambda: np.resize(np.array([2, 0, -1], np.int32), TOKENS),
}


def together(work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives in each of several threads that begin at the same moment."""
    start, results, errors = threading.Barrier(THREADS), [None] * THREADS, []

    def run(number: int) -> None:
        try:
            start.wait(60)
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return results


def everything_about(steps: Any, mask: Any, train_step: int) -> tuple[Any, ...]:
    rule: dict[str, Any] = {"train_step": train_step, "token_stale_threshold": 4}
    out = np.empty(TOKENS, np.uint8)
    effective_mask(steps, response_mask=mask, out=out, **rule)
    offsets = np.linspace(0, TOKENS, 50).astype(np.int64)
    staleness, expired = refresh_batch(steps, offsets, stale_threshold=8, response_mask=mask, **rule)
    return (
        zlib.crc32(out),
        staleness_of(steps, train_step=train_step),
        has_trainable_token(steps, response_mask=mask, **rule),
        staleness.tolist(),
        expired.tolist(),
        _objects.summarise(steps, mask),
    )


@pytest.mark.parametrize(
    ("steps", "mask"),
    [*((steps, "no mask") for steps in STEPS), ("int64", "bool mask"), ("int16", "int32 mask")],
)
def test_threads_that_read_the_same_arrays_get_the_answers_of_one(steps: str, mask: str) -> None:
    shared_steps, shared_mask = STEPS[steps](), MASKS[mask]()
    alone = [everything_about(shared_steps, shared_mask, 8 + number) for number in range(THREADS)]
    assert together(lambda number: everything_about(shared_steps, shared_mask, 8 + number)) == alone


def test_threads_may_write_parts_of_one_array() -> None:
    steps = np.resize(PATTERN, THREADS * TOKENS)
    out = np.full(len(steps), 7, np.uint8)

    def write(number: int) -> None:
        part = slice(number * TOKENS, (number + 1) * TOKENS)
        effective_mask(steps[part], train_step=13, token_stale_threshold=4, out=out[part])

    together(write)
    assert out.tobytes() == (steps >= 9).astype(np.uint8).tobytes()


def test_threads_may_ask_about_the_same_lists_and_model_steps() -> None:
    values = np.resize(PATTERN, 5000).tolist()
    shared = ModelSteps.from_list(values)

    def ask(number: int) -> list[Any]:
        answers = []
        for turn in range(20):
            train_step = 8 + (number + turn) % 3
            answers.append(effective_mask(shared, train_step=train_step, token_stale_threshold=4).tobytes())
            answers.append(effective_mask(values, train_step=train_step, token_stale_threshold=4).tobytes())
            answers.append((shared[turn], shared[::-1].runs() == shared.copy()[::-1].runs()))
        return answers

    assert together(ask) == [ask(number) for number in range(THREADS)]
