"""What a buffer knows of the work in flight, and who waits for it to land."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pystale.arguments import checked_group_id, checked_task_name
from pystale.readiness import Waiter, Waiters
from pystale.reservations import Reservation, Reservations, StragglersOverdue, described
from pystale.staleness import checked_int
from pystale.state import Status
from pystale.waiting import Waiting

if TYPE_CHECKING:
    from pystale.operations import Operations

__all__ = ["InFlight", "Wanted", "wait_for_stragglers"]


class Wanted(NamedTuple):
    """A batch to be taken for a step."""

    sizes: Mapping[str, int]  # by task
    train_step: int


class InFlight:
    """Reservations of a buffer, guarded by its mutex.

    A take of n groups waits for work in flight where it would leave more than later takes of n groups can train in
    time. What is as old as version m, or older, may be trained at step D = m + stale_threshold at the latest: once the
    take for T is over, by those for T + 1 to D. So the take for T waits where more than (D - T) * n groups of these are
    in flight, unless it is full of stored ones of these itself. While no more is begun than can be trained in time,
    that is both enough for nothing to be dropped for its oldest token, and no longer than needed, for batches that take
    the stalest first.

    For D <= T it waits in any case: for all that is too old for step T + 1, which is verl's rule.

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
        self._waiters: Waiters[Wanted] = Waiters()

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
            ready = self.ready() if self.reserved.discard(reservation) else []
        for waiter in ready:
            waiter.wake()

    def land(self, names: Iterable[tuple[str, Any]]) -> None:
        """Groups have come to the buffer. Called under the mutex."""
        for name in names:
            self.reserved.land(*name)

    def ready(self) -> list[Waiter[Wanted]]:
        """Those who need not wait any more, to be woken. Called under the mutex."""
        return self._waiters.pop_ready(self.straggling)

    def straggling(self, wanted: Wanted) -> bool:
        """Whether a take waits. Called under the mutex."""
        return any(self._awaited(name, n, wanted.train_step) is not None for name, n in wanted.sizes.items())

    def stragglers(self, wanted: Wanted) -> list[Reservation]:
        """What a take waits for, in the order it was reserved. Called under the mutex."""
        found: list[Reservation] = []
        for name, n in wanted.sizes.items():
            newest = self._awaited(name, n, wanted.train_step)
            if newest is not None:
                found += self.reserved.until(name, newest)
        return found

    def _awaited(self, task_name: str, n: int, train_step: int) -> int | None:
        """Newest version in flight that a take of `n` groups of a task waits for, None where it does not."""
        if not n:
            return None
        store = self._operations.store
        stale_threshold = store.settings(task_name)[0].stale_threshold
        oldest = train_step - stale_threshold  # that this take may train
        newest, last_chance, others = None, 0, 0
        for version, count in self.reserved.by_version(task_name):
            if version <= oldest:
                newest = version
                last_chance += count if version == oldest else 0
                continue
            others += count
            if others > (version - oldest) * n:  # takes after this one that may train it, times n
                stored = store.count_keys(task_name, Status.COMPLETED, oldest, version)
                if last_chance + stored < n:
                    newest = version
        return newest

    def enlist(self, wanted: Wanted, wake: Callable[[], None]) -> Waiter[Wanted] | None:
        """A waiter that `wake` is called for once a take need not wait any more; None when it need not now."""
        with self._operations.lock:
            return self._waiters.add(wanted, wake) if self.straggling(wanted) else None

    def straggles(self, wanted: Wanted) -> bool:
        """As :meth:`straggling`, not under the mutex."""
        with self._operations.lock:
            return self.straggling(wanted)

    def dismiss(self, waiter: Waiter[Wanted], seconds: float) -> None:
        """A wait is over; it took so many seconds."""
        with self._operations.lock:
            self._waiters.discard(waiter)
            self.waited_s += seconds

    def overdue(self, wanted: Wanted, limit: float) -> StragglersOverdue:
        """What to raise when stragglers have not landed in time, with the whole state."""
        with self._operations.lock:
            store, found = self._operations.store, self.stragglers(wanted)
            stored = {name: {s.name: n for s in Status if (n := store.count(name, s))} for name in wanted.sizes}
            in_flight = self.reserved.counts()
        return StragglersOverdue(
            f"train_step {wanted.train_step}: work that later batches could not train in time has not landed within "
            f"{limit} s, and nothing was taken. {described(found, time.monotonic())}. Of all tasks in flight: "
            f"{in_flight}, stored: {stored}. A producer that is gone has to release what it reserved; "
            f"straggler_timeout_s allows more time"
        )


async def wait_for_stragglers(
    in_flight: InFlight, wanted: Wanted, limit: float, waited: float, waiting: Waiting
) -> float:
    """Until a take has no stragglers; returns the seconds it took.

    Parameters
    ----------
    wanted : Wanted
        What is to be taken.
    limit, waited : float
        Seconds that the take may wait in all, and those it has waited before.

    Raises
    ------
    StragglersOverdue
        When the time is up.
    """
    alarm = waiting.alarm()
    waiter = in_flight.enlist(wanted, alarm.ring)
    if waiter is None:
        return 0.0
    began, seconds = waiting.clock(), 0.0
    try:
        landed = await alarm.wait(max(limit - waited, 0.0))
    finally:
        seconds = waiting.clock() - began
        in_flight.dismiss(waiter, seconds)
    if not landed and in_flight.straggles(wanted):
        raise in_flight.overdue(wanted, limit)
    return seconds
