"""What clients of the actor say is in flight."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pystale.buffer import ReplayBuffer
from pystale.reservations import Reservation

__all__ = ["Reserved", "Told"]


class Told(NamedTuple):
    """A reservation as a client tells it."""

    number: int  # of the client; every one has its own
    task_name: str
    group_id: Any
    model_step: int


@dataclass(slots=True)
class _Known:
    """The last that was heard of a number."""

    message: int
    over: bool
    reservation: Reservation | None = None  # None where it is over, or the buffer has refused it


class Reserved:
    """Reservations of a buffer by client.

    In memory only. A client numbers its messages: they say what is new and what is over, and now and then all that it
    has. So an actor that was started anew knows it again, and a message that was lost or overtaken by others does no
    lasting harm.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._known: dict[str, dict[int, _Known]] = {}
        self._whole: dict[str, int] = {}  # by client: the last message that said all

    @property
    def clients(self) -> list[str]:
        """Clients that have something in flight."""
        return [client for client, known in self._known.items() if any(k.reservation for k in known.values())]

    def hear(self, client: str, message: int, new: Sequence[Told], over: Iterable[int], whole: bool) -> None:
        """A client says what is new and what is over; `whole`: that `new` was all it had at that moment."""
        if message < self._whole.get(client, -1):
            return
        known = self._known.setdefault(client, {})
        for number in over:
            self._hear_of(known, number, message, None)
        for told in new:
            self._hear_of(known, told.number, message, told)
        if whole:
            self._whole[client] = message
            for number in [n for n, k in known.items() if k.message < message]:
                _release(known.pop(number))

    def _hear_of(self, known: dict[int, _Known], number: int, message: int, told: Told | None) -> None:
        before = known.get(number)
        if before is not None and before.message > message:
            return
        if told is None:
            if before is not None:
                _release(before)
            known[number] = _Known(message, True)
        elif before is not None and (before.over or before.reservation is not None):
            before.message = message
        else:
            known[number] = _Known(message, False, self._reserve(told))

    def _reserve(self, told: Told) -> Reservation | None:
        try:
            return self._buffer.reserve(told.group_id, told.task_name, model_step=told.model_step)
        except ValueError:  # the group is here already, or another client has it
            return None

    def forget(self, client: str) -> None:
        """A client is gone: nothing of it will land."""
        self._whole.pop(client, None)
        for known in self._known.pop(client, {}).values():
            _release(known)

    def told(self, reservations: Iterable[Reservation]) -> list[tuple[str, Told, float]]:
        """Of each of these reservations: its client, what that told, and for how many seconds it has been known."""
        owners = {k.reservation: (client, n) for client, known in self._known.items() for n, k in known.items()}
        now, found = time.monotonic(), []
        for r in reservations:
            client, number = owners[r]
            found.append((client, Told(number, r.task_name, r.group_id, r.model_step), now - r.since))
        return found


def _release(known: _Known) -> None:
    if known.reservation is not None:
        known.reservation.release()
