"""Where the next group to generate comes from: the buffer's pools, then new prompts."""

import copy
import itertools
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pystale.buffer import ReplayBuffer
from pystale.staleness import checked_int
from pystale.state import RolloutState, Status, reset, write_status

__all__ = ["PromptSampler", "PromptsExhausted", "Sampler"]

_END = object()


class PromptsExhausted(RuntimeError):
    """No pool that was asked for has a group, and there are no more prompts."""


class Sampler(Protocol):
    """Hands out groups to generate. Its method may be plain or async."""

    def sample(self, task_name: str, statuses: Sequence[Status]) -> Awaitable[Sequence[Any]] | Sequence[Any]:
        """One group: the first of the first pool in `statuses` that has any, else of a new prompt.

        A call that raises, or is cancelled, must not have taken a group.

        Raises
        ------
        PromptsExhausted
            When there is neither.
        """
        ...


class PromptSampler:
    """Draws groups from a buffer's pools and from an iterable of prompts.

    Prompts are numbered as they are drawn, from 0; the number is the ``group_id``, and member `i` of it has
    ``rollout_id = group_id * group_size + i``.

    Parameters
    ----------
    prompts : iterable
        Prompts, endless or not. A prompt is a RolloutState to copy, a mapping of its fields, a list or array of token
        ids (``prompt_ids``), or anything else (``message``). What has a length and an index, such as a list or a data
        set, is read by index, so that resuming skips without reading.
    buffer : ReplayBuffer
        Whose pools are asked first.
    group_size : int
        Rollouts per prompt.

    Examples
    --------
    >>> import asyncio
    >>> from pystale import ReplayBuffer, StalenessRule, Status
    >>> sampler = PromptSampler([[5, 6], [7]], ReplayBuffer(StalenessRule()), group_size=2)
    >>> group = asyncio.run(sampler.sample("default", [Status.ABORTED]))
    >>> [(state.group_id, state.rollout_id, state.prompt_ids) for state in group]
    [(0, 0, [5, 6]), (0, 1, [5, 6])]
    >>> sampler.state_dict()
    {'version': 1, 'drawn': 1, 'again': []}
    """

    def __init__(self, prompts: Iterable[Any], buffer: ReplayBuffer, group_size: int) -> None:
        self.buffer = buffer
        self.group_size = checked_int("group_size", group_size, at_least=1)
        if isinstance(prompts, (str, bytes, Mapping)) or not _iterable(prompts):
            raise TypeError(f"prompts must be an iterable of prompts, got {type(prompts).__name__}")
        self._prompts: Any = prompts
        self._rest = _from(prompts, 0)
        self._drawn = 0
        self._again: dict[int, list[Any]] = {}  # number of a prompt to be drawn again -> its states

    async def sample(self, task_name: str, statuses: Sequence[Status]) -> list[Any]:
        """See :meth:`Sampler.sample`. Prompts given back come before new ones, the lowest number first."""
        for status in statuses:
            groups = await self.buffer.get(1, task_name, status)
            if groups:
                return groups[0]
        if self._again:
            group = self._again.pop(min(self._again))
        else:
            prompt = next(self._rest, _END)
            if prompt is _END:
                pools = ", ".join(status.name for status in statuses) or "none"
                raise PromptsExhausted(
                    f"all {self._drawn} prompts of task {task_name!r} are drawn, pools asked before: {pools}"
                )
            self._drawn += 1  # before anything can fail on the prompt: numbers are positions in `prompts`
            group = self._group(prompt, self._drawn - 1)
        for state in group:
            state.task_name = task_name
        return group

    def give_back(self, group: Sequence[Any]) -> None:
        """Have the prompt of a lost group drawn again, with nothing of its responses.

        Parameters
        ----------
        group : sequence of states
            A group of this sampler that nobody will put. It is copied before it is changed, so its outcome can still
            be counted, for example with ``buffer.reject(group, task_name, "lost")``.

        Raises
        ------
        ValueError
            If it was not drawn here, or is waiting to be drawn again already.
        """
        if not group:
            raise ValueError("the group is empty; a group has at least one member")
        number = self._checked_number(getattr(group[0], "group_id", None))
        if number in self._again:
            raise ValueError(f"group {number} was given back already; it is drawn again once")
        self._again[number] = [_unrolled(state) for state in group]

    def state_dict(self, in_flight: Iterable[int] = ()) -> dict[str, Any]:
        """Position to continue from, as plain numbers that any format can hold.

        Parameters
        ----------
        in_flight : iterable of int
            Group ids drawn here of which no trace is saved elsewhere; they are drawn again after a resume.
        """
        again = self._again.keys() | {self._checked_number(number) for number in in_flight}
        return {"version": 1, "drawn": self._drawn, "again": sorted(again)}

    def load_state_dict(self, state: Mapping[str, Any], finished: Iterable[Any] = ()) -> None:
        """Continue where :meth:`state_dict` was taken, over the same prompts.

        Parameters
        ----------
        state : mapping
            What :meth:`state_dict` gave.
        finished : iterable, optional
            Ids of groups that came to the buffer after that: what a journal knows, ``Resumed.finished``. They are not
            drawn again; the prompts drawn before the last of them that never came are.

        Raises
        ------
        ValueError
            If this sampler has drawn already, `state` is not what :meth:`state_dict` gives, or there are fewer prompts
            than were drawn. Nothing has changed then, but an iterator of prompts may have been read.
        """
        if self._drawn or self._again:
            raise ValueError(f"this sampler has drawn {self._drawn} prompts; load into a new one")
        drawn, again = _checked_state(state)
        known = {number for number in finished if type(number) is int and number >= 0}
        last = max(known, default=-1) + 1
        again = sorted({*again, *range(drawn, last)} - known)
        drawn = max(drawn, last)
        rest, kept = self._rest, {}
        if _indexable(self._prompts):
            total = len(self._prompts)
            if drawn <= total:
                kept = {number: self._prompts[number] for number in again}
                rest = _from(self._prompts, drawn)
        else:
            wanted, total = set(again), 0
            for prompt in itertools.islice(rest, drawn):
                if total in wanted:
                    kept[total] = prompt
                total += 1
        if drawn > total:
            raise ValueError(f"{drawn} prompts were drawn, but there are only {total}; load over the same prompts")
        self._rest, self._drawn = rest, drawn
        self._again = {number: self._group(prompt, number) for number, prompt in kept.items()}

    def _group(self, prompt: Any, number: int) -> list[Any]:
        first = number * self.group_size
        group = [_state(prompt) for _ in range(self.group_size)]
        for rollout_id, state in enumerate(group, first):
            state.group_id, state.rollout_id = number, rollout_id
        return group

    def _checked_number(self, group_id: Any) -> int:
        if type(group_id) is not int or not 0 <= group_id < self._drawn:
            raise ValueError(f"group {group_id!r} was not drawn here; drawn are 0 to {self._drawn - 1}")
        return group_id


def _iterable(prompts: Any) -> bool:
    return isinstance(prompts, Iterable) or hasattr(prompts, "__getitem__")


def _indexable(prompts: Any) -> bool:
    return hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__")


def _from(prompts: Any, start: int) -> Iterator[Any]:
    if _indexable(prompts):
        return (prompts[number] for number in range(start, len(prompts)))
    return iter(prompts)


def _checked_state(state: Mapping[str, Any]) -> tuple[int, list[int]]:
    if not isinstance(state, Mapping) or set(state) != {"version", "drawn", "again"}:
        raise ValueError(f"a sampler's state has the keys version, drawn and again, got {state!r}")
    if state["version"] != 1:
        raise ValueError(f"sampler state of version {state['version']!r} is not known here; known is 1")
    drawn, again = state["drawn"], state["again"]
    if type(drawn) is not int or drawn < 0:
        raise ValueError(f"drawn must be a number of prompts, got {drawn!r}")
    if not isinstance(again, list) or any(type(n) is not int or not 0 <= n < drawn for n in again):
        raise ValueError(f"again must list numbers of prompts below drawn={drawn}, got {again!r}")
    return drawn, again


def _state(prompt: Any) -> Any:
    """A state of its own for one member."""
    if isinstance(prompt, RolloutState):
        return _unrolled(prompt)
    if isinstance(prompt, Mapping):
        return _unrolled(RolloutState(**prompt))
    if isinstance(prompt, np.ndarray) or (
        isinstance(prompt, (list, tuple)) and prompt and all(type(token) is int for token in prompt)
    ):
        return _unrolled(RolloutState(prompt_ids=prompt))
    return _unrolled(RolloutState(message=prompt))


def _unrolled(state: Any) -> Any:
    """Copy of a state from before it was generated."""
    fresh = copy.copy(state)
    reset(fresh)
    write_status(fresh, Status.INIT)
    start: dict[str, Any] = {"rerolls": 0, "seq_staleness": 0, "prompt_model_step": None}
    start["extra_fields"] = dict(getattr(state, "extra_fields", None) or {})
    for name, value in start.items():
        if hasattr(fresh, name):
            setattr(fresh, name, value)
    return fresh
