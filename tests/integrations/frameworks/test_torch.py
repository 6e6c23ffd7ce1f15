"""Torch tensors as arguments and as out: read and written where they lie, or refused with a remedy."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from pystale import (
    ModelSteps,
    RolloutState,
    TrainBatch,
    _objects,
    effective_mask,
    has_trainable_token,
    refresh_batch,
    seq_staleness,
    update_sample_version,
)

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FRESH: dict[str, Any] = {"train_step": 8, "token_stale_threshold": 2}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_steps_of_every_integer_dtype_are_read(dtype: torch.dtype) -> None:
    steps = torch.tensor([5, 5, 5, 7, 7]).to(dtype)
    assert effective_mask(steps, **FRESH).tolist() == [0, 0, 0, 1, 1]
    assert seq_staleness(steps, train_step=8) == 2
    assert has_trainable_token(steps, **FRESH)
    assert _objects.summarise(steps) == (5, 7, 5, 5)
    assert ModelSteps.from_list(steps).runs() == [(5, 3), (7, 2)]


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS], ids=str)
def test_masks_of_bool_and_every_integer_dtype_are_read(dtype: torch.dtype) -> None:
    mask = torch.tensor([1, 0, 1]).to(dtype)
    for steps in ([7, 7, 5], torch.tensor([7, 7, 5]), ModelSteps.from_list([7, 7, 5])):
        assert effective_mask(steps, **FRESH, response_mask=mask).tolist() == [1, 0, 0]


def test_views_are_read_where_they_lie() -> None:
    table = torch.tensor([[9, 1], [8, 2], [5, 3]])
    assert effective_mask(table[:, 0], **FRESH).tolist() == [1, 1, 0]
    assert effective_mask(table.T, **FRESH).tolist() == [[1, 1, 0], [0, 0, 0]]
    assert effective_mask(torch.tensor(7).expand(3), **FRESH).tolist() == [1, 1, 1]
    assert effective_mask(torch.empty(0, dtype=torch.int64), **FRESH).tolist() == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool], ids=str)
def test_out_is_written_in_place_and_given_back(dtype: torch.dtype) -> None:
    memory = torch.ones(2, 6, dtype=dtype)
    out = memory[:, ::2]
    steps = torch.tensor([[5, 7, 7], [7, 5, -1]])
    assert effective_mask(steps, **FRESH, out=out) is out
    assert out.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert memory[:, 1::2].all()
    mask = torch.tensor([1, 1, 0]).to(dtype)
    assert effective_mask([5, 7, 7], **FRESH, response_mask=mask, out=mask) is mask
    assert mask.tolist() == [0, 1, 0]


def test_out_that_shares_memory_with_the_steps_is_written_correctly() -> None:
    memory = torch.tensor([5, 7, 7, 5], dtype=torch.uint8)
    effective_mask(memory[:3], **FRESH, out=memory[1:])
    assert memory.tolist() == [5, 0, 1, 1]


def test_batches_are_refreshed_in_tensors() -> None:
    out = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
    result = refresh_batch(
        torch.tensor([5, 7, 3]), torch.tensor([0, 2, 3], dtype=torch.int32), train_step=8, stale_threshold=4, out=out
    )
    assert result[0] is out[0]
    assert result[1] is out[1]
    assert [column.tolist() for column in out] == [[2, 4], [False, True]]


def test_states_may_hold_tensors() -> None:
    state = RolloutState(
        response_ids=torch.arange(3),
        response_model_steps=torch.tensor([7, 7, 7]),
        response_mask=torch.tensor([1, 0, 1]),
    )
    member = _objects.measure(state, state.response_model_steps)
    assert (member.tokens, member.oldest, member.trainable) == (3, 7, 2)
    unstamped = RolloutState(response_ids=torch.arange(3))
    update_sample_version(unstamped, 4)
    assert list(unstamped.response_model_steps) == [4, 4, 4]


REFUSED: list[tuple[Any, str]] = [
    (lambda: torch.tensor([3.9]), "float32; an integer"),
    (lambda: torch.tensor([3.9], requires_grad=True), "float32; an integer"),
    (lambda: torch.tensor([3], dtype=torch.bfloat16), "bfloat16; an integer"),
    (lambda: torch.tensor([3j]).conj(), "complex64; an integer"),
    (lambda: torch.tensor([3]).to_sparse(), r"has layout torch.sparse_coo; .*\.to_dense\(\)"),
    (lambda: torch.tensor([3], device="meta"), r"is on device meta; .*\.cpu\(\)"),
    (lambda: torch._neg_view(torch.tensor([3])), r"negated view .*\.resolve_neg\(\)"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_tensors_without_integers_in_memory_are_refused_with_a_remedy(make: Any, message: str) -> None:
    tensor = make()
    for name, call in (
        ("steps", lambda: seq_staleness(tensor, train_step=5)),
        ("steps", lambda: effective_mask(tensor, **FRESH)),
        ("response_mask", lambda: effective_mask([3], **FRESH, response_mask=tensor)),
        ("offsets", lambda: refresh_batch([3], tensor, train_step=5, stale_threshold=1)),
    ):
        with pytest.raises(TypeError, match=f"{name} .*{message}"):
            call()


def test_tensors_of_a_compiler_are_refused() -> None:
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"steps of dtype torch\.int64 cannot be used as an array"):
        seq_staleness(fake, train_step=5)


def test_out_is_refused_unless_it_is_flags_of_the_same_shape() -> None:
    for out, error, message in (
        (torch.zeros(3), TypeError, "out has dtype float32; uint8 or bool is required"),
        (torch.zeros(3, dtype=torch.int64), TypeError, "out has dtype int64; uint8 or bool is required"),
        (torch.zeros(4, dtype=torch.uint8), ValueError, r"out has shape \(4,\); \(3,\) is required"),
        (torch.zeros(1, dtype=torch.uint8).expand(3), ValueError, "entries of out share memory"),
        (torch.zeros(3, dtype=torch.uint8, device="meta"), TypeError, "out is on device meta"),
    ):
        with pytest.raises(error, match=message):
            effective_mask([5, 7, 7], **FRESH, out=out)


# --- the masks of a batch -------------------------------------------------------------------------------------------


@pytest.fixture
def batch() -> TrainBatch:
    group = [
        RolloutState(response_ids=[1] * 3, response_model_steps=torch.tensor([4, 4, 5]), response_mask=[0, 1, 1]),
        RolloutState(response_ids=torch.arange(2), response_model_steps=[5, -1], response_mask=torch.ones(2).bool()),
    ]
    return TrainBatch({"default": [group]}, {"default": 3})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
def test_the_masks_of_a_batch_are_written_into_a_tensor(batch: TrainBatch, dtype: torch.dtype) -> None:
    table = torch.ones(2, 9, dtype=dtype)
    out = table[:, 5:]
    assert batch.response_masks(out) is out
    assert out.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert table[:, :5].all()
    assert batch.response_masks(out, padding="left").tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    flat = torch.ones(5, dtype=dtype)
    masks, offsets = batch.packed_response_masks(flat)
    assert masks is flat
    assert flat.tolist() == [0, 1, 1, 1, 0]
    assert torch.from_numpy(offsets).tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, 3, requires_grad=True), r"out requires grad; .*\.detach\(\)"),
        (lambda: torch.zeros(2, 3, dtype=torch.bfloat16), "out of dtype torch.bfloat16 cannot be used as an array"),
        (lambda: torch.zeros(2, 3, device="meta"), "out is on device meta"),
        (lambda: torch.zeros(2, 3, dtype=torch.complex64), "the dtype of out is complex64"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(batch: TrainBatch, make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        batch.response_masks(make())


def test_the_package_never_imports_torch() -> None:
    code = (
        "import sys, pystale, numpy\n"
        "pystale.effective_mask(numpy.array([1]), train_step=2, token_stale_threshold=1)\n"
        "try: pystale.seq_staleness(object(), train_step=2)\n"
        "except TypeError: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_large_tensors_share_their_memory_with_the_kernel() -> None:
    steps = torch.full((1 << 20,), 7, dtype=torch.int32)
    out = torch.zeros(1 << 20, dtype=torch.bool)
    address = out.data_ptr()
    effective_mask(steps, **FRESH, out=out)
    assert out.all()
    assert out.data_ptr() == address
