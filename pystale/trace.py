"""The trace: what happened to a buffer, line by line, for ``pystale replay`` to go through again.

JSON Lines in ASCII, described in ``docs/trace.md``: a header with the settings, then a line per operation. Versions and
masks are runs, there is no text, and what is usual is left out: a rollout takes about 100 bytes, more in many parts.

A trace is a record, not a safeguard. It never holds up the buffer: lines wait in memory for a thread that writes them,
:data:`WAITING_BYTES` at most. Where the disk is slower than that, lines are left out, and a line in their place says
how many. When it cannot be written at all, that is logged once, and the buffer goes on without it.
"""

import atexit
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from pystale._objects import ModelSteps, effective_mask
from pystale.arguments import Rules, Triggers
from pystale.files import write_all
from pystale.group import AGEING, Arriving, read_group
from pystale.staleness import StalenessRule, checked_int
from pystale.state import Status
from pystale.strict_json import dump_json

if TYPE_CHECKING:
    from pystale.record import Record
    from pystale.store import Store

__all__ = ["LINE_BYTES", "SCHEMA", "Trace", "members_of", "note_weight_sync", "stored_lines", "trace_header"]

logger = logging.getLogger("pystale")

SCHEMA = 1
# Lines that wait to be written take no more memory than this.
WAITING_BYTES = 64 << 20
# Longer lines are neither written nor read. A group of 8 responses whose 32,768 tokens are all of different versions
# has 3 MiB.
LINE_BYTES = 16 << 20
# Times are below this.
MOST_SECONDS = 1e11
# What the writing thread takes at a time, and how long it lets lines gather.
WRITE_BYTES = 1 << 20
GATHER_SECONDS = 0.05
# What a line that is not a dict of its own takes on top of its members.
HEAD_BYTES = 400

# Windows closes files in new processes by itself, and has a text mode that must be off.
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
NEW_FILE |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

# What a line says, but for the members of its group; and these, as JSON.
Line = tuple[dict[str, Any], bytes]


def trace_header(
    rules: Rules,
    triggers: Triggers,
    order: str,
    missing_version: str,
    max_rerolls: int | None,
    min_fresh: int | None,
) -> dict[str, Any]:
    """First line of a trace: its schema, and the settings of the buffer."""
    names: list[str | None] = []
    if isinstance(rules, dict):
        names += rules
    else:
        names += [None, *(triggers if isinstance(triggers, dict) else ())]
    tasks = []
    for name in names:
        rule = rules if isinstance(rules, StalenessRule) else rules[str(name)]
        trigger = triggers.get(str(name), -1) if isinstance(triggers, dict) else triggers
        if name is None and isinstance(triggers, dict):
            trigger = -1
        tasks.append(
            {
                "task": name,
                "max_staleness": rule.max_staleness,
                "max_token_staleness": rule.max_token_staleness,
                "sync_weights_interval": rule.sync_weights_interval,
                "spare_aborted": rule.spare_aborted,
                "tail_batch_trigger_size": trigger,
            }
        )
    return {
        "pystale_trace": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "order": order,
        "missing_version": missing_version,
        "max_rerolls": max_rerolls,
        "min_fresh": min_fresh,
        "tasks": tasks,
    }


class Trace:
    """Writes the trace of one buffer.

    The buffer's operations call it under their mutex, in the order in which they take effect; managers and clients add
    what only they know with :meth:`leg` and :meth:`weight_sync`, from any thread. No method but :meth:`flush` and
    :meth:`close` waits, and none raises for what becomes of the file once it is there. A process that is forked leaves
    the file to its parent.

    Parameters
    ----------
    path : path
        File to write, which must not exist.
    header : mapping
        See :func:`trace_header`.

    Raises
    ------
    FileExistsError
        If there is such a file: a recorded run is not overwritten.
    OSError
        If it cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        self._lines = _Lines(path)
        self._began = time.monotonic()
        self._model_step: int | None = None
        weakref.finalize(self, self._lines.end)
        self._lines.append((dict(header), b""))

    @property
    def path(self) -> str:
        """The file."""
        return self._lines.path

    @property
    def lost(self) -> int:
        """Lines left out so far because the disk was too slow."""
        return self._lines.lost_in_all

    # What producers know

    def leg(
        self, group_id: Any, rollout_id: Any, *, model_step: int | None, tokens: int, reason: str, seconds: float
    ) -> None:
        """A request to the engine is over.

        Parameters
        ----------
        group_id, rollout_id : int, str or None
            The rollout it belongs to.
        model_step : int or None
            Version that served it, its last where there were several.
        tokens : int
            New tokens.
        reason : str
            Finish reason: stop, length, abort or what the engine says.
        seconds : float
            How long it took.

        Raises
        ------
        TypeError, ValueError
            For a version or tokens that are no integers, or negative tokens.
        """
        if model_step is not None:
            model_step = checked_int("model_step", model_step, at_least=-(2**63))
        tokens = checked_int("tokens", tokens, at_least=0)
        seconds = min(max(0.0, float(seconds)), MOST_SECONDS)  # whatever a clock says
        leg: list[Any] = [_id(group_id), _id(rollout_id), model_step, tokens, round(seconds, 3)]
        if reason != "stop":
            leg.append(str(reason)[:100])
        self._write("leg", {"leg": leg})

    def weight_sync(self, model_step: int) -> None:
        """From now on the engine serves the weights of `model_step`; written once for each."""
        if model_step != self._model_step:
            self._model_step = checked_int("model_step", model_step, at_least=0)
            self._write("sync", {"model_step": self._model_step})

    # What the buffer does

    def put(self, store: "Store", arriving: Arriving, members: bytes, train_step: int | None) -> None:
        """A group came; `members` is what :func:`members_of` said of it before."""
        self._write("put", {**_arrival(store, arriving), **_given("train_step", train_step)}, members)

    def close_account(self, op: str, store: "Store", arriving: Arriving, members: bytes, outcome: str) -> None:
        """A group came that is not stored: `op` is "reject" or "settle"."""
        self._write(op, {**_arrival(store, arriving), "outcome": outcome}, members)

    def refresh(self, train_step: int, pools: Collection[Status]) -> None:
        """Groups of `pools` were aged."""
        some = {} if set(AGEING) <= set(pools) else {"pools": sorted(status.name for status in pools)}
        self._write("refresh", {"train_step": train_step, **some})

    def get(self, records: "Sequence[Record]") -> None:
        """Groups of one pool were handed out for continuation or re-rollout."""
        if records:
            self._write("get", {"pool": records[0].status.name, "groups": _by_task(records)})

    def take(
        self, sizes: Mapping[str, int], status: Status, train_step: int | None, records: "Sequence[Record]"
    ) -> None:
        """A batch was asked for; it got `records`, or none when a task was short."""
        pool = {} if status is Status.COMPLETED else {"pool": status.name}
        groups = _by_task(records)
        self._write("take", {"sizes": dict(sizes), **_given("train_step", train_step), **pool, "groups": groups})

    def undo(self, records: "Sequence[Record]") -> None:
        """Groups that were handed out or taken are stored again, as if they had never left."""
        if records:
            self._write("undo", {"groups": _by_task(records)})

    def account(self, store: "Store", *, always: bool = False) -> None:
        """The account of tokens, and the counts of groups, at this moment; `always`: however much waits already."""
        self._write("ledger", _account(store), always=always)

    def resume(self, store: "Store", stored: "Sequence[Line]") -> None:
        """A checkpoint was loaded; `stored` is what :func:`stored_lines` made of its groups.

        All of it waits to be written, however much it is: a trace without a part of it would say nothing.
        """
        at = self._at()
        lines = [({"op": "stored", "at": at, **head}, members) for head, members in stored]
        head = {"op": "resume", "at": at, **_given("train_step", store.train_step), **_account(store)}
        self._lines.append((head, b""), *lines, always=True)

    def _write(self, op: str, content: dict[str, Any], members: bytes = b"", *, always: bool = False) -> None:
        self._lines.append(({"op": op, "at": self._at(), **content}, members), always=always)

    def _at(self) -> float:
        return round(time.monotonic() - self._began, 3)

    # The file

    def flush(self) -> None:
        """Block until every line so far is in the file, or the file is given up."""
        self._lines.flush()

    def close(self) -> None:
        """Block until every line is in the file. Later ones go nowhere."""
        self._lines.close()


def members_of(arriving: Arriving) -> bytes:
    """Members of a group as a line has them; to be called before the group is stored, which may reset them."""
    members: list[dict[str, Any] | list[int]] = []
    for state, steps, member, status in zip(
        arriving.states, arriving.steps, arriving.members, arriving.statuses, strict=True
    ):
        content: dict[str, Any] = {}
        if status is not Status.COMPLETED:
            content["status"] = status.name
        if member.tokens:
            runs = ModelSteps.from_list(steps) if member.versioned else ModelSteps.from_runs([(0, member.tokens)])
            if member.versioned:
                content["steps"] = [number for run in runs.runs() for number in run]
            else:
                content["tokens"] = member.tokens
            if member.trainable != member.tokens - member.others:
                mask = effective_mask(runs, train_step=1, token_stale_threshold=None, response_mask=state.response_mask)
                content["mask"] = [number for run in ModelSteps.from_list(mask).runs() for number in run]
        members.append(content["steps"] if list(content) == ["steps"] else content)
    return dump_json(members)


def stored_lines(store: "Store") -> list[Line]:
    """Lines for the groups of a store that a checkpoint was loaded into, in the order in which they came."""
    lines = []
    for record in sorted(store.records.values(), key=lambda record: record.arrival):
        arriving = read_group(record.states, record.task.name)
        head = {
            "task": record.task.name,
            "group": _id(record.group_id),
            "pool": record.status.name,
            **_given("key", record.key),
            **_given("rerolls", record.rerolls or None),
            **_given("agentic", arriving.agentic or None),
            **_given("prompt_model_step", arriving.prompt_model_step),
        }
        lines.append((head, members_of(arriving)))
    return lines


def note_weight_sync(buffer: Any, model_step: int) -> None:
    """Have a weight sync in the trace of a buffer, of whatever kind, that has one."""
    trace = getattr(buffer, "trace", None)
    if isinstance(trace, Trace):
        trace.weight_sync(model_step)


def _account(store: "Store") -> dict[str, Any]:
    ledger = store.ledger.as_dict()
    return {**ledger, "discarded": dict(ledger["discarded"]), "groups": dict(store.group_counts)}


def _arrival(store: "Store", arriving: Arriving) -> dict[str, Any]:
    """What a line says of a group that has just come, but for its members."""
    came = store.came
    content: dict[str, Any] = {"task": arriving.task_name, "group": _id(came.group_id)}
    if came.returned:
        content["back"] = True
        if came.restarted:
            content["restarted"] = came.restarted
    elif arriving.rerolls:
        content["rerolls"] = arriving.rerolls
    if arriving.agentic:
        content["agentic"] = True
    return {**content, **_given("prompt_model_step", arriving.prompt_model_step)}


def _given(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


def _id(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value if isinstance(value, (int, str)) else None


def _by_task(records: "Sequence[Record]") -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for record in records:
        groups.setdefault(record.task.name, []).append(_id(record.group_id))
    return groups


class _Lines:
    """A file, the lines that wait for it, and the thread that writes them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.lost_in_all = 0
        try:
            self._file = os.open(self.path, NEW_FILE, 0o666)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST, "exists; a recorded run is not overwritten, name another file", self.path
            ) from None
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._hurry = threading.Event()
        self._waiting: list[Line] = []
        self._waiting_bytes = 0  # with those being written
        self._lost = 0  # since the last line that was kept
        self._appended = 0
        self._written = 0
        self._closed = False
        self._failed = False
        self._writer = threading.Thread(target=self._write, name="pystale-trace", daemon=True)
        self._writer.start()
        _open.add(self)

    def append(self, *lines: Line, always: bool = False) -> None:
        """Have lines written, which are not changed any more; `always`: however much waits already."""
        if self._closed or self._failed or os.getpid() != self._process:
            return
        size = _size(lines)
        with self._condition:
            full = self._waiting_bytes + size > WAITING_BYTES and not always
            if full or any(len(members) > LINE_BYTES - HEAD_BYTES for _, members in lines):
                if not self.lost_in_all:
                    logger.warning("lines of the trace %s are left out: the disk is too slow for them", self.path)
                self._lost += len(lines)
                self.lost_in_all += len(lines)
                return
            self._note_lost(lines[0][0].get("at"))
            idle = not self._waiting
            self._waiting += lines
            self._waiting_bytes += size
            self._appended += len(lines)
            if idle:
                self._condition.notify_all()

    def _note_lost(self, at: Any) -> None:
        if self._lost:
            self._waiting.append(({"op": "lost", "at": at, "lines": self._lost}, b""))
            self._waiting_bytes += HEAD_BYTES
            self._appended += 1
            self._lost = 0

    def flush(self) -> None:
        if os.getpid() != self._process:
            return
        with self._condition:
            wanted = self._appended
            self._hurry.set()
            self._condition.wait_for(lambda: self._written >= wanted or self._failed)
            if not self._closed:
                self._hurry.clear()

    def end(self) -> None:
        """Have the file closed once what waits is written, without waiting for it."""
        if os.getpid() != self._process:
            return
        with self._condition:
            if not self._closed:
                self._note_lost(None)
                self._closed = True
                self._hurry.set()
                self._condition.notify_all()

    def close(self) -> None:
        self.end()
        if os.getpid() == self._process:
            self._writer.join()

    def _write(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    break
            self._hurry.wait(GATHER_SECONDS)
            with self._condition:
                batch, self._waiting = self._waiting, []
            if not self._failed:
                self._write_batch(batch)
            with self._condition:
                self._written += len(batch)
                self._waiting_bytes -= _size(batch)
                self._condition.notify_all()
        _open.discard(self)
        os.close(self._file)

    def _write_batch(self, batch: list[Line]) -> None:
        try:
            gathered = bytearray()
            for head, members in batch:
                gathered += _line(head, members)
                if len(gathered) >= WRITE_BYTES:
                    self._write_all(gathered)
                    gathered = bytearray()
            self._write_all(gathered)
        except Exception:  # also what is no OSError must not leave anybody waiting
            self._failed = True
            logger.exception("the trace %s ends here: it cannot be written", self.path)

    def _write_all(self, data: bytearray) -> None:
        whole = os.fstat(self._file).st_size
        try:
            write_all(self._file, bytes(data))
        except OSError:
            os.ftruncate(self._file, whole)  # so that no line is half there
            raise


# Files that are still written to: what waits when the interpreter exits is written then.
_open: set[_Lines] = set()


@atexit.register
def _close_all() -> None:
    for lines in list(_open):
        lines.close()


def _size(lines: Iterable[Line]) -> int:
    """Memory that lines take while they wait, about."""
    return sum([len(members) + HEAD_BYTES for _, members in lines])


def _line(head: dict[str, Any], members: bytes) -> bytes:
    line = dump_json(head)
    return line + b"\n" if not members else line[:-1] + b',"members":' + members + b"}\n"
