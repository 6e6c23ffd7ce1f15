"""The files of ``pystale demo --report``: plots of a run, and its record as JSON."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pystale.demo.record import Record
from pystale.plots import COLOURS, GREY, INK, legend, new_figure, save, shades, tokens_axis

__all__ = ["write_report"]

VERSION = 1
STEP = "trainer step"
WINDOW = 20  # trainer steps of a running mean, at most
COLUMNS = 60  # stacked bars over the steps, at most


def write_report(record: Record, directory: str | os.PathLike[str]) -> list[str]:
    """Write ``record.json``, and a PNG for everything that the run has figures of; returns the names.

    Raises
    ------
    OSError
        If a file cannot be written.
    """
    kept = {name: value for name, value in record.as_dict().items() if name not in ("batches", "gap_ms", "best")}
    content = {"pystale_demo": VERSION, "settings": asdict(record.settings), "record": kept}
    with open(os.path.join(directory, "record.json"), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    written = ["record.json"]
    if record.steps:
        paths = [
            _reward(record, directory),
            _staleness(record, directory),
            _staleness_over_steps(record, directory),
            _latency(record, directory),
        ]
        paths += [_tokens(record, directory)] if record.ledger.get("produced") else []
        written += [os.path.basename(path) for path in paths]
    return written


def _reward(record: Record, directory: str | os.PathLike[str]) -> str:
    figure, axes = new_figure("Reward", STEP, "mean reward of the batch (0 to 1)")
    steps = np.arange(1, record.steps + 1)
    window = max(1, min(WINDOW, record.steps // 5))
    means = np.convolve(record.rewards, np.ones(window) / window, mode="valid")
    axes.plot(steps, record.rewards, color=GREY, linewidth=1.2, marker="." if record.steps < 30 else "", label="batch")
    axes.plot(steps[window - 1 :], means, color=COLOURS[0], label=f"mean of the last {window}")
    for done in record.continued_after:
        axes.axvline(done + 0.5, color=INK, linestyle=":", linewidth=1.2)
    axes.set_ylim(0, 1)
    legend(figure, columns=2)
    return save(figure, directory, "reward")


def _staleness(record: Record, directory: str | os.PathLike[str]) -> str:
    figure, axes = new_figure(
        "Age of the tokens taken for training", "staleness of the token when trained (trainer steps)", "response tokens"
    )
    ages = sorted({age for step in record.ages for age, _, _ in step})
    trained = [sum(count for step in record.ages for at, count, _ in step if at == age) for age in ages]
    masked = [sum(count for step in record.ages for at, _, count in step if at == age) for age in ages]
    axes.bar(ages, trained, color=COLOURS[0], label="in the loss")
    axes.bar(ages, masked, bottom=trained, color=COLOURS[1], label="masked as stale")
    tallest = max(map(sum, zip(trained, masked, strict=True)), default=0)
    for age, first, second in zip(ages, trained, masked, strict=True):
        share = 100 * (first + second) / max(record.tokens, 1)
        axes.annotate(
            f"{share:.1f} %", (age, first + second), (0, 4), textcoords="offset points", ha="center", fontsize=12
        )
    axes.set_xticks(ages)
    axes.set_ylim(0, 1.1 * max(tallest, 1))
    axes.grid(visible=False, axis="x")
    tokens_axis(axes.yaxis)
    legend(figure, columns=2)
    return save(figure, directory, "staleness")


def _staleness_over_steps(record: Record, directory: str | os.PathLike[str]) -> str:
    figure, axes = new_figure(
        "Age of the tokens taken for training, over the run", STEP, "share of the batch's tokens (%)"
    )
    ages = sorted({age for step in record.ages for age, trained, _ in step if trained})
    columns = [part.tolist() for part in np.array_split(np.arange(record.steps), min(COLUMNS, record.steps))]
    middles = [1 + sum(column) / len(column) for column in columns]
    widths = [len(column) for column in columns]
    totals = [sum(trained + masked for at in column for _, trained, masked in record.ages[at]) for column in columns]
    bottom = np.zeros(len(columns))
    parts: list[tuple[str, Any, list[int]]] = [
        (f"staleness {age}", colour, [_count(record, column, age) for column in columns])
        for age, colour in zip(ages, shades(len(ages)), strict=True)
    ]
    parts.append(("masked as stale", COLOURS[1], [_count(record, column, None) for column in columns]))
    for label, colour, counts in parts:
        heights = 100 * np.divide(counts, np.maximum(totals, 1))
        axes.bar(middles, heights, widths, bottom=bottom, color=colour, label=label)
        bottom += heights
    axes.set_ylim(0, 100)
    axes.set_xlim(0.5, record.steps + 0.5)
    axes.grid(visible=False)
    legend(figure, columns=4)
    return save(figure, directory, "staleness-over-steps")


def _count(record: Record, steps: Sequence[int], age: int | None) -> int:
    """Tokens of some steps that were in the loss at an age; None: masked at any."""
    return sum(
        masked if age is None else trained
        for at in steps
        for found, trained, masked in record.ages[at]
        if age is None or found == age
    )


def _tokens(record: Record, directory: str | os.PathLike[str]) -> str:
    ledger = record.ledger
    uses = [("trained", ledger["trained"], COLOURS[0]), ("masked as stale", ledger["masked_stale"], COLOURS[1])]
    uses += [("masked by the task", ledger["masked_semantic"], GREY)] if ledger["masked_semantic"] else []
    uses += [(f"discarded:\n{reason}", count, COLOURS[3]) for reason, count in sorted(ledger["discarded"].items())]
    uses += [("still in the buffer", ledger["stored"], COLOURS[2]), ("in flight", ledger["in_flight"], COLOURS[2])]
    figure, axes = new_figure(
        f"Where {ledger['produced']:,} generated tokens went", "response tokens", "", height=1.8 + 0.6 * len(uses)
    )
    places = range(len(uses))
    axes.barh(places, [count for _, count, _ in uses], color=[colour for _, _, colour in uses])
    for at, (_, count, _) in zip(places, uses, strict=True):
        text = f"{count:,}  ({100 * count / ledger['produced']:.1f} %)"
        axes.annotate(text, (count, at), (6, 0), textcoords="offset points", va="center", fontsize=12)
    axes.set_yticks(list(places), [label for label, _, _ in uses])
    axes.set_ylim(len(uses) - 0.5, -0.5)
    axes.set_xlim(0, 1.4 * max(count for _, count, _ in uses))
    axes.grid(visible=False, axis="y")
    tokens_axis(axes.xaxis)
    return save(figure, directory, "tokens")


def _latency(record: Record, directory: str | os.PathLike[str]) -> str:
    title = "How long the event loop was away"
    if record.refreshes:
        title = f"What a refresh takes, and {title.lower()}"
    figure, axes = new_figure(title, STEP, "milliseconds")
    steps = np.arange(1, record.steps + 1)
    axes.plot(steps, record.gaps_ms, "^", markersize=5, color=GREY, label="longest gap of the loop (heartbeat: 5 ms)")
    refreshes = record.refreshes[: record.steps]
    for expired, colour, label in (
        (False, COLOURS[0], "refresh, nothing due"),
        (True, COLOURS[1], "refresh, groups expired"),
    ):
        chosen = [(at, us / 1e3) for at, (us, due) in enumerate(refreshes, 1) if bool(due) is expired]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), "o", markersize=4, color=colour, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))  # whole decades have numbers
    axes.set_xlim(0, record.steps + 1)
    legend(figure, columns=2)
    return save(figure, directory, "latency")
