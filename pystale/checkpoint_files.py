"""The files of a checkpoint directory: their names, whose they are, and which of them nobody needs any more."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from pystale.files import delete, lock

__all__ = ["DATA_FILE", "begin_writing", "delete_dead", "directory_lock", "end_writing", "names_in"]

DATA_FILE = re.compile(r"(?:groups-([0-9a-f]{16})-[0-9]{5,9}\.jsonl|arrays-([0-9a-f]{16})-[0-9]{5,9}\.safetensors)")
_ANY_FILE = re.compile(
    r"(?:groups-|arrays-|writing-|checkpoint-)([0-9a-f]{16})(?:-[0-9]{5,9}\.jsonl|-[0-9]{5,9}\.safetensors|\.lock|\.tmp)"
)


def begin_writing(directory: Path) -> tuple[str, int]:
    """A token nobody uses, and the descriptor that holds its lock."""
    while True:
        token = secrets.token_hex(8)
        path = directory / f"writing-{token}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # no locks here: nobody can tell that this writer lives, nobody deletes
            lock(fd, wait=True)
        # Between creation and lock a committing writer may have taken the file for a dead one's and deleted it.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return token, fd
        os.close(fd)


def end_writing(directory: Path, token: str, fd: int) -> None:
    delete([directory / f"writing-{token}.lock"])
    os.close(fd)


@contextlib.contextmanager
def directory_lock(directory: Path) -> Iterator[bool]:
    """Keeps two commits from interleaving; False where the file system has no locks."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        locked = True
        try:
            lock(fd, wait=True)
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(fd)


def names_in(document: Path) -> list[str]:
    """Data files a document names, whatever state it is in."""
    with contextlib.suppress(OSError):
        return [match[0] for match in DATA_FILE.finditer(document.read_bytes().decode("ascii", "replace"))]
    return []


def delete_dead(directory: Path, own: str) -> None:
    """Delete the files of every token but `own` whose writer holds no lock. Call under the directory lock."""
    files: dict[str, list[str]] = {}
    for name in os.listdir(directory):
        match = _ANY_FILE.fullmatch(name)
        if match and match[1] != own:
            files.setdefault(match[1], []).append(name)
    for token, names in files.items():
        held = f"writing-{token}.lock"
        fd = -1
        try:
            if held in names:
                fd = os.open(directory / held, os.O_RDWR | os.O_CLOEXEC)
                lock(fd, wait=False)
            # The lock goes last: without it the rest still counts as a dead writer's.
            delete(directory / name for name in sorted(names, key=lambda name: name == held))
        except OSError:  # locked, so alive; or it has just ended
            continue
        finally:
            if fd >= 0:
                os.close(fd)
