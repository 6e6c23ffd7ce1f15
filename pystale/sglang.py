"""The `TokenEngine` of an SGLang server: `/generate` and `/abort_request` over HTTP.

Requests are not streamed. A server answers an aborted request with all it generated, log-probabilities included, so
nothing is gained by streaming, and by default every chunk of a stream repeats all the tokens before it.

Answers are untrusted: sizes are bounded while they are read, and every type is checked before it is used.
"""

import asyncio
import base64
import binascii
import functools
import json
import math
import reprlib
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pystale.engine import EngineError, EngineOutput
from pystale.staleness import checked_int

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import httpx

__all__ = ["SGLangEngine", "numbered_version"]

# Statuses under 500 that say "not now" rather than "not this": timeout, too early, too many.
_RETRIABLE = frozenset((408, 425, 429))
ABORTS_AT_ONCE = 16
_SHOWN = 300  # characters of an unexpected answer that an error shows
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def numbered_version(weight_version: str) -> int | None:
    """The trainer step that a server's weight version names: the number it is, None if it is none.

    Examples
    --------
    >>> numbered_version("12"), numbered_version("default")
    (12, None)
    """
    is_step = weight_version.isascii() and weight_version.isdigit() and len(weight_version) < 19  # fits int64
    return int(weight_version) if is_step else None


class SGLangEngine:
    """A :class:`~pystale.engine.TokenEngine` that asks an SGLang server, or a router before several.

    An async context manager, so that its connections are closed.

    Parameters
    ----------
    base_url : str
        For example ``http://127.0.0.1:30000``.
    routed_experts_shape : (int, int), optional
        Layers and experts per token of a mixture-of-experts model. When given, routed experts are asked for and come
        as int32, shape (rows, layers, experts).
    version_of : callable, default `numbered_version`
        ``version_of(weight_version) -> int or None``: the trainer step a weight version names. Where a server reports
        spans of weight versions and one of them names none, the spans are not used.
    timeout_s : float or None, default 3600.0
        Seconds without a byte from the server after which a request fails.
    connect_timeout_s : float, default 10.0
        Also bounds every step of an abort.
    max_answer_bytes : int, default 256 MiB
        Longest answer that is read.
    headers : mapping of str to str, optional
        For example ``{"Authorization": "Bearer ..."}``.
    client : httpx.AsyncClient, optional
        Used instead of clients of its own, and not closed. It needs a connection for every request that may run at
        once, and then some for aborts. `headers` and timeouts go with every request all the same.

    Raises
    ------
    ImportError
        Without httpx, which the extra ``pystale[http]`` installs.

    Notes
    -----
    ``max_tokens`` and ``min_tokens`` are sent as ``max_new_tokens`` and ``min_new_tokens``; other parameters go as they
    are.

    Of the versions a server reports, only ``weight_versions`` (spans per token) is used. ``weight_version`` is read by
    the server when the answer is ready: after a change of weights under way it names weights that are newer than those
    of the first tokens.

    Answers that are not what SGLang sends raise :class:`~pystale.engine.EngineError`, retriable but for statuses that
    refuse the request itself (400 and the like).

    Examples
    --------
    >>> from pystale.sglang import SGLangEngine
    >>> async def main(client_of, state):
    ...     async with SGLangEngine("http://127.0.0.1:30000") as engine:
    ...         await client_of(engine).generate(state, enable_partial_rollout=True)
    """

    def __init__(
        self,
        base_url: str,
        *,
        routed_experts_shape: tuple[int, int] | None = None,
        version_of: "Callable[[str], int | None]" = numbered_version,
        timeout_s: float | None = 3600.0,
        connect_timeout_s: float = 10.0,
        max_answer_bytes: int = 256 * 2**20,
        headers: "Mapping[str, str] | None" = None,
        client: "httpx.AsyncClient | None" = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ImportError("SGLangEngine needs httpx: pip install 'pystale[http]'") from error
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self.routed_experts_shape = None
        if routed_experts_shape is not None:
            layers, experts = routed_experts_shape
            self.routed_experts_shape = (
                checked_int("layers of routed_experts_shape", layers, at_least=1),
                checked_int("experts of routed_experts_shape", experts, at_least=1),
            )
        self.version_of = version_of
        self.max_answer_bytes = checked_int("max_answer_bytes", max_answer_bytes, at_least=1)
        # Compressed answers would make the bound on their size one on what is sent, not on what they unpack to.
        self._headers = {"Accept-Encoding": "identity", **(headers or {})}
        self._timeout = httpx.Timeout(timeout_s, connect=connect_timeout_s, pool=None)
        self._abort_timeout = httpx.Timeout(connect_timeout_s, pool=None)
        self._client = client
        if client is None:
            # Every request to generate has a connection pool of its own. In a shared one, each costs time in proportion
            # to those that run (with 300 of them and idle connections 30 ms), and one that meets a connection the
            # server has just closed fails. Aborts are short and come in bursts: they share a few connections.
            context = httpx.create_ssl_context(trust_env=False)
            self._own_client = functools.partial(httpx.AsyncClient, verify=context, trust_env=False)
            self._abort_client = self._own_client()
        # Aborts wait here and not in the pool, whose every step looks at all that wait in it.
        self._aborting = asyncio.Semaphore(ABORTS_AT_ONCE)
        self._http_error = httpx.HTTPError

    async def generate(self, tokens: list[int], sampling_params: dict[str, Any], request_id: str) -> EngineOutput:
        """Continue `tokens` (see :meth:`TokenEngine.generate <pystale.engine.TokenEngine.generate>`)."""
        body = {
            "rid": request_id,
            "input_ids": tokens,
            "sampling_params": {_NAMES.get(name, name): value for name, value in sampling_params.items()},
            "return_logprob": True,
            "stream": False,
        }
        if self.routed_experts_shape is not None:
            body["return_routed_experts"] = True
        if self._client is not None:
            answer = await self._post(self._client, "/generate", body, self._timeout)
        else:
            async with self._own_client() as client:
                answer = await self._post(client, "/generate", body, self._timeout)
        return self._output(_parsed(answer))

    async def abort(self, request_id: str) -> None:
        """Have the server end a request. One it does not know (any more, or yet) is no error."""
        if not request_id:
            raise ValueError("request_id is empty, and an SGLang server aborts all requests that begin with it")
        async with self._aborting:
            await self._post(
                self._client or self._abort_client, "/abort_request", {"rid": request_id}, self._abort_timeout
            )

    async def aclose(self) -> None:
        """Close the connections, if they are its own."""
        if self._client is None:
            await self._abort_client.aclose()

    async def __aenter__(self) -> "SGLangEngine":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _post(
        self, client: "httpx.AsyncClient", path: str, body: dict[str, Any], timeout: "httpx.Timeout"
    ) -> bytes:
        url = self.base_url + path
        answer = bytearray()
        try:
            async with client.stream("POST", url, json=body, headers=self._headers, timeout=timeout) as response:
                async for piece in response.aiter_bytes():
                    if len(answer) + len(piece) > self.max_answer_bytes:
                        raise EngineError(f"{url}: the answer is longer than max_answer_bytes, {self.max_answer_bytes}")
                    answer += piece
        except self._http_error as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}".rstrip(": ")) from error
        status = response.status_code
        if not 200 <= status < 300:
            raise EngineError(
                f"{url}: HTTP {status}: {bytes(answer[:_SHOWN]).decode(errors='replace')}",
                retriable=status >= 500 or status in _RETRIABLE,
            )
        return bytes(answer)

    # Reading an answer

    def _output(self, answer: dict[str, Any]) -> EngineOutput:
        meta = _typed(answer, "meta_info", dict)
        reason = _typed(meta, "finish_reason", dict, of="meta_info")
        token_ids, logprobs = _sampled(answer, meta)
        text = answer.get("text")
        return EngineOutput(
            token_ids,
            _typed(reason, "type", str, of="finish_reason"),
            logprobs=logprobs,
            version_spans=self._version_spans(meta, len(token_ids)),
            routed_experts=self._routed_experts(meta),
            text=text if isinstance(text, str) else None,
        )

    def _version_spans(self, meta: dict[str, Any], tokens: int) -> list[tuple[int, int]] | None:
        """Spans of ``weight_versions``: ``[{"version": str, "start": int, "end": int}, ...]``, end exclusive."""
        if meta.get("weight_versions") is None:
            return None
        spans, at = [], 0
        for span in _typed(meta, "weight_versions", list, of="meta_info"):
            if not isinstance(span, dict):
                _malformed(f"weight_versions holds {reprlib.repr(span)}")
            start, end = (_typed(span, name, int, of="weight_versions") for name in ("start", "end"))
            if start != at or end < start:
                _malformed(f"weight_versions has a span from {start} to {end} after {at} tokens")
            at = end
            spans.append((self.version_of(_typed(span, "version", str, of="weight_versions")), end - start))
        if at != tokens:
            _malformed(f"weight_versions cover {at} tokens of {tokens}")
        known = [(step, n) for step, n in spans if step is not None]
        return known if len(known) == len(spans) else None

    def _routed_experts(self, meta: dict[str, Any]) -> NDArray[np.int32] | None:
        if self.routed_experts_shape is None or meta.get("routed_experts") is None:
            return None
        try:
            packed = base64.b64decode(_typed(meta, "routed_experts", str, of="meta_info"), validate=True)
            return np.frombuffer(packed, dtype="<i4").reshape(-1, *self.routed_experts_shape).astype(np.int32)
        except (binascii.Error, ValueError) as error:
            _malformed(f"routed_experts are not base64 of int32 in rows of {self.routed_experts_shape}: {error}")


def _sampled(answer: dict[str, Any], meta: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities: ``output_token_logprobs`` holds ``[logprob, token id, text or None]`` for each."""
    entries = meta.get("output_token_logprobs")
    if entries is None:  # a request that was aborted before its first token
        if answer.get("output_ids"):
            _malformed("output_ids came without output_token_logprobs")
        return [], []
    token_ids, logprobs = [], []
    for i, entry in enumerate(_typed(meta, "output_token_logprobs", list, of="meta_info")):
        if not isinstance(entry, list) or len(entry) < 2:
            _malformed(f"output_token_logprobs[{i}] is {reprlib.repr(entry)}")
        logprob, token_id = entry[0], entry[1]
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            _malformed(f"output_token_logprobs[{i}] has token id {reprlib.repr(token_id)}")
        if type(logprob) not in (float, int) or not math.isfinite(logprob):
            _malformed(f"output_token_logprobs[{i}] has log-probability {reprlib.repr(logprob)}")
        token_ids.append(token_id)
        logprobs.append(float(logprob))
    return token_ids, logprobs


def _parsed(answer: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(answer)
    except (ValueError, RecursionError) as error:
        _malformed(f"{type(error).__name__} in {answer[:_SHOWN].decode(errors='replace')!r}")
    if not isinstance(parsed, dict):
        _malformed(f"not an object but {type(parsed).__name__}")
    return parsed


def _typed(holder: dict[str, Any], name: str, kind: type[Any], of: str = "the answer") -> Any:
    value = holder.get(name)
    if type(value) is not kind:
        _malformed(f"{name} of {of} is {reprlib.repr(value)}" if name in holder else f"{of} has no {name}")
    return value


def _malformed(what: str) -> NoReturn:
    raise EngineError(f"not an answer of an SGLang server: {what}")
