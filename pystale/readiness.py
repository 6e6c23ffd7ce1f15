"""Who waits for groups, and who of them can go on."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from pystale.waiting import Waiting

if TYPE_CHECKING:
    from pystale.operations import Operations

__all__ = ["Waiter", "Waiters", "wait_ready"]


T = TypeVar("T")


class Waiter(Generic[T]):
    """One wait to take `wanted`; `wake` may be called from any thread."""

    __slots__ = ("wake", "wanted")

    def __init__(self, wanted: T, wake: Callable[[], None]) -> None:
        self.wanted = wanted
        self.wake = wake


class Waiters(Generic[T]):
    """Set of waiters. Not synchronised; the buffer's mutex guards it."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[Waiter[T]] = set()

    def add(self, wanted: T, wake: Callable[[], None]) -> Waiter[T]:
        waiter = Waiter(wanted, wake)
        self._waiting.add(waiter)
        return waiter

    def discard(self, waiter: Waiter[T]) -> None:
        self._waiting.discard(waiter)

    def pop_ready(self, held_up: Callable[[T], bool]) -> list[Waiter[T]]:
        """Remove and return those that are not held up any more; wake them once the mutex is free."""
        if not self._waiting:
            return []
        ready = [waiter for waiter in self._waiting if not held_up(waiter.wanted)]
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
