"""A client of verl's LLM servers that goes on after aborts, within bounds, and knows which weights made its tokens."""

import asyncio
import copy
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from pystale.arguments import checked_seconds
from pystale.backoff import backoff, loop_time
from pystale.continuation import continued_params
from pystale.side_data import joined_rows
from pystale.staleness import checked_int

__all__ = ["AbortAwareClient", "RetriesExhausted"]

logger = logging.getLogger("pystale")

ABORTED = ("abort", "aborted")
LIMITS = ("max_tokens", "max_new_tokens")
# What is wrong with a request is wrong with it the next time, too.
FAULTS = (TypeError, ValueError, LookupError, AssertionError, NotImplementedError)


class RetriesExhausted(RuntimeError):
    """A response could not be generated within the bounds; the message names the bound and the last reason."""


class AbortAwareClient:
    """Makes interruptions of rollouts invisible to an agent loop.

    A request that is aborted goes on from prompt and tokens so far with what is left of the budget. The versions of the
    answer are those of the legs that yielded tokens: a leg that was aborted before its first token counts for neither.

    Parameters
    ----------
    client : LLMServerClient or alike
        ``await client.generate(request_id, prompt_ids=, sampling_params=, ...)`` sends one request; its answer has
        ``token_ids``, ``log_probs``, ``routed_experts``, ``stop_reason``, ``num_preempted`` and ``extra_fields`` with
        ``global_steps``. verl's ``FullyAsyncLLMServerClient`` retries by itself, without bounds, and is not for here.
    max_tokens : int, optional
        Longest response where the sampling parameters do not say (``max_tokens`` or ``max_new_tokens``); verl's
        ``rollout.response_length``. Without either the budget is the server's, anew for each leg.
    eos_token_ids : iterable of int
        Tokens that end a response, besides ``stop_token_ids`` of the sampling parameters: aborted right after one, it
        is finished without a further request.
    max_attempts : int, default 8
        Requests in a row that may bring nothing: that fail, or are aborted before a token.
    max_seconds : float or None, default 3600.0
        Seconds a response may take, waiting included. A request that is out is not cut short.
    backoff_s, max_backoff_s : float, default 0.5, 30.0
        Waiting time after the first request that brought nothing; it doubles with each, up to the maximum, and a
        random part of up to half is taken off.
    clock, sleep, random : callable
        ``clock() -> float`` in seconds (default: that of the event loop), ``sleep(seconds)`` async, and
        ``random() -> float`` in [0, 1).

    Raises
    ------
    TypeError, ValueError
        For a setting that is none of the above.

    Notes
    -----
    Rules of continuation are those of verl's ``FullyAsyncLLMServerClient``, except that retries are bounded and depend
    on no other setting, that failures of a server are retried too, and that legs without tokens leave the versions
    alone.

    Examples
    --------
    >>> import asyncio
    >>> from types import SimpleNamespace
    >>> from pystale.integrations.verl import AbortAwareClient
    >>> class Server:
    ...     version = 3
    ...     async def generate(self, request_id, *, prompt_ids, sampling_params):
    ...         self.version += 1
    ...         tokens, reason = ([7, 7], "aborted") if self.version == 4 else ([8], "completed")
    ...         return SimpleNamespace(token_ids=tokens, log_probs=None, routed_experts=None, num_preempted=None,
    ...                                stop_reason=reason, extra_fields={"global_steps": self.version})
    >>> client = AbortAwareClient(Server())
    >>> answer = asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 9}))
    >>> answer.token_ids, answer.extra_fields["min_global_steps"], answer.extra_fields["max_global_steps"]
    ([7, 7, 8], 4, 5)
    """

    def __init__(
        self,
        client: Any,
        *,
        max_tokens: int | None = None,
        eos_token_ids: Iterable[int] = (),
        max_attempts: int = 8,
        max_seconds: float | None = 3600.0,
        backoff_s: float = 0.5,
        max_backoff_s: float = 30.0,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        if not callable(getattr(client, "generate", None)):
            raise TypeError(f"client must have a method generate, got {type(client).__name__}")
        clock = clock or loop_time
        for name, value in (("clock", clock), ("sleep", sleep), ("random", random)):
            if not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        self.client = client
        self.max_tokens = None if max_tokens is None else checked_int("max_tokens", max_tokens, at_least=1)
        self.eos_token_ids = frozenset(checked_int("eos_token_ids", i, at_least=0) for i in eos_token_ids)
        self.max_attempts = checked_int("max_attempts", max_attempts, at_least=1)
        self.max_seconds = None if max_seconds is None else checked_seconds("max_seconds", max_seconds)
        self.backoff_s = checked_seconds("backoff_s", backoff_s)
        self.max_backoff_s = checked_seconds("max_backoff_s", max_backoff_s)
        self._clock = clock
        self._sleep = sleep
        self._random = random

    async def generate(
        self, request_id: Any, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **options: Any
    ) -> Any:
        """Generate a response in as many requests as it takes.

        Parameters
        ----------
        request_id, options
            Handed on with every request.
        prompt_ids : sequence of int
        sampling_params : mapping
            Never changed.

        Returns
        -------
        TokenOutput or alike
            A copy of the last answer with all tokens, log-probabilities and routed experts, and in ``extra_fields``
            ``min_global_steps`` and ``max_global_steps`` over the legs that yielded tokens (of the last leg if none
            did) and ``global_steps``, the version of the last leg.

        Raises
        ------
        RetriesExhausted
            Past a bound.
        ValueError
            If the legs do not fit together, such as log-probabilities in some of them only.
        """
        prompt = list(prompt_ids)
        response = _Response(prompt, dict(sampling_params), self.max_tokens, self.eos_token_ids)
        deadline = None if self.max_seconds is None else self._clock() + self.max_seconds
        failures, reason, cause = 0, "", None
        while True:
            delay = backoff(failures, self.backoff_s, self.max_backoff_s, self._random)
            if failures >= self.max_attempts:
                raise RetriesExhausted(
                    f"max_attempts: {failures} requests in a row brought nothing; last reason: {reason}"
                ) from cause
            if deadline is not None and self._clock() + delay >= deadline:
                raise RetriesExhausted(
                    f"max_seconds: not done within {self.max_seconds} s; last reason: {reason or 'none'}"
                ) from cause
            if delay:
                await self._sleep(delay)
            try:
                leg = await self.client.generate(
                    request_id,
                    prompt_ids=[*prompt, *response.token_ids],
                    sampling_params=response.request_params(),
                    **options,
                )
            except FAULTS:
                raise
            except Exception as error:
                failures, reason, cause = failures + 1, f"{type(error).__name__}: {error}", error
                logger.warning("request %s failed and is tried again: %s", request_id, reason)
                continue
            response.add(leg)
            if (ended := response.ended(leg)) is not None:
                return response.answer(leg, ended)
            if leg.token_ids:
                failures = 0
            else:
                failures += 1
            reason, cause = f"aborted after {len(leg.token_ids)} tokens", None


class _Response:
    """A response so far."""

    def __init__(
        self, prompt: list[int], params: dict[str, Any], max_tokens: int | None, eos_token_ids: frozenset[int]
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.limit = next((name for name in LIMITS if params.get(name) is not None), "max_tokens")
        given = params.get(self.limit)
        self.max_tokens = max_tokens if given is None else checked_int(self.limit, given, at_least=1)
        stop_ids = frozenset(params.get("stop_token_ids") or ())
        self.end_ids = stop_ids if params.get("ignore_eos") else stop_ids | eos_token_ids
        self.token_ids: list[int] = []
        self.log_probs: list[float] | None = None
        self.routed_experts: Any = None
        self.num_preempted: int | None = None
        self.min_global_steps: int | None = None
        self.max_global_steps: int | None = None

    def request_params(self) -> dict[str, Any]:
        """Parameters of the next request: the caller's, with budgets less what has been generated."""
        generated = len(self.token_ids)
        left = None if self.max_tokens is None else self.max_tokens - generated
        return continued_params(self.params, self.limit, left, generated)

    def add(self, leg: Any) -> None:
        """Append an answer; all or, if it raises, nothing."""
        new, had = len(leg.token_ids), len(self.token_ids)
        if leg.num_preempted is not None:
            self.num_preempted = (self.num_preempted or 0) + leg.num_preempted
        if not new:
            return
        given = leg.log_probs
        if given is not None and len(given) != new:
            raise ValueError(f"log_probs has {len(given)} entries, token_ids has {new}; one entry each is required")
        if had and (given is None) != (self.log_probs is None):
            raise ValueError(
                f"{new} new tokens came {'without' if given is None else 'with'} log_probs, the {had} before them "
                "are the other way; all tokens of a response have them or none"
            )
        self.routed_experts = joined_rows(
            self.routed_experts, leg.routed_experts, sent=len(self.prompt) + had, generated=had, new=new
        )
        self.token_ids.extend(leg.token_ids)
        if given is not None:
            self.log_probs = [*(self.log_probs or ()), *given]
        for version in _versions(leg):
            low, high = self.min_global_steps, self.max_global_steps
            self.min_global_steps = version if low is None else min(low, version)
            self.max_global_steps = version if high is None else max(high, version)

    def ended(self, leg: Any) -> str | None:
        """Why the response is over: a stop reason of verl's; None if it goes on."""
        if leg.stop_reason not in ABORTED:
            return leg.stop_reason or "completed"
        if self.max_tokens is not None and len(self.token_ids) >= self.max_tokens:
            return "length"
        if self.token_ids and self.token_ids[-1] in self.end_ids:
            return "completed"
        return None

    def answer(self, leg: Any, stop_reason: str) -> Any:
        """A copy of the last leg that holds the whole response."""
        low, high = self.min_global_steps, self.max_global_steps
        if not self.token_ids:
            versions = _versions(leg)
            low, high = min(versions, default=None), max(versions, default=None)
        fields = {
            "token_ids": self.token_ids,
            "log_probs": leg.log_probs if not self.token_ids else self.log_probs,
            "routed_experts": leg.routed_experts if not self.token_ids else self.routed_experts,
            "num_preempted": self.num_preempted,
            "stop_reason": stop_reason,
            "extra_fields": {**leg.extra_fields, "min_global_steps": low, "max_global_steps": high},
        }
        whole = copy.copy(leg)
        for name, value in fields.items():
            setattr(whole, name, value)
        return whole


def _versions(leg: Any) -> list[int]:
    """Versions of the weights that an answer reports: where it was continued inside, the oldest and the newest."""
    reported = leg.extra_fields.get
    versions = [reported("min_global_steps"), reported("max_global_steps")]
    if versions == [None, None]:
        versions = [reported("global_steps")]
    return [version for version in versions if version is not None]
