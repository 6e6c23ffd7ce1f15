"""What a buffer writes to its trace, and that writing it never holds the buffer up."""

import asyncio
import errno
import gc
import json
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from rollouts import group, state

import pystale.trace
from pystale import (
    DisaggAgentLoopManager,
    DisaggAsyncProduceStrategyConfig,
    ModelSteps,
    ReplayBuffer,
    RolloutState,
    StalenessRule,
    Status,
    TaskSpec,
)
from pystale.client import PartialRolloutClient
from pystale.engine import EngineOutput
from pystale.replay import read_history, replay
from pystale.trace import Trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


@pytest.fixture
def buffer(path):
    buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, trace=path)
    yield buffer
    buffer.sync.close()


def lines_of(path, *ops):
    """Lines after the header, of these kinds or all, without their times."""
    lines = [json.loads(text) for text in path.read_bytes().splitlines()][1:]
    times = [line.pop("at") for line in lines]
    assert times == sorted(times)
    return [line for line in lines if line["op"] in ops or not ops]


def reproduced(path):
    recorded, _ = replay(read_history(path))
    assert recorded.differs == ""
    return recorded


def test_the_header_has_the_settings(path):
    ReplayBuffer(
        {"a": StalenessRule(2, 1, 4, spare_aborted=True), "b": StalenessRule()},
        order="fifo",
        tail_batch_trigger_size={"a": 3},
        missing_version="newest",
        max_rerolls=2,
        group_mode="members",
        min_fresh=3,
        trace=path,
    ).sync.close()
    header = json.loads(path.read_bytes().splitlines()[0])
    assert header.pop("created")
    assert header == {
        "pystale_trace": 1,
        "order": "fifo",
        "missing_version": "newest",
        "max_rerolls": 2,
        "min_fresh": 3,
        "tasks": [
            {
                "task": "a",
                "max_staleness": 2,
                "max_token_staleness": 1,
                "sync_weights_interval": 4,
                "spare_aborted": True,
                "tail_batch_trigger_size": 3,
            },
            {
                "task": "b",
                "max_staleness": 0,
                "max_token_staleness": None,
                "sync_weights_interval": 1,
                "spare_aborted": False,
                "tail_batch_trigger_size": -1,
            },
        ],
    }
    read = read_history(path).header
    assert read.rules == {"a": StalenessRule(2, 1, 4, spare_aborted=True), "b": StalenessRule()}
    assert read.triggers == {"a": 3, "b": -1}


@pytest.mark.parametrize("triggers", [-1, 2, {"a": 0}, {}])
def test_settings_of_one_rule_for_all_are_read_back(path, triggers):
    ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=triggers, trace=path).sync.close()
    header = read_history(path).header
    assert header.rules == StalenessRule(1)
    for task in ("a", "b"):
        expected = triggers if isinstance(triggers, int) else triggers.get(task, -1)
        assert (header.triggers if isinstance(header.triggers, int) else header.triggers.get(task, -1)) == expected


def test_a_line_for_every_operation(buffer, path):
    buffer.sync.put(group([0, 0], [0, -1, 0], group_id="a"), "t", train_step=1)
    buffer.sync.put(group([0], status=Status.ABORTED, group_id=np.int64(2)), "t", train_step=1)
    buffer.sync.refresh_staleness(1)
    buffer.sync.refresh_staleness(1, statuses=[Status.EXPIRED])
    ((again,),) = buffer.sync.get(1, "t", Status.ABORTED)
    again.response_ids, again.response_model_steps, again.status = [100, 1], [0, 0], Status.COMPLETED
    buffer.sync.put([again], "t", train_step=1)
    buffer.sync.take_train_batch({"t": 9}, train_step=1)
    buffer.sync.take_train_batch({"t": 1}, train_step=1)
    buffer.sync.take_batch({"t": 1}, status="completed")
    buffer.sync.reject(group([0, 0], group_id="r"), "t", "filtered")
    buffer.trace.weight_sync(1)
    buffer.trace.weight_sync(1)
    buffer.sync.close()
    ledger = {
        "op": "ledger",
        "produced": 5,
        "trained": 4,
        "masked_stale": 0,
        "masked_semantic": 1,
        "discarded": {},
        "stored": 2,
        "in_flight": 0,
    }
    counts = {"trained": 1, "expired": 0, "rerolled": 0, "discarded": 0}
    found = lines_of(path)
    assert found == [
        {
            "op": "put",
            "task": "t",
            "group": "a",
            "train_step": 1,
            "members": [[0, 2], [0, 1, -1, 1, 0, 1]],
        },
        {"op": "put", "task": "t", "group": 2, "train_step": 1, "members": [{"status": "ABORTED", "steps": [0, 1]}]},
        {"op": "refresh", "train_step": 1},
        {"op": "refresh", "train_step": 1, "pools": ["EXPIRED"]},
        {"op": "get", "pool": "ABORTED", "groups": {"t": [2]}},
        {"op": "put", "task": "t", "group": 2, "back": True, "train_step": 1, "members": [[0, 2]]},
        {"op": "take", "sizes": {"t": 9}, "train_step": 1, "groups": {}},
        {"op": "take", "sizes": {"t": 1}, "train_step": 1, "groups": {"t": ["a"]}},
        {**ledger, "produced": 7, "groups": counts},
        {"op": "take", "sizes": {"t": 1}, "groups": {"t": [2]}},
        {**ledger, "produced": 7, "trained": 6, "stored": 0, "groups": {**counts, "trained": 2}},
        {"op": "reject", "task": "t", "group": "r", "outcome": "filtered", "members": [[0, 2]]},
        {"op": "sync", "model_step": 1},
        {
            **ledger,
            "produced": 9,
            "trained": 6,
            "stored": 0,
            "discarded": {"filtered": 2},
            "groups": {**counts, "trained": 2},
        },
    ]
    assert reproduced(path).ledger == buffer.ledger()


def test_masks_are_runs_of_what_may_be_trained_and_left_out_where_that_is_all(buffer, path):
    masks = [None, [1, 1, 1, 1], [0, 0, 5, 1], np.array([True, False, False, True]), ModelSteps.from_list([0, 0, 0, 0])]
    members = [state([0, -1, 0, 0], response_mask=mask) for mask in masks]
    for member in members:
        member.group_id = 1
    buffer.sync.put(members, train_step=1)
    buffer.sync.close()
    ((put),) = lines_of(path, "put")
    steps = [0, 1, -1, 1, 0, 2]
    masks = [[0, 2, 1, 2], [1, 1, 0, 2, 1, 1], [0, 4]]
    assert put["members"] == [steps, steps, *({"steps": steps, "mask": mask} for mask in masks)]


def test_what_a_state_says_besides_its_tokens(path):
    buffer = ReplayBuffer(StalenessRule(1, 0), tail_batch_trigger_size=0, missing_version="oldest", trace=path)
    unversioned = RolloutState(group_id=1, response_ids=[1, 2], status="completed", rerolls=3, prompt_model_step=0)
    agentic = RolloutState(group_id=2, response_ids=[1], response_model_steps=[0], input_ids=[1], status="completed")
    buffer.sync.put([unversioned], train_step=1)
    buffer.sync.put([agentic], train_step=1)
    buffer.sync.close()
    first, second = lines_of(path, "put")
    assert (first["members"], first["rerolls"], first["prompt_model_step"]) == ([{"tokens": 2}], 3, 0)
    assert (second["agentic"], second["members"]) == (True, [[0, 1]])
    reproduced(path)


def test_members_that_start_again_are_named(buffer, path):
    members = group([0, 0], [0, 0], [0], status=Status.ABORTED, group_id=1)
    buffer.sync.put(members, train_step=1)
    (again,) = buffer.sync.get(1, status=Status.ABORTED)
    again[0].response_ids = [100, 101, 5]
    again[1].response_ids = [7, 7, 7]
    for member in again[:2]:
        member.response_model_steps = [0, 0, 0]
    for member in again:
        member.status = Status.COMPLETED
    buffer.sync.put(again, train_step=1)
    buffer.sync.close()
    assert lines_of(path, "put")[1]["restarted"] == [1]
    assert reproduced(path).ledger["discarded"] == {"restarted": 2}


def test_settling(buffer, path):
    for group_id in (1, 2):
        buffer.sync.put(group([0, 0], group_id=group_id), train_step=1)
    groups = buffer.sync.get(2)
    buffer.sync.settle(groups[:1], "trained")
    buffer.settle(groups[1:], "lost")
    buffer.sync.close()
    assert [(x["group"], x["outcome"], x["back"]) for x in lines_of(path, "settle")] == [
        (1, "trained", True),
        (2, "lost", True),
    ]
    assert reproduced(path).ledger == buffer.ledger()


def test_a_group_without_an_id_gets_its_own(buffer, path):
    buffer.sync.put([RolloutState(response_ids=[1], response_model_steps=[0], status="completed")], train_step=1)
    (put,) = (buffer.sync.flush(), lines_of(path, "put"))[1]
    assert put["group"] > 2**62
    assert lines_of(path)[-1]["op"] == "ledger"  # flush writes everything, the account too


def test_a_put_that_is_refused_leaves_no_line(buffer, path):
    buffer.sync.put(group([0], group_id=1), train_step=1)
    with pytest.raises(ValueError, match="stored already"):
        buffer.sync.put(group([0], group_id=1), train_step=1)
    with pytest.raises(ValueError, match="in the future"):
        buffer.sync.put(group([5], group_id=2), train_step=1)
    buffer.sync.close()
    assert len(lines_of(path, "put")) == 1


def test_a_batch_that_is_given_back(tmp_path, path):
    async def main():
        buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, journal=tmp_path / "journal", trace=path)
        await buffer.put(group([0, 0], group_id=1), train_step=1)
        buffer.operations.journal.wait = None
        taking = asyncio.ensure_future(buffer.take_train_batch({"default": 1}, train_step=1))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()
        assert len(buffer) == 1
        await buffer.take_train_batch({"default": 1}, train_step=1)
        await buffer.close()

    asyncio.run(main())
    assert [x["op"] for x in lines_of(path)] == ["put", "take", "ledger", "undo", "take", "ledger", "ledger"]
    assert reproduced(path).trained == 1


def test_what_happens_while_a_take_releases(path):
    async def main():
        async def on_release(released):
            lent.extend(await buffer.get(1, status=Status.EXPIRED))

        lent = []
        buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, on_release=on_release, trace=path)
        await buffer.put(group([0, 0], group_id=1), train_step=1)
        await buffer.put(group([2], group_id=2), train_step=3)
        await buffer.take_train_batch({"default": 1}, train_step=3)
        assert len(lent) == 1
        await buffer.close()

    asyncio.run(main())
    assert [x["op"] for x in lines_of(path)] == ["put", "put", "refresh", "get", "take", "ledger", "ledger"]
    assert reproduced(path).rerolled == 1


def test_what_happens_while_a_take_waits_for_stragglers(path):
    async def main():
        buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, wait_for_stragglers=True, trace=path)
        await buffer.put(group([0], group_id=1), train_step=1)
        await buffer.put(group([2], group_id=2), train_step=3)
        buffer.reserve(3, model_step=1)
        taking = asyncio.ensure_future(buffer.take_train_batch({"default": 1}, train_step=3))
        await asyncio.sleep(0)
        assert len(await buffer.get(1, status=Status.EXPIRED)) == 1  # expired by the take that waits
        await buffer.put(group([1], group_id=3), train_step=3)
        assert (await taking)["default"][0][0].group_id == 3
        await buffer.close()

    asyncio.run(main())
    assert [x["op"] for x in lines_of(path)] == ["put", "put", "refresh", "get", "put", "take", "ledger", "ledger"]
    assert reproduced(path).trained == 1


def test_flush_on_an_event_loop(path):
    async def main():
        buffer = ReplayBuffer(StalenessRule(1), trace=path)
        await buffer.put(group([0], group_id=1), train_step=1)
        await buffer.flush()
        assert [x["op"] for x in lines_of(path)] == ["put", "ledger"]
        await buffer.close()

    asyncio.run(main())


def test_groups_nobody_got(buffer, path):
    class Refuses(RolloutState):
        def __setattr__(self, name, value):
            if name == "response_mask" and value is not None:
                raise ValueError("no masks here")
            super().__setattr__(name, value)

    buffer.sync.put(
        [Refuses(group_id=1, response_ids=[1, 2], response_model_steps=[-1, 0], status="completed")], train_step=1
    )
    with pytest.raises(ValueError, match="no masks here"):
        buffer.sync.take_train_batch({"default": 1}, train_step=1)
    buffer.sync.close()
    assert [x["op"] for x in lines_of(path)] == ["put", "take", "undo", "ledger"]
    assert reproduced(path).trained == 0


def test_a_resumed_checkpoint_is_in_the_trace(tmp_path, path):
    first = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0)
    for group_id in (1, 2, 3):
        first.sync.put(group([0, 1], group_id=group_id), train_step=2)
    first.sync.put(group([0], group_id=4), train_step=2)
    first.sync.refresh_staleness(3)
    (lent,) = first.sync.get(1, status=Status.EXPIRED)
    first.sync.save(tmp_path / "checkpoint")

    buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, trace=path)
    buffer.sync.resume(tmp_path / "checkpoint")
    buffer.sync.put(group([2], group_id=9), train_step=3)
    buffer.sync.take_train_batch({"default": 1}, train_step=3)
    assert len(buffer.sync.get(9, status=Status.EXPIRED)) == 4
    buffer.sync.close()
    assert [x["op"] for x in lines_of(path)][:5] == ["resume", *["stored"] * 4]
    assert reproduced(path).ledger == buffer.ledger()
    assert lent


def test_about_a_hundred_bytes_per_rollout(path):
    buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, trace=path)
    for number in range(200):
        members = group(*[[0] * 40 + [1] * 60] * 8, group_id=number)
        for rollout_id, member in enumerate(members, 8 * number):
            buffer.trace.leg(number, rollout_id, model_step=1, tokens=100, reason="stop", seconds=1.5)
            member.rollout_id = rollout_id
        buffer.sync.put(members, train_step=2)
        if number % 16 == 15:
            buffer.sync.take_train_batch({"default": 16}, train_step=2)
    buffer.sync.close()
    assert path.stat().st_size / (200 * 8) < 85


# Files


def test_a_recorded_run_is_not_overwritten(path):
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="a recorded run is not overwritten"):
        ReplayBuffer(StalenessRule(), trace=path)
    assert path.read_text() == "precious"


def test_a_file_that_cannot_be_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError):
        ReplayBuffer(StalenessRule(), trace=tmp_path / "nowhere" / "run.jsonl")


def test_without_a_trace_there_is_none(tmp_path):
    buffer = ReplayBuffer(StalenessRule())
    assert buffer.trace is None
    buffer.sync.flush()
    buffer.sync.close()


def test_a_disk_that_is_too_slow_loses_lines_and_holds_up_nothing(path, monkeypatch, caplog):
    monkeypatch.setattr(pystale.trace, "WAITING_BYTES", 20_000)
    write_all, reached, go_on = pystale.trace.write_all, threading.Event(), threading.Event()

    def slow(fd, data):
        reached.set()
        assert go_on.wait(60)
        write_all(fd, data)

    monkeypatch.setattr(pystale.trace, "write_all", slow)
    buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, trace=path)
    assert reached.wait(60)

    async def main():
        for number in range(100):
            await buffer.put(group([0], group_id=number), train_step=1)

    asyncio.run(main())  # though nothing can be written
    assert len(buffer) == 100
    lost = buffer.trace.lost
    assert 0 < lost < 100
    go_on.set()
    buffer.sync.flush()
    buffer.sync.put(group([0], group_id=100), train_step=1)
    buffer.sync.close()
    ops = [line["op"] for line in lines_of(path)]
    assert ops == ["put"] * (100 - lost) + ["lost", "ledger", "put", "ledger"]
    assert lines_of(path, "lost") == [{"op": "lost", "lines": lost}]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    history = read_history(path)
    assert history.lost == lost
    assert not history.complete


def test_lines_lost_at_the_very_end_are_told(path, monkeypatch):
    trace = Trace(path, {})
    trace.flush()
    monkeypatch.setattr(pystale.trace, "WAITING_BYTES", 0)
    trace.weight_sync(1)
    trace.close()
    assert path.read_bytes().splitlines()[-1] == b'{"op":"lost","at":null,"lines":1}'


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("odd")])
def test_a_disk_that_is_full_ends_the_trace_at_a_whole_line_and_nothing_else(path, monkeypatch, caplog, error):
    buffer = ReplayBuffer(StalenessRule(1), tail_batch_trigger_size=0, trace=path)
    buffer.sync.put(group([0], group_id=1), train_step=1)
    buffer.sync.flush()
    whole = path.read_bytes()
    write_all = pystale.trace.write_all

    def full(fd, data):
        if isinstance(error, OSError):
            write_all(fd, data[:20])
        raise error

    monkeypatch.setattr(pystale.trace, "write_all", full)
    caplog.set_level(logging.ERROR)
    for number in (2, 3):
        buffer.sync.put(group([0], group_id=number), train_step=1)
        buffer.sync.flush()
    assert len(buffer) == 3
    buffer.sync.close()
    buffer.sync.put(group([0], group_id=4), train_step=1)
    assert path.read_bytes() == whole
    (record,) = caplog.records
    assert "ends here: it cannot be written" in record.message


def test_what_waits_is_written_when_the_buffer_is_forgotten(path):
    buffer = ReplayBuffer(StalenessRule(1), trace=path)
    buffer.sync.put(group([0], group_id=1), train_step=1)
    writer = buffer.trace._lines._writer
    del buffer
    gc.collect()
    writer.join(60)
    assert not writer.is_alive()
    assert len(lines_of(path, "put")) == 1


def run_apart(code, path):
    """Run code in a process of its own that ends by itself."""
    start = """
import os, sys
from pystale import ReplayBuffer, RolloutState, StalenessRule
buffer = ReplayBuffer(StalenessRule(1), trace=sys.argv[1])
def put(number):
    buffer.sync.put([RolloutState(group_id=number, response_ids=[1], response_model_steps=[0], status="completed")])
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + code, str(path)], check=True, timeout=120, cwd=path.parent
    )
    return [line["group"] for line in lines_of(path, "put")]


def test_what_waits_is_written_when_the_interpreter_exits(path):
    assert run_apart("for number in range(50): put(number)", path) == list(range(50))


def test_a_forked_process_leaves_the_file_to_its_parent(path):
    code = """
put(1)
child = os.fork()
put(2 + bool(child == 0))
if child:
    assert os.waitpid(child, 0)[1] == 0
buffer.sync.flush()
buffer.sync.close()
"""
    assert run_apart(code, path) == [1, 2]


# What producers add


def test_a_client_adds_a_line_per_request(buffer, path):
    class Engine:
        calls = 0

        async def generate(self, tokens, sampling_params, request_id):
            self.calls += 1
            if self.calls == 1:
                raise ConnectionError("no")
            return EngineOutput([1, 2], "abort") if self.calls == 2 else EngineOutput([3], "stop")

        async def abort(self, request_id): ...

    client = PartialRolloutClient(Engine(), lambda: 4, trace=buffer.trace, backoff_s=0.0)
    state = RolloutState(group_id=5, rollout_id=50, prompt_ids=[1], sample_params={"max_tokens": 9})
    asyncio.run(client.generate(state, enable_partial_rollout=True))
    buffer.sync.close()
    legs = lines_of(path, "leg")
    assert all(leg["leg"].pop(4) >= 0 for leg in legs)
    assert [leg["leg"] for leg in legs] == [[5, 50, 4, 0, "error"], [5, 50, 4, 2, "abort"], [5, 50, 4, 1]]
    assert read_history(path).leg_tokens == {"error": 0, "abort": 2, "stop": 1}


def test_numbers_of_whatever_kind_are_written_and_others_refused(buffer, path):
    buffer.trace.leg(1, np.int64(2), model_step=np.int32(3), tokens=np.uint8(4), reason="stop", seconds=np.float32(0.5))
    for seconds in (-1.0, float("nan"), float("inf")):
        buffer.trace.leg("a", None, model_step=None, tokens=0, reason="abort", seconds=seconds)
    for wrong in ({"tokens": 1.5}, {"tokens": True}, {"tokens": -1}, {"model_step": "4"}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} must be"):
            buffer.trace.leg(1, 2, **{"model_step": 3, "tokens": 4, "reason": "stop", "seconds": 0.5, **wrong})
    with pytest.raises(ValueError, match="model_step must be at least 0"):
        buffer.trace.weight_sync(-1)
    buffer.sync.close()
    legs = [line["leg"] for line in lines_of(path, "leg")]
    assert legs == [
        [1, 2, 3, 4, 0.5],
        ["a", None, None, 0, 0.0, "abort"],
        ["a", None, None, 0, 0.0, "abort"],
        ["a", None, None, 0, 1e11, "abort"],
    ]
    assert read_history(path).leg_tokens == {"stop": 4, "abort": 0}


def test_a_request_that_is_cancelled_has_its_line(buffer, path):
    class Engine:
        def __init__(self):
            self.aborted = asyncio.Event()

        async def generate(self, tokens, sampling_params, request_id):
            await self.aborted.wait()
            return EngineOutput([1, 2], "abort")

        async def abort(self, request_id):
            self.aborted.set()

    async def main():
        client = PartialRolloutClient(Engine(), lambda: 0, trace=buffer.trace)
        state = RolloutState(group_id=5, rollout_id=50, prompt_ids=[1], sample_params={"max_tokens": 9})
        generating = asyncio.ensure_future(client.generate(state, enable_partial_rollout=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        generating.cancel()
        await asyncio.wait([generating])

    asyncio.run(main())
    buffer.sync.close()
    (leg,) = lines_of(path, "leg")
    del leg["leg"][4]
    assert leg["leg"] == [5, 50, 0, 2, "abort"]


def test_a_manager_adds_weight_syncs(path):
    async def main():
        strategy = DisaggAsyncProduceStrategyConfig(max_staleness=1).build()
        buffer = ReplayBuffer(strategy.rule, trace=path)
        manager = DisaggAgentLoopManager(TaskSpec("t", None, None, strategy), buffer)
        await manager.continue_produce(3)
        await manager.shutdown()
        await buffer.close()

    asyncio.run(main())
    assert lines_of(path, "sync") == [{"op": "sync", "model_step": 3}]
