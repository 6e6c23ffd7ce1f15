"""The partial-rollout client: responses generated in parts, over aborts, faults and changes of weights."""

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from pystale.arguments import checked_seconds
from pystale.backoff import backoff, loop_time
from pystale.buffer import OnRelease
from pystale.call import Call
from pystale.continuation import continued_fields
from pystale.engine import EngineError, EngineOutput, TokenEngine
from pystale.pending import to_the_end
from pystale.side_data import LoadRef, SideData, StoreRef
from pystale.staleness import checked_int
from pystale.state import Status, as_status, length, reset, write_status
from pystale.trace import Trace

__all__ = ["PartialRolloutClient"]

logger = logging.getLogger("pystale")

Group = TypeVar("Group", bound=Sequence[Any])

# An engine coroutine that is cancelled has this long to end before it is given up.
CANCELLED_WITHIN_S = 1.0


class PartialRolloutClient:
    """Generates rollouts with a :class:`~pystale.engine.TokenEngine`, in as many requests as it takes.

    It is an :class:`~pystale.rollout.AgentLoop` for single-turn rollouts, and the generating part of any other.

    With partial rollout on, a response goes on from the prompt and the tokens it has, with what is left of
    ``max_tokens``; one that was aborted at the limit, or whose last token ends it, is finished without a request. With
    partial rollout off its tokens are dropped and it starts again from the prompt. Every token is stamped with the
    model step served when its request went out, or with what the engine reports.

    Aborts that nobody here asked for, and requests that fail, are tried again within bounds. Past a bound the rollout
    is FAILED, with the bound and the last reason in ``error_msg``.

    Parameters
    ----------
    engine : TokenEngine
    model_step : callable
        ``model_step() -> int``: the trainer step of the weights that the engine serves now. Read before each request
        goes out, never after. Where several servers load weights one after the other, it may only rise once all have.
    max_tokens : int, optional
        Longest response, where the rollout's ``sample_params`` do not say (``max_tokens`` or ``max_new_tokens``).
    eos_token_ids : iterable of int
        Tokens that end a response, besides ``stop_token_ids`` of the ``sample_params``.
    max_attempts : int, default 8
        Requests in a row that may bring nothing: that fail, or are aborted by the engine without a token that is kept.
        A request that made the response longer starts the count anew.
    max_seconds : float or None, default 3600.0
        Seconds a rollout may take in one call, waiting included.
    token_budget : int or None, default None
        Tokens that may be generated for a rollout in one call, those dropped by restarts included. A request is sent
        only if all it asks for is left.
    backoff_s, max_backoff_s : float, default 0.5, 30.0
        Waiting time after the first request that brought nothing; it doubles with each, up to the maximum, and a
        random part of up to half is taken off.
    abort_grace_s : float, default 1.0
        Seconds an aborted request has to answer when the call itself is cancelled, so that its tokens are kept.
    load_ref, store_ref : callable, optional
        For engines whose ``routed_experts`` are references: ``load_ref(reference) -> rows`` and
        ``store_ref(rows) -> reference``, plain or async. Called only when a response is continued.
    on_release : callable, optional
        ``on_release(released)``, plain or async, gets a list of ``(state, {field: old value})`` with what no state
        holds any more, each value once: the fields a restart cleared, rows or references that were joined into new
        ones, and those of answers that were not used. The same function can serve a buffer. What it raises is logged.
    trace : Trace, optional
        ``buffer.trace`` of the buffer that the rollouts go to; it gets a line per request.
    clock, sleep, random
        ``clock() -> float`` in seconds (default: that of the event loop), ``sleep(seconds)`` async, and
        ``random() -> float`` in [0, 1).

    Raises
    ------
    TypeError, ValueError
        For a setting that is none of the above.

    Notes
    -----
    For use from one event loop. At every await the states are consistent: per-token fields have one entry per response
    token, and the status fits them. The rules of continuation are those of XTuner (``PartialRolloutHandler``) and verl.

    Examples
    --------
    >>> import asyncio
    >>> from pystale import RolloutState
    >>> from pystale.client import PartialRolloutClient
    >>> from pystale.engine import EngineOutput
    >>> class Engine:
    ...     model_step = 2
    ...     async def generate(self, tokens, sampling_params, request_id):
    ...         self.model_step += 1  # new weights cut the first request short
    ...         if self.model_step == 3:
    ...             return EngineOutput([7, 7], "abort")
    ...         return EngineOutput([8] * sampling_params["max_tokens"], "length")
    ...     async def abort(self, request_id): ...
    >>> engine = Engine()
    >>> client = PartialRolloutClient(engine, lambda: engine.model_step)
    >>> state = RolloutState(prompt_ids=[1], sample_params={"max_tokens": 5})
    >>> _ = asyncio.run(client.generate(state, enable_partial_rollout=True))
    >>> state.response_ids, list(state.response_model_steps), state.finish_reason
    ([7, 7, 8, 8, 8], [2, 2, 3, 3, 3], 'length')
    """

    def __init__(
        self,
        engine: TokenEngine,
        model_step: Callable[[], int],
        *,
        max_tokens: int | None = None,
        eos_token_ids: Iterable[int] = (),
        max_attempts: int = 8,
        max_seconds: float | None = 3600.0,
        token_budget: int | None = None,
        backoff_s: float = 0.5,
        max_backoff_s: float = 30.0,
        abort_grace_s: float = 1.0,
        load_ref: LoadRef | None = None,
        store_ref: StoreRef | None = None,
        on_release: OnRelease | None = None,
        trace: Trace | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        for name in ("generate", "abort"):
            if not callable(getattr(engine, name, None)):
                raise TypeError(f"engine must have a method {name}, got {type(engine).__name__}")
        clock = clock or loop_time
        given: dict[str, Any] = {"model_step": model_step, "clock": clock, "sleep": sleep, "random": random}
        for name, value in given.items():
            if not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        self.engine = engine
        self.model_step = model_step
        self.max_tokens = None if max_tokens is None else checked_int("max_tokens", max_tokens, at_least=1)
        self.eos_token_ids = frozenset(checked_int("eos_token_ids", i, at_least=0) for i in eos_token_ids)
        self.max_attempts = checked_int("max_attempts", max_attempts, at_least=1)
        self.max_seconds = None if max_seconds is None else checked_seconds("max_seconds", max_seconds)
        self.token_budget = None if token_budget is None else checked_int("token_budget", token_budget, at_least=1)
        self.backoff_s = checked_seconds("backoff_s", backoff_s)
        self.max_backoff_s = checked_seconds("max_backoff_s", max_backoff_s)
        self.abort_grace_s = checked_seconds("abort_grace_s", abort_grace_s)
        self._side_data = SideData(load_ref, store_ref, on_release)
        self._trace = trace
        self._clock = clock
        self._sleep = sleep
        self._random = random
        self._calls: dict[Call, None] = {}

    # What an agent loop does

    async def generate_group(self, group: Group, *, enable_partial_rollout: bool) -> Group:
        """Generate the members of `group` that are not COMPLETED, all at once.

        COMPLETED members cost no request and stay as they are.

        Returns
        -------
        sequence of states
            `group` itself.

        Raises
        ------
        TypeError, ValueError
            If a member cannot be generated (see :meth:`generate`); then nothing was sent or changed.
        """
        calls = [
            self._call(state, enable_partial_rollout)
            for state in group
            if as_status(state.status) is not Status.COMPLETED
        ]
        # Exceptions are gathered too, so that no member is left running behind one that raised.
        for outcome in await asyncio.gather(*map(self._generate, calls), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return group

    async def generate(self, state: Any, *, enable_partial_rollout: bool) -> Any:
        """Generate one rollout until it is COMPLETED, paused (ABORTED) or FAILED.

        Parameters
        ----------
        state : RolloutState or alike
            With ``prompt_ids``; ``sample_params`` a mapping or a pydantic model. One that is COMPLETED is left alone.
            ``response_mask`` stays None if it is; otherwise new tokens get ones.
        enable_partial_rollout : bool
            Whether to keep the tokens of aborted requests, this call's and earlier ones.

        Returns
        -------
        RolloutState or alike
            The same object.

        Raises
        ------
        TypeError, ValueError
            Before anything is sent or changed: no prompt, no ``max_tokens``, per-token fields of different lengths,
            tokens to continue from that have no model steps.
        CancelledError
            If cancelled. The request is aborted at the engine; the state is ABORTED with the tokens it has.
        """
        if as_status(state.status) is not Status.COMPLETED:
            await self._generate(self._call(state, enable_partial_rollout))
        return state

    async def pause(self) -> None:
        """Abort what is being generated now: those calls return soon, ABORTED with the tokens they have.

        A response that ends by itself meanwhile is COMPLETED all the same. Later calls generate as usual.
        """
        requests = []
        for call in self._calls:
            if not call.paused.done():
                call.paused.set_result(None)
            if call.request_id is not None:
                requests.append(self._abort(call.request_id))
        await asyncio.gather(*requests)

    # One call

    def _call(self, state: Any, partial: bool) -> Call:
        deadline = None if self.max_seconds is None else self._clock() + self.max_seconds
        return Call.of(state, partial, max_tokens=self.max_tokens, eos_token_ids=self.eos_token_ids, deadline=deadline)

    async def _generate(self, call: Call) -> None:
        self._calls[call] = None
        try:
            await self._run(call)
        except asyncio.CancelledError:
            if as_status(call.state.status) is not Status.COMPLETED:
                _end(call.state, Status.ABORTED, "abort")
            raise
        finally:
            del self._calls[call]

    async def _run(self, call: Call) -> None:
        state = call.state
        if not call.partial:
            await self._restart(call)
        while True:
            if (finish_reason := call.finished()) is not None:
                return _end(state, Status.COMPLETED, finish_reason)
            if call.paused.done():
                return _end(state, Status.ABORTED, "abort")
            delay = backoff(call.failures, self.backoff_s, self.max_backoff_s, self._random)
            if bound := self._bound_reached(call, delay):
                return _end(state, Status.FAILED, "error", f"{bound}; last reason: {call.reason or 'none'}")
            if delay:
                await self._wait(call.paused, delay)
                if call.paused.done():
                    continue
            served = checked_int("model_step", self.model_step(), at_least=0)
            try:
                output = await self._request(call, served)
            except Exception as error:
                call.failed(f"{type(error).__name__}: {error}")
                if isinstance(error, EngineError) and not error.retriable and not call.paused.done():
                    return _end(state, Status.FAILED, "error", f"the engine refused the request: {error}")
                continue
            status, new = call.verdict(output), len(output.token_ids)
            call.spent += new
            if status is Status.FAILED:
                await to_the_end(self._drop(state, output))
                call.failed(f"the engine answered {new} tokens with finish reason {output.finish_reason!r}")
                continue
            try:
                await to_the_end(self._absorb(call, output, served, status))
            except Exception as error:
                return _end(
                    state, Status.FAILED, "error", f"unusable answer of the engine: {type(error).__name__}: {error}"
                )
            if status is Status.COMPLETED:
                return None
            if call.finished() is None and not call.paused.done():
                if call.partial and new:
                    call.failures = 0
                else:
                    call.failed(f"the engine aborted the request by itself after {new} tokens")
                    await self._restart(call)

    def _bound_reached(self, call: Call, delay: float) -> str:
        """The bound that the next request would pass, empty if none."""
        if call.failures >= self.max_attempts:
            return f"max_attempts: {call.failures} requests in a row brought nothing"
        if call.deadline is not None and self._clock() + delay >= call.deadline:
            return f"max_seconds: not done within {self.max_seconds} s"
        if self.token_budget is not None and call.spent + call.left > self.token_budget:
            spent = f"{call.spent} of {self.token_budget} tokens are spent"
            return f"token_budget: {spent}, the next request takes {call.left}"
        return ""

    async def _restart(self, call: Call) -> None:
        """Drop the tokens of a rollout that does not go on from them."""
        state = call.state
        if call.partial or not (
            call.generated or length(state.response_model_steps) or getattr(state, "routed_experts", None) is not None
        ):
            return
        cleared = reset(state)
        write_status(state, Status.INIT)
        await to_the_end(self._side_data.release(state, cleared))

    # One request

    async def _request(self, call: Call, served: int) -> EngineOutput:
        """Send a request and wait for its answer; `served` is the model step from before it goes out."""
        request_id = uuid.uuid4().hex  # all of one length: engines abort by prefix
        request = asyncio.ensure_future(self._send(call, request_id))
        call.request_id = request_id
        began = 0.0 if self._trace is None else self._clock()
        try:
            await self._wait(request, None if call.deadline is None else call.deadline - self._clock())
        except asyncio.CancelledError:
            late = await self._cut_off(request, request_id)
            self._note(call, served, late, "abort", began)
            if late is not None:
                await self._keep(call, late, served)
            raise
        finally:
            call.request_id = None
        if not request.done():
            late = await self._cut_off(request, request_id)
            self._note(call, served, late, "timeout", began)
            if late is not None:
                await self._drop(call.state, late)
            raise EngineError("the engine did not answer in time")
        self._note(call, served, None if _look_at(request) else request.result(), "error", began)
        if request.cancelled():
            raise EngineError("the engine cancelled the request")
        return request.result()

    def _note(self, call: Call, served: int, output: EngineOutput | None, otherwise: str, began: float) -> None:
        """Have a request that is over in the trace; `otherwise`: why there is no output."""
        if self._trace is not None:
            self._trace.leg(
                getattr(call.state, "group_id", None),
                getattr(call.state, "rollout_id", None),
                model_step=served,
                tokens=0 if output is None else len(output.token_ids),
                reason=otherwise if output is None else str(output.finish_reason),
                seconds=self._clock() - began,
            )

    async def _send(self, call: Call, request_id: str) -> EngineOutput:
        if call.paused.done():  # between creating this task and its first step: too early for the engine to abort it
            return EngineOutput((), "abort")
        output = await self.engine.generate(call.tokens(), call.request_params(), request_id)
        if not isinstance(output, EngineOutput):
            raise TypeError(f"the engine must return an EngineOutput, got {type(output).__name__}")
        return output

    async def _cut_off(self, request: "asyncio.Task[EngineOutput]", request_id: str) -> EngineOutput | None:
        """Abort a request that nobody waits for any more; what it answers within the grace, if anything."""
        abort = asyncio.ensure_future(self._abort(request_id))
        try:
            for task in (abort, request):
                await self._wait(task, self.abort_grace_s)
        finally:
            for task in (abort, request):
                task.cancel()
            await asyncio.wait((abort, request), timeout=CANCELLED_WITHIN_S)
            request.add_done_callback(_look_at)
        return request.result() if request.done() and not _look_at(request) else None

    async def _abort(self, request_id: str) -> None:
        try:
            await self.engine.abort(request_id)
        except Exception as error:
            logger.warning(
                "the engine did not take the abort of request %s: %s: %s", request_id, type(error).__name__, error
            )

    async def _wait(self, future: "asyncio.Future[Any]", seconds: float | None) -> None:
        """Until `future` is done or `seconds` have passed. Neither they nor a cancellation end `future`."""
        if future.done() or seconds is None:
            await asyncio.wait((future,))
            return
        timer = asyncio.ensure_future(self._sleep(max(seconds, 0.0)))
        try:
            await asyncio.wait((future, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            await asyncio.wait((timer,))

    # What an answer changes

    async def _keep(self, call: Call, output: EngineOutput, served: int) -> None:
        """Take what a request answered when its call was cancelled already, if it can be used."""
        try:
            if (status := call.verdict(output)) is Status.FAILED:
                await to_the_end(self._drop(call.state, output))
            else:
                await to_the_end(self._absorb(call, output, served, status))
        except Exception:
            logger.warning("what a cancelled request answered is dropped", exc_info=True)

    async def _absorb(self, call: Call, output: EngineOutput, served: int, status: Status) -> None:
        """Append what a request brought to its state, and release what it replaced; all or, if it raises, nothing."""
        state = call.state
        kept, added = getattr(state, "routed_experts", None), output.routed_experts
        try:
            new = len(output.token_ids)
            if new > call.left:
                raise ValueError(f"{new} tokens for a request of at most {call.left}")
            fields = continued_fields(state, output, output.runs(served), call.prompt)
            rows = await self._side_data.joined(
                kept, added, sent=len(call.prompt) + call.generated, generated=call.generated, new=new
            )
        except Exception:
            await self._drop(state, output)
            raise
        for name, value in fields.items():
            setattr(state, name, value)
        if rows is not kept:
            state.routed_experts = rows
        _end(state, status, "abort" if status is Status.ABORTED else output.finish_reason)
        await self._side_data.release_all_but(rows, state, kept, added)

    async def _drop(self, state: Any, output: EngineOutput) -> None:
        """Release what an answer that is not used refers to."""
        await self._side_data.release_all_but(getattr(state, "routed_experts", None), state, output.routed_experts)


def _end(state: Any, status: Status, finish_reason: str | None, error_msg: str | None = None) -> None:
    write_status(state, status)
    state.finish_reason = finish_reason
    state.error_msg = error_msg


def _look_at(task: "asyncio.Task[Any]") -> bool:
    """Whether a task failed or was cancelled; asyncio reports exceptions that nobody looked at."""
    return task.cancelled() or task.exception() is not None
