"""Groups that were handed out and may come back, and how they are recognised."""

from collections.abc import Sequence
from typing import Any

from pystale.group import Group
from pystale.ticket import Ticket

__all__ = ["HandedOut"]

Name = tuple[str, Any]


class HandedOut(dict[Name, Ticket]):
    """Tickets by task and group id.

    States of classes that have no ``group_id`` are recognised as the objects they are. These are kept until the group
    comes back or is settled: the identity of an object that is gone may become another's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nameless: dict[int, tuple[Name, Any]] = {}  # by the state's identity: its group, and the state

    def lend(self, ticket: Ticket, states: Group) -> None:
        name = (ticket.task.name, ticket.group_id)
        self[name] = ticket
        for state in states:
            if not hasattr(state, "group_id"):
                self._nameless[id(state)] = (name, state)

    def take_back(self, name: Name) -> Ticket:
        """Ticket of a group that is back, or is not coming back."""
        if self._nameless:
            self._nameless = {key: entry for key, entry in self._nameless.items() if entry[0] != name}
        return self.pop(name)

    def group_id(self, states: Sequence[Any], task_name: str) -> Any:
        """Id of a group of a task; None for one that has none yet."""
        group_id = getattr(states[0], "group_id", None)
        if group_id is None and self._nameless:
            name, _ = self._nameless.get(id(states[0]), ((task_name, None), None))
            return name[1] if name[0] == task_name else None
        return group_id

    def name(self, group: Sequence[Any], stored: dict[Name, int]) -> Name:
        """Task and id of a group, by its id and, where several tasks have that id, by its task name.

        Raises
        ------
        ValueError
            When no such group is handed out, or the id alone does not tell which.
        """
        first = group[0] if group else None
        if id(first) in self._nameless:
            return self._nameless[id(first)][0]
        group_id, task_name = getattr(first, "group_id", None), getattr(first, "task_name", None)
        if (task_name, group_id) in self:
            return str(task_name), group_id
        is_stored = (task_name, group_id) in stored
        tasks = [] if is_stored else [name for name, known in self if known == group_id]
        if len(tasks) == 1:
            return tasks[0], group_id
        if tasks:
            raise ValueError(f"group {group_id!r} is handed out by tasks {', '.join(sorted(tasks))}; set its task_name")
        where = "is stored" if is_stored or any(known == group_id for _, known in stored) else "is not handed out"
        raise ValueError(f"group {group_id!r} {where}; only groups handed out by get and not put back can be settled")
