"""The manager of production that goes on in the background while a trainer trains."""

import asyncio
import logging
from collections.abc import Awaitable, Generator, Mapping, Sequence
from typing import Any

from pystale.batch import TrainBatch
from pystale.buffer import ReplayBuffer
from pystale.manager import StarvationWatch, pools_text, result_of
from pystale.pending import ended, resolved
from pystale.producer import DisaggAsyncProduceStrategy
from pystale.production import ProductionStalled
from pystale.production_loop import Phase, ProductionLoop
from pystale.progress import Progress
from pystale.report import ProduceBatchStatus, ProduceReport
from pystale.reservations import StragglersOverdue
from pystale.result import ProduceBatchResult
from pystale.rollout import RolloutController
from pystale.staleness import checked_int
from pystale.state import Status
from pystale.take import claim_train_batch
from pystale.tasks import TaskSpec, checked_tasks, task_batch_sizes
from pystale.waiting import IN_EVENT_LOOP

__all__ = ["DisaggAgentLoopManager"]

logger = logging.getLogger("pystale")

NORMAL = ProduceBatchStatus.NORMAL
UPDATE_WEIGHT_AND_ABORT = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
EXPIRED_BATCH = ProduceBatchStatus.EXPIRED_BATCH


class DisaggAgentLoopManager:
    """Disaggregated production: engines of their own generate all the time, and a trainer takes batches.

    One task runs :meth:`produce_loop`. Beside it the trainer calls, step by step, :meth:`get_batch`, and around every
    publication of weights :meth:`pause_produce` and :meth:`continue_produce`::

        producing = asyncio.create_task(manager.produce_loop(batch_size))
        while train_step <= last_step:
            result = await manager.get_batch(batch_size, train_step)
            if result.groups:
                train(result.groups)
                newest, train_step = train_step, train_step + 1
            if result.status is ProduceBatchStatus.EXPIRED_BATCH or newest % sync_weights_interval == 0:
                await manager.pause_produce()
                publish_weights()
                await manager.continue_produce(newest)
        await manager.shutdown()

    Production runs ahead of the trainer, for one step after the other, until its weights would be too old for the step
    it would produce for; then it stops, with status EXPIRED_BATCH, and waits for newer ones. What it wants is counted
    from the beginning of the run, so that groups that expire while they wait are made up for.

    All methods belong to one event loop.

    Parameters
    ----------
    tasks : TaskSpec or sequence of TaskSpec
        Tasks that share every batch, with strategies built by :class:`~pystale.DisaggAsyncProduceStrategyConfig`.
    buffer : ReplayBuffer
        With the rule and the tail batch trigger of every task's strategy.
    rollout_controller : RolloutController, optional
        Asked to pause by :meth:`pause_produce`, before the agent loops are, and to continue by
        :meth:`continue_produce`.
    model_step : int, default 0
        Trainer step whose weights are served at first.
    train_step : int, optional
        Trainer step that takes the first batch; the one after `model_step` by default. To go on after a restart it is
        enough to give both numbers: nothing else of a manager needs to be saved.
    starvation_steps : int, default 10
        See :class:`~pystale.AgentLoopManager`.

    Attributes
    ----------
    status : ProduceBatchStatus
        NORMAL while production is wanted, UPDATE_WEIGHT_AND_ABORT from :meth:`pause_produce` to
        :meth:`continue_produce`, EXPIRED_BATCH while the weights are too old to go on.
    progress : Progress
        Steps and numbers of groups; to be read.

    Raises
    ------
    TypeError, ValueError
        For tasks that do not fit each other or the buffer, or steps out of range.

    Examples
    --------
    >>> import asyncio
    >>> from pystale import DisaggAgentLoopManager, DisaggAsyncProduceStrategyConfig, ReplayBuffer, Status, TaskSpec
    >>> from pystale.sampler import PromptSampler
    >>> class Echo:
    ...     async def generate_group(self, group, *, enable_partial_rollout):
    ...         for state in group:
    ...             state.response_ids, state.status = list(state.prompt_ids), Status.COMPLETED
    ...         return group
    ...     async def pause(self):
    ...         pass
    >>> async def main():
    ...     strategy = DisaggAsyncProduceStrategyConfig(max_staleness=1).build()
    ...     buffer = ReplayBuffer(strategy.rule)
    ...     sampler = PromptSampler([[n, n] for n in range(100)], buffer, group_size=2)
    ...     manager = DisaggAgentLoopManager(TaskSpec("echo", Echo(), sampler, strategy), buffer)
    ...     producing = asyncio.create_task(manager.produce_loop(4))
    ...     for train_step in (1, 2, 3):
    ...         result = await manager.get_batch(4, train_step)
    ...         await manager.pause_produce()
    ...         # train on result.groups, publish the weights
    ...         await manager.continue_produce(train_step)
    ...     await manager.shutdown()
    ...     return len(result.groups), result.trainable_tokens, result.status.name
    >>> asyncio.run(main())
    (4, 16, 'NORMAL')
    """

    def __init__(
        self,
        tasks: TaskSpec[DisaggAsyncProduceStrategy] | Sequence[TaskSpec[DisaggAsyncProduceStrategy]],
        buffer: ReplayBuffer,
        *,
        rollout_controller: RolloutController | None = None,
        model_step: int = 0,
        train_step: int | None = None,
        starvation_steps: int = 10,
    ) -> None:
        self.tasks = checked_tasks(tasks, buffer, DisaggAsyncProduceStrategy)
        self.buffer = buffer
        self.rollout_controller = rollout_controller
        model_step = checked_int("model_step", model_step, at_least=0)
        train_step = model_step + 1 if train_step is None else checked_int("train_step", train_step, at_least=1)
        if train_step <= model_step:
            raise ValueError(
                f"model_step={model_step} is in the future of train_step={train_step}, whose newest weights are of "
                f"step {train_step - 1}"
            )
        self.progress = Progress([task.task_name for task in self.tasks], train_step=train_step, model_step=model_step)
        self._production = ProductionLoop(self.tasks, buffer, rollout_controller, self.progress)
        self._watch = StarvationWatch(self.tasks, starvation_steps)
        self._pause_s = 0.0
        self._straggler_s = 0.0  # waited for the next batch so far
        self._switching = asyncio.Lock()

    @property
    def status(self) -> ProduceBatchStatus:
        return self._production.status

    # The trainer's side

    async def get_batch(self, batch_size: int, train_step: int) -> ProduceBatchResult:
        """Wait for the batch of a step, and take it.

        The buffer is refreshed at `train_step` first, and at the step after it once the batch is taken, so that
        production makes up for what expires while the trainer trains. A call that is cancelled takes nothing along.

        Parameters
        ----------
        batch_size : int
            Groups of the batch, of all tasks together; what :meth:`produce_loop` produces per step.
        train_step : int
            Trainer step that trains it, from 1.

        Returns
        -------
        ProduceBatchResult
            Without groups, and with status EXPIRED_BATCH, if production has stopped since its weights are too old, and
            the trainer has newer ones: publish them and ask again. Without groups, and with status NORMAL, if
            :meth:`shutdown` was called and no batch is there. Else with `batch_size` groups.

        Raises
        ------
        TypeError, ValueError
            For an argument out of range.
        PromptsExhausted, ProductionStalled
            If the batch can never be there: prompts ran out, groups keep failing, :meth:`produce_loop` is not running,
            production was paused before and not continued, or it has stopped though there are no newer weights to
            publish. The message holds the whole state.
        StragglersOverdue
            If the buffer's takes wait for stragglers, and these do not land in time.
        """
        sizes = task_batch_sizes(self.tasks, batch_size)
        train_step = checked_int("train_step", train_step, at_least=1)
        await self._move_to(train_step)
        production = self._production
        if production.phase is not Phase.RUNNING:
            await asyncio.sleep(0)  # its task may have been created just now
        paused = self.status is UPDATE_WEIGHT_AND_ABORT
        while True:
            changed = production.changed
            if self.status is EXPIRED_BATCH and train_step - 1 > self.progress.model_step and not production.shut_down:
                return await self._empty()
            try:
                batch = await self._take(sizes, train_step)
            except StragglersOverdue as error:
                stored = await self.buffer.count_statuses(sizes, Status)
                raise StragglersOverdue(f"{error}. {self._state(sizes, stored)}") from None
            self._straggler_s += batch.straggler_s
            if batch:
                self._refresh_behind(train_step + 1)
                result = await self._result(batch)
                self._watch.delivered(result, train_step)
                return result
            if production.shut_down:
                return await self._empty()
            await self._refuse_hopeless_wait(sizes, train_step, paused)
            paused = False
            if not changed.is_set():
                await self._wait(sizes, changed)

    async def pause_produce(self) -> float:
        """Interrupt production: stop the engines, and collect what they were generating into the buffer.

        To be called before new weights are published, and before anything else that needs the engines to be idle.
        Groups that are not finished are stored as ABORTED and taken up afterwards. Nothing is lost.

        Returns
        -------
        float
            Seconds it took; also part of the timing of the next result.

        Raises
        ------
        Exception
            What the controller raised, or TimeoutError if it has not answered in time. Production is paused then, and
            what was generated is collected.
        """
        async with self._switching:
            clock = asyncio.get_running_loop().time
            began = clock()
            try:
                await self._production.pause()
            finally:
                seconds = clock() - began
                self._pause_s += seconds
            return seconds

    async def continue_produce(self, model_step: int) -> None:
        """Produce again, with the weights of `model_step`.

        May also be called without :meth:`pause_produce` before it, for engines that take new weights while they
        generate. These should report the versions of tokens themselves; tokens of groups begun before the call that
        have none are stamped with the version served when they were begun.

        Parameters
        ----------
        model_step : int
            Trainer step whose weights are served from now on.
        """
        model_step = checked_int("model_step", model_step, at_least=0)
        async with self._switching:
            if self.rollout_controller is not None and not self._production.shut_down:
                await resolved(self.rollout_controller.continue_generation())
            self.progress.publish(model_step)
            self._production.switch(NORMAL)

    def shutdown(self) -> Awaitable[None]:
        """End production. Takes effect at once; what it returns can be awaited, until nothing is running any more.

        :meth:`produce_loop` pauses what is running, stores it, and returns. Batches that are there can still be taken.
        """
        self._production.end()
        return _Ending(self._production)

    # The producer's side

    async def produce_loop(self, batch_size: int) -> None:
        """Produce until :meth:`shutdown`, one step after the other. To be run in a task beside the trainer.

        However it ends, nothing is running afterwards, and what was generated is in the buffer. If it is cancelled,
        or fails, it can be run again.

        Parameters
        ----------
        batch_size : int
            Groups per step, of all tasks together.

        Raises
        ------
        ProductionStalled
            If groups keep failing. :meth:`get_batch` raises it too, once it has no batch to give any more.
        TypeError, ValueError
            For a batch size that is no int from 1 on.
        RuntimeError
            If it is running already.
        """
        await self._production.run(task_batch_sizes(self.tasks, batch_size))

    # Between the two

    async def _move_to(self, train_step: int) -> None:
        self.progress.reach(train_step)
        await self.buffer.refresh_staleness(train_step)
        self._production.look_again()

    async def _take(self, sizes: dict[str, int], train_step: int) -> TrainBatch:
        """Take a batch from the buffer, and count it in the same moment: production adds what is stored and taken.

        As :meth:`ReplayBuffer.take_train_batch`, which a journal makes wait while the groups are nowhere.
        """
        if not isinstance(self.buffer, ReplayBuffer):
            return await self._take_elsewhere(sizes, train_step)
        claim = await claim_train_batch(self.buffer.operations, sizes, train_step, IN_EVENT_LOOP)
        if not claim.batch:
            return await claim.hand_over(IN_EVENT_LOOP)
        self.progress.consume(sizes, train_step)
        try:
            return await claim.hand_over(IN_EVENT_LOOP)
        except BaseException:
            self.progress.give_back(sizes, train_step)
            self._production.look_again()
            raise

    async def _take_elsewhere(self, sizes: dict[str, int], train_step: int) -> TrainBatch:
        """Take from a buffer in another process, where nothing happens in the same moment as here.

        Counted before it is taken, so that production never sees less than there is, and draws too much.
        """
        self.progress.consume(sizes, train_step)
        batch = TrainBatch({}, {})
        try:
            batch = await self.buffer.take_train_batch(sizes, train_step=train_step)
        finally:
            if not batch:
                self.progress.give_back(sizes, train_step)
                self._production.look_again()
        return batch

    async def _refresh_elsewhere(self, train_step: int) -> None:
        await self.buffer.refresh_staleness(train_step)
        self._production.look_again()

    def _refresh_behind(self, train_step: int) -> None:
        """Refresh without awaiting what follows from it: a cancellation meanwhile would lose the batch taken."""
        if not isinstance(self.buffer, ReplayBuffer):
            self._production.follow(self._refresh_elsewhere(train_step), _refresh_failed)
            return
        _, effects = self.buffer.operations.refresh(train_step)
        if effects.pending:
            self._production.follow(effects.finish(IN_EVENT_LOOP), _refresh_failed)
        else:
            effects.cleared.free()
        self._production.look_again()

    async def _wait(self, sizes: dict[str, int], changed: asyncio.Event) -> None:
        """Until the buffer has a batch, or something else has changed."""
        ready = asyncio.ensure_future(self.buffer.wait_ready(sizes))
        change = asyncio.ensure_future(changed.wait())
        cancelled: asyncio.CancelledError | None = None
        try:
            await asyncio.wait((ready, change), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
        for task in (ready, change):
            task.cancel()
            cancelled = await ended(task) or cancelled
        if cancelled is not None:
            raise cancelled

    async def _refuse_hopeless_wait(self, sizes: dict[str, int], train_step: int, paused: bool) -> None:
        """Raise if nothing that goes on can bring the batch."""
        stored = await self.buffer.count_statuses(sizes, Status)
        error: type[Exception] = ProductionStalled
        why, cause = "", None
        reasons = [
            line.stalled
            for line in self._production.lines
            if line.stalled is not None and stored[line.task_name][Status.COMPLETED] < sizes[line.task_name]
        ]
        if self._production.phase is not Phase.RUNNING:
            why, cause = f"produce_loop {self._production.phase.value}", self._production.failure
            if cause is not None:
                why += f" with {type(cause).__name__}: {cause}"
        elif reasons:
            error, why = type(reasons[0]), str(reasons[0])
        elif paused:
            why = "production is paused; call continue_produce first"
        elif self.status is EXPIRED_BATCH and not any(line.pending for line in self._production.lines):
            why = "production has stopped since its weights are too old, and there are no newer ones to publish"
        if why:
            raise error(f"no batch for train_step {train_step}: {why}. {self._state(sizes, stored)}") from cause

    def _state(self, sizes: dict[str, int], stored: Mapping[str, dict[Status, int]]) -> str:
        progress = self.progress
        running = {line.task_name: len(line.pending) for line in self._production.lines}
        errors = {line.task_name: line.report.last_error for line in self._production.lines if line.report.last_error}
        return (
            f"Wanted: {sizes}, stored: {pools_text(stored)}, running: {running}, consumed so far: {progress.consumed}. "
            f"Status {self.status.name}, model_step {progress.model_step}, produced for step {progress.future_step}, "
            f"next step to consume {progress.next_train_step}. Last errors: {errors or 'none'}"
        )

    async def _result(self, batch: TrainBatch) -> ProduceBatchResult:
        stored = await self.buffer.count_statuses([task.task_name for task in self.tasks], Status)
        pause_s, self._pause_s = self._pause_s, 0.0
        straggler_s, self._straggler_s = self._straggler_s, 0.0
        status = EXPIRED_BATCH if self.status is EXPIRED_BATCH else NORMAL
        reports = [line.take_report() for line in self._production.lines]
        return result_of(batch, reports, stored, status=status, pause_s=pause_s, straggler_s=straggler_s)

    async def _empty(self) -> ProduceBatchResult:
        """Result without a batch; what was produced is reported with the next batch."""
        stored = await self.buffer.count_statuses([task.task_name for task in self.tasks], Status)
        idle = [
            ProduceReport(task.task_name, 0, self.progress.next_train_step, self.progress.model_step)
            for task in self.tasks
        ]
        status = EXPIRED_BATCH if self.status is EXPIRED_BATCH else NORMAL
        return result_of(TrainBatch({}, {}), idle, stored, status=status, pause_s=0.0)


class _Ending(Awaitable[None]):
    """Until :meth:`DisaggAgentLoopManager.produce_loop` has ended, if it is running."""

    def __init__(self, production: ProductionLoop) -> None:
        self._production = production

    def __await__(self) -> Generator[Any, None, None]:
        return self._production.ended().__await__()


def _refresh_failed(error: BaseException) -> None:
    logger.error("what expired behind a batch could not be recorded", exc_info=error)
