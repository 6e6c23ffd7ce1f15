"""What a buffer saves is what it resumes."""

import asyncio
import json
import threading

import numpy as np
import pytest
from rollouts import balance, group, state

import pystale.saving
from pystale import CheckpointError, ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status

C, A, E, F = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED


def make(**more):
    return ReplayBuffer(**{"rule": StalenessRule(3, 1), "tail_batch_trigger_size": 0, **more})


def filled(**more):
    buffer = make(**more)
    b = buffer.sync
    for number, (steps, status) in enumerate([([5], C), ([4, 5], C), ([5, 5], A), ([3], C), ([5], F), ([5], C)]):
        b.put(group(steps, [5], status=status, group_id=f"g{number}"), "ab"[number % 2], train_step=6)
    b.refresh_staleness(7)
    b.get(1, "a", A)
    return buffer


def picture(buffer):
    """Everything a user can see of a buffer, taking it apart."""
    b = buffer.sync
    seen = {"len": len(buffer)}
    for task in ("a", "b"):
        for status in Status:
            for members in b.take_batch({task: b.count(task, status)}, status=status)[task]:
                for m in members:
                    fields = {f: getattr(m, f) for f in RolloutState.__dataclass_fields__}
                    fields["response_model_steps"] = list(m.response_model_steps)
                    seen.setdefault((task, status), []).append(fields)
    return seen


def test_a_resumed_buffer_hands_out_the_same_in_the_same_order(tmp_path):
    buffer = filled()
    buffer.sync.save(tmp_path / "checkpoint")
    other = make()
    other.sync.resume(tmp_path / "checkpoint")
    before, after = buffer.sync.ledger(), other.sync.ledger()
    assert after["discarded"].pop("lost") == before["in_flight"]
    before.update(in_flight=0)
    assert after == before
    assert other.sync.refresh_staleness(7) == {"a": 0, "b": 0}
    assert picture(other) == picture(buffer)


def test_a_group_in_flight_at_the_save_keeps_arrival_and_rerolls(tmp_path):
    buffer = make(order="fifo")
    first, second = group([5], group_id=1), group([5], group_id=2)
    first[0].status = E
    for members in (first, second):
        buffer.sync.put(members, train_step=6)
    buffer.sync.get(1, status=E)
    buffer.sync.save(tmp_path)
    other = make(order="fifo")
    other.sync.resume(tmp_path)
    again = group([6], group_id=1)
    other.sync.put(again, train_step=7)
    assert again[0].rerolls == 1
    assert [g[0].group_id for g in other.sync.take_batch({"default": 2})["default"]] == [1, 2]


def test_new_groups_after_a_resume_get_ids_and_places_of_their_own(tmp_path):
    buffer = make(order="fifo")
    for _ in range(3):
        buffer.sync.put(group([5]), train_step=6)
    buffer.sync.save(tmp_path)
    other = make(order="fifo")
    other.sync.resume(tmp_path)
    members = group([5])
    other.sync.put(members, train_step=6)
    ids = [g[0].group_id for g in other.sync.take_batch({"default": 4})["default"]]
    assert len(set(ids)) == 4
    assert ids[-1] == members[0].group_id


def test_another_rule_is_allowed_and_deadlines_are_made_anew(tmp_path):
    buffer = make(rule=StalenessRule(9))
    buffer.sync.put(group([3]), train_step=6)
    buffer.sync.save(tmp_path)
    strict = make(rule=StalenessRule(2))
    strict.sync.resume(tmp_path)
    assert strict.sync.count() == 1
    assert strict.sync.refresh_staleness(6) == {"default": 0}
    assert strict.sync.refresh_staleness(7) == {"default": 1}


def test_resume_is_refused_where_it_could_mix_things_up(tmp_path):
    filled().sync.save(tmp_path)
    with pytest.raises(ValueError, match="order"):
        make(order="fifo").sync.resume(tmp_path)
    with pytest.raises(ValueError, match="task 'b' has no rule"):
        make(rule={"a": StalenessRule(2, 0)}, tail_batch_trigger_size={"a": 0}).sync.resume(tmp_path)
    used = make()
    used.sync.put(group([5]), train_step=6)
    with pytest.raises(ValueError, match="never held a group"):
        used.sync.resume(tmp_path)
    assert len(used) == 1


def test_the_state_saved_is_the_state_at_the_call(tmp_path, monkeypatch):
    """While the save is held up, every kind of change happens to groups it has not written yet."""
    buffer = make(rule=StalenessRule(2, 0))
    for number, status in enumerate([C, C, A, C, C]):
        members = group([5, 5], group_id=number, status=status)
        if number == 4:
            members[0].response_model_steps = [4, 5]
        buffer.sync.put(members, train_step=6)
    gate, reached = threading.Event(), threading.Event()
    encode = pystale.saving.encode

    def held_up(record):
        if threading.current_thread() is saver:
            reached.set()
            assert gate.wait(20)
        return encode(record)

    monkeypatch.setattr(pystale.saving, "encode", held_up)
    saver = threading.Thread(target=buffer.sync.save, args=(tmp_path,))
    saver.start()
    assert reached.wait(20)
    b = buffer.sync
    (taken,) = b.take_train_batch({"default": 1}, train_step=6)["default"]
    taken[0].response_ids.append(1)
    (lent,) = b.get(1, status=A)
    lent[0].response_ids.extend([1, 2, 3])
    lent[0].response_model_steps.extend([6, 6, 6])
    b.put(lent, train_step=7)
    b.put(group([6], group_id="new"), train_step=7)
    b.refresh_staleness(8)
    assert b.count(status=E) == 5
    gate.set()
    saver.join(20)

    other = make(rule=StalenessRule(2, 0))
    other.sync.resume(tmp_path)
    assert (other.sync.count(), other.sync.count(status=A), other.sync.count(status=E)) == (4, 1, 0)
    assert other.sync.ledger()["produced"] == 10
    groups = [
        g for s in (C, A) for g in other.sync.take_batch({"default": other.sync.count(status=s)}, status=s)["default"]
    ]
    assert sorted(g[0].group_id for g in groups) == [0, 1, 2, 3, 4]
    assert all(g[0].response_ids == [100, 101] and g[0].response_mask is None for g in groups)


def test_saving_again_replaces_the_checkpoint(tmp_path):
    buffer = make()
    for n in range(1, 4):
        buffer.sync.put(group([5]), train_step=6)
        buffer.sync.save(tmp_path)
        other = make()
        other.sync.resume(tmp_path)
        assert len(other) == n


def test_a_payload_that_cannot_be_written_is_named_and_the_old_checkpoint_stays(tmp_path):
    buffer = make()
    buffer.sync.put(group([5]), train_step=6)
    buffer.sync.save(tmp_path)
    files = sorted(p.name for p in tmp_path.iterdir())
    buffer.sync.put([state([5], routed_experts=object())], train_step=6)
    with pytest.raises(TypeError, match=r"routed_experts.*object"):
        buffer.sync.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    other = make()
    other.sync.resume(tmp_path)
    assert len(other) == 1


def test_a_payload_that_cannot_be_written_fails_the_save_and_not_what_runs_meanwhile(tmp_path, monkeypatch):
    buffer = make()
    bad = [state([5], routed_experts=object())]
    buffer.sync.put(bad, train_step=6)
    job = buffer._start_save(tmp_path)
    assert buffer.sync.take_train_batch({"default": 1}, train_step=6)["default"] == [bad]
    with pytest.raises(TypeError, match="routed_experts"):
        buffer._run_save(job)
    assert buffer._saves == []


def test_a_cancelled_save_leaves_no_trace(tmp_path):
    async def main():
        buffer = make()
        for _ in range(50):
            await buffer.put(group([5] * 100), train_step=6)
        save = asyncio.create_task(buffer.save(tmp_path / "c"))
        await asyncio.sleep(0)
        save.cancel()
        with pytest.raises(asyncio.CancelledError):
            await save
        assert buffer._saves == []
        assert len(buffer) == 50
        await buffer.save(tmp_path / "c")
        other = make()
        await other.resume(tmp_path / "c")
        assert len(other) == 50

    asyncio.run(main())


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.update(order=None),
        lambda d: d.pop("ledger"),
        lambda d: d["ledger"].update(stored=99),
        lambda d: d["ledger"].update(trained=-1),
        lambda d: d["ledger"].update(discarded={"stolen": 1}),
        lambda d: d.update(arrivals="1"),
        lambda d: d.update(train_step=0),
        lambda d: d.update(handed_out=3),
        lambda d: d["handed_out"].append({"task": "a"}),
        lambda d: d["handed_out"].extend(d["handed_out"]),
        lambda d: d["handed_out"][0].update(task=7),
        lambda d: d["handed_out"][0].update(group_id=[1]),
    ],
)
def test_a_document_that_contradicts_itself_loads_nothing(tmp_path, damage):
    filled().sync.save(tmp_path)
    document, groups = pystale.saving.read_checkpoint(tmp_path)
    document = json.loads(json.dumps(document))
    damage(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pystale.saving, "read_checkpoint", lambda directory: (document, groups))
        buffer = make()
        with pytest.raises(ValueError):  # noqa: PT011
            buffer.sync.resume(tmp_path)
    assert (len(buffer), buffer.ledger()["produced"]) == (0, 0)
    buffer.sync.resume(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda h: h.update(task=3),
        lambda h: h.update(arrival=-1),
        lambda h: h.update(arrival=True),
        lambda h: h.update(key="x"),
        lambda h: h.update(key=2**63),
        lambda h: h.update(rerolls=None),
        lambda h: h.update(status="gone"),
        lambda h: h.update(status=None),
        lambda h: h.update(status="EXPIRED"),
        lambda h: h.update(group_id={}),
        lambda h: h.update(group_id="g0"),
    ],
)
def test_a_group_that_contradicts_itself_loads_nothing(tmp_path, damage):
    filled().sync.save(tmp_path)
    document, groups = pystale.saving.read_checkpoint(tmp_path)
    (victim,) = [i for i, (h, _) in enumerate(groups) if h["group_id"] == "g5"]
    groups = [(json.loads(json.dumps(h)), s) for h, s in groups]
    groups[victim][0]["task"] = "a" if groups[victim][0]["task"] == "a" else groups[victim][0]["task"]
    damage(groups[victim][0])
    if groups[victim][0]["group_id"] == "g0":
        groups[victim][0]["task"] = "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pystale.saving, "read_checkpoint", lambda directory: (document, groups))
        buffer = make()
        with pytest.raises(CheckpointError):
            buffer.sync.resume(tmp_path)
    assert len(buffer) == 0


def test_every_kind_of_payload_comes_back(tmp_path):
    buffer = make()
    member = state([5, 5])
    member.response_ids = np.array([7, 8], dtype=np.int32)
    member.response_model_steps = ModelSteps.from_list([4, 5])
    member.response_mask = np.array([1, 0], dtype=np.uint8)
    member.logprobs = [-0.5, float("-inf")]
    member.mm_info = {"pixels": np.ones((2, 3), dtype=np.float32), "sizes": (1, 2)}
    member.extra_fields = {"nested": [None, True, {"x": 1.5}], 3: "int key"}
    buffer.sync.put([member], train_step=6)
    buffer.sync.save(tmp_path)
    other = make()
    other.sync.resume(tmp_path)
    (again,) = other.sync.take_batch({"default": 1})["default"][0]
    assert again.response_ids.dtype == np.int32
    assert again.response_model_steps.runs() == [(4, 1), (5, 1)]
    assert again.response_mask.tolist() == [1, 0]
    assert again.logprobs == member.logprobs
    np.testing.assert_array_equal(again.mm_info["pixels"], member.mm_info["pixels"])
    assert again.mm_info["sizes"] == (1, 2)
    assert again.extra_fields == member.extra_fields
    assert balance(other.ledger())[0] == balance(other.ledger())[1] == 2


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_ids_of_numpy_are_saved_stored_or_handed_out(tmp_path, kind):
    b = make().sync
    b.put(group([5], group_id=kind(1)), train_step=6)
    b.put(group([4], group_id=kind(2)), train_step=6)
    [handed_out] = b.get(1)
    b.save(tmp_path)
    resumed = make().sync
    resumed.resume(tmp_path)
    resumed.put(handed_out, train_step=6)
    assert [members[0].group_id for members in resumed.get(2)] == [2, 1]


@pytest.mark.parametrize("order", ["stalest_first", "freshest_first", "oldest_prompt_first"])
def test_the_order_of_the_largest_steps_is_resumed(tmp_path, order):
    b = make(order=order).sync
    for step in (3, 2**63 - 1):
        b.put(group([step], group_id=step))
    b.save(tmp_path)
    resumed = make(order=order).sync
    resumed.resume(tmp_path)
    assert [m.group_id for (m,) in resumed.get(2)] == [m.group_id for (m,) in b.get(2)]


def test_a_cancelled_resume_loads_nothing(tmp_path, monkeypatch):
    filled().sync.save(tmp_path)
    reading, going_on, load = threading.Event(), threading.Event(), pystale.saving.load

    def slow(*args):
        reading.set()
        assert going_on.wait(20)
        return load(*args)

    monkeypatch.setattr("pystale.buffer.load", slow)

    async def main():
        buffer = make()
        resume = asyncio.create_task(buffer.resume(tmp_path))
        await asyncio.to_thread(reading.wait, 20)
        resume.cancel()
        await asyncio.sleep(0)
        going_on.set()
        with pytest.raises(asyncio.CancelledError):
            await resume
        return buffer

    buffer = asyncio.run(main())  # its end waits for the threads of the executor
    assert len(buffer) == 0
    buffer.sync.resume(tmp_path)
    assert len(buffer) == 5
