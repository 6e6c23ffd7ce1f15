"""The parts of Ray, torch and TransferQueue that are used, imported when they are."""

import importlib
from typing import Any

__all__ = ["framework"]


def framework(module: str) -> Any:
    """A module of Ray, torch, tensordict or TransferQueue.

    Raises
    ------
    ImportError
        If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is needed for pystale.integrations.transfer_queue: install pystale[transfer-queue] ({error})"
        ) from error
