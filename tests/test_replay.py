"""What-if replays of a trace whose numbers are worked out here."""

import subprocess
import sys
import threading
from collections import Counter

import pytest
from rollouts import group
from traces import LINES, header, line, written

from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.replay import RECORDED, WhatIf, read_history, replay, what_ifs
from pystale.replay.outcome import mean_of, quantile_of


@pytest.fixture
def history(tmp_path):
    return read_history(written(tmp_path / "run.jsonl"))


def outcome_of(history, *limits):
    recorded, reference = replay(history)
    return replay(history, WhatIf(*limits), reference)[0] if limits else recorded


def test_the_recorded_settings_give_what_was_recorded(history):
    outcome = outcome_of(history)
    assert outcome.differs == ""
    assert outcome.ledger == {
        "produced": 30 + 5 + 16 + 4 + 9,
        "trained": 30 + 5 + 17,
        "masked_stale": 0,
        "masked_semantic": 0,
        "discarded": {"expired": 8},
        "stored": 4,
        "in_flight": 0,
    }
    assert (outcome.trained, outcome.expired, outcome.rerolled, outcome.discarded) == (3, 1, 1, 0)
    # "a" is on-policy; "b" is a step old when it is trained; of "c", 8 tokens are a step old and 9 on-policy.
    assert outcome.token_staleness == {0: 30 + 9, 1: 5 + 8}
    assert outcome.response_staleness == {0: 2 + 1, 1: 1 + 1}
    assert [(b.train_step, b.tokens, b.masked, b.staleness) for b in outcome.batches] == [
        (1, 30, 0, 0.0),
        (2, 5, 0, 1.0),
        (3, 17, 0, 8 / 17),
    ]
    assert (outcome.wasted, outcome.expired_tokens, outcome.waited, outcome.unfilled) == (8, 8, 0, 0)


def test_the_recorded_limits_as_a_what_if_are_the_same(history):
    recorded, again = outcome_of(history).as_dict(), outcome_of(history, 1, None).as_dict()
    assert again == {**recorded, "recorded": False}


def test_a_tighter_limit(history):
    outcome = outcome_of(history, 0, None)
    # "c" loses its second member when it is put, "b" expires at step 2, so that this batch waits, until "d" comes at
    # step 3. By then the first member of "c" has expired too: both are generated anew, by version 2.
    assert outcome.ledger["produced"] == 30 + 5 + 16 + 4 + 17
    assert outcome.ledger["trained"] == 30 + 4 + 17
    assert outcome.ledger["discarded"] == {"expired": 8 + 5 + 8}
    assert outcome.ledger["stored"] == 0
    assert (outcome.trained, outcome.expired, outcome.rerolled, outcome.unrolled) == (3, 3, 1, 1)
    assert (outcome.waited, outcome.unfilled) == (1, 0)
    assert outcome.token_staleness == {0: 51}
    assert [batch.train_step for batch in outcome.batches] == [1, 3, 3]


def test_a_looser_limit(history):
    outcome = outcome_of(history, 2, None)
    # "c" does not expire, so its re-roll is not put; it is trained at step 3 with 2 tokens of version 0.
    assert outcome.ledger["produced"] == 30 + 5 + 16 + 4
    assert outcome.ledger["trained"] == 30 + 5 + 16
    assert outcome.wasted == 0
    assert (outcome.not_handed_out, outcome.not_put, outcome.rerolled) == (1, 1, 0)
    assert outcome.token_staleness == {0: 30, 1: 5 + 14, 2: 2}
    assert outcome.waited == 0


def test_a_limit_for_tokens(history):
    outcome = outcome_of(history, 1, 0)
    # At step 2 "b" has no fresh token; "c" is trained instead, without its 2 tokens of version 0.
    assert outcome.ledger["trained"] == 30 + 14 + 4
    assert outcome.ledger["masked_stale"] == 2
    assert outcome.ledger["discarded"] == {"expired": 5}
    assert outcome.wasted == 7
    assert outcome.token_staleness == {0: 48}
    assert [(b.tokens, b.masked) for b in outcome.batches] == [(30, 0), (14, 2), (4, 0)]


def test_without_rerolls_groups_are_discarded(tmp_path):
    history = read_history(written(tmp_path / "run.jsonl", LINES[:7], header(tail_batch_trigger_size=-1)))
    outcome = outcome_of(history, 0, None)
    assert (outcome.trained, outcome.discarded, outcome.unrolled) == (1, 2, 0)
    assert (outcome.waited, outcome.unfilled) == (1, 1)


def test_a_member_that_was_generated_anew_and_would_have_gone_on_starts_again(tmp_path):
    lines = [
        line("put", group="a", train_step=1, members=[{"status": "ABORTED", "steps": [0, 4]}]),
        {"op": "refresh", "train_step": 2},
        {"op": "get", "pool": "EXPIRED", "groups": {"t": ["a"]}},
        line("put", group="a", back=True, train_step=2, members=[{"steps": [1, 6]}]),
        line("take", train_step=2),
    ]
    history = read_history(written(tmp_path / "run.jsonl", lines, header(max_staleness=0)))
    assert outcome_of(history).ledger["discarded"] == {"expired": 4}
    outcome = outcome_of(history, 1, None)
    assert outcome.ledger["discarded"] == {"restarted": 4}
    assert (outcome.ledger["produced"], outcome.ledger["trained"], outcome.rerolled) == (10, 6, 0)


def test_a_reroll_that_nobody_got_does_not_count(tmp_path):
    get = {"op": "get", "pool": "EXPIRED", "groups": {"t": ["a"]}}
    lines = [
        line("put", group="a", train_step=1, members=[{"steps": [0, 4]}]),
        {"op": "refresh", "train_step": 3},
        get,
        {"op": "undo", "groups": {"t": ["a"]}},
        get,
        line("put", group="a", back=True, train_step=3, members=[{"steps": [2, 6]}]),
        {"op": "refresh", "train_step": 9},
    ]
    head = {**header(), "max_rerolls": 2}
    outcome = outcome_of(read_history(written(tmp_path / "run.jsonl", lines, head)))
    assert (outcome.rerolled, outcome.expired, outcome.discarded, outcome.unrolled) == (1, 2, 0, 1)


def test_batches_that_wait_are_taken_in_the_order_in_which_they_were_asked_for(tmp_path):
    lines = [
        line("put", group="a", train_step=1, members=[{"steps": [0, 3]}]),
        line("put", group="b", train_step=1, members=[{"steps": [0, 5]}]),
        line("put", group="c", train_step=2, members=[{"steps": [1, 7]}]),
        {"op": "take", "sizes": {"t": 2}, "train_step": 2, "groups": {"t": ["a", "b"]}},
        {"op": "take", "sizes": {"t": 1}, "train_step": 2, "groups": {"t": ["c"]}},
        line("put", group="d", train_step=3, members=[{"steps": [2, 9]}]),
        line("put", group="e", train_step=3, members=[{"steps": [2, 11]}]),
        line("put", group="f", train_step=3, members=[{"steps": [2, 13]}]),
    ]
    outcome = outcome_of(read_history(written(tmp_path / "run.jsonl", lines)), 0, None)
    # At step 2 only "c" is fresh: too few for the first batch, and the second waits behind it. At step 3 "c" is too old
    # too, so that the first batch gets "d" and "e", the second "f".
    assert (outcome.waited, outcome.unfilled, outcome.expired) == (2, 0, 3)
    assert [(batch.train_step, batch.tokens) for batch in outcome.batches] == [(3, 20), (3, 13)]


def test_a_member_that_went_on_and_expires_here_is_generated_anew(tmp_path):
    lines = [
        line("put", group="a", train_step=1, members=[{"status": "ABORTED", "steps": [0, 4]}, {"steps": [0, 3]}]),
        {"op": "refresh", "train_step": 2},
        {"op": "get", "pool": "ABORTED", "groups": {"t": ["a"]}},
        line("put", group="a", back=True, train_step=2, members=[{"steps": [0, 4, 1, 2]}, {"steps": [0, 3]}]),
        line("take", train_step=2),
    ]
    history = read_history(written(tmp_path / "run.jsonl", lines))
    recorded = outcome_of(history)
    assert recorded.differs == ""
    assert recorded.token_staleness == {1: 4 + 3, 0: 2}
    outcome = outcome_of(history, 0, None)
    assert outcome.rerolled == 1
    assert outcome.ledger["produced"] == 7 + 9
    assert outcome.ledger["discarded"] == {"expired": 7}
    assert outcome.token_staleness == {0: 6 + 3}


def test_a_member_that_was_generated_anew_and_is_complete_here_stays(tmp_path):
    lines = [
        line(
            "put", group="a", train_step=2, members=[{"steps": [1, 4]}, {"steps": [0, 1, 1, 5]}, {"status": "ABORTED"}]
        ),
        {"op": "refresh", "train_step": 3},  # the second member is too old, the others are not
        {"op": "get", "pool": "EXPIRED", "groups": {"t": ["a"]}},
        line(
            "put", group="a", back=True, train_step=3, members=[{"steps": [1, 4]}, {"steps": [2, 9]}, {"steps": [2, 2]}]
        ),
        line("take", train_step=3),
    ]
    history = read_history(written(tmp_path / "run.jsonl", lines))
    assert outcome_of(history).ledger["discarded"] == {"expired": 6}
    outcome = outcome_of(history, 2, None)  # nothing expires: the group is ABORTED, and only its third member goes on
    assert outcome.rerolled == 0
    assert outcome.ledger["produced"] == 10 + 2
    assert outcome.token_staleness == {1: 4 + 5, 2: 1, 0: 2}


@pytest.mark.parametrize(
    ("number", "changed", "differs"),
    [
        (14, line("ledger", trained=51), "line 14: trained tokens are 52, recorded are 51"),
        (14, line("ledger", groups={"expired": 2}), "line 14: groups expired are 1, recorded are 2"),
        (13, line("take", train_step=3, groups={"t": ["d"]}), "line 13: other groups are taken"),
        (13, line("take", train_step=3, groups={}), "line 13: a batch that found too few groups finds enough"),
        (13, line("take", train_step=9), "line 13: a batch finds too few groups"),
        (10, line("get", pool="ABORTED"), "line 10: a group was handed out of ABORTED and is EXPIRED"),
        (10, line("refresh"), "line 12: a group comes back that was not handed out"),
        (10, {"op": "undo", "groups": {"t": ["b"]}}, ""),
        (10, {"op": "undo", "groups": {"t": ["c"]}}, "line 10: a group is given back that was not taken"),
    ],
)
def test_differences_to_the_record_are_named(tmp_path, number, changed, differs):
    lines = list(LINES)
    lines[number - 2] = changed
    found = outcome_of(read_history(written(tmp_path / "run.jsonl", lines))).differs
    assert found.startswith(differs)
    assert found


def test_masks_and_what_no_model_wrote_stay_out_of_the_loss(tmp_path):
    members = [
        {"steps": [0, 4, -1, 3, 1, 5], "mask": [1, 2, 0, 5, 1, 5]},  # in the loss: 2 of version 0, 5 of version 1
        {"steps": [1, 6]},
        {"steps": [1, 2], "mask": [0, 2]},
    ]
    lines = [line("put", group="a", train_step=3, members=members), line("take", train_step=3)]
    history = read_history(written(tmp_path / "run.jsonl", lines, header(max_staleness=5)))
    outcome = outcome_of(history)
    assert outcome.token_staleness == {2: 2, 1: 5 + 6}
    assert outcome.ledger["trained"] == 13
    assert outcome.ledger["masked_semantic"] == 5 + 2
    tight = outcome_of(history, 5, 1)
    assert (tight.ledger["trained"], tight.ledger["masked_stale"]) == (11, 2)
    assert tight.token_staleness == {1: 11}


def test_tokens_without_versions_are_trained_and_have_no_staleness(tmp_path):
    head = {**header(), "missing_version": "oldest"}
    lines = [line("put", group="a", members=[{"tokens": 7}]), line("take")]
    outcome = outcome_of(read_history(written(tmp_path / "run.jsonl", lines, head)))
    assert outcome.ledger["trained"] == 7
    assert outcome.token_staleness == {}
    assert outcome.batches[0].staleness == 0 / 7


def test_a_response_without_tokens_is_trained_as_nothing(tmp_path):
    lines = [line("put", group="a", members=[{}, {"steps": [0, 2]}]), line("take")]
    outcome = outcome_of(read_history(written(tmp_path / "run.jsonl", lines)))
    assert outcome.token_staleness == {0: 2}
    assert outcome.response_staleness == {0: 1}


def test_an_agentic_group_has_no_token_rule(tmp_path):
    lines = [
        line("put", group="a", agentic=True, train_step=2, members=[{"steps": [0, 3]}]),
        line("take", train_step=2),
    ]
    outcome = outcome_of(read_history(written(tmp_path / "run.jsonl", lines)), 1, 0)
    assert outcome.token_staleness == {1: 3}


def test_ids_may_be_used_again(tmp_path):
    lines = [line("put", group="a"), line("take"), line("put", group="a"), line("take")]
    history = read_history(written(tmp_path / "run.jsonl", lines))
    assert outcome_of(history).differs == ""
    # Here the first "a" is still stored when the second comes.
    assert outcome_of(history, 0, None).trained == 2


def test_what_threads_do_at_once_replays(tmp_path):
    path = tmp_path / "run.jsonl"
    buffer = ReplayBuffer(StalenessRule(1, 0), tail_batch_trigger_size=0, trace=path)

    def produce(first):
        for number in range(first, first + 150):
            step = 1 + number // 20
            buffer.sync.put(group([step - 1] * 3, [max(step - 2, 0), step - 1], group_id=number), train_step=step)
            for again in buffer.sync.get(1, status=Status.EXPIRED):
                for member in again:
                    if member.status is not Status.COMPLETED:
                        member.response_ids, member.response_model_steps = [1], [step - 1]
                        member.logprobs, member.status = None, Status.COMPLETED
                buffer.sync.put(again, train_step=step)

    def train():
        for step in range(1, 12):
            buffer.sync.take_train_batch({"default": 3}, train_step=step)
            buffer.sync.take_batch({"default": 2})

    threads = [threading.Thread(target=produce, args=(1000 * n,)) for n in range(3)]
    threads += [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    buffer.sync.close()
    history = read_history(path)
    recorded, _ = replay(history)
    assert recorded.differs == ""
    assert recorded.ledger == buffer.ledger()


def test_what_ifs_are_every_combination_once():
    assert what_ifs(StalenessRule(3), [0, 2, 0], [None, 1]) == [
        RECORDED,
        WhatIf(0, None),
        WhatIf(0, 1),
        WhatIf(2, None),
        WhatIf(2, 1),
    ]
    assert what_ifs(StalenessRule(3, 1), None, [0]) == [RECORDED, WhatIf(3, 0)]
    assert what_ifs(StalenessRule(3, 1), [0], None) == [RECORDED, WhatIf(0, 1)]
    assert what_ifs(StalenessRule(3), None, None) == [RECORDED]


def test_a_limit_the_tasks_do_not_share_has_to_be_given():
    rules = {"a": StalenessRule(1), "b": StalenessRule(2)}
    with pytest.raises(ValueError, match="the recorded tasks differ in max_staleness; give --max-staleness"):
        what_ifs(rules, None, [0])
    assert WhatIf(5, 0).rules(rules) == {"a": StalenessRule(5, 0), "b": StalenessRule(5, 0)}
    assert RECORDED.rules(rules) is rules


def test_a_what_if_keeps_the_rest_of_a_rule_and_does_not_warn():
    rule = StalenessRule(1, 0, 4, spare_aborted=True)
    assert WhatIf(0, 3).rules(rule).sync_weights_interval == 4
    assert WhatIf(0, 3).rules(rule).spare_aborted


def test_histograms():
    counts = Counter({0: 90, 3: 6, 7: 4})
    assert mean_of(counts) == (18 + 28) / 100
    assert [quantile_of(counts, share) for share in (0.5, 0.9, 0.91, 0.96, 0.97, 1.0)] == [0, 0, 3, 3, 7, 7]
    assert mean_of(Counter()) is None
    assert quantile_of(Counter(), 0.95) is None


def test_replay_needs_no_plotting_library(tmp_path):
    code = (
        "import sys, pystale.replay, pystale.cli; sys.exit('matplotlib' in sys.modules or 'rich.live' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path).returncode == 0


def test_states_of_other_classes_without_ids_are_recognised(tmp_path):
    class Foreign:
        __slots__ = ("__dict__",)

        def __init__(self):
            self.status, self.response_ids, self.response_mask = Status.ABORTED, [1, 2], None
            self.response_model_steps, self.seq_staleness = [0, 0], 0

    path = tmp_path / "run.jsonl"
    buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, trace=path)
    buffer.sync.put([Foreign()], train_step=1)
    buffer.sync.put([RolloutState(response_ids=[1], response_model_steps=[0], status=Status.COMPLETED)], train_step=1)
    ((state,),) = buffer.sync.get(1, status=Status.ABORTED)
    state.response_ids, state.response_model_steps, state.status = [1, 2, 3], [0, 0, 1], Status.COMPLETED
    buffer.sync.put([state], train_step=2)
    assert len(buffer.sync.take_train_batch({"default": 2}, train_step=2)["default"]) == 2
    buffer.sync.close()
    recorded, _ = replay(read_history(path))
    assert recorded.differs == ""
    assert recorded.ledger["trained"] == 4
