"""Calls that were answered or refused leave nothing behind, in C++, Cython or Python."""

import copy
import ctypes
import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from memory import Memory, memory_in_use, resident_bytes, set_apart
from rollouts import state

from pystale import (
    ModelSteps,
    ReplayBuffer,
    StalenessRule,
    Status,
    _objects,
    build_info,
    effective_mask,
    has_trainable_token,
    refresh_batch,
    seq_staleness,
)
from pystale._core import StalenessIndex

VALUES = [-1, 3, 3, 3, 4, 4, 10**6, 7] * 10
TOKENS = len(VALUES)
OFFSETS = [0, 30, 30, TOKENS]
RULE: dict[str, Any] = {"train_step": 8, "token_stale_threshold": 2}
FORMS: dict[str, Any] = {
    "list": VALUES,
    "NumPy scalars": tuple(np.int64(value) for value in VALUES),
    "int32": np.array(VALUES, np.int32),
    "strided big-endian": np.array(VALUES, ">i8").repeat(2)[::2],
    "uint64": np.abs(np.array(VALUES)).astype(np.uint64),
    "ModelSteps": ModelSteps.from_list(VALUES),
}
MASK = [1, 0] * (TOKENS // 2)


class Unreadable:
    """No integer, and its own code says so."""

    def __index__(self) -> int:
        raise ZeroDivisionError


BAD_STEPS: dict[str, Any] = {
    "too large": [*VALUES, 2**70],
    "of floats": [3, 0.5],
    "with code that fails": [3, Unreadable()],
    "of a wrong dtype": np.zeros(3),
    "past int64": np.array([3, 2**63], np.uint64),
    "that are none": object(),
}


def refused(call: Callable[[], Any]) -> Callable[[], None]:
    """The call, which must raise; the error goes the way of the others."""

    def attempt() -> None:
        try:
            call()
        except (TypeError, ValueError, IndexError, KeyError, OverflowError, ZeroDivisionError):
            return
        raise AssertionError("was not refused")

    return attempt


def kernel_paths() -> dict[str, Callable[[], Any]]:
    paths: dict[str, Callable[[], Any]] = {"build_info": build_info}
    flags, ages = np.empty(TOKENS, np.uint8), (np.empty(3, np.int64), np.empty(3, np.bool_))
    for form, steps in FORMS.items():
        paths |= {
            f"seq_staleness, {form}": lambda s=steps: seq_staleness(s, train_step=8),
            f"has_trainable_token, {form}": lambda s=steps: has_trainable_token(s, response_mask=MASK, **RULE),
            f"effective_mask, {form}": lambda s=steps: effective_mask(s, response_mask=MASK, **RULE),
            f"effective_mask with out, {form}": lambda s=steps: effective_mask(s, out=flags, **RULE),
            f"refresh_batch, {form}": lambda s=steps: refresh_batch(s, OFFSETS, stale_threshold=4, **RULE),
            f"refresh_batch with out, {form}": lambda s=steps: refresh_batch(
                s, OFFSETS, stale_threshold=4, response_mask=MASK, out=ages, **RULE
            ),
            f"summarise, {form}": lambda s=steps: _objects.summarise(s, MASK),
            f"trainable_mask, {form}": lambda s=steps: _objects.trainable_mask(s, MASK, 8, 2),
            f"ModelSteps.from_list, {form}": lambda s=steps: ModelSteps.from_list(s),
        }
    for kind, steps in BAD_STEPS.items():
        paths |= {
            f"effective_mask refuses steps {kind}": refused(lambda s=steps: effective_mask(s, **RULE)),
            f"refresh_batch refuses steps {kind}": refused(
                lambda s=steps: refresh_batch(s, [0, len(s)], stale_threshold=4, **RULE)
            ),
            f"ModelSteps.extend refuses steps {kind}": refused(lambda s=steps: ModelSteps().extend(s)),
        }
    paths["refresh_batch refuses offsets"] = refused(
        lambda: refresh_batch(VALUES, [0, 9, 3, TOKENS], stale_threshold=4, **RULE)
    )
    paths["effective_mask refuses a mask"] = refused(lambda: effective_mask(VALUES, response_mask=[1, "x"], **RULE))
    return paths


def grown() -> ModelSteps:
    steps = ModelSteps()
    for step in range(50):
        steps.append(step, 3)
    steps.extend(steps)
    return steps


def model_steps_paths() -> dict[str, Callable[[], Any]]:
    steps = ModelSteps.from_list(VALUES)
    return {
        "ModelSteps.append and extend": grown,
        "ModelSteps.append refuses": refused(lambda: steps.append(2**70)),
        "ModelSteps.from_runs": lambda: ModelSteps.from_runs([(3, 2), (4, 5)]),
        "ModelSteps.runs and nbytes": lambda: (steps.runs(), steps.nbytes),
        "ModelSteps.copy": lambda: (steps.copy(), copy.copy(steps), copy.deepcopy(steps)),
        "ModelSteps.count and index": lambda: (steps.count(3), steps.index(4), 4 in steps),
        "ModelSteps.index refuses": refused(lambda: steps.index(99)),
        "a slice of ModelSteps": lambda: (steps[3], steps[::-2], steps[5:40]),
        "ModelSteps refuse an index": refused(lambda: steps[TOKENS]),
        "iterating ModelSteps": lambda: (list(steps), list(reversed(steps))),
        "comparing ModelSteps": lambda: (steps == VALUES, steps == FORMS["int32"], steps == [*VALUES[:-1], "x"]),
        "an array of ModelSteps": lambda: (np.asarray(steps), np.asarray(steps, np.int32)),
        "pickling ModelSteps": lambda: (pickle.loads(pickle.dumps(steps)), repr(steps)),
    }


def index_paths() -> dict[str, Callable[[], Any]]:
    index = StalenessIndex()
    index.add_task(2, 1)

    def use() -> None:
        groups = [index.insert(0, 2, 5, at, [5, 4], [5, 4]) for at in range(4)]
        index.set_thresholds(0, 2, 1)
        for group in groups:
            index.due_members(group, 7)
            index.seq_staleness(group, 7), index.oldest(group), index.newest_trainable(group)
            index.key(group), index.arrival(group), index.status(group), index.deadline(group)
        index.due(7, 0x7F)
        index.expire(groups[0], [0], 4)
        (
            index.first(0, 2, 2),
            index.count(0, 2),
            index.counts(0),
            index.count_keys(0, 2, 0, 9),
            len(index),
            groups[0] in index,
            index.nbytes,
        )
        index.take(0, 2, 3)
        index.remove(groups[0])

    def add_task() -> None:
        StalenessIndex().add_task(2, None)

    return {
        "StalenessIndex.insert due due_members expire first take remove count counts count_keys set_thresholds "
        "seq_staleness oldest newest_trainable key arrival status deadline nbytes": use,
        "StalenessIndex.add_task": add_task,
        "StalenessIndex.insert refuses": refused(lambda: index.insert(0, 2, 5, 0, [5, 4], [5])),
        "StalenessIndex.remove refuses": refused(lambda: index.remove(12345)),
    }


def object_paths() -> dict[str, Callable[[], Any]]:
    states = [state([3, 4, 4]), state([7] * 40, response_mask=[1] * 40)]
    members = [_objects.measure(s, s.response_model_steps) for s in states]
    flags = np.empty(43, np.uint8)
    tags = {"p": {"head": True, "status": "x"}, "p_0": {}, "p_1": {}}

    def listing() -> None:
        known = _objects.KeyedListing("head", ("status",))
        heads, _ = known.accept(known.compare(tags))
        changes = known.compare({"p": {"head": True, "status": "y"}, "q": {"head": True, "status": "x"}, "q_0": {}})
        known.accept(changes)
        heads[0].keys, known.state({"head": True, "status": "x"})

    return {
        "Responses": lambda: _objects.Responses(states).write(flags, 1),
        "Responses refuse": refused(lambda: _objects.Responses([state([3, "x"])])),
        "Member and measure": lambda: _objects.measure(states[0], [3, 4, 4], 8).seq_staleness(8),
        "trainable_masks": lambda: _objects.trainable_masks(states, members, True, 8, 2),
        "pack_lists": lambda: (_objects.pack_lists([VALUES, VALUES]), _objects.pack_lists([[1, "x"]])),
        "filled_fields": lambda: _objects.filled_fields(states, ("response_ids", "response_mask")),
        "replace_fields": lambda: _objects.replace_fields(state([3]), {"response_ids": [9]}, []),
        "copy_fields": lambda: _objects.copy_fields(states[0], state([3]), ("response_ids", "status")),
        "tensor_memory": lambda: _objects.tensor_memory(flags, "out"),
        "KeyedListing, ListingChanges, KeyGroup": listing,
    }


def buffer_paths() -> dict[str, Callable[[], Any]]:
    buffer = ReplayBuffer(StalenessRule(1, 0), tail_batch_trigger_size=0).sync

    def put_and_take() -> None:
        buffer.put([state([5, 5, 5]), state([4, 5])], train_step=6)
        buffer.refresh_staleness(6)
        assert len(buffer.take_train_batch({"default": 1}, train_step=6)["default"]) == 1

    def put_and_expire() -> None:
        buffer.put([state([5, 5, 5], routed_experts=object())], train_step=6)
        assert buffer.refresh_staleness(9) == {"default": 1}
        (group,) = buffer.get(1, status=Status.EXPIRED)
        group[0].response_ids, group[0].response_model_steps, group[0].status = [1], [8], Status.COMPLETED
        buffer.put(group)
        buffer.take_batch({"default": 1})

    def refuse() -> None:
        buffer.put([state([5, 5, 5], response_mask=[1])])

    return {
        "a group put and taken": put_and_take,
        "a group that expires and is rolled out again": put_and_expire,
        "a group that is refused": refused(refuse),
        "a buffer": lambda: ReplayBuffer(StalenessRule(1, 0), tail_batch_trigger_size=0).sync.put([state([5])]),
    }


PATHS = kernel_paths() | model_steps_paths() | index_paths() | object_paths() | buffer_paths()


def leaks(growth: Memory, calls: int) -> bool:
    """Whether every other call left something: a block, an object, or 16 bytes of malloc, the least it gives."""
    return growth.blocks >= calls // 2 or growth.objects >= calls // 2 or growth.heap >= calls // 2 * 16


def growth_of(call: Callable[[], Any], calls: int) -> Memory:
    """What the calls leave behind. A leak is there in every round; what fills a cache or a free list is not."""
    with set_apart():
        for _ in range(8):
            before = memory_in_use()
            for _ in range(calls):
                call()
            growth = memory_in_use().growth_since(before)
            if not leaks(growth, calls):
                break
    return growth


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_calls_leave_nothing_behind(path: Callable[[], Any]) -> None:
    calls = 500
    growth = growth_of(path, calls)
    assert not leaks(growth, calls), growth


@pytest.mark.long
def test_a_million_calls_leave_memory_as_it_was() -> None:
    calls, rounds = 100, 1_000_000 // 100 // len(PATHS) + 1

    def every_path() -> None:
        for path in PATHS.values():
            for _ in range(calls):
                path()

    for _ in range(3):
        every_path()
    with set_apart():
        before, resident = memory_in_use(), resident_bytes()
        for _ in range(rounds):
            every_path()
        growth = memory_in_use().growth_since(before)
    assert not leaks(growth, calls * rounds), growth
    assert resident_bytes() - resident < 4 << 20


def test_every_compiled_function_and_class_is_among_the_calls() -> None:
    public = [name for name, value in vars(_objects).items() if callable(value) and not name.startswith("_")]
    ours = [name for name in public if getattr(vars(_objects)[name], "__module__", "").startswith("pystale")]
    methods = [name for kind in (ModelSteps, StalenessIndex) for name in vars(kind) if not name.startswith("_")]
    words = set(re.findall(r"\w+", " ".join(PATHS)))
    assert {*ours, *methods} <= words


@pytest.mark.parametrize("kind", ["block", "object", "malloc"])
def test_one_leak_per_call_is_noticed(kind: str) -> None:
    kept: list[int] = []
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    objects: list[Any] = []

    def leak() -> None:
        if kind == "malloc":
            kept.append(malloc(16))
        else:
            objects.append([] if kind == "object" else object())

    def leak_nothing() -> None:
        [object(), [], ctypes.create_string_buffer(100)]

    try:
        assert leaks(growth_of(leak, 200), 200)
        assert not leaks(growth_of(leak_nothing, 200), 200)
    finally:
        for address in kept:
            free(address)
    gc.collect()
