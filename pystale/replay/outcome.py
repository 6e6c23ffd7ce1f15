"""What became of a run under one setting."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pystale.replay.whatif import NO_LIMIT, WhatIf

__all__ = ["Batch", "Outcome", "mean_of", "quantile_of"]


class Batch(NamedTuple):
    """A batch that was trained."""

    train_step: int | None
    tokens: int  # in the loss
    masked: int  # left out of it as stale
    staleness: float | None  # mean over the tokens in the loss, in trainer steps


@dataclass
class Outcome:
    """Counts of one replay.

    Attributes
    ----------
    ledger : dict
        The account of tokens, as :meth:`~pystale.ReplayBuffer.ledger` gives it.
    trained, expired, rerolled, discarded : int
        Groups trained; that entered the EXPIRED pool or left for good; handed out of that pool again; that left for
        good.
    unrolled : int
        Groups in the EXPIRED pool at the end.
    batches : list of Batch
    waited, unfilled : int
        Batches that found too few groups when they were asked for; of these, those that never got enough.
    not_put, not_handed_out : int
        Groups whose recorded comeback, and hand-out, had no counterpart here.
    token_staleness, response_staleness : Counter of int
        Tokens in the loss by their staleness, and responses of trained groups by that of their oldest token, in
        trainer steps.
    differs : str
        Where it first differs from what was recorded; empty where it does not.
    """

    setting: WhatIf
    max_staleness: dict[str, int] = field(default_factory=dict)  # by task, "" for all others
    max_token_staleness: dict[str, int | None] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    trained: int = 0
    expired: int = 0
    rerolled: int = 0
    discarded: int = 0
    unrolled: int = 0
    batches: list[Batch] = field(default_factory=list)
    waited: int = 0
    unfilled: int = 0
    not_put: int = 0
    not_handed_out: int = 0
    token_staleness: Counter[int] = field(default_factory=Counter)
    response_staleness: Counter[int] = field(default_factory=Counter)
    differs: str = ""

    @property
    def wasted(self) -> int:
        """Tokens generated and not trained: masked as stale, or discarded for whatever reason."""
        return int(self.ledger["masked_stale"] + sum(self.ledger["discarded"].values()))

    @property
    def expired_tokens(self) -> int:
        """Tokens of responses that were reset or left because they, or their group, had expired."""
        return int(sum(self.ledger["discarded"].get(reason, 0) for reason in ("expired", "max_rerolls")))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "recorded": self.setting.recorded,
            "max_staleness": _single({name: None if n == NO_LIMIT else n for name, n in self.max_staleness.items()}),
            "max_token_staleness": _single(self.max_token_staleness),
            "tokens": {
                **{name: value for name, value in self.ledger.items() if name != "discarded"},
                "discarded": dict(self.ledger["discarded"]),
                "expired": self.expired_tokens,
                "wasted": self.wasted,
            },
            "groups": {
                "trained": self.trained,
                "expired": self.expired,
                "rerolled": self.rerolled,
                "discarded": self.discarded,
                "waiting_for_reroll": self.unrolled,
                "not_put": self.not_put,
                "not_handed_out": self.not_handed_out,
            },
            "batches": {
                "trained": len(self.batches),
                "waited": self.waited,
                "unfilled": self.unfilled,
                "each": [batch._asdict() for batch in self.batches],
            },
            "token_staleness": _spread(self.token_staleness),
            "response_staleness": _spread(self.response_staleness),
            "differs": self.differs or None,
        }


def _single(by_task: dict[str, Any]) -> Any:
    """The value of all tasks, or the values by task where they differ."""
    values = list(by_task.values())
    return values[0] if values and all(value == values[0] for value in values) else by_task


def _spread(counts: "Counter[int]") -> dict[str, Any]:
    return {
        "mean": mean_of(counts),
        "p95": quantile_of(counts, 0.95),
        "max": max(counts, default=None),
        "counts": {str(value): count for value, count in sorted(counts.items())},
    }


def mean_of(counts: "Counter[int]") -> float | None:
    """Mean of a histogram; None of an empty one."""
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else None


def quantile_of(counts: "Counter[int]", share: float) -> int | None:
    """Smallest value that at least this share of a histogram does not exceed; None of an empty one."""
    wanted, seen = share * sum(counts.values()), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= wanted and count:
            return value
    return None
