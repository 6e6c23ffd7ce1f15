"""What the actor makes of what its clients say is in flight, and whom it lets in: the parts that need no cluster."""

import asyncio
import random

import pytest
from rollouts import group

from pystale import ReplayBuffer, StalenessRule
from pystale.integrations.ray.reserved import Reserved, Told
from pystale.integrations.ray.room import Room


@pytest.fixture
def buffer():
    return ReplayBuffer(StalenessRule(1))


@pytest.fixture
def reserved(buffer):
    return Reserved(buffer)


def told(number, group_id=None):
    return Told(number, "default", number if group_id is None else group_id, 3)


def in_flight(buffer):
    return buffer.report().reserved.get("default", 0)


def test_what_is_new_is_reserved_until_it_is_over(buffer, reserved):
    reserved.hear("a", 0, [told(1), told(2)], [], False)
    reserved.hear("b", 0, [told(1, "x")], [], False)
    assert (in_flight(buffer), sorted(reserved.clients)) == (3, ["a", "b"])
    reserved.hear("a", 1, [], [1], False)
    assert in_flight(buffer) == 2
    reserved.forget("a")
    assert (in_flight(buffer), reserved.clients) == (1, ["b"])


def test_the_whole_replaces_what_was_known(buffer, reserved):
    reserved.hear("a", 0, [told(1), told(2)], [], False)
    reserved.hear("a", 3, [told(2), told(3)], [], True)
    assert [t.number for _, t, _ in reserved.told(buffer.sync.stragglers({"default": 1}, train_step=5))] == [2, 3]
    reserved.hear("a", 4, [], [], True)
    assert (in_flight(buffer), reserved.clients) == (0, [])


@pytest.mark.parametrize("seed", range(50))
def test_in_whatever_order_messages_come_the_end_is_what_was_said_last(buffer, reserved, seed):
    rng = random.Random(seed)
    held, messages = set(), []
    for message in range(40):
        kind = rng.random()
        if kind < 0.5 or not held:
            held.add(message)
            messages.append((message, [told(message)], [], False))
        elif kind < 0.85:
            number = rng.choice(sorted(held))
            held.remove(number)
            messages.append((message, [], [number], False))
        else:
            messages.append((message, [told(number) for number in sorted(held)], [], True))
    # Each may be overtaken by a few.
    order = sorted(messages, key=lambda message: message[0] + rng.uniform(0, 6))
    for message in order:
        reserved.hear("a", *message)
    assert in_flight(buffer) == len(held)
    found = reserved.told(buffer.sync.stragglers({"default": 1}, train_step=5))
    assert {t.group_id for _, t, _ in found} == held
    reserved.hear("a", 99, [], [], True)
    assert in_flight(buffer) == 0
    assert reserved._known == {"a": {}}, "nothing is kept of what is over"


def test_a_group_that_is_here_is_reserved_once_it_is_gone(buffer, reserved):
    buffer.sync.put(group([3], group_id=1), train_step=5)
    reserved.hear("a", 0, [told(1)], [], False)
    assert in_flight(buffer) == 0
    buffer.sync.take_batch({"default": 1})
    reserved.hear("a", 1, [told(1)], [], True)
    assert in_flight(buffer) == 1


def test_a_group_that_has_landed_is_not_reserved_again(buffer, reserved):
    reserved.hear("a", 0, [told(1)], [], False)
    buffer.sync.put(group([3], group_id=1), train_step=5)
    buffer.sync.take_batch({"default": 1})
    reserved.hear("a", 1, [told(1)], [], True)
    assert in_flight(buffer) == 0


def test_only_those_that_are_waited_for_pass_the_bound():
    stored, awaited, entered = [], set(), []
    room = Room(lambda task_name: len(stored), 1, lambda task_name, group_id: group_id in awaited)

    async def put(group_id):
        async with room.of("default", group_id):
            entered.append(group_id)
            stored.append(group_id)

    async def main():
        puts = [asyncio.ensure_future(put(number)) for number in range(5)]
        await asyncio.sleep(0)
        assert (entered, room.waiting) == ([0], 4)
        awaited.update([2, 4])
        room.let_in()
        await asyncio.sleep(0)
        assert entered == [0]
        room.let_in(stragglers=True)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (entered, room.waiting) == ([0, 2, 4], 2)
        awaited.add(7)
        await put(7)  # though others wait
        puts[1].cancel()
        await asyncio.sleep(0)
        stored.clear()
        room.let_in()
        await asyncio.wait(puts)
        assert (entered, room.waiting) == ([0, 2, 4, 7, 3], 0)

    asyncio.run(main())
