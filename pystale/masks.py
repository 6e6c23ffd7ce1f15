"""Masks that groups train with: made without the buffer's mutex, and written all or none."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pystale._objects import trainable_masks
from pystale.record import Record
from pystale.writing import Writes

__all__ = ["Taken", "counts_of", "masks_of", "write_masks"]


class Taken(NamedTuple):
    """What a group trains with."""

    masks: list[Any]  # mask to write to each member, None where it keeps its own
    tokens: int  # in the loss, of all members


def masks_of(record: Record, train_step: int | None) -> Taken:
    """What a group trains with at `train_step`; without one every member keeps its mask. Nothing changes."""
    return _taken(record, train_step, count_only=False)


def counts_of(record: Record, train_step: int | None) -> Taken:
    """As :func:`masks_of` but without masks: for a summary, whose tokens are elsewhere, the count is all there is."""
    return _taken(record, train_step, count_only=True)


def _taken(record: Record, train_step: int | None, *, count_only: bool) -> Taken:
    if train_step is None:
        return Taken([None] * len(record.states), sum([member.trainable for member in record.members]))
    threshold = record.task.rule.token_stale_threshold
    return Taken(
        *trainable_masks(
            record.states, record.members, record.masks_tokens, train_step, threshold, count_only=count_only
        )
    )


def write_masks(records: Sequence[Record], taken: Sequence[Taken]) -> Writes:
    """Write the masks that records train with; all of them, or none when a state refuses."""
    writes = Writes()
    try:
        for record, (masks, _) in zip(records, taken, strict=True):
            writes.write_each(record.states, "response_mask", masks)
    except BaseException:
        writes.undo()
        raise
    return writes
