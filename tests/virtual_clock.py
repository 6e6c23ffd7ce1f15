"""An event loop whose clock jumps to the next timer instead of sleeping, and that notices when nothing can happen."""

import asyncio
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


def run(coroutine):
    """`asyncio.run` on a clock that jumps. Fails when a task is left behind, or an error went unheard."""
    selector = _JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    unheard = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
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
