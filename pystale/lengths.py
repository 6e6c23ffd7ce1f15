"""What became of responses, by their length: whether long ones are trained as often as short ones.

Long responses are in flight for longer, so whatever drops old work drops them first. What is trained is then shorter
than what was generated, and a policy learns from the short answers only. Counts by length show it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pystale.accumulators import read_fields, read_int

__all__ = ["OUTCOMES", "LengthAccumulator", "LengthRow"]

OUTCOMES = ("trained", "expired", "failed", "filtered", "max_rerolls", "lost")


class LengthRow(NamedTuple):
    """Responses of ``at_least`` to ``at_most`` tokens, and their tokens."""

    at_least: int
    at_most: int
    produced_responses: int
    produced_tokens: int
    trained_responses: int
    trained_tokens: int


class LengthAccumulator:
    """Responses and their tokens by outcome and length, in buckets of a power of two.

    A response is counted once, when its story ends: it was ``trained``, whatever its mask, or its tokens were discarded
    (the ledger's reasons). What is stored or in flight is not counted yet, nor is a response that was restarted, which
    has its end before it. Bucket b holds the lengths of b binary digits: 1, 2 to 3, 4 to 7, and so on.

    Merging is exact: it adds integers.

    Notes
    -----
    Not synchronised: one thread at a time.

    Examples
    --------
    >>> from pystale.lengths import LengthAccumulator
    >>> first, second = LengthAccumulator(), LengthAccumulator()
    >>> first.add("trained", 3)
    >>> second.add("trained", 2)
    >>> second.add("expired", 9)
    >>> first.merge(second)
    >>> for row in first.rows():
    ...     print(row.at_least, row.at_most, row.trained_responses, row.produced_responses)
    2 3 2 2
    8 15 0 1
    >>> round(first.length_ratio, 3)  # what is trained is half as long as what was produced
    0.536
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, list[int]]] = {}  # outcome -> bucket -> [responses, tokens]

    def add(self, outcome: str, *tokens: int, sign: int = 1) -> None:
        """Count responses of so many tokens each, or count them no more where `sign` is -1; 0 tokens are none."""
        buckets = self._counts.get(outcome)
        if buckets is None:
            if outcome not in OUTCOMES:
                raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r}")
            buckets = self._counts[outcome] = {}
        for n in tokens:
            bucket = buckets.get(n.bit_length())
            if bucket is None:
                if not n:
                    continue
                bucket = buckets[n.bit_length()] = [0, 0]
            bucket[0] += sign
            bucket[1] += sign * n

    def responses(self, outcome: str | None = None) -> int:
        """Responses with an outcome, or with any."""
        return self._total(outcome, 0)

    def tokens(self, outcome: str | None = None) -> int:
        """Tokens of responses with an outcome, or with any."""
        return self._total(outcome, 1)

    def _total(self, outcome: str | None, which: int) -> int:
        return sum(counts[which] for name, _, counts in self._items() if outcome in (None, name))

    def rows(self) -> list[LengthRow]:
        """What was produced and what was trained, by length; shortest first, lengths that did not occur left out."""
        produced: dict[int, list[int]] = {}
        for _, bucket, (responses, tokens) in self._items():
            total = produced.setdefault(bucket, [0, 0])
            total[0] += responses
            total[1] += tokens
        trained = self._counts.get("trained", {})
        return [
            LengthRow(1 << (bucket - 1), (1 << bucket) - 1, *produced[bucket], *trained.get(bucket, (0, 0)))
            for bucket in sorted(produced)
        ]

    @property
    def length_ratio(self) -> float | None:
        """Mean length of what was trained over that of what was produced; None while nothing was trained.

        1.0: lengths are trained as they are produced. Below: long responses are dropped more often than short ones.
        """
        responses = self.responses("trained")
        if not responses:
            return None
        return self.tokens("trained") * self.responses() / (responses * self.tokens())

    def metrics(self, prefix: str = "training/lengths") -> dict[str, float]:
        """For a logger: ``{prefix}/ratio`` (see :attr:`length_ratio`) and, for every bucket,
        ``{prefix}/trained_fraction/{at_most}``, the share of its responses that were trained; ``{}`` without any."""
        ratio = self.length_ratio
        found = {} if ratio is None else {f"{prefix}/ratio": ratio}
        for row in self.rows():
            fraction = row.trained_responses / row.produced_responses
            found[f"{prefix}/trained_fraction/{row.at_most}"] = fraction
        return found

    def merge(self, other: "LengthAccumulator") -> None:
        """Add what `other` has counted, which stays as it is."""
        if not isinstance(other, LengthAccumulator):
            raise TypeError(
                f"a LengthAccumulator merges with a LengthAccumulator, got {type(other).__name__}; read dicts with "
                "LengthAccumulator.from_dict"
            )
        for outcome, bucket, (responses, tokens) in list(other._items()):
            counts = self._counts.setdefault(outcome, {}).setdefault(bucket, [0, 0])
            counts[0] += responses
            counts[1] += tokens

    def copy(self) -> "LengthAccumulator":
        """One that later counting leaves as it is."""
        return self + LengthAccumulator()

    def to_dict(self) -> dict[str, Any]:
        """What JSON can write: ``{"counts": [[outcome, binary digits, responses, tokens], ...]}``."""
        return {"counts": [[outcome, bucket, *counts] for outcome, bucket, counts in sorted(self._items())]}

    @classmethod
    def from_dict(cls, saved: Any) -> "LengthAccumulator":
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        ValueError
            For anything no LengthAccumulator can have written.
        """
        read = cls()
        rows = read_fields("lengths", saved, ("counts",))["counts"]
        if not isinstance(rows, (list, tuple)):
            raise ValueError(f"lengths: counts must be a list, got {rows!r:.80}")
        for at, row in enumerate(rows):
            where = f"lengths: counts[{at}]"
            if not isinstance(row, (list, tuple)) or len(row) != 4 or row[0] not in OUTCOMES:
                raise ValueError(f"{where} must be [outcome, binary digits, responses, tokens], got {row!r:.80}")
            bucket = read_int(f"{where}[1]", row[1], at_least=1)
            responses = read_int(f"{where}[2]", row[2], at_least=1)
            tokens = read_int(f"{where}[3]", row[3])
            if bucket > 63 or not responses << (bucket - 1) <= tokens < responses << bucket:
                raise ValueError(f"{where}: {responses} responses of {bucket} binary digits have no {tokens} tokens")
            buckets = read._counts.setdefault(row[0], {})
            if bucket in buckets:
                raise ValueError(f"{where} is there already")
            buckets[bucket] = [responses, tokens]
        return read

    def _items(self) -> Iterator[tuple[str, int, list[int]]]:
        for outcome, buckets in self._counts.items():
            for bucket, counts in buckets.items():
                if counts[0]:
                    yield outcome, bucket, counts

    def __add__(self, other: "LengthAccumulator") -> "LengthAccumulator":
        if not isinstance(other, LengthAccumulator):
            return NotImplemented
        both = LengthAccumulator()
        both.merge(self)
        both.merge(other)
        return both

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, LengthAccumulator) else NotImplemented

    def __repr__(self) -> str:
        trained: Mapping[str, int] = {name: self.responses(name) for name in OUTCOMES if self.responses(name)}
        return f"LengthAccumulator({dict(trained)})"
