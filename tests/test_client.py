"""The partial-rollout client against an engine that follows a script, on a clock that jumps."""

import asyncio
import copy
import gc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import balance
from virtual_clock import run

from pystale import (
    AsyncProduceStrategyConfig,
    ModelSteps,
    ReplayBuffer,
    RolloutState,
    StalenessRule,
    Status,
    effective_mask,
    seq_staleness,
)
from pystale.client import PartialRolloutClient
from pystale.engine import EngineError, EngineOutput
from pystale.side_data import joined_rows
from pystale.state import length

C, A, E, F, U = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED, Status.INIT
EOS = 9


async def settle():
    for _ in range(30):
        await asyncio.sleep(0)


class Engine:
    """Answers requests from a script.

    An entry is an output, an exception, ``("wait", output)`` to answer only when the request is aborted, or a function
    that returns one of them.
    """

    def __init__(self, *script):
        self.script = list(script)
        self.requests = []  # (tokens, sampling params)
        self.ids = []
        self.aborted = []
        self.running = {}
        self.cancelled = 0
        self.step = 0

    async def generate(self, tokens, sampling_params, request_id):
        self.requests.append((tokens, sampling_params))
        self.ids.append(request_id)
        entry = self.script.pop(0) if self.script else AssertionError("an unexpected request")
        if callable(entry):
            entry = entry(self)
        if isinstance(entry, Exception):
            raise entry
        if isinstance(entry, EngineOutput):
            return entry
        _, answer = entry
        self.running[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.running[request_id]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return answer

    async def abort(self, request_id):
        self.aborted.append(request_id)
        if request_id in self.running and not self.running[request_id].done():
            self.running[request_id].set_result(None)


class Deaf(Engine):
    """Takes aborts and does not act on them."""

    async def abort(self, request_id):
        self.aborted.append(request_id)


def out(n, reason="abort", first=100, **more):
    return EngineOutput(list(range(first, first + n)), reason, **more)


def at(step, output):
    """Answer with `output`, after which the engine serves `step`."""

    def entry(engine):
        engine.step = step
        return output

    return entry


def new_state(limit=20, **fields):
    return RolloutState(**{"rollout_id": 7, "prompt_ids": [1, 2], "sample_params": {"max_tokens": limit}, **fields})


def client_of(engine, **settings):
    settings = {"eos_token_ids": [EOS], "random": lambda: 0.0, **settings}
    return PartialRolloutClient(engine, lambda: engine.step, **settings)


def generate(engine, state, *, partial=True, **settings):
    """Generate `state`, and check what must hold of any state that comes back."""

    async def main():
        client = client_of(engine, **settings)
        assert await client.generate(state, enable_partial_rollout=partial) is state
        assert not client._calls
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    consistent(state)
    return state


def consistent(state):
    tokens = length(state.response_ids)
    assert length(state.response_model_steps) == tokens
    assert length(state.logprobs) in (0, tokens)
    assert state.response_mask is None or len(state.response_mask) == tokens
    if state.status in (C, A, F):
        assert Status.from_finish_reason(state.finish_reason) is state.status
    assert (state.error_msg is not None) == (state.status is F)


# Versions


def test_tokens_are_stamped_with_the_version_served_when_the_request_went_out():
    engine = Engine(at(4, out(4, "stop")))
    engine.step = 3
    state = generate(engine, new_state())
    assert list(state.response_model_steps) == [3, 3, 3, 3]
    assert isinstance(state.response_model_steps, ModelSteps)
    rule = StalenessRule(max_staleness=1)

    async def put():
        return await ReplayBuffer(rule, tail_batch_trigger_size=0).put([state], train_step=6)

    assert run(put()) is E


def test_reported_spans_win_over_what_was_served():
    engine = Engine(at(9, out(4, "stop", version_spans=[(3, 2), (4, 2)], model_step=8)))
    engine.step = 3
    state = generate(engine, new_state())
    assert list(state.response_model_steps) == [3, 3, 4, 4]
    mask = effective_mask(state.response_model_steps, train_step=6, token_stale_threshold=2)
    assert mask.tolist() == [0, 0, 1, 1]


def test_a_reported_version_wins_over_what_was_served():
    state = generate(Engine(out(2, "stop", model_step=5)), new_state())
    assert list(state.response_model_steps) == [5, 5]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"version_spans": [(3, 1)]}, "cover 1 tokens, the answer has 2"),
        ({"version_spans": [(3, 3)]}, "cover 3 tokens"),
        ({"version_spans": [(3, 3), (4, -1)]}, "at least 0"),
        ({"version_spans": [(-1, 2)]}, "at least 0"),
        ({"version_spans": [(True, 2)]}, "must be an int"),
        ({"version_spans": [3, 4]}, r"version_spans\[0\]"),
        ({"model_step": "3"}, "must be an int"),
        ({"logprobs": [-0.5]}, "logprobs has 1 entries, token_ids has 2"),
        ({"logprobs": []}, "logprobs has 0 entries"),
    ],
)
def test_an_answer_that_does_not_add_up_fails_the_rollout_and_changes_nothing_else(more, error):
    released = []
    engine = Engine(out(2, "stop", routed_experts=["row"] * 3, **more))
    state = generate(engine, new_state(), on_release=released.extend)
    assert state.status is F
    assert state.response_ids is None
    assert state.routed_experts is None
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(state.error_msg)
    assert [old for _, old in released] == [{"routed_experts": ["row"] * 3}]
    assert len(engine.requests) == 1


def test_the_version_is_read_anew_for_every_request():
    engine = Engine(at(1, out(2)), at(2, ConnectionError("down")), at(3, out(3, "stop")))
    state = generate(engine, new_state())
    assert list(state.response_model_steps) == [0, 0, 2, 2, 2]


def test_requests_that_brought_no_token_leave_no_version():
    engine = Engine(at(5, out(0)), at(7, out(3)), at(8, out(0)), at(9, out(1, "stop")))
    state = generate(engine, new_state())
    assert (state.min_model_step, state.max_model_step) == (5, 8)
    assert state.response_model_steps.runs() == [(5, 3), (8, 1)]


def test_an_aborted_response_reports_its_versions_too():
    async def main():
        engine = Engine(("wait", out(3)))
        engine.step = 4
        client = client_of(engine)
        state = new_state()
        call = asyncio.create_task(client.generate(state, enable_partial_rollout=True))
        await settle()
        await client.pause()
        await call
        return state

    state = run(main())
    assert (state.status, state.min_model_step, state.max_model_step) == (A, 4, 4)


# Going on and starting again


@pytest.mark.parametrize("paused", [False, True], ids=["aborts by itself", "is paused"])
@pytest.mark.parametrize(
    ("partial", "steps", "staleness", "mask"),
    [
        (False, [6] * 8, 0, [1] * 8),
        (True, [2, 2, 4, 4] + [6] * 8, 4, [0] * 4 + [1] * 8),
    ],
    ids=["partial off", "partial on"],
)
def test_three_attempts_at_three_versions(paused, partial, steps, staleness, mask):
    if paused:
        engine = Engine(("wait", out(2)), ("wait", out(2)), out(8, "stop"))

        async def main():
            client = client_of(engine)
            state = new_state()
            for step in (2, 4, 6):
                engine.step = step
                call = asyncio.create_task(client.generate(state, enable_partial_rollout=partial))
                await settle()
                await client.pause()
                await call
            return state

        state = run(main())
    else:
        engine = Engine(at(4, out(2)), at(6, out(2)), out(8, "stop"))
        engine.step = 2
        state = generate(engine, new_state(), partial=partial)
    assert state.status is C
    assert list(state.response_model_steps) == steps
    assert len(state.response_ids) == len(steps)
    assert seq_staleness(state.response_model_steps, train_step=7) == staleness
    assert effective_mask(state.response_model_steps, train_step=7, token_stale_threshold=2).tolist() == mask
    sent = [tokens for tokens, _ in engine.requests]
    if partial:
        assert sent == [[1, 2], [1, 2, 100, 101], [1, 2, 100, 101, 100, 101]]
    else:
        assert sent == [[1, 2]] * 3


def test_the_budget_is_what_is_left_and_the_parameters_stay_the_callers():
    params = {"max_tokens": 10, "min_tokens": 8, "stop": ["x"], "temperature": 0.7}
    before = copy.deepcopy(params)

    def spoil(engine):
        engine.requests[-1][1]["stop"].append("y")
        engine.requests[-1][1].clear()
        return out(7)

    engine = Engine(spoil, out(3, "length"))
    state = generate(engine, new_state(sample_params=params))
    assert engine.requests[1][1] == {"max_tokens": 3, "min_tokens": 1, "stop": ["x"], "temperature": 0.7}
    assert len(state.response_ids) == 10
    assert state.sample_params is params
    assert params == before


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(out(10), "length"), (EngineOutput([5, EOS], "abort"), "stop"), (EngineOutput([5] * 9 + [EOS], "abort"), "stop")],
    ids=["at the limit", "after its last token", "both"],
)
def test_a_response_aborted_when_it_was_done_is_finished_without_a_request(answer, reason, partial):
    engine = Engine(answer)
    state = generate(engine, new_state(10), partial=partial)
    assert (state.status, state.finish_reason) == (C, reason)
    assert len(engine.requests) == 1

    # The same for one that a pause, or an earlier run, left behind.
    engine = Engine()
    left = new_state(
        10, response_ids=list(answer.token_ids), response_model_steps=[3] * len(answer.token_ids), status=A
    )
    generate(engine, left, partial=True)
    assert (left.status, left.finish_reason, engine.requests) == (C, reason, [])


def test_more_tokens_than_a_lowered_limit_are_finished_by_length():
    engine = Engine()
    state = new_state(2, response_ids=[1, 2, 3], response_model_steps=[0, 0, 0], status=A)
    assert generate(engine, state).finish_reason == "length"
    assert generate(engine, new_state(0)).finish_reason == "length"
    assert engine.requests == []


def test_a_prompt_that_ends_with_an_end_token_is_generated():
    state = generate(Engine(out(1, "stop")), new_state(prompt_ids=[1, EOS]))
    assert state.response_ids == [100]


def test_what_ends_a_response_can_be_said_per_rollout():
    aborted = {"response_ids": [5, 6], "response_model_steps": [0, 0], "status": A}
    stops = new_state(sample_params={"max_tokens": 9, "stop_token_ids": [6]}, **aborted)
    assert generate(Engine(), stops).finish_reason == "stop"
    aborted = {"response_ids": [5, EOS], "response_model_steps": [0, 0], "status": A}
    goes_on = new_state(sample_params={"max_tokens": 9, "ignore_eos": True}, **aborted)
    assert len(generate(Engine(out(7, "length")), goes_on).response_ids) == 9


@pytest.mark.parametrize("status", [A, U, E])
def test_without_partial_rollout_old_tokens_are_gone_and_released_once(status):
    released = []
    engine = Engine(out(2, "stop", first=50))
    state = new_state(
        response_ids=[5, 6, 7],
        response_model_steps=[1, 1, 2],
        response_mask=[1, 1, 1],
        logprobs=[-1.0] * 3,
        routed_experts="ref",
        response="old",
        finish_reason="abort",
        status=status,
    )
    engine.step = 3
    generate(engine, state, partial=False, on_release=released.append)
    assert engine.requests[0][0] == [1, 2]
    assert (state.response_ids, list(state.response_model_steps)) == ([50, 51], [3, 3])
    assert (state.response_mask, state.logprobs, state.routed_experts, state.response) == (None, [], None, "")
    assert state.tokens == [1, 2, 50, 51]
    [[(of, old)]] = released
    assert of is state
    assert old["routed_experts"] == "ref"


def test_a_completed_rollout_makes_no_request_and_is_not_touched():
    state = new_state(response_ids=[1], response_model_steps=[0], status=C, reward=1.0, finish_reason="stop")
    before = copy.deepcopy(state)
    for partial in (True, False):
        engine = Engine()
        generate(engine, state, partial=partial)
        assert engine.requests == []
    assert all(getattr(state, name) == getattr(before, name) for name in RolloutState.__slots__)


@pytest.mark.parametrize("kind", [list, tuple, np.array, ModelSteps.from_list], ids=["list", "tuple", "array", "runs"])
def test_fields_keep_their_kind(kind):
    plain = kind if kind is not ModelSteps.from_list else list
    state = new_state(
        prompt_ids=plain([1, 2]),
        response_ids=plain([5, 6]),
        response_model_steps=kind([1, 1]),
        response_mask=plain([1, 0]),
        logprobs=plain([-1.0, -2.0]),
        status=A,
    )
    engine = Engine(EngineOutput([70_000, 8], "stop", logprobs=[-0.5, -0.25], version_spans=[(300, 1), (70_000, 1)]))
    generate(engine, state)
    assert list(state.response_ids) == [5, 6, 70_000, 8]
    assert list(state.response_model_steps) == [1, 1, 300, 70_000]
    assert list(state.response_mask) == [1, 0, 1, 1]
    assert list(state.logprobs) == [-1.0, -2.0, -0.5, -0.25]
    for values in (state.response_ids, state.response_mask, state.logprobs):
        assert isinstance(values, np.ndarray) == (kind is np.array)
    assert isinstance(state.response_model_steps, ModelSteps) == (kind is ModelSteps.from_list)
    assert engine.requests[0][0] == [1, 2, 5, 6]
    assert all(type(token) is int for token in engine.requests[0][0])


def test_narrow_arrays_are_widened_rather_than_wrapped():
    state = new_state(
        response_ids=np.array([5], dtype=np.uint8),
        response_model_steps=np.array([1], dtype=np.int8),
        response_mask=np.array([True]),
        logprobs=np.array([-1.0], dtype=np.float32),
        status=A,
    )
    generate(Engine(EngineOutput(np.array([300]), "stop", logprobs=np.array([-0.5]), model_step=200)), state)
    assert (state.response_ids.tolist(), state.response_model_steps.tolist()) == ([5, 300], [1, 200])
    assert (state.response_mask.dtype, state.logprobs.dtype) == (bool, np.float32)


def test_log_probabilities_are_those_of_all_tokens_or_none():
    had = {"response_ids": [5], "response_model_steps": [0], "status": A}
    without = generate(Engine(out(1, "stop")), new_state(logprobs=[-1.0], **had))
    given = generate(Engine(out(1, "stop", logprobs=[-1.0])), new_state(**had))
    for state in (without, given):
        assert state.status is F
        assert "logprobs" in state.error_msg
        assert state.response_ids == [5]


def test_text_is_joined():
    engine = Engine(out(2, text="ab"), out(0), out(1, "stop", text="c"))
    assert generate(engine, new_state()).response == "abc"


# Bounds


def pauses(engine, **settings):
    """Seconds slept between requests."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)
        await asyncio.sleep(seconds)

    assert generate(engine, new_state(), max_seconds=None, sleep=sleep, **settings).status is C
    return slept


def test_failed_requests_are_tried_again_after_a_doubling_pause():
    engine = Engine(*[ConnectionError("down")] * 4, out(2), ConnectionError("down"), out(2, "stop"))
    assert pauses(engine, backoff_s=1.0, max_backoff_s=5.0) == [1.0, 2.0, 4.0, 5.0, 1.0]


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_jitter_takes_off_up_to_half(draw):
    engine = Engine(ConnectionError("down"), out(2, "stop"))
    assert pauses(engine, backoff_s=2.0, random=lambda: draw) == [2.0 * (1 - draw / 2)]


@pytest.mark.parametrize(
    "fault",
    [
        ConnectionError("the last reason"),
        EngineError("the last reason"),
        EngineOutput([1, 2], "error"),
        EngineOutput([1, 2], None),
        EngineOutput([1, 2], "bogus"),
        EngineOutput([], "stop"),
        EngineOutput([], "abort"),
        lambda engine: (_ for _ in ()).throw(asyncio.CancelledError()),
        lambda engine: RuntimeError("the last reason"),
    ],
    ids=lambda fault: "lambda" if callable(fault) else repr(fault)[:40],
)
@pytest.mark.parametrize("partial", [True, False])
def test_faults_are_bounded_by_attempts(fault, partial):
    engine = Engine(*[fault] * 10)
    state = generate(engine, new_state(), partial=partial, max_attempts=3)
    assert state.status is F
    assert len(engine.requests) == 3
    assert "max_attempts" in state.error_msg
    assert not state.response_ids
    if isinstance(fault, Exception):
        assert "the last reason" in state.error_msg


def test_something_else_than_an_output_is_a_fault():
    state = generate(Engine(lambda engine: ("wait", None)), new_state(), max_attempts=1, max_seconds=1.0)
    assert state.status is F

    class Odd(Engine):
        async def generate(self, tokens, sampling_params, request_id):
            return {"token_ids": [1]}

    assert "EngineOutput" in generate(Odd(), new_state(), max_attempts=1).error_msg


def test_a_request_the_engine_refuses_is_not_repeated():
    engine = Engine(EngineError("too long", retriable=False))
    state = generate(engine, new_state())
    assert state.status is F
    assert "too long" in state.error_msg
    assert len(engine.requests) == 1


def test_requests_that_bring_tokens_are_not_counted_as_attempts():
    engine = Engine(*[out(1)] * 9, out(1, "stop"))
    assert len(generate(engine, new_state(), max_attempts=2).response_ids) == 10


def test_without_partial_rollout_every_abort_counts():
    engine = Engine(*[out(1)] * 9)
    state = generate(engine, new_state(), partial=False, max_attempts=2)
    assert state.status is F
    assert "aborted the request by itself after 1 tokens" in state.error_msg
    assert len(engine.requests) == 2


def test_total_time_is_bounded_between_requests():
    engine = Engine(*[ConnectionError("down")] * 50)

    async def main():
        client = client_of(engine, max_attempts=50, max_seconds=10.0, backoff_s=3.0, max_backoff_s=3.0)
        state = await client.generate(new_state(), enable_partial_rollout=True)
        return state, asyncio.get_running_loop().time()

    state, ended = run(main())
    assert state.status is F
    assert "max_seconds" in state.error_msg
    assert "down" in state.error_msg
    assert len(engine.requests) == 4
    assert ended == 9.0  # another pause would have been past the bound


def test_time_is_that_of_the_clock_given():
    seconds = iter([0.0, 0.0, 0.0, 61.0])
    engine = Engine(out(1), out(1, "stop"))
    state = generate(engine, new_state(), max_seconds=60.0, clock=lambda: next(seconds))
    assert state.status is F
    assert len(engine.requests) == 1


def test_total_time_is_bounded_while_the_engine_does_not_answer():
    engine = Deaf(out(2), ("wait", out(1)))
    state = generate(engine, new_state(), max_seconds=60.0)
    assert state.status is F
    assert "max_seconds" in state.error_msg
    assert engine.aborted == engine.ids[1:]
    assert engine.cancelled == 1
    assert len(state.response_ids) == 2


def test_an_answer_after_the_time_is_up_is_dropped_and_released():
    released = []
    engine = Engine(("wait", out(3, routed_experts=[0] * 4)))
    state = generate(engine, new_state(), max_seconds=60.0, on_release=released.extend)
    assert (state.status, state.response_ids) == (F, None)
    assert [old for _, old in released] == [{"routed_experts": [0] * 4}]


def test_generated_tokens_are_bounded_over_restarts():
    engine = Engine(*[out(7)] * 9)
    state = generate(engine, new_state(10), partial=False, token_budget=25)
    assert state.status is F
    assert "token_budget: 21 of 25" in state.error_msg
    assert len(engine.requests) == 3
    assert generate(Engine(), new_state(10), token_budget=9).status is F


def test_more_tokens_than_asked_for_are_refused():
    state = generate(Engine(out(3), out(8, "length")), new_state(10))
    assert state.status is F
    assert "8 tokens for a request of at most 7" in state.error_msg
    assert len(state.response_ids) == 3


def test_a_rollout_that_failed_once_can_succeed_later():
    state = generate(Engine(ConnectionError("down")), new_state(), max_attempts=1)
    assert state.status is F
    assert generate(Engine(out(1, "stop")), state).status is C


# Pausing


def paused_in(engine, state, *, partial=True, **settings):
    """Generate `state` and pause once nothing goes on by itself. Returns the seconds that took."""

    async def main():
        client = client_of(engine, **settings)
        call = asyncio.create_task(client.generate(state, enable_partial_rollout=partial))
        await settle()
        await client.pause()
        await call
        return asyncio.get_running_loop().time()

    seconds = run(main())
    consistent(state)
    return seconds


def test_an_answer_that_comes_after_the_pause_keeps_its_tokens():
    engine = Engine(("wait", out(5, logprobs=[-1.0] * 5)))
    state = new_state()
    paused_in(engine, state)
    assert (state.status, len(state.response_ids), len(state.logprobs)) == (A, 5, 5)
    assert engine.aborted == engine.ids


def test_a_response_that_ends_by_itself_during_a_pause_is_completed():
    for answer, reason in ((out(5, "stop"), "stop"), (out(20), "length"), (EngineOutput([EOS], "abort"), "stop")):
        state = new_state()
        paused_in(Engine(("wait", answer)), state)
        assert (state.status, state.finish_reason) == (C, reason)


@pytest.mark.parametrize("answer", [out(0), out(3, "error")], ids=["nothing", "an error"])
def test_a_pause_that_catches_nothing_new_keeps_what_was_there(answer):
    state = new_state(response_ids=[5, 6], response_model_steps=[1, 1], status=A)
    paused_in(Engine(("wait", answer)), state)
    assert (state.status, state.response_ids) == (A, [5, 6])


def test_a_fault_during_a_pause_is_an_abort():
    class Drops(Engine):
        async def abort(self, request_id):
            self.running[request_id].set_exception(EngineError("connection closed", retriable=False))

    state = new_state()
    paused_in(Drops(("wait", None)), state)
    assert state.status is A


def test_a_pause_ends_the_wait_for_the_next_try():
    state = new_state()
    assert paused_in(Engine(ConnectionError("down")), state, backoff_s=1000.0) == 0.0
    assert state.status is A


def test_a_pause_before_the_request_is_out_is_not_lost():
    async def main():
        engine = Engine()
        client = client_of(engine)
        state = new_state()
        call = asyncio.create_task(client.generate(state, enable_partial_rollout=True))
        await asyncio.sleep(0)  # the call has begun, its request has not
        await client.pause()
        await call
        return state.status, engine.requests

    assert run(main()) == (A, [])


def test_a_pause_is_for_what_runs_now_and_can_be_repeated():
    async def main():
        engine = Deaf(("wait", out(1)))
        client = client_of(engine)
        await client.pause()
        call = asyncio.create_task(client.generate(new_state(), enable_partial_rollout=True))
        await settle()
        await client.pause()
        await client.pause()
        assert not call.done()
        engine.running[engine.ids[0]].set_result(None)
        assert (await call).status is A
        engine.script.append(out(2, "stop"))
        later = await client.generate(new_state(), enable_partial_rollout=True)
        return later.status, engine.aborted == engine.ids[:1] * 2

    assert run(main()) == (C, True)


def test_an_engine_that_does_not_take_the_abort_does_not_break_the_pause(caplog):
    class Broken(Engine):
        async def abort(self, request_id):
            self.running[request_id].set_result(None)
            raise ConnectionError("no route")

    state = new_state()
    paused_in(Broken(("wait", out(1))), state)
    assert state.status is A
    assert "did not take the abort" in caplog.text


def test_a_pause_with_partial_rollout_off_leaves_the_tokens_to_be_dropped_later():
    engine = Engine(("wait", out(4)))
    state = new_state()
    paused_in(engine, state, partial=False)
    assert (state.status, len(state.response_ids)) == (A, 4)
    generate(engine := Engine(out(1, "stop")), state, partial=False)
    assert engine.requests[0][0] == [1, 2]
    assert len(state.response_ids) == 1


# Cancelling


@pytest.mark.parametrize("engine", [Engine, Deaf], ids=["answers the abort", "does not answer"])
def test_a_cancelled_call_aborts_the_request_and_keeps_what_there_is(engine):
    engine = engine(out(3), ("wait", out(2)))
    state = new_state()

    async def main():
        client = client_of(engine)
        call = asyncio.create_task(client.generate(state, enable_partial_rollout=True))
        await settle()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert not client._calls
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    consistent(state)
    assert engine.aborted == engine.ids[1:]
    assert (state.status, len(state.response_ids)) == (A, 3 if isinstance(engine, Deaf) else 5)
    assert engine.cancelled == isinstance(engine, Deaf)


def test_cancelling_twice_does_not_wait_for_the_engine():
    engine = Deaf(("wait", out(2)))
    state = new_state()

    async def main():
        call = asyncio.create_task(client_of(engine).generate(state, enable_partial_rollout=True))
        await settle()
        call.cancel()
        await settle()
        assert not call.done()  # waits for the answer to the abort
        call.cancel()
        await settle()
        assert call.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert (state.status, engine.cancelled) == (A, 1)


def test_an_engine_that_does_not_even_end_when_cancelled_is_given_up():
    class Stubborn(Deaf):
        async def generate(self, tokens, sampling_params, request_id):
            try:
                await super().generate(tokens, sampling_params, request_id)
            except asyncio.CancelledError:
                await asyncio.sleep(100)
                raise ValueError("too late") from None

    reported = []
    state = new_state()

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reported.append(context))
        call = asyncio.create_task(client_of(Stubborn(("wait", None))).generate(state, enable_partial_rollout=True))
        await settle()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert loop.time() < 10
        del call
        await asyncio.sleep(200)
        gc.collect()

    run(main())
    assert state.status is A
    assert reported == []


def test_a_response_that_was_finished_when_its_call_was_cancelled_stays_so():
    engine = Engine(("wait", out(4, "stop")))
    state = new_state()

    async def main():
        call = asyncio.create_task(client_of(engine).generate(state, enable_partial_rollout=True))
        await settle()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    run(main())
    assert (state.status, len(state.response_ids)) == (C, 4)


def test_cancelling_the_wait_for_the_next_try():
    state = new_state()

    async def main():
        client = client_of(Engine(out(2), ConnectionError("down")))
        call = asyncio.create_task(client.generate(state, enable_partial_rollout=True))
        await settle()
        call.cancel()
        await asyncio.wait([call])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert (state.status, len(state.response_ids), state.error_msg) == (A, 2, None)


# Groups


def group_of(*statuses):
    members = []
    for i, status in enumerate(statuses):
        tokens = [] if status in (U, E) else [50 + i] * 2
        members.append(
            new_state(rollout_id=i, response_ids=tokens, response_model_steps=[1] * len(tokens), status=status)
        )
    return members


def test_only_members_that_are_not_completed_are_generated():
    engine = Engine(out(1, "stop"))
    group = group_of(C, C, A, C)
    before = [copy.deepcopy(member) for member in group]

    async def main():
        return await client_of(engine).generate_group(group, enable_partial_rollout=True)

    assert run(main()) is group
    assert [tokens for tokens, _ in engine.requests] == [[1, 2, 52, 52]]
    assert [member.status for member in group] == [C] * 4
    for i in (0, 1, 3):
        assert all(getattr(group[i], name) == getattr(before[i], name) for name in RolloutState.__slots__)


def test_a_pause_does_not_flip_completed_members():
    engine = Engine(("wait", out(1)), out(2, "stop"), ("wait", out(3)))
    group = group_of(C, A, U, E)

    async def main():
        client = client_of(engine)
        call = asyncio.create_task(client.generate_group(group, enable_partial_rollout=True))
        await settle()
        await client.pause()
        await call

    run(main())
    assert [member.status for member in group] == [C, A, C, A]
    assert [len(member.response_ids) for member in group] == [2, 3, 2, 3]


def test_a_group_with_a_member_that_cannot_be_generated_is_refused_whole():
    engine = Engine()
    group = [*group_of(A, A), new_state(prompt_ids=None)]

    async def main():
        await client_of(engine).generate_group(group, enable_partial_rollout=False)

    with pytest.raises(ValueError, match="no prompt_ids"):
        run(main())
    assert engine.requests == []
    assert group[0].response_ids == [50, 50]


def test_a_cancelled_group_leaves_no_member_running():
    engine = Engine(*[("wait", out(2))] * 3)
    group = group_of(U, A, C, U)

    async def main():
        call = asyncio.create_task(client_of(engine).generate_group(group, enable_partial_rollout=True))
        await settle()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())
    assert sorted(engine.aborted) == sorted(engine.ids)
    assert [member.status for member in group] == [A, A, C, A]
    assert [len(member.response_ids) for member in group] == [2, 4, 2, 2]


def test_an_exception_of_one_member_does_not_leave_the_others_running():
    engine = Engine(out(1, "stop"))
    steps = iter([0])

    async def main():
        client = PartialRolloutClient(engine, lambda: next(steps))
        group = group_of(A, A)
        with pytest.raises(RuntimeError):  # StopIteration, as coroutines raise it
            await client.generate_group(group, enable_partial_rollout=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return [member.status for member in group]

    assert run(main()) == [C, A]


# Side data


@pytest.mark.parametrize("lacking", [0, 1], ids=["every token", "all but the last"])
@pytest.mark.parametrize("kind", [list, np.array], ids=["list", "array"])
def test_whole_sequence_rows_keep_those_of_earlier_requests(lacking, kind):
    def rows(of, tokens):
        return kind([10 * of + i for i in range(tokens - lacking)])

    engine = Engine(out(3, routed_experts=rows(1, 5)), out(2, routed_experts=rows(2, 7)), out(0), out(1, "stop"))
    engine.script[3] = out(1, "stop", routed_experts=rows(3, 8))
    released = []
    state = generate(engine, new_state(), on_release=released.extend)
    whole = [10, 11, 12, 13, 14, 25, 26, 37] if not lacking else [10, 11, 12, 13, 24, 25, 36]
    assert list(state.routed_experts) == whole
    assert isinstance(state.routed_experts, np.ndarray) == (kind is np.array)
    # Everything but the rows that the state holds now, once each.
    assert len({id(old["routed_experts"]) for _, old in released}) == len(released) == 4


def test_rows_of_new_tokens_are_appended():
    engine = Engine(out(3, routed_experts=[1, 1, 1]), out(0, routed_experts=[]), out(2, "stop", routed_experts=[2, 2]))
    assert generate(engine, new_state()).routed_experts == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8, 9, None])
def test_any_other_number_of_rows_fails_the_rollout(rows):
    # 2 prompt tokens, 3 and then 2 generated: 2, 6 and 7 rows can be told apart, of which 7 lacks a row before.
    engine = Engine(out(3, routed_experts=[1] * 4), out(2, routed_experts=None if rows is None else [2] * rows))
    released = []
    state = generate(engine, new_state(), on_release=released.extend)
    assert state.status is F
    assert "rows" in state.error_msg
    assert (state.routed_experts, len(state.response_ids)) == ([1] * 4, 3)
    assert [old["routed_experts"] for _, old in released] == ([] if rows is None else [[2] * rows])


@given(
    prompt=st.integers(1, 4),
    legs=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    layout=st.sampled_from(["whole", "whole but one", "new"]),
)
def test_rows_are_those_the_tokens_were_sampled_with(prompt, legs, layout):
    kept, generated = None, 0
    row_of = {}
    for leg, new in enumerate(legs):
        sent = prompt + generated
        first, last = {
            "whole": (0, sent + new),
            "whole but one": (0, sent + new - 1),
            "new": (sent, sent + new),
        }[layout]
        added = [(leg, i) for i in range(first, last)]
        kept = joined_rows(kept, added, sent=sent, generated=generated, new=new)
        if new:
            for position in range(first, last):
                row_of.setdefault(position, (leg, position))
        generated += new
    assert (kept or []) == [row_of[position] for position in sorted(row_of)]


def test_rows_that_are_no_rows_are_refused():
    for rows in (7, "abc"):
        with pytest.raises(TypeError, match="list or an array"):
            joined_rows(None, rows, sent=2, generated=0, new=3)
    with pytest.raises(ValueError, match="have 0 rows"):
        joined_rows(None, [1] * 6, sent=5, generated=3, new=1)
    with pytest.raises(ValueError, match="have 2 rows"):
        joined_rows([1] * 2, [1], sent=5, generated=3, new=1)
    with pytest.raises(ValueError, match="have 3 rows"):
        joined_rows([1] * 3, [1] * 6, sent=5, generated=3, new=1)


class Store:
    """References to rows; loading one that was freed is an error."""

    def __init__(self):
        self.rows = {}
        self.loads = 0

    def put(self, rows):
        reference = SimpleNamespace()
        self.rows[id(reference)] = (reference, rows)
        return reference

    async def load(self, reference):
        self.loads += 1
        await asyncio.sleep(0)
        return self.rows[id(reference)][1]

    async def free(self, released):
        await asyncio.sleep(0)
        for _, old in released:
            del self.rows[id(old["routed_experts"])]  # KeyError if it was freed before


def test_references_are_loaded_only_to_join_them_and_freed_once():
    store = Store()
    settings = {"load_ref": store.load, "store_ref": store.put, "on_release": store.free}
    once = generate(Engine(out(3, "stop", routed_experts=store.put([1] * 4))), new_state(), **settings)
    assert store.loads == 0
    parts = Engine(
        out(3, routed_experts=store.put([1] * 4)),
        out(0, routed_experts=store.put([9] * 4)),
        out(2, routed_experts=store.put([2] * 6)),
        EngineOutput([4], "error", routed_experts=store.put([9])),
        out(1, "stop", routed_experts=store.put([3])),
    )
    state = generate(parts, new_state(), **settings)
    assert store.rows[id(state.routed_experts)][1] == [1] * 4 + [2] * 2 + [3]
    assert len(store.rows) == 2
    assert store.rows[id(once.routed_experts)][1] == [1] * 4


def test_a_reference_that_cannot_be_joined_is_freed_and_the_old_one_kept():
    store = Store()
    settings = {"load_ref": store.load, "store_ref": store.put, "on_release": store.free}
    first = store.put([1] * 4)
    engine = Engine(out(3, routed_experts=first), out(2, routed_experts=store.put([2] * 3)))
    state = generate(engine, new_state(), **settings)
    assert state.status is F
    assert state.routed_experts is first
    assert list(store.rows) == [id(first)]


def test_an_answer_that_has_come_is_taken_whole_even_if_the_call_is_cancelled_meanwhile():
    store = Store()
    loading = asyncio.Event()

    async def load(reference):
        loading.set()
        return await store.load(reference)

    state = new_state()

    async def main():
        engine = Engine(out(3, routed_experts=store.put([1] * 4)), out(2, routed_experts=store.put([2] * 6)))
        client = client_of(engine, load_ref=load, store_ref=store.put, on_release=store.free)
        call = asyncio.create_task(client.generate(state, enable_partial_rollout=True))
        await loading.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()

    run(main())
    consistent(state)
    assert (state.status, len(state.response_ids)) == (A, 5)
    assert [rows for _, rows in store.rows.values()] == [[1] * 4 + [2] * 2]


def test_a_release_that_fails_is_logged_and_the_rollout_goes_on(caplog):
    def broken(released):
        raise OSError("store is gone")

    engine = Engine(out(1, routed_experts=[1]), out(1, "stop", routed_experts=[2]))
    assert generate(engine, new_state(prompt_ids=[1, 2, 3]), on_release=broken).status is C
    assert "on_release failed" in caplog.text


# Bad input


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"prompt_ids": None}, ValueError, "rollout_id 7 has no prompt_ids"),
        ({"prompt_ids": []}, ValueError, "no prompt_ids"),
        ({"sample_params": None}, ValueError, "max_tokens"),
        ({"sample_params": {}}, ValueError, "max_tokens"),
        ({"sample_params": {"max_tokens": -1}}, ValueError, "at least 0"),
        ({"sample_params": {"max_tokens": 1.5}}, TypeError, "must be an int"),
        ({"sample_params": {"max_tokens": True}}, TypeError, "must be an int"),
        ({"sample_params": {"max_tokens": 5, "n": 4}}, ValueError, "n=4"),
        ({"sample_params": object()}, TypeError, "mapping"),
        ({"response_ids": [1, 2, 3]}, ValueError, "must have model steps"),
        ({"response_ids": [1, 2, 3], "response_model_steps": [1, 1]}, ValueError, "2 entries, response_ids has 3"),
        ({"response_ids": [1], "response_model_steps": [1], "logprobs": [0.0, 0.0]}, ValueError, "logprobs"),
        ({"response_ids": [1], "response_model_steps": [1], "response_mask": []}, ValueError, "response_mask"),
    ],
)
def test_rollouts_that_cannot_be_generated_are_refused_before_anything_is_sent(fields, error, match):
    engine = Engine()
    state = new_state(**fields)
    before = copy.copy(state)
    with pytest.raises(error, match=match):
        run(client_of(engine).generate(state, enable_partial_rollout=True))
    assert engine.requests == []
    assert all(getattr(state, name) is getattr(before, name) for name in RolloutState.__slots__)


def test_enable_partial_rollout_is_a_bool():
    with pytest.raises(TypeError, match="enable_partial_rollout"):
        run(client_of(Engine()).generate(new_state(), enable_partial_rollout=1))


def test_broken_fields_do_not_matter_where_they_are_dropped_anyway():
    state = new_state(response_ids=[1, 2, 3], status=A)
    assert generate(Engine(out(1, "stop")), state, partial=False).response_ids == [100]


def test_a_model_step_that_is_none_is_refused():
    engine = Engine()
    engine.step = -1
    with pytest.raises(ValueError, match="model_step must be at least 0"):
        run(client_of(engine).generate(new_state(), enable_partial_rollout=True))
    assert engine.requests == []


def test_other_names_and_holders_of_the_limit():
    engine = Engine(out(2), out(1, "stop"))
    generate(engine, new_state(sample_params={"max_new_tokens": 6}))
    assert [params for _, params in engine.requests] == [{"max_new_tokens": 6}, {"max_new_tokens": 4}]
    engine = Engine(out(1, "stop"))
    generate(engine, new_state(sample_params=None), max_tokens=4)
    assert engine.requests[0][1] == {"max_tokens": 4}
    engine = Engine(out(1, "stop"))
    generate(engine, new_state(sample_params=SimpleNamespace(model_dump=lambda: {"max_tokens": 3})))
    assert engine.requests[0][1] == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1"),
        ({"max_attempts": 1.0}, TypeError, "max_attempts"),
        ({"max_tokens": 0}, ValueError, "max_tokens"),
        ({"token_budget": 0}, ValueError, "token_budget"),
        ({"max_seconds": -1}, ValueError, "max_seconds"),
        ({"max_seconds": float("nan")}, ValueError, "max_seconds"),
        ({"backoff_s": float("inf")}, ValueError, "backoff_s"),
        ({"max_backoff_s": True}, TypeError, "max_backoff_s"),
        ({"abort_grace_s": "1"}, TypeError, "abort_grace_s"),
        ({"eos_token_ids": [-1]}, ValueError, "eos_token_ids"),
        ({"eos_token_ids": ["9"]}, TypeError, "eos_token_ids"),
        ({"load_ref": len}, ValueError, "load_ref and store_ref"),
        ({"on_release": 3}, TypeError, "on_release"),
        ({"clock": 3}, TypeError, "clock"),
        ({"sleep": None}, TypeError, "sleep"),
    ],
)
def test_wrong_settings_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        client_of(Engine(), **settings)


def test_an_engine_has_two_methods_and_a_version_is_a_function():
    with pytest.raises(TypeError, match="method generate"):
        PartialRolloutClient(object(), lambda: 0)
    with pytest.raises(TypeError, match="model_step must be callable"):
        PartialRolloutClient(Engine(), 3)


# Any schedule


@given(
    script=st.lists(
        st.tuples(st.sampled_from(["abort", "error", "raise"]), st.integers(0, 4), st.integers(0, 2)), max_size=12
    ),
    partial=st.booleans(),
    limit=st.integers(1, 12),
)
def test_a_response_is_its_legs_in_order_whatever_happens_between_them(script, partial, limit):
    """Against a plain account of what each request must have done."""
    engine = Engine()
    expected, log = [], iter(script)

    def entry(engine):
        asked = engine.requests[-1][1]["max_tokens"]
        assert asked == limit - len(expected)
        assert engine.requests[-1][0] == [1, 2, *(token for token, _ in expected)]
        kind, n, ahead = next(log, ("stop", asked, 0))
        served, n = engine.step, min(n, asked)
        engine.step += ahead
        tokens = [100 + len(expected) + i for i in range(n)]
        if kind == "raise":
            raise ConnectionError("down")
        if kind in ("abort", "stop"):
            expected.extend((token, served) for token in tokens)
            if kind == "abort" and not partial and len(expected) < limit:
                expected.clear()
        return EngineOutput(tokens, kind, logprobs=[-1.0] * n)

    engine.script = [entry] * 20
    state = generate(engine, new_state(limit, response_mask=[]), partial=partial, max_attempts=20)
    assert state.status is C
    assert state.response_ids == [token for token, _ in expected]
    assert list(state.response_model_steps) == [step for _, step in expected]
    assert list(state.response_mask or []) in ([1] * len(expected), [])


# With the producer


@pytest.mark.parametrize("partial", [True, False])
def test_the_client_is_an_agent_loop_and_no_token_gets_lost(partial):
    """Two rounds: the second goes on from, or starts again, what the pause of the first left."""

    class Prompts:
        def __init__(self, buffer):
            self.buffer = buffer
            self.drawn = 0

        async def sample(self, task_name, statuses):
            for status in statuses:
                if groups := await self.buffer.get(1, task_name, status):
                    return groups[0]
            self.drawn += 1
            return [new_state(8, rollout_id=(self.drawn, i), group_id=self.drawn) for i in range(2)]

    async def main():
        engine = Engine()
        first = [out(8, "length")] * 4 + [("wait", out(3, first=30))] * 4
        engine.script = [*first, *[lambda e: out(e.requests[-1][1]["max_tokens"], "length")] * 20]
        buffer = ReplayBuffer(StalenessRule(max_staleness=2), tail_batch_trigger_size=0)
        config = AsyncProduceStrategyConfig(
            over_sample_threshold=1.0, enable_partial_rollout=partial, max_staleness=2, tail_batch_trigger_size=0
        )
        strategy = config.build()
        client = client_of(engine)
        sampler = Prompts(buffer)
        for train_step in (1, 2):
            engine.step = train_step - 1
            report = await strategy.produce_batch(
                agent_loop=client,
                sampler=sampler,
                buffer=buffer,
                batch_size=2,
                task_name="default",
                train_step=train_step,
                model_step=engine.step,
            )
            produced, accounted = balance(buffer.ledger())
            assert produced == accounted
            batch = await buffer.take_train_batch({"default": 2}, train_step=train_step)
            assert len(batch["default"]) == 2
            for group in batch["default"]:
                for state in group:
                    assert len(state.response_ids) == 8
        return report, batch["default"], buffer.ledger()

    report, groups, ledger = run(main())
    steps = [
        state.response_model_steps.runs()
        if isinstance(state.response_model_steps, ModelSteps)
        else ModelSteps.from_list(state.response_model_steps).runs()
        for group in groups
        for state in group
    ]
    assert steps == ([[(0, 3), (1, 5)]] if partial else [[(1, 8)]]) * 4
    assert report.produced_tokens == (4 * 5 if partial else 4 * 8) + 4 * 8  # two groups went on, two are new
    assert ledger["discarded"].get("restarted", 0) == (0 if partial else 12)
