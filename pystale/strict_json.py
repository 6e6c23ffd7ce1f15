"""The JSON of files: strict, in ASCII, one value a line."""

import json
from typing import Any, NoReturn

from pystale.columns import Malformed

__all__ = ["dump_json", "parse_json"]

_dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")).encode


def dump_json(value: Any) -> bytes:
    """Strict JSON in ASCII, without spaces or line feeds."""
    return _dumps(value).encode("ascii")


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
