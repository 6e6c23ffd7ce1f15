"""What a trainer takes out of the buffer."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pystale._objects import Responses, tensor_memory
from pystale.group import Group
from pystale.staleness import checked_int

__all__ = ["TrainBatch"]


class TrainBatch(Mapping[str, list[Group]]):
    """Groups taken for training, by task.

    Empty, and false, when some task could not fill its share; then nothing was taken.

    Attributes
    ----------
    trainable_tokens : int
        Tokens that enter the loss, of all tasks.
    trainable_tokens_by_task : dict of str to int
        The same by task.
    left_out : int
        Members of these groups that are not in them, since they had expired; see :class:`~pystale.GroupMode`.
    left_out_by_task : dict of str to int
        The same by task.
    straggler_s : float
        Seconds that the take has waited for stragglers; see :class:`~pystale.ReplayBuffer`.
    """

    __slots__ = (
        *("_groups", "left_out", "left_out_by_task", "straggler_s", "trainable_tokens", "trainable_tokens_by_task"),
    )

    def __init__(
        self,
        groups: dict[str, list[Group]],
        trainable_tokens_by_task: dict[str, int],
        left_out_by_task: Mapping[str, int] | None = None,
    ) -> None:
        self._groups = groups
        self.trainable_tokens_by_task = trainable_tokens_by_task
        self.trainable_tokens = sum(trainable_tokens_by_task.values())
        counts = left_out_by_task or {}
        self.left_out_by_task = {task: counts.get(task, 0) for task in groups}
        self.left_out = sum(self.left_out_by_task.values())
        self.straggler_s = 0.0

    def __getitem__(self, task_name: str) -> list[Group]:
        return self._groups[task_name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def responses(self) -> list[Any]:
        """Every state of the batch: task by task, group by group, member by member."""
        return [state for groups in self._groups.values() for group in groups for state in group]

    def response_masks(
        self,
        out: Any = None,
        *,
        length: int | None = None,
        dtype: npt.DTypeLike | None = None,
        padding: Literal["left", "right"] = "right",
    ) -> Any:
        """Masks of all responses as one table: 1 where a token enters the loss, 0 elsewhere and in the padding.

        Row r belongs to ``responses[r]``. A token counts when the mask of its state is not zero (None: everywhere) and
        a model generated it; ``take_train_batch`` has put the stale ones out of the masks. So the table of a batch
        taken for training sums up to ``trainable_tokens``.

        Parameters
        ----------
        out : ndarray or CPU tensor, shape (B, length), optional
            Written in place; any bool, integer or floating dtype that NumPy has. May be part of a wider table.
        length : int, optional
            Columns of a new table, in tokens; by default those of the longest response.
        dtype : dtype, optional
            Of a new table; by default uint8.
        padding : {"right", "left"}
            The side on which rows are filled up.

        Returns
        -------
        ndarray, shape (B, length)
            Or ``out`` itself.

        Raises
        ------
        TypeError
            ``out`` is not an array or tensor of numbers, or a mask or step is not an integer.
        ValueError
            A response is longer than the table is wide, ``out`` has another shape or cannot be written, or per-token
            fields differ in length. Nothing was written.

        Examples
        --------
        >>> from pystale import RolloutState, TrainBatch
        >>> group = [
        ...     RolloutState(response_ids=[7, 8, 9], response_model_steps=[4, 4, 5], response_mask=[0, 1, 1]),
        ...     RolloutState(response_ids=[7, 8], response_model_steps=[5, 5]),
        ... ]
        >>> TrainBatch({"math": [group]}, {"math": 4}).response_masks(padding="left", dtype="int64")
        array([[0, 1, 1],
               [0, 1, 1]])
        """
        if padding not in ("left", "right"):
            raise ValueError(f"padding is {padding!r}; 'left' or 'right' is required")
        responses = Responses(self.responses)
        longest = max(responses.tokens, default=0)
        if out is None:
            wide = longest if length is None else checked_int("length", length, at_least=0)
            table = result = np.empty((len(responses.tokens), wide), _number(np.dtype(dtype or np.uint8), "dtype"))
        else:
            table, result = _writable(out, length=length, dtype=dtype), out
            if table.ndim != 2 or table.shape[0] != len(responses.tokens):
                raise ValueError(
                    f"out has shape {table.shape}; two dimensions with {len(responses.tokens)} rows are required, "
                    "one row per response"
                )
        if longest > table.shape[1]:
            at = next(at for at, tokens in enumerate(responses.tokens) if tokens > table.shape[1])
            raise ValueError(
                f"response {at} has {responses.tokens[at]} tokens, the table is {table.shape[1]} wide; the longest "
                f"response needs {longest}"
            )
        _write(responses, table, left=padding == "left")
        return result

    def packed_response_masks(
        self, out: Any = None, *, dtype: npt.DTypeLike | None = None
    ) -> tuple[Any, npt.NDArray[np.int64]]:
        """Masks of all responses laid end to end, as :meth:`response_masks` but without padding.

        Parameters
        ----------
        out : ndarray or CPU tensor, shape (tokens,), optional
            Written in place; any bool, integer or floating dtype that NumPy has.
        dtype : dtype, optional
            Of a new array; by default uint8.

        Returns
        -------
        masks : ndarray, shape (tokens,)
            Or ``out`` itself.
        offsets : ndarray of int64, shape (B + 1,)
            Response r has entries ``[offsets[r], offsets[r + 1])``.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`response_masks`.

        Examples
        --------
        >>> from pystale import RolloutState, TrainBatch
        >>> group = [
        ...     RolloutState(response_ids=[7, 8, 9], response_model_steps=[4, 4, 5], response_mask=[0, 1, 1]),
        ...     RolloutState(response_ids=[7, 8], response_model_steps=[5, 5]),
        ... ]
        >>> TrainBatch({"math": [group]}, {"math": 4}).packed_response_masks()
        (array([0, 1, 1, 1, 1], dtype=uint8), array([0, 3, 5]))
        """
        responses = Responses(self.responses)
        offsets = np.zeros(len(responses.tokens) + 1, np.int64)
        np.cumsum(responses.tokens, out=offsets[1:])
        if out is None:
            flat = result = np.empty(offsets[-1], _number(np.dtype(dtype or np.uint8), "dtype"))
        else:
            flat, result = _writable(out, length=None, dtype=dtype), out
            if flat.shape != (offsets[-1],):
                raise ValueError(f"out has shape {flat.shape}; ({offsets[-1]},) is required, one entry per token")
        _write(responses, flat, left=False)
        return result, offsets

    def __repr__(self) -> str:
        sizes = {task: len(groups) for task, groups in self._groups.items()}
        left_out = f", left_out={self.left_out}" if self.left_out else ""
        return f"TrainBatch({sizes}, trainable_tokens={self.trainable_tokens}{left_out})"


def _number(dtype: np.dtype[Any], name: str) -> np.dtype[Any]:
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise TypeError(f"{name} is {dtype}; a bool, integer or floating dtype of at most 8 bytes is required")
    return dtype


def _writable(out: Any, *, length: int | None, dtype: npt.DTypeLike | None) -> npt.NDArray[Any]:
    """The array to write for an `out` of the caller's."""
    if length is not None or dtype is not None:
        raise ValueError("length and dtype are those of out where out is given; leave them out")
    array = tensor_memory(out, "out", floats=True)
    if not isinstance(array, np.ndarray):
        raise TypeError(f"out is of type {type(out).__name__}; an array or a CPU tensor is required")
    _number(array.dtype, "the dtype of out")
    if not array.flags.writeable:
        raise ValueError("out is read-only; a writable array is required")
    if array.size and not _entries_are_distinct(array):
        raise ValueError(f"entries of out share memory (strides {array.strides}); every entry must have its own")
    return array


def _write(responses: Responses, out: npt.NDArray[Any], *, left: bool) -> None:
    size = out.dtype.itemsize
    if (out.size and out.strides[-1] != size) or not out.dtype.isnative:
        # Any other layout is NumPy's to write.
        copy = np.empty(out.shape, out.dtype.newbyteorder("="))
        _write(responses, copy, left=left)
        out[...] = copy
        return
    bits = np.dtype(f"u{size}")
    responses.write(out.view(bits), int(np.ones((), out.dtype).view(bits)), left=left)


def _entries_are_distinct(array: npt.NDArray[Any]) -> bool:
    reach = array.itemsize
    for distance, size in sorted((abs(stride), size) for stride, size in zip(array.strides, array.shape, strict=True)):
        if size > 1 and distance < reach:
            return False
        reach += distance * (size - 1)
    return True
