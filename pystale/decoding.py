"""How a line of JSON and entries in typed columns become the states of one group.

The other way is :mod:`pystale.payload`. Nothing that is read is ever executed.
"""

import re
import struct
from typing import Any

from pystale.columns import ColumnReader, Malformed
from pystale.field_types import ALLOWED, ENCODED_FIELDS, MAX_DEPTH, LoadRef, name_of, names_of
from pystale.state import RolloutState, Status
from pystale.strict_json import parse_json

__all__ = ["decode_document", "decode_group"]

_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_HEX_DOUBLE = re.compile(r"[0-9a-f]{16}")
_NESTED: frozenset[type] = frozenset({dict, list})
_STATUSES = dict(Status.__members__)


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
            if name not in ENCODED_FIELDS:
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
    status = _STATUSES.get(name)
    if status is None:
        raise Malformed(f"has an unknown status {name!r:.80}")
    return status


def _require_allowed(name: str, values: list[Any]) -> None:
    allowed = ALLOWED.get(name)
    if allowed is not None and not allowed.issuperset(map(type, values)):
        kind = next(type(value) for value in values if type(value) not in allowed)
        raise Malformed(f"is a {name_of(kind)}; allowed are {names_of(allowed)}")
