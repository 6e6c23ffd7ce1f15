"""The engine: decodes many rollouts at once, token by token, as one asyncio task.

One forward pass per decode step serves every running response. Each token is kept with its log-probability and with
the model step of the weights that produced it, read before the step that generates it. A pause takes every running
response off and gives back what it has; it continues later, from its tokens, under whatever weights are loaded then.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from pystale import ModelSteps
from pystale.demo.policy import Floats, Policy, first_context, next_context
from pystale.demo.task import END, MAX_TOKENS

__all__ = ["Engine", "Generation", "Request"]


@dataclass(frozen=True)
class Generation:
    """Tokens one request added to a response; the arrays have one entry per new token."""

    token_ids: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    model_steps: ModelSteps
    finish_reason: str  # "stop", "length" or "abort"


@dataclass(eq=False, slots=True)
class Request:
    """A running request; `done` gives its :class:`Generation`."""

    done: "asyncio.Future[Generation]"
    row: int
    context: int  # what the policy sees when it comes in
    first: int  # length of the response when the request came in
    limit: int  # length at which it is cut


class Engine:
    """Batched sampler over a :class:`~pystale.demo.policy.Policy`; a context manager that runs its decode task.

    Parameters
    ----------
    parameters : float32 array
        Weights of model step 0; copied.
    rng : numpy.random.Generator
        Draws the tokens.

    Attributes
    ----------
    model_step : int
        Trainer step whose weights are served.
    generated_tokens : int
        Tokens so far.
    rng : numpy.random.Generator
        See above; its state is part of a checkpoint.

    Notes
    -----
    For use from one event loop. The decode task lets other tasks run after every decode step.
    """

    def __init__(self, parameters: Floats, rng: np.random.Generator) -> None:
        self.model_step = 0
        self.generated_tokens = 0
        self._policy = Policy(parameters)
        self.rng = rng
        self._paused = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._free: list[int] = []
        # One row per response, one column per token.
        self._tokens = np.empty((0, MAX_TOKENS), dtype=np.uint8)
        self._logprobs = np.empty((0, MAX_TOKENS), dtype=np.float32)
        self._steps = np.empty((0, MAX_TOKENS), dtype=np.int64)
        # Requests being decoded, in the order they came; for each its row, what the policy sees next, the length of its
        # response, and the length at which it is cut. Requests that came since the last decode step wait in `_joining`.
        self._running: list[Request] = []
        self._joining: list[Request] = []
        self._rows = np.empty(0, dtype=np.intp)
        self._contexts = np.empty(0, dtype=np.int64)
        self._lengths = np.empty(0, dtype=np.intp)
        self._limits = np.empty(0, dtype=np.intp)

    async def __aenter__(self) -> "Engine":
        self._task = asyncio.create_task(self._decode_forever(), name="engine")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if error is None and not self._task.cancelled():
                self._task.result()

    @property
    def parameters(self) -> Floats:
        """Weights that are served."""
        return self._policy.parameters

    def load_weights(self, parameters: Floats, model_step: int) -> None:
        """Serve these weights from the next token on."""
        self._policy.load(parameters)
        self.model_step = model_step

    def submit(self, prompt_ids: Any, response_ids: Any, max_new_tokens: int) -> Request:
        """Start, or continue, a response.

        Parameters
        ----------
        response_ids : sequence of int
            Tokens the response has already.
        max_new_tokens : int
            Budget of this request, at least 1.

        Returns
        -------
        Request
            Already done, with no tokens and reason ``abort``, while the engine is paused.

        Raises
        ------
        ValueError
            If the budget does not fit.
        RuntimeError
            If the engine is not running: not started, or broken.
        """
        if self._task is None or self._task.done():
            raise RuntimeError("the engine is not running; submit inside `async with engine`")
        first = len(response_ids)
        if max_new_tokens < 1 or first + max_new_tokens > MAX_TOKENS:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens} for a response of {first} tokens; "
                f"at least 1, and at most {MAX_TOKENS} in all, is allowed"
            )
        done: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        if self._paused:
            done.set_result(Generation(np.empty(0, np.uint8), np.empty(0, np.float32), ModelSteps(), "abort"))
            return Request(done, -1, 0, first, first)
        if not self._free:
            self._grow()
        context = first_context(prompt_ids, response_ids)
        request = Request(done, self._free.pop(), context, first, first + max_new_tokens)
        self._joining.append(request)
        self._work.set()
        return request

    def abort(self, requests: Iterable[Request]) -> None:
        """End these requests now, each with the tokens it has; those that are done already stay as they are."""
        self._join()
        aborted = set(requests)
        self._finish(np.array([request in aborted for request in self._running], dtype=bool))

    def pause(self) -> None:
        """Abort whatever runs, and whatever comes until :meth:`resume`."""
        self._paused = True
        self.abort(self._running + self._joining)

    def resume(self) -> None:
        """Take requests again."""
        self._paused = False

    async def _decode_forever(self) -> None:
        try:
            while True:
                self._work.clear()
                self._join()
                while self._running:
                    self._decode()
                    # Lets submits, aborts and all others in: one decode step is the longest the engine holds the loop.
                    await asyncio.sleep(0)
                    self._join()
                await self._work.wait()
        except Exception as error:
            self._join()
            self._finish(np.ones(len(self._running), dtype=bool), error)  # or somebody would wait for ever
            raise

    def _decode(self) -> None:
        """One token for every running request."""
        rows, lengths = self._rows, self._lengths
        model_step = self.model_step
        # Members of a group often write the same text: one forward pass for all that are in the same context.
        distinct, which = np.unique(self._contexts, return_inverse=True)
        log_probs = self._policy.forward(distinct).log_probs
        cumulative = np.exp(log_probs).cumsum(axis=1)
        draws = self.rng.random((len(rows), 1), dtype=np.float32) * cumulative[which, -1:]
        cumulative[:, -1] = np.inf  # a float32 product may round up to the whole sum, which is past the last token
        tokens = (cumulative[which] > draws).argmax(axis=1)
        self._tokens[rows, lengths] = tokens
        self._logprobs[rows, lengths] = log_probs[which, tokens]
        self._steps[rows, lengths] = model_step
        self._contexts = next_context(self._contexts, tokens)
        lengths += 1
        self.generated_tokens += len(rows)
        finished = tokens == END
        finished |= lengths >= self._limits
        if finished.any():
            self._finish(finished)

    def _join(self) -> None:
        """Start to decode the requests that came in."""
        if self._joining:
            self._running += self._joining
            self._rows = np.concatenate([self._rows, [request.row for request in self._joining]])
            self._contexts = np.concatenate([self._contexts, [request.context for request in self._joining]])
            self._lengths = np.concatenate([self._lengths, [request.first for request in self._joining]])
            self._limits = np.concatenate([self._limits, [request.limit for request in self._joining]])
            self._joining = []

    def _finish(self, finished: npt.NDArray[np.bool_], error: Exception | None = None) -> None:
        """Answer the running requests that `finished` marks, with `error` if there is one, and free their rows."""
        for i in finished.nonzero()[0]:
            request, length = self._running[i], int(self._lengths[i])
            self._free.append(request.row)
            if request.done.done():  # cancelled, so nobody waits for it
                continue
            if error is not None:
                request.done.set_exception(error)
                request.done.exception()  # counts as heard: a group passes only the first of its faults on
                continue
            tokens = self._tokens[request.row, request.first : length].copy()
            if len(tokens) and tokens[-1] == END:
                reason = "stop"
            else:
                reason = "length" if length >= request.limit else "abort"
            steps = ModelSteps.from_list(self._steps[request.row, request.first : length])
            logprobs = self._logprobs[request.row, request.first : length].copy()
            request.done.set_result(Generation(tokens, logprobs, steps, reason))
        kept = ~finished
        self._running = [request for request, keep in zip(self._running, kept.tolist(), strict=True) if keep]
        self._rows, self._contexts = self._rows[kept], self._contexts[kept]
        self._lengths, self._limits = self._lengths[kept], self._limits[kept]

    def _grow(self) -> None:
        """Double the number of rows."""
        old = len(self._tokens)
        more = max(64, old)
        self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens, shape=(more, MAX_TOKENS))])
        self._logprobs = np.concatenate([self._logprobs, np.empty_like(self._logprobs, shape=(more, MAX_TOKENS))])
        self._steps = np.concatenate([self._steps, np.empty_like(self._steps, shape=(more, MAX_TOKENS))])
        self._free += range(old + more - 1, old - 1, -1)
