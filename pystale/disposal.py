"""What an operation cleared: handed to whoever wants it, or freed without holding up the caller."""

import threading
from typing import Any

__all__ = ["Cleared"]

# A list of 4,096 distinct ints takes some 80 us to free. Past this many entries it is worth a thread.
ENTRIES_FREED_AT_ONCE = 50_000


class Cleared:
    """Old values of the fields that one operation reset or discarded.

    Parameters
    ----------
    wanted : bool
        Keep them by state, for somebody to look through. Otherwise they only wait to be freed: tokens in lists are an
        object each, and freeing those of a hundred expired responses under the mutex would stop the event loop.
    """

    __slots__ = ("_values", "states", "wanted")

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.states: list[tuple[Any, dict[str, Any]]] = []
        self._values: list[Any] = []

    def add(self, state: Any, old: dict[str, Any]) -> None:
        if not self.wanted:
            self._values.extend(old.values())
        elif old:
            self.states.append((state, old))

    def free(self) -> None:
        """Let go of what nobody wanted; on a thread of its own if that takes long."""
        values, self._values = self._values, []
        if sum(len(value) for value in values if type(value) in (list, tuple)) > ENTRIES_FREED_AT_ONCE:
            threading.Thread(target=_free, args=(values,), name="pystale-free", daemon=True).start()


def _free(values: list[Any]) -> None:
    while values:
        values.pop()  # one by one, so that other threads get their turn
