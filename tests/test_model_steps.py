"""ModelSteps: a sequence of int that is stored as runs."""

import collections.abc
import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from pystale import ModelSteps, _reference, effective_mask


@given(values=strategies.step_values)
def test_it_holds_what_it_was_given(values: list[int]) -> None:
    steps = ModelSteps.from_list(values)
    assert len(steps) == len(values)
    assert list(steps) == values
    assert steps.runs() == _reference.runs(values)
    assert np.asarray(steps).tolist() == values
    assert np.asarray(steps).dtype == np.int64
    assert list(reversed(steps)) == values[::-1]
    assert ModelSteps.from_runs(steps.runs()) == steps


@given(data=st.data(), values=strategies.step_values)
def test_from_list_takes_every_form_of_steps(data: st.DataObject, values: list[int]) -> None:
    assert list(ModelSteps.from_list(data.draw(strategies.steps_of(values)))) == values


@given(values=strategies.usual_steps, index=st.integers(-45, 45))
def test_indexing_is_that_of_a_list(values: list[int], index: int) -> None:
    steps = ModelSteps.from_list(values)
    if -len(values) <= index < len(values):
        assert steps[index] == values[index]
    else:
        with pytest.raises(IndexError, match=f"index {index} is out of range for {len(values)} model steps"):
            steps[index]


bounds = st.one_of(st.none(), st.integers(-50, 50), st.sampled_from([-(2**80), 2**80]))


@given(values=strategies.usual_steps, start=bounds, stop=bounds, step=bounds.filter(lambda step: step != 0))
def test_slicing_is_that_of_a_list_and_gives_model_steps(values: list[int], start: Any, stop: Any, step: Any) -> None:
    piece = ModelSteps.from_list(values)[start:stop:step]
    assert type(piece) is ModelSteps
    assert piece.runs() == _reference.runs(values[start:stop:step])


@given(pieces=st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 5)), max_size=12))
def test_appending_merges_equal_neighbours(pieces: list[tuple[int, int]]) -> None:
    steps, values = ModelSteps(), []
    for model_step, n in pieces:
        steps.append(model_step, n)
        values += [model_step] * n
    assert steps.runs() == _reference.runs(values)


def test_append_adds_one_token_unless_told_how_many() -> None:
    steps = ModelSteps()
    steps.append(3)
    steps.append(model_step=np.int32(3), n=2)
    assert steps.runs() == [(3, 3)]


@given(data=st.data(), first=strategies.usual_steps, more=strategies.usual_steps)
def test_extend_takes_every_form_of_steps(data: st.DataObject, first: list[int], more: list[int]) -> None:
    steps = ModelSteps.from_list(first)
    steps.extend(data.draw(strategies.steps_of(more)))
    assert steps == first + more


def test_extending_by_itself_doubles_it() -> None:
    steps = ModelSteps.from_list([1, 2])
    steps.extend(steps)
    assert steps == [1, 2, 1, 2]


@pytest.mark.parametrize("bad", [[3, "4"], [3, True], [3, 2**63], np.array([3.0]), np.array([2**63], np.uint64), 3])
def test_a_refused_extension_adds_nothing(bad: Any) -> None:
    steps = ModelSteps.from_list([1])
    with pytest.raises((TypeError, ValueError)):
        steps.extend(bad)
    assert steps == [1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0,), TypeError, r"model_step is 1.0 \(float\); an int is required"),
        ((True,), TypeError, "model_step is True; an int is required"),
        ((2**63,), ValueError, "model_step does not fit int64"),
        ((1, -1), ValueError, "n is -1; the number of tokens must be at least 0"),
        ((1, 2.0), TypeError, r"n is 2.0 \(float\)"),
        ((1, 2**63 - 1), ValueError, r"more than 2\*\*63 - 1 tokens"),
    ],
)
def test_append_refuses_what_is_no_step_or_no_length(arguments: Any, error: type[Exception], message: str) -> None:
    steps = ModelSteps.from_list([5])
    with pytest.raises(error, match=message):
        steps.append(*arguments)
    assert steps == [5]


def test_equality_is_that_of_the_integers_in_any_container() -> None:
    steps = ModelSteps.from_list([3, 3, 4])
    same = [ModelSteps.from_runs([(3, 1), (3, 1), (4, 1)]), [3, 3, 4], (3, 3, 4), np.array([3, 3, 4], np.uint8)]
    assert [steps == other for other in same] == [True] * len(same)
    assert [steps != other for other in same] == [False] * len(same)
    different = [ModelSteps(), [3, 3], [3, 3, 5], [3, 3, 4.0], np.array([3.0, 3, 4]), np.array(3), "334", None, {3: 4}]
    assert [steps == other for other in different] == [False] * len(different)
    assert [steps != other for other in different] == [True] * len(different)
    assert ModelSteps() == []
    assert [3, 3, 4].__eq__(steps) is NotImplemented


def test_it_is_unhashable_because_it_can_grow() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(ModelSteps())


def test_it_is_a_sequence() -> None:
    steps = ModelSteps.from_list([3, 3, 4, 3])
    assert isinstance(steps, collections.abc.Sequence)
    assert 3 in steps
    assert 5 not in steps
    assert steps.count(3) == 3
    assert [steps.index(3), steps.index(3, 1), steps.index(3, 2), steps.index(4, -2)] == [0, 1, 3, 2]
    for arguments in ((5,), (4, 3), (4, 0, 2), (3, 2, 3)):
        with pytest.raises(ValueError, match="is not in these model steps"):
            steps.index(*arguments)
    assert bool(steps)
    assert not ModelSteps()


def test_iteration_sees_the_steps_as_they_were_when_it_began() -> None:
    steps = ModelSteps.from_list([1, 2])
    seen = []
    for step in steps:
        seen.append(step)
        steps.append(step + 10, 1000)
    assert seen == [1, 2]
    assert len(steps) == 2002


def test_tokens_of_one_run_share_one_int() -> None:
    # Lists made from it are then read at the speed of runs.
    first, second = list(ModelSteps.from_runs([(10**6, 2)]))
    assert first is second


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_the_runs(protocol: int) -> None:
    steps = ModelSteps.from_list([3, 3, 4])
    restored = pickle.loads(pickle.dumps(steps, protocol))
    assert type(restored) is ModelSteps
    assert restored == steps


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, ModelSteps.copy, ModelSteps.from_list])
def test_copies_are_independent(duplicate: Any) -> None:
    steps = ModelSteps.from_list([3])
    other = duplicate(steps)
    other.append(4)
    assert steps == [3]
    assert other == [3, 4]


def test_arrays_of_it_follow_the_numpy_protocol() -> None:
    steps = ModelSteps.from_list([3, 300])
    assert np.array(steps, dtype=np.int16).tolist() == [3, 300]
    assert np.asarray(steps, dtype=np.float64).dtype == np.float64
    assert steps.__array__(copy=True).tolist() == [3, 300]
    with pytest.raises(ValueError, match="always a copy"):
        steps.__array__(copy=False)
    with pytest.raises(OverflowError, match="does not fit dtype int8"):
        np.asarray(steps, dtype=np.int8)
    assert np.max(steps) == 300


def test_a_run_costs_sixteen_bytes_whatever_its_length() -> None:
    steps = ModelSteps.from_runs([(3, 2**40), (4, 1)])
    assert len(steps) == 2**40 + 1
    assert steps[-2] == 3
    assert steps.nbytes == 32
    assert sys.getsizeof(steps) < 200
    assert steps[:: -(2**39)].runs() == [(4, 1), (3, 2)]
    assert ModelSteps.from_runs([(3, 20_000), (4, 12_768)]).nbytes / 32_768 < 0.1


def test_repr_is_an_expression_until_it_would_be_long() -> None:
    steps = ModelSteps.from_list([3, 3, 4])
    assert eval(repr(steps)) == steps
    assert repr(ModelSteps()) == "ModelSteps.from_runs([])"
    many = repr(ModelSteps.from_list(list(range(1000))))
    assert many.startswith("<ModelSteps of 1000 tokens in 1000 runs: [(0, 1), (1, 1), (2, 1), ..., (997, 1)")
    assert len(many) < 200


def test_it_cannot_be_subclassed() -> None:
    with pytest.raises(TypeError, match="not an acceptable base type"):
        type("Sub", (ModelSteps,), {})


def test_the_mask_may_be_run_length_encoded_too() -> None:
    steps, mask = ModelSteps.from_list([4, 4, 4, 4]), ModelSteps.from_list([0, 0, 1, 1])
    flags = effective_mask(steps, train_step=5, token_stale_threshold=1, response_mask=mask)
    assert flags.tolist() == [0, 0, 1, 1]
