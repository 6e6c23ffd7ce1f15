"""The client that goes on after aborts, over an engine in this process whose weights change."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pystale.integrations.verl import AbortAwareClient, RetriesExhausted

EOS = 9


@dataclass
class Output:
    """What verl's servers answer: fields and defaults of its ``TokenOutput``."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Engine:
    """Writes the numbers 10, 11, ... to the budget, one weight version after the other.

    `legs` says after how many tokens each request is aborted (None: it runs to the end), or is an exception.
    """

    def __init__(self, *legs, versions=None, log_probs=False, experts=False):
        self.legs = list(legs)
        self.versions = list(versions or range(3, 99))
        self.log_probs = log_probs
        self.experts = experts
        self.requests = []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **options):
        self.requests.append((request_id, list(prompt_ids), sampling_params, options))
        version = self.versions.pop(0)
        leg = self.legs.pop(0) if self.legs else None
        if isinstance(leg, BaseException):
            raise leg
        budget = sampling_params.get("max_tokens", 6)
        n = budget if leg is None else leg
        first = 10 + len(prompt_ids) - 2
        output = Output(list(range(first, first + n)), extra_fields={"global_steps": version, "server": version})
        output.stop_reason = "completed" if leg is None else "aborted"
        output.num_preempted = 1
        if self.log_probs:
            output.log_probs = [-float(version)] * n
        if self.experts:
            output.routed_experts = np.full((len(prompt_ids) + n - 1, 2), version)
        return output


def run(engine, *, params=None, seconds=None, **settings):
    """The answer, with time that passes only where the client waits."""
    now = [0.0]
    waits = seconds if seconds is not None else []

    async def sleep(delay):
        waits.append(delay)
        now[0] += delay

    client = AbortAwareClient(engine, clock=lambda: now[0], sleep=sleep, random=lambda: 0.0, **settings)
    params = {"max_tokens": 6} if params is None else params
    return asyncio.run(client.generate("r", prompt_ids=[1, 2], sampling_params=params, image_data=None))


def versions(answer):
    return answer.extra_fields["min_global_steps"], answer.extra_fields["max_global_steps"]


def test_a_single_generation_has_both_versions():
    engine = Engine(None)
    answer = run(engine)
    assert answer.token_ids == [10, 11, 12, 13, 14, 15]
    assert (answer.stop_reason, versions(answer)) == ("completed", (3, 3))
    assert len(engine.requests) == 1


def test_an_aborted_response_goes_on_with_what_is_left_of_the_budget():
    engine = Engine(2, 1, log_probs=True)
    answer = run(engine)
    assert answer.token_ids == [10, 11, 12, 13, 14, 15]
    assert answer.log_probs == [-3.0, -3.0, -4.0, -5.0, -5.0, -5.0]
    assert versions(answer) == (3, 5)
    assert answer.num_preempted == 3
    assert [(prompt, params["max_tokens"]) for _, prompt, params, _ in engine.requests] == [
        ([1, 2], 6),
        ([1, 2, 10, 11], 4),
        ([1, 2, 10, 11, 12], 3),
    ]


@pytest.mark.parametrize(
    ("legs", "expected"), [((0, None), (4, 4)), ((2, 0, None), (3, 5)), ((0, 6), (4, 4)), ((0, 2, 0, 4), (4, 6))]
)
def test_legs_without_tokens_leave_the_versions_alone(legs, expected):
    answer = run(Engine(*legs))
    assert versions(answer) == expected
    assert answer.extra_fields["global_steps"] == 2 + len(legs)


def test_versions_are_the_oldest_and_the_newest_also_where_servers_differ():
    assert versions(run(Engine(2, 1, versions=[5, 3, 4]))) == (3, 5)


def test_a_leg_that_was_continued_inside_counts_with_all_its_versions():
    class Inner(Engine):
        async def generate(self, *args, **options):
            output = await super().generate(*args, **options)
            output.extra_fields |= {"min_global_steps": 1, "max_global_steps": 7}
            return output

    assert versions(run(Inner(2))) == (1, 7)


def test_an_empty_response_has_the_version_of_its_last_leg():
    class Silent(Engine):
        async def generate(self, *args, **options):
            output = await super().generate(*args, **options)
            output.token_ids = []
            return output

    answer = run(Silent(0, None))
    assert (answer.token_ids, versions(answer)) == ([], (4, 4))


def test_a_server_without_versions_gives_none():
    class Unversioned(Engine):
        async def generate(self, *args, **options):
            output = await super().generate(*args, **options)
            output.extra_fields = {}
            return output

    assert versions(run(Unversioned(2))) == (None, None)


def test_a_response_aborted_at_its_limit_costs_no_request():
    engine = Engine(6)
    assert run(engine).stop_reason == "length"
    assert len(engine.requests) == 1


def test_a_response_aborted_after_its_last_token_costs_no_request():
    engine = Engine(2)
    assert run(engine, eos_token_ids=[11]).stop_reason == "completed"
    engine = Engine(2)
    assert run(engine, params={"max_tokens": 6, "stop_token_ids": [11]}).stop_reason == "completed"
    engine = Engine(2)
    assert len(run(engine, params={"max_tokens": 6, "ignore_eos": True}, eos_token_ids=[11]).token_ids) == 6


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_the_callers_parameters_stay_as_they_are(name):
    params = {name: 6, "stop_token_ids": [99], "min_tokens": 4}
    engine = Engine(3, 3)
    run(engine, params=params)
    assert params == {name: 6, "stop_token_ids": [99], "min_tokens": 4}
    assert [(p[name], p["min_tokens"]) for _, _, p, _ in engine.requests] == [(6, 4), (3, 1)]


def test_without_a_limit_of_its_own_a_response_has_the_clients():
    engine = Engine(2)
    assert len(run(engine, params={}, max_tokens=5).token_ids) == 5
    assert [params["max_tokens"] for _, _, params, _ in engine.requests] == [5, 3]


def test_other_arguments_go_with_every_request():
    engine = Engine(2)
    run(engine)
    assert [(request_id, options) for request_id, _, _, options in engine.requests] == [("r", {"image_data": None})] * 2


def test_routed_experts_of_earlier_legs_stay_and_new_rows_are_appended():
    answer = run(Engine(2, 1, experts=True))
    assert answer.routed_experts[:, 0].tolist() == [3, 3, 3, 4, 5, 5, 5]


# Bounds


def test_aborts_without_a_token_are_bounded_and_waited_for_longer_each_time():
    waits = []
    engine = Engine(*[0] * 9)
    with pytest.raises(RetriesExhausted, match=r"max_attempts: 4 requests .* last reason: aborted after 0 tokens"):
        run(engine, seconds=waits, max_attempts=4, backoff_s=1.0, max_backoff_s=3.0)
    assert len(engine.requests) == 4
    assert waits == [1.0, 2.0, 3.0]


def test_a_token_starts_the_count_anew():
    assert len(run(Engine(0, 0, 1, 0, 0, 1, 0, 0), max_attempts=3).token_ids) == 6


def test_time_is_bounded():
    engine = Engine(*[0] * 99)
    with pytest.raises(RetriesExhausted, match=r"max_seconds: not done within 10.0 s; last reason: aborted"):
        run(engine, max_attempts=99, max_seconds=10.0, backoff_s=4.0, max_backoff_s=4.0)
    assert len(engine.requests) == 3


def test_a_server_that_fails_is_tried_again_and_the_last_failure_is_the_cause():
    assert len(run(Engine(ConnectionError("gone"), 2, RuntimeError("no server"))).token_ids) == 6
    lost = ConnectionError("gone")
    with pytest.raises(RetriesExhausted, match="last reason: ConnectionError: gone") as caught:
        run(Engine(*[lost] * 9), max_attempts=2)
    assert caught.value.__cause__ is lost


@pytest.mark.parametrize("fault", [ValueError("too long"), TypeError("?"), KeyError("k")])
def test_a_faulty_request_is_not_tried_again(fault):
    engine = Engine(fault)
    with pytest.raises(type(fault)):
        run(engine)
    assert len(engine.requests) == 1


def test_cancelling_ends_the_call():
    class Hanging(Engine):
        async def generate(self, *args, **options):
            await asyncio.Event().wait()

    async def cancelled():
        task = asyncio.ensure_future(
            AbortAwareClient(Hanging()).generate("r", prompt_ids=[1], sampling_params={"max_tokens": 1})
        )
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


# What does not fit


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_log_probs_in_some_legs_only_are_refused(first, second):
    class Mixed(Engine):
        async def generate(self, *args, **options):
            self.log_probs = second if self.requests else first
            return await super().generate(*args, **options)

    with pytest.raises(ValueError, match="all tokens of a response have them or none"):
        run(Mixed(2))


def test_log_probs_of_another_length_are_refused():
    class Short(Engine):
        async def generate(self, *args, **options):
            output = await super().generate(*args, **options)
            output.log_probs = [0.0]
            return output

    with pytest.raises(ValueError, match="log_probs has 1 entries, token_ids has 6"):
        run(Short(None))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_attempts": 0}, ValueError, "max_attempts must be at least 1"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an int"),
        ({"max_seconds": -1}, ValueError, "max_seconds must be at least 0 and finite"),
        ({"backoff_s": "1"}, TypeError, "backoff_s must be a number of seconds"),
        ({"eos_token_ids": [-1]}, ValueError, "eos_token_ids must be at least 0"),
        ({"sleep": 1}, TypeError, "sleep must be callable"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        AbortAwareClient(Engine(), **settings)


def test_what_generates_nothing_is_no_client():
    with pytest.raises(TypeError, match="client must have a method generate, got object"):
        AbortAwareClient(object())
