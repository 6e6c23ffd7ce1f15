"""How far a background producer and its consumer are, in steps and groups."""

from collections.abc import Mapping

__all__ = ["Progress"]


class Progress:
    """Absolute position of production and consumption.

    What is wanted in all, for every step up to the one being produced for, is derived from what was consumed: groups
    that were consumed, and one share for every step not consumed yet. So it stays right when a batch is taken earlier
    than it was asked for, when steps are skipped, and after a resume, and nothing of it needs saving.

    Attributes
    ----------
    model_step : int
        Trainer step whose weights are served.
    next_train_step : int
        Trainer step that takes the next batch.
    future_step : int
        Trainer step that is produced for.
    consumed : dict of str to int
        Groups taken so far, by task.

    Examples
    --------
    >>> progress = Progress(["math"], train_step=3, model_step=2)
    >>> progress.future_step = 4  # one step ahead
    >>> progress.target("math", 8)
    16
    >>> progress.consume({"math": 8}, 3)
    >>> progress.target("math", 8), progress.next_train_step
    (16, 4)
    """

    def __init__(self, task_names: list[str], *, train_step: int, model_step: int) -> None:
        self.model_step = model_step
        self.next_train_step = train_step
        self.future_step = train_step
        self.consumed = dict.fromkeys(task_names, 0)

    def target(self, task_name: str, share: int) -> int:
        """Groups wanted in all, those consumed so far included, when every step takes `share`."""
        return self.consumed[task_name] + max(self.future_step - self.next_train_step + 1, 0) * share

    @property
    def put_step(self) -> int:
        """Step at which groups are put: the one that takes them first, but one that the weights may train."""
        return max(self.next_train_step, self.model_step + 1)

    def reach(self, train_step: int) -> None:
        """The consumer is at this step, and nothing is produced for those before it any more."""
        self.next_train_step = train_step
        self.future_step = max(self.future_step, train_step)

    def publish(self, model_step: int) -> None:
        """Weights of this step are served from now on."""
        self.model_step = model_step
        self.reach(max(self.next_train_step, model_step + 1))

    def consume(self, sizes: Mapping[str, int], train_step: int) -> None:
        """A batch was taken for this step."""
        for task_name, n in sizes.items():
            self.consumed[task_name] += n
        self.reach(train_step + 1)

    def give_back(self, sizes: Mapping[str, int], train_step: int) -> None:
        """The batch taken for this step was not delivered and is in the buffer again."""
        for task_name, n in sizes.items():
            self.consumed[task_name] -= n
        self.reach(train_step)

    def advance(self, future_step: int) -> None:
        """Production for this step is done."""
        self.future_step = max(self.future_step, future_step + 1)
