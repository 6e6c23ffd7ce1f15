"""Work that runs in tasks of its own until somebody claims it back."""

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

__all__ = ["PendingTasks", "all_ended", "ended", "resolved", "to_the_end", "together"]

T = TypeVar("T")
Work = TypeVar("Work")


async def resolved(value: Awaitable[T] | T) -> T:
    """`value`, awaited where it is awaitable: what a plain or an async function returned."""
    if inspect.isawaitable(value):
        return await value
    return value


async def ended(task: "asyncio.Future[Any]") -> asyncio.CancelledError | None:
    """Wait until `task` is done, whatever happens to the caller.

    Returns
    -------
    CancelledError or None
        The cancellation that reached the caller meanwhile, and that it now owes an answer.
    """
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` without letting a cancellation into it; the cancellation is raised once `work` is done.

    For steps that must not be left half done, such as putting a finished group into a buffer.
    """
    task = asyncio.ensure_future(work)
    cancelled = await ended(task)
    if cancelled is None:
        return task.result()
    raise cancelled from (None if task.cancelled() else task.exception())


async def all_ended(tasks: "Sequence[asyncio.Task[Any]]", *, keep_going: bool = False) -> None:
    """Wait until all tasks have ended, whatever happens: the first failure, or being cancelled, cancels the others.

    Parameters
    ----------
    tasks : sequence of tasks
        A task that somebody else cancels is no failure.
    keep_going : bool, default False
        Whether a failure leaves the others to their end, instead of cancelling them.

    Raises
    ------
    BaseException
        The caller's cancellation, else the first failure in the order of `tasks`.
    """
    cancelled: BaseException | None = None
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.ALL_COMPLETED if keep_going else asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError as error:
        cancelled = error
    for task in tasks:
        task.cancel()
    for task in tasks:
        cancelled = await ended(task) or cancelled
    failures = [task.exception() for task in tasks if not task.cancelled()]
    failure = next((error for error in failures if error is not None), None)
    if cancelled is not None:
        raise cancelled from failure
    if failure is not None:
        raise failure


async def together(*work: Coroutine[Any, Any, None], keep_going: bool = False) -> None:
    """Await several pieces of work at once, as :func:`all_ended` does; one alone in the caller's own task."""
    if len(work) == 1:
        await work[0]
    else:
        await all_ended([asyncio.ensure_future(piece) for piece in work], keep_going=keep_going)


class PendingTasks(Generic[Work]):
    """Pieces of work that run, and those that are done and wait to be claimed.

    Every piece scheduled is claimed exactly once, by whoever asks first after its task has ended: by itself, with an
    exception, or cancelled. No method but :meth:`wait` awaits, so that nothing can come between looking and taking.
    Not thread-safe: it belongs to one event loop.

    Examples
    --------
    >>> async def main():
    ...     pending = PendingTasks()
    ...     pending.schedule("a", asyncio.sleep(0))
    ...     await pending.wait()
    ...     return pending.claim(), pending.claim()
    >>> asyncio.run(main())
    ('a', None)
    """

    __slots__ = ("_done", "_running", "_waiters")

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], Work] = {}
        self._done: deque[Work] = deque()
        self._waiters: dict[asyncio.Future[None], None] = {}

    def __len__(self) -> int:
        """Pieces scheduled and not claimed."""
        return len(self._running) + len(self._done)

    @property
    def claimable(self) -> int:
        """Pieces that are done and not claimed."""
        return len(self._done)

    def running(self) -> list[Work]:
        """Pieces whose task has not ended."""
        return list(self._running.values())

    def schedule(self, work: Work, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run `coroutine` in a task; `work` can be claimed once the task is done.

        The coroutine writes what came of it into `work`. What it raises is dropped.
        """
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running[task] = work
        # A callback, and not asyncio.wait over all tasks: that costs every task pending at every wait, and forgets
        # the order in which they ended.
        task.add_done_callback(self._end)

    def claim(self) -> Work | None:
        """The piece that has been done for longest, None when none is."""
        return self._done.popleft() if self._done else None

    async def wait(self, timeout: float | None = None) -> None:
        """Until a piece can be claimed, nothing is pending, :meth:`wake` is called, or `timeout` seconds have passed.

        Cancelling a wait takes nothing along.
        """
        if self._done or not self._running:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            # Not asyncio.wait_for, which before Python 3.12 can swallow a cancellation.
            await asyncio.wait((waiter,), timeout=timeout)
        finally:
            self._waiters.pop(waiter, None)

    def cancel(self) -> None:
        """Ask every task that runs to end. Its work is still to be claimed."""
        for task in list(self._running):
            task.cancel()

    def abandon(self) -> list[Work]:
        """Give up on the tasks that run: their work can be claimed now, and they end unheard.

        Returns
        -------
        list
            That work, in the order it was scheduled.
        """
        works = list(self._running.values())
        self._running.clear()
        self._done.extend(works)
        self.wake()
        return works

    def _end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            task.exception()  # looked at, or asyncio reports an exception nobody retrieved
        if task in self._running:
            self._done.append(self._running.pop(task))
            self.wake()

    def wake(self) -> None:
        """End every wait that is under way, though nothing may have ended."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
