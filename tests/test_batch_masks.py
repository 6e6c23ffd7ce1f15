"""Masks of a whole batch: one table or one flat array, in the order of the batch, of any dtype and layout."""

import doctest
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status, TrainBatch, _reference

DTYPES = ["?", "u1", "i1", "i2", "u4", "i8", "f2", "f4", "f8"]


def batch_of(*responses: tuple[Any, Any]) -> TrainBatch:
    """A batch of one group, one member per (steps, mask)."""
    group = [
        RolloutState(response_ids=list(range(len(steps))), response_model_steps=steps, response_mask=mask)
        for steps, mask in responses
    ]
    return TrainBatch({"default": [group]}, {"default": 0})


@pytest.fixture
def batch() -> TrainBatch:
    return batch_of(([4, 4, 5], [0, 1, 2]), (ModelSteps.from_list([5, -1]), None), (np.array([5]), np.array([True])))


RIGHT = [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
LEFT = [[0, 1, 1], [0, 1, 0], [0, 0, 1]]
PACKED = [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_filled_up_on_either_side(batch: TrainBatch, dtype: str) -> None:
    right = batch.response_masks(dtype=dtype)
    assert right.dtype == np.dtype(dtype)
    assert right.tolist() == RIGHT
    assert batch.response_masks(dtype=dtype, padding="left").tolist() == LEFT
    wide = batch.response_masks(dtype=dtype, length=5, padding="left")
    assert wide.tolist() == [[0, 0, *row] for row in LEFT]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_responses_lie_end_to_end(batch: TrainBatch, dtype: str) -> None:
    masks, offsets = batch.packed_response_masks(dtype=dtype)
    assert (masks.dtype, offsets.dtype) == (np.dtype(dtype), np.int64)
    assert masks.tolist() == PACKED
    assert offsets.tolist() == [0, 3, 5, 6]


def test_masks_are_uint8_unless_asked_otherwise(batch: TrainBatch) -> None:
    assert batch.response_masks().dtype == np.uint8
    assert batch.packed_response_masks()[0].dtype == np.uint8


@pytest.mark.parametrize("dtype", [*DTYPES, ">i4", ">f4"])
@pytest.mark.parametrize("layout", ["whole", "columns of a wider table", "every other column", "transposed", "upwards"])
def test_a_table_of_the_callers_is_written_in_place(batch: TrainBatch, dtype: str, layout: str) -> None:
    memory = np.full((6, 12), 7).astype(dtype)
    before = memory.copy()
    if layout == "transposed":
        memory, before = memory.T, before.T
    area = {
        "whole": (slice(3), slice(12)),
        "columns of a wider table": (slice(2, 5), slice(4, 8)),
        "every other column": (slice(3), slice(0, 8, 2)),
        "transposed": (slice(3), slice(1, 5)),
        "upwards": (slice(4, 1, -1), slice(4)),
    }[layout]
    out = memory[area]
    assert batch.response_masks(out) is out
    assert out.tolist() == [row + [0] * (out.shape[1] - 3) for row in RIGHT]
    before[area] = out
    np.testing.assert_array_equal(memory, before)  # nothing else was touched


def test_a_flat_array_of_the_callers_is_written_in_place(batch: TrainBatch) -> None:
    memory = np.full(12, 7.0, np.float32)
    out = memory[::2]
    masks, _ = batch.packed_response_masks(out)
    assert masks is out
    assert out.tolist() == PACKED
    assert (memory[1::2] == 7).all()


def test_rows_come_task_by_task_group_by_group_member_by_member() -> None:
    states = [RolloutState(response_ids=[0] * n, response_model_steps=[3] * n) for n in range(1, 6)]
    batch = TrainBatch({"b": [[states[0], states[1]], [states[2]]], "a": [[states[3], states[4]]]}, {})
    assert batch.responses == states
    assert batch.response_masks().sum(axis=1).tolist() == [1, 2, 3, 4, 5]


def test_the_table_of_a_batch_taken_for_training_sums_up_to_its_trainable_tokens() -> None:
    buffer = ReplayBuffer(StalenessRule(max_staleness=5, max_token_staleness=0), tail_batch_trigger_size=0)
    for number in range(3):
        group = [
            RolloutState(group_id=number, response_ids=[1] * 4, response_model_steps=steps, status=Status.COMPLETED)
            for steps in ([-1, 4, 5, 6], [6, 6, 6, 6], [5, 5, 6, -1])
        ]
        buffer.sync.put(group, train_step=7)
    batch = buffer.sync.take_train_batch({"default": 3}, train_step=7)
    assert batch.response_masks().tolist() == [[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0]] * 3
    assert batch.response_masks().sum() == batch.trainable_tokens == 18


def test_a_batch_taken_as_it_is_counts_no_tokens_that_no_model_generated() -> None:
    buffer = ReplayBuffer(StalenessRule(max_staleness=5))
    state = RolloutState(response_ids=[1] * 3, response_model_steps=[-1, 4, 5], status=Status.COMPLETED)
    buffer.sync.put([state])
    batch = buffer.sync.take_batch({"default": 1})
    assert batch.response_masks().sum() == batch.trainable_tokens == 2


def test_responses_without_versions_or_tokens_have_rows_too() -> None:
    states = [
        RolloutState(response_ids=[1, 2], response_mask=[1, 0]),
        RolloutState(response_ids=[]),
        RolloutState(),
        RolloutState(response_ids=[1, 2, 3]),
    ]
    batch = TrainBatch({"default": [states]}, {"default": 0})
    assert batch.response_masks().tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]]
    masks, offsets = batch.packed_response_masks()
    assert masks.tolist() == [1, 0, 1, 1, 1]
    assert offsets.tolist() == [0, 2, 2, 2, 5]


def test_an_empty_batch_has_no_rows() -> None:
    empty = TrainBatch({}, {})
    assert empty.response_masks().shape == (0, 0)
    assert empty.response_masks(length=4).shape == (0, 4)
    assert empty.response_masks(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert [column.tolist() for column in empty.packed_response_masks()] == [[], [0]]


@given(
    responses=st.lists(strategies.tokens(), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    left=st.booleans(),
    spare=st.integers(0, 3),
)
def test_rows_are_the_reference_masks(responses: Any, dtype: str, left: bool, spare: int) -> None:
    expected = [
        _reference.effective_mask(steps, train_step=1, token_stale_threshold=None, response_mask=mask)
        for steps, mask, _, _ in responses
    ]
    batch = batch_of(*[(steps, mask) for _, _, steps, mask in responses])
    width = max(map(len, expected)) + spare
    out = np.ones((len(expected), width), dtype)
    batch.response_masks(out, padding="left" if left else "right")
    for row, mask in zip(out, expected, strict=True):
        padding = [0] * (width - len(mask))
        assert row.tolist() == (padding + mask.tolist() if left else mask.tolist() + padding)
    masks, offsets = batch.packed_response_masks(dtype=dtype)
    assert offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    np.testing.assert_array_equal(masks, np.concatenate(expected))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_refused_and_stays_as_it_was(batch: TrainBatch) -> None:
    read_only = np.zeros((3, 3))
    read_only.flags.writeable = False
    shared = np.lib.stride_tricks.as_strided(np.zeros(3), (3, 3), (0, 8))
    for out, error, message in (
        (np.full((3, 2), 7), ValueError, "response 0 has 3 tokens, the table is 2 wide; the longest response needs 3"),
        (np.full((2, 3), 7), ValueError, r"out has shape \(2, 3\); two dimensions with 3 rows are required"),
        (np.full(9, 7), ValueError, r"out has shape \(9,\); two dimensions"),
        (np.full((3, 3), 7 + 0j), TypeError, "the dtype of out is complex128; a bool, integer or floating dtype"),
        (np.full((3, 3), "7"), TypeError, "the dtype of out is <U1; a bool, integer or floating dtype"),
        ([[7] * 3] * 3, TypeError, "out is of type list; an array or a CPU tensor is required"),
        (read_only, ValueError, "out is read-only"),
        (shared, ValueError, r"entries of out share memory \(strides \(0, 8\)\)"),
    ):
        before = np.array(out)
        with pytest.raises(error, match=message):
            batch.response_masks(out)
        np.testing.assert_array_equal(out, before)
    with pytest.raises(ValueError, match=r"out has shape \(5,\); \(6,\) is required, one entry per token"):
        batch.packed_response_masks(np.zeros(5))


def test_settings_that_make_no_sense_are_refused(batch: TrainBatch) -> None:
    with pytest.raises(ValueError, match="padding is 'both'; 'left' or 'right' is required"):
        batch.response_masks(padding="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="length and dtype are those of out"):
        batch.response_masks(np.zeros((3, 3)), length=3)
    with pytest.raises(ValueError, match="length and dtype are those of out"):
        batch.packed_response_masks(np.zeros(6), dtype="f4")
    with pytest.raises(ValueError, match="response 0 has 3 tokens, the table is 2 wide"):
        batch.response_masks(length=2)
    with pytest.raises(TypeError, match="dtype is complex64"):
        batch.response_masks(dtype="c8")


@pytest.mark.parametrize(
    ("steps", "mask", "error", "message"),
    [
        ([4, "x", 5], None, TypeError, r"response 1: response_model_steps\[1\] is 'x'"),
        ([4, 5, 5], [1, 1, 0.5], TypeError, r"response 1: response_mask\[2\] is 0.5"),
        ([4, 5, 5], [1, 1], ValueError, "response 1: response_mask has 2 entries, response_ids has 3"),
        (
            np.array([4, 5, 2**63], np.uint64),
            None,
            ValueError,
            r"response 1: response_model_steps\[2\] is 9223372036854",
        ),
        (np.array([4.0, 5, 5]), None, TypeError, "response 1: response_model_steps has dtype float64"),
        (np.array([[4], [5], [5]]), None, ValueError, r"response 1: response_model_steps has shape \(3, 1\)"),
    ],
)
def test_nothing_is_written_when_a_response_is_refused(steps: Any, mask: Any, error: Any, message: str) -> None:
    batch = batch_of(([4, 4, 5], None), (steps, mask))
    out = np.full((2, 3), 7)
    with pytest.raises(error, match=message):
        batch.response_masks(out)
    assert (out == 7).all()


def test_lengths_of_steps_and_ids_must_agree() -> None:
    batch = TrainBatch({"default": [[RolloutState(response_ids=[1, 2], response_model_steps=[3])]]}, {"default": 0})
    with pytest.raises(ValueError, match="response 0: response_model_steps has 1 entries, response_ids has 2"):
        batch.response_masks()


def test_out_is_refused_where_it_is_the_memory_of_a_mask() -> None:
    memory = np.ones((2, 3), np.uint8)
    batch = batch_of(([4, 4, 5], None), ([4, 4, 5], memory[0]))
    with pytest.raises(ValueError, match="out shares memory with the mask or the steps of response 1"):
        batch.response_masks(memory)
    assert memory.all()


@pytest.mark.parametrize("documented", [TrainBatch.response_masks, TrainBatch.packed_response_masks])
def test_the_example_in_the_docstring_runs(documented: Any) -> None:
    example = doctest.DocTestParser().get_doctest(documented.__doc__, {}, documented.__qualname__, None, None)
    assert example.examples
    assert doctest.DocTestRunner(verbose=False).run(example).failed == 0
