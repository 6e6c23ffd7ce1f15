"""Markdown tables of median ratios from pytest-benchmark's JSON files.

One file: within each group, how many times faster every "after" is than every "before". Two files: every benchmark of
the second run against the same benchmark of the first; exit status 1 if one takes more than ``--limit`` times as long.
More files are more runs of the two, in turn: A B A B. Each benchmark counts with the median of its runs.

    pytest benchmarks --benchmark-json=benchmark-run.json
    python benchmarks/compare.py benchmark-run.json
    python benchmarks/compare.py base-1.json new-1.json base-2.json new-2.json --limit 1.25

A benchmark is a "before" or an "after" if its name says so, as a word of the function's name or in its parameters
(``test_mask_before_numpy``, ``test_mask[after-32768]``). A before and an after are compared if they are in one group
and their parameters, without that word, are the same.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROLE = re.compile(r"(?<![a-z])(before|after)(?![a-z])")


def load(path: Path) -> dict[str, Any]:
    """Read a pytest-benchmark JSON file; ValueError says what about it is wrong."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(run, dict) or not isinstance(run.get("benchmarks"), list):
        raise ValueError(f"{path}: is not a pytest-benchmark file: it has no list named 'benchmarks'")
    for number, benchmark in enumerate(run["benchmarks"]):
        try:
            fits = isinstance(benchmark["fullname"], str) and benchmark["stats"]["median"] > 0
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise ValueError(f"{path}: benchmarks[{number}] has no 'fullname' or no positive 'stats.median'")
    if not run["benchmarks"]:
        raise ValueError(f"{path}: holds no benchmark; was it written with --benchmark-disable?")
    return run


def duration(seconds: float) -> str:
    """Seconds in the unit that leaves one to three digits before the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def times(ratio: float) -> str:
    """A ratio with enough digits to read, and no exponent."""
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown table: first column to the left, the others, which hold numbers, to the right."""
    head = list(header)
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def listing(title: str, names: Iterable[str]) -> str:
    """A titled Markdown list, or nothing for no names."""
    items = [f"- {name}" for name in names]
    return "\n".join(["", f"{title}:", "", *items]) if items else ""


def machine(run: dict[str, Any]) -> str:
    """Processor of a run and, where it was recorded, the CPU level of the kernels."""
    info = run.get("machine_info") or {}
    level = (info.get("pystale") or {}).get("cpu_level")
    brand = (info.get("cpu") or {}).get("brand_raw", "unknown CPU")
    return f"{brand}, kernels at {level}" if level else str(brand)


def parts(benchmark: dict[str, Any]) -> tuple[str, str, str]:
    """Role ("before", "after" or ""), what the comparison is called, and which of its benchmarks this is."""
    function, _, parameters = benchmark["fullname"].rpartition("::")[2].partition("[")
    parameters = parameters.removesuffix("]")
    found = ROLE.search(parameters.lower()) or ROLE.search(function.lower())
    if not found:
        return "", "", ""
    rest = "-".join(word for word in parameters.split("-") if not ROLE.search(word.lower()))
    group = benchmark.get("group") or ROLE.sub("", function.lower()).strip("_").replace("__", "_")
    detail = next((word for word in parameters.split("-") if ROLE.search(word.lower())), function)
    return found[1], f"{group} [{rest}]" if rest else group, ROLE.split(detail.lower())[-1].strip("_- ")


def before_and_after(run: dict[str, Any]) -> tuple[str, bool]:
    """Table of one run: how many times faster each "after" is than each "before" it stands beside."""
    found: dict[str, dict[str, list[tuple[str, float]]]] = {}
    alone = []
    for benchmark in run["benchmarks"]:
        role, comparison, detail = parts(benchmark)
        if role:
            sides = found.setdefault(comparison, {"before": [], "after": []})
            sides[role].append((f"{role} {detail}".strip(), benchmark["stats"]["median"]))
        else:
            notes = [f"{name}: {value}" for name, value in (benchmark.get("extra_info") or {}).items()]
            alone.append("; ".join([f"{benchmark['fullname']}: {duration(benchmark['stats']['median'])}", *notes]))
    rows = []
    for comparison, sides in found.items():
        if not sides["before"] or not sides["after"]:
            alone += [f"{comparison}, {name}: {duration(median)}" for name, median in sides["before"] + sides["after"]]
        for old_name, old in sides["before"]:
            for new_name, new in sides["after"]:
                label = ", ".join(name for name in (old_name, new_name) if name not in ("before", "after"))
                rows.append([f"{comparison} ({label})" if label else comparison])
                rows[-1] += [duration(old), duration(new), times(old / new)]
    text = table(["what", "before", "after", "times faster"], rows) + f"\n\nMedians; {machine(run)}."
    return text + listing("Measured without a counterpart", alone), True


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of every benchmark that all of the runs have: the median of its medians."""
    found = [{b["fullname"]: b["stats"]["median"] for b in run["benchmarks"]} for run in runs]
    names = set[str].intersection(*map(set, found))
    return {name: statistics.median(run[name] for run in found) for name in names}


def old_and_new(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], limit: float) -> tuple[str, bool]:
    """Table of the runs of two states, slowest-grown first, and whether no ratio is above `limit`."""
    first, second = medians(old), medians(new)
    shared = sorted(first.keys() & second.keys(), key=lambda name: first[name] / second[name])
    if not shared:
        raise ValueError("the two files have no benchmark in common")
    ratios = {name: second[name] / first[name] for name in shared}
    marks = {name: f"**{times(ratio)}**" if ratio > limit else times(ratio) for name, ratio in ratios.items()}
    rows = [[name, duration(first[name]), duration(second[name]), marks[name]] for name in shared]
    counted = f"{len(old)} runs of each" if len(old) > 1 else "a run of each"
    over = sum(ratio > limit for ratio in ratios.values())
    text = table(["benchmark", "first", "second", "second / first"], rows)
    text += f"\n\nMedians of {counted}; {over} of {len(shared)} above the limit of {limit:g}x."
    if len(machines := sorted({machine(run) for run in (*old, *new)})) > 1:
        text += f" Different machines ({'; '.join(machines)}): the ratios say little."
    text += listing("Only in the first", sorted(first.keys() - second.keys()))
    return text + listing("Only in the second", sorted(second.keys() - first.keys())), over == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Markdown tables of median ratios from pytest-benchmark's JSON files.")
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JSON file of one run; or of runs of two states, in turn"
    )
    parser.add_argument("--limit", type=float, default=1.25, help="largest second / first that passes (default 1.25)")
    arguments = parser.parse_args()
    if not arguments.limit > 0:
        parser.error(f"--limit must be a positive ratio, got {arguments.limit}")
    if len(arguments.files) > 1 and len(arguments.files) % 2:
        parser.error(f"runs of two states go in turn, first second first second; got {len(arguments.files)} files")
    try:
        runs = [load(path) for path in arguments.files]
        if len(runs) == 1:
            text, passed = before_and_after(runs[0])
        else:
            text, passed = old_and_new(runs[::2], runs[1::2], arguments.limit)
    except ValueError as error:
        parser.error(str(error))
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
