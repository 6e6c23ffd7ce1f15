"""verl's off-policy metrics from the tags of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pystale.metrics import off_policy_metrics

__all__ = ["off_policy_metrics_from_tags"]


def off_policy_metrics_from_tags(
    tags: Sequence[Mapping[str, Any]], non_padding_mask: ArrayLike | None, global_steps: int
) -> dict[str, float]:
    """How far behind the trainer a batch is, as verl's trainer logs it.

    Padding rows are left out whatever their tags hold, also where the versions are None or not there at all, on which
    a plain array of integers fails.

    Parameters
    ----------
    tags : sequence of mappings
        Of the batch (``KVBatchMeta.tags``), one per row, with ``min_global_steps`` and ``max_global_steps``.
    non_padding_mask : array_like of bool, shape (rows,), or None
        True marks a row that is not padding. None: what the tags say (``is_padding``).
    global_steps : int
        Step that consumes the batch.

    Returns
    -------
    dict of str to float
        ``training/off_policy/{trajectory_spans,trajectory_staleness,trajectory_staleness_worst}/{mean,max,min}``. Rows
        without versions are left out of them, and ``training/off_policy/coverage`` says how many are in. Without any
        row that is not padding: empty.

    Raises
    ------
    TypeError, ValueError
        If the mask has another length than `tags`, or a row holds what is no version, or versions in the wrong order.

    Notes
    -----
    Names and formulas are verl's (``trainer_base._compute_metrics``).

    Examples
    --------
    >>> from pystale.integrations.verl import off_policy_metrics_from_tags
    >>> tags = [{"min_global_steps": 2, "max_global_steps": 4}, {"is_padding": True}]
    >>> metrics = off_policy_metrics_from_tags(tags, [True, False], global_steps=6)
    >>> metrics["training/off_policy/trajectory_spans/mean"], metrics["training/off_policy/trajectory_staleness/max"]
    (3.0, 1.0)
    """
    if non_padding_mask is None:
        real = np.array([not tag.get("is_padding", False) for tag in tags], dtype=bool)
    else:
        real = np.asarray(non_padding_mask)
        if real.shape != (len(tags),):
            raise ValueError(f"non_padding_mask has shape {real.shape}, there are {len(tags)} tags")
        if real.size and real.dtype.kind != "b":
            raise TypeError(f"non_padding_mask must be boolean, got dtype {real.dtype}")
    rows = [tag for tag, is_real in zip(tags, real.tolist(), strict=True) if is_real]
    low, high = ([_version(tag.get(name)) for tag in rows] for name in ("min_global_steps", "max_global_steps"))
    return off_policy_metrics(low, high, train_step=global_steps)


def _version(value: Any) -> Any:
    return -1 if value is None else value
