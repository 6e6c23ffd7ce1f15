"""Finished groups that lose members: trained with those that are fresh, or not at all."""

import asyncio
import json
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
from rollouts import balance, group, state

from pystale import (
    AsyncProduceStrategyConfig,
    CheckpointError,
    DisaggAsyncProduceStrategyConfig,
    GroupMode,
    ReplayBuffer,
    StalenessRule,
    Status,
)
from pystale.checkpoint import DOCUMENT

C, A, E = Status.COMPLETED, Status.ABORTED, Status.EXPIRED


def members_mode(min_fresh=1, *, rule=None, **more):
    """Buffer whose responses expire with their oldest token two steps behind."""
    rule = StalenessRule(1) if rule is None else rule
    return ReplayBuffer(rule, group_mode="members", min_fresh=min_fresh, **{"tail_batch_trigger_size": 0, **more})


def three(*oldest):
    """A group of responses that began with these steps, each of two tokens."""
    return group(*[[step, max(step, 4)] for step in oldest])


def lengths(members):
    return [len(m.response_ids) for m in members]


# Which groups are trained with some of their members


@pytest.mark.parametrize(
    ("oldest", "min_fresh", "status", "fresh"),
    [
        ((4, 4, 4), 3, C, 3),
        ((3, 4, 4), 2, C, 2),
        ((3, 3, 4), 1, C, 1),
        ((3, 4, 4), 3, E, 2),
        ((3, 3, 4), 2, E, 1),
        ((3, 3, 3), 1, E, 0),
    ],
)
def test_a_group_goes_on_while_enough_members_are_fresh(oldest, min_fresh, status, fresh):
    b = members_mode(min_fresh).sync
    b.put(three(*oldest), train_step=5)
    b.refresh_staleness(6)
    assert b.count(status=status) == len(b) == 1
    batch = b.take_train_batch({"default": 1}, train_step=6)
    assert bool(batch) is (status is C)
    if batch:
        assert len(batch["default"][0]) == fresh
        assert (batch.left_out, batch.left_out_by_task) == (3 - fresh, {"default": 3 - fresh})
    assert balance(b.ledger())[0] == balance(b.ledger())[1] == 6


def test_all_is_the_default_and_leaves_nobody_out():
    b = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0)
    assert (b.group_mode, b.min_fresh) == (GroupMode.ALL, 1)
    assert b.sync.put(three(2, 4, 4), train_step=5) is E
    assert b.sync.put(three(4, 4, 4), train_step=5) is C
    batch = b.sync.take_train_batch({"default": 1}, train_step=5)
    assert (batch.left_out, batch.left_out_by_task, b.report().left_out) == (0, {"default": 0}, {})
    assert repr(batch) == "TrainBatch({'default': 1}, trainable_tokens=6)"


def test_without_rerollout_what_is_fresh_is_trained_all_the_same():
    b = members_mode(tail_batch_trigger_size=-1).sync
    assert b.put(three(2, 4, 4), train_step=5) is C
    assert b.put(three(2, 2, 2), train_step=5) is E
    assert len(b) == 1
    assert b.refresh_staleness(7) == {"default": 1}
    assert len(b) == 0
    assert b.ledger()["discarded"] == {"expired": 12}


def test_a_member_left_out_is_reset_released_once_and_booked_once():
    released = []
    b = members_mode(on_release=released.extend).sync
    members = three(2, 4, 4)
    members[0].reward, members[0].extra_fields = 1.0, {"baseline": 0.5}
    assert b.put(members, train_step=5) is C
    b.refresh_staleness(5)
    assert [(s is members[0], sorted(old)) for s, old in released] == [
        (True, ["response_ids", "response_model_steps", "reward"])
    ]
    assert (members[0].status, members[0].response_ids, members[0].reward) == (E, [], None)
    assert (members[0].seq_staleness, members[0].extra_fields) == (2, {"baseline": 0.5})
    assert b.ledger() == {
        **{"produced": 6, "trained": 0, "masked_stale": 0, "masked_semantic": 0, "discarded": {"expired": 2}},
        **{"stored": 4, "in_flight": 0},
    }
    (trained,) = b.take_train_batch({"default": 1}, train_step=5)["default"]
    assert trained == members[1:]
    assert b.ledger()["trained"] == 4
    assert len(released) == 1


def test_a_group_goes_on_ageing_without_them():
    b = members_mode(rule=StalenessRule(2)).sync
    members = group([1], [2], [3])
    b.put(members, train_step=4)
    seen = []
    for train_step in (4, 5, 6, 7):
        moved = b.refresh_staleness(train_step)["default"]
        seen.append((train_step, moved, lengths(members)))
    # The last member takes the group along: nothing is left to train.
    assert seen == [(4, 0, [1, 1, 1]), (5, 0, [0, 1, 1]), (6, 0, [0, 0, 1]), (7, 1, [0, 0, 0])]
    (again,) = b.get(1, status=E)
    assert [(m.status, m.rerolls) for m in again] == [(E, 1)] * 3


def test_the_token_rule_leaves_members_out_too():
    b = members_mode(rule=StalenessRule(2, 0)).sync
    assert b.put(group([4, 5], [4, 4], [5, 5]), train_step=6) is C
    batch = b.take_train_batch({"default": 1}, train_step=6)
    assert [list(m.response_mask) for m in batch["default"][0]] == [[0, 1], [1, 1]]
    assert (batch.trainable_tokens, batch.left_out) == (3, 1)
    assert batch.response_masks().tolist() == [[0, 1], [1, 1]]


def test_an_unfinished_group_goes_the_way_of_all():
    b = members_mode().sync
    members = three(2, 4, 4)
    members[2].status = A
    assert b.put(members, train_step=5) is E
    assert [m.status for m in members] == [E, C, A]
    # It waits for re-rollout there, also once what was unfinished has expired and two finished members are left.
    members = [state([2]), state([3], A), state([4]), state([4])]
    assert b.put(members, train_step=5) is E
    assert b.refresh_staleness(6) == {"default": 0}
    assert [m.status for m in members] == [E, E, C, C]
    assert b.count(status=E) == 2


def test_members_that_come_expired_count_as_left_out():
    b = members_mode(2).sync
    members = three(4, 4, 4)
    members[1].status = E
    assert b.put(members, train_step=5) is C
    assert lengths(members) == [2, 0, 2]
    assert b.ledger()["discarded"] == {"expired": 2}
    fewer = three(4, 4, 4)
    fewer[0].status = fewer[1].status = E
    assert b.put(fewer, train_step=5) is E
    assert b.take_train_batch({"default": 1}, train_step=5).left_out == 1


def test_those_that_come_expired_and_those_that_are_found_expired_add_up():
    b = members_mode(2).sync
    members = three(2, 4, 4)
    members[1].status = E
    assert b.put(members, train_step=5) is E
    assert lengths(members) == [0, 0, 2]


def test_leaving_out_is_no_rerollout():
    b = members_mode(2, max_rerolls=0).sync
    members = three(2, 3, 4)
    assert b.put(members, train_step=5) is C
    assert members[2].rerolls == 0
    assert b.refresh_staleness(6) == {"default": 1}
    assert len(b) == 0
    assert b.ledger()["discarded"] == {"expired": 2, "max_rerolls": 4}


def test_a_group_handed_out_is_whole_and_comes_back_as_it_was():
    b = members_mode().sync
    members = three(2, 4, 4)
    b.put(members, train_step=5)
    (lent,) = b.get(1)
    assert lent == members
    assert b.put(lent, train_step=5) is C
    (lent,) = b.get(1)
    lent[0].response_ids, lent[0].response_model_steps, lent[0].status = [7], [4], C
    assert b.put(lent, train_step=5) is C
    batch = b.take_train_batch({"default": 1}, train_step=5)
    assert (lengths(batch["default"][0]), batch.left_out) == ([1, 2, 2], 0)


def test_settling_a_group_books_what_it_has_left():
    b = members_mode()
    b.sync.put(three(2, 4, 4), train_step=5)
    b.settle(b.sync.get(1), "trained")
    assert b.ledger()["trained"] == 4
    assert balance(b.ledger())[0] == balance(b.ledger())[1]


def test_a_plain_take_leaves_them_out_and_other_pools_are_taken_whole():
    b = members_mode().sync
    b.put(three(2, 4, 4), train_step=5)
    b.put(three(2, 2, 2), train_step=5)
    assert (len(b.take_batch({"default": 1})["default"][0]), b.report().left_out) == (2, {"default": 1})
    batch = b.take_batch({"default": 1}, status=E)
    assert (len(batch["default"][0]), batch.left_out) == (3, 0)


def test_the_place_in_the_order_stays():
    b = members_mode(order="stalest_first").sync
    old, young = three(2, 4, 4), three(3, 4, 4)
    b.put(young, train_step=5)
    b.put(old, train_step=5)
    taken = b.take_train_batch({"default": 2}, train_step=5)["default"]
    assert [members[-1] for members in taken] == [old[-1], young[-1]]


def test_a_waiter_is_woken_by_a_group_with_members_left_out():
    async def main():
        b = members_mode()
        waiting = asyncio.ensure_future(b.wait_ready({"default": 1}, timeout=60))
        await asyncio.sleep(0)
        await b.put(three(2, 4, 4), train_step=5)
        return await waiting

    assert asyncio.run(main())


def test_a_group_that_cannot_be_reset_leaves_and_takes_nobody_along(caplog):
    @dataclass(eq=False)
    class Stubborn:
        response_ids: Any
        response_model_steps: Any
        response_mask: Any = None
        logprobs: Any = None
        status: Status = C
        uid: str = field(default="")

        def __setattr__(self, name, value):
            if name == "logprobs" and value == []:
                raise TypeError("no")
            super().__setattr__(name, value)

    b = members_mode().sync
    assert b.put([Stubborn([1], [2]), Stubborn([1], [4])], train_step=5) is E
    assert b.put(three(2, 4, 4), train_step=5) is C
    assert (len(b), b.ledger()["discarded"]) == (1, {"expired": 4})
    assert "cannot be reset" in caplog.text


def test_a_summary_keeps_its_place():
    b = members_mode(write_masks=False).sync
    b.put(three(2, 4, 4), train_step=5)
    batch = b.take_train_batch({"default": 1}, train_step=5)
    assert [m.status for m in batch["default"][0]] == [E, C, C]
    assert (batch.left_out, batch.trainable_tokens) == (1, 4)


# What is kept on disk


def test_a_checkpoint_holds_groups_and_counts(tmp_path):
    b = members_mode(order="fifo").sync
    for _ in range(3):
        b.put(three(2, 4, 4), train_step=5)
    b.take_train_batch({"default": 1}, train_step=5)
    b.get(1)
    b.save(tmp_path)
    for settings in ({"group_mode": "members"}, {}):  # what has expired stays so, in either mode
        other = ReplayBuffer(StalenessRule(1), order="fifo", tail_batch_trigger_size=0, **settings).sync
        other.resume(tmp_path)
        assert other.report().left_out == {"default": 1}
        batch = other.take_train_batch({"default": 2}, train_step=5)
        assert [lengths(g) for g in batch["default"]] == [[2, 2]] * 2
        assert (batch.left_out, other.report().left_out) == (2, {"default": 3})
        assert balance(other.ledger())[0] == balance(other.ledger())[1]


def test_a_checkpoint_of_a_buffer_that_left_nobody_out_is_as_it_always_was(tmp_path):
    b = members_mode().sync
    b.put(three(4, 4, 4), train_step=5)
    b.save(tmp_path)
    assert "left_out" not in json.loads((tmp_path / DOCUMENT).read_text())


@pytest.mark.parametrize(
    ("statuses", "tokens", "words"),
    [
        ((E, A, C), 0, "its members are EXPIRED, ABORTED, COMPLETED"),
        ((E, E, E), 0, "members are"),
        ((E, C, C), 2, "has tokens"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(tmp_path, monkeypatch, statuses, tokens, words):
    b = members_mode()
    members = three(4, 4, 4)
    b.sync.put(members, train_step=5)
    for m, status in zip(members, statuses, strict=True):
        m.status = status
        if status is E and not tokens:
            m.response_ids, m.response_model_steps = [], []
    b.sync.save(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        members_mode().sync.resume(tmp_path)


def test_undoing_takes_takes_the_count_back(tmp_path):
    b = members_mode(journal=tmp_path / "journal").sync
    b.put(three(2, 4, 4), train_step=5)
    b.save(tmp_path / "checkpoint")
    assert b.take_train_batch({"default": 1}, train_step=5).left_out == 1
    b.close()
    again = members_mode(journal=tmp_path / "journal").sync
    again.resume(tmp_path / "checkpoint", undo_takes=True)
    assert again.report().left_out == {}
    again.close()
    again = members_mode(journal=tmp_path / "journal").sync
    again.resume(tmp_path / "checkpoint")  # and it stays so
    assert again.report().left_out == {}
    assert again.take_train_batch({"default": 1}, train_step=5).left_out == 1
    assert balance(again.ledger())[0] == balance(again.ledger())[1]


def test_a_take_given_up_takes_the_count_back(tmp_path):
    async def main():
        b = members_mode(journal=tmp_path / "journal")
        await b.put(three(2, 4, 4), train_step=5)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()
        await b.flush()
        await b.close()
        again = members_mode(journal=tmp_path / "journal")
        await again.resume(None)
        counts = b.report().left_out, again.report().left_out
        batch = await again.take_train_batch({"default": 1}, train_step=5)
        return counts, batch.left_out

    assert asyncio.run(main()) == (({}, {}), 1)


# Settings


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"group_mode": "some"}, ValueError, "group_mode must be one of all, members, got 'some'"),
        ({"group_mode": None}, ValueError, "group_mode must be one of"),
        ({"min_fresh": 2}, ValueError, "no effect with group_mode='all'"),
        ({"group_mode": "members", "min_fresh": 0}, ValueError, "min_fresh must be at least 1"),
        ({"group_mode": "members", "min_fresh": True}, TypeError, "min_fresh must be an int"),
    ],
)
def test_a_wrong_setting_is_refused(settings, error, words):
    with pytest.raises(error, match=words):
        ReplayBuffer(StalenessRule(), **settings)


def test_nothing_is_warned_of_where_fresh_members_are_kept():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ReplayBuffer(StalenessRule(1, 0), group_mode=GroupMode.MEMBERS)
        AsyncProduceStrategyConfig(max_staleness=1, max_token_staleness=0, group_mode="members").build()


@pytest.mark.parametrize("config", [AsyncProduceStrategyConfig, DisaggAsyncProduceStrategyConfig])
@pytest.mark.parametrize(
    ("own", "buffer", "name"),
    [
        ({}, {"group_mode": "members"}, "group_mode of task 'default' is 'members' in the buffer and 'all'"),
        ({"group_mode": "members"}, {}, "group_mode of task 'default' is 'all' in the buffer and 'members'"),
        (
            {"group_mode": "members", "min_fresh": 3},
            {"group_mode": "members", "min_fresh": 2},
            "min_fresh of task 'default' is 2 in the buffer and 3",
        ),
    ],
)
def test_strategy_and_buffer_agree(config, own, buffer, name):
    strategy = config(**own).build()
    with pytest.raises(ValueError, match=name):
        strategy.check_buffer(ReplayBuffer(strategy.rule, **buffer), "default")
    strategy.check_buffer(ReplayBuffer(strategy.rule, **own), "default")
