"""Continuing a response: what it must be like before, and its per-token fields after one more request."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from pystale._objects import ModelSteps, measure
from pystale.engine import EngineOutput
from pystale.state import length

__all__ = ["as_list", "continued_fields", "continued_params", "refuse_broken"]


def refuse_broken(state: Any, which: str) -> None:
    """Refuse to continue a response whose per-token fields do not fit together.

    Raises
    ------
    ValueError
        If fields have different lengths, or tokens have no model step: those of a continuation would be taken for
        theirs.
    """
    try:
        measure(state, state.response_model_steps)
    except ValueError as error:
        raise ValueError(f"{which}: {error}") from None
    tokens, steps = length(state.response_ids), length(state.response_model_steps)
    if steps != tokens:
        raise ValueError(
            f"{which} has {tokens} response_ids and {steps} response_model_steps; tokens to continue from must have "
            f"model steps (see update_sample_version)"
        )


def continued_params(params: Mapping[str, Any], limit: str, left: int | None, generated: int) -> dict[str, Any]:
    """Sampling parameters of the next request: the caller's, with budgets less what has been generated.

    `left` tokens may still come, which goes under the name `limit`; None leaves that to the server.
    """
    # Deep, so that an engine which changes a list in them does not change the caller's.
    less = dict(copy.deepcopy(params))
    if left is not None:
        less[limit] = left
    for name in ("min_tokens", "min_new_tokens"):
        if less.get(name):
            less[name] = max(less[name] - generated, 0)
    return less


def continued_fields(
    state: Any, output: EngineOutput, runs: list[tuple[int, int]], prompt: list[int]
) -> dict[str, Any]:
    """New values of the fields of `state` that one more request changes; nothing is written.

    Fields keep their kind (list, array or ModelSteps); where there were none, steps are ModelSteps and the others
    lists.

    Parameters
    ----------
    runs : list of (int, int)
        ``(model_step, tokens)`` of the new tokens.
    prompt : list of int

    Raises
    ------
    ValueError
        If the answer has another number of log-probabilities than of tokens, or has them where the response has none,
        or the other way round.
    """
    new, had = len(output.token_ids), length(state.response_ids)
    fields: dict[str, Any] = {}
    if output.text is not None:
        fields["response"] = (state.response or "") + output.text
    if new:
        given = length(output.logprobs)
        if output.logprobs is not None and given != new:
            raise ValueError(f"logprobs has {given} entries, token_ids has {new}; one entry per token is required")
        if had and (length(state.logprobs) > 0) != (given > 0):
            raise ValueError(
                f"{new} new tokens came {'with' if given else 'without'} logprobs, the {had} before them have "
                f"{length(state.logprobs)}; all tokens of a response have them or none"
            )
        ids = as_list(output.token_ids)
        fields["response_ids"] = _extended(state.response_ids, ids, np.min_scalar_type(max(ids)))
        fields["response_model_steps"] = _with_runs(state.response_model_steps, runs)
        if output.logprobs is not None:
            fields["logprobs"] = _extended(state.logprobs, output.logprobs, getattr(state.logprobs, "dtype", None))
        if (mask := state.response_mask) is not None:
            fields["response_mask"] = _extended(mask, [1] * new, getattr(mask, "dtype", None))
    if hasattr(state, "tokens"):
        fields["tokens"] = [*prompt, *as_list(fields.get("response_ids", state.response_ids))]
    return fields


def as_list(values: Any) -> list[Any]:
    """Entries of a per-token field as a list of Python numbers; None has none."""
    if values is None:
        return []
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _with_runs(steps: Any, runs: list[tuple[int, int]]) -> Any:
    if isinstance(steps, (list, tuple)):
        return [*steps, *ModelSteps.from_runs(runs)]
    if isinstance(steps, np.ndarray):
        newest = max(step for step, _ in runs)
        return _extended(steps, np.asarray(ModelSteps.from_runs(runs)), np.min_scalar_type(newest))
    extended = ModelSteps() if steps is None else ModelSteps.from_list(steps)
    for step, n in runs:
        extended.append(step, n)
    return extended


def _extended(values: Any, more: Any, dtype: Any) -> Any:
    """`values` and `more`: an array where `values` is one (`more` as `dtype`, widened if need be), otherwise a list."""
    if isinstance(values, np.ndarray):
        return np.concatenate((values, np.asarray(more, dtype=dtype)))
    return [*as_list(values), *as_list(more)]
