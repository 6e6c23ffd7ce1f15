"""Masks that groups train with: made without the buffer's mutex, and written all or none."""

from collections.abc import Sequence
from typing import Any

from pystale._objects import trainable_mask
from pystale.record import Record
from pystale.writing import Writes

__all__ = ["Taken", "masks_of", "write_masks"]

# What a member trains with: the mask to write, None where it keeps its own, and the tokens in the loss.
Taken = tuple[Any, int]


def masks_of(record: Record, train_step: int | None) -> list[Taken]:
    """Masks a group trains with at `train_step`; without one every member keeps its own. Nothing changes."""
    taken: list[Taken] = []
    token_stale_threshold = record.task.rule.token_stale_threshold
    for state, member in zip(record.states, record.members, strict=True):
        applies = record.masks_tokens and member.newest_trainable >= 0
        if train_step is None or not (applies or member.others):
            taken.append((None, member.trainable))
            continue
        old = state.response_mask
        mask, ones = trainable_mask(
            state.response_model_steps, old, train_step, token_stale_threshold if applies else None
        )
        taken.append((mask.tolist() if isinstance(old, list) else mask, ones))
    return taken


def write_masks(records: Sequence[Record], masks: Sequence[list[Taken]]) -> Writes:
    """Write the masks that records train with; all of them, or none when a state refuses."""
    writes = Writes()
    try:
        for record, taken in zip(records, masks, strict=True):
            for state, (mask, _) in zip(record.states, taken, strict=True):
                if mask is not None:
                    writes.write(state, "response_mask", mask)
    except BaseException:
        writes.undo()
        raise
    return writes
