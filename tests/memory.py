"""What the process holds in memory, counted exactly enough to see one small leak per call."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Memory", "memory_in_use", "resident_bytes", "set_apart"]


class Memory(NamedTuple):
    """Numbers that come back to where they were when nothing is kept."""

    heap: int  # bytes of malloc
    blocks: int  # of Python's own allocator, which takes small objects
    objects: int  # that the garbage collector knows

    def growth_since(self, before: "Memory") -> "Memory":
        return Memory(*(now - then for now, then in zip(self, before, strict=True)))


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


SANITIZED = hasattr(ctypes.CDLL(None), "__sanitizer_get_current_allocated_bytes")  # its malloc is not glibc's


def _heap_counter() -> Callable[[], int]:
    process = ctypes.CDLL(None)
    if SANITIZED:
        count = process.__sanitizer_get_current_allocated_bytes
        count.restype = ctypes.c_size_t
        return lambda: int(count())
    if hasattr(process, "mallinfo2"):
        info = process.mallinfo2
        info.restype = _MallocInfo

        def in_use() -> int:
            now = info()
            return int(now.uordblks + now.hblkhd)

        return in_use
    return lambda: 0  # no such count here: Python's own remain


_heap = _heap_counter()


def memory_in_use() -> Memory:
    """After a garbage collection."""
    gc.collect()
    return Memory(_heap(), sys.getallocatedblocks(), len(gc.get_objects()))


@contextlib.contextmanager
def set_apart() -> Iterator[None]:
    """Leaves out of collections and counts what is there already: looking through it takes longer than the calls."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resident_bytes() -> int:
    """Memory of the process that is in RAM; 0 where the system does not say so in ``/proc``.

    And 0 under a sanitizer, which keeps what was freed.
    """
    if SANITIZED:
        return 0
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * 4096
