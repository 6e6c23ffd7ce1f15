"""Traces come from anywhere: what is not one, and every kind of damage, is an error that names the line."""

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import HEADER, LINES, header, line, written

import pystale.trace_reader
from pystale.replay import read_history, replay
from pystale.trace_lines import TraceError
from pystale.trace_reader import TraceReader


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def refused(path):
    with pytest.raises(TraceError) as caught:
        read_history(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# What is no trace


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        b"group,rollout\n",
        b"[1]\n",
        b'"pystale_trace"\n',
        b'{"op":"put"}\n',
        b'{"pystale_trace":NaN}\n',
        b'{"pystale_trace":1,"pystale_trace":1}\n',
        b"[" * 100_000,
        b'{"pystale_trace":1}',
        '{"pystale_trace":1,"order":"é"}\n'.encode(),
    ],
)
def test_what_is_no_trace(path, content):
    path.write_bytes(content)
    message = refused(path)
    assert "is not a trace" in message or "line 1: the header consists of" in message


@pytest.mark.parametrize("schema", [2, 0, "1", True, None, 1.0])
def test_another_schema(path, schema):
    assert "this version of pystale reads 1" in refused(written(path, [], {**HEADER, "pystale_trace": schema}))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({**HEADER, "order": "newest"}, "order must be one of"),
        ({**HEADER, "missing_version": "none"}, "missing_version must be"),
        ({**HEADER, "max_rerolls": -1}, "max_rerolls must be at least 0"),
        ({**HEADER, "max_rerolls": 1.5}, "max_rerolls must be an int"),
        ({**HEADER, "min_fresh": 0}, "min_fresh must be at least 1"),
        ({**HEADER, "tasks": []}, "tasks must be a list"),
        ({**HEADER, "tasks": {"t": 1}}, "tasks must be a list"),
        ({**HEADER, "tasks": [1]}, "tasks must be a list"),
        ({**HEADER, "tasks": HEADER["tasks"] * 2}, "occurs twice"),
        ({**HEADER, "more": 1}, "the header consists of"),
        (header(task=7), "is no name"),
        (header(max_staleness=-1), "max_staleness"),
        (header(max_staleness=True), "max_staleness"),
        (header(sync_weights_interval=0), "sync_weights_interval"),
        (header(tail_batch_trigger_size=-2), "tail_batch_trigger_size"),
        (header(tail_batch_trigger_size=None), "tail_batch_trigger_size"),
        (header(speed=3), "speed"),
        (
            {**HEADER, "tasks": HEADER["tasks"] + header(task="t", max_staleness=9)["tasks"]},
            "one rule is for all tasks",
        ),
    ],
)
def test_a_header_that_cannot_be(path, head, why):
    message = refused(written(path, [], head))
    assert "line 1: " in message
    assert why in message


def test_a_missing_file_and_a_directory_are_errors_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "nowhere")
    with pytest.raises(IsADirectoryError):
        read_history(tmp_path)


# Damage

PUT = line("put")
DAMAGED = [
    (b"", "is not JSON"),
    (b"nonsense", "is not JSON"),
    (b'{"op":"put"', "is not JSON"),
    (b"\xff\xfe", "is not JSON"),
    (b"[" * 50_000, "nested too deep"),
    (b'{"op":"refresh","train_step":' + b"9" * 5000 + b"}", "is not JSON"),
    (b'{"op":"refresh","train_step":1,"train_step":2}', "a key occurs twice"),
    (b'{"op":"refresh","train_step":Infinity}', "Infinity"),
    (b"[]", "an object is required"),
    (b"null", "an object is required"),
    ({}, "op must be one of"),
    ({"op": "erase"}, "op must be one of"),
    ({"op": ["put"]}, "op must be one of"),
    ({"op": "refresh"}, "train_step is missing"),
    ({"op": "refresh", "train_step": 0}, "train_step must be at least 1"),
    ({"op": "refresh", "train_step": 2**63}, "below 2**63"),
    ({"op": "refresh", "train_step": True}, "train_step must be an int"),
    ({"op": "refresh", "train_step": "3"}, "train_step must be an int"),
    ({"op": "refresh", "train_step": 3, "pools": "EXPIRED"}, "pools must be a list"),
    ({"op": "refresh", "train_step": 3, "pools": ["OLD"]}, "a status is one of"),
    ({"op": "refresh", "train_step": 3, "at": -1}, "at must be seconds"),
    ({"op": "refresh", "train_step": 3, "at": "noon"}, "at must be seconds"),
    ({"op": "refresh", "train_step": 3, "more": 1, "less": 2}, "refresh has no less, more"),
    ({**PUT, "group": None}, "a group id is"),
    ({**PUT, "group": 1.5}, "a group id is"),
    ({**PUT, "group": True}, "a group id is"),
    ({**PUT, "task": 3}, "task must be a text"),
    ({**PUT, "members": []}, "members must be a list"),
    ({**PUT, "members": {}}, "members must be a list"),
    ({**PUT, "members": [3]}, "a member is a list of runs or an object"),
    ({**PUT, "members": [[0]]}, "steps must be a list of value, length"),
    ({**PUT, "members": [[0, -5]]}, "lengths from 1 on"),
    ({**PUT, "members": [{"steps": [0]}]}, "steps must be a list of value, length"),
    ({**PUT, "members": [{"steps": [0, 0]}]}, "lengths from 1 on"),
    ({**PUT, "members": [{"steps": [0, -5]}]}, "lengths from 1 on"),
    ({**PUT, "members": [{"steps": [0, 2**41]}]}, "lengths from 1 on"),
    ({**PUT, "members": [{"steps": [2**63, 1]}]}, "values of 64 bits"),
    ({**PUT, "members": [{"steps": [0.5, 1]}]}, "steps must be a list of value, length"),
    ({**PUT, "members": [{"steps": "0,1"}]}, "steps must be a list of value, length"),
    ({**PUT, "members": [{"steps": [0, 3], "mask": [1, 2]}]}, "mask has 2 tokens, the response 3"),
    ({**PUT, "members": [{"steps": [0, 3], "tokens": 3}]}, "not both"),
    ({**PUT, "members": [{"tokens": 2**41}]}, "tokens must be at most"),
    ({**PUT, "members": [{"tokens": -1}]}, "tokens must be at least 0"),
    ({**PUT, "members": [{"status": "DONE"}]}, "a status is one of"),
    ({**PUT, "members": [{"ids": [1]}]}, "a member has no ids"),
    ({**PUT, "restarted": [-1]}, "restarted must list positions"),
    ({**PUT, "restarted": [7]}, "restarted names member 7"),
    ({**PUT, "back": 1}, "back must be true or false"),
    ({**PUT, "group": "z", "back": True}, "comes back, and never came"),
    ({**PUT, "outcome": "failed"}, "put has no outcome"),
    ({**PUT, "op": "reject"}, "outcome must be a text"),
    ({**PUT, "op": "reject", "outcome": "trained"}, "outcome must be one of"),
    ({**PUT, "op": "settle", "outcome": "sold", "group": "a"}, "outcome must be one of"),
    ({**PUT, "op": "stored"}, "a status is one of"),
    ({"op": "get", "pool": "EXPIRED", "groups": ["a"]}, "groups must be lists of group ids by task"),
    ({"op": "get", "pool": "EXPIRED", "groups": {"t": "a"}}, "groups must be lists of group ids by task"),
    ({"op": "get", "pool": "EXPIRED", "groups": {"t": ["z"]}}, "group 'z' of task 't' never came"),
    ({"op": "get", "groups": {}}, "a status is one of"),
    ({"op": "undo"}, "groups must be lists"),
    ({"op": "take", "sizes": {}, "groups": {}}, "sizes must be"),
    ({"op": "take", "sizes": {"t": -1}, "groups": {}}, "sizes must be at least 0"),
    ({"op": "take", "sizes": {"t": 2}, "groups": {"t": ["a"]}}, "1 groups were taken, and 2 were asked for"),
    ({**line("ledger"), "produced": -1}, "produced must be at least 0"),
    ({**line("ledger"), "discarded": {"eaten": 1}}, "discarded must map"),
    ({**line("ledger"), "groups": {"lost": 1}}, "groups must map"),
    (line("leg", leg=None), "leg must be [group, rollout, model_step, tokens, seconds, reason], got None"),
    (line("leg", leg=["c", 0, 1, 8]), "leg must be [group, rollout, model_step, tokens, seconds, reason], got ['c', 0"),
    (line("leg", leg=["c", 0, 1, 8, None]), "seconds must be a number"),
    (line("leg", leg=["c", 0, 1, 8, True]), "seconds must be a number"),
    (line("leg", leg=["c", 0, 1, -3, 0.2]), "tokens must be at least 0"),
    (line("leg", leg=["c", 0, 1.0, 8, 0.2]), "model_step must be an int, got float"),
    (line("leg", leg=[[], 0, 1, 8, 0.2]), "a group id is an integer or a text"),
    (line("leg", leg=["c", 0, 1, 8, 0.2, 3]), "reason must be a text"),
    (line("leg", leg=["c", 0, 1, 8, 0.2, "stop", 3]), "leg must be [group, rollout"),
    ({"op": "sync", "model_step": -1}, "model_step must be at least 0"),
    ({"op": "lost", "lines": 0}, "lines must be at least 1"),
    ({**line("ledger"), "op": "resume", "stored": 5}, "does not balance"),
]


@pytest.mark.parametrize(("damaged", "why"), DAMAGED, ids=[str(n) for n in range(len(DAMAGED))])
def test_a_damaged_line_is_named_or_skipped(path, damaged, why):
    lines = [*LINES[:3], damaged, *LINES[3:]]
    message = refused(written(path, lines))
    assert message.startswith("line 5: ")
    assert why in message
    assert "--skip-damaged" in message
    history = read_history(path, skip_damaged=True)
    assert history.skipped == 1
    assert history.damaged[0].startswith("line 5: ")
    assert not history.complete
    recorded, _ = replay(history)
    assert recorded.differs == ""
    assert recorded.ledger["trained"] == 52


def test_tasks_without_a_rule_are_damage(path):
    head = header(task="other")
    assert "task 't' has no rule in the header" in refused(written(path, LINES[:2], head))
    assert "task 't' has no rule in the header" in refused(
        written(path, [{"op": "take", "sizes": {"t": 1}, "groups": {}}], head)
    )


def test_a_line_that_is_cut_off(path):
    whole = written(path).read_bytes()
    path.write_bytes(whole[:-10])
    assert refused(path).startswith(f"line {len(LINES) + 1}: it is cut off")
    assert read_history(path, skip_damaged=True).skipped == 1


def test_a_line_that_is_too_long_is_not_read_into_memory(path, monkeypatch):
    monkeypatch.setattr(pystale.trace_reader, "LINE_BYTES", 2000)
    written(path, [*LINES[:3], b'{"op":"' + b"x" * 9000 + b'"}', *LINES[3:]])
    with pytest.raises(TraceError, match="line 5: it is longer than"):
        read_history(path)
    history = read_history(path, skip_damaged=True)
    assert history.skipped == 1
    assert replay(history)[0].differs == ""


def test_what_is_wrong_with_many_lines_is_told_of_the_first(path):
    written(path, [b"nonsense"] * 500)
    history = read_history(path, skip_damaged=True)
    assert (history.skipped, len(history.damaged)) == (500, 100)


def test_the_file_is_closed(path):
    written(path, [b"nonsense"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        refused(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_progress_ends_at_the_size_of_the_file(path):
    seen = []
    read_history(written(path), progress=lambda done, of: seen.append((done, of)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_huge_numbers_of_tokens_cost_no_memory(path):
    members = [{"steps": [0, 2**30], "mask": [1, 2**29, 0, 2**29]}, {"tokens": 2**39}]
    head = {**HEADER, "missing_version": "oldest"}
    began = time.process_time()
    history = read_history(written(path, [{**PUT, "members": members}, line("take")], head))
    assert replay(history)[0].ledger["trained"] == 2**29 + 2**39
    assert time.process_time() - began < 60  # expanded it would take minutes, or the memory


# After LINES: the other kinds of lines.
MORE_LINES = [
    {"op": "get", "pool": "COMPLETED", "groups": {"t": ["d"]}},
    {"op": "undo", "groups": {"t": ["d"]}},
    {"op": "take", "sizes": {"t": 1}, "groups": {"t": ["d"]}},
    {"op": "undo", "groups": {"t": ["d"]}},
    {"op": "get", "pool": "COMPLETED", "groups": {"t": ["d"]}},
    {
        **line("put"),
        "op": "settle",
        "group": "d",
        "back": True,
        "outcome": "lost",
        "restarted": [0],
        "train_step": None,
    },
    {**line("put"), "op": "reject", "group": "e", "outcome": "failed", "train_step": None, "agentic": True},
    {**line("ledger"), "op": "resume", "train_step": 4, "stored": 3, "in_flight": 1, "groups": {}},
    {
        **line("put"),
        "op": "stored",
        "group": 1,
        "pool": "COMPLETED",
        "train_step": None,
        "members": [{"steps": [3, 3]}],
    },
    {"op": "get", "pool": "COMPLETED", "groups": {"t": [1]}},
    {**line("put"), "group": 1, "back": True, "rerolls": 2, "prompt_model_step": 1, "members": [{"tokens": 3}]},
    {"op": "lost", "lines": 2},
]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_changed_anywhere_are_read_or_refused_and_replayed_without_a_fault(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("changed") / "run.jsonl", [*LINES, *MORE_LINES])
    assert replay(read_history(path))[0].differs == ""
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["digit", "byte", "cut", "swap"]))
        if kind == "digit":
            digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
            content[data.draw(st.sampled_from(digits))] = ord(data.draw(st.sampled_from("0123456789")))
        elif kind == "byte":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 60))]
        else:
            lines = bytes(content).split(b"\n")
            i, j = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            lines[i], lines[j] = lines[j], lines[i]
            content = bytearray(b"\n".join(lines))
        if not content:
            return
    path.write_bytes(content)
    try:
        history = read_history(path, skip_damaged=True)
    except TraceError:
        return
    recorded, reference = replay(history)
    ledger = recorded.ledger
    uses = ledger["trained"] + ledger["masked_stale"] + ledger["masked_semantic"] + ledger["stored"]
    assert ledger["produced"] == uses + ledger["in_flight"] + sum(ledger["discarded"].values())
    for setting in (0, 3):
        replay(history, pystale.replay.WhatIf(setting, 0), reference)


def test_the_reader_gives_numbers_and_times(path):
    with TraceReader(written(path)) as reader:
        lines = list(reader)
    assert [found.number for found in lines] == list(range(2, len(LINES) + 2))
    assert lines[0].at == 0.0
    assert json.dumps(lines[-1].event.group_counts) == json.dumps(LINES[-1]["groups"])
