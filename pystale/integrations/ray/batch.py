"""A batch of references, and how its payloads become states with their masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pystale._objects import measure, trainable_masks
from pystale.batch import TrainBatch
from pystale.integrations.ray.keeper import PayloadsLost
from pystale.staleness import StalenessRule
from pystale.state import RolloutState, Status
from pystale.summary import assembled

__all__ = ["BatchRefs", "GroupRefs"]


@dataclass(frozen=True, slots=True)
class GroupRefs:
    """A group: what the actor knows of it, and references to its payloads."""

    summaries: list[RolloutState]
    prompts: Any  # ObjectRef
    responses: Any  # ObjectRef, None where every member was reset


@dataclass(frozen=True, slots=True)
class BatchRefs:
    """Groups taken for training, whose tokens are still where they were produced.

    It is small, and can be handed to other processes of the cluster, such as the ranks of a trainer.

    Attributes
    ----------
    groups : dict of str to list of GroupRefs
        By task; empty when a task was short, and nothing was taken.
    train_step : int
        Step it was taken for.
    trainable_tokens_by_task : dict of str to int
        Tokens that enter the loss.
    straggler_s : float
        Seconds that the take has waited for stragglers.
    """

    groups: dict[str, list[GroupRefs]]
    train_step: int
    trainable_tokens_by_task: dict[str, int]
    rules: Mapping[str, StalenessRule]
    straggler_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.groups)

    @property
    def trainable_tokens(self) -> int:
        """Tokens that enter the loss, of the whole batch."""
        return sum(self.trainable_tokens_by_task.values())

    def refs(self, rank: int = 0, world_size: int = 1) -> list[Any]:
        """References of all payloads in order, for :meth:`assembled`."""
        found = []
        for groups in self.groups.values():
            for group in groups[rank::world_size]:
                found += [group.prompts] if group.responses is None else [group.prompts, group.responses]
        return found

    def assembled(self, payloads: Sequence[Any], rank: int = 0, world_size: int = 1) -> TrainBatch:
        """Groups of a rank, every `world_size`-th of each task, with effective masks.

        Parameters
        ----------
        payloads : sequence
            What ``ray.get(batch.refs(rank, world_size))`` gave.
        rank, world_size : int
            The share wanted; all by default.

        Returns
        -------
        TrainBatch
            As :meth:`~pystale.ReplayBuffer.take_train_batch` returns it.

        Raises
        ------
        PayloadsLost
            If the payloads are not those that the batch was counted with.
        """
        rest = iter(payloads)
        states: dict[str, list[list[RolloutState]]] = {}
        tokens: dict[str, int] = {}
        left_out: dict[str, int] = {}
        for task_name, groups in self.groups.items():
            states[task_name], tokens[task_name], left_out[task_name] = [], 0, 0
            for refs in groups[rank::world_size]:
                prompts = next(rest)
                group = assembled(refs.summaries, prompts, None if refs.responses is None else next(rest))
                tokens[task_name] += write_group_masks(
                    group, self.rules[task_name], self.train_step, agentic=is_agentic(refs.summaries)
                )
                # The actor has them in their places, by which payloads are found; they are left out here.
                fresh = [state for state in group if state.status is not Status.EXPIRED]
                left_out[task_name] += len(group) - len(fresh)
                states[task_name].append(fresh)
            if world_size == 1 and tokens[task_name] != self.trainable_tokens_by_task[task_name]:
                raise PayloadsLost(
                    f"task {task_name!r}: the payloads have {tokens[task_name]} tokens in the loss, their summaries "
                    f"{self.trainable_tokens_by_task[task_name]}; they do not belong together, and must not be trained"
                )
        batch = TrainBatch(states, tokens, left_out)
        batch.straggler_s = self.straggler_s
        return batch


def is_agentic(summaries: Sequence[RolloutState]) -> bool:
    """Whether a group came with training tensors, so that the token rule does not apply to it."""
    return any(summary.input_ids is not None for summary in summaries)


def write_group_masks(group: list[RolloutState], rule: StalenessRule, train_step: int, *, agentic: bool) -> int:
    """Write the masks a group trains with at a step, as the buffer would; returns its tokens in the loss."""
    members = [measure(state, state.response_model_steps) for state in group]
    threshold = rule.token_stale_threshold
    masks, tokens = trainable_masks(group, members, threshold is not None and not agentic, train_step, threshold)
    for state, mask in zip(group, masks, strict=True):
        if mask is not None:
            state.response_mask = mask
    return tokens
