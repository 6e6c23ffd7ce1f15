"""Settings of a run."""

from dataclasses import dataclass

from pystale import AsyncProduceStrategyConfig, ReplayBuffer
from pystale.producer import AsyncProduceStrategy

__all__ = ["BATCH_GROUPS", "TASK", "Settings"]

TASK = "count"
BATCH_GROUPS = 16  # groups per trainer step


@dataclass(frozen=True)
class Settings:
    """What the options of ``pystale demo`` set; the defaults learn to count in well under a minute."""

    steps: int = 300
    seed: int = 0
    group_size: int = 8
    max_staleness: int = 2
    max_token_staleness: int | None = 1
    sync_weights_interval: int = 1
    tail_batch_trigger_size: int = 0
    over_sample_threshold: float = 0.75
    base_steps: int = 120  # supervised steps before the first trainer step; not an option

    def build(self) -> tuple[AsyncProduceStrategy, ReplayBuffer]:
        """Producer and buffer that agree on these settings.

        Raises
        ------
        ValueError
            For a setting out of range.
        """
        strategy = AsyncProduceStrategyConfig(
            over_sample_threshold=self.over_sample_threshold,
            enable_partial_rollout=True,
            max_staleness=self.max_staleness,
            max_token_staleness=self.max_token_staleness,
            tail_batch_trigger_size=self.tail_batch_trigger_size,
        ).build(sync_weights_interval=self.sync_weights_interval)
        return strategy, ReplayBuffer(strategy.rule, tail_batch_trigger_size=strategy.tail_batch_trigger_size)
