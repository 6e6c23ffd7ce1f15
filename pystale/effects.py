"""What an operation of the buffer leaves to do once it has happened, and its mutex is free."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from pystale.disposal import Cleared
from pystale.journal import Journal
from pystale.waiting import Waiting

__all__ = ["Effects", "OnRelease", "flush"]

logger = logging.getLogger("pystale")

OnRelease = Callable[[list[tuple[Any, dict[str, Any]]]], Awaitable[None] | None]
# A callback that raises CancelledError has failed: nobody cancelled the caller. KeyboardInterrupt and SystemExit go on.
_FAILURES = (Exception, asyncio.CancelledError)


class Effects:
    """Wait for the journal entry of an operation, then release what it cleared.

    Attributes
    ----------
    cleared : Cleared
        What the operation clears goes here.
    entry : int or None
        Number of the journal entry to wait for.
    straggling : bool
        Whether the operation has done nothing else, since it has to wait for work in flight first.
    """

    __slots__ = ("_journal", "_on_release", "cleared", "entry", "straggling")

    def __init__(self, journal: Journal | None, on_release: OnRelease | None) -> None:
        self._journal = journal
        self._on_release = on_release
        self.cleared = Cleared(wanted=on_release is not None)
        self.entry: int | None = None
        self.straggling = False

    @property
    def pending(self) -> bool:
        """Whether there is something to wait for."""
        return self.entry is not None or bool(self.cleared.states)

    async def finish(self, waiting: Waiting) -> None:
        """Do it; what was cleared is released also when the caller is cancelled meanwhile."""
        self.cleared.free()
        if not self.cleared.states:
            await self._written(waiting)
        elif self.entry is None:
            await self._release(waiting)
        else:
            await waiting.completed(self._release_recorded(waiting))

    async def _written(self, waiting: Waiting) -> None:
        if self._journal is not None and self.entry is not None:
            await waiting.written(self._journal, self.entry)

    async def _release_recorded(self, waiting: Waiting) -> None:
        try:
            await self._written(waiting)
        finally:
            await self._release(waiting)

    async def _release(self, waiting: Waiting) -> None:
        if self._on_release is None:
            return
        try:
            pending = self._on_release(self.cleared.states)
        except _FAILURES:
            logger.exception("on_release failed on %d states", len(self.cleared.states))
            return
        if inspect.isawaitable(pending):
            await waiting.resolved(self._logged(pending))

    async def _logged(self, pending: Awaitable[None]) -> None:
        try:
            await pending
        except _FAILURES:
            logger.exception("on_release failed on %d states", len(self.cleared.states))


async def flush(journal: Journal | None, waiting: Waiting) -> None:
    """Wait for all that is in the journal so far."""
    if journal is not None:
        await waiting.written(journal, journal.last)
