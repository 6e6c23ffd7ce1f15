"""Plots of a replay: how old what is trained is, where tokens went, and what one costs the other."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pystale.plots import COLOURS, GREY, INK, legend, new_figure, save, shades, tokens_axis
from pystale.replay.outcome import Outcome, mean_of
from pystale.replay.table import setting_name

__all__ = ["write_plots"]

# Ages from this on share a colour, and no more lines than these are told apart.
MOST_AGES = 6
MOST_LINES = 6
MARKERS = "os^Dv"
SETTING = "max staleness / max token staleness"


def write_plots(outcomes: Sequence[Outcome], directory: str | os.PathLike[str]) -> list[str]:
    """Write all plots to a directory; returns their paths.

    Parameters
    ----------
    outcomes : sequence of Outcome
        The recorded one first.
    directory : path
        Must exist.

    Raises
    ------
    OSError
        If one cannot be written.
    """
    figures = {
        "staleness": _staleness(outcomes),
        "tokens": _tokens(outcomes),
        "staleness-over-steps": _over_steps(outcomes),
        "trade-off": _trade_off(outcomes),
    }
    return [save(figure, directory, name) for name, figure in figures.items()]


def _label(outcome: Outcome) -> str:
    sequence, token = setting_name(outcome)
    return f"{sequence.removesuffix('*')} / {token}" + (" (recorded)" if outcome.setting.recorded else "")


def _bars(outcomes: Sequence[Outcome], title: str, x: str, parts: Sequence[tuple[str, Any, list[float]]]) -> Any:
    """A bar for every setting, in parts: label, colour, and a length for each setting."""
    figure, axes = new_figure(title, x, SETTING, height=2.2 + 0.42 * len(outcomes))
    places, left = np.arange(len(outcomes)), np.zeros(len(outcomes))
    for label, colour, lengths in parts:
        axes.barh(places, lengths, left=left, color=colour, label=label, height=0.72, edgecolor="white", linewidth=0.6)
        left += np.array(lengths)
    axes.set_yticks(places, [_label(outcome) for outcome in outcomes])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.03 * max(*left, 1e-9))
    legend(figure)
    return figure, axes


def _staleness(outcomes: Sequence[Outcome]) -> Any:
    ages = sorted({age for outcome in outcomes for age in outcome.token_staleness})
    shown = ages if len(ages) <= MOST_AGES else ages[: MOST_AGES - 1]
    parts = []
    for age, colour in zip(shown, shades(max(len(shown), 2)), strict=False):
        parts.append(
            (f"stale by {age} step{'s' * (age != 1)}", colour, [_share(o, o.token_staleness[age]) for o in outcomes])
        )
    if len(ages) > len(shown):
        rest = [_share(o, sum(n for age, n in o.token_staleness.items() if age not in shown)) for o in outcomes]
        parts.append((f"stale by {ages[len(shown)]} to {ages[-1]} steps", INK, rest))
    figure, axes = _bars(outcomes, "How stale the trained tokens are", "share of the tokens in the loss (%)", parts)
    axes.set_xlim(0, 100)
    return figure


def _share(outcome: Outcome, tokens: int) -> float:
    return 100 * tokens / max(sum(outcome.token_staleness.values()), 1)


def _tokens(outcomes: Sequence[Outcome]) -> Any:
    ledgers = [outcome.ledger for outcome in outcomes]
    expired = [outcome.expired_tokens for outcome in outcomes]
    discarded = [sum(ledger["discarded"].values()) for ledger in ledgers]
    parts: list[tuple[str, Any, list[float]]] = [
        ("trained", COLOURS[0], [ledger["trained"] for ledger in ledgers]),
        ("wasted: masked as stale", COLOURS[1], [ledger["masked_stale"] for ledger in ledgers]),
        ("wasted: expired", COLOURS[3], [float(tokens) for tokens in expired]),
        ("wasted: otherwise", COLOURS[4], [d - e for d, e in zip(discarded, expired, strict=True)]),
        ("masked by the task", COLOURS[5], [ledger["masked_semantic"] for ledger in ledgers]),
        ("still there", GREY, [ledger["stored"] + ledger["in_flight"] for ledger in ledgers]),
    ]
    kept = [part for i, part in enumerate(parts) if i < 2 or any(part[2])]
    figure, axes = _bars(outcomes, "Where the generated tokens went", "tokens", kept)
    tokens_axis(axes.xaxis)
    return figure


def _over_steps(outcomes: Sequence[Outcome]) -> Any:
    figure, axes = new_figure(
        "Staleness over the run", "trainer step", "mean staleness of the tokens\nin the loss (trainer steps)"
    )
    curves: dict[Any, list[str]] = {}
    for outcome in outcomes:
        points = [(batch.train_step, batch.staleness) for batch in outcome.batches if batch.staleness is not None]
        if points:
            curves.setdefault(tuple(points), []).append(_label(outcome))
    chosen, longest = list(curves.items())[:MOST_LINES], max(map(len, curves), default=0)
    for number, (points, labels) in enumerate(chosen):
        steps, means = zip(*points, strict=True)
        style = {"marker": "o" if longest < 40 else "", "markersize": 5, "color": COLOURS[number]}
        axes.plot(steps, means, label=_joined(labels), zorder=9 - number, **style)
    axes.set_ylim(bottom=min(0, *axes.get_ylim()))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(curves) > len(chosen):
        axes.set_title(f"Staleness over the run ({len(chosen)} of {len(curves)} different curves)", loc="left")
    legend(figure, columns=2, title=SETTING)
    return figure


def _joined(labels: Sequence[str]) -> str:
    return ", ".join(labels) if len(labels) <= 3 else f"{labels[0]} and {len(labels) - 1} more"


def _trade_off(outcomes: Sequence[Outcome]) -> Any:
    figure, axes = new_figure(
        "What freshness costs",
        "mean staleness of the tokens in the loss (trainer steps)",
        "trained share of the tokens\ntrained or wasted (%)",
    )
    curves: dict[str, list[tuple[float, float, str]]] = {}
    for outcome in outcomes:
        mean = mean_of(outcome.token_staleness)
        if mean is None:
            continue
        trained = outcome.ledger["trained"]
        point = (mean, 100 * trained / (trained + outcome.wasted))
        sequence, token = setting_name(outcome)
        if outcome.setting.recorded:
            axes.plot(*point, marker="*", markersize=26, color=GREY, linestyle="", label="recorded", zorder=1)
        else:
            curves.setdefault(token, []).append((*point, sequence))
    for number, (token, points) in enumerate(curves.items()):
        # Points of several curves may coincide: later ones are smaller.
        style = {"marker": MARKERS[number % len(MARKERS)], "markersize": max(14 - 3 * number, 5)}
        xs, ys, _ = zip(*points, strict=True)
        axes.plot(
            xs,
            ys,
            color=COLOURS[number % len(COLOURS)],
            label=f"max token staleness {token}",
            zorder=3 + number,
            **style,
        )
    axes.set_ylim(0, 105)
    axes.margins(x=0.1)
    low, high = axes.get_xlim()
    near: list[list[tuple[float, float, str]]] = []  # points whose names would overlap
    for x, y, name in (point for points in curves.values() for point in points):
        for points in near:
            if any(abs(x - there[0]) < (high - low) / 16 and abs(y - there[1]) < 8 for there in points):
                points.append((x, y, name))
                break
        else:
            near.append([(x, y, name)])
    for points in near:
        x, y, _ = max(points)
        names = ", ".join(dict.fromkeys(name for _, _, name in points))
        axes.annotate(names, (x, y), xytext=(12, -5), textcoords="offset points", fontsize=12, color=INK, zorder=20)
    legend(figure, columns=2, title="numbers at the points: max staleness" if curves else None)
    return figure
