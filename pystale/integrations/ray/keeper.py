"""Keepers own the payloads of a node, so that these outlive the producer that made them."""

import itertools
import os
import time
from collections.abc import Iterable
from typing import Any

__all__ = ["PayloadKeeper", "PayloadsLost"]


class PayloadsLost(RuntimeError):
    """Payloads that cannot be had any more: their keeper, or the node their objects were on, is gone."""


class PayloadKeeper:
    """A Ray actor, one per node, in which payloads are put into the object store of the node.

    An object of Ray is lost with the process that owns it, which since Ray 2.56 is always the one that put it there. So
    this process does, and it does nothing else. Its objects can be spilled to disk, and are fetched from the node they
    are on without passing through here.

    A payload is kept until it is released. One that was kept for a put which never came is *unconfirmed*; the buffer's
    actor asks for those from time to time, and says which it knows.

    Examples
    --------
    >>> keeper = PayloadKeeper()
    >>> keeper.count()
    0
    """

    def __init__(self) -> None:
        self._refs: dict[str, Any] = {}
        self._unconfirmed: dict[str, float] = {}  # in order of time

    def keep(self, name: str, prompts: Any, responses: Any) -> None:
        """Put the two payloads of a group into the object store, as ``name + ".p"`` and ``name + ".r"``.

        A call that comes again changes nothing.
        """
        import ray

        now = time.monotonic()
        for payload, value in ((f"{name}.p", prompts), (f"{name}.r", responses)):
            if payload not in self._refs:
                self._refs[payload] = ray.put(value)
                self._unconfirmed[payload] = now

    def keep_many(self, payloads: Iterable[tuple[str, Any, Any]]) -> None:
        """:meth:`keep` for several groups."""
        for name, prompts, responses in payloads:
            self.keep(name, prompts, responses)

    def refs(self, names: Iterable[str]) -> list[Any]:
        """References to payloads; None for one that is not here."""
        return [self._refs.get(name) for name in names]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are not here."""
        return [name for name in names if name not in self._refs]

    def release(self, names: Iterable[str]) -> int:
        """Let payloads go. Returns how many there were; those that are gone already are not counted."""
        released = 0
        for name in names:
            released += self._refs.pop(name, None) is not None
            self._unconfirmed.pop(name, None)
        return released

    def unconfirmed(self, seconds: float) -> list[str]:
        """Payloads that were kept more than `seconds` ago and not confirmed."""
        since = time.monotonic() - seconds
        return [name for name, _ in itertools.takewhile(lambda item: item[1] <= since, self._unconfirmed.items())]

    def confirm(self, names: Iterable[str]) -> None:
        """Payloads that the buffer knows, and will release."""
        for name in names:
            self._unconfirmed.pop(name, None)

    def settle_up(self, known: Iterable[str]) -> list[str]:
        """Release what was confirmed and is not in `known`; returns what is in `known` and not here.

        For an actor that was started anew, and may have been killed before it released something.
        """
        names = set(known)
        stale = [name for name in self._refs if name not in names and name not in self._unconfirmed]
        self.release(stale)
        self.confirm(names)
        return sorted(names - self._refs.keys())

    def pid(self) -> int:
        """Process of the keeper."""
        return os.getpid()

    def count(self) -> int:
        """Payloads kept."""
        return len(self._refs)
