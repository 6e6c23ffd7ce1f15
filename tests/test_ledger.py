"""Every generated token is somewhere, exactly once."""

import pytest
from rollouts import balance, group, state

from pystale import ReplayBuffer, StalenessRule, Status

C, A, E, F = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED


@pytest.fixture
def b():
    return ReplayBuffer(StalenessRule(3, 0), tail_batch_trigger_size=0).sync


def test_a_new_buffer_has_an_empty_account(b):
    ledger = b.ledger()
    assert ledger["discarded"] == {}
    assert ledger["discarded"]["expired"] == 0
    assert set(ledger) == {
        "produced",
        "trained",
        "masked_stale",
        "masked_semantic",
        "discarded",
        "stored",
        "in_flight",
    }


def test_a_trained_response_is_split_into_trained_stale_and_semantic(b):
    b.put([state([4, 4, 5, 5, -1], response_mask=[1, 0, 1, 1, 1])], train_step=6)
    assert b.ledger()["stored"] == 5
    b.take_train_batch({"default": 1}, train_step=6)
    ledger = b.ledger()
    assert (ledger["trained"], ledger["masked_stale"], ledger["masked_semantic"]) == (2, 1, 2)
    assert balance(ledger) == (5, 5)


def test_what_was_handed_out_is_in_flight_until_it_comes_back(b):
    members = group([5, 5], [5], status=A)
    b.put(members, train_step=6)
    (again,) = b.get(1, status=A)
    assert (b.ledger()["stored"], b.ledger()["in_flight"]) == (0, 3)
    again[0].response_ids = [*again[0].response_ids, 7, 8]
    b.put(again, model_step=5, train_step=6)
    ledger = b.ledger()
    assert (ledger["produced"], ledger["stored"], ledger["in_flight"], ledger["discarded"]) == (5, 5, 0, {})


@pytest.mark.parametrize("new", [[9], [9, 9], [9, 9, 9, 9]], ids=["shorter", "as long", "longer"])
def test_a_restarted_response_discards_the_tokens_it_had(b, new):
    members = group([5, 5], status=A)
    b.put(members, train_step=6)
    (again,) = b.get(1, status=A)
    again[0].response_ids, again[0].response_model_steps, again[0].status = new, [6] * len(new), C
    b.put(again, train_step=7)
    ledger = b.ledger()
    assert ledger["discarded"] == {"restarted": 2}
    assert (ledger["produced"], ledger["stored"]) == (2 + len(new), len(new))


def test_a_finished_member_is_not_taken_for_a_restart(b):
    members = group([5, 5], [5])
    members[1].status = A
    b.put(members, train_step=6)
    (again,) = b.get(1, status=A)
    again[1].response_ids = [*again[1].response_ids, 1]
    b.put(again, model_step=5, train_step=6)
    assert b.ledger()["discarded"] == {}


@pytest.mark.parametrize("outcome", ["failed", "filtered", "lost"])
def test_what_does_not_come_back_is_settled(b, outcome):
    b.put(group([5, 5], status=A), train_step=6)
    groups = b.get(1, status=A)
    b.settle(groups, outcome)
    assert b.ledger()["discarded"] == {outcome: 2}
    assert balance(b.ledger()) == (2, 2)
    with pytest.raises(ValueError, match="not handed out"):
        b.settle(groups, outcome)


def test_what_was_trained_elsewhere_is_settled_as_trained(b):
    b.put([state([5, 5, 5], A, response_mask=[1, 1, 0])], train_step=6)
    groups = b.get(1, status=A)
    groups[0][0].response_ids += [4]
    groups[0][0].response_model_steps += [6]
    groups[0][0].response_mask += [1]
    b.settle(groups, "trained")
    ledger = b.ledger()
    assert (ledger["produced"], ledger["trained"], ledger["masked_semantic"], ledger["in_flight"]) == (4, 3, 1, 0)


def test_settling_is_all_or_nothing(b):
    stored, lent = group([5], group_id=1), group([5], group_id=2, status=A)
    b.put(stored, train_step=6)
    b.put(lent, train_step=6)
    b.get(1, status=A)
    for wrong, words in (
        ([lent, stored], "1 is stored"),
        ([lent, group([5])], "not handed out"),
        ([lent, lent], "twice"),
        ([lent, []], "not handed out"),
    ):
        with pytest.raises(ValueError, match=words):
            b.settle(wrong, "lost")
    assert b.ledger()["in_flight"] == 1
    b.settle([lent], "lost")


def test_an_id_used_by_two_tasks_is_told_apart_by_the_task_name(b):
    for task in ("a", "b"):
        b.put(group([5], group_id=1, status=A), task, train_step=6)
    (from_a,), (from_b,) = b.get(1, "a", A), b.get(1, "b", A)
    from_a[0].task_name = None
    with pytest.raises(ValueError, match="task_name"):
        b.settle([from_a], "lost")
    b.settle([from_b], "lost")
    b.settle([from_a], "lost")
    assert b.ledger()["discarded"] == {"lost": 2}


@pytest.mark.parametrize("outcome", ["failed", "filtered", "lost"])
def test_groups_that_were_never_stored_can_be_rejected(b, outcome):
    members = [state([5, 5], F, routed_experts="ref")]
    b.reject(members, outcome=outcome)
    assert balance(b.ledger()) == (2, 2)
    assert b.ledger()["discarded"] == {outcome: 2}
    assert (members[0].status, members[0].routed_experts, members[0].response_ids) == (F, None, None)


def test_a_group_handed_out_can_be_rejected_and_a_stored_one_cannot(b):
    members = group([5, 5], status=A)
    b.put(members, train_step=6)
    with pytest.raises(ValueError, match="stored; take it out"):
        b.reject(members)
    (again,) = b.get(1, status=A)
    b.reject(again)
    assert b.ledger()["discarded"] == {"failed": 2}
    assert b.ledger()["in_flight"] == 0
    assert b.put(group([5], group_id=members[0].group_id), train_step=6) is C


def test_a_discarded_group_is_forgotten(b):
    members = group([5], group_id=1)
    b.put(members, train_step=6)
    b.take_train_batch({"default": 1}, train_step=6)
    assert b.put(group([5], group_id=1), train_step=6) is C


def test_a_group_that_comes_back_with_fewer_members_loses_their_tokens(b):
    members = group([5, 5], [5], status=A)
    b.put(members, train_step=6)
    (again,) = b.get(1, status=A)
    b.put(again[:1], train_step=6)
    assert b.ledger()["discarded"] == {"lost": 1}
    assert balance(b.ledger()) == (3, 3)


def test_a_stored_group_does_not_close_the_account_of_its_namesake_in_another_task():
    b = ReplayBuffer(StalenessRule(), tail_batch_trigger_size=0).sync
    handed_out, stored = group([3], group_id=1, task_name="a"), group([3, 3], group_id=1, task_name="b")
    b.put(handed_out, "a")
    b.put(stored, "b")
    b.get(1, "a")
    with pytest.raises(ValueError, match="group 1 is stored"):
        b.settle([stored], "trained")
    assert b.ledger()["in_flight"] == 1
    b.settle([handed_out], "trained")
    assert (b.ledger()["trained"], b.ledger()["stored"]) == (1, 2)
