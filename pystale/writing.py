"""Writing to states that may refuse: all of it, or nothing."""

from typing import Any

__all__ = ["Writes"]

_ABSENT = object()


class Writes:
    """Fields written so far, which can be given back what they held."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written: list[tuple[Any, str, Any]] = []

    def write(self, state: Any, name: str, value: Any) -> None:
        """Write a field; raises what the state raises."""
        old = getattr(state, name, _ABSENT)
        setattr(state, name, value)
        self._written.append((state, name, old))

    def undo(self) -> None:
        """Write back what the fields held, the last written first."""
        while self._written:
            state, name, old = self._written.pop()
            if old is _ABSENT:
                delattr(state, name)
            else:
                setattr(state, name, old)
