"""A production line that works in the background: its work outlives rounds, and weight updates interrupt it."""

import asyncio
from collections.abc import Callable
from typing import Any

from pystale.pending import to_the_end
from pystale.production import Line, ProductionStalled
from pystale.progress import Progress
from pystale.report import ProduceBatchStatus
from pystale.sampler import PromptsExhausted

__all__ = ["BackgroundLine"]


class BackgroundLine(Line):
    """One task's production beside a trainer.

    A round ends when the absolute target is reached, when it is interrupted, or when the weights are too old. What it
    has begun goes on; the next round, or :meth:`tend` between rounds, collects it.

    Attributes
    ----------
    stalled : ProductionStalled, PromptsExhausted or None
        Why nothing is running and nothing can be run, until something changes.
    """

    period = "Since the last batch it"

    def __init__(
        self, *, too_old: Callable[[], bool], progress: Progress, on_stall: Callable[[], None], **settings: Any
    ) -> None:
        super().__init__(**settings, train_step=progress.put_step, model_step=progress.model_step)
        self.too_old = too_old
        self.progress = progress
        self.on_stall = on_stall
        self.interrupted = False
        self.stalled: ProductionStalled | PromptsExhausted | None = None
        self.changed = asyncio.Event()

    def consumed(self) -> int:
        return self.progress.consumed[self.task_name]

    def ended(self) -> ProduceBatchStatus | None:
        if self.interrupted:
            return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
        return ProduceBatchStatus.EXPIRED_BATCH if self.too_old() else None

    async def stuck(self, reason: ProductionStalled | PromptsExhausted) -> None:
        """Wait until something has changed: groups expired that can be generated anew, or the round is to end.

        Without prompts production may still go on later, and the trainer may have batches left to train meanwhile. A
        source of which everything fails will not get better by waiting.
        """
        if isinstance(reason, ProductionStalled):
            raise reason
        if self.woken:
            return
        self.stalled = reason
        self.changed.clear()
        self.on_stall()
        await self.changed.wait()

    def look_again(self) -> None:
        """The trainer has moved, and groups may have expired or gone."""
        self.train_step, self.model_step = self.progress.put_step, self.progress.model_step
        self.fruitless = self.without_completed = 0  # weights and steps moved; what failed before says little
        self.stalled = None
        self.changed.set()
        self.wake()

    def interrupt(self) -> None:
        """End the round that is under way; what it has begun goes on."""
        self.interrupted = True
        self.look_again()

    def reopen(self) -> None:
        """Allow a new round."""
        self.interrupted = False
        self.pausing = False
        self.look_again()

    async def tend(self) -> ProduceBatchStatus:
        """Collect what is running, without beginning anything, until it has ended or the line is interrupted."""
        while self.pending and not self.interrupted:
            await self.pending.wait()
            await to_the_end(self.collect())
        return ProduceBatchStatus.EXPIRED_BATCH
