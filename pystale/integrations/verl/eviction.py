"""What was evicted and why, under verl's metric names."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pystale.accumulators import Tally
from pystale.integrations.verl.groups import Group

__all__ = ["FILTERED_REWARD_COUNTS", "EvictionMetrics", "Reasons", "metrics_prefix"]

# verl's key for a metric that is a dict: how many filtered groups shared which reward.
FILTERED_REWARD_COUNTS = "_dapo_filtered_reward_counts"


def metrics_prefix(partition_id: str) -> str:
    return "training" if partition_id == "train" else "validation"


@dataclass
class Reasons:
    """Groups to evict, by reason; a group may have several.

    Attributes
    ----------
    stale, failed : list of Group
    filtered : dict of Group to float
        With the reward that all their trajectories share.
    """

    stale: list[Group] = field(default_factory=list)
    filtered: dict[Group, float] = field(default_factory=dict)
    failed: list[Group] = field(default_factory=list)

    def union(self) -> list[Group]:
        """Every group once."""
        return list(dict.fromkeys((*self.stale, *self.filtered, *self.failed)))


class EvictionMetrics:
    """Counts over the polls of one call."""

    def __init__(self, partition_id: str) -> None:
        self._prefix = metrics_prefix(partition_id)
        self._spans = Tally()
        self._counts: Counter[str] = Counter()
        self._rewards: Counter[float] = Counter()

    def add(self, reasons: Reasons, spans: Iterable[int]) -> None:
        """Add what one poll evicted; `spans` are those of the stale groups."""
        self._spans.add(list(spans))
        self._counts["filter_groups/evicted_samples"] += len(reasons.filtered)
        self._counts["rollout_failure/evicted_samples"] += len(reasons.failed)
        self._rewards.update(reasons.filtered.values())

    def add_surplus(self, groups: int) -> None:
        """Add finished groups that a sync step had no use for."""
        self._counts["filter_groups/discarded_surplus_samples"] += groups

    def to_dict(self) -> dict[str, Any]:
        """What verl logs; what did not happen is left out."""
        metrics: dict[str, Any] = {}
        spans = self._spans
        if spans.count and spans.mean is not None and spans.max is not None and spans.min is not None:
            name = f"{self._prefix}/off_policy/evicted_samples"
            metrics[name] = spans.count
            metrics[f"{name}_staleness/mean"] = float(spans.mean)
            metrics[f"{name}_staleness/max"] = float(spans.max)
            metrics[f"{name}_staleness/min"] = float(spans.min)
        metrics.update({f"{self._prefix}/{name}": count for name, count in self._counts.items() if count})
        if self._rewards:
            metrics[FILTERED_REWARD_COUNTS] = dict(self._rewards)
        return metrics
