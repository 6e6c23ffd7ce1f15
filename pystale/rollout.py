"""One group on its way through an agent loop: tries, outcome, and what is new in it."""

import asyncio
import copy
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from pystale._objects import measure
from pystale.pending import ended, resolved
from pystale.report import score
from pystale.reservations import Reservation
from pystale.state import Status, as_status, group_status, write_status

__all__ = ["AgentLoop", "IsValidSample", "Rollout", "RolloutController"]

logger = logging.getLogger("pystale")

IsValidSample = Callable[[Any], Awaitable[bool] | bool]

# Fields that have one entry per response token, and that a buffer refuses when they have more or less.
_PER_TOKEN = ("response_mask", "response_model_steps", "logprobs")
# Fields that say which group it is; an agent loop has no business with them.
_PLACE = ("group_id", "rerolls", "prompt_model_step")


class AgentLoop(Protocol):
    """Generates groups. Its methods may be plain or async."""

    def generate_group(
        self, group: list[Any], *, enable_partial_rollout: bool
    ) -> Awaitable[Sequence[Any]] | Sequence[Any]:
        """Generate the members of `group` that are not COMPLETED, and set their status.

        COMPLETED members are left as they are and cost no request. With `enable_partial_rollout` the others continue
        from the tokens they have. Without, the first thing done is to drop the tokens they have (and masks, steps and
        log-probabilities with them): they start again from their prompt.

        A call that is cancelled leaves in the states what was generated up to then.

        Returns
        -------
        sequence of states
            The group, the same objects or others, with the same ``group_id``. Members that were aborted have the
            tokens generated so far. FAILED is final: this method has done its own retries. FILTERED is dropped.

        Raises
        ------
        Exception
            Any; the group is tried again, as often as the strategy's ``max_retries`` says.
        """
        ...

    def pause(self) -> Awaitable[None] | None:
        """Abort what is running: calls of :meth:`generate_group` return soon, with ABORTED members.

        Asked again every few seconds while any of them is running. Later calls generate as usual.
        """
        ...


class RolloutController(Protocol):
    """Switches the engines that agent loops share on and off. Its methods may be plain or async."""

    def pause_generation(self) -> Awaitable[None] | None:
        """Stop generating: abort what is running, and hold what is asked for until told to continue."""
        ...

    def continue_generation(self) -> Awaitable[None] | None:
        """Generate again. Also called when nothing was paused."""
        ...


class Rollout:
    """A group given to an agent loop, and what became of it.

    Attributes
    ----------
    group : sequence of states
        As it was drawn, then as it came back.
    attempts : int
        Calls of ``generate_group`` begun.
    outcome : Status or None
        FAILED or FILTERED; None: to be put.
    error : str or None
        Why the last try failed.
    model_step : int
        Trainer step whose weights were served when it was given to the agent loop.
    reservation : Reservation or None
        That the buffer knows of it while it is in flight.
    samples : int
        Members that were to be generated: those not COMPLETED when it was drawn.
    rewards : list of float
        Rewards of the members of a group that came back COMPLETED, before the filter.
    seconds : float
        How long it took.
    """

    __slots__ = (
        "_began",
        "_cut_off",
        "_kept",
        "_kept_tokens",
        "_place",
        "attempts",
        "error",
        "group",
        "model_step",
        "outcome",
        "reservation",
        "rewards",
        "samples",
        "seconds",
    )

    def __init__(self, group: Sequence[Any], *, partial: bool, model_step: int, began: float) -> None:
        self.group = group
        self.model_step = model_step
        self.samples = sum(as_status(state.status) is not Status.COMPLETED for state in group)
        self.rewards: list[float] = []
        self.attempts = 0
        self.reservation: Reservation | None = None
        self.outcome: Status | None = None
        self.error: str | None = None
        self.seconds = 0.0
        self._began = began
        self._cut_off = True  # until generate_group has returned
        self._place = {name: getattr(group[0], name, None) for name in _PLACE}
        self._kept = [state for state in group if partial or as_status(state.status) is Status.COMPLETED]
        self._kept_tokens = sum(map(_tokens, self._kept))

    def oldest_step(self) -> int:
        """Version that the group is as old as when it is given to the agent loop: that of the oldest token it keeps."""
        kept = [measure(state, state.response_model_steps).oldest for state in self._kept]
        return min([self.model_step, *(step for step in kept if step >= 0)])

    def release(self) -> None:
        """It is not in flight any more."""
        if self.reservation is not None:
            self.reservation.release()

    async def run(
        self,
        agent_loop: AgentLoop,
        *,
        partial: bool,
        max_retries: int,
        is_valid: IsValidSample | None,
        pausing: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Generate, try again what raised, and judge what came back. Never raises an Exception."""
        try:
            while self._cut_off and self.outcome is None:
                self.attempts += 1
                try:
                    returned = agent_loop.generate_group(list(self.group), enable_partial_rollout=partial)
                    self._accept(await resolved(returned))
                except asyncio.CancelledError:
                    return  # its own or ours: the group is put as far as it got
                except Exception as error:
                    self.error = f"{type(error).__name__}: {error}"
                    if pausing():
                        return  # cut off by the pause, most likely; tried again in a later round
                    last = self.attempts > max_retries
                    logger.warning(
                        "generate_group raised in try %d of %d, %s: %s",
                        self.attempts,
                        max_retries + 1,
                        "the group is FAILED" if last else "trying again",
                        self.error,
                        exc_info=last,
                    )
                    if last:
                        self.fail(self.error)
            await self._judge(is_valid)
        finally:
            self.seconds = clock() - self._began

    def _accept(self, returned: Any) -> None:
        if isinstance(returned, (str, bytes)) or not isinstance(returned, Sequence) or not returned:
            raise TypeError(f"generate_group returned {returned!r}; a sequence of at least one state is required")
        given, got = (getattr(group[0], "group_id", None) for group in (self.group, returned))
        if given is not None and got != given:
            raise ValueError(f"generate_group returned group {got!r} for group {given!r}")
        if group_status(returned) is Status.ARCHIVED:
            raise ValueError(f"generate_group returned group {got!r} as ARCHIVED, which says nothing of its outcome")
        self.group = returned
        self._cut_off = False

    async def _judge(self, is_valid: IsValidSample | None) -> None:
        """Find the outcome of a group that came back."""
        if self._cut_off or self.outcome is not None:
            return
        status = group_status(self.group)
        if status is Status.FAILED:
            self.outcome = status
            reasons = (getattr(s, "error_msg", None) for s in self.group if as_status(s.status) is status)
            self.error = next((str(reason) for reason in reasons if reason), "generate_group returned it as FAILED")
        elif status is Status.FILTERED:
            self.outcome = status
        elif status is Status.COMPLETED:
            scores = (score(getattr(state, "reward", None)) for state in self.group)
            self.rewards = [value for value in scores if value is not None]
            if is_valid is None:
                return
            try:
                valid = is_valid(self.group)
                if inspect.isawaitable(valid):
                    # To its end even if cancelled: a group whose check was cut short must not be trained on.
                    check = asyncio.ensure_future(valid)
                    await ended(check)
                    valid = check.result()
            except (Exception, asyncio.CancelledError) as error:
                self.fail(f"is_valid_sample_fn raised {type(error).__name__}: {error}")
                logger.warning(self.error, exc_info=True)
                return
            if not valid:
                self.outcome = Status.FILTERED
                for state in self.group:
                    write_status(state, Status.FILTERED)

    def fail(self, reason: str) -> None:
        """Make the group FAILED."""
        self.outcome, self.error = Status.FAILED, reason
        for state in self.group:
            try:
                write_status(state, Status.FAILED)
            except (TypeError, ValueError):  # what it has is no status
                state.status = Status.FAILED

    def mark_unfinished(self) -> None:
        """Make ABORTED what was not finished, so that a later round takes it up.

        A member that came back as it was drawn (INIT or EXPIRED) was not finished; of a group that was cut off, all
        that is not COMPLETED. EXPIRED would count as expiring once more, and INIT is never drawn again.
        """
        for state in self.group:
            status = as_status(state.status)
            if status in (Status.INIT, Status.EXPIRED) or (self._cut_off and status is not Status.COMPLETED):
                write_status(state, Status.ABORTED)

    def new_tokens(self) -> int:
        """Response tokens that were not there when the group was drawn, or were there and had to be dropped."""
        return max(sum(map(_tokens, self.group)) - self._kept_tokens, 0)

    def countable(self) -> list[Any]:
        """Copies of the states that a buffer can count whatever came back: the group as drawn, with its tokens."""
        copies = [copy.copy(state) for state in self.group]
        for state in copies:
            for name, value in {**dict.fromkeys(_PER_TOKEN), **self._place}.items():
                if hasattr(state, name):
                    setattr(state, name, value)
            try:
                measure(state, None)
            except (TypeError, ValueError):  # no tokens either
                state.response_ids = None
        return copies


def _tokens(state: Any) -> int:
    ids = state.response_ids
    entries = state.response_model_steps if ids is None else ids
    return len(entries) if hasattr(entries, "__len__") else 0
