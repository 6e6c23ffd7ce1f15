"""The command line, as a shell and a terminal see it."""

import errno
import importlib.metadata
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pystale
from pystale import cli
from pystale.__main__ import main
from pystale.checkpoint import CheckpointWriter
from pystale.demo.grpo import BaseModel

pytestmark = pytest.mark.whole_run

PYSTALE = [sys.executable, "-m", "pystale"]
# Far more than any of this takes: a hang fails, a busy machine does not.
PATIENCE_S = 120
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|38;[25];[\d;]+|9[0-7])m")
OPTIONS = (
    "--mode",
    "--engine",
    "--checkpoint",
    "--checkpoint-every",
    "--report",
    "--steps",
    "--seed",
    "--group-size",
    "--max-staleness",
    "--max-token-staleness",
    "--sync-weights-interval",
    "--tail-batch-trigger-size",
    "--over-sample-threshold",
)


def environment(**changed: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**plain, "TERM": "xterm-256color", **changed}


@pytest.fixture
def untaught(monkeypatch):
    """Leaves the base model as it is, for runs of which only the frame matters."""
    monkeypatch.setattr(BaseModel, "train", lambda self, steps: None)


@contextmanager
def started(*arguments: str, cwd: Any) -> "Iterator[subprocess.Popen[str]]":
    """A command with pipes for standard output and error; killed if the test fails."""
    process = subprocess.Popen(
        [*PYSTALE, *arguments],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


class Terminal:
    """A command on a pseudo-terminal of its own, which is its controlling terminal: Ctrl-C works."""

    def __init__(self, *arguments: str, cwd: Any, **changed: str) -> None:
        self._master, slave = pty.openpty()
        # The shell, leader of a new session, opens the terminal and so makes it the session's.
        self._process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(slave), *PYSTALE, *arguments],
            cwd=cwd,
            env=environment(**changed),
            start_new_session=True,
        )
        self._slave = slave  # held open until the command is done: a terminal without users loses what it holds
        self._written = b""

    @property
    def screen(self) -> str:
        """All it has written."""
        return self._written.decode(errors="ignore")

    def read_until(self, pattern: str) -> None:
        """Read what it writes until `pattern` was there; to its end, if that is empty."""
        deadline = time.monotonic() + PATIENCE_S
        while not pattern or not re.search(pattern, self.screen):
            ready, _, _ = select.select([self._master], [], [], 0.2)
            if ready:
                self._written += os.read(self._master, 65536)
            elif self._process.poll() is not None:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pattern!r} did not come; the screen is {self.screen!r}")

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def exit_code(self) -> int:
        self.read_until("")
        return self._process.wait(PATIENCE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._slave)
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path):
    opened: list[Terminal] = []

    def start(*arguments: str, **changed: str) -> Terminal:
        opened.append(Terminal(*arguments, cwd=tmp_path, **changed))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_the_command_is_installed():
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="pystale")
    assert entry.load() is main


def test_a_short_run_in_a_pipe(tmp_path):
    done = subprocess.run(
        [*PYSTALE, "demo", "--steps", "8"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert re.search(r"^step +8/8 ", done.stdout, re.MULTILINE)
    for label in ("reward", "tokens generated", "staleness when taken", "groups", "refresh", "longest loop gap"):
        assert re.search(rf"^{label} ", done.stdout, re.MULTILINE), label
    assert "balances" in done.stdout
    assert "tenth" not in done.stdout  # eight steps say nothing about learning


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--steps", "many"],
        ["--steps"],
        ["--seed", "-1"],
        ["--group-size", "0"],
        ["--group-size", "1.5"],
        ["--max-staleness", "-1"],
        ["--max-token-staleness", "-1"],
        ["--max-token-staleness", "never"],
        ["--sync-weights-interval", "0"],
        ["--tail-batch-trigger-size", "-2"],
        ["--over-sample-threshold", "-0.5"],
        ["--over-sample-threshold", "nan"],
        ["--over-sample-threshold", "inf"],
        ["--mode", "async"],
        ["--mode"],
        ["--max-staleness", "1", "--mode", "sync"],
        ["--max-token-staleness", "0", "--mode", "sync"],
        ["--over-sample-threshold", "0.75", "--mode", "sync"],
        ["--tail-batch-trigger-size", "0", "--mode", "sync"],
        ["--checkpoint"],
        ["--checkpoint", ""],
        ["--checkpoint-every", "5"],
        ["--report"],
        ["--report", ""],
        ["--engine", "spark"],
        ["--engine", "ray", "--checkpoint", "nowhere"],
        ["--checkpoint-every", "0", "--checkpoint", "nowhere"],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line_and_exit_code_2(arguments, capsys):
    assert cli.run(["demo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("pystale: ")
    assert arguments[0] in err


@pytest.mark.parametrize("arguments", [["nonsense"], ["demo", "nonsense"], ["--nonsense"]], ids=" ".join)
def test_a_wrong_command_is_one_line_and_exit_code_2(arguments, capsys):
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "nonsense" in err


def test_help_names_every_option_in_full(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["demo", "--help"]) == 0
    out = capsys.readouterr().out
    for option in OPTIONS:
        assert option in out
    assert max(map(len, out.splitlines())) <= 80


def test_without_arguments_it_shows_its_commands(capsys):
    assert cli.run([]) == 0
    assert "demo" in capsys.readouterr().out


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"pystale {pystale.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich", "threadpoolctl"])
def test_without_the_extra_it_says_what_to_install(missing, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, missing, None)
    assert main() == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"pystale: the command line needs {missing}: pip install 'pystale[cli]'\n")


@pytest.mark.usefixtures("untaught")
def test_what_a_configuration_warns_of_is_said_in_one_line(capsys):
    arguments = ["--steps", "1", "--max-token-staleness", "0", "--tail-batch-trigger-size", "-1", "--group-size", "1"]
    assert cli.run(["demo", *arguments]) == 0
    out, err = capsys.readouterr()
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert any("tail_batch_trigger_size=-1" in note for note in notes)
    assert any("partial rollout saves nothing" in note for note in notes)
    assert "UserWarning" not in out + err


@pytest.mark.usefixtures("untaught")
def test_it_says_so_when_no_response_has_several_versions(capsys):
    assert cli.run(["demo", "--steps", "1", "--group-size", "1", "--max-token-staleness", "none"]) == 0
    assert "no response with tokens of several versions was trained" in capsys.readouterr().out


@pytest.mark.usefixtures("untaught")
@pytest.mark.parametrize(
    ("mode", "has", "has_not"),
    [
        ("sync", ["generating and", "in turn"], ["re-rolled", "beside training"]),
        ("colocated", ["re-rolled", "generating and", "in turn"], ["beside training"]),
        ("disaggregated", ["re-rolled", "beside training", "waiting for batches"], ["in turn"]),
    ],
)
def test_the_report_fits_the_mode(mode, has, has_not, capsys):
    assert cli.run(["demo", "--mode", mode, "--steps", "3", "--group-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "balances" in out
    assert [text for text in has if text not in out] == []
    assert [text for text in has_not if text in out] == []


@pytest.mark.usefixtures("untaught")
def test_what_sync_has_anyway_may_be_said(capsys):
    options = ["--max-staleness", "0", "--max-token-staleness", "none", "--tail-batch-trigger-size", "-1"]
    assert cli.run(["demo", "--mode", "sync", "--steps", "1", "--group-size", "1", *options]) == 0
    assert "balances" in capsys.readouterr().out


@pytest.mark.usefixtures("untaught")
def test_a_kept_run_is_reported_when_it_is_started_again(tmp_path, capsys):
    command = ["demo", "--steps", "3", "--group-size", "1", "--checkpoint", str(tmp_path / "a" / "run")]
    assert cli.run(command) == 0
    first = capsys.readouterr().out
    assert "note:" not in first
    assert cli.run(command) == 0
    again = capsys.readouterr().out
    assert again.startswith(f"note: the run in {tmp_path / 'a' / 'run'} is finished; this is its report\n")
    assert "reward " in again
    assert "balances" in again


@pytest.mark.usefixtures("untaught")
def test_other_options_than_the_kept_run_has_are_refused(tmp_path, capsys):
    command = ["demo", "--steps", "2", "--group-size", "1", "--checkpoint", str(tmp_path)]
    assert cli.run(command) == 0
    capsys.readouterr()
    assert cli.run([*command, "--seed", "7"]) == 2
    assert capsys.readouterr() == (
        "",
        f"pystale: --seed is 7, and the run in '{tmp_path}' has 0; go on with --seed 0, or choose another directory to "
        "begin a new run\n",
    )


@pytest.mark.parametrize("where", ["file", "file/below", "\0", "x" * 300])
def test_a_directory_that_cannot_be_is_one_line_and_exit_code_2(tmp_path, capsys, where):
    (tmp_path / "file").touch()
    assert cli.run(["demo", "--checkpoint", str(tmp_path / where)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pystale: ")


def test_a_run_that_cannot_be_kept_any_longer_ends_with_its_report_and_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(BaseModel, "train", lambda self, steps: None)
    original = CheckpointWriter.commit

    def commit(self: Any, document: Any) -> None:
        if document["extra"]["demo"]["record"]["rewards"]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))
        original(self, document)

    monkeypatch.setattr(CheckpointWriter, "commit", commit)
    command = ["demo", "--steps", "3", "--group-size", "1", "--checkpoint", str(tmp_path), "--checkpoint-every", "1"]
    assert cli.run(command) == 1
    out, err = capsys.readouterr()
    assert err == (
        f"pystale: the run cannot be kept any longer: [Errno 28] No space left on device: '{tmp_path}'; its last "
        "checkpoint is of step 0\n"
    )
    assert "balances" in out


def test_ctrl_c_on_a_terminal_and_going_on(terminal, tmp_path):
    command = ["demo", "--steps", "80", "--group-size", "2", "--checkpoint", "run", "--checkpoint-every", "20"]
    first = terminal(*command)
    first.read_until(r"[1-9]/80")
    first.press_ctrl_c()
    assert first.exit_code() == 130
    assert "the same command goes on with it" in first.screen
    second = terminal(*command)
    assert second.exit_code() == 0
    assert "going on with the run in run after step" in second.screen
    assert "continued" in second.screen
    assert "balances" in second.screen
    assert "Traceback" not in first.screen + second.screen


@pytest.mark.parametrize("moment", ["teaching", "step "])
def test_an_interrupt_ends_it_with_a_report(moment, tmp_path):
    with started("demo", "--steps", "60", cwd=tmp_path) as process:
        out = ""
        while not out.rpartition("\n")[2].startswith(moment) and not out.startswith(moment):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            out = line
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    assert re.search(r"^interrupted after \d+ of 60 steps$", rest, re.MULTILINE)
    assert re.search(r"^time ", rest, re.MULTILINE)
    assert ("balances" in rest) is (moment == "step ")


@pytest.mark.parametrize("arguments", [["--version"], ["demo", "--steps", "2"], ["demo", "--nonsense"]])
def test_started_without_an_output_it_does_its_work_quietly(tmp_path, arguments):
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *PYSTALE, *arguments]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.returncode == (2 if "--nonsense" in arguments else 0), done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_ends_it_quietly(tmp_path):
    with started("demo", "--steps", "60", cwd=tmp_path) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 141
        assert process.stderr.read() == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no file that is always full")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--steps", "1"]])
def test_an_output_that_is_full_is_one_line(tmp_path, arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PYSTALE, *arguments], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    assert done.returncode not in (0, 120)
    assert done.stderr.startswith("pystale: ")
    assert done.stderr.endswith("No space left on device\n")
    assert done.stderr.count("\n") == 1


def test_a_terminal_shows_a_panel_then_the_report(terminal):
    shown = terminal("demo", "--steps", "5")
    assert shown.exit_code() == 0
    assert "1/5" in shown.screen
    assert "report" in shown.screen
    assert "balances" in shown.screen
    assert COLOURS.search(shown.screen)
    assert shown.screen.rindex("\x1b[?25h") > shown.screen.rindex("\x1b[?25l")  # the cursor is back


def test_no_color_is_respected(terminal):
    shown = terminal("demo", "--steps", "3", NO_COLOR="1")
    assert shown.exit_code() == 0
    assert "balances" in shown.screen
    assert not COLOURS.search(shown.screen)


def test_ctrl_c_on_a_terminal(terminal):
    shown = terminal("demo", "--steps", "500")
    shown.read_until("2/500")
    shown.press_ctrl_c()
    assert shown.exit_code() == 130
    assert "Traceback" not in shown.screen
    assert re.search(r"after \d+ of 500 steps", shown.screen)
    assert "balances" in shown.screen
    assert shown.screen.rindex("\x1b[?25h") > shown.screen.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines(terminal):
    shown = terminal("demo", "--steps", "2", "--group-size", "1", TERM="dumb")
    assert shown.exit_code() == 0
    assert "\x1b" not in shown.screen
