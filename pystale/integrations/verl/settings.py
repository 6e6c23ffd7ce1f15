"""What the replay buffer of verl is told: verl's constructor arguments, and the choices of `sampler_kwargs`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pystale.arguments import checked_seconds
from pystale.staleness import StalenessRule, checked_int

__all__ = ["SettingError", "Settings"]

Refill = Callable[[int], Any]

STRATEGIES = ("drop", "wait")
STALENESS = ("prompt", "tokens")
MISSING_VERSIONS = ("prompt", "drop", "keep", "error")
DEFAULTS: dict[str, Any] = {
    "staleness": "prompt",
    "missing_version": "prompt",
    "poll_interval": 2.0,
    "filter_groups_metric": None,
    "train_batch_size": None,
    "gen_batch_size": 1,
    "max_inflight_gen_batches": 1,
    "sync_refill_failed_groups": False,
}


class SettingError(ValueError, AssertionError):
    """A setting that cannot be. Also an AssertionError, which is what verl's own buffer raises for some."""


@dataclass(frozen=True)
class Settings:
    """Checked settings of :class:`~pystale.integrations.verl.StalenessReplayBuffer`, where they are described.

    Attributes
    ----------
    sync : bool
        Whether samples are taken with the semantics of verl's sync trainer.
    threshold : int or None
        ``max_off_policy_threshold``; None turns off-policy control off.
    """

    sync: bool
    threshold: int | None
    strategy: str
    staleness: str
    missing_version: str
    poll_interval: float
    filter_groups_metric: str | None
    train_batch_size: int | None
    gen_batch_size: int
    max_inflight_gen_batches: int
    sync_refill_failed_groups: bool

    @property
    def drops(self) -> bool:
        """Whether finished groups are dropped for their age."""
        return not self.sync and self.threshold is not None and self.strategy == "drop"

    @property
    def waits(self) -> bool:
        """Whether sampling is held back for prompts in flight."""
        return not self.sync and self.threshold is not None and self.strategy == "wait"

    @property
    def by_tokens(self) -> bool:
        """Whether a group is as old as its oldest tokens, not as its prompt."""
        return self.staleness == "tokens"

    @classmethod
    def checked(
        cls,
        *,
        trainer_mode: Any,
        max_off_policy_threshold: Any,
        max_off_policy_strategy: Any,
        sampler_kwargs: Any,
        refill_fn: Any,
        arguments: Mapping[str, Any],
    ) -> "Settings":
        """Settings from the arguments of the constructor.

        Parameters
        ----------
        arguments : mapping
            Those that verl hands to its own buffer only; each may stand in `sampler_kwargs` instead. None: not given.

        Raises
        ------
        TypeError, ValueError
            See :class:`~pystale.integrations.verl.StalenessReplayBuffer`.
        """
        if not isinstance(trainer_mode, str) or not trainer_mode:
            raise TypeError(f"trainer_mode must be the name of a trainer mode, got {trainer_mode!r}")
        sync = trainer_mode == "sync"
        threshold = _threshold(max_off_policy_threshold)
        if max_off_policy_strategy not in STRATEGIES:
            raise SettingError(
                f"max off policy strategy must be one of {', '.join(STRATEGIES)}, got {max_off_policy_strategy!r} "
                f"(trainer.v1.sampler.max_off_policy_strategy)"
            )
        if refill_fn is not None and not callable(refill_fn):
            raise TypeError(f"refill_fn must be callable, got {type(refill_fn).__name__}")
        values = _merged(sampler_kwargs, arguments)
        settings = cls(
            sync=sync,
            threshold=threshold,
            strategy=max_off_policy_strategy,
            staleness=_one_of("staleness", values["staleness"], STALENESS),
            missing_version=_one_of("missing_version", values["missing_version"], MISSING_VERSIONS),
            poll_interval=checked_seconds("poll_interval", values["poll_interval"], positive=True),
            filter_groups_metric=_metric(values["filter_groups_metric"]),
            train_batch_size=None
            if values["train_batch_size"] is None
            else checked_int("train_batch_size", values["train_batch_size"], at_least=1),
            gen_batch_size=checked_int("gen_batch_size", values["gen_batch_size"], at_least=1),
            max_inflight_gen_batches=checked_int(
                "max_inflight_gen_batches (prompt batches in flight, a positive integer)",
                values["max_inflight_gen_batches"],
                at_least=1,
            ),
            sync_refill_failed_groups=_flag("sync_refill_failed_groups", values["sync_refill_failed_groups"]),
        )
        settings._check_together(refill_fn)
        return settings

    def _check_together(self, refill_fn: Any) -> None:
        for name in ("filter_groups_metric", "sync_refill_failed_groups"):
            if getattr(self, name) and refill_fn is None:
                raise ValueError(f"{name} requires refill_fn, which replaces the groups that are evicted")
        if self.missing_version != "prompt" and not self.by_tokens:
            raise ValueError(
                f"missing_version={self.missing_version!r} says what becomes of trajectories without min_global_steps; "
                "it needs staleness='tokens' (with 'prompt', the age of a group does not depend on them)"
            )
        if not self.sync:
            return
        if self.filter_groups_metric and self.train_batch_size is None:
            raise ValueError(
                "filter_groups_metric in sync mode requires train_batch_size, which bounds the prompts in flight; "
                "in sampler_kwargs: train_batch_size: ${data.train_batch_size}"
            )
        if self.sync_refill_failed_groups and self.gen_batch_size != 1:
            raise ValueError(
                f"sync_refill_failed_groups requires gen_batch_size=1, got {self.gen_batch_size}; failed groups are "
                "replaced one by one"
            )


def _merged(sampler_kwargs: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    if sampler_kwargs is None:
        sampler_kwargs = {}
    if not isinstance(sampler_kwargs, Mapping):
        raise TypeError(f"sampler_kwargs must be a mapping, got {type(sampler_kwargs).__name__}")
    chosen = {name: sampler_kwargs[name] for name in sampler_kwargs}
    unknown = [name for name in chosen if name not in DEFAULTS]
    if unknown:
        raise ValueError(
            f"sampler_kwargs has unknown keys {', '.join(map(repr, unknown))}; known are {', '.join(DEFAULTS)}"
        )
    for name, value in arguments.items():
        if value is None:
            continue
        if name in chosen and chosen[name] != value:
            raise ValueError(f"{name} is {value!r} as an argument and {chosen[name]!r} in sampler_kwargs; give one")
        chosen[name] = value
    return {**DEFAULTS, **chosen}


def _threshold(value: Any) -> int | None:
    if value is None:
        return None
    where = "max off policy threshold (trainer.v1.sampler.max_off_policy_threshold)"
    if not isinstance(value, bool) and isinstance(value, int) and value < 1:
        raise SettingError(f"{where} must be at least 1, got {value}; null turns off-policy control off")
    threshold = checked_int(where, value, at_least=1)
    return StalenessRule.from_verl(threshold).stale_threshold


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def _metric(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"filter_groups_metric must be the name of a reward metric or null, got {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {type(value).__name__} {value!r}")
    return value
