"""What is measured, in which order, and what the time and the memory do not allow."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pystale.bench import buffers, kernels
from pystale.bench.buffers import BYTES_PER_GROUP, Stored
from pystale.bench.comparison import Comparison, Side, measure
from pystale.bench.machine import available_bytes

__all__ = ["SIZES", "Bench"]

SIZES = (10_000, 100_000, 1_000_000)  # groups stored
SHARE = 1 / 40  # of the time, for each comparison
RESERVE_S = 4.0  # for what is measured on the stored groups once they are there
MARGIN = 1.25  # memory that nobody has used yet is slower
FRACTION_OF_MEMORY = 0.5

KERNELS: tuple[tuple[str, Callable[[], list[Side]]], ...] = (
    ("mask of 32,768 tokens, int32", kernels.mask_of_an_array),
    ("mask of 32,768 tokens, lists", kernels.mask_of_a_list),
    ("mask of 32,768 tokens, ModelSteps of 3 versions", kernels.mask_of_runs),
    ("mask of 16.8M tokens, int32", kernels.mask_of_a_batch),
    ("is a token left to train? the last of {}", kernels.token_left),
    ("is a token left to train? none of a list of 32,768", kernels.no_token_left),
)
LONG_LISTS: tuple[tuple[str, Callable[[], list[Side]]], ...] = (
    ("put of 8 x 8,192 tokens in lists", buffers.put_of_long_lists),
    ("refresh of 64 groups x 8 x 8,192 tokens, nothing due", buffers.refresh_of_long_lists),
)
STORED: tuple[tuple[str, Callable[[Stored], list[Side]]], ...] = (
    ("refresh of {} groups, nothing due", buffers.refresh_of_stored),
    ("take of the 64 stalest of {} groups", buffers.take_of_stored),
)


@dataclass
class Bench:
    """A run of all comparisons, within `seconds`.

    Attributes
    ----------
    comparisons : list of Comparison
        What has been measured so far.
    left_out : list of str
        What has not been, and why.
    """

    seconds: float
    sizes: tuple[int, ...] = field(default_factory=lambda: SIZES)
    comparisons: list[Comparison] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, progress: Callable[[str, float], object] = lambda what, done: None) -> None:
        """Measure everything; what has been measured is kept if an exception ends it.

        Parameters
        ----------
        progress : callable
            Gets what is being done, and the share of the time that is over.

        Raises
        ------
        Disagreement
            If pystale and what it is compared with give different results.
        """
        began = time.perf_counter()
        self._end = began + self.seconds

        def report(what: str) -> None:
            progress(what, min((time.perf_counter() - began) / self.seconds, 1.0))

        for title, make in (*KERNELS, *LONG_LISTS):
            report(title.replace("{}", "N"))
            if time.perf_counter() < self._end:
                self._measure(title, make)
            else:
                self.left_out.append(f"{title.replace('{}', 'N')}: the time is over; --seconds gives more")
        stored = Stored()
        for size in self._sizes(stored):
            stored.fill(size, report)
        if stored.buffers:  # measured even where storing took longer than it should have
            for title, make_of in STORED:
                report(title.replace("{}", "N"))
                self._measure(title, functools.partial(make_of, stored))

    def _measure(self, title: str, make: Callable[[], list[Side]]) -> None:
        self.comparisons.append(measure(title, make(), SHARE * self.seconds))

    def _sizes(self, stored: Stored) -> Iterator[int]:
        """The sizes for which there are time and memory; asked for one after the other, as the earlier are filled."""
        for size in self.sizes:
            left = self._end - time.perf_counter() - RESERVE_S
            needed_s, needed_bytes = MARGIN * size * stored.seconds_per_group, size * BYTES_PER_GROUP
            available = available_bytes()
            if left <= 0:
                self.left_out.append(f"{size:,} groups stored: the time is over; --seconds gives more")
            elif needed_s > left:
                self.left_out.append(
                    f"{size:,} groups stored: storing them takes {needed_s:.0f} s, and {left:.0f} s are left; "
                    "--seconds gives more"
                )
            elif size > min(self.sizes) and (available is None or needed_bytes > FRACTION_OF_MEMORY * available):
                found = "is not known here" if available is None else f"of {available / 1e9:.1f} GB is too little"
                self.left_out.append(
                    f"{size:,} groups stored: this takes {needed_bytes / 1e9:.1f} GB; the memory {found}"
                )
            else:
                yield size
