"""What a run consists of, whatever its mode: it is set up or read from a directory, trains, publishes and saves."""

import asyncio
import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from pystale import RolloutState, Status
from pystale.demo.checkpoint import RunDirectory
from pystale.demo.engine import Engine
from pystale.demo.grpo import BaseModel, Trainer
from pystale.demo.record import Record
from pystale.demo.rollouts import CountingSampler, forget_versions_after
from pystale.demo.settings import TASK, Settings
from pystale.trace import Trace, note_weight_sync

__all__ = ["Display", "Run"]

BASE_STRIDE = 20
HEARTBEAT_S = 0.005


class Display(Protocol):
    """Shows a run while it goes on."""

    def update(self, record: Record) -> None:
        """Called after every trainer step, and now and then before the first."""
        ...


class Heartbeat:
    """Measures how long the event loop was ever away: the longest time between two wake-ups meant to be 5 ms apart."""

    def __init__(self, record: Record) -> None:
        self._record = record

    async def _beat(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(HEARTBEAT_S)
            self._record.add_gap((time.perf_counter() - before) * 1e3)

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._beat(), name="heartbeat")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


class Run:
    """A run, new or continued.

    Parameters
    ----------
    settings : Settings
    directory : RunDirectory, optional
        Where the run is kept. What it holds is continued.
    new_buffer : callable, optional
        Makes a buffer in another process; called with the record, the rule and the tail batch trigger. Not together
        with a directory.
    trace : path, optional
        File to record the buffer's operations in.

    Attributes
    ----------
    record : Record
        What was done, by earlier processes too.
    strategy, buffer
        Producer, and where its groups wait. There is none of them once the run is finished.
    trainer, engine : Trainer, Engine
        There once :meth:`prepare` is done.

    Raises
    ------
    ValueError
        For a setting out of range, and for a directory that cannot be used; see :class:`RunDirectory`.
    OSError
        If the file system refuses.
    """

    def __init__(
        self,
        settings: Settings,
        directory: RunDirectory | None = None,
        new_buffer: Callable[..., Any] | None = None,
        trace: str | None = None,
    ) -> None:
        self.settings = settings
        self.directory = directory
        saved = None if directory is None else directory.read(settings)
        self.record = Record(settings) if saved is None else saved.record
        self.finished = self.record.steps == settings.steps
        if self.finished:
            self.record.ended = time.perf_counter()
            return
        self._base_rng, self._engine_rng, prompt_rng = map(
            np.random.default_rng, np.random.SeedSequence(settings.seed).spawn(3)
        )
        journal = None if directory is None else directory.journal
        if new_buffer is None:
            self.strategy, self.buffer = settings.build(
                on_release=self.record.add_expired, journal=journal, trace=trace
            )
        else:
            self.strategy, self.buffer = settings.build(functools.partial(new_buffer, self.record))
        self.sampler = CountingSampler(self.buffer, settings.group_size, prompt_rng)
        self.trainer: Trainer | None = None
        self.engine: Engine | None = None
        self._due = 0  # step of the next checkpoint
        if saved is not None and directory is not None:
            resumed = directory.resume(self.buffer)
            self.sampler.load_state_dict(saved.sampler, resumed.finished.get(TASK, ()))
            self.sampler.drawn.update({Status[name]: count for name, count in saved.drawn.items()})
            self._forget_lost_versions(saved.model_step)
            self.trainer = Trainer(saved.parameters)
            self.trainer.adam.load(saved.adam, saved.adam_updates)
            self._engine_rng.bit_generator.state = saved.engine_rng
            self.engine = Engine(saved.served, self._engine_rng)
            self.engine.model_step = saved.model_step
            self.record.continued_after.append(self.record.steps)
            self._due = self.record.steps + directory.every

    def _forget_lost_versions(self, model_step: int) -> None:
        for status in (Status.ABORTED, Status.EXPIRED):
            for group in self.buffer.sync.get(len(self.buffer), TASK, status):
                forget_versions_after(group, model_step)
                self.buffer.sync.put(group, TASK)

    async def prepare(self, display: Display) -> None:
        """Teach the base model, unless the run goes on from a checkpoint, and make trainer and engine."""
        if self.engine is not None:
            self.record.pretrained = 1.0
            return
        base, steps = BaseModel(self._base_rng), self.settings.base_steps
        for done in range(0, steps, BASE_STRIDE):
            self.record.pretrained = done / steps
            display.update(self.record)
            await asyncio.to_thread(base.train, min(BASE_STRIDE, steps - done))
        self.trainer = Trainer(base.parameters)
        self.engine = Engine(base.parameters, self._engine_rng)

    async def train(self, groups: list[list[RolloutState]], trainable_tokens: int) -> None:
        """Train the next step, in a thread, and note it. To be awaited to the end: half a step is none."""
        trainer, engine, record = self._parts()
        train_step = record.steps + 1
        began, tokens = time.perf_counter(), engine.generated_tokens
        await asyncio.to_thread(trainer.step, groups, trainable_tokens)
        record.training_s += time.perf_counter() - began
        record.tokens_beside_training += engine.generated_tokens - tokens
        record.add_batch(groups, trainable_tokens, train_step)

    @property
    def publication_due(self) -> bool:
        """Whether the interval says that the trainer's weights are to be served now."""
        steps = self.record.steps
        return steps % self.settings.sync_weights_interval == 0 and steps > self._parts()[1].model_step

    def publish(self) -> None:
        """Have the engine serve the trainer's weights from the next token on."""
        trainer, engine, record = self._parts()
        engine.load_weights(trainer.parameters, record.steps)
        note_weight_sync(self.buffer, record.steps)

    @property
    def trace(self) -> Trace | None:
        """Where the run is recorded, if it is."""
        trace = getattr(self.buffer, "trace", None)  # a buffer in another process has none
        return trace if isinstance(trace, Trace) else None

    @property
    def checkpoint_due(self) -> bool:
        """Whether it is time to save."""
        return self.directory is not None and self.record.steps >= min(self._due, self.settings.steps)

    async def save(self) -> None:
        """Save the run as it is. Nothing may be running: the state is taken down in several moments."""
        if self.directory is None:
            return
        trainer, engine, record = self._parts()
        began = time.perf_counter()
        record.ledger = self.buffer.ledger()
        drawn = {status.name: count for status, count in self.sampler.drawn.items()}
        await self.directory.save(self.buffer, record, trainer, engine, self.sampler.state_dict(), drawn)
        record.checkpoints.append(time.perf_counter() - began)
        self._due = record.steps + self.directory.every

    def _parts(self) -> tuple[Any, Any, Record]:
        return self.trainer, self.engine, self.record
