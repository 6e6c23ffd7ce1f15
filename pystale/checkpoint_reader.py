"""Reading a checkpoint, whose format is in :mod:`pystale.checkpoint`: nothing is interpreted before it is checked."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from safetensors.numpy import load as load_tensors

from pystale.checkpoint import DOCUMENT, FORMAT, SCHEMA_VERSION, CheckpointError
from pystale.checkpoint_files import DATA_FILE
from pystale.collector import collector_paused
from pystale.columns import Array, ColumnReader, Malformed
from pystale.decoding import decode_document, decode_group
from pystale.field_types import LoadRef
from pystale.files import check_durable_files
from pystale.state import RolloutState
from pystale.strict_json import parse_json

__all__ = ["LoadedGroup", "read_checkpoint", "read_checkpoint_into"]

Result = TypeVar("Result")

LoadedGroup: TypeAlias = tuple[dict[str, Any], list[RolloutState]]
"""Header and members of a group."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


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
    check_durable_files("checkpoints")
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
        if type(name) is not str or not DATA_FILE.fullmatch(name) or not name.startswith(prefix):
            raise Malformed(f"names a file {name!r:.80}, which is not a name of a {prefix[:-1]} file")
        if name in seen:
            raise Malformed(f"names {name} twice")
        seen.add(name)
        if type(size) is not int or size < 0 or type(digest) is not str or not _DIGEST.fullmatch(digest):
            raise Malformed(f"has no valid size and sha256 for {name}")


def _load_shard(directory: Path, shard: dict[str, Any], load_ref: LoadRef | None) -> Iterator[LoadedGroup]:
    parts: dict[str, list[Array]] = {}
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
    done = 0
    try:
        columns = ColumnReader({name: known[0] if len(known) == 1 else np.concatenate(known)
                                for name, known in parts.items()})  # fmt: skip
        for line in lines:
            yield decode_group(line, columns, load_ref)
            done += 1
        columns.finish()
    except Malformed as fault:
        arrays = " and ".join(file["name"] for file in shard["arrays"][:1])
        where = f"line {done + 1}: " if done < len(lines) else ""
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
