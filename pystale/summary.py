"""What a buffer of summaries knows of a rollout, and what of it stays elsewhere as its payloads.

A summary is a :class:`~pystale.RolloutState` the buffer takes like any other, with its tokens left out: steps and
semantic mask are runs, ``response`` holds the name of the group's response payload and ``mm_info`` that of its prompt
payload. So resetting a member lets go of the name of its response and keeps that of its prompt, and discarding it lets
go of both, as for any state.
"""

from collections.abc import Collection, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from pystale._objects import ModelSteps
from pystale.group import Arriving, read_group
from pystale.state import RolloutState, Status, as_status

__all__ = [
    "PROMPT_FIELDS",
    "RESPONSE_FIELDS",
    "assembled",
    "names_of",
    "payloads_of",
    "plain_group",
    "read_rollouts",
    "summaries_of",
    "task_of",
    "unplain_group",
]

# Which fields are in which payload. All others are in the summary.
PROMPT_FIELDS = ("message", "prompt_ids", "sample_params", "mm_info", "extra_fields")
RESPONSE_FIELDS = (
    *("tokens", "response", "response_ids", "response_mask", "response_model_steps", "logprobs", "routed_experts"),
    *("finish_reason", "tool_calls", "reward", "error_msg", "input_ids", "labels", "position_ids"),
)
_SUMMARY = ("rollout_id", "group_id", "task_name", "session_id", "prompt_model_step", "seq_staleness", "rerolls")

Payload = list[tuple[Any, ...]]


def read_rollouts(
    group: Sequence[Any], task_name: str, model_step: int | None = None, train_step: int | None = None
) -> Arriving:
    """Check and measure a group, see :func:`~pystale.group.read_group`, whose fields are all known here.

    Raises
    ------
    TypeError, ValueError
        As :func:`~pystale.group.read_group`, and for states that are no RolloutState.
    """
    arriving = read_group(group, task_name, model_step=model_step, train_step=train_step)
    for position, state in enumerate(arriving.states):
        if type(state) is not RolloutState:
            raise TypeError(
                f"member {position} is a {type(state).__name__}; this buffer takes RolloutState objects only"
            )
    return arriving


def task_of(group: Sequence[Any], lent: Collection[tuple[str, Any]]) -> str:
    """Task of a group that was handed out, among tasks and ids of all that were."""
    task_name, group_id = group[0].task_name, group[0].group_id
    names = [known for known, known_id in lent if known_id == group_id]
    return names[0] if task_name not in names and len(names) == 1 else str(task_name or "default")


def payloads_of(arriving: Arriving) -> tuple[Payload, Payload]:
    """What of a group stays behind: its prompts, and its responses with their steps stamped."""
    prompts = [tuple([getattr(state, name) for name in PROMPT_FIELDS]) for state in arriving.states]
    responses = []
    for state, steps in zip(arriving.states, arriving.steps, strict=True):
        fields = {name: getattr(state, name) for name in RESPONSE_FIELDS}
        fields["response_model_steps"] = steps
        responses.append(tuple(fields.values()))
    return prompts, responses


def summaries_of(arriving: Arriving, name: str | None) -> list[RolloutState]:
    """Summaries of a group that was read, whose payloads have the names of `name`.

    Without payloads, of a group that is only to be counted, tokens without a step get one.
    """
    # One object for all members: it is sent, and held, once.
    names = ("", None) if name is None else (f"{name}.r", f"{name}.p")
    return [
        _summary(state, steps, member.tokens, *names, agentic=arriving.agentic)
        for state, steps, member in zip(arriving.states, arriving.steps, arriving.members, strict=True)
    ]


def _summary(
    state: RolloutState, steps: Any, tokens: int, response: str, prompt: str | None, *, agentic: bool
) -> RolloutState:
    runs = ModelSteps() if steps is None else steps if type(steps) is ModelSteps else ModelSteps.from_list(steps)
    if len(runs) != tokens:
        runs = ModelSteps.from_runs([(0, tokens)])
    summary = RolloutState(
        status=as_status(state.status),
        response=response,
        mm_info=prompt,
        response_model_steps=runs,
        reward=float(state.reward) if isinstance(state.reward, Real) else None,
        **{field: _plain(getattr(state, field)) for field in _SUMMARY},
    )
    if state.response_mask is not None:
        mask: Any = state.response_mask
        summary.response_mask = mask_runs(mask)  # type: ignore[assignment]
    if agentic:
        # The token rule does not apply; every member says so, as the one that had the training tensors may be reset.
        summary.input_ids = []
    return summary


def mask_runs(mask: Any) -> ModelSteps:
    """A mask as runs of 0 and 1."""
    if type(mask) is ModelSteps:
        return ModelSteps.from_runs([(int(value != 0), count) for value, count in mask.runs()])
    return ModelSteps.from_list((np.asarray(mask) != 0).astype(np.int8))


def names_of(states: Iterable[RolloutState]) -> Iterable[str]:
    """Names of payloads that summaries hold, each as often as it is held."""
    for state in states:
        if state.response:
            yield state.response
        if state.mm_info:
            yield state.mm_info


def assembled(summaries: Sequence[RolloutState], prompts: Payload, responses: Payload | None) -> list[RolloutState]:
    """States of summaries, with what of them stayed behind.

    A member that was reset has what resetting leaves it, whatever its payload holds.
    """
    states = []
    for position, summary in enumerate(summaries):
        fields = dict(zip(PROMPT_FIELDS, prompts[position], strict=True))
        if summary.response and responses is not None:
            fields.update(zip(RESPONSE_FIELDS, responses[position], strict=True))
        else:
            prompt = fields["prompt_ids"]
            fields.update(tokens=None if prompt is None else list(prompt), response="", response_ids=[], logprobs=[])
            fields["response_model_steps"] = ModelSteps()
        fields.update({name: getattr(summary, name) for name in _SUMMARY})
        states.append(RolloutState(status=summary.status, **fields))
    return states


def plain_group(states: Sequence[RolloutState]) -> list[Any]:
    """Summaries as plain data, which a checkpoint's document can hold."""
    return [
        [
            state.status.name,
            state.response,
            state.mm_info,
            _plain_runs(state.response_model_steps),
            _plain_runs(state.response_mask),
            state.reward,
            state.input_ids is not None,
            *(_plain(getattr(state, name)) for name in _SUMMARY),
        ]
        for state in states
    ]


def unplain_group(plain: Sequence[Sequence[Any]]) -> list[RolloutState]:
    """Summaries that :func:`plain_group` made plain."""
    states = []
    for status, response, prompt, steps, mask, reward, agentic, *fields in plain:
        states.append(
            RolloutState(
                status=Status[status],
                response=response,
                mm_info=prompt,
                response_model_steps=_runs(steps),
                response_mask=_runs(mask),
                reward=reward,
                input_ids=[] if agentic else None,
                **dict(zip(_SUMMARY, fields, strict=True)),
            )
        )
    return states


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


def _plain_runs(runs: Any) -> Any:
    if type(runs) is ModelSteps:
        return [list(run) for run in runs.runs()]
    return None if runs is None else []


def _runs(plain: Any) -> Any:
    return None if plain is None else ModelSteps.from_runs([(step, count) for step, count in plain])
