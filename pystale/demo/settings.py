"""Settings of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pystale import (
    AsyncProduceStrategyConfig,
    DisaggAsyncProduceStrategyConfig,
    ReplayBuffer,
    SyncProduceStrategyConfig,
)
from pystale.producer import AsyncProduceStrategy, DisaggAsyncProduceStrategy

__all__ = ["BATCH_GROUPS", "MODES", "SYNCHRONOUS", "TASK", "Settings", "option"]

TASK = "count"
BATCH_GROUPS = 16  # groups per trainer step
MODES = ("sync", "colocated", "disaggregated")
# What a synchronous run is: exactly a batch is generated, with the newest weights, and all of it is trained.
SYNCHRONOUS: dict[str, Any] = {
    "max_staleness": 0,
    "max_token_staleness": None,
    "tail_batch_trigger_size": -1,
    "over_sample_threshold": 0.0,
}


def option(name: str) -> str:
    """Command line option of a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """What the options of ``pystale demo`` set; the defaults learn to count in well under a minute.

    Raises
    ------
    ValueError
        For a mode that is not known, and for what contradicts the synchronous mode.
    """

    mode: str = "colocated"
    steps: int = 300
    seed: int = 0
    group_size: int = 8
    max_staleness: int = 2
    max_token_staleness: int | None = 1
    sync_weights_interval: int = 1
    tail_batch_trigger_size: int = 0
    over_sample_threshold: float = 0.75
    base_steps: int = 120  # supervised steps before the first trainer step; not an option

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"{option('mode')} must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.mode == "sync":
            for name, value in SYNCHRONOUS.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"{option(name)} is {words(getattr(self, name))}, and in mode sync it is always "
                        f"{words(value)}; leave it out, or choose another --mode"
                    )

    @classmethod
    def of_mode(cls, mode: str, **changed: Any) -> "Settings":
        """The defaults of a mode, but for what is given.

        Examples
        --------
        >>> Settings.of_mode("sync", steps=20).max_staleness
        0
        """
        return cls(mode=mode, **{**(SYNCHRONOUS if mode == "sync" else {}), **changed})

    def build(
        self, new_buffer: Callable[..., Any] = ReplayBuffer, **buffer_settings: Any
    ) -> tuple[AsyncProduceStrategy | DisaggAsyncProduceStrategy, ReplayBuffer]:
        """Producer and buffer that agree on these settings.

        Parameters
        ----------
        new_buffer : callable
            Makes the buffer; called as :class:`~pystale.ReplayBuffer` is.
        **buffer_settings
            Further arguments of :class:`~pystale.ReplayBuffer`.

        Raises
        ------
        ValueError
            For a setting out of range.
        """
        strategy: AsyncProduceStrategy | DisaggAsyncProduceStrategy
        if self.mode == "sync":
            strategy = SyncProduceStrategyConfig().build(sync_weights_interval=self.sync_weights_interval)
        else:
            asynchronous = (
                DisaggAsyncProduceStrategyConfig if self.mode == "disaggregated" else AsyncProduceStrategyConfig
            )
            strategy = asynchronous(
                over_sample_threshold=self.over_sample_threshold,
                enable_partial_rollout=True,
                max_staleness=self.max_staleness,
                max_token_staleness=self.max_token_staleness,
                tail_batch_trigger_size=self.tail_batch_trigger_size,
            ).build(sync_weights_interval=self.sync_weights_interval)
        buffer = new_buffer(strategy.rule, tail_batch_trigger_size=strategy.tail_batch_trigger_size, **buffer_settings)
        return strategy, buffer


def words(value: Any) -> str:
    """A value as it is given on the command line."""
    return "none" if value is None else str(value)
