"""Agent loop and sampler: what connects the engine to the producer."""

import asyncio
from collections.abc import Sequence

import numpy as np

from pystale._core import ModelSteps
from pystale.buffer import ReplayBuffer
from pystale.demo.engine import Engine, Generation, Request
from pystale.demo.task import MAX_TOKENS, reward, sample_prompt, text
from pystale.state import RolloutState, Status

__all__ = ["CountingAgentLoop", "PromptSampler"]


class CountingAgentLoop:
    """Generates the members of a group that are not COMPLETED, and rewards those that finish.

    Parameters
    ----------
    engine : Engine
        Where the tokens come from.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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
            running.append((member, self._engine.submit(member.prompt_ids, member.response_ids, budget)))
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


def _extend(member: RolloutState, new: Generation) -> None:
    """Append what a request brought; a finished response gets its reward."""
    member.response_ids = np.concatenate([member.response_ids, new.token_ids], dtype=np.uint8)
    member.logprobs = np.concatenate([member.logprobs, new.logprobs], dtype=np.float32)
    steps = ModelSteps.from_list(member.response_model_steps)
    for step, count in new.model_steps.runs():
        steps.append(step, count)
    member.response_model_steps = steps
    member.finish_reason = new.finish_reason
    member.status = Status.from_finish_reason(new.finish_reason)
    if member.status is Status.COMPLETED:
        member.response = text(member.response_ids)
        member.reward = reward(member.prompt_ids, member.response_ids)


class PromptSampler:
    """Hands out groups: from the pools of the buffer it is told to try, else a group for a new prompt.

    Parameters
    ----------
    buffer : ReplayBuffer
        Whose pools to try.
    engine : Engine
        Whose model step a new prompt is dispatched at.
    group_size : int
        Rollouts per prompt.
    rng : numpy.random.Generator
        Draws the prompts.
    """

    def __init__(self, buffer: ReplayBuffer, engine: Engine, group_size: int, rng: np.random.Generator) -> None:
        self.groups_rerolled = 0
        self.groups_continued = 0
        self._buffer = buffer
        self._engine = engine
        self._group_size = group_size
        self._rng = rng
        self._drawn = 0

    async def sample(self, task_name: str, statuses: Sequence[Status]) -> list[RolloutState]:
        """A group from the first of these pools that has one, else a new one."""
        for status in statuses:
            found = await self._buffer.get(1, task_name, status)
            if found:
                self.groups_rerolled += status is Status.EXPIRED
                self.groups_continued += status is Status.ABORTED
                group: list[RolloutState] = found[0]
                return group
        prompt = sample_prompt(self._rng)
        group_id = self._drawn
        self._drawn += 1
        return [
            RolloutState(
                rollout_id=group_id * self._group_size + i,
                group_id=group_id,
                task_name=task_name,
                prompt_ids=prompt,
                prompt_model_step=self._engine.model_step,
            )
            for i in range(self._group_size)
        ]
