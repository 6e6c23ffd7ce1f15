"""Ray references in a checkpoint: the objects they name are written in their place, and put back when it is read."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from pystale.integrations.xtuner.framework import ray, replay_buffer_module

__all__ = ["materialised", "referenced"]

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


def materialised(value: Any) -> Any:
    """Copy in which every Ray reference is replaced by XTuner's stand-in, with the object in it.

    Lists, dicts, sets, tuples, dataclasses and pydantic models are copied and looked into; everything else is shared.
    Ray is asked for all objects at once.
    """
    reference, stand_in = ray().ObjectRef, replay_buffer_module().SerializedRayObjectRef
    found: list[tuple[Any, Any]] = []

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, reference):
            return leaf
        found.append((leaf, stand_in(None)))
        return found[-1][1]

    copied = _copied(value, replace)
    while found:
        asked, found[:] = list(found), []
        objects = ray().get([leaf for leaf, _ in asked])
        for (_, stood_in), content in zip(asked, objects, strict=True):
            stood_in.value = _copied(content, replace)
    return copied


def referenced(value: Any) -> Any:
    """Copy in which every stand-in is replaced by a reference to the object in it."""
    stand_in = replay_buffer_module().SerializedRayObjectRef

    def replace(leaf: Any) -> Any:
        return ray().put(_copied(leaf.value, replace, (stand_in,))) if isinstance(leaf, stand_in) else leaf

    return _copied(value, replace, leaves=(stand_in,))


def _copied(value: Any, replace: Callable[[Any], Any], leaves: tuple[type, ...] = ()) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, leaves):
        return replace(value)
    if isinstance(value, (list, tuple, set)):
        if _ATOMS.issuperset(map(type, value)):  # tokens: nothing to look into, one by one it would take a second
            return value.copy() if isinstance(value, (list, set)) else value
        entries = [_copied(entry, replace, leaves) for entry in value]
        return entries if isinstance(value, list) else tuple(entries) if isinstance(value, tuple) else set(entries)
    if isinstance(value, dict):
        return {key: _copied(entry, replace, leaves) for key, entry in value.items()}
    if isinstance(value, BaseModel):
        model = value.model_copy()
        for name in kind.model_fields:
            setattr(model, name, _copied(getattr(value, name), replace, leaves))
        return model
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(
            value, **{name: _copied(entry, replace, leaves) for name, entry in fields.items()}
        )  # fmt: skip
    return replace(value)
