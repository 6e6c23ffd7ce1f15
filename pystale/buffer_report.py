"""What a buffer has done to groups, beside the account of tokens in its ledger."""

from dataclasses import dataclass, field

__all__ = ["BufferReport"]


@dataclass(frozen=True, slots=True)
class BufferReport:
    """Counts since the buffer was made, those of the run it was resumed from included.

    Attributes
    ----------
    left_out : dict of str to int
        By task: members that groups were trained without, since they had expired; see :class:`~pystale.GroupMode`.
        A task is there once it has left one out.
    """

    left_out: dict[str, int] = field(default_factory=dict)
