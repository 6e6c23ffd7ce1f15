"""Several threads and event loops, cancelled calls, waits and callbacks."""

import asyncio
import gc
import threading
import time

import pytest
from rollouts import balance, group, state

from pystale import ReplayBuffer, StalenessRule, Status

C, A, E = Status.COMPLETED, Status.ABORTED, Status.EXPIRED
GUARD = 20  # seconds; only keeps a broken wait from hanging the run

pytestmark = pytest.mark.threads


def make(**more):
    return ReplayBuffer(**{"rule": StalenessRule(2, 0), "tail_batch_trigger_size": 0, **more})


# Waiting


def test_a_wait_is_over_at_once_when_the_groups_are_there():
    async def main():
        buffer = make()
        await buffer.put(group([5]), train_step=6)
        assert await buffer.wait_ready({"default": 1}, timeout=0)
        assert not await buffer.wait_ready({"default": 2}, timeout=0)

    asyncio.run(main())


def test_a_wait_is_woken_by_the_put_that_completes_it():
    async def main():
        buffer = make()
        wait = asyncio.create_task(buffer.wait_ready({"a": 2, "b": 1}))
        for task, status in (("a", C), ("b", A), ("b", C), ("a", C)):
            await asyncio.sleep(0)
            assert not wait.done()
            await buffer.put(group([5], status=status), task, train_step=6)
        assert await asyncio.wait_for(wait, GUARD)

    asyncio.run(main())


def test_a_wait_ends_at_its_timeout_and_leaves_nothing_behind():
    async def main():
        buffer = make()
        assert not await buffer.wait_ready({"default": 1}, timeout=0.01)
        assert not buffer.operations.waiters._waiting

    asyncio.run(main())
    assert not make().sync.wait_ready({"default": 1}, timeout=0.01)


@pytest.mark.parametrize("name", ["wait_ready", "is_ready", "take_batch"])
def test_a_task_without_a_rule_is_refused_even_when_another_task_is_short(name):
    buffer = ReplayBuffer({"a": StalenessRule()}, tail_batch_trigger_size=0)
    with pytest.raises(ValueError, match="task 'b' has no rule"):
        getattr(buffer.sync, name)({"a": 1, "b": 1})
    # Nobody waits who would make the put fail that has the groups of the other task ready.
    assert buffer.sync.put(group([5]), "a") is C


@pytest.mark.parametrize("timeout", [1e11, float("inf"), 2**70])
def test_a_wait_may_be_as_long_as_one_likes(timeout):
    buffer = make()
    put = threading.Timer(0.05, lambda: buffer.sync.put(group([5])))
    put.start()
    assert buffer.sync.wait_ready({"default": 1}, timeout=timeout)
    assert asyncio.run(buffer.wait_ready({"default": 1}, timeout=timeout))
    put.join()

    async def main():
        wait = asyncio.create_task(make().wait_ready({"default": 1}, timeout=timeout))
        await asyncio.wait((wait,), timeout=0.05)
        assert not wait.done()
        wait.cancel()

    asyncio.run(main())


def test_a_cancelled_wait_takes_nothing():
    async def main():
        buffer = make()
        wait = asyncio.create_task(buffer.wait_ready({"default": 1}))
        await asyncio.sleep(0)
        await buffer.put(group([5]), train_step=6)
        wait.cancel()  # woken and cancelled in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert not buffer.operations.waiters._waiting
        assert await buffer.count() == 1

    asyncio.run(main())


def test_waiters_in_threads_and_in_other_loops_are_woken():
    buffer, woken = make(), []

    def blocking():
        woken.append(buffer.sync.wait_ready({"default": 1}, timeout=GUARD))

    def other_loop():
        woken.append(asyncio.run(buffer.wait_ready({"default": 1}, timeout=GUARD)))

    threads = [threading.Thread(target=f) for f in (blocking, other_loop, blocking, other_loop)]
    for thread in threads:
        thread.start()
    while len(buffer.operations.waiters._waiting) < len(threads):
        time.sleep(0.001)
    buffer.sync.put(group([5]), train_step=6)
    for thread in threads:
        thread.join(GUARD)
    assert woken == [True] * 4


def test_a_waiter_whose_loop_is_gone_disturbs_nobody():
    buffer = make()
    loop = asyncio.new_event_loop()
    task = loop.create_task(buffer.wait_ready({"default": 1}))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    buffer.sync.put(group([5]), train_step=6)
    assert buffer.sync.count() == 1
    task._log_destroy_pending = False
    with pytest.raises(RuntimeError, match="closed"):
        task.get_loop().call_soon(int)
    coroutine = task.get_coro()
    coroutine.close()
    del task
    gc.collect()


# Threads


def test_many_threads_share_a_buffer_without_losing_or_doubling_a_group():
    buffer, taken, lock = make(rule=StalenessRule(50, 0)), [], threading.Lock()
    per_thread, errors = 200, []

    def produce(number):
        try:
            for i in range(per_thread):
                members = [state([5, 5], group_id=f"{number}-{i}", status=C if i % 3 else A)]
                buffer.sync.put(members, train_step=6)
                if i % 10 == 0:
                    buffer.sync.refresh_staleness(6 + i % 2)
        except Exception as error:
            errors.append(error)

    def consume(stop):
        try:
            while (
                not stop.is_set() or buffer.sync.count() or buffer.sync.count(status=A) or buffer.sync.count(status=E)
            ):
                batch = buffer.sync.take_train_batch({"default": 1}, train_step=6)
                for members in batch.get("default", []):
                    with lock:
                        taken.append(members[0].group_id)
                for status in (A, E):
                    for members in buffer.sync.get(2, status=status):
                        members[0].response_ids, members[0].response_model_steps = [1, 2, 3], [6, 6, 6]
                        members[0].status = C
                        buffer.sync.put(members)
                produced, used = balance(buffer.sync.ledger())
                if produced != used:
                    raise AssertionError(f"ledger does not balance: {buffer.sync.ledger()}")
        except Exception as error:
            errors.append(error)

    stop = threading.Event()
    producers = [threading.Thread(target=produce, args=(n,)) for n in range(4)]
    consumers = [threading.Thread(target=consume, args=(stop,)) for _ in range(3)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join(GUARD * 3)
    stop.set()
    for thread in consumers:
        thread.join(GUARD * 3)
    assert not errors
    assert sorted(taken) == sorted(f"{n}-{i}" for n in range(4) for i in range(per_thread))
    assert len(buffer) == 0


def test_one_group_put_by_many_threads_is_stored_once():
    for _ in range(20):
        buffer, members, refused = make(), group([5] * 2000), []
        start = threading.Barrier(4)

        def put(buffer=buffer, members=members, refused=refused, start=start):
            start.wait(GUARD)
            try:
                buffer.sync.put(members, train_step=6)
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD)
        assert len(buffer) == 1
        assert len(refused) == 3
        assert all("stored already" in words for words in refused)


def test_two_event_loops_share_a_buffer():
    buffer, counts = make(rule=StalenessRule(50, 0)), []

    async def produce():
        for i in range(100):
            await buffer.put(group([5]), train_step=6)
            await asyncio.sleep(0)
            counts.append(i)

    async def consume():
        total = 0
        while total < 200:
            await buffer.wait_ready({"default": 1}, timeout=GUARD)
            batch = await buffer.take_train_batch({"default": 1}, train_step=6)
            total += len(batch.get("default", []))
        return total

    result = []
    threads = [threading.Thread(target=lambda: asyncio.run(produce())) for _ in range(2)]
    threads.append(threading.Thread(target=lambda: result.append(asyncio.run(consume()))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD * 3)
    assert (result, len(counts), len(buffer)) == ([200], 200, 0)


# Releasing


def test_the_callback_gets_once_per_operation_what_was_cleared():
    calls = []
    buffer = make(on_release=calls.append).sync
    ref = object()
    for step in (2, 2, 5):
        buffer.put([state([step], routed_experts=ref), state([step])], train_step=3 if step == 2 else 6)
    buffer.refresh_staleness(6)
    assert len(calls) == 1
    released = [(s, cleared) for call in calls for s, cleared in call]
    assert [cleared.get("routed_experts") for _, cleared in released].count(ref) == 2
    assert all(s.routed_experts is None for s, _ in released)
    calls.clear()
    buffer.refresh_staleness(6)
    buffer.refresh_staleness(7)
    assert len(calls) == 1
    buffer.refresh_staleness(99)
    assert len(calls) == 1  # nothing was left to release


def test_an_async_callback_is_awaited_outside_the_lock():
    seen = []

    async def main():
        async def on_release(released):
            await asyncio.sleep(0)
            seen.append((len(released), await buffer.count(status=E)))  # would hang under the lock

        buffer = make(on_release=on_release)
        await buffer.put(group([2], [2]), train_step=3)
        await asyncio.wait_for(buffer.refresh_staleness(9), GUARD)
        await buffer.put(group([8]), train_step=9)
        await buffer.put(group([9]), train_step=10)
        batch = await buffer.take_train_batch({"default": 1}, train_step=10)
        assert list(batch["default"][0][0].response_model_steps) == [9]

    asyncio.run(main())
    assert seen == [(2, 1), (1, 2)]


def test_blocking_calls_run_an_async_callback_too_even_beside_a_running_loop():
    seen = []

    async def on_release(released):
        await asyncio.sleep(0)
        seen.append(len(released))

    buffer = make(on_release=on_release)
    buffer.sync.put(group([2]), train_step=6)

    async def main():
        buffer.sync.put(group([2]), train_step=6)

    asyncio.run(main())
    assert seen == [1, 1]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_callback_that_fails_is_logged_and_the_operation_stands(kind, caplog):
    def plain(released):
        raise RuntimeError("free failed")

    async def asynchronous(released):
        raise RuntimeError("free failed")

    async def main():
        buffer = make(on_release=plain if kind == "plain" else asynchronous)
        await buffer.put(group([2]), train_step=3)
        await buffer.put(group([5]), train_step=6)
        assert await buffer.refresh_staleness(6) == {"default": 1}
        await buffer.put(group([6], [3]), train_step=7)
        assert len(buffer) == 3
        assert len((await buffer.take_train_batch({"default": 1}, train_step=6))["default"]) == 1

    asyncio.run(main())
    assert "free failed" in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("face", ["async", "blocking"])
def test_a_callback_that_raises_a_cancellation_cancels_nobody(kind, face, caplog):
    def plain(released):
        raise asyncio.CancelledError("of my own")

    async def asynchronous(released):
        raise asyncio.CancelledError("of my own")

    buffer = make(on_release=plain if kind == "plain" else asynchronous)

    async def operate():
        await buffer.put(group([2]), train_step=3)
        await buffer.put(group([5]), train_step=6)
        return len((await buffer.take_train_batch({"default": 1}, train_step=6))["default"])

    def operate_blocking():
        buffer.sync.put(group([2]), train_step=3)
        buffer.sync.put(group([5]), train_step=6)
        return len(buffer.sync.take_train_batch({"default": 1}, train_step=6)["default"])

    assert (asyncio.run(operate()) if face == "async" else operate_blocking()) == 1
    assert "on_release failed on 1 states" in caplog.text
    assert "of my own" in caplog.text


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("face", ["async", "blocking"])
def test_a_callback_that_ends_the_program_ends_it_and_the_operation_stands(stop, kind, face):
    def plain(released):
        raise stop

    async def asynchronous(released):
        raise stop

    buffer = make(on_release=plain if kind == "plain" else asynchronous)
    buffer.sync.put(group([2]), train_step=3)
    buffer.sync.put(group([2]), train_step=3)
    with pytest.raises(stop):
        asyncio.run(buffer.refresh_staleness(9)) if face == "async" else buffer.sync.refresh_staleness(9)
    assert (buffer.sync.count(), buffer.sync.count(status=E)) == (0, 2)
    produced, accounted_for = balance(buffer.ledger())
    assert produced == accounted_for
    assert buffer.sync.refresh_staleness(9) == {"default": 0}


@pytest.mark.parametrize("operation", ["put", "reject"])
def test_cancelling_a_call_that_releases_leaves_what_it_did(operation):
    async def main():
        entered, gate, freed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def on_release(released):
            entered.set()
            await gate.wait()
            freed.set()

        buffer = make(on_release=on_release)
        members = group([2])
        call = buffer.put(members, train_step=9) if operation == "put" else buffer.reject(members)
        task = asyncio.create_task(call)
        await asyncio.wait_for(entered.wait(), GUARD)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await buffer.count(status=E), sum(buffer.ledger()["discarded"].values())) == (operation == "put", 1)
        gate.set()
        await asyncio.wait_for(freed.wait(), GUARD)

    asyncio.run(main())


def test_cancelling_a_take_while_it_releases_takes_nothing():
    async def main():
        entered, gate, freed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def on_release(released):
            entered.set()
            await gate.wait()
            freed.set()

        buffer = make(on_release=on_release)
        await buffer.put(group([2]), train_step=3)
        await buffer.put(group([5]), train_step=6)
        take = asyncio.create_task(buffer.take_train_batch({"default": 1}, train_step=6))
        await asyncio.wait_for(entered.wait(), GUARD)
        take.cancel()
        with pytest.raises(asyncio.CancelledError):
            await take
        assert await buffer.count() == 1
        gate.set()
        await asyncio.wait_for(freed.wait(), GUARD)  # the references are freed all the same

    asyncio.run(main())


def test_a_call_cancelled_before_it_ran_changes_nothing():
    async def main():
        buffer = make()
        for call in (
            lambda: buffer.put(group([5]), train_step=6),
            lambda: buffer.take_train_batch({"default": 0}, train_step=6),
        ):
            task = asyncio.create_task(call())
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (len(buffer), buffer.ledger()["produced"]) == (0, 0)

    asyncio.run(main())


# The loop stays free


def test_a_heartbeat_goes_on_while_the_buffer_refreshes_and_saves(tmp_path):
    async def main():
        buffer = ReplayBuffer(StalenessRule(3, 1), tail_batch_trigger_size=0)
        for i in range(60):
            await buffer.put(group(*[[5] * 2048] * 4, group_id=i), train_step=6)
        gaps, stop = [], asyncio.Event()

        async def heartbeat():
            last = time.monotonic()
            while not stop.is_set():
                await asyncio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        beat = asyncio.create_task(heartbeat())
        await asyncio.gather(buffer.save(tmp_path / "c"), buffer.refresh_staleness(6))
        await buffer.refresh_staleness(7)
        stop.set()
        await beat
        assert max(gaps) < GUARD

    asyncio.run(main())


def test_a_rollout_that_hangs_holds_up_nobody():
    async def main():
        buffer = make()
        await buffer.put(group([5], status=A), train_step=6)
        (lent,) = await buffer.get(1, status=A)
        hanging = asyncio.create_task(asyncio.Event().wait())
        await asyncio.wait_for(buffer.refresh_staleness(7), GUARD)
        assert await asyncio.wait_for(buffer.count(status=A), GUARD) == 0
        hanging.cancel()
        await buffer.put(lent)

    asyncio.run(main())
