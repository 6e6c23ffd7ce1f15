"""What a buffer knows of the work in flight, and who waits for it to land."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pystale.arguments import checked_group_id, checked_task_name
from pystale.readiness import Waiter, Waiters
from pystale.reservations import Reservation, Reservations, StragglersOverdue, described
from pystale.staleness import checked_int
from pystale.state import Status
from pystale.waiting import Waiting

if TYPE_CHECKING:
    from pystale.operations import Operations

__all__ = ["InFlight", "wait_for_stragglers"]


class InFlight:
    """Reservations of a buffer, guarded by its mutex.

    A straggler of a take for step T is work that would be too old for step T + 1.

    Attributes
    ----------
    reserved : Reservations
    waited_s : float
        Seconds that takes have waited.
    """

    def __init__(self, operations: "Operations") -> None:
        self.reserved = Reservations()
        self.waited_s = 0.0
        self._operations = operations
        self._waiters = Waiters()  # their sizes are the steps that tasks are taken for

    def reserve(self, group_id: Any, task_name: str, model_step: int) -> Reservation:
        task_name, group_id = checked_task_name(task_name), checked_group_id(group_id)
        model_step = checked_int("model_step", model_step, at_least=0)
        self._operations.store.settings(task_name)
        reservation = Reservation(task_name, group_id, model_step, time.monotonic(), self._release)
        with self._operations.lock:
            if (task_name, group_id) in self._operations.store.numbers:
                raise ValueError(
                    f"group {group_id!r} of task {task_name!r} is stored; what is in flight was taken out first"
                )
            self.reserved.add(reservation)
        return reservation

    def _release(self, reservation: Reservation) -> None:
        with self._operations.lock:
            ready = self._unblocked() if self.reserved.discard(reservation) else []
        for waiter in ready:
            waiter.wake()

    def land(self, names: Iterable[tuple[str, Any]]) -> list[Waiter]:
        """Groups have come to the buffer: those who can go on now, to be woken. Called under the mutex."""
        landed = [self.reserved.land(*name) for name in names]
        return self._unblocked() if any(landed) else []

    def _unblocked(self) -> list[Waiter]:
        return self._waiters.pop_ready(self.straggling)

    def straggling(self, steps: Mapping[str, int]) -> bool:
        """Whether a take of each task for ``steps[task]`` has stragglers. Called under the mutex."""
        return any(self.reserved.any_until(name, self._last_version(name, step)) for name, step in steps.items())

    def _last_version(self, task_name: str, train_step: int) -> int:
        """Newest version that is too old for the step after this one."""
        return train_step - self._operations.store.settings(task_name)[0].stale_threshold

    def enlist(self, steps: Mapping[str, int], wake: Callable[[], None]) -> Waiter | None:
        """A waiter that `wake` is called for once no straggler is left; None when there is none now."""
        with self._operations.lock:
            return self._waiters.add(steps, wake) if self.straggling(steps) else None

    def dismiss(self, waiter: Waiter, seconds: float) -> None:
        """A wait is over; it took so many seconds."""
        with self._operations.lock:
            self._waiters.discard(waiter)
            self.waited_s += seconds

    def overdue(self, steps: Mapping[str, int], limit: float) -> StragglersOverdue:
        """What to raise when stragglers have not landed in time, with the whole state."""
        with self._operations.lock:
            store, known = self._operations.store, self.reserved
            found = [r for name, step in steps.items() for r in known.until(name, self._last_version(name, step))]
            stored = {name: {s.name: n for s in Status if (n := store.count(name, s))} for name in steps}
            in_flight = known.counts()
        step = max(steps.values())
        return StragglersOverdue(
            f"train_step {step}: work that would be too old for step {step + 1} has not landed within {limit} s, and "
            f"nothing was taken. {described(found, time.monotonic())}. Of all tasks in flight: {in_flight}, stored: "
            f"{stored}. A producer that is gone has to release what it reserved; straggler_timeout_s allows more time"
        )


async def wait_for_stragglers(
    in_flight: InFlight, steps: Mapping[str, int], limit: float, waited: float, waiting: Waiting
) -> float:
    """Until a take has no stragglers; returns the seconds it took.

    Parameters
    ----------
    steps : mapping of str to int
        Step that each task is taken for.
    limit, waited : float
        Seconds that the take may wait in all, and those it has waited before.

    Raises
    ------
    StragglersOverdue
        When the time is up.
    """
    alarm = waiting.alarm()
    waiter = in_flight.enlist(steps, alarm.ring)
    if waiter is None:
        return 0.0
    began, seconds = waiting.clock(), 0.0
    try:
        landed = await alarm.wait(max(limit - waited, 0.0))
    finally:
        seconds = waiting.clock() - began
        in_flight.dismiss(waiter, seconds)
    if not landed:
        raise in_flight.overdue(steps, limit)
    return seconds
