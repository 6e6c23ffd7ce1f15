"""Agent loop and sampler: what connects the engine to the producer."""

import asyncio
import functools
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pystale import ModelSteps, ReplayBuffer, RolloutState, Status
from pystale.demo.engine import Engine, Generation, Request
from pystale.demo.task import MAX_TOKENS, reward, sample_prompt, text
from pystale.sampler import PromptSampler
from pystale.trace import Trace

__all__ = ["CountingAgentLoop", "CountingSampler", "EngineController", "forget_versions_after"]


class CountingAgentLoop:
    """Generates the members of a group that are not COMPLETED, and rewards those that finish.

    Parameters
    ----------
    engine : Engine
        Where the tokens come from.
    trace : Trace, optional
        Gets a line per request.
    """

    def __init__(self, engine: Engine, trace: Trace | None = None) -> None:
        self._engine = engine
        self._trace = trace

    async def generate_group(self, group: list[RolloutState], *, enable_partial_rollout: bool) -> list[RolloutState]:
        """Generate until every member is COMPLETED or the engine is paused; an aborted one keeps what it has.

        A cancelled call leaves its members ABORTED, with the tokens they have.
        """
        running: list[tuple[RolloutState, Request]] = []
        for member in group:
            if member.status is Status.COMPLETED:
                continue
            if not enable_partial_rollout or member.response_ids is None or not len(member.response_ids):
                member.response_ids = np.empty(0, dtype=np.uint8)
                member.logprobs = np.empty(0, dtype=np.float32)
                member.response_model_steps = ModelSteps()
            budget = MAX_TOKENS - len(member.response_ids)
            request = self._engine.submit(member.prompt_ids, member.response_ids, budget)
            if self._trace is not None:
                request.done.add_done_callback(functools.partial(note, self._trace, member, time.monotonic()))
            running.append((member, request))
        try:
            if running:
                await asyncio.wait([request.done for _, request in running])
        except asyncio.CancelledError:
            self._engine.abort(request for _, request in running)
            raise
        finally:
            for member, request in running:
                _extend(member, request.done.result())
        return group

    async def pause(self) -> None:
        """Abort what runs."""
        self._engine.pause()


def note(trace: Trace, member: RolloutState, began: float, done: "asyncio.Future[Generation]") -> None:
    """Have a request that is over in the trace."""
    if done.cancelled() or done.exception() is not None:
        return
    new = done.result()
    runs = new.model_steps.runs()
    trace.leg(
        member.group_id,
        member.rollout_id,
        model_step=runs[-1][0] if runs else None,
        tokens=len(new.token_ids),
        reason=new.finish_reason,
        seconds=time.monotonic() - began,
    )


def _extend(member: RolloutState, new: Generation) -> None:
    """Append what a request brought; a finished response gets its reward."""
    member.response_ids = np.concatenate([member.response_ids, new.token_ids])
    member.logprobs = np.concatenate([member.logprobs, new.logprobs])
    old_steps: Any = member.response_model_steps
    steps = ModelSteps.from_list(old_steps)
    for step, count in new.model_steps.runs():
        steps.append(step, count)
    member.response_model_steps = steps
    member.finish_reason = new.finish_reason
    member.status = Status.from_finish_reason(new.finish_reason)
    if member.status is Status.COMPLETED:
        member.response = text(member.response_ids)
        member.reward = reward(member.prompt_ids, member.response_ids)


class EngineController:
    """Pauses the engine and lets it go on: what a :class:`~pystale.DisaggAgentLoopManager` asks for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def pause_generation(self) -> None:
        """Abort what runs."""
        self._engine.pause()

    def continue_generation(self) -> None:
        """Take requests again."""
        self._engine.resume()


def forget_versions_after(group: Sequence[RolloutState], model_step: int) -> None:
    """Cut the responses of a group back to the tokens of weights up to `model_step`.

    After a crash the weights are those of the last checkpoint. A response that newer ones began cannot be continued by
    them: its versions would not be in order.
    """
    for member in group:
        if member.max_model_step is None or member.max_model_step <= model_step:
            continue
        kept, steps = ModelSteps(), member.response_model_steps
        for step, count in ModelSteps.from_list(steps).runs():  # type: ignore[arg-type]
            if step <= model_step:
                kept.append(step, count)
        tokens: Any = member.response_ids
        logprobs: Any = member.logprobs
        member.response_ids, member.logprobs = tokens[: len(kept)], logprobs[: len(kept)]
        member.response_model_steps, member.response_mask = kept, None
        member.response, member.reward, member.finish_reason = "", None, None
        member.status = Status.ABORTED


class CountingSampler(PromptSampler):
    """A :class:`~pystale.PromptSampler` that counts its groups by the pool they come from (INIT: a new prompt)."""

    def __init__(self, buffer: ReplayBuffer, group_size: int, rng: np.random.Generator) -> None:
        super().__init__((sample_prompt(rng) for _ in itertools.count()), buffer, group_size)
        self.drawn: Counter[Status] = Counter()

    async def sample(self, task_name: str, statuses: Sequence[Status]) -> list[RolloutState]:
        """A group of the first of these pools that has one, to be continued or generated anew; else of a new prompt."""
        for status in statuses:
            groups = await self.buffer.get(1, task_name, status)
            if groups:
                self.drawn[status] += 1
                return groups[0]
        self.drawn[Status.INIT] += 1
        return await super().sample(task_name, ())
