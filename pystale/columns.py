"""Typed columns: where the arrays, lists and model steps of many groups lie end to end.

The format is written down in :mod:`pystale.checkpoint`. An entry belongs to the field it stands in and to a kind; the
entries of one (field, kind) are used up in the order in which they were added.
"""

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from pystale._objects import ModelSteps
from pystale.state import RolloutState

__all__ = ["FIELDS", "Array", "Column", "ColumnReader", "Columns", "Entries", "Malformed", "array_kind", "scalar_kind"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

Entries: TypeAlias = dict[tuple[str, str], tuple[list[bytes], list[int]]]
"""(field, kind) to values in native byte order, in pieces, and the shapes of the entries, one after the other."""

FIELDS = tuple(RolloutState.__dataclass_fields__)
"""Names of the fields of a state, in the order they are written."""

# Longest list, in elements, that is made or copied without letting other threads run: about a millisecond.
LIST_STRIDE = 1 << 16

_DTYPES = {
    np.dtype(order + code): order + code
    for order in "<>"
    for code in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8")
} | {np.dtype(code): code for code in ("|i1", "|u1", "|b1")}
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
_SCALARS = {dtype.type: "scalar." + name for dtype, name in _DTYPES.items() if name[0] != ">"}
_LISTS = {"ints": np.dtype(np.int64), "floats": np.dtype(np.float64), "bools": np.dtype(np.bool_)}
_NATIVE = _LISTS | {"runs": np.dtype(np.int64), "bytes": np.dtype(np.uint8)}
_ARRAY_KIND = re.compile(r"array\.([<>|][iufb][1248])\.([0-9]|[1-6][0-9])")
_SIGNED = (np.int8, np.int16, np.int32, np.int64)


class Malformed(ValueError):
    """What was read is not what the format allows."""


def array_kind(values: Array) -> str | None:
    """Kind of the column an array goes to, None for a dtype that has none."""
    name = _DTYPES.get(values.dtype)
    return name and f"array.{name}.{values.ndim}"


def scalar_kind(kind: type) -> str | None:
    """Kind of the column a NumPy scalar of this type goes to, None for other types."""
    return _SCALARS.get(kind)


def _narrow(values: Array) -> Array:
    """The same integers in the smallest signed dtype that holds them all."""
    if not values.size:
        return values.astype(np.int8)
    low, high = int(values.min()), int(values.max())
    return values.astype(next(d for d in _SIGNED if np.iinfo(d).min <= low and high <= np.iinfo(d).max))


class Columns:
    """Columns of one shard, gathered from the entries of groups.

    Not safe for use from several threads at once.
    """

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], tuple[list[bytes], array[int]]] = {}

    def extend(self, entries: Entries) -> None:
        """Append the entries of a group."""
        for key, (pieces, shapes) in entries.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = ([], array("q"))
            column[0].extend(pieces)
            column[1].fromlist(shapes)

    def tensors(self) -> Iterable[tuple[str, Array]]:
        """Name and values of every tensor, integers in the smallest dtype that holds them."""
        for (field, kind), (pieces, shapes) in self._columns.items():
            matched = _ARRAY_KIND.fullmatch(kind)
            native = _NATIVE.get(kind) or _NAMED[kind.split(".")[1]].newbyteorder("=")
            values: Array = np.frombuffer(b"".join(pieces), native)
            if kind in ("ints", "runs"):
                values = _narrow(values)
            yield f"{field}:{kind}", values.reshape(-1, 2) if kind == "runs" else values
            ndim = int(matched[2]) if matched else 1 if kind in _NATIVE else 0
            if ndim:
                yield f"{field}:{kind}:shapes", _narrow(np.frombuffer(shapes, np.int64)).reshape(-1, ndim)


class Column:
    """Entries of one column, handed out in order.

    Parameters
    ----------
    kind : str
        What an entry is.
    values : ndarray
        Values of all entries.
    shapes : ndarray of int, shape (entries, ndim), or None
        Their lengths.

    Raises
    ------
    Malformed
        When the three do not fit each other.
    """

    __slots__ = ("_cursor", "_dtype", "_kind", "_offsets", "_shapes", "_values")

    def __init__(self, kind: str, values: Array, shapes: Array | None) -> None:
        matched = _ARRAY_KIND.fullmatch(kind)
        scalar = kind.startswith("scalar.")
        name = matched[1] if matched else kind[len("scalar.") :] if scalar else None
        if (name is None and kind not in _NATIVE) or (name is not None and name not in _NAMED):
            raise Malformed("is of an unknown kind")
        self._dtype = _NATIVE[kind] if name is None else _NAMED[name]
        fits = values.dtype.kind in "iu" if kind in ("ints", "runs") else values.dtype == self._dtype.newbyteorder("=")
        if not fits or values.ndim != (2 if kind == "runs" else 1) or (kind == "runs" and values.shape[1] != 2):
            raise Malformed(f"has dtype {values.dtype} and shape {values.shape}, which is not what its kind has")
        ndim = int(matched[2]) if matched else 0 if scalar else 1
        self._shapes: list[list[int]] | None = None
        self._offsets: Sequence[int] = range(len(values) + 1)
        if (shapes is None) != (ndim == 0):
            raise Malformed("has no shapes" if ndim else "has shapes, which its kind does not have")
        if shapes is not None:
            if shapes.dtype.kind not in "iu" or shapes.ndim != 2 or shapes.shape[1] != ndim:
                raise Malformed(f"has shapes that are not rows of {ndim} integers")
            if shapes.size and int(shapes.min()) < 0:
                raise Malformed("has a negative length in its shapes")
            if ndim > 1:
                self._shapes = shapes.tolist()
            sizes = shapes[:, 0].tolist() if self._shapes is None else map(math.prod, self._shapes)
            self._offsets = list(accumulate(sizes, initial=0))
            if self._offsets[-1] != len(values):
                raise Malformed(f"has {len(values)} values, its shapes ask for {self._offsets[-1]}")
        self._values = values
        self._kind = "array" if matched else "scalar" if scalar else "list" if kind in _LISTS else kind
        self._cursor = 0

    @property
    def left(self) -> int:
        """Entries not handed out yet."""
        return len(self._offsets) - 1 - self._cursor

    def take(self, count: int = 1) -> list[Any]:
        """The next `count` entries; nothing they hold is shared with the column."""
        first = self._cursor
        if count > self.left:
            raise Malformed("asks for more entries of a column than there are")
        self._cursor += count
        bounds = self._offsets[first : first + count + 1]
        start = bounds[0]
        if self._kind in ("list", "runs") and bounds[-1] - start <= LIST_STRIDE:
            flat = self._values[start : bounds[-1]].tolist()
            lists = [flat[i - start : j - start] for i, j in pairwise(bounds)]
            return lists if self._kind == "list" else list(map(_steps, lists))
        return [self._convert(self._values[i:j], first + at) for at, (i, j) in enumerate(pairwise(bounds))]

    def _convert(self, values: Array, index: int) -> Any:
        if self._kind == "array":
            # The copy is contiguous, so that giving it its shape copies nothing.
            copy = values.astype(self._dtype)
            shape = (-1,) if isinstance(self._offsets, list) else ()
            try:
                return copy.reshape(shape if self._shapes is None else self._shapes[index])
            except (ValueError, OverflowError) as fault:
                raise Malformed(f"has an array of an impossible shape: {fault}") from None
        if self._kind == "scalar":
            return values[0]
        if self._kind == "bytes":
            return values.tobytes()
        items: list[Any] = []
        for start in range(0, len(values), LIST_STRIDE):
            items.extend(values[start : start + LIST_STRIDE].tolist())
        return items if self._kind == "list" else _steps(items)


def _steps(runs: list[Any]) -> ModelSteps:
    total = 0
    for step, length in runs:
        total += length
        if length < 1 or total >= 2**63 or step >= 2**63:
            raise Malformed(f"has a run of {length} tokens of model step {step}")
    return ModelSteps.from_runs(runs)


class ColumnReader:
    """Columns of one shard.

    Parameters
    ----------
    tensors : mapping of str to ndarray
        All tensors of the shard, by name.

    Raises
    ------
    Malformed
        For a tensor that belongs to no field, or does not fit its kind or its shapes.
    """

    __slots__ = ("_columns",)

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._columns: dict[tuple[str, str], Column] = {}
        for name, values in tensors.items():
            if name.endswith(":shapes"):
                if name.removesuffix(":shapes") not in tensors:
                    raise Malformed(f"tensor {name!r:.80} has no values")
                continue
            field, _, kind = name.partition(":")
            if field not in ("header", "refs") and field not in FIELDS:
                raise Malformed(f"tensor {name!r:.80} belongs to no field")
            try:
                self._columns[field, kind] = Column(kind, values, tensors.get(name + ":shapes"))
            except Malformed as fault:
                raise Malformed(f"tensor {name!r:.80} {fault}") from None

    def column(self, field: str, kind: Any) -> Column:
        """The column of a kind of a field."""
        column = self._columns.get((field, kind)) if type(kind) is str else None
        if column is None:
            raise Malformed(f"names a column {kind!r:.80} that is not there")
        return column

    def finish(self) -> None:
        """Refuse entries that no line asked for."""
        for (field, kind), column in self._columns.items():
            if column.left:
                raise Malformed(f"column {field}:{kind} has {column.left} entries that no group uses")
