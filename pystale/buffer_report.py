"""What a buffer has done to groups, beside the account of tokens in its ledger."""

from dataclasses import dataclass, field

from pystale.lengths import LengthAccumulator

__all__ = ["BufferReport"]


@dataclass(frozen=True, slots=True)
class BufferReport:
    """Counts since the buffer was made.

    Attributes
    ----------
    left_out : dict of str to int
        By task: members that groups were trained without, since they had expired; see :class:`~pystale.GroupMode`.
        A task is there once it has left one out. Those of the run that was resumed are included.
    reserved : dict of str to int
        By task: groups that are in flight now, as far as they were reserved.
    straggler_s : float
        Seconds that takes have waited for stragglers, those that were given up included.
    lengths : LengthAccumulator
        What became of responses, by their length.
    """

    left_out: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    straggler_s: float = 0.0
    lengths: LengthAccumulator = field(default_factory=LengthAccumulator)

    def metrics(self, prefix: str = "training") -> dict[str, float]:
        """For a logger: ``left_out``, ``reserved`` and ``straggler_s`` of all tasks, and those of `lengths`.

        Examples
        --------
        >>> from pystale.buffer_report import BufferReport
        >>> BufferReport(left_out={"math": 3}, straggler_s=1.5).metrics()
        {'training/left_out': 3.0, 'training/reserved': 0.0, 'training/straggler_s': 1.5}
        """
        return {
            f"{prefix}/left_out": float(sum(self.left_out.values())),
            f"{prefix}/reserved": float(sum(self.reserved.values())),
            f"{prefix}/straggler_s": self.straggler_s,
            **self.lengths.metrics(f"{prefix}/lengths"),
        }
