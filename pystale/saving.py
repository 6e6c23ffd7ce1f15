"""What of a store goes into a checkpoint, and how it is taken down while the store changes."""

import copy
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pystale.checkpoint import DOCUMENT, CheckpointError, CheckpointWriter
from pystale.checkpoint_reader import LoadedGroup, read_checkpoint_into
from pystale.collector import collector_paused
from pystale.field_types import DumpRef, LoadRef
from pystale.group import AGEING, Arriving, read_group
from pystale.history import Player
from pystale.journal import Journal
from pystale.ledger import Ledger, counts_by_task
from pystale.payload import EncodedGroup, encode_document, encode_group
from pystale.reading import Reading, read_journal
from pystale.staleness import checked_int
from pystale.state import Status, as_status, copy_state
from pystale.store import Record, Store
from pystale.strict_json import dump_json
from pystale.ticket import ForeignCopy, Ticket

__all__ = ["Resumed", "SaveJob", "encode_arriving", "load"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a buffer was resumed from.

    Attributes
    ----------
    extra : dict
        What ``save`` was given to keep; empty without a checkpoint.
    in_flight : dict of str to list
        By task, ids of the groups that were handed out when the checkpoint was made. They are stored again, but for
        those in `finished`.
    finished : dict of str to list
        By task, ids of the groups that came to the buffer after the checkpoint, according to the journal: whatever
        became of them, their prompts are not to be drawn again.
    taken : dict of str to list
        By task and in order, ids of the groups taken for training after the checkpoint, or on their way to the trainer
        at its moment. They are not in the buffer.
    notes : list of (note, result)
        What callers inside pystale kept in the journal with their operations, and what those returned.
    """

    extra: dict[str, Any] = field(default_factory=dict)
    in_flight: dict[str, list[Any]] = field(default_factory=dict)
    finished: dict[str, list[Any]] = field(default_factory=dict)
    taken: dict[str, list[Any]] = field(default_factory=dict)
    notes: list[tuple[Any, Any]] = field(default_factory=list)


class SaveJob:
    """One save: the store as it was when the job was made.

    Records are written one by one on a worker thread. Before a record changes, :meth:`preserve` keeps it as it is; so
    nothing has to be copied at the start, and nothing waits for the disk. What is handed out is written as it was then,
    and will be stored again in the pool it came from.

    Parameters
    ----------
    directory : path
        Where the checkpoint goes.
    store : Store
        Read here, under `lock`, which the caller holds.
    lock : threading.Lock
        The buffer's mutex.
    dump_ref : callable, optional
        Writes external references. Never called under the mutex.
    journal : Journal, optional
        Goes on in a new segment, and loses the old ones once the checkpoint is on disk.
    extra : mapping, optional
        Kept with the checkpoint.
    on_their_way : sequence of Record
        Taken for training, by callers who do not have them yet and may never get them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        store: Store,
        lock: threading.Lock,
        dump_ref: DumpRef | None = None,
        journal: Journal | None = None,
        extra: Mapping[str, Any] | None = None,
        on_their_way: Sequence[Record] = (),
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._dump_ref = dump_ref
        self._journal = journal
        # What is still to be written, by number in the index, which no two groups share. Copied as it is: a loop over
        # 100,000 groups would hold the mutex for 40 ms.
        self._stored = store.records.copy()
        self._numbers: Iterator[int] = iter(())
        # By arrival: what was claimed and has no number, and what changed while it was being written.
        self._apart = store.claimed.copy()
        self._lent = [ticket for ticket in reversed(store.tickets.values()) if ticket.states]
        self._writing: Record | None = None
        self._cancelled = False
        ledger = store.ledger.as_dict()
        ledger["stored"] += ledger["in_flight"]
        self._document: dict[str, Any] = {
            "id": secrets.token_hex(16),
            "order": store.order.value,
            "train_step": store.train_step,
            "arrivals": store.arrivals,
            "own_group_ids": store.own_group_ids,
            "ledger": {**ledger, "in_flight": 0, "discarded": dict(ledger["discarded"])},
            # Handed out by an earlier process, and known by their place alone.
            "handed_out": [
                {
                    "task": t.task.name,
                    "group_id": _plain(t.group_id),
                    "arrival": t.arrival,
                    "key": t.key,
                    "rerolls": t.rerolls,
                }
                for t in store.tickets.values()
                if not t.states
            ],
            "taken": [
                {"task": r.task.name, "group_id": _plain(r.group_id), "arrival": r.arrival} for r in on_their_way
            ],
            "extra": dict(extra or {}),
        }
        if store.left_out:
            self._document["left_out"] = dict(store.left_out)
        self._position = None if journal is None else journal.rotate()
        if journal is not None and self._position is not None:
            self._document["journal"] = {"id": journal.id, "segment": self._position.segment}

    def cancel(self) -> None:
        self._cancelled = True

    def preserve(self, record: Record, leaving: bool) -> None:
        """Keep a record as it was at the call, before it changes or leaves. Called under the mutex.

        Where it only changes, its fields are replaced and what they held stays as it is: copies of the states will do.
        What leaves may be changed to its last token, so then everything is copied; and what was kept earlier too, as
        it shares the tokens of members that have not changed.
        """
        arrival, number = record.arrival, record.number
        writing = self._writing is not None and self._writing.arrival == arrival
        kept = self._writing if writing else self._apart.get(arrival, self._stored.get(number))
        if kept is None or (kept is not record and not leaving):
            return
        copied = replace(kept, states=[copy_state(state, deep=leaving) for state in kept.states])
        if writing:
            self._writing = None
        if writing or arrival in self._apart:
            self._apart[arrival] = copied
        else:
            self._stored[number] = copied

    def run(self) -> None:
        """Write the checkpoint. Blocks; runs on a thread of its own."""
        writer = CheckpointWriter(self._directory)
        # Taking the first key of a dict again and again would walk over all that were taken before.
        self._numbers = iter(tuple(self._stored))
        try:
            while (group := self._next()) is not None:
                writer.add_encoded(self._dumped(group))
            if self._cancelled:
                writer.abort()
                return
            if self._journal is None or self._position is None:
                writer.commit(self._document)
            elif not self._journal.commit(self._position, self._directory, lambda: writer.commit(self._document)):
                writer.abort()
        except BaseException:
            writer.abort()
            raise

    def _pop(self) -> Record | None:
        """The next record to write, None after the last. Called under the mutex."""
        for number in self._numbers:
            return self._stored.pop(number)
        return self._apart.popitem()[1] if self._apart else None

    def _dumped(self, group: EncodedGroup) -> EncodedGroup:
        return group if self._dump_ref is None else group.dump_references(self._dump_ref)

    def _next(self) -> EncodedGroup | None:
        while not self._cancelled:
            with self._lock:
                record = self._writing = self._pop()
            if record is None:
                break
            failure = encoded = None
            try:
                encoded = encode(record, self._dump_ref)
            except Exception as error:
                failure = error
            with self._lock:
                # Otherwise the record changed meanwhile, and how it was is kept apart.
                if self._writing is record:
                    self._writing = None
                    if failure is not None:
                        raise failure
                    return encoded
        if self._lent and not self._cancelled:
            return encode(self._lent.pop(), self._dump_ref)
        return None


def _plain(group_id: Any) -> Any:
    """A NumPy integer as an int, which is the same id and which a document can hold."""
    return int(group_id) if isinstance(group_id, np.integer) else group_id


def encode(group: Record | Ticket, dump_ref: DumpRef | None) -> EncodedGroup:
    """A group as a checkpoint holds it, its external references to be written later."""
    header = {
        "task": group.task.name,
        "group_id": _plain(group.group_id),
        "status": group.status.name,
        "arrival": group.arrival,
        "key": group.key,
        "rerolls": group.rerolls,
    }
    if isinstance(group, Record) and group.is_agentic:
        header["agentic"] = True  # the member that had the training tensors may have been reset since
    if isinstance(group, Ticket):
        for position, state in enumerate(group.states):
            if isinstance(state, ForeignCopy):
                raise TypeError(
                    f"member {position} of group {group.group_id!r}, which is handed out, is a {state.kind.__name__}; "
                    "a checkpoint holds RolloutState objects only"
                )
        header["in_flight"] = True
        # It is going to be handed out again, and counted then.
        header["rerolls"] -= group.status is Status.EXPIRED
    return encode_group(header, group.states, references=dump_ref is not None)


def encode_arriving(arriving: Arriving, dump_ref: DumpRef | None) -> EncodedGroup:
    """A group that is about to be put, with its steps stamped, as the journal holds it.

    Raises
    ------
    TypeError
        For a payload that cannot be written, naming field and type.
    """
    states = []
    for state, steps in zip(arriving.states, arriving.steps, strict=True):
        if steps is not state.response_model_steps:
            state = copy.copy(state)
            state.response_model_steps = steps
        states.append(state)
    encoded = encode_group({}, states, references=dump_ref is not None)
    return encoded if dump_ref is None else encoded.dump_references(dump_ref)


def load(
    directory: str | os.PathLike[str] | None,
    new_store: Callable[[], Store],
    *,
    load_ref: LoadRef | None = None,
    journal: Journal | None = None,
    undo_takes: bool = False,
) -> tuple[Store, Resumed, Reading | None]:
    """Store that a checkpoint and the journal after it describe.

    Parameters
    ----------
    directory : path or None
        The checkpoint. With a journal it may be None, or hold no checkpoint: then all is in the journal.
    new_store : callable
        Makes an empty store.
    load_ref : callable, optional
        Reads external references.
    journal : Journal, optional
        Played back after the checkpoint.
    undo_takes : bool
        Store again what was taken for training after the checkpoint.

    Returns
    -------
    Store, Resumed, Reading or None
        The reading is of the journal, and is to be finished when the store is in place.

    Raises
    ------
    CheckpointError
        If the files, or what they say, cannot be right.
    ValueError
        If they are fine but do not fit the buffer's order or tasks, or each other.
    """
    if journal is None and directory is None:
        raise ValueError("resume(None) resumes from the journal alone, and this buffer has none; name the checkpoint")
    # Everything made here lives on; the collector would walk all of it again and again, stopping every thread.
    with collector_paused():
        return _load(directory, new_store, load_ref, journal, undo_takes)


def _load(
    directory: str | os.PathLike[str] | None,
    new_store: Callable[[], Store],
    load_ref: LoadRef | None,
    journal: Journal | None,
    undo_takes: bool,
) -> tuple[Store, Resumed, Reading | None]:
    store, resumed = new_store(), Resumed()
    place = identity = None
    on_their_way: list[dict[str, Any]] = []
    if directory is not None and (journal is None or Path(directory, DOCUMENT).exists()):
        store, resumed, document = read_checkpoint_into(
            directory, lambda document, groups: _filled(new_store(), directory, document, groups), load_ref
        )
        identity = document.get("id") or hashlib.sha256(dump_json(encode_document(document))).hexdigest()
        place = _journal_place(directory, document)
        on_their_way = document.get("taken", [])
    if journal is None:
        _name_taken(resumed, store, on_their_way)
        return store, resumed, None
    reading = read_journal(journal, place, identity, load_ref)
    player = Player(store)
    player.play(reading)
    if undo_takes:
        player.undo_takes()
    resumed.finished.update({task: list(ids) for task, ids in player.finished.items()})
    _name_taken(resumed, store, on_their_way)
    for task_name, ids in player.taken().items():
        resumed.taken.setdefault(task_name, []).extend(ids)
    resumed.notes.extend(player.notes)
    return store, resumed, reading


def _name_taken(resumed: Resumed, store: Store, on_their_way: list[dict[str, Any]]) -> None:
    """Name the groups that were on their way to the trainer at a checkpoint, but for those given back since."""
    here = {record.arrival for record in store.records.values()} if on_their_way else ()
    for group in on_their_way:
        if group["arrival"] not in here:
            resumed.taken.setdefault(group["task"], []).append(group["group_id"])


def _journal_place(directory: str | os.PathLike[str], document: dict[str, Any]) -> dict[str, Any] | None:
    place = document.get("journal")
    if place is None:
        return None
    if not isinstance(place, dict) or type(place.get("id")) is not str or type(place.get("segment")) is not int:
        raise CheckpointError(f"checkpoint in {os.fspath(directory)!r} contradicts itself: journal is {place!r:.80}")
    return place


def _filled(
    store: Store, directory: str | os.PathLike[str], document: dict[str, Any], groups: Iterator[LoadedGroup]
) -> tuple[Store, Resumed, dict[str, Any]]:
    """An empty store, filled with what a checkpoint holds; what is kept with it, and its document.

    Each group goes in as it is read. All of them in a list first, to be freed in one go at the end, would stop every
    thread for a tenth of a second per 100,000 groups.
    """
    if document.get("order") != store.order.value:
        raise ValueError(
            f"the checkpoint in {os.fspath(directory)!r} is ordered {document.get('order')}, "
            f"this buffer {store.order.value}; make the buffer with the checkpoint's order"
        )
    extra = document.get("extra", {})
    resumed = Resumed(extra if isinstance(extra, dict) else {})
    stored = 0
    for header, states in groups:
        store.settings(_text(header, "task"))
        try:
            stored += _restore(store, header, states)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise _contradiction(directory, error) from None
        if header.get("in_flight"):
            resumed.in_flight.setdefault(header["task"], []).append(header["group_id"])
    try:
        store.arrivals = checked_int("arrivals", document.get("arrivals"), at_least=0)
        store.own_group_ids = checked_int("own_group_ids", document.get("own_group_ids"), at_least=0)
        if document.get("train_step") is not None:
            store.train_step = checked_int("train_step", document["train_step"], at_least=1)
        for ticket in _objects(document, "handed_out"):
            name = (_text(ticket, "task"), ticket.get("group_id"))
            if name in store.tickets or name in store.numbers:
                raise ValueError(f"group {name[1]!r} of task {name[0]!r} is listed twice")
            arrival, key, rerolls = _place(ticket)
            store.tickets[name] = Ticket(
                store.task(name[0]), name[1], Status.ABORTED, arrival, key, rerolls, states=[], held=[]
            )
        # Absent in files written before it was kept.
        for group in _objects(document, "taken") if "taken" in document else ():
            _text(group, "task")
            checked_int("arrival", group.get("arrival"), at_least=0)
        store.left_out = counts_by_task(document.get("left_out", {}), "left_out")
        store.ledger = Ledger.after_restart(document.get("ledger"), stored)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise _contradiction(directory, error) from None
    return store, resumed, document


def _contradiction(directory: str | os.PathLike[str], error: Exception) -> CheckpointError:
    return CheckpointError(f"checkpoint in {os.fspath(directory)!r} contradicts itself: {error}")


def _restore(store: Store, header: dict[str, Any], states: list[Any]) -> int:
    """Store a group again; returns its response tokens."""
    task_name = _text(header, "task")
    arriving = read_group(states, task_name)
    if header.get("agentic") is True:
        arriving = arriving._replace(agentic=True)
    arrival, key, rerolls = _place(header)
    status = as_status(header.get("status"))
    expired = status is Status.EXPIRED
    if expired and Status.EXPIRED not in arriving.statuses:
        raise ValueError(f"group {arriving.group_id!r} is EXPIRED, none of its members is")
    left_out = [i for i, member_status in enumerate(arriving.statuses) if member_status is Status.EXPIRED]
    if status is Status.COMPLETED:
        if arriving.statuses.count(status) + len(left_out) < len(states) or len(left_out) == len(states):
            names = ", ".join(member_status.name for member_status in arriving.statuses)
            raise ValueError(f"group {arriving.group_id!r} is COMPLETED, its members are {names}")
        if any(arriving.members[i].tokens for i in left_out):
            raise ValueError(f"group {arriving.group_id!r} is COMPLETED, and a member that is EXPIRED has tokens")
    elif status in AGEING and not expired and left_out:
        raise ValueError(f"group {arriving.group_id!r} is {status.name}, one of its members is EXPIRED")
    group_id = header.get("group_id")
    hash(group_id)
    if (task_name, group_id) in store.numbers:
        raise ValueError(f"group {group_id!r} of task {task_name!r} is stored twice")
    record = store.record(arriving, group_id, status, arrival, key, rerolls)
    store.insert(record, arriving.statuses)
    return record.tokens


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
