"""Runs that were not traced, as rows of a CSV file."""

import numpy as np
import pytest
from rollouts import group, state

from pystale import RolloutState
from pystale.replay import WhatIf, read_history, replay
from pystale.replay.conversions import Row, read_csv, rows_of_states, rows_of_verl_tags, write_csv
from pystale.trace_lines import TraceError

HEAD = "group,rollout,model_step,tokens,put_step\n"
# Three steps, five groups of which the last two come for step 3.
RUN = HEAD + "a,0,0,10,1\na,1,0,5,1\nb,0,0,7,2\nc,0,0,3,3\nc,0,2,4,3\nd,0,-1,2,3\nd,0,2,9,3\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.csv"


def history_of(path, text, **options):
    path.write_text(text, encoding="utf-8")
    return read_csv(path, **options)


def test_nothing_expired_in_the_run(path):
    recorded, _ = replay(history_of(path, RUN))
    # One group per step: "a" at step 1, "b" at 2, and at 3 "c", whose oldest token is of version 0. "d" stays.
    assert recorded.ledger["trained"] == 15 + 7 + 7
    assert recorded.ledger["stored"] == 2 + 9
    assert recorded.token_staleness == {0: 15 + 4, 1: 7, 2: 3}
    assert recorded.as_dict()["max_staleness"] is None
    assert recorded.differs == ""
    assert recorded.waited == 0


def test_what_a_limit_would_have_done(path):
    history = history_of(path, RUN)
    recorded, reference = replay(history)
    outcome, _ = replay(history, WhatIf(0, None), reference)
    # "b" and "c" are too old for steps 2 and 3, and discarded; the batch of step 2 waits and gets "d", that of 3 none.
    assert outcome.ledger["discarded"] == {"expired": 14}
    assert outcome.ledger["trained"] == 15 + 9
    assert outcome.ledger["masked_semantic"] == 2
    assert (outcome.waited, outcome.unfilled, outcome.discarded) == (2, 1, 2)
    masked, _ = replay(history, WhatIf(2, 1), reference)
    assert masked.ledger["masked_stale"] == 3
    assert recorded.ledger["masked_stale"] == 0


def test_the_size_of_batches(path):
    text = HEAD + "".join(f"{n},0,{n // 3},4,{1 + n // 3}\n" for n in range(9))
    assert replay(history_of(path, text))[0].trained == 9
    assert replay(history_of(path, text, batch_groups=2))[0].trained == 6
    assert replay(history_of(path, text, batch_groups=5))[0].waited == 3


def test_a_group_is_put_when_its_last_member_is(path):
    recorded, _ = replay(history_of(path, HEAD + "a,0,0,4,1\na,1,0,4,3\nb,0,0,5,2\nc,0,1,6,2\n"))
    assert [batch.train_step for batch in recorded.batches] == [2, 3]


def test_columns_may_be_in_any_order_and_among_others(path):
    text = '\ufeffreward,put_step,tokens,model_step,rollout,group\n0.5,1,10,0,0,"x, y"\n\n'
    recorded, _ = replay(history_of(path, text))
    assert recorded.ledger["trained"] == 10


def test_no_rows_are_no_run(path):
    recorded, _ = replay(history_of(path, HEAD))
    assert recorded.ledger["produced"] == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("group,rollout,tokens\n", "has no column model_step, put_step"),
        (HEAD + "a,0,0\n", "line 2: 3 cells, at least 5 are required"),
        (HEAD + "a,0,0,1,1\na,0,x,1,1\n", "line 3: model_step must be an integer, got 'x'"),
        (HEAD + "a,0,0,1.5,1\n", "line 2: tokens must be an integer"),
        (HEAD + "a,0,0,-1,1\n", "line 2: tokens must be at least 0"),
        (HEAD + f"a,0,0,{2**41},1\n", "line 2: tokens must be at most"),
        (HEAD + f"a,0,0,{10**30},1\n", "line 2: tokens must be an integer"),
        (HEAD + "a,0,-2,1,1\n", "line 2: model_step must be at least -1"),
        (HEAD + "a,0,0,1,0\n", "line 2: put_step must be at least 1"),
        (HEAD + "a,0,3,1,3\n", "line 2: model_step 3 is in the future of put_step 3"),
        (HEAD + '"a,0,0,1,1\n', "line 2: unexpected end of data"),
        (HEAD + f"a,0,0,1,1\na,0,0,1,{10**9}\n", ""),
        (HEAD + f"a,0,0,1,1\nb,0,0,1,{10**9}\n", "put_step goes from 1 to 1000000000"),
    ],
)
def test_rows_that_cannot_be(path, text, why):
    if not why:
        history_of(path, text)
        return
    with pytest.raises(TraceError) as caught:
        history_of(path, text)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_rows_are_skipped_on_request(path):
    text = RUN.replace("b,0,0,7,2\n", "b,0,zero,7,2\nb,0,0,7,2\n")
    with pytest.raises(TraceError, match=r"line 4: .*--skip-damaged"):
        history_of(path, text)
    history = history_of(path, text, skip_damaged=True)
    assert (history.skipped, history.complete) == (1, False)
    assert replay(history)[0].ledger["trained"] == 29


def test_what_is_no_text(path):
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="is not text in UTF-8"):
        read_csv(path)


def test_rows_of_states(path):
    groups = [
        group([3, 3, 4], [4], group_id=7),
        [state([2, 2, 5, 5], group_id="x", response_mask=np.array([0, 1, 1, 0]))],
        [RolloutState(group_id=8, rollout_id=1)],
    ]
    rows = list(rows_of_states(groups, put_step=6))
    assert [(row.group, *row[2:]) for row in rows] == [
        (7, 3, 2, 6),
        (7, 4, 1, 6),
        (7, 4, 1, 6),
        ("x", -1, 1, 6),
        ("x", 2, 1, 6),
        ("x", 5, 1, 6),
        ("x", -1, 1, 6),
        (8, 0, 0, 6),
    ]
    write_csv(path, rows[:3])
    write_csv(path, rows[3:])
    recorded, _ = replay(read_csv(path))
    assert (recorded.ledger["produced"], recorded.ledger["stored"]) == (8, 0)
    assert recorded.ledger["trained"] == 6


def test_states_as_xtuner_has_them(path):
    class State:
        def __init__(self, uid, steps):
            self.uid, self.response_ids, self.response_model_steps = uid, [0] * len(steps), steps
            self.response_mask = None

    rows = list(rows_of_states([[State(11, [0, 0]), State(11, [0, 1])]], put_step=2))
    assert [tuple(row) for row in rows] == [(11, 0, 0, 2, 2), (11, 1, 0, 1, 2), (11, 1, 1, 1, 2)]
    with pytest.raises(ValueError, match="its tokens have no response_model_steps"):
        list(rows_of_states([[RolloutState(response_ids=[1])]], put_step=2))


def test_rows_of_verl_tags():
    tags = {
        "u1": {"is_prompt": True, "status": "finished", "global_steps": 4},
        "u1_0_0": {"min_global_steps": 3, "max_global_steps": 3, "response_len": 5},
        "u1_1_0": {"min_global_steps": 3, "max_global_steps": 4, "response_len": 5},
        "pad_0_0": {"is_padding": True},
        "u2_0_0": {"min_global_steps": 1, "max_global_steps": 3, "response_len": 1},
    }
    assert list(rows_of_verl_tags(tags, put_step=6)) == [
        Row("u1", "0_0", 3, 5, 6),
        Row("u1", "1_0", 3, 2, 6),
        Row("u1", "1_0", 4, 3, 6),
        Row("u2", "0_0", 3, 1, 6),
    ]
    with pytest.raises(ValueError, match=r"trajectory 'u_0_0': max_global_steps must be an int"):
        list(rows_of_verl_tags({"u_0_0": {"min_global_steps": 1, "response_len": 1}}, put_step=2))


def test_a_csv_is_no_trace(path):
    path.write_text(RUN)
    with pytest.raises(TraceError, match="is not a trace"):
        read_history(path)
