"""A stored group, and the settings of the task it belongs to."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pystale._objects import Member
from pystale.group import Group
from pystale.staleness import StalenessRule
from pystale.state import Status, as_status

__all__ = ["Record", "Task"]


class Task(NamedTuple):
    """One task's settings."""

    name: str
    number: int  # its number in the index
    rule: StalenessRule
    tail_batch_trigger_size: int

    @property
    def retries(self) -> bool:
        return self.tail_batch_trigger_size >= 0


@dataclass(slots=True, eq=False)
class Record:
    """A stored group."""

    task: Task
    group_id: Any
    states: Group
    members: list[Member]
    status: Status
    arrival: int
    key: int | None
    rerolls: int
    masks_tokens: bool  # whether the token rule applies to the group: it is on and the group is not agentic
    number: int = -1  # its id in the index
    left_out: int = 0  # members of a COMPLETED group that have expired, and that it is trained without
    tokens: int = field(init=False)  # of all members

    def __post_init__(self) -> None:
        self.tokens = sum([member.tokens for member in self.members])

    @property
    def trained_states(self) -> Group:
        """States that are handed to training: all but the members left out."""
        if not self.left_out:
            return self.states
        return [state for state in self.states if as_status(state.status) is not Status.EXPIRED]

    @property
    def is_agentic(self) -> bool:
        """Whether the token rule, which is on, does not apply to the group: a member came with training tensors."""
        return not self.masks_tokens and self.task.rule.token_stale_threshold is not None
