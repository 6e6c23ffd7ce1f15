"""Back-pressure: a bound on the groups that wait to be trained, and who waits for room."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pystale.arguments import Sizes
from pystale.staleness import checked_int

__all__ = ["Room", "checked_bound"]

Bound = int | Mapping[str, int] | None


class Room:
    """Lets puts of COMPLETED groups in, in the order they came, as long as their task has room.

    The bound is of each task by itself, and only of COMPLETED groups. So it cannot bring a trainer to a stop: one that
    waits lacks groups of some task, and where that task has fewer than a batch holds, and the bound is not below that,
    the task has room. One that waits for stragglers would keep them waiting for room: these need none.

    Parameters
    ----------
    count : callable
        COMPLETED groups of a task.
    bound : int, mapping of str to int, or None
        Of every task, or by task.
    awaited : callable
        Whether a take waits for the group of a task and id.
    """

    def __init__(self, count: Callable[[str], int], bound: Bound, awaited: Callable[[str, Any], bool]) -> None:
        self._count = count
        self._awaited = awaited
        self._bound = bound
        self._entering: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], Any]]] = {}  # each with the id of its group

    @property
    def waiting(self) -> int:
        """Puts that wait."""
        return sum(map(len, self._waiting.values()))

    def bound(self, task_name: str) -> int | None:
        """Bound of a task."""
        return self._bound.get(task_name) if isinstance(self._bound, Mapping) else self._bound

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError for a batch that the bound keeps from ever being there."""
        for task_name, n in sizes.items():
            bound = self.bound(task_name)
            if bound is not None and n > bound:
                raise ValueError(
                    f"a batch of {n} groups of task {task_name!r} is never there: max_groups is {bound}; it has to be "
                    "at least the batch size"
                )

    @contextlib.asynccontextmanager
    async def of(self, task_name: str, group_id: Any) -> AsyncIterator[None]:
        """Room for a group, to be stored within."""
        bound = self.bound(task_name)
        if bound is None:
            yield
            return
        queue = self._waiting.setdefault(task_name, deque())
        if (queue or self._taken(task_name) >= bound) and not self._awaited(task_name, group_id):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append((place, group_id))
            try:
                await place
            except BaseException:
                if place.done() and not place.cancelled():
                    self._entering[task_name] -= 1
                elif (place, group_id) in queue:
                    queue.remove((place, group_id))
                self.let_in()
                raise
        else:
            self._entering[task_name] += 1
        try:
            yield
        finally:
            self._entering[task_name] -= 1

    def let_in(self, *, stragglers: bool = False) -> None:
        """Let those in who have room now; `stragglers`: and those that a take waits for."""
        for task_name, queue in self._waiting.items():
            bound = self.bound(task_name)
            while queue and bound is not None and self._taken(task_name) < bound:
                self._let_in(task_name, queue.popleft()[0])
            if stragglers:
                for waiting in [waiting for waiting in queue if self._awaited(task_name, waiting[1])]:
                    queue.remove(waiting)
                    self._let_in(task_name, waiting[0])

    def _let_in(self, task_name: str, place: "asyncio.Future[None]") -> None:
        if not place.done():
            self._entering[task_name] += 1
            place.set_result(None)

    def _taken(self, task_name: str) -> int:
        return self._count(task_name) + self._entering[task_name]


def checked_bound(max_groups: Bound, batch_groups: Bound) -> Bound:
    """`max_groups`, if batches of `batch_groups` fit into it.

    Raises
    ------
    TypeError, ValueError
        For a bound that is not positive, or below the groups of a batch.
    """
    if max_groups is None:
        return None
    bounds = dict(max_groups) if isinstance(max_groups, Mapping) else {"": max_groups}
    for task_name, bound in bounds.items():
        which = f"max_groups of task {task_name!r}" if task_name else "max_groups"
        checked_int(which, bound, at_least=1, remedy="None sets no bound")
        size = batch_groups.get(task_name) if isinstance(batch_groups, Mapping) else batch_groups
        if isinstance(batch_groups, Mapping) and not task_name:
            size = max(batch_groups.values(), default=None)
        if size is not None and bound < checked_int("batch_groups", size, at_least=1):
            raise ValueError(
                f"{which} is {bound}, and a batch holds {size} groups: producers would wait for room, and the trainer "
                f"for groups, for ever; at least {size} is required"
            )
    return max_groups
