"""Rollout states, their statuses, and what stamping, resetting and discarding do to them.

The buffer works on any object that has the attributes it needs; :class:`RolloutState` is the one pystale brings.
Field names are XTuner's where XTuner has the field.
"""

import contextlib
import copy
import enum
import logging
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pystale._objects import ModelSteps, copy_fields, replace_fields, summarise
from pystale.staleness import checked_int

__all__ = [
    "FieldsRefused",
    "RolloutState",
    "Status",
    "as_status",
    "copy_state",
    "discard",
    "group_status",
    "reset",
    "stamped_steps",
    "update_sample_version",
]

logger = logging.getLogger("pystale")

State = TypeVar("State")
Ints: TypeAlias = list[int] | tuple[int, ...] | NDArray[np.integer[Any]]
Floats: TypeAlias = list[float] | tuple[float, ...] | NDArray[np.floating[Any]]


class Status(enum.Enum):
    """Where a rollout, or a group of rollouts, stands in its life.

    Attributes
    ----------
    INIT
        Not generated yet.
    COMPLETED
        Generated to its end; the only one that is trained.
    ABORTED
        Cut off, to be continued or generated anew.
    EXPIRED
        Too old to train; to be generated anew, or discarded.
    FAILED
        The engine, or what judges the response, gave up.
    FILTERED
        Generated, and refused by ``is_valid_sample_fn`` or another filter.
    ARCHIVED
        Put away by whoever owns it. No buffer or producer of pystale gives it.
    """

    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"

    @classmethod
    def from_finish_reason(cls, finish_reason: str | None) -> "Status":
        """Translate an engine's finish reason.

        Parameters
        ----------
        finish_reason : str or None
            Case does not matter. ``stop``, ``length`` and ``tool_calls`` complete a rollout; ``abort`` and
            ``aborted`` abort it; ``error``, None and anything unknown fail it, and the latter two are logged.

        Examples
        --------
        >>> Status.from_finish_reason("LENGTH")
        <Status.COMPLETED: 'completed'>
        """
        reason = finish_reason.lower() if isinstance(finish_reason, str) else finish_reason
        if reason in ("stop", "length", "tool_calls"):
            return cls.COMPLETED
        if reason in ("abort", "aborted"):
            return cls.ABORTED
        logger.warning("finish reason %r: the rollout is marked FAILED", finish_reason)
        return cls.FAILED


# The first of these that any member has is the status of a group that is not wholly COMPLETED.
_PRECEDENCE = (Status.FAILED, Status.ABORTED, Status.EXPIRED, Status.FILTERED, Status.INIT)


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutState:
    """One rollout: a prompt, the response generated so far, and the policy version of every response token.

    Every field is an optional keyword. Per-token fields are lists, NumPy arrays or, for the steps,
    :class:`~pystale.ModelSteps`, with one entry per response token. Two states are equal only if they are the same
    object.

    Attributes
    ----------
    rollout_id, group_id, session_id : int, str or None
        Rollouts of one prompt share ``group_id``.
    prompt_model_step : int or None
        Trainer step whose weights were current when the prompt was dispatched.
    response_ids : sequence of int or None
        Response tokens.
    response_mask : sequence of int or None
        Semantic mask: non-zero where the policy produced the token and it may enter the loss. None: all ones.
        Replaced by the effective mask when a batch is taken for training.
    response_model_steps : sequence of int or None
        Trainer step after whose update the weights that produced the token were published; negative for tokens that
        no model produced.
    seq_staleness : int
        Staleness of the oldest model token, in trainer steps, as of the buffer's last look.
    rerolls : int
        How often the group was handed out to be generated anew.

    Examples
    --------
    >>> state = RolloutState(rollout_id=7, response_ids=[11, 12, 13], response_model_steps=[3, 3, 4])
    >>> state.min_model_step, state.max_model_step
    (3, 4)
    """

    rollout_id: int | str | None = None
    group_id: int | str | None = None
    task_name: str | None = None
    session_id: int | str | None = None
    message: Any = None
    prompt_ids: Ints | None = None
    prompt_model_step: int | None = None
    tokens: Ints | None = None
    sample_params: Any = None
    response: str | None = None
    response_ids: Ints | None = None
    response_mask: Ints | None = None
    response_model_steps: Ints | ModelSteps | None = None
    logprobs: Floats | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    tool_calls: Any = None
    reward: Any = None
    status: Status = Status.INIT
    seq_staleness: int = 0
    error_msg: str | None = None
    input_ids: Ints | None = None
    labels: Ints | None = None
    position_ids: Ints | None = None
    mm_info: Any = None
    rerolls: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def min_model_step(self) -> int | None:
        """Oldest step among the model tokens, None without any."""
        steps = self.response_model_steps
        oldest = -1 if steps is None else summarise(steps)[0]
        return None if oldest < 0 else oldest

    @property
    def max_model_step(self) -> int | None:
        """Newest step among the model tokens, None without any."""
        steps = self.response_model_steps
        newest = -1 if steps is None else summarise(steps)[1]
        return None if newest < 0 else newest


def as_status(status: Any) -> Status:
    """Match a status of another framework by its name.

    Parameters
    ----------
    status : Status, enum member or str
        An enum member is matched by its name, a string by name or value; case does not matter.

    Raises
    ------
    ValueError
        When there is no status of this name.

    Examples
    --------
    >>> as_status("completed")
    <Status.COMPLETED: 'completed'>
    """
    if type(status) is Status:
        return status
    name = status if isinstance(status, str) and not isinstance(status, enum.Enum) else getattr(status, "name", None)
    found = Status.__members__.get(name.upper()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"unknown status {status!r}; known are {', '.join(Status.__members__)}")
    return found


def foreign_status(kind: type[enum.Enum], status: Status) -> enum.Enum:
    """Member of another framework's enum that stands for `status`; ValueError when it has none."""
    for name, member in kind.__members__.items():
        if name.upper() == status.name:
            return member
    raise ValueError(f"{kind.__name__} has no {status.name}, which its rollouts may become")


def write_status(state: Any, status: Status) -> None:
    """Set ``state.status`` to `status` in the vocabulary the state already uses; nothing where it is that already."""
    current = state.status
    if type(current) is Status:
        state.status = status
    elif as_status(current) is not status:
        state.status = _in_vocabulary(current, status)


def _in_vocabulary(current: Any, status: Status) -> Any:
    if isinstance(current, enum.Enum):
        return foreign_status(type(current), status)
    return status.name if current.isupper() else status.value


def group_status(group: Iterable[Any]) -> Status:
    """Status of a group, from its members.

    COMPLETED only if every member is. Otherwise the first of FAILED, ABORTED, EXPIRED, FILTERED that any member has;
    otherwise INIT if any member has it, otherwise ARCHIVED.

    Parameters
    ----------
    group : iterable of states or statuses
        Members, or their statuses.

    Raises
    ------
    ValueError
        For an empty group or an unknown status.

    Examples
    --------
    >>> group_status([Status.COMPLETED, Status.EXPIRED, Status.ABORTED])
    <Status.ABORTED: 'aborted'>

    Notes
    -----
    The order of precedence is XTuner's (``get_group_status``), except that unfinished (INIT) groups are not COMPLETED.
    """
    statuses = [as_status(getattr(member, "status", member)) for member in group]
    if not statuses:
        raise ValueError("the group is empty; a group has at least one member")
    if statuses.count(Status.COMPLETED) == len(statuses):
        return Status.COMPLETED
    return next((status for status in _PRECEDENCE if status in statuses), Status.ARCHIVED)


def length(values: Any) -> int:
    """Entries of a per-token field; None has none."""
    return 0 if values is None else len(values)


def stamped_steps(state: Any, model_step: int) -> Any:
    """Steps `state` has once `model_step` is stamped on the tokens that have none; nothing is written.

    The steps keep their kind (list, array or ModelSteps); where there were none, they are ModelSteps. The same object
    comes back when every token is stamped already.
    """
    step = checked_int("model_step", model_step, at_least=0, remedy="initial weights are step 0")
    steps = state.response_model_steps
    missing = length(state.response_ids) - length(steps)
    if missing <= 0:
        return steps
    if isinstance(steps, (list, tuple)):
        return [*steps, *[step] * missing]
    if isinstance(steps, np.ndarray):
        if steps.dtype.kind not in "iu":
            raise TypeError(f"response_model_steps has dtype {steps.dtype}; an integer dtype is required")
        # Never by promotion with uint64: that gives floats.
        holds = step <= np.iinfo(steps.dtype).max
        return np.concatenate([steps, np.full(missing, step, dtype=steps.dtype if holds else np.int64)])
    stamped = ModelSteps() if steps is None else ModelSteps.from_list(steps)
    stamped.append(step, missing)
    return stamped


def update_sample_version(state: State, model_step: int) -> State:
    """Stamp `model_step` on the response tokens that have no step yet.

    Parameters
    ----------
    state : RolloutState or alike
        ``response_model_steps`` is replaced; tokens already stamped keep their step.
    model_step : int
        Version the engine served the tokens with: read before the request went out, or reported by the engine, never
        read again after the response arrived.

    Returns
    -------
    RolloutState or alike
        The same object.

    Raises
    ------
    TypeError, ValueError
        If `model_step` is not an int, negative, or past int64; or if there are steps that are not integers.

    Examples
    --------
    >>> state = RolloutState(response_ids=[1, 2, 3, 4], response_model_steps=[3, 3])
    >>> update_sample_version(state, 4).response_model_steps
    [3, 3, 4, 4]
    """
    steps = stamped_steps(state, model_step)
    if steps is not state.response_model_steps:  # type: ignore[attr-defined]
        state.response_model_steps = steps  # type: ignore[attr-defined]
    return state


_PER_TOKEN = (
    *("prompt_ids", "tokens", "response_ids", "response_mask", "response_model_steps"),
    *("logprobs", "input_ids", "labels", "position_ids"),
)


def copy_state(state: Any, *, deep: bool) -> Any:
    """Copy of a state; a deep one is out of reach of any change to what the state holds.

    Per-token fields are copied entry by entry and not looked into, which keeps this cheap. States of other classes come
    back as they are.
    """
    if type(state) is not RolloutState:
        return state
    copied = RolloutState.__new__(RolloutState)
    copy_fields(state, copied, _FIELDS)
    if not deep:
        return copied
    for name in RolloutState.__slots__:
        value = getattr(state, name)
        if value is None or type(value) in (int, str, float, bool, Status):
            continue
        if name in _PER_TOKEN:
            setattr(copied, name, copy.copy(value))
            continue
        with contextlib.suppress(Exception):  # what cannot be copied cannot be saved either, and saving says so
            setattr(copied, name, copy.deepcopy(value))
    return copied


_FIELDS = tuple(f.name for f in fields(RolloutState))
_RESET: dict[str, Any] = {
    **dict.fromkeys(("response_mask", "reward", "finish_reason", "error_msg", "routed_experts", "tool_calls")),
    **dict.fromkeys(("input_ids", "labels", "position_ids")),
    "response": "",
}
_KEPT_BY_DISCARD = frozenset(
    ("rollout_id", "group_id", "task_name", "session_id", "message", "prompt_ids", "prompt_model_step", "rerolls")
)
_DISCARDED = tuple(f for f in fields(RolloutState) if f.name not in _KEPT_BY_DISCARD and f.name != "status")


def reset(state: Any) -> dict[str, Any]:
    """Take the response of an expired rollout away, so that it can be generated anew.

    ``tokens`` becomes the prompt; response, steps and log-probabilities are emptied; mask, reward, finish reason,
    error, routed experts, tool calls and prebuilt training tensors are cleared; the status is EXPIRED. Prompt,
    multimodal data and ``extra_fields`` stay. Fields the object does not have are skipped.

    Returns
    -------
    dict of str to object
        Old values of the fields that held something, so that references among them can be freed. That of ``tokens``,
        which hold the prompt again, is not among them.

    Raises
    ------
    FieldsRefused
        If the state does not take one of these values.

    Examples
    --------
    >>> state = RolloutState(prompt_ids=[5], response_ids=[1, 2], response_model_steps=[3, 3], reward=1.0)
    >>> sorted(reset(state))
    ['response_ids', 'response_model_steps', 'reward']
    >>> state.tokens, state.response_ids, state.status
    ([5], [], <Status.EXPIRED: 'expired'>)
    """
    prompt = getattr(state, "prompt_ids", None)
    new = _RESET.copy()
    new["tokens"] = None if prompt is None else list(prompt)
    new["response_ids"] = []
    new["response_model_steps"] = ModelSteps() if isinstance(state.response_model_steps, ModelSteps) else []
    new["logprobs"] = []
    return _replace(state, new, unreported="tokens")


def discard(state: Any) -> dict[str, Any]:
    """Let go of all that a rollout holds, but for what says which rollout it was.

    Every field but the ids, the task, the message, the prompt and the count of re-rolls returns to its default; the
    status is EXPIRED. Fields the object does not have are skipped.

    Returns
    -------
    dict of str to object
        Old values of the fields that held something, so that references among them can be freed.

    Raises
    ------
    FieldsRefused
        If the state does not take one of these values.
    """
    new = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in _DISCARDED}
    return _replace(state, new)


class FieldsRefused(TypeError):
    """A state cannot be reset or discarded, since it refuses values for some fields; all others are written.

    Attributes
    ----------
    cleared : dict of str to object
        Old values of the fields that were written and held something.
    """

    def __init__(self, state: Any, refused: list[tuple[str, Exception]], cleared: dict[str, Any]) -> None:
        self.cleared = cleared
        names = ", ".join(name for name, _ in refused)
        super().__init__(f"{type(state).__name__} refuses what it is to hold then in {names}: {refused[0][1]}")


def _replace(state: Any, new: dict[str, Any], unreported: str = "") -> dict[str, Any]:
    """Write the fields a state has, and that it is EXPIRED."""
    refused: list[tuple[str, Exception]] = []
    cleared = replace_fields(state, new, refused)
    cleared.pop(unreported, None)
    try:
        write_status(state, Status.EXPIRED)
    except Exception as error:
        refused.append(("status", error))
    if refused:
        raise FieldsRefused(state, refused, cleared) from refused[0][1]
    return cleared
