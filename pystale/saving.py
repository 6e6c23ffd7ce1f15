"""What of a store goes into a checkpoint, and how it is taken down while the store changes."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pystale.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    EncodedGroup,
    collector_paused,
    encode_group,
    read_checkpoint,
)
from pystale.group import AGEING, read_group
from pystale.ledger import Ledger
from pystale.staleness import checked_int
from pystale.state import Status, as_status, copy_state
from pystale.store import Record, Store, Ticket

__all__ = ["SaveJob", "load"]


class SaveJob:
    """One save: the store as it was when the job was made.

    Records are written one by one on a worker thread. Before a record changes, :meth:`preserve` keeps it as it is; so
    nothing has to be copied at the start, and nothing waits for the disk.

    Parameters
    ----------
    directory : path
        Where the checkpoint goes.
    store : Store
        Read here, under `lock`, which the caller holds.
    lock : threading.Lock
        The buffer's mutex.
    """

    def __init__(self, directory: str | os.PathLike[str], store: Store, lock: threading.Lock) -> None:
        self._directory = directory
        self._lock = lock
        self._remaining = dict(store.records)
        self._writing: Record | None = None
        self._cancelled = False
        self._document = {
            "order": store.order.value,
            "train_step": store.train_step,
            "arrivals": store.arrivals,
            "own_group_ids": store.own_group_ids,
            "ledger": {**store.ledger.as_dict(), "discarded": dict(store.ledger.discarded)},
            "handed_out": [
                {
                    "task": t.task.name,
                    "group_id": _plain(t.group_id),
                    "arrival": t.arrival,
                    "key": t.key,
                    "rerolls": t.rerolls,
                }
                for t in store.tickets.values()
            ],
        }

    def cancel(self) -> None:
        self._cancelled = True

    def preserve(self, record: Record, leaving: bool) -> None:
        """Keep a record as it was at the call, before it changes or leaves. Called under the mutex.

        Where it only changes, its fields are replaced and what they held stays as it is: copies of the states will do.
        What leaves may be changed to its last token, so then everything is copied; and what was kept earlier too, as
        it shares the tokens of members that have not changed.
        """
        writing = self._writing is not None and self._writing.number == record.number
        kept = self._writing if writing else self._remaining.get(record.number)
        if kept is None or (kept is not record and not leaving):
            return
        if writing:
            self._writing = None
        states = [copy_state(state, deep=leaving) for state in kept.states]
        self._remaining[record.number] = replace(kept, states=states)

    def run(self) -> None:
        """Write the checkpoint. Blocks; runs on a thread of its own."""
        writer = CheckpointWriter(self._directory)
        try:
            while (group := self._next()) is not None:
                writer.add_encoded(group)
            if self._cancelled:
                writer.abort()
                return
            writer.commit(self._document)
        except BaseException:
            writer.abort()
            raise

    def _next(self) -> EncodedGroup | None:
        while not self._cancelled:
            with self._lock:
                if not self._remaining:
                    return None
                record = self._writing = self._remaining.pop(next(iter(self._remaining)))
            failure = encoded = None
            try:
                encoded = encode(record)
            except Exception as error:
                failure = error
            with self._lock:
                # Otherwise the record changed meanwhile, and how it was is among the remaining again.
                if self._writing is record:
                    self._writing = None
                    if failure is not None:
                        raise failure
                    return encoded
        return None


def _plain(group_id: Any) -> Any:
    """A NumPy integer as an int, which is the same id and which a document can hold."""
    return int(group_id) if isinstance(group_id, np.integer) else group_id


def encode(record: Record) -> EncodedGroup:
    header = {
        "task": record.task.name,
        "group_id": _plain(record.group_id),
        "status": record.status.name,
        "arrival": record.arrival,
        "key": record.key,
        "rerolls": record.rerolls,
    }
    return encode_group(header, record.states)


def load(directory: str | os.PathLike[str], new_store: Callable[[], Store]) -> Store:
    """Store that a checkpoint describes.

    Raises
    ------
    CheckpointError
        If the files, or what they say, cannot be right.
    ValueError
        If the checkpoint is fine but does not fit the buffer's order or tasks.
    """
    # Everything made here lives on; the collector would walk all of it again and again, stopping every thread.
    with collector_paused():
        return _load(directory, new_store)


def _load(directory: str | os.PathLike[str], new_store: Callable[[], Store]) -> Store:
    document, groups = read_checkpoint(directory)
    store = new_store()
    if document.get("order") != store.order.value:
        raise ValueError(
            f"the checkpoint in {os.fspath(directory)!r} is ordered {document.get('order')}, "
            f"this buffer {store.order.value}; make the buffer with the checkpoint's order"
        )
    for header, _ in groups:
        store.settings(_text(header, "task"))
    try:
        for header, states in groups:
            _restore(store, header, states)
        store.arrivals = checked_int("arrivals", document.get("arrivals"), at_least=0)
        store.own_group_ids = checked_int("own_group_ids", document.get("own_group_ids"), at_least=0)
        if document.get("train_step") is not None:
            store.train_step = checked_int("train_step", document["train_step"], at_least=1)
        for ticket in _objects(document, "handed_out"):
            name = (_text(ticket, "task"), ticket.get("group_id"))
            if name in store.tickets or name in store.numbers:
                raise ValueError(f"group {name[1]!r} of task {name[0]!r} is listed twice")
            store.tickets[name] = Ticket(store.task(name[0]), name[1], *_place(ticket), held=[])
        stored = sum(record.tokens for record in store.records.values())
        store.ledger = Ledger.after_restart(document.get("ledger"), stored)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(f"checkpoint in {os.fspath(directory)!r} contradicts itself: {error}") from None
    return store


def _restore(store: Store, header: dict[str, Any], states: list[Any]) -> None:
    task_name = _text(header, "task")
    arriving = read_group(states, task_name)
    arrival, key, rerolls = _place(header)
    status = as_status(header.get("status"))
    expired = status is Status.EXPIRED
    if expired and Status.EXPIRED not in arriving.statuses:
        raise ValueError(f"group {arriving.group_id!r} is EXPIRED, none of its members is")
    if status in AGEING and not expired and Status.EXPIRED in arriving.statuses:
        raise ValueError(f"group {arriving.group_id!r} is {status.name}, one of its members is EXPIRED")
    group_id = header.get("group_id")
    hash(group_id)
    if (task_name, group_id) in store.numbers:
        raise ValueError(f"group {group_id!r} of task {task_name!r} is stored twice")
    store.insert(store.record(arriving, group_id, status, arrival, key, rerolls), arriving.statuses)


def _place(header: dict[str, Any]) -> tuple[int, int | None, int]:
    key = header.get("key")
    if key is not None:
        key = checked_int("key", key, at_least=-(2**63))
    arrival = checked_int("arrival", header.get("arrival"), at_least=0)
    return arrival, key, checked_int("rerolls", header.get("rerolls"), at_least=0)


def _text(header: dict[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str):
        raise CheckpointError(f"{name} must be a string, got {value!r}")
    return value


def _objects(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    value = document.get(name)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} must be a list of objects")
    return value
