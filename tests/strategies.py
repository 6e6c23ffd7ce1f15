"""Hypothesis strategies for the arguments of the kernels: the same integers in every form they may come in."""

import array
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from pystale import ModelSteps

INTEGER_DTYPES = [np.dtype(code) for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
INT64_MAX = 2**63 - 1


class Version(int):
    """A subclass of int that adds nothing; numbers of this kind come out of enums and configuration libraries."""


# Steps as they occur, long runs that span the blocks the kernels read in, and anything that fits.
usual_steps = st.lists(st.integers(-2, 12), max_size=40)
long_runs = st.lists(st.tuples(st.integers(-1, 8), st.integers(1, 900)), max_size=5).map(
    lambda runs: [step for step, length in runs for _ in range(length)]
)
any_steps = st.lists(st.integers(-(2**63), INT64_MAX), max_size=8)
step_values = st.one_of(usual_steps, long_runs, any_steps)

train_steps = st.one_of(st.integers(1, 16), st.integers(1, INT64_MAX))
thresholds = st.one_of(st.none(), st.integers(0, 12), st.integers(0, 2**70))


def mask_values(size: int) -> st.SearchStrategy[list[int]]:
    """Masks of `size` entries; any non-zero entry counts. Long ones repeat a pattern, which is quicker to draw."""
    entries = st.one_of(st.integers(0, 1), st.integers(-3, 300))
    if size <= 40:
        return st.lists(entries, min_size=size, max_size=size)
    return st.lists(entries, min_size=1, max_size=7).map(lambda pattern: (pattern * size)[:size])


@st.composite
def arrays_of(draw: st.DrawFn, values: Sequence[int]) -> npt.NDArray[Any]:
    """An array of these values: any dtype that holds them, either byte order, any stride, aligned or not."""
    low, high = min(values, default=0), max(values, default=0)
    fitting = [dtype for dtype in INTEGER_DTYPES if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max]
    dtype = draw(st.sampled_from(fitting)).newbyteorder(draw(st.sampled_from("<>")))
    plain = np.array(values, dtype=dtype)
    layout = draw(st.sampled_from(["contiguous", "reversed", "column", "unaligned", "repeated", "read-only"]))
    if layout == "reversed":
        return plain[::-1].copy()[::-1]
    if layout == "column":
        table = np.full((len(values), 3), 1, dtype=dtype)
        table[:, 1] = plain
        return table[:, 1]
    if layout == "unaligned":
        records = np.zeros(len(values), dtype=np.dtype([("pad", "u1"), ("value", dtype)]))
        records["value"] = plain
        return records["value"]
    if layout == "repeated" and len(set(values)) == 1:
        return np.broadcast_to(plain[0], (len(values),))
    plain.flags.writeable = layout != "read-only"
    return plain


def members(values: Sequence[int]) -> list[int]:
    """The values as members of an IntEnum."""
    names = {f"v{value}": value for value in set(values)}
    kind = enum.IntEnum("members", names)
    return [kind(value) for value in values]


LISTS: list[Any] = [
    list,
    tuple,
    members,
    lambda values: [Version(value) for value in values],
    lambda values: [np.int64(value) for value in values],
    lambda values: [np.int64(value) if at % 2 else value for at, value in enumerate(values)],
]


def lists_of(values: Sequence[int]) -> st.SearchStrategy[Any]:
    """A list or tuple of these values: exact ints, subclasses of int, NumPy scalars."""
    return st.sampled_from(LISTS).map(lambda make: make(values))


def steps_of(values: Sequence[int]) -> st.SearchStrategy[Any]:
    """These model steps in any form a kernel takes."""
    return st.one_of(
        arrays_of(values),
        lists_of(values),
        st.builds(ModelSteps.from_list, st.just(list(values))),
        st.builds(array.array, st.just("q"), st.just(values)),
    )


def masks_of(values: Sequence[int]) -> st.SearchStrategy[Any]:
    """This mask in any form a kernel takes; where only zero or not zero is kept, the meaning is the same."""
    flags = [value != 0 for value in values]
    return st.one_of(
        steps_of(values),
        st.sampled_from([flags, tuple(flags), np.array(flags, dtype=np.bool_)]),
        st.builds(lambda: [np.bool_(flag) for flag in flags]),
        st.builds(lambda: np.array(flags[::-1], dtype=np.bool_)[::-1]),
    )


@st.composite
def tokens(draw: st.DrawFn) -> tuple[list[int], list[int] | None, Any, Any]:
    """One response: its steps and mask as plain lists, and the same two in some form a kernel takes."""
    steps = draw(step_values)
    mask = draw(st.one_of(st.none(), mask_values(len(steps))))
    return steps, mask, draw(steps_of(steps)), None if mask is None else draw(masks_of(mask))
