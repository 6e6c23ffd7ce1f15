"""What ``pystale bench`` does."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pystale.bench.comparison import CLOCK, Disagreement
from pystale.bench.machine import description, words
from pystale.bench.plan import Bench
from pystale.bench.table import HEADINGS, cells, document, markdown
from pystale.files import prepare_directory

__all__ = ["Disagreement", "show"]

INTERRUPTED = 130
CLOCK_IN_WORDS = "processor time" if CLOCK == "process_time" else "wall time"


def show(seconds: float, *, as_json: bool = False, plots: str | None = None) -> int:
    """Measure, and print what was found; after Ctrl-C, what was measured until then.

    Returns
    -------
    int
        The exit code: 0, or 130 if interrupted.

    Raises
    ------
    OSError
        If the directory for plots cannot be written to; before anything is measured.
    Disagreement
        If pystale and what it is compared with give different results.
    """
    if plots is not None:
        prepare_directory(plots)
    bench, interrupted = Bench(seconds), False
    try:
        with _progress() as progress:
            task = progress.add_task("", total=1.0)
            bench.run(lambda what, done: progress.update(task, description=what, completed=done))
    except KeyboardInterrupt:
        interrupted = True
    written: list[str] = []
    if plots is not None:
        from pystale.bench.plots import write_plots

        written = write_plots(bench.comparisons, plots)
    machine = description()
    if as_json:
        found = document(machine, bench.comparisons, bench.left_out, written, interrupted=interrupted)
        print(json.dumps(found, indent=2))
    else:
        _print(bench, machine, written, interrupted=interrupted)
    return INTERRUPTED if interrupted else 0


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    shown = console.is_terminal and not console.is_dumb_terminal
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        yield progress


def _print(bench: Bench, machine: dict[str, Any], written: list[str], *, interrupted: bool) -> None:
    notes = [f"Medians of interleaved rounds, {CLOCK_IN_WORDS}, results compared before. {words(machine)}."]
    notes += [f"Left out: {each}." for each in bench.left_out]
    notes += [f"plot {path}" for path in written]
    notes += ["interrupted: this is what was measured until then"] if interrupted else []
    console = Console(highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        console.print(_table(bench))
        console.print(Text("\n".join(notes), "dim"))
    else:
        print("\n".join([*markdown(bench.comparisons), "", *notes]))


def _table(bench: Bench) -> Table:
    table = Table(header_style="bold cyan", border_style="dim")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in HEADINGS[:2] and heading else "right")
    shown = ""
    for comparison in bench.comparisons:
        for pair in comparison.pairs:
            what, *rest = cells(pair)
            table.add_row("" if what == shown else what, *rest)
            shown = what
        table.add_section()
    return table
