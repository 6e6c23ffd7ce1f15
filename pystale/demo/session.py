"""A run from its start, or from where it was left, until it is done or Ctrl-C comes."""

import asyncio
import signal
import time

from pystale.demo.modes import training_loop
from pystale.demo.run import Display, Heartbeat, Run

__all__ = ["execute"]


async def train(run: Run, display: Display) -> None:
    """Train to the last step. However it ends, the record holds what was done; so does the directory, if it ends well.

    Ctrl-C is a good end: what was generated and trained until then is saved.
    """
    record = run.record
    try:
        async with Heartbeat(record):
            await run.prepare(display)
            if run.engine is None:
                raise RuntimeError("the run is prepared and has no engine")
            try:
                async with run.engine:
                    await training_loop(run)(run, display)
            except asyncio.CancelledError:
                await run.save()
                raise
            await run.save()
    finally:
        record.ledger = run.buffer.ledger() if record.steps or len(run.buffer) else {}
        record.ended = time.perf_counter()
        await run.buffer.close()


async def execute(run: Run, display: Display) -> bool:
    """Train until done or interrupted (SIGINT).

    Returns
    -------
    bool
        Whether it was interrupted. A second SIGINT raises KeyboardInterrupt.
    """
    training = asyncio.create_task(train(run, display), name="train")
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
    return training.cancelled()
