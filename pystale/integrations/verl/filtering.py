"""Groups without a signal: all their trajectories have the same reward, so their advantages are zero (DAPO)."""

from collections.abc import Callable, Sequence
from typing import Any

from pystale.integrations.verl.groups import FINISHED, Group, PromptGroups

__all__ = ["RewardFilter"]

# (keys, field) -> one entry per key
Fetch = Callable[[list[str], str], Sequence[Any]]


class RewardFilter:
    """Finds finished groups whose reward metric is the same for all of two or more trajectories.

    Parameters
    ----------
    metric : str
        Entry of ``extra_fields["reward_extra_info"]``.
    canonical : str or None
        The metric name that stands for the sum of ``rm_scores`` instead; verl has one from version 0.9.1 on.
    """

    def __init__(self, metric: str, *, canonical: str | None = None) -> None:
        self.metric = metric
        self._summed = metric == canonical

    def look(self, groups: PromptGroups, fetch: Fetch) -> None:
        """Look into the groups that finished since the last time; what is found is in ``groups.filtered``.

        All their trajectories are fetched in one call, and each group once.

        Raises
        ------
        RuntimeError
            If a group has no trajectory, or one without the metric. Then none was classified.
        """
        fresh = [group for group in groups.unclassified if group.status == FINISHED]
        if not fresh:
            return
        keys = [key for group in fresh for key in group.keys]
        rewards = self._rewards(keys, fetch) if keys else []
        found: dict[Group, float] = {}
        missing = []
        end = 0
        for group in fresh:
            begin, end = end, end + len(group.keys)
            own = rewards[begin:end]
            values = [value for value in own if value is not None]
            if not own or len(values) < len(own):
                missing.append(group.uid)
            elif len(values) > 1 and all(value == values[0] for value in values):
                found[group] = values[0]
        if missing:
            raise RuntimeError(
                f"{len(missing)} finished groups are missing DAPO metric {self.metric!r}, among them "
                f"{', '.join(sorted(missing)[:5])}"
            )
        for group in fresh:  # some for the second time, since they got or lost trajectories
            groups.filtered.pop(group, None)
        groups.filtered.update(found)
        groups.unclassified.clear()

    def _rewards(self, keys: list[str], fetch: Fetch) -> list[float | None]:
        if self._summed:
            return [float(scores.sum()) for scores in fetch(keys, "rm_scores")]
        return [self._reward(getattr(extra, "data", extra)) for extra in fetch(keys, "extra_fields")]

    def _reward(self, extra_fields: Any) -> float | None:
        info = extra_fields.get("reward_extra_info") if isinstance(extra_fields, dict) else None
        value = info.get(self.metric) if isinstance(info, dict) else None
        return None if value is None else float(value)
