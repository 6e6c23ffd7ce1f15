"""Reading a group: what is checked before anything changes, and what is measured of its members."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pystale._objects import Member, measure
from pystale.staleness import checked_int
from pystale.state import Status, as_status, foreign_status, stamped_steps

__all__ = ["AGEING", "Arriving", "Group", "read_group"]

Group = list[Any]

# Groups in these pools age; the life cycle leaves all others alone.
AGEING = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)


class Arriving(NamedTuple):
    """A group that was read and found right, before anything changed."""

    task_name: str
    group_id: Any
    states: Group
    steps: list[Any]
    members: list[Member]
    statuses: list[Status]
    agentic: bool
    prompt_model_step: int | None  # oldest of the members'
    rerolls: int  # largest of the members'

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)


def read_group(
    group: Sequence[Any],
    task_name: str,
    *,
    model_step: int | None = None,
    train_step: int | None = None,
    versions_required: bool = False,
) -> Arriving:
    """Check a group and measure its members, without changing anything.

    Raises
    ------
    TypeError, ValueError
        For anything the contract refuses, naming the member.
    """
    if isinstance(group, (str, bytes)) or not isinstance(group, Sequence):
        raise TypeError(f"a group is a sequence of states, got {type(group).__name__}; put one state as [state]")
    states = list(group)
    if not states:
        raise ValueError("the group is empty; a group has at least one member")
    if len({id(state) for state in states}) < len(states):
        raise ValueError("the group holds the same state object twice; every member is an object of its own")
    group_id = getattr(states[0], "group_id", None)
    steps, members, statuses = [], [], []
    agentic, prompt_model_step, rerolls = False, None, 0
    for position, state in enumerate(states):
        try:
            status = as_status(state.status)
            if type(state.status) is not Status and isinstance(state.status, enum.Enum):
                foreign_status(type(state.status), Status.EXPIRED)
            stamped = state.response_model_steps if model_step is None else stamped_steps(state, model_step)
            member = measure(state, stamped, train_step)
            if versions_required and not member.versioned and status in AGEING:
                raise ValueError(
                    f"{member.tokens} response tokens have no model step; give response_model_steps or model_step, "
                    "or say where such groups go with missing_version='oldest' or 'newest'"
                )
            if getattr(state, "input_ids", None) is not None or getattr(state, "labels", None) is not None:
                agentic = True
            prompt = getattr(state, "prompt_model_step", None)
            if prompt is not None:
                prompt = checked_int("prompt_model_step", prompt, at_least=0)
                prompt_model_step = prompt if prompt_model_step is None else min(prompt, prompt_model_step)
            rerolls = max(rerolls, checked_int("rerolls", getattr(state, "rerolls", 0), at_least=0))
            other_id = getattr(state, "group_id", None)
            if other_id is not None and type(other_id) not in (int, str) and not isinstance(other_id, np.integer):
                raise TypeError(
                    f"group_id must be an int, a str or None, got {type(other_id).__name__} {other_id!r}; "
                    "a checkpoint holds no other ids"
                )
            if other_id != group_id:
                raise ValueError(f"group_id is {other_id!r}, that of member 0 is {group_id!r}; a group has one")
        except AttributeError as error:
            raise TypeError(f"{_which(position, state)} is no rollout state: {error}") from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{_which(position, state)}: {error}") from None
        steps.append(stamped)
        members.append(member)
        statuses.append(status)
    return Arriving(task_name, group_id, states, steps, members, statuses, agentic, prompt_model_step, rerolls)


def _which(position: int, state: Any) -> str:
    return f"member {position} (rollout_id {getattr(state, 'rollout_id', None)!r})"
