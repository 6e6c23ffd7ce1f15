"""What a partial rollout needs of an inference engine: tokens in, tokens out, and a way to cut a request short."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pystale.staleness import checked_int
from pystale.state import Floats, Ints

__all__ = ["EngineError", "EngineOutput", "TokenEngine"]


class EngineError(RuntimeError):
    """A request that an engine did not answer.

    Parameters
    ----------
    message : str
    retriable : bool, default True
        Whether the same request may succeed later. False for one that the engine refuses for what it says.
    """

    def __init__(self, message: str, *, retriable: bool = True) -> None:
        super().__init__(message)
        self.retriable = retriable


@dataclass(frozen=True, eq=False)
class EngineOutput:
    """What one request to an engine brought: the tokens past those sent.

    Attributes
    ----------
    token_ids : sequence of int, shape (n,)
        New tokens; none if the request was aborted before the first.
    finish_reason : str or None
        As :meth:`~pystale.Status.from_finish_reason` reads it. ``abort`` means that the response can be continued.
    logprobs : sequence of float, shape (n,), or None
        Log-probabilities under the weights that sampled the tokens, in nats.
    model_step : int or None
        Trainer step whose weights produced all of the tokens, if the engine knows. A version that is read only when
        the answer is ready is not that: weights may have changed while it was generated.
    version_spans : sequence of (int, int) or None
        ``(model_step, tokens)``, oldest token first, where the engine knows of a change of weights under way. Wins
        over `model_step`.
    routed_experts : object
        Side data, one row per token: rows or a reference to them (see :func:`~pystale.side_data.joined_rows`).
    text : str or None
        The new tokens as text.

    Examples
    --------
    >>> from pystale.engine import EngineOutput
    >>> EngineOutput([11, 12, 13], "stop", version_spans=[(3, 2), (4, 1)]).runs(served=3)
    [(3, 2), (4, 1)]
    """

    token_ids: Ints
    finish_reason: str | None
    logprobs: Floats | None = None
    model_step: int | None = None
    version_spans: Sequence[tuple[int, int]] | None = None
    routed_experts: Any = None
    text: str | None = None

    def runs(self, served: int) -> list[tuple[int, int]]:
        """Model steps of the tokens, as ``(model_step, tokens)`` with at least one token each.

        Parameters
        ----------
        served : int
            Step to stamp where the engine reports nothing: the one served when the request went out.

        Raises
        ------
        TypeError, ValueError
            If a reported step is not an int of at least 0, or the spans do not add up to the tokens.
        """
        tokens = len(self.token_ids)
        if self.version_spans is None:
            step = served if self.model_step is None else checked_int("model_step", self.model_step, at_least=0)
            return [(step, tokens)] if tokens else []
        runs = []
        for i, span in enumerate(self.version_spans):
            if not isinstance(span, Sequence) or len(span) != 2:
                raise TypeError(f"version_spans[{i}] must be (model_step, tokens), got {span!r}")
            step = checked_int(f"model step of version_spans[{i}]", span[0], at_least=0)
            runs.append((step, checked_int(f"tokens of version_spans[{i}]", span[1], at_least=0)))
        if (covered := sum(n for _, n in runs)) != tokens:
            raise ValueError(f"version_spans cover {covered} tokens, the answer has {tokens}; they must add up")
        return [(step, n) for step, n in runs if n]


class TokenEngine(Protocol):
    """An inference engine that continues token sequences.

    Any object with these two coroutines. Both are called from one event loop, for many requests at once.
    """

    async def generate(self, tokens: list[int], sampling_params: dict[str, Any], request_id: str) -> EngineOutput:
        """Continue `tokens`.

        Parameters
        ----------
        tokens : list of int
            Prompt, and the response so far.
        sampling_params : dict
            The engine's to keep or change. ``max_tokens`` (or ``max_new_tokens``, whichever the caller uses) is what
            is left for the response.
        request_id : str
            New for every request, and no other's prefix.

        Returns
        -------
        EngineOutput
            Of a request that was aborted: the tokens generated until then, with reason ``abort``.

        Raises
        ------
        Exception
            Any; the request is tried again, but for an :class:`EngineError` that is not retriable. The tokens it may
            have generated are lost.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Have :meth:`generate` answer soon with what it has.

        Also called with requests that have just ended, that have not arrived yet, and more than once with the same.
        """
        ...
