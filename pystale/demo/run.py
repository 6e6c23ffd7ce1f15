"""The run: generate, take, train, publish weights, in one event loop.

Generation and training alternate (colocated): engine, producer and buffer live on the loop, the trainer works in a
thread, and the loop goes on answering while it does.
"""

import asyncio
import signal
import time
from types import TracebackType
from typing import Protocol

import numpy as np

from pystale import ReplayBuffer, Status
from pystale.demo.engine import Engine
from pystale.demo.grpo import BaseModel, Trainer
from pystale.demo.record import Record
from pystale.demo.rollouts import CountingAgentLoop, CountingSampler
from pystale.demo.settings import BATCH_GROUPS, TASK, Settings
from pystale.producer import AsyncProduceStrategy

__all__ = ["Display", "run", "train"]

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
            gap_ms = (time.perf_counter() - before) * 1e3
            self._record.longest_gap_ms = max(self._record.longest_gap_ms, gap_ms)

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._beat(), name="heartbeat")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def train(strategy: AsyncProduceStrategy, buffer: ReplayBuffer, record: Record, display: Display) -> None:
    """Train for ``record.settings.steps`` steps; whatever ends it, `record` holds what was done."""
    settings = record.settings
    base_rng, engine_rng, prompt_rng = map(np.random.default_rng, np.random.SeedSequence(settings.seed).spawn(3))
    async with Heartbeat(record):
        base = BaseModel(base_rng)
        for done in range(0, settings.base_steps, BASE_STRIDE):
            record.pretrained = done / settings.base_steps
            display.update(record)
            await asyncio.to_thread(base.train, min(BASE_STRIDE, settings.base_steps - done))
        trainer = Trainer(base.parameters)
        sampler = CountingSampler(buffer, settings.group_size, prompt_rng)
        try:
            async with Engine(base.parameters, engine_rng) as engine:
                agent_loop = CountingAgentLoop(engine)
                for train_step in range(1, settings.steps + 1):
                    began = time.perf_counter_ns()
                    expired = await buffer.refresh_staleness(train_step)
                    elapsed_us = (time.perf_counter_ns() - began) / 1e3
                    record.refreshes.append((elapsed_us, expired.get(TASK, 0)))
                    record.groups_expired += expired.get(TASK, 0)

                    began, engine_tokens = time.perf_counter_ns(), engine.generated_tokens
                    engine.resume()
                    try:
                        report = await strategy.produce_batch(
                            agent_loop=agent_loop,
                            sampler=sampler,
                            buffer=buffer,
                            batch_size=BATCH_GROUPS,
                            task_name=TASK,
                            train_step=train_step,
                            model_step=engine.model_step,
                        )
                    finally:
                        record.generation_s += (time.perf_counter_ns() - began) / 1e9
                        record.generated_tokens += engine.generated_tokens - engine_tokens
                        record.groups_rerolled = sampler.drawn[Status.EXPIRED]
                        record.groups_continued = sampler.drawn[Status.ABORTED]
                    record.groups_expired += report.expired

                    batch = await buffer.take_train_batch({TASK: BATCH_GROUPS}, train_step=train_step)
                    record.add_batch(batch[TASK], batch.trainable_tokens, train_step)
                    await asyncio.to_thread(trainer.step, batch[TASK], batch.trainable_tokens)
                    if train_step % settings.sync_weights_interval == 0:
                        engine.load_weights(trainer.parameters, train_step)
                    record.ledger = buffer.ledger()
                    display.update(record)
        finally:
            record.ledger = buffer.ledger()
            record.ended = time.perf_counter()


async def run(
    settings: Settings, strategy: AsyncProduceStrategy, buffer: ReplayBuffer, display: Display
) -> tuple[Record, bool]:
    """Train until done or interrupted (SIGINT).

    Parameters
    ----------
    strategy, buffer
        What ``settings.build()`` gave.

    Returns
    -------
    Record, bool
        What was done, and whether it was interrupted. A second SIGINT raises KeyboardInterrupt.
    """
    record = Record(settings)
    training = asyncio.create_task(train(strategy, buffer, record, display), name="train")
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        training.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await asyncio.wait([training])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if not training.cancelled():
        training.result()
    record.ended = record.ended or time.perf_counter()
    return record, training.cancelled()
