import copy
import enum
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from pystale import ModelSteps, RolloutState, Status, group_status, update_sample_version
from pystale.state import FieldsRefused, as_status, copy_state, discard, reset

C, A, E, F, X, U, Z = (
    Status.COMPLETED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FAILED,
    Status.FILTERED,
    Status.INIT,
    Status.ARCHIVED,
)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([C, C], C),
        ([C, A, C], A),
        ([E, A, C], A),
        ([F, A], F),
        ([C, E], E),
        ([C, X], X),
        ([X, E], E),
        ([C, U], U),
        ([Z, Z], Z),
        ([C, Z], Z),
        ([U, Z], U),
    ],
)
def test_a_group_has_the_status_that_matters_most_among_its_members(members, expected):
    assert group_status(members) is expected
    assert group_status(reversed([RolloutState(status=s) for s in members])) is expected


def test_statuses_of_other_frameworks_are_matched_by_name():
    class Foreign(enum.Enum):
        COMPLETED = 17

    assert as_status(Foreign.COMPLETED) is C
    assert group_status([SimpleNamespace(status=Foreign.COMPLETED), SimpleNamespace(status="completed")]) is C


@pytest.mark.parametrize("status", ["done", 3, None, "", SimpleNamespace(name=4)])
def test_an_unknown_status_is_refused(status):
    with pytest.raises(ValueError, match="unknown status"):
        as_status(status)


def test_an_empty_group_has_no_status():
    with pytest.raises(ValueError, match="empty"):
        group_status([])


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", C),
        ("LENGTH", C),
        ("tool_calls", C),
        ("abort", A),
        ("Aborted", A),
        ("error", F),
        (None, F),
        ("?", F),
        (7, F),
    ],
)
def test_finish_reasons(reason, status):
    assert Status.from_finish_reason(reason) is status


@pytest.mark.parametrize(
    "steps",
    [[3, 3], np.array([3, 3], dtype=np.int32), ModelSteps.from_list([3, 3]), (3, 3)],
    ids=lambda s: type(s).__name__,
)
def test_stamping_marks_only_tokens_not_yet_stamped(steps):
    state = RolloutState(response_ids=[1, 2, 3, 4], response_model_steps=steps)
    assert update_sample_version(state, 4) is state
    assert list(state.response_model_steps) == [3, 3, 4, 4]
    update_sample_version(state, 5)
    assert list(state.response_model_steps) == [3, 3, 4, 4]
    assert list(steps) == [3, 3]  # what was passed in is left alone


@pytest.mark.parametrize("nothing", [None, [], ModelSteps()], ids=["None", "list", "ModelSteps"])
def test_stamping_a_response_without_steps(nothing):
    state = RolloutState(response_ids=np.arange(3), response_model_steps=nothing)
    assert list(update_sample_version(state, 7).response_model_steps) == [7, 7, 7]


def test_stamping_widens_an_array_too_narrow_for_the_step():
    state = RolloutState(response_ids=[1, 2], response_model_steps=np.array([100], dtype=np.int8))
    assert list(update_sample_version(state, 70_000).response_model_steps) == [100, 70_000]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)])
def test_a_wrong_step_is_not_stamped(step, error):
    state = RolloutState(response_ids=[1])
    with pytest.raises(error, match="model_step"):
        update_sample_version(state, step)
    assert state.response_model_steps is None


def test_oldest_and_newest_step_are_those_of_model_tokens():
    state = RolloutState(response_ids=[1, 2, 3], response_model_steps=[-1, 6, 7], response_mask=[0, 1, 0])
    assert (state.min_model_step, state.max_model_step) == (6, 7)
    for empty in (None, [], [-1, -1]):
        none = RolloutState(response_model_steps=empty)
        assert (none.min_model_step, none.max_model_step) == (None, None)


def full_state():
    return RolloutState(
        rollout_id=1,
        group_id=2,
        task_name="t",
        session_id=3,
        message="hello",
        prompt_ids=[9, 8],
        prompt_model_step=4,
        tokens=[9, 8, 1],
        sample_params={"n": 1},
        response="x",
        response_ids=[1],
        response_mask=[1],
        response_model_steps=[4],
        logprobs=[-0.5],
        routed_experts="ref",
        finish_reason="stop",
        tool_calls=["call"],
        reward=1.0,
        status=C,
        seq_staleness=3,
        error_msg="e",
        input_ids=[1],
        labels=[1],
        position_ids=[0],
        mm_info={"image": 1},
        rerolls=2,
        extra_fields={"k": "v"},
    )


def test_reset_takes_the_response_and_keeps_the_prompt():
    state = full_state()
    before = {f: getattr(state, f) for f in RolloutState.__dataclass_fields__}
    cleared = reset(state)
    kept = ("rollout_id", "group_id", "task_name", "session_id", "message", "prompt_ids", "prompt_model_step")
    kept += ("sample_params", "mm_info", "rerolls", "extra_fields", "seq_staleness")
    assert {f: getattr(state, f) for f in kept} == {f: before[f] for f in kept}
    assert state.tokens == [9, 8]
    assert state.tokens is not state.prompt_ids
    assert (state.response, state.response_ids, state.response_model_steps, state.logprobs) == ("", [], [], [])
    gone = ("response_mask", "reward", "finish_reason", "error_msg", "routed_experts", "tool_calls")
    gone += ("input_ids", "labels", "position_ids")
    assert all(getattr(state, f) is None for f in gone)
    assert state.status is E
    assert cleared == {f: before[f] for f in (*gone, "response", "response_ids", "response_model_steps", "logprobs")}
    assert reset(state) == {}  # nothing is released twice


def test_discard_keeps_what_says_which_rollout_it_was():
    state, blank = full_state(), RolloutState()
    cleared = discard(state)
    kept = (
        "rollout_id",
        "group_id",
        "task_name",
        "session_id",
        "message",
        "prompt_ids",
        "prompt_model_step",
        "rerolls",
    )
    for name in RolloutState.__dataclass_fields__:
        if name in kept:
            assert getattr(state, name) == getattr(full_state(), name)
        elif name != "status":
            assert getattr(state, name) == getattr(blank, name), name
    assert state.status is E
    assert cleared["routed_experts"] == "ref"
    assert discard(state) == {}


def test_reset_and_discard_leave_fields_a_foreign_state_lacks():
    state = SimpleNamespace(status="completed", prompt_ids=None, response_ids=[1], response_model_steps=[1])
    reset(state)
    assert vars(state) == {"status": "expired", "prompt_ids": None, "response_ids": [], "response_model_steps": []}


def test_a_state_that_refuses_fields_is_reset_in_all_others():
    class Strict(SimpleNamespace):
        def __setattr__(self, name, value):
            if name in ("reward", "logprobs"):
                raise ValueError("a number is required")
            super().__setattr__(name, value)

    state = Strict(status="completed", prompt_ids=[1], response_ids=[2], response_model_steps=[3])
    vars(state).update(reward=1.0, logprobs=[0.5], tokens=[1, 2])
    with pytest.raises(FieldsRefused, match=r"Strict refuses .* in reward, logprobs: a number is required") as caught:
        reset(state)
    assert caught.value.cleared == {"response_ids": [2], "response_model_steps": [3]}
    assert (state.tokens, state.response_ids, state.reward, state.status) == ([1], [], 1.0, "expired")


def test_a_shallow_copy_holds_the_same_values():
    state = full_state()
    copied = copy_state(state, deep=False)
    assert copied is not state
    assert all(getattr(copied, name) is getattr(state, name) for name in RolloutState.__dataclass_fields__)


def test_default_containers_are_not_shared():
    one, two = RolloutState(), RolloutState()
    one.extra_fields["x"] = 1
    discard(one)
    one.extra_fields["y"] = 1
    assert two.extra_fields == {}


def test_states_copy_and_pickle():
    state = full_state()
    state.response_model_steps = ModelSteps.from_list([4, 5])
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert other is not state
        assert list(other.response_model_steps) == [4, 5]
        assert other.extra_fields == {"k": "v"}


def test_no_change_of_a_state_reaches_its_deep_copy():
    state = full_state()
    state.response_mask, state.extra_fields = np.array([1]), {"deep": [{"x": 1}]}
    state.response_model_steps, state.routed_experts = ModelSteps.from_list([4]), lambda: None
    copied = copy_state(state, deep=True)
    state.response_ids.append(9)
    state.response_mask[0] = 7
    state.response_model_steps.append(5)
    state.extra_fields["deep"][0]["x"] = 2
    state.tool_calls.clear()
    assert (copied.response_ids, copied.response_mask.tolist(), list(copied.response_model_steps)) == ([1], [1], [4])
    assert (copied.extra_fields, copied.tool_calls) == ({"deep": [{"x": 1}]}, ["call"])
    assert (copied.status, copied.rerolls, copied.routed_experts) == (C, 2, state.routed_experts)


def test_fields_are_keywords_and_misspelled_ones_are_refused():
    with pytest.raises(TypeError):
        RolloutState(1)
    with pytest.raises(TypeError, match="respons_ids"):
        RolloutState(respons_ids=[1])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64, ">i4"])
@pytest.mark.parametrize("model_step", [4, 200, 2**32, 2**63 - 1])
def test_a_stamped_array_stays_one_of_integers(dtype, model_step):
    member = RolloutState(response_ids=[1, 2], response_model_steps=np.array([3], dtype))
    steps = update_sample_version(member, model_step).response_model_steps
    assert steps.dtype.kind in "iu"
    assert steps.tolist() == [3, model_step]


@pytest.mark.parametrize("dtype", [bool, float])
def test_steps_that_are_no_integers_are_not_made_some_by_stamping(dtype):
    member = RolloutState(response_ids=[1, 2], response_model_steps=np.ones(1, dtype))
    with pytest.raises(TypeError, match="integer dtype"):
        update_sample_version(member, 4)


@pytest.mark.parametrize(("model_step", "error"), [(-1, ValueError), (2**63, ValueError), (True, TypeError)])
def test_a_bad_version_is_refused_even_where_every_token_is_stamped(model_step, error):
    member = RolloutState(response_ids=[1], response_model_steps=[3])
    with pytest.raises(error, match="model_step must be"):
        update_sample_version(member, model_step)
