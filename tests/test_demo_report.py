"""``pystale demo --report``: plots, and a record whose figures are those of the run."""

import errno
import json
import os
import sys
from typing import Any

import pytest

from pystale import cli
from pystale.demo import plots
from pystale.demo.grpo import BaseModel
from pystale.demo.record import Record
from pystale.demo.settings import MODES, Settings

pytestmark = pytest.mark.whole_run

PLOTS = ["latency.png", "reward.png", "staleness.png", "staleness-over-steps.png", "tokens.png"]


@pytest.fixture(autouse=True)
def untaught(monkeypatch):
    """Leaves the base model as it is: only the frame of these runs matters."""
    monkeypatch.setattr(BaseModel, "train", lambda self, steps: None)


def size(path: Any) -> tuple[int, int]:
    """Width and height of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize("mode", MODES)
def test_the_files_of_a_run(mode, tmp_path, capsys):
    directory = tmp_path / "new" / "report"
    assert cli.run(["demo", "--mode", mode, "--steps", "4", "--group-size", "2", "--report", str(directory)]) == 0
    out = capsys.readouterr().out
    assert sorted(path.name for path in directory.iterdir()) == sorted([*PLOTS, "record.json"])
    for name in PLOTS:
        assert name in out
        assert min(size(directory / name)) >= 400
    content = json.loads((directory / "record.json").read_text(encoding="utf-8"))
    record, ledger = content["record"], content["record"]["ledger"]
    assert content["settings"]["mode"] == mode
    assert len(record["rewards"]) == len(record["ages"]) == len(record["gaps_ms"]) == 4
    assert max(record["gaps_ms"]) <= record["longest_gap_ms"]
    trained = sum(count for step in record["ages"] for _, count, _ in step)
    masked = sum(count for step in record["ages"] for _, _, count in step)
    assert trained == record["trainable_tokens"] == ledger["trained"]
    assert masked == ledger["masked_stale"]
    assert trained + masked == record["tokens"]


def test_a_token_in_the_loss_is_as_fresh_as_the_rule_says(tmp_path):
    options = ["--max-staleness", "3", "--max-token-staleness", "1", "--sync-weights-interval", "2"]
    assert cli.run(["demo", "--steps", "6", "--group-size", "1", *options, "--report", str(tmp_path)]) == 0
    ages = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["record"]["ages"]
    assert all(age < 4 for step in ages for age, trained, _ in step if trained)
    assert all(age >= 4 for step in ages for age, _, masked in step if masked)


def test_a_kept_run_that_is_finished_is_reported_again(tmp_path):
    command = ["demo", "--steps", "2", "--group-size", "1", "--checkpoint", str(tmp_path / "run")]
    assert cli.run(command) == 0
    assert cli.run([*command, "--report", str(tmp_path / "report")]) == 0
    content = json.loads((tmp_path / "report" / "record.json").read_text(encoding="utf-8"))
    assert len(content["record"]["gaps_ms"]) == 2


def test_a_run_that_has_not_begun_has_a_record_and_no_plots(tmp_path):
    assert plots.write_report(Record(Settings()), tmp_path) == ["record.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("where", ["file", "file/below", "\0", "x" * 300, "/proc"])
def test_a_directory_that_cannot_be_is_one_line_before_anything_starts(where, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.run(["demo", "--report", os.path.join(tmp_path, where)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pystale: ")


def test_a_disk_that_is_full_at_the_end_leaves_the_report_in_text(tmp_path, capsys, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(plots, "write_report", full)
    assert cli.run(["demo", "--steps", "1", "--group-size", "1", "--report", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "balances" in out
    assert err == f"pystale: the report cannot be written: [Errno 28] No space left on device: '{tmp_path}'\n"


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.run(["demo", "--report", "plots"]) == 2
    assert capsys.readouterr() == (
        "",
        "pystale: --report needs matplotlib; install it with: pip install 'pystale[cli]'\n",
    )
