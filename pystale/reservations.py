"""Work in flight: groups that a producer has begun, and the version each is as old as."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

__all__ = ["Reservation", "Reservations", "StragglersOverdue", "described"]


class StragglersOverdue(TimeoutError):
    """Work in flight that a take waited for has not landed in time. The message says which; nothing was taken."""


class Reservation:
    """A group in flight; made by :meth:`~pystale.ReplayBuffer.reserve`. Leaving its ``with`` block releases it.

    Attributes
    ----------
    task_name : str
    group_id : int, str or None
    model_step : int
        Version it is as old as.
    since : float
        When it was reserved, in seconds of the monotonic clock.
    """

    __slots__ = ("_release", "group_id", "model_step", "since", "task_name")

    def __init__(
        self, task_name: str, group_id: Any, model_step: int, since: float, release: "Callable[[Reservation], None]"
    ) -> None:
        self.task_name = task_name
        self.group_id = group_id
        self.model_step = model_step
        self.since = since
        self._release = release

    def release(self) -> None:
        """The group is not in flight any more. Does nothing once it has been put, rejected, settled or released."""
        self._release(self)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Reservation({self.task_name!r}, {self.group_id!r}, model_step={self.model_step})"


class Reservations:
    """What is in flight. Not synchronised; the buffer's mutex guards it.

    Asking for the oldest costs the versions in flight, which are few, and not the groups.
    """

    __slots__ = ("_held", "_named", "_steps")

    def __init__(self) -> None:
        self._held: dict[int, Reservation] = {}  # by identity, in the order they were made
        self._named: dict[tuple[str, Any], Reservation] = {}
        self._steps: dict[str, Counter[int]] = {}  # by task: reservations of each version

    def add(self, reservation: Reservation) -> None:
        """Enter a reservation.

        Raises
        ------
        ValueError
            If its group is in flight already.
        """
        name = (reservation.task_name, reservation.group_id)
        if reservation.group_id is not None:
            if name in self._named:
                raise ValueError(
                    f"group {name[1]!r} of task {name[0]!r} is reserved already, with model_step "
                    f"{self._named[name].model_step}; put, reject or release it first"
                )
            self._named[name] = reservation
        self._held[id(reservation)] = reservation
        self._steps.setdefault(reservation.task_name, Counter())[reservation.model_step] += 1

    def discard(self, reservation: Reservation) -> bool:
        """Strike a reservation out; False when it is not here any more."""
        if self._held.pop(id(reservation), None) is None:
            return False
        self._named.pop((reservation.task_name, reservation.group_id), None)
        steps = self._steps[reservation.task_name]
        steps[reservation.model_step] -= 1
        if not steps[reservation.model_step]:
            del steps[reservation.model_step]
        return True

    def land(self, task_name: str, group_id: Any) -> Reservation | None:
        """A group has come to the buffer; strikes out its reservation, if there is one, and returns it."""
        reservation = self.find(task_name, group_id)
        if reservation is not None:
            self.discard(reservation)
        return reservation

    def find(self, task_name: str, group_id: Any) -> Reservation | None:
        """Reservation of the group of this task and id, if it is in flight."""
        return self._named.get((task_name, group_id))

    def by_version(self, task_name: str) -> list[tuple[int, int]]:
        """(version, groups in flight that are as old as it) of a task, the oldest version first."""
        return sorted(self._steps.get(task_name, {}).items())

    def until(self, task_name: str, model_step: int) -> list[Reservation]:
        """Groups of a task that are as old as this version, or older, in the order they were reserved."""
        return [r for r in self._held.values() if r.task_name == task_name and r.model_step <= model_step]

    def counts(self) -> dict[str, int]:
        """Groups in flight by task; tasks without any left out."""
        return {task_name: n for task_name, steps in self._steps.items() if (n := steps.total())}


def described(reservations: Sequence[Reservation], now: float) -> str:
    """Which they are, for a message: how many there are, and the first of them."""
    named = [
        f"group {r.group_id!r} of task {r.task_name!r} (model_step {r.model_step}, for {now - r.since:.0f} s)"
        for r in reservations[:5]
    ]
    return f"{len(reservations)} in flight: {', '.join(named)}{', ...' if len(reservations) > len(named) else ''}"
