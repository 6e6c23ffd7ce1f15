"""``pystale replay``, as a shell and a terminal see it, and runs of the demo recorded and replayed."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from test_cli import COLOURS, PATIENCE_S, PYSTALE, Terminal, environment
from traces import LINES, line, written

from pystale import cli
from pystale.demo.grpo import BaseModel
from pystale.demo.run import Run
from pystale.replay import read_history, replay

pytestmark = pytest.mark.whole_run


@pytest.fixture
def trace(tmp_path):
    return str(written(tmp_path / "run.jsonl"))


@pytest.fixture
def many(tmp_path):
    """A trace that takes a moment."""
    return str(written(tmp_path / "many.jsonl", [{"op": "refresh", "train_step": 1}] * 200_000))


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(*arguments, **changed):
        opened.append(Terminal(*arguments, cwd=tmp_path, **changed))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def output(capsys, *arguments, code=0):
    assert cli.run(["replay", *arguments]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.usefixtures("trace")
def test_the_table_in_a_pipe(tmp_path):
    done = subprocess.run(
        [*PYSTALE, "replay", "run.jsonl", "--max-staleness", "0,1,2", "--max-token-staleness", "none"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 125
    assert lines[0] == "run.jsonl: 6 responses in 4 groups, 3 batches taken, order stalest_first"
    assert "its own settings reproduce the run's own counts" in lines
    assert [re.split(r" {2,}", row.strip()) for row in lines if re.match(r" +\d\*? +none", row)] == [
        ["1*", "none", "52", "0", "8", "8", "1", "0", "0.25", "1", "1", "0"],
        ["0", "none", "51", "0", "21", "21", "1", "0", "0.00", "0", "0", "1"],
        ["1", "none", "52", "0", "8", "8", "1", "0", "0.25", "1", "1", "0"],
        ["2", "none", "51", "0", "0", "0", "0", "0", "0.45", "1", "2", "0"],
    ]
    assert sum(row.startswith("- ") for row in lines) == 5  # the assumptions


def test_only_the_recorded_settings_need_no_assumption(trace, capsys):
    out = output(capsys, trace)
    assert "assuming" not in out
    assert "1 request to the engine brought 8 tokens, 1 weight sync" in out


def test_json_and_nothing_else(trace, capsys):
    document = json.loads(output(capsys, trace, "--json", "--max-staleness", "0,2"))
    assert document["reproduced"] is True
    recorded, tight, loose = document["settings"]
    assert (recorded["recorded"], tight["recorded"]) == (True, False)
    assert recorded["tokens"]["trained"] == 52
    assert recorded["groups"] == {
        "trained": 3,
        "expired": 1,
        "rerolled": 1,
        "discarded": 0,
        "waiting_for_reroll": 0,
        "not_put": 0,
        "not_handed_out": 0,
    }
    assert recorded["token_staleness"] == {"mean": 0.25, "p95": 1, "max": 1, "counts": {"0": 39, "1": 13}}
    assert (tight["max_staleness"], tight["max_token_staleness"], tight["batches"]["waited"]) == (0, None, 1)
    assert loose["batches"]["each"][-1] == {"train_step": 3, "tokens": 16, "masked": 0, "staleness": 18 / 16}
    assert document["requests"] == {"number": 1, "tokens": {"stop": 8}}
    assert document["assumptions"]


def test_a_run_that_is_not_reproduced_is_said_and_exit_code_1(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", [*LINES[:-1], line("ledger", trained=51)])
    out = output(capsys, str(path), code=1)
    assert "its own settings do NOT reproduce it: line 14: trained tokens are 52, recorded are 51" in out
    assert json.loads(output(capsys, str(path), "--json", code=1))["reproduced"] is False


def test_lost_and_damaged_lines_are_said(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", [*LINES, {"op": "lost", "lines": 7}, b"nonsense"])
    out = output(capsys, str(path), "--skip-damaged")
    assert "7 lines left out when it was recorded: the disk was too slow" in out
    assert "1 damaged line left out, the first: line 16: is not JSON" in out


def test_a_csv(tmp_path, capsys):
    path = tmp_path / "run.CSV"
    path.write_text("group,rollout,model_step,tokens,put_step\na,0,0,10,1\nb,0,0,7,3\n")
    out = output(capsys, str(path), "--max-staleness", "0,2", "--batch-groups", "1")
    assert re.search(r"^ +none\* +none +17 ", out, re.MULTILINE)
    assert re.search(r"^ +0 +none +10 +0 +7 +7 ", out, re.MULTILINE)
    assert "it has no account to compare with" in out


def test_plots(trace, tmp_path, capsys):
    directory = tmp_path / "a" / "plots"
    out = output(capsys, trace, "--max-staleness", "0,1,2", "--max-token-staleness", "none,0", "--plot", str(directory))
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["staleness-over-steps.png", "staleness.png", "tokens.png", "trade-off.png"]
    for name in names:
        assert f"plot {directory / name}" in out
        assert (directory / name).read_bytes().startswith(b"\x89PNG")
    document = json.loads(output(capsys, trace, "--plot", str(directory), "--json"))
    assert len(document["plots"]) == 4


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "Missing argument 'TRACE'"),
        (["nowhere.jsonl"], "'nowhere.jsonl': No such file or directory"),
        (["nowhere.csv"], "'nowhere.csv': No such file or directory"),
        (["."], "'.': Is a directory"),
        (["RUN", "--max-staleness", "-1"], "is not an integer from 0"),
        (["RUN", "--max-staleness", "0,,1"], "is not a list of limits between commas"),
        (["RUN", "--max-staleness", "none"], "is not an integer from 0"),
        (["RUN", "--max-token-staleness", "0,never"], "is neither none nor an integer from 0"),
        (["RUN", "--max-token-staleness", ""], "is not a list of limits between commas"),
        (["RUN", "--plot", ""], "--plot is empty"),
        (["RUN", "--plot", "RUN"], "is a file, and a directory is needed"),
        (["RUN", "--plot", "RUN/plots"], "Not a directory"),
        (["RUN", "--batch-groups", "3"], "--batch-groups is for .csv files only"),
        (["RUN", "--batch-groups", "0"], "is not an integer from 1"),
        (["RUN", "--no-such-option"], "--no-such-option"),
        (["RUN", "another"], "another"),
        (["\0"], "null byte"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, why, trace, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["replay", *(text.replace("RUN", trace) for text in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pystale: ")
    assert why in err


@pytest.mark.parametrize("content", [b"", b"not a trace\n", b"\x00\xff" * 1000, gzip.compress(b"a trace", mtime=0)])
def test_a_file_that_is_no_trace_is_one_line_and_exit_code_2(content, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert cli.run(["replay", str(tmp_path / "file")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "is not a trace" in err
    assert ("unpack it" in err) == content.startswith(b"\x1f\x8b")


def test_a_damaged_line_is_one_line_and_exit_code_2(tmp_path, capsys):
    path = written(tmp_path / "run.jsonl", [*LINES, b"nonsense"])
    assert cli.run(["replay", str(path)]) == 2
    assert capsys.readouterr().err.startswith("pystale: line 15: is not JSON")


def test_a_directory_for_plots_that_cannot_be_written(trace, tmp_path, capsys):
    (tmp_path / "plots" / "tokens.png").mkdir(parents=True)
    assert cli.run(["replay", trace, "--plot", str(tmp_path / "plots")]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_plots_without_matplotlib_say_what_to_install(trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.run(["replay", trace, "--plot", str(tmp_path / "plots")]) == 2
    assert capsys.readouterr().err == "pystale: --plot needs matplotlib; install it with: pip install 'pystale[cli]'\n"


def test_tasks_that_differ_ask_for_the_limit(tmp_path, capsys):
    rules = [{**json.loads((written(tmp_path / "x")).read_text().splitlines()[0])["tasks"][0], "task": t} for t in "ab"]
    rules[1]["max_staleness"] = 4
    head = {**json.loads((tmp_path / "x").read_text().splitlines()[0]), "tasks": rules}
    path = written(tmp_path / "run.jsonl", [], head)
    assert cli.run(["replay", str(path), "--max-token-staleness", "0"]) == 2
    assert "the recorded tasks differ in max_staleness; give --max-staleness" in capsys.readouterr().err


def test_help_names_every_option_in_full(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["replay", "--help"]) == 0
    out = capsys.readouterr().out
    for option in (
        "TRACE",
        "--max-staleness",
        "--max-token-staleness",
        "--json",
        "--plot",
        "--skip-damaged",
        "--batch-groups",
    ):
        assert option in out
    assert max(map(len, out.splitlines())) <= 80


# Terminals, pipes, Ctrl-C


def test_a_terminal_shows_progress_and_then_a_table(trace, terminal):
    shown = terminal("replay", trace, "--max-staleness", "0,2", COLUMNS="140")
    assert shown.exit_code() == 0
    assert COLOURS.search(shown.screen)
    assert "replaying" in shown.screen
    assert "re-rolled" in shown.screen
    assert "assuming" in shown.screen
    assert shown.screen.rindex("\x1b[?25h") > shown.screen.rindex("\x1b[?25l")  # the cursor is back


def test_a_narrow_terminal_gets_a_table_that_fits(tmp_path, terminal):
    members = [{"steps": [0, 123_456_789]}]
    path = written(tmp_path / "big.jsonl", [line("put", group="a", members=members), line("take")])
    shown = terminal("replay", str(path), "--max-token-staleness", "0", COLUMNS="80", NO_COLOR="1")
    assert shown.exit_code() == 0
    plain = re.sub(r"\x1b\[[\d;?]*\w|\r", "", shown.screen)
    (row,) = re.findall(r"^ *1\* .*123\.5M.*$", plain, re.MULTILINE)
    assert len(row) <= 80
    assert "123,456,789" not in shown.screen


def test_a_dumb_terminal_gets_plain_lines(trace, terminal):
    shown = terminal("replay", trace, TERM="dumb")
    assert shown.exit_code() == 0
    assert "\x1b" not in shown.screen


def test_ctrl_c_on_a_terminal(many, terminal):
    limits = ",".join(map(str, range(200)))
    shown = terminal("replay", many, "--max-staleness", limits)
    shown.read_until("reading")
    shown.press_ctrl_c()
    assert shown.exit_code() == 130
    assert "Traceback" not in shown.screen


def test_an_interrupt_in_a_pipe(many, tmp_path):
    limits = ",".join(map(str, range(2000)))
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pystale.replay.command as c, sys\n"
            "read = c.read_history\n"
            "def told(*a, **k):\n    print('reading', file=sys.stderr, flush=True)\n    return read(*a, **k)\n"
            "c.read_history = told\n"
            "from pystale.__main__ import main\nsys.exit(main())",
            "replay",
            many,
            "--max-staleness",
            limits,
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_closed_pipe_ends_it_quietly(trace, tmp_path, options):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PYSTALE, "replay", trace, *options],
        cwd=tmp_path,
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


# The demo


@pytest.fixture
def untaught(monkeypatch):
    """Leaves the base model as it is, for runs of which only the frame matters."""
    monkeypatch.setattr(BaseModel, "train", lambda self, steps: None)


def counts_of(report):
    """Figures of a report's lines, by their labels."""
    rows = re.findall(r"^ *(\S.*?) {2,}([\d,]+)(?: |$)", report, re.MULTILINE)
    return {label: int(number.replace(",", "")) for label, number in rows}


@pytest.mark.usefixtures("untaught")
@pytest.mark.parametrize(
    "options",
    [
        ["--mode", "sync"],
        ["--mode", "colocated"],
        ["--mode", "colocated", "--max-token-staleness", "0", "--tail-batch-trigger-size", "2"],
        ["--mode", "colocated", "--tail-batch-trigger-size", "-1", "--sync-weights-interval", "2"],
        ["--mode", "disaggregated"],
        ["--mode", "disaggregated", "--max-staleness", "1", "--max-token-staleness", "none"],
    ],
    ids=" ".join,
)
def test_a_run_of_the_demo_is_reproduced_by_its_own_settings(options, tmp_path, capsys):
    path = str(tmp_path / "run.jsonl")
    assert cli.run(["demo", "--steps", "8", "--group-size", "4", *options, "--trace", path]) == 0
    report = capsys.readouterr().out
    history = read_history(path)
    recorded, _ = replay(history)
    assert recorded.differs == ""
    assert history.accounts > 8
    counts = counts_of(report)
    ledger = recorded.ledger
    assert counts["tokens generated"] == ledger["produced"]
    assert counts["trained"] == ledger["trained"]
    assert counts["masked as stale"] == ledger["masked_stale"]
    assert counts["still in the buffer"] == ledger["stored"]
    assert counts.get("discarded, expired", 0) == ledger["discarded"]["expired"]
    assert recorded.trained == 8 * 16
    if groups := re.search(r"^groups +([\d,]+) expired, ([\d,]+) re-rolled", report, re.MULTILINE):
        assert [int(text.replace(",", "")) for text in groups.groups()] == [recorded.expired, recorded.rerolled]
    shares = dict(re.findall(r"(\d\+?): ([\d.]+) %", re.search(r"staleness when taken(.*)", report)[1]))
    responses = sum(recorded.response_staleness.values())
    assert shares["0"] == f"{100 * recorded.response_staleness[0] / responses:.1f}"
    assert history.legs >= 8 * 16 * 4
    assert sum(history.leg_tokens.values()) == ledger["produced"]
    assert history.syncs >= 3


@pytest.mark.usefixtures("untaught")
def test_a_run_that_goes_on_is_recorded_from_there(tmp_path, capsys, monkeypatch):
    command = ["demo", "--steps", "8", "--group-size", "2", "--checkpoint", str(tmp_path / "kept")]
    train = Run.train

    async def interrupted(self, *batch):
        await train(self, *batch)
        if self.record.steps == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, "train", interrupted)
    assert cli.run([*command, "--trace", str(tmp_path / "first.jsonl")]) == 130
    first, _ = replay(read_history(tmp_path / "first.jsonl"))
    assert (first.differs, first.trained) == ("", 4 * 16)
    assert cli.run([*command, "--trace", str(tmp_path / "second.jsonl")]) == 0
    history = read_history(tmp_path / "second.jsonl")
    second, _ = replay(history)
    assert (second.differs, second.trained) == ("", 4 * 16)
    assert history.accounts
    assert counts_of(capsys.readouterr().out)["trained"] == second.ledger["trained"]
    assert cli.run([*command, "--trace", str(tmp_path / "first.jsonl")]) == 0  # there is nothing left to record
    assert "is finished" in capsys.readouterr().out


@pytest.mark.usefixtures("untaught")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--trace", ""], "--trace is empty"),
        (["--trace", "RUN"], "a recorded run is not overwritten"),
        (["--trace", "nowhere/run.jsonl"], "No such file or directory"),
        (["--trace", "."], "exists"),
        (["--trace", "x.jsonl", "--engine", "ray"], "--trace records a run with --engine local only"),
    ],
)
def test_a_trace_that_cannot_be_is_one_line_and_exit_code_2(options, why, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["demo", *(text.replace("RUN", trace) for text in options)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert why in err
