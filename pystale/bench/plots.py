"""The plots of ``pystale bench --plot``."""

import os
from collections.abc import Sequence

from matplotlib.ticker import LogLocator

from pystale.bench.comparison import Comparison, Pair
from pystale.bench.table import duration, times
from pystale.plots import COLOURS, GREY, INK, legend, new_figure, save

__all__ = ["write_plots"]

KERNELS = ("mask", "is a token left")  # what titles of comparisons without a buffer begin with


def write_plots(comparisons: Sequence[Comparison], directory: str | os.PathLike[str]) -> list[str]:
    """Write ``kernels.png``, ``buffer.png`` and ``stored.png``, each if it was measured; returns their paths.

    Raises
    ------
    OSError
        If a file cannot be written.
    """
    kernels = [pair for each in comparisons if each.title.startswith(KERNELS) for pair in each.pairs]
    buffer = [pair for each in comparisons if not each.title.startswith(KERNELS) for pair in each.pairs]
    stored = [each for each in comparisons if "{} groups" in each.title and len(each.pairs) > 1]
    written = []
    if kernels:
        written.append(_ratios("Masks: pystale beside other ways", kernels, directory, "kernels"))
    if buffer:
        written.append(_ratios("Replay buffer: pystale beside other ways", buffer, directory, "buffer"))
    if stored:
        written.append(_stored(stored, directory))
    return written


def _ratios(title: str, pairs: Sequence[Pair], directory: str | os.PathLike[str], name: str) -> str:
    """A bar for each line of the table."""
    figure, axes = new_figure(
        "",
        "times faster than without pystale (logarithmic)",
        "",
        height=1.7 + 0.56 * len(pairs),
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
    ratios, places = [pair.ratio for pair in pairs], range(len(pairs))
    axes.barh(places, [ratio - 1 for ratio in ratios], 0.62, left=1, color=COLOURS[0])
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *ratios) / 1.2, max(10.0, *ratios) * 30)
    axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}x")
    for at, ratio in zip(places, ratios, strict=True):
        axes.annotate(
            times(ratio), (max(ratio, 1.0), at), (6, 0), textcoords="offset points", va="center", fontsize=11.5
        )
    axes.set_yticks(list(places), [_label(pair) for pair in pairs], fontsize=11)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return save(figure, directory, name)


def _label(pair: Pair) -> str:
    return (
        f"{pair.what}\n{pair.before.name}: {duration(pair.before.median)} $\\rightarrow$ {duration(pair.ours.median)}"
    )


def _stored(comparisons: Sequence[Comparison], directory: str | os.PathLike[str]) -> str:
    """Time against the number of groups stored."""
    figure, axes = new_figure("What a call costs as the buffer grows", "groups stored", "time per call", height=5.6)
    markers = "os^D"
    for comparison, marker in zip(comparisons, markers, strict=False):
        work = comparison.title.partition(" of ")[0]
        sizes = [int(pair.ours.of.replace(",", "")) for pair in comparison.pairs]
        for colour, style, name, seconds in (
            (GREY, "--", comparison.pairs[0].before.name, [pair.before.median for pair in comparison.pairs]),
            (COLOURS[0], "-", "pystale", [pair.ours.median for pair in comparison.pairs]),
        ):
            axes.plot(sizes, seconds, marker + style, color=colour, label=f"{work}: {name}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: duration(value))
    legend(figure, columns=2)
    return save(figure, directory, "stored")
