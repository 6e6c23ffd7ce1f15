"""Ray, imported when it is used."""

import importlib
from typing import Any

__all__ = ["ray_module"]


def ray_module() -> Any:
    """The module ``ray``.

    Raises
    ------
    ImportError
        If it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(f"Ray is needed for pystale.integrations.ray: install pystale[ray] ({error})") from error
