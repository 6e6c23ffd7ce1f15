"""pystale in XTuner's place, against stand-ins of what XTuner brings."""

import asyncio
import copy
import functools
import pickle
import random
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plain_xtuner
import pytest
from pydantic import ValidationError
from stand_in_xtuner import ObjectRef, RolloutState, StandIn, Status, xtuner

import pystale.integrations.xtuner as integration
from pystale.integrations.xtuner import XTunerReplayBuffer, calculate_group_effective_response_masks

__all__ = ["xtuner"]  # the fixture


def in_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


CONFIGS = ("SyncReplayBufferConfig", "AsyncReplayBufferConfig")


def state(steps: Any, number: int = 0, status: Status = Status.COMPLETED, **fields: Any) -> RolloutState:
    """State with a token per step."""
    ids = [] if steps is None else list(range(len(steps)))
    return RolloutState(
        **{
            "message": [{"role": "user", "content": "?"}],
            "rollout_id": number,
            "session_id": number,
            "prompt_ids": [7],
            "response_ids": ids,
            "response_model_steps": steps,
            "status": status,
            **fields,
        }
    )


def numbers(groups: list[list[Any]]) -> list[int]:
    return [group[0].rollout_id for group in groups]


@pytest.fixture(params=[True, False], ids=["fifo", "stalest_first"])
def buffer(request: pytest.FixtureRequest, xtuner: StandIn) -> XTunerReplayBuffer:
    return XTunerReplayBuffer(fifo=request.param)


@pytest.fixture
def installed(xtuner: StandIn):
    integration.install()
    yield xtuner
    integration.uninstall()


# Installing


def test_importing_the_module_imports_neither_xtuner_nor_ray_nor_torch(tmp_path: Path) -> None:
    code = """if True:
        import sys
        import pystale.integrations.xtuner
        print({"xtuner", "ray", "torch"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", CONFIGS)
def test_without_xtuner_the_error_says_what_is_missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "xtuner", None)
    with pytest.raises(ImportError, match=r"xtuner\.v1\.rl\.replay_buffer cannot be imported .* PYTHONPATH"):
        getattr(integration, name)
    with pytest.raises(ImportError, match="PYTHONPATH"):
        integration.install()


def test_install_reaches_configs_that_exist_already(xtuner):
    before = xtuner.TrainerConfig()  # with the default that was made with the class
    integration.install()
    assert isinstance(before.replay_buffer_config.build(), XTunerReplayBuffer)
    built = [getattr(xtuner.replay_buffer, name)().build() for name in CONFIGS]
    assert [b.fifo for b in built] == [True, False]
    integration.uninstall()
    assert before.replay_buffer_config.build() == "XTuner's own, fifo"


def test_install_reaches_modules_that_imported_the_mask_function(xtuner):
    name = "calculate_group_effective_response_masks"
    own = getattr(xtuner.rl_data, name)
    integration.install()
    for module in (xtuner.rl_data, xtuner.replay_buffer, xtuner.produce_utils):
        assert getattr(module, name) is calculate_group_effective_response_masks
    late = types.ModuleType("xtuner.v1.late")
    setattr(late, name, getattr(xtuner.rl_data, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, late.__name__, late)
        integration.uninstall()
    for module in (xtuner.rl_data, xtuner.replay_buffer, xtuner.produce_utils, late):
        assert getattr(module, name) is own


def test_installing_twice_and_uninstalling_twice_changes_nothing_more(xtuner):
    own = xtuner.replay_buffer.AsyncReplayBufferConfig.build
    integration.install()
    integration.install()
    integration.uninstall()
    assert xtuner.replay_buffer.AsyncReplayBufferConfig.build is own
    integration.uninstall()
    assert xtuner.replay_buffer.AsyncReplayBufferConfig.build is own


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("replay_buffer", "release_and_discard_rollout_groups"),
        ("replay_buffer", "AsyncReplayBufferConfig"),
        ("rl_data", "calculate_group_effective_response_masks"),
    ],
)
def test_another_xtuner_is_refused_before_anything_changes(xtuner, module, name):
    own = xtuner.replay_buffer.SyncReplayBufferConfig.build
    delattr(getattr(xtuner, module), name)
    with pytest.raises(ImportError, match=f"has no {name}; this pystale was tried with"):
        integration.install()
    assert xtuner.replay_buffer.SyncReplayBufferConfig.build is own


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_stand_where_xtuners_own_do(xtuner, name):
    config = getattr(integration, name)()
    assert isinstance(config, getattr(xtuner.replay_buffer, name))
    assert xtuner.TrainerConfig(replay_buffer_config=config).replay_buffer_config is config
    for same in (config, copy.deepcopy(config), config.model_copy(), pickle.loads(pickle.dumps(config))):
        assert type(same) is getattr(integration, name)
        assert same.build().fifo == (name == "SyncReplayBufferConfig")
    with pytest.raises(ValidationError):
        getattr(integration, name)(capacity=3)


def test_configs_give_a_new_buffer_each_time(installed):
    config = installed.replay_buffer.AsyncReplayBufferConfig()
    assert config.build() is not config.build()


# Putting


@in_a_loop
async def test_put_stamps_and_writes_the_staleness(buffer):
    one = state([3, 3], response_ids=[1, 2, 3])
    other = state(None)
    await buffer.put([one, other], "task", model_step=4, current_train_step=6)
    assert one.response_model_steps == [3, 3, 4]
    assert other.response_model_steps == []
    assert [s.seq_staleness for s in (one, other)] == [2, 0]


@in_a_loop
async def test_an_empty_group_is_no_group(buffer):
    await buffer.put([], "task")
    assert len(buffer) == 0


@in_a_loop
async def test_the_very_list_that_was_put_comes_back(buffer):
    group = [state([1])]
    await buffer.put(group, "task")
    assert (await buffer.get(1, "task", Status.COMPLETED))[0] is group


@in_a_loop
async def test_without_a_train_step_nothing_expires_and_staleness_is_carried(xtuner):
    buffer = XTunerReplayBuffer(fifo=False)
    for number, staleness in ((1, 1), (2, 5), (3, 5), (4, 3)):
        await buffer.put([state([0], number, seq_staleness=staleness)], "task", stale_threshold=1)
    groups = await buffer.get(4, "task", Status.COMPLETED)
    assert numbers(groups) == [2, 3, 4, 1]
    assert [group[0].seq_staleness for group in groups] == [5, 5, 3, 1]


@in_a_loop
async def test_the_next_refresh_orders_by_age_what_was_put_without_a_train_step(xtuner):
    buffer = XTunerReplayBuffer(fifo=False)
    for number, step in ((1, 3), (2, None), (3, 1), (4, 2)):
        await buffer.put([state(step and [step], number, seq_staleness=9)], "task")
    await buffer.refresh_staleness(task_stale_thresholds={"task": 10}, current_train_step=5)
    groups = await buffer.get(4, "task", Status.COMPLETED)
    assert numbers(groups) == [3, 4, 1, 2]
    assert [group[0].seq_staleness for group in groups] == [3, 2, 1, 0]


@in_a_loop
async def test_staleness_of_different_train_steps_is_compared_as_it_is(xtuner):
    buffer = XTunerReplayBuffer(fifo=False)
    await buffer.put([state([2], 1)], "task", current_train_step=4)  # staleness 1
    await buffer.put([state([3], 2)], "task", current_train_step=7)  # staleness 3, though generated later
    assert numbers(await buffer.get(2, "task", Status.COMPLETED)) == [2, 1]


@in_a_loop
async def test_unfinished_groups_count_as_completed(buffer):
    await buffer.put([state([1], status=Status.INIT)], "task")
    assert await buffer.count("task", Status.COMPLETED) == 1
    assert await buffer.count("task", Status.INIT) == 0


@in_a_loop
async def test_a_negative_step_is_the_oldest(buffer):
    stale = state([-1, 4])
    await buffer.put([stale], "task", current_train_step=5, stale_threshold=5)
    assert stale.status is Status.EXPIRED
    assert stale.seq_staleness == 5


@in_a_loop
async def test_versions_of_the_future_are_taken_as_they_are(buffer):
    early = state([9])
    await buffer.put([early], "task", current_train_step=5, stale_threshold=1)
    assert early.seq_staleness == -5
    assert await buffer.count("task", Status.COMPLETED) == 1


@in_a_loop
async def test_masks_and_steps_of_different_length_are_compared_as_far_as_both_go(buffer):
    # The trainable token has no step.
    group = [state([4, 4], response_mask=[0, 0, 1])]
    await buffer.put(group, "task", current_train_step=5, stale_threshold=9, token_stale_threshold=9)
    assert await buffer.count("task", Status.EXPIRED) == 1


@in_a_loop
async def test_a_mask_that_lets_no_token_in_switches_the_token_rule_off(buffer):
    group = [state([0, 0], response_mask=[0, 0, 0])]
    await buffer.put(group, "task", current_train_step=5, stale_threshold=9, token_stale_threshold=1)
    assert await buffer.count("task", Status.COMPLETED) == 1


@in_a_loop
async def test_prebuilt_tensors_switch_the_token_rule_off_for_the_group(buffer):
    group = [state([0]), state([4], labels=[1])]
    await buffer.put(group, "task", current_train_step=5, stale_threshold=9, token_stale_threshold=1)
    assert await buffer.count("task", Status.COMPLETED) == 1


@pytest.mark.parametrize("retryable", [True, False])
@in_a_loop
async def test_an_expired_group_is_reset_or_released(buffer, xtuner, retryable):
    stale, fresh = state([0], 1, reward={"score": 1.0}), state([4], 2)
    await buffer.put(
        [stale, fresh], "task", current_train_step=5, stale_threshold=2, expired_groups_retryable=retryable
    )
    if retryable:
        assert [s.status for s in (stale, fresh)] == [Status.EXPIRED, Status.COMPLETED]
        assert (stale.response_ids, stale.reward, stale.tokens, fresh.response_ids) == ([], None, [7], [0])
        assert stale.seq_staleness == 4  # until the next refresh
        assert xtuner.released == []
        assert await buffer.count("task", Status.EXPIRED) == 1
    else:
        assert xtuner.released == [[1, 2]]
        for member in (stale, fresh):
            assert member.status is Status.EXPIRED
            assert (member.prompt_ids, member.response_ids, member.rollout_id) == (None, None, None)
            assert member.message == [{"role": "user", "content": "?"}]
        assert len(buffer) == 0


@pytest.mark.parametrize(
    ("fields", "call", "error"),
    [
        ({"response_model_steps": [1.5]}, {}, "response_model_steps holds 1.5 .* an int is required"),
        ({"response_model_steps": [2**60]}, {}, "steps between -2\\*\\*60 and 2\\*\\*60 are allowed"),
        ({}, {"stale_threshold": 0}, "stale_threshold is 0; at least 1 trainer step"),
        ({}, {"token_stale_threshold": -1}, "token_stale_threshold is -1; at least 1 trainer step"),
        ({}, {"current_train_step": 2**60}, "current_train_step is .* are allowed"),
    ],
)
@in_a_loop
async def test_bad_input_is_refused_and_nothing_changes(buffer, fields, call, error):
    good, bad = state(None, response_ids=[1]), state([1])
    for name, value in fields.items():
        setattr(bad, name, value)
    with pytest.raises((TypeError, ValueError), match=error):
        await buffer.put([good, bad], "task", model_step=1, **{"current_train_step": 5, **call})
    assert good.response_model_steps is None
    assert len(buffer) == 0
    with pytest.raises(ValueError, match="stale_threshold is 0"):
        await buffer.refresh_staleness(task_stale_thresholds={"task": 0}, current_train_step=5)


@in_a_loop
async def test_a_group_whose_reset_fails_stays_stored(buffer, xtuner):
    await buffer.put([state([0])], "task")

    def fail(state):
        raise OSError("the object store is gone")

    xtuner.replay_buffer.reset_rollout_response = fail
    with pytest.raises(OSError, match="object store"):
        await buffer.refresh_staleness(task_stale_thresholds={"task": 1}, current_train_step=5)
    assert len(buffer) == 1


# Refreshing


class Watched(RolloutState):
    """Counts what is read of it."""

    def __getattribute__(self, name: str) -> Any:
        reads[0] += 1
        return super().__getattribute__(name)


reads = [0]


@in_a_loop
async def test_a_refresh_with_nothing_due_looks_at_no_state(buffer):
    for number in range(50):
        await buffer.put([Watched(**dict(state([number % 5 + 5])))], "task", current_train_step=11)
    call: dict[str, Any] = {"task_stale_thresholds": {"task": 8}, "task_token_stale_thresholds": {"task": 8}}
    await buffer.refresh_staleness(**call, current_train_step=11)
    reads[0] = 0
    assert await buffer.refresh_staleness(**call, current_train_step=12) == {"task": 0}
    assert reads[0] == 0


@in_a_loop
async def test_a_changed_threshold_goes_through_its_task_alone(buffer):
    for task in ("math", "code"):
        await buffer.put([state([1])], task, current_train_step=3, stale_threshold=9)

    def refresh(**thresholds: int) -> Any:
        return buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=4)

    assert await refresh(math=9, code=9) == {"math": 0, "code": 0}
    assert await refresh(math=2, code=9) == {"math": 1, "code": 0}
    assert await refresh(code=9) == {"code": 0}
    assert await refresh(code=1) == {"code": 1}


@in_a_loop
async def test_refresh_counts_what_is_expired_the_pool_included(buffer):
    await buffer.put([state([1])], "task", current_train_step=2)
    await buffer.put([state([5])], "task", current_train_step=6)
    counts = [
        await buffer.refresh_staleness(task_stale_thresholds={"task": 3, "unknown": 3}, current_train_step=train_step)
        for train_step in (3, 6, 6, 9)
    ]
    assert counts == [{"task": n, "unknown": 0} for n in (0, 1, 1, 2)]
    only = {"statuses": [Status.COMPLETED]}
    assert await buffer.refresh_staleness(task_stale_thresholds={"task": 3}, current_train_step=9, **only) == {
        "task": 0
    }


@in_a_loop
async def test_a_preserved_member_expires_while_its_group_waits(buffer):
    group = [state([1]), state([4])]
    await buffer.put(group, "task", current_train_step=5, stale_threshold=3)
    await buffer.refresh_staleness(task_stale_thresholds={"task": 3}, current_train_step=8)
    assert [s.status for s in group] == [Status.EXPIRED, Status.EXPIRED]
    assert group[1].response_ids == []
    # What was reset earlier counts as 0 now, and what was reset just now keeps what it had.
    assert [s.seq_staleness for s in group] == [0, 3]


@in_a_loop
async def test_an_expired_member_put_without_a_train_step_is_reset_by_the_next_refresh(buffer):
    group = [state([4], status=Status.EXPIRED), state([4], status=Status.ABORTED)]
    await buffer.put(group, "task")
    assert await buffer.count("task", Status.ABORTED) == 1
    assert group[0].response_ids == [0]
    await buffer.refresh_staleness(task_stale_thresholds={"task": 9}, current_train_step=5)
    assert await buffer.count("task", Status.EXPIRED) == 1
    assert [s.response_ids for s in group] == [[], [0]]


@in_a_loop
async def test_retry_off_drops_the_expired_pool_too(buffer, xtuner):
    await buffer.put([state([1], 1)], "task", current_train_step=5, stale_threshold=1)
    await buffer.put([state([2], 2)], "task")
    await buffer.put([state([9], 3)], "task")
    counts = await buffer.refresh_staleness(
        task_stale_thresholds={"task": 3}, expired_groups_retryable_by_task={"task": False}, current_train_step=6
    )
    assert counts == {"task": 2}
    assert xtuner.released == [[1, 2]]
    assert len(buffer) == 1


@in_a_loop
async def test_sessions_are_released_in_one_call_while_the_buffer_goes_on(buffer, xtuner):
    for number, task in enumerate(("math", "code", "math")):
        await buffer.put([state([1], number)], task)
    began, allowed = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        began.set()
        await allowed.wait()

    xtuner.on_release = wait
    refresh = asyncio.create_task(
        buffer.refresh_staleness(
            task_stale_thresholds={"math": 1, "code": 1},
            expired_groups_retryable_by_task={"math": False, "code": False},
            current_train_step=6,
        )
    )
    await began.wait()
    assert len(buffer) == 0
    await buffer.put([state([5], 9)], "math", current_train_step=6)
    allowed.set()
    assert await refresh == {"math": 2, "code": 1}
    assert xtuner.released == [[0, 2, 1]]
    assert await buffer.count("math", Status.COMPLETED) == 1


@in_a_loop
async def test_a_member_without_tokens_counts_0_beside_one_of_a_future_version(xtuner):
    buffer = XTunerReplayBuffer(fifo=False)
    for number, group in enumerate(([state([6]), state(None)], [state([4])], [state([5])])):
        group[0].rollout_id = number
        await buffer.put(group, "task", current_train_step=5)
    groups = await buffer.get(3, "task", Status.COMPLETED)
    assert numbers(groups) == [0, 1, 2]
    assert [[s.seq_staleness for s in group] for group in groups] == [[-2, 0], [0], [-1]]


@in_a_loop
async def test_a_refresh_may_go_back_in_time(xtuner):
    buffer = XTunerReplayBuffer(fifo=False)
    for number, group in enumerate(([state([6]), state(None)], [state([4])], [state([5])], [state(None)])):
        group[0].rollout_id = number
        await buffer.put(group, "task", current_train_step=9)
    await buffer.refresh_staleness(task_stale_thresholds={"task": 9}, current_train_step=5)
    groups = await buffer.get(4, "task", Status.COMPLETED)
    assert numbers(groups) == [0, 1, 3, 2]
    assert [[s.seq_staleness for s in group] for group in groups] == [[-2, 0], [0], [0], [-1]]


# Taking and counting


@in_a_loop
async def test_take_batch_takes_what_is_there(buffer):
    for number in range(3):
        await buffer.put([state([1], number)], "math")
    batch, consumed = await buffer.take_batch({"math": 2, "code": 2, "none": 0})
    assert {name: len(groups) for name, groups in batch.items()} == consumed == {"math": 2, "code": 0, "none": 0}
    assert await buffer.count("math", Status.COMPLETED) == 1


@in_a_loop
async def test_counts_are_by_the_statuses_that_were_asked_for(buffer):
    await buffer.put([state([1])], "math")
    await buffer.put([state([1], status=Status.FAILED)], "math")
    wanted = [Status.COMPLETED, Status.FAILED, Status.EXPIRED]
    assert await buffer.count_statuses(["math", "code"], wanted) == {
        "math": {Status.COMPLETED: 1, Status.FAILED: 1, Status.EXPIRED: 0},
        "code": dict.fromkeys(wanted, 0),
    }


@in_a_loop
async def test_is_ready_when_every_task_is(buffer):
    await buffer.put([state([1])], "math")
    assert await buffer.is_ready({"math": 1, "code": 0})
    assert not await buffer.is_ready({"math": 1, "code": 1})
    assert await buffer.is_ready({"math": 0}, group_status=Status.FAILED)


@in_a_loop
async def test_fifo_is_by_arrival_whatever_expires(xtuner):
    buffer = XTunerReplayBuffer(fifo=True)
    for number, step in enumerate((1, 3, 1, 3)):
        await buffer.put([state([step], number)], "task", current_train_step=4)
    await buffer.refresh_staleness(task_stale_thresholds={"task": 3}, current_train_step=5)
    await buffer.refresh_staleness(task_stale_thresholds={"task": 3}, current_train_step=7)
    assert numbers(await buffer.get(9, "task", Status.EXPIRED)) == [0, 1, 2, 3]


def test_threads_may_share_a_buffer(buffer):
    taken: list[int] = []

    async def produce(first: int) -> None:
        for number in range(first, first + 100):
            await buffer.put([state([number % 7], number)], "task", current_train_step=8, stale_threshold=6)

    async def consume() -> None:
        while len(taken) < 400:
            for status in (Status.COMPLETED, Status.EXPIRED):
                taken.extend(numbers(await buffer.get(3, "task", status)))
            await buffer.refresh_staleness(task_stale_thresholds={"task": 6}, current_train_step=9)
            await asyncio.sleep(0)

    work = [produce(first) for first in range(0, 400, 100)] + [consume(), consume()]
    threads = [threading.Thread(target=asyncio.run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(400))
    assert len(buffer) == 0


# Masks


def test_masks_are_xtuners_on_random_groups():
    draw = random.Random(20)
    for _ in range(2000):
        tokens = [draw.randint(0, 6) for _ in range(3)]
        group = [
            state(
                [draw.randint(-2, 9) for _ in range(draw.choice((n, n, n, n + 1, n // 2)))],
                response_ids=list(range(n)),
                response_mask=draw.choice(
                    (None, [draw.choice((0, 1)) for _ in range(n)], [draw.choice((0, True, 2, -1)) for _ in range(n)])
                ),
                input_ids=draw.choice((None,) * 9 + ([1],)),
            )
            for n in tokens
        ]
        train_step, threshold = draw.randint(-1, 9), draw.choice((None, 0, 1, 2, 5, 12))
        before = copy.deepcopy(group)
        masks = calculate_group_effective_response_masks(
            group, current_train_step=train_step, token_stale_threshold=threshold
        )
        assert masks == plain_xtuner.masks(group, train_step, threshold)
        assert group == before
        assert all(type(entry) is int for mask in masks if mask is not None for entry in mask)


def test_masks_of_arrays_are_lists():
    one = state([1])
    one.response_model_steps, one.response_ids = np.array([2, 7]), np.array([1, 2])
    masks = calculate_group_effective_response_masks([one], current_train_step=8, token_stale_threshold=3)
    assert masks == [[0, 1]]


def test_a_mask_of_tokens_without_steps_is_an_error_that_says_so():
    with pytest.raises(TypeError, match="rollout_id 3 has 2 response tokens and no response_model_steps"):
        calculate_group_effective_response_masks(
            [state(None, 3, response_ids=[1, 2])], current_train_step=8, token_stale_threshold=3
        )


# Saving


@in_a_loop
async def test_references_are_written_with_their_objects_and_come_back(buffer, xtuner, tmp_path):
    put = xtuner.cluster.put
    inner = put([1, 2])
    kept = state(
        [1], routed_experts=[put(np.arange(3)), put({"deep": inner})], extra_fields={"a": {"b": (inner, "text")}}
    )
    await buffer.put([kept], "task")
    await buffer.save(tmp_path)
    assert xtuner.cluster.asked == 2  # for all at once, and for what was in them

    resumed = XTunerReplayBuffer(fifo=buffer.fifo)
    await resumed.resume(tmp_path)
    ((back,),) = await resumed.get(1, "task", Status.COMPLETED)
    assert kept.extra_fields["a"]["b"][0] is inner
    get = xtuner.cluster.get
    assert all(isinstance(reference, ObjectRef) for reference in back.routed_experts)
    assert get(back.routed_experts[0]).tolist() == [0, 1, 2]
    assert get(get(back.routed_experts[1])["deep"]) == [1, 2]
    assert get(back.extra_fields["a"]["b"][0]) == [1, 2]
    assert back.extra_fields["a"]["b"][1] == "text"


@in_a_loop
async def test_order_and_arrival_survive(xtuner, tmp_path):
    buffer = XTunerReplayBuffer(fifo=False)
    for number, staleness in ((1, 1), (2, 5), (3, 1)):
        await buffer.put([state([0], number, seq_staleness=staleness)], "task")
    await buffer.get(1, "task", Status.COMPLETED)
    await buffer.save(tmp_path / "new" / "directory")
    resumed = XTunerReplayBuffer(fifo=False)
    await resumed.resume(tmp_path / "new" / "directory")
    await resumed.put([state([0], 4, seq_staleness=1)], "task")
    assert numbers(await resumed.get(9, "task", Status.COMPLETED)) == [1, 3, 4]


@in_a_loop
async def test_the_file_is_xtuners(buffer, xtuner, tmp_path):
    await buffer.put([state([3], 1)], "task", current_train_step=5)
    await buffer.save(tmp_path)
    document = pickle.loads((tmp_path / "replay_buffer.pth").read_bytes())
    assert document["policy"] == ("FIFOReplayPolicy" if buffer.fifo else "StalenessReplayPolicy")
    assert document["storage"] == "NaiveStorage"
    (item,) = document["storage_state"].pop("items")
    assert document["storage_state"] == {"next_uid": 2, "next_timestamp_id": 2}
    assert (item.uid, item.timestamp_id, item.task_name, item.staleness) == (1, 1, "task", 1)
    assert item.status is Status.COMPLETED


@in_a_loop
async def test_what_changes_during_a_save_is_not_in_it(buffer, xtuner, tmp_path, monkeypatch):
    group = [state([3, 3], extra_fields={"notes": ["a"]})]
    await buffer.put(group, "task")
    write, taken = sys.modules["torch"].save, threading.Event()

    def late(document: Any, path: Any) -> None:
        assert taken.wait(30)
        write(document, path)

    monkeypatch.setattr(sys.modules["torch"], "save", late)
    saving = asyncio.create_task(buffer.save(tmp_path))
    await asyncio.sleep(0)
    assert await buffer.get(1, "task", Status.COMPLETED) == [group]
    group[0].response_ids.append(8)
    group[0].extra_fields["notes"].append("b")
    taken.set()
    await saving
    resumed = XTunerReplayBuffer(fifo=buffer.fifo)
    await resumed.resume(tmp_path)
    ((back,),) = await resumed.get(1, "task", Status.COMPLETED)
    assert (back.response_ids, back.extra_fields) == ([0, 1], {"notes": ["a"]})


@in_a_loop
async def test_a_save_that_fails_leaves_the_last_one(buffer, xtuner, tmp_path, monkeypatch):
    await buffer.put([state([3])], "task")
    await buffer.save(tmp_path)

    def fail(document: Any, path: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["torch"], "save", fail)
    with pytest.raises(OSError, match="disk full"):
        await buffer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["replay_buffer.pth"]
    resumed = XTunerReplayBuffer(fifo=buffer.fifo)
    await resumed.resume(tmp_path)
    assert len(resumed) == 1


@in_a_loop
async def test_resume_is_into_an_empty_buffer_of_the_same_order(buffer, xtuner, tmp_path):
    await buffer.put([state([3])], "task")
    await buffer.save(tmp_path)
    with pytest.raises(RuntimeError, match="stores 1 groups"):
        await buffer.resume(tmp_path)
    other = XTunerReplayBuffer(fifo=not buffer.fifo)
    with pytest.raises(ValueError, match="is of policy"):
        await other.resume(tmp_path)
    assert len(other) == 0
