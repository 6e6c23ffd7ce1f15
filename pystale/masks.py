"""Masks that groups train with: made without the buffer's mutex, and written all or none."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pystale._objects import trainable_mask
from pystale.record import Record
from pystale.writing import Writes

__all__ = ["Taken", "masks_of", "write_masks"]


class Taken(NamedTuple):
    """What a group trains with."""

    masks: list[Any]  # mask to write to each member, None where it keeps its own
    tokens: int  # in the loss, of all members


def masks_of(record: Record, train_step: int | None) -> Taken:
    """What a group trains with at `train_step`; without one every member keeps its mask. Nothing changes."""
    masks: list[Any] = []
    tokens = 0
    threshold = record.task.rule.token_stale_threshold
    masks_tokens = record.masks_tokens
    for state, member in zip(record.states, record.members, strict=True):
        applies = masks_tokens and member.newest_trainable >= 0
        if train_step is None or not (applies or member.others):
            masks.append(None)
            tokens += member.trainable
            continue
        old = state.response_mask
        mask, ones = trainable_mask(state.response_model_steps, old, train_step, threshold if applies else None)
        masks.append(mask.tolist() if isinstance(old, list) else mask)
        tokens += ones
    return Taken(masks, tokens)


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
