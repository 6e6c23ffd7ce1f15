"""How a run looks: a live panel on a terminal, plain lines elsewhere; then one response and the report."""

import asyncio
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from pystale.demo.checkpoint import RunDirectory
from pystale.demo.record import Record, Response
from pystale.demo.report import groups_text, progress, report, share, spread
from pystale.demo.run import Run
from pystale.demo.session import execute
from pystale.demo.settings import Settings
from pystale.files import prepare_directory

__all__ = ["LiveDisplay", "NotKept", "PlainDisplay", "show"]

WIDTH = 92
INTERRUPTED = 130
SILENCE_S = 10.0
SPARKS = "▁▂▃▄▅▆▇█"
AGES = ("green", "yellow", "red", "magenta")
TITLES = {
    "sync": "synchronous GRPO",
    "colocated": "asynchronous GRPO",
    "disaggregated": "asynchronous GRPO beside the engine",
}
VERSIONS = ("cyan", "magenta", "yellow", "green", "blue")


class NotKept(RuntimeError):
    """A run ended because it could not be kept: the disk is full, or gone."""


def show(
    settings: Settings,
    directory: RunDirectory | None = None,
    new_buffer: Callable[..., Any] | None = None,
    trace: str | None = None,
    *,
    plots: str | None = None,
) -> int:
    """Run, or go on, with a display that suits standard output.

    Parameters
    ----------
    settings : Settings
    directory : RunDirectory, optional
        Where the run is kept.
    new_buffer, trace
        See :class:`~pystale.demo.run.Run`.
    plots : path, optional
        Directory for plots of the run and its record.

    Returns
    -------
    int
        The exit code: 0, or 130 if interrupted.

    Raises
    ------
    ValueError, OSError
        For a setting out of range, or a directory that cannot be used, before anything has started.
    NotKept
        When a checkpoint, the journal or the plots cannot be written later; after the report so far.
    """
    if sys.platform == "win32":
        raise ValueError("the demo needs POSIX's signals for Ctrl-C, and so does not run on Windows")
    if plots is not None:
        prepare_directory(plots)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Run(settings, directory, new_buffer, trace)
    console = Console(highlight=False)
    fancy = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    display: LiveDisplay | PlainDisplay = LiveDisplay(console) if fancy else PlainDisplay()
    for message in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
        display.note(message)
    if directory is not None and (run.finished or run.record.continued_after):
        display.note(kept(run, directory))
    if run.finished:
        finish(display, run.record, "", plots)
        return 0
    # One thread for linear algebra: with products this small a second one only costs time, and the bits of a run would
    # depend on the machine.
    try:
        with threadpool_limits(limits=1, user_api="blas"), display:
            interrupted = asyncio.run(execute(run, display))
    except BrokenPipeError:
        raise
    except OSError as error:
        if directory is None:
            raise
        finish(display, run.record, "", plots)
        raise NotKept(f"the run cannot be kept any longer: {error}; {saved(settings, directory)}") from error
    finish(display, run.record, left(run, directory) if interrupted else "", plots)
    return INTERRUPTED if interrupted else 0


def finish(display: "LiveDisplay | PlainDisplay", record: Record, left: str, plots: str | None) -> None:
    """Show the report, then write the one with plots."""
    display.finish(record, left)
    if plots is None:
        return
    from pystale.demo.plots import write_report  # matplotlib takes a while

    try:
        written = write_report(record, plots)
    except OSError as error:
        raise NotKept(f"the report cannot be written: {error}") from error
    display.note(f"in {plots}: {', '.join(written)}")


def saved(settings: Settings, directory: RunDirectory) -> str:
    """What there is to go on from after a failure."""
    try:
        run = directory.read(settings)
    except (OSError, ValueError):
        run = None
    return "no checkpoint was written" if run is None else f"its last checkpoint is of step {run.record.steps}"


def kept(run: Run, directory: RunDirectory) -> str:
    """What a directory was found to hold."""
    steps = run.settings.steps
    if run.finished:
        return f"the run in {directory.path} is finished; this is its report"
    return f"going on with the run in {directory.path} after step {run.record.steps} of {steps}"


def left(run: Run, directory: RunDirectory | None) -> str:
    """How to go on after an interrupt."""
    if directory is None:
        return "nothing is kept of it; --checkpoint DIR would"
    if run.engine is None:
        return f"nothing is kept in {directory.path} yet; the same command begins anew"
    return f"kept in {directory.path}: the same command goes on with it"


class PlainDisplay:
    """Lines for a file or a pipe: one every twentieth of the run, and at least every ten seconds."""

    def __init__(self) -> None:
        self._shown = -1
        self._said = time.perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, message: str) -> None:
        """Something to know."""
        print(f"note: {message}", flush=True)

    def update(self, record: Record) -> None:
        """See :class:`~pystale.demo.run.Display`."""
        if not record.steps:
            if not record.pretrained:
                print("teaching a base model to count, with slips and without an idea where to stop", flush=True)
            return
        now, twentieth = time.perf_counter(), record.steps * 20 // record.settings.steps
        if self._shown < 0:
            self._shown = (record.steps - 1) * 20 // record.settings.steps  # what an earlier process has shown
        if twentieth > self._shown or now - self._said >= SILENCE_S:
            self._shown, self._said = twentieth, now
            print(progress(record), flush=True)

    def finish(self, record: Record, left: str) -> None:
        """A response and the report; `left`: it was interrupted, and how to go on."""
        print()
        for line in response_lines(record.sample):
            print(line)
        print()
        if left:
            print(f"interrupted after {record.steps} of {record.settings.steps} steps")
            print(left)
        for label, value in report(record):
            print(f"{label:<22}{value}")


class LiveDisplay:
    """A panel that is redrawn as the run goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def note(self, message: str) -> None:
        """Something to know."""
        self._console.print(Text.assemble(("note ", "bold yellow"), message))

    def update(self, record: Record) -> None:
        """See :class:`~pystale.demo.run.Display`."""
        now = time.perf_counter()
        if now - self._drawn >= 0.1:
            self._drawn = now
            self._live.update(panel(record), refresh=True)

    def finish(self, record: Record, left: str) -> None:
        """See :meth:`PlainDisplay.finish`."""
        console, width = self._console, min(self._console.width, WIDTH)
        if console.no_color or record.sample is None:
            console.print(Group(*map(Text, response_lines(record.sample))))
        else:
            console.print(response_panel(record.sample), width=width)
        rows = _grid()
        if left:
            rows.add_row("interrupted", Text(f"after {record.steps} of {record.settings.steps} steps", "bold yellow"))
            rows.add_row("", Text(left))
        if record.steps > 1:
            rows.add_row("reward", _curve(record))
        for label, value in report(record):
            rows.add_row("" if label == "reward" and record.steps > 1 else label, value)
        console.print(Panel(rows, title="report", title_align="left", border_style="dim"), width=width)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column()
    return grid


def panel(record: Record) -> Panel:
    """The live panel."""
    rows = _grid()
    settings = record.settings
    if not record.steps:
        bar = ProgressBar(total=1, completed=record.pretrained, width=40)
        rows.add_row("base model", bar)
        rows.add_row("", Text("learns to count, with slips, without an idea where to stop", "dim"))
    else:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=settings.steps, completed=record.steps, width=40),
            f"{record.steps}/{settings.steps}",
            Text(f"{record.seconds:.0f} s", "dim"),
        )
        rows.add_row("step", head)
        rows.add_row("reward", _curve(record))
        rows.add_row("staleness", _ages(record))
        rows.add_row("versions", spread(record.versions))
        rows.add_row(
            "tokens",
            f"{share(record.masked, 1)} masked as stale, {record.tokens_per_s / 1e3:,.0f}k generated per second",
        )
        if settings.mode != "sync":
            rows.add_row("groups", groups_text(record))
        if record.refreshes:
            rows.add_row("refresh", f"{np.median(record.refresh_us):.0f} µs")
        if settings.mode == "disaggregated":
            beside = share(record.tokens_beside_training, record.generated_tokens)
            rows.add_row("beside", f"{beside} of the tokens were generated while the trainer worked")
    return Panel(
        rows,
        title=f"[bold]pystale demo[/]  {TITLES[settings.mode]}, counting from a to b",
        title_align="left",
        subtitle="Ctrl-C ends it",
        subtitle_align="right",
        border_style="dim",
        width=WIDTH,
    )


def _curve(record: Record, columns: int = 48) -> Text:
    """Rewards so far as a line of blocks, on a scale of 0 to 1, and the mean of the last twentieth."""
    parts = np.array_split(np.array(record.rewards), min(columns, record.steps))
    blocks = "".join(SPARKS[min(int(part.mean() * len(SPARKS)), len(SPARKS) - 1)] for part in parts)
    recent = float(np.mean(record.rewards[-max(record.settings.steps // 20, 1) :]))
    return Text.assemble((blocks, "green"), f"  {recent:.2f}")


def _ages(record: Record, columns: int = 40) -> Text:
    """Responses by staleness when taken, as one bar in parts."""
    counts: Counter[int] = Counter()
    for age, count in record.staleness.items():
        counts[max(age, -1)] += count
    line, total = Text(), sum(counts.values())
    ages = sorted(counts)
    for i, age in enumerate(ages):
        line.append("█" * round(columns * counts[age] / total), AGES[min(i, len(AGES) - 1)])
    for i, age in enumerate(ages):
        line.append(f"  {age if age >= 0 else 'ahead'}", AGES[min(i, len(AGES) - 1)])
        line.append(f" {100 * counts[age] / total:.0f} %")
    return line


def _heading(response: Response) -> str:
    versions = len({stretch.model_step for stretch in response.stretches})
    first, last = response.prompt[:2], response.prompt[2:]
    return (
        f"from {first} to {last}: {response.tokens} tokens by {versions} versions of the policy, "
        f"trained at step {response.train_step}, reward {response.reward:.2f}"
    )


def response_panel(response: Response) -> Panel:
    """A response coloured by the model step that wrote it, grey where the mask left it out of the loss."""
    body, legend = Text(), Text("\nmodel step")
    colours: dict[int, str] = {}
    for stretch in response.stretches:
        colour = colours.setdefault(stretch.model_step, VERSIONS[len(colours) % len(VERSIONS)])
        style, note = (colour, "") if stretch.trained else ("grey50", " (stale when trained: masked)")
        body.append(stretch.characters, style)
        legend.append(f"   {stretch.model_step}{note}", style)
    return Panel(Group(body, legend), title=_heading(response), title_align="left", border_style="dim")


def response_lines(response: Response | None) -> Sequence[str]:
    """The same in plain text: a line, or more, for each model step."""
    if response is None:
        return ["no response with tokens of several versions was trained"]
    lines = [_heading(response)]
    for stretch in response.stretches:
        label = f"  model step {stretch.model_step:<5}{'trained' if stretch.trained else 'masked'}  "
        lines += textwrap.wrap(
            stretch.characters.strip(), WIDTH, initial_indent=f"{label:<28}", subsequent_indent=" " * 28
        )
    return lines
