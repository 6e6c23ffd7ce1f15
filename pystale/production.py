"""A round of production: draw, generate, collect until a batch is there, pause, and lose nothing on the way."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from pystale.buffer import ReplayBuffer
from pystale.pending import PendingTasks, resolved, to_the_end
from pystale.rollout import AgentLoop, IsValidSample, Rollout
from pystale.sampler import PromptsExhausted, Sampler
from pystale.state import Status

__all__ = [
    "ProduceReport",
    "ProductionStalled",
    "Round",
    "RoundSettings",
    "ShouldContinue",
    "oversampled",
    "pools_to_draw_from",
]

logger = logging.getLogger("pystale")

ShouldContinue = Callable[..., Awaitable[bool] | bool]

# A round gives up after this many groups in a row brought nothing at all, or one share if that is more.
FRUITLESS_GROUPS = 8
# It also gives up after this many shares in a row without a COMPLETED group, though tokens were generated.
FRUITLESS_SHARES = 100


class ProductionStalled(RuntimeError):
    """A round that cannot end: nothing it tries brings it nearer to its batch. The message holds its whole state."""


@dataclass(slots=True)
class ProduceReport:
    """What one round did. Groups are counted as they came back, tokens are response tokens."""

    task_name: str
    batch_size: int
    train_step: int
    model_step: int
    tail_batch: bool = False
    """Whether the round was in tail batch mode."""
    refreshed: int = 0
    """Groups that expired when the round began."""
    scheduled: int = 0
    """Groups wanted, stored ones included: the batch and what is oversampled."""
    spawned: int = 0
    """Groups drawn and given to the agent loop."""
    completed: int = 0
    aborted: int = 0
    expired: int = 0
    failed: int = 0
    filtered: int = 0
    retried: int = 0
    """Times a group was tried again after the agent loop raised."""
    produced_tokens: int = 0
    """Tokens that are new in this round: not those a continued response had before."""
    group_s: list[float] = field(default_factory=list)
    """Seconds each group took, in the order they came back."""
    produce_s: float = 0.0
    """Seconds until the batch was there."""
    pause_s: float = 0.0
    """Seconds from then until nothing was running."""
    last_error: str | None = None
    """Why the last group failed, or its last try did."""


def oversampled(target: int, over_sample_threshold: float, task_batch_size: int) -> int:
    """Groups to have in all: `target` and ``ceil(over_sample_threshold * task_batch_size)`` more.

    The product is that of the decimal number as written, so float noise never adds a group.

    Examples
    --------
    >>> oversampled(100, 0.07, 100), math.ceil(0.07 * 100)
    (107, 8)
    """
    return target + math.ceil(Fraction(repr(over_sample_threshold)) * task_batch_size)


def pools_to_draw_from(tail_batch_trigger_size: int, expired: int) -> tuple[tuple[Status, ...], bool]:
    """Pools a round draws from before new prompts, and whether it is in tail batch mode.

    Parameters
    ----------
    tail_batch_trigger_size : int
        See :class:`~pystale.AsyncProduceStrategyConfig`.
    expired : int
        Groups in the EXPIRED pool at the start of the round.

    Notes
    -----
    The three cases are XTuner's. 0 is not a trigger that any pool reaches: it never leads to tail batch mode.

    Examples
    --------
    >>> pools_to_draw_from(0, 3)[1], pools_to_draw_from(4, 3)[1], pools_to_draw_from(4, 9)[1]
    (False, False, True)
    """
    tail_batch = 0 < tail_batch_trigger_size <= expired
    if tail_batch or (tail_batch_trigger_size == 0 and expired > 0):
        return (Status.EXPIRED, Status.ABORTED), tail_batch
    return (Status.ABORTED,), False


class RoundSettings(Protocol):
    """What a round needs to know of a strategy's settings."""

    @property
    def enable_partial_rollout(self) -> bool: ...
    @property
    def max_retries(self) -> int: ...
    @property
    def is_valid_sample_fn(self) -> IsValidSample | None: ...
    @property
    def should_continue_fn(self) -> ShouldContinue | None: ...


class Round:
    """One round: its pending rollouts and what it counts."""

    def __init__(
        self,
        *,
        agent_loop: AgentLoop,
        sampler: Sampler,
        buffer: ReplayBuffer,
        pools: tuple[Status, ...],
        settings: RoundSettings,
        pause_repeat_s: float,
        pause_limit_s: float,
        report: ProduceReport,
    ) -> None:
        self.agent_loop = agent_loop
        self.sampler = sampler
        self.buffer = buffer
        self.pools = pools
        self.settings = settings
        self.pause_repeat_s = pause_repeat_s
        self.pause_limit_s = pause_limit_s
        self.report = report
        self.pending: PendingTasks[Rollout] = PendingTasks()
        self.clock = asyncio.get_running_loop().time
        self.pausing = False
        self.fruitless = 0  # groups in a row that brought nothing
        self.without_completed = 0  # groups in a row that were not COMPLETED

    async def run(self) -> None:
        """Produce, and leave nothing running, however it ends."""
        began = self.clock()
        try:
            try:
                await self.fill()
            except Exception:
                await self.pause()  # what is running is put before the error goes on
                raise
            self.report.produce_s = self.clock() - began
            await self.pause()
            self.report.pause_s = self.clock() - began - self.report.produce_s
        except BaseException:
            # Cancelled, or the buffer broke. Either way no task may stay behind, and no group be lost.
            await to_the_end(self.cancel())
            raise

    # Drawing

    async def fill(self) -> None:
        """Draw and collect until the batch is there."""
        batch_size, should_continue = self.report.batch_size, self.settings.should_continue_fn
        while True:
            completed = await self.buffer.count(self.report.task_name, Status.COMPLETED)
            if should_continue is None:
                going_on = completed < batch_size
            else:
                going_on = await resolved(should_continue(completed, batch_size))
            if not going_on:
                return
            hopeless = self.hopeless()
            missing = 0 if hopeless else self.report.scheduled - completed - len(self.pending)
            if missing <= 0 and not self.pending and not hopeless:
                missing = batch_size  # a should_continue_fn wants more than was scheduled
            for _ in range(missing):
                group = await self.draw()
                if group is None:
                    break
                self.start(group)
            if not self.pending:
                if completed >= batch_size:
                    return
                await self.give_up(hopeless)
            await self.pending.wait()
            await to_the_end(self.collect())

    async def draw(self) -> Sequence[Any] | None:
        """A group to generate, None when there is none at the moment."""
        task_name = self.report.task_name
        for pools in (self.pools, (Status.EXPIRED, Status.ABORTED)):
            try:
                group = await resolved(self.sampler.sample(task_name, pools))
            except PromptsExhausted:
                # Without new prompts the EXPIRED pool may never grow to its trigger: then it is not waited for.
                if Status.EXPIRED in pools or not await self.buffer.count(task_name, Status.EXPIRED):
                    return None
                continue
            if isinstance(group, (str, bytes)) or not isinstance(group, Sequence) or not group:
                raise TypeError(f"the sampler gave {group!r}; sample returns a sequence of at least one state")
            return group
        return None

    def start(self, group: Sequence[Any]) -> None:
        for state in group:
            if getattr(state, "prompt_model_step", self) is None:
                state.prompt_model_step = self.report.model_step
        settings = self.settings
        partial = settings.enable_partial_rollout
        rollout = Rollout(group, partial=partial, began=self.clock())
        self.pending.schedule(
            rollout,
            rollout.run(
                self.agent_loop,
                partial=partial,
                max_retries=settings.max_retries,
                is_valid=settings.is_valid_sample_fn,
                pausing=lambda: self.pausing,
                clock=self.clock,
            ),
        )
        self.report.spawned += 1

    # Collecting

    async def collect(self) -> None:
        """Put or reject every rollout that has ended; a fault in one does not keep the others."""
        failure: Exception | None = None
        while (rollout := self.pending.claim()) is not None:
            try:
                await self.settle(rollout)
            except Exception as error:
                logger.exception("task %r: a group could not be settled", self.report.task_name)
                failure = failure or error
        if failure is not None:
            raise failure

    async def settle(self, rollout: Rollout) -> None:
        report = self.report
        report.retried += max(rollout.attempts - 1, 0)
        report.group_s.append(rollout.seconds)
        report.last_error = rollout.error or report.last_error
        tokens = rollout.new_tokens()
        report.produced_tokens += tokens
        outcome = rollout.outcome
        if outcome not in (Status.FAILED, Status.FILTERED):
            rollout.mark_unfinished()
            try:
                outcome = await self.buffer.put(
                    rollout.group, report.task_name, model_step=report.model_step, train_step=report.train_step
                )
            except (TypeError, ValueError) as error:
                logger.warning("task %r: the buffer refused a group: %s", report.task_name, error)
                report.last_error = f"the buffer refused a group: {error}"
                rollout.group = rollout.without_per_token_fields()
                rollout.fail(report.last_error)
                outcome = Status.FAILED
        if outcome in (Status.FAILED, Status.FILTERED):
            await self.buffer.reject(rollout.group, report.task_name, outcome.value)
        name = outcome.value
        setattr(report, name, getattr(report, name) + 1)
        nothing = outcome in (Status.FAILED, Status.EXPIRED) or (outcome is Status.ABORTED and tokens == 0)
        self.fruitless = self.fruitless + 1 if nothing else 0
        self.without_completed = 0 if outcome is Status.COMPLETED else self.without_completed + 1

    def hopeless(self) -> str:
        """Why drawing more would not help, empty while it may.

        Groups still running may disprove it, for example where one broken worker fails at once all that it is given
        while others take minutes. So drawing stops, and the round gives up only when nothing is running any more.
        """
        share = max(self.report.scheduled, FRUITLESS_GROUPS)
        if self.fruitless >= share:
            return f"the last {self.fruitless} groups failed, expired at once, or came back empty"
        if self.without_completed >= FRUITLESS_SHARES * share:
            return f"none of the last {self.without_completed} groups came back COMPLETED and valid"
        return ""

    async def give_up(self, hopeless: str) -> None:
        """Raise, with all there is to know about the round."""
        report, name = self.report, self.report.task_name
        others = report.completed + report.aborted + report.expired + report.filtered
        exhausted = not hopeless and (others > 0 or report.failed == 0)
        why = hopeless or "prompts are exhausted, no pool has a group left to generate, and nothing is running"
        stored = (await self.buffer.count_statuses([name], Status))[name]
        pools = ", ".join(f"{status.name} {n}" for status, n in stored.items() if n) or "nothing"
        message = (
            f"task {name!r}, train_step {report.train_step}, model_step {report.model_step}: {why}. "
            f"Wanted {report.batch_size} COMPLETED groups, stored: {pools}. "
            f"This round drew {report.spawned}: {report.completed} completed, {report.aborted} aborted, "
            f"{report.expired} expired, {report.failed} failed, {report.filtered} filtered, {report.retried} retries"
            + (", in tail batch mode" if report.tail_batch else "")
            + f". Last error: {report.last_error or 'none'}"
        )
        raise (PromptsExhausted if exhausted else ProductionStalled)(message)

    # Stopping

    async def pause(self) -> None:
        """Have the agent loop abort what is running and collect it; cancel what does not stop in time."""
        if not self.pending:
            return
        self.pausing = True
        loop = asyncio.get_running_loop()
        request: asyncio.Task[None] | None = None

        def ask() -> None:
            nonlocal request
            if request is not None:
                request.cancel()  # unanswered so far, or answered without effect
            request = loop.create_task(self.ask_to_pause())

        try:
            await self.drain(ask)
            if self.pending:
                logger.warning(
                    "task %r: %d groups are still running %s s after the first request to pause; they are cancelled",
                    self.report.task_name,
                    len(self.pending),
                    self.pause_limit_s,
                )
                await self.cancel()
            elif request is not None:
                # All groups are in; the agent loop may still be about to answer.
                await asyncio.wait((request,), timeout=self.pause_repeat_s)
        finally:
            if request is not None and not request.done():
                request.cancel()
                await asyncio.wait((request,), timeout=self.pause_repeat_s)

    async def ask_to_pause(self) -> None:
        try:
            await resolved(self.agent_loop.pause())
        except Exception:
            logger.warning("task %r: the request to pause failed", self.report.task_name, exc_info=True)

    async def cancel(self) -> None:
        """Cancel what is running and collect it; give up on what does not even end then."""
        self.pausing = True
        try:
            await self.drain(self.pending.cancel)
        finally:
            for rollout in self.pending.abandon():
                rollout.fail(f"it did not end within {self.pause_limit_s} s of being cancelled")
                logger.error("task %r: a group is given up: %s", self.report.task_name, rollout.error)
            await self.collect()

    async def drain(self, nudge: Callable[[], None]) -> None:
        """Collect until nothing is pending or the time is up, with a nudge now and every few seconds."""
        failure: Exception | None = None
        due = self.clock()
        limit = due + self.pause_limit_s
        while self.pending and (now := self.clock()) < limit:
            if now >= due:
                nudge()
                due = now + self.pause_repeat_s
            await self.pending.wait(min(due, limit) - now)
            try:
                await to_the_end(self.collect())
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
