"""Payloads as the actor sees them: who holds each, and which keeper has it."""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from pystale.state import RolloutState
from pystale.summary import names_of

__all__ = ["Payloads"]

logger = logging.getLogger("pystale")


class Payloads:
    """Counts the members that hold a payload, and has it released once nobody does.

    Parameters
    ----------
    keepers : mapping of str to ActorHandle
        By what their payloads' names begin with.
    """

    def __init__(self, keepers: Mapping[str, Any]) -> None:
        self.keepers = keepers
        self._holders: Counter[str] = Counter()
        self._background: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def hold(self, states: Iterable[RolloutState]) -> None:
        """Members came that hold payloads."""
        self._holders.update(names_of(states))

    def let_go(self, names: Iterable[str]) -> None:
        """Members hold these no more; what nobody holds any more is released, once."""
        released = []
        for name in names:
            self._holders[name] -= 1
            if self._holders[name] <= 0:
                del self._holders[name]
                released.append(name)
        for keeper, of_keeper in _by_keeper(released).items():
            handle = self.keepers.get(keeper)
            if handle is not None:
                self.in_background(handle.release.remote(of_keeper))

    def released(self, released: list[tuple[Any, dict[str, Any]]]) -> None:
        """The buffer's ``on_release``."""
        self.let_go([old[field] for _, old in released for field in ("response", "mm_info") if old.get(field)])

    async def missing(self, groups: Iterable[Sequence[RolloutState]]) -> set[str]:
        """Payloads of these groups that are gone with their keeper."""
        return await self._missing_of(_by_keeper({name for group in groups for name in names_of(group)}))

    async def missing_with(self, missing: Iterable[str]) -> set[str]:
        """All that the keepers of these payloads have no more."""
        lost = _by_keeper(missing)
        return await self._missing_of({k: names for k, names in _by_keeper(self._holders).items() if k in lost})

    async def _missing_of(self, by_keeper: Mapping[str, list[str]]) -> set[str]:
        missing: set[str] = set()
        for keeper, names in by_keeper.items():
            handle = self.keepers.get(keeper)
            missing.update(names if handle is None else await handle.missing.remote(names))
        return missing

    def settle_up(self) -> set[str]:
        """Have the keepers forget all that is not held; returns what they do not have. Blocks."""
        import ray

        known = _by_keeper(self._holders)
        missing: set[str] = set()
        for keeper, handle in self.keepers.items():
            missing.update(ray.get(handle.settle_up.remote(known.pop(keeper, []))))
        return missing.union(*known.values())  # those of keepers that are no more

    async def sweep(self, grace_s: float) -> None:
        """Let payloads go whose put has not come for so long."""
        for handle in self.keepers.values():
            names = await handle.unconfirmed.remote(grace_s)
            if names:
                known = [name for name in names if name in self._holders]
                await handle.confirm.remote(known)
                await handle.release.remote([name for name in names if name not in self._holders])

    def in_background(self, pending: Awaitable[Any]) -> None:
        """Have payloads released, as `pending` does, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # without a loop, before the actor takes calls, nobody waits
            asyncio.get_running_loop()
            future = asyncio.ensure_future(_quiet(pending))
            self._background.add(future)
            future.add_done_callback(self._background.discard)


def _by_keeper(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[name.rpartition("/")[0]].append(name)
    return found


async def _quiet(pending: Awaitable[Any]) -> None:
    try:
        await pending
    except Exception:
        logger.exception("payloads could not be released; they are once the actor is started anew")
