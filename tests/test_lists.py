"""Lists and tuples of int, read in place."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pystale import (
    ModelSteps,
    _objects,
    _reference,
    effective_mask,
    has_trainable_token,
    refresh_batch,
    seq_staleness,
)


@given(
    runs=st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 20)), max_size=8),
    shared=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_equal_ints_count_the_same_whether_or_not_they_are_one_object(runs: Any, shared: list[bool]) -> None:
    # Stamped lists repeat one object, lists from elsewhere hold equal objects; a stretch of one object is read once.
    steps = []
    for (step, length), one_object in zip(runs, shared, strict=False):
        steps += [step] * length if one_object else [int(str(step)) for _ in range(length)]
    assert ModelSteps.from_list(steps).runs() == _reference.runs(steps)
    assert _objects.summarise(steps) == _reference.summarise(steps)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 1023, 1024, 1025, 1088, 1089, 5000])
def test_the_one_fresh_token_is_found_wherever_it_is(length: int) -> None:
    # Around the sizes of the blocks that are read: 64 tokens from the tail, then 1024 at a time.
    for at in {0, 1, length // 2, length - 65, length - 64, length - 2, length - 1} & set(range(length)):
        steps = [2] * length
        steps[at] = 7
        for form in (steps, tuple(steps), np.array(steps), ModelSteps.from_list(steps)):
            assert has_trainable_token(form, train_step=8, token_stale_threshold=1)
            assert not has_trainable_token(form, train_step=9, token_stale_threshold=1)
        assert np.flatnonzero(effective_mask(steps, train_step=8, token_stale_threshold=1)).tolist() == [at]
        mask = [1] * length
        mask[at] = 0
        assert not has_trainable_token(steps, train_step=8, token_stale_threshold=1, response_mask=mask)


def test_any_mix_of_lists_arrays_and_model_steps_is_allowed() -> None:
    steps, mask = [3, 4, 4], [1, 0, 1]
    for steps_form in (steps, tuple(steps), np.array(steps, np.int16), ModelSteps.from_list(steps)):
        for mask_form in (mask, tuple(mask), np.array(mask, np.bool_), ModelSteps.from_list(mask), [True, False, True]):
            flags = effective_mask(steps_form, train_step=5, token_stale_threshold=1, response_mask=mask_form)
            assert flags.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (3.9, TypeError, r"steps\[2\] is 3.9 \(float\); an int is required"),
        (float("nan"), TypeError, r"steps\[2\] is nan \(float\)"),
        (True, TypeError, r"steps\[2\] is True; an int is required"),
        ("3", TypeError, r"steps\[2\] is '3' \(str\)"),
        ("x" * 10_000, TypeError, r"steps\[2\] is 'x{59} \(str\)"),
        (None, TypeError, r"steps\[2\] is None"),
        ([3], TypeError, r"steps\[2\] is of type list"),
        (np.float64(3), TypeError, r"steps\[2\] is of type float64"),
        (np.bool_(True), TypeError, r"steps\[2\] is of type bool"),
        (np.array(3), TypeError, r"steps\[2\] is of type ndarray"),
        (2**63, ValueError, r"steps\[2\] does not fit int64; values from -2\*\*63 to 2\*\*63 - 1 are allowed"),
        (-(2**63) - 1, ValueError, r"steps\[2\] does not fit int64"),
        (10**4000, ValueError, r"steps\[2\] does not fit int64"),
        (np.uint64(2**63), ValueError, r"steps\[2\] does not fit int64"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_model_step_is_refused_naming_its_index(entry: Any, error: type[Exception], message: str) -> None:
    for steps in ([3, 4, entry, 5], (3, 4, entry, 5)):
        for call in (
            lambda steps=steps: seq_staleness(steps, train_step=5),
            lambda steps=steps: effective_mask(steps, train_step=5, token_stale_threshold=1),
            lambda steps=steps: has_trainable_token(steps, train_step=9, token_stale_threshold=1),
            lambda steps=steps: refresh_batch(steps, [0, 4], train_step=5, stale_threshold=1),
            lambda steps=steps: _objects.summarise(steps),
            lambda steps=steps: _objects.trainable_mask(steps, None, 5, 1),
            lambda steps=steps: ModelSteps.from_list(steps),
        ):
            with pytest.raises(error, match=message):
                call()


def test_masks_take_ints_and_bools_of_any_size_and_nothing_else() -> None:
    mask = [1, True, np.bool_(True), np.uint8(3), -5, 2**64, 10**40, 0, False, np.bool_(False), np.int8(0)]
    flags = effective_mask([4] * len(mask), train_step=5, token_stale_threshold=1, response_mask=mask)
    assert flags.tolist() == [1] * 7 + [0] * 4
    for entry in (1.0, "1", None):
        with pytest.raises(TypeError, match=r"response_mask\[1\] is .*; an int or a bool is required"):
            effective_mask([4, 4], train_step=5, token_stale_threshold=1, response_mask=[1, entry])


def test_offsets_are_held_to_the_same_rules() -> None:
    with pytest.raises(TypeError, match=r"offsets\[1\] is 2.0 \(float\); an int is required"):
        refresh_batch([1, 2], [0, 2.0], train_step=5, stale_threshold=1)  # type: ignore[list-item]


def test_entries_before_the_newest_trainable_block_are_not_looked_at() -> None:
    steps = ["never read"] + [7] * 5000
    assert has_trainable_token(steps, train_step=8, token_stale_threshold=1)  # type: ignore[arg-type]
