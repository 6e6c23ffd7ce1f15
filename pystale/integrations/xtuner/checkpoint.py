"""XTuner's own checkpoint file of a replay buffer, written from and read into pystale's."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pystale.integrations.xtuner.framework import replay_buffer_module, torch
from pystale.integrations.xtuner.references import materialised, referenced
from pystale.state import Status, as_status

__all__ = ["FILE", "Entry", "describe", "read", "write"]

FILE = "replay_buffer.pth"
_STORAGE = "NaiveStorage"


class Entry(NamedTuple):
    """A stored group, as the file has it."""

    group: list[Any]
    arrival: int
    task_name: str
    status: Status
    staleness: int


def _policy(fifo: bool) -> str:
    return "FIFOReplayPolicy" if fifo else "StalenessReplayPolicy"


def describe(entries: Sequence[Entry], *, fifo: bool) -> dict[str, Any]:
    """The document of a file: what the groups are now, out of reach of later changes to their lists and dicts."""
    module = replay_buffer_module()
    items = [
        module.StorageItem(
            item=entry.group,
            uid=entry.arrival,
            timestamp_id=entry.arrival,
            task_name=entry.task_name,
            status=module.Status[entry.status.name],
            staleness=entry.staleness,
        )
        for entry in sorted(entries, key=lambda entry: entry.arrival)
    ]
    following = items[-1].uid + 1 if items else 1
    state = {"items": materialised(items), "next_uid": following, "next_timestamp_id": following}
    return {"policy": _policy(fifo), "storage": _STORAGE, "storage_state": state}


def write(document: dict[str, Any], directory: Path) -> None:
    """Write the file beside its place, then move it there."""
    directory.mkdir(parents=True, exist_ok=True)
    beside = directory / f".{FILE}.{os.getpid()}"
    try:
        torch().save(document, beside)
        os.replace(beside, directory / FILE)
    finally:
        beside.unlink(missing_ok=True)


def read(directory: Path, *, fifo: bool) -> tuple[list[Entry], int]:
    """Groups of a file, and the arrival number of the next.

    Raises
    ------
    ValueError
        If the file is of a buffer of another order or storage.
    """
    # The file is XTuner's own, a pickle of its states: nothing less can read it. `resume` says so to its callers.
    document = torch().load(directory / FILE, map_location="cpu", weights_only=False)
    for key, wanted in (("policy", _policy(fifo)), ("storage", _STORAGE)):
        if document[key] != wanted:
            raise ValueError(f"{directory / FILE} is of {key} {document[key]}, this buffer is of {wanted}")
    state = document["storage_state"]
    items = sorted(referenced(state["items"]), key=lambda item: item.timestamp_id)
    entries = [
        Entry(item.item, item.timestamp_id, item.task_name, as_status(item.status), item.staleness) for item in items
    ]
    return entries, state["next_timestamp_id"]
