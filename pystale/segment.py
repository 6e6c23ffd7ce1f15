"""Segments: the files of a journal, which hold in order what happened to a buffer since its last checkpoint.

The format, schema version 1
----------------------------
A journal is a directory with files ``segment-NNNNNNNNNN.journal``, numbered in decimal. A segment begins with the 16
bytes ``pystale-journal`` and a line feed; frames follow without gaps. Integers are little-endian.

A frame is

=============  =======================================================================================================
4 bytes        ``\\x89PSF``
8 bytes        length of the body
4 bytes        CRC-32 of: the checksum of the segment's first frame (4 bytes; zeros in the first frame itself), the
               offset of this frame in the file (8 bytes), the length (8 bytes), and the body
body           first frame: the header. Others: what one commit wrote
=============  =======================================================================================================

The header is one JSON object: ``format`` ("pystale-journal"), ``schema_version`` (1), ``library_version``, ``journal``
(16 hexadecimal digits, the same in all segments), ``segment`` (the number in its name), ``order`` (the buffer's, which
the keys belong to) and ``after``, which says what the segment continues: null (an empty buffer), ``"segment"`` (the
segment numbered one less), ``"checkpoint"`` (only the checkpoint whose document names this segment) or anything else:
the identity of a checkpoint that was resumed into a buffer with a new journal.

The body of any other frame is lines of ASCII JSON, each ended by a line feed: one object per entry, followed, where it
has the key ``put``, by the line of the group; then an empty line; then the columns of these groups as one safetensors
file, or nothing. Lines of groups and columns are those of a shard of a checkpoint, see :mod:`pystale.checkpoint`.

An entry is what one operation of the buffer did. Groups are named by their arrival, which no two groups share.

=================  ===================================================================================================
``op``             the operation, for people
``train_step``     latest T the buffer knows, or null
``arrivals``       groups that have arrived so far
``own_group_ids``  ids the buffer has given out so far
``ledger``         the account after it: produced, trained, masked_stale, masked_semantic, discarded
``left``           optional; arrivals of groups that left for good, but for those taken
``taken``          optional; ``[arrival, trained, masked_stale, masked_semantic]`` of groups taken for training
``put``            optional; task, group_id, status, arrival, key and rerolls of the group put. It takes the place of
                   the group with this arrival, if that was handed out. What it says replaces what the states say
``expired``        optional; ``[arrival, [positions]]`` of members that were reset, after the put
``thinned``        optional; the same, of groups that stay COMPLETED without these members
``left_out``       optional; by task, members that groups were trained without so far; absent where none were
``finished``       optional; ``[task, group_id]`` of a group that came to the buffer and was not stored
``undo_takes``     optional; true: all groups taken since the checkpoint are stored again
``note``           optional; whatever JSON the caller of the operation wanted to find again
=================  ===================================================================================================

What is handed out by ``get`` stays in the journal as it is until it is put back, settled or rejected.
"""

import importlib.metadata
import mmap
import os
import re
import struct
import zlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from pystale.checkpoint import CheckpointError
from pystale.columns import ColumnReader, Columns, Malformed
from pystale.decoding import decode_group
from pystale.field_types import LoadRef
from pystale.payload import EncodedGroup
from pystale.state import RolloutState
from pystale.strict_json import dump_json, parse_json

__all__ = [
    "Appended",
    "Entry",
    "Envelope",
    "Segment",
    "body_of",
    "entries_of",
    "frame_of",
    "open_segment",
    "segment_path",
    "segment_paths",
    "segment_start",
]

FORMAT = "pystale-journal"
SCHEMA_VERSION = 1
PREFACE = FORMAT.encode() + b"\n"
MARK = b"\x89PSF"
_FRAME = struct.Struct("<4sQI")
_SEED = struct.Struct("<IQQ")
_NAME = re.compile(r"segment-([0-9]{10})\.journal")
_ID = re.compile(r"[0-9a-f]{16}")

Envelope = dict[str, Any]


class Entry(NamedTuple):
    """One operation, as it is read back."""

    envelope: Envelope
    states: list[RolloutState] | None  # the group that was put
    where: str  # file and offset, for messages


class Appended(NamedTuple):
    """One operation, as it waits to be written."""

    segment: int  # number of the segment it goes to
    envelope: Envelope
    group: EncodedGroup | None  # what was put


class Segment(NamedTuple):
    """A file that was opened; one whose header is torn holds nothing."""

    number: int
    path: Path
    after: Any  # what it continues
    journal: str
    order: Any  # of the buffer
    seed: int  # checksum of the header, -1 where that is torn
    start: int  # offset of the first frame behind the header


def segment_paths(directory: Path) -> dict[int, Path]:
    """Segments by number, in order."""
    try:
        matches = filter(None, map(_NAME.fullmatch, os.listdir(directory)))
    except FileNotFoundError:
        return {}
    return {int(match[1]): directory / match[0] for match in sorted(matches, key=lambda match: match[1])}


def segment_path(directory: Path, number: int) -> Path:
    """Where a segment is, or is to be."""
    return directory / f"segment-{number:010d}.journal"


def checksum_of(seed: int, offset: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(_SEED.pack(seed, offset, len(body))))


def frame_of(seed: int, offset: int, body: bytes) -> bytes:
    """A frame to be written at an offset."""
    return _FRAME.pack(MARK, len(body), checksum_of(seed, offset, body)) + body


def segment_start(journal: str, number: int, after: Any, order: str) -> tuple[bytes, int]:
    """What a segment begins with, and the checksum of its header, which those of all other frames begin from."""
    header = dump_json({
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "library_version": importlib.metadata.version("pystale"),
        "journal": journal,
        "segment": number,
        "after": after,
        "order": order,
    })  # fmt: skip
    return PREFACE + frame_of(0, len(PREFACE), header), checksum_of(0, len(PREFACE), header)


def body_of(batch: Sequence[Appended]) -> bytes:
    """Body of the frame that holds these entries."""
    lines, columns = [], Columns()
    for item in batch:
        lines.append(dump_json(item.envelope))
        if item.group is not None:
            lines.append(item.group.line)
            columns.extend(item.group.entries)
    tensors = dict(columns.tensors())
    return b"\n".join([*lines, b"", save_tensors(tensors) if tensors else b""])


def open_segment(number: int, path: Path) -> Segment:
    """Read a segment's header.

    Raises
    ------
    CheckpointError
        If it is foreign, newer or damaged.
    """
    with open(path, "rb") as file:
        start = file.read(len(PREFACE) + _FRAME.size)
        if not PREFACE.startswith(start[: len(PREFACE)]) and start.strip(b"\0"):
            raise CheckpointError(f"{path}: is not a journal of pystale")
        mark, length, checksum = _FRAME.unpack(start[len(PREFACE) :].ljust(_FRAME.size, b"\0"))
        body = file.read(min(length, 1 << 16))
        if mark != MARK or len(body) != length or checksum_of(0, len(PREFACE), body) != checksum:
            file.seek(0)
            frame = file.read().find(MARK, len(PREFACE) + 1)
            if frame >= 0:
                raise CheckpointError(f"{path}: is damaged at offset {len(PREFACE)}: a frame follows at {frame}")
            return Segment(number, path, None, "", None, -1, 0)
    try:
        header = parse_json(body)
        version = header.get("schema_version") if type(header) is dict else None
        if type(version) is not int or version < 1 or header.get("format") != FORMAT:
            raise Malformed("is not a journal of pystale")
        if version > SCHEMA_VERSION:
            raise Malformed(f"has schema version {version}, this pystale reads up to {SCHEMA_VERSION}; written by "
                            f"pystale {header.get('library_version')!r:.80}")  # fmt: skip
        if header.get("segment") != number:
            raise Malformed(f"says it is segment {header.get('segment')!r:.80}; was it renamed?")
        if type(header.get("journal")) is not str or not _ID.fullmatch(header["journal"]) or "after" not in header:
            raise Malformed("has no valid header")
    except Malformed as fault:
        raise CheckpointError(f"{path}: {fault}") from None
    return Segment(number, path, header["after"], header["journal"], header.get("order"), checksum, len(start) + length)


def entries_of(segment: Segment, load_ref: LoadRef | None) -> Generator[Entry, None, int]:
    """Entries of a segment; returns the offset its last whole frame ends at."""
    with open(segment.path, "rb", buffering=0) as file:
        fd, offset = file.fileno(), segment.start
        while (body := _body_at(fd, segment.seed, offset)) is not None:
            where = f"{segment.path}: the frame at offset {offset}"
            try:
                yield from _decoded(body, where, load_ref)
            except Malformed as fault:
                raise CheckpointError(f"{where} {fault}") from None
            offset += _FRAME.size + len(body)
        if offset < os.fstat(fd).st_size:
            _refuse_damage(segment, fd, offset)
    return offset


def _refuse_damage(segment: Segment, fd: int, offset: int) -> None:
    """Raise where a whole frame follows behind what is no frame at an offset: a crash tears only the last.

    One that was moved, by bytes that came in or went missing before it, has a checksum for another offset, but ends
    where the next begins, or with the file.
    """
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        later = data.find(MARK, offset + 1)
        while later >= 0:
            end = _end_of_frame(data, later)
            moved = end == len(data) or data[end : end + len(MARK)] == MARK
            if moved or _body_at(fd, segment.seed, later) is not None:
                raise CheckpointError(
                    f"{segment.path}: is damaged at offset {offset}: a whole frame follows at {later}, so this is no "
                    "torn end"
                )
            later = data.find(MARK, later + 1)


def _end_of_frame(data: mmap.mmap, offset: int) -> int:
    """Where the frame at an offset says it ends; beyond the end of the data where there is no room for its head."""
    head = data[offset : offset + _FRAME.size]
    return offset + _FRAME.size + (_FRAME.unpack(head)[1] if len(head) == _FRAME.size else 0)


def _body_at(fd: int, seed: int, offset: int) -> bytes | None:
    """Body of the frame at an offset; None where there is no whole one.

    Read, and not mapped: waiting for the disk in a mapping would keep every thread waiting.
    """
    start = offset + _FRAME.size
    head = os.pread(fd, _FRAME.size, offset)
    if len(head) < _FRAME.size:
        return None
    mark, length, checksum = _FRAME.unpack(head)
    if mark != MARK or length > os.fstat(fd).st_size - start:
        return None
    body = b"".join(_pieces(fd, start, length))
    return body if checksum_of(seed, offset, body) == checksum else None


def _pieces(fd: int, start: int, length: int) -> Iterator[bytes]:
    """What a file holds from an offset on; less where it ends earlier."""
    while length and (piece := os.pread(fd, length, start)):
        yield piece
        start += len(piece)
        length -= len(piece)


def _decoded(body: bytes, where: str, load_ref: LoadRef | None) -> Iterator[Entry]:
    text, separator, arrays = body.partition(b"\n\n")
    if not separator:
        raise Malformed("has no empty line")
    try:
        columns = ColumnReader(load_tensors(arrays) if arrays else {})
    except Malformed:
        raise
    except Exception as fault:  # whatever the library makes of bytes it does not understand
        raise Malformed(f"holds no safetensors file: {fault!r:.200}") from None
    lines = iter(text.split(b"\n"))
    for line in lines:
        envelope = parse_json(line)
        if type(envelope) is not dict:
            raise Malformed("has an entry that is not an object")
        states = None
        if "put" in envelope:
            group = next(lines, None)
            if group is None:
                raise Malformed("lacks the line of a group")
            states = decode_group(group, columns, load_ref)[1]
        yield Entry(envelope, states, where)
    columns.finish()
