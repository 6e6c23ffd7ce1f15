"""The store with a real TransferQueue, whose processes are killed and started again."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
import transfer_queue as tq

from pystale import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    DisaggAgentLoopManager,
    DisaggAsyncProduceStrategyConfig,
    PromptSampler,
    RolloutState,
    StalenessRule,
    Status,
    TaskSpec,
)
from pystale.integrations.transfer_queue import (
    TransferQueueGone,
    TransferQueueStore,
    start_transfer_queue,
)

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

RULE = StalenessRule(max_staleness=2, max_token_staleness=0)


@pytest.fixture(scope="session")
def service() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, logging_level="warning", object_store_memory=200 << 20)
    start_transfer_queue()
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def make(service: None, tmp_path: Path) -> Iterator[Callable[..., TransferQueueStore]]:
    """Makes stores that share a partition, which nobody else has, and closes them after the test."""
    made: list[TransferQueueStore] = []

    def make(rule: Any = RULE, **settings: Any) -> TransferQueueStore:
        settings = {"partition_id": tmp_path.name, "tail_batch_trigger_size": 0, "timeout": 60.0, **settings}
        made.append(TransferQueueStore(rule, **settings))
        return made[-1]

    yield make
    for store in made:
        store.sync.close()


def group_of(number: int, steps: list[int], *, size: int = 2, **fields: Any) -> list[RolloutState]:
    return [
        RolloutState(
            **{
                "rollout_id": number * size + i,
                "group_id": number,
                "prompt_ids": [1, 2, number],
                "message": {"text": f"prompt {number}"},
                "response": f"answer {i}",
                "response_ids": list(range(100 * i, 100 * i + len(steps))),
                "response_model_steps": list(steps),
                "logprobs": [-0.5] * len(steps),
                "status": Status.COMPLETED,
                "reward": float(i),
                **fields,
            }
        )
        for i in range(size)
    ]


def keys_of(store: TransferQueueStore) -> set[str]:
    """Keys that TransferQueue has for a store, once it has cleared what it was to clear."""
    store.sync.flush()
    partition = store.partition_id
    return set(tq.kv_list(partition).get(partition, {}))


def np_tensor(values: list[int]) -> Any:
    return torch.from_numpy(np.array(values))


def balanced(ledger: dict[str, Any]) -> bool:
    uses = ("trained", "masked_stale", "masked_semantic", "stored", "in_flight")
    return ledger["produced"] == sum(ledger[name] for name in uses) + sum(ledger["discarded"].values())


def test_a_group_comes_back_from_a_take_as_it_was_put_with_its_masks(make: Any) -> None:
    store = make()
    given = group_of(1, [3, 4, 4], response_mask=[1, 1, 0], extra_fields={"difficulty": 3})
    assert store.sync.put(given, train_step=5) is Status.COMPLETED
    assert len(keys_of(store)) == 3
    batch = store.sync.take_train_batch({"default": 1}, train_step=5)
    assert batch.trainable_tokens == 2
    for state, before in zip(batch.responses, given, strict=True):
        assert state.response_ids.tolist() == before.response_ids
        assert state.response_mask.tolist() == [0, 1, 0]
        assert list(state.response_model_steps) == [3, 4, 4]
        assert state.logprobs.tolist() == [-0.5] * 3
        for field in ("rollout_id", "group_id", "prompt_ids", "message", "response", "reward", "extra_fields"):
            assert getattr(state, field) == getattr(before, field)
    assert balanced(store.ledger())
    assert store.ledger()["trained"] == 2


def test_fields_that_no_member_has_come_back_as_none(make: Any) -> None:
    store = make()
    store.sync.put(group_of(1, [4, 4], logprobs=None, prompt_ids=None, response_ids=None), train_step=5)
    store.sync.put(group_of(2, [], size=1, response_ids=[], status=Status.COMPLETED), train_step=5)
    batch = store.sync.take_train_batch({"default": 2}, train_step=5)
    assert batch.trainable_tokens == 4
    for state in batch["default"][0]:
        assert (state.logprobs, state.prompt_ids, state.response_ids, state.response_mask.tolist()) == (
            *(None, None, None),
            [1, 1],
        )
    assert list(batch["default"][1][0].response_ids) == []


def test_ranks_read_the_rows_of_a_batch_of_keys_with_effective_masks(make: Any) -> None:
    store = make()
    for number in range(3):
        store.sync.put(group_of(number, [3, 4, 4, 4][number:]), train_step=5)
    batch = store.sync.take_keys({"default": 3}, train_step=5)
    assert batch.trainable_tokens == 2 * (3 + 3 + 2)
    meta = batch.kv_meta(rank=1, world_size=2)
    rows = tq.kv_batch_get_by_meta(meta)
    assert [row.tolist() for row in rows["response_ids"].unbind()] == [[0, 1, 2], [100, 101, 102]]
    masks = tq.kv_batch_get(batch.rows(), batch.partition_id, ["response_mask"])["response_mask"]
    assert [row.tolist() for row in masks.unbind()] == [[0, 1, 1, 1]] * 2 + [[1, 1, 1]] * 2 + [[1, 1]] * 2


def test_rows_of_a_batch_are_cleared_once_the_next_step_is_taken(make: Any) -> None:
    store = make(StalenessRule(max_staleness=2))
    for number in range(2):
        store.sync.put(group_of(number, [4, 4]), train_step=5)
    first = store.sync.take_keys({"default": 1}, train_step=5)
    assert keys_of(store).issuperset(first.rows())
    second = store.sync.take_keys({"default": 1}, train_step=6)
    assert keys_of(store).isdisjoint(first.rows())
    assert keys_of(store).issuperset(second.rows())
    store.sync.acknowledge(6)
    assert keys_of(store) == set()


def test_what_is_reset_keeps_its_prompts_and_what_is_discarded_nothing(make: Any) -> None:
    store = make(max_rerolls=0)
    store.sync.put(group_of(1, [1, 1]), train_step=2)
    assert len(keys_of(store)) == 3
    assert store.sync.refresh_staleness(9) == {"default": 1}
    assert keys_of(store) == set()
    store = make(StalenessRule(max_staleness=2), max_rerolls=1)
    old, new = group_of(2, [1, 1]), group_of(2, [1, 1])
    old[1].response_model_steps, old[1].rollout_id = [3, 3], 5
    store.sync.put(old, train_step=4)
    store.sync.refresh_staleness(5)
    assert len(keys_of(store)) == 2
    (group,) = store.sync.get(1, status=Status.EXPIRED)
    assert [state.status for state in group] == [Status.EXPIRED, Status.COMPLETED]
    assert [list(state.response_ids) for state in group] == [[], [100, 101]]
    assert group[0].prompt_ids == new[0].prompt_ids
    assert group[0].message == new[0].message
    group[0].response_ids, group[0].response_model_steps, group[0].status = [7], [4], Status.COMPLETED
    before = keys_of(store)
    assert store.sync.put(group, train_step=5) is Status.COMPLETED
    assert len(keys_of(store)) == 3
    assert keys_of(store).isdisjoint(before)
    assert balanced(store.ledger())


def test_members_that_expired_are_left_out_of_batches_and_keys(make: Any) -> None:
    store = make(StalenessRule(1), group_mode="members", min_fresh=2)
    for number in range(2):
        group = group_of(number, [4, 4], size=3)
        group[1].response_model_steps = [2, 4]
        assert store.sync.put(group, train_step=5) is Status.COMPLETED
    batch = store.sync.take_train_batch({"default": 1}, train_step=5)
    assert [state.rollout_id for state in batch["default"][0]] == [0, 2]
    assert [state.response_ids.tolist() for state in batch["default"][0]] == [[0, 1], [200, 201]]
    keys = store.sync.take_keys({"default": 1}, train_step=5)
    rows = tq.kv_batch_get(keys.rows(), keys.partition_id, ["response_ids"])["response_ids"]
    assert [row.tolist() for row in rows.unbind()] == [[0, 1], [200, 201]]
    assert (batch.left_out, keys.left_out, store.report().left_out) == (1, 1, {"default": 2})
    assert balanced(store.ledger())
    store.sync.acknowledge(5)
    assert keys_of(store) == set()


def test_a_take_waits_for_stragglers(make: Any) -> None:
    store = make(StalenessRule(1), wait_for_stragglers=True)

    async def main() -> Any:
        await store.put(group_of(1, [4]), train_step=5)
        with store.reserve(2, model_step=3):
            taking = asyncio.ensure_future(store.take_train_batch({"default": 1}, train_step=5))
            await asyncio.sleep(0.3)
            assert not taking.done()
            await store.put(group_of(2, [3]), train_step=5)
        return await taking

    batch = asyncio.run(main())
    assert [state.group_id for state in batch.responses] == [2, 2]
    assert batch.straggler_s == store.sync.report().straggler_s > 0.2


def test_an_aborted_group_goes_on_and_a_settled_one_leaves_nothing(make: Any) -> None:
    store = make()
    store.sync.put(group_of(1, [4, 4], status=Status.ABORTED), train_step=5)
    (group,) = store.sync.get(1, status=Status.ABORTED)
    assert store.ledger()["in_flight"] == 4
    for state in group:
        state.response_ids, state.status = [*state.response_ids, 9], Status.COMPLETED
        state.logprobs = [*state.logprobs, -1.0]
    store.sync.put(group, model_step=5, train_step=6)
    (group,) = store.sync.get(1)
    assert [list(state.response_model_steps) for state in group] == [[4, 4, 5]] * 2
    store.settle([group], "filtered")
    assert keys_of(store) == set()
    assert store.ledger()["discarded"]["filtered"] == 6
    assert balanced(store.ledger())


def test_a_refused_put_leaves_no_rows(make: Any) -> None:
    store = make()
    store.sync.put(group_of(1, [4]), train_step=5)
    with pytest.raises(ValueError, match="stored already"):
        store.sync.put(group_of(1, [4]), train_step=5)
    with pytest.raises(TypeError, match=r"extra_fields.*object"):
        store.sync.put(group_of(2, [4], extra_fields={"what": object()}), train_step=5)
    with pytest.raises(ValueError, match="no model step"):
        store.sync.put(group_of(3, [], response_ids=[1]), train_step=5)
    assert len(keys_of(store)) == 3


def test_producers_and_a_trainer_share_a_store_in_an_event_loop(make: Any) -> None:
    store = make(StalenessRule(max_staleness=2))

    async def produce(first: int) -> None:
        for number in range(first, first + 6):
            await store.put(group_of(number, [5, 5]), train_step=6)

    async def train() -> list[int]:
        seen = []
        for train_step in (6, 7, 8):
            assert await store.wait_ready({"default": 4}, timeout=120)
            batch = await store.take_train_batch({"default": 4}, train_step=train_step)
            seen += [group[0].group_id for group in batch["default"]]
        return seen

    async def run() -> list[int]:
        return (await asyncio.gather(train(), produce(0), produce(100)))[0]

    seen = asyncio.run(run())
    assert sorted(seen) == [*range(6), *range(100, 106)]
    store.sync.acknowledge(8)
    assert keys_of(store) == set()


class Echo:
    """An agent loop that answers with the prompt, twice."""

    async def generate_group(self, group: list[RolloutState], *, enable_partial_rollout: bool) -> list[RolloutState]:
        for state in group:
            if state.status is not Status.COMPLETED:
                await asyncio.sleep(0.01)
                prompt: Any = state.prompt_ids
                state.response_ids, state.status, state.reward = list(prompt) * 2, Status.COMPLETED, 1.0
        return group

    async def pause(self) -> None:
        pass


@pytest.mark.parametrize("disaggregated", [False, True])
def test_managers_run_on_it(make: Any, disaggregated: bool) -> None:
    config = DisaggAsyncProduceStrategyConfig if disaggregated else AsyncProduceStrategyConfig
    strategy: Any = config(max_staleness=1, tail_batch_trigger_size=0, over_sample_threshold=0.5).build()
    store = make(strategy.rule)
    task = TaskSpec("echo", Echo(), PromptSampler(([n, n] for n in range(1000)), store, group_size=2), strategy)

    async def colocated() -> None:
        manager = AgentLoopManager(task, store)
        for train_step in range(1, 5):
            check(await manager.produce_batch(4, train_step, model_step=train_step - 1))

    async def beside() -> None:
        manager = DisaggAgentLoopManager(task, store, model_step=0, train_step=1)
        producing = asyncio.create_task(manager.produce_loop(4))
        for train_step in range(1, 5):
            check(await manager.get_batch(4, train_step))
            await manager.pause_produce()
            await manager.continue_produce(train_step)
        await manager.shutdown()
        await producing

    def check(result: Any) -> None:
        assert len(result.groups) == 4
        assert result.trainable_tokens == 32
        assert all(list(state.response_ids) == [*state.prompt_ids] * 2 for group in result.groups for state in group)

    asyncio.run(beside() if disaggregated else colocated())
    ledger = store.ledger()
    assert (ledger["trained"], ledger["in_flight"]) == (4 * 32, 0)
    assert balanced(ledger)


def test_calls_that_are_cancelled_at_any_moment_take_nothing_along(make: Any) -> None:
    store = make(StalenessRule(max_staleness=2), max_rerolls=None)

    async def run() -> None:
        for number in range(4):
            await store.put(group_of(number, [5, 5]), train_step=6)
        for attempt in range(40):
            take: Any = store.take_train_batch({"default": 4}, train_step=6) if attempt % 2 else store.get(4)
            task = asyncio.ensure_future(take)
            await asyncio.sleep(0.0005 * (attempt // 2))
            task.cancel()
            try:
                got = await task
            except asyncio.CancelledError:
                assert await store.count() == 4
                continue
            for group in got["default"] if attempt % 2 else got:
                await store.put(group, train_step=6)

    asyncio.run(run())
    assert store.sync.count() == 4
    ledger = store.ledger()
    assert (ledger["stored"], ledger["in_flight"]) == (16, 0)
    assert balanced(ledger)


def test_a_resumed_store_has_what_was_acknowledged_and_clears_what_was_not(make: Any, tmp_path: Path) -> None:
    store = make(journal=tmp_path / "journal")
    for number in range(3):
        store.sync.put(group_of(number, [4, 4]), train_step=5)
    store.sync.save(tmp_path / "checkpoint")
    store.sync.put(group_of(3, [4, 4]), train_step=5)
    taken = store.sync.take_train_batch({"default": 1}, train_step=5)
    # As if the process had died between writing rows and storing their summary.
    tq.kv_put("pystale-000000000000-7_0", store.partition_id, {"response_ids": np_tensor([1])}, {})
    tq.kv_put("of somebody else", store.partition_id, {"response_ids": np_tensor([1])}, {})
    store.sync.close()
    again = make(journal=tmp_path / "journal")
    with pytest.raises(ValueError, match="keep_until_save"):
        again.sync.resume(tmp_path / "checkpoint", undo_takes=True)
    resumed = again.sync.resume(tmp_path / "checkpoint")
    assert resumed.taken == {"default": [group[0].group_id for group in taken["default"]]}
    assert len(keys_of(again)) == 3 * 3 + 1
    assert "of somebody else" in keys_of(again)
    batch = again.sync.take_train_batch({"default": 3}, train_step=5)
    assert [group[0].group_id for group in batch["default"]] == [1, 2, 3]
    assert balanced(again.ledger())
    tq.kv_clear("of somebody else", store.partition_id)


def test_takes_are_undone_where_rows_are_kept_until_the_next_save(make: Any, tmp_path: Path) -> None:
    settings = {"journal": tmp_path / "journal", "keep_until_save": True}
    store = make(**settings)
    for number in range(2):
        store.sync.put(group_of(number, [4, 4]), train_step=5)
    store.sync.save(tmp_path)
    store.sync.take_train_batch({"default": 1}, train_step=5)
    store.sync.acknowledge(5)
    store.sync.close()
    again = make(**settings)
    again.sync.resume(tmp_path, undo_takes=True)
    batch = again.sync.take_train_batch({"default": 2}, train_step=5)
    assert [group[0].group_id for group in batch["default"]] == [0, 1]
    again.sync.acknowledge(5)
    assert len(keys_of(again)) == 6
    again.sync.save(tmp_path)
    assert keys_of(again) == set()


def test_a_group_whose_rows_are_lost_is_booked_and_not_handed_out(make: Any) -> None:
    store = make()
    for number in range(3):
        store.sync.put(group_of(number, [4, 4]), train_step=5)
    lost = sorted(key for key in keys_of(store) if "-1_" in key)
    tq.kv_clear(lost[:1], store.partition_id)
    assert not store.sync.take_train_batch({"default": 3}, train_step=5)
    batch = store.sync.take_train_batch({"default": 2}, train_step=5)
    assert [group[0].group_id for group in batch["default"]] == [0, 2]
    assert store.ledger()["discarded"]["lost"] == 4
    assert balanced(store.ledger())


def test_too_few_logical_cpus_are_an_error_and_no_endless_wait(service: None, monkeypatch: pytest.MonkeyPatch) -> None:
    start_transfer_queue()  # runs already: nothing to place
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: (_ for _ in ()).throw(ValueError("no such actor")))
    with pytest.raises(RuntimeError, match=r"needs 101 logical CPUs .* of 8 are free.*num_cpus"):
        start_transfer_queue(num_data_storage_units=100)


def processes(name: str) -> list[psutil.Process]:
    """Processes of this Ray whose title begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith(f"ray::{name}"):
            found.append(process)
    return found


def test_storage_that_does_not_answer_is_an_error_at_the_time_limit_and_loses_nothing(make: Any) -> None:
    store = make(timeout=5.0)
    for number in range(2):
        store.sync.put(group_of(number, [4, 4]), train_step=5)
    units = processes("SimpleStorageUnit")
    assert len(units) == 2
    for unit in units:
        unit.suspend()
    try:
        with pytest.raises(TransferQueueGone, match=r"failed after \d+\.\d of 5\.0 s: no answer came in time"):
            store.sync.take_train_batch({"default": 2}, train_step=5)
        with pytest.raises(TransferQueueGone, match="no answer came in time"):
            store.sync.put(group_of(2, [4, 4]), train_step=5)
        with pytest.raises(TransferQueueGone, match="no answer came in time"):
            store.sync.get(1)
    finally:
        for unit in units:
            unit.resume()
    assert store.sync.count() == 2
    store.sync.put(group_of(2, [4, 4]), train_step=5)
    batch = store.sync.take_train_batch({"default": 3}, train_step=5)
    assert [group[0].group_id for group in batch["default"]] == [0, 1, 2]
    assert "lost" not in {reason for reason, tokens in store.ledger()["discarded"].items() if tokens}
    assert balanced(store.ledger())
    store.sync.acknowledge(5)
    assert keys_of(store) == set()


PUTTING = """
import sys, ray
from test_transfer_queue import RULE, group_of
from pystale.integrations.transfer_queue import TransferQueueStore
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
store = TransferQueueStore(RULE, partition_id=sys.argv[2], journal=sys.argv[3], tail_batch_trigger_size=0, timeout=60.0)
store.sync.resume(None)
number = 0
while True:
    store.sync.put(group_of(number, [4, 4]), train_step=5)
    print("put", number, flush=True)
    if number == 5:
        batch = store.sync.take_train_batch({"default": 2}, train_step=5)
        print("took", *[group[0].group_id for group in batch["default"]], flush=True)
    number += 1
"""


def test_a_process_that_is_killed_leaves_all_it_acknowledged_and_no_rows_of_nothing(make: Any, tmp_path: Path) -> None:
    store = make(journal=tmp_path / "journal")
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", PUTTING, address, store.partition_id, str(tmp_path / "journal")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    store.sync.close()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        acknowledged = []
        for line in process.stdout or ():
            acknowledged.append(line.split())
            if len(acknowledged) == 12:
                process.kill()
    put = {int(number) for kind, number in (words for words in acknowledged if words[0] == "put")}
    took = [int(number) for words in acknowledged if words[0] == "took" for number in words[1:]]
    assert took == [0, 1]
    again = make(journal=tmp_path / "journal")
    resumed = again.sync.resume(None)
    assert resumed.taken == {"default": took}
    keys = keys_of(again)
    assert len(keys) == 3 * len(again.sync), "the batch that was taken, and a put that was cut short, are cleared"
    batch = again.sync.take_train_batch({"default": len(again.sync)}, train_step=5)
    there = {group[0].group_id for group in batch["default"]}
    assert there >= put - set(took)
    assert there.isdisjoint(took)
    assert balanced(again.ledger())


def test_storage_that_is_killed_is_an_error_in_time_and_nothing_is_handed_out_twice(make: Any) -> None:
    store = make(timeout=60.0)
    for number in range(6):
        store.sync.put(group_of(number, [4, 4]), train_step=5)
    first = store.sync.take_train_batch({"default": 2}, train_step=5)
    for process in processes("SimpleStorageUnit"):
        process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TransferQueueGone, match=r"storage unit .* gone; start it \(again\)"):
        store.sync.take_train_batch({"default": 2}, train_step=5)
    with pytest.raises(TransferQueueGone, match="storage unit"):
        store.sync.put(group_of(10, [4, 4]), train_step=5)
    assert time.monotonic() - began < 60.0, "sooner than the time limit"
    assert store.sync.count() == 4
    assert store.ledger()["trained"] == 8
    tq.close()
    # How far the end has come decides what it says at first: its processes may answer, and Ray know them, for a moment.
    said = ""
    while "no TransferQueue in this Ray cluster" not in said:
        assert time.monotonic() - began < 300.0, said
        with pytest.raises(TransferQueueGone, match="start it \\(again\\)") as gone:
            store.sync.get(1)
        said = str(gone.value)
    start_transfer_queue()
    # Connects by itself; what the storage held is lost, and said so.
    assert store.sync.put(group_of(10, [4, 4]), train_step=5) is Status.COMPLETED
    assert store.ledger()["discarded"]["lost"] == 4 * 4
    second = store.sync.take_train_batch({"default": 1}, train_step=5)
    assert [group[0].group_id for group in first["default"]] == [0, 1]
    assert [group[0].group_id for group in second["default"]] == [10]
    assert store.sync.count() == 0
    assert balanced(store.ledger())


def test_a_controller_that_is_killed_is_an_error_and_a_restarted_service_is_found(make: Any) -> None:
    store = make(timeout=60.0)
    store.sync.put(group_of(1, [4, 4]), train_step=5)
    for process in processes("TransferQueueController"):
        process.send_signal(signal.SIGKILL)
    with pytest.raises(TransferQueueGone, match="controller"):
        store.sync.take_train_batch({"default": 1}, train_step=5)
    with pytest.raises(TransferQueueGone):
        store.sync.put(group_of(2, [4, 4]), train_step=5)
    assert store.sync.count() == 1
    tq.close()
    start_transfer_queue()
    assert not store.sync.take_train_batch({"default": 1}, train_step=5)
    store.sync.put(group_of(2, [4, 4]), train_step=5)
    assert store.sync.take_train_batch({"default": 1}, train_step=5).trainable_tokens == 4
    assert balanced(store.ledger())
