"""verl's replay buffer, over TransferQueue: which prompt groups are trained, evicted and refilled."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from pystale.integrations.verl.eviction import EvictionMetrics, Reasons
from pystale.integrations.verl.filtering import RewardFilter
from pystale.integrations.verl.framework import transfer_queue, verl_buffer, verl_skipping
from pystale.integrations.verl.groups import FAILURE, FINISHED, PENDING, RUNNING, Group, PromptGroups
from pystale.integrations.verl.settings import Settings
from pystale.staleness import checked_int

__all__ = ["StalenessReplayBuffer"]

logger = logging.getLogger("pystale")

VALIDATION = "val"
REPORT_EVERY_S = 60.0


class StalenessReplayBuffer:
    """Stands where verl's ``ReplayBuffer`` and ``ReplayBufferAsync`` do: a `custom_sampler` of its V1 trainers.

    It decides as they do, and asks the same of TransferQueue. What differs is the cost of a poll, which follows what
    changed since the last one, and the choices in `sampler_kwargs`.

    Parameters
    ----------
    trainer_mode : str
        ``"sync"`` samples on-policy; every other mode is asynchronous.
    trainer_config : mapping
        Kept, not read.
    max_off_policy_threshold : int or None
        Largest span ``T - g + 1`` of a prompt dispatched at step g and trained at T. None turns off-policy control off.
    max_off_policy_strategy : {"drop", "wait"}
        In asynchronous modes: evict finished groups past the threshold, or hold sampling while a prompt in flight has
        reached it.
    sampler_kwargs : mapping, optional
        Choices, all off by default:

        - ``staleness``: ``"prompt"``, or ``"tokens"``: a finished group is as old as the oldest weights that its
          trajectories were generated with (``min_global_steps``), and ``drop`` evicts it once these are
          `max_off_policy_threshold` steps behind;
        - ``missing_version``: with ``"tokens"``, what becomes of a trajectory without ``min_global_steps`` and of a
          group without trajectories: ``"prompt"`` (default) takes the age of the prompt, ``"drop"`` evicts the group,
          ``"keep"`` never does, ``"error"`` raises;
        - ``poll_interval``: seconds between polls, default 2.0;
        - ``filter_groups_metric``, ``train_batch_size``, ``gen_batch_size``, ``max_inflight_gen_batches``,
          ``sync_refill_failed_groups``: what verl hands to its own buffer, but not to a custom sampler.
    refill_fn : callable, optional
        ``refill_fn(n)`` submits n fresh prompts in place of evicted ones.
    poll_interval, filter_groups_metric, train_batch_size, gen_batch_size, max_inflight_gen_batches, \
sync_refill_failed_groups : optional
        The same as in `sampler_kwargs`, as arguments of verl's own buffer.

    Raises
    ------
    TypeError, ValueError
        At construction, for settings that cannot be, unknown keys of `sampler_kwargs` among them.
    ImportError
        If verl or TransferQueue cannot be imported.

    Notes
    -----
    For use from one thread at a time, like verl's. Rules, statuses and metric names are verl's
    (``verl.trainer.ppo.v1.replay_buffer``); the README lists where decisions differ.
    """

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Mapping[str, Any] | None = None,
        poll_interval: float | None = None,
        refill_fn: Callable[[int], Any] | None = None,
        filter_groups_metric: str | None = None,
        train_batch_size: int | None = None,
        gen_batch_size: int | None = None,
        max_inflight_gen_batches: int | None = None,
        sync_refill_failed_groups: bool | None = None,
    ) -> None:
        self.settings = Settings.checked(
            trainer_mode=trainer_mode,
            max_off_policy_threshold=max_off_policy_threshold,
            max_off_policy_strategy=max_off_policy_strategy,
            sampler_kwargs=sampler_kwargs,
            refill_fn=refill_fn,
            arguments={
                "poll_interval": poll_interval,
                "filter_groups_metric": filter_groups_metric,
                "train_batch_size": train_batch_size,
                "gen_batch_size": gen_batch_size,
                "max_inflight_gen_batches": max_inflight_gen_batches,
                "sync_refill_failed_groups": sync_refill_failed_groups,
            },
        )
        self.trainer_mode = trainer_mode
        self.trainer_config = trainer_config
        self.refill_fn = refill_fn
        self.poll_interval = self.settings.poll_interval  # the trainer reads it
        self._store = transfer_queue()
        self._sample = verl_skipping(StalenessReplayBuffer._sampled)
        self._filter: RewardFilter | None = None
        if (metric := self.settings.filter_groups_metric) is not None:
            canonical = getattr(verl_buffer(), "FILTER_GROUPS_REWARD_METRIC", None)
            self._filter = RewardFilter(metric, canonical=canonical)
        self._partitions: dict[str, PromptGroups] = {}

    # What verl calls

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Wait for `batch_size` prompt groups, evicting and refilling meanwhile, and take the oldest prompts.

        Parameters
        ----------
        global_steps : int
            Step that will consume the batch.
        partition_id : str
            ``"train"`` or ``"val"``; of validation nothing is evicted.
        batch_size : int
            Number of prompts.

        Returns
        -------
        KVBatchMeta
            Keys and tags of all their trajectories, group by group. The keys of the prompts are cleared.
        dict
            Metrics of what was evicted, under verl's names.

        Raises
        ------
        RuntimeError
            In sync mode, if no selected group has a trajectory; with the filter, if a finished group lacks the metric.
        ValueError
            For a tag that cannot be, such as an unknown status.
        """
        result: tuple[Any, dict[str, Any]] = self._sample(self, global_steps, partition_id, batch_size)
        return result

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """Number of groups that :meth:`sample` could take now."""
        groups, _ = self._poll(partition_id)
        doomed = self._reasons(groups, global_steps, partition_id).union()
        return groups.count(FINISHED, FAILURE) - len(doomed)

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, Any]]:
        """Wait until `target_count` groups can be sampled, evicting and refilling meanwhile; none is taken.

        Returns
        -------
        set of str
            The prompts that can be sampled.
        dict
            Metrics of what was evicted.
        """
        groups, _, metrics = self._wait(global_steps, partition_id, target_count)
        sampleable = groups.oldest_first(groups.count(FINISHED, FAILURE))
        return {group.uid for group in sampleable}, metrics.to_dict()

    # Sampling

    def _sampled(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch_size = checked_int("batch_size", batch_size, at_least=0)
        if self.settings.sync:
            return self._sample_sync(global_steps, partition_id, batch_size)
        groups, items, metrics = self._wait(global_steps, partition_id, batch_size)
        return self._take(partition_id, groups.oldest_first(batch_size), items), metrics.to_dict()

    def _wait(
        self, global_steps: int, partition_id: str, target: int
    ) -> tuple[PromptGroups, dict[str, Any], EvictionMetrics]:
        """Asynchronous modes: poll until enough is there and nothing is left to evict, all in one listing."""
        metrics = EvictionMetrics(partition_id)
        report = _Report(partition_id, target)
        while True:
            groups, items = self._poll(partition_id)
            reasons = self._reasons(groups, global_steps, partition_id)
            if evicted := self._evict(groups, reasons, global_steps, partition_id, metrics):
                if self.refill_fn is not None:
                    self.refill_fn(evicted)
                continue  # what finished meanwhile may be too old as well
            if groups.count(FINISHED, FAILURE) >= target and not self._held_back(groups, global_steps):
                return groups, items, metrics
            report.tell(groups)
            time.sleep(self.poll_interval)

    def _held_back(self, groups: PromptGroups, global_steps: int) -> bool:
        """Strategy wait: whether a prompt in flight has reached the threshold."""
        threshold = self.settings.threshold
        if not self.settings.waits or threshold is None:
            return False
        oldest = groups.oldest_in_flight()
        return oldest is not None and global_steps - oldest + 1 >= threshold

    def _sample_sync(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Sync mode: what is evicted is replaced within the step; with the filter, a step ends with nothing in flight.

        With the filter, each filtered group is worth two fresh prompts, each failed one one, dispatched as prompts in
        flight leave room. Once enough groups are there, the rest drains and is discarded.
        """
        metrics = EvictionMetrics(partition_id)
        report = _Report(partition_id, batch_size)
        filtering = self._filter is not None and partition_id != VALIDATION
        credit = 0
        draining = False
        while True:
            groups, items = self._poll(partition_id)
            reasons = self._reasons(groups, global_steps, partition_id)
            self._evict(groups, reasons, global_steps, partition_id, metrics)
            enough = groups.count(FINISHED, FAILURE) >= batch_size
            in_flight = groups.count(PENDING, RUNNING)
            if not filtering:
                if enough:
                    break
                if reasons.failed and self.refill_fn is not None:
                    self.refill_fn(len(reasons.failed))
                    continue
            else:
                draining = draining or enough
                credit = 0 if draining else credit + 2 * len(reasons.filtered) + len(reasons.failed)
                if dispatched := self._dispatch(credit, in_flight):
                    credit -= dispatched
                    continue
                if enough and not in_flight:
                    break
            report.tell(groups)
            time.sleep(self.poll_interval)
        selected = groups.oldest_first(batch_size)
        if filtering:
            self._discard_surplus(groups, selected, partition_id, metrics)
        if partition_id != VALIDATION and selected and not any(group.keys for group in selected):
            remedy = (
                "" if self.settings.sync_refill_failed_groups else "; sync_refill_failed_groups replaces such groups"
            )
            raise RuntimeError(f"none of the {len(selected)} groups selected has a trajectory{remedy}")
        return self._take(partition_id, selected, items), metrics.to_dict()

    def _dispatch(self, credit: int, in_flight: int) -> int:
        """Submit as many fresh prompts as credit and room allow, in whole generation batches."""
        if credit <= 0 or self.refill_fn is None or self.settings.train_batch_size is None:
            return 0
        room = self.settings.max_inflight_gen_batches * self.settings.train_batch_size - in_flight
        n = max(0, min(credit, room))
        n -= n % self.settings.gen_batch_size
        if n:
            self.refill_fn(n)
        return n

    def _discard_surplus(
        self, groups: PromptGroups, selected: list[Group], partition_id: str, metrics: EvictionMetrics
    ) -> None:
        chosen = set(selected)
        surplus = [g for g in groups.oldest_first(groups.count(FINISHED, FAILURE)) if g not in chosen]
        if surplus:
            self._clear(groups, surplus, partition_id)
            metrics.add_surplus(len(surplus))

    # The store

    def _poll(self, partition_id: str) -> tuple[PromptGroups, dict[str, Any]]:
        """Read a listing; eviction, gating and selection go by the same one."""
        listed = self._store.kv_list(partition_id=partition_id)
        items: dict[str, Any] = (listed or {}).get(partition_id) or {}
        groups = self._partitions.get(partition_id)
        if groups is None:
            groups = self._partitions[partition_id] = PromptGroups(
                self.settings.threshold,
                by_tokens=self.settings.by_tokens,
                missing_version=self.settings.missing_version,
                classified=self._filter is not None,
            )
        groups.read(items)
        return groups, items

    def _reasons(self, groups: PromptGroups, global_steps: int, partition_id: str) -> Reasons:
        """What is to be evicted, by reason; of validation nothing."""
        reasons = Reasons()
        if partition_id == VALIDATION:
            return reasons
        if self.settings.drops:
            reasons.stale = groups.stale(global_steps)
        if self._filter is not None:
            self._filter.look(groups, lambda keys, field: self._fetch(keys, field, partition_id))
            reasons.filtered = dict(groups.filtered)
        if not self.settings.sync:
            reasons.failed = groups.of_status(FAILURE)
        elif self.settings.sync_refill_failed_groups:
            reasons.failed = [group for group in groups.of_status(FAILURE) if not group.keys]
        return reasons

    def _fetch(self, keys: list[str], field: str, partition_id: str) -> list[Any]:
        return list(self._store.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[field])[field])

    def _evict(
        self,
        groups: PromptGroups,
        reasons: Reasons,
        global_steps: int,
        partition_id: str,
        metrics: EvictionMetrics,
    ) -> int:
        """Clear every group that has a reason, once; how many."""
        doomed = reasons.union()
        if doomed:
            spans = [groups.span(group, global_steps) for group in reasons.stale]
            self._clear(groups, doomed, partition_id)
            metrics.add(reasons, spans)
        return len(doomed)

    def _clear(self, groups: PromptGroups, doomed: list[Group], partition_id: str) -> None:
        keys = [group.uid for group in doomed]
        keys.extend(key for group in doomed for key in group.keys)
        self._store.kv_clear(keys=keys, partition_id=partition_id)
        groups.clear(doomed)

    def _take(self, partition_id: str, selected: list[Group], items: dict[str, Any]) -> Any:
        """Clear the prompts; their trajectories are the trainer's to clear."""
        self._store.kv_clear(keys=[group.uid for group in selected], partition_id=partition_id)
        keys = [key for group in selected for key in group.keys]
        # The trainer writes into tags (padding), so they are its own.
        return self._store.KVBatchMeta(partition_id=partition_id, keys=keys, tags=[dict(items[key]) for key in keys])


class _Report:
    """Says now and then what a call is waiting for."""

    def __init__(self, partition_id: str, target: int) -> None:
        self._partition_id = partition_id
        self._target = target
        self._last = time.monotonic()

    def tell(self, groups: PromptGroups) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_EVERY_S:
            return
        self._last = now
        in_flight = groups.count(PENDING, RUNNING)
        logger.log(
            logging.INFO if in_flight else logging.WARNING,
            "waiting for %d groups of partition %s: %d finished, %d failed, %d in flight",
            self._target,
            self._partition_id,
            groups.count(FINISHED),
            groups.count(FAILURE),
            in_flight,
        )
