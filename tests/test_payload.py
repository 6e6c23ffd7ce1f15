"""Rollout states survive the way through JSON and columns exactly, or are refused with a name for what is wrong."""

import math
import struct
from collections import OrderedDict, namedtuple
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pystale import ModelSteps, columns
from pystale.columns import ColumnReader, Columns, Malformed
from pystale.decoding import decode_document, decode_group
from pystale.field_types import MAX_DEPTH
from pystale.payload import encode_document, encode_group
from pystale.state import RolloutState, Status
from pystale.strict_json import dump_json, parse_json

FIELDS = [field.name for field in fields(RolloutState)]


def same(a: Any, b: Any) -> bool:
    """Equal in type, dtype, shape, order of keys and every bit of every float."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, RolloutState):
        return all(same(getattr(a, name), getattr(b, name)) for name in FIELDS)
    return bool(a == b)


def through(*groups: tuple[dict[str, Any], list[RolloutState]]) -> list[tuple[dict[str, Any], list[RolloutState]]]:
    """The groups after a way through JSON and columns."""
    encoded = [encode_group(header, states) for header, states in groups]
    shard = Columns()
    for group in encoded:
        shard.extend(group.entries)
    reader = ColumnReader(dict(shard.tensors()))
    decoded = [decode_group(group.line, reader) for group in encoded]
    reader.finish()
    return decoded


def kept(value: Any, field: str = "extra_fields") -> Any:
    """The value after a way through a state."""
    state = RolloutState(extra_fields={"v": value}) if field == "extra_fields" else RolloutState(**{field: value})
    ((_, (back,)),) = through(({}, [state]))
    return back.extra_fields["v"] if field == "extra_fields" else getattr(back, field)


def tensor_dtypes(*states: RolloutState) -> dict[str, Any]:
    shard = Columns()
    shard.extend(encode_group({}, states).entries)
    return {name: values.dtype for name, values in shard.tensors()}


DTYPES = [np.dtype(o + c) for o in "<>" for c in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8")]
DTYPES += [np.dtype(c) for c in ("i1", "u1", "?")]

EDGES = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    10**5000,
    0.1,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0],
    5e-324,
    "",
    "ünï→\n\x00\ud800",
    b"",
    b"\x00\xff",
    Status.FILTERED,
    [],
    [True, False],
    [1, True],
    [True, 1],
    [1, 2.0],
    [1, None],
    [1, 2**70],
    [0.5, math.nan, math.inf, -0.0],
    list(range(-5, 40)),
    [2**63 - 1, -(2**63)] * 10,
    [2**63] * 20,
    [True] * 20,
    [[1, 2], [3.0], []],
    (),
    (1, (2, [3, (None,)])),
    {},
    {"a": {"b": [1, {"c": (1.5,)}]}},
    {"$column": "ints"},
    {"$dict": 1, "x": 2},
    {"$": None},
    {1: "a", "1": "b", None: 0, (1, 2): [b"k"], 2.5: 1, 2: 3, b"b": 2, np.int64(9): 1, math.nan: 0, Status.INIT: 1},
    np.float32(1.5),
    np.float64(math.nan),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.float16(0.1),
    ModelSteps(),
    ModelSteps.from_list([3, 3, -1, 2**63 - 1, -(2**63)]),
    np.zeros((2, 0, 3), np.float16),
    np.array(7, np.uint16),
    np.arange(24, dtype=np.int32).reshape(2, 3, 4).transpose(2, 0, 1),
    np.arange(10, dtype=np.int64)[::-2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("value", EDGES, ids=[f"{type(value).__name__}{i}" for i, value in enumerate(EDGES)])
@pytest.mark.parametrize("field", ["extra_fields", "message", "mm_info", "reward"])
def test_a_value_comes_back_as_it_was(value: Any, field: str) -> None:
    back = kept(value, field)
    assert same(back, value)
    if isinstance(value, np.ndarray):
        assert back.flags.writeable
        assert back.base is None or back.base.base is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_array_keeps_dtype_shape_and_byte_order(dtype: "np.dtype[Any]") -> None:
    array = np.array([[0, 1, 2], [3, 4, 100]]).astype(dtype)
    for value in (array, array[:, ::2], array.T, array[:0], array[0]):
        assert same(kept(value, "routed_experts"), value)


@pytest.mark.parametrize("field", ["prompt_ids", "tokens", "response_ids", "response_mask", "logprobs", "labels"])
@pytest.mark.parametrize(
    "value", [[], [1, 2, 3], (1, 2), np.arange(3), np.arange(3.0), [0.5, 1.0], [1, 0.5], [True, False, True], None]
)
def test_a_per_token_field_keeps_its_kind(field: str, value: Any) -> None:
    assert same(kept(value, field), value)


def test_members_of_one_group_may_differ_in_kind() -> None:
    values = [[1, 2], None, np.arange(4, dtype=np.int16), (3, 4), [], [0.5], ModelSteps.from_list([1, 1]), [1, 2]]
    states = [RolloutState(response_model_steps=value, rollout_id=i, status=list(Status)[i % 7])
              for i, value in enumerate(values)]  # fmt: skip
    ((_, back),) = through(({}, states))
    assert same(back, states)


def test_what_all_members_share_is_written_once_and_is_separate_afterwards() -> None:
    message = [{"role": "user", "content": "how much is 2 + 2?"}]
    states = [RolloutState(message=message, task_name="math", prompt_ids=[1, 2]) for _ in range(4)]
    assert encode_group({}, states).line.count(b"how much") == 1
    assert encode_group({}, states).line.count(b"math") == 1
    ((_, back),) = through(({}, states))
    assert same(back, states)
    back[0].message[0]["role"] = "changed"
    back[0].prompt_ids.append(3)
    assert back[1].message[0]["role"] == "user"
    assert back[1].prompt_ids == [1, 2]


def test_a_shared_value_that_holds_arrays_comes_back_for_every_member() -> None:
    shared = {"image": np.arange(6, dtype=np.uint8), "name": "x"}
    states = [RolloutState(mm_info=shared, extra_fields={"i": i}) for i in range(3)]
    ((_, back),) = through(({}, states))
    assert same(back, states)


def test_fields_that_are_left_out_come_back_as_defaults() -> None:
    assert encode_group({}, [RolloutState()]).line == b'{"header":{},"fields":{"status":["INIT"]}}'
    ((_, (back,)),) = through(({}, [RolloutState()]))
    assert same(back, RolloutState())


@pytest.mark.parametrize("field", ["seq_staleness", "rerolls"])
def test_zero_counts_beside_others_come_back(field: str) -> None:
    states = [RolloutState(**{field: value}) for value in (0, 3, np.int32(0))]
    ((_, back),) = through(({}, states))
    assert same(back, states)


def test_a_status_given_as_text_stays_text() -> None:
    states = [RolloutState(status="completed"), RolloutState(status=Status.COMPLETED)]  # type: ignore[arg-type]
    ((_, back),) = through(({}, states))
    assert [state.status for state in back] == ["completed", Status.COMPLETED]


def test_integers_take_the_smallest_dtype_that_holds_them() -> None:
    state = RolloutState(prompt_ids=[1, -128], response_ids=[1, 150_000], labels=[-100, 2**40],
                         logprobs=[0.5], response_model_steps=ModelSteps.from_list([7] * 100))  # fmt: skip
    dtypes = tensor_dtypes(state)
    assert dtypes["prompt_ids:ints"] == np.int8
    assert dtypes["response_ids:ints"] == np.int32
    assert dtypes["labels:ints"] == np.int64
    assert dtypes["logprobs:floats"] == np.float64
    assert dtypes["response_model_steps:runs"] == np.int8
    assert dtypes["response_ids:ints:shapes"] == np.int8


def test_model_steps_are_stored_as_runs() -> None:
    steps = ModelSteps()
    steps.append(3, 10**12)
    steps.append(4, 1)
    group = encode_group({}, [RolloutState(response_model_steps=steps)])
    assert group.nbytes < 200
    assert kept(steps, "response_model_steps").runs() == [(3, 10**12), (4, 1)]


def test_long_lists_are_cut_into_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pystale.payload.LIST_STRIDE", 7)
    monkeypatch.setattr(columns, "LIST_STRIDE", 7)
    monkeypatch.setattr("pystale.payload._ARRAY_STRIDE", 16)
    for value in (list(range(20)), [0.5] * 15, [*range(14), True], [*range(14), 2**70], np.arange(30).reshape(5, 6).T):
        assert same(kept(value), value)
        assert same(kept(value, "tokens"), value)
    states = [RolloutState(response_ids=list(range(n)), labels=[True] * n) for n in (3, 0, 9, 7)]
    ((_, back),) = through(({}, states))
    assert same(back, states)


def test_an_encoded_group_does_not_see_later_changes() -> None:
    state = RolloutState(response_ids=[1, 2], tokens=np.arange(3), extra_fields={"a": [1]}, status=Status.ABORTED,
                         response_model_steps=ModelSteps.from_list([1, 1]))  # fmt: skip
    group = encode_group({"n": 1}, [state])
    state.response_ids.append(9)
    state.tokens[:] = 9
    state.extra_fields["a"].append(9)
    state.response_model_steps.append(9, 9)
    state.status = Status.FAILED
    shard = Columns()
    shard.extend(group.entries)
    _, (back,) = decode_group(group.line, ColumnReader(dict(shard.tensors())))
    assert back.response_ids == [1, 2]
    assert back.tokens.tolist() == [0, 1, 2]
    assert back.extra_fields == {"a": [1]}
    assert list(back.response_model_steps) == [1, 1]
    assert back.status is Status.ABORTED


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("extra_fields", {"a": [1, {"b": {2}}]}, "extra_fields['a'][1]['b'] of rollout_id 17 is a set"),
        ("extra_fields", {"a": object()}, "extra_fields['a'] of rollout_id 17 is a object"),
        ("extra_fields", {frozenset((1,)): 1}, "is a frozenset"),
        ("extra_fields", OrderedDict(a=1), "extra_fields of rollout_id 17 is a collections.OrderedDict"),
        ("message", {10**5000: {1}}, "message[int] of rollout_id 17 is a set"),
        ("message", OrderedDict(a=1), "message of rollout_id 17 is a collections.OrderedDict"),
        ("message", [bytearray(b"a")], "message[0] of rollout_id 17 is a bytearray"),
        ("message", 1j, "is a complex"),
        ("reward", np.complex64(1), "is a numpy.complex64"),
        ("reward", np.datetime64("2020-01-01"), "is a numpy.datetime64"),
        ("routed_experts", np.array([None]), "routed_experts of rollout_id 17 is an array of dtype object"),
        ("routed_experts", np.zeros(2, np.complex64), "is an array of dtype complex64"),
        ("routed_experts", np.array(["a"]), "is an array of dtype <U1"),
        ("routed_experts", np.zeros(2, [("a", "i4")]), "is an array of dtype"),
        ("mm_info", (np.ma.array([1]),), "mm_info[0] of rollout_id 17 is a numpy.ma"),
        ("tool_calls", namedtuple("Call", "a")(1), "Call"),
        ("tokens", {1, 2}, "tokens of rollout_id 17 is a set; allowed are None, list, ndarray, tuple"),
        ("response_ids", "abc", "response_ids of rollout_id 17 is a str"),
        ("status", None, "status of rollout_id 17 is a NoneType; allowed are Status, str"),
        ("seq_staleness", 1.5, "seq_staleness of rollout_id 17 is a float"),
        ("rerolls", True, "rerolls of rollout_id 17 is a bool"),
        ("group_id", (1, 2), "group_id of rollout_id 17 is a tuple"),
    ],
)
def test_what_cannot_be_written_is_named(field: str, value: Any, said: str) -> None:
    states = [RolloutState(rollout_id=16), RolloutState(**{"rollout_id": 17, field: value})]
    with pytest.raises(TypeError) as caught:
        encode_group({}, states)
    assert said in str(caught.value)


def test_a_header_that_cannot_be_written_is_named() -> None:
    with pytest.raises(TypeError, match=r"header\['key'\] is a set"):
        encode_group({"key": {1}}, [RolloutState()])
    with pytest.raises(TypeError, match="header must be a dict, got list"):
        encode_group([], [RolloutState()])  # type: ignore[arg-type]


def test_only_rollout_states_are_written() -> None:
    with pytest.raises(TypeError, match="member 1 of the group is a dict"):
        encode_group({}, [RolloutState(), {}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the group is empty"):
        encode_group({}, [])


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    tangle: dict[str, Any] = {}
    tangle["x"] = (tangle,)
    for value in (loop, tangle):
        with pytest.raises(TypeError, match="contains itself"):
            encode_group({}, [RolloutState(message=value)])


def test_nesting_up_to_the_limit_comes_back() -> None:
    value: Any = "deep"
    for i in range(MAX_DEPTH):
        value = [[value], (value,), {i: value}][i % 3]
    assert same(kept(value, "message"), value)
    with pytest.raises(TypeError, match="nested more than"):
        kept((value,), "message")


def test_a_header_may_hold_anything_a_state_can() -> None:
    header = {"task": "math", "key": (3, 4), "array": np.arange(3), "ids": list(range(30)), "none": None}
    ((back, _),) = through((header, [RolloutState()]))
    assert same(back, header)


def test_a_document_holds_everything_but_arrays() -> None:
    document = {"tasks": {"a": (1, None)}, "ids": list(range(100)), 5: [2**80, math.nan], "s": Status.FAILED}
    assert same(decode_document(parse_json(dump_json(encode_document(document)))), document)
    for value in (np.arange(3), b"x", np.int64(3), {1}, ModelSteps()):
        with pytest.raises(TypeError, match=r"document\['x'\]"):
            encode_document({"x": value})
    with pytest.raises(TypeError, match="document must be a dict"):
        encode_document(None)  # type: ignore[arg-type]


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.sampled_from(Status),
    hnp.from_dtype(np.dtype(np.float32)),
    hnp.from_dtype(np.dtype(np.int16)),
)
arrays = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
runs = st.lists(st.integers(-2, 3), max_size=6).map(ModelSteps.from_list)
flat_lists = st.one_of(
    st.lists(st.integers(-300, 2**40), max_size=30), st.lists(st.floats(), max_size=30), st.lists(st.booleans())
)
values = st.recursive(
    st.one_of(scalars, arrays, runs, flat_lists),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("$ab", max_size=3), inner, max_size=3),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=2), st.binary(max_size=2)), inner, max_size=3),
    ),
    max_leaves=12,
)
sequences = st.one_of(st.none(), flat_lists, flat_lists.map(tuple), arrays)
states = st.builds(
    RolloutState,
    rollout_id=st.one_of(st.none(), st.integers(), st.text(max_size=3)),
    message=values,
    tokens=sequences,
    response_ids=sequences,
    logprobs=sequences,
    response_model_steps=st.one_of(sequences, runs),
    reward=values,
    status=st.sampled_from(Status),
    seq_staleness=st.integers(-3, 3),
    extra_fields=st.dictionaries(st.text(max_size=3), values, max_size=2),
)
groups = st.lists(st.tuples(st.dictionaries(st.text(max_size=2), values, max_size=2),
                            st.lists(states, min_size=1, max_size=3)), max_size=3)  # fmt: skip


@given(groups)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_any_groups_come_back_as_they_were(given_groups: list[tuple[dict[str, Any], list[RolloutState]]]) -> None:
    assert same(through(*given_groups), given_groups)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1,]", "not JSON"),
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b'{"a":1,"a":2}', "a key occurs twice"),
        (b'"\xc3\xa9"', "not JSON"),
        (b"9" * 10_000, "not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
    ],
)
def test_json_is_strict(text: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        parse_json(text)


INTS = {"response_ids:ints": np.arange(3, dtype=np.int8), "response_ids:ints:shapes": np.array([[2], [1]], np.int8)}


def line(fields: str, header: str = "{}", status: str = '["INIT"]') -> bytes:
    return f'{{"header":{header},"fields":{{"status":{status}{fields and "," + fields}}}}}'.encode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[]", "not an object of header and fields"),
        (b'{"header":{}}', "not an object of header and fields"),
        (b'{"header":{},"fields":[]}', "not an object of header and fields"),
        (b'{"header":{},"fields":{}}', "status is not a list"),
        (line("", header="[]"), "header is not a dict"),
        (line("", status="[]"), "status is not a list"),
        (line("", status='"ints"'), "status is not a list"),
        (line("", status="[1]"), "status is a int; allowed are Status, str"),
        (line("", status='["GONE"]'), "status has an unknown status 'GONE'"),
        (line('"message":[{"$status":"GONE"}]'), "message has an unknown status 'GONE'"),
        (line('"color":[1]'), "color is not a field of a state"),
        (line('"rerolls":[1,2]'), "rerolls is neither a list of 1 values"),
        (line('"rerolls":{"all":1,"b":1}'), "rerolls is neither"),
        (line('"rerolls":1'), "rerolls is neither"),
        (line('"rerolls":["x"]'), "rerolls is a str"),
        (line('"rerolls":{"all":[]}'), "rerolls is a list"),
        (line('"response_ids":"floats"'), "response_ids names a column 'floats' that is not there"),
        (line('"tokens":"ints"'), "tokens names a column"),
        (line('"response_ids":[{"$column":3}]'), "names a column 3"),
        (line('"response_ids":[{"$column":["ints"]}]'), "names a column"),
        (line('"response_ids":"ints"', status='["INIT","INIT","INIT"]'), "asks for more entries"),
        (line('"response_ids":["abc"]'), "response_ids is a str"),
        (line('"message":[{"$magic":1}]'), r"message has an unknown tag or a wrong value for it: '\$magic'"),
        (line('"message":[{"$tuple":1}]'), r"'\$tuple'"),
        (line('"message":[{"$int":"12"}]'), r"'\$int'"),
        (line('"message":[{"$float":"nan"}]'), r"'\$float'"),
        (line('"message":[{"$str":1}]'), r"'\$str'"),
        (line('"message":[{"$dict":[1]}]'), "not made of pairs"),
        (line('"message":[{"$dict":[[[],1]]}]'), "has a list as a key"),
        (line('"message":[{"$dict":[[1,1],[1,2]]}]'), "duplicate key"),
        (line('"message":[{"$tuple":[],"a":1}]'), "among other keys"),
        (line('"message":[' + "[" * 102 + "]" * 102 + "]"), "nested more than 100 deep"),
        (line('"message":[' + '{"$tuple":[' * 102 + "]}" * 102 + "]"), "nested more than 100 deep"),
    ],
)
def test_a_line_that_is_not_of_the_format_is_malformed(text: bytes, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        decode_group(text, ColumnReader(INTS))


def ints(values: Any, shapes: Any) -> dict[str, Any]:
    return {"tokens:ints": np.array(values, np.int64), "tokens:ints:shapes": np.array(shapes, np.int64)}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"color:ints": np.arange(3)}, "belongs to no field"),
        ({"tokens": np.arange(3)}, "unknown kind"),
        ({"tokens:gold": np.arange(3)}, "unknown kind"),
        ({"tokens:array.<i4.100": np.arange(3)}, "unknown kind"),
        ({"tokens:array.<c8.1": np.arange(3)}, "unknown kind"),
        ({"tokens:scalar.|O1": np.arange(3)}, "unknown kind"),
        ({"tokens:ints:shapes": np.zeros((1, 1), np.int8)}, "has no values"),
        ({"tokens:ints": np.arange(3)}, "has no shapes"),
        ({"tokens:scalar.<i8": np.arange(3), "tokens:scalar.<i8:shapes": np.zeros((3, 1), int)}, "which its kind does"),
        ({"tokens:array.<i4.1": np.arange(3), "tokens:array.<i4.1:shapes": np.array([[3]])}, "has dtype int64"),
        (ints([0.5], [[1]]) | {"tokens:ints": np.array([0.5])}, "has dtype float64"),
        (ints([1, 2], [[3]]), "has 2 values, its shapes ask for 3"),
        (ints([1, 2], [[3], [-1]]), "negative length"),
        (ints([1, 2], [[1]]), "ask for 1"),
        (ints([1, 2], [[2, 1]]), "rows of 1 integers"),
        (ints([1, 2], [2]), "rows of 1 integers"),
        (ints([1, 2], [[2**63 - 1], [2**63 - 1]]), "ask for 18446744073709551614"),
        (
            {"tokens:array.<i8.2": np.arange(4), "tokens:array.<i8.2:shapes": np.array([[2**62, 8]])},
            "ask for 36893488147419103232",
        ),
    ],
)
def test_columns_that_do_not_fit_together_are_malformed(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed, match=said):
        ColumnReader(tensors)


@pytest.mark.parametrize("runs", [[[3, 0]], [[3, -1]], [[3, 2**62], [4, 2**62]], [[3, 2**63 - 1], [4, 1]]])
def test_impossible_runs_are_malformed(runs: list[list[int]]) -> None:
    tensors = {"response_model_steps:runs": np.array(runs), "response_model_steps:runs:shapes": np.array([[len(runs)]])}
    with pytest.raises(Malformed, match="has a run of"):
        decode_group(line('"response_model_steps":"runs"'), ColumnReader(tensors))


def test_an_empty_array_of_impossible_shape_is_malformed() -> None:
    kind = "array.<i8.3"
    tensors = {f"tokens:{kind}": np.empty(0, np.int64), f"tokens:{kind}:shapes": np.array([[2**62, 0, 2**62]])}
    with pytest.raises(Malformed, match="impossible shape"):
        decode_group(line(f'"tokens":"{kind}"'), ColumnReader(tensors))


def test_entries_that_no_line_uses_are_malformed() -> None:
    reader = ColumnReader(INTS)
    decode_group(line('"response_ids":"ints"'), reader)
    with pytest.raises(Malformed, match="has 1 entries that no group uses"):
        reader.finish()
