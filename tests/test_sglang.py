"""The SGLang engine against a real HTTP server on the loopback interface, which decodes slowly and breaks on demand."""

import asyncio
import base64
import contextlib
import json
import sys

import httpx
import numpy as np
import pytest

from pystale import RolloutState, Status
from pystale.client import PartialRolloutClient
from pystale.engine import EngineError
from pystale.sglang import SGLangEngine, numbered_version

GUARD = 30  # seconds; only keeps a broken test from hanging the run
LAYERS, EXPERTS = 2, 3


class Server:
    """A small inference server that speaks SGLang's `/generate` and `/abort_request` over HTTP/1.1.

    It decodes a token per tick, ends a request that is aborted with what it has, and forgets one whose client hangs
    up. `faults` holds what to do with the next requests to `/generate` instead of answering them.
    """

    def __init__(self):
        self.weight_version = "0"
        self.tick = 0.001  # seconds per token
        self.faults = []
        self.bodies = []
        self.headers = []
        self.aborts = []
        self.hung_up = []  # request ids whose client went away
        self.decoded = {}  # request id -> tokens so far
        self._aborted = set()
        self._progress = asyncio.Condition()
        self._connections = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *error):
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def has_decoded(self, tokens):
        """Wait until some request has this many tokens."""
        async with self._progress:
            await self._progress.wait_for(lambda: any(n >= tokens for n in self.decoded.values()))

    async def is_decoding(self, requests):
        """Wait until this many requests have a token."""
        async with self._progress:
            await self._progress.wait_for(lambda: sum(n > 0 for n in self.decoded.values()) >= requests)

    async def lost_a_client(self):
        async with self._progress:
            await self._progress.wait_for(lambda: self.hung_up)

    async def _connect(self, reader, writer):
        self._connections.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                start, *lines = head.decode().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = start.split()
                assert method == "POST"
                assert headers["content-type"] == "application/json"
                self.headers.append(headers)
                if not await self._serve(path, json.loads(body), reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
            self._connections.discard(asyncio.current_task())

    async def _serve(self, path, body, reader, writer):
        if path == "/abort_request":
            self.aborts.append(body["rid"])
            self._aborted |= {rid for rid in self.decoded if rid.startswith(body["rid"])}
            return await self._reply(writer, b"")
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            return await fault(self, body, writer)
        decode = asyncio.ensure_future(self._decode(body))
        hang_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((decode, hang_up), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                async with self._progress:
                    self.hung_up.append(body["rid"])
                    self._progress.notify_all()
                return False
            return await self._reply(writer, json.dumps(decode.result()).encode())
        finally:
            for task in (decode, hang_up):
                task.cancel()
            await asyncio.wait((decode, hang_up))

    async def _decode(self, body):
        rid, limit = body["rid"], body["sampling_params"]["max_new_tokens"]
        sent, ids, versions, reason = len(body["input_ids"]), [], [], {"type": "length", "length": limit}
        self.decoded[rid] = 0
        while len(ids) < limit:
            await asyncio.sleep(self.tick)
            if rid in self._aborted:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                break
            ids.append(1000 + sent + len(ids))  # the token says where it stands
            versions.append(self.weight_version)
            async with self._progress:
                self.decoded[rid] += 1
                self._progress.notify_all()
        del self.decoded[rid]
        return reply(ids, reason, sent=sent, versions=versions, rid=rid, experts=body.get("return_routed_experts"))

    async def _reply(self, writer, payload, status="200 OK", extra=""):
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(payload)}\r\n{extra}\r\n".encode() + payload)
        await writer.drain()
        return True


def reply(ids, reason, *, sent=2, versions=(), rid="r", experts=False, **meta):
    spans = []
    for i, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": i, "end": i})
        spans[-1]["end"] = i + 1
    meta_info = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": sent,
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.25, token, None] for token in ids],
        "weight_version": versions[-1] if versions else "0",
        **({"weight_versions": spans} if versions else {}),
        **meta,
    }
    if experts:
        rows = np.arange(sent + len(ids) - 1, dtype="<i4")
        meta_info["routed_experts"] = base64.b64encode(np.repeat(rows, LAYERS * EXPERTS).tobytes()).decode()
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta_info}


def says(payload, status="200 OK", extra=""):
    """A fault: answer at once with these bytes, or with this object as JSON."""

    async def fault(server, body, writer):
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return await server._reply(writer, raw, status, extra)

    return fault


async def drops(server, body, writer):
    """Hang up in the middle of the answer."""
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"text": "hel')
    await writer.drain()
    return False


async def drops_unanswered(server, body, writer):
    return False


async def garbles(server, body, writer):
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    await writer.drain()
    return False


async def stalls(server, body, writer):
    await asyncio.sleep(GUARD)


def serve(scenario, **settings):
    """Run ``scenario(server, engine)`` with both up, and see that no task is left."""

    async def main():
        async with Server() as server, SGLangEngine(server.url, **settings) as engine:
            result = await asyncio.wait_for(scenario(server, engine), GUARD)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(main())


def error_of(fault, **settings):
    async def scenario(server, engine):
        server.faults = [fault]
        with pytest.raises(EngineError) as caught:
            await engine.generate([1, 2], {"max_tokens": 4}, "r1")
        # The engine is none the worse for it.
        assert len((await engine.generate([1, 2], {"max_tokens": 2}, "r2")).token_ids) == 2
        return caught.value

    return serve(scenario, **settings)


def new_state(limit=40):
    return RolloutState(prompt_ids=[1, 2], sample_params={"max_tokens": limit, "temperature": 1.0})


# What is sent and what comes back


def test_a_request_and_its_answer():
    async def scenario(server, engine):
        server.weight_version = "12"
        output = await engine.generate([5, 6, 7], {"max_tokens": 4, "min_tokens": 1, "top_p": 0.9}, "request")
        return server.bodies, output

    [body], output = serve(scenario)
    assert body == {
        "rid": "request",
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 1, "top_p": 0.9},
        "return_logprob": True,
        "stream": False,
    }
    assert output.token_ids == [1003, 1004, 1005, 1006]
    assert output.logprobs == [-0.25] * 4
    assert (output.finish_reason, output.text) == ("length", "xxxx")
    assert output.version_spans == [(12, 4)]


def test_an_aborted_request_answers_what_it_has_generated():
    async def scenario(server, engine):
        request = asyncio.create_task(engine.generate([1, 2], {"max_tokens": 100_000}, "r1"))
        await server.has_decoded(5)
        await engine.abort("r1")
        return await request

    output = serve(scenario)
    assert output.finish_reason == "abort"
    assert len(output.token_ids) == len(output.logprobs) >= 5
    assert output.token_ids == list(range(1002, 1002 + len(output.token_ids)))


def test_aborting_what_is_not_running_is_no_error():
    async def scenario(server, engine):
        await engine.abort("nobody")
        return server.aborts

    assert serve(scenario) == ["nobody"]


def test_an_abort_of_everything_is_refused():
    with pytest.raises(ValueError, match="request_id is empty"):
        serve(lambda server, engine: engine.abort(""))


def test_spans_say_when_weights_changed_under_way():
    async def scenario(server, engine):
        server.weight_version = "3"
        request = asyncio.create_task(engine.generate([1, 2], {"max_tokens": 50}, "r1"))
        await server.has_decoded(5)
        server.weight_version = "4"
        return await request

    spans = serve(scenario).version_spans
    assert [step for step, _ in spans] == [3, 4]
    assert sum(n for _, n in spans) == 50
    assert spans[0][1] >= 5


def test_a_version_read_when_the_answer_was_ready_is_not_used():
    output = read(reply([7, 8], {"type": "stop", "matched": 8}, weight_version="9"))
    assert output.version_spans is None
    assert output.model_step is None


def read(answer, **settings):
    async def scenario(server, engine):
        server.faults = [says(answer)]
        return await engine.generate([1, 2], {"max_tokens": 9}, "r1")

    return serve(scenario, **settings)


def test_spans_with_a_version_that_names_no_step_are_not_used():
    named = {"type": "stop", "matched": 8}
    assert read(reply([7, 8], named, versions=["default", "1"])).version_spans is None
    known = {"default": 100, "1": 101}
    assert read(reply([7, 8], named, versions=["default", "1"]), version_of=known.get).version_spans == [
        (100, 1),
        (101, 1),
    ]


def test_a_request_aborted_before_its_first_token():
    answer = {"text": "", "output_ids": [], "meta_info": {"id": "r1", "finish_reason": {"type": "abort"}}}
    output = read(answer)
    assert (output.token_ids, output.logprobs, output.finish_reason) == ([], [], "abort")
    output = read(reply([], {"type": "abort"}, weight_versions=[{"version": "3", "start": 0, "end": 0}]))
    assert output.runs(served=2) == []


def test_routed_experts_are_unpacked():
    async def scenario(server, engine):
        output = await engine.generate([1, 2], {"max_tokens": 3}, "r1")
        return server.bodies[0]["return_routed_experts"], output.routed_experts

    asked, rows = serve(scenario, routed_experts_shape=(LAYERS, EXPERTS))
    assert asked is True
    assert (rows.shape, rows.dtype) == ((4, LAYERS, EXPERTS), np.int32)
    assert rows[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_headers_go_with_every_request():
    async def scenario(server, engine):
        await engine.generate([1], {"max_tokens": 1}, "r1")
        await engine.abort("r1")
        return [headers["authorization"] for headers in server.headers]

    assert serve(scenario, headers={"Authorization": "Bearer x"}) == ["Bearer x"] * 2


def test_a_client_that_was_passed_in_is_used_and_stays_open():
    async def main():
        async with Server() as server, httpx.AsyncClient() as client:
            async with SGLangEngine(server.url + "/", client=client) as engine:
                await engine.generate([1], {"max_tokens": 1}, "r1")
            assert not client.is_closed
            assert len(server.bodies) == 1

    asyncio.run(main())


# Faults


@pytest.mark.parametrize(
    ("status", "retriable"),
    [
        ("500 Internal Server Error", True),
        ("503 Service Unavailable", True),
        ("429 Too Many Requests", True),
        ("408 Request Timeout", True),
        ("400 Bad Request", False),
        ("404 Not Found", False),
        ("307 Temporary Redirect", False),
    ],
)
def test_error_statuses(status, retriable):
    extra = "Location: http://127.0.0.1:9/\r\n" if status.startswith("307") else ""
    error = error_of(says({"error": {"message": "the input is too long"}}, status, extra))
    assert error.retriable is retriable
    assert f"/generate: HTTP {status[:3]}" in str(error)
    assert "the input is too long" in str(error)


@pytest.mark.parametrize("fault", [drops, drops_unanswered, garbles], ids=lambda fault: fault.__name__)
def test_broken_connections(fault):
    error = error_of(fault)
    assert error.retriable
    assert "ProtocolError" in str(error) or "ReadError" in str(error)


def test_a_server_that_stops_answering():
    error = error_of(stalls, timeout_s=0.2)
    assert error.retriable
    assert "ReadTimeout" in str(error)


def test_no_server():
    async def main():
        async with Server() as server:
            url = server.url
        async with SGLangEngine(url) as engine:
            for call in (engine.generate([1], {"max_tokens": 1}, "r1"), engine.abort("r1")):
                with pytest.raises(EngineError, match="ConnectError"):
                    await call

    asyncio.run(main())


def test_answers_are_read_up_to_a_limit():
    error = error_of(says(b"[" * 5000), max_answer_bytes=4000)
    assert "longer than max_answer_bytes, 4000" in str(error)


def broken(**meta):
    return reply([7, 8], {"type": "stop"}, **meta)


MALFORMED = {
    "empty": b"",
    "no JSON": b"<html>proxy error</html>",
    "cut off": b'{"meta_info": {',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "huge number": b'{"a": ' + b"9" * 10_000 + b"}",
    "a list": [reply([7], {"type": "stop"})],
    "null": b"null",
    "no meta_info": {"text": "x"},
    "meta_info is a list": {"meta_info": []},
    "no finish reason": broken(finish_reason=None),
    "finish reason is text": broken(finish_reason="stop"),
    "finish reason without type": broken(finish_reason={"matched": 1}),
    "type is a number": broken(finish_reason={"type": 1}),
    "no log-probabilities": broken(output_token_logprobs=None),
    "log-probabilities are an object": broken(output_token_logprobs={"0": [-1.0, 7]}),
    "an entry is a number": broken(output_token_logprobs=[-1.0, -1.0]),
    "an entry is short": broken(output_token_logprobs=[[-1.0]]),
    "a token is text": broken(output_token_logprobs=[[-1.0, "7", None]]),
    "a token is a float": broken(output_token_logprobs=[[-1.0, 7.0, None]]),
    "a token is a bool": broken(output_token_logprobs=[[-1.0, True, None]]),
    "a token is negative": broken(output_token_logprobs=[[-1.0, -7, None]]),
    "a token is huge": broken(output_token_logprobs=[[-1.0, 2**40, None]]),
    "a log-probability is null": broken(output_token_logprobs=[[None, 7, None]]),
    "a log-probability is NaN": broken(output_token_logprobs=[[float("nan"), 7, None]]),
    "a log-probability is infinite": broken(output_token_logprobs=[[float("-inf"), 7, None]]),
    "spans are an object": broken(weight_versions={"version": "3"}),
    "a span is a number": broken(weight_versions=[3]),
    "a span without version": broken(weight_versions=[{"start": 0, "end": 2}]),
    "a version is a number": broken(weight_versions=[{"version": 3, "start": 0, "end": 2}]),
    "a span ends before it starts": broken(weight_versions=[{"version": "3", "start": 0, "end": -1}]),
    "spans have a gap": broken(
        weight_versions=[{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 2, "end": 2}]
    ),
    "spans are too short": broken(weight_versions=[{"version": "3", "start": 0, "end": 1}]),
    "spans are too long": broken(weight_versions=[{"version": "3", "start": 0, "end": 3}]),
    "experts are a list": broken(routed_experts=[[1]]),
    "experts are no base64": broken(routed_experts="***"),
    "experts are no whole rows": broken(routed_experts=base64.b64encode(b"\0" * 28).decode()),
    "experts are no whole numbers": broken(routed_experts=base64.b64encode(b"\0" * 25).decode()),
}


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_answer_of_such_a_server_is_an_error_that_shows_little_of_it(answer):
    error = error_of(says(answer), routed_experts_shape=(LAYERS, EXPERTS))
    assert "not an answer of an SGLang server" in str(error)
    assert error.retriable
    assert len(str(error)) < 1000


def test_any_prefix_of_an_answer_is_an_error():
    whole = json.dumps(reply([7, 8, 9], {"type": "stop"}, versions=["3", "3", "4"])).encode()

    async def scenario(server, engine):
        for end in range(0, len(whole), 7):
            server.faults = [says(whole[:end])]
            with pytest.raises(EngineError, match="not an answer"):
                await engine.generate([1, 2], {"max_tokens": 9}, "r1")

    serve(scenario)


# The client on a real connection


def make_client(engine, server, **settings):
    settings = {"backoff_s": 0.001, "max_attempts": 4, **settings}
    return PartialRolloutClient(engine, lambda: int(server.weight_version), **settings)


def test_a_response_generated_over_pauses_and_new_weights():
    async def scenario(server, engine):
        client = make_client(engine, server)
        state = new_state(limit=60)
        for step in range(3):
            server.weight_version = str(step)
            call = asyncio.create_task(client.generate(state, enable_partial_rollout=True))
            await server.has_decoded(4)
            await client.pause()
            await call
            assert state.status is Status.ABORTED
        server.weight_version = "3"
        return await client.generate(state, enable_partial_rollout=True), server.bodies

    state, bodies = serve(scenario, routed_experts_shape=(LAYERS, EXPERTS))
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert state.response_ids == list(range(1002, 1062))
    assert [step for step, _ in state.response_model_steps.runs()] == [0, 1, 2, 3]
    assert state.logprobs == [-0.25] * 60
    assert state.response == "x" * 60
    assert state.routed_experts[:, 0, 0].tolist() == list(range(61))
    asked = [body["sampling_params"]["max_new_tokens"] for body in bodies]
    assert asked == [60 - len(body["input_ids"]) + 2 for body in bodies]
    assert len({body["rid"] for body in bodies}) == 4


def test_a_response_goes_on_after_faults_of_the_server():
    async def scenario(server, engine):
        server.faults = [drops, says(b"oops", "500 Internal Server Error"), says(b"{")]
        client = make_client(engine, server)
        return await client.generate(new_state(limit=5), enable_partial_rollout=True), server.bodies

    state, bodies = serve(scenario)
    assert (state.status, len(state.response_ids)) == (Status.COMPLETED, 5)
    assert len(bodies) == 4


def test_the_last_fault_is_told_when_tries_run_out():
    async def scenario(server, engine):
        server.faults = [drops, says(b"overloaded", "503 Service Unavailable")]
        return await make_client(engine, server, max_attempts=2).generate(new_state(), enable_partial_rollout=True)

    state = serve(scenario)
    assert state.status is Status.FAILED
    assert "503: overloaded" in state.error_msg


def test_a_refused_request_fails_at_once():
    async def scenario(server, engine):
        server.faults = [says({"error": "too long"}, "400 Bad Request")]
        state = await make_client(engine, server).generate(new_state(), enable_partial_rollout=True)
        return state, len(server.bodies)

    state, requests = serve(scenario)
    assert (state.status, requests) == (Status.FAILED, 1)
    assert "too long" in state.error_msg


def test_cancelling_aborts_at_the_server_and_keeps_its_answer():
    async def scenario(server, engine):
        state = new_state(limit=100_000)
        call = asyncio.create_task(
            make_client(engine, server, abort_grace_s=GUARD).generate(state, enable_partial_rollout=True)
        )
        await server.has_decoded(3)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert server.aborts == [server.bodies[0]["rid"]]
        return state

    state = serve(scenario)
    assert state.status is Status.ABORTED
    assert len(state.response_ids) == len(state.response_model_steps) >= 3


def test_giving_up_on_a_request_hangs_up():
    async def scenario(server, engine):
        request = asyncio.create_task(engine.generate([1, 2], {"max_tokens": 100_000}, "r1"))
        await server.has_decoded(3)
        request.cancel()
        await server.lost_a_client()
        return server.hung_up

    assert serve(scenario) == ["r1"]


def test_aborts_do_not_queue_behind_the_requests_they_are_to_abort():
    """More requests at once than an HTTP client usually has connections."""

    async def scenario(server, engine):
        server.tick = 0.2
        client = make_client(engine, server)
        group = [new_state(limit=100_000) for _ in range(150)]
        call = asyncio.create_task(client.generate_group(group, enable_partial_rollout=True))
        await server.is_decoding(len(group))
        await client.pause()
        await call
        return group

    assert {state.status for state in serve(scenario)} == {Status.ABORTED}


# Settings


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"base_url": "127.0.0.1:30000"}, ValueError, "base_url"),
        ({"base_url": None}, ValueError, "base_url"),
        ({"max_answer_bytes": 0}, ValueError, "max_answer_bytes"),
        ({"routed_experts_shape": (0, 2)}, ValueError, "layers"),
        ({"routed_experts_shape": (2, 1.0)}, TypeError, "experts"),
    ],
)
def test_wrong_settings_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        SGLangEngine(**{"base_url": "http://127.0.0.1:1", **settings})


def test_without_httpx_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"pystale\[http\]"):
        SGLangEngine("http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("version", "step"),
    [("0", 0), ("12", 12), ("default", None), ("", None), ("-1", None), ("1.5", None), ("²", None), ("9" * 5000, None)],
)
def test_numbered_versions(version, step):
    assert numbered_version(version) == step
