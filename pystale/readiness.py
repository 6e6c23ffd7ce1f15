"""Who waits for groups, and who of them can go on."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pystale.waiting import Waiting

if TYPE_CHECKING:
    from pystale.operations import Operations

__all__ = ["Waiter", "Waiters", "wait_ready"]


class Waiter:
    """One wait for ``sizes[task]`` groups of every task; `wake` may be called from any thread."""

    __slots__ = ("sizes", "wake")

    def __init__(self, sizes: Mapping[str, int], wake: Callable[[], None]) -> None:
        self.sizes = sizes
        self.wake = wake


class Waiters:
    """Set of waiters. Not synchronised; the buffer's mutex guards it."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[Waiter] = set()

    def add(self, sizes: Mapping[str, int], wake: Callable[[], None]) -> Waiter:
        waiter = Waiter(sizes, wake)
        self._waiting.add(waiter)
        return waiter

    def discard(self, waiter: Waiter) -> None:
        self._waiting.discard(waiter)

    def pop_ready(self, short: Callable[[Mapping[str, int]], bool]) -> list[Waiter]:
        """Remove and return those that `short` no longer says lack groups; wake them once the mutex is free."""
        if not self._waiting:
            return []
        ready = [waiter for waiter in self._waiting if not short(waiter.sizes)]
        self._waiting.difference_update(ready)
        return ready


async def wait_ready(
    operations: "Operations", sizes: Mapping[str, int], timeout: float | None, waiting: Waiting
) -> bool:
    """Until every task has ``sizes[task]`` COMPLETED groups; False after `timeout` seconds."""
    alarm = waiting.alarm()
    waiter = operations.enlist(sizes, timeout, alarm.ring)
    if waiter is None:
        return True
    try:
        return await alarm.wait(timeout)
    finally:
        operations.dismiss(waiter)
