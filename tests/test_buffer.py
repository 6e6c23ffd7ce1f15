"""The buffer's life cycle, taking and ordering, through its blocking calls."""

import dataclasses
import enum
import gc
import sys
import tracemalloc
import weakref
from array import array
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from rollouts import balance, group, state

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status

C, A, E, F, X, U = (
    Status.COMPLETED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FAILED,
    Status.FILTERED,
    Status.INIT,
)


def rule(sequence, token=None, **more):
    """Rule by its thresholds, in trainer steps."""
    return StalenessRule(sequence - 1, None if token is None else token - 1, **more)


def buffer(sequence=3, token=None, trigger=0, **more):
    return ReplayBuffer(rule(sequence, token), tail_batch_trigger_size=trigger, **more).sync


def steps_of(groups):
    return [[list(s.response_model_steps) for s in g] for g in groups]


# Age


@pytest.mark.parametrize(
    ("threshold", "model_step", "status"),
    [(1, 4, C), (1, 3, E), (1, 2, E), (2, 4, C), (2, 3, C), (2, 2, E)],
)
def test_a_response_expires_when_its_age_reaches_the_threshold(threshold, model_step, status):
    member = state([model_step])
    assert buffer(threshold).put([member], train_step=5) is status
    assert member.seq_staleness == 5 - model_step - 1


def test_thresholds_scale_with_the_sync_interval():
    b = ReplayBuffer(StalenessRule(1, sync_weights_interval=2), tail_batch_trigger_size=0).sync
    assert b.put(group([1]), train_step=5) is C
    assert b.put(group([0]), train_step=5) is E


def test_time_in_the_queue_counts():
    b = buffer(3)
    members = group([3, 3])
    b.put(members, train_step=4)
    seen = []
    for train_step in (5, 6, 7):
        moved = b.refresh_staleness(train_step)
        seen.append((moved["default"], b.count(status=C), members[0].seq_staleness))
    assert [(moved, completed) for moved, completed, _ in seen] == [(0, 1), (0, 1), (1, 0)]
    assert seen[-1][2] == 3


def test_seq_staleness_is_written_when_a_group_is_handed_out():
    b = buffer(9)
    b.put(group([3], [4]), train_step=5)
    (taken,) = b.take_train_batch({"default": 1}, train_step=7)["default"]
    assert [s.seq_staleness for s in taken] == [3, 2]


def test_a_future_version_cannot_be_put_for_a_step():
    b = buffer()
    with pytest.raises(ValueError, match=r"member 0.*model step 5.*train_step 5"):
        b.put(group([4, 5]), train_step=5)
    assert len(b) == 0
    assert b.put(group([5]), train_step=6) is C


def test_without_a_train_step_the_life_cycle_runs_at_the_latest_one_known():
    b = buffer(2)
    assert b.put(group([0])) is C  # no step is known yet
    b.refresh_staleness(6)
    assert b.put(group([3])) is E
    assert b.put(group([9])) is C


def test_refresh_may_go_back_in_time_and_what_expired_stays_so():
    b = buffer(2)
    b.put(group([3]), train_step=4)
    assert b.refresh_staleness(6) == {"default": 1}
    assert b.refresh_staleness(4) == {"default": 0}
    assert b.count(status=E) == 1
    assert b.put(group([5])) is C  # in the future of step 4, and fresh there


def test_refresh_is_idempotent():
    b = buffer(2, 1)
    for g in (group([3, 4]), group([4], [5]), group([5], status=A)):
        b.put(g, train_step=6)
    first = b.refresh_staleness(7)
    ledger = b.ledger()
    assert b.refresh_staleness(7) == {"default": 0}
    assert b.ledger() == ledger
    assert first["default"] > 0


def test_refresh_looks_only_at_the_pools_asked_for():
    b = buffer(2)
    b.put(group([3]), train_step=4)
    b.put(group([3], status=A), train_step=4)
    assert b.refresh_staleness(6, statuses=[A]) == {"default": 1}
    assert (b.count(status=C), b.count(status=E)) == (1, 1)
    assert b.refresh_staleness(6, statuses=["completed"]) == {"default": 1}
    assert b.refresh_staleness(6, statuses=[F, U]) == {"default": 0}


def test_refresh_has_a_key_for_every_task_that_had_groups_stored():
    b = buffer(2, trigger=-1)
    b.put(group([3]), "a", train_step=4)
    b.put(group([5]), "b", train_step=6)
    assert b.refresh_staleness(6) == {"a": 1, "b": 0}
    assert b.refresh_staleness(6) == {"b": 0}


def test_a_reset_member_keeps_the_age_it_expired_with_until_it_is_generated_anew():
    b = buffer(2)
    members = group([1], [4])
    b.put(members, train_step=5)
    assert [m.seq_staleness for m in members] == [3, 0]
    (again,) = b.get(1, status=E)
    assert again[0].seq_staleness == 3
    again[0].status = C  # generated anew, and nothing came of it
    b.put(again, train_step=5)
    assert again[0].seq_staleness == 0


# Groups


def test_only_expired_members_are_reset_and_their_siblings_survive():
    b = buffer(8, 3)
    members = [state(s, reward=1.0) for s in ([4, 4], [5, 9], [8, 8], [9])]
    assert b.put(members, train_step=10) is E
    first, *others = members
    assert (first.status, first.response_ids, first.reward) == (E, [], None)
    assert steps_of([others]) == [[[5, 9], [8, 8], [9]]]
    assert all(m.status is C and m.reward == 1.0 and m.response_mask is None for m in others)

    (again,) = b.get(1, status=E)
    assert [m for m in again if m.status is not C] == [first]
    first.response_ids, first.response_model_steps, first.status = [7], [10], C
    assert b.put(again, train_step=11) is C
    (taken,) = b.take_train_batch({"default": 1}, train_step=11)["default"]
    assert [list(m.response_mask) for m in taken] == [[1], [0, 1], [1, 1], [1]]


def test_a_preserved_member_keeps_ageing_in_the_expired_pool():
    b = buffer(2)
    members = group([3], [5])
    assert b.put(members, train_step=6) is E
    assert [m.status for m in members] == [E, C]
    assert b.refresh_staleness(7) == {"default": 0}
    assert members[1].status is C
    assert b.refresh_staleness(8) == {"default": 0}  # it was in the EXPIRED pool already
    assert [m.status for m in members] == [E, E]
    assert members[1].response_ids == []
    assert b.count(status=E) == 1
    assert b.ledger()["discarded"] == {"expired": 2}


def test_one_aborted_member_makes_the_group_aborted():
    b = buffer()
    members = group([5], [5], [5], [5])
    members[2].status = A
    assert b.put(members, train_step=6) is A
    assert b.count(status=C) == 0
    (again,) = b.get(9, status=A)
    assert [m.status for m in again].count(A) == 1


def test_a_group_with_an_expired_and_an_aborted_member_is_handed_out_once():
    b = buffer(3, trigger=0)
    members = group([4], [2], [4])
    members[1].status = A
    b.put(members, train_step=5)
    members_put_expired = group([], [5], [5])
    members_put_expired[0].status, members_put_expired[1].status = E, A
    assert b.put(members_put_expired) is E
    assert b.count(status=A) == 1
    b.refresh_staleness(6)
    assert members[1].status is E
    assert b.get(9, status=A) == []
    assert len(b.get(9, status=E)) == 2
    assert b.get(9, status=E) == []


def test_failed_wins_over_expired_and_does_not_age():
    b = buffer(2)
    members = group([1], [1])
    members[0].status, members[1].status = F, A
    assert b.put(members, train_step=6) is F
    assert members[1].response_ids == [100]
    assert b.refresh_staleness(60) == {"default": 0}


def test_unfinished_and_settled_groups_are_left_alone():
    b = buffer(2)
    first = group([2, 2])
    b.put(first, train_step=3)
    b.put(group([1], status=X), train_step=3)
    b.put(group([1], status=F), train_step=3)
    b.put(group([1], status=U), train_step=3)
    assert b.refresh_staleness(6) == {"default": 1}
    assert b.count_statuses(["default"], [C, E, X, F, U]) == {"default": {C: 0, E: 1, X: 1, F: 1, U: 1}}
    late = group([5])
    assert b.put(late, train_step=6) is C
    assert late[0].seq_staleness == 0
    assert len(b.take_train_batch({"default": 1}, train_step=6)) == 1
    assert not b.take_train_batch({"default": 1}, train_step=6)  # INIT work is never trained


@pytest.mark.parametrize("trigger", [0, 4])
def test_with_re_rollout_expired_groups_wait(trigger):
    b = buffer(2, trigger=trigger)
    for step in (2, 3, 4):
        b.put(group([step]), train_step=5)
    assert b.refresh_staleness(6) == {"default": 1}
    assert (len(b), b.count(status=E)) == (3, 2)


def test_without_re_rollout_expired_groups_leave():
    b = buffer(2, trigger=-1)
    for step in (2, 3, 4):
        b.put(group([step]))
    assert b.refresh_staleness(6) == {"default": 2}
    assert (len(b), b.count(status=E)) == (1, 0)


def test_without_re_rollout_fresh_siblings_leave_too():
    b = buffer(2, trigger=-1)
    members = group([2, 2], [5, 5])
    assert b.put(members, train_step=6) is E
    assert len(b) == 0
    assert [m.response_ids for m in members] == [None, None]
    assert b.ledger()["discarded"] == {"expired": 4}
    with_retry = group([2, 2], [5, 5])
    buffer(2, trigger=0).put(with_retry, train_step=6)
    assert [m.response_ids for m in with_retry] == [[], [100, 101]]


def test_a_hundred_steps_without_re_rollout_leave_no_pile():
    b = buffer(2, trigger=-1)
    for train_step in range(1, 101):
        b.put(group([train_step - 1]), train_step=train_step)
        b.refresh_staleness(train_step)
    assert len(b) == 2
    assert b.ledger()["discarded"] == {"expired": 98}


def test_aborted_work_expires_by_age_after_the_same_wait_as_finished_work():
    b = buffer(3)
    members = group([1, 1], status=A)
    seen = []
    b.put(members, train_step=2)
    for train_step in range(2, 6):
        moved = b.refresh_staleness(train_step)["default"]
        if not moved:
            (again,) = b.get(1, status=A)
            seen.append(again[0].seq_staleness)
            b.put(again, train_step=train_step)
    assert seen == [0, 1, 2]
    assert (members[0].status, members[0].response_ids, members[0].seq_staleness) == (E, [], 3)


# The token rule


def test_a_response_without_a_fresh_trainable_token_expires_before_it_is_too_old():
    b = buffer(8, 2)
    assert b.put(group([5, 6]), train_step=8) is C
    assert b.refresh_staleness(9) == {"default": 1}


@pytest.mark.parametrize("mask", [[1, 1, 0], np.array([1, 1, 0]), np.array([True, True, False])])
def test_only_trainable_tokens_keep_a_response_alive(mask):
    b = buffer(8, 2)
    assert b.put([state([3, 3, 9], response_mask=mask)], train_step=10) is E


def test_the_token_rule_spares_what_it_does_not_apply_to():
    b = buffer(8, 1)
    kept = {
        "empty": group([]),
        "nothing trainable": [state([3], response_mask=[0])],
        "agentic by input_ids": [state([3], input_ids=[1]), state([3])],
        "agentic by labels": [state([3]), state([3], labels=[1])],
    }
    assert {name: b.put(members, train_step=8) for name, members in kept.items()} == dict.fromkeys(kept, C)
    assert b.refresh_staleness(11)["default"] == 0
    assert b.refresh_staleness(12)["default"] == 3  # the sequence rule still applies


def test_aborted_work_can_be_spared_by_the_token_rule_until_it_is_completed():
    spare = ReplayBuffer(rule(8, 1, spare_aborted=True), tail_batch_trigger_size=0).sync
    members = group([5], [6])
    members[0].status = A
    assert spare.put(members, train_step=7) is A
    assert spare.refresh_staleness(8) == {"default": 1}  # its sibling is not spared
    assert [m.status for m in members] == [A, E]
    assert members[0].response_ids == [100]

    plain = buffer(8, 1)
    assert plain.put([state([5], A), state([6])], train_step=7) is E


# What is put


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_mask": [1, 1, 1]}, "response_mask has 3 entries, response_ids has 5"),
        ({"response_mask": []}, "response_mask has 0 entries, response_ids has 5"),
        ({"logprobs": [0.0]}, "logprobs has 1 entries, response_ids has 5"),
        ({"response_model_steps": [5] * 4}, "response_model_steps has 4 entries, response_ids has 5"),
        ({"response_model_steps": [5] * 6}, "response_model_steps has 6 entries, response_ids has 5"),
        ({"response_ids": None, "response_mask": [1]}, "response_mask has 1 entries, response_model_steps has 5"),
        ({"response_model_steps": None}, "5 response tokens have no model step"),
        ({"response_model_steps": np.array([5.0] * 5)}, "response_model_steps|steps"),
        ({"response_model_steps": [5, 5, True, 5, 5]}, r"steps\[2\] is True"),
        ({"response_model_steps": [5, 5, 3.9, 5, 5]}, r"steps\[2\] is 3.9"),
        ({"response_model_steps": np.array([2**63] * 5, dtype=np.uint64)}, "2\\*\\*63|9223372036854775807"),
        ({"status": "done"}, "unknown status"),
        ({"prompt_model_step": -1}, "prompt_model_step"),
        ({"prompt_model_step": "3"}, "prompt_model_step"),
        ({"rerolls": 1.5}, "rerolls"),
        ({"group_id": [1]}, r"group_id must be an int, a str or None, got list \[1\]"),
        ({"group_id": 1.5}, "group_id must be an int, a str or None, got float 1.5"),
        ({"group_id": (1, 2)}, "group_id must be an int, a str or None, got tuple"),
        ({"group_id": b"1"}, "group_id must be an int, a str or None, got bytes"),
        ({"group_id": True}, "group_id must be an int, a str or None, got bool"),
    ],
)
def test_a_wrong_member_is_named_and_nothing_changes(fields, words):
    b = buffer()
    good, bad = state([5] * 5), state([5, 5, 5, 7, 7])
    for name, value in fields.items():
        setattr(bad, name, value)
    before = {f: getattr(bad, f) for f in RolloutState.__dataclass_fields__}
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        b.put([good, bad] if "group_id" not in fields else [bad, good], train_step=8)
    assert f"rollout_id {bad.rollout_id}" in str(caught.value)
    assert all(getattr(bad, f) is value for f, value in before.items())
    assert (good.group_id, len(b), b.ledger()["produced"]) == (None, 0, 0)


def test_stamping_comes_first_and_a_refused_put_takes_it_back():
    b = buffer()
    short = state([5] * 3)
    short.response_ids = [1, 2, 3, 4]
    assert b.put([short], model_step=6, train_step=7) is C
    assert short.response_model_steps == [5, 5, 5, 6]
    refused = state([5] * 3)
    refused.response_ids, refused.response_mask = [1, 2, 3, 4], [1]
    with pytest.raises(ValueError, match="response_mask has 1"):
        b.put([refused], model_step=6, train_step=7)
    assert refused.response_model_steps == [5, 5, 5]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ([], ValueError, "empty"),
        (state([5]), TypeError, "sequence of states"),
        ("group", TypeError, "sequence of states"),
        (None, TypeError, "sequence of states"),
        ([object()], TypeError, "member 0 .* is no rollout state"),
        ([state([5]), 3], TypeError, "member 1 .* is no rollout state"),
        ([state([5], group_id=1), state([5], group_id=2)], ValueError, "a group has one"),
        ([state([5], group_id=1), state([5])], ValueError, "a group has one"),
        ([state([5])] * 2, ValueError, "same state object twice"),
    ],
)
def test_what_is_no_group_is_refused(wrong, error, words):
    b = buffer()
    with pytest.raises(error, match=words):
        b.put(wrong, train_step=6)
    assert len(b) == 0


def test_a_group_cannot_be_stored_twice():
    b = buffer()
    members = group([5], group_id="g")
    b.put(members, train_step=6)
    with pytest.raises(ValueError, match=r"'g'.*stored already"):
        b.put(group([5], group_id="g"), train_step=6)
    assert (len(b), b.ledger()["produced"]) == (1, 1)
    assert b.put(group([5], group_id="g"), "other", train_step=6) is C  # tasks have ids of their own


def test_groups_without_an_id_get_a_fresh_one():
    b = buffer()
    first, second = group([5], [5]), group([5])
    b.put(first, train_step=6)
    b.put(second, train_step=6)
    assert first[0].group_id == first[1].group_id != second[0].group_id is not None
    with pytest.raises(ValueError, match="stored already"):
        b.put(first, train_step=6)


def test_a_missing_version_can_be_ordered_instead_of_refused():
    for where, expected in (("oldest", [None, 3, 5]), ("newest", [3, 5, None])):
        b = buffer(9, 1, missing_version=where)
        for steps in ([3], [None], [5]):
            b.put(group(steps, response_mask=None), train_step=4 if steps == [3] else 6)
        taken = [g[0] for _ in range(3) for g in b.take_batch({"default": 1})["default"]]
        got = [m.response_model_steps and m.response_model_steps[0] for m in taken]
        assert got == expected
    b = buffer(2, 1, missing_version="newest")
    b.put(group([None]), train_step=6)
    assert b.refresh_staleness(1000) == {"default": 0}  # neither rule applies


def test_groups_without_response_tokens_are_not_missing_a_version():
    b = buffer()
    assert b.put(group([], status=A), train_step=3) is A
    assert b.put(group([], []), train_step=3) is C


def test_any_object_with_the_attributes_works():
    b = buffer(2, 1)
    foreign = SimpleNamespace(
        status="completed", prompt_ids=[1], response_ids=[5, 6], response_model_steps=(3, 4), response_mask=None
    )
    assert b.put([foreign], train_step=5) is C
    batch = b.take_train_batch({"default": 1}, train_step=5)
    assert batch["default"][0][0] is foreign
    assert list(foreign.response_mask) == [0, 1]
    b.put([foreign])
    b.refresh_staleness(9)
    assert (foreign.status, foreign.response_ids) == ("expired", [])


# Taking


def test_taking_all_or_nothing_loses_nothing():
    b = buffer(2)
    for step in (5, 5, 4, 2):
        b.put(group([step]), train_step=6 if step > 2 else None)
    assert (b.count(status=C), b.count(status=E)) == (3, 1)
    for _ in range(2):
        assert not b.take_train_batch({"default": 4}, train_step=6)
        assert not b.is_ready({"default": 4})
        assert b.count() == 3
    b.put(group([5]), train_step=6)
    batch = b.take_train_batch({"default": 4}, train_step=6)
    assert len(batch["default"]) == 4
    assert len(b) == 1


def test_a_short_task_keeps_the_others_where_they_are():
    b = buffer()
    for _ in range(2):
        b.put(group([5]), "a", train_step=6)
    assert not b.is_ready({"a": 2, "b": 1})
    batch = b.take_train_batch({"a": 2, "b": 1}, train_step=6)
    assert not batch
    assert (dict(batch), batch.trainable_tokens) == ({}, 0)
    assert b.count("a") == 2
    b.put(group([5]), "b", train_step=6)
    batch = b.take_train_batch({"a": 2, "b": 1}, train_step=6)
    assert {task: len(groups) for task, groups in batch.items()} == {"a": 2, "b": 1}
    assert batch.trainable_tokens_by_task == {"a": 2, "b": 1}
    assert batch.trainable_tokens == 3


def test_nothing_too_old_is_ever_handed_to_training():
    b = buffer(2)
    b.put(group([3]), train_step=4)
    b.put(group([5]), train_step=6)
    batch = b.take_train_batch({"default": 1}, train_step=7)
    assert steps_of(batch["default"]) == [[[5]]]
    assert b.count(status=E) == 1


@pytest.mark.parametrize(
    ("mask", "expected"), [(None, [0, 0, 0, 1, 1]), ([1] * 5, [0, 0, 0, 1, 1]), ([1, 1, 0, 0, 1], [0, 0, 0, 0, 1])]
)
def test_the_mask_is_written_when_a_batch_is_taken(mask, expected):
    b = buffer(8, 2)
    member = state([5, 5, 5, 7, 7], response_mask=mask)
    b.put([member], train_step=8)
    assert member.response_mask is mask
    batch = b.take_train_batch({"default": 1}, train_step=8)
    assert list(member.response_mask) == expected
    assert batch.trainable_tokens == sum(expected)
    if mask is None:
        assert member.response_mask.dtype == np.uint8
    else:
        assert type(member.response_mask) is list


def test_without_a_token_rule_only_foreign_tokens_are_masked():
    b = buffer(8)
    own, mixed = state([5, 6]), state([-1, 5, 6], response_mask=[1, 1, 0])
    b.put([own, mixed], train_step=8)
    batch = b.take_train_batch({"default": 1}, train_step=8)
    assert own.response_mask is None
    assert mixed.response_mask == [0, 1, 0]
    assert batch.trainable_tokens == 3
    assert b.ledger()["masked_semantic"] == 2


def test_agentic_groups_keep_their_masks():
    b = buffer(8, 1)
    member = state([3, 7], labels=[1, 2], response_mask=[1, 1])
    b.put([member], train_step=8)
    assert b.take_train_batch({"default": 1}, train_step=8).trainable_tokens == 2
    assert member.response_mask == [1, 1]


def test_take_batch_takes_any_pool_and_leaves_masks_alone():
    b = buffer(8, 1)
    member = state([3, 7], X)
    b.put([member], train_step=8)
    batch = b.take_batch({"default": 1}, status=X)
    assert batch["default"] == [[member]]
    assert member.response_mask is None
    assert (b.ledger()["trained"], len(b)) == (2, 0)


def test_a_take_that_fails_puts_the_groups_back():
    b = buffer(8, 1)
    good, bad = state([7], reward=1), state([7, 7], reward=2)
    b.put([good], train_step=8)
    b.put([bad], train_step=8)
    bad.response_mask = [1]  # somebody broke the buffer's state
    with pytest.raises(ValueError, match="1"):
        b.take_train_batch({"default": 2}, train_step=8)
    assert (b.count(), good.response_mask) == (2, None)
    assert balance(b.ledger())[0] == balance(b.ledger())[1]
    bad.response_mask = None
    batch = b.take_train_batch({"default": 2}, train_step=8)
    assert [g[0].reward for g in batch["default"]] == [1, 2]


# Orders


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fifo", "abcdef"),
        ("stalest_first", "bdacef"),
        ("freshest_first", "eacbdf"),
        ("oldest_prompt_first", "ecabdf"),
    ],
)
def test_orders_are_stable_and_groups_without_a_key_come_last(order, expected):
    b = buffer(99, order=order)
    arrivals = {
        "a": group([7, 8], prompt_model_step=6),
        "b": group([5], [9], prompt_model_step=7),
        "c": group([7], prompt_model_step=5),
        "d": group([5], prompt_model_step=7),
        "e": group([9, 8], prompt_model_step=4),
        "f": group([]),
    }
    for name, members in arrivals.items():
        b.put(members, train_step=10)
        members[0].extra_fields["name"] = name
    b.refresh_staleness(50)
    taken = "".join(g[0].extra_fields["name"] for g in b.take_batch({"default": 6})["default"])
    assert taken == expected


def test_the_oldest_prompt_goes_first_whatever_its_tokens_are():
    for order, first in (("oldest_prompt_first", 5), ("stalest_first", 6)):
        b = buffer(9, order=order)
        b.put(group([6, 6], prompt_model_step=6), train_step=9)
        b.put(group([8, 8], prompt_model_step=5), train_step=9)
        assert b.take_batch({"default": 1})["default"][0][0].prompt_model_step == first


def test_a_group_that_comes_back_keeps_its_arrival_and_gets_a_new_key():
    b = buffer(9, order="stalest_first")
    first, second, third = group([5], status=A), group([5]), group([5])
    for members in (first, second, third):
        b.put(members, train_step=7)
    (again,) = b.get(1, status=A)
    again[0].status = C
    b.put(again, train_step=7)
    assert b.get(2) == [first, second]
    b.put(first)
    assert b.get(1) == [first]
    first[0].response_ids, first[0].response_model_steps = [1], [6]
    b.put(first, train_step=7)
    assert b.get(2) == [third, first]


def test_a_reset_does_not_change_a_groups_place():
    b = buffer(3, order="stalest_first")
    old, young = group([2], [4]), group([3], [4])
    b.put(young, train_step=5)
    b.put(old, train_step=5)
    b.refresh_staleness(7)
    assert [[m.status for m in g] for g in (old, young)] == [[E, C], [E, C]]
    assert b.get(2, status=E) == [old, young]


def test_a_group_put_back_without_tokens_keeps_its_key():
    b = buffer(3, trigger=0)
    old, young = group([2]), group([3])
    b.put(young, train_step=4)
    b.put(old, train_step=4)
    b.refresh_staleness(9)
    for members in b.get(2, status=E):
        b.put(members)
    assert b.get(2, status=E) == [old, young]


# Re-rolls


def test_rerolls_count_hand_outs_of_the_expired_pool_and_can_be_bounded():
    b = buffer(1, trigger=0, max_rerolls=1)
    members = group([0], [0])
    b.put(members, train_step=1)
    b.refresh_staleness(2)
    (again,) = b.get(1, status=E)
    assert [m.rerolls for m in again] == [1, 1]
    for m in again:
        m.response_ids, m.response_model_steps, m.status = [1], [1], C
    assert b.put(again, train_step=2) is C
    assert b.refresh_staleness(3) == {"default": 1}
    assert len(b) == 0
    assert b.ledger()["discarded"] == {"expired": 2, "max_rerolls": 2}
    assert members[0].rerolls == 1
    assert balance(b.ledger())[0] == balance(b.ledger())[1] == 4


def test_a_group_expired_for_the_last_time_is_not_stored_by_put():
    b = buffer(1, trigger=0, max_rerolls=0)
    assert b.put(group([0]), train_step=5) is E
    assert len(b) == 0
    assert b.ledger()["discarded"] == {"max_rerolls": 1}


# Settings


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"rule": None}, TypeError, "rule"),
        ({"rule": {}}, ValueError, "rule"),
        ({"rule": {"a": 3}}, TypeError, "rule of task 'a'"),
        ({"rule": {3: StalenessRule()}}, TypeError, "task name"),
        ({"order": "newest"}, ValueError, "order must be one of"),
        ({"order": None}, ValueError, "order must be one of"),
        ({"tail_batch_trigger_size": -2}, ValueError, "tail_batch_trigger_size"),
        ({"tail_batch_trigger_size": True}, TypeError, "tail_batch_trigger_size"),
        ({"tail_batch_trigger_size": 1.0}, TypeError, "tail_batch_trigger_size"),
        ({"tail_batch_trigger_size": {"a": -2}}, ValueError, "'a'"),
        ({"rule": {"a": StalenessRule()}, "tail_batch_trigger_size": {"b": 0}}, ValueError, "'b', which has no rule"),
        ({"missing_version": "ignore"}, ValueError, "missing_version"),
        ({"max_rerolls": -1}, ValueError, "max_rerolls"),
        ({"max_rerolls": False}, TypeError, "max_rerolls"),
        ({"on_release": 3}, TypeError, "on_release"),
    ],
)
def test_a_wrong_setting_is_refused(settings, error, words):
    with pytest.raises(error, match=words):
        ReplayBuffer(**{"rule": StalenessRule(), **settings})


def test_tasks_have_their_own_rules_and_triggers():
    rules = {"a": StalenessRule(1), "b": StalenessRule(0)}
    b = ReplayBuffer(rules, tail_batch_trigger_size={"b": 0})
    assert (b.rule("a"), b.tail_batch_trigger_size("a"), b.tail_batch_trigger_size("b")) == (rules["a"], -1, 0)
    assert b.sync.put(group([4]), "a", train_step=6) is C
    assert b.sync.put(group([4]), "b", train_step=6) is E
    assert b.sync.refresh_staleness(7) == {"a": 1, "b": 0}
    assert b.sync.count_statuses(["a", "b"], [E]) == {"a": {E: 0}, "b": {E: 1}}
    for call in (
        lambda: b.sync.put(group([4]), "c"),
        lambda: b.sync.get(1, "c"),
        lambda: b.sync.count("c"),
        lambda: b.sync.take_batch({"c": 1}),
        lambda: b.sync.take_train_batch({"c": 0}, train_step=8),
        lambda: b.rule("c"),
    ):
        with pytest.raises(ValueError, match="task 'c' has no rule; tasks with one are: a, b"):
            call()


def test_discarding_with_a_token_rule_warns_once_of_the_consequence():
    with pytest.warns(UserWarning, match="discarded for good") as caught:
        ReplayBuffer(rule(3, 1))
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda b: b.refresh_staleness(0), ValueError, "train_step"),
        (lambda b: b.refresh_staleness(True), TypeError, "train_step"),
        (lambda b: b.refresh_staleness(2.0), TypeError, "train_step"),
        (lambda b: b.refresh_staleness(2, statuses=["nope"]), ValueError, "unknown status"),
        (lambda b: b.refresh_staleness(2, statuses="completed"), TypeError, "statuses must be an iterable"),
        (lambda b: b.refresh_staleness(2, statuses=Status.COMPLETED), TypeError, "statuses must be an iterable"),
        *(
            (
                lambda b, f=field, v=value: b.put([dataclasses.replace(state([1, 1]), **{f: v})]),
                TypeError,
                f"{field} must be a sequence",
            )
            for field in ("response_ids", "logprobs")
            for value in ("ab", {1: 2, 3: 4}, {1, 2}, frozenset((1, 2)))
        ),
        (lambda b: b.put(group([1]), train_step=0), ValueError, "train_step"),
        (lambda b: b.put(group([1]), model_step=True), TypeError, "model_step"),
        (lambda b: b.put(group([1]), 3), TypeError, "task name"),
        (lambda b: b.get(-1), ValueError, "n must be"),
        (lambda b: b.get(1, status="nope"), ValueError, "unknown status"),
        (lambda b: b.take_batch({}), ValueError, "sizes names no task"),
        (lambda b: b.take_batch([("default", 1)]), TypeError, "sizes"),
        (lambda b: b.take_batch({"default": -1}), ValueError, r"sizes\['default'\]"),
        (lambda b: b.take_train_batch({"default": 1.0}, train_step=2), TypeError, r"sizes\['default'\]"),
        (lambda b: b.take_train_batch({"default": 1}, train_step=0), ValueError, "train_step"),
        (lambda b: b.wait_ready({"default": 1}, timeout=-1), ValueError, "timeout"),
        (lambda b: b.wait_ready({"default": 1}, timeout=float("nan")), ValueError, "timeout"),
        (lambda b: b.wait_ready({"default": 1}, timeout=True), TypeError, "timeout"),
        (lambda b: b.wait_ready({"default": 1}, timeout="1"), TypeError, "timeout"),
        (lambda b: b.settle([], "done"), ValueError, "outcome"),
        (lambda b: b.reject(group([1]), outcome="trained"), ValueError, "outcome"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_changes(call, error, words):
    b = buffer(2)
    b.put(group([1]), train_step=2)
    ledger = b.ledger()
    with pytest.raises(error, match=words):
        call(b)
    assert (b.count(), b.ledger()) == (1, ledger)


def test_sizes_of_zero_take_nothing_from_a_task():
    b = buffer()
    b.put(group([5]), "a", train_step=6)
    batch = b.take_train_batch({"a": 1, "b": 0}, train_step=6)
    assert {task: len(groups) for task, groups in batch.items()} == {"a": 1, "b": 0}


def test_model_steps_serve_as_steps_everywhere():
    b = buffer(8, 2)
    member = state([5])
    member.response_ids, member.response_model_steps = list(range(6)), ModelSteps.from_list([5, 5, 5])
    b.put([member], model_step=7, train_step=8)
    assert member.response_model_steps.runs() == [(5, 3), (7, 3)]
    assert b.take_train_batch({"default": 1}, train_step=8).trainable_tokens == 3


# Cost


@pytest.mark.parametrize("groups", [10, 2_000])
def test_a_refresh_with_nothing_due_allocates_nothing_that_grows(groups):
    """Neither with the groups stored nor with their tokens: a byte per group or token would show."""
    b = buffer(9, 4)
    steps = [5] * 500
    for _ in range(groups):
        b.put([RolloutState(response_ids=steps, response_model_steps=steps, status=C)], train_step=6)
    b.refresh_staleness(7)
    gc.collect()
    gc.disable()
    try:
        tracemalloc.start()
        blocks = sys.getallocatedblocks()
        for _ in range(10):
            b.refresh_staleness(7)
        grown = sys.getallocatedblocks() - blocks
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert grown < 32
    assert peak < 4096


class Tensor:
    """Tokens in a container of another library: no ``copy``, and slices are views."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, at):
        return Tensor(self.values[at])

    def tolist(self):
        return self.values.tolist()


@pytest.mark.parametrize("container", [Tensor, tuple, bytes, np.array, lambda ids: array("q", ids)])
def test_tokens_in_any_container_are_continued_or_restarted(container):
    b = buffer(9)
    member = state([3, 3], A)
    member.response_ids = container([1, 2])
    b.put([member])
    [continued] = b.get(1, status=A)
    member.response_ids, member.response_model_steps = container([1, 2, 3]), [3, 3, 4]
    b.put(continued)
    assert b.ledger()["produced"] == 3
    assert not b.ledger()["discarded"]
    [restarted] = b.get(1, status=A)
    member.response_ids = container([7, 2, 3])
    b.put(restarted)
    assert b.ledger()["discarded"] == {"restarted": 3}
    assert len(set(balance(b.ledger()))) == 1


def test_tokens_of_several_numbers_each_are_continued():
    b = buffer(9)
    member = state([3, 3], A)
    member.response_ids = np.array([[1, 2], [3, 4]])
    b.put([member])
    assert b.put(b.get(1, status=A)[0]) is A
    assert b.ledger()["produced"] == 2


def test_an_id_the_buffer_gives_is_that_of_no_other_group():
    b = buffer(9)
    [first] = group([3])
    b.put([first])
    b.put(group([3], group_id=first.group_id + 1))
    b.put(group([3], status=A, group_id=first.group_id + 2))
    b.get(1, status=A)
    [last] = group([3])
    b.put([last])
    assert last.group_id == first.group_id + 3
    assert len(b.get(9)) == 3


@dataclass(frozen=True)
class Frozen:
    status: str = "completed"
    prompt_ids: tuple = (1,)
    response_ids: tuple = (5, 6)
    response_model_steps: tuple = (3, 3)
    response_mask: tuple | None = None
    group_id: int | None = 1


class Picky(SimpleNamespace):
    """Refuses one field, as a class that checks what is assigned may."""

    def __setattr__(self, name, value):
        if name == self.refused:
            raise ValueError(f"{name} is not what it should be")
        super().__setattr__(name, value)


@pytest.mark.parametrize("train_step", [None, 5])
def test_a_group_that_cannot_be_written_to_is_refused_whole(train_step):
    b = buffer(9)
    with pytest.raises(TypeError, match="member 0: its status cannot be written"):
        b.put([Frozen()], train_step=train_step)
    assert len(b) == 0
    assert b.ledger()["produced"] == 0


@pytest.mark.parametrize("refused", ["response_model_steps", "group_id", "task_name", "rerolls", "seq_staleness"])
def test_a_state_that_refuses_a_field_leaves_its_group_as_it_was(refused):
    b = buffer(9)
    fields = {"status": "completed", "prompt_ids": [1], "response_ids": [5, 6], "response_mask": None, "rerolls": 0}
    picky = Picky(refused=None, response_model_steps=None, task_name=None, group_id=None, **fields)
    first = state([], C, rerolls=2)
    first.response_ids = [7]
    first.response_model_steps = None
    picky.refused = refused
    with pytest.raises(TypeError, match=f"member 1: its {refused} cannot be written: {refused} is not"):
        b.put([first, picky], model_step=3, train_step=5)
    assert (first.response_model_steps, first.group_id, first.task_name, first.seq_staleness) == (None, None, None, 0)
    assert not hasattr(picky, "seq_staleness")
    assert (len(b), b.ledger()["produced"]) == (0, 0)
    picky.__dict__["refused"] = None
    assert b.put([first, picky], model_step=3, train_step=5) is C
    assert picky.rerolls == 2


def test_a_mask_that_a_state_refuses_costs_no_group():
    b = buffer(9, 2)
    picky = Picky(
        refused=None,
        status="completed",
        prompt_ids=[1],
        response_ids=[5, 6],
        response_mask=None,
        response_model_steps=[5, 8],
        group_id=2,
    )
    first = state([5, 7], response_mask=[1, 1])
    b.put([first], train_step=9)
    b.put([picky], train_step=9)
    picky.refused = "response_mask"
    with pytest.raises(ValueError, match="response_mask is not what it should be"):
        b.take_train_batch({"default": 2}, train_step=9)
    assert first.response_mask == [1, 1]
    assert (b.count(), b.ledger()["stored"], b.ledger()["trained"]) == (2, 4, 0)
    picky.refused = None
    assert b.take_train_batch({"default": 2}, train_step=9).trainable_tokens == 2


def test_a_status_that_cannot_become_expired_is_refused():
    half = enum.Enum("Half", ["COMPLETED", "ABORTED"])
    b = buffer(2)
    with pytest.raises(ValueError, match=r"member 0 .*Half has no EXPIRED"):
        b.put([state([3], half.COMPLETED)], train_step=4)
    assert len(b) == 0


def test_a_status_in_small_letters_expires_too():
    small = enum.Enum("Small", ["completed", "expired"])
    b = buffer(2)
    member = state([3], small.completed)
    b.put([member], train_step=4)
    b.refresh_staleness(9)
    assert member.status is small.expired


def test_a_foreign_state_without_a_prompt_is_reset_with_the_others():
    b = buffer(2)
    foreign = SimpleNamespace(
        status="completed", tokens=[1, 5], response_ids=[5], response_model_steps=[3], response_mask=None, group_id=1
    )
    ours = state([3])
    b.put([foreign])
    b.put([ours])
    assert b.refresh_staleness(9) == {"default": 2}
    assert (foreign.tokens, foreign.status, ours.status) == (None, "expired", E)


REFUSALS = [
    "tokens",
    "response",
    "response_ids",
    "response_model_steps",
    "logprobs",
    "reward",
    "status",
    "seq_staleness",
]


def picky_group(number):
    """One state of each kind, of which the second can be told to refuse a field."""
    picky = Picky(
        refused=None,
        status="completed",
        prompt_ids=[1],
        tokens=[1, 5, 6],
        response="ab",
        response_ids=[5, 6],
        response_mask=None,
        response_model_steps=[5, 5],
        logprobs=[0.1, 0.1],
        reward=1.0,
        routed_experts=f"reference {number}",
        group_id=number,
        seq_staleness=0,
    )
    return [state([5], group_id=number, routed_experts=f"own reference {number}"), picky]


@pytest.mark.parametrize("refused", REFUSALS)
@pytest.mark.parametrize("when", ["refresh", "take", "put"])
def test_a_group_whose_state_refuses_to_be_reset_is_discarded_and_the_others_are_reset(refused, when, caplog):
    released = []
    b = buffer(3, on_release=released.extend)
    groups = [picky_group(number) for number in range(3)]
    for members in groups:
        if when != "put":
            b.put(members, train_step=6)
    groups[1][1].refused = refused
    if when == "put" and refused in ("status", "seq_staleness"):
        with pytest.raises(TypeError, match=f"member 1: its {refused} cannot be written"):
            b.put(groups[1], train_step=9)
        return
    if when == "put":
        assert [b.put(members, train_step=9) for members in groups] == [E, E, E]
    elif when == "take":
        assert not b.take_train_batch({"default": 1}, train_step=9)
    else:
        assert b.refresh_staleness(9) == {"default": 3}
        assert b.refresh_staleness(9) == {"default": 0}
    assert "group 1 of task 'default' is discarded" in caplog.text
    assert f"{refused} is not what it should be" in caplog.text
    assert (len(b), b.count(status=E)) == (2, 2)
    ledger = b.ledger()
    assert (ledger["produced"], ledger["stored"], ledger["discarded"]) == (9, 0, {"expired": 9})
    # Every reference is released once, also those of the group that left.
    freed = [cleared["routed_experts"] for _, cleared in released if "routed_experts" in cleared]
    assert sorted(freed) == sorted(f"{own}reference {number}" for own in ("", "own ") for number in range(3))
    assert [m[0].group_id for m in b.get(5, status=E)] == [0, 2]


@pytest.mark.parametrize("refused", ["response_ids", "status"])
def test_a_state_that_refuses_to_be_discarded_leaves_all_the_same(refused, caplog):
    b = buffer(3, trigger=-1)
    groups = [picky_group(number) for number in range(2)]
    for members in groups:
        b.put(members, train_step=6)
    groups[0][1].refused = refused
    assert b.refresh_staleness(9) == {"default": 2}
    assert f"Picky refuses what it is to hold then in {refused}" in caplog.text
    assert (len(b), b.ledger()["stored"], b.ledger()["discarded"]) == (0, 0, {"expired": 6})
    assert groups[0][0].response_ids is None


@pytest.mark.parametrize("status", ["COMPLETED", "completed"])
def test_a_status_that_is_a_word_keeps_its_letters(status):
    b = buffer(3)
    member, rejected = state([5], status, group_id=1), state([5], status, group_id=2)
    b.put([member], train_step=6)
    assert member.status == status
    b.reject([rejected])
    assert (rejected.status, rejected.response_ids) == (status, None)
    b.refresh_staleness(9)
    assert member.status == ("EXPIRED" if status.isupper() else "expired")
    (again,) = b.get(1, status=E)
    b.put(again, train_step=9)
    assert member.status == ("EXPIRED" if status.isupper() else "expired")


# One object, one place


def nameless(status="completed", steps=(5,)):
    """State of a class that has no group_id."""
    return SimpleNamespace(
        status=status,
        prompt_ids=[1],
        response_ids=[7] * len(steps),
        response_model_steps=list(steps),
        response_mask=None,
    )


@pytest.mark.parametrize("kind", [state, nameless])
@pytest.mark.parametrize("where", ["another task", "another group", "the same group"])
def test_a_state_that_is_stored_cannot_be_stored_again_elsewhere(kind, where):
    b = buffer(9)
    shared, other = kind(steps=[5]), kind(steps=[5])
    b.put([kind(steps=[5]), shared], "a", train_step=6)
    before = dict(b.ledger())
    if hasattr(shared, "group_id") and where != "the same group":
        shared.group_id = other.group_id = 17
    second = [other, shared] if where == "another group" else [shared]
    with pytest.raises(ValueError, match="stored already"):
        b.put(second, "b" if where == "another task" else "a", train_step=6)
    with pytest.raises(ValueError, match="stored"):
        b.reject(second, "b" if where == "another task" else "a")
    assert (len(b), b.ledger()) == (1, before)
    assert (shared.response_ids is not None, getattr(other, "task_name", None)) == (True, None)
    b.take_train_batch({"a": 1}, train_step=6)
    b.put(second, "b", train_step=6)  # it has left, and may come again


def test_a_state_that_was_discarded_or_taken_and_given_back_is_known_for_what_it_is():
    b = buffer(3, trigger=-1)
    member = state([5])
    b.put([member], train_step=6)
    b.refresh_staleness(9)
    member.response_ids, member.response_model_steps, member.status = [1], [8], C
    assert b.put([member], "b", train_step=9) is C


# States that have no group_id


@pytest.mark.parametrize("outcome", ["trained", "failed", "filtered", "lost"])
def test_nameless_states_that_are_handed_out_can_be_settled(outcome):
    b = buffer(9)
    for task in ("a", "a", "b"):
        b.put([nameless(), nameless()], task, train_step=6)
    groups = [*b.get(2, "a"), *b.get(1, "b")]
    assert b.ledger()["in_flight"] == 6
    with pytest.raises(ValueError, match="a group is given twice"):
        b.settle([groups[0], groups[0]], outcome)
    b.settle(groups[1:], outcome)
    with pytest.raises(ValueError, match="not handed out"):
        b.settle(groups[1:2], outcome)
    b.settle(groups[:1], outcome)
    ledger = b.ledger()
    assert ledger["in_flight"] == 0
    assert {"trained": ledger["trained"], **ledger["discarded"]}[outcome] == 6
    assert balance(ledger) == (6, 6)


def test_nameless_states_keep_their_place_when_they_come_back():
    b = buffer(9, order="fifo", max_rerolls=1)
    first, second = [nameless(steps=[5, 5]), nameless("aborted", [5])], [nameless("aborted", [5])]
    b.put(first, train_step=6)
    b.put(second, train_step=6)
    for members in b.get(2, status=A):
        members[-1].response_ids, members[-1].response_model_steps = [7, 8], [5, 6]
        members[-1].status = "completed"
    b.put(second, train_step=7)
    b.put(first, train_step=7)
    ledger = b.ledger()
    assert (ledger["produced"], ledger["stored"], ledger["in_flight"], ledger["discarded"]) == (6, 6, 0, {})
    assert b.get(2) == [first, second]
    b.reject(first, outcome="filtered")
    b.reject(second)
    assert balance(b.ledger()) == (6, 6)
    assert (b.ledger()["in_flight"], b.ledger()["discarded"]) == (0, {"filtered": 4, "failed": 2})


def test_nameless_states_are_let_go_of_once_they_are_settled():
    b = buffer(9)
    held = Held()
    b.put([held], train_step=6)
    groups = b.get(1)
    gone = weakref.ref(held)
    del held
    b.settle(groups, "trained")
    del groups
    gc.collect()
    assert gone() is None


class Held:
    """State of a plain class, which a weak reference can follow."""

    def __init__(self):
        vars(self).update(vars(nameless()))


# The garbage collector


@pytest.mark.parametrize("trigger", [-1, 0])
@pytest.mark.parametrize("operation", ["refresh_staleness", "take_train_batch"])
def test_no_collection_starts_while_groups_are_reset(trigger, operation):
    b = ReplayBuffer(rule(3), tail_batch_trigger_size=trigger)
    for _ in range(20):
        b.sync.put(group([5], [5]), train_step=6)
    during = []

    def watch(phase, _info):
        during.append(b.operations.lock.locked())

    expire = {
        "refresh_staleness": lambda: b.sync.refresh_staleness(9),
        "take_train_batch": lambda: b.operations.claim_train_batch({"default": 1}, 9),
    }[operation]
    before = gc.get_threshold()
    gc.callbacks.append(watch)
    try:
        gc.set_threshold(1, 1, 1)
        expire()
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(watch)
    assert b.sync.count() == 0
    assert during
    assert not any(during)


def test_a_collector_that_is_off_stays_off():
    b = buffer(3)
    b.put(group([5]), train_step=6)
    gc.disable()
    try:
        b.refresh_staleness(9)
        assert not gc.isenabled()
    finally:
        gc.enable()
