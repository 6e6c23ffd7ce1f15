"""Lists become columns of numbers: exactly, and only lists of one kind of number."""

import gc
import math
import struct
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pystale import ModelSteps, RolloutState
from pystale._objects import filled_fields, pack_lists

INT64 = st.integers(-(2**63), 2**63 - 1)
ITEMS = st.one_of(
    INT64, st.integers(-300, 300), st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=2)
)


def expected(lists):
    """Meaning in plain Python."""
    items = [item for one in lists for item in one]
    lengths = [len(one) for one in lists]
    kinds = {type(item) for item in items}
    if kinds <= {int}:
        fits = all(-(2**63) <= item < 2**63 for item in items)
        return ("ints", array("q", items).tobytes(), lengths) if fits else None
    if kinds == {float}:
        return "floats", array("d", items).tobytes(), lengths
    return ("bools", bytes(items), lengths) if kinds == {bool} else None


@given(
    st.one_of(
        *(st.lists(st.lists(of)) for of in (INT64, st.sampled_from([0, 1, 10**6]), st.floats(), st.booleans(), ITEMS))
    )
)
def test_lists_are_packed_as_plain_python_would(lists):
    assert pack_lists(lists) == expected(lists)
    assert pack_lists(tuple(lists)) == expected(lists)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 17, 1000])
def test_runs_of_one_object_end_where_they_end(length):
    one, other = 10**6, 10**6 + 1
    values = [one] * length + [other] + [one] * length
    assert pack_lists([values, [other]]) == expected([values, [other]])


@pytest.mark.parametrize(
    "values",
    [[1, True], [True, 1], [1, 1.0], [1.0, 1], [1, None], ["a"], [2**63], [-(2**63) - 1], [0, 2**100], [np.int64(1)],
     [np.float64(1)], [type("Int", (int,), {})(1)], [type("Float", (float,), {})(1)], [[1]]],
    ids=repr,
)  # fmt: skip
def test_other_values_are_left_to_json(values):
    assert pack_lists([values]) is None
    assert pack_lists([[], values]) is None
    assert pack_lists([[1, 2], values]) is None


@pytest.mark.parametrize(
    "lists", [[(1, 2)], [np.array([1, 2])], [ModelSteps()], [[1], None], [type("List", (list,), {})([1])]], ids=repr
)
def test_only_lists_are_packed(lists):
    assert pack_lists(lists) is None


def test_every_bit_of_a_float_is_kept():
    values = [0.0, -0.0, math.inf, -math.inf, 5e-324, 0.1, *struct.unpack("<d", bytes.fromhex("efcdab9078563ff7"))]
    assert pack_lists([values])[1] == b"".join(struct.pack("=d", value) for value in values)


def test_nothing_is_kept_of_what_could_not_be_packed():
    def growth() -> int:
        gc.collect()
        before = gc.get_objects()
        for _ in range(100):
            pack_lists([[1] * 1000, [None]])
        return len(gc.get_objects()) - len(before)

    # Other threads make objects too, but not each time.
    assert min(growth() for _ in range(5)) <= 1


def test_fields_that_hold_nothing_are_not_named():
    states = [RolloutState(reward=0.5, response="a"), RolloutState(reward=1.0)]
    names = ("response", "reward", "logprobs", "rerolls")
    assert filled_fields(states, names) == [
        ("response", ["a", None], None),
        ("reward", [0.5, 1.0], float),
        ("rerolls", [0, 0], int),
    ]


def test_a_later_member_can_be_the_first_to_hold_something():
    assert filled_fields([RolloutState(), RolloutState(reward=1.0)], ("reward",)) == [("reward", [None, 1.0], None)]
