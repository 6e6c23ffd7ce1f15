"""How far behind the trainer its data was: by trajectory, by token, and by what was thrown away for it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pystale._objects import effective_mask, seq_staleness
from pystale.accumulators import Histogram, Tally, read_fields, read_int
from pystale.ledger import booked
from pystale.staleness import checked_int
from pystale.state import Status, as_status
from pystale.trajectories import read_trajectories
from pystale.versions import model_runs, read_versions

__all__ = ["PREFIX", "OffPolicyAccumulator"]

PREFIX = "training/off_policy"

_TRAJECTORIES = ("trajectory_spans", "trajectory_staleness", "trajectory_staleness_worst", "in_flight", "in_queue")
_TALLIES = (*_TRAJECTORIES, "evicted_staleness")
_COUNTS = ("rows", "ruled_tokens", "stale_tokens", "trained_tokens", "masked_stale_tokens", "evicted")


class OffPolicyAccumulator:
    """Staleness of what was trained, adding up over polls, batches, tasks and ranks.

    With `T` the train step that consumes a trajectory whose model tokens are of model steps `min` to `max`, in trainer
    steps::

        trajectory_spans              max - min + 1         policy versions it may have lived through
        trajectory_staleness          (T - 1) - max         lag of its newest token
        trajectory_staleness_worst    (T - 1) - min         lag of its oldest token, its seq_staleness
        in_flight                     smaller of trajectory_staleness_worst and max - min: the lag it was born with
        in_queue                      trajectory_staleness_worst - in_flight: the lag it gathered while it waited
        token_staleness               T - m - 1             of every model token

    A trajectory from a future version (possible for a while after a resume) has negative staleness, all of it in
    flight; nothing is clamped.

    Attributes
    ----------
    rows : int
        Trajectories, those of unknown version included.
    trajectory_spans, trajectory_staleness, trajectory_staleness_worst, in_flight, in_queue : Tally
        Over the trajectories whose version is known.
    token_staleness : Histogram
        Over the model tokens of those that were given as groups. A token counts whether it enters the loss or not.
    ruled_tokens, stale_tokens : int
        Model tokens the token rule applied to, and those of them that were too old for it.
    trained_tokens, masked_stale_tokens : int
        From ledgers: tokens that entered the loss, and those kept out of it for their age alone.
    evicted : int
        Groups that lost responses because they had expired.
    evicted_staleness : Tally
        Staleness of their oldest token, where it has a version.

    See Also
    --------
    off_policy_metrics : the numbers of one batch in one call.

    Notes
    -----
    Not synchronised: one thread at a time. A call that raises has added nothing. Names and formulas of the spans and
    of both ages are verl's, the split of the worst age is prime-rl's (which clamps it at 0).

    Examples
    --------
    >>> from pystale import RolloutState
    >>> from pystale.off_policy import OffPolicyAccumulator
    >>> poll, rank = OffPolicyAccumulator(), OffPolicyAccumulator()
    >>> poll.add_steps([7, 9], [9, 9], train_step=11)
    >>> rank.add_groups([[RolloutState(response_model_steps=[3, 3, 5, 8])]], train_step=9, token_stale_threshold=2)
    >>> poll.merge(OffPolicyAccumulator.from_dict(rank.to_dict()))
    >>> metrics = poll.metrics()
    >>> metrics["training/off_policy/trajectory_staleness_worst/max"]
    5.0
    >>> metrics["training/off_policy/in_flight/max"], metrics["training/off_policy/in_queue/max"]
    (5.0, 1.0)
    >>> metrics["training/off_policy/token_staleness/mean"], metrics["training/off_policy/stale_token_fraction"]
    (3.25, 0.75)
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = (*_TALLIES, *_COUNTS, "token_staleness")

    trajectory_spans: Tally
    trajectory_staleness: Tally
    trajectory_staleness_worst: Tally
    in_flight: Tally
    in_queue: Tally
    evicted_staleness: Tally
    rows: int
    ruled_tokens: int
    stale_tokens: int
    trained_tokens: int
    masked_stale_tokens: int
    evicted: int

    def __init__(self) -> None:
        for name in _TALLIES:
            setattr(self, name, Tally())
        for name in _COUNTS:
            setattr(self, name, 0)
        self.token_staleness = Histogram()

    # Adding

    def add_steps(
        self,
        min_model_step: ArrayLike,
        max_model_step: ArrayLike,
        *,
        train_step: int,
        padding_mask: ArrayLike | None = None,
    ) -> None:
        """Add trajectories that are consumed at `train_step`, from their oldest and newest model step.

        Parameters
        ----------
        min_model_step, max_model_step : array_like of int, shape (rows,)
            A negative step marks a missing version.
        train_step : int
            Trainer step that consumes them, from 1.
        padding_mask : array_like of bool, shape (rows,), optional
            True marks a padding row; it is left out whatever it holds.

        Raises
        ------
        TypeError, ValueError
            For steps that are not integers, arrays of different lengths, or a row whose minimum exceeds its maximum.
        """
        train_step = checked_int("train_step", train_step, at_least=1)
        read = read_trajectories(min_model_step, max_model_step, padding_mask)
        self._add_rows(read.oldest, read.newest, train_step, rows=read.rows)

    def add_groups(
        self,
        groups: Mapping[str, Sequence[Sequence[Any]]] | Iterable[Sequence[Any]],
        *,
        train_step: int,
        token_stale_threshold: int | None = None,
    ) -> None:
        """Add groups that are consumed at `train_step`: their trajectories, and their tokens.

        The cost is that of the runs where steps are ModelSteps, whatever the responses' length. Responses without a
        model token have no age and are left out; those with tokens but no steps are of unknown version.

        Parameters
        ----------
        groups : TrainBatch, mapping of task name to groups, or iterable of groups
            Of RolloutState or alike. Before or after their masks were written: the numbers are the same.
        train_step : int
            Trainer step that consumes them, from 1.
        token_stale_threshold : int, optional
            Trainer steps, as of the rule of their task. With it, ``stale_token_fraction`` is known: the model tokens
            whose staleness reaches the threshold, among all model tokens of responses that the token rule applies to.
            It does not apply to a group with prebuilt training tensors (``input_ids`` or ``labels``), nor to a response
            whose mask is all zero.

        Raises
        ------
        TypeError, ValueError
            For what is no group of states, and for steps or masks that are not one integer per response token; the
            message names group and member.
        """
        train_step = checked_int("train_step", train_step, at_least=1)
        if token_stale_threshold is not None:
            token_stale_threshold = checked_int("token_stale_threshold", token_stale_threshold, at_least=0)
        read = read_versions(groups, ruled=token_stale_threshold is not None)
        self._add_rows(read.oldest, read.newest, train_step, rows=read.rows)
        for step, n in read.tokens.items():
            self.token_staleness.add(seq_staleness([step], train_step=train_step), n)
        steps, tokens = list(read.ruled_tokens), read.ruled_tokens.values()
        fresh = effective_mask(steps, train_step=train_step, token_stale_threshold=token_stale_threshold).tolist()
        self.ruled_tokens += sum(tokens)
        self.stale_tokens += sum(n for n, is_fresh in zip(tokens, fresh, strict=True) if not is_fresh)

    def add_ledger(self, ledger: Mapping[str, Any], *, since: Mapping[str, Any] | None = None) -> None:
        """Add what a buffer trained and masked, for ``masked_stale_fraction``.

        The ledger knows the masks as they were before :meth:`~pystale.ReplayBuffer.take_train_batch` wrote over them,
        so it can tell tokens masked for their age alone from those that could not have trained anyway.

        Parameters
        ----------
        ledger : mapping
            Of :meth:`~pystale.ReplayBuffer.ledger`, now.
        since : mapping, optional
            The same as it was when it was last added; without it, all since the buffer began.

        Raises
        ------
        TypeError, ValueError
            If a count is missing, or `since` is later than `ledger`.

        Examples
        --------
        >>> from pystale.off_policy import OffPolicyAccumulator
        >>> accumulator = OffPolicyAccumulator()
        >>> accumulator.add_ledger({"trained": 90, "masked_stale": 30}, since={"trained": 30, "masked_stale": 10})
        >>> accumulator.metrics()
        {'training/off_policy/masked_stale_fraction': 0.25}
        """
        trained, masked = (booked(ledger, name, since) for name in ("trained", "masked_stale"))
        self.trained_tokens += trained
        self.masked_stale_tokens += masked

    def add_evicted(self, staleness: ArrayLike) -> None:
        """Add groups that expired, by the staleness of their oldest token.

        Parameters
        ----------
        staleness : int or array_like of int
            Trainer steps, one entry per group.
        """
        more = Tally(staleness)
        self.evicted += more.count
        self.evicted_staleness.merge(more)

    def add_released(self, released: Iterable[tuple[Any, Mapping[str, Any]]], *, train_step: int) -> None:
        """Add the groups that expired among what a buffer's `on_release` was called with.

        States are taken together by task and ``group_id`` (those without one are groups of their own); a group counts
        once, with the staleness of the oldest token that any of them lost. A group that waits for its re-rollout counts
        again in a later call, when members expire that were fresh before. States that were not released for their age
        (FAILED, FILTERED) are passed over.

        Parameters
        ----------
        released : iterable of (state, {field: old value})
        train_step : int
            Step the buffer was refreshed at, or that the group was put for.

        Examples
        --------
        >>> import asyncio
        >>> from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
        >>> from pystale.off_policy import OffPolicyAccumulator
        >>> evictions = OffPolicyAccumulator()
        >>> buffer = ReplayBuffer(
        ...     StalenessRule(max_staleness=1),
        ...     on_release=lambda released: evictions.add_released(released, train_step=6),
        ... )
        >>> state = RolloutState(response_ids=[5], response_model_steps=[2], status=Status.COMPLETED)
        >>> asyncio.run(buffer.put([state], train_step=6))
        <Status.EXPIRED: 'expired'>
        >>> evictions.evicted, evictions.evicted_staleness.max
        (1, 3)
        """
        train_step = checked_int("train_step", train_step, at_least=1)
        evicted: dict[Any, int | None] = {}
        for state, cleared in released:
            if as_status(state.status) is not Status.EXPIRED:
                continue
            group_id = getattr(state, "group_id", None)
            name = (getattr(state, "task_name", None), id(state) if group_id is None else group_id, group_id is None)
            runs = model_runs(cleared.get("response_model_steps"))
            age = seq_staleness([min(runs)[0]], train_step=train_step) if runs else None
            known = [a for a in (evicted.get(name), age) if a is not None]
            evicted[name] = max(known, default=None)
        self.evicted += len(evicted)
        self.evicted_staleness.add([age for age in evicted.values() if age is not None])

    # Merging and sending

    def merge(self, other: "OffPolicyAccumulator") -> None:
        """Add what `other` has counted, which stays as it is. Equal to having counted the union here."""
        if not isinstance(other, OffPolicyAccumulator):
            raise TypeError(
                f"an OffPolicyAccumulator merges with its like, got {type(other).__name__}; read dicts with from_dict"
            )
        for name in (*_TALLIES, "token_staleness"):
            getattr(self, name).merge(getattr(other, name))
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __add__(self, other: "OffPolicyAccumulator") -> "OffPolicyAccumulator":
        if not isinstance(other, OffPolicyAccumulator):
            return NotImplemented
        both = OffPolicyAccumulator()
        both.merge(self)
        both.merge(other)
        return both

    def to_dict(self) -> dict[str, Any]:
        """What JSON can write, for sending to another process."""
        saved: dict[str, Any] = {name: getattr(self, name).to_dict() for name in (*_TALLIES, "token_staleness")}
        return saved | {name: getattr(self, name) for name in _COUNTS}

    @classmethod
    def from_dict(cls, saved: Any) -> "OffPolicyAccumulator":
        """Read what :meth:`to_dict` wrote.

        Raises
        ------
        ValueError
            For anything no accumulator can have written, naming the field.
        """
        fields = read_fields("off-policy accumulator", saved, (*_TALLIES, *_COUNTS, "token_staleness"))
        read = cls()
        for name in _TALLIES:
            setattr(read, name, _named(name, Tally.from_dict, fields[name]))
        read.token_staleness = _named("token_staleness", Histogram.from_dict, fields["token_staleness"])
        for name in _COUNTS:
            setattr(read, name, read_int(name, fields[name], at_least=0))
        for name in _TRAJECTORIES:
            known, spans = getattr(read, name).count, read.trajectory_spans.count
            if known != spans or known > read.rows:
                raise ValueError(
                    f"{name}: count is {known}; it must be that of trajectory_spans, {spans}, "
                    f"and at most rows, {read.rows}"
                )
        for part, few, whole, many in (
            ("stale_tokens", read.stale_tokens, "ruled_tokens", read.ruled_tokens),
            ("ruled_tokens", read.ruled_tokens, "tokens in token_staleness", read.token_staleness.count),
            ("count of evicted_staleness", read.evicted_staleness.count, "evicted", read.evicted),
        ):
            if few > many:
                raise ValueError(f"off-policy accumulator: {part} is {few}, but there are only {many} {whole}")
        return read

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, OffPolicyAccumulator) else NotImplemented

    def __repr__(self) -> str:
        tokens = self.token_staleness.count
        return f"<OffPolicyAccumulator of {self.rows} trajectories, {tokens} tokens, {self.evicted} evicted groups>"

    # Reading

    def trajectory_metrics(self, prefix: str = PREFIX) -> dict[str, float]:
        """Spans and both ages, ``{prefix}/{name}/{mean,max,min}``, and coverage; see :meth:`metrics`."""
        metrics: dict[str, float] = {}
        for name in _TRAJECTORIES[:3]:
            _describe(metrics, f"{prefix}/{name}", getattr(self, name))
        if self.trajectory_spans.count < self.rows:
            metrics[f"{prefix}/coverage"] = self.trajectory_spans.count / self.rows
        return metrics

    def metrics(self, prefix: str = PREFIX) -> dict[str, float]:
        """Everything, as any logger takes it. What nothing was added for is left out.

        Parameters
        ----------
        prefix : str, default "training/off_policy"
            Start of every key.

        Returns
        -------
        dict of str to float
            ``mean``, ``max`` and ``min``, in trainer steps, of ``trajectory_spans``, ``trajectory_staleness``,
            ``trajectory_staleness_worst``, ``in_flight``, ``in_queue``, ``token_staleness`` (also ``p50`` and ``p99``)
            and ``evicted_samples_staleness``; and

            - ``coverage``: fraction of trajectories whose version is known, only when some are not;
            - ``stale_token_fraction``: of model tokens, those too old for the token rule (:meth:`add_groups`);
            - ``masked_stale_fraction``: ``masked_stale / (trained + masked_stale)``, of the tokens that could have
              trained, those masked for their age (:meth:`add_ledger`);
            - ``evicted_samples``: groups that expired.

        Notes
        -----
        ``evicted_samples`` and ``evicted_samples_staleness`` are verl's names. verl logs ``T - g + 1`` for a prompt
        dispatched at step g, which is one more than the staleness logged here.
        """
        metrics = self.trajectory_metrics(prefix)
        for name in (*_TRAJECTORIES[3:], "token_staleness"):
            _describe(metrics, f"{prefix}/{name}", getattr(self, name))
        for q in (50, 99):
            value = self.token_staleness.percentile(q)
            if value is not None:
                metrics[f"{prefix}/token_staleness/p{q}"] = float(value)
        if self.ruled_tokens:
            metrics[f"{prefix}/stale_token_fraction"] = self.stale_tokens / self.ruled_tokens
        could_train = self.trained_tokens + self.masked_stale_tokens
        if could_train:
            metrics[f"{prefix}/masked_stale_fraction"] = self.masked_stale_tokens / could_train
        if self.evicted:
            metrics[f"{prefix}/evicted_samples"] = float(self.evicted)
            _describe(metrics, f"{prefix}/evicted_samples_staleness", self.evicted_staleness)
        return metrics

    def _add_rows(self, oldest: NDArray[np.int64], newest: NDArray[np.int64], train_step: int, *, rows: int) -> None:
        """Add trajectories of known version; `rows` counts those of unknown version too."""
        worst, gap = (train_step - 1) - oldest, newest - oldest
        in_flight = np.minimum(worst, gap)
        self.rows += rows
        # Unsigned, since the widest span is one more than int64 holds.
        self.trajectory_spans.add(gap.astype(np.uint64) + np.uint64(1))
        self.trajectory_staleness.add((train_step - 1) - newest)
        self.trajectory_staleness_worst.add(worst)
        self.in_flight.add(in_flight)
        self.in_queue.add(worst - in_flight)


def _describe(metrics: dict[str, float], name: str, values: Tally | Histogram) -> None:
    for statistic in ("mean", "max", "min"):
        value = getattr(values, statistic)
        if value is not None:
            metrics[f"{name}/{statistic}"] = float(value)


def _named(name: str, read: Any, saved: Any) -> Any:
    try:
        return read(saved)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
