"""Putting pystale into an imported XTuner, and taking it out again."""

import sys
import threading
from typing import Any

from pystale.integrations.xtuner.buffer import XTunerReplayBuffer
from pystale.integrations.xtuner.framework import MASKS, masks_module, replay_buffer_module, required
from pystale.integrations.xtuner.masks import calculate_group_effective_response_masks

__all__ = ["config_class", "install", "uninstall"]

_FIFO = {"SyncReplayBufferConfig": True, "AsyncReplayBufferConfig": False}
_NEEDED = (
    *("StorageItem", "SerializedRayObjectRef", "Status"),
    *("reset_rollout_response", "release_and_discard_rollout_groups"),
)

_lock = threading.Lock()
_replaced: list[tuple[Any, str, Any]] = []  # owner, name, and what was there
_configs: dict[type, type] = {}


def _build_fifo(self: Any) -> XTunerReplayBuffer:
    """Make the buffer: groups come out in the order they were put."""
    return XTunerReplayBuffer(fifo=True)


def _build_stalest_first(self: Any) -> XTunerReplayBuffer:
    """Make the buffer: the stalest group comes out first."""
    return XTunerReplayBuffer(fifo=False)


def _build(name: str) -> Any:
    return _build_fifo if _FIFO[name] else _build_stalest_first


def config_class(name: str) -> Any:
    """Subclass of XTuner's config of this name whose ``build()`` gives pystale's buffer."""
    module = replay_buffer_module()
    required(module, *_FIFO, *_NEEDED)
    base = getattr(module, name)
    with _lock:
        if base not in _configs:
            _configs[base] = type(base)(
                name,
                (base,),
                {
                    "__module__": "pystale.integrations.xtuner",
                    "__qualname__": name,
                    "__doc__": f"XTuner's ``{name}``, whose ``build()`` gives pystale's buffer.",
                    "build": _build(name),
                },
            )
        return _configs[base]


def install() -> None:
    """Put pystale into XTuner: what its replay buffer configs build, and its group mask function.

    Everything of XTuner's that was imported already is reached too. Calling it again changes nothing.

    Raises
    ------
    ImportError
        Without XTuner, or with one in which something needed has another name. Nothing has changed then.
    """
    buffers, masks = replay_buffer_module(), masks_module()
    required(buffers, *_FIFO, *_NEEDED)
    required(masks, MASKS)
    with _lock:
        if _replaced:
            return
        # On the classes themselves, so that configs and defaults made before build pystale's buffer too.
        new = [(getattr(buffers, name), "build", _build(name)) for name in _FIFO]
        # In every module that has imported it by name.
        old = getattr(masks, MASKS)
        new += [
            (module, MASKS, calculate_group_effective_response_masks)
            for name, module in sorted(sys.modules.items())
            if name.split(".")[0] == "xtuner" and getattr(module, "__dict__", {}).get(MASKS) is old
        ]
        for owner, name, value in new:
            _replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)


def uninstall() -> None:
    """Give XTuner back what :func:`install` replaced; without it nothing happens."""
    with _lock:
        original = next((old for _, name, old in _replaced if name == MASKS), None)
        while _replaced:
            owner, name, old = _replaced.pop()
            setattr(owner, name, old)
        # Modules imported since have ours.
        for name, module in sorted(sys.modules.items()):
            if (
                original is not None
                and name.split(".")[0] == "xtuner"
                and getattr(module, "__dict__", {}).get(MASKS) is calculate_group_effective_response_masks
            ):
                setattr(module, MASKS, original)
