"""What an operation did to a store, as the journal keeps it, and how a store is brought forward by what is kept.

Outcomes are kept, not calls: which members expired, and not at which T the rule was asked. So playing back is exact
whatever the rules and the library have become since, costs no look at a token, and brings nothing back to life.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from pystale.batch import TrainBatch
from pystale.checkpoint import CheckpointError
from pystale.disposal import Cleared
from pystale.group import Group, read_group
from pystale.ledger import Ledger, Shares, counts_by_task
from pystale.segment import Entry
from pystale.staleness import checked_int
from pystale.state import Status, as_status

if TYPE_CHECKING:
    from pystale.store import Record, Store
    from pystale.ticket import Ticket

__all__ = ["Changes", "Player"]


class Changes:
    """What the running operation did to a store. The store tells; :meth:`envelope` takes it away."""

    __slots__ = ("_came", "_expired", "_finished", "_left", "_put", "_taken", "_thinned", "_train_step", "_undone")

    def __init__(self, train_step: int | None) -> None:
        self._train_step = train_step  # the latest that is in the journal
        self._clear()

    def _clear(self) -> None:
        self._put: tuple[Record, Status, bool] | None = None
        self._expired: list[list[Any]] = []
        self._thinned: list[list[Any]] = []  # groups that go on without members that expired
        self._left: list[int] = []
        self._taken: list[list[int]] = []
        self._came = False
        self._finished: list[Any] | None = None
        self._undone = False

    def put(self, record: "Record", *, returned: bool) -> None:
        """A group was stored; `returned`: it had been handed out."""
        self._put = (record, record.status, returned)

    def expire(self, record: "Record", members: list[int]) -> None:
        where = self._thinned if record.status is Status.COMPLETED else self._expired
        where.append([record.arrival, list(members)])

    def leave(self, record: "Record") -> None:
        """A stored group was discarded."""
        if self._put is None or self._put[0] is not record:
            self._left.append(record.arrival)
            return
        if self._put[2]:
            self._left.append(record.arrival)
        self._put = None
        self.finish(record.task.name, record.group_id)

    def settle(self, ticket: "Ticket") -> None:
        """A group that had been handed out does not come back."""
        if ticket.states:  # one that an earlier process handed out is known to no journal
            self._left.append(ticket.arrival)

    def finish(self, task_name: str, group_id: Any) -> None:
        """A group came and was not stored. One whose id no file can hold is in the account only."""
        self._came = True
        if isinstance(group_id, np.integer):
            group_id = int(group_id)
        if type(group_id) in (int, str):
            self._finished = [task_name, group_id]

    def take(self, record: "Record", shares: Shares) -> None:
        self._taken.append([record.arrival, *shares])

    def undo_takes(self) -> None:
        self._undone = True

    def envelope(self, op: str, store: "Store", note: Any = None) -> tuple[dict[str, Any], bool, bool] | None:
        """Entry for what was done, whether it has a group, and whether it is worth waiting for; None for nothing.

        `note` is kept with it: JSON, or None.
        """
        done = (self._put, self._expired, self._thinned, self._left, self._taken, self._came, self._undone, note)
        waits = any(map(bool, done))
        if not waits and store.train_step == self._train_step:
            return None
        self._train_step = store.train_step
        ledger = store.ledger
        content: dict[str, Any] = {
            "op": op,
            "train_step": store.train_step,
            "arrivals": store.arrivals,
            "own_group_ids": store.own_group_ids,
            "ledger": {
                "produced": ledger.produced,
                "trained": ledger.trained,
                "masked_stale": ledger.masked_stale,
                "masked_semantic": ledger.masked_semantic,
                "discarded": dict(ledger.discarded),
            },
        }
        if self._put is not None:
            record, status, _ = self._put
            group_id = record.group_id
            content["put"] = {
                "task": record.task.name,
                "group_id": int(group_id) if isinstance(group_id, np.integer) else group_id,
                "status": status.name,
                "arrival": record.arrival,
                "key": record.key,
                "rerolls": record.rerolls,
            }
        for name, value in (
            ("left", self._left),
            ("taken", self._taken),
            ("expired", self._expired),
            ("thinned", self._thinned),
            ("left_out", dict(store.left_out)),
            ("finished", self._finished),
            ("undo_takes", self._undone),
            ("note", note),
        ):
            if value:
                content[name] = value
        has_group = self._put is not None
        self._clear()
        return content, has_group, waits


class Player:
    """Brings a store forward, entry by entry.

    Attributes
    ----------
    finished : dict of str to list
        By task, ids of the groups that came: were put, or counted without being put.
    notes : list of (note, result)
        Notes of operations, in order. The result of a put is the pool it was stored in, EXPIRED if it was not; that of
        a take its TrainBatch; all others have none.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._records = {record.arrival: record for record in store.records.values()}
        self._taken: dict[int, tuple[Record, list[int]]] = {}
        self._ledger: Any = None
        self.finished: dict[str, dict[Any, None]] = {}
        self.notes: list[tuple[Any, Status | TrainBatch | None]] = []

    def taken(self) -> dict[str, list[Any]]:
        """By task, ids of the groups taken for training and not undone, in order."""
        found: dict[str, list[Any]] = {}
        for record, _ in self._taken.values():
            found.setdefault(record.task.name, []).append(record.group_id)
        return found

    def play(self, entries: Iterable[Entry]) -> None:
        """Do to the store what the entries say.

        Raises
        ------
        CheckpointError
            If an entry cannot be right, or the account does not balance at the end.
        ValueError
            If a task has no rule.
        """
        where = ""
        for entry in entries:
            where = entry.where
            if "put" in entry.envelope:
                self._store.settings(_object(entry.envelope, "put", where).get("task"))  # type: ignore[arg-type]
            try:
                self._play(entry)
            except (TypeError, ValueError, KeyError, IndexError, OverflowError) as fault:
                raise CheckpointError(f"{where} contradicts what comes before: {fault!s:.300}") from None
        if where:
            stored = sum(record.tokens for record in self._store.records.values())
            try:
                self._store.ledger = Ledger.after_restart({**self._ledger, "stored": stored, "in_flight": 0}, stored)
            except ValueError as fault:
                raise CheckpointError(f"{where} contradicts what comes before: {fault!s:.300}") from None

    def _play(self, entry: Entry) -> None:
        store, envelope = self._store, entry.envelope
        if envelope["train_step"] is not None:
            store.train_step = checked_int("train_step", envelope["train_step"], at_least=1)
        store.arrivals = checked_int("arrivals", envelope["arrivals"], at_least=0)
        store.own_group_ids = checked_int("own_group_ids", envelope["own_group_ids"], at_least=0)
        self._ledger = _object(envelope, "ledger", entry.where)
        for arrival in envelope.get("left", ()):
            store.remove(self._pop(arrival))
        for arrival, *shares in envelope.get("taken", ()):
            record = self._pop(arrival)
            store.remove(record)
            self._taken[arrival] = (record, [checked_int("tokens taken", share, at_least=0) for share in shares])
        if entry.states is not None:
            self._put(envelope["put"], entry.states)
        for kind, pool in (("expired", Status.EXPIRED), ("thinned", Status.COMPLETED)):
            for arrival, positions in envelope.get(kind, ()):
                record = self._records[arrival]
                if not positions or not set(positions) <= set(range(len(record.states))):
                    raise ValueError(f"members {positions!r} of {len(record.states)} expired")
                store.reset_members(record, positions, Cleared(wanted=False), pool)
        if envelope.get("finished"):
            task_name, group_id = envelope["finished"]
            self.finished.setdefault(task_name, {})[group_id] = None
        if envelope.get("undo_takes"):
            self.undo_takes()
        store.left_out = counts_by_task(envelope.get("left_out", {}), "left_out")
        if envelope.get("note"):
            self.notes.append((envelope["note"], self._result(envelope)))

    def _result(self, envelope: dict[str, Any]) -> "Status | TrainBatch | None":
        if envelope["op"] == "put":
            return self._records[envelope["put"]["arrival"]].status if "put" in envelope else Status.EXPIRED
        if envelope["op"] != "take":
            return None
        groups: dict[str, list[Group]] = {}
        tokens: dict[str, int] = {}
        left_out: Counter[str] = Counter()
        for arrival, trained, *_ in envelope.get("taken", ()):
            record, _ = self._taken[arrival]
            groups.setdefault(record.task.name, []).append(record.states)
            tokens[record.task.name] = tokens.get(record.task.name, 0) + trained
            left_out[record.task.name] += record.left_out
        return TrainBatch(groups, tokens, left_out)

    def _pop(self, arrival: Any) -> "Record":
        record = self._records.pop(arrival, None)
        if record is None:
            raise ValueError(f"no group with arrival {arrival!r} is stored")
        return record

    def _put(self, header: dict[str, Any], states: list[Any]) -> None:
        store = self._store
        arrival, rerolls = (checked_int(name, header[name], at_least=0) for name in ("arrival", "rerolls"))
        key = None if header["key"] is None else checked_int("key", header["key"], at_least=-(2**63))
        self._taken.pop(arrival, None)
        if arrival in self._records:
            store.remove(self._records.pop(arrival))
        name = (header["task"], header["group_id"])
        if name in store.numbers:
            raise ValueError(f"group {name[1]!r} of task {name[0]!r} is stored already")
        store.tickets.pop(name, None)
        arriving = read_group(states, header["task"])
        status = as_status(header["status"])
        record = store.admit(arriving, header["group_id"], status, arrival, key, rerolls, store.train_step)
        self._records[arrival] = record
        self.finished.setdefault(header["task"], {})[header["group_id"]] = None

    def undo_takes(self) -> int:
        """Store the groups again that were taken for training; returns how many."""
        store, undone = self._store, 0
        for arrival, (record, shares) in self._taken.items():
            if (record.task.name, record.group_id) in store.numbers:
                continue  # the same prompt has come again since
            store.insert(record, [as_status(state.status) for state in record.states])
            self._records[arrival] = record
            store.ledger.trained -= shares[0]
            store.ledger.masked_stale -= shares[1]
            store.ledger.masked_semantic -= shares[2]
            store.ledger.stored += record.tokens
            store.count_left_out(record, -1)
            undone += 1
        self._taken.clear()
        return undone


def _object(envelope: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = envelope.get(name)
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name} must be an object, got {value!r:.80}")
    return value
