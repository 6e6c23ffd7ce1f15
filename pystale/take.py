"""Taking a batch: claimed at once, in the caller's hands once the journal has it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from pystale.batch import TrainBatch
from pystale.in_flight import Wanted, wait_for_stragglers
from pystale.journal import Journal
from pystale.masks import Taken
from pystale.record import Record
from pystale.waiting import Waiting
from pystale.writing import Writes

if TYPE_CHECKING:
    from pystale.operations import Operations

__all__ = ["Claim", "claim_train_batch"]


class Claim(NamedTuple):
    """Groups taken out of the store for training, and what they train with."""

    batch: TrainBatch
    records: list[Record]
    taken: list[Taken]
    writes: Writes  # the masks it has written
    arrived: "Callable[[Claim], None]"  # told that the caller has the batch
    take_back: "Callable[[Claim], None]"  # stores the groups again, as if they had never left
    journal: Journal | None = None
    entry: int | None = None  # number of the journal entry to wait for

    async def hand_over(self, waiting: Waiting) -> TrainBatch:
        """The batch, once the journal says that it is taken. A caller that gives up meanwhile takes nothing along."""
        if self.entry is not None and self.journal is not None:
            try:
                await waiting.written(self.journal, self.entry)
            except BaseException:
                self.take_back(self)
                raise
            self.arrived(self)
        return self.batch


async def claim_train_batch(
    operations: "Operations", sizes: Mapping[str, int], train_step: int, waiting: Waiting
) -> Claim:
    """Refresh, and claim a batch of what is left.

    Claims nothing until what the refresh released is freed and no straggler is left, so that nothing but the journal is
    waited for while groups are nowhere; and returns in the moment it has claimed.
    """
    waited = 0.0
    while True:
        claim, effects = operations.claim_train_batch(sizes, train_step)
        if claim is not None:
            claim.batch.straggler_s = waited
            return claim
        await effects.finish(waiting)
        if effects.straggling:
            wanted, limit = Wanted(sizes, train_step), operations.straggler_timeout_s
            waited += await wait_for_stragglers(operations.in_flight, wanted, limit, waited, waiting)
