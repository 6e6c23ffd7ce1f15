"""A replay buffer whose payloads are in TransferQueue: tokens stay there, and what is decided is decided on summaries.

>>> from pystale.integrations.transfer_queue import TransferQueueStore, start_transfer_queue
"""

from pystale.integrations.transfer_queue.batch import KeyBatch
from pystale.integrations.transfer_queue.service import TransferQueueGone
from pystale.integrations.transfer_queue.starting import start_transfer_queue
from pystale.integrations.transfer_queue.store import BlockingTransferQueueStore, TransferQueueStore

__all__ = [
    "BlockingTransferQueueStore",
    "KeyBatch",
    "TransferQueueGone",
    "TransferQueueStore",
    "start_transfer_queue",
]
