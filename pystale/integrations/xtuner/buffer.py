"""A replay buffer with the methods of XTuner's, on pystale's index."""

import asyncio
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pystale._core import StalenessIndex
from pystale.disposal import Cleared
from pystale.integrations.xtuner import checkpoint
from pystale.integrations.xtuner.framework import replay_buffer_module
from pystale.integrations.xtuner.members import STEP_LIMIT, Tokens, is_agentic, read_tokens, stamped_steps
from pystale.integrations.xtuner.pools import AGEING, POOLS, Pools, Record, group_status
from pystale.state import Status, as_status, write_status

__all__ = ["XTunerReplayBuffer"]

logger = logging.getLogger("pystale")

# Tokens in lists are an object each. These fields hold nothing else, so they need not be searched for references.
PER_TOKEN = (
    *("prompt_ids", "tokens", "response_ids", "response_mask", "response_model_steps", "logprobs"),
    *("input_ids", "labels"),
)
_RESPONSE = ("tokens", "response_ids", "response_mask", "response_model_steps", "logprobs")


class XTunerReplayBuffer:
    """XTuner's ``ReplayBuffer``: the same calls, the same answers, in time that does not grow with what is stored.

    It works on XTuner's own states, in place. A refresh costs what was put and what has expired since the last one,
    not what is stored, and does not look at tokens; only a task whose thresholds have changed is gone through.

    Operations do not await before they have taken effect, and one mutex keeps threads apart.

    Parameters
    ----------
    fifo : bool
        Hand out by arrival, as XTuner's ``SyncReplayBufferConfig`` does; otherwise the stalest group first, as its
        ``AsyncReplayBufferConfig`` does.

    Notes
    -----
    States belong to the buffer while they are stored; their ``seq_staleness`` is brought up to date when they expire,
    are handed out or saved.

    Examples
    --------
    >>> import asyncio
    >>> from pystale import RolloutState, Status
    >>> from pystale.integrations.xtuner import XTunerReplayBuffer
    >>> async def main():
    ...     buffer = XTunerReplayBuffer(fifo=False)
    ...     for step in (4, 3):
    ...         state = RolloutState(response_ids=[7], response_model_steps=[step], status=Status.COMPLETED)
    ...         await buffer.put([state], "math", current_train_step=5, stale_threshold=3)
    ...     batch, consumed = await buffer.take_batch({"math": 1})
    ...     return [state.seq_staleness for state in batch["math"][0]], consumed
    >>> asyncio.run(main())
    ([1], {'math': 1})
    """

    def __init__(self, *, fifo: bool) -> None:
        self.fifo = fifo
        self._lock = threading.Lock()
        self._index = StalenessIndex()
        self._records: dict[int, Record] = {}
        self._tasks: dict[str, Pools] = {}
        self._next_arrival = 1

    # Storing

    async def put(
        self,
        items: list[Any],
        task_name: str,
        *,
        model_step: int | None = None,
        current_train_step: int | None = None,
        stale_threshold: int | None = None,
        token_stale_threshold: int | None = None,
        expired_groups_retryable: bool = True,
    ) -> None:
        """Store a group, unless it has expired for good.

        Parameters
        ----------
        items : list of xtuner.v1.data_proto.rl_data.RolloutState
            Its members. An empty list is no group, and nothing happens.
        task_name : str
        model_step : int, optional
            Version to stamp on response tokens that have none.
        current_train_step : int, optional
            Step that will consume the group. Without it nothing expires, and the group keeps the ``seq_staleness`` it
            has, until the next refresh.
        stale_threshold, token_stale_threshold : int, optional
            In trainer steps, for this call; None turns the rule off.
        expired_groups_retryable : bool, default True
            Whether an expired group is reset and stored in the EXPIRED pool, or released and discarded.

        Raises
        ------
        TypeError, ValueError
            For steps that are no integers and thresholds below 1. Nothing has changed then.
        """
        if not items:
            return
        _check(current_train_step, stale_threshold, token_stale_threshold)
        statuses = [as_status(state.status) for state in items]
        agentic = is_agentic(items)
        steps = [stamped_steps(state, model_step) for state in items]
        tokens = [read_tokens(state, own, agentic=agentic) for state, own in zip(items, steps, strict=True)]
        for state, own in zip(items, steps, strict=True):
            if own is not state.response_model_steps:
                state.response_model_steps = own
        status = group_status(statuses)
        expired = [own is Status.EXPIRED for own in statuses]
        cleared = Cleared(wanted=False)
        record = Record(
            task=self._pools(task_name, stale_threshold, token_stale_threshold),
            group=items,
            tokens=tokens,
            expired=expired,
            status=status,
            arrival=-1,
            staleness=0,
            written_at=None,
            unreset=any(expired) and status in AGEING,
        )
        discarded = status is Status.EXPIRED and not expired_groups_retryable
        if current_train_step is not None and status in AGEING:
            due = [
                position
                for position, member in enumerate(tokens)
                if not expired[position] and member.expires(current_train_step, stale_threshold, token_stale_threshold)
            ]
            if due or record.unreset:
                discarded = not expired_groups_retryable
                _expire(record, due, current_train_step, expired_groups_retryable, cleared)
            else:
                record.write_staleness(current_train_step)
        if discarded:
            await _discard([items])
            return
        record.staleness = max(state.seq_staleness for state in items)
        with self._lock:
            record.arrival = self._next_arrival
            self._next_arrival += 1
            record.task.add(record)
        cleared.free()

    def _pools(self, task_name: str, stale_threshold: int | None, token_stale_threshold: int | None) -> Pools:
        """Pools of a task. A new one expects to be refreshed with these thresholds."""
        with self._lock:
            pools = self._tasks.get(task_name)
            if pools is None:
                pools = Pools(self._index, self.fifo, self._records, (stale_threshold, token_stale_threshold))
                self._tasks[task_name] = pools
            return pools

    async def refresh_staleness(
        self,
        *,
        task_stale_thresholds: Mapping[str, int],
        task_token_stale_thresholds: Mapping[str, int] | None = None,
        expired_groups_retryable_by_task: Mapping[str, bool] | None = None,
        current_train_step: int,
        statuses: list[Any] | None = None,
    ) -> dict[str, int]:
        """Expire what is too old at a train step.

        Parameters
        ----------
        task_stale_thresholds : mapping of str to int
            The tasks to look at, and their thresholds in trainer steps.
        task_token_stale_thresholds : mapping of str to int, optional
            A task that is not in it has no token rule.
        expired_groups_retryable_by_task : mapping of str to bool, optional
            Tasks in it with False have their expired groups released and discarded, those of the EXPIRED pool too.
        current_train_step : int
            Trainer step that consumes next.
        statuses : list of xtuner.v1.data_proto.rl_data.Status, optional
            Pools to look at; COMPLETED, ABORTED and EXPIRED by default.

        Returns
        -------
        dict of str to int
            By task, how many of the groups looked at are EXPIRED, the pool included.

        Raises
        ------
        TypeError, ValueError
            For thresholds below 1. Nothing has changed then.
        """
        tokens = task_token_stale_thresholds or {}
        retryable = expired_groups_retryable_by_task or {}
        covered = AGEING if statuses is None else tuple(s for s in AGEING if s in set(map(as_status, statuses)))
        for task_name, stale_threshold in task_stale_thresholds.items():
            _check(current_train_step, stale_threshold, tokens.get(task_name))
        discarded: list[list[Any]] = []
        counts: dict[str, int] = {}
        cleared = Cleared(wanted=False)
        with self._lock:
            for task_name, stale_threshold in task_stale_thresholds.items():
                pools = self._tasks.get(task_name)
                if pools is None:
                    counts[task_name] = 0
                    continue
                pools.set_thresholds(stale_threshold, tokens.get(task_name))
                retry = retryable.get(task_name, True)
                counts[task_name], dropped = _refresh(pools, current_train_step, covered, retry, cleared)
                discarded += dropped
        cleared.free()
        await _discard(discarded)
        return counts

    # Reading and taking

    async def get(self, batch_size: int, task_name: str, group_status: Any) -> list[list[Any]]:
        """Take up to `batch_size` groups out of a pool, in order."""
        with self._lock:
            return self._take(batch_size, task_name, as_status(group_status))

    async def take_batch(
        self, task_batch_sizes: Mapping[str, int], *, group_status: Any = Status.COMPLETED
    ) -> tuple[dict[str, list[list[Any]]], dict[str, int]]:
        """Take up to ``task_batch_sizes[task]`` groups of each task.

        Returns
        -------
        groups : dict of str to list
        consumed : dict of str to int
            How many there were.
        """
        status = as_status(group_status)
        with self._lock:
            batch = {name: self._take(size, name, status) for name, size in task_batch_sizes.items()}
        return batch, {name: len(groups) for name, groups in batch.items()}

    def _take(self, n: int, task_name: str, status: Status) -> list[list[Any]]:
        pools = self._tasks.get(task_name)
        if pools is None or n <= 0:
            return []
        return [record.group for record in pools.take(n, status)]

    async def count(self, task_name: str, group_status: Any) -> int:
        """Groups in a pool."""
        status = as_status(group_status)
        with self._lock:
            return self._count(task_name, status)

    async def count_statuses(self, task_names: Iterable[str], statuses: Iterable[Any]) -> dict[str, dict[Any, int]]:
        """Groups by task and status."""
        wanted = [(status, as_status(status)) for status in statuses]
        with self._lock:
            return {name: {given: self._count(name, status) for given, status in wanted} for name in task_names}

    async def is_ready(self, task_batch_sizes: Mapping[str, int], *, group_status: Any = Status.COMPLETED) -> bool:
        """Whether every task has as many groups in a pool as are wanted of it."""
        status = as_status(group_status)
        with self._lock:
            return all(size <= 0 or self._count(name, status) >= size for name, size in task_batch_sizes.items())

    def _count(self, task_name: str, status: Status) -> int:
        pools = self._tasks.get(task_name)
        return 0 if pools is None else pools.count(status)

    def __len__(self) -> int:
        return len(self._records)

    # Saving

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write XTuner's own ``replay_buffer.pth``: XTuner's buffer can resume from it, and the other way round.

        Objects that Ray references name are written in their place.
        """
        with self._lock:
            entries = []
            for name, pools in self._tasks.items():
                for status in POOLS:
                    for record in pools.all_of(status):
                        pools.show_staleness(record)
                        entries.append(checkpoint.Entry(
                            record.group, record.arrival, name, record.status, pools.staleness(record)
                        ))  # fmt: skip
            document = checkpoint.describe(entries, fifo=self.fifo)
        where = Path(path)
        await asyncio.to_thread(checkpoint.write, document, where)
        logger.info("replay buffer saved to %s", where)

    async def resume(self, path: str | os.PathLike[str]) -> None:
        """Read what :meth:`save`, or XTuner's own buffer, has written.

        The file is read as XTuner reads it, with ``torch.load``, which runs what is pickled in it: resume only from
        files that you or your trainer wrote.

        Raises
        ------
        RuntimeError
            If something is stored already.
        ValueError
            If the file is of a buffer of another order.
        """
        if len(self):
            raise RuntimeError(f"cannot resume into a buffer that stores {len(self)} groups; resume into a new one")
        entries, next_arrival = await asyncio.to_thread(checkpoint.read, Path(path), fifo=self.fifo)
        index, records, tasks = StalenessIndex(), dict[int, Record](), dict[str, Pools]()
        for entry in entries:
            pools = tasks.get(entry.task_name)
            if pools is None:
                pools = tasks[entry.task_name] = Pools(index, self.fifo, records, (None, None))
            agentic = is_agentic(entry.group)
            expired = [as_status(state.status) is Status.EXPIRED for state in entry.group]
            pools.add(
                Record(
                    task=pools,
                    group=entry.group,
                    tokens=[read_tokens(s, s.response_model_steps, agentic=agentic) for s in entry.group],
                    expired=expired,
                    status=entry.status,
                    arrival=entry.arrival,
                    staleness=entry.staleness,
                    written_at=None,
                    unreset=any(expired) and entry.status in AGEING,
                )
            )
        with self._lock:
            self._index, self._records, self._tasks, self._next_arrival = index, records, tasks, next_arrival
        logger.info("replay buffer resumed from %s", os.fspath(path))


def _check(train_step: int | None, stale_threshold: int | None, token_stale_threshold: int | None) -> None:
    if train_step is not None and not -STEP_LIMIT < train_step < STEP_LIMIT:
        raise ValueError(f"current_train_step is {train_step}; steps between -2**60 and 2**60 are allowed")
    for name, threshold in (("stale_threshold", stale_threshold), ("token_stale_threshold", token_stale_threshold)):
        if threshold is not None and not 1 <= threshold < STEP_LIMIT:
            raise ValueError(f"{name} is {threshold}; at least 1 trainer step is required, less than 2**60")


def _refresh(
    pools: Pools, train_step: int, covered: tuple[Status, ...], retry: bool, cleared: Cleared
) -> tuple[int, list[list[Any]]]:
    """Run the life cycle over what is due; how many groups are EXPIRED, and those that were dropped."""
    due = pools.due(train_step, covered)
    waiting = pools.count(Status.EXPIRED) if Status.EXPIRED in covered else 0
    expired = waiting + sum(record.status is not Status.EXPIRED for record, _ in due)
    if not retry and waiting:
        moving = {id(record) for record, _ in due}
        due += [(record, []) for record in pools.all_of(Status.EXPIRED) if id(record) not in moving]
        due.sort(key=lambda entry: entry[0].arrival)
    pools.refresh(train_step, covered, (record for record, _ in due))
    for record, positions in due:
        _expire(record, positions, train_step, retry, cleared)
        pools.remove(record)
        if retry:
            record.staleness = max(state.seq_staleness for state in record.group)
            pools.add(record)
    return expired, [] if retry else [record.group for record, _ in due]


def _expire(record: Record, due: list[int], train_step: int, retry: bool, cleared: Cleared) -> None:
    """Expire a group: reset the members that are due or already EXPIRED, or mark all where they are not retried."""
    record.write_staleness(train_step)
    for position in due:
        record.expired[position] = True
    reset = replay_buffer_module().reset_rollout_response if retry else None
    for position, state in enumerate(record.group):
        if reset is None:
            write_status(state, Status.EXPIRED)
        elif record.expired[position]:
            write_status(state, Status.EXPIRED)
            # Held until the lock is free: letting go of a long list takes a while.
            cleared.add(state, {name: getattr(state, name, None) for name in _RESPONSE})
            reset(state)
            record.tokens[position] = Tokens(None, None)
    record.status = Status.EXPIRED
    record.written_at = None  # what was reset counts as 0 from the next refresh on, and keeps its value until then
    record.unreset = False


async def _discard(groups: list[list[Any]]) -> None:
    """Release sessions in one call and let go of what the states hold, by XTuner's own function."""
    if not groups:
        return
    cleared = Cleared(wanted=False)
    for group in groups:
        for state in group:
            # XTuner looks for references in every entry of every list, and in these there are none.
            old = {name: getattr(state, name, None) for name in PER_TOKEN}
            cleared.add(state, old)
            for name, value in old.items():
                if value is not None:
                    setattr(state, name, None)
    cleared.free()
    await replay_buffer_module().release_and_discard_rollout_groups(groups)
    for group in groups:
        for state in group:
            write_status(state, Status.EXPIRED)
