"""Pending tasks, and awaiting something to its end."""

import asyncio

import pytest
from virtual_clock import run

from pystale.pending import PendingTasks, resolved, to_the_end, together


async def nothing():
    pass


async def end_after(seconds):
    await asyncio.sleep(seconds)


async def cancelled_while(coroutine):
    """Run in a task, cancel it at its first wait, and say how it ended."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return "cancelled" if task.cancelled() else task.result()


def test_work_is_claimed_in_the_order_it_ended():
    async def main():
        pending = PendingTasks()
        for seconds in (3, 1, 2):
            pending.schedule(seconds, end_after(seconds))
        claimed = []
        while pending:
            await pending.wait()
            claimed.append(pending.claim())
        return claimed

    assert run(main()) == [1, 2, 3]


def test_every_piece_is_claimed_once_however_many_ask():
    async def main():
        pending, claimed = PendingTasks(), []

        async def collect():
            while pending:
                await pending.wait()
                while (work := pending.claim()) is not None:
                    claimed.append(work)
                    await asyncio.sleep(0)

        for work in range(20):
            pending.schedule(work, end_after(work % 3))
        await asyncio.gather(collect(), collect(), collect())
        return claimed

    assert sorted(run(main())) == list(range(20))


def test_work_that_raised_or_was_cancelled_is_claimed_too(caplog):
    async def broken():
        raise RuntimeError

    async def main():
        pending = PendingTasks()
        pending.schedule("raised", broken())
        pending.schedule("cancelled", end_after(1))
        await pending.wait()
        pending.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [pending.claim(), pending.claim(), pending.claim()]

    assert run(main()) == ["raised", "cancelled", None]
    assert not caplog.records


def test_work_cancelled_before_its_task_began_is_claimed():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", nothing())
        pending.cancel()
        await pending.wait()
        return pending.claim()

    assert run(main()) == "a"


def test_waiting_ends_at_the_timeout():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", end_after(10))
        await pending.wait(4)
        early = asyncio.get_running_loop().time(), pending.claim(), len(pending)
        await pending.wait(60)
        return early, asyncio.get_running_loop().time(), pending.claim(), len(pending)

    assert run(main()) == ((4, None, 1), 10, "a", 0)


def test_waiting_for_nothing_returns():
    run(PendingTasks().wait())


def test_all_who_wait_are_woken():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", end_after(1))
        await asyncio.gather(*[pending.wait() for _ in range(3)])

    run(main())


def test_a_cancelled_wait_takes_nothing_along():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", end_after(1))
        ended = await cancelled_while(pending.wait())
        await pending.wait()
        return ended, pending.claim()

    assert run(main()) == ("cancelled", "a")


def test_a_wait_cancelled_at_the_moment_something_ends_is_still_cancelled():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", nothing())
        waiting = asyncio.ensure_future(pending.wait())
        await asyncio.sleep(0)  # both begin
        await asyncio.sleep(0)  # the piece of work has ended; who waits is about to be told
        waiting.cancel()
        await asyncio.wait([waiting])
        return waiting.cancelled(), pending.claim()

    assert run(main()) == (True, "a")


def test_abandoned_work_can_be_claimed_at_once_and_only_once():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", end_after(1))
        pending.schedule("b", end_after(2))
        given_up = pending.abandon()
        claimed = pending.claim(), pending.claim()
        await asyncio.sleep(3)
        return given_up, claimed, pending.claim(), len(pending)

    assert run(main()) == (["a", "b"], ("a", "b"), None, 0)


def test_what_runs_to_the_end_is_not_touched_by_cancellations():
    done = []

    async def work():
        await asyncio.sleep(1)
        done.append(True)
        return "result"

    async def main():
        task = asyncio.ensure_future(to_the_end(work()))
        for _ in range(3):
            await asyncio.sleep(0.1)
            task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), await to_the_end(work())

    assert run(main()) == (True, "result")
    assert done == [True, True]


def test_an_error_of_what_runs_to_the_end_is_raised_and_explains_a_cancellation():
    async def work():
        await asyncio.sleep(1)
        raise ValueError("broken")

    async def main():
        with pytest.raises(ValueError, match="broken"):
            await to_the_end(work())
        try:
            task = asyncio.ensure_future(to_the_end(work()))
            await asyncio.sleep(0)
            task.cancel()
            await task
        except asyncio.CancelledError as error:
            return repr(error.__cause__)

    assert run(main()) == "ValueError('broken')"


def test_plain_values_and_awaitables_are_resolved():
    async def five():
        return 5

    async def main():
        return await resolved(five()), await resolved(5)

    assert run(main()) == (5, 5)


def test_a_wait_can_be_ended_though_nothing_has():
    async def main():
        pending = PendingTasks()
        pending.schedule("a", end_after(5))
        asyncio.get_running_loop().call_later(1, pending.wake)
        await pending.wait()
        woken = asyncio.get_running_loop().time(), pending.claim()
        await pending.wait()
        return woken, pending.claim()

    assert run(main()) == ((1, None), "a")


async def raise_after(seconds, error):
    await asyncio.sleep(seconds)
    raise error


@pytest.mark.parametrize(("keep_going", "time"), [(False, 2), (True, 9)])
def test_the_first_failure_of_several_is_raised_once_all_have_ended(keep_going, time):
    async def main():
        with pytest.raises(ValueError, match="first"):
            await together(
                end_after(9),
                raise_after(2, ValueError("first")),
                raise_after(3, KeyError("later")),
                keep_going=keep_going,
            )
        return asyncio.get_running_loop().time()

    assert run(main()) == time


@pytest.mark.parametrize("pieces", [1, 3])
def test_cancelling_several_at_once_ends_all_of_them(pieces):
    assert run(cancelled_while(together(*[end_after(9) for _ in range(pieces)]))) == "cancelled"


def test_several_at_once_take_as_long_as_the_longest():
    async def main():
        await together()
        await together(end_after(2), end_after(5), end_after(1))
        return asyncio.get_running_loop().time()

    assert run(main()) == 5
