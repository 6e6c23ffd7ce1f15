"""Takes that wait for work in flight which would be dropped otherwise: when, how long, and what ends the wait."""

import asyncio
import random
import threading
import time

import pytest
from agent_loops import ScriptedLoop, fail, finish, in_turn, until_cancelled, until_paused
from hypothesis import assume, given
from hypothesis import strategies as st
from production_line import Line
from production_site import BackgroundSite, Site, ids
from rollouts import balance, group
from virtual_clock import run

from pystale import DisaggAsyncProduceStrategyConfig, ReplayBuffer, StalenessRule, Status, StragglersOverdue
from pystale.lengths import LengthAccumulator
from pystale.production import ProductionStalled

C, A, E = Status.COMPLETED, Status.ABORTED, Status.EXPIRED


def waiting_buffer(max_staleness=1, **more):
    return ReplayBuffer(StalenessRule(max_staleness), **{"wait_for_stragglers": True, **more})


def one(number, step=4, status=C):
    return group([step], status=status, group_id=number)


async def settled():
    """Let everything happen that needs no time to pass."""
    await asyncio.sleep(0.001)


# When a take waits


def test_a_take_waits_for_work_that_would_be_too_old_for_the_next_step():
    async def main():
        b = waiting_buffer()
        await b.put(one(1), train_step=5)
        b.reserve(2, model_step=3)  # at step 6 it would be two steps behind
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await asyncio.sleep(7)
        assert not taking.done()
        assert (len(b), b.report().reserved) == (1, {"default": 1})
        await b.put(one(2, 3), train_step=5)
        return await taking, b.report()

    batch, report = run(main())
    assert [g[0].group_id for g in batch["default"]] == [2]  # the stalest first, as ever
    assert batch.straggler_s == report.straggler_s == 7
    assert report.reserved == {}


@pytest.mark.parametrize("threshold", [1, 2, 3])
@pytest.mark.parametrize("model_step", range(7))
def test_what_is_waited_for_is_what_verl_waits_for(threshold, model_step):
    async def main():
        b = ReplayBuffer(StalenessRule.from_verl(threshold), wait_for_stragglers=True)
        await b.put(one(1, 6), train_step=7)
        b.reserve(2, model_step=model_step)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=7))
        await settled()
        waits = not taking.done()
        taking.cancel()
        await asyncio.wait([taking])
        return waits

    global_steps = model_step + 1  # verl counts the step a prompt is dispatched at
    assert run(main()) is (7 - global_steps + 1 >= threshold)


def dropped(due, train_step, size):
    """How many groups, given by the last step they may be trained at, batches from this step on cannot train."""
    due, lost = sorted(due), 0
    while due:
        while due and due[0] < train_step:
            due.pop(0)
            lost += 1
        del due[:size]
        train_step += 1
    return lost


@given(
    max_staleness=st.integers(0, 4),
    size=st.integers(1, 3),
    work=st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=20),
)
def test_a_take_waits_exactly_where_it_would_cost_a_group_that_can_be_trained(max_staleness, size, work):
    train_step, threshold = 5, max_staleness + 1
    stored, in_flight = [], []
    for has_landed, step in work + [(True, 4)] * size:
        step = max(step, train_step - threshold)
        due = [step + threshold for step in [*stored, *in_flight, step]]
        if dropped(due, train_step, size) == 0:  # no more is begun than can be trained
            (stored if has_landed else in_flight).append(step)
    assume(len(stored) >= size)
    stored_due, due = ([step + threshold for step in steps] for steps in (stored, in_flight))
    b = waiting_buffer(max_staleness)
    for number, step in enumerate(stored):
        b.sync.put(one(number, step), train_step=train_step)
    for number, step in enumerate(in_flight, len(stored)):
        b.reserve(number, model_step=step)
    left = sorted(stored_due)[size:] + due  # the rest, where nobody waits
    awaited = b.sync.stragglers({"default": size}, train_step=train_step)
    assert bool(awaited) == (dropped(left, train_step + 1, size) > 0)
    # What is in flight is waited for up to a version, and with all of that there is nothing more to wait for.
    newest = max((r.model_step for r in awaited), default=-1)
    assert [r.model_step for r in awaited] == [step for step in in_flight if step <= newest]
    for reservation in awaited:
        b.sync.put(one(reservation.group_id, reservation.model_step), train_step=train_step)
    assert b.sync.stragglers({"default": size}, train_step=train_step) == []


def test_a_wait_ends_when_a_batch_can_be_filled_with_what_is_as_urgent():
    async def main():
        b = waiting_buffer(2)
        for number in range(4):
            await b.put(one(number, 4), train_step=5)  # may be trained at step 7
        for number in range(4, 8):
            b.reserve(number, model_step=3)  # may be trained at step 6: two batches of 2, but not one
        taking = asyncio.ensure_future(b.take_train_batch({"default": 2}, train_step=5))
        await asyncio.sleep(3)
        await b.put(one(4, 3), train_step=5)
        await asyncio.sleep(3)
        assert not taking.done()
        await b.put(one(5, 3), train_step=5)
        return await taking, b.report()

    batch, report = run(main())
    assert [g[0].group_id for g in batch["default"]] == [4, 5]
    assert (batch.straggler_s, report.reserved) == (6, {"default": 2})


def test_a_wait_ends_also_with_work_that_was_not_reserved():
    async def main():
        b = waiting_buffer(2)
        await b.put(one(1, 4), train_step=5)
        for number in (2, 3):
            b.reserve(number, model_step=3)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await asyncio.sleep(3)
        await b.put(one(4, 3), train_step=5)
        return [g[0].group_id for g in (await taking)["default"]]

    assert run(main()) == [4]


def test_a_wait_ends_when_a_batch_is_given_back(tmp_path):
    async def main():
        b = waiting_buffer(2, journal=tmp_path / "journal", journal_delay=0.5)
        for number, step in enumerate([3, 3, 4, 4]):
            await b.put(one(number, step), train_step=5)
        first = asyncio.ensure_future(b.take_train_batch({"default": 2}, train_step=5))
        await asyncio.sleep(0)  # it has the two oldest, and waits for the disk
        for number in (10, 11, 12):  # more than the batch after this one holds
            b.reserve(number, model_step=3)
        second = asyncio.ensure_future(b.take_train_batch({"default": 2}, train_step=5))
        await asyncio.sleep(0.1)
        assert not second.done()
        first.cancel()
        batch = await asyncio.wait_for(second, 30)
        return [g[0].group_id for g in batch["default"]], first.cancelled()

    assert asyncio.run(main()) == ([0, 1], True)


def test_what_only_the_token_rule_makes_urgent_is_not_taken_first_and_fills_no_batch():
    b = ReplayBuffer(StalenessRule(5, 2), tail_batch_trigger_size=0, wait_for_stragglers=True)
    b.sync.put(group([8, 11], group_id=1), train_step=12)
    b.sync.put(group([9, 9], group_id=2), train_step=12)  # is out of fresh tokens at step 13, and comes second
    for number in (3, 4):
        b.reserve(number, model_step=7)  # may be trained at step 13, where a batch of 1 trains one of them
    assert [r.group_id for r in b.sync.stragglers({"default": 1}, train_step=12)] == [3, 4]


def test_what_is_too_old_already_fills_no_batch():
    b = waiting_buffer(2)
    b.sync.put(one(1, 2), train_step=5)
    for number in (2, 3):
        b.sync.put(one(number, 5), train_step=6)
    for number in (4, 5):
        b.reserve(number, model_step=4)
    assert len(b.sync.stragglers({"default": 1}, train_step=6)) == 2  # group 1 has expired by then
    b.sync.refresh_staleness(6)
    assert len(b.sync.stragglers({"default": 1}, train_step=6)) == 2


@pytest.mark.parametrize("model_step", [2**63 - 1, 2**63 - 2])
def test_the_largest_versions_are_versions_like_others(model_step):
    b = waiting_buffer(1)
    b.sync.put(one(0, 2**63 - 4), train_step=2**63 - 2)
    for number in range(1, 9):
        b.reserve(number, model_step=model_step)
    assert len(b.sync.stragglers({"default": 2}, train_step=2**63 - 2)) == 8
    assert len(b.sync.stragglers({"default": 2}, train_step=1)) == 0
    b.sync.put(one(9, 2**63 - 4), train_step=2**63 - 2)
    assert len(b) == 2


@pytest.mark.parametrize("order", ["fifo", "freshest_first", "oldest_prompt_first"])
def test_an_order_that_leaves_stragglers_behind_is_warned_of(order):
    with pytest.warns(UserWarning, match=f"order='{order}'.*'stalest_first' takes it first") as warned:
        ReplayBuffer(StalenessRule(1), order=order, wait_for_stragglers=True)
    assert warned[0].filename == __file__
    ReplayBuffer(StalenessRule(1), order=order)  # no warning, which would be an error


@pytest.mark.parametrize(
    ("sizes", "train_step", "error", "match"),
    [
        ({"default": -1}, 1, ValueError, "default"),
        ({"other": 1}, 1, ValueError, "other"),
        ([1], 1, TypeError, "sizes"),
        ({"default": 1}, 0, ValueError, "train_step must be at least 1"),
        ({"default": 1}, None, TypeError, "train_step must be an int"),
    ],
)
def test_stragglers_of_what_cannot_be_taken_are_refused(sizes, train_step, error, match):
    b = ReplayBuffer({"default": StalenessRule(1)})
    with pytest.raises(error, match=match):
        run(b.stragglers(sizes, train_step=train_step))
    with pytest.raises(error, match=match):
        b.sync.stragglers(sizes, train_step=train_step)


@pytest.mark.parametrize("option", [{}, {"wait_for_stragglers": False}])
def test_nobody_waits_unless_told_to(option):
    b = ReplayBuffer(StalenessRule(1), **option)
    b.sync.put(one(1), train_step=5)
    b.reserve(2, model_step=0)
    batch = b.sync.take_train_batch({"default": 1}, train_step=5)
    assert (len(batch["default"]), batch.straggler_s, b.report().reserved) == (1, 0.0, {"default": 1})


def test_a_batch_that_is_not_there_is_not_waited_for():
    async def main():
        b = waiting_buffer()
        b.reserve(2, model_step=0)
        return await b.take_train_batch({"default": 1}, train_step=5)

    assert not run(main())


def test_other_tasks_do_not_hold_a_take_up():
    async def main():
        b = ReplayBuffer({"a": StalenessRule(1), "b": StalenessRule(5)}, wait_for_stragglers=True)
        await b.put(one(1), "a", train_step=5)
        b.reserve(2, "b", model_step=0)
        first = await b.take_train_batch({"a": 1, "b": 0}, train_step=5)
        await b.put(one(3), "a", train_step=5)
        await b.put(one(4), "b", train_step=5)
        # Each by its own rule: at step 7 that of "b" would be the sixth behind.
        second = await b.take_train_batch({"a": 1, "b": 1}, train_step=5)
        return len(first["a"]), len(second["b"])

    assert run(main()) == (1, 1)


def test_what_is_too_old_for_a_take_has_expired_before_it_waits():
    async def main():
        b = waiting_buffer()
        await b.put(one(1, 2), train_step=4)
        b.reserve(2, model_step=3)
        return await b.take_train_batch({"default": 1}, train_step=5)

    assert not run(main())


# What ends a wait


def ways_to_land():
    async def put(b, _reservation):
        await b.put(one(2, 4), train_step=5)

    async def put_unfinished(b, _reservation):
        await b.put(one(2, 4, A), train_step=5)

    async def put_too_late(b, _reservation):
        assert await b.put(one(2, 0), train_step=5) is E

    async def reject(b, _reservation):
        await b.reject(one(2), "default", "failed")

    async def release(_b, reservation):
        reservation.release()

    async def leave(_b, reservation):
        with reservation:
            pass

    async def cancelled(_b, reservation):
        async def producer():
            with reservation:
                await asyncio.sleep(1000)

        producing = asyncio.ensure_future(producer())
        await settled()
        producing.cancel()
        await asyncio.wait([producing])

    return [put, put_unfinished, put_too_late, reject, release, leave, cancelled]


@pytest.mark.parametrize("land", ways_to_land(), ids=lambda land: land.__name__)
def test_work_that_has_landed_is_not_waited_for(land):
    async def main():
        b = waiting_buffer()
        await b.put(one(1), train_step=5)
        reservation = b.reserve(2, model_step=3)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await settled()
        assert not taking.done()
        await land(b, reservation)
        batch = await asyncio.wait_for(taking, 1)
        reservation.release()  # once more does nothing
        return len(batch["default"]), b.report().reserved

    assert run(main()) == (1, {})


def test_settling_a_group_handed_out_ends_its_flight():
    async def main():
        b = waiting_buffer()
        await b.put(one(1), train_step=5)
        await b.put(one(2, 4, A), train_step=5)
        (lent,) = await b.get(1, status=A)
        b.reserve(2, model_step=3)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await settled()
        b.settle([lent], "lost")
        return len((await asyncio.wait_for(taking, 1))["default"])

    assert run(main()) == 1


def test_a_take_waits_for_the_last_of_them_and_is_not_woken_before():
    async def main():
        b = waiting_buffer()
        asked = []
        claim = b.operations.claim_train_batch
        b.operations.claim_train_batch = lambda *args: asked.append(args) or claim(*args)
        await b.put(one(1), train_step=5)
        reservations = [b.reserve(number, model_step=3) for number in range(2, 50)]
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        for reservation in reservations:
            await asyncio.sleep(1)
            assert not taking.done()
            reservation.release()
        return len((await taking)["default"]), len(asked)

    assert run(main()) == (1, 2)


def test_work_begun_while_a_take_waits_is_waited_for_too():
    async def main():
        b = waiting_buffer()
        await b.put(one(1), train_step=5)
        first = b.reserve(2, model_step=3)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await settled()
        second = b.reserve(3, model_step=3)
        b.reserve(4, model_step=4)  # young enough
        first.release()
        await settled()
        assert not taking.done()
        second.release()
        return len((await taking)["default"])

    assert run(main()) == 1


def test_a_wait_that_is_cancelled_takes_nothing_and_disturbs_nobody():
    async def main():
        b = waiting_buffer()
        for number in (1, 2):
            await b.put(one(number), train_step=5)
        straggler = b.reserve(3, model_step=3)
        takes = [asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5)) for _ in range(2)]
        await asyncio.sleep(2)
        takes[0].cancel()
        await asyncio.wait([takes[0]])
        assert takes[0].cancelled()
        assert (len(b), b.report().straggler_s) == (2, 2)
        await asyncio.sleep(3)
        straggler.release()
        batch = await takes[1]
        return len(b), batch.straggler_s, b.report().straggler_s, balance(b.ledger())

    assert run(main()) == (1, 5, 7, (2, 2))


def test_other_operations_go_on_meanwhile():
    async def main():
        b = waiting_buffer()
        await b.put(one(1), train_step=5)
        straggler = b.reserve(2, model_step=3)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await settled()
        await b.put(one(3), train_step=5)
        assert await b.refresh_staleness(5) == {"default": 0}
        assert await b.count() == 2
        assert len((await b.take_batch({"default": 1}))["default"]) == 1
        straggler.release()
        return len((await taking)["default"]), len(b)

    assert run(main()) == (1, 0)


def test_a_wait_has_an_end_and_says_what_it_waited_for():
    async def main():
        b = waiting_buffer(straggler_timeout_s=30)
        await b.put(one(1), train_step=5)
        for number in range(2, 9):
            b.reserve(number, model_step=3)
        b.reserve(20, model_step=4)
        with pytest.raises(StragglersOverdue) as raised:
            await b.take_train_batch({"default": 1}, train_step=5)
        assert isinstance(raised.value, TimeoutError)
        return str(raised.value), len(b), b.report().straggler_s

    message, stored, seconds = run(main())
    assert message.startswith(
        "train_step 5: work that later batches could not train in time has not landed within 30 s, and nothing was "
        "taken. 7 in flight: group 2 of task 'default' (model_step 3, for 0 s), "
    )
    assert "group 6 of task" in message
    assert "group 7 of task" not in message
    assert "Of all tasks in flight: {'default': 8}, stored: {'default': {'COMPLETED': 1}}" in message
    assert (stored, seconds) == (1, 30)


def test_a_thread_waits_too():
    b = waiting_buffer()
    b.sync.put(one(1), train_step=5)
    straggler = b.sync.reserve(2, model_step=3)
    batches = []
    thread = threading.Thread(target=lambda: batches.append(b.sync.take_train_batch({"default": 1}, train_step=5)))
    thread.start()
    while not b.operations.in_flight._waiters._waiting:
        time.sleep(0.001)
    assert thread.is_alive()
    straggler.release()
    thread.join(60)
    assert len(batches[0]["default"]) == 1
    assert batches[0].straggler_s == b.report().straggler_s > 0


def test_a_thread_does_not_wait_for_ever():
    b = waiting_buffer(straggler_timeout_s=0.01)
    b.sync.put(one(1), train_step=5)
    b.reserve("x", model_step=3)
    with pytest.raises(StragglersOverdue, match="group 'x' of task 'default'"):
        b.sync.take_train_batch({"default": 1}, train_step=5)
    assert len(b) == 1


# Reserving


def test_what_cannot_be_in_flight_is_refused():
    b = ReplayBuffer({"a": StalenessRule(1)}, wait_for_stragglers=True)
    b.sync.put(one(1), "a", train_step=5)
    b.reserve(2, "a", model_step=3)
    for arguments, error, words in (
        ((1, "a", 3), ValueError, "group 1 of task 'a' is stored"),
        ((2, "a", 4), ValueError, "group 2 of task 'a' is reserved already, with model_step 3"),
        ((3, "b", 3), ValueError, "task 'b' has no rule"),
        ((3, None, 3), TypeError, "a task name is a str"),
        ((3, "a", -1), ValueError, "model_step must be at least 0"),
        ((3, "a", True), TypeError, "model_step must be an int"),
        ((3.5, "a", 3), TypeError, "group_id must be an int, a str or None"),
    ):
        with pytest.raises(error, match=words):
            b.reserve(arguments[0], arguments[1], model_step=arguments[2])
    assert b.report().reserved == {"a": 1}


def test_groups_without_an_id_are_in_flight_until_they_are_released():
    b = waiting_buffer()
    first, second = (b.reserve(None, model_step=3) for _ in range(2))
    b.sync.put(group([4]), train_step=5)
    assert b.report().reserved == {"default": 2}
    first.release()
    first.release()
    assert b.report().reserved == {"default": 1}
    second.release()
    assert b.report().reserved == {}


def test_a_reservation_ends_once_and_leaves_the_next_one_alone():
    b = waiting_buffer()
    first = b.reserve(2, model_step=3)
    b.sync.put(one(2, 4, A), train_step=5)
    b.sync.get(1, status=A)
    again = b.reserve(2, model_step=4)
    first.release()
    assert b.report().reserved == {"default": 1}
    assert repr(again) == "Reservation('default', 2, model_step=4)"


def test_a_group_put_twice_is_refused_and_nobody_waits_for_it():
    b = waiting_buffer()
    b.reserve(2, model_step=3)
    b.sync.put(one(2), train_step=5)
    with pytest.raises(ValueError, match="stored already"):
        b.sync.put(one(2), train_step=5)
    assert b.report().reserved == {}
    assert len(b.sync.take_train_batch({"default": 1}, train_step=5)["default"]) == 1


def test_a_put_that_is_refused_leaves_the_group_in_flight():
    b = waiting_buffer()
    b.reserve(2, model_step=3)
    with pytest.raises(ValueError, match="future"):
        b.sync.put(one(2, 9), train_step=5)
    assert b.report().reserved == {"default": 1}


def test_nothing_of_what_is_in_flight_expires():
    b = waiting_buffer(tail_batch_trigger_size=0)
    b.sync.put(one(2, 4, A), train_step=5)
    (lent,) = b.sync.get(1, status=A)
    b.reserve(2, model_step=4)
    assert b.sync.refresh_staleness(50) == {}
    assert (lent[0].response_ids, lent[0].status) == ([100], A)
    assert b.sync.put(lent) is E  # it is judged once it has landed


def test_work_in_flight_of_a_process_that_is_gone_is_not_waited_for(tmp_path):
    b = waiting_buffer(journal=tmp_path / "journal")
    b.sync.put(one(1), train_step=5)
    b.sync.put(one(2, 4, A), train_step=5)
    b.sync.get(1, status=A)
    b.reserve(2, model_step=3)
    b.sync.save(tmp_path / "checkpoint")
    b.sync.close()
    again = waiting_buffer(journal=tmp_path / "journal")
    again.sync.resume(tmp_path / "checkpoint")
    assert again.report().reserved == {}
    batch = again.sync.take_train_batch({"default": 1}, train_step=5)
    assert (len(batch["default"]), batch.straggler_s) == (1, 0.0)


def test_with_a_journal_a_group_in_flight_has_landed_once_others_see_it(tmp_path):
    async def main():
        b = waiting_buffer(journal=tmp_path / "journal")
        await b.put(one(1), train_step=5)
        b.reserve(2, model_step=3)
        taking = asyncio.ensure_future(b.take_train_batch({"default": 2}, train_step=5))
        taking_one = asyncio.ensure_future(b.take_train_batch({"default": 1}, train_step=5))
        await asyncio.sleep(0)
        await b.put(one(2, 3), train_step=5)
        batches = [await taking, await taking_one]
        await b.close()
        return [len(batch.get("default", ())) for batch in batches]

    assert asyncio.run(main()) == [0, 1]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"wait_for_stragglers": 1}, TypeError, "wait_for_stragglers must be a bool"),
        ({"straggler_timeout_s": 0}, ValueError, "straggler_timeout_s must be above 0"),
        ({"straggler_timeout_s": "5"}, TypeError, "straggler_timeout_s must be a number"),
    ],
)
def test_a_wrong_setting_is_refused(settings, error, words):
    with pytest.raises(error, match=words):
        ReplayBuffer(StalenessRule(), **settings)


# A run: producers that never stop, responses some of which take ten times as long


class Traffic:
    """Producers and a trainer around a buffer, on a clock that jumps.

    As many groups are begun as can be trained in time: by the version `v`, those of `v + max_staleness + 1` batches.
    """

    def __init__(self, seed, max_staleness, **settings):
        self.rng = random.Random(seed)
        self.buffer = ReplayBuffer(StalenessRule(max_staleness), **settings)
        self.size, self.periods = 4, max_staleness + 1
        self.version, self.train_step, self.begun, self.dropped = 0, 1, 0, 0
        self.staleness = []

    async def producer(self):
        while True:
            while self.begun - self.dropped >= (self.version + self.periods) * self.size:
                await self.changed.wait()
            number, version = self.begun, self.version
            self.begun += 1
            with self.buffer.reserve(number, model_step=version):
                long = self.rng.random() < 0.2
                await asyncio.sleep(self.rng.uniform(4, 12) if long else self.rng.uniform(0.5, 2))
                members = group([version] * (64 if long else 8), group_id=number)
                stored = await self.buffer.put(members, train_step=max(self.train_step, version + 1))
            self.drop(stored is E)

    def drop(self, n):
        self.dropped += n
        self.ring()

    def ring(self):
        self.changed.set()
        self.changed = asyncio.Event()

    async def play(self, steps=40):
        self.changed = asyncio.Event()
        producers = [asyncio.ensure_future(self.producer()) for _ in range(self.size * self.periods)]
        while self.train_step <= steps:
            self.drop((await self.buffer.refresh_staleness(self.train_step)).get("default", 0))
            await self.buffer.wait_ready({"default": self.size})
            batch = await self.buffer.take_train_batch({"default": self.size}, train_step=self.train_step)
            self.staleness += [self.train_step - m.min_model_step - 1 for g in batch["default"] for m in g]
            await asyncio.sleep(1)
            self.version = self.train_step
            self.train_step += 1
            self.ring()
        for producer in producers:
            producer.cancel()
        await asyncio.wait(producers)
        return self.buffer


@pytest.mark.parametrize("max_staleness", range(5))
@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_dropped_and_the_bound_is_kept(seed, max_staleness):
    traffic = Traffic(seed, max_staleness, wait_for_stragglers=True)
    report = run(traffic.play()).report()
    ledger = traffic.buffer.ledger()
    assert ledger["discarded"] == {}
    assert max(traffic.staleness) <= max_staleness
    assert len(traffic.staleness) == 160
    assert (report.straggler_s > 0) == (max_staleness > 0)  # where all is for one batch, that is waited for
    assert report.reserved == {}  # producers that were cancelled have none
    assert report.lengths.responses("expired") == 0
    assert report.lengths.length_ratio == 1.0


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_without_waiting_long_responses_are_dropped_and_the_lengths_show_it(max_staleness):
    lengths = {}
    for wait in (False, True):
        found = [Traffic(seed, max_staleness, wait_for_stragglers=wait) for seed in range(5)]
        reports = [run(traffic.play()).report() for traffic in found]
        assert all(max(traffic.staleness) <= max_staleness for traffic in found)
        lengths[wait] = sum((report.lengths for report in reports), LengthAccumulator())
    dropped, kept = (lengths[wait].responses("expired") for wait in (False, True))
    assert dropped > 20
    assert kept == 0
    by_length = {row.at_least: row.trained_responses / row.produced_responses for row in lengths[False].rows()}
    assert by_length[8] > 0.9 > by_length[64]
    assert lengths[False].length_ratio < 0.9 < lengths[True].length_ratio


# Producers of pystale


def waiting_line(*args, **settings):
    line = Line(*args, **settings)
    line.buffer.wait_for_stragglers = line.buffer.operations.wait_for_stragglers = True
    return line


def test_a_round_waits_for_stragglers_before_it_pauses():
    loop = ScriptedLoop(acts={2: finish(3, after=9)})
    site = Site(loop, over_sample_threshold=0.5, buffer={"wait_for_stragglers": True})
    result = run(site.manager.produce_batch(2, 1, model_step=0))
    assert loop.requests_to_pause == 0
    assert (ids(result), result.leftover[C], result.straggler_s) == ([0, 1], 1, 9)
    assert result.task_results["default"].straggler_s == 9
    # Without it the third group is paused, and is too old for the next round.
    loop = ScriptedLoop(acts={2: until_paused()})
    site = Site(loop, over_sample_threshold=0.5)
    result = run(site.manager.produce_batch(2, 1, model_step=0))
    assert (loop.requests_to_pause, result.straggler_s, result.leftover[A]) == (1, 0.0, 1)


def test_a_round_pauses_what_is_young_enough():
    loop = ScriptedLoop(acts={2: until_paused()})
    site = Site(loop, over_sample_threshold=0.5, max_staleness=1, buffer={"wait_for_stragglers": True})
    result = run(site.manager.produce_batch(2, 1, model_step=0))
    assert (result.leftover[A], result.straggler_s, site.buffer.report().reserved) == (1, 0.0, {})


def test_what_is_continued_is_as_old_as_its_oldest_token():
    loop = ScriptedLoop(acts={2: in_turn(until_paused(2), finish(1, after=9))})
    site = Site(
        loop,
        over_sample_threshold=0.5,
        max_staleness=1,
        enable_partial_rollout=True,
        buffer={"wait_for_stragglers": True},
    )

    async def main():
        await site.manager.produce_batch(2, 1, model_step=0)
        return await site.manager.produce_batch(2, 2, model_step=1)

    # The group has tokens of step 0 and is too old for step 3: the second round waits for it.
    assert run(main()).straggler_s > 8
    assert 2 in loop.calls


def test_a_round_does_not_wait_for_ever():
    site = Site(
        ScriptedLoop(acts={2: until_cancelled()}),
        over_sample_threshold=0.5,
        pause_limit_s=5,
        buffer={"wait_for_stragglers": True, "straggler_timeout_s": 20},
    )
    with pytest.raises(StragglersOverdue, match="1 in flight: group 2 of task 'default'"):
        run(site.manager.produce_batch(2, 1, model_step=0))
    assert site.stored() == {C: 2, A: 1}
    assert site.buffer.report().reserved == {}


@pytest.mark.parametrize("act", [fail(), until_cancelled()], ids=["failed", "cancelled"])
def test_a_group_that_does_not_come_back_is_not_in_flight(act):
    line = waiting_line(ScriptedLoop(act), max_retries=0, pause_limit_s=1)

    async def main():
        producing = asyncio.ensure_future(line.produce())
        await asyncio.sleep(3)
        producing.cancel()
        await asyncio.wait([producing])
        if not producing.cancelled():
            assert isinstance(producing.exception(), ProductionStalled)
        return line.buffer.report().reserved

    assert run(main()) == {}


def test_a_group_that_is_not_well_formed_is_given_up_and_not_waited_for(caplog):
    class Malformed:
        def __init__(self, sampler):
            self.sampler = sampler

        async def sample(self, task_name, statuses):
            members = await self.sampler.sample(task_name, statuses)
            if members[0].group_id == 0:
                members[0].response_ids, members[0].response_model_steps = [1, 2, 3], [0]
            return members

    line = waiting_line(enable_partial_rollout=True)
    report = run(line.produce(sampler=Malformed(line.sampler)))
    assert "nobody will wait for group 0: response_model_steps has 1 entries" in caplog.text
    assert report.completed + report.failed == report.spawned
    assert line.buffer.report().reserved == {}


def play(site, trainer, batch_size=2):
    async def main():
        producing = asyncio.ensure_future(site.manager.produce_loop(batch_size))
        try:
            return await trainer(site.manager)
        finally:
            await site.manager.shutdown()
            await asyncio.wait([producing])

    return run(main())


@pytest.mark.parametrize("wait", [False, True])
def test_in_the_background_a_batch_waits_for_stragglers_while_production_goes_on(wait):
    loop = ScriptedLoop(finish(3, after=1), acts={3: finish(30, after=3.5)})
    site = BackgroundSite(loop, max_staleness=2, over_sample_threshold=0.5, buffer={"wait_for_stragglers": wait})

    async def trainer(manager):
        waited = []
        for train_step in range(1, 6):
            result = await manager.get_batch(2, train_step)
            waited.append(result.straggler_s)
            await asyncio.sleep(1)
            await manager.continue_produce(train_step)  # engines take the new weights while they generate
        return waited

    waited = play(site, trainer)
    assert waited == [0, 0, 1.5 if wait else 0, 0, 0]
    # With oversampling more is begun than can be trained: then a short response is beyond it, and no long one.
    assert site.buffer.ledger()["discarded"] == {"expired": 3 if wait else 30}
    assert site.buffer.report().straggler_s == sum(waited)


def test_a_batch_in_the_background_says_all_when_stragglers_do_not_land():
    loop = ScriptedLoop(acts={1: until_cancelled()})
    site = BackgroundSite(
        loop, over_sample_threshold=0.5, pause_limit_s=1, buffer={"wait_for_stragglers": True, "straggler_timeout_s": 9}
    )

    async def trainer(manager):
        with pytest.raises(StragglersOverdue) as raised:
            await manager.get_batch(2, 1)
        return str(raised.value)

    message = play(site, trainer)
    assert "group 1 of task 'default' (model_step 0" in message
    assert "running: {'default': 1}, consumed so far: {'default': 0}. Status" in message


def test_ending_production_ends_the_wait():
    loop = ScriptedLoop(acts={1: until_paused()})
    site = BackgroundSite(loop, over_sample_threshold=0.5, buffer={"wait_for_stragglers": True})

    async def trainer(manager):
        getting = asyncio.ensure_future(manager.get_batch(2, 1))
        await asyncio.sleep(5)
        assert not getting.done()
        manager.shutdown()
        return await getting

    result = play(site, trainer)
    assert (ids(result), result.straggler_s) == ([0, 2], 5)


def test_the_strategy_needs_no_setting_for_it():
    strategy = DisaggAsyncProduceStrategyConfig().build()
    strategy.check_buffer(ReplayBuffer(strategy.rule, wait_for_stragglers=True), "default")
