"""The two ways to wait: in an event loop, and on the thread that calls.

What an operation of the buffer waits for is written once, as a coroutine that is given one of these. On a thread
nothing in it suspends, so that :func:`finished` runs it to its end in one go.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pystale.journal import Journal

__all__ = ["IN_EVENT_LOOP", "ON_THREAD", "Alarm", "Waiting", "finished"]

T = TypeVar("T")


class Alarm(Protocol):
    """Wakes one waiter once."""

    def ring(self) -> None:
        """Wake it; may be called from any thread, and before it waits."""

    async def wait(self, timeout: float | None) -> bool:
        """Until it rings; False when that takes more than `timeout` seconds."""


class Waiting(Protocol):
    """A way to wait."""

    def alarm(self) -> Alarm:
        """A new alarm for whoever waits this way."""

    def clock(self) -> float:
        """Seconds of the clock that these waits go by."""

    async def written(self, journal: Journal, entry: int) -> None:
        """Until an entry of the journal is on disk."""

    async def completed(self, work: Coroutine[Any, Any, None]) -> None:
        """Until `work`, which waits this way, is done. It goes on to its end also where the caller is cancelled."""

    async def resolved(self, pending: Awaitable[None]) -> None:
        """Until `pending`, which belongs to somebody else, is done; also where the caller is cancelled."""

    async def computed(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        """Result of `work`, which blocks. A caller that is cancelled calls `cancel`, and waits for its end."""


class _LoopAlarm:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        # A closed loop has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout: float | None) -> bool:
        done, _ = await asyncio.wait([self._future], timeout=timeout)
        return bool(done)


class _InEventLoop:
    def alarm(self) -> Alarm:
        return _LoopAlarm()

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    async def written(self, journal: Journal, entry: int) -> None:
        await journal.durable(entry)

    async def completed(self, work: Coroutine[Any, Any, None]) -> None:
        # A task of its own, and shielded: a caller that is cancelled does not take it along.
        await asyncio.shield(asyncio.ensure_future(work))

    async def resolved(self, pending: Awaitable[None]) -> None:
        await asyncio.shield(asyncio.ensure_future(pending))

    async def computed(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        running = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            cancel()
            await asyncio.wait([running])
            raise


class _ThreadAlarm:
    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, timeout: float | None) -> bool:
        # A longer wait overflows the clock.
        return self._event.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))


class _OnThread:
    def alarm(self) -> Alarm:
        return _ThreadAlarm()

    def clock(self) -> float:
        return time.monotonic()

    async def written(self, journal: Journal, entry: int) -> None:
        journal.wait(entry)

    async def completed(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    async def resolved(self, pending: Awaitable[None]) -> None:
        async def resolve() -> None:
            await pending

        # In a loop of its own thread, since one may be running in this thread.
        with ThreadPoolExecutor(1, thread_name_prefix="pystale-release") as threads:
            threads.submit(asyncio.run, resolve()).result()

    async def computed(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        return work()


IN_EVENT_LOOP: Waiting = _InEventLoop()
ON_THREAD: Waiting = _OnThread()


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine that waits on its thread."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call tried to wait in an event loop")
