"""Which model versions the tokens of some groups are of, read run by run."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pystale._objects import ModelSteps, has_trainable_token
from pystale.state import length

__all__ = ["Versions", "model_runs", "read_versions"]


class Versions(NamedTuple):
    """What :func:`read_versions` found."""

    oldest: NDArray[np.int64]  # oldest model step of every response that has a model token
    newest: NDArray[np.int64]  # newest one
    rows: int  # those, and responses that have tokens but no steps
    tokens: dict[int, int]  # model tokens by model step
    ruled_tokens: dict[int, int]  # those that a token rule applies to


def read_versions(groups: Mapping[str, Iterable[Sequence[Any]]] | Iterable[Sequence[Any]], *, ruled: bool) -> Versions:
    """Read groups; the cost is that of the runs where steps are ModelSteps, whatever the responses' length.

    Parameters
    ----------
    groups : TrainBatch, mapping of task name to groups, or iterable of groups
    ruled : bool
        Whether there is a token rule. It does not apply to a group with prebuilt training tensors, nor to a response
        whose mask is all zero.

    Raises
    ------
    TypeError, ValueError
        For what is no group of states, and for steps or masks that are not one integer per response token, naming
        group and member.
    """
    oldest: list[int] = []
    newest: list[int] = []
    rows = 0
    tokens: dict[int, int] = {}
    ruled_tokens: dict[int, int] = {}
    for at, group in enumerate(chain.from_iterable(groups.values()) if isinstance(groups, Mapping) else groups):
        if isinstance(group, (str, bytes)) or not isinstance(group, Sequence):
            raise TypeError(f"group {at} must be a sequence of states, got {type(group).__name__}; one is [state]")
        masks = ruled and not any(
            getattr(state, name, None) is not None for state in group for name in ("input_ids", "labels")
        )
        for position, state in enumerate(group):
            try:
                runs = _runs_of(state)
                applies = masks and bool(runs) and _trains(state)
            except AttributeError as error:
                raise TypeError(f"{_which(at, position, state)} is no rollout state: {error}") from None
            except (TypeError, ValueError, RuntimeError) as error:
                raise type(error)(f"{_which(at, position, state)}: {error}") from None
            rows += runs is None or bool(runs)
            if not runs:
                continue
            oldest.append(min(runs)[0])
            newest.append(max(runs)[0])
            for step, n in runs:
                tokens[step] = tokens.get(step, 0) + n
                if applies:
                    ruled_tokens[step] = ruled_tokens.get(step, 0) + n
    return Versions(np.array(oldest, np.int64), np.array(newest, np.int64), rows, tokens, ruled_tokens)


def model_runs(steps: Any) -> list[tuple[int, int]]:
    """Runs ``(model_step, length)`` of the model tokens among `steps`; None has none."""
    if steps is None:
        return []
    encoded = steps if isinstance(steps, ModelSteps) else ModelSteps.from_list(steps)
    return [run for run in encoded.runs() if run[0] >= 0]


def _runs_of(state: Any) -> list[tuple[int, int]] | None:
    """Runs of a response's model tokens; None where it has tokens but no steps."""
    ids, steps = state.response_ids, state.response_model_steps
    tokens, stamped = length(ids), length(steps)
    if not stamped:
        return None if tokens else []
    if ids is not None and tokens != stamped:
        raise ValueError(
            f"response_model_steps has {stamped} entries, response_ids has {tokens}; one entry per response token is "
            "required"
        )
    return model_runs(steps)


def _trains(state: Any) -> bool:
    """Whether any model token of a response may enter the loss by its mask, whatever its age."""
    mask = getattr(state, "response_mask", None)
    return mask is None or has_trainable_token(
        state.response_model_steps, train_step=1, token_stale_threshold=None, response_mask=mask
    )


def _which(at: int, position: int, state: Any) -> str:
    return f"group {at}, member {position} (rollout_id {getattr(state, 'rollout_id', None)!r})"
