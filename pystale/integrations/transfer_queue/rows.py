"""A group as rows of TransferQueue: one per member, and one for what a re-rollout needs of their prompts.

Rows have the same columns, all of them jagged tensors, so that any backend holds them and a group is one put:

========================  ========  ==================================================================================
``prompt_ids``            int64     tokens of the prompt
``response_ids``          int64     tokens of the response; empty in the row of the prompts, as all that follow
``response_mask``         uint8     one entry per response token: the semantic mask, and once a batch was taken for
                                    training the effective one
``response_model_steps``  int64     one entry per response token
``logprobs``              float32   one entry per response token, or none
``rest``                  uint8     all other fields, as a shard of a checkpoint holds them: never pickled
========================  ========  ==================================================================================

Keys are ``{name}_{member}`` and ``{name}_prompts``; the name is new for every put.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from pystale.columns import ColumnReader, Columns
from pystale.decoding import decode_group
from pystale.group import Arriving
from pystale.integrations.transfer_queue.framework import framework
from pystale.payload import encode_group
from pystale.record import Record
from pystale.state import RolloutState
from pystale.summary import PROMPT_FIELDS, RESPONSE_FIELDS, Payload, assembled, summaries_of

__all__ = [
    "COLUMNS",
    "READ_COLUMNS",
    "Rows",
    "arrays_of",
    "is_own",
    "joined",
    "mask_rows",
    "name_of",
    "new_name",
    "rows_of",
    "states_of",
    "summarised",
    "tensors_of",
]

COLUMNS = ("prompt_ids", "response_ids", "response_mask", "response_model_steps", "logprobs", "rest")
_DTYPES = dict(zip(COLUMNS, (np.int64, np.int64, np.uint8, np.int64, np.float32, np.uint8), strict=True))
# A summary knows steps and semantic mask, and the row of the prompts the prompts: those columns are for others.
READ_COLUMNS = ("response_ids", "logprobs", "rest")
_REST = tuple(name for name in RESPONSE_FIELDS if name not in COLUMNS)
_PREFIX = "pystale-"


class Rows(NamedTuple):
    """Rows to write."""

    keys: list[str]
    columns: dict[str, list[Any]]  # by name, an array per row

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(int(values.nbytes) for column in self.columns.values() for values in column)


def is_own(key: str) -> bool:
    """Whether a key is one that is made here."""
    return key.startswith(_PREFIX) and "_" in key


def name_of(key: str) -> str:
    """Name of the put that a key is of."""
    return key.rpartition("_")[0]


def new_name(store: str, number: int) -> str:
    """Name of a put; no other has it."""
    return f"{_PREFIX}{store}-{number}"


def summarised(arriving: Arriving, name: str | None) -> list[RolloutState]:
    """Summaries of a group that was read, each with the key of its own row; without `name` only to be counted."""
    summaries = summaries_of(arriving, None)
    if name is not None:
        for position, summary in enumerate(summaries):
            summary.response, summary.mm_info = f"{name}_{position}", f"{name}_prompts"
    return summaries


def rows_of(arriving: Arriving, name: str) -> Rows:
    """Rows of a group that was read, with its steps stamped.

    Raises
    ------
    TypeError, ValueError
        For a value that cannot be held, naming the field.
    """
    columns: dict[str, list[Any]] = {column: [] for column in COLUMNS}
    keys = []
    for position, (state, steps, member) in enumerate(
        zip(arriving.states, arriving.steps, arriving.members, strict=True)
    ):
        keys.append(f"{name}_{position}")
        mask = state.response_mask
        values = {
            "prompt_ids": state.prompt_ids,
            "response_ids": state.response_ids,
            "response_mask": np.ones(member.tokens, np.uint8) if mask is None else np.asarray(mask) != 0,
            "response_model_steps": steps,
            "logprobs": state.logprobs,
            "rest": _packed([RolloutState(**{field: getattr(state, field) for field in _REST})]),
        }
        for column, given in values.items():
            columns[column].append(_row(column, given, position))
    keys.append(f"{name}_prompts")
    prompts = [RolloutState(**{field: getattr(state, field) for field in PROMPT_FIELDS}) for state in arriving.states]
    for column in COLUMNS:
        columns[column].append(_packed(prompts) if column == "rest" else np.empty(0, _DTYPES[column]))
    return Rows(keys, columns)


def _row(column: str, given: Any, position: int) -> Any:
    dtype = _DTYPES[column]
    if given is None:
        return np.empty(0, dtype)
    values = np.asarray(given)
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iubf"):
        raise TypeError(
            f"member {position}: {column} is an array of shape {values.shape} and dtype {values.dtype}; one number per "
            "token is required"
        )
    # A list without entries is an array of floats.
    if values.size and values.dtype.kind == "f" and dtype is not np.float32:
        raise TypeError(f"member {position}: {column} has dtype {values.dtype}; integers are required")
    return np.ascontiguousarray(values, dtype)


def _packed(states: list[RolloutState]) -> Any:
    encoded = encode_group({}, states)
    columns = Columns()
    columns.extend(encoded.entries)
    return np.frombuffer(encoded.line + b"\n" + save_tensors(dict(columns.tensors())), np.uint8)


def _unpacked(values: Any) -> list[RolloutState]:
    line, _, tensors = values.tobytes().partition(b"\n")
    return decode_group(line, ColumnReader(load_tensors(tensors)))[1]


def mask_rows(records: Sequence[Record], masks: Sequence[Sequence[Any]]) -> Rows:
    """Effective masks, for the rows of members that have one."""
    keys, values = [], []
    for record, of_record in zip(records, masks, strict=True):
        for state, mask in zip(record.states, of_record, strict=True):
            if mask is not None and state.response:
                keys.append(state.response)
                values.append(mask)
    return Rows(keys, {"response_mask": values})


def states_of(summaries: Sequence[RolloutState], found: Mapping[str, Mapping[str, Any]]) -> list[RolloutState]:
    """States of a group from its summaries and its rows by key, each an array by column.

    Per-token fields are arrays, whatever they were when they were put, and steps are ModelSteps.
    """
    prompts: Payload = [
        tuple([getattr(state, name) for name in PROMPT_FIELDS])
        for state in _unpacked(found[str(summaries[0].mm_info)]["rest"])
    ]
    responses: Payload = []
    for summary in summaries:
        if not summary.response:
            responses.append(())
            continue
        row = found[summary.response]
        (state,) = _unpacked(row["rest"])
        steps = summary.response_model_steps
        state.response_model_steps = steps
        state.response_ids = row["response_ids"] if len(row["response_ids"]) or not len(steps or ()) else None
        state.logprobs = row["logprobs"] if len(row["logprobs"]) else None
        mask = summary.response_mask
        state.response_mask = None if mask is None else np.asarray(mask, dtype=np.uint8)
        responses.append(tuple([getattr(state, name) for name in RESPONSE_FIELDS]))
    return assembled(summaries, prompts, responses)


def joined(several: Sequence[Rows]) -> Rows:
    """Rows of several groups as one."""
    if len(several) == 1:
        return several[0]
    columns = {name: [row for rows in several for row in rows.columns[name]] for name in several[0].columns}
    return Rows([key for rows in several for key in rows.keys], columns)


def tensors_of(rows: Rows) -> Any:
    """Rows as a TensorDict with jagged columns."""
    torch = framework("torch")
    tensordict = framework("tensordict")
    columns = {}
    for name, values in rows.columns.items():
        lengths = [len(row) for row in values]
        flat = torch.from_numpy(np.concatenate(values))
        if not len(flat):
            flat = torch.empty(0, dtype=flat.dtype)  # that of NumPy has a stride of 0, which TransferQueue cannot send
        offsets = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]))
        columns[name] = torch.nested.nested_tensor_from_jagged(flat, offsets)
    return tensordict.TensorDict(columns, batch_size=len(rows.keys))


def arrays_of(tensors: Any, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of a TensorDict by key: an array for each column."""
    found: dict[str, dict[str, Any]] = {key: {} for key in keys}
    for name, column in tensors.items():
        rows = column.unbind() if hasattr(column, "unbind") else list(column)
        for key, row in zip(keys, rows, strict=True):
            found[key][name] = row.numpy()
    return found
