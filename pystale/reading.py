"""Reading a journal back: which of its segments come after a checkpoint, and how it goes on after them."""

import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pystale.checkpoint import CheckpointError
from pystale.field_types import LoadRef
from pystale.files import delete
from pystale.journal import Journal
from pystale.segment import Entry, Segment, entries_of, open_segment, segment_path, segment_paths

__all__ = ["Reading", "read_journal"]

logger = logging.getLogger("pystale")


class Reading:
    """Entries of a journal, and how it goes on after them.

    Iterating raises :class:`CheckpointError` at damage. Nothing in the directory changes before :meth:`finish`.
    """

    def __init__(
        self,
        journal: Journal,
        segments: list[Segment],
        covered: list[Path],
        torn: Segment | None,
        following: int,
        identity: Any,
        load_ref: LoadRef | None,
    ) -> None:
        self._journal = journal
        self._segments = segments
        self._covered = covered
        self._torn = torn
        self._following = following
        self._identity = identity
        self._load_ref = load_ref
        self._cut: tuple[Path, int] | None = None

    def __iter__(self) -> Iterator[Entry]:
        for segment in self._segments:
            end = yield from entries_of(segment, self._load_ref)
            if end == segment.path.stat().st_size:
                continue
            if segment is not self._segments[-1] or self._torn is not None:
                raise CheckpointError(f"{segment.path}: is damaged at offset {end}; entries follow in later segments")
            self._cut = (segment.path, end)

    def finish(self) -> None:
        """Cut a torn tail off, and delete what the checkpoint covers."""
        if self._cut is not None:
            path, end = self._cut
            logger.warning("%s: the last commit was not finished; cut off at offset %d", path, end)
            with open(path, "r+b") as file:
                file.truncate(end)
                os.fsync(file.fileno())
        delete([*self._covered, *([self._torn.path] if self._torn else [])])

    def open(self) -> None:
        """Let entries be appended, in a segment of their own."""
        known = self._segments[0].journal if self._segments else self._journal.id
        self._journal.go_on(known, self._following, {} if self._segments else {self._following: self._identity})


def read_journal(
    journal: Journal, checkpoint: dict[str, Any] | None, identity: Any, load_ref: LoadRef | None
) -> Reading:
    """Open the entries that come after a checkpoint, or all of them.

    Parameters
    ----------
    journal : Journal
        Of the buffer that reads them; it has not appended anything yet.
    checkpoint : dict or None
        ``{"id": ..., "segment": ...}``, where the checkpoint says it ends; None when it does not say.
    identity : str or None
        What identifies the checkpoint; None without one.
    load_ref : callable, optional
        Reads external references.

    Raises
    ------
    CheckpointError
        If a segment is foreign, newer, damaged or missing.
    ValueError
        If the journal does not continue the checkpoint, or is of a buffer with another order.
    """
    directory = journal.directory
    segments = [open_segment(number, path) for number, path in segment_paths(directory).items()]
    torn = segments.pop() if segments and segments[-1].seed < 0 else None
    for segment in segments:
        if segment.seed < 0:
            raise CheckpointError(f"{segment.path}: is damaged: it has no whole header, and segments follow")
        if segment.order != journal.order:
            raise ValueError(
                f"the journal in {str(directory)!r} is ordered {segment.order}, this buffer {journal.order}; "
                "make the buffer with the journal's order"
            )
    if len({segment.journal for segment in segments}) > 1:
        raise CheckpointError(f"{directory}: has segments of several journals; separate them")
    last = segments[-1].number if segments else -1
    first = 0
    if segments:
        first = _first_of(directory, segments, checkpoint, identity)
        wanted = [segment for segment in segments if segment.number >= first]
        for before, segment in pairwise(wanted):
            if segment.number != before.number + 1:
                raise CheckpointError(f"{segment_path(directory, before.number + 1)}: is missing")
            if segment.after != "segment":
                raise ValueError(
                    f"the journal in {str(directory)!r} goes on from a checkpoint at {segment.path.name}; "
                    "resume from that one"
                )
        if wanted and wanted[0].number != first:
            raise CheckpointError(f"{segment_path(directory, first)}: is missing")
    else:
        wanted = []
    covered = [segment.path for segment in segments if segment.number < first]
    return Reading(journal, wanted, covered, torn, max(first, last + 1), identity, load_ref)


def _first_of(directory: Path, segments: list[Segment], checkpoint: dict[str, Any] | None, identity: Any) -> int:
    """Number of the first segment to read."""
    oldest = segments[0]
    where = f"the journal in {str(directory)!r}"
    if identity is None:
        if oldest.after is not None:
            raise ValueError(f"{where} does not begin with an empty buffer; name the checkpoint it continues")
        return oldest.number
    if checkpoint is not None and checkpoint["id"] == oldest.journal:
        if checkpoint["segment"] < oldest.number:
            raise ValueError(
                f"{where} begins after a later checkpoint than this one; resume from that, or use another directory"
            )
        return int(checkpoint["segment"])
    if oldest.after == identity:
        return oldest.number
    raise ValueError(f"{where} does not continue this checkpoint; use another directory to go on from it alone")
