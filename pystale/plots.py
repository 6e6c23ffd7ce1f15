"""How plots look: size, colours, axes with units. Drawn into memory and written as PNG; nothing is shown on a screen.

Fonts are large for the figure, so that a plot can be read at half its size. Colours can be told apart by colour-blind
readers (Okabe and Ito).
"""

import os
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["COLOURS", "GREY", "INK", "WIDTH", "legend", "new_figure", "save", "shades", "tokens_axis"]

WIDTH, HEIGHT, DPI = 9.0, 5.0, 140  # inches, inches, dots per inch
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
GREY, INK = "#BBBBBB", "#222222"
STYLE: Any = {
    "font.size": 13,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 1.0,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 9,
}


def new_figure(title: str, x: str, y: str, *, height: float = HEIGHT) -> tuple[Figure, Any]:
    """A figure with one pair of axes, whose labels `x` and `y` name the units. To be given to :func:`save`.

    Examples
    --------
    >>> figure, axes = new_figure("Reward", "trainer step", "mean reward (0 to 1)")
    >>> _ = axes.plot([1, 2, 3], [0.1, 0.2, 0.4], color=COLOURS[0], label="recorded")
    >>> axes.get_xlabel()
    'trainer step'
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return figure, axes


def legend(figure: Figure, *, columns: int = 3, title: str | None = None) -> None:
    """A legend below the axes, where there is something to explain."""
    (axes,) = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            title=title,
            frameon=False,
            fontsize=12,
            title_fontsize=12,
        )


def save(figure: Figure, directory: str | os.PathLike[str], name: str) -> str:
    """Write a figure as ``name.png``, replacing the one that is there; returns its path."""
    path = os.path.join(os.fspath(directory), f"{name}.png")
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format="png")
    figure.clear()
    return path


def shades(n: int) -> list[Any]:
    """`n` colours from light to dark, for what has an order."""
    colours = matplotlib.colormaps["viridis"].reversed()
    return [colours(0.08 + 0.84 * i / max(n - 1, 1)) for i in range(n)]


def tokens_axis(axis: Any) -> None:
    """Numbers of tokens as 0, 50k, 1.5M."""
    axis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
