"""What became of responses by their length: buckets, merging, and what a buffer counts."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import group, state

from pystale import ReplayBuffer, StalenessRule, Status
from pystale.buffer_report import BufferReport
from pystale.lengths import OUTCOMES, LengthAccumulator, LengthRow

C, A, E = Status.COMPLETED, Status.ABORTED, Status.EXPIRED

responses = st.lists(st.tuples(st.sampled_from(OUTCOMES), st.integers(0, 70_000)), max_size=30)


def counted(given_responses):
    lengths = LengthAccumulator()
    for outcome, tokens in given_responses:
        lengths.add(outcome, tokens)
    return lengths


@given(responses)
def test_every_response_is_in_the_row_of_its_length(found):
    found = [(outcome, tokens) for outcome, tokens in found if tokens]
    lengths = counted(found)
    rows = lengths.rows()
    assert [row.at_least for row in rows] == sorted({1 << (tokens.bit_length() - 1) for _, tokens in found})
    for row in rows:
        assert row.at_most == 2 * row.at_least - 1
        inside = [(outcome, tokens) for outcome, tokens in found if row.at_least <= tokens <= row.at_most]
        trained = [tokens for outcome, tokens in inside if outcome == "trained"]
        assert row[2:] == (len(inside), sum(tokens for _, tokens in inside), len(trained), sum(trained))
    assert lengths.responses() == len(found)
    assert lengths.tokens("expired") == sum(tokens for outcome, tokens in found if outcome == "expired")


@given(responses, responses)
def test_merging_parts_is_counting_their_union(first, second):
    a, b = counted(first), counted(second)
    assert a + b == counted(first + second) == b + a
    assert a == counted(first)
    copied = a.copy()
    copied.merge(b)
    assert copied == a + b
    assert a == counted(first)


@given(responses)
def test_it_can_be_sent(found):
    lengths = counted(found)
    assert LengthAccumulator.from_dict(json.loads(json.dumps(lengths.to_dict()))) == lengths


@given(responses)
def test_what_is_counted_no_more_leaves_nothing(found):
    lengths = counted(found)
    for outcome, tokens in found:
        lengths.add(outcome, tokens, sign=-1)
    assert lengths == LengthAccumulator()
    assert (lengths.rows(), lengths.length_ratio, lengths.metrics()) == ([], None, {})


def test_a_response_without_tokens_is_none():
    lengths = LengthAccumulator()
    lengths.add("trained", 0)
    assert lengths.rows() == []


@pytest.mark.parametrize(
    "saved",
    [
        None,
        {},
        {"counts": 3},
        {"counts": [["trained", 1, 1]]},
        {"counts": [["sold", 1, 1, 1]]},
        {"counts": [["trained", 0, 1, 0]]},
        {"counts": [["trained", True, 1, 1]]},
        {"counts": [["trained", 2, 0, 0]]},
        {"counts": [["trained", 2, 1, 1]]},  # two binary digits are 2 or 3
        {"counts": [["trained", 2, 1, 4]]},
        {"counts": [["trained", 10**9, 1, 4]]},
        {"counts": [["trained", 2, 1, 2], ["trained", 2, 1, 2]]},
        {"counts": [], "more": 1},
    ],
)
def test_what_no_accumulator_has_written_is_refused(saved):
    with pytest.raises(ValueError, match="lengths"):
        LengthAccumulator.from_dict(saved)


def test_wrong_use_is_refused():
    lengths = LengthAccumulator()
    with pytest.raises(ValueError, match="outcome must be one of trained, expired"):
        lengths.add("restarted", 5)
    with pytest.raises(TypeError, match="merges with a LengthAccumulator, got dict"):
        lengths.merge({})
    assert lengths == LengthAccumulator()


def test_a_ratio_below_one_says_that_long_responses_are_dropped():
    lengths = counted([("trained", 10), ("trained", 10), ("expired", 100), ("trained", 100)])
    # Trained are 40 tokens on average, produced 55.
    assert lengths.length_ratio == 40 / 55
    assert lengths.metrics() == {
        "training/lengths/ratio": 40 / 55,
        "training/lengths/trained_fraction/15": 1.0,
        "training/lengths/trained_fraction/127": 0.5,
    }


def test_a_response_is_counted_once_when_its_story_ends():
    b = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0).sync
    b.put([state([4] * 3), state([2] * 9), state([4] * 6)], train_step=5)  # the second has expired
    b.put(group([4] * 2), train_step=5)
    b.put(group([4] * 5, status=A), train_step=5)
    assert b.report().lengths == counted([("expired", 9)])
    b.take_train_batch({"default": 1}, train_step=5)
    b.reject(group([4] * 70), outcome="filtered")
    (unfinished,) = b.get(1, status=A)
    unfinished[0].response_ids, unfinished[0].response_model_steps = [7], [4]  # restarted
    unfinished[0].status = C
    b.put(unfinished, train_step=5)
    (again,) = b.get(1, status=E)
    b.put(again[:1], train_step=5)  # without the others
    b.settle(b.get(2), "failed")
    ended = [("expired", 9), ("trained", 2), ("filtered", 70), ("lost", 6), ("failed", 3), ("failed", 1)]
    assert b.report().lengths == counted(ended)
    assert b.report().lengths.rows()[-1] == LengthRow(64, 127, 1, 70, 0, 0)


def test_a_report_stays_as_it_was():
    b = ReplayBuffer(StalenessRule(1)).sync
    before = b.report()
    b.put(group([4]), train_step=5)
    b.take_batch({"default": 1})
    assert (before.lengths.responses(), b.report().lengths.responses("trained")) == (0, 1)


def test_a_take_given_up_is_not_counted(tmp_path):
    async def main():
        b = ReplayBuffer(StalenessRule(1), journal=tmp_path)
        await b.put(group([4]), train_step=5)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        given_up = b.report().lengths
        await b.close()
        return given_up

    assert asyncio.run(main()) == LengthAccumulator()


def test_the_metrics_of_a_report_are_those_of_all_tasks():
    report = BufferReport({"a": 2, "b": 1}, {"a": 4}, 2.5, counted([("trained", 3), ("lost", 3)]))
    assert report.metrics("buffer") == {
        "buffer/left_out": 3.0,
        "buffer/reserved": 4.0,
        "buffer/straggler_s": 2.5,
        "buffer/lengths/ratio": 1.0,
        "buffer/lengths/trained_fraction/3": 0.5,
    }
