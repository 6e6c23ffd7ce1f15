"""What a buffer with a journal has answered for survives a crash, exactly and once."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import struct
import threading
import warnings
import zlib
from pathlib import Path

import pytest
from rollouts import balance, group, state
from safetensors.numpy import load as load_tensors

import pystale.journal
import pystale.operations
from pystale import CheckpointError, ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.sampler import PromptSampler
from pystale.saving import encode
from pystale.waiting import IN_EVENT_LOOP

C, A, E, F = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED
FIXTURE = Path(__file__).parent / "fixtures" / "journal_v1"


def make(directory, **more):
    return ReplayBuffer(
        **{"rule": StalenessRule(3, 1), "tail_batch_trigger_size": 0, "journal": directory, "journal_delay": 0, **more}
    )


def crashed(buffer, tmp_path, name="crashed"):
    """Directory as it would be after a crash now: a copy, for the original has a living user."""
    copy = tmp_path / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(buffer.operations.journal.directory, copy)
    return copy


def picture(buffer):
    """All a store holds, what is handed out where it was; by arrival."""
    store = buffer.operations.store
    seen = {"train_step": store.train_step, "arrivals": store.arrivals, "own": store.own_group_ids}
    seen["left_out"] = buffer.report().left_out
    for record in [*store.records.values(), *store.tickets.values()]:
        content = json.loads(encode(record, None).line)
        content["header"].pop("in_flight", None)
        content["fields"].pop("seq_staleness", None)  # written anew whenever a group is handed out
        seen[record.arrival] = content, encode(record, None).entries
    ledger = buffer.ledger()
    ledger["stored"] += ledger.pop("in_flight")
    assert ledger["discarded"] == {reason: n for reason, n in ledger["discarded"].items() if n}
    return seen, {**ledger, "in_flight": 0}


def finish(members, step, tokens=1):
    for m in members:
        if m.status is not C:
            m.response_ids = [*(m.response_ids or []), *range(tokens)]
            m.response_model_steps = [*(m.response_model_steps or []), *[step] * tokens]
            m.status = C
    return members


# What comes back


def test_a_put_that_returned_is_on_disk(tmp_path):
    buffer = make(tmp_path / "j")
    members = [state([5, 5], mm_info={"x": b"abc"}), state([4])]
    members[1].response_model_steps = ModelSteps.from_list([4])
    assert buffer.sync.put(members, train_step=6) is C
    other = make(crashed(buffer, tmp_path))
    resumed = other.sync.resume(None)
    assert picture(other) == picture(buffer)
    assert resumed.finished == {"default": [members[0].group_id]}
    (again,) = other.sync.take_batch({"default": 1})["default"]
    assert again[0].mm_info == {"x": b"abc"}
    assert again[1].response_model_steps.runs() == [(4, 1)]


def test_steps_are_in_the_journal_as_they_were_stamped(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put([RolloutState(response_ids=[1, 2], status=C)], model_step=5, train_step=6)
    other = make(crashed(buffer, tmp_path))
    other.sync.resume(None)
    assert picture(other) == picture(buffer)
    assert list(other.sync.take_batch({"default": 1})["default"][0][0].response_model_steps) == [5, 5]


@pytest.mark.parametrize("mode", [{}, {"group_mode": "members"}], ids=["all", "members"])
@pytest.mark.parametrize("retries", [-1, 0])
def test_playing_back_is_exact_whatever_happened(tmp_path, monkeypatch, rng, retries, mode):
    """Random operations and checkpoints; after each of many, a crash is played back, under the same rule or another."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    rules = {"rule": StalenessRule(1, 0), "max_rerolls": 1, "tail_batch_trigger_size": retries, **mode}
    warned = retries < 0 and not mode
    with pytest.warns(UserWarning, match="discarded for good") if warned else pytest.MonkeyPatch.context():
        buffer = make(tmp_path / "j", **rules)
    b, now, lent, saved = buffer.sync, 1, [], False
    for number in range(120):
        choice = rng.integers(12)
        now += int(rng.random() < 0.15)
        if choice < 4 or not len(buffer):
            length = int(rng.integers(1, 4))
            members = group(*[[int(s) for s in rng.integers(max(0, now - 2), now, length)] for _ in range(2)])
            for m in members:
                m.status = [C, C, C, A, F][int(rng.integers(5))]
                m.group_id = None if number % 3 else f"g{number}"
            b.put(members, "ab"[number % 2], train_step=now)
        elif choice < 6:
            b.refresh_staleness(now)
        elif choice < 8:
            b.take_train_batch({"ab"[number % 2]: 1}, train_step=now)
        elif choice < 9:
            b.take_batch({"a": 1}, status=A)
        elif choice < 10:
            lent += b.get(1, "ab"[number % 2], [A, E, C, F][int(rng.integers(4))])
        elif lent and choice < 11:
            members = lent.pop(int(rng.integers(len(lent))))
            what = rng.integers(4)
            if what == 0:
                b.settle([members], "trained")
            elif what == 1:
                b.reject(members, members[0].task_name, "failed")
            else:
                if what == 2:
                    members[0].response_ids = members[0].response_model_steps = members[0].logprobs = None
                    members[0].status = E
                else:
                    finish(members, now - 1)
                b.put(members, members[0].task_name, train_step=now)
        elif rng.random() < 0.3:
            b.save(tmp_path / "checkpoint", extra={"n": number})
            saved = True
        else:
            b.reject(group([5]), "a", "filtered")
        if number % 6 == 0:
            b.flush()  # nobody waits for a new T that moved nothing
            other = make(
                crashed(buffer, tmp_path), tail_batch_trigger_size=0, rule=StalenessRule(number % 5), max_rerolls=None
            )
            other.sync.resume(tmp_path / "checkpoint" if saved else None)
            assert picture(other) == picture(buffer)
            assert balance(other.ledger())[0] == balance(other.ledger())[1]
            other.sync.close()


def test_orders_survive(tmp_path):
    buffer = make(tmp_path / "j", order="freshest_first", rule=StalenessRule(9))
    for number, step in enumerate([3, 5, 4, 5]):
        buffer.sync.put(group([step], group_id=number), train_step=6)
    other = make(crashed(buffer, tmp_path), order="freshest_first")
    other.sync.resume(None)
    assert [g[0].group_id for g in other.sync.take_batch({"default": 4})["default"]] == [1, 3, 2, 0]


def test_a_crash_after_a_crash(tmp_path):
    directory, expected = tmp_path / "0", set()
    for n in range(4):
        buffer = make(directory)
        if n:
            buffer.sync.resume(tmp_path / "checkpoint")
        buffer.sync.put(group([5], group_id=2 * n), train_step=6)
        if n == 2:
            buffer.sync.save(tmp_path / "checkpoint")
        buffer.sync.put(group([5], group_id=2 * n + 1), train_step=6)
        expected |= {2 * n, 2 * n + 1}
        directory = crashed(buffer, tmp_path, str(n + 1))
    last = make(directory)
    assert last.sync.resume(tmp_path / "checkpoint").finished == {"default": [5, 6, 7]}
    groups = last.sync.take_batch({"default": len(last)})["default"]
    assert {g[0].group_id for g in groups} == expected


def test_what_is_discarded_is_not_brought_back_by_a_milder_rule(tmp_path):
    with pytest.warns(UserWarning, match="discarded for good"):
        buffer = make(tmp_path / "j", rule=StalenessRule(0, 0), tail_batch_trigger_size=-1)
    buffer.sync.put(group([5], group_id=1), train_step=6)
    assert buffer.sync.refresh_staleness(7) == {"default": 1}
    other = make(crashed(buffer, tmp_path), rule=StalenessRule(9))
    assert other.sync.resume(None).finished == {"default": [1]}
    assert len(other) == 0
    assert other.ledger()["discarded"] == {"expired": 1}


def test_a_group_discarded_at_put_came_and_is_not_stored(tmp_path):
    with pytest.warns(UserWarning, match="discarded for good"):
        buffer = make(tmp_path / "j", rule=StalenessRule(0, 0), tail_batch_trigger_size=-1)
    assert buffer.sync.put(group([1], group_id=7), train_step=6) is E
    buffer.sync.reject(group([5], group_id=8), outcome="failed")
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(None).finished == {"default": [7, 8]}
    assert picture(other) == picture(buffer)


def test_a_settled_group_is_on_disk_after_a_flush(tmp_path):
    async def main():
        buffer = make(tmp_path / "j")
        await buffer.put(group([5], status=A, group_id=1), train_step=6)
        buffer.settle(await buffer.get(1, status=A), "trained")
        await buffer.flush()
        other = make(crashed(buffer, tmp_path))
        await other.resume(None)
        assert len(other) == 0
        assert other.ledger()["trained"] == 1

    asyncio.run(main())


def test_takes_since_the_checkpoint_are_named_and_can_be_undone(tmp_path):
    buffer = make(tmp_path / "j")
    for number in range(6):
        buffer.sync.put(group([5, -1], group_id=number), train_step=6)
    buffer.sync.take_train_batch({"default": 1}, train_step=6)
    buffer.sync.save(tmp_path / "checkpoint")
    before = picture(buffer)
    taken = buffer.sync.take_train_batch({"default": 2}, train_step=6)["default"]
    assert taken[0][0].response_mask.tolist() == [1, 0]
    buffer.sync.put(group([5], group_id=1), train_step=6)  # the prompt comes again
    for name in ("first", "second"):
        final = make(crashed(buffer, tmp_path, name))
        assert final.sync.resume(tmp_path / "checkpoint").taken == {"default": [1, 2]}
        assert picture(final) == picture(buffer)
        final.sync.close()
    undone = make(tmp_path / "first")
    undone.sync.resume(tmp_path / "checkpoint", undo_takes=True)
    assert undone.sync.count() == 5
    assert undone.ledger()["trained"] == 2
    assert balance(undone.ledger()) == (13, 13)
    seen, old = picture(undone)[0], before[0]
    assert {a: seen[a] for a in (2, 3, 4, 5)} == {a: old[a] for a in (2, 3, 4, 5)}
    undone.sync.put(group([5], group_id="later"), train_step=6)
    again = make(crashed(undone, tmp_path, "third"))
    assert again.sync.resume(tmp_path / "checkpoint").taken == {}
    assert picture(again) == picture(undone)


@pytest.mark.parametrize("kept", range(4))
def test_checkpoints_with_nothing_between_them_leave_no_gap(tmp_path, kept):
    """Every checkpoint can be gone on from with the journal as it is when a later one has not got to its place."""
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=0), train_step=6)
    for number in range(4):
        # As a save that is killed before its checkpoint is in place: the journal has rotated, and nothing is deleted.
        job = buffer.operations.start_save(tmp_path / "killed")
        if number == kept:
            buffer.sync.save(tmp_path / "checkpoint")
        buffer.operations.saves.remove(job)
        if number % 2:
            buffer.sync.put(group([5], group_id=number), train_step=6)
    final = make(crashed(buffer, tmp_path, "after"))
    final.sync.resume(tmp_path / "checkpoint")
    assert picture(final) == picture(buffer)


@pytest.mark.parametrize("given_back", [False, True])
def test_a_batch_on_its_way_at_the_checkpoint_is_named(tmp_path, given_back):
    buffer = make(tmp_path / "j")
    for number in range(4):
        buffer.sync.put(group([5], group_id=number), train_step=6)
    buffer.sync.take_train_batch({"default": 1}, train_step=6)
    claim, _ = buffer.operations.claim_train_batch({"default": 2}, 6)  # booked, and its caller does not have it yet
    buffer.sync.save(tmp_path / "checkpoint")
    if given_back:
        claim.take_back(claim)
    else:
        assert asyncio.run(claim.hand_over(IN_EVENT_LOOP)) is claim.batch
    buffer.sync.flush()
    final = make(crashed(buffer, tmp_path, "after"))
    assert final.sync.resume(tmp_path / "checkpoint").taken == ({} if given_back else {"default": [1, 2]})
    assert picture(final) == picture(buffer)
    buffer.sync.save(tmp_path / "later")
    final.sync.close()
    final = make(crashed(buffer, tmp_path, "later still"))
    assert final.sync.resume(tmp_path / "later").taken == {}


def test_a_sampler_goes_on_behind_what_the_journal_knows(tmp_path):
    async def main():
        buffer = make(tmp_path / "j")
        sampler = PromptSampler(range(50), buffer, group_size=1)
        groups = [await sampler.sample("default", []) for _ in range(4)]
        await buffer.put(finish(set_empty(groups[0]), 5), train_step=6)
        await buffer.save(tmp_path / "checkpoint", extra={"sampler": sampler.state_dict(in_flight=[1, 2, 3])})
        groups += [await sampler.sample("default", []) for _ in range(4)]
        for n in (2, 5, 6):
            await buffer.put(finish(set_empty(groups[n]), 5), train_step=6)
        await buffer.reject(groups[3], outcome="failed")
        other = make(crashed(buffer, tmp_path))
        resumed = await other.resume(tmp_path / "checkpoint")
        again = PromptSampler(range(50), other, group_size=1)
        again.load_state_dict(resumed.extra["sampler"], resumed.finished["default"])
        assert [(await again.sample("default", []))[0].group_id for _ in range(4)] == [1, 4, 7, 8]

    def set_empty(members):
        members[0].response_ids, members[0].response_model_steps = [], []
        return members

    asyncio.run(main())


def test_references_outside_go_through_the_hooks(tmp_path):
    class Handle:
        def __init__(self, name):
            self.name = name

    hooks = {"dump_ref": lambda value: value.name, "load_ref": Handle}
    buffer = make(tmp_path / "j", **hooks)
    buffer.sync.put([state([5], routed_experts=Handle("x"))], train_step=6)
    other = make(crashed(buffer, tmp_path), **hooks)
    other.sync.resume(None)
    assert other.sync.take_batch({"default": 1})["default"][0][0].routed_experts.name == "x"
    other.sync.close()
    with pytest.raises(CheckpointError, match="load_ref"):
        make(tmp_path / "crashed").sync.resume(None)


def test_a_payload_that_cannot_be_written_is_named_before_anything_changes(tmp_path):
    buffer = make(tmp_path / "j")
    members = [state([5], routed_experts=object(), rerolls=1)]
    with pytest.raises(TypeError, match=r"routed_experts of rollout_id \d+ is a object"):
        buffer.sync.put(members, model_step=5, train_step=6)
    assert (len(buffer), buffer.ledger()["produced"], members[0].group_id) == (0, 0, None)
    members[0].routed_experts = None
    buffer.sync.put(members, train_step=6)


# When it is written


class Disk:
    """Stands between a journal and its disk: counts, holds up, and refuses."""

    def __init__(self, monkeypatch):
        self.syncs, self.threads = 0, set()
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.refuse = None
        self.write, self.fdatasync = os.write, os.fdatasync
        monkeypatch.setattr(pystale.journal.os, "write", self.writing)
        monkeypatch.setattr(pystale.journal.os, "fdatasync", self.syncing)

    def writing(self, fd, data):
        if self.refuse is not None and threading.current_thread().name == "pystale-journal":
            self.write(fd, bytes(data[: len(data) // 2]))
            raise self.refuse
        return self.write(fd, data)

    def syncing(self, fd):
        self.reached.set()
        assert self.gate.wait(30)
        self.syncs += 1
        self.threads.add(threading.current_thread())
        self.fdatasync(fd)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_puts_at_one_time_share_a_sync_that_is_not_on_the_loop(tmp_path, disk):
    async def main():
        buffer = make(tmp_path / "j", journal_delay=0.05)
        await asyncio.gather(*(buffer.put(group([5]), train_step=6) for _ in range(64)))
        assert len(buffer) == 64
        return buffer

    buffer = asyncio.run(main())
    assert 1 <= disk.syncs <= 8
    assert threading.main_thread() not in disk.threads
    other = make(crashed(buffer, tmp_path))
    other.sync.resume(None)
    assert picture(other) == picture(buffer)


def test_nothing_is_written_under_the_mutex(tmp_path, disk):
    buffer = make(tmp_path / "j")
    disk.gate.clear()
    putting = threading.Thread(target=buffer.sync.put, args=(group([5], group_id=1),))
    putting.start()
    assert disk.reached.wait(30)
    # The put is not answered yet, and everybody can see the group already.
    assert buffer.sync.count() == 1
    assert putting.is_alive()
    disk.gate.set()
    putting.join(30)
    assert not putting.is_alive()


def test_a_put_cancelled_while_it_waits_stays_put(tmp_path, disk):
    async def main():
        buffer = make(tmp_path / "j")
        disk.gate.clear()
        putting = asyncio.create_task(buffer.put(group([5], group_id=1), train_step=6))
        assert await asyncio.to_thread(disk.reached.wait, 30)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert len(buffer) == 1
        with pytest.raises(ValueError, match="is stored already"):
            await buffer.put(group([5], group_id=1), train_step=6)
        disk.gate.set()
        await buffer.flush()
        other = make(crashed(buffer, tmp_path))
        await other.resume(None)
        assert picture(other) == picture(buffer)

    asyncio.run(main())


def test_a_take_cancelled_while_it_waits_gives_its_groups_back(tmp_path, disk):
    async def main():
        buffer = make(tmp_path / "j")
        for number in range(3):
            await buffer.put(group([5, -1], [3, 5], group_id=number), train_step=6)
        before = picture(buffer)
        disk.gate.clear()
        disk.reached.clear()
        taking = asyncio.create_task(buffer.take_train_batch({"default": 2}, train_step=6))
        assert await asyncio.to_thread(disk.reached.wait, 30)
        waiting = asyncio.create_task(buffer.wait_ready({"default": 3}))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await asyncio.wait_for(waiting, 30)
        assert picture(buffer) == before
        disk.gate.set()
        await buffer.flush()
        other = make(crashed(buffer, tmp_path))
        assert (await other.resume(None)).taken == {}
        assert picture(other) == before
        batch = await buffer.take_train_batch({"default": 3}, train_step=6)
        assert batch.trainable_tokens == 6

    asyncio.run(main())


def test_what_is_released_is_freed_after_its_entry_is_on_disk(tmp_path, disk):
    freed = []

    async def main():
        done = asyncio.Event()

        async def on_release(released):
            freed.append((len(released), disk.syncs))
            done.set()

        buffer = make(tmp_path / "j", on_release=on_release)
        await buffer.put(group([5]), train_step=6)
        disk.gate.clear()
        refreshing = asyncio.create_task(buffer.refresh_staleness(9))
        await asyncio.sleep(0.02)
        assert freed == []
        refreshing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await refreshing
        disk.gate.set()
        await asyncio.wait_for(done.wait(), 30)
        assert freed == [(1, 2)]

    asyncio.run(main())


def test_a_refresh_that_moves_nothing_waits_for_nothing(tmp_path, disk):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5]), train_step=6)
    disk.gate.clear()
    assert buffer.sync.refresh_staleness(7) == {"default": 0}
    disk.gate.set()
    buffer.sync.flush()
    other = make(crashed(buffer, tmp_path))
    other.sync.resume(None)
    assert other.operations.store.train_step == 7


@pytest.mark.threads
def test_many_threads_and_a_crash(tmp_path, monkeypatch):
    buffer = make(tmp_path / "j", journal_delay=0.001)
    trained = []

    def produce(first):
        for n in range(first, first + 25):
            buffer.sync.put(group([5], group_id=n), train_step=6)

    def train():
        while len(trained) < 60:
            for g in buffer.sync.take_train_batch({"default": 4}, train_step=6).get("default", []):
                trained.append(g[0].group_id)

    threads = [threading.Thread(target=produce, args=(100 * n,)) for n in range(4)] + [threading.Thread(target=train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(None).taken == {"default": trained}
    assert picture(other) == picture(buffer)


# What goes wrong with the disk


@pytest.mark.parametrize("moment", ["first", "later"])
def test_a_full_disk_is_an_error_and_a_checkpoint_ends_it(tmp_path, disk, moment):
    buffer = make(tmp_path / "j")
    b = buffer.sync
    if moment == "later":
        b.put(group([5], group_id=0), train_step=6)
    size = {p.name: p.stat().st_size for p in (tmp_path / "j").iterdir()}
    disk.refuse = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"No space left on device.*in memory only.*save") as raised:
        b.put(group([5], group_id=1), train_step=6)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path / "j")
    assert {p.name: p.stat().st_size for p in (tmp_path / "j").iterdir()} == size
    before = picture(buffer)
    for refused in (
        lambda: b.put(group([5]), train_step=6),
        lambda: b.take_batch({"default": 1}),
        lambda: b.take_train_batch({"default": 1}, train_step=6),
        lambda: b.get(1),
        lambda: b.refresh_staleness(9),
        lambda: b.reject(group([5]), outcome="failed"),
    ):
        with pytest.raises(OSError, match="No space left"):
            refused()
    assert picture(buffer) == before
    assert b.is_ready({"default": 1})
    disk.refuse = None
    with pytest.raises(OSError, match="No space left"):  # nothing mends by itself
        b.get(1)
    b.save(tmp_path / "checkpoint")
    b.put(group([5], group_id=2), train_step=6)
    other = make(crashed(buffer, tmp_path))
    other.sync.resume(tmp_path / "checkpoint")
    assert picture(other) == picture(buffer)
    other.sync.close()
    if moment == "later":
        with pytest.raises(ValueError, match="name the checkpoint"):
            make(tmp_path / "crashed").sync.resume(None)


def test_a_take_that_cannot_be_written_gives_its_groups_back(tmp_path, disk):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5, -1], group_id=1), train_step=6)
    before = picture(buffer)
    disk.refuse = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        buffer.sync.take_train_batch({"default": 1}, train_step=6)
    assert picture(buffer) == before
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(None).taken == {}
    assert picture(other) == before
    disk.refuse = None
    buffer.sync.save(tmp_path / "checkpoint")
    assert buffer.sync.take_train_batch({"default": 1}, train_step=6).trainable_tokens == 1


def test_a_failed_save_does_not_end_it(tmp_path, disk, monkeypatch):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=0), train_step=6)
    disk.refuse = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        buffer.sync.put(group([5], group_id=1), train_step=6)
    disk.refuse = None
    with pytest.raises(TypeError):
        buffer.sync.save(tmp_path / "checkpoint", extra={"x": object()})
    with pytest.raises(OSError, match="No space"):
        buffer.sync.put(group([5], group_id=2), train_step=6)
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(None).finished == {"default": [0]}


def test_a_directory_that_is_deleted_is_an_error(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5]), train_step=6)
    shutil.rmtree(tmp_path / "j")
    with pytest.raises(OSError, match="No such file"):
        buffer.sync.put(group([5]), train_step=6)


def test_one_directory_has_one_user(tmp_path):
    buffer = make(tmp_path / "j")
    with pytest.raises(ValueError, match=f"is used by another buffer \\(process {os.getpid()}\\)"):
        make(tmp_path / "j")
    buffer.sync.put(group([5]), train_step=6)
    buffer.sync.close()
    buffer.sync.close()
    with pytest.raises(ValueError, match="is closed"):
        buffer.sync.put(group([5]), train_step=6)
    assert len(buffer) == 1
    make(tmp_path / "j").sync.resume(None)


def test_a_used_directory_accepts_nothing_but_resume(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5]), train_step=6)
    buffer.sync.close()
    other = make(tmp_path / "j")
    b = other.sync
    for refused in (
        lambda: b.put(group([5]), train_step=6),
        lambda: b.take_batch({"default": 1}),
        lambda: b.take_train_batch({"default": 1}, train_step=6),
        lambda: b.get(1),
        lambda: b.refresh_staleness(9),
        lambda: b.reject(group([5]), outcome="failed"),
        lambda: b.wait_ready({"default": 1}),
        lambda: b.save(tmp_path / "checkpoint"),
    ):
        with pytest.raises(ValueError, match=r"used before; call resume"):
            refused()
    b.resume(None)
    assert b.wait_ready({"default": 1})


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), True, "1"])
def test_a_delay_that_is_none_is_refused(tmp_path, delay):
    with pytest.raises((ValueError, TypeError), match="journal_delay"):
        make(tmp_path / "j", journal_delay=delay)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "j").write_text("x")
    with pytest.raises(NotADirectoryError):
        make(tmp_path / "j")


# Checkpoints and the journal


def test_a_checkpoint_empties_the_journal_once_it_is_on_disk(tmp_path, monkeypatch):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=1), train_step=6)
    replace = os.replace

    def replacing(*args):
        assert len(segments(tmp_path / "j")) == 1
        replace(*args)

    monkeypatch.setattr(os, "replace", replacing)
    buffer.sync.save(tmp_path / "checkpoint")
    assert segments(tmp_path / "j") == []
    buffer.sync.put(group([5], group_id=2), train_step=6)
    assert len(segments(tmp_path / "j")) == 1
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(tmp_path / "checkpoint").finished == {"default": [2]}
    assert picture(other) == picture(buffer)


def segments(directory):
    return sorted(directory.glob("segment-*.journal"))


def test_a_crash_between_checkpoint_and_emptying(tmp_path, monkeypatch):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=1), train_step=6)
    monkeypatch.setattr(pystale.journal.Journal, "covered", lambda self, position: None)
    buffer.sync.save(tmp_path / "checkpoint")
    buffer.sync.put(group([5], group_id=2), train_step=6)
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(tmp_path / "checkpoint").finished == {"default": [2]}
    assert picture(other) == picture(buffer)
    assert len(segments(tmp_path / "crashed")) == 1


def test_a_save_that_fails_leaves_the_journal_whole(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=1), train_step=6)
    with pytest.raises(TypeError):
        buffer.sync.save(tmp_path / "checkpoint", extra={"x": object()})
    buffer.sync.put(group([5], group_id=2), train_step=6)
    assert len(segments(tmp_path / "j")) == 2
    other = make(crashed(buffer, tmp_path))
    other.sync.resume(tmp_path / "checkpoint")
    assert picture(other) == picture(buffer)


def test_of_two_saves_the_earlier_does_not_replace_the_later(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=1), train_step=6)
    earlier = buffer.operations.start_save(tmp_path / "checkpoint")
    buffer.sync.put(group([5], group_id=2), train_step=6)
    buffer.sync.save(tmp_path / "checkpoint")
    buffer.operations.run_save(earlier)
    buffer.sync.put(group([5], group_id=3), train_step=6)
    other = make(crashed(buffer, tmp_path))
    assert other.sync.resume(tmp_path / "checkpoint").finished == {"default": [3]}
    assert picture(other) == picture(buffer)


def test_a_forked_child_leaves_the_journal_to_its_parent(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5]), train_step=6)
    (go, done), (forked, ready) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the thread that writes is idle
        child = os.fork()
    if child == 0:
        os.close(done)
        with contextlib.suppress(ValueError):
            buffer.sync.put(group([5]), train_step=6)
            os._exit(1)
        os.write(ready, b"x")
        os.read(go, 1)  # lives on while the parent uses the directory again
        os._exit(0)
    os.close(ready)
    os.read(forked, 1)
    buffer.sync.close()
    again = make(tmp_path / "j")
    again.sync.resume(None)
    assert len(again) == 1
    for fd in (done, go, forked):
        os.close(fd)
    assert os.waitpid(child, 0)[1] == 0


def test_what_does_not_fit_together_is_refused(tmp_path):
    buffer = make(tmp_path / "j")
    buffer.sync.put(group([5], group_id=1), train_step=6)
    buffer.sync.save(tmp_path / "first")
    buffer.sync.put(group([5], group_id=2), train_step=6)
    buffer.sync.save(tmp_path / "second")
    buffer.sync.put(group([5], group_id=3), train_step=6)
    copy = crashed(buffer, tmp_path)
    other = make(tmp_path / "other journal")
    other.sync.save(tmp_path / "foreign")
    resuming = make(copy)
    for directory, said in (
        ("first", "begins after a later checkpoint"),
        ("foreign", "does not continue this checkpoint"),
        ("absent", "name the checkpoint"),
        (None, "name the checkpoint"),
    ):
        with pytest.raises(ValueError, match=said):
            resuming.sync.resume(directory and tmp_path / directory)
    assert len(resuming) == 0
    resuming.sync.resume(tmp_path / "second")
    assert len(resuming) == 3
    with pytest.raises(ValueError, match="and this buffer has none"):
        ReplayBuffer(StalenessRule()).sync.resume(None)


def test_a_new_journal_goes_on_from_a_checkpoint_without_one(tmp_path):
    plain = ReplayBuffer(StalenessRule(3, 1), tail_batch_trigger_size=0)
    plain.sync.put(group([5], group_id=1), train_step=6)
    plain.sync.save(tmp_path / "checkpoint")
    buffer = make(tmp_path / "j")
    buffer.sync.resume(tmp_path / "checkpoint")
    buffer.sync.put(group([5], group_id=2), train_step=6)
    for _ in range(2):
        other = make(crashed(buffer, tmp_path))
        other.sync.resume(tmp_path / "checkpoint")
        assert picture(other) == picture(buffer)
        other.sync.close()
    plain.sync.save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="does not continue this checkpoint"):
        make(tmp_path / "crashed").sync.resume(tmp_path / "checkpoint")


def test_groups_in_flight_at_the_checkpoint_come_back_once(tmp_path):
    buffer = make(tmp_path / "j")
    for number in range(3):
        buffer.sync.put(group([5], group_id=number, status=A), train_step=6)
    first, second, third = buffer.sync.get(3, status=A)
    buffer.sync.save(tmp_path / "checkpoint")
    buffer.sync.put(finish(first, 5), train_step=6)
    buffer.sync.reject(second, outcome="failed")
    third[0].response_ids.append(9)
    other = make(crashed(buffer, tmp_path))
    resumed = other.sync.resume(tmp_path / "checkpoint")
    assert (resumed.in_flight, resumed.finished) == ({"default": [0, 1, 2]}, {"default": [0]})
    assert (other.sync.count(), other.sync.count(status=A)) == (1, 1)
    assert picture(other) == picture(buffer)


# Damage


@pytest.fixture
def written(tmp_path):
    """Journal of three commits, and what the store was after each."""
    buffer = make(tmp_path / "j")
    pictures, ends = [], []
    for number in range(3):
        buffer.sync.put(group([5, 5], group_id=number), train_step=6)
        pictures.append(picture(buffer))
        ends.append(segments(tmp_path / "j")[0].stat().st_size)
    buffer.sync.close()
    return segments(tmp_path / "j")[0], pictures, ends


def test_a_torn_end_is_cut_off_wherever_it_is_torn(written, caplog):
    path, pictures, ends = written
    data = path.read_bytes()
    for cut in [*range(ends[1] + 1, ends[2], 37), ends[2] - 1]:
        for tail in (data[ends[1] : cut], bytes(cut - ends[1])):
            for other in segments(path.parent):
                other.unlink()
            path.write_bytes(data[: ends[1]] + tail)
            buffer = make(path.parent)
            buffer.sync.resume(None)
            assert picture(buffer) == pictures[1]
            assert path.stat().st_size == ends[1]
            buffer.sync.put(group([5], group_id="new"), train_step=6)
            buffer.sync.close()
            again = make(path.parent)
            again.sync.resume(None)
            assert len(again) == 3
            again.sync.close()
    assert "cut off at offset" in caplog.text


def test_a_torn_beginning_is_an_empty_journal(written):
    path, _, _ = written
    data = path.read_bytes()
    start = data.index(b"\x89PSF", 20)
    for cut in range(0, start, 13):
        path.write_bytes(data[:cut])
        buffer = make(path.parent)
        buffer.sync.resume(None)
        assert len(buffer) == 0
        buffer.sync.put(group([5]), train_step=6)
        buffer.sync.close()
        again = make(path.parent)
        again.sync.resume(None)
        assert len(again) == 1
        again.sync.close()


def test_damage_before_a_whole_frame_is_an_error_that_names_file_and_offset(written):
    path, _, ends = written
    data = path.read_bytes()
    for at in range(0, ends[1], 11):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        buffer = make(path.parent)
        with pytest.raises(CheckpointError, match=str(path)) as raised:
            buffer.sync.resume(None)
        assert at < 16 or "offset" in str(raised.value)
        assert len(buffer) == 0
        buffer.sync.close()
    path.write_bytes(data)
    make(path.parent).sync.resume(None)


def test_bytes_that_came_in_or_went_missing_before_whole_frames_are_damage_and_no_torn_end(written):
    """What follows has been acknowledged, though its checksums are for other offsets."""
    path, _, ends = written
    data = path.read_bytes()
    for at in range(ends[0] + 1, ends[1] - 5, 29):
        for forged in (data[:at] + b"\0" * 8 + data[at:], data[:at] + data[at + 5 :], data[:at] + data[at + 1 :]):
            path.write_bytes(forged)
            buffer = make(path.parent)
            with pytest.raises(CheckpointError, match=f"is damaged at offset {ends[0]}: a whole frame follows"):
                buffer.sync.resume(None)
            buffer.sync.close()
            assert path.read_bytes() == forged


def test_frames_that_are_missing_moved_or_repeated_are_damage(written):
    path, _, ends = written
    data = path.read_bytes()
    for forged in (
        data[: ends[0]] + data[ends[1] :],
        data[: ends[0]] + data[ends[1] : ends[2]] + data[ends[0] : ends[1]],
        data[: ends[1]] + data[ends[0] :],
    ):
        path.write_bytes(forged)
        buffer = make(path.parent)
        try:
            buffer.sync.resume(None)
        except CheckpointError:
            pass
        else:  # as if torn: what is behind does not belong where it is
            assert len(buffer) in (1, 2)
        buffer.sync.close()


def test_an_end_torn_in_a_segment_that_is_not_the_last_is_damage(written, tmp_path):
    path, _, ends = written
    buffer = make(path.parent)
    buffer.sync.resume(None)
    buffer.sync.put(group([5]), train_step=6)
    buffer.sync.close()
    first, second = segments(path.parent)
    data = first.read_bytes()
    first.write_bytes(data[:-1])
    again = make(path.parent)
    with pytest.raises(CheckpointError, match=f"{first}: is damaged at offset {ends[1]}"):
        again.sync.resume(None)
    first.unlink()
    with pytest.raises(ValueError, match="name the checkpoint"):
        again.sync.resume(None)
    first.write_bytes(data)
    second.rename(second.with_name("segment-0000000007.journal"))
    with pytest.raises(CheckpointError, match="says it is segment 1"):
        again.sync.resume(None)


def frame(seed, offset, body):
    """A frame by the description of the format alone."""
    checksum = zlib.crc32(struct.pack("<IQQ", seed, offset, len(body)) + body)
    return b"\x89PSF" + struct.pack("<QI", len(body), checksum) + body, checksum


def forge(path, *bodies, **header):
    fields = {"format": "pystale-journal", "schema_version": 1, "library_version": "x", "journal": "0" * 16,
              "segment": 0, "after": None, "order": "stalest_first", **header}  # fmt: skip
    data = b"pystale-journal\n"
    first, seed = frame(0, len(data), json.dumps(fields).encode())
    data += first
    for body in bodies:
        data += frame(seed, len(data), body)[0]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"schema_version": 2}, "has schema version 2, this pystale reads up to 1"),
        ({"schema_version": 0}, "is not a journal"),
        ({"schema_version": True}, "is not a journal"),
        ({"format": "else"}, "is not a journal"),
        ({"segment": 1}, "says it is segment 1"),
        ({"order": "fifo"}, "is ordered fifo, this buffer stalest_first"),
        ({"journal": "../x"}, "no valid header"),
        ({"after": "checkpoint"}, "name the checkpoint"),
    ],
)
def test_a_segment_that_is_not_ours_is_refused(tmp_path, header, said):
    path = tmp_path / "j" / "segment-0000000000.journal"
    forge(path, **header)
    buffer = make(path.parent)
    with pytest.raises(ValueError, match=said):
        buffer.sync.resume(None)
    buffer.sync.close()
    forge(path)
    make(path.parent).sync.resume(None)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "j" / "segment-0000000000.journal"
    path.parent.mkdir()
    path.write_bytes(b"something else altogether, and longer than a header")
    with pytest.raises(CheckpointError, match=f"{path}: is not a journal of pystale"):
        make(path.parent).sync.resume(None)


GOOD = {
    "op": "put",
    "train_step": 6,
    "arrivals": 1,
    "own_group_ids": 0,
    "ledger": {"produced": 1, "trained": 0, "masked_stale": 0, "masked_semantic": 0, "discarded": {}},
    "put": {"task": "default", "group_id": 1, "status": "COMPLETED", "arrival": 0, "key": 5, "rerolls": 0},
}
FIELDS = {"status": ["COMPLETED"], "response_ids": [(1,)], "response_model_steps": [(5,)]}
LINE = json.dumps({"header": {}, "fields": FIELDS}).encode()


def entry(line=LINE, **changes):
    return json.dumps({**GOOD, **changes}).encode() + b"\n" + (line and line + b"\n")


def put_with(**changes):
    return entry(put={**GOOD["put"], **changes})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no empty line"),
        (b"[]\n\n", "not an object"),
        (b"{}\n\n", "contradicts"),
        (entry(b"") + b"\n", "lacks the line of a group"),
        (entry() + b"\nxyz", "no safetensors file"),
        (entry(b"{}") + b"\n", "not an object of header and fields"),
        (entry(put=7) + b"\n", "put must be an object"),
        (entry(train_step=0) + b"\n", "train_step"),
        (entry(arrivals=-1) + b"\n", "arrivals"),
        (entry(ledger={}) + b"\n", "contradicts"),
        (entry(ledger={**GOOD["ledger"], "produced": 2}) + b"\n", "does not balance"),
        (entry(left=[5]) + b"\n", "no group with arrival 5"),
        (entry(taken=[[0, 1, 0, 0]]) + b"\n", "no group with arrival 0"),
        (entry(expired=[[0, [1]]]) + b"\n", r"members \[1\] of 1 expired"),
        (entry(expired=[[1, [0]]]) + b"\n", "contradicts"),
        (put_with(status="gone") + b"\n", "unknown status"),
        (put_with(arrival=None) + b"\n", "arrival"),
        (put_with(key="x") + b"\n", "key"),
        (put_with(group_id=[]) + b"\n", "contradicts"),
        (put_with() + put_with(arrival=1) + b"\n", "is stored already"),
    ],
)
def test_an_entry_that_cannot_be_right_loads_nothing(tmp_path, body, said):
    path = tmp_path / "j" / "segment-0000000000.journal"
    forge(path, body)
    buffer = make(path.parent)
    with pytest.raises(CheckpointError, match=said) as raised:
        buffer.sync.resume(None)
    assert str(path) in str(raised.value)
    assert (len(buffer), buffer.ledger()["produced"]) == (0, 0)
    buffer.sync.close()
    forge(path, entry() + b"\n")
    good = make(path.parent)
    good.sync.resume(None)
    assert good.sync.count() == 1


def test_a_task_without_a_rule_is_named(tmp_path):
    path = tmp_path / "j" / "segment-0000000000.journal"
    forge(path, put_with(task="math") + b"\n")
    with pytest.raises(ValueError, match="task 'math' has no rule"):
        make(path.parent, rule={"code": StalenessRule()}, tail_batch_trigger_size={"code": 0}).sync.resume(None)


# The format


def test_the_journal_is_readable_by_its_description_alone(written):
    path, _, _ = written
    data = path.read_bytes()
    assert data[:16] == b"pystale-journal\n"
    offset, seed, bodies = 16, 0, []
    while offset < len(data):
        length, checksum = struct.unpack("<QI", data[offset + 4 : offset + 16])
        body = data[offset + 16 : offset + 16 + length]
        assert data[offset : offset + 16 + length] == frame(seed, offset, body)[0]
        seed = seed or checksum
        bodies.append(body)
        offset += 16 + length
    header = json.loads(bodies[0])
    assert (header["format"], header["schema_version"], header["after"]) == ("pystale-journal", 1, None)
    lines, _, arrays = bodies[1].partition(b"\n\n")
    envelope, line = map(json.loads, lines.split(b"\n"))
    assert (envelope["op"], envelope["train_step"], envelope["put"]["group_id"]) == ("put", 6, 0)
    assert line["fields"]["response_model_steps"] == "ints"
    assert load_tensors(arrays)["response_model_steps:ints"].tolist() == [5, 5]


def test_the_committed_journal_of_schema_version_1_is_read(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "j")
    buffer = make(tmp_path / "j", rule=StalenessRule(1))
    resumed = buffer.sync.resume(None)
    assert resumed.taken == {"default": [0]}
    assert resumed.finished == {"default": [0, 1, 2, 3, 4, 5]}
    ledger = buffer.ledger()
    assert ledger["discarded"] == {"expired": 2, "failed": 1}
    assert (ledger["produced"], ledger["trained"], ledger["stored"]) == (8, 2, 3)
    counts = buffer.sync.count_statuses(["default"], Status)["default"]
    assert {status: n for status, n in counts.items() if n} == {C: 2, A: 1, E: 1}
