"""Production in the background: for one step after the other, until it is told to end."""

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from pystale.buffer import ReplayBuffer
from pystale.pending import all_ended, to_the_end, together
from pystale.producer import DisaggAsyncProduceStrategy
from pystale.progress import Progress
from pystale.report import ProduceBatchStatus
from pystale.rollout import RolloutController
from pystale.rounds import cancel_lines, pause_lines
from pystale.tasks import TaskSpec

__all__ = ["Phase", "ProductionLoop"]

logger = logging.getLogger("pystale")

NORMAL = ProduceBatchStatus.NORMAL
UPDATE_WEIGHT_AND_ABORT = ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
EXPIRED_BATCH = ProduceBatchStatus.EXPIRED_BATCH


class Phase(enum.Enum):
    """Where :meth:`ProductionLoop.run` is."""

    NOT_STARTED = "has not been started"
    RUNNING = "is running"
    ENDED = "has ended"


class ProductionLoop:
    """Lines that fill up side by side, step by step, and can be paused from outside.

    Belongs to one event loop.

    Parameters
    ----------
    tasks : sequence of TaskSpec
        One line is made for each.
    buffer : ReplayBuffer
        Where the lines put.
    controller : RolloutController or None
        Asked to pause before the agent loops are.
    progress : Progress
        Says what is wanted.

    Attributes
    ----------
    lines : list of BackgroundLine
        By task.
    status : ProduceBatchStatus
        NORMAL while production is wanted, UPDATE_WEIGHT_AND_ABORT while it is paused, EXPIRED_BATCH while the weights
        are too old to go on.
    phase : Phase
        Where :meth:`run` is.
    failure : Exception or None
        What it has ended with.
    shut_down : bool
        Whether it was told to end.
    changed : asyncio.Event
        Set, and replaced by a new one, whenever something has changed. Who has got it before looking misses nothing.
    """

    def __init__(
        self,
        tasks: Sequence[TaskSpec[DisaggAsyncProduceStrategy]],
        buffer: ReplayBuffer,
        controller: RolloutController | None,
        progress: Progress,
    ) -> None:
        self.progress = progress
        self.status = NORMAL
        self.phase = Phase.NOT_STARTED
        self.failure: Exception | None = None
        self.shut_down = False
        self.changed = asyncio.Event()
        self.lines = [
            task.strategy.line(
                task.agent_loop,
                task.sampler,
                buffer,
                task.task_name,
                progress=progress,
                too_old=self._too_old,
                on_stall=self.ring,
            )
            for task in tasks
        ]
        self._tasks = tasks
        self._controller = controller
        self._work: list[asyncio.Task[ProduceBatchStatus]] = []  # what the lines do at the moment
        self._behind: set[asyncio.Task[None]] = set()

    # Producing

    async def run(self, shares: dict[str, int]) -> None:
        """Produce `shares` by task per step until :meth:`end`. However it ends, nothing is running afterwards."""
        if self.phase is Phase.RUNNING:
            raise RuntimeError("produce_loop is running already; one manager has one")
        self.phase, self.failure = Phase.RUNNING, None
        try:
            try:
                while not self.shut_down:
                    await self._step(shares)
            except Exception as error:
                self.failure = error
                # What is running is put before the error goes on.
                await pause_lines(self.lines, self._controller)
                raise
            await pause_lines(self.lines, self._controller)
        except BaseException:
            # Cancelled, or the buffer broke. Either way no task may stay behind, and no group be lost.
            await to_the_end(cancel_lines(self.lines))
            raise
        finally:
            if self._behind:
                await to_the_end(self._all_behind())
            self.phase = Phase.ENDED
            self.ring()

    async def _step(self, shares: dict[str, int]) -> None:
        """Produce for one step, or wait until that is wanted and possible."""
        changed = self.changed
        if self.status is NORMAL:
            for line in self.lines:
                line.reopen()
            future_step = self.progress.future_step
            statuses = await self._side_by_side(
                line.produce(share, self.progress.target(line.task_name, share))
                for line in self.lines
                if (share := shares[line.task_name])
            )
            if all(status is NORMAL for status in statuses):
                self.progress.advance(future_step)
            elif EXPIRED_BATCH in statuses and not any(line.interrupted for line in self.lines):
                self.status = EXPIRED_BATCH
                self.ring()
        elif self.status is EXPIRED_BATCH and any(line.pending for line in self.lines):
            await self._side_by_side(line.tend() for line in self.lines)
            self.ring()
        else:
            await changed.wait()

    async def _side_by_side(self, work: Iterable[Coroutine[Any, Any, ProduceBatchStatus]]) -> list[ProduceBatchStatus]:
        """Have lines work in tasks of their own, so that a pause can end them."""
        self._work = [asyncio.ensure_future(piece) for piece in work]
        try:
            await all_ended(self._work)
            return [UPDATE_WEIGHT_AND_ABORT if task.cancelled() else task.result() for task in self._work]
        finally:
            self._work = []

    def _too_old(self) -> bool:
        """Whether some task's weights are too old: then all tasks wait, since a batch needs all of them."""
        return any(task.strategy.too_old(self.progress) for task in self._tasks if task.weight)

    # Interrupting

    async def pause(self) -> None:
        """Stop the engines, and have the lines collect what was being generated."""
        self.switch(UPDATE_WEIGHT_AND_ABORT)
        await together(self._end_round(), pause_lines(self.lines, self._controller), keep_going=True)

    async def _end_round(self) -> None:
        """Wait until the interrupted lines have stopped drawing; cancel a sampler that takes too long."""
        limit = max(line.pause_limit_s for line in self.lines)
        for last in (False, True):
            late = [task for task in self._work if not task.done()]
            if not late:
                return
            await asyncio.wait(late, timeout=limit)
            if not last:
                for task in late:
                    task.cancel()  # has no effect on those that have ended
        if any(not task.done() for task in late):
            logger.error("production goes on %s s after it was cancelled; a sampler does not let itself be", limit)

    def switch(self, status: ProduceBatchStatus) -> None:
        self.status = status
        self._interrupt()

    def end(self) -> None:
        """Have :meth:`run` pause what is running, store it, and return."""
        self.shut_down = True
        self._interrupt()

    def _interrupt(self) -> None:
        for line in self.lines:
            line.interrupt()
        self.ring()

    async def ended(self) -> None:
        """Until nothing is running any more."""
        while self.phase is Phase.RUNNING:
            await self.changed.wait()
        await self._all_behind()

    # Telling

    def ring(self) -> None:
        """Have everybody who waits look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def look_again(self) -> None:
        """Have the lines look at the buffer again: it holds other groups than they know of."""
        for line in self.lines:
            line.look_again()

    # What follows behind

    def follow(self, work: Coroutine[Any, Any, None], failed: Callable[[BaseException], None]) -> None:
        """Have `work` done in a task of its own, before production is said to have ended."""

        def done(task: "asyncio.Task[None]") -> None:
            self._behind.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        task = asyncio.ensure_future(work)
        self._behind.add(task)
        task.add_done_callback(done)

    async def _all_behind(self) -> None:
        while self._behind:
            await asyncio.wait(self._behind)
