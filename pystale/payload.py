"""How the states of one group become a line of JSON and entries in typed columns.

The format is written down in :mod:`pystale.checkpoint`: JSON gives the structure, columns of plain numbers the rest.
Nothing here touches a file. The way back is :mod:`pystale.decoding`.
"""

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from pystale._objects import ModelSteps, filled_fields, pack_lists
from pystale.columns import Array, Entries, array_kind, scalar_kind
from pystale.field_types import ALLOWED, DEFAULT_KIND, ENCODED_FIELDS, MAX_DEPTH, DumpRef, LoadRef, name_of, names_of
from pystale.state import RolloutState, Status
from pystale.strict_json import dump_json

__all__ = ["DumpRef", "EncodedGroup", "LoadRef", "encode_document", "encode_group"]

# A nested list shorter than this stays in the JSON, where it can be read.
_SHORT = 16
# Most list entries that are read without letting other threads run: about a millisecond.
LIST_STRIDE = 1 << 18
# Longest stretch of an array, in bytes, that is copied without letting other threads run.
_ARRAY_STRIDE = 1 << 20

_PLAIN: frozenset[type] = frozenset({str, bool, type(None)})
_INT: frozenset[type] = frozenset({int})
_FLOAT: frozenset[type] = frozenset({float})
_LISTS: frozenset[type] = frozenset({list})
_STEPS: frozenset[type] = frozenset({ModelSteps})


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
                raise TypeError(f"{where} is a {name_of(type(value))}, which dump_ref gave nothing to write for")
            try:
                dumped.append(encoder.value(stand_in))
            except _Unstorable as fault:
                raise TypeError(
                    f"{where} is a {name_of(type(value))}; what dump_ref made of it{fault.where} {fault.what}"
                ) from None
        self.line = self.line[:-1] + b',"refs":' + dump_json(dumped) + b"}"
        self.references = []
        self.nbytes = _nbytes(self.line, self.entries)
        return self


def _nbytes(line: bytes, entries: Entries) -> int:
    nbytes = len(line)
    for pieces, shapes in entries.values():
        nbytes += 8 * len(shapes)
        for piece in pieces:
            nbytes += len(piece)
    return nbytes


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
        if kinds <= _PLAIN or (kinds == _INT and min(values) >= -(2**63) and max(values) < 2**63):
            same = len(kinds) == 1 and len(values) > 1 and values.count(first) == len(values)
            return {"all": first} if same else values
        if kinds == _FLOAT and all(map(math.isfinite, values)):
            return values
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
        if kinds == _LISTS:
            packed = pack_lists(values) if sum(map(len, values)) <= LIST_STRIDE else None
            if packed is None:
                return None
            kind, content, lengths = packed
            self.entry(kind, (content,), lengths)
            return kind
        if kinds == _STEPS:
            runs = [steps.runs() for steps in values]
            self.entry("runs", (array("q", chain.from_iterable(chain.from_iterable(runs))).tobytes(),), map(len, runs))
            return "runs"
        return None

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
            raise _Unstorable(path, f"is a {name_of(kind)}, which a document cannot hold")
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
            f"is a {name_of(kind)}, which a checkpoint cannot hold; allowed are None, bool, int, float, str, bytes, "
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
            for key in value:
                if type(key) is not str or key[:1] == "$":
                    break
            else:
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


def _pack(values: list[Any]) -> tuple[str, list[bytes], int] | None:
    """A list of one kind as (kind, bytes, length); None if it has to be JSON."""
    pieces, kinds, length = [], set(), 0
    for start in range(0, len(values) or 1, LIST_STRIDE):
        packed = pack_lists((values if len(values) <= LIST_STRIDE else values[start : start + LIST_STRIDE],))
        if packed is None:
            return None
        kinds.add(packed[0])
        pieces.append(packed[1])
        length += packed[2][0]
    return (kinds.pop(), pieces, length) if len(kinds) == 1 else None


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
        raise TypeError(f"header must be a dict, got {name_of(type(header))}")
    for index, state in enumerate(states):
        if type(state) is not RolloutState:
            raise TypeError(
                f"member {index} of the group is a {name_of(type(state))}; a checkpoint holds RolloutState objects only"
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
    for name, values, kind in filled_fields(list(states), ENCODED_FIELDS):
        if kind is not None and kind is DEFAULT_KIND.get(name) and not any(values):
            continue
        kinds = set(map(type, values)) if kind is None else {kind}
        if name in ALLOWED:
            _check(name, values, kinds, states)
        try:
            fields[name] = encoder.members(name, values, kinds)
        except _Unstorable as fault:
            who = states[fault.member].rollout_id
            raise TypeError(f"{name}{fault.where} of rollout_id {_shown(who)} {fault.what}") from None
    line = dump_json({"header": encoded_header, "fields": fields})
    return EncodedGroup(line, entries, [] if external is None else external.located(states))


def _check(name: str, values: Sequence[Any], kinds: set[type], states: Sequence[RolloutState]) -> None:
    allowed = ALLOWED[name]
    if kinds <= allowed:
        return
    index = next(i for i, value in enumerate(values) if type(value) not in allowed)
    raise TypeError(
        f"{name} of rollout_id {_shown(states[index].rollout_id)} is a {name_of(type(values[index]))}; allowed are "
        + names_of(allowed)
    )


def encode_document(document: dict[str, Any]) -> Any:
    """The JSON of a document: as for a group, but without arrays and bytes.

    Raises
    ------
    TypeError
        For a value that cannot be written.
    """
    if type(document) is not dict:
        raise TypeError(f"document must be a dict, got {name_of(type(document))}")
    try:
        return _Encoder("document", None).value(document)
    except _Unstorable as fault:
        raise TypeError(f"document{fault.where} {fault.what}") from None
