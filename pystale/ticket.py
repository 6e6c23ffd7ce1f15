"""What is remembered of a group that was handed out, so that it is known when it comes back."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pystale._objects import ModelSteps
from pystale.group import Group
from pystale.state import RolloutState, Status, as_status

if TYPE_CHECKING:
    from pystale.record import Record, Task

__all__ = ["Copy", "ForeignCopy", "Ticket", "begins_with", "copied"]

_PER_TOKEN = ("prompt_ids", "tokens", "response_ids", "response_mask", "response_model_steps", "logprobs")
_NESTED = frozenset({dict, list, tuple})
_SLICED = (list, tuple, ModelSteps, np.ndarray)


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
    def of(cls, record: "Record", copies: "list[Copy]") -> "Ticket":
        """Ticket of a record, with the copies that :func:`copied` made of its states."""
        held = [(member.tokens, copy.begins) for copy, member in zip(copies, record.members, strict=True)]
        states = [copy.state for copy in copies]
        return cls(
            record.task, record.group_id, record.status, record.arrival, record.key, record.rerolls, states, held
        )


class Copy(NamedTuple):
    """A state as it was handed out."""

    state: Any  # a RolloutState, or what stands for a state of another framework
    begins: Any  # tokens of an unfinished response; None where there are none, or they cannot change


class ForeignCopy(NamedTuple):
    """Stands for a state of another framework, which no checkpoint can hold."""

    kind: type


def copied(states: Group) -> list[Copy]:
    """Copies of states that stay as they are whatever is done to the originals, but for changes inside an object.

    Arrays other than those per token are shared: they can be gigabytes of images, and generation does not write them.
    """
    return [
        Copy(
            _copy(state) if type(state) is RolloutState else ForeignCopy(type(state)),
            None if as_status(state.status) is Status.COMPLETED else _own(_tokens_of(state)),
        )
        for state in states
    ]


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


def _own(tokens: Any) -> Any:
    """Copy of tokens."""
    if isinstance(tokens, _SLICED):
        return tokens.copy() if isinstance(tokens, np.ndarray) else tokens[:]
    return None if tokens is None else _plain(tokens)


def _plain(tokens: Any) -> list[Any]:
    """Tokens as a list of their own. Not every container has ``copy``, and a slice of a tensor is a view."""
    listed = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    return listed if isinstance(listed, list) else [listed]


def begins_with(state: Any, begins: Any) -> bool:
    """Whether a response still begins with the tokens it had; None: it had none, or they cannot have changed."""
    if begins is None:
        return True
    tokens = _tokens_of(state)
    if tokens is None or not len(begins):
        return len(begins) == 0
    return _plain(tokens[: len(begins)] if isinstance(tokens, _SLICED) else tokens)[: len(begins)] == _plain(begins)
