"""How much a round of production is to generate, and where it draws from."""

import math
from dataclasses import dataclass
from fractions import Fraction

from pystale.state import Status

__all__ = ["Plan", "oversampled", "pools_to_draw_from"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round is to achieve, decided once when it begins. All are numbers of groups.

    Attributes
    ----------
    share : int
        One batch's share of the task.
    target : int
        Groups wanted in all, those consumed so far included.
    scheduled : int
        The target and what is oversampled.
    pools : tuple of Status
        Where to draw from before new prompts.
    tail_batch : bool
        Whether it is in tail batch mode.
    """

    share: int
    target: int
    scheduled: int
    pools: tuple[Status, ...]
    tail_batch: bool


def oversampled(target: int, over_sample_threshold: float, task_batch_size: int) -> int:
    """Groups to have in all: `target` and ``ceil(over_sample_threshold * task_batch_size)`` more.

    The product is that of the decimal number as written, so float noise never adds a group.

    Examples
    --------
    >>> oversampled(100, 0.07, 100), math.ceil(0.07 * 100)
    (107, 8)
    """
    return target + math.ceil(Fraction(repr(over_sample_threshold)) * task_batch_size)


def pools_to_draw_from(tail_batch_trigger_size: int, expired: int) -> tuple[tuple[Status, ...], bool]:
    """Pools a round draws from before new prompts, and whether it is in tail batch mode.

    Parameters
    ----------
    tail_batch_trigger_size : int
        See :class:`~pystale.AsyncProduceStrategyConfig`.
    expired : int
        Groups in the EXPIRED pool at the start of the round.

    Notes
    -----
    The three cases are XTuner's. 0 is not a trigger that any pool reaches: it never leads to tail batch mode.

    Examples
    --------
    >>> pools_to_draw_from(0, 3)[1], pools_to_draw_from(4, 3)[1], pools_to_draw_from(4, 9)[1]
    (False, False, True)
    """
    tail_batch = 0 < tail_batch_trigger_size <= expired
    if tail_batch or (tail_batch_trigger_size == 0 and expired > 0):
        return (Status.EXPIRED, Status.ABORTED), tail_batch
    return (Status.ABORTED,), False
