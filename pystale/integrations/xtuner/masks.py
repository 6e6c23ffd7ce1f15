"""XTuner's group mask function, by the kernels."""

import operator
from itertools import islice
from typing import Any

import numpy as np

from pystale._objects import effective_mask, summarise
from pystale.integrations.xtuner.members import is_agentic

__all__ = ["calculate_group_effective_response_masks"]


def calculate_group_effective_response_masks(
    group: list[Any], *, current_train_step: int, token_stale_threshold: int | None
) -> list[list[int] | None]:
    """Effective mask of every member of a group, as XTuner computes it.

    Parameters
    ----------
    group : list of xtuner.v1.data_proto.rl_data.RolloutState or alike
        Nothing in it is changed.
    current_train_step : int
        Trainer step that consumes the group.
    token_stale_threshold : int or None
        In trainer steps. None: the token rule is off.

    Returns
    -------
    list of (list of int or None)
        By member: its mask where a token is fresh, 0 elsewhere; None where the token rule does not apply: it is off,
        the group is agentic, the response is empty, or its semantic mask lets no token in.

    Raises
    ------
    TypeError
        For a response to which the rule applies and that has no steps.

    Examples
    --------
    >>> from pystale import RolloutState
    >>> from pystale.integrations.xtuner import calculate_group_effective_response_masks
    >>> group = [RolloutState(response_ids=[7, 8], response_model_steps=[0, 4]), RolloutState()]
    >>> calculate_group_effective_response_masks(group, current_train_step=5, token_stale_threshold=4)
    [[0, 1], None]
    """
    if token_stale_threshold is None or is_agentic(group):
        return [None] * len(group)
    return [_mask(state, current_train_step, token_stale_threshold) for state in group]


def _mask(state: Any, train_step: int, threshold: int) -> list[int] | None:
    ids, mask, steps = state.response_ids, state.response_mask, state.response_model_steps
    if ids is None or not len(ids) or (mask is not None and not any(mask)):
        return None
    if steps is None:
        raise TypeError(
            f"rollout_id {getattr(state, 'rollout_id', None)!r} has {len(ids)} response tokens and no "
            "response_model_steps; put it with a model_step"
        )
    entries = len(ids) if mask is None else len(mask)
    if entries == len(steps) and _is_plain(steps, mask, train_step, threshold):
        flags = effective_mask(
            steps, train_step=train_step, token_stale_threshold=threshold, response_mask=mask
        )  # fmt: skip
        return _as_ints(flags)
    fresh = (int(train_step - step - 1 < threshold) for step in steps)
    return list(islice(fresh, len(ids))) if mask is None else list(map(operator.mul, mask, fresh))


def _is_plain(steps: Any, mask: Any, train_step: int, threshold: int) -> bool:
    """Whether the kernel's answer is XTuner's.

    It is not where XTuner lets tokens of negative steps in, which takes a threshold that reaches back beyond step 0,
    and for masks of other values than 0 and 1, which XTuner hands through.
    """
    if train_step < 1 or threshold < 0:
        return False
    try:
        if train_step < threshold and summarise(steps)[3] != len(steps):
            return False
        if mask is None:
            return True
        _, largest, _, not_negative = summarise(mask)
    except (TypeError, ValueError):
        return False
    return largest <= 1 and not_negative == len(mask)


def _as_ints(flags: "np.ndarray[Any, np.dtype[np.uint8]]") -> list[int]:
    # A list of the bytes object: the interpreter's own 0 and 1, a third faster than ndarray.tolist.
    return list(flags.tobytes())
