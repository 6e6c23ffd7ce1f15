"""The two ways to wait for an answer of Ray: in an event loop, and on the thread that calls."""

import asyncio
from typing import Any, Protocol

__all__ = ["IN_EVENT_LOOP", "ON_THREAD", "Answers"]


class Answers(Protocol):
    """A way to wait."""

    async def one(self, ref: Any) -> Any:
        """Result of a call. What the actor raised is raised as it was."""

    async def all(self, refs: list[Any]) -> list[Any]:
        """Values of objects."""


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
