"""The two ways to wait for an answer of Ray: in an event loop, and on the thread that calls."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

__all__ = ["IN_EVENT_LOOP", "ON_THREAD", "Answers", "Together"]


class Answers(Protocol):
    """A way to wait."""

    async def one(self, ref: Any) -> Any:
        """Result of a call. What the actor raised is raised as it was."""

    async def all(self, refs: list[Any]) -> list[Any]:
        """Values of objects."""


class Together:
    """Calls made at the same time share a message: one of Ray costs the actor more than what it is about.

    A call that nobody is ahead of goes out at once; what comes while two messages are under way goes with the next.

    Parameters
    ----------
    send : callable
        Sends items, and gives an answer to each: ``(failed, value)``, or None for one that takes longer.
    at_most : int
        Items of a message.
    """

    def __init__(self, send: Callable[[list[Any]], Awaitable[list[Any]]], at_most: int = 32) -> None:
        self._send = send
        self._at_most = at_most
        self._waiting: deque[tuple[Any, asyncio.Future[Any]]] = deque()
        self._sending: set[asyncio.Task[None]] = set()

    async def call(self, item: Any) -> Any:
        """Answer to an item; None where it takes longer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if len(self._sending) < 2:
            sending = asyncio.ensure_future(self._run())
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
        return await answer

    async def _run(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._at_most, len(self._waiting)))]
            try:
                answers = await self._send([item for item, _ in batch])
            except Exception as error:
                answers = [(True, error)] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():  # cancelled
                    continue
                if answer is not None and answer[0]:
                    future.set_exception(answer[1])
                else:
                    future.set_result(None if answer is None else answer[1])


class _InEventLoop:
    async def one(self, ref: Any) -> Any:
        import ray
        from ray.exceptions import RayTaskError

        try:
            return await ref
        except RayTaskError as error:
            raise _cause(error) from None
        except asyncio.CancelledError:
            ray.cancel(ref)  # a wait for groups, or for room, would go on for nobody
            raise

    async def all(self, refs: list[Any]) -> list[Any]:
        import ray

        values: list[Any] = await asyncio.to_thread(ray.get, refs)
        return values


class _OnThread:
    async def one(self, ref: Any) -> Any:
        import ray
        from ray.exceptions import RayTaskError

        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise _cause(error) from None

    async def all(self, refs: list[Any]) -> list[Any]:
        import ray

        values: list[Any] = ray.get(refs)
        return values


def _cause(error: Any) -> BaseException:
    cause: BaseException = error.cause if isinstance(error.cause, (TypeError, ValueError, OSError)) else error
    return cause


IN_EVENT_LOOP: Answers = _InEventLoop()
ON_THREAD: Answers = _OnThread()
