"""Managers bring production and the buffer together: a trainer asks one for a batch, and gets one."""

import logging
from collections.abc import Mapping, Sequence

from pystale.batch import TrainBatch
from pystale.buffer import ReplayBuffer
from pystale.pending import resolved
from pystale.producer import AsyncProduceStrategy
from pystale.production import Line, ProductionStalled
from pystale.report import ProduceBatchStatus, ProduceReport
from pystale.result import ProduceBatchResult, build_result
from pystale.rollout import RolloutController
from pystale.rounds import run_round
from pystale.staleness import checked_int
from pystale.state import Status
from pystale.tasks import TaskSpec, checked_tasks, task_batch_sizes

__all__ = ["AgentLoopManager", "StarvationWatch"]

logger = logging.getLogger("pystale")


class AgentLoopManager:
    """Colocated production: every batch is asked for, produced, and taken; nothing runs in between.

    Parameters
    ----------
    tasks : TaskSpec or sequence of TaskSpec
        Tasks that share every batch, with strategies built by :class:`~pystale.AsyncProduceStrategyConfig` or
        :class:`~pystale.SyncProduceStrategyConfig`.
    buffer : ReplayBuffer
        With the rule and the tail batch trigger of every task's strategy.
    rollout_controller : RolloutController, optional
        Asked to continue at the beginning of a round, and to pause before the agent loops are.
    starvation_steps : int, default 10
        Log a warning when a task with a positive weight has delivered nothing for so many batches.

    Raises
    ------
    TypeError, ValueError
        For tasks that do not fit each other or the buffer.

    Examples
    --------
    >>> import asyncio
    >>> from pystale import AgentLoopManager, AsyncProduceStrategyConfig, ReplayBuffer, Status, TaskSpec
    >>> from pystale.sampler import PromptSampler
    >>> class Echo:
    ...     async def generate_group(self, group, *, enable_partial_rollout):
    ...         for state in group:
    ...             state.response_ids, state.status, state.reward = list(state.prompt_ids), Status.COMPLETED, 1.0
    ...         return group
    ...     async def pause(self):
    ...         pass
    >>> strategy = AsyncProduceStrategyConfig(max_staleness=1).build()
    >>> buffer = ReplayBuffer(strategy.rule)
    >>> sampler = PromptSampler([[n, n] for n in range(100)], buffer, group_size=4)
    >>> manager = AgentLoopManager(TaskSpec("echo", Echo(), sampler, strategy), buffer)
    >>> result = asyncio.run(manager.produce_batch(8, train_step=1, model_step=0))
    >>> len(result.groups), result.trainable_tokens, result.mean_raw_reward
    (8, 64, 1.0)
    """

    def __init__(
        self,
        tasks: TaskSpec[AsyncProduceStrategy] | Sequence[TaskSpec[AsyncProduceStrategy]],
        buffer: ReplayBuffer,
        *,
        rollout_controller: RolloutController | None = None,
        starvation_steps: int = 10,
    ) -> None:
        self.tasks = checked_tasks(tasks, buffer, AsyncProduceStrategy)
        self.buffer = buffer
        self.rollout_controller = rollout_controller
        self._watch = StarvationWatch(self.tasks, starvation_steps)
        self._producing = False

    async def produce_batch(self, batch_size: int, train_step: int, *, model_step: int) -> ProduceBatchResult:
        """Refresh the buffer, produce every task's share, pause what is running, and take the batch.

        Parameters
        ----------
        batch_size : int
            Groups of the batch, of all tasks together.
        train_step : int
            Trainer step that trains it, from 1.
        model_step : int
            Trainer step whose weights are served.

        Returns
        -------
        ProduceBatchResult
            With `batch_size` groups; fewer only where a strategy's ``should_continue_fn`` ended the round earlier.

        Raises
        ------
        TypeError, ValueError
            For an argument out of range, or weights so old that all they generate would expire at once. Nothing has
            started then.
        PromptsExhausted, ProductionStalled
            If some task cannot fill its share. What was generated is in the buffer.
        StragglersOverdue
            If the buffer's takes wait for stragglers, and these do not land in time.
        RuntimeError
            If a batch is being produced already.
        """
        sizes = task_batch_sizes(self.tasks, batch_size)
        active = [task for task in self.tasks if sizes[task.task_name]]
        checked_int("train_step", train_step, at_least=1)
        for task in active:
            task.strategy.check_steps(train_step, model_step)
        if self._producing:
            raise RuntimeError("a batch is being produced already; wait for it, or give each trainer its own manager")
        self._producing = True
        try:
            if self.rollout_controller is not None:
                await resolved(self.rollout_controller.continue_generation())
            lines = [
                task.strategy.line(
                    task.agent_loop,
                    task.sampler,
                    self.buffer,
                    task.task_name,
                    train_step=train_step,
                    model_step=model_step,
                )
                for task in active
            ]
            refreshed = await self.buffer.refresh_staleness(train_step)
            for line in lines:
                line.report.refreshed = refreshed.get(line.task_name, 0)
            await run_round(lines, sizes, self.rollout_controller)
            return await self._take(lines, sizes, train_step)
        finally:
            self._producing = False

    async def _take(self, lines: list[Line], sizes: dict[str, int], train_step: int) -> ProduceBatchResult:
        wanted = {line.task_name: sizes[line.task_name] for line in lines}
        for line in lines:
            if line.settings.should_continue_fn is not None:  # it may have ended the round before the batch was there
                stored = await self.buffer.count(line.task_name, Status.COMPLETED)
                wanted[line.task_name] = min(wanted[line.task_name], stored)
        batch = await self.buffer.take_train_batch(wanted, train_step=train_step)
        stored_by_task = await self.buffer.count_statuses([task.task_name for task in self.tasks], Status)
        if not any(batch.values()):
            raise ProductionStalled(
                f"train_step {train_step}: a batch of {sizes} was produced, and there is nothing to take. Stored: "
                f"{pools_text(stored_by_task)}. A should_continue_fn ended the round too early, or somebody else took "
                "the groups"
            )
        reports = {line.task_name: line.report for line in lines}
        for task in self.tasks:
            reports.setdefault(task.task_name, ProduceReport(task.task_name, 0, train_step, lines[0].model_step))
        result = result_of(
            batch,
            [reports[task.task_name] for task in self.tasks],
            stored_by_task,
            status=ProduceBatchStatus.NORMAL,
            pause_s=max(line.report.pause_s for line in lines),
            straggler_s=batch.straggler_s,
        )
        self._watch.delivered(result, train_step)
        return result


class StarvationWatch:
    """Notices when a task delivers nothing for many batches in a row."""

    def __init__(self, tasks: Sequence[TaskSpec], starvation_steps: int) -> None:  # type: ignore[type-arg]
        self.limit = checked_int("starvation_steps", starvation_steps, at_least=1)
        self.weights = {task.task_name: task.weight for task in tasks if task.weight}
        self.without = dict.fromkeys(self.weights, 0)

    def delivered(self, result: ProduceBatchResult, train_step: int) -> None:
        """Count a batch; warn of each task that has now been missing in as many batches as the limit, or twice, ..."""
        for name in self.without:
            task_result = result.task_results[name]
            self.without[name] = 0 if task_result.groups else self.without[name] + 1
            if self.without[name] and self.without[name] % self.limit == 0:
                logger.warning(
                    "task %r has delivered nothing for %d batches, up to train_step %d: with weight %s its share of a "
                    "batch of %d groups is 0, or its groups do not get completed; %d samples came back since the last "
                    "batch, %d failed, %d were filtered; stored: %s",
                    name,
                    self.without[name],
                    train_step,
                    self.weights[name],
                    len(result.groups),
                    task_result.produced_samples,
                    task_result.failed_samples,
                    task_result.filtered_samples,
                    pools_text({name: task_result.leftover}),
                )


def result_of(
    batch: TrainBatch,
    reports: Sequence[ProduceReport],
    stored: Mapping[str, dict[Status, int]],
    *,
    status: ProduceBatchStatus,
    pause_s: float,
    straggler_s: float = 0.0,
) -> ProduceBatchResult:
    """Result of a batch taken."""
    return build_result(
        reports,
        groups=batch,
        trainable_tokens=batch.trainable_tokens_by_task,
        left_out=batch.left_out_by_task,
        straggler_s=straggler_s,
        leftover=stored,
        status=status,
        pause_s=pause_s,
    )


def pools_text(stored: Mapping[str, Mapping[Status, int]]) -> str:
    """Groups by task and pool, empty pools left out."""
    texts = []
    for name, pools in stored.items():
        counts = ", ".join(f"{status.name} {n}" for status, n in pools.items() if n) or "nothing"
        texts.append(f"{name!r}: {counts}")
    return "; ".join(texts)
