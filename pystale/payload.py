"""How the states of one group become a line of JSON and entries in typed columns, and back.

The format is written down in :mod:`pystale.checkpoint`. Nothing here touches a file, and nothing that is read is ever
executed: JSON gives the structure, columns of plain numbers give the rest.
"""

import json
import math
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import numpy as np

from pystale._objects import ModelSteps
from pystale.state import RolloutState, Status

__all__ = [
    "FIELDS",
    "ColumnReader",
    "Columns",
    "EncodedGroup",
    "Malformed",
    "decode_document",
    "decode_group",
    "dump_json",
    "encode_document",
    "encode_group",
    "parse_json",
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

FIELDS = tuple(RolloutState.__dataclass_fields__)
"""Names of the fields of a state, in the order they are written."""

# Containers inside one field; more is refused on both sides, so neither side can run out of stack.
MAX_DEPTH = 100
# A nested list shorter than this stays in the JSON, where it can be read.
_SHORT = 16
# Longest stretch of a list, in elements, and of an array, in bytes, that is copied without letting other threads run.
_LIST_STRIDE = 1 << 16
_ARRAY_STRIDE = 1 << 20

_DTYPES = {
    np.dtype(order + code): order + code
    for order in "<>"
    for code in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8")
} | {np.dtype(code): code for code in ("|i1", "|u1", "|b1")}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
_SCALARS = {dtype.type: "scalar." + name for dtype, name in _DTYPES.items() if dtype.isnative}
_ARRAY_KIND = re.compile(r"array\.([<>|][iufb][1248])\.([0-9]|[1-6][0-9])")
_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_HEX_DOUBLE = re.compile(r"[0-9a-f]{16}")

_NONE = {type(None)}
_INTEGERS: frozenset[type] = frozenset({int, *(kind for kind in _SCALARS if issubclass(kind, np.integer))})
_IDS: frozenset[type] = _INTEGERS | {str, type(None)}
_SEQUENCES: frozenset[type] = frozenset({list, tuple, np.ndarray, type(None)})
# What the library itself computes with must have a type it can compute with, when written and when read.
_ALLOWED: dict[str, frozenset[type]] = {
    **dict.fromkeys(("rollout_id", "group_id", "session_id"), _IDS),
    **dict.fromkeys(("prompt_ids", "tokens", "response_ids", "response_mask", "logprobs"), _SEQUENCES),
    **dict.fromkeys(("input_ids", "labels", "position_ids"), _SEQUENCES),
    "task_name": frozenset({str, type(None)}),
    "prompt_model_step": _INTEGERS | {type(None)},
    "response_model_steps": _SEQUENCES | {ModelSteps},
    "status": frozenset({Status, str}),
    "seq_staleness": _INTEGERS,
    "rerolls": _INTEGERS,
    "extra_fields": frozenset({dict, type(None)}),
}
# Left out of a line when every member has this value.
_DEFAULTS: dict[str, tuple[set[type], Callable[[Any], bool]]] = {
    "seq_staleness": ({int}, lambda value: value == 0),
    "rerolls": ({int}, lambda value: value == 0),
    "extra_fields": ({dict}, lambda value: not value),
}
_GETTERS = [(name, attrgetter(name), _ALLOWED.get(name), _DEFAULTS.get(name)) for name in FIELDS]


class Malformed(ValueError):
    """What was read is not what the format allows."""


class _Unstorable(Exception):
    """A value that cannot be written, and where it is."""

    def __init__(self, path: Any, what: str) -> None:
        steps: list[str] = []
        while path is not None:
            path, key = path
            steps.append(f"[{key!r}]")
        self.where = "".join(reversed(steps))
        self.what = what


class EncodedGroup:
    """One group as it was when it was encoded; shares nothing with its states that could change.

    Attributes
    ----------
    line : bytes
        JSON, ASCII, without the line feed.
    columns : dict of (field, kind) to (list of bytes, list of int)
        Values in native byte order, and the shapes of the entries, one after the other.
    nbytes : int
        Bytes held, for deciding when a shard is full.
    """

    __slots__ = ("columns", "line", "nbytes")

    def __init__(self, line: bytes, columns: dict[tuple[str, str], tuple[list[bytes], list[int]]]) -> None:
        self.line = line
        self.columns = columns
        self.nbytes = len(line) + sum(
            sum(map(len, pieces)) + 8 * len(shapes) for pieces, shapes in self.columns.values()
        )


class _Encoder:
    """Turns values of one field into JSON, and puts arrays aside."""

    __slots__ = ("columns", "field", "references")

    def __init__(self, columns: dict[tuple[str, str], tuple[list[bytes], list[int]]] | None) -> None:
        self.columns = columns
        self.field = ""
        self.references: dict[str, dict[str, str]] = {}

    def value(self, value: Any, path: Any = None, depth: int = 0) -> Any:
        kind = type(value)
        if kind is str or value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is list:
            return self.list(value, path, depth)
        if kind is np.ndarray:
            return self.array(value, path)
        if kind is ModelSteps:
            runs = value.runs()
            return self.entry("runs", [array("q", chain.from_iterable(runs)).tobytes()], (len(runs),), path)
        if kind is Status:
            return {"$status": value.name}
        if depth >= MAX_DEPTH and kind in (dict, tuple):
            raise _Unstorable(path, f"is nested more than {MAX_DEPTH} deep, or contains itself")
        if kind is dict:
            if all(type(key) is str and key[:1] != "$" for key in value):
                return {key: self.value(item, (path, key), depth + 1) for key, item in value.items()}
            return {"$dict": [[self.key(key, path, depth), self.value(item, (path, key), depth + 1)]
                              for key, item in value.items()]}  # fmt: skip
        if kind is tuple:
            return {"$tuple": [self.value(item, (path, i), depth + 1) for i, item in enumerate(value)]}
        if kind is bytes:
            return self.entry("bytes", [value], (len(value),), path)
        if kind in _SCALARS:
            return self.entry(_SCALARS[kind], [value.tobytes()], (), path)
        raise _Unstorable(
            path,
            f"is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; allowed are None, bool, int, "
            "float, str, bytes, list, tuple, dict, Status, ModelSteps, and NumPy arrays and scalars of integers, "
            "floats or bools (exactly these types, no subclasses)",
        )

    def key(self, key: Any, path: Any, depth: int) -> Any:
        return self.value(key, (path, key), depth + 1)

    def list(self, values: list[Any], path: Any, depth: int) -> Any:
        # A document has no columns; within a field, short lists are better read than packed.
        if self.columns is not None and (depth == 0 or len(values) >= _SHORT):
            packed = _pack(values)
            if packed is not None:
                kind, pieces, length = packed
                return self.entry(kind, pieces, (length,), path)
        if depth >= MAX_DEPTH:
            raise _Unstorable(path, f"is nested more than {MAX_DEPTH} deep, or contains itself")
        return [self.value(item, (path, i), depth + 1) for i, item in enumerate(values)]

    def array(self, values: Array, path: Any) -> dict[str, str]:
        name = _DTYPES.get(values.dtype)
        if name is None:
            raise _Unstorable(
                path, f"is an array of dtype {values.dtype}; allowed are integers, floats to 64 bits, bool"
            )
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        if values.nbytes <= _ARRAY_STRIDE:
            pieces = [values.tobytes()]
        else:
            flat = np.array(values, order="C").reshape(-1).view(np.uint8)
            pieces = [flat[i : i + _ARRAY_STRIDE].tobytes() for i in range(0, len(flat), _ARRAY_STRIDE)]
        return self.entry(f"array.{name}.{values.ndim}", pieces, values.shape, path)

    def entry(self, kind: str, pieces: "Iterable[bytes]", shape: "tuple[int, ...]", path: Any) -> dict[str, str]:
        if self.columns is None:
            raise _Unstorable(path, "is an array or bytes, which only groups can hold")
        column = self.columns.get((self.field, kind))
        if column is None:
            column = self.columns[self.field, kind] = ([], [])
        column[0].extend(pieces)
        column[1].extend(shape)
        reference = self.references.get(kind)
        if reference is None:
            reference = self.references[kind] = {"$column": kind}
        return reference


def _pack(values: list[Any]) -> tuple[str, list[bytes], int] | None:
    """A list of one kind as (kind, bytes, length); None if it has to be JSON."""
    pieces = []
    length = 0
    found: set[type] = set()
    for start in range(0, len(values), _LIST_STRIDE):
        part = values if len(values) <= _LIST_STRIDE else values[start : start + _LIST_STRIDE]
        found.update(map(type, part))
        if len(found) != 1:
            return None
        try:
            if int in found:
                piece = array("q", part).tobytes()
            elif float in found:
                piece = array("d", part).tobytes()
            elif bool in found:
                piece = bytes(part)
            else:
                return None
        except OverflowError:  # an int beyond 64 bits
            return None
        pieces.append(piece)
        length += len(part)
    return "floats" if float in found else "bools" if bool in found else "ints", pieces, length


_dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")).encode


def dump_json(value: Any) -> bytes:
    """Strict JSON in ASCII, without spaces or line feeds."""
    return _dumps(value).encode("ascii")


def encode_group(header: dict[str, Any], states: Sequence[RolloutState]) -> EncodedGroup:
    """Copy a group out of its states.

    Parameters
    ----------
    header : dict
        What the caller wants to know about the group; any storable value.
    states : sequence of RolloutState
        The members, at least one. They are only read.

    Raises
    ------
    TypeError
        For a value that cannot be written, naming the field, the rollout_id, the path within the field and the type.
    ValueError
        For a group without members.

    Examples
    --------
    >>> encode_group({"arrival": 1}, [RolloutState(rollout_id=7, response_ids=[1, 2], reward=0.5)]).line.decode()
    '{"header":{"arrival":1},"fields":{"rollout_id":[7],"response_ids":"ints","reward":[0.5],"status":["INIT"]}}'
    """
    if type(header) is not dict:
        raise TypeError(f"header must be a dict, got {type(header).__name__}")
    for index, state in enumerate(states):
        if type(state) is not RolloutState:
            raise TypeError(
                f"member {index} of the group is a {type(state).__module__}.{type(state).__qualname__}; a checkpoint "
                "holds RolloutState objects only"
            )
    if not len(states):
        raise ValueError("the group is empty; a group has at least one member")
    columns: dict[tuple[str, str], tuple[list[bytes], list[int]]] = {}
    encoder = _Encoder(columns)
    encoder.field = "header"
    try:
        encoded_header = encoder.value(header)
    except _Unstorable as fault:
        raise TypeError(f"header{fault.where} {fault.what}") from None
    encoder.references.clear()
    fields: dict[str, Any] = {}
    for name, getter, allowed, default in _GETTERS:
        values = list(map(getter, states))
        kinds = set(map(type, values))
        if kinds == _NONE and (allowed is None or allowed >= _NONE) and name != "extra_fields":
            continue
        if allowed is not None and not kinds <= allowed:
            _refuse(name, values, states, allowed)
        if default is not None and kinds == default[0] and all(map(default[1], values)):
            continue
        if name == "status":
            fields[name] = [value.name if type(value) is Status else {"$str": value} for value in values]
            continue
        encoder.field = name
        encoded: list[Any] = []
        try:
            for value in values:
                encoded.append(encoder.value(value))  # one by one: its length tells who failed
        except _Unstorable as fault:
            who = states[len(encoded)].rollout_id
            raise TypeError(f"{name}{fault.where} of rollout_id {who!r} {fault.what}") from None
        first = encoded[0]
        if type(first) is dict and "$column" in first and all(item is first for item in encoded):
            fields[name] = first["$column"]
        else:
            fields[name] = encoded
    return EncodedGroup(dump_json({"header": encoded_header, "fields": fields}), columns)


def _refuse(name: str, values: list[Any], states: Sequence[RolloutState], allowed: frozenset[type]) -> NoReturn:
    index = next(i for i, value in enumerate(values) if type(value) not in allowed)
    kind = type(values[index])
    raise TypeError(
        f"{name} of rollout_id {states[index].rollout_id!r} is a {kind.__module__}.{kind.__qualname__}; allowed are "
        + ", ".join(sorted(t.__name__ for t in allowed))
    )


def encode_document(document: dict[str, Any]) -> Any:
    """The JSON of a document: as for a group, but without arrays and bytes.

    Raises
    ------
    TypeError
        For a value that cannot be written.
    """
    if type(document) is not dict:
        raise TypeError(f"document must be a dict, got {type(document).__name__}")
    try:
        return _Encoder(None).value(document)
    except _Unstorable as fault:
        raise TypeError(f"document{fault.where} {fault.what}") from None


_SIGNED = (np.int8, np.int16, np.int32, np.int64)


def _narrow(values: Array) -> Array:
    """The same integers in the smallest signed dtype that holds them all."""
    if not values.size:
        return values.astype(np.int8)
    low, high = int(values.min()), int(values.max())
    return values.astype(next(d for d in _SIGNED if np.iinfo(d).min <= low and high <= np.iinfo(d).max))


def _ndim(kind: str) -> int:
    """Lengths an entry of this kind has in the shapes of its column."""
    if kind.startswith("array."):
        return int(kind.rpartition(".")[2])
    return 0 if kind.startswith("scalar.") else 1


_NATIVE = {"ints": np.dtype(np.int64), "runs": np.dtype(np.int64), "floats": np.dtype(np.float64),
           "bools": np.dtype(np.bool_), "bytes": np.dtype(np.uint8)}  # fmt: skip


class Columns:
    """Columns of one shard, gathered from encoded groups.

    Not safe for use from several threads at once.
    """

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns: dict[tuple[str, str], tuple[list[bytes], array[int]]] = {}

    def extend(self, group: EncodedGroup) -> None:
        """Append the entries of `group`."""
        for key, (pieces, shapes) in group.columns.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = ([], array("q"))
            column[0].extend(pieces)
            column[1].fromlist(shapes)

    def tensors(self) -> Iterable[tuple[str, Array]]:
        """Name and values of every tensor, integers in the smallest dtype that holds them."""
        for (field, kind), (pieces, shapes) in self._columns.items():
            native = _NATIVE.get(kind) or _DTYPE_OF[kind.split(".")[1]].newbyteorder("=")
            values: Array = np.frombuffer(b"".join(pieces), native)
            if kind == "ints" or kind == "runs":
                values = _narrow(values)
            yield f"{field}:{kind}", values.reshape(-1, 2) if kind == "runs" else values
            ndim = _ndim(kind)
            if ndim:
                yield f"{field}:{kind}:shapes", _narrow(np.frombuffer(shapes, np.int64)).reshape(-1, ndim)


class _Column:
    """Entries of one column, handed out in order."""

    __slots__ = ("convert", "cursor", "offsets", "shapes", "values")

    def __init__(self, kind: str, values: Array, shapes: Array | None) -> None:
        matched = _ARRAY_KIND.fullmatch(kind)
        name = matched[1] if matched else kind[len("scalar.") :] if kind.startswith("scalar.") else None
        ndim = int(matched[2]) if matched else 0 if name is not None else 1
        if name is not None and (name not in _DTYPE_OF or (not matched and not _DTYPE_OF[name].isnative)):
            raise Malformed(f"unknown dtype in kind {kind!r}")
        if name is None and kind not in _NATIVE:
            raise Malformed(f"unknown kind {kind!r}")
        if kind in ("ints", "runs"):
            fits = values.dtype.kind in "iu"
        else:
            fits = values.dtype == (_NATIVE[kind] if name is None else _DTYPE_OF[name].newbyteorder("="))
        if not fits or values.ndim != (2 if kind == "runs" else 1) or (kind == "runs" and values.shape[1] != 2):
            raise Malformed(f"has dtype {values.dtype} and shape {values.shape}, which does not fit its kind")
        total = len(values)
        self.shapes: list[list[int]] | None = None
        if ndim == 0:
            if shapes is not None:
                raise Malformed("has shapes, which its kind does not have")
            self.offsets: Sequence[int] = range(total + 1)
        else:
            if shapes is None or shapes.dtype.kind not in "iu" or shapes.ndim != 2 or shapes.shape[1] != ndim:
                raise Malformed(f"has no shapes of {ndim} integers per entry")
            if ndim == 1:
                sizes = shapes[:, 0].tolist()
            else:
                self.shapes = shapes.tolist()
                sizes = [math.prod(shape) for shape in self.shapes]
            if shapes.size and int(shapes.min()) < 0:
                raise Malformed("has a negative length")
            self.offsets = list(accumulate(sizes, initial=0))
            if self.offsets[-1] != total:
                raise Malformed(f"has {total} values, its shapes ask for {self.offsets[-1]}")
        self.values = values
        self.cursor = 0
        if matched:
            self.convert: Callable[[Array, int], Any] = _ToArray(_DTYPE_OF[matched[1]], self.shapes, ndim)
        elif name is not None:
            self.convert = _to_scalar
        else:
            self.convert = _CONVERT[kind]

    def take(self) -> Any:
        index = self.cursor
        if index + 1 >= len(self.offsets):
            raise Malformed("names more entries of a column than there are")
        self.cursor = index + 1
        return self.convert(self.values[self.offsets[index] : self.offsets[index + 1]], index)

    @property
    def left(self) -> int:
        return len(self.offsets) - 1 - self.cursor


class _ToArray:
    """Copies an entry out as an array of its own."""

    __slots__ = ("dtype", "ndim", "shapes")

    def __init__(self, dtype: "np.dtype[Any]", shapes: list[list[int]] | None, ndim: int) -> None:
        self.dtype = dtype
        self.shapes = shapes
        self.ndim = ndim

    def __call__(self, values: Array, index: int) -> Array:
        if self.ndim == 1:
            return values.astype(self.dtype)
        try:
            return values.astype(self.dtype).reshape(self.shapes[index] if self.shapes is not None else ())
        except (ValueError, OverflowError) as fault:
            raise Malformed(f"has an entry of impossible shape: {fault}") from None


def _to_list(values: Array, index: int) -> list[Any]:
    if len(values) <= _LIST_STRIDE:
        return values.tolist()  # type: ignore[no-any-return]
    items: list[Any] = []
    for start in range(0, len(values), _LIST_STRIDE):
        items.extend(values[start : start + _LIST_STRIDE].tolist())
    return items


def _to_bytes(values: Array, index: int) -> bytes:
    return values.tobytes()


def _to_scalar(values: Array, index: int) -> Any:
    return values[0]


def _to_steps(values: Array, index: int) -> ModelSteps:
    steps = ModelSteps()
    total = 0
    for step, length in values.tolist():
        total += length
        if length < 1 or total >= 2**62 or step >= 2**63:
            raise Malformed(f"has a run of {length} tokens of step {step}")
        steps.append(step, length)
    return steps


_CONVERT: dict[str, Callable[[Array, int], Any]] = {
    "ints": _to_list, "floats": _to_list, "bools": _to_list, "bytes": _to_bytes, "runs": _to_steps,
}  # fmt: skip


class ColumnReader:
    """Columns of one shard, read in the order they were written.

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
        self._columns: dict[tuple[str, str], _Column] = {}
        for name, values in tensors.items():
            if name.endswith(":shapes"):
                if name[: -len(":shapes")] not in tensors:
                    raise Malformed(f"tensor {name!r} has no values")
                continue
            field, _, kind = name.partition(":")
            if field != "header" and field not in FIELDS:
                raise Malformed(f"tensor {name!r} belongs to no field")
            try:
                self._columns[field, kind] = _Column(kind, values, tensors.get(name + ":shapes"))
            except Malformed as fault:
                raise Malformed(f"tensor {name!r} {fault}") from None

    def column(self, field: str, kind: Any) -> _Column:
        """The column of a kind of a field."""
        if type(kind) is str and (field, kind) in self._columns:
            return self._columns[field, kind]
        raise Malformed(f"names a column {kind!r:.80} that is not there")

    def finish(self) -> None:
        """Refuse entries that no line asked for."""
        for (field, kind), column in self._columns.items():
            if column.left:
                raise Malformed(f"column {field}:{kind} has {column.left} entries that no group uses")


class _Decoder:
    """Turns JSON of one field back into values."""

    __slots__ = ("columns", "field")

    def __init__(self, columns: ColumnReader | None) -> None:
        self.columns = columns
        self.field = ""

    def value(self, raw: Any, depth: int = 0) -> Any:
        kind = type(raw)
        if kind is not dict and kind is not list:
            return raw
        if depth > MAX_DEPTH:
            raise Malformed(f"is nested more than {MAX_DEPTH} deep")
        if kind is list:
            return [self.value(item, depth + 1) for item in raw]
        if len(raw) == 1:
            ((tag, content),) = raw.items()
            if tag[:1] == "$":
                return self.tagged(tag, content, depth)
        for key in raw:
            if key[:1] == "$":
                raise Malformed(f"has the tag {key!r:.80} among other keys")
        return {key: self.value(item, depth + 1) for key, item in raw.items()}

    def tagged(self, tag: str, content: Any, depth: int) -> Any:
        if tag == "$column":
            if self.columns is None:
                raise Malformed("names a column, which only groups have")
            return self.columns.column(self.field, content).take()
        if tag == "$tuple" and type(content) is list:
            return tuple([self.value(item, depth + 1) for item in content])
        if tag == "$dict" and type(content) is list:
            return self.mapping(content, depth)
        if type(content) is str:
            if tag == "$str":
                return content
            if tag == "$status" and content in Status.__members__:
                return Status[content]
            if tag == "$int" and _HEX_INT.fullmatch(content):
                return int(content, 16)
            if tag == "$float" and _HEX_DOUBLE.fullmatch(content):
                return struct.unpack(">d", bytes.fromhex(content))[0]
        raise Malformed(f"has an unknown tag or a wrong value for it: {tag!r:.80}")

    def mapping(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        found = {}
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise Malformed("has a $dict that is not made of pairs")
            key, item = self.value(pair[0], depth + 1), self.value(pair[1], depth + 1)
            try:
                found[key] = item
            except TypeError:
                raise Malformed(f"has a {type(key).__name__} as a key") from None
        if len(found) != len(pairs):
            raise Malformed("has a duplicate key")
        return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a key occurs twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise Malformed(f"{name} is not JSON")


_loads = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant).decode


def parse_json(text: bytes) -> Any:
    """Strict JSON: ASCII, no duplicate keys, no NaN or Infinity.

    Raises
    ------
    Malformed
        For anything else, including numbers of thousands of digits and nesting beyond the stack.
    """
    try:
        return _loads(text.decode("ascii"))
    except RecursionError:
        raise Malformed("is nested too deep") from None
    except Malformed:
        raise
    except ValueError as fault:
        raise Malformed(f"is not JSON: {fault!s:.200}") from None


def decode_document(raw: Any) -> dict[str, Any]:
    """The document that :func:`encode_document` gave this JSON for.

    Raises
    ------
    Malformed
        For JSON that encodes no dict.
    """
    document = _Decoder(None).value(raw)
    if type(document) is not dict:
        raise Malformed("is not a dict")
    return document


def decode_group(line: bytes, columns: ColumnReader) -> tuple[dict[str, Any], list[RolloutState]]:
    """Header and members of the next group of a shard.

    Raises
    ------
    Malformed
        Naming the field.
    """
    raw = parse_json(line)
    if type(raw) is not dict or raw.keys() != {"header", "fields"} or type(raw["fields"]) is not dict:
        raise Malformed("is not an object of header and fields")
    decoder = _Decoder(columns)
    decoder.field = "header"
    try:
        header = decoder.value(raw["header"])
        if type(header) is not dict:
            raise Malformed("is not a dict")
        decoder.field = "status"
        statuses = raw["fields"].get("status")
        if type(statuses) is not list or not statuses:
            raise Malformed("is not a list with a status per member")
        fields: dict[str, list[Any]] = {}
        for name, content in raw["fields"].items():
            decoder.field = name
            fields[name] = _decode_field(decoder, name, content, len(statuses))
    except Malformed as fault:
        raise Malformed(f"{decoder.field:.80} {fault}") from None
    return header, [RolloutState(**dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]


def _decode_field(decoder: _Decoder, name: str, content: Any, members: int) -> list[Any]:
    if name not in FIELDS:
        raise Malformed("is not a field of a state")
    if type(content) is str:
        if decoder.columns is None:
            raise Malformed("names a column, which only groups have")
        take = decoder.columns.column(name, content).take
        values = [take() for _ in range(members)]
    elif type(content) is not list or len(content) != members:
        raise Malformed(f"is not a list of {members} values, one per member")
    elif name == "status":
        values = [decoder.value({"$status": item} if type(item) is str else item) for item in content]
    else:
        values = [decoder.value(item) for item in content]
    allowed = _ALLOWED.get(name)
    if allowed is not None and not allowed.issuperset(map(type, values)):
        kind = next(type(value) for value in values if type(value) not in allowed)
        raise Malformed(f"is a {kind.__name__}; allowed are {', '.join(sorted(t.__name__ for t in allowed))}")
    return values
