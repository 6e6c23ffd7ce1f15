"""What clients of the actor say is in flight."""

import time
from collections.abc import Iterable, Sequence
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


class Reserved:
    """Reservations of a buffer by client.

    In memory only. A client says what is new and what is over, and now and then all that it has: so an actor that was
    started anew knows it again, and a message that was lost or overtaken does no lasting harm.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        # By client and number; None where the buffer refused it, or it was over before it was heard of.
        self._held: dict[str, dict[int, Reservation | None]] = {}
        self._latest: dict[str, int] = {}  # number of the last message

    @property
    def clients(self) -> list[str]:
        """Clients that have something in flight."""
        return [client for client, held in self._held.items() if any(held.values())]

    def hear(self, client: str, message: int, new: Sequence[Told], over: Iterable[int], whole: bool) -> None:
        """A client says what is new and what is over; `whole`: and that there is nothing else.

        `message` numbers what a client says. The whole is of one moment, and ignored when a later message is known.
        """
        held = self._held.setdefault(client, {})
        latest = self._latest.get(client, -1)
        self._latest[client] = max(latest, message)
        if whole:
            if message < latest:
                return
            over = held.keys() - {told.number for told in new}
        for number in list(over):
            if number not in held:
                held[number] = None
            elif (reservation := held.pop(number)) is not None:
                reservation.release()
        for told in new:
            if told.number not in held:
                held[told.number] = self._reserve(told)

    def _reserve(self, told: Told) -> Reservation | None:
        try:
            return self._buffer.reserve(told.group_id, told.task_name, model_step=told.model_step)
        except ValueError:  # the group is here already, or another client has it
            return None

    def forget(self, client: str) -> None:
        """A client is gone: nothing of it will land."""
        self._latest.pop(client, None)
        for reservation in filter(None, self._held.pop(client, {}).values()):
            reservation.release()

    def told(self, reservations: Iterable[Reservation]) -> list[tuple[str, Told, float]]:
        """Of each of these reservations: its client, what that told, and for how many seconds it has been known."""
        owners = {r: (client, number) for client, held in self._held.items() for number, r in held.items() if r}
        now, found = time.monotonic(), []
        for r in reservations:
            client, number = owners[r]
            found.append((client, Told(number, r.task_name, r.group_id, r.model_step), now - r.since))
        return found
