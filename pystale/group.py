"""Reading a group: what is checked before anything changes, and what is measured of its members."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pystale._objects import ModelSteps, summarise
from pystale.staleness import checked_int
from pystale.state import Status, as_status, length, stamped_steps

__all__ = ["AGEING", "EMPTY", "Arriving", "Group", "Member", "read_group", "seq_staleness_of"]

Group = list[Any]

# Groups in these pools age; the life cycle leaves all others alone.
AGEING = frozenset((Status.COMPLETED, Status.ABORTED, Status.EXPIRED))


class Member(NamedTuple):
    """What the store knows of one member's tokens."""

    tokens: int  # response tokens
    oldest: int  # oldest model step, -1 without a model token
    newest_trainable: int  # newest model step whose token is semantically trainable, -1 without any
    trainable: int  # semantically trainable tokens
    others: int  # tokens that no model produced
    versioned: bool  # False: response tokens without any step


EMPTY = Member(0, -1, -1, 0, 0, True)


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
    steps, members, statuses, prompts, rerolls, group_ids = [], [], [], [], [], []
    agentic = False
    for position, state in enumerate(states):
        try:
            statuses.append(as_status(state.status))
            stamped = state.response_model_steps if model_step is None else stamped_steps(state, model_step)
            member = measure(state, stamped)
            if getattr(state, "input_ids", None) is not None or getattr(state, "labels", None) is not None:
                agentic = True
            if versions_required and not member.versioned and statuses[-1] in AGEING:
                raise ValueError(
                    f"{member.tokens} response tokens have no model step; give response_model_steps or model_step, "
                    "or say where such groups go with missing_version='oldest' or 'newest'"
                )
            if train_step is not None:
                _refuse_future(stamped, train_step)
            prompt = getattr(state, "prompt_model_step", None)
            if prompt is not None:
                prompts.append(checked_int("prompt_model_step", prompt, at_least=0))
            rerolls.append(checked_int("rerolls", getattr(state, "rerolls", 0), at_least=0))
            group_ids.append(getattr(state, "group_id", None))
            hash(group_ids[-1])
        except AttributeError as error:
            raise TypeError(f"{_which(position, state)} is no rollout state: {error}") from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise type(error)(f"{_which(position, state)}: {error}") from None
        steps.append(stamped)
        members.append(member)
    if len(set(group_ids)) > 1:
        raise ValueError(f"members of one group have one group_id, got {group_ids}")
    return Arriving(
        task_name,
        group_ids[0],
        states,
        steps,
        members,
        statuses,
        agentic,
        min(prompts, default=None),
        max(rerolls),
    )


def seq_staleness_of(member: Member, train_step: int) -> int:
    """Staleness of a member's oldest model token, 0 without one (see :mod:`pystale.staleness`)."""
    return train_step - member.oldest - 1 if member.oldest >= 0 else 0


def measure(state: Any, steps: Any) -> Member:
    """Check the lengths of a state's per-token fields and summarise its tokens; `steps` stand for its own."""
    ids, mask, logprobs = state.response_ids, state.response_mask, getattr(state, "logprobs", None)
    stamped = length(steps)
    tokens = stamped if ids is None else len(ids)
    what = "response_model_steps" if ids is None else "response_ids"
    for name, entries, given in (
        ("response_model_steps", stamped, stamped > 0),
        ("response_mask", length(mask), mask is not None),
        ("logprobs", length(logprobs), length(logprobs) > 0),
    ):
        if given and entries != tokens:
            raise ValueError(
                f"{name} has {entries} entries, {what} has {tokens}; one entry per response token is required"
            )
    if not tokens:
        return EMPTY
    if not stamped:
        # Without versions only the semantic mask says anything; steps of 0 stand in to have it checked and counted.
        unversioned = ModelSteps()
        unversioned.append(0, tokens)
        return Member(tokens, -1, -1, summarise(unversioned, mask)[2], 0, False)
    oldest, newest, trainable, model = summarise(steps, mask)
    return Member(tokens, oldest, newest, trainable, tokens - model, True)


def _refuse_future(steps: Any, train_step: int) -> None:
    if not length(steps):
        return
    newest = summarise(steps)[1]
    if newest > train_step - 1:
        raise ValueError(
            f"model step {newest} is in the future of train_step {train_step}, whose newest weights are of step "
            f"{train_step - 1}; pass the step the group is produced for, at least {newest + 1}"
        )


def _which(position: int, state: Any) -> str:
    return f"member {position} (rollout_id {getattr(state, 'rollout_id', None)!r})"
