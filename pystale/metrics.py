"""Off-policy metrics of the trajectories in a batch."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pystale.staleness import checked_int

__all__ = ["off_policy_metrics"]


def _steps(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, one entry per trajectory, got shape {array.shape}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has {array.max()} at index {array.argmax()}; steps are at most 2**63 - 1")
    return array.astype(np.int64)


def off_policy_metrics(
    min_model_step: ArrayLike,
    max_model_step: ArrayLike,
    *,
    train_step: int,
    padding_mask: ArrayLike | None = None,
    prefix: str = "training/off_policy",
) -> dict[str, float]:
    """Span and staleness of the trajectories that train at `train_step`.

    Parameters
    ----------
    min_model_step, max_model_step : array_like of int, shape (rows,)
        Oldest and newest model step of each trajectory. A negative step marks a missing version; such rows are left
        out.
    train_step : int
        Trainer step that consumes the batch, from 1.
    padding_mask : array_like of bool, shape (rows,), optional
        True marks a padding row; it is left out whatever it holds.
    prefix : str, default "training/off_policy"
        Start of every key.

    Returns
    -------
    dict of str to float
        ``mean``, ``max`` and ``min``, in trainer steps, of

        - ``trajectory_spans``: ``max - min + 1``, policy versions a trajectory may have lived through;
        - ``trajectory_staleness``: ``(train_step - 1) - max``, lag of its newest token;
        - ``trajectory_staleness_worst``: ``(train_step - 1) - min``, lag of its oldest token (its `seq_staleness`);

        and ``coverage``, the fraction of real rows whose version is known, only when some are missing. Empty when
        there is no real row.

    Raises
    ------
    TypeError, ValueError
        For steps that are not integers, arrays of different lengths, or a row whose minimum exceeds its maximum.

    Examples
    --------
    >>> metrics = off_policy_metrics([7, 9, 0], [9, 9, 0], train_step=11, padding_mask=[False, False, True])
    >>> metrics["training/off_policy/trajectory_spans/mean"]
    2.0

    Notes
    -----
    Names and formulas are verl's (``training/off_policy/*``); leaving padding rows out is not.
    """
    train_step = checked_int("train_step", train_step, at_least=1)
    oldest, newest = _steps("min_model_step", min_model_step), _steps("max_model_step", max_model_step)
    if oldest.shape != newest.shape:
        raise ValueError(f"min_model_step has {oldest.size} entries, max_model_step has {newest.size}")
    real: NDArray[Any] = np.ones(oldest.shape, dtype=bool)
    if padding_mask is not None:
        padding = np.asarray(padding_mask)
        if padding.shape != oldest.shape:
            raise ValueError(f"padding_mask has shape {padding.shape}, min_model_step has {oldest.shape}")
        if padding.size and padding.dtype.kind not in "biu":
            raise TypeError(f"padding_mask must be boolean, got dtype {padding.dtype}")
        real = ~padding.astype(bool)
    if not real.any():
        return {}
    known = real & (oldest >= 0) & (newest >= 0)
    wrong = np.flatnonzero(known & (oldest > newest))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(f"row {row} has min_model_step {oldest[row]} above max_model_step {newest[row]}")

    metrics: dict[str, float] = {}
    low, high = oldest[known], newest[known]
    if low.size:
        for name, values in (
            ("trajectory_spans", high - low + 1),
            ("trajectory_staleness", train_step - 1 - high),
            ("trajectory_staleness_worst", train_step - 1 - low),
        ):
            metrics[f"{prefix}/{name}/mean"] = float(values.mean())
            metrics[f"{prefix}/{name}/max"] = float(values.max())
            metrics[f"{prefix}/{name}/min"] = float(values.min())
    if low.size < int(real.sum()):
        metrics[f"{prefix}/coverage"] = low.size / int(real.sum())
    return metrics
