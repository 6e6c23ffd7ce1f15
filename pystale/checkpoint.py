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
import hashlib
import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.numpy import save as save_tensors

from pystale.checkpoint_files import begin_writing, delete_dead, directory_lock, end_writing, names_in
from pystale.columns import Array, Columns
from pystale.files import check_durable_files, delete, sync_directory, write_new
from pystale.payload import EncodedGroup, encode_document, encode_group
from pystale.state import RolloutState
from pystale.strict_json import dump_json

__all__ = ["DOCUMENT", "FORMAT", "SCHEMA_VERSION", "CheckpointError", "CheckpointWriter"]

DOCUMENT = "checkpoint.json"
FORMAT = "pystale-checkpoint"
SCHEMA_VERSION = 2

# A shard is written when it holds this much. Small enough that no step of writing or reading it keeps other threads
# waiting for long, large enough that a file and its fsync are not the cost.
SHARD_BYTES = 4 << 20
SHARD_GROUPS = 2048

_PREFIX = f'{{"format":"{FORMAT}",'.encode()


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
    >>> from pystale.checkpoint_reader import read_checkpoint
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointWriter(directory) as writer:
    ...         writer.add({"arrival": 0}, [RolloutState(rollout_id=7, response_ids=[1, 2, 3])])
    ...         writer.commit({"train_step": 4})
    ...     document, groups = read_checkpoint(directory)
    >>> document, groups[0][1][0].response_ids
    ({'train_step': 4}, [1, 2, 3])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        check_durable_files("checkpoints")
        self._directory = Path(os.path.abspath(directory))
        if self._directory.exists() and not self._directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a checkpoint is a directory, this is a file", str(self._directory))
        self._created = not self._directory.exists()
        self._directory.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(self._directory / DOCUMENT)
        self._token, self._lock = begin_writing(self._directory)
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
        write_new(self._temporary, text)
        # The names of the data files must be on disk before the document that lists them.
        sync_directory(self._directory)
        with directory_lock(self._directory) as locked:
            replaced = [] if locked else names_in(self._directory / DOCUMENT)
            self._state = "renaming"
            os.replace(self._temporary, self._directory / DOCUMENT)
            self._state = "committed"
            try:
                # Until the rename is on disk, a crash may bring the previous document back: its files stay till then.
                sync_directory(self._directory)
                if locked:
                    delete_dead(self._directory, self._token)
                else:
                    delete(self._directory / name for name in replaced)
            finally:
                end_writing(self._directory, self._token, self._lock)

    def abort(self) -> None:
        """Remove what was written. Does nothing after :meth:`commit` succeeded, or twice."""
        if self._state not in ("committed", "aborted"):
            if self._state == "renaming" and not self._temporary.exists():
                # Interrupted between the rename and taking note of it.
                self._state = "committed"
                end_writing(self._directory, self._token, self._lock)
                return
            self._state = "aborted"
            delete([self._temporary, *(self._directory / name for name in self._files)])
            self._lines.clear()
            self._columns = Columns()
            end_writing(self._directory, self._token, self._lock)
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
        write_new(self._directory / name, data)
        return {"name": name, "size": len(data), "sha256": digest}


def _sealed(content: dict[str, Any]) -> bytes:
    """The document file: `content` with the checksum put where 64 zeros stand."""
    text = dump_json(content)
    key = b'"sha256":"'
    start = text.index(key) + len(key)
    return text[:start] + hashlib.sha256(text).hexdigest().encode() + text[start + 64 :]


def _files_of(tensors: Iterable[tuple[str, Array]]) -> Iterator[dict[str, Array]]:
    """Spread tensors over files of about SHARD_BYTES, cutting large ones along their first dimension."""
    content: dict[str, Array] = {}
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
