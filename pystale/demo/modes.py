"""How generation and training share the time: one after the other, or side by side."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pystale import DisaggAgentLoopManager, ProduceBatchStatus, Status, TaskSpec
from pystale.demo.rollouts import CountingAgentLoop, EngineController
from pystale.demo.run import Display, Run
from pystale.demo.settings import BATCH_GROUPS, TASK
from pystale.pending import to_the_end
from pystale.producer import AsyncProduceStrategy, DisaggAsyncProduceStrategy

__all__ = ["train_alternately", "train_beside", "training_loop"]


def training_loop(run: Run) -> Callable[[Run, Display], Awaitable[None]]:
    """The loop of a run's mode."""
    return train_beside if run.settings.mode == "disaggregated" else train_alternately


async def train_alternately(run: Run, display: Display) -> None:
    """Generate a batch, then train on it: modes sync and colocated.

    Engine, producer and buffer live on the event loop, the trainer works in a thread, and the loop goes on answering
    while it does.
    """
    engine, strategy, buffer, record = run.engine, run.strategy, run.buffer, run.record
    if engine is None or not isinstance(strategy, AsyncProduceStrategy):
        raise RuntimeError("the run is not prepared, or of another mode")
    agent_loop = CountingAgentLoop(engine, run.trace)
    while record.steps < run.settings.steps:
        train_step = record.steps + 1
        if run.publication_due:
            run.publish()
        if run.checkpoint_due:
            await run.save()
        began = time.perf_counter_ns()
        expired = await buffer.refresh_staleness(train_step)
        record.refreshes.append(((time.perf_counter_ns() - began) / 1e3, expired.get(TASK, 0)))

        began, engine_tokens = time.perf_counter_ns(), engine.generated_tokens
        engine.resume()
        try:
            await strategy.produce_batch(
                agent_loop=agent_loop,
                sampler=run.sampler,
                buffer=buffer,
                batch_size=BATCH_GROUPS,
                task_name=TASK,
                train_step=train_step,
                model_step=engine.model_step,
            )
        finally:
            record.generation_s += (time.perf_counter_ns() - began) / 1e9
            record.generated_tokens += engine.generated_tokens - engine_tokens
            count_draws(run)

        batch = await buffer.take_train_batch({TASK: BATCH_GROUPS}, train_step=train_step)
        await to_the_end(run.train(batch[TASK], batch.trainable_tokens))
        record.ledger = buffer.ledger()
        display.update(record)


async def train_beside(run: Run, display: Display) -> None:
    """Train while the engine generates: mode disaggregated.

    The engine's task decodes between the steps of everything else on the event loop, and goes on while the trainer
    works in its thread. New weights are loaded in the middle of responses: production is paused, which aborts them,
    and continues them afterwards.
    """
    engine, strategy, buffer, record = run.engine, run.strategy, run.buffer, run.record
    if engine is None or not isinstance(strategy, DisaggAsyncProduceStrategy):
        raise RuntimeError("the run is not prepared, or of another mode")
    if run.publication_due:
        run.publish()
    if run.checkpoint_due:
        await run.save()
    manager = DisaggAgentLoopManager(
        TaskSpec(TASK, CountingAgentLoop(engine, run.trace), run.sampler, strategy),
        buffer,
        rollout_controller=EngineController(engine),
        model_step=engine.model_step,
        train_step=record.steps + 1,
    )
    engine.resume()
    engine_tokens, earlier_tokens = engine.generated_tokens, record.generated_tokens
    earlier_s, began, paused_s = record.generation_s, time.perf_counter(), 0.0

    def count() -> None:
        record.generated_tokens = earlier_tokens + engine.generated_tokens - engine_tokens
        record.generation_s = earlier_s + time.perf_counter() - began - paused_s
        record.ledger = buffer.ledger()
        count_draws(run)

    producing = asyncio.create_task(manager.produce_loop(BATCH_GROUPS), name="produce")
    try:
        while record.steps < run.settings.steps:
            asked = time.perf_counter()
            result = await manager.get_batch(BATCH_GROUPS, record.steps + 1)
            record.waiting_s += time.perf_counter() - asked
            if result.groups:
                await to_the_end(run.train(result.groups, result.trainable_tokens))
            too_old = result.status is ProduceBatchStatus.EXPIRED_BATCH and record.steps > engine.model_step
            if too_old or run.publication_due or run.checkpoint_due:
                paused = time.perf_counter()
                await manager.pause_produce()
                if too_old or run.publication_due:
                    run.publish()
                count()
                if run.checkpoint_due and record.steps < run.settings.steps:
                    await run.save()
                await manager.continue_produce(engine.model_step)
                pause_s = time.perf_counter() - paused
                paused_s += pause_s
                record.pausing_s += pause_s
            count()
            display.update(record)
    finally:
        await to_the_end(stopped(manager, producing))
        count()


async def stopped(manager: DisaggAgentLoopManager, producing: "asyncio.Task[None]") -> None:
    """Until production has ended, and all it has begun is in the buffer."""
    await manager.shutdown()
    await asyncio.wait([producing])
    producing.result()


def count_draws(run: Run) -> None:
    """Note how many groups were drawn from the buffer's pools."""
    run.record.groups_rerolled = run.sampler.drawn[Status.EXPIRED]
    run.record.groups_continued = run.sampler.drawn[Status.ABORTED]
