"""A pytest plugin that runs verl's own test file with pystale's buffer in place of verl's.

With a checkout of verl on the path, and this folder::

    PYTHONPATH=/path/to/verl:tests/integrations/frameworks pytest -p verl_own_tests --rootdir /path/to/verl \
        /path/to/verl/tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py

`PYSTALE_VERL_TESTS=unmodified` starts Ray, which these tests need on a small machine, and leaves verl's buffer alone.

Most of those tests use a buffer as a trainer does. A few look into verl's private tables and call its private methods;
for them the buffer put in place has these names, filled from what pystale's groups say, and read back where a test has
written to them.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from pystale.integrations.verl import StalenessReplayBuffer
from pystale.integrations.verl.eviction import EvictionMetrics, Reasons
from pystale.integrations.verl.groups import FAILURE, FINISHED, PENDING, RUNNING, STATUSES, Group, PromptGroups

os.environ.setdefault("TQ_NUM_THREADS", "2")  # read when transfer_queue is imported

TABLES = {"pending_keys": PENDING, "running_keys": RUNNING, "finished_keys": FINISHED, "failure_keys": FAILURE}


class Probe(StalenessReplayBuffer):
    """pystale's buffer with the private names that verl's tests use."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.partitions: dict[str, dict[str, Any]] = defaultdict(dict)
        self.prompt_global_steps: dict[str, dict[str, int]] = defaultdict(dict)
        self._dapo_classification_cache: dict[str, dict[str, float | None]] = defaultdict(dict)
        for table in TABLES:
            setattr(self, table, defaultdict(set))

    def _sync_metadata_from_transfer_queue(self) -> None:
        for partition_id in {*(self._store.kv_list() or {}), *self._partitions}:
            groups, items = self._poll(partition_id)
            self._show(partition_id, groups, items)

    def _show(self, partition_id: str, groups: PromptGroups, items: dict[str, Any]) -> None:
        """Fill verl's tables."""
        self.prompt_global_steps[partition_id] = {}
        self.partitions[partition_id] = {key: dict(tag) for key, tag in items.items() if not tag.get("is_prompt")}
        for table, status in TABLES.items():
            members = groups.of_status(status)
            getattr(self, table)[partition_id] = {group.uid for group in members}
            self.prompt_global_steps[partition_id].update({group.uid: group.steps for group in members})

    def _written(self, partition_id: str) -> tuple[PromptGroups, dict[str, Any]]:
        """Groups that say what a test has written into the tables; each prompt counts with its last status."""
        names = {number: name for name, number in STATUSES.items()}
        items = dict(self.partitions[partition_id])
        for table, status in TABLES.items():
            for uid in getattr(self, table)[partition_id]:
                steps = self.prompt_global_steps[partition_id].get(uid)
                items[uid] = {"is_prompt": True, "status": names[status], "global_steps": steps}
        groups = PromptGroups(self.settings.threshold)
        groups.read(items)
        return groups, items

    def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
        groups, _ = self._written(partition_id)
        doomed = [group for status in TABLES.values() for group in groups.of_status(status) if group.uid in uids]
        self._clear(groups, doomed, partition_id)
        for key in [key for group in doomed for key in group.keys]:
            del self.partitions[partition_id][key]
        for table in TABLES:
            getattr(self, table)[partition_id] -= {group.uid for group in doomed}
        for group in doomed:
            self.prompt_global_steps[partition_id].pop(group.uid, None)
            self._dapo_classification_cache[partition_id].pop(group.uid, None)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        filtered = self._reasons(self._partitions[partition_id], 0, partition_id).filtered
        return {group.uid for group in filtered}, Counter(filtered.values())

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        groups = self._partitions.get(partition_id, PromptGroups(None))
        return self._reasons(groups, global_steps, partition_id)

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: Reasons) -> Any:
        metrics = EvictionMetrics(partition_id)
        groups = self._partitions[partition_id]
        evicted: list[Group] = eviction_reasons.union()
        self._evict(groups, eviction_reasons, global_steps, partition_id, metrics)
        return (
            {group.uid for group in evicted},
            len(eviction_reasons.stale),
            len(eviction_reasons.filtered),
            metrics.to_dict(),
        )


@pytest.fixture(scope="session", autouse=True)
def ray_with_enough_processors() -> Iterator[None]:
    """TransferQueue waits for ever where Ray has fewer logical processors than it takes."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


if os.environ.get("PYSTALE_VERL_TESTS", "") != "unmodified":
    from verl.trainer.ppo.v1 import replay_buffer

    replay_buffer.ReplayBuffer = replay_buffer.ReplayBufferAsync = Probe
