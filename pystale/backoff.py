"""Waiting between attempts that brought nothing."""

import asyncio
from collections.abc import Callable

__all__ = ["backoff", "loop_time"]


def backoff(failures: int, first: float, longest: float, random: Callable[[], float]) -> float:
    """Seconds to wait after so many failures in a row: `first`, doubled with each, up to `longest`.

    A random part of up to half is taken off, so that clients which failed together do not come again together.
    """
    if not failures:
        return 0.0
    return min(longest, first * 2.0 ** min(failures - 1, 64)) * (1 - random() / 2)


def loop_time() -> float:
    """Clock of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
