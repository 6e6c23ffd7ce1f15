"""What the fields of a state may hold in a file: the types pystale computes with, when written and when read."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pystale._objects import ModelSteps
from pystale.columns import FIELDS
from pystale.state import Status

__all__ = ["ALLOWED", "DEFAULT_KIND", "ENCODED_FIELDS", "MAX_DEPTH", "DumpRef", "LoadRef", "name_of", "names_of"]

DumpRef = Callable[[Any], Any]
LoadRef = Callable[[Any], Any]

# Containers inside one field; more is refused on both sides, so neither side can run out of stack.
MAX_DEPTH = 100

_INTEGERS: frozenset[type] = frozenset({int}) | frozenset(
    np.dtype(code).type for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
)
_IDS: frozenset[type] = _INTEGERS | {str, type(None)}
_SEQUENCES: frozenset[type] = frozenset({list, tuple, np.ndarray, type(None)})
# Other fields may hold anything that can be written.
ALLOWED: dict[str, frozenset[type]] = {
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
# A field is left out of a line when all members have its default: None, or here the false value of this type.
DEFAULT_KIND: dict[str, type] = {"seq_staleness": int, "rerolls": int, "extra_fields": dict}
# Written where they hold something; ``status`` is always written.
ENCODED_FIELDS = tuple(name for name in FIELDS if name != "status")


def name_of(kind: type) -> str:
    """Name of a type, for messages."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def names_of(kinds: Iterable[type]) -> str:
    """Names of types, for messages that say what is allowed."""
    return ", ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
