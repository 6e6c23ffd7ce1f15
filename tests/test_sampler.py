"""Drawing groups: pools first, then prompts, with a position that can be saved."""

import asyncio
import itertools
import json

import numpy as np
import pytest
from rollouts import group

from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.sampler import PromptSampler, PromptsExhausted

E, A = Status.EXPIRED, Status.ABORTED


def buffer():
    return ReplayBuffer(StalenessRule(), tail_batch_trigger_size=0)


def sampler(prompts=None, group_size=2, into=None):
    return PromptSampler([[1], [2], [3]] if prompts is None else prompts, into or buffer(), group_size)


def draw(source, *statuses, task_name="default"):
    return asyncio.run(source.sample(task_name, statuses))


def numbers(source, n):
    return [draw(source)[0].group_id for _ in range(n)]


def test_a_new_prompt_makes_a_group_with_ids_of_its_own():
    source = sampler(group_size=3)
    drawn = draw(source, task_name="math") + draw(source, task_name="math")
    assert [(s.group_id, s.rollout_id) for s in drawn] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert {(s.task_name, s.status) for s in drawn} == {("math", Status.INIT)}


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([5, 6], "prompt_ids"),
        ((5, 6), "prompt_ids"),
        (np.array([5, 6]), "prompt_ids"),
        ("what is 2 + 2?", "message"),
        ([{"role": "user", "content": "hello"}], "message"),
        ([], "message"),
    ],
)
def test_token_ids_and_messages_are_told_apart(prompt, field):
    (state,) = draw(sampler([prompt], group_size=1))
    assert getattr(state, field) is prompt
    assert state.tokens == ([5, 6] if field == "prompt_ids" else None)


def test_a_prompt_may_be_fields_or_a_state_to_copy():
    template = RolloutState(prompt_ids=[5], extra_fields={"answer": 4}, sample_params={"max_tokens": 8})
    first, second = draw(sampler([template])), draw(sampler([{"prompt_ids": [5], "extra_fields": {"answer": 4}}]))
    for state in first + second:
        assert state is not template
        assert (state.prompt_ids, state.tokens, state.extra_fields) == ([5], [5], {"answer": 4})
    assert first[0].sample_params == {"max_tokens": 8}


def test_members_share_nothing_that_is_written_to():
    one, other = draw(sampler([{"prompt_ids": [5], "extra_fields": {}}]))
    one.tokens.append(9)
    one.response_ids.append(9)
    one.extra_fields["reward_model"] = 1
    assert (other.tokens, other.response_ids, other.extra_fields) == ([5], [], {})


def test_pools_are_tried_in_the_order_given_and_prompts_come_last():
    pools = buffer()
    for group_id, status in ((10, A), (11, E), (12, A)):
        pools.sync.put(group([1], status=status, group_id=group_id))
    source = sampler(into=pools)
    drawn = [draw(source, E, A)[0].group_id for _ in range(4)]
    assert drawn == [11, 10, 12, 0]


def test_pools_not_named_are_left_alone():
    pools = buffer()
    pools.sync.put(group([1], status=E, group_id=10))
    assert draw(sampler(into=pools), A)[0].group_id == 0
    assert pools.sync.count(status=E) == 1


def test_exhaustion_names_the_pools_that_were_asked():
    source = sampler([[1]])
    draw(source)
    with pytest.raises(
        PromptsExhausted, match="all 1 prompts of task 'default' are drawn, pools asked before: ABORTED"
    ):
        draw(source, A)


def test_prompts_may_be_endless():
    assert numbers(sampler([n] for n in itertools.count()), 100) == list(range(100))


def test_prompts_are_read_one_at_a_time():
    read = []

    def prompts():
        for n in range(5):
            read.append(n)
            yield [n]

    numbers(sampler(prompts()), 2)
    assert read == [0, 1]


@pytest.mark.parametrize("kind", [list, iter])
def test_a_new_sampler_continues_where_the_state_was_taken(kind):
    prompts = [[n] for n in range(12)]
    source = sampler(kind(prompts))
    numbers(source, 10)
    saved = json.loads(json.dumps(source.state_dict(in_flight=[9, 8])))
    resumed = sampler(kind(prompts))
    resumed.load_state_dict(saved)
    drawn = [draw(resumed) for _ in range(4)]
    assert [(g[0].group_id, g[0].rollout_id, g[0].prompt_ids) for g in drawn] == [
        (8, 16, [8]),
        (9, 18, [9]),
        (10, 20, [10]),
        (11, 22, [11]),
    ]


def test_prompts_waiting_to_be_drawn_again_survive_a_second_resume():
    first = sampler()
    numbers(first, 3)
    second = sampler()
    second.load_state_dict(first.state_dict(in_flight=[0, 2]))
    third = sampler()
    third.load_state_dict(second.state_dict())
    assert numbers(third, 2) == [0, 2]


def test_resuming_over_a_data_set_reads_only_what_is_drawn():
    class Prompts:
        read: list[int] = []  # noqa: RUF012

        def __len__(self):
            return 1000

        def __getitem__(self, number):
            self.read.append(number)
            return [number]

    resumed = sampler(Prompts())
    resumed.load_state_dict({"version": 1, "drawn": 900, "again": [7]})
    assert numbers(resumed, 2) == [7, 900]
    assert Prompts.read == [7, 900]


def test_a_group_given_back_is_drawn_again_with_its_prompt_and_nothing_of_its_responses():
    source = sampler([{"prompt_ids": [5], "sample_params": {"n": 1}, "extra_fields": {"answer": 4}}, [6]])
    lost = draw(source)
    for state in lost:
        state.response_ids, state.reward, state.rerolls, state.prompt_model_step = [1, 2], 1.0, 2, 7
        state.status = Status.FAILED
    source.give_back(lost)
    source.buffer.sync.reject(lost, outcome="lost")
    again = draw(source)
    assert [s.rollout_id for s in again] == [0, 1]
    for state in again:
        assert (state.prompt_ids, state.tokens, state.sample_params, state.extra_fields) == (
            [5],
            [5],
            {"n": 1},
            {"answer": 4},
        )
        assert (state.response_ids, state.reward, state.rerolls, state.prompt_model_step, state.status) == (
            [],
            None,
            0,
            None,
            Status.INIT,
        )
    assert draw(source)[0].group_id == 1


def test_only_groups_drawn_here_can_be_given_back_and_only_once():
    source = sampler()
    with pytest.raises(ValueError, match="group 0 was not drawn here"):
        source.give_back([RolloutState(group_id=0)])
    drawn = draw(source)
    source.give_back(drawn)
    with pytest.raises(ValueError, match="group 0 was given back already"):
        source.give_back(drawn)
    with pytest.raises(ValueError, match="the group is empty"):
        source.give_back([])
    with pytest.raises(ValueError, match="group 'a' was not drawn here"):
        source.state_dict(in_flight=["a"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"version": 2, "drawn": 0, "again": []}, "version 2 is not known here"),
        ({"drawn": 0, "again": []}, "has the keys version, drawn and again"),
        ({"version": 1, "drawn": 0, "again": [], "more": 1}, "has the keys version, drawn and again"),
        ([], "has the keys version, drawn and again"),
        ({"version": 1, "drawn": -1, "again": []}, "drawn must be a number of prompts"),
        ({"version": 1, "drawn": True, "again": []}, "drawn must be a number of prompts"),
        ({"version": 1, "drawn": 2, "again": [2]}, "again must list numbers of prompts below drawn=2"),
        ({"version": 1, "drawn": 2, "again": [False]}, "again must list numbers of prompts below drawn=2"),
        ({"version": 1, "drawn": 4, "again": [1]}, "4 prompts were drawn, but there are only 3"),
    ],
)
@pytest.mark.parametrize("kind", [list, iter])
def test_a_state_that_does_not_fit_is_refused(state, message, kind):
    fresh = sampler(kind([[1], [2], [3]]))
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(state)
    assert fresh.state_dict() == {"version": 1, "drawn": 0, "again": []}


def test_a_sampler_in_use_does_not_load():
    source = sampler()
    draw(source)
    with pytest.raises(ValueError, match="this sampler has drawn 1 prompts"):
        source.load_state_dict(source.state_dict())


@pytest.mark.parametrize("prompts", ["a string", b"bytes", {"a": 1}, 7, None])
def test_what_is_no_iterable_of_prompts_is_refused(prompts):
    with pytest.raises(TypeError, match="prompts must be an iterable of prompts"):
        PromptSampler(prompts, buffer(), 1)


@pytest.mark.parametrize(("group_size", "error"), [(0, ValueError), (True, TypeError), (1.0, TypeError)])
def test_a_group_size_out_of_range_is_refused(group_size, error):
    with pytest.raises(error, match="group_size"):
        sampler(group_size=group_size)


def test_a_prompt_that_makes_no_state_does_not_shift_the_numbers():
    source = sampler([{"no such field": 1}, [2]])
    with pytest.raises(TypeError, match="no such field"):
        draw(source)
    assert draw(source)[0].group_id == 1
