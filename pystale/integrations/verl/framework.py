"""The parts of verl and TransferQueue that are used, imported when they are."""

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["transfer_queue", "verl_buffer", "verl_skipping"]


def transfer_queue() -> Any:
    """The module `transfer_queue`.

    Raises
    ------
    ImportError
        If it is not installed.
    """
    return _imported("transfer_queue", "TransferQueue")


def verl_buffer() -> Any:
    """verl's own replay buffer module.

    Raises
    ------
    ImportError
        If verl is not installed, or is one without V1 trainers.
    """
    return _imported("verl.trainer.ppo.v1.replay_buffer", "verl 0.9 or newer")


def verl_skipping(sample: Callable[..., Any]) -> Callable[..., Any]:
    """`sample` with what verl wraps around its own: batches saved for runs that skip rollouts."""
    skipping = _imported("verl.utils.skip", "verl 0.9 or newer").SkipManager
    wrapped: Callable[..., Any] = skipping.annotate_tq(role="rollout_tq", phase="sample")(sample)
    return wrapped


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{package} is needed for pystale.integrations.verl: install pystale[verl], and verl as its documentation "
            f"says ({error})"
        ) from error
