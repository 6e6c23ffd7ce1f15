"""``pystale bench``: both sides agree before they are timed, and what was measured is said in every form."""

import gc
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pystale import cli
from pystale.bench import buffers, kernels, plan
from pystale.bench.comparison import OURS, Comparison, Disagreement, Side, Timing, measure
from pystale.bench.plan import Bench
from pystale.bench.table import cells, duration, markdown, times

pytestmark = pytest.mark.whole_run

PATIENCE_S = 120
TITLES = (*plan.KERNELS, *plan.LONG_LISTS, *plan.STORED)
SMALL: list[tuple[str, Any]] = [
    ("mask of an array", lambda: kernels.mask_of_an_array(300)),
    ("mask of a list", lambda: kernels.mask_of_a_list(300)),
    ("mask of runs", lambda: kernels.mask_of_runs(300)),
    ("mask of a batch", lambda: kernels.mask_of_a_batch(300)),
    ("token left", lambda: kernels.token_left((3, 30))),
    ("no token left", lambda: kernels.no_token_left(30)),
    ("put", lambda: buffers.put_of_long_lists(2, 10)),
    ("refresh", lambda: buffers.refresh_of_long_lists(2, 2, 10)),
]


@pytest.fixture
def small(monkeypatch):
    """A bench of the same kind that takes no time."""
    gc.freeze()  # each measurement begins with a collection, of everything that the tests have imported
    monkeypatch.setattr(plan, "KERNELS", tuple(SMALL[:6]))
    monkeypatch.setattr(plan, "LONG_LISTS", tuple(SMALL[6:]))
    monkeypatch.setattr(plan, "SIZES", (100, 200))
    monkeypatch.setattr(plan, "SHARE", 1e-4)
    yield
    gc.unfreeze()


def comparison(title: str = "work of {}", **seconds: tuple[float, ...]) -> Comparison:
    return Comparison(title, tuple(Timing(name, "10", 1, found) for name, found in seconds.items()))


@pytest.mark.parametrize(("title", "make"), SMALL, ids=[title for title, _ in SMALL])
def test_sides_agree_and_each_is_timed_in_every_round(title, make):
    sides = make()
    found = measure(title, sides, 0.01)
    assert [timing.name for timing in found.timings] == [side.name for side in sides]
    assert len({len(timing.seconds) for timing in found.timings}) == 1
    assert all(len(timing.seconds) >= 3 and min(timing.seconds) > 0 for timing in found.timings)
    assert all(timing.name == OURS for timing in (pair.ours for pair in found.pairs))
    assert len(found.pairs) == sum(side.name != OURS for side in sides)


def test_sides_take_turns():
    calls: list[str] = []
    sides = [Side(name, lambda name=name: calls.append(name), restore=lambda _: None) for name in ("a", OURS)]
    measure("work", sides, 0)
    assert calls[-6:] == ["a", OURS] * 3


def test_sides_that_differ_are_not_timed():
    sides = [Side("loop", lambda: [1, 0]), Side(OURS, lambda: [1, 1])]
    with pytest.raises(Disagreement, match="work: pystale gives another result than loop"):
        measure("work", sides, 1)


def test_sides_are_compared_with_those_of_their_size():
    sides = [Side(name, lambda of=of: int(of), of) for of in ("1", "2") for name in ("loop", OURS)]
    found = measure("work of {}", sides, 0)
    assert [(pair.what, pair.before.name) for pair in found.pairs] == [("work of 1", "loop"), ("work of 2", "loop")]


def test_a_call_is_undone_before_the_next():
    buffer: list[int] = [1]
    sides = [Side("peek", lambda: buffer[-1]), Side(OURS, buffer.pop, restore=buffer.append)]
    measure("work", sides, 0)
    assert buffer == [1]


def test_the_garbage_collector_is_as_it_was():
    measure("work", [Side(OURS, lambda: gc.isenabled())], 0)
    assert gc.isenabled()


def test_a_row_has_medians_and_their_ratio():
    found = comparison(loop=(3e-3, 9e-3, 4e-3), pystale=(1e-6, 2e-6, 3e-6))
    assert cells(found.pairs[0]) == ("work of 10", "loop", "4 ms", "2 us", "2,000x")


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.56e-6, "4.56 us"), (7.8e-9, "7.8 ns")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.87, "0.87x"), (4.91, "4.9x"), (63.2, "63x"), (27_667.0, "27,667x")])
def test_ratios(ratio, text):
    assert times(ratio) == text


def test_markdown_is_aligned_and_can_be_empty():
    lines = markdown([comparison(loop=(1.0,), pystale=(0.5,))])
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")] == ["", "work of 10", "loop", "1 s", "500 ms", "2x", ""]
    assert len(markdown([])) == 2


@pytest.mark.usefixtures("small")
def test_all_of_it():
    bench, said = Bench(60), []
    bench.run(lambda what, done: said.append((what, done)))
    assert bench.left_out == []
    assert [found.title for found in bench.comparisons] == [
        *(title for title, _ in SMALL),
        "refresh of {} groups, nothing due",
        "take of the 64 stalest of {} groups",
    ]
    assert [pair.what for pair in bench.comparisons[-1].pairs] == [
        "take of the 64 stalest of 100 groups",
        "take of the 64 stalest of 200 groups",
    ]
    assert all(0 <= done <= 1 for _, done in said)


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_in_the_time_is_named():
    bench = Bench(1e-9)
    bench.run()
    assert bench.comparisons == []
    assert bench.left_out[0] == "mask of an array: the time is over; --seconds gives more"
    assert bench.left_out[-1] == "200 groups stored: the time is over; --seconds gives more"


@pytest.mark.usefixtures("small")
def test_what_was_stored_is_measured_however_long_storing_took(monkeypatch):
    original = buffers.Stored.fill

    def slow(self: Any, groups: int, report: Any) -> None:
        original(self, groups, report)
        bench._end = 0.0

    monkeypatch.setattr(buffers.Stored, "fill", slow)
    bench = Bench(60)
    bench.run()
    assert [pair.what for pair in bench.comparisons[-1].pairs] == ["take of the 64 stalest of 100 groups"]
    assert bench.left_out == ["200 groups stored: the time is over; --seconds gives more"]


@pytest.mark.usefixtures("small")
def test_what_takes_too_long_to_store_is_named():
    bench = Bench(60, sizes=(100, 10**9))
    bench.run()
    assert len(bench.left_out) == 1
    assert bench.left_out[0].startswith("1,000,000,000 groups stored: storing them takes ")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("available", "words"), [(500_000, "of 0.0 GB is too little"), (None, "is not known here")])
def test_what_does_not_fit_in_the_memory_is_named(monkeypatch, available, words):
    monkeypatch.setattr(plan, "available_bytes", lambda: available)
    bench = Bench(60)
    bench.run()
    assert bench.left_out == [f"200 groups stored: this takes 0.0 GB; the memory {words}"]
    assert len(bench.comparisons[-1].pairs) == 1


def test_readme_shows_what_it_prints():
    """The lines of README's table of speeds are those of the command."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    speed = readme.partition("[start:speed]")[2].partition("[end:speed]")[0]
    lines = re.findall(r"^\| (.+?) \|", speed, re.MULTILINE)
    known = [re.escape(title).replace(re.escape("{}"), "[0-9,]+") for title, *_ in TITLES]
    assert "pystale bench" in speed
    assert lines[0] == "what"
    assert [line for line in lines[1:] if not any(re.fullmatch(title, line) for title in known)] == []
    assert all(any(re.fullmatch(title, line) for line in lines) for title in known)


@pytest.mark.usefixtures("small")
def test_the_command_prints_markdown_and_what_it_ran_on(capsys):
    assert cli.run(["bench"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("| what ")
    assert out.isascii()
    assert "kernels at " in out
    assert "Left out" not in out


@pytest.mark.usefixtures("small")
def test_json_is_all_that_is_printed(capsys, tmp_path):
    assert cli.run(["bench", "--json", "--plot", str(tmp_path / "a" / "b")]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["pystale_bench"], found["interrupted"], found["left_out"]) == (1, False, [])
    assert {pair["before"] for pair in found["comparisons"][0]["pairs"]} == {"list comprehension", "NumPy"}
    assert found["machine"]["pystale"]["cpu_level"]
    assert [os.path.basename(path) for path in found["plots"]] == ["kernels.png", "buffer.png", "stored.png"]
    for path in found["plots"]:
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.usefixtures("small")
def test_ctrl_c_prints_what_was_measured(capsys, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "LONG_LISTS", (("never", interrupted),))
    assert cli.run(["bench"]) == 130
    out = capsys.readouterr().out
    assert "| mask of an array " in out
    assert "never" not in out
    assert out.endswith("interrupted: this is what was measured until then\n")


def test_results_that_differ_are_one_line(capsys, monkeypatch):
    monkeypatch.setattr(plan, "KERNELS", (("work", lambda: [Side("loop", lambda: 1), Side(OURS, lambda: 2)]),))
    assert cli.run(["bench"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pystale: work: pystale gives another result")


@pytest.mark.parametrize(
    "arguments",
    [["--seconds", "0"], ["--seconds", "soon"], ["--seconds"], ["--plot"], ["--plot", ""], ["--quick"], ["more"]],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line_and_exit_code_2(arguments, capsys):
    assert cli.run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("pystale: ")
    assert arguments[0] in err


@pytest.mark.parametrize("where", ["file", "file/below", "\0", "x" * 300])
def test_a_directory_that_cannot_be_is_one_line_before_anything_is_measured(tmp_path, capsys, where):
    (tmp_path / "file").touch()
    assert cli.run(["bench", "--plot", str(tmp_path / where)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.run(["bench", "--plot", "plots"]) == 2
    assert capsys.readouterr().err == "pystale: --plot needs matplotlib; install it with: pip install 'pystale[cli]'\n"


def test_help_names_every_option_in_full(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert [option for option in ("--seconds", "--json", "--plot") if option not in out] == []
    assert max(map(len, out.splitlines())) <= 80


SAYS_WHEN_IT_BEGINS = "import sys, pystale.__main__ as command; print('ready', flush=True); sys.exit(command.main())"


@pytest.fixture
def process(tmp_path):
    """The command as a process, once Python has started."""
    with subprocess.Popen(
        [sys.executable, "-c", SAYS_WHEN_IT_BEGINS, "bench", "--seconds", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout.readline() == "ready\n"
        yield started
        started.kill()


def test_in_a_pipe_nothing_moves(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "mask of 32,768 tokens, int32" in out
    assert "1,000,000 groups stored: the time is over" in out


def on_a_terminal(cwd: Any, *arguments: str, interrupt_after: str = "", **changed: str) -> tuple[int, str]:
    """Exit code and output of the command on a pseudo-terminal 130 columns wide."""
    master, slave = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "130", **changed}
    command = [sys.executable, "-c", SAYS_WHEN_IT_BEGINS, "bench", *arguments]
    written = b""
    with subprocess.Popen(command, cwd=cwd, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # EIO: nobody has the other end any more
                break
            if not piece:
                break
            written += piece
            if interrupt_after and interrupt_after in written.decode(errors="ignore"):
                interrupt_after = ""
                process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
    os.close(master)
    return code, written.decode(errors="ignore")


def test_a_terminal_shows_progress_and_a_table(tmp_path):
    code, screen = on_a_terminal(tmp_path, "--seconds", "1")
    assert code == 0
    assert "│" in screen
    assert "list comprehension" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")  # the cursor is back


def test_ctrl_c_on_a_terminal(tmp_path):
    code, screen = on_a_terminal(tmp_path, "--seconds", "600", interrupt_after="mask of 32,768 tokens, lists")
    assert code == 130
    assert "Traceback" not in screen
    assert "mask of 32,768 tokens, int32" in screen
    assert "this is what was measured until then" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    code, screen = on_a_terminal(tmp_path, "--seconds", "1", TERM="dumb")
    assert code == 0
    assert "\x1b" not in screen
    assert "| mask of 32,768 tokens, int32" in screen


def test_a_closed_pipe_ends_it_quietly(process):
    process.stdout.close()
    assert process.wait(PATIENCE_S) == 141
    assert process.stderr.read() == ""


def test_a_signal_ends_it_with_a_table(process):
    time.sleep(0.5)  # wherever it is by now
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in out + err
