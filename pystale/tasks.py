"""Tasks that share a batch: what each is produced with, and how large its share is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Generic, TypeVar

from pystale.arguments import checked_task_name
from pystale.buffer import ReplayBuffer
from pystale.producer import ProduceStrategy
from pystale.rollout import AgentLoop
from pystale.sampler import Sampler
from pystale.staleness import checked_int

__all__ = ["TaskSpec", "checked_tasks", "task_batch_sizes"]

Strategy = TypeVar("Strategy", bound=ProduceStrategy, covariant=True)


@dataclass(frozen=True)
class TaskSpec(Generic[Strategy]):
    """One task of a manager.

    Parameters
    ----------
    task_name : str
        Its name in the buffer and in results.
    agent_loop : AgentLoop
        Generates its groups.
    sampler : Sampler
        Draws its groups.
    strategy : ProduceStrategy
        A built strategy: colocated for :class:`~pystale.AgentLoopManager`, disaggregated for
        :class:`~pystale.DisaggAgentLoopManager`.
    weight : int, Fraction or float, default 1
        Its part of every batch, relative to the other tasks' weights. A float counts as the decimal number it is
        written as. 0 turns the task off.

    Raises
    ------
    TypeError, ValueError
        For a name that is no string, or a weight that is no finite number from 0 on.
    """

    task_name: str
    agent_loop: AgentLoop
    sampler: Sampler
    strategy: Strategy
    weight: float | Fraction = 1

    def __post_init__(self) -> None:
        checked_task_name(self.task_name)
        if not isinstance(self.strategy, ProduceStrategy):
            raise TypeError(
                f"strategy of task {self.task_name!r} must be a built strategy, got {type(self.strategy).__name__}; "
                "call build() of its config"
            )
        if isinstance(self.weight, bool) or not isinstance(self.weight, (Rational, float)):
            raise TypeError(f"weight of task {self.task_name!r} must be a number, got {self.weight!r}")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight of task {self.task_name!r} must be a finite number from 0 on, got {self.weight}")

    @property
    def exact_weight(self) -> Fraction:
        """The weight without float noise: 0.1 is a tenth."""
        return Fraction(repr(self.weight)) if isinstance(self.weight, float) else Fraction(self.weight)


def task_batch_sizes(tasks: Sequence[TaskSpec[Strategy]], batch_size: int) -> dict[str, int]:
    """Groups of a batch by task: proportional to the weights, by largest remainder.

    The shares add up to `batch_size`. Equal remainders go to the task named first.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> tasks = [SimpleNamespace(task_name=name, exact_weight=Fraction(1)) for name in "abc"]
    >>> task_batch_sizes(tasks, 8)
    {'a': 3, 'b': 3, 'c': 2}
    """
    batch_size = checked_int("batch_size", batch_size, at_least=1)
    total = sum((task.exact_weight for task in tasks), Fraction(0))
    exact = [batch_size * task.exact_weight / total for task in tasks]
    sizes = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(tasks)), key=lambda i: sizes[i] - exact[i])  # stable: ties stay in order
    for i in by_remainder[: batch_size - sum(sizes)]:
        sizes[i] += 1
    return {task.task_name: size for task, size in zip(tasks, sizes, strict=True)}


def checked_tasks(
    tasks: TaskSpec[Strategy] | Sequence[TaskSpec[Strategy]], buffer: ReplayBuffer, kind: type[ProduceStrategy]
) -> list[TaskSpec[Strategy]]:
    """Tasks as a list, after checking that they fit each other, the manager and the buffer.

    Raises
    ------
    TypeError, ValueError
        For no task, a name twice, weights that are all 0, a strategy of another kind, or one whose settings differ
        from the buffer's.
    """
    given = [tasks] if isinstance(tasks, TaskSpec) else list(tasks)
    if not given:
        raise ValueError("tasks is empty; a manager has at least one")
    names: set[str] = set()
    for task in given:
        if not isinstance(task, TaskSpec):
            raise TypeError(f"a task is a TaskSpec, got {type(task).__name__}")
        if task.task_name in names:
            raise ValueError(f"two tasks have the name {task.task_name!r}; names tell them apart")
        names.add(task.task_name)
        if not isinstance(task.strategy, kind):
            raise ValueError(
                f"task {task.task_name!r} has a {type(task.strategy).__name__}; this manager runs a {kind.__name__}"
            )
        task.strategy.check_buffer(buffer, task.task_name)
    if not any(task.exact_weight for task in given):
        raise ValueError("all tasks have weight 0; at least one must be positive")
    return given
