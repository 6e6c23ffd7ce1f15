"""The staleness rule: how old a response may be, and how old a token that enters the loss.

With `T` the trainer step that consumes a sample (from 1) and `m` the trainer step after whose update the weights that
produced a token were published (initial weights: 0)::

    staleness of a token      T - m - 1                                     trainer steps; on-policy is 0
    seq_staleness             T - min(m) - 1
    stale_threshold           (max_staleness + 1) * sync_weights_interval
    token_stale_threshold     (max_token_staleness + 1) * sync_weights_interval

A response is too old iff ``seq_staleness >= stale_threshold``; a token is fresh iff its staleness is
``< token_stale_threshold``. The equation is XTuner's. The compiled kernels (``csrc/kernels.hpp``) and the deadlines of
the index (``csrc/index.hpp``) are this equation solved for `m` and for `T`.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["StalenessRule"]


def checked_int(name: str, value: Any, *, at_least: int, remedy: str = "") -> int:
    """`value` as an int, refusing bools, floats and values under `at_least`."""
    if type(value) is int and at_least <= value < 2**63:
        return value
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}{remedy and '; ' + remedy}")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {value}")
    return int(value)


@dataclass(frozen=True)
class StalenessRule:
    """How far behind the trainer a response, and a token in the loss, may be.

    Parameters
    ----------
    max_staleness : int, default 0
        Extra weight-sync periods the oldest token of a response may lag; 0 accepts what the current period produced.
    max_token_staleness : int or None, default None
        Extra weight-sync periods a token in the loss may lag. None turns the token rule off.
    sync_weights_interval : int, default 1
        Trainer steps between two publications of weights.
    spare_aborted : bool, default False
        Exempt ABORTED rollouts from expiry by the token rule: their continuation will bring fresh tokens.

    Raises
    ------
    TypeError, ValueError
        For bools, floats, negative bounds or an interval under 1.

    Warns
    -----
    UserWarning
        If the token limit is looser than the sequence limit, and so never masks anything.

    Examples
    --------
    >>> rule = StalenessRule(max_staleness=2, max_token_staleness=0)
    >>> rule.stale_threshold, rule.token_stale_threshold
    (3, 1)
    """

    max_staleness: int = 0
    max_token_staleness: int | None = None
    sync_weights_interval: int = 1
    spare_aborted: bool = False

    def __post_init__(self) -> None:
        # Kept as int: the arithmetic of NumPy's integers wraps around.
        interval = checked_int("sync_weights_interval", self.sync_weights_interval, at_least=1)
        object.__setattr__(self, "sync_weights_interval", interval)
        for name in ("max_staleness", "max_token_staleness"):
            if getattr(self, name) is None and name == "max_token_staleness":
                continue
            remedy = "None turns the rule off" if name == "max_token_staleness" else ""
            periods = checked_int(name, getattr(self, name), at_least=0, remedy=remedy)
            object.__setattr__(self, name, periods)
            if (periods + 1) * interval >= 2**63:
                raise ValueError(
                    f"({name} + 1) * sync_weights_interval must be below 2**63, got ({periods} + 1) * {interval}; "
                    "no response reaches a limit that far away"
                )
        if not isinstance(self.spare_aborted, bool):
            raise TypeError(f"spare_aborted must be a bool, got {type(self.spare_aborted).__name__}")
        if self.max_token_staleness is not None and self.max_token_staleness > self.max_staleness:
            warnings.warn(
                f"max_token_staleness={self.max_token_staleness} is looser than max_staleness={self.max_staleness}: "
                "a response expires before any of its tokens is masked, so the token limit has no effect",
                stacklevel=3,
            )

    @property
    def stale_threshold(self) -> int:
        """Trainer steps: a response whose `seq_staleness` reaches this is too old."""
        return (self.max_staleness + 1) * self.sync_weights_interval

    @property
    def token_stale_threshold(self) -> int | None:
        """Trainer steps: a token whose staleness reaches this is masked. None: the token rule is off."""
        if self.max_token_staleness is None:
            return None
        return (self.max_token_staleness + 1) * self.sync_weights_interval

    @classmethod
    def from_verl(cls, max_off_policy_threshold: int) -> "StalenessRule":
        """Rule of verl's ``max_off_policy_threshold`` (strategy ``drop``).

        verl drops a prompt dispatched at step g iff ``T - g + 1 > max_off_policy_threshold``. With one push of weights
        per step a prompt dispatched at g is generated by model step ``g - 1``.

        Examples
        --------
        >>> StalenessRule.from_verl(2).stale_threshold
        2
        """
        threshold = checked_int(
            "max_off_policy_threshold", max_off_policy_threshold, at_least=1, remedy="less drops every sample"
        )
        return cls(max_staleness=threshold - 1)

    @classmethod
    def from_nemo_rl(cls, max_staleness_versions: int) -> "StalenessRule":
        """Rule of NeMo-RL's windowed sampler: kept iff the start version is in ``[v - max_staleness_versions, v]``.

        ``v = T - 1`` is the trainer's version; the rule holds for the version a response started with.

        Examples
        --------
        >>> StalenessRule.from_nemo_rl(1).stale_threshold
        2
        """
        return cls(max_staleness=checked_int("max_staleness_versions", max_staleness_versions, at_least=0))

    @classmethod
    def from_prime_rl(cls, max_off_policy_steps: int) -> "StalenessRule":
        """Rule of prime-rl: kept iff the group's dispatch version is ``>= (T - 1) - max_off_policy_steps``.

        Examples
        --------
        >>> StalenessRule.from_prime_rl(8).stale_threshold
        9
        """
        return cls(max_staleness=checked_int("max_off_policy_steps", max_off_policy_steps, at_least=0))

    @classmethod
    def from_trl(cls, max_staleness: int, weight_sync_steps: int = 1) -> "StalenessRule":
        """Rule of TRL's asynchronous GRPO: dropped iff ``version - sample version > max_staleness``.

        TRL counts versions from 1, one per weight sync; version w is model step ``(w - 1) * weight_sync_steps``.

        Examples
        --------
        >>> StalenessRule.from_trl(1, weight_sync_steps=4).stale_threshold
        8
        """
        return cls(
            max_staleness=checked_int("max_staleness", max_staleness, at_least=0),
            sync_weights_interval=checked_int("weight_sync_steps", weight_sync_steps, at_least=1),
        )
