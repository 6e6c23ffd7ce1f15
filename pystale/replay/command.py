"""What ``pystale replay`` does."""

import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from pystale.files import prepare_directory
from pystale.replay.conversions import read_csv
from pystale.replay.engine import ASSUMPTIONS, replay
from pystale.replay.history import History, read_history
from pystale.replay.outcome import Outcome
from pystale.replay.table import introduction, notes, text_table
from pystale.replay.whatif import RECORDED, what_ifs

__all__ = ["show"]

NOT_REPRODUCED = 1


def show(
    path: str,
    max_staleness: Sequence[int] | None,
    max_token_staleness: Sequence[int | None] | None,
    *,
    as_json: bool = False,
    plots: str | None = None,
    skip_damaged: bool = False,
    batch_groups: int | None = None,
) -> int:
    """Read a trace, replay it under every combination of limits, and print what comes of it.

    Returns
    -------
    int
        The exit code: 0, or 1 where a whole trace is not reproduced by its own settings.

    Raises
    ------
    ValueError, OSError
        If it cannot be read, or the plots cannot be written.
    """
    is_csv = path.lower().endswith(".csv")
    if batch_groups is not None and not is_csv:
        raise ValueError("--batch-groups is for .csv files only; a trace knows its batches")
    if plots is not None:
        prepare_directory(plots)
    with _progress() as progress:
        reading = progress.add_task("reading", total=None)
        read = functools.partial(read_csv, batch_groups=batch_groups) if is_csv else read_history
        history = read(
            path,
            skip_damaged=skip_damaged,
            progress=lambda done, of: progress.update(reading, completed=done, total=of),
        )
        outcomes = _outcomes(history, max_staleness, max_token_staleness, progress)
    written: list[str] = []
    if plots is not None:
        from pystale.replay.plots import write_plots

        written = write_plots(outcomes, plots)
    recorded = outcomes[0]
    if as_json:
        print(json.dumps(_document(path, history, outcomes, written), indent=2))
    else:
        _print(path, history, outcomes)
        for name in written:
            print(f"plot {name}")
    return NOT_REPRODUCED if recorded.differs and history.complete and history.accounts else 0


def _outcomes(
    history: History,
    max_staleness: Sequence[int] | None,
    max_token_staleness: Sequence[int | None] | None,
    progress: Progress,
) -> list[Outcome]:
    settings = what_ifs(history.header.rules, max_staleness, max_token_staleness)
    playing = progress.add_task("replaying", total=len(history.events) * len(settings) or 1)
    outcomes, reference = [], None
    for number, setting in enumerate(settings):

        def played(done: int, before: int = number * len(history.events)) -> None:
            progress.update(playing, completed=before + done)

        outcome, found = replay(history, setting, reference, played)
        if setting is RECORDED:
            reference = found
        outcomes.append(outcome)
    return outcomes


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A progress bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    shown = console.is_terminal and not console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        yield progress


def _print(path: str, history: History, outcomes: Sequence[Outcome]) -> None:
    console = Console(highlight=False)
    lines = introduction(path, history, outcomes[0])
    if not (console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")):
        encoding = sys.stdout.encoding or "ascii"
        for line in (*lines, "", *text_table(outcomes), "", *notes(outcomes)):
            print(line.encode(encoding, "backslashreplace").decode(encoding))
        return
    console.print(Text("\n".join(lines)))
    console.print()
    styles = ["bold cyan", "bold cyan", *("bold" if outcome.setting.recorded else "" for outcome in outcomes)]
    for row, style in zip(text_table(outcomes, console.width), styles, strict=True):
        console.print(Text(row, style))
    console.print(Text("\n" + "\n".join(notes(outcomes)), "dim"))


def _document(path: str, history: History, outcomes: Sequence[Outcome], plots: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "pystale_replay": 1,
        "trace": path,
        "order": history.header.order.value,
        "responses": history.rollouts,
        "groups": history.groups,
        "seconds": history.seconds,
        "requests": {"number": history.legs, "tokens": dict(history.leg_tokens)},
        "weight_syncs": history.syncs,
        "lines_lost": history.lost,
        "lines_damaged": {"number": history.skipped, "first": history.damaged},
        "reproduced": not outcomes[0].differs if history.accounts else None,
        "settings": [outcome.as_dict() for outcome in outcomes],
        "assumptions": list(ASSUMPTIONS),
        "plots": list(plots),
    }
