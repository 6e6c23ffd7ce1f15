"""A replay buffer whose payloads are in TransferQueue: tokens stay there, and what is decided is decided on summaries.

>>> from pystale.integrations.transferqueue import TransferQueueStore, start_transfer_queue
"""

from pystale.integrations.transferqueue.batch import KeyBatch
from pystale.integrations.transferqueue.service import TransferQueueGone
from pystale.integrations.transferqueue.starting import start_transfer_queue
from pystale.integrations.transferqueue.store import BlockingTransferQueueStore, TransferQueueStore

__all__ = [
    "BlockingTransferQueueStore",
    "KeyBatch",
    "TransferQueueGone",
    "TransferQueueStore",
    "start_transfer_queue",
]
