"""What XTuner's rules know of a rollout's tokens, read from the state in place.

XTuner's reading is more lenient than pystale's own: every step counts, negative ones too, and where the semantic mask
and the steps differ in length, what both have is compared.
"""

import operator
from itertools import compress, islice
from typing import Any, NamedTuple

from pystale._objects import summarise

__all__ = ["ALWAYS_STALE", "STEP_LIMIT", "Tokens", "is_agentic", "read_tokens", "stamped_steps"]

STEP_LIMIT = 2**60
"""Steps, train steps and thresholds lie between minus this and this, exclusively."""

ALWAYS_STALE = -STEP_LIMIT
"""Newest step of a response with trainable tokens none of which has a step: under a token rule it is never fresh."""


class Tokens(NamedTuple):
    """The two numbers that decide when a member expires.

    Attributes
    ----------
    oldest : int or None
        Oldest model step; None without any, which counts as staleness 0.
    newest : int or None
        Newest model step of a trainable token; None where the token rule does not apply to the member.
    """

    oldest: int | None
    newest: int | None

    def seq_staleness(self, train_step: int) -> int:
        """Staleness of the oldest token at a train step; 0 without one."""
        return 0 if self.oldest is None else train_step - self.oldest - 1

    def expires(self, train_step: int, stale_threshold: int | None, token_stale_threshold: int | None) -> bool:
        """Whether the response is too old at a train step, or no token of it may enter the loss."""
        if stale_threshold is not None and self.seq_staleness(train_step) >= stale_threshold:
            return True
        return (
            token_stale_threshold is not None
            and self.newest is not None
            and train_step - self.newest - 1 >= token_stale_threshold
        )


def is_agentic(group: list[Any]) -> bool:
    """Whether a member carries prebuilt training tensors: then the token rule does not apply to the group."""
    return any(
        getattr(state, "input_ids", None) is not None or getattr(state, "labels", None) is not None for state in group
    )


def stamped_steps(state: Any, model_step: int | None) -> Any:
    """Steps of a state once `model_step` is stamped on the tokens that have none; nothing is written.

    A list, as XTuner's trainer wants it, unless the state has something else with a step for every token.
    """
    steps = state.response_model_steps
    if model_step is None:
        return steps
    ids = state.response_ids
    missing = (0 if ids is None else len(ids)) - (0 if steps is None else len(steps))
    if missing > 0:
        return [*(() if steps is None else steps), *[model_step] * missing]
    return [] if steps is None else steps


def read_tokens(state: Any, steps: Any, *, agentic: bool) -> Tokens:
    """Summarise the tokens of a state.

    Parameters
    ----------
    state : xtuner.v1.data_proto.rl_data.RolloutState or alike
        Its ``response_ids`` and ``response_mask`` are read.
    steps : list of int, integer array or None
        Stands for its ``response_model_steps``.
    agentic : bool
        Whether the token rule does not apply to its group.

    Raises
    ------
    TypeError, ValueError
        For steps that are no integers, or not within `STEP_LIMIT`.
    """
    ids, mask = state.response_ids, state.response_mask
    tokens = 0 if ids is None else len(ids)
    stamped = 0 if steps is None else len(steps)
    entries = tokens if mask is None else len(mask)
    if not stamped:
        applies = tokens and not agentic and (mask is None or any(mask))
        return Tokens(None, ALWAYS_STALE if applies else None)
    if entries == stamped and tokens:
        try:
            oldest, newest, trainable, model = summarise(steps, mask)
        except (TypeError, ValueError):
            model = -1  # Masks of floats and the like: XTuner goes by their truth.
        if model == stamped:
            return Tokens(_checked(oldest), _checked(newest) if trainable and not agentic else None)
    oldest = _checked(min(steps))
    if not tokens or agentic or (mask is not None and not any(mask)):
        return Tokens(oldest, None)
    trained = islice(steps, tokens) if mask is None else compress(steps, mask)
    return Tokens(oldest, max(map(_checked, trained), default=ALWAYS_STALE))


def _checked(step: Any) -> int:
    try:
        step = operator.index(step)
    except TypeError:
        kind = type(step).__name__
        raise TypeError(f"response_model_steps holds {step!r:.60} ({kind}); an int is required") from None
    if not -STEP_LIMIT < step < STEP_LIMIT:
        raise ValueError(f"response_model_steps holds {step}; steps between -2**60 and 2**60 are allowed")
    return int(step)
