"""A task's production line: draw, generate, collect until enough is there, pause, and lose nothing on the way."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from pystale.buffer import ReplayBuffer
from pystale.pending import PendingTasks, resolved, to_the_end, together
from pystale.plan import Plan, oversampled, pools_to_draw_from
from pystale.report import ProduceBatchStatus, ProduceReport, ProductionStalled
from pystale.reservations import StragglersOverdue, described
from pystale.rollout import AgentLoop, IsValidSample, Rollout
from pystale.sampler import PromptsExhausted, Sampler
from pystale.state import Status

__all__ = [
    "Line",
    "LineSettings",
    "Plan",
    "ProductionStalled",
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


class LineSettings(Protocol):
    """What a line needs to know of a strategy's settings."""

    @property
    def over_sample_threshold(self) -> float: ...
    @property
    def enable_partial_rollout(self) -> bool: ...
    @property
    def tail_batch_trigger_size(self) -> int: ...
    @property
    def max_retries(self) -> int: ...
    @property
    def is_valid_sample_fn(self) -> IsValidSample | None: ...
    @property
    def should_continue_fn(self) -> ShouldContinue | None: ...


class Line:
    """One task's production: where it draws, what is running, and what it counts.

    Attributes
    ----------
    train_step : int
        Trainer step that takes next what is put.
    model_step : int
        Trainer step whose weights are served.
    report : ProduceReport
        What was done so far.
    """

    def __init__(
        self,
        *,
        agent_loop: AgentLoop,
        sampler: Sampler,
        buffer: ReplayBuffer,
        task_name: str,
        settings: LineSettings,
        train_step: int,
        model_step: int,
        pause_repeat_s: float,
        pause_limit_s: float,
    ) -> None:
        self.agent_loop = agent_loop
        self.sampler = sampler
        self.buffer = buffer
        self.task_name = task_name
        self.settings = settings
        self.train_step = train_step
        self.model_step = model_step
        self.pause_repeat_s = pause_repeat_s
        self.pause_limit_s = pause_limit_s
        self.plan = Plan(0, 0, 0, (), False)
        self.report = ProduceReport(task_name, 0, train_step, model_step)
        self.pending: PendingTasks[Rollout] = PendingTasks()
        self.pausing = False
        self.woken = False
        self.began: float | None = None  # since when production is under way and not counted yet
        self.fruitless = 0  # groups in a row that brought nothing
        self.without_completed = 0  # groups in a row that were not COMPLETED

    @staticmethod
    def clock() -> float:
        return asyncio.get_running_loop().time()

    # What lines that work in the background do otherwise

    period = "This round"
    """What the counts of the report are about, in messages."""

    def consumed(self) -> int:
        """Groups taken so far that the target counts."""
        return 0

    def ended(self) -> ProduceBatchStatus | None:
        """Why the round must end now, None while it may go on."""
        return None

    async def stuck(self, reason: ProductionStalled | PromptsExhausted) -> None:
        """Nothing is running, and there is nothing to run."""
        raise reason

    # Producing

    async def produce(self, share: int, target: int) -> ProduceBatchStatus:
        """Draw and collect until `target` groups are there; what is running then goes on running.

        Cancelling it leaves what is running to :meth:`pause` or :meth:`cancel`.
        """
        settings = self.settings
        expired = await self.buffer.count(self.task_name, Status.EXPIRED)
        pools, tail_batch = pools_to_draw_from(settings.tail_batch_trigger_size, expired)
        scheduled = oversampled(target, 0.0 if tail_batch else settings.over_sample_threshold, share)
        self.plan = Plan(share, target, scheduled, pools, tail_batch)
        self.label_report()
        self.began = self.clock()
        try:
            return await self.fill()
        finally:
            self.count_time()
            self.began = None

    def take_report(self) -> ProduceReport:
        """What was done since the last call, or at all."""
        self.count_time()
        report = self.report
        self.report = ProduceReport(self.task_name, 0, self.train_step, self.model_step)
        self.label_report()
        return report

    def count_time(self) -> None:
        if self.began is not None:
            now = self.clock()
            self.report.produce_s += now - self.began
            self.began = now

    def label_report(self) -> None:
        """Write into the report which round it is about."""
        report, plan = self.report, self.plan
        report.batch_size, report.train_step, report.model_step = plan.share, self.train_step, self.model_step
        report.scheduled, report.tail_batch = plan.scheduled, plan.tail_batch

    async def fill(self) -> ProduceBatchStatus:
        plan, should_continue = self.plan, self.settings.should_continue_fn
        while True:
            self.woken = False
            if (ended := self.ended()) is not None:
                return ended
            available = self.consumed() + await self.buffer.count(self.task_name, Status.COMPLETED)
            if should_continue is None:
                going_on = available < plan.target
            else:
                going_on = await resolved(should_continue(available, plan.target))
            if not going_on:
                return ProduceBatchStatus.NORMAL
            hopeless = self.hopeless()
            missing = 0 if hopeless else plan.scheduled - available - len(self.pending)
            if missing <= 0 and not self.pending and not hopeless:
                missing = plan.share  # a should_continue_fn wants more than was scheduled
            await self.spawn(missing)
            if self.woken:
                continue
            if not self.pending:
                if available >= plan.target:
                    return ProduceBatchStatus.NORMAL
                await self.stuck(await self.reason(hopeless))
                continue
            await self.pending.wait()
            await to_the_end(self.collect())

    def wake(self) -> None:
        """Have the round look again at what there is: something else than its own groups has changed."""
        self.woken = True
        self.pending.wake()

    async def spawn(self, n: int) -> None:
        """Draw up to `n` groups and start them."""
        for _ in range(n):
            group = await self.draw()
            if group is None:
                return
            rollout = self.rollout(group)
            if self.ended() is not None:
                await to_the_end(self.store(rollout))  # drawn, but too late
                return
            self.start(rollout)

    async def draw(self) -> Sequence[Any] | None:
        """A group to generate, None when there is none at the moment."""
        for pools in (self.plan.pools, (Status.EXPIRED, Status.ABORTED)):
            try:
                group = await resolved(self.sampler.sample(self.task_name, pools))
            except PromptsExhausted:
                # Without new prompts the EXPIRED pool may never grow to its trigger: then it is not waited for.
                if Status.EXPIRED in pools or not await self.buffer.count(self.task_name, Status.EXPIRED):
                    return None
                continue
            if isinstance(group, (str, bytes)) or not isinstance(group, Sequence) or not group:
                raise TypeError(f"the sampler gave {group!r}; sample returns a sequence of at least one state")
            return group
        return None

    def rollout(self, group: Sequence[Any]) -> Rollout:
        partial = self.settings.enable_partial_rollout
        return Rollout(group, partial=partial, model_step=self.model_step, began=self.clock())

    def reserve(self, rollout: Rollout) -> None:
        """Tell a buffer whose takes wait for stragglers that a group is in flight."""
        if not self.buffer.wait_for_stragglers:
            return
        group_id = getattr(rollout.group[0], "group_id", None)
        try:
            rollout.reservation = self.buffer.reserve(group_id, self.task_name, model_step=rollout.oldest_step())
        except (TypeError, ValueError) as error:  # what is wrong with it is said when it is put
            logger.warning("task %r: nobody will wait for group %r: %s", self.task_name, group_id, error)

    def start(self, rollout: Rollout) -> None:
        for state in rollout.group:
            if getattr(state, "prompt_model_step", self) is None:
                state.prompt_model_step = rollout.model_step
        self.reserve(rollout)
        settings = self.settings
        self.pending.schedule(
            rollout,
            rollout.run(
                self.agent_loop,
                partial=settings.enable_partial_rollout,
                max_retries=settings.max_retries,
                is_valid=settings.is_valid_sample_fn,
                pausing=lambda: self.pausing,
                clock=self.clock,
            ),
        )
        self.report.spawned += 1

    # Collecting

    async def collect(self) -> None:
        """Put or reject every rollout that has ended; a fault in one does not keep the others.

        They are put side by side, in the order in which they ended: with a journal, all of them wait for one sync of
        the disk, and not each for its own.
        """
        await together(*[self.collect_one() for _ in range(self.pending.claimable)], keep_going=True)

    async def collect_one(self) -> None:
        # Claimed here, and not before: nothing may look between this and the put, when the group would be nowhere.
        rollout = self.pending.claim()
        if rollout is None:
            return
        try:
            await self.settle(rollout)
        except Exception:
            logger.exception("task %r: a group could not be settled", self.task_name)
            raise

    async def settle(self, rollout: Rollout) -> None:
        """Put or reject a rollout, and count it."""
        tokens = rollout.new_tokens()
        outcome = await self.store(rollout)
        report, name = self.report, outcome.value
        setattr(report, name, getattr(report, name) + 1)
        if outcome is Status.FAILED:
            report.failed_samples += rollout.samples
        elif outcome is Status.FILTERED:
            report.filtered_samples += rollout.samples
        report.produced_samples += rollout.samples
        report.produced_tokens += tokens
        report.raw_reward_sum += sum(rollout.rewards)
        report.raw_reward_count += len(rollout.rewards)
        report.retried += max(rollout.attempts - 1, 0)
        report.group_s.append(rollout.seconds)
        report.last_error = rollout.error or report.last_error
        nothing = outcome in (Status.FAILED, Status.EXPIRED) or (outcome is Status.ABORTED and tokens == 0)
        self.fruitless = self.fruitless + 1 if nothing else 0
        self.without_completed = 0 if outcome is Status.COMPLETED else self.without_completed + 1

    async def store(self, rollout: Rollout) -> Status:
        """Put a rollout into the buffer, or reject it there. Returns what became of it."""
        try:
            return await self._store(rollout)
        finally:
            rollout.release()

    async def _store(self, rollout: Rollout) -> Status:
        outcome = rollout.outcome
        if outcome not in (Status.FAILED, Status.FILTERED):
            try:
                rollout.mark_unfinished()
                return await self.buffer.put(
                    rollout.group, self.task_name, model_step=rollout.model_step, train_step=self.train_step
                )
            except (TypeError, ValueError) as error:
                logger.warning("task %r: the buffer refused a group: %s", self.task_name, error)
                rollout.fail(f"the buffer refused a group: {error}")
                outcome = Status.FAILED
        try:
            await self.buffer.reject(rollout.group, self.task_name, outcome.value)
        except (TypeError, ValueError):
            # It may be anything but well formed: a continued response that failed has steps for its earlier tokens
            # only, and an agent loop may have written to what is none of its business. It is counted all the same.
            rollout.group = rollout.countable()
            await self.buffer.reject(rollout.group, self.task_name, outcome.value)
        return outcome

    async def tend_stragglers(self) -> None:
        """Collect until nothing of this line is running that a take of its share would wait for.

        For a line that is about to be paused, where the buffer's takes wait for stragglers: paused work stays as old as
        it is, and would expire before it is trained.

        Raises
        ------
        StragglersOverdue
            If they take longer than the buffer allows.
        """
        buffer = self.buffer
        if not buffer.wait_for_stragglers:
            return
        wanted, began, limit = {self.task_name: self.plan.share}, self.clock(), buffer.straggler_timeout_s
        try:
            while True:
                running = {rollout.reservation for rollout in self.pending.running()}
                awaited = await buffer.stragglers(wanted, train_step=self.train_step)
                if running.isdisjoint(awaited):
                    return
                left = began + limit - self.clock()
                if left <= 0:
                    ours = [reservation for reservation in awaited if reservation in running]
                    raise StragglersOverdue(
                        f"task {self.task_name!r}, train_step {self.train_step}, model_step {self.model_step}: work "
                        f"that later batches could not train in time has not come back within {limit} s. "
                        f"{described(ours, time.monotonic())}. {self.counts()}"
                    )
                await self.pending.wait(left)
                await to_the_end(self.collect())
        finally:
            self.report.straggler_s += self.clock() - began

    def hopeless(self) -> str:
        """Why drawing more would not help, empty while it may.

        Groups still running may disprove it, for example where one broken worker fails at once all that it is given
        while others take minutes. So drawing stops, and the round gives up only when nothing is running any more.
        """
        plan = self.plan
        share = max(plan.share + plan.scheduled - plan.target, FRUITLESS_GROUPS)
        if self.fruitless >= share:
            return f"the last {self.fruitless} groups failed, expired at once, or came back empty"
        if self.without_completed >= FRUITLESS_SHARES * share:
            return f"none of the last {self.without_completed} groups came back COMPLETED and valid"
        return ""

    async def reason(self, hopeless: str) -> ProductionStalled | PromptsExhausted:
        """Why nothing can go on, with all there is to know about the round."""
        report, name, plan = self.report, self.task_name, self.plan
        others = report.completed + report.aborted + report.expired + report.filtered
        exhausted = not hopeless and (others > 0 or report.failed == 0)
        why = hopeless or "prompts are exhausted, no pool has a group left to generate, and nothing is running"
        stored = (await self.buffer.count_statuses([name], Status))[name]
        pools = ", ".join(f"{status.name} {n}" for status, n in stored.items() if n) or "nothing"
        message = (
            f"task {name!r}, train_step {self.train_step}, model_step {self.model_step}: {why}. "
            f"Wanted {plan.target - self.consumed()} COMPLETED groups, stored: {pools}. {self.counts()}"
        )
        return (PromptsExhausted if exhausted else ProductionStalled)(message)

    def counts(self) -> str:
        """What was drawn and what became of it, for a message."""
        report = self.report
        return (
            f"{self.period} drew {report.spawned}: {report.completed} completed, {report.aborted} aborted, "
            f"{report.expired} expired, {report.failed} failed, {report.filtered} filtered, {report.retried} retries"
            + (", in tail batch mode" if self.plan.tail_batch else "")
            + f". Last error: {report.last_error or 'none'}"
        )

    # Stopping

    async def pause(self) -> None:
        """Have the agent loop abort what is running and collect it; cancel what does not stop in time."""
        self.pausing = True
        if not self.pending:
            return
        began = self.clock()
        try:
            await self.stop()
        finally:
            self.report.pause_s += self.clock() - began

    async def stop(self) -> None:
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
                    self.task_name,
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
            logger.warning("task %r: the request to pause failed", self.task_name, exc_info=True)

    async def cancel(self) -> None:
        """Cancel what is running and collect it; give up on what does not even end then."""
        self.pausing = True
        try:
            await self.drain(self.pending.cancel)
        finally:
            for rollout in self.pending.abandon():
                rollout.fail(f"it did not end within {self.pause_limit_s} s of being cancelled")
                logger.error("task %r: a group is given up: %s", self.task_name, rollout.error)
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
