"""The journal: what happened to a buffer since its last checkpoint, on disk before anybody is told.

Its files are described in :mod:`pystale.segment`. A thread of the journal's writes and syncs one frame for all that was
appended meanwhile. A crash can tear only the last frame, which nobody was told of; reading ends there. What is wrong
anywhere else is damage: an error that names file and offset. A checkpoint names the segment that begins where it ends;
once the checkpoint is on disk, older segments are deleted. The buffer that uses the directory holds a lock (``flock``)
on ``journal.lock``; on file systems without locks nothing keeps two from using it.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pystale.files import check_durable_files, delete, lock, sync_directory, write_all
from pystale.payload import EncodedGroup
from pystale.segment import (
    Appended,
    Envelope,
    body_of,
    frame_of,
    segment_path,
    segment_paths,
    segment_start,
)

__all__ = ["Journal", "Position"]

logger = logging.getLogger("pystale")

# A commit takes no more than this at a time, so that no frame is too large to be read at once.
COMMIT_BYTES = 16 << 20
# The writing thread ends when it had nothing to do for so many seconds.
IDLE_SECONDS = 1.0


class Position(NamedTuple):
    """A point in the journal that a checkpoint ends at."""

    segment: int  # the first that comes after
    number: int  # of the last entry before
    failure: Exception | None  # what kept entries before it from being written


class Journal:
    """Appends entries to a directory, durably and in order.

    Appending never waits: it happens under the buffer's mutex. :meth:`wait` and :meth:`durable` wait until an entry is
    on disk. One thread writes; it lives while there is something to write.

    After an error nothing more is written: entries not on disk are given up, whoever waits for one gets the error, and
    :meth:`check` raises it, until a checkpoint that covers them is on disk (:meth:`covered`).

    Parameters
    ----------
    directory : str or PathLike
        Created, with its parents, if absent.
    order : str
        The buffer's order: keys of groups mean something only in it.
    delay : float
        Seconds between commits, at least: entries appended meanwhile share one write and one sync. The first entry
        after a pause is committed at once.

    Raises
    ------
    ValueError
        If another buffer uses the directory.
    NotADirectoryError
        If it is a file.
    """

    def __init__(self, directory: str | os.PathLike[str], order: str, delay: float) -> None:
        self._guard = -1
        self._file = -1
        self.directory = Path(os.path.abspath(directory))
        self.order = order
        self.delay = delay
        check_durable_files("journals")
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a journal is a directory, this is a file", str(self.directory))
        # Directories whose new entries have to be synced before anything in the journal counts.
        self._unsynced = [path.parent for path in (self.directory, *self.directory.parents) if not path.exists()]
        self.directory.mkdir(parents=True, exist_ok=True)
        self._guard = _locked(self.directory / "journal.lock")
        self.id = secrets.token_hex(8)
        self.used = bool(segment_paths(self.directory))
        self._closed = False
        self._failure: Exception | None = None
        self._condition = threading.Condition()
        self._hurry = threading.Event()
        self._pending: deque[Appended] = deque()
        self._writer: threading.Thread | None = None
        self._writer_idles = False
        self._appended = 0  # entries appended, and the number of the last
        self._durable = 0  # number of the last entry on disk
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._segment = 0  # where entries appended now go
        self._begun = False  # whether it has any
        self._after: dict[int, Any] = {0: None}  # what a segment not created yet continues; "segment" if not here
        self._committing = threading.Lock()
        self._checkpoints: dict[str, int] = {}  # directory -> segment that the checkpoint in it names
        # Of the writer
        self._open_segment = -1
        self._seed = 0
        self._offset = 0
        self._began = -delay
        _journals.add(self)

    def __del__(self) -> None:
        for fd in (self._file, self._guard):
            if fd >= 0:
                os.close(fd)

    # Appending

    def check(self) -> None:
        """Raise unless entries can be appended.

        Raises
        ------
        ValueError
            See :meth:`check_open`.
        OSError
            If an earlier entry could not be written.
        """
        self.check_open()
        if self._failure is not None:
            raise _failed(self.directory, self._failure)

    def check_open(self) -> None:
        """Raise ValueError if the directory holds entries that were not read, or the journal is closed."""
        if self._closed:
            raise ValueError(f"the journal in {str(self.directory)!r} is closed; make a new buffer and resume")
        if self.used:
            raise ValueError(
                f"the journal in {str(self.directory)!r} was used before; call resume(checkpoint directory) first, "
                "resume(None) where there is no checkpoint, or choose another directory to begin anew"
            )

    def append(self, envelope: Envelope, group: EncodedGroup | None) -> int:
        """Append an entry; returns its number, to wait for."""
        with self._condition:
            self._appended += 1
            self._begun = True
            if self._failure is None:
                self._pending.append(Appended(self._segment, envelope, group))
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write, name="pystale-journal", daemon=True)
                    self._writer.start()
                elif self._writer_idles:
                    self._condition.notify_all()
            return self._appended

    @property
    def last(self) -> int:
        """Number of the last entry appended, 0 before the first."""
        return self._appended

    def wait(self, number: int) -> None:
        """Block until an entry is on disk.

        Raises
        ------
        OSError
            If it could not be written.
        """
        done = threading.Event()
        if self._enlist(number, done.set):
            done.wait()
        self._raise_unless_durable(number)

    async def durable(self, number: int) -> None:
        """As :meth:`wait`, without blocking the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who waits
                loop.call_soon_threadsafe(resolve)

        if self._enlist(number, wake):
            await future
        self._raise_unless_durable(number)

    def _enlist(self, number: int, wake: Callable[[], None]) -> bool:
        with self._condition:
            if number <= self._durable or self._failure is not None:
                return False
            self._waiting.append((number, wake))
            return True

    def _raise_unless_durable(self, number: int) -> None:
        with self._condition:
            if number > self._durable:
                raise _failed(self.directory, self._failure or ValueError("it is closed"))

    # Checkpoints

    def rotate(self) -> Position:
        """Have later entries go to a new segment, which a checkpoint of the state now is followed by.

        A segment without entries is never written, and would look like a lost one: two checkpoints with nothing
        between them are followed by the same.
        """
        with self._condition:
            if self._begun or self._failure is not None:
                self._segment += 1
                self._begun = False
            if self._failure is not None:
                # What was given up is only in that checkpoint; no other can precede the segment.
                self._after[self._segment] = "checkpoint"
            return Position(self._segment, self._appended, self._failure)

    def commit(self, position: Position, directory: str | os.PathLike[str], write: Callable[[], None]) -> bool:
        """Have `write` put the checkpoint made at `position` in place in `directory`, and drop what it covers.

        One at a time. False where a later checkpoint of this journal is there already: with the earlier one in its
        place, the entries between the two would be missing.
        """
        path = os.path.abspath(directory)
        with self._committing:
            if self._checkpoints.get(path, 0) > position.segment:
                return False
            write()
            self._checkpoints[path] = position.segment
            self.covered(position)
            return True

    def covered(self, position: Position) -> None:
        """Take note that a checkpoint made at `position` is on disk: delete what it covers, and forget a failure."""
        with self._condition:
            if self._failure is None:
                self._condition.wait_for(lambda: self._durable >= position.number or self._failure is not None)
            if self._failure is not None and self._failure is position.failure:
                self._failure = None
                self._durable = self._appended
        delete(path for number, path in segment_paths(self.directory).items() if number < position.segment)

    def close(self) -> None:
        """Write what is appended and let the directory go. Everything but this raises afterwards."""
        self._hurry.set()
        with self._condition:
            self._condition.wait_for(lambda: self._durable >= self._appended or self._failure is not None)
            self._closed = True
            self._condition.notify_all()
            fds, self._file, self._guard, self._open_segment = (self._file, self._guard), -1, -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    # Going on after what was read

    def go_on(self, journal_id: str, segment: int, after: dict[int, Any]) -> None:
        """Let entries be appended to a used directory, in a segment of their own.

        Parameters
        ----------
        journal_id : str
            The id in the segments that were read.
        segment : int
            Number of the segment entries go to.
        after : dict of int to object
            What a segment continues, where that is not the segment before it.
        """
        with self._condition:
            self.id, self._segment, self._after, self.used = journal_id, segment, after, False
            self._begun = False

    # The writing thread

    def _write(self) -> None:
        while True:
            with self._condition:
                self._writer_idles = True
                if not self._pending:
                    self._condition.wait_for(lambda: self._pending or self._closed, IDLE_SECONDS)
                self._writer_idles = False
                if not self._pending:
                    self._writer = None
                    return
            self._hurry.wait(self._began + self.delay - time.monotonic())
            with self._condition:
                batch = self._batch()
            self._began = time.monotonic()
            failure = None
            try:
                self._commit(batch)
            except Exception as error:  # also what is no OSError must not leave anybody waiting
                failure = error
                self._undo_commit()
            with self._condition:
                if failure is None:
                    self._durable += len(batch)
                else:
                    self._failure = failure
                    self._pending.clear()
                due = [wake for number, wake in self._waiting if failure is not None or number <= self._durable]
                self._waiting = [item for item in self._waiting if failure is None and item[0] > self._durable]
                self._condition.notify_all()
            for wake in due:
                wake()

    def _batch(self) -> list[Appended]:
        batch: list[Appended] = []
        size = 0
        while self._pending and size < COMMIT_BYTES and (not batch or self._pending[0].segment == batch[0].segment):
            item = self._pending.popleft()
            size += item.group.nbytes if item.group is not None else 0
            batch.append(item)
        return batch

    def _commit(self, batch: list[Appended]) -> None:
        body = body_of(batch)
        segment = batch[0].segment
        if self._open_segment != segment:
            self._create(segment, body)
            return
        frame = frame_of(self._seed, self._offset, body)
        write_all(self._file, frame)
        os.fdatasync(self._file)
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError(
                errno.ENOENT, "the segment was deleted while in use", str(segment_path(self.directory, segment))
            )
        self._offset += len(frame)

    def _create(self, segment: int, body: bytes) -> None:
        """Begin a segment with a first commit. The header is on disk before it, so that no whole frame lacks one."""
        start, seed = segment_start(self.id, segment, self._after.get(segment, "segment"), self.order)
        frame = frame_of(seed, len(start), body)
        path = segment_path(self.directory, segment)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            write_all(file, start)
            os.fsync(file)
            for directory in (self.directory, *self._unsynced):
                sync_directory(directory)
            write_all(file, frame)
            os.fdatasync(file)
        except BaseException:
            os.close(file)
            delete([path])
            raise
        old, self._file = self._file, file
        if old >= 0:
            os.close(old)
        self._open_segment, self._seed, self._offset = segment, seed, len(start) + len(frame)
        self._after.pop(segment, None)
        self._unsynced = []

    def _undo_commit(self) -> None:
        """Take what a failed commit may have written away: those who waited for it were told that it failed."""
        if self._open_segment >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._offset)
                os.fdatasync(self._file)


# Journals of this process: a child that is forked must not hold their locks, nor write.
_journals: "weakref.WeakSet[Journal]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for journal in list(_journals):
        journal._closed = True
        journal.__del__()
        journal._file = journal._guard = -1


os.register_at_fork(after_in_child=_leave_to_parent)


def _failed(directory: Path, failure: Exception) -> OSError:
    number = failure.errno if isinstance(failure, OSError) and failure.errno else errno.EIO
    why = os.strerror(number) if isinstance(failure, OSError) and failure.errno else repr(failure)
    return OSError(
        number,
        f"the journal cannot be written ({why}); what was put is in memory only, and nothing more is accepted until "
        "save() has written a checkpoint",
        str(directory),
    )


def _locked(path: Path) -> int:
    """Descriptor that holds the lock of a directory."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        lock(fd, wait=False)
    except BlockingIOError:
        user = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ValueError(
            f"the journal in {str(path.parent)!r} is used by another buffer (process {user}); "
            "close that, or choose another directory"
        ) from None
    except OSError as error:  # no locks on this file system
        logger.warning("%s cannot be locked (%s): nothing keeps two buffers from using it", path, error)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
