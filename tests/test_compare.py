"""benchmarks/compare.py, run as the command it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "compare.py"


@pytest.fixture
def write(tmp_path):
    """Write a pytest-benchmark file from {name: median in seconds} and groups; return its path."""

    def write(file, medians, group=None, cpu="X 1", level="avx2"):
        benchmarks = [
            {"fullname": f"benchmarks/bench_a.py::{name}", "group": group, "stats": {"median": median}}
            for name, median in medians.items()
        ]
        info = {"cpu": {"brand_raw": cpu}, "pystale": {"cpu_level": level}}
        path = tmp_path / file
        path.write_text(json.dumps({"machine_info": info, "benchmarks": benchmarks}))
        return path

    return write


def compare(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_run_within_the_limit_passes(write):
    code, out, _ = compare(write("a", {"test_x": 1e-6}), write("b", {"test_x": 1.2e-6}))
    assert code == 0
    assert "| benchmarks/bench_a.py::test_x | 1 us | 1.2 us | 1.2x |" in out
    assert "0 of 1 above the limit of 1.25x" in out


def test_a_run_past_the_limit_fails_and_comes_first(write):
    first, second = write("a", {"test_x": 1e-3, "test_y": 2.0}), write("b", {"test_x": 1e-3, "test_y": 3.0})
    code, out, _ = compare(first, second)
    assert code == 1
    assert "| benchmarks/bench_a.py::test_y | 2 s | 3 s | **1.5x** |" in out
    assert out.index("test_y") < out.index("test_x")


def test_several_runs_in_turn_count_with_their_medians(write):
    medians = [("base-1", 2.0), ("new-1", 2.0), ("base-2", 1.0), ("new-2", 9.0), ("base-3", 3.0), ("new-3", 2.5)]
    code, out, _ = compare(*(write(name, {"test_x": seconds}) for name, seconds in medians))
    assert code == 0
    assert "test_x | 2 s | 2.5 s | 1.25x |" in out
    assert "Medians of 3 runs of each" in out


def test_a_benchmark_must_be_in_all_runs_of_a_state_to_count(write):
    runs = [write("a", {"test_x": 1.0}), write("b", {"test_x": 1.0, "test_y": 1.0})]
    runs += [write("c", {"test_x": 1.0, "test_y": 1.0}), write("d", {"test_x": 1.0, "test_y": 1.0})]
    code, out, _ = compare(*runs)
    assert code == 0
    assert "Only in the second:\n\n- benchmarks/bench_a.py::test_y" in out


def test_an_odd_number_of_runs_is_refused(write):
    code, out, err = compare(*(write(name, {"test_x": 1.0}) for name in "abc"))
    assert (code, out) == (2, "")
    assert "got 3 files" in err


def test_the_limit_can_be_set(write):
    first, second = write("a", {"test_x": 2.0}), write("b", {"test_x": 3.0})
    assert compare(first, second, "--limit", 1.5)[0] == 0
    assert compare(first, second, "--limit", 1.49)[0] == 1


def test_a_benchmark_of_one_run_only_is_listed_and_does_not_fail(write):
    code, out, _ = compare(
        write("a", {"test_x": 1e-9, "test_old": 1e-9}), write("b", {"test_x": 1e-9, "test_new": 1e-9})
    )
    assert code == 0
    assert "Only in the first:\n\n- benchmarks/bench_a.py::test_old" in out
    assert "Only in the second:\n\n- benchmarks/bench_a.py::test_new" in out


def test_runs_of_different_machines_are_called_so(write):
    first = write("a", {"test_x": 1.0})
    assert "Different machines" not in compare(first, first)[1]
    assert "Different machines" in compare(first, write("b", {"test_x": 1.0}, cpu="Y 2"))[1]
    assert "Different machines" in compare(first, write("b", {"test_x": 1.0}, level="avx512"))[1]


def test_one_run_shows_after_against_before_by_group(write):
    medians = {"test_mask_before_numpy": 3e-5, "test_mask_before_reference": 6e-3, "test_mask_after": 1e-5}
    code, out, _ = compare(write("a", medians, group="mask, 32k tokens"))
    assert code == 0
    assert "| mask, 32k tokens (before numpy) | 30 us | 10 us | 3x |" in out
    assert "| mask, 32k tokens (before reference) | 6 ms | 10 us | 600x |" in out
    assert "Medians; X 1, kernels at avx2." in out
    assert "Measured without a counterpart" not in out


def test_before_and_after_may_be_parameters(write):
    medians = {f"test_take[{role}-{n}]": n * cost for role, cost in (("before", 4e-6), ("after", 1e-6)) for n in (1, 3)}
    out = compare(write("a", medians, group="take"))[1]
    assert "| take [1] | 4 us | 1 us | 4x |" in out
    assert "| take [3] | 12 us | 3 us | 4x |" in out
    assert out.count("4x") == 2


def test_what_a_benchmark_notes_beside_its_time_is_shown(write):
    path = write("a", {"test_wakes": 0.02})
    run = json.loads(path.read_text())
    run["benchmarks"][0]["extra_info"] = {"median of one wake-up in us": 81.5}
    path.write_text(json.dumps(run))
    assert "- benchmarks/bench_a.py::test_wakes: 20 ms; median of one wake-up in us: 81.5" in compare(path)[1]


def test_what_has_no_counterpart_is_listed(write):
    out = compare(write("a", {"test_lonely_after": 1e-3, "test_flat": 1e-9, "test_hereafter": 2.0}, group="g"))[1]
    assert "Measured without a counterpart" in out
    assert "- g, after: 1 ms" in out
    assert "- benchmarks/bench_a.py::test_flat: 1 ns" in out
    assert "- benchmarks/bench_a.py::test_hereafter: 2 s" in out


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", "is not JSON"),
        ("[]", "no list named 'benchmarks'"),
        ('{"benchmarks": {}}', "no list named 'benchmarks'"),
        ('{"benchmarks": []}', "holds no benchmark"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": 1}}, {"name": "x"}]}', "benchmarks[1] has no"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": 0}}]}', "positive 'stats.median'"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"median": "1"}}]}', "positive 'stats.median'"),
    ],
)
def test_a_foreign_file_is_refused_by_name(content, complaint, tmp_path, write):
    foreign = tmp_path / "foreign.json"
    foreign.write_text(content)
    code, out, err = compare(write("a", {"test_x": 1.0}), foreign)
    assert (code, out) == (2, "")
    assert "foreign.json" in err
    assert complaint in err
    assert "Traceback" not in err


def test_a_missing_or_binary_file_is_refused_by_name(tmp_path):
    code, _, err = compare(tmp_path / "absent.json")
    assert code == 2
    assert "absent.json: cannot be read: No such file" in err
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    code, _, err = compare(tmp_path / "binary.json")
    assert code == 2
    assert "binary.json: is not JSON" in err


def test_runs_without_a_common_benchmark_cannot_pass(write):
    code, _, err = compare(write("a", {"test_x": 1.0}), write("b", {"test_y": 1.0}))
    assert code == 2
    assert "no benchmark in common" in err


def test_a_limit_must_be_positive(write):
    first = write("a", {"test_x": 1.0})
    assert compare(first, first, "--limit", 0)[0] == 2
    assert compare(first, first, "--limit", "nan")[0] == 2
