"""An event loop whose clock jumps to the next timer instead of sleeping, and that notices when nothing can happen."""

import asyncio
import collections
import selectors


class Deadlock(Exception):
    """Nothing is ready and no timer runs: the program would wait for ever."""


class _JumpingSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock
            self.now += timeout
        return ready


class _ShuffledQueue(collections.deque):
    """What is ready to run, in an order of its own: any that an event loop could have had."""

    def __init__(self, rng):
        super().__init__()
        self.rng = rng

    def popleft(self):
        self.rotate(-self.rng.randrange(len(self)))
        return super().popleft()


def run(coroutine, rng=None):
    """`asyncio.run` on a clock that jumps. Fails when a task is left behind, or an error went unheard.

    With `rng`, what is ready at the same time runs in the order it says.
    """
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    unheard = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    if rng is not None:
        loop._ready = _ShuffledQueue(rng)
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(coroutine)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks left behind: {left}"
        assert not unheard, f"errors nobody heard: {unheard}"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        loop.close()
