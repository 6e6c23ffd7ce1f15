"""What production did, task by task, and how it ended."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["ProduceBatchStatus", "ProduceReport", "ProductionStalled", "score"]


class ProductionStalled(RuntimeError):
    """Production that cannot go on: nothing it tries brings it nearer to its batch. The message holds its state."""


class ProduceBatchStatus(enum.Enum):
    """How a round of production ended."""

    NORMAL = "normal"
    """It has what it was to produce."""
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    """New weights are to be served: it was interrupted, and goes on after the update."""
    EXPIRED_BATCH = "expired_batch"
    """The weights being served are too old for the step it produces for; it waits for newer ones."""


@dataclass(slots=True)
class ProduceReport:
    """What one round did; in the background, what was done since the last batch.

    Groups are counted as they came back, samples are their rollouts, tokens are response tokens.
    """

    task_name: str
    batch_size: int
    train_step: int
    model_step: int
    tail_batch: bool = False
    """Whether the round was in tail batch mode."""
    refreshed: int = 0
    """Groups that expired when the round began."""
    scheduled: int = 0
    """Groups wanted, stored ones included: the batch and what is oversampled."""
    spawned: int = 0
    """Groups drawn and given to the agent loop."""
    completed: int = 0
    aborted: int = 0
    expired: int = 0
    failed: int = 0
    filtered: int = 0
    retried: int = 0
    """Times a group was tried again after the agent loop raised."""
    produced_samples: int = 0
    """Rollouts that were given to the agent loop and came back; members that were COMPLETED before are not."""
    failed_samples: int = 0
    filtered_samples: int = 0
    produced_tokens: int = 0
    """Tokens that are new in this round: not those a continued response had before."""
    raw_reward_sum: float = 0.0
    """Sum of the rewards of groups that came back COMPLETED, before the filter."""
    raw_reward_count: int = 0
    """Rewards in that sum."""
    group_s: list[float] = field(default_factory=list)
    """Seconds each group took, in the order they came back."""
    produce_s: float = 0.0
    """Seconds until the batch was there."""
    pause_s: float = 0.0
    """Seconds from then until nothing was running."""
    straggler_s: float = 0.0
    """Seconds in between that went to groups which the next weights would have made too old."""
    last_error: str | None = None
    """Why the last group failed, or its last try did."""


def score(reward: Any) -> float | None:
    """A reward as a finite number: itself, or its entry ``"score"``; None when there is none.

    Examples
    --------
    >>> score(1), score({"score": 0.5, "format": 1}), score(None), score(float("nan"))
    (1.0, 0.5, None, None)
    """
    if isinstance(reward, Mapping):
        reward = reward.get("score")
    if isinstance(reward, (int, float, np.integer, np.floating, np.bool_)) and np.isfinite(reward):
        return float(reward)
    return None
