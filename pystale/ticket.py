"""What is remembered of a group that was handed out, so that it is known when it comes back."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pystale._objects import ModelSteps
from pystale.group import Group
from pystale.state import RolloutState, Status, as_status

if TYPE_CHECKING:
    from pystale.store import Record, Task

__all__ = ["ForeignCopy", "Ticket", "begins_with", "copied"]

_PER_TOKEN = ("prompt_ids", "tokens", "response_ids", "response_mask", "response_model_steps", "logprobs")
_NESTED = frozenset({dict, list, tuple})


@dataclass(slots=True, eq=False)
class Ticket:
    """A group that was handed out and may come back."""

    task: "Task"
    group_id: Any
    status: Status  # of the pool it came from
    arrival: int
    key: int | None
    rerolls: int
    states: Group  # copies as they were handed out; empty where an earlier process handed it out
    held: list[tuple[int, Any]]  # per member: response tokens, and the tokens of an unfinished one

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.held)

    @classmethod
    def of(cls, record: "Record", states: Group) -> "Ticket":
        """Ticket of a record, with `states` that :func:`copied` made of its own."""
        held = [
            (member.tokens, None if as_status(state.status) is Status.COMPLETED else _tokens_of(state))
            for state, member in zip(states, record.members, strict=True)
        ]
        return cls(
            record.task, record.group_id, record.status, record.arrival, record.key, record.rerolls, states, held
        )


def copied(states: Group) -> Group:
    """Copies of states that stay as they are whatever is done to the originals, but for changes inside an object.

    Arrays other than those per token are shared: they can be gigabytes of images, and generation does not write them.
    Of objects that are no :class:`RolloutState` only the status and the response are copied.
    """
    return [_copy(state) if type(state) is RolloutState else ForeignCopy(state) for state in states]


class ForeignCopy:
    """Status and tokens of a state of another framework. No checkpoint can hold it."""

    __slots__ = ("kind", "response_ids", "response_model_steps", "status")

    def __init__(self, state: Any) -> None:
        self.kind = type(state)
        self.status = state.status
        self.response_ids = _per_token(state.response_ids)
        self.response_model_steps = _per_token(state.response_model_steps) if state.response_ids is None else None


def _copy(state: RolloutState) -> RolloutState:
    fields = {}
    for name in RolloutState.__dataclass_fields__:
        value = getattr(state, name)
        if value is not None:
            fields[name] = _per_token(value) if name in _PER_TOKEN else _structure(value)
    return RolloutState(**fields)


def _per_token(values: Any) -> Any:
    if isinstance(values, (list, ModelSteps)):
        return values[:]
    return values.copy() if isinstance(values, np.ndarray) else values


def _structure(value: Any) -> Any:
    """Copy of lists, tuples and dicts, all the way down; what they hold is shared."""
    kind = type(value)
    if kind is dict:
        return {key: _structure(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return value[:] if _NESTED.isdisjoint(map(type, value)) else kind(_structure(item) for item in value)
    return value


def _tokens_of(state: Any) -> Any:
    """A response's tokens, or their steps where it has no ids; None when it has none."""
    return state.response_model_steps if state.response_ids is None else state.response_ids


def begins_with(state: Any, begins: Any) -> bool:
    """Whether a response still begins with the tokens it had; None: it had none, or they cannot have changed."""
    if begins is None:
        return True
    tokens = _tokens_of(state)
    if tokens is None:
        return len(begins) == 0
    return len(begins) == 0 or list(tokens[: len(begins)]) == list(begins)
