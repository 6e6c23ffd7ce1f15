"""Files that are on disk when a call returns."""

import errno
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["check_durable_files", "delete", "lock", "prepare_directory", "sync_directory", "write_all", "write_new"]

logger = logging.getLogger("pystale")


def check_durable_files(what: str) -> None:
    """Raise where the system has no file locks and no way to have a directory on disk.

    Raises
    ------
    OSError
        On Windows; `what` names what needs them.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, f"{what} need file locks and synced directories as POSIX has them; not on Windows")


def lock(fd: int, *, wait: bool) -> None:
    """Take the lock of an open file or directory, which goes with its descriptor.

    Raises
    ------
    BlockingIOError
        If somebody else has it and `wait` is false.
    OSError
        If the file system has no locks.
    """
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def prepare_directory(path: str) -> None:
    """Make a directory for what is written later, unless it is there, and see that files can be written to it.

    Raises
    ------
    OSError
        If not; it names the directory.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        raise OSError(errno.ENOTDIR, "is a file, and a directory is needed", path) from None
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def write_new(path: Path, data: bytes) -> None:
    """A new file, on disk but for its name."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, which one call of the system need not."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def delete(paths: Iterable[Path]) -> None:
    """Delete files that may be gone already; what cannot be deleted is logged."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as fault:
            logger.warning("cannot delete %s: %s", path, fault)
