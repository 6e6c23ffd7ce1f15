"""The page about traces: its example is a trace with every kind of line, and its code runs."""

import ast
import re
from pathlib import Path

from pystale.replay import read_history, replay
from pystale.replay.conversions import read_csv
from pystale.trace_lines import OPERATIONS
from pystale.trace_reader import TraceReader

PAGE = (Path(__file__).parent.parent / "docs" / "trace.md").read_text(encoding="utf-8")


def fence(kind):
    return re.search(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]


def test_the_example_has_every_line_and_is_reproduced(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(fence("json"))
    assert set(re.findall(r'"op":"(\w+)"', fence("json"))) == set(OPERATIONS)
    with TraceReader(path) as reader:
        assert len(list(reader)) == len(fence("json").splitlines()) - 1
    history = read_history(path)
    recorded, _ = replay(history)
    assert recorded.differs == ""
    assert history.accounts == 2
    assert history.lost == 3


def test_the_table_names_every_line():
    rows = "".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))
    assert [op for op in OPERATIONS if f"`{op}`" not in rows] == []


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = ast.parse(fence("python"))
    exec(compile(code, "docs/trace.md", "exec"), {})
    recorded, _ = replay(read_csv("run.csv"))
    assert recorded.ledger["produced"] == 3 + 9
