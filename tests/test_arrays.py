"""Arrays of every layout, the out array, and the refusal of what is not an array of integers."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from pystale import ModelSteps, _objects, _reference, effective_mask, has_trainable_token, refresh_batch, seq_staleness


def fresh(steps: Any, *, train_step: int, threshold: int = 2, **arguments: Any) -> list[Any]:
    return effective_mask(steps, train_step=train_step, token_stale_threshold=threshold, **arguments).tolist()


def test_views_of_any_stride_are_read_where_they_lie() -> None:
    table = np.array([[9, 1], [8, 2], [7, 3]])
    assert fresh(table[:, 0], train_step=10) == [1, 1, 0]
    assert fresh(np.array([5, 6, 7])[::-1], train_step=8) == [1, 1, 0]
    assert fresh(np.broadcast_to(6, (3,)), train_step=8) == [1, 1, 1]


def test_masks_of_any_stride_are_read_where_they_lie() -> None:
    steps = np.array([7, 7, 7])
    assert fresh(steps, train_step=8, response_mask=np.array([[1, 9], [0, 9], [2, 9]])[:, 0]) == [1, 0, 1]
    assert fresh(steps, train_step=8, response_mask=np.array([1, 0, 0])[::-1]) == [0, 0, 1]
    assert fresh(steps, train_step=8, response_mask=np.broadcast_to(False, (3,))) == [0, 0, 0]
    assert fresh(steps, train_step=8, response_mask=[True, False, 256]) == [1, 0, 1]


@pytest.mark.parametrize("dtype", strategies.INTEGER_DTYPES, ids=str)
def test_every_integer_dtype_gives_the_same_answer(dtype: np.dtype[Any]) -> None:
    assert fresh(np.array([4, 5, 3], dtype), train_step=5, threshold=1) == [1, 1, 0]
    assert seq_staleness(np.array([4, 5, 3], dtype), train_step=5) == 1


def test_a_wide_mask_entry_whose_low_byte_is_zero_counts() -> None:
    assert fresh([7], train_step=8, response_mask=np.array([256])) == [1]
    assert fresh([7], train_step=8, response_mask=np.array([2**63], np.uint64)) == [1]


def test_uint64_past_int64_is_refused_naming_the_entry() -> None:
    steps = np.array([1, 2**63, 3], np.uint64)
    for call in (
        lambda: seq_staleness(steps, train_step=5),
        lambda: fresh(steps, train_step=5),
        lambda: _objects.summarise(steps),
        lambda: ModelSteps.from_list(steps),
        lambda: has_trainable_token(steps, train_step=5, token_stale_threshold=0, response_mask=[0, 0, 0]),
        lambda: refresh_batch(steps, [0, 3], train_step=5, stale_threshold=1),
    ):
        with pytest.raises(ValueError, match=r"steps\[1\] is 9223372036854775808"):
            call()
    table = np.array([[1, 2], [2**64 - 1, 3], [4, 5]], np.uint64)
    with pytest.raises(ValueError, match=r"steps\[2\] is 18446744073709551615"):
        fresh(table, train_step=5)


@pytest.mark.parametrize("stride", [1, 2, -1])
@pytest.mark.parametrize("order", "<>")
def test_uint64_past_int64_is_found_anywhere_in_any_layout(stride: int, order: str) -> None:
    steps = np.zeros(5000 * abs(stride), np.dtype("u8").newbyteorder(order))[::stride]
    for at in (0, 1023, 1024, 4999):
        steps[at] = 2**63 + at
        for call in (lambda: fresh(steps, train_step=5), lambda: seq_staleness(steps, train_step=5)):
            with pytest.raises(ValueError, match=rf"steps\[{at}\] is {2**63 + at}"):
                call()
        steps[at] = 2**63 - 1  # the largest step there is
        assert fresh(steps, train_step=2**63 - 1, threshold=0)[at] == 1
        steps[at] = 0


@pytest.mark.parametrize(
    "array", [np.array([3.9]), np.array([np.nan]), np.array(["3"]), np.array([3], object)], ids=repr
)
def test_other_dtypes_are_refused_never_truncated(array: Any) -> None:
    for call in (
        lambda: seq_staleness(array, train_step=5),
        lambda: fresh(array, train_step=5),
        lambda: fresh([1], train_step=5, response_mask=array),
        lambda: ModelSteps.from_list(array),
    ):
        with pytest.raises(TypeError, match=rf"has dtype {array.dtype}; an integer"):
            call()


def test_bool_arrays_are_masks_not_steps() -> None:
    flags = np.array([True, False])
    assert fresh([4, 4], train_step=5, response_mask=flags) == [1, 0]
    with pytest.raises(TypeError, match="steps has dtype bool; an integer dtype is required"):
        fresh(flags, train_step=5)


@pytest.mark.parametrize("other", [None, 3, "343", {3: 4}, range(3), object()], ids=lambda other: type(other).__name__)
def test_what_holds_no_integers_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match=r"steps is .*; an integer array, a list or tuple of int, or ModelSteps is"):
        seq_staleness(other, train_step=5)


def test_only_the_effective_mask_takes_more_than_one_dimension() -> None:
    table = np.zeros((2, 3), np.int64)
    for call in (
        lambda: seq_staleness(table, train_step=5),
        lambda: has_trainable_token(table, train_step=5, token_stale_threshold=1),
        lambda: refresh_batch(table, [0, 6], train_step=5, stale_threshold=1),
        lambda: _objects.summarise(table),
        lambda: _objects.trainable_mask(table, None, 5, 1),
        lambda: ModelSteps.from_list(table),
    ):
        with pytest.raises(ValueError, match=r"steps has shape \(2, 3\); one dimension is required"):
            call()
    assert fresh(table, train_step=1, threshold=1) == [[1, 1, 1], [1, 1, 1]]
    assert fresh(np.array(4), train_step=5) == 1


def test_shapes_that_differ_are_refused_naming_both() -> None:
    with pytest.raises(ValueError, match="response_mask has 3 entries, steps has 5"):
        fresh([5] * 5, train_step=8, response_mask=[1, 1, 1])
    with pytest.raises(ValueError, match="response_mask has 0 entries, steps has 1"):
        fresh(np.array([5]), train_step=8, response_mask=np.array([], np.uint8))
    with pytest.raises(ValueError, match=r"response_mask has shape \(3, 2\), steps has \(2, 3\)"):
        fresh(np.zeros((2, 3), int), train_step=8, response_mask=np.zeros((3, 2), int))
    with pytest.raises(ValueError, match=r"response_mask has shape \(6,\), steps has \(2, 3\)"):
        fresh(np.zeros((2, 3), int), train_step=8, response_mask=[1] * 6)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "offsets is empty"),
        ([1, 3], r"offsets\[0\] is 1; the first offset must be 0"),
        ([0, 2, 1, 3], r"offsets\[2\] is 1, less than the 2 before it"),
        ([0, 2], "the last offset is 2, steps has 3 entries"),
        ([0, 4], "the last offset is 4, steps has 3 entries"),
        ([0, -1, 3], r"offsets\[1\] is -1, less than the 0"),
    ],
)
def test_offsets_out_of_order_are_refused(offsets: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refresh_batch([1, 2, 3], offsets, train_step=5, stale_threshold=1)


SCALARS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda value: seq_staleness([1], train_step=value), "train_step"),
    (lambda value: effective_mask([1], train_step=value, token_stale_threshold=1), "train_step"),
    (lambda value: effective_mask([1], train_step=5, token_stale_threshold=value), "token_stale_threshold"),
    (lambda value: has_trainable_token([1], train_step=5, token_stale_threshold=value), "token_stale_threshold"),
    (lambda value: refresh_batch([1], [0, 1], train_step=5, stale_threshold=value), "stale_threshold"),
]


@pytest.mark.parametrize(("call", "name"), SCALARS)
def test_train_step_and_thresholds_are_ints_in_range(call: Callable[[Any], Any], name: str) -> None:
    for value in (3, np.int8(3), np.uint64(3)):
        call(value)
    for refused in (True, 3.0, "3", np.bool_(True), np.float64(3)):
        with pytest.raises(TypeError, match=f"{name} is .*; an int is required"):
            call(refused)
    with pytest.raises(ValueError, match=f"{name} is -1"):
        call(-1)
    if name == "train_step":
        with pytest.raises(ValueError, match="train_step is 0; train steps are counted from 1"):
            call(0)
        with pytest.raises(ValueError, match="train_step does not fit int64"):
            call(2**63)


def test_the_sequence_threshold_cannot_be_left_open() -> None:
    with pytest.raises(TypeError, match="stale_threshold is None"):
        refresh_batch([1], [0, 1], train_step=5, stale_threshold=None)  # type: ignore[arg-type]


# --- out -----------------------------------------------------------------------------------------------------------


def test_out_may_be_the_mask_itself() -> None:
    for mask in (np.array([1, 0, 5], np.uint8), np.array([1, 9, 0, 9, 5, 9], np.uint8)[::2]):
        result = effective_mask([4, 4, 4], train_step=5, token_stale_threshold=1, response_mask=mask, out=mask)
        assert result is mask
        assert mask.tolist() == [1, 0, 1]


def test_out_may_be_bool_also_the_mask_itself() -> None:
    flags = np.zeros(3, np.bool_)
    result = effective_mask([4, -1, 4], train_step=5, token_stale_threshold=1, response_mask=[2, 1, 0], out=flags)
    assert result is flags
    assert flags.tolist() == [True, False, False]
    mask = np.array([True, True, False])
    effective_mask([4, -1, 4], train_step=5, token_stale_threshold=1, response_mask=mask, out=mask)
    assert mask.tolist() == [True, False, False]


@given(data=st.data(), shift=st.integers(-3, 3), length=st.integers(1, 40), reverse=st.booleans())
def test_out_that_overlaps_an_argument_is_written_correctly(
    data: st.DataObject, shift: int, length: int, reverse: bool
) -> None:
    memory = np.array(data.draw(st.lists(st.integers(0, 3), min_size=length + 6, max_size=length + 6)), np.uint8)
    argument = memory[3 : 3 + length]
    out = memory[3 + shift : 3 + shift + length]
    out = out[::-1] if reverse else out
    as_mask = data.draw(st.booleans())
    steps = [2] * length if as_mask else argument
    mask = argument if as_mask else None
    expected = _reference.effective_mask(steps, train_step=3, token_stale_threshold=1, response_mask=mask)
    effective_mask(steps, train_step=3, token_stale_threshold=1, response_mask=mask, out=out)
    assert out.tolist() == expected.tolist()


def test_out_is_refused_unless_it_is_writable_flags_of_the_same_shape() -> None:
    steps = np.array([[1, 2], [3, 4]])
    read_only = np.zeros((2, 2), np.uint8)
    read_only.flags.writeable = False
    shared = np.lib.stride_tricks.as_strided(np.zeros(2, np.uint8), (2, 2), (0, 1))
    for out, error, message in (
        ([[0, 0], [0, 0]], TypeError, "out is of type list; an array or tensor of uint8 or bool is required"),
        (np.zeros((2, 2)), TypeError, "out has dtype float64; uint8 or bool is required"),
        (np.zeros((2, 2), np.int8), TypeError, "out has dtype int8; uint8 or bool is required"),
        (np.zeros(4, np.uint8), ValueError, r"out has shape \(4,\); \(2, 2\) is required"),
        (read_only, ValueError, "out is read-only"),
        (shared, ValueError, "entries of out share memory"),
    ):
        with pytest.raises(error, match=message):
            fresh(steps, train_step=5, out=out)


@pytest.mark.parametrize(
    ("steps", "mask"),
    [
        ([3, 3, "x"], None),
        ([3, 3, 2**63], None),
        ([3, 3, 3], [1, 1, 0.5]),
        (np.array([3, 3, 2**63], np.uint64), None),
        (np.array([3, 3, 3]), [1, 1, None]),
    ],
)
def test_nothing_is_written_when_an_entry_is_refused(steps: Any, mask: Any) -> None:
    # Long enough for the bad entry to be found only after whole blocks of good ones.
    steps = np.repeat(steps, 3000) if isinstance(steps, np.ndarray) else [s for s in steps for _ in range(3000)]
    mask = None if mask is None else [flag for flag in mask for _ in range(3000)]
    out = np.full(9000, 7, np.uint8)
    with pytest.raises((TypeError, ValueError), match=r"(steps|response_mask)\[6000\]"):
        fresh(steps, train_step=5, response_mask=mask, out=out)
    staleness, expired = np.full(1, 7, np.int64), np.ones(1, np.bool_)
    with pytest.raises((TypeError, ValueError), match=r"(steps|response_mask)\[6000\]"):
        refresh_batch(steps, [0, 9000], train_step=5, stale_threshold=9, response_mask=mask, out=(staleness, expired))
    assert (out == 7).all()
    assert staleness.tolist() == [7]
    assert expired.tolist() == [True]


def test_refresh_batch_writes_its_two_arrays_in_place() -> None:
    staleness, expired = np.zeros((2, 3), np.int64)[:, 1], np.zeros(2, np.bool_)[::-1]
    result = refresh_batch([2, 4], [0, 1, 2], train_step=5, stale_threshold=2, out=(staleness, expired))
    assert result[0] is staleness
    assert result[1] is expired
    assert staleness.tolist() == [2, 0]
    assert expired.tolist() == [True, False]


def test_refresh_batch_refuses_out_arrays_it_cannot_use() -> None:
    steps, offsets = np.array([2, 4]), np.array([0, 1, 2])
    good = (np.zeros(2, np.int64), np.zeros(2, np.bool_))
    for out, error, message in (
        (good[0], TypeError, "out must be a tuple of two arrays"),
        ((good[0],), TypeError, "out must be a tuple of two arrays"),
        ((good[0].astype(np.int32), good[1]), TypeError, r"out\[0\] has dtype int32; int64 is required"),
        ((good[0].astype(">i8"), good[1]), TypeError, r"out\[0\] has dtype >i8; int64 is required"),
        ((good[0], good[1].view(np.uint8)), TypeError, r"out\[1\] has dtype uint8; bool is required"),
        ((good[0][:1], good[1]), ValueError, r"out\[0\] has shape \(1,\); \(2,\) is required"),
        ((steps, good[1]), ValueError, "share memory"),
        ((offsets[1:], good[1]), ValueError, "share memory"),
        ((good[0], good[0].view(np.bool_)[:2]), ValueError, "share memory"),
    ):
        with pytest.raises(error, match=message):
            refresh_batch(steps, offsets, train_step=5, stale_threshold=2, out=out)
    assert steps.tolist() == [2, 4]


# --- any number of dimensions ---------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn, low: int = -2, high: int = 9) -> Any:
    """A function that lays out fresh random entries of one shape in a fresh random way."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=2, max_size=4)))

    def table(dtype: Any) -> Any:
        entries = draw(st.lists(st.integers(low, high), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        order = draw(st.permutations(range(len(shape))))
        doubled = np.zeros([shape[axis] * 2 for axis in order], dtype)
        steps = draw(st.lists(st.sampled_from([1, 2, -1, -2]), min_size=len(shape), max_size=len(shape)))
        view = doubled[tuple(slice(None, None, step) for step in steps)]
        view = view[tuple(slice(shape[axis]) for axis in order)].transpose(np.argsort(order))
        view[...] = np.reshape(entries, shape)
        return view

    return table


@given(table=tables(), step_dtype=st.sampled_from(["i1", "i4", "i8", ">i4"]), data=st.data())
def test_tables_of_any_layout_keep_their_shape(table: Any, step_dtype: str, data: st.DataObject) -> None:
    steps, mask, out = table(step_dtype), table("i2"), table("u1")
    arguments = {"train_step": 9, "token_stale_threshold": data.draw(st.integers(0, 12)), "response_mask": mask}
    expected = _reference.effective_mask(steps, **arguments)
    new = effective_mask(steps, **arguments)
    assert new.shape == steps.shape
    np.testing.assert_array_equal(new, expected)
    assert effective_mask(steps, **arguments, out=out) is out
    np.testing.assert_array_equal(out, expected)


# --- the GIL --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ticks() -> Any:
    """A counter that another thread moves on whenever the GIL is let go voluntarily, and only then."""
    counter = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            counter[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=tick)
    thread.start()
    sys.setswitchinterval(1000)
    # Until it asks for the GIL anew, the other thread waits with the old interval.
    time.sleep(0.01)
    yield counter
    sys.setswitchinterval(interval)
    stop.set()
    thread.join()


def test_large_arrays_let_other_threads_run(ticks: list[int]) -> None:
    steps = np.zeros(16 * _objects.GIL_RELEASE_TOKENS, np.int16)
    offsets = np.array([0, len(steps)])
    for call in (
        lambda: seq_staleness(steps, train_step=5),
        lambda: effective_mask(steps, train_step=5, token_stale_threshold=1),
        lambda: has_trainable_token(steps, train_step=5, token_stale_threshold=1),
        lambda: refresh_batch(steps, offsets, train_step=5, stale_threshold=1),
        lambda: _objects.summarise(steps),
    ):
        before = ticks[0]
        # A busy machine may take its time to wake the other thread.
        for _ in range(100):
            call()
            if ticks[0] > before:
                break
        assert ticks[0] > before


def test_small_arrays_lists_and_model_steps_keep_the_gil(ticks: list[int]) -> None:
    small, large = np.zeros(1000, np.int32), np.zeros(_objects.GIL_RELEASE_TOKENS + 1, np.int8)
    long_list = [0] * len(large)
    runs = ModelSteps.from_runs([(0, len(large))])
    before = ticks[0]
    for steps in (small, long_list, runs):
        seq_staleness(steps, train_step=5)
        has_trainable_token(steps, train_step=5, token_stale_threshold=1)
        _objects.summarise(steps)
    has_trainable_token(large, train_step=5, token_stale_threshold=1, response_mask=long_list)
    refresh_batch(large, [0, len(large)], train_step=5, stale_threshold=1)
    assert ticks[0] == before
