"""Keepers own the payloads of a node, so that these outlive the producer that made them."""

import itertools
import os
import time
from collections.abc import Iterable
from typing import Any

__all__ = ["PayloadKeeper", "PayloadsLost", "keeper_of", "start_keepers"]

# A cluster that has just been started may put an actor on another node than it was told to.
PLACING_ATTEMPTS = 6
PLACING_PAUSE_S = 0.5


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

    def node(self) -> str:
        """Id of the node it is on."""
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def pid(self) -> int:
        """Process of the keeper."""
        return os.getpid()

    def count(self) -> int:
        """Payloads kept."""
        return len(self._refs)


def keeper_of(node_id: str) -> str:
    """Key of the keeper of a node: short, since every payload is named after it."""
    return node_id[:12]


def start_keepers(prefix: str, namespace: str, lifetime: str | None) -> tuple[dict[str, str], list[Any]]:
    """Start a keeper on every node that is alive.

    Returns
    -------
    dict of str to str, list of ActorHandle
        Names of their actors by node, and the handles they were made with.

    Raises
    ------
    RuntimeError
        If not one of them could be started on its node.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes: Any = ray.nodes
    left = [node["NodeID"] for node in nodes() if node["Alive"]]
    names: dict[str, str] = {}
    handles: list[Any] = []
    for attempt in range(PLACING_ATTEMPTS):
        tried: dict[str, tuple[str, Any]] = {}
        for node in left:
            name = f"{prefix}-keeper-{keeper_of(node)}-{attempt}"
            options = {
                "num_cpus": 0,
                "max_restarts": -1,
                "max_task_retries": -1,
                "lifetime": lifetime,
                "name": name,
                "namespace": namespace,
                # Soft: a keeper whose node is gone starts empty somewhere else, and calls to it get an answer.
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
            }
            tried[node] = (name, ray.remote(PayloadKeeper).options(**options).remote())
        left = []
        for node, (name, handle) in tried.items():
            if ray.get(handle.node.remote()) == node:
                names[keeper_of(node)] = name
                handles.append(handle)
            else:
                ray.kill(handle)
                left.append(node)
        if not left:
            break
        time.sleep(PLACING_PAUSE_S)
    if not names:
        raise RuntimeError("no keeper of payloads could be started on its node; see the state of the cluster")
    return names, handles
