"""The masks of a whole batch in one tensor, against what trainers write with torch and NumPy.

The torch forms run where torch is installed. ``PYSTALE_BENCH_GROUPS`` groups, 512 by default, of 8 responses of up to
4,096 tokens.
"""

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

from pystale import ModelSteps, RolloutState, TrainBatch, effective_mask

GROUPS = min(int(os.environ.get("PYSTALE_BENCH_GROUPS", 512)), 512)
MEMBERS, LONGEST = 8, 4_096
TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="module", params=["arrays", "lists"])
def batch(request: Any) -> TrainBatch:
    """Responses of three weight versions each, their masks as ``take_train_batch`` leaves them."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(512, LONGEST + 1, GROUPS * MEMBERS)
    lengths[0] = LONGEST
    states = []
    for length in lengths.tolist():
        steps = ModelSteps.from_runs([(3, length // 3), (4, length // 3), (5, length - 2 * (length // 3))])
        mask = effective_mask(steps, train_step=6, token_stale_threshold=2)
        is_list = request.param == "lists"
        states.append(
            RolloutState(
                response_ids=range(length),
                response_model_steps=list(steps) if is_list else steps,
                response_mask=mask.tolist() if is_list else mask,
            )
        )
    groups = [states[first : first + MEMBERS] for first in range(0, len(states), MEMBERS)]
    return TrainBatch({"default": groups}, {"default": 0})


@pytest.mark.benchmark(group="masks of a batch in one table", min_rounds=2, max_time=0.5)
@pytest.mark.parametrize("dtype", ["bool", "int64", "float32"])
@pytest.mark.parametrize(
    "how", ["before numpy", *(["before torch rows", "before torch pad_sequence"] * TORCH), "after"]
)
def test_table(benchmark: Any, batch: TrainBatch, dtype: str, how: str) -> None:
    states = batch.responses
    out: Any = np.zeros((len(states), LONGEST), dtype)
    if TORCH:
        import torch

        out = torch.from_numpy(out)

    def with_numpy() -> Any:
        table = np.asarray(out)
        table[...] = 0
        for row, state in zip(table, states, strict=True):
            row[: len(state.response_mask)] = state.response_mask
        return table

    def with_torch_rows() -> Any:
        out.zero_()
        for row, state in zip(out, states, strict=True):
            row[: len(state.response_mask)] = torch.as_tensor(state.response_mask)
        return out

    def with_pad_sequence() -> Any:
        rows = [torch.as_tensor(state.response_mask) for state in states]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(out.dtype)

    function = {
        "before numpy": with_numpy,
        "before torch rows": with_torch_rows,
        "before torch pad_sequence": with_pad_sequence,
        "after": lambda: batch.response_masks(out),
    }[how]
    result = benchmark(function)
    assert np.array_equal(np.asarray(result), TrainBatch.response_masks(batch, dtype=dtype))
