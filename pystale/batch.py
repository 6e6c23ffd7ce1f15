"""What a trainer takes out of the buffer."""

from collections.abc import Iterator, Mapping

from pystale.group import Group

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
    """

    __slots__ = ("_groups", "trainable_tokens", "trainable_tokens_by_task")

    def __init__(self, groups: dict[str, list[Group]], trainable_tokens_by_task: dict[str, int]) -> None:
        self._groups = groups
        self.trainable_tokens_by_task = trainable_tokens_by_task
        self.trainable_tokens = sum(trainable_tokens_by_task.values())

    def __getitem__(self, task_name: str) -> list[Group]:
        return self._groups[task_name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __repr__(self) -> str:
        sizes = {task: len(groups) for task, groups in self._groups.items()}
        return f"TrainBatch({sizes}, trainable_tokens={self.trainable_tokens})"
