"""Oldest and newest model step of many trajectories, given as arrays."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pystale.accumulators import as_integers

__all__ = ["Trajectories", "read_trajectories"]


class Trajectories(NamedTuple):
    """What :func:`read_trajectories` found."""

    oldest: NDArray[np.int64]  # of those whose version is known
    newest: NDArray[np.int64]
    rows: int  # those, and those of unknown version


def read_trajectories(
    min_model_step: ArrayLike, max_model_step: ArrayLike, padding_mask: ArrayLike | None
) -> Trajectories:
    """Check the arrays that :meth:`~pystale.OffPolicyAccumulator.add_steps` is given, and leave padding rows out."""
    padding = None if padding_mask is None else np.asarray(padding_mask)
    if padding is not None and padding.size and padding.dtype.kind not in "biu":
        raise TypeError(f"padding_mask must be boolean, got dtype {padding.dtype}")
    low, high = (
        _rows(name, values, padding)
        for name, values in (("min_model_step", min_model_step), ("max_model_step", max_model_step))
    )
    if low.shape != high.shape:
        raise ValueError(f"min_model_step has {low.size} entries, max_model_step has {high.size}")
    real: NDArray[np.bool_] = np.ones(low.shape, dtype=bool) if padding is None else ~padding.astype(bool)
    oldest, newest = _steps("min_model_step", low, real), _steps("max_model_step", high, real)
    known = real & (oldest >= 0) & (newest >= 0)
    wrong = np.flatnonzero(known & (oldest > newest))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(f"row {row} has min_model_step {oldest[row]} above max_model_step {newest[row]}")
    return Trajectories(oldest[known], newest[known], int(real.sum()))


def _rows(name: str, values: ArrayLike, padding: NDArray[Any] | None) -> NDArray[np.integer[Any]]:
    if padding is not None:
        rows = np.shape(values)
        if padding.shape != rows:
            raise ValueError(f"padding_mask has shape {padding.shape}, {name} has {rows}")
        if isinstance(values, (list, tuple)):  # what pads it need not be integers
            values = [0 if pads else value for value, pads in zip(values, padding.tolist(), strict=True)]
    array = as_integers(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, one entry per trajectory, got shape {array.shape}")
    return array


def _steps(name: str, array: NDArray[np.integer[Any]], real: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`array` as int64; entries that are not `real` may hold anything."""
    if array.dtype.kind == "u":
        too_large = np.flatnonzero(real & (array > np.iinfo(np.int64).max))
        if too_large.size:
            row = int(too_large[0])
            raise ValueError(f"{name} has {array[row]} at index {row}; steps are at most 2**63 - 1")
    return array.astype(np.int64)
