"""What XTuner's replay buffer does, in plain Python: every refresh looks at every token of every group."""

from dataclasses import dataclass
from typing import Any

from stand_in_xtuner import Status, reset_rollout_response


@dataclass
class Row:
    group: list[Any]
    arrival: int
    task: str
    status: Status
    staleness: int


def group_status(group: list[Any]) -> Status:
    present = [state.status for state in group]
    for status in (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED):
        if status in present:
            return status
    return Status.COMPLETED


def mask(state: Any, agentic: bool, train_step: int, threshold: int | None) -> list[int] | None:
    """Effective mask of a member, None where the token rule does not apply to it."""
    if threshold is None or agentic or not state.response_ids:
        return None
    allowed = [1] * len(state.response_ids) if state.response_mask is None else state.response_mask
    if not any(allowed):
        return None
    steps = state.response_model_steps or []
    return [m * (train_step - s - 1 < threshold) for m, s in zip(allowed, steps, strict=False)]


def masks(group: list[Any], train_step: int, threshold: int | None) -> list[list[int] | None]:
    agentic = any(state.input_ids is not None or state.labels is not None for state in group)
    return [mask(state, agentic, train_step, threshold) for state in group]


def age(group: list[Any], train_step: int | None, stale: int | None, token: int | None, retry: bool) -> Status:
    """Run the life cycle on a group; its status afterwards."""
    status = group_status(group)
    if train_step is None or status not in (Status.COMPLETED, Status.ABORTED, Status.EXPIRED):
        return status
    for state in group:
        steps = state.response_model_steps
        state.seq_staleness = train_step - min(steps) - 1 if steps else 0
    expired = []
    for state, effective in zip(group, masks(group, train_step, token), strict=True):
        too_old = stale is not None and state.seq_staleness >= stale
        expired.append(state.status is Status.EXPIRED or too_old or (effective is not None and not any(effective)))
    if not any(expired):
        return status
    for state, is_expired in zip(group, expired, strict=True):
        if is_expired or not retry:
            state.status = Status.EXPIRED
        if is_expired and retry:
            reset_rollout_response(state)
    return Status.EXPIRED


class PlainBuffer:
    """The same calls as :class:`pystale.integrations.xtuner.XTunerReplayBuffer`.

    Attributes
    ----------
    discarded : list of list of int
        Rollout ids of the groups each call released.
    """

    def __init__(self, *, fifo: bool) -> None:
        self.fifo = fifo
        self.rows: list[Row] = []
        self.arrivals = 0
        self.discarded: list[list[int]] = []

    async def put(
        self,
        items: list[Any],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
    ) -> None:
        if not items:
            return
        if model_step is not None:
            for state in items:
                steps = list(state.response_model_steps or [])
                steps += [model_step] * (len(state.response_ids or []) - len(steps))
                state.response_model_steps = steps
        status = age(items, current_train_step, stale_threshold, token_stale_threshold, expired_groups_retryable)
        if status is Status.EXPIRED and not expired_groups_retryable:
            self.discard([items])
            return
        self.arrivals += 1
        self.rows.append(Row(items, self.arrivals, task_name, status, max(state.seq_staleness for state in items)))

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: dict[str, int],
        task_token_stale_thresholds: dict[str, int] | None = None,
        expired_groups_retryable_by_task: dict[str, bool] | None = None,
        current_train_step: int,
        statuses: list[Status] | None = None,
    ) -> dict[str, int]:
        covered = statuses if statuses is not None else [Status.COMPLETED, Status.ABORTED, Status.EXPIRED]
        counts, dropped = {}, []
        for task, stale in task_stale_thresholds.items():
            token = (task_token_stale_thresholds or {}).get(task)
            retry = (expired_groups_retryable_by_task or {}).get(task, True)
            counts[task] = 0
            for row in [row for row in self.rows if row.task == task and row.status in covered]:
                row.status = age(row.group, current_train_step, stale, token, retry)
                row.staleness = max(state.seq_staleness for state in row.group)
                if row.status is Status.EXPIRED:
                    counts[task] += 1
                    if not retry:
                        dropped.append(row.group)
                        self.rows.remove(row)
        if dropped:
            self.discard(dropped)
        return counts

    def discard(self, groups: list[list[Any]]) -> None:
        self.discarded.append([state.session_id for group in groups for state in group])

    def pool(self, task: str, status: Status) -> list[Row]:
        rows = [row for row in self.rows if row.task == task and row.status is status]
        return rows if self.fifo else sorted(rows, key=lambda row: (-row.staleness, row.arrival))

    async def get(self, batch_size: int, task_name: str, group_status: Status) -> list[list[Any]]:
        taken = self.pool(task_name, group_status)[: max(batch_size, 0)]
        for row in taken:
            self.rows.remove(row)
        return [row.group for row in taken]

    async def count(self, task_name: str, group_status: Status) -> int:
        return len(self.pool(task_name, group_status))

    def __len__(self) -> int:
        return len(self.rows)
