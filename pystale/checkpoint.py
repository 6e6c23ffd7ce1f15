"""Checkpoints: a directory that holds groups of rollout states and a document, whole or not at all.

The format, schema version 2
----------------------------
Version 1 had no external references (``refs`` and ``$ref``); otherwise it is the same, and is read as well.

A checkpoint is a directory with these files. All text is ASCII, all JSON is strict (no duplicate keys, no NaN).

``checkpoint.json``
    One object with exactly these keys:

    ``format``
        The string ``pystale-checkpoint``.
    ``schema_version``
        2.
    ``library_version``
        Version of pystale that wrote it, for people.
    ``sha256``
        SHA-256 in lower-case hexadecimal of this very file, computed with these 64 characters replaced by ``0``.
    ``groups``
        Number of groups in all shards.
    ``shards``
        List of objects ``{"groups": n, "lines": FILE, "arrays": [FILE, ...]}``, in order. FILE is
        ``{"name": ..., "size": bytes, "sha256": hex}``. Names are ``groups-TOKEN-NNNNN.jsonl`` and
        ``arrays-TOKEN-NNNNN.safetensors`` in the same directory, TOKEN being 16 hexadecimal digits.
    ``document``
        What the caller of :meth:`CheckpointWriter.commit` wanted kept: an object, encoded as below but without columns.

``groups-TOKEN-NNNNN.jsonl``
    One line per group, each ended by a line feed: ``{"header": {...}, "fields": {...}}``, and ``"refs": [...]`` where
    the group has external references. The header is the caller's.
    ``fields`` maps names of :class:`~pystale.RolloutState` fields to one of

    - a list of encoded values, one per member of the group,
    - ``{"all": value}``, one encoded value that every member has a copy of, or
    - a string, the kind of a column: every member has the next entry of the column ``field:kind``.

    ``status`` is always there, always a list, and its plain strings are names of :class:`~pystale.Status`. Any other
    field that is not there has its default for every member: ``{}`` for ``extra_fields``, 0 for ``seq_staleness`` and
    ``rerolls``, otherwise None. ``refs`` lists the encoded values that stand for external references.

``arrays-TOKEN-NNNNN.safetensors``
    Columns of the shard, in the safetensors format (little-endian). The tensor ``field:kind`` holds the values of all
    entries of the column, one after the other; ``field:kind:shapes`` has one row per entry with its lengths, outermost
    dimension first. Where a shard has several of these files, a tensor is the concatenation, along its first dimension,
    of the tensors of that name in the files in order.

Encoded values
    None, bools, strings, finite floats and integers of 64 bits are their JSON. A list is a JSON array of encoded
    values. A dict is an object of encoded values if its keys are strings that do not begin with ``$``. An object whose
    one key begins with ``$`` is one of

    ============================  =====================================================================================
    ``{"$column": kind}``         the next entry of column ``field:kind``, of the field (``header``, ``refs``) it is in
    ``{"$ref": n}``               the external reference that the entry `n` of ``refs`` stands for, counted from 0
    ``{"$tuple": [...]}``         a tuple
    ``{"$dict": [[k, v], ...]}``  a dict with any keys, in order
    ``{"$int": "-0x..."}``        an integer beyond 64 bits
    ``{"$float": "7ff8..."}``     an infinite float or NaN: the big-endian IEEE 754 double in hexadecimal
    ``{"$status": "NAME"}``       a :class:`~pystale.Status`
    ``{"$str": "..."}``           a string, where a plain one would mean something else
    ============================  =====================================================================================

Columns
    Entries are used up in the order in which they are named: line by line, within a line by member, within a member
    depth first, in the order of the JSON (a key of a ``$dict`` before its value). No entry is left over.

    =====================  ==================  ==============  ========================================================
    kind                   an entry is         shapes          values
    =====================  ==================  ==============  ========================================================
    ``ints``               list of int         ``[n]``         any signed integer dtype
    ``floats``             list of float       ``[n]``         float64
    ``bools``              list of bool        ``[n]``         bool
    ``bytes``              bytes               ``[n]``         uint8
    ``runs``               ModelSteps          ``[runs]``      any signed integer dtype, rows of (model step, tokens)
    ``array.DTYPE.NDIM``   ndarray             its shape       that dtype, C order; no shapes where NDIM is 0
    ``scalar.DTYPE``       NumPy scalar        none            that dtype
    =====================  ==================  ==============  ========================================================

    DTYPE is NumPy's name with byte order, such as ``<i4``, ``>f8`` or ``|b1``: integers of 8 to 64 bits, floats of 16
    to 64 bits, bool. The byte order is that of the array to be made; the file is little-endian.

Writing
-------
Data files are new files under a token of their own, and are on disk before the new ``checkpoint.json``, written beside
the old one, takes its place by a rename. Until then the previous checkpoint is untouched; only afterwards are its files
deleted. A writer holds a lock (``flock``) on ``writing-TOKEN.lock`` while it lives, so that a commit can delete what
dead writers left behind without touching live ones. Of two writers into one directory the last to commit wins. On file
systems without locks a commit deletes only the files of the checkpoint it replaces.
"""

import contextlib
import errno
import fcntl
import gc
import hashlib
import importlib.metadata
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from pystale.columns import ColumnReader, Columns, Malformed
from pystale.payload import (
    EncodedGroup,
    LoadRef,
    decode_document,
    decode_group,
    dump_json,
    encode_document,
    encode_group,
    parse_json,
)
from pystale.state import RolloutState

__all__ = [
    "CheckpointError",
    "CheckpointWriter",
    "EncodedGroup",
    "LoadedGroup",
    "collector_paused",
    "encode_group",
    "read_checkpoint",
    "read_checkpoint_into",
]

logger = logging.getLogger("pystale")

DOCUMENT = "checkpoint.json"
FORMAT = "pystale-checkpoint"
SCHEMA_VERSION = 2

# A shard is written when it holds this much. Small enough that no step of writing or reading it keeps other threads
# waiting for long, large enough that a file and its fsync are not the cost.
SHARD_BYTES = 4 << 20
SHARD_GROUPS = 2048

_PREFIX = f'{{"format":"{FORMAT}",'.encode()
_DATA_FILE = re.compile(r"(?:groups-([0-9a-f]{16})-[0-9]{5,9}\.jsonl|arrays-([0-9a-f]{16})-[0-9]{5,9}\.safetensors)")
_ANY_FILE = re.compile(
    r"(?:groups-|arrays-|writing-|checkpoint-)([0-9a-f]{16})(?:-[0-9]{5,9}\.jsonl|-[0-9]{5,9}\.safetensors|\.lock|\.tmp)"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


Result = TypeVar("Result")

LoadedGroup: TypeAlias = tuple[dict[str, Any], list[RolloutState]]
"""Header and members of a group."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file and what is wrong with it."""


class CheckpointWriter:
    """Writes one checkpoint into a directory.

    Nothing a reader sees changes before :meth:`commit`. A writer may be handed from thread to thread, but is for one
    thread at a time. As a context manager it aborts unless it was committed.

    Parameters
    ----------
    directory : str or PathLike
        Created, with its parents, if absent.

    Raises
    ------
    NotADirectoryError
        If `directory` is a file.
    FileExistsError
        If it holds a ``checkpoint.json`` that is not a checkpoint of pystale.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointWriter(directory) as writer:
    ...         writer.add({"arrival": 0}, [RolloutState(rollout_id=7, response_ids=[1, 2, 3])])
    ...         writer.commit({"train_step": 4})
    ...     document, groups = read_checkpoint(directory)
    >>> document, groups[0][1][0].response_ids
    ({'train_step': 4}, [1, 2, 3])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(os.path.abspath(directory))
        if self._directory.exists() and not self._directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a checkpoint is a directory, this is a file", str(self._directory))
        self._created = not self._directory.exists()
        self._directory.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(self._directory / DOCUMENT)
        self._token, self._lock = _begin(self._directory)
        self._temporary = self._directory / f"checkpoint-{self._token}.tmp"
        self._files: list[str] = []
        self._shards: list[dict[str, Any]] = []
        self._groups = 0
        self._arrays = 0
        self._lines: list[bytes] = []
        self._columns = Columns()
        self._nbytes = 0
        self._state = "open"

    def add(self, header: dict[str, Any], states: Sequence[RolloutState]) -> None:
        """Add a group.

        Parameters
        ----------
        header : dict
            What the caller keeps with the group; comes back as it was.
        states : sequence of RolloutState
            The members.

        Raises
        ------
        TypeError
            For a value that cannot be written, naming the field, the rollout_id, the path within the field and the
            type. The writer is as it was.
        OSError
            When a shard cannot be written. The writer then refuses everything but :meth:`abort`.
        """
        self.add_encoded(encode_group(header, states))

    def add_encoded(self, group: EncodedGroup) -> None:
        """Add a group that :func:`encode_group` encoded earlier."""
        self._require_open()
        if group.references:
            raise ValueError("the group has external references that are not written; call its dump_references first")
        self._lines.append(group.line)
        self._columns.extend(group.entries)
        self._nbytes += group.nbytes
        if self._nbytes >= SHARD_BYTES or len(self._lines) >= SHARD_GROUPS:
            self._flush()

    def commit(self, document: dict[str, Any]) -> None:
        """Make this the checkpoint of the directory, and delete the files of earlier ones.

        Parameters
        ----------
        document : dict
            What the caller keeps with the checkpoint: anything a state can hold but arrays and bytes.

        Raises
        ------
        TypeError
            For a document that cannot be written. The writer is as it was.
        OSError
            When something cannot be written; the previous checkpoint is then still there, unless the rename itself
            succeeded and only making it durable failed.
        """
        self._require_open()
        encoded = encode_document(document)
        self._flush()
        text = _sealed({
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "library_version": importlib.metadata.version("pystale"),
            "sha256": "0" * 64,
            "groups": self._groups,
            "shards": self._shards,
            "document": encoded,
        })  # fmt: skip
        self._state = "broken"
        _write(self._temporary, text)
        # The names of the data files must be on disk before the document that lists them.
        _sync_directory(self._directory)
        with _directory_lock(self._directory) as locked:
            replaced = [] if locked else _names_in(self._directory / DOCUMENT)
            self._state = "renaming"
            os.replace(self._temporary, self._directory / DOCUMENT)
            self._state = "committed"
            try:
                # Until the rename is on disk, a crash may bring the previous document back: its files stay till then.
                _sync_directory(self._directory)
                if locked:
                    _delete_dead(self._directory, self._token)
                else:
                    _delete(self._directory / name for name in replaced)
            finally:
                _end(self._directory, self._token, self._lock)

    def abort(self) -> None:
        """Remove what was written. Does nothing after :meth:`commit` succeeded, or twice."""
        if self._state not in ("committed", "aborted"):
            if self._state == "renaming" and not self._temporary.exists():
                # Interrupted between the rename and taking note of it.
                self._state = "committed"
                _end(self._directory, self._token, self._lock)
                return
            self._state = "aborted"
            _delete([self._temporary, *(self._directory / name for name in self._files)])
            self._lines.clear()
            self._columns = Columns()
            _end(self._directory, self._token, self._lock)
            if self._created:
                with contextlib.suppress(OSError):  # not empty: somebody else uses it
                    self._directory.rmdir()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def _require_open(self) -> None:
        if self._state != "open":
            raise ValueError(f"this writer is {self._state}; a checkpoint needs a new CheckpointWriter")

    def _flush(self) -> None:
        if not self._lines:
            return
        lines, columns = self._lines, self._columns
        self._lines, self._columns, self._nbytes = [], Columns(), 0
        self._state = "broken"
        lines.append(b"")
        text = self._write_file(f"groups-{self._token}-{len(self._shards):05d}.jsonl", b"\n".join(lines))
        arrays = []
        for tensors in _files_of(columns.tensors()):
            name = f"arrays-{self._token}-{self._arrays:05d}.safetensors"
            self._arrays += 1
            arrays.append(self._write_file(name, save_tensors(tensors)))
        self._shards.append({"groups": len(lines) - 1, "lines": text, "arrays": arrays})
        self._groups += len(lines) - 1
        self._state = "open"

    def _write_file(self, name: str, data: bytes) -> dict[str, Any]:
        self._files.append(name)
        digest = hashlib.sha256(data).hexdigest()
        _write(self._directory / name, data)
        return {"name": name, "size": len(data), "sha256": digest}


def read_checkpoint(
    directory: str | os.PathLike[str], load_ref: LoadRef | None = None
) -> tuple[dict[str, Any], list[LoadedGroup]]:
    """Document and groups of the checkpoint of a directory; :func:`read_checkpoint_into` says what is checked."""
    return read_checkpoint_into(directory, lambda document, groups: (document, list(groups)), load_ref)


def read_checkpoint_into(
    directory: str | os.PathLike[str],
    fill: Callable[[dict[str, Any], Iterator[LoadedGroup]], Result],
    load_ref: LoadRef | None = None,
) -> Result:
    """Read the checkpoint of a directory, group by group.

    Every byte is checked against its checksum before it is interpreted, a shard at a time: what is wrong with a later
    one is raised by the iterator, so keep nothing of what came before until it has ended. A checkpoint that is replaced
    while it is being read is read anew.

    Parameters
    ----------
    directory : str or PathLike
        Where :class:`CheckpointWriter` wrote.
    fill : callable
        ``fill(document, groups)`` gets the document as given to :meth:`CheckpointWriter.commit`, and an iterator of
        header and members of every group, in the order they were added. Called anew if the checkpoint is replaced.
    load_ref : callable, optional
        Makes an external reference of what ``dump_ref`` made of it; called only once all of a shard is checked.

    Returns
    -------
    object
        What `fill` returned.

    Raises
    ------
    CheckpointError
        When there is no checkpoint, or it is damaged, truncated, foreign, or of a newer schema.
    """
    path = Path(os.path.abspath(directory)) / DOCUMENT
    raw = _read(path)
    while True:
        try:
            with collector_paused():
                return fill(*_load(path, raw, load_ref))
        except CheckpointError:
            now = _read(path)
            if now == raw:
                raise
            raw = now


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking a heap that is only being filled.

    Reading makes millions of objects and no garbage. Left alone, the collector walks all of them again and again: it
    doubles the time to read 100,000 groups, and stops every thread for seconds. What was made meanwhile goes to the
    oldest generation without being walked. Nothing is done where the collector is off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # whoever froze objects wants them to stay frozen
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _sealed(content: dict[str, Any]) -> bytes:
    """The document file: `content` with the checksum put where 64 zeros stand."""
    text = dump_json(content)
    key = b'"sha256":"'
    start = text.index(key) + len(key)
    return text[:start] + hashlib.sha256(text).hexdigest().encode() + text[start + 64 :]


def _files_of(tensors: Iterable[tuple[str, "np.ndarray[Any, Any]"]]) -> Iterator[dict[str, "np.ndarray[Any, Any]"]]:
    """Spread tensors over files of about SHARD_BYTES, cutting large ones along their first dimension."""
    content: dict[str, np.ndarray[Any, Any]] = {}
    used = 0
    for name, values in tensors:
        start = 0
        row = max(1, values.nbytes // max(1, len(values)))
        while True:
            rows = (SHARD_BYTES - used) // row
            if rows <= 0 and content and len(values) > start:
                yield content
                content, used = {}, 0
                continue
            content[name] = values[start : start + max(1, rows)]
            used += content[name].nbytes
            start += len(content[name])
            if start >= len(values):
                break
    if content:
        yield content


def _load(path: Path, raw: bytes, load_ref: LoadRef | None) -> tuple[dict[str, Any], Iterator[LoadedGroup]]:
    try:
        content = _parse_document(raw)
        document = decode_document(content["document"])
    except Malformed as fault:
        raise CheckpointError(f"{path}: {fault}") from None
    return document, _groups_of(path, content, load_ref)


def _groups_of(path: Path, content: dict[str, Any], load_ref: LoadRef | None) -> Iterator[LoadedGroup]:
    found = 0
    for shard in content["shards"]:
        for group in _load_shard(path.parent, shard, load_ref):
            found += 1
            yield group
    if found != content["groups"]:
        raise CheckpointError(f"{path}: says {content['groups']} groups, its shards hold {found}")


def _parse_document(raw: bytes) -> dict[str, Any]:
    content = parse_json(raw)
    if type(content) is not dict or content.get("format") != FORMAT:
        raise Malformed("is not a checkpoint of pystale")
    version = content.get("schema_version")
    if type(version) is not int or version < 1:
        raise Malformed(f"has no valid schema_version: {version!r:.80}")
    if version > SCHEMA_VERSION:
        raise Malformed(
            f"has schema version {version}, this pystale reads up to {SCHEMA_VERSION}; written by pystale "
            f"{content.get('library_version')!r:.80}"
        )
    keys = {"format", "schema_version", "library_version", "sha256", "groups", "shards", "document"}
    if content.keys() != keys:
        raise Malformed(f"has missing or unknown keys: {', '.join(sorted(content.keys() ^ keys)):.200}")
    digest = content["sha256"]
    if type(digest) is not str or not _DIGEST.fullmatch(digest) or raw.count(digest.encode()) != 1:
        raise Malformed("has no valid checksum")
    if hashlib.sha256(raw.replace(digest.encode(), b"0" * 64)).hexdigest() != digest:
        raise Malformed("is damaged: its checksum does not match")
    if type(content["library_version"]) is not str:
        raise Malformed("has a library_version that is not a string")
    if type(content["groups"]) is not int or type(content["shards"]) is not list:
        raise Malformed("has groups or shards of a wrong type")
    seen: set[str] = set()
    for shard in content["shards"]:
        _check_shard(shard, seen)
    return content


def _check_shard(shard: Any, seen: set[str]) -> None:
    if type(shard) is not dict or shard.keys() != {"groups", "lines", "arrays"} or type(shard["arrays"]) is not list:
        raise Malformed("has a shard that is not an object of groups, lines and arrays")
    if type(shard["groups"]) is not int or shard["groups"] < 1:
        raise Malformed(f"has a shard of {shard['groups']!r:.80} groups")
    for prefix, file in (("groups-", shard["lines"]), *(("arrays-", file) for file in shard["arrays"])):
        if type(file) is not dict or file.keys() != {"name", "size", "sha256"}:
            raise Malformed("has a file entry that is not an object of name, size and sha256")
        name, size, digest = file["name"], file["size"], file["sha256"]
        if type(name) is not str or not _DATA_FILE.fullmatch(name) or not name.startswith(prefix):
            raise Malformed(f"names a file {name!r:.80}, which is not a name of a {prefix[:-1]} file")
        if name in seen:
            raise Malformed(f"names {name} twice")
        seen.add(name)
        if type(size) is not int or size < 0 or type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise Malformed(f"has no valid size and sha256 for {name}")


def _load_shard(directory: Path, shard: dict[str, Any], load_ref: LoadRef | None) -> Iterator[LoadedGroup]:
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for file in shard["arrays"]:
        path = directory / file["name"]
        data = _read_checked(path, file)
        try:
            tensors = load_tensors(data)
        except Exception as fault:  # whatever the library makes of a file it does not understand
            raise CheckpointError(f"{path}: is not a safetensors file: {fault!r:.200}") from None
        for name, values in tensors.items():
            known = parts.setdefault(name, [])
            if known and (known[0].dtype != values.dtype or known[0].shape[1:] != values.shape[1:]):
                raise CheckpointError(f"{path}: tensor {name!r:.80} does not continue the one in an earlier file")
            known.append(values)
    lines_path = directory / shard["lines"]["name"]
    lines = _read_checked(lines_path, shard["lines"]).split(b"\n")
    if lines.pop() or len(lines) != shard["groups"]:
        raise CheckpointError(f"{lines_path}: does not hold {shard['groups']} lines, each ended by a line feed")
    number = 0
    try:
        columns = ColumnReader({name: known[0] if len(known) == 1 else np.concatenate(known)
                                for name, known in parts.items()})  # fmt: skip
        for number, line in enumerate(lines, 1):
            yield decode_group(line, columns, load_ref)
        number += 1
        columns.finish()
    except Malformed as fault:
        arrays = " and ".join(file["name"] for file in shard["arrays"][:1])
        where = f"line {number}: " if 1 <= number <= len(lines) else ""
        raise CheckpointError(f"{lines_path}: {where}{fault}{arrays and f' (arrays in {arrays})'}") from None


def _read_checked(path: Path, file: dict[str, Any]) -> bytes:
    data = _read(path, file["size"])
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise CheckpointError(f"{path}: is damaged: its SHA-256 is not the one {DOCUMENT} lists")
    return data


def _read(path: Path, size: int | None = None) -> bytes:
    """All of a regular file, which must have `size` bytes."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for ever.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
            if size is not None and status.st_size != size:
                raise CheckpointError(f"{path}: has {status.st_size} bytes, {DOCUMENT} lists {size}")
            return file.readall()
    except OSError as fault:
        what = "is missing" if fault.errno in (errno.ENOENT, errno.ENOTDIR) else f"cannot be read: {fault.strerror}"
        raise CheckpointError(f"{path}: {what}") from None


def _write(path: Path, data: bytes) -> None:
    """A new file, on disk."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while len(view):
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_foreign(document: Path) -> None:
    try:
        with open(document, "rb") as file:
            start = file.read(len(_PREFIX))
    except FileNotFoundError:
        return
    if start != _PREFIX:
        raise FileExistsError(
            errno.EEXIST,
            "is not a checkpoint of pystale and would be overwritten; choose another directory",
            str(document),
        )


def _begin(directory: Path) -> tuple[str, int]:
    """A token nobody uses, and the descriptor that holds its lock."""
    while True:
        token = secrets.token_hex(8)
        path = directory / f"writing-{token}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # no locks here: nobody can tell that this writer lives, nobody deletes
            fcntl.flock(fd, fcntl.LOCK_EX)
        # Between creation and lock a committing writer may have taken the file for a dead one's and deleted it.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return token, fd
        os.close(fd)


def _end(directory: Path, token: str, fd: int) -> None:
    _delete([directory / f"writing-{token}.lock"])
    os.close(fd)


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[bool]:
    """Keeps two commits from interleaving; False where the file system has no locks."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        locked = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(fd)


def _names_in(document: Path) -> list[str]:
    """Data files a document names, whatever state it is in."""
    with contextlib.suppress(OSError):
        return [match[0] for match in _DATA_FILE.finditer(document.read_bytes().decode("ascii", "replace"))]
    return []


def _delete_dead(directory: Path, own: str) -> None:
    """Delete the files of every token but `own` whose writer holds no lock. Call under the directory lock."""
    files: dict[str, list[str]] = {}
    for name in os.listdir(directory):
        match = _ANY_FILE.fullmatch(name)
        if match and match[1] != own:
            files.setdefault(match[1], []).append(name)
    for token, names in files.items():
        lock = f"writing-{token}.lock"
        fd = -1
        try:
            if lock in names:
                fd = os.open(directory / lock, os.O_RDWR | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock goes last: without it the rest still counts as a dead writer's.
            _delete(directory / name for name in sorted(names, key=lambda name: name == lock))
        except OSError:  # locked, so alive; or it has just ended
            continue
        finally:
            if fd >= 0:
                os.close(fd)


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as fault:
            logger.warning("cannot delete %s: %s", path, fault)
