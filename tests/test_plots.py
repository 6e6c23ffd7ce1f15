"""Plots: whatever there is to show, axes have names with units, what is drawn has a legend, and a PNG comes out."""

import subprocess
import sys
from collections import Counter

import pytest
from matplotlib.image import imread

from pystale.plots import COLOURS, new_figure, save, shades, tokens_axis
from pystale.replay import RECORDED, Outcome, WhatIf
from pystale.replay import plots as replay_plots
from pystale.replay.outcome import Batch


def outcome(setting, ages, *, steps=3, discarded=0):
    total = sum(ages.values())
    made = Outcome(setting, {"": setting.max_staleness or 0}, {"": setting.max_token_staleness})
    made.ledger = {
        "produced": total + discarded,
        "trained": total,
        "masked_stale": 0,
        "masked_semantic": 0,
        "discarded": Counter({"expired": discarded} if discarded else {}),
        "stored": 0,
        "in_flight": 0,
    }
    made.token_staleness = Counter(ages)
    made.batches = [Batch(step, total, 0, 0.5 + step / 7 + len(ages)) for step in range(1, steps + 1)]
    return made


NOTHING = outcome(RECORDED, {}, steps=0)
RECORDED_RUN = outcome(RECORDED, {0: 700, 1: 300}, discarded=50)
MANY = [
    outcome(WhatIf(n, limit), {age: 10 + age * n for age in range(n + 1)}, steps=60, discarded=100 * n)
    for n in range(9)
    for limit in (None, 0, 1)
]


def figures(outcomes, monkeypatch):
    """Figures by name, instead of files."""
    found = {}
    monkeypatch.setattr(replay_plots, "save", lambda figure, directory, name: found.setdefault(name, figure) and name)
    replay_plots.write_plots(outcomes, "nowhere")
    return found


@pytest.mark.parametrize(
    "outcomes",
    [[NOTHING], [RECORDED_RUN], [NOTHING, outcome(WhatIf(0, None), {})], [RECORDED_RUN, *MANY]],
    ids=["nothing", "recorded", "nothing of two", "many"],
)
def test_every_plot_says_what_it_shows(outcomes, monkeypatch):
    found = figures(outcomes, monkeypatch)
    assert list(found) == ["staleness", "tokens", "staleness-over-steps", "trade-off"]
    for figure in found.values():
        (axes,) = figure.axes
        assert axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        drawn = axes.get_legend_handles_labels()[1]
        shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert shown == drawn
        assert len(drawn) == len(set(drawn)) or not drawn
    units = [found[name].axes[0].get_xlabel() for name in found]
    assert units == [
        "share of the tokens in the loss (%)",
        "tokens",
        "trainer step",
        "mean staleness of the tokens in the loss (trainer steps)",
    ]


def test_bars_are_the_numbers(monkeypatch):
    found = figures([RECORDED_RUN, outcome(WhatIf(0, None), {0: 400}, discarded=600)], monkeypatch)
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in found["tokens"].axes[0].containers}
    assert widths == {"trained": [1000, 400], "wasted: masked as stale": [0, 0], "wasted: expired": [50, 600]}
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in found["staleness"].axes[0].containers}
    assert widths == {"stale by 0 steps": [70.0, 100.0], "stale by 1 step": [30.0, 0.0]}


def test_old_ages_share_a_part(monkeypatch):
    found = figures([outcome(RECORDED, dict.fromkeys(range(20), 10))], monkeypatch)
    bars = found["staleness"].axes[0].containers
    assert bars[-1].get_label() == "stale by 5 to 19 steps"
    assert sum(bar.get_width() for part in bars for bar in part) == pytest.approx(100)


def test_equal_curves_are_drawn_once_and_no_more_than_can_be_told_apart(monkeypatch):
    axes = figures([RECORDED_RUN, outcome(WhatIf(7, None), {0: 1, 1: 2})], monkeypatch)["staleness-over-steps"].axes[0]
    assert [line.get_label() for line in axes.lines] == ["0 / none (recorded), 7 / none"]
    axes = figures([RECORDED_RUN, *MANY], monkeypatch)["staleness-over-steps"].axes[0]
    assert len(axes.lines) == replay_plots.MOST_LINES
    assert "6 of 10 different curves" in axes.get_title(loc="left")


def test_files(tmp_path):
    for path in replay_plots.write_plots([RECORDED_RUN, *MANY[:4]], tmp_path):
        height, width, _ = imread(path).shape
        assert 1000 < width < 2000
        assert 500 < height < 2000


def test_a_figure_leaves_no_trace_in_matplotlib(tmp_path):
    code = """
import sys, matplotlib
def settings():  # without looking up the backend, which would choose one
    return {name: str(dict.__getitem__(matplotlib.rcParams, name)) for name in matplotlib.rcParams}
before = settings()
from pystale.plots import new_figure, save
figure, axes = new_figure("A", "x (s)", "y (s)")
axes.plot([1, 2], [3, 4])
assert save(figure, sys.argv[1], "name").endswith("name.png")
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules  # so no backend was chosen, and no figure is kept
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)


def test_a_plot_replaces_the_one_before(tmp_path):
    (tmp_path / "a.png").write_text("old")
    figure, _ = new_figure("A", "x", "y")
    save(figure, tmp_path, "a")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_colours_and_numbers():
    assert len(set(COLOURS)) == len(COLOURS)
    assert len(set(shades(6))) == 6
    assert len(shades(1)) == 1
    figure, axes = new_figure("A", "x", "y")
    axes.set_xlim(0, 2_000_000)
    tokens_axis(axes.xaxis)
    figure.draw_without_rendering()
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["0", "250k", "500k"]
