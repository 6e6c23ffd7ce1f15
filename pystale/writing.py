"""Writing to states that may refuse: all of it, or nothing."""

from collections.abc import Sequence
from typing import Any

from pystale._objects import Member
from pystale.group import Arriving, Group
from pystale.state import Status, as_status

__all__ = ["Writes", "write_arrival", "write_staleness"]

_ABSENT = object()


class Writes:
    """Fields written so far, which can be given back what they held."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        # State, name, old value, and so on: one list, where a tuple for each would be work for the garbage collector.
        self._written: list[Any] = []

    def write(self, state: Any, name: str, value: Any) -> None:
        """Write a field; raises what the state raises."""
        old = getattr(state, name, _ABSENT)
        setattr(state, name, value)
        self._written += (state, name, old)

    def write_each(self, states: Sequence[Any], name: str, values: Sequence[Any]) -> None:
        """Write one field of many states, but for those whose value is None."""
        written = self._written
        for state, value in zip(states, values, strict=True):
            if value is not None:
                old = getattr(state, name, _ABSENT)
                setattr(state, name, value)
                written += (state, name, old)

    def undo(self) -> None:
        """Write back what the fields held, the last written first."""
        written = self._written
        while written:
            old, name, state = written.pop(), written.pop(), written.pop()
            if old is _ABSENT:
                delattr(state, name)
            else:
                setattr(state, name, old)


def write_arrival(arriving: Arriving, group_id: Any, rerolls: int, train_step: int | None) -> None:
    """Write to the states of a group what storing it says of them; all of it, or nothing when a state refuses.

    Raises
    ------
    TypeError
        Naming the member and the field that cannot be written.
    """
    writes = Writes()
    for position, (state, steps, member, status) in enumerate(
        zip(arriving.states, arriving.steps, arriving.members, arriving.statuses, strict=True)
    ):
        # Status and staleness are tried out, too: the life cycle will write them.
        new: dict[str, Any] = {"status": state.status, "seq_staleness": getattr(state, "seq_staleness", 0)}
        if steps is not state.response_model_steps:
            new["response_model_steps"] = steps
        if arriving.group_id is None and hasattr(state, "group_id"):
            new["group_id"] = group_id
        if getattr(state, "task_name", arriving.task_name) is None:
            new["task_name"] = arriving.task_name
        if getattr(state, "rerolls", rerolls) != rerolls:
            new["rerolls"] = rerolls
        if train_step is not None and _shows_staleness(member, status):
            new["seq_staleness"] = member.seq_staleness(train_step)
        for name, value in new.items():
            try:
                writes.write(state, name, value)
            except Exception as error:
                writes.undo()
                raise TypeError(f"member {position}: its {name} cannot be written: {error}") from error


def write_staleness(states: Group, members: Sequence[Member], train_step: int) -> None:
    for state, member in zip(states, members, strict=True):
        if member.tokens or _shows_staleness(member, as_status(state.status)):
            state.seq_staleness = member.seq_staleness(train_step)


def _shows_staleness(member: Member, status: Status) -> bool:
    """A member that was reset keeps the staleness it expired with until it is generated anew."""
    return member.tokens > 0 or status is not Status.EXPIRED
