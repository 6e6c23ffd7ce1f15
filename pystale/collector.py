"""Keeping the garbage collector away while it would only cost."""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_delayed", "collector_paused"]


@contextlib.contextmanager
def collector_delayed() -> Iterator[None]:
    """Keep the garbage collector from starting in the middle of an operation. Nothing is done where it is off.

    Each member that is reset leaves some new lists, and a few hundred of these would set the collector off: under the
    mutex, and up to ten times. One walk over groups put recently, with their tokens in lists, can take longer than all
    the rest (140 ms for 2,000 responses of 4,096 tokens, against 11 ms to reset them). It comes once, afterwards.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking a heap that is only being filled. Nothing is done where it is off.

    Reading makes millions of objects and no garbage. Left alone, the collector walks all of them again and again: it
    doubles the time to read 100,000 groups, and stops every thread for seconds. What was made meanwhile goes to the
    oldest generation without being walked.
    """
    enabled = gc.isenabled()
    with collector_delayed():
        try:
            yield
        finally:
            if enabled and not gc.get_freeze_count():  # whoever froze objects wants them to stay frozen
                gc.freeze()
                gc.unfreeze()
