"""What was measured, as a table for people, as Markdown and as plain data."""

from collections.abc import Iterable, Sequence
from typing import Any

from pystale.bench.comparison import CLOCK, Comparison, Pair

__all__ = ["HEADINGS", "cells", "document", "duration", "markdown", "times"]

HEADINGS = ("what", "without pystale", "", "pystale", "ratio")
SCHEMA = 1


def duration(seconds: float) -> str:
    """Three digits, in the unit that leaves one to three of them before the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def times(ratio: float) -> str:
    """How many times faster: two digits, or whole numbers."""
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


def cells(pair: Pair) -> tuple[str, str, str, str, str]:
    """A line of the table."""
    return (
        pair.what,
        pair.before.name,
        duration(pair.before.median),
        duration(pair.ours.median),
        times(pair.ratio),
    )


def markdown(comparisons: Iterable[Comparison]) -> list[str]:
    """The lines of the table as Markdown that can be read as it is."""
    rows = [cells(pair) for comparison in comparisons for pair in comparison.pairs]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    rule = ["-" * width for width in widths[:2]] + ["-" * (max(width, 2) - 1) + ":" for width in widths[2:]]
    widths = [max(width, 2) for width in widths]
    lines = []
    for row in (HEADINGS, tuple(rule), *rows):
        padded = [cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False)]
        padded += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
    return lines


def document(
    machine: dict[str, Any],
    comparisons: Sequence[Comparison],
    left_out: Sequence[str],
    plots: Sequence[str],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """What ``--json`` prints; times in seconds per call."""
    return {
        "pystale_bench": SCHEMA,
        "machine": machine,
        "clock": CLOCK,
        "interrupted": interrupted,
        "left_out": list(left_out),
        "comparisons": [
            {
                "what": comparison.title.replace("{}", "N"),
                "timings": [
                    {
                        "name": timing.name,
                        "size": timing.of,
                        "calls_per_round": timing.calls,
                        "median": timing.median,
                        "rounds": list(timing.seconds),
                    }
                    for timing in comparison.timings
                ],
                "pairs": [
                    {"what": pair.what, "before": pair.before.name, "ratio": pair.ratio} for pair in comparison.pairs
                ],
            }
            for comparison in comparisons
        ],
        "plots": list(plots),
    }
