"""What a trainer gets from a manager for one step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pystale.group import Group
from pystale.report import ProduceBatchStatus, ProduceReport
from pystale.state import Status

__all__ = ["GroupTiming", "ProduceBatchResult", "build_result"]


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """How long groups took to generate, of those that came back; seconds.

    Attributes
    ----------
    count : int
        Groups that came back.
    mean_s, p50_s, p99_s : float
        Their mean, median and 99th percentile; 0.0 when there are none.
    ratio : float
        ``p99_s / p50_s``: how far the slowest lag behind. 1.0 when there are none, or none took any time.
    pause_s : float
        Seconds that pausing took.

    Examples
    --------
    >>> GroupTiming.of([1.0, 2.0, 3.0], pause_s=0.5)
    GroupTiming(count=3, mean_s=2.0, p50_s=2.0, p99_s=2.98, ratio=1.49, pause_s=0.5)
    """

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    ratio: float = 1.0
    pause_s: float = 0.0

    @classmethod
    def of(cls, group_s: Sequence[float], pause_s: float = 0.0) -> "GroupTiming":
        """Timing of groups that took these seconds."""
        if not group_s:
            return cls(pause_s=pause_s)
        p50, p99 = (float(value) for value in np.percentile(group_s, (50, 99)))
        ratio = p99 / p50 if p50 else 1.0 if not p99 else float("inf")
        return cls(len(group_s), float(np.mean(group_s)), p50, p99, ratio, pause_s)


@dataclass(slots=True)
class ProduceBatchResult:
    """A batch, and what was produced since the batch before it.

    A sample is a rollout, a group has several. Counts are those of all tasks; those of one are in `task_results`.

    Attributes
    ----------
    groups : list of groups
        To train, task by task; masks are written. Empty when there is nothing to train, see `status`.
    status : ProduceBatchStatus
        NORMAL, or EXPIRED_BATCH when production has stopped since the weights it serves are too old: with groups,
        train them; without, publish newer weights and ask again.
    trainable_tokens : int
        Tokens of `groups` that enter the loss.
    left_out : int
        Members of `groups` that are not in them, since they had expired; see :class:`~pystale.GroupMode`.
    straggler_s : float
        Seconds that the batch waited for stragglers; see ``wait_for_stragglers`` of :class:`~pystale.ReplayBuffer`.
    timing : GroupTiming
        Of the groups that came back.
    leftover : dict of Status to int
        Groups in the buffer by pool, after `groups` were taken.
    failed_samples, filtered_samples : int
        Samples of groups that were given up, and of groups the filter refused.
    raw_reward_sum : float
        Rewards of all that was completed, before the filter; with a mapping as reward, of its entry ``"score"``.
    raw_reward_count : int
        How many; samples without a finite reward are left out.
    produced_samples : int
        Samples that were given to the agent loop and came back, however they ended.
    produced_tokens : int
        Response tokens that are new: not those a continued response had before.
    produce_time_s : float
        Seconds during which production was under way; of several tasks, the longest.
    task_results : dict of str to ProduceBatchResult
        The same by task; empty in the result of a task.

    Examples
    --------
    >>> ProduceBatchResult(raw_reward_sum=3.0, raw_reward_count=4).mean_raw_reward
    0.75
    """

    groups: list[Group] = field(default_factory=list)
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL
    trainable_tokens: int = 0
    left_out: int = 0
    straggler_s: float = 0.0
    timing: GroupTiming = field(default_factory=GroupTiming)
    leftover: dict[Status, int] = field(default_factory=dict)
    failed_samples: int = 0
    filtered_samples: int = 0
    raw_reward_sum: float = 0.0
    raw_reward_count: int = 0
    produced_samples: int = 0
    produced_tokens: int = 0
    produce_time_s: float = 0.0
    task_results: dict[str, "ProduceBatchResult"] = field(default_factory=dict)

    @property
    def mean_raw_reward(self) -> float | None:
        """Mean of the rewards before the filter; None when there are none."""
        return self.raw_reward_sum / self.raw_reward_count if self.raw_reward_count else None


def build_result(
    reports: Iterable[ProduceReport],
    *,
    groups: Mapping[str, list[Group]],
    trainable_tokens: Mapping[str, int],
    leftover: Mapping[str, dict[Status, int]],
    status: ProduceBatchStatus,
    pause_s: float,
    left_out: Mapping[str, int] | None = None,
    straggler_s: float = 0.0,
) -> ProduceBatchResult:
    """Result of a batch, from the report of every task; `pause_s` is the pause of all of them together.

    `straggler_s` is what taking it waited for stragglers, after production had.
    """
    reports = list(reports)
    result = ProduceBatchResult(
        status=status,
        timing=GroupTiming.of([seconds for report in reports for seconds in report.group_s], pause_s),
        produce_time_s=max((report.produce_s for report in reports), default=0.0),
        straggler_s=straggler_s + max((report.straggler_s for report in reports), default=0.0),
    )
    for report in reports:
        name = report.task_name
        own = ProduceBatchResult(
            groups=groups.get(name, []),
            status=status,
            trainable_tokens=trainable_tokens.get(name, 0),
            left_out=0 if left_out is None else left_out.get(name, 0),
            straggler_s=report.straggler_s,
            timing=GroupTiming.of(report.group_s, report.pause_s),
            leftover=dict(leftover.get(name, {})),
            failed_samples=report.failed_samples,
            filtered_samples=report.filtered_samples,
            raw_reward_sum=report.raw_reward_sum,
            raw_reward_count=report.raw_reward_count,
            produced_samples=report.produced_samples,
            produced_tokens=report.produced_tokens,
            produce_time_s=report.produce_s,
        )
        result.task_results[name] = own
        result.groups.extend(own.groups)
        for pool, n in own.leftover.items():
            result.leftover[pool] = result.leftover.get(pool, 0) + n
        for count in (
            "trainable_tokens",
            "left_out",
            "failed_samples",
            "filtered_samples",
            "raw_reward_sum",
            "raw_reward_count",
            "produced_samples",
            "produced_tokens",
        ):
            setattr(result, count, getattr(result, count) + getattr(own, count))
    return result
