"""Counts that add up: the same numbers whether they were taken at once, poll by poll, or rank by rank.

A mean cannot be merged with a mean. What is kept here can: integers in, and Python's integers have no rounding and no
overflow, so merging is exact, associative and commutative, and merging parts equals counting their union.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Histogram", "Tally"]


class Tally:
    """Count, sum, minimum and maximum of integers.

    Attributes
    ----------
    count : int
        Values added.
    sum : int
    min, max : int or None
        None without values.

    Notes
    -----
    Not synchronised: one thread at a time.

    Examples
    --------
    >>> from pystale.accumulators import Tally
    >>> first, second = Tally([3, 5]), Tally([10])
    >>> first + second
    Tally(count=3, sum=18, min=3, max=10)
    >>> (first + second).mean, first.mean
    (6.0, 4.0)
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("count", "max", "min", "sum")

    def __init__(self, values: ArrayLike = ()) -> None:
        self.count = 0
        self.sum = 0
        self.min: int | None = None
        self.max: int | None = None
        self.add(values)

    @property
    def mean(self) -> float | None:
        """``sum / count``, rounded once; None without values."""
        return self.sum / self.count if self.count else None

    def add(self, values: ArrayLike) -> None:
        """Add integers.

        Parameters
        ----------
        values : int or array_like of int, any shape

        Raises
        ------
        TypeError
            For anything but integers: sums of floats depend on the order they are added in.
        """
        array = as_integers("values", values)
        if array.size:
            self._include(array.size, exact_sum(array), int(array.min()), int(array.max()))

    def merge(self, other: "Tally") -> None:
        """Add what `other` has counted, which stays as it is."""
        if not isinstance(other, Tally):
            raise TypeError(f"a Tally merges with a Tally, got {type(other).__name__}; read dicts with Tally.from_dict")
        if other.count and other.min is not None and other.max is not None:
            self._include(other.count, other.sum, other.min, other.max)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can write, for sending to another process."""
        return {"count": self.count, "sum": self.sum, "min": self.min, "max": self.max}

    @classmethod
    def from_dict(cls, saved: Any) -> "Tally":
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        ValueError
            For anything no Tally can have written.
        """
        tally = cls()
        fields = read_fields("tally", saved, ("count", "sum", "min", "max"))
        count, total = read_int("tally: count", fields["count"], at_least=0), read_int("tally: sum", fields["sum"])
        if count:
            low, high = read_int("tally: min", fields["min"]), read_int("tally: max", fields["max"])
            tally._include(count, total, low, high)
            # One value is the minimum, another (or the same, if alone) the maximum, and the others lie between.
            if not (low <= high and low * (count - 1) + high <= total <= high * (count - 1) + low):
                raise ValueError(f"tally: no {count} integers have the sum, min and max of {saved!r}")
        elif total != 0 or fields["min"] is not None or fields["max"] is not None:
            raise ValueError(f"tally: count is 0, so sum must be 0 and min and max None, got {saved!r}")
        return tally

    def _include(self, count: int, total: int, low: int, high: int) -> None:
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)
        self.count += count
        self.sum += total

    def __add__(self, other: "Tally") -> "Tally":
        if not isinstance(other, Tally):
            return NotImplemented
        both = Tally()
        both.merge(self)
        both.merge(other)
        return both

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Tally) else NotImplemented

    def __repr__(self) -> str:
        return f"Tally(count={self.count}, sum={self.sum}, min={self.min}, max={self.max})"


class Histogram:
    """How often each integer occurred: every percentile of the union, exactly, after any merging.

    Its size is that of the distinct values, so it is for quantities that take few of them, such as the staleness of
    tokens, of which there is one value per weight version.

    Attributes
    ----------
    counts : dict of int to int
        Occurrences of each value; at least 1.

    Notes
    -----
    Not synchronised: one thread at a time.

    Examples
    --------
    >>> from pystale.accumulators import Histogram
    >>> tokens = Histogram({0: 900, 1: 90, 7: 10})
    >>> tokens.mean, tokens.percentile(50), tokens.percentile(99), tokens.percentile(99.5)
    (0.16, 0, 1, 7)
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | Iterable[tuple[int, int]] = ()) -> None:
        self.counts: dict[int, int] = {}
        for value, n in counts.items() if isinstance(counts, Mapping) else counts:
            self.add(value, n)

    @property
    def count(self) -> int:
        """Occurrences in all."""
        return sum(self.counts.values())

    @property
    def sum(self) -> int:
        """Sum over all occurrences."""
        return sum(value * n for value, n in self.counts.items())

    @property
    def mean(self) -> float | None:
        """``sum / count``, rounded once; None without values."""
        return self.sum / self.count if self.counts else None

    @property
    def min(self) -> int | None:
        """Smallest value, None without any."""
        return min(self.counts, default=None)

    @property
    def max(self) -> int | None:
        """Largest value, None without any."""
        return max(self.counts, default=None)

    def percentile(self, q: float) -> int | None:
        """Smallest value that at least `q` percent of the occurrences do not exceed; None without values.

        Always a value that occurred, never one between two (NumPy's method ``inverted_cdf``).

        Parameters
        ----------
        q : float
            From 0 (the minimum) to 100 (the maximum).

        Raises
        ------
        ValueError
            For `q` outside of 0 to 100.
        """
        if not 0 <= q <= 100:
            raise ValueError(f"q must be between 0 and 100 percent, got {q}")
        # As the fraction it was written as: 0.55 * count in floats can pass an occurrence it should stop at.
        needed = (Fraction(q) if isinstance(q, int) else Fraction(repr(float(q)))) * self.count / 100
        seen = 0
        for value in sorted(self.counts):
            seen += self.counts[value]
            if seen >= needed:
                return value
        return None

    def add(self, value: int, n: int = 1) -> None:
        """Count `value` another `n` times.

        Raises
        ------
        TypeError, ValueError
            If `value` or `n` is no int, or `n` is negative.
        """
        for name, given in (("value", value), ("n", n)):
            if isinstance(given, (bool, np.bool_)) or not isinstance(given, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {type(given).__name__} {given!r}")
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if n:
            self.counts[int(value)] = self.counts.get(int(value), 0) + int(n)

    def merge(self, other: "Histogram") -> None:
        """Add what `other` has counted, which stays as it is."""
        if not isinstance(other, Histogram):
            raise TypeError(
                f"a Histogram merges with a Histogram, got {type(other).__name__}; read dicts with Histogram.from_dict"
            )
        for value, n in list(other.counts.items()):
            self.counts[value] = self.counts.get(value, 0) + n

    def to_dict(self) -> dict[str, Any]:
        """What JSON can write, for sending to another process: ``{"counts": [[value, n], ...]}``, values ascending."""
        return {"counts": [[value, n] for value, n in sorted(self.counts.items())]}

    @classmethod
    def from_dict(cls, saved: Any) -> "Histogram":
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        ValueError
            For anything no Histogram can have written.
        """
        histogram = cls()
        pairs = read_fields("histogram", saved, ("counts",))["counts"]
        if not isinstance(pairs, (list, tuple)):
            raise ValueError(f"histogram: counts must be a list of [value, n], got {pairs!r}")
        for at, pair in enumerate(pairs):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise ValueError(f"histogram: counts[{at}] must be [value, n], got {pair!r}")
            value = read_int(f"histogram: value of counts[{at}]", pair[0])
            n = read_int(f"histogram: n of counts[{at}]", pair[1], at_least=1)
            if value in histogram.counts:
                raise ValueError(f"histogram: counts[{at}] is for value {value}, which is there already")
            histogram.counts[value] = n
        return histogram

    def __add__(self, other: "Histogram") -> "Histogram":
        if not isinstance(other, Histogram):
            return NotImplemented
        both = Histogram()
        both.merge(self)
        both.merge(other)
        return both

    def __eq__(self, other: object) -> bool:
        return self.counts == other.counts if isinstance(other, Histogram) else NotImplemented

    def __repr__(self) -> str:
        return f"Histogram({dict(sorted(self.counts.items()))})"


def as_integers(name: str, values: ArrayLike) -> NDArray[np.integer[Any]]:
    """`values` as an array of integers of any width; nothing else is accepted."""
    array = np.asarray(values)
    if array.size == 0:  # an empty list is an array of floats
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers that fit 64 bits, got dtype {array.dtype}")
    return array


def exact_sum(array: NDArray[np.integer[Any]]) -> int:
    """Sum of a non-empty array of integers, whatever its dtype could hold."""
    bound = max(abs(int(array.min())), abs(int(array.max())))
    if bound * array.size < 2**63:
        return int(array.sum(dtype=np.int64))
    return sum(array.ravel().tolist())


def read_fields(what: str, saved: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """`saved` as a mapping of exactly these names."""
    expected = sorted(names)
    if not isinstance(saved, Mapping) or sorted(map(str, saved)) != expected:
        raise ValueError(f"{what}: expected a mapping of {', '.join(expected)}, got {saved!r}")
    return saved


def read_int(what: str, value: Any, *, at_least: int | None = None) -> int:
    """`value` as the int it must be in a document; JSON has no bools or floats where these wrote an int."""
    if type(value) is not int:
        raise ValueError(f"{what} must be an int, got {type(value).__name__} {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{what} must be at least {at_least}, got {value}")
    return value
