"""StalenessIndex against a plain dict model, and its limits."""

import dataclasses
import random
import sys
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from pystale._core import StalenessIndex

STATUSES = range(7)
ALL = (1 << 7) - 1
MAX = 2**63 - 1
MIN = -(2**63)


@dataclasses.dataclass
class Group:
    """What the model knows of a group."""

    task: int
    status: int
    key: int | None
    arrival: int
    oldest: list[int]
    newest: list[int]


class Model:
    """The meaning of the index: groups in a dict, every question a scan."""

    def __init__(self, *thresholds: tuple[int, int | None]) -> None:
        self.thresholds = list(thresholds)
        self.groups: dict[int, Group] = {}

    def deadlines(self, group: Group) -> list[int | None]:
        stale, token = self.thresholds[group.task]
        deadlines: list[int | None] = []
        for oldest, newest in zip(group.oldest, group.newest, strict=True):
            terms = [oldest + stale] if oldest >= 0 else []
            if newest >= 0 and token is not None:
                terms.append(newest + token)
            deadline = 1 + min(terms, default=MAX)
            deadlines.append(deadline if deadline <= MAX else None)
        return deadlines

    def deadline(self, group: Group) -> int | None:
        return min((deadline for deadline in self.deadlines(group) if deadline is not None), default=None)

    def due_members(self, group: Group, train_step: int) -> list[int]:
        return [i for i, d in enumerate(self.deadlines(group)) if d is not None and d <= train_step]

    def due(self, train_step: int, statuses: int, task: int | None = None) -> list[tuple[int, list[int]]]:
        asked = [
            (group.arrival, group.task, id_, self.due_members(group, train_step))
            for id_, group in self.groups.items()
            if statuses >> group.status & 1 and task in (None, group.task)
        ]
        return [(id_, members) for _, _, id_, members in sorted(asked) if members]

    def expire(self, id_: int, positions: list[int], status: int) -> None:
        group = self.groups[id_]
        group.status = status
        for position in positions:
            group.oldest[position] = group.newest[position] = -1

    def pool(self, task: int, status: int) -> list[int]:
        def order(id_: int) -> tuple[bool, int, int]:
            group = self.groups[id_]
            return (group.key is None, group.key or 0, group.arrival)

        ids = [id_ for id_, group in self.groups.items() if (group.task, group.status) == (task, status)]
        return sorted(ids, key=order)


def insert(index: StalenessIndex, group: Group) -> int:
    return index.insert(group.task, group.status, group.key, group.arrival, group.oldest, group.newest)


def index_with(*groups: Group, stale: int = 3, token: int | None = 1) -> tuple[StalenessIndex, list[int]]:
    index = StalenessIndex()
    for _ in range(1 + max((group.task for group in groups), default=0)):
        index.add_task(stale, token)
    return index, [insert(index, group) for group in groups]


def assert_same(index: StalenessIndex, model: Model) -> None:
    assert len(index) == len(model.groups)
    for id_, group in model.groups.items():
        assert id_ in index
        assert index.oldest(id_) == group.oldest
        assert index.newest_trainable(id_) == group.newest
        assert (index.key(id_), index.arrival(id_), index.status(id_)) == (group.key, group.arrival, group.status)
        assert index.deadline(id_) == model.deadline(group)
    for task in range(len(model.thresholds)):
        pools = [model.pool(task, status) for status in STATUSES]
        assert [index.first(task, status, len(model.groups) + 1) for status in STATUSES] == pools
        assert index.counts(task) == [len(pool) for pool in pools]
        assert [index.count(task, status) for status in STATUSES] == [len(pool) for pool in pools]


# Few distinct values, so that buckets fill, empty and are met again; and the ends of int64.
steps = st.integers(-1, 6) | st.sampled_from([MAX, MAX - 1, MAX - 4])
keys = st.none() | st.integers(-4, 4) | st.sampled_from([MIN, MAX])
thresholds = st.integers(1, 5) | st.just(MAX)
token_thresholds = st.none() | thresholds
train_steps = st.integers(-2, 14) | st.sampled_from([MIN, MAX - 2, MAX - 1, MAX])
statuses = st.sampled_from(STATUSES)
masks = st.integers(0, ALL)
members = st.lists(st.tuples(steps, steps), min_size=1, max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """Any history of calls leaves the index and the model with the same answers."""

    groups: Bundle[int] = Bundle("groups")
    left: Bundle[Group] = Bundle("left")  # taken or removed; may come back with its arrival

    def __init__(self) -> None:
        super().__init__()
        self.index = StalenessIndex()
        self.model = Model()
        self.arrivals: list[int] = []
        self.issued: set[int] = set()

    def insert(self, group: Group) -> int:
        id_ = insert(self.index, group)
        assert id_ not in self.issued
        self.issued.add(id_)
        self.model.groups[id_] = group
        return id_

    def some_task(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(range(len(self.model.thresholds))), label="task")

    @initialize(stale=thresholds, token=token_thresholds)
    def start_with_a_task(self, stale: int, token: int | None) -> None:
        self.add_task(stale, token)

    @rule(stale=thresholds, token=token_thresholds)
    def add_task(self, stale: int, token: int | None) -> None:
        assert self.index.add_task(stale, token) == len(self.model.thresholds)
        self.model.thresholds.append((stale, token))
        self.arrivals.append(0)

    @rule(data=st.data(), stale=thresholds, token=token_thresholds)
    def set_thresholds(self, data: st.DataObject, stale: int, token: int | None) -> None:
        task = self.some_task(data)
        self.index.set_thresholds(task, stale, token)
        self.model.thresholds[task] = (stale, token)

    @rule(target=groups, data=st.data(), status=statuses, key=keys, members=members, sign=st.sampled_from([1, 1, -1]))
    def insert_new(
        self, data: st.DataObject, status: int, key: int | None, members: list[tuple[int, int]], sign: int
    ) -> int:
        task = self.some_task(data)
        self.arrivals[task] += 1
        oldest, newest = ([*side] for side in zip(*members, strict=True))
        return self.insert(Group(task, status, key, sign * self.arrivals[task], oldest, newest))

    @rule(target=groups, group=consumes(left), status=statuses, key=keys)
    def insert_again(self, group: Group, status: int, key: int | None) -> int:
        return self.insert(dataclasses.replace(group, status=status, key=key))

    @rule(id_=groups, data=st.data(), status=statuses)
    def expire(self, id_: int, data: st.DataObject, status: int) -> None:
        if id_ not in self.model.groups:
            with pytest.raises(KeyError, match=str(id_)):
                self.index.expire(id_, [0], status)
            return
        last = len(self.model.groups[id_].oldest) - 1
        positions = data.draw(st.lists(st.integers(0, last), max_size=4), label="positions")
        self.index.expire(id_, positions, status)
        self.model.expire(id_, positions, status)

    @rule(train_step=train_steps, mask=masks, status=statuses)
    def expire_all_that_is_due(self, train_step: int, mask: int, status: int) -> None:
        for id_, positions in self.index.due(train_step, mask):
            self.index.expire(id_, positions, status)
            self.model.expire(id_, positions, status)
        assert self.index.due(train_step, mask) == []

    @rule(target=left, id_=consumes(groups))
    def remove(self, id_: int) -> Group | MultipleResults[Group]:
        if id_ not in self.model.groups:
            with pytest.raises(KeyError, match=str(id_)):
                self.index.remove(id_)
            return multiple()
        self.index.remove(id_)
        assert id_ not in self.index
        return self.model.groups.pop(id_)

    @rule(target=left, data=st.data(), status=statuses, n=st.integers(0, 4))
    def take(self, data: st.DataObject, status: int, n: int) -> MultipleResults[Group]:
        task = self.some_task(data)
        expected = self.model.pool(task, status)[:n]
        assert self.index.first(task, status, n) == expected
        assert self.index.take(task, status, n) == expected
        return multiple(*(self.model.groups.pop(id_) for id_ in expected))

    @rule(train_step=train_steps, mask=masks, data=st.data(), one_task=st.booleans())
    def due(self, train_step: int, mask: int, data: st.DataObject, one_task: bool) -> None:
        task = self.some_task(data) if one_task else None
        assert self.index.due(train_step, mask, task) == self.model.due(train_step, mask, task)

    @rule(first=keys.filter(lambda key: key is not None), last=keys.filter(lambda key: key is not None), data=st.data())
    def count_keys(self, first: int, last: int, data: st.DataObject) -> None:
        task = self.some_task(data)
        for status in STATUSES:
            of_pool = [self.model.groups[id_].key for id_ in self.model.pool(task, status)]
            found = [key for key in of_pool if key is not None and first <= key <= last]
            assert self.index.count_keys(task, status, first, last) == len(found)

    @rule(id_=groups, train_step=train_steps)
    def ask_of_a_group(self, id_: int, train_step: int) -> None:
        group = self.model.groups.get(id_)
        if group is not None:
            assert self.index.due_members(id_, train_step) == self.model.due_members(group, train_step)
            staleness = [max(train_step - oldest - 1, MIN) if oldest >= 0 else 0 for oldest in group.oldest]
            assert self.index.seq_staleness(id_, train_step) == staleness

    @invariant()
    def same_as_the_model(self) -> None:
        assert_same(self.index, self.model)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("distinct_keys", [1, 7, 10_000], ids=lambda n: f"{n}_keys")
def test_long_random_histories_agree_with_the_model(seed: int, distinct_keys: int) -> None:
    # Thousands of groups: several chunks of slots, deep buckets, and many late arrivals in each.
    rng = random.Random(seed)
    model = Model((3, None), (2, 1), (9, 4))
    index = StalenessIndex()
    for stale, token in model.thresholds:
        index.add_task(stale, token)
    left: list[Group] = []
    for round_ in range(12):
        for arrival in range(round_ * 400, (round_ + 1) * 400):
            size = rng.choice([1, 2, 8, 17])
            oldest = [rng.randint(-1, round_ + 2) for _ in range(size)]
            newest = [rng.randint(step, round_ + 3) for step in oldest]
            key = rng.choice([None, rng.randrange(distinct_keys), -rng.randrange(distinct_keys)])
            group = Group(rng.randrange(3), rng.choice([1, 1, 2]), key, arrival, oldest, newest)
            model.groups[insert(index, group)] = group
            if left and rng.random() < 0.5:
                group = left.pop(rng.randrange(len(left)))
                model.groups[insert(index, group)] = group
        task = rng.choice([None, 0, 1, 2])
        due = index.due(round_, 0b1110, task)
        assert due == model.due(round_, 0b1110, task)
        for id_, positions in due:
            index.expire(id_, positions, 3)
            model.expire(id_, positions, 3)
        for task in range(3):
            status, n = rng.choice([1, 2, 3]), rng.randrange(200)
            taken = index.take(task, status, n)
            assert taken == model.pool(task, status)[:n]
            left += [model.groups.pop(id_) for id_ in taken]
        for id_ in rng.sample(sorted(model.groups), len(model.groups) // 5):
            index.remove(id_)
            left.append(model.groups.pop(id_))
        if round_ % 4 == 3:
            index.set_thresholds(1, round_, round_ // 2)
            model.thresholds[1] = (round_, round_ // 2)
    assert_same(index, model)


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("oldest", "newest", "token", "deadline"),
    [
        (4, 4, None, 8),
        (4, 4, 1, 6),
        (4, 6, 1, 8),
        (4, 9, 1, 8),
        (4, -1, 1, 8),
        (-1, 4, 1, 6),
        (-1, 4, None, None),
        (-1, -1, 1, None),
        (0, 0, 1, 2),
    ],
)
def test_the_deadline_is_one_past_the_earlier_of_the_two_terms(
    oldest: int, newest: int, token: int | None, deadline: int | None
) -> None:
    index, (group,) = index_with(Group(0, 1, 0, 0, [oldest], [newest]), token=token)
    assert index.deadline(group) == deadline
    if deadline is not None:
        assert index.due(deadline - 1, ALL) == []
        assert index.due(deadline, ALL) == [(group, [0])]


def test_preserved_members_of_an_expired_group_come_due_later() -> None:
    index, (group,) = index_with(Group(0, 1, 2, 0, [2, 5], [2, 5]), token=None)
    assert index.due(6, ALL) == [(group, [0])]
    index.expire(group, [0], 3)
    assert index.due(8, ALL) == []
    assert index.due(9, ALL) == [(group, [1])]
    assert (index.status(group), index.key(group), index.arrival(group)) == (3, 2, 0)


def test_going_back_in_train_step_asks_the_same_question_again() -> None:
    index, groups = index_with(*(Group(0, 1, 0, i, [i], [-1]) for i in range(5)))
    ahead = index.due(100, ALL)
    assert [group for group, _ in ahead] == groups
    assert index.due(4, ALL) == ahead[:1]
    assert index.due(100, ALL) == ahead


def test_any_negative_step_means_none() -> None:
    index, (group,) = index_with(Group(0, 1, 0, 0, [-7, MIN], [-2, MIN]))
    assert index.oldest(group) == index.newest_trainable(group) == [-1, -1]
    assert index.deadline(group) is None
    assert index.seq_staleness(group, 10) == [0, 0]


def test_a_deadline_past_int64_never_comes_and_the_last_one_does() -> None:
    index, (never, last) = index_with(Group(0, 1, 0, 0, [MAX - 3], [-1]), Group(0, 1, 0, 1, [MAX - 4], [-1]))
    assert index.deadline(never) is None
    assert index.deadline(last) == MAX
    assert index.due(MAX - 1, ALL) == []
    assert index.due(MAX, ALL) == [(last, [0])]
    index.set_thresholds(0, MAX, MAX)
    assert index.due(MAX, ALL) == []


def test_seq_staleness_saturates_instead_of_overflowing() -> None:
    index, (group,) = index_with(Group(0, 1, 0, 0, [0, 5, MAX, -1], [-1] * 4))
    assert index.seq_staleness(group, MIN) == [MIN, MIN, MIN, 0]
    assert index.seq_staleness(group, 0) == [-1, -6, MIN, 0]
    assert index.seq_staleness(group, MAX) == [MAX - 1, MAX - 6, -1, 0]


def test_thresholds_belong_to_one_task() -> None:
    index, (mine, other) = index_with(Group(0, 1, 0, 0, [4], [4]), Group(1, 1, 0, 0, [4], [4]))
    index.set_thresholds(0, 10, None)
    assert (index.deadline(mine), index.deadline(other)) == (15, 6)
    assert index.due(20, ALL, 0) == [(mine, [0])]
    assert index.due(20, ALL) == [(mine, [0]), (other, [0])]


def test_due_answers_for_the_pools_asked() -> None:
    index, groups = index_with(*(Group(0, status, 0, status, [0], [0]) for status in STATUSES))
    for status in STATUSES:
        assert index.due(9, 1 << status) == [(groups[status], [0])]
    assert index.due(9, 0) == []


# --- order and ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_by_key_then_arrival_and_without_key_last(seed: int) -> None:
    wanted = [(-3, 9), (0, 2), (0, 5), (MAX, 1), (None, 0), (None, 7)]
    shuffled = random.Random(seed).sample(wanted, len(wanted))
    index, groups = index_with(*(Group(0, 1, key, arrival, [0], [0]) for key, arrival in shuffled))
    inserted = dict(zip(groups, shuffled, strict=True))
    assert [inserted[group] for group in index.take(0, 1, 99)] == wanted


def test_groups_that_come_back_keep_their_place() -> None:
    index, groups = index_with(*(Group(0, 1, 0, i, [0], [0]) for i in range(6)))
    assert index.take(0, 1, 3) == groups[:3]
    again = [insert(index, Group(0, 1, 0, i, [0], [0])) for i in (1, 0, 2)]
    assert index.first(0, 1, 6) == [again[1], again[0], again[2], *groups[3:]]


def test_an_id_is_never_issued_again() -> None:
    index, (group,) = index_with(Group(0, 1, 0, 0, [0], [0]))
    issued = {group}
    for arrival in range(100):
        index.remove(group)
        assert group not in index
        group = insert(index, Group(0, 1, 0, arrival, [0], [0]))
        assert group not in issued
        issued.add(group)


# --- refusals, each before anything changes --------------------------------------------------------------------------

Call = Callable[[StalenessIndex, int], object]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x, g: x.add_task(0, None), ValueError, "^stale_threshold is 0"),
        (lambda x, g: x.add_task(1, -1), ValueError, "token_stale_threshold is -1"),
        (lambda x, g: x.set_thresholds(0, 0, 1), ValueError, "^stale_threshold is 0"),
        (lambda x, g: x.set_thresholds(2, 1, 1), IndexError, "task is 2; the index has 2"),
        (lambda x, g: x.insert(-1, 1, 0, 9, [0], [0]), IndexError, "task is -1"),
        (lambda x, g: x.insert(0, 7, 0, 9, [0], [0]), ValueError, "status is 7; 0 to 6"),
        (lambda x, g: x.insert(0, 1, 0, 9, [0, 1], [0]), ValueError, "2 entries, newest_trainable has 1"),
        (lambda x, g: x.insert(0, 1, 0, 9, [], []), ValueError, "at least one member"),
        (lambda x, g: x.insert(0, 1, 0, 9, [0, 1.0], [0, 0]), TypeError, r"oldest\[1\] must be an integer, got float"),
        (lambda x, g: x.insert(0, 1, 0, 9, [0], 0), TypeError, "newest_trainable must be a sequence .* got int"),
        (lambda x, g: x.insert(0, 1, 0, 9, [2**63], [0]), ValueError, r"oldest\[0\] .* 64 bits: 9223372036854775808"),
        (lambda x, g: x.due(1, 128), ValueError, "statuses is 128"),
        (lambda x, g: x.due(1, -1), ValueError, "statuses is -1"),
        (lambda x, g: x.due(1, 1, 5), IndexError, "task is 5"),
        (lambda x, g: x.expire(g, [0, 2], 3), IndexError, r"members\[1\] is 2; group \d+ has members 0 to 1"),
        (lambda x, g: x.expire(g, [-1], 3), IndexError, r"members\[0\] is -1"),
        (lambda x, g: x.expire(g, [0], -1), ValueError, "status is -1"),
        (lambda x, g: x.first(0, 1, -1), ValueError, "n is -1"),
        (lambda x, g: x.take(0, 1, -1), ValueError, "n is -1"),
        (lambda x, g: x.take(0, 9, 1), ValueError, "status is 9"),
        (lambda x, g: x.count(2, 1), IndexError, "task is 2"),
        (lambda x, g: x.counts(2), IndexError, "task is 2"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(call: Call, error: type[Exception], match: str) -> None:
    stored = [Group(0, 1, 4, 0, [4, 5], [6, 5]), Group(1, 3, None, 1, [-1], [-1])]
    index, groups = index_with(*stored)
    model = Model((3, 1), (3, 1))
    model.groups = dict(zip(groups, stored, strict=True))
    with pytest.raises(error, match=match):
        call(index, groups[0])
    assert_same(index, model)
    assert index.add_task(1, None) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda x, g: x.due_members(g, 1),
        lambda x, g: x.expire(g, [0], 3),
        lambda x, g: x.remove(g),
        lambda x, g: x.seq_staleness(g, 1),
        lambda x, g: x.oldest(g),
        lambda x, g: x.newest_trainable(g),
        lambda x, g: x.key(g),
        lambda x, g: x.arrival(g),
        lambda x, g: x.status(g),
        lambda x, g: x.deadline(g),
    ],
)
def test_an_unknown_group_is_a_key_error(call: Call) -> None:
    index, (kept, removed) = index_with(Group(0, 1, 0, 0, [0], [0]), Group(0, 1, 0, 1, [0], [0]))
    index.remove(removed)
    replaced = insert(index, Group(0, 1, 0, 2, [0], [0]))
    for unknown in (removed, -1, kept + 2, replaced + (1 << 32), MAX, MIN):
        with pytest.raises(KeyError, match=f"group {unknown} is not in the index"):
            call(index, unknown)
    assert index.first(0, 1, 9) == [kept, replaced]


def test_containment_takes_anything() -> None:
    index, (group,) = index_with(Group(0, 1, 0, 0, [0], [0]))
    assert group in index
    for other in ("0", None, 0.0, 2**70, -(2**70), group + 1, -1):
        assert other not in index


def test_members_may_be_any_sequence_of_integers() -> None:
    index, _ = index_with(Group(0, 1, 0, 0, [0], [0]))
    for steps in ((3, 4), range(3, 5), np.array([3, 4], np.int32)):
        assert index.oldest(index.insert(0, 1, 0, 1, steps, steps)) == [3, 4]


class Clearing:
    """An integer that empties its list when it is read."""

    def __init__(self, owner: list[object]) -> None:
        self.owner = owner

    def __index__(self) -> int:
        self.owner.clear()
        return 3


def test_a_list_that_shrinks_while_it_is_read_is_refused() -> None:
    hostile: list[object] = []
    hostile += [Clearing(hostile), *range(1000, 1100)]
    index, groups = index_with(Group(0, 1, 0, 0, [0], [0]))
    with pytest.raises(ValueError, match="oldest has 1 entries, newest_trainable has 101"):
        index.insert(0, 1, 0, 1, hostile, [0] * 101)  # type: ignore[arg-type]
    assert index.first(0, 1, 9) == groups


# --- memory ----------------------------------------------------------------------------------------------------------


def test_nothing_due_allocates_no_python_objects() -> None:
    index, _ = index_with(*(Group(0, 1, i % 50, i, [i % 50 + 100] * 8, [i % 50 + 100] * 8) for i in range(20_000)))
    assert index.due(1, ALL) == []
    tracemalloc.start()
    blocks = sys.getallocatedblocks()
    for _ in range(100):
        index.due(1, ALL)
    allocated = sys.getallocatedblocks() - blocks
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert allocated < 50
    assert peak < 4096


def test_the_memory_of_removed_groups_is_used_again() -> None:
    index, groups = index_with(*(Group(0, 1, 0, i, [0] * 8, [0] * 8) for i in range(5000)))
    full = index.nbytes
    for group in groups:
        index.remove(group)
    assert index.nbytes < full
    for i in range(5000):
        insert(index, Group(0, 1, 0, i, [0] * 8, [0] * 8))
    assert index.nbytes == full


def test_an_empty_index_answers() -> None:
    index = StalenessIndex()
    assert len(index) == 0
    assert index.due(5, ALL) == []
    index.add_task(1, None)
    assert index.counts(0) == [0] * 7
    assert index.take(0, 1, 10) == []
    assert index.nbytes > 0
