"""What a buffer saves is what it resumes."""

import asyncio
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rollouts import balance, group, state

import pystale.operations
import pystale.saving
from pystale import CheckpointError, ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.checkpoint_reader import read_checkpoint
from pystale.sampler import PromptSampler

FIXTURES = Path(__file__).parent / "fixtures"
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
    assert after == {**before, "stored": before["stored"] + before["in_flight"], "in_flight": 0}
    other.sync.get(1, "a", A)
    assert other.ledger() == before
    assert other.sync.refresh_staleness(7) == {"a": 0, "b": 0}
    assert picture(other) == picture(buffer)


def test_a_group_in_flight_at_the_save_is_handed_out_again_and_keeps_arrival_and_rerolls(tmp_path):
    buffer = make(order="fifo")
    first, second = group([5], group_id=1), group([5], group_id=2)
    first[0].status = E
    for members in (first, second):
        buffer.sync.put(members, train_step=6)
    buffer.sync.get(1, status=E)
    buffer.sync.save(tmp_path)
    other = make(order="fifo", max_rerolls=1)
    assert other.sync.resume(tmp_path).in_flight == {"default": [1]}
    (again,) = other.sync.get(1, status=E)
    assert again[0].rerolls == 1
    again[0].response_ids, again[0].response_model_steps, again[0].status = [7], [6], C
    other.sync.put(again, train_step=7)
    assert [g[0].group_id for g in other.sync.take_batch({"default": 2})["default"]] == [1, 2]


def test_a_group_in_flight_is_saved_as_it_was_handed_out(tmp_path):
    buffer = make()
    members = group([5, 5], [5], status=A, extra_fields={"turns": [1]}, response_mask=[1, 0])
    members[1].response_mask = np.array([1], dtype=np.uint8)
    buffer.sync.put(members, train_step=6)
    (lent,) = buffer.sync.get(1, status=A)
    lent[0].response_ids.append(9)
    lent[0].response_mask[0] = 0
    lent[1].response_mask[0] = 0
    lent[0].extra_fields["turns"].append(2)
    lent[1].reward = 1.0
    lent[1].status = C
    buffer.sync.save(tmp_path)
    other = make()
    other.sync.resume(tmp_path)
    (again,) = other.sync.get(1, status=A)
    assert [m.response_ids for m in again] == [[100, 101], [100]]
    assert [list(m.response_mask) for m in again] == [[1, 0], [1]]
    assert (again[0].extra_fields, again[1].reward, again[1].status) == ({"turns": [1]}, None, A)


def test_a_save_in_the_middle_of_a_take_or_a_get_holds_the_groups(tmp_path, monkeypatch):
    buffer = make()
    for number, status in enumerate([C, A]):
        buffer.sync.put(group([5], group_id=number, status=status), train_step=6)
    genuine_copied, genuine_masks = pystale.operations.copied, pystale.operations.masks_of

    def save(name, then):
        def saving(*args):
            buffer.sync.save(tmp_path / name)
            return then(*args)

        return saving

    monkeypatch.setattr(pystale.operations, "copied", save("get", genuine_copied))
    monkeypatch.setattr(pystale.operations, "masks_of", save("take", genuine_masks))
    buffer.sync.get(1, status=A)
    buffer.sync.take_train_batch({"default": 1}, train_step=6)
    for name in ("get", "take"):
        other = make()
        other.sync.resume(tmp_path / name)
        assert (other.sync.count(), other.sync.count(status=A)) == (1, 1)
        assert balance(other.ledger()) == (2, 2)


def test_what_is_kept_with_a_checkpoint_comes_back(tmp_path):
    buffer = make()
    buffer.sync.save(tmp_path, extra={"sampler": {"drawn": 3}, "step": 7, "pair": (1, None)})
    assert make().sync.resume(tmp_path).extra == {"sampler": {"drawn": 3}, "step": 7, "pair": (1, None)}
    with pytest.raises(TypeError, match=r"extra.*ndarray"):
        buffer.sync.save(tmp_path, extra={"weights": np.zeros(3)})
    with pytest.raises(TypeError, match="extra must be a mapping"):
        buffer.sync.save(tmp_path, extra=[1])
    assert make().sync.resume(tmp_path).extra["step"] == 7


def test_prompts_over_a_resume(tmp_path):
    """Ten prompts drawn: four trained, one discarded, three stored, two nobody has put yet."""
    buffer = make(rule=StalenessRule(0), tail_batch_trigger_size=-1)
    sampler = PromptSampler(range(100), buffer, group_size=1)

    async def main():
        groups = [await sampler.sample("default", [A]) for _ in range(10)]
        for n in (0, 1, 2, 3, 4):
            await put(buffer, groups[n], [3 if n == 2 else 4], C, 4 if n == 2 else 5)
        await buffer.take_train_batch({"default": 4}, train_step=5)
        assert len(buffer) == 0
        for n in (5, 6, 7):
            await put(buffer, groups[n], [5], A if n == 7 else C, 6)
        await buffer.save(tmp_path, extra={"sampler": sampler.state_dict(in_flight=[8, 9])})

        other = make(rule=StalenessRule(0), tail_batch_trigger_size=-1)
        again = PromptSampler(range(100), other, group_size=1)
        again.load_state_dict((await other.resume(tmp_path)).extra["sampler"])
        assert (await other.count(), await other.count(status=A)) == (2, 1)
        drawn = [(await again.sample("default", [A]))[0] for _ in range(4)]
        assert [(s.group_id, s.status, s.message) for s in drawn] == [
            (7, A, 7), (8, Status.INIT, 8), (9, Status.INIT, 9), (10, Status.INIT, 10)
        ]  # fmt: skip
        batch = await other.take_train_batch({"default": 2}, train_step=6)
        assert [g[0].group_id for g in batch["default"]] == [5, 6]
        assert balance(buffer.ledger()) == (8, 8)

    async def put(buffer, members, steps, status, train_step):
        members[0].response_ids, members[0].response_model_steps, members[0].status = [1], steps, status
        await buffer.put(members, train_step=train_step)

    asyncio.run(main())


class Handle:
    """Something outside the process that a state refers to."""

    def __init__(self, name):
        self.name = name


def dump_handle(value):
    return {"name": value.name, "shape": (2, 3)} if isinstance(value, Handle) else None


def test_external_references_go_through_the_hooks(tmp_path):
    hooks = {"dump_ref": dump_handle, "load_ref": lambda dumped: Handle(dumped["name"])}
    buffer = make(**hooks)
    shared = Handle("experts")
    first = group([5], [5], routed_experts=shared, mm_info={"images": [Handle("cat"), Handle("dog")]})
    lent = group([5], status=A, reward=Handle("judge"))
    buffer.sync.put(first, train_step=6)
    buffer.sync.put(lent, train_step=6)
    buffer.sync.get(1, status=A)
    buffer.sync.save(tmp_path)
    other = make(**hooks)
    other.sync.resume(tmp_path)
    (members,) = other.sync.take_batch({"default": 1})["default"]
    assert members[0].routed_experts is members[1].routed_experts
    assert members[0].routed_experts.name == "experts"
    assert [h.name for h in members[1].mm_info["images"]] == ["cat", "dog"]
    assert other.sync.get(1, status=A)[0][0].reward.name == "judge"
    with pytest.raises(ValueError, match="load_ref"):
        make().sync.resume(tmp_path)


def test_the_committed_checkpoint_of_schema_version_2_is_read():
    buffer = make(dump_ref=dump_handle, load_ref=lambda dumped: Handle(dumped["name"]))
    resumed = buffer.sync.resume(FIXTURES / "checkpoint_v2")
    assert (resumed.extra, resumed.in_flight) == ({"step": 6}, {"default": [2]})
    ((lent,),) = buffer.sync.get(1, status=A)
    assert (lent.reward.name, lent.response_ids) == ("judge", [100, 101])
    (members,) = buffer.sync.take_train_batch({"default": 1}, train_step=6)["default"]
    assert members[0].routed_experts is members[1].routed_experts
    assert members[0].routed_experts.name == "experts"


def test_what_version_1_says_of_groups_in_flight_is_their_place_alone(tmp_path):
    """Such a checkpoint has their arrival and re-rolls, for when they are put, and books their tokens as lost."""
    filled().sync.save(tmp_path)
    document, groups = read_checkpoint(tmp_path)
    (lent,) = [h for h, _ in groups if h.get("in_flight")]
    groups = [(h, s) for h, s in groups if h is not lent]
    place = {name: lent[name] for name in ("task", "group_id", "arrival", "key", "rerolls")}
    document.update(handed_out=[place])
    for name in ("id", "extra"):
        del document[name]
    document["ledger"]["stored"] -= 3
    document["ledger"]["in_flight"] += 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pystale.saving, "read_checkpoint_into", lambda directory, fill, load_ref: fill(document, iter(groups))
        )
        buffer = make()
        assert buffer.sync.resume(tmp_path).in_flight == {}
    assert buffer.ledger()["discarded"]["lost"] == 3
    buffer.sync.save(tmp_path)  # and keeps it over another checkpoint
    again = make()
    again.sync.resume(tmp_path)
    again.sync.put(group([5], group_id=lent["group_id"], status=A), "a", train_step=7)
    (record,) = [r for r in again.operations.store.records.values() if r.group_id == lent["group_id"]]
    assert record.arrival == lent["arrival"]
    assert balance(again.ledger())[0] == balance(again.ledger())[1]


@pytest.mark.parametrize(
    ("dump_ref", "said"),
    [
        (lambda value: None, r"mm_info\['image'\] of rollout_id \d+ is a .*Handle, which dump_ref gave nothing"),
        (lambda value: {"x": [value]}, r"mm_info\['image'\] of rollout_id \d+ .*dump_ref made of it\['x'\]\[0\] is a"),
    ],
)
def test_a_reference_the_hook_cannot_write_is_named(tmp_path, dump_ref, said):
    buffer = make(dump_ref=dump_ref, load_ref=Handle)
    buffer.sync.put(group([5], mm_info={"image": Handle("x")}), train_step=6)
    with pytest.raises(TypeError, match=said):
        buffer.sync.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_hook_is_never_called_under_the_mutex(tmp_path, monkeypatch):
    def dump_ref(value):
        assert len(buffer) >= 0  # takes the mutex
        return value.name

    buffer = make(dump_ref=dump_ref, load_ref=Handle)
    for _ in range(3):
        buffer.sync.put([state([5], routed_experts=Handle("x"))], train_step=6)
    job = buffer.operations.start_save(tmp_path)
    buffer.sync.take_batch({"default": 2})
    buffer.operations.run_save(job)
    other = make(dump_ref=dump_ref, load_ref=Handle)
    other.sync.resume(tmp_path)
    assert len(other) == 3


def test_hooks_come_together():
    with pytest.raises(ValueError, match="come together"):
        make(dump_ref=dump_handle)
    with pytest.raises(TypeError, match="load_ref must be callable"):
        make(dump_ref=dump_handle, load_ref=3)


def test_a_group_of_foreign_states_in_flight_fails_the_save(tmp_path):
    buffer = make()
    foreign = SimpleNamespace(
        group_id=1, status="aborted", response_ids=[1], response_model_steps=[5], response_mask=None, logprobs=None,
        prompt_ids=[1], seq_staleness=0,
    )  # fmt: skip
    buffer.sync.put([foreign], train_step=6)
    (lent,) = buffer.sync.get(1, status=A)
    with pytest.raises(TypeError, match=r"group 1, which is handed out, is a SimpleNamespace"):
        buffer.sync.save(tmp_path)
    lent[0].response_ids.append(2)
    lent[0].response_model_steps.append(5)
    buffer.sync.put(lent, train_step=6)
    assert buffer.ledger()["discarded"] == {}


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


@pytest.mark.threads
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

    def held_up(record, dump_ref):
        if threading.current_thread() is saver:
            reached.set()
            assert gate.wait(20)
        return encode(record, dump_ref)

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
    job = buffer.operations.start_save(tmp_path)
    assert buffer.sync.take_train_batch({"default": 1}, train_step=6)["default"] == [bad]
    with pytest.raises(TypeError, match="routed_experts"):
        buffer.operations.run_save(job)
    assert buffer.operations.saves == []


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
        assert buffer.operations.saves == []
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
    document, groups = read_checkpoint(tmp_path)
    document = json.loads(json.dumps(document))
    document["handed_out"].append({"task": "a", "group_id": "earlier", "arrival": 9, "key": 1, "rerolls": 0})
    damage(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pystale.saving, "read_checkpoint_into", lambda directory, fill, load_ref: fill(document, iter(groups))
        )
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
    document, groups = read_checkpoint(tmp_path)
    (victim,) = [i for i, (h, _) in enumerate(groups) if h["group_id"] == "g5"]
    groups = [(json.loads(json.dumps(h)), s) for h, s in groups]
    groups[victim][0]["task"] = "a" if groups[victim][0]["task"] == "a" else groups[victim][0]["task"]
    damage(groups[victim][0])
    if groups[victim][0]["group_id"] == "g0":
        groups[victim][0]["task"] = "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pystale.saving, "read_checkpoint_into", lambda directory, fill, load_ref: fill(document, iter(groups))
        )
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
    b.get(1)
    b.save(tmp_path)
    resumed = make().sync
    assert resumed.resume(tmp_path).in_flight == {"default": [2]}
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

    def slow(*args, **more):
        reading.set()
        assert going_on.wait(20)
        return load(*args, **more)

    monkeypatch.setattr("pystale.operations.load", slow)

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
    assert len(buffer) == 6


@pytest.mark.parametrize("resumes", [False, True])
def test_a_group_stays_agentic_when_the_member_with_training_tensors_was_reset(tmp_path, resumes):
    """Its other member has no fresh token, which is none of the token rule's business; nor is it after a resume."""
    buffer = ReplayBuffer(StalenessRule(2, 0), tail_batch_trigger_size=0)
    buffer.sync.put([state([1], group_id=1, input_ids=[1]), state([3, 3], group_id=1)], train_step=4)
    assert buffer.sync.refresh_staleness(5) == {"default": 1}
    if resumes:
        for number in range(2):  # also what was saved by a buffer that was resumed itself
            buffer.sync.save(tmp_path / str(number))
            buffer = ReplayBuffer(StalenessRule(2, 0), tail_batch_trigger_size=0)
            buffer.sync.resume(tmp_path / str(number))
    assert buffer.sync.refresh_staleness(5) == {"default": 0}
    assert buffer.ledger()["discarded"] == {"expired": 1}
    ((reset, kept),) = buffer.sync.get(1, status=Status.EXPIRED)
    assert (reset.status, kept.status) == (Status.EXPIRED, Status.COMPLETED)
