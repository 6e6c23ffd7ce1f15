"""What is left to XTuner itself, looked up when it is needed, so that pystale imports without it."""

import importlib
from types import ModuleType
from typing import Any

__all__ = ["MASKS", "masks_module", "ray", "replay_buffer_module", "required", "torch"]

MASKS = "calculate_group_effective_response_masks"
_TRIED = "tried with XTuner at commit b934f462 of 2026-08-21"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} cannot be imported ({error}). pystale.integrations.xtuner works inside XTuner: put a checkout of "
            f"https://github.com/InternLM/xtuner on PYTHONPATH, with what it requires ({_TRIED})"
        ) from error


def required(module: ModuleType, *names: str) -> None:
    """Refuse a module of another XTuner, in which something has another name.

    Raises
    ------
    ImportError
        Naming what is missing.
    """
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ImportError(f"{module.__name__} has no {', '.join(missing)}; this pystale was {_TRIED}")


def replay_buffer_module() -> Any:
    """XTuner's module of the replay buffer; what pystale does not replace is called through it."""
    return _module("xtuner.v1.rl.replay_buffer")


def masks_module() -> Any:
    """XTuner's module of rollout states and their masks."""
    return _module("xtuner.v1.data_proto.rl_data")


def ray() -> Any:
    """Ray, which XTuner needs anyway."""
    return _module("ray")


def torch() -> Any:
    """torch, which XTuner needs anyway."""
    return _module("torch")
