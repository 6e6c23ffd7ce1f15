"""How the states of one group become a line of JSON and entries in typed columns, and back.

The format is written down in :mod:`pystale.checkpoint`. Nothing here touches a file, and nothing that is read is ever
executed: JSON gives the structure, columns of plain numbers give the rest.
"""

import json
import math
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from pystale._objects import ModelSteps
from pystale.columns import FIELDS, LIST_STRIDE, Array, ColumnReader, Entries, Malformed, array_kind, scalar_kind
from pystale.state import RolloutState, Status

__all__ = [
    "DumpRef",
    "EncodedGroup",
    "LoadRef",
    "decode_document",
    "decode_group",
    "dump_json",
    "encode_document",
    "encode_group",
    "parse_json",
]

# Containers inside one field; more is refused on both sides, so neither side can run out of stack.
MAX_DEPTH = 100
# A nested list shorter than this stays in the JSON, where it can be read.
_SHORT = 16
# Longest stretch of an array, in bytes, that is copied without letting other threads run.
_ARRAY_STRIDE = 1 << 20

_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_HEX_DOUBLE = re.compile(r"[0-9a-f]{16}")

_NONE: frozenset[type] = frozenset({type(None)})
_NESTED: frozenset[type] = frozenset({dict, list})
_PLAIN: frozenset[type] = frozenset({str, bool, type(None)})
_INTEGERS: frozenset[type] = frozenset({int}) | frozenset(
    np.dtype(code).type for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
)
_IDS: frozenset[type] = _INTEGERS | {str, type(None)}
_SEQUENCES: frozenset[type] = frozenset({list, tuple, np.ndarray, type(None)})
# What the library itself computes with must have a type it can compute with, when written and when read.
_ALLOWED: dict[str, frozenset[type]] = {
    **dict.fromkeys(("rollout_id", "group_id", "session_id"), _IDS),
    **dict.fromkeys(("prompt_ids", "tokens", "response_ids", "logprobs"), _SEQUENCES),
    **dict.fromkeys(("input_ids", "labels", "position_ids"), _SEQUENCES),
    "task_name": frozenset({str, type(None)}),
    "prompt_model_step": _INTEGERS | {type(None)},
    **dict.fromkeys(("response_mask", "response_model_steps"), _SEQUENCES | {ModelSteps}),
    "status": frozenset({Status, str}),
    "seq_staleness": _INTEGERS,
    "rerolls": _INTEGERS,
    "extra_fields": frozenset({dict, type(None)}),
}
# A field is left out of a line when all members have the value of this type that is false.
_LEFT_OUT: dict[str, frozenset[type]] = {
    **dict.fromkeys(FIELDS, _NONE),
    **dict.fromkeys(("seq_staleness", "rerolls"), frozenset({int})),
    "extra_fields": frozenset({dict}),
}
_FIELDS = [(name, _ALLOWED.get(name), _LEFT_OUT[name]) for name in FIELDS if name != "status"]
_values_of = attrgetter(*(name for name, _, _ in _FIELDS))


DumpRef = Callable[[Any], Any]
LoadRef = Callable[[Any], Any]


class _Unstorable(Exception):
    """A value that cannot be written, and where it is."""

    def __init__(self, path: Any, what: str) -> None:
        steps: list[str] = []
        while path is not None:
            path, key = path
            steps.append(f"[{_shown(key)}]")
        self.where = "".join(reversed(steps))
        self.what = what
        self.member = 0


class EncodedGroup:
    """One group as it was when it was encoded; shares nothing with its states that could change.

    Attributes
    ----------
    line : bytes
        JSON, ASCII, without the line feed.
    entries : Entries
        What the line takes from columns.
    nbytes : int
        Bytes held, for deciding when a shard is full.
    references : list of (value, str)
        External references that :meth:`dump_references` has to write before the group is whole, and where they are.
    """

    __slots__ = ("entries", "line", "nbytes", "references")

    def __init__(self, line: bytes, entries: Entries, references: "list[tuple[Any, str]]") -> None:
        self.line = line
        self.entries = entries
        self.references = references
        self.nbytes = _nbytes(line, entries)

    def dump_references(self, dump_ref: DumpRef) -> "EncodedGroup":
        """Write what `dump_ref` makes of the external references; does nothing where there are none.

        Raises
        ------
        TypeError
            Where it gives None or what cannot be written, naming field, rollout_id and type.
        """
        if not self.references:
            return self
        encoder = _Encoder("refs", self.entries)
        dumped = []
        for value, where in self.references:
            stand_in = dump_ref(value)
            if stand_in is None:
                raise TypeError(f"{where} is a {_name(type(value))}, which dump_ref gave nothing to write for")
            try:
                dumped.append(encoder.value(stand_in))
            except _Unstorable as fault:
                raise TypeError(
                    f"{where} is a {_name(type(value))}; what dump_ref made of it{fault.where} {fault.what}"
                ) from None
        self.line = self.line[:-1] + b',"refs":' + dump_json(dumped) + b"}"
        self.references = []
        self.nbytes = _nbytes(self.line, self.entries)
        return self


def _nbytes(line: bytes, entries: Entries) -> int:
    return len(line) + sum(sum(map(len, pieces)) + 8 * len(shapes) for pieces, shapes in entries.values())


class _References:
    """External references of one group: each object once, however many members hold it."""

    __slots__ = ("found", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.found: list[tuple[Any, str, Any, int]] = []

    def number(self, value: Any, field: str, path: Any, member: int) -> int:
        number = self.numbers.setdefault(id(value), len(self.found))
        if number == len(self.found):
            self.found.append((value, field, path, member))
        return number

    def located(self, states: Sequence[RolloutState]) -> list[tuple[Any, str]]:
        return [
            (value, f"{field}{_Unstorable(path, '').where} of rollout_id {_shown(states[member].rollout_id)}")
            for value, field, path, member in self.found
        ]


class _Encoder:
    """Turns values into JSON, and puts arrays aside for the field at hand; without `entries`, refuses them.

    With `references`, puts aside what cannot be written, too.
    """

    __slots__ = ("count", "entries", "field", "kinds", "member", "references")

    def __init__(self, field: str, entries: Entries | None) -> None:
        self.entries = entries
        self.field = field
        self.references: _References | None = None
        self.kinds: dict[str, dict[str, str]] = {}
        self.count = 0
        self.member = 0

    def members(self, field: str, values: Sequence[Any], kinds: set[type]) -> Any:
        """What stands for the values of all members in a field, given their types."""
        self.field = field
        self.count = self.member = 0
        first = values[0]
        if kinds <= _PLAIN or (kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63):
            same = len(kinds) == 1 and len(values) > 1 and values.count(first) == len(values)
            return {"all": first} if same else values
        kind = self.packed(values, kinds)
        if kind is not None:
            return kind
        encoded: list[Any] = []
        try:
            encoded.append(self.value(first))
            for self.member, value in enumerate(values[1:], 1):
                encoded.append(encoded[0] if value is first and not self.count else self.value(value))
        except _Unstorable as fault:
            fault.member = self.member
            raise
        one = encoded[0]
        if len(values) > 1 and all(item is one for item in encoded):
            return one["$column"] if self.count else {"all": one}
        return encoded

    def packed(self, values: Sequence[Any], kinds: set[type]) -> str | None:
        """Put short lists, or model steps, of all members aside in one go; None if that is not possible."""
        if kinds == {list}:
            parts = values
        elif kinds == {ModelSteps}:
            runs = [steps.runs() for steps in values]
            self.entry("runs", [array("q", chain.from_iterable(chain.from_iterable(runs))).tobytes()], map(len, runs))
            return "runs"
        else:
            return None
        lengths = list(map(len, parts))
        if sum(lengths) > LIST_STRIDE:
            return None
        packed = _pack(list(chain.from_iterable(parts)))
        if packed is None or packed[2] != sum(lengths):
            return None
        self.entry(packed[0], packed[1], lengths)
        return packed[0]

    def value(self, value: Any, path: Any = None, depth: int = 0) -> Any:
        kind = type(value)
        if kind is str or value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if kind is Status:
            return {"$status": value.name}
        if kind is dict or kind is list or kind is tuple:
            return self.container(value, kind, path, depth)
        if self.entries is None:
            raise _Unstorable(path, f"is a {_name(kind)}, which a document cannot hold")
        if kind is np.ndarray:
            return self.array(value, path)
        if kind is ModelSteps:
            runs = value.runs()
            return self.entry("runs", [array("q", chain.from_iterable(runs)).tobytes()], (len(runs),))
        if kind is bytes:
            return self.entry("bytes", [value], (len(value),))
        scalar = scalar_kind(kind)
        if scalar is not None:
            return self.entry(scalar, [value.tobytes()], ())
        if self.references is not None:
            return {"$ref": self.references.number(value, self.field, path, self.member)}
        raise _Unstorable(
            path,
            f"is a {_name(kind)}, which a checkpoint cannot hold; allowed are None, bool, int, float, str, bytes, "
            "list, tuple, dict, Status, ModelSteps, and NumPy arrays and scalars of integers, floats or bools, exactly "
            "these types; dump_ref and load_ref of the buffer write others",
        )

    def container(self, value: Any, kind: type, path: Any, depth: int) -> Any:
        if kind is list and self.entries is not None and (depth == 0 or len(value) >= _SHORT):
            packed = _pack(value)
            if packed is not None:
                return self.entry(packed[0], packed[1], (packed[2],))
        if depth >= MAX_DEPTH:
            raise _Unstorable(path, f"is nested more than {MAX_DEPTH} deep, or contains itself")
        depth += 1
        if kind is dict:
            if all(type(key) is str and key[:1] != "$" for key in value):
                return {key: self.value(item, (path, key), depth) for key, item in value.items()}
            pairs = []
            for key, item in value.items():
                step = (path, key)
                pairs.append([self.value(key, step, depth), self.value(item, step, depth)])
            return {"$dict": pairs}
        items = [self.value(item, (path, i), depth) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}

    def array(self, values: Array, path: Any) -> dict[str, str]:
        kind = array_kind(values)
        if kind is None:
            raise _Unstorable(
                path, f"is an array of dtype {values.dtype}; allowed are integers, floats of 16 to 64 bits and bools"
            )
        if not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("="))
        if values.nbytes <= _ARRAY_STRIDE:
            return self.entry(kind, [values.tobytes()], values.shape)
        flat = np.array(values, order="C").reshape(-1).view(np.uint8)
        pieces = [flat[i : i + _ARRAY_STRIDE].tobytes() for i in range(0, len(flat), _ARRAY_STRIDE)]
        return self.entry(kind, pieces, values.shape)

    def entry(self, kind: str, pieces: Iterable[bytes], shape: Iterable[int]) -> dict[str, str]:
        self.count += 1
        key = (self.field, kind)
        column = self.entries.get(key)  # type: ignore[union-attr]
        if column is None:
            column = self.entries[key] = ([], [])  # type: ignore[index]
        column[0].extend(pieces)
        column[1].extend(shape)
        # The same object for the same kind, so that members are compared by identity.
        return self.kinds.setdefault(kind, {"$column": kind})


def _shown(value: Any) -> str:
    """`value` for a message: of a key, or an id, that may have any type."""
    try:
        return f"{value!r:.80}"
    except Exception:  # an int of thousands of digits, or a repr of the user's
        return type(value).__name__


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _pack(values: list[Any]) -> tuple[str, list[bytes], int] | None:
    """A list of one kind as (kind, bytes, length); None if it has to be JSON."""
    pieces = []
    length = 0
    found: set[type] = set()
    for start in range(0, len(values), LIST_STRIDE):
        part = values if len(values) <= LIST_STRIDE else values[start : start + LIST_STRIDE]
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


def encode_group(header: dict[str, Any], states: Sequence[RolloutState], *, references: bool = False) -> EncodedGroup:
    """Copy a group out of its states.

    Parameters
    ----------
    header : dict
        What the caller wants to know about the group; any storable value.
    states : sequence of RolloutState
        The members, at least one. They are only read.
    references : bool, default False
        Take objects of other types for external references, and put them aside for
        :meth:`EncodedGroup.dump_references`. They may stand in fields that pystale does not compute with.

    Raises
    ------
    TypeError
        For a value that cannot be written, naming the field, the rollout_id, the path within the field and the type.
    ValueError
        For a group without members.

    Examples
    --------
    >>> encode_group({"arrival": 1}, [RolloutState(rollout_id=7, response_ids=[1, 2], reward=0.5)]).line.decode()
    '{"header":{"arrival":1},"fields":{"status":["INIT"],"rollout_id":[7],"response_ids":"ints","reward":[0.5]}}'
    """
    if type(header) is not dict:
        raise TypeError(f"header must be a dict, got {_name(type(header))}")
    for index, state in enumerate(states):
        if type(state) is not RolloutState:
            raise TypeError(
                f"member {index} of the group is a {_name(type(state))}; a checkpoint holds RolloutState objects only"
            )
    if not len(states):
        raise ValueError("the group is empty; a group has at least one member")
    entries: Entries = {}
    encoder = _Encoder("header", entries)
    try:
        encoded_header = encoder.value(header)
    except _Unstorable as fault:
        raise TypeError(f"header{fault.where} {fault.what}") from None
    external = encoder.references = _References() if references else None
    statuses = [state.status for state in states]
    _check("status", statuses, set(map(type, statuses)), states)
    fields: dict[str, Any] = {
        "status": [status.name if type(status) is Status else {"$str": status} for status in statuses]
    }
    for (name, allowed, left_out), values in zip(_FIELDS, zip(*map(_values_of, states), strict=True), strict=True):
        kinds = set(map(type, values))
        if kinds == left_out and not any(values):
            continue
        if allowed is not None and not kinds <= allowed:
            _check(name, values, kinds, states)
        try:
            fields[name] = encoder.members(name, values, kinds)
        except _Unstorable as fault:
            who = states[fault.member].rollout_id
            raise TypeError(f"{name}{fault.where} of rollout_id {_shown(who)} {fault.what}") from None
    line = dump_json({"header": encoded_header, "fields": fields})
    return EncodedGroup(line, entries, [] if external is None else external.located(states))


def _check(name: str, values: Sequence[Any], kinds: set[type], states: Sequence[RolloutState]) -> None:
    allowed = _ALLOWED[name]
    if kinds <= allowed:
        return
    index = next(i for i, value in enumerate(values) if type(value) not in allowed)
    raise TypeError(
        f"{name} of rollout_id {_shown(states[index].rollout_id)} is a {_name(type(values[index]))}; allowed are "
        + _names(allowed)
    )


def _names(kinds: Iterable[type]) -> str:
    return ", ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))


def encode_document(document: dict[str, Any]) -> Any:
    """The JSON of a document: as for a group, but without arrays and bytes.

    Raises
    ------
    TypeError
        For a value that cannot be written.
    """
    if type(document) is not dict:
        raise TypeError(f"document must be a dict, got {_name(type(document))}")
    try:
        return _Encoder("document", None).value(document)
    except _Unstorable as fault:
        raise TypeError(f"document{fault.where} {fault.what}") from None


class _Decoder:
    """Turns JSON back into values, for the field at hand."""

    __slots__ = ("columns", "field", "references")

    def __init__(self, field: str, columns: ColumnReader | None) -> None:
        self.columns = columns
        self.field = field
        self.references: list[Any] = []

    def members(self, content: Any, count: int) -> list[Any]:
        """Values of all members."""
        if type(content) is str and self.columns is not None:
            return self.columns.column(self.field, content).take(count)
        if type(content) is dict and content.keys() == {"all"}:
            one = content["all"]
            return [self.value(one) for _ in range(count)] if type(one) in _NESTED else [one] * count
        if type(content) is not list or len(content) != count:
            raise Malformed(f"is neither a list of {count} values, one per member, nor a kind, nor one for all")
        if _NESTED.isdisjoint(map(type, content)):
            return content
        return [self.value(item) for item in content]

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
            return self.columns.column(self.field, content).take()[0]
        if tag == "$ref" and type(content) is int and 0 <= content < len(self.references):
            return self.references[content]
        if tag == "$tuple" and type(content) is list:
            return tuple([self.value(item, depth + 1) for item in content])
        if tag == "$dict" and type(content) is list:
            return self.mapping(content, depth)
        if type(content) is str:
            if tag == "$str":
                return content
            if tag == "$status":
                return _status(content)
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
    document = _Decoder("document", None).value(raw)
    if type(document) is not dict:
        raise Malformed("is not a dict")
    return document


def decode_group(
    line: bytes, columns: ColumnReader, load_ref: LoadRef | None = None
) -> tuple[dict[str, Any], list[RolloutState]]:
    """Header and members of the next group of a shard; `load_ref` turns stand-ins into external references.

    Raises
    ------
    Malformed
        Naming the field.
    """
    raw = parse_json(line)
    if type(raw) is not dict or raw.keys() - {"refs"} != {"header", "fields"} or type(raw["fields"]) is not dict:
        raise Malformed("is not an object of header and fields")
    decoder = _Decoder("refs", columns)
    try:
        if "refs" in raw:
            decoder.references = _loaded(decoder.value(raw["refs"]), load_ref)
        decoder.field = "header"
        header = decoder.value(raw["header"])
        if type(header) is not dict:
            raise Malformed("is not a dict")
        decoder.field = "status"
        encoded = raw["fields"].pop("status", None)
        if type(encoded) is not list or not encoded:
            raise Malformed("is not a list with one entry per member")
        statuses = [_status(item) if type(item) is str else decoder.value(item) for item in encoded]
        _require_allowed("status", statuses)
        fields = {"status": statuses}
        for name, content in raw["fields"].items():
            decoder.field = name
            if name not in _LEFT_OUT:
                raise Malformed("is not a field of a state")
            fields[name] = decoder.members(content, len(statuses))
            _require_allowed(name, fields[name])
    except Malformed as fault:
        raise Malformed(f"{decoder.field:.80} {fault}") from None
    return header, [RolloutState(**dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]


def _loaded(stand_ins: Any, load_ref: LoadRef | None) -> list[Any]:
    if type(stand_ins) is not list or not stand_ins:
        raise Malformed("is not a list")
    if load_ref is None:
        raise Malformed("names external references; make the buffer with the load_ref that reads them")
    return [load_ref(stand_in) for stand_in in stand_ins]


def _status(name: str) -> Status:
    status = Status.__members__.get(name)
    if status is None:
        raise Malformed(f"has an unknown status {name!r:.80}")
    return status


def _require_allowed(name: str, values: list[Any]) -> None:
    allowed = _ALLOWED.get(name)
    if allowed is not None and not allowed.issuperset(map(type, values)):
        kind = next(type(value) for value in values if type(value) not in allowed)
        raise Malformed(f"is a {_name(kind)}; allowed are {_names(allowed)}")
