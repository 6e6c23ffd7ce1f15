"""Files that are on disk when a call returns."""

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["delete", "prepare_directory", "sync_directory", "write_all", "write_new"]

logger = logging.getLogger("pystale")


def prepare_directory(path: str) -> None:
    """Make a directory for what is written later, unless it is there, and see that files can be written to it.

    Raises
    ------
    OSError
        If not; it names the directory.
    """
    os.makedirs(path, exist_ok=True)
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
