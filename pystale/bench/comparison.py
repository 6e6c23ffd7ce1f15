"""Several ways to do the same work, checked to agree and then timed in turn."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["CLOCK", "Comparison", "Disagreement", "Pair", "Side", "Timing", "measure", "uncollected"]

LEAST_ROUNDS, MOST_ROUNDS = 3, 25
SAMPLE_S = 1e-3  # calls shorter than this are timed several at once
MOST_CALLS = 10_000
OURS = "pystale"
# Processor time, which does not count what else the machine does meanwhile: neighbours hit long calls, not short ones,
# and so would look like a gain. Where its ticks are too coarse (Windows), the wall clock.
CLOCK: Literal["process_time", "perf_counter"] = (
    "process_time" if time.get_clock_info("process_time").resolution <= 1e-6 else "perf_counter"
)
now = time.process_time if CLOCK == "process_time" else time.perf_counter


class Disagreement(RuntimeError):
    """Two ways to do the same work gave different results, so that their times say nothing."""


@dataclass(frozen=True)
class Side:
    """One way to do the work.

    Attributes
    ----------
    name : str
        ``"pystale"``, or what stands in its place.
    run : callable
        Does the work once and returns its result.
    of : str
        Size of the work, where a comparison has several; sides of the same size are compared.
    restore : callable, optional
        Undoes a call, untimed; gets what `run` returned.
    answer : callable, optional
        What to compare of the result; all of it by default.
    """

    name: str
    run: Callable[[], Any]
    of: str = ""
    restore: Callable[[Any], object] | None = None
    answer: Callable[[Any], Any] = field(default=lambda result: result)

    @property
    def ours(self) -> bool:
        """Whether this is pystale, and not what it is compared with."""
        return self.name == OURS


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one side: a value per round."""

    name: str
    of: str
    calls: int  # per round
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Pair:
    """A line of the table: one size of the work, one way to do it without pystale, and pystale."""

    what: str
    before: Timing
    ours: Timing

    @property
    def ratio(self) -> float:
        """How many times faster pystale is."""
        return self.before.median / self.ours.median


@dataclass(frozen=True)
class Comparison:
    """What was measured of one kind of work."""

    title: str
    timings: tuple[Timing, ...]

    @property
    def pairs(self) -> list[Pair]:
        """Every way without pystale beside pystale, size by size."""
        ours = {timing.of: timing for timing in self.timings if timing.name == OURS}
        return [
            Pair(self.title.replace("{}", timing.of), timing, ours[timing.of])
            for timing in self.timings
            if timing.name != OURS
        ]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, after a collection."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def measure(title: str, sides: Sequence[Side], seconds: float) -> Comparison:
    """Check that the sides agree, then time them in turn, A B A B, until the time is over.

    Parameters
    ----------
    title : str
        The work; ``{}`` stands for its size.
    sides : sequence of Side
    seconds : float
        Time for all rounds. There are at least three rounds, and at most 25.

    Raises
    ------
    Disagreement
        If the results differ; nothing is timed then.
    """
    calls = [_calls(side, title, sides) for side in sides]
    samples: list[list[float]] = [[] for _ in sides]
    end = time.perf_counter() + seconds
    with uncollected():  # a collection falls on whoever allocates next
        while len(samples[0]) < LEAST_ROUNDS or (len(samples[0]) < MOST_ROUNDS and time.perf_counter() < end):
            for side, number, found in zip(sides, calls, samples, strict=True):
                found.append(_sample(side, number))
    timings = (
        Timing(side.name, side.of, number, tuple(found))
        for side, number, found in zip(sides, calls, samples, strict=True)
    )
    return Comparison(title, tuple(timings))


def _calls(side: Side, title: str, sides: Sequence[Side]) -> int:
    """Compare a side with the first of its size, and find how many calls of it make a sample."""
    first = next(other for other in sides if other.of == side.of)
    result = side.run()
    got = side.answer(result)
    if side.restore is not None:
        side.restore(result)
    if first is not side:
        expected = first.run()
        if not np.array_equal(first.answer(expected), got):
            raise Disagreement(
                f"{title.replace('{}', side.of)}: {side.name} gives another result than {first.name}; nothing is timed"
            )
        if first.restore is not None:
            first.restore(expected)
    if side.restore is not None:
        return 1
    return max(1, min(MOST_CALLS, round(SAMPLE_S / max(_sample(side, 1), 1e-9))))


def _sample(side: Side, calls: int) -> float:
    """Seconds per call, of several calls in a row; a call before them brings into the caches what it needs."""
    run = side.run
    if calls > 1:
        run()
    began = now()
    for _ in range(calls):
        result = run()
    elapsed = now() - began
    if side.restore is not None:
        side.restore(result)
    return elapsed / calls
