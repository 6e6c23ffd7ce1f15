"""A batch of keys: rows of TransferQueue that are to be trained."""

from dataclasses import dataclass, field
from typing import Any

from pystale.integrations.transfer_queue.framework import framework

__all__ = ["KeyBatch"]


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Groups taken for training, as keys of TransferQueue; small, and can be sent to the ranks of a trainer.

    Attributes
    ----------
    partition_id : str
        Where the rows are.
    keys : dict of str to list of list of str
        By task, the rows of every group; empty when a task was short, and nothing was taken.
    train_step : int
        Step it was taken for.
    trainable_tokens_by_task : dict of str to int
        Tokens that enter the loss.
    left_out_by_task : dict of str to int
        Members of these groups whose rows are not among the keys, since they had expired.
    straggler_s : float
        Seconds that the take has waited for stragglers.
    """

    partition_id: str
    keys: dict[str, list[list[str]]]
    train_step: int
    trainable_tokens_by_task: dict[str, int]
    left_out_by_task: dict[str, int] = field(default_factory=dict)
    straggler_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def trainable_tokens(self) -> int:
        """Tokens that enter the loss, of the whole batch."""
        return sum(self.trainable_tokens_by_task.values())

    @property
    def left_out(self) -> int:
        """Members that had expired, of the whole batch."""
        return sum(self.left_out_by_task.values())

    def rows(self, rank: int = 0, world_size: int = 1) -> list[str]:
        """Keys of a rank in order, every `world_size`-th group of each task: for ``transfer_queue.kv_batch_get``."""
        return [key for groups in self.keys.values() for group in groups[rank::world_size] for key in group]

    def kv_meta(self, rank: int = 0, world_size: int = 1) -> Any:
        """The same as a ``KVBatchMeta`` of TransferQueue, which verl's workers take.

        Returns
        -------
        transfer_queue.KVBatchMeta
        """
        keys = self.rows(rank, world_size)
        return framework("transfer_queue").KVBatchMeta(
            keys=keys,
            tags=[{"status": "success"} for _ in keys],
            partition_id=self.partition_id,
            fields=["prompt_ids", "response_ids", "response_mask", "response_model_steps", "logprobs"],
            extra_info={"train_step": self.train_step, "trainable_tokens": self.trainable_tokens},
        )
