"""A round of production that leaves nothing running: lines fill up side by side, then all of them are paused."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from pystale.pending import resolved, to_the_end, together
from pystale.production import Line
from pystale.rollout import RolloutController

__all__ = ["cancel_lines", "pause_lines", "run_round", "within"]


async def run_round(lines: Sequence[Line], shares: dict[str, int], controller: RolloutController | None = None) -> None:
    """Have every line produce its share, then pause all of them.

    A line that has its share goes on generating what it has begun until the last one has, since pausing one would
    often pause an engine that others use. However it ends, nothing is running afterwards, and all that was generated
    is in the buffer. Where the buffer's takes wait for stragglers, these are not paused but waited for.

    Parameters
    ----------
    lines : sequence of Line
        With nothing pending.
    shares : dict of str to int
        COMPLETED groups wanted, by task.
    controller : RolloutController, optional
        Asked to pause before the agent loops are.
    """
    try:
        try:
            await together(*[_produce(line, shares[line.task_name]) for line in lines])
        except Exception:
            await pause_lines(lines, controller)  # what is running is put before the error goes on
            raise
        await pause_lines(lines, controller)
    except BaseException:
        # Cancelled, or the buffer broke. Either way no task may stay behind, and no group be lost.
        await to_the_end(cancel_lines(lines))
        raise


async def pause_lines(lines: Sequence[Line], controller: RolloutController | None = None) -> None:
    """Stop the engines, then have every line collect what it has begun.

    Raises
    ------
    Exception
        What the controller raised, once everything is collected.
    """
    failure: Exception | None = None
    if controller is not None:
        try:
            await within(max(line.pause_limit_s for line in lines), "pause_generation", controller.pause_generation)
        except Exception as error:
            failure = error
    await together(*[line.pause() for line in lines], keep_going=True)
    if failure is not None:
        raise failure


async def cancel_lines(lines: Sequence[Line]) -> None:
    """Cancel what every line has begun and collect it."""
    await together(*[line.cancel() for line in lines], keep_going=True)


async def within(seconds: float, name: str, request: Callable[[], Awaitable[None] | None]) -> None:
    """Make a request that may be plain or async, and wait for its answer, but not for ever.

    Raises
    ------
    TimeoutError
        If it has not answered after `seconds`.
    """
    task = asyncio.ensure_future(_answer(request))
    try:
        await asyncio.wait((task,), timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=seconds)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"{name} has not answered within {seconds} s")
    task.result()


async def _produce(line: Line, share: int) -> None:
    await line.produce(share, share)
    await line.tend_stragglers()


async def _answer(request: Callable[[], Awaitable[None] | None]) -> None:
    await resolved(request())
