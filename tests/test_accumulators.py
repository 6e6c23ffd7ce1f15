import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pystale.accumulators import Histogram, Tally

integers = st.one_of(st.integers(-5, 20), st.integers(-(2**63), 2**63 - 1))
values = st.lists(integers, max_size=20)
KINDS = [Tally, lambda given: Histogram((value, 1) for value in given)]


@pytest.fixture(params=KINDS, ids=["tally", "histogram"])
def counted(request):
    """Makes an accumulator of either kind from a list of integers."""
    return request.param


@given(values)
def test_a_tally_is_count_sum_min_and_max(given_values):
    tally = Tally(given_values)
    assert (tally.count, tally.sum) == (len(given_values), sum(given_values))
    assert tally.min == min(given_values, default=None)
    assert tally.max == max(given_values, default=None)
    assert tally.mean == (sum(given_values) / len(given_values) if given_values else None)


@given(values)
def test_a_histogram_is_the_same_and_how_often(given_values):
    histogram, tally = Histogram((value, 1) for value in given_values), Tally(given_values)
    for name in ("count", "sum", "min", "max", "mean"):
        assert getattr(histogram, name) == getattr(tally, name)
    assert histogram.counts == {value: given_values.count(value) for value in given_values}


@pytest.mark.parametrize("kind", KINDS, ids=["tally", "histogram"])
@given(st.lists(values, max_size=5))
def test_merging_parts_is_counting_their_union(kind, parts):
    merged = kind([])
    for part in parts:
        merged.merge(kind(part))
    assert merged == kind([value for part in parts for value in part])


@pytest.mark.parametrize("kind", KINDS, ids=["tally", "histogram"])
@given(values, values, values)
def test_merging_is_associative_and_commutative(kind, first, second, third):
    a, b, c = kind(first), kind(second), kind(third)
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + kind([]) == a


@pytest.mark.parametrize("kind", KINDS, ids=["tally", "histogram"])
@given(values)
def test_a_dict_of_it_goes_through_json_and_back(kind, given_values):
    there = kind(given_values)
    assert type(there).from_dict(json.loads(json.dumps(there.to_dict()))) == there


def test_merging_leaves_the_other_alone_and_may_be_with_itself(counted):
    one, other = counted([1, 2]), counted([5])
    one.merge(other)
    assert one == counted([1, 2, 5])
    assert other == counted([5])
    one.merge(one)
    assert one == counted([1, 2, 5, 1, 2, 5])


def test_adding_leaves_both_sides_alone(counted):
    one, other = counted([1]), counted([2])
    both = one + other
    both.merge(other)
    assert (one, other) == (counted([1]), counted([2]))


def test_neither_kind_merges_with_what_it_is_not(counted):
    for other in (counted([3]).to_dict(), 3, None):
        with pytest.raises(TypeError, match="merges with"):
            counted([3]).merge(other)
    with pytest.raises(TypeError):
        counted([3]) + 3
    assert counted([3]) != counted([3]).to_dict()
    assert copy.deepcopy(counted([3])) == counted([3])


@pytest.mark.parametrize(
    "array",
    [
        np.array([2**63 - 1] * 3),
        np.array([-(2**63)] * 3),
        np.array([2**64 - 1, 5], dtype=np.uint64),
        np.arange(12, dtype=np.int8).reshape(3, 4)[:, ::-2],
        np.array([127, 127], dtype=np.int8),
    ],
    ids=["top", "bottom", "unsigned", "strided", "narrow"],
)
def test_a_sum_is_exact_in_any_dtype(array):
    tally = Tally(array)
    plain = [int(value) for value in array.ravel()]
    assert (tally.count, tally.sum, tally.min, tally.max) == (len(plain), sum(plain), min(plain), max(plain))


def test_a_tally_takes_one_integer_too():
    tally = Tally()
    tally.add(3)
    tally.add(np.int32(5))
    assert repr(tally) == "Tally(count=2, sum=8, min=3, max=5)"


@pytest.mark.parametrize("wrong", [1.0, [1.5], [True], "3", [None], [2**70]])
def test_a_tally_refuses_what_is_no_integer_and_stays_as_it_was(wrong):
    tally = Tally([4])
    with pytest.raises(TypeError, match="values must hold integers"):
        tally.add(wrong)
    assert tally == Tally([4])


@given(st.dictionaries(st.integers(-3, 12), st.integers(1, 9), min_size=1), st.floats(0, 100))
def test_a_percentile_is_that_of_the_values_written_out(counts, q):
    written_out = [value for value, n in counts.items() for _ in range(n)]
    found = Histogram(counts).percentile(q)
    assert found in counts
    assert sum(value <= found for value in written_out) * 100 >= q * len(written_out) - 1e-9
    assert sum(value < found for value in written_out) * 100 <= q * len(written_out) + 1e-9


@pytest.mark.parametrize("q", [0, 1, 10, 25, 50, 75, 90, 99, 100])
def test_percentiles_agree_with_numpy(q, rng):
    drawn = rng.integers(-2, 9, size=int(rng.integers(1, 200)))
    histogram = Histogram((value, 1) for value in drawn)
    assert histogram.percentile(q) == np.percentile(drawn, q, method="inverted_cdf")


def test_a_percentile_stops_where_its_fraction_is_exactly_reached():
    # 0.07 * 100 in floats is more than 7.
    assert Histogram({0: 7, 1: 93}).percentile(7) == 0
    assert Histogram({0: 7, 1: 9993}).percentile(0.07) == 0
    assert Histogram({0: 7, 1: 9993}).percentile(np.float64(0.07)) == 0
    assert Histogram({0: 7, 1: 93}).percentile(np.int64(7)) == 0


def test_a_histogram_of_nothing_has_no_statistics():
    empty = Histogram({5: 0})
    assert empty == Histogram()
    assert (empty.count, empty.sum) == (0, 0)
    assert empty.mean is empty.min is empty.max is empty.percentile(50) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((1.0,), TypeError), ((True,), TypeError), ((1, 2.0), TypeError), ((1, False), TypeError), ((1, -1), ValueError)],
)
def test_a_histogram_refuses_what_is_no_count_of_an_integer(arguments, error):
    histogram = Histogram({1: 1})
    with pytest.raises(error, match=r"value|n must"):
        histogram.add(*arguments)
    assert histogram == Histogram({1: 1})


@pytest.mark.parametrize("q", [-0.1, 100.5, float("nan")])
def test_a_percentile_is_between_0_and_100(q):
    with pytest.raises(ValueError, match="between 0 and 100"):
        Histogram({1: 1}).percentile(q)


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        {},
        {"count": 1, "sum": 3, "min": 3},
        {"count": 1, "sum": 3, "min": 3, "max": 3, "more": 1},
        {"count": True, "sum": 3, "min": 3, "max": 3},
        {"count": 1.0, "sum": 3, "min": 3, "max": 3},
        {"count": -1, "sum": 3, "min": 3, "max": 3},
        {"count": 0, "sum": 3, "min": None, "max": None},
        {"count": 0, "sum": 0, "min": 1, "max": 1},
        {"count": 1, "sum": 3, "min": None, "max": 3},
        {"count": 2, "sum": 4, "min": 3, "max": 1},
        {"count": 1, "sum": 4, "min": 3, "max": 5},
        {"count": 2, "sum": 7, "min": 3, "max": 5},
        {"count": 3, "sum": 10, "min": 3, "max": 5},
    ],
)
def test_a_tally_nobody_can_have_written_is_refused(saved):
    with pytest.raises(ValueError, match="tally"):
        Tally.from_dict(saved)


@pytest.mark.parametrize(
    "pairs",
    [None, 5, {"1": 2}, [3], [[1]], [[1, 2, 3]], [["1", 2]], [[1, 2.0]], [[True, 1]], [[1, 0]], [[1, 2], [1, 3]]],
)
def test_a_histogram_nobody_can_have_written_is_refused(pairs):
    with pytest.raises(ValueError, match="histogram"):
        Histogram.from_dict({"counts": pairs})
