"""Numbers for a logger: flat dicts of str to float, under verl's names or another project's.

Three sources, each its own function: what was trained (:func:`off_policy_metrics`, and
:class:`~pystale.off_policy.OffPolicyAccumulator` where numbers have to be merged), where tokens went
(:func:`ledger_metrics`) and what is stored (:func:`pool_metrics`).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from pystale.ledger import booked
from pystale.off_policy import PREFIX, OffPolicyAccumulator
from pystale.staleness import checked_int
from pystale.state import as_status

__all__ = ["ledger_metrics", "off_policy_metrics", "pool_metrics", "translate"]

_TOKENS = "training/tokens"
_POOLS = "training/pools"
_FLOWS = ("produced", "trained", "masked_stale", "masked_semantic")
_LEVELS = ("stored", "in_flight")


def off_policy_metrics(
    min_model_step: ArrayLike,
    max_model_step: ArrayLike,
    *,
    train_step: int,
    padding_mask: ArrayLike | None = None,
    prefix: str = PREFIX,
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

    See Also
    --------
    pystale.off_policy.OffPolicyAccumulator : the same and more, from several batches or ranks.

    Examples
    --------
    >>> metrics = off_policy_metrics([7, 9, 0], [9, 9, 0], train_step=11, padding_mask=[False, False, True])
    >>> metrics["training/off_policy/trajectory_spans/mean"]
    2.0

    Notes
    -----
    Names and formulas are verl's (``training/off_policy/*``); leaving padding rows out is not.
    """
    rows = OffPolicyAccumulator()
    rows.add_steps(min_model_step, max_model_step, train_step=train_step, padding_mask=padding_mask)
    return rows.trajectory_metrics(prefix)


def ledger_metrics(
    ledger: Mapping[str, Any], *, since: Mapping[str, Any] | None = None, prefix: str = _TOKENS
) -> dict[str, float]:
    """Where generated tokens went.

    Parameters
    ----------
    ledger : mapping
        Of :meth:`~pystale.ReplayBuffer.ledger`, now.
    since : mapping, optional
        The same as it was earlier: ``produced``, ``trained``, ``masked_*`` and ``discarded`` are then what was added in
        between. ``stored`` and ``in_flight`` are always as of now.
    prefix : str, default "training/tokens"
        Start of every key.

    Returns
    -------
    dict of str to float
        Response tokens: ``produced``, ``trained``, ``masked_stale``, ``masked_semantic``, ``stored``, ``in_flight``,
        and ``discarded/{reason}`` for every reason that ever occurred. Without `since` the first is the sum of the
        others. And ``masked_stale_fraction``, ``masked_stale / (trained + masked_stale)``, when that is defined.

    Raises
    ------
    TypeError, ValueError
        If a count is missing, or `since` is later than `ledger`.

    Examples
    --------
    >>> from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
    >>> from pystale.metrics import ledger_metrics
    >>> buffer = ReplayBuffer(StalenessRule(max_staleness=1, max_token_staleness=0), tail_batch_trigger_size=0)
    >>> state = RolloutState(response_ids=[5, 6, 7], response_model_steps=[3, 4, 4], status=Status.COMPLETED)
    >>> stored = buffer.sync.put([state], train_step=5)
    >>> batch = buffer.sync.take_train_batch({"default": 1}, train_step=5)
    >>> metrics = ledger_metrics(buffer.ledger())
    >>> metrics["training/tokens/trained"], metrics["training/tokens/masked_stale"]
    (2.0, 1.0)
    """
    metrics = {f"{prefix}/{name}": float(booked(ledger, name, since)) for name in _FLOWS}
    metrics |= {f"{prefix}/{name}": float(booked(ledger, name, None)) for name in _LEVELS}
    discarded, earlier = _discarded(ledger), _discarded(since)
    for reason in sorted({*discarded, *earlier}):
        # A reason that has not occurred is not in the ledger.
        now, before = ({reason: account.get(reason, 0)} for account in (discarded, earlier))
        metrics[f"{prefix}/discarded/{reason}"] = float(booked(now, reason, before))
    could_train = metrics[f"{prefix}/trained"] + metrics[f"{prefix}/masked_stale"]
    if could_train:
        metrics[f"{prefix}/masked_stale_fraction"] = metrics[f"{prefix}/masked_stale"] / could_train
    return metrics


def pool_metrics(counts: Mapping[str, Mapping[Any, int]], *, prefix: str = _POOLS) -> dict[str, float]:
    """Groups a buffer holds, by status, over all tasks given.

    Parameters
    ----------
    counts : mapping of task name to mapping of status to int
        Of :meth:`~pystale.ReplayBuffer.count_statuses`.
    prefix : str, default "training/pools"
        Start of every key.

    Returns
    -------
    dict of str to float
        ``{prefix}/completed`` and so on, for every status in `counts`.

    Raises
    ------
    TypeError, ValueError
        For a status nobody knows, or counts that are not counts.

    Examples
    --------
    >>> from pystale import Status
    >>> from pystale.metrics import pool_metrics
    >>> pool_metrics({"math": {Status.COMPLETED: 5, Status.EXPIRED: 1}, "code": {Status.COMPLETED: 2}})
    {'training/pools/completed': 7.0, 'training/pools/expired': 1.0}
    """
    groups: Counter[str] = Counter()
    for task_name, pools in counts.items():
        for status, n in pools.items():
            found = as_status(status)
            groups[found.value] += checked_int(f"count of {found.value} groups of task {task_name!r}", n, at_least=0)
    return {f"{prefix}/{name}": float(n) for name, n in groups.items()}


# Their name of each of ours that they have, by the project they are of.
_NAMES: dict[str, dict[str, str]] = {
    "verl": {},
    "xtuner": {f"{_POOLS}/{name}": f"async/{name}_samples" for name in ("init", "completed", "aborted", "expired")},
    "prime-rl": {
        f"{PREFIX}/trajectory_staleness_worst/mean": "off_policy/mean",
        f"{PREFIX}/trajectory_staleness_worst/max": "off_policy/max",
        f"{PREFIX}/in_flight/mean": "off_policy/in_flight/mean",
        f"{PREFIX}/in_flight/max": "off_policy/in_flight/max",
        f"{PREFIX}/in_queue/mean": "off_policy/in_queue/mean",
        f"{PREFIX}/in_queue/max": "off_policy/in_queue/max",
        f"{PREFIX}/evicted_samples": "off_policy/dropped",
    },
}


def translate(metrics: Mapping[str, float], project: str) -> dict[str, float]:
    """The same numbers under another project's names, so that its dashboards go on working.

    Known are the names under their default prefixes. A name that the project has no counterpart of stays as it is, and
    so does every key that is not of this module.

    Parameters
    ----------
    metrics : mapping of str to float
    project : {"verl", "xtuner", "prime-rl"}
        - ``verl``: off-policy names are verl's already; nothing changes. ``in_flight``, ``in_queue``, ``coverage``,
          ``token_staleness``, both fractions, ``training/tokens/*`` and ``training/pools/*`` it does not have.
        - ``xtuner``: logs no staleness; ``training/pools/{init,completed,aborted,expired}``, the groups left in the
          buffer, become ``async/{init,completed,aborted,expired}_samples``. The rest stays. Its
          ``async/failed_samples`` and ``async/filtered_samples`` count samples that never entered the buffer, so they
          are not these pools.
        - ``prime-rl``: mean and max of ``trajectory_staleness_worst`` become ``off_policy/{mean,max}``, those of
          ``in_flight`` and ``in_queue`` become ``off_policy/in_flight/*`` and ``off_policy/in_queue/*`` (there clamped
          at 0), and ``evicted_samples`` becomes ``off_policy/dropped`` (there counted in traces, here in groups). It
          has no minima, spans, age of the newest token, coverage, token-level numbers, fractions or staleness of what
          was evicted; those stay.

    Raises
    ------
    ValueError
        For an unknown project, or a key that is there already under the new name.

    Examples
    --------
    >>> from pystale import off_policy_metrics
    >>> from pystale.metrics import translate
    >>> metrics = translate(off_policy_metrics([7, 9], [9, 9], train_step=11), "prime-rl")
    >>> metrics["off_policy/mean"], metrics["off_policy/max"], metrics["training/off_policy/trajectory_spans/max"]
    (2.0, 3.0, 3.0)
    """
    names = _NAMES.get(project)
    if names is None:
        raise ValueError(f"project must be one of {', '.join(_NAMES)}, got {project!r}")
    translated: dict[str, float] = {}
    for name, value in metrics.items():
        theirs = names.get(name, name)
        if theirs in translated or (theirs != name and theirs in metrics):
            raise ValueError(f"{name!r} is {theirs!r} in {project}, and metrics has a value of that name already")
        translated[theirs] = value
    return translated


def _discarded(account: Mapping[str, Any] | None) -> Mapping[str, Any]:
    discarded = {} if account is None else account.get("discarded")
    if not isinstance(discarded, Mapping):
        raise ValueError(
            f"discarded must map reasons to counts, got {discarded!r}; give what ReplayBuffer.ledger returns"
        )
    return discarded
