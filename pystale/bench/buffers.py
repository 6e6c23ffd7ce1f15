"""The replay buffer beside buffers that look at everything they store."""

import heapq
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status, TrainBatch
from pystale.bench.comparison import OURS, Side, uncollected

__all__ = ["Stored", "put_of_long_lists", "refresh_of_long_lists", "refresh_of_stored", "take_of_stored"]

Group = list[RolloutState]
RULE = StalenessRule(max_staleness=4, max_token_staleness=1)
STALE, TOKEN_STALE = 5, 2  # the thresholds of this rule, in trainer steps
TRAIN_STEP = 9
BYTES_PER_GROUP = 1_400  # measured: state, lists, index
TAKEN = 64


def group(number: int, steps: list[int] | ModelSteps, members: int = 1) -> Group:
    """A finished group; what does not matter here is shared by its members."""
    ids = [1] * len(steps)
    return [
        RolloutState(group_id=number, response_ids=ids, response_model_steps=steps, status=Status.COMPLETED)
        for _ in range(members)
    ]


def expired(groups: Iterable[Group]) -> int:
    """How many responses are too old or have no token left: age and mask of each, by list comprehension."""
    count = 0
    for members in groups:
        for member in members:
            steps: Any = member.response_model_steps
            mask = [int(TRAIN_STEP - step - 1 < TOKEN_STALE) for step in steps]
            count += TRAIN_STEP - min(steps) - 1 >= STALE or not any(mask)
    return count


def moved(refreshed: dict[str, int]) -> int:
    """Groups that a refresh expired."""
    return sum(refreshed.values())


def put_of_long_lists(members: int = 8, tokens: int = 8_192) -> list[Side]:
    """A group arrives: it is checked, counted, and stored with its deadline. Beside only reading its lists."""
    arriving = group(0, [7] * (tokens // 2) + [8] * (tokens - tokens // 2), members)
    buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0)
    return [
        Side("list comprehension", lambda: expired([arriving])),
        Side(
            OURS,
            lambda: buffer.sync.put(arriving, train_step=TRAIN_STEP),
            restore=lambda _: buffer.sync.take_batch({"default": 1}),
            answer=lambda status: int(status is not Status.COMPLETED),
        ),
    ]


def refresh_of_long_lists(groups: int = 64, members: int = 8, tokens: int = 8_192) -> list[Side]:
    """Nothing is due. The lists are shared between responses, which helps the list comprehension's caches."""
    steps = [7] * (tokens // 2) + [8] * (tokens - tokens // 2)
    stored = [group(number, steps, members) for number in range(groups)]
    buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0)
    for members_ in stored:
        buffer.sync.put(members_, train_step=TRAIN_STEP)
    return [
        Side("list comprehension", lambda: expired(stored)),
        Side(OURS, lambda: buffer.sync.refresh_staleness(TRAIN_STEP), answer=moved),
    ]


class Stored:
    """Buffers with many short groups, of which none is due, and what others would keep of the same groups."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[ReplayBuffer, list[Group]]] = {}
        self.seconds_per_group = 0.0

    def fill(self, groups: int, report: Callable[[str], object]) -> None:
        """Store `groups` groups of one response of three tokens; `report` hears how many there are."""
        buffer, stored = ReplayBuffer(RULE, tail_batch_trigger_size=0), []
        began = time.perf_counter()
        steps = [7, 8, 8]
        with uncollected():  # a collection walks all that is stored, again and again
            for number in range(groups):
                stored.append(group(number, steps))
                buffer.sync.put(stored[-1], train_step=TRAIN_STEP)
                if number % 1_000 == 0:
                    report(f"storing {groups:,} groups, {number:,} are there")
        self.seconds_per_group = (time.perf_counter() - began) / groups
        self.buffers[groups] = buffer, stored


def refresh_of_stored(stored: Stored) -> list[Side]:
    """Nothing is due, at several sizes in turn. Beside NumPy over two columns that somebody keeps up to date."""
    return [side for groups, (buffer, _) in stored.buffers.items() for side in _refresh(groups, buffer)]


def _refresh(groups: int, buffer: ReplayBuffer) -> Sequence[Side]:
    oldest, newest, of = np.full(groups, 7), np.full(groups, 8), f"{groups:,}"
    return (
        Side(
            "NumPy on kept ages",
            lambda: int(((TRAIN_STEP - 1 - oldest >= STALE) | (TRAIN_STEP - 1 - newest >= TOKEN_STALE)).sum()),
            of,
        ),
        Side(OURS, lambda: buffer.sync.refresh_staleness(TRAIN_STEP), of, answer=moved),
    )


def take_of_stored(stored: Stored) -> list[Side]:
    """The 64 stalest groups with their masks, beside picking them by age from a list."""
    return [side for groups, (buffer, kept) in stored.buffers.items() for side in _take(groups, buffer, kept)]


def _take(groups: int, buffer: ReplayBuffer, kept: list[Group]) -> Sequence[Side]:
    def pick() -> int:
        picked = heapq.nsmallest(TAKEN, kept, key=lambda members: min(members[0].response_model_steps or ()))
        masks = [
            [int(TRAIN_STEP - step - 1 < TOKEN_STALE) for step in member.response_model_steps or ()]
            for members in picked
            for member in members
        ]
        return sum(map(sum, masks))

    def put_back(batch: TrainBatch) -> None:
        for members in batch["default"]:
            buffer.sync.put(members, train_step=TRAIN_STEP)

    return (
        Side("heapq.nsmallest by age", pick, f"{groups:,}"),
        Side(
            OURS,
            lambda: buffer.sync.take_train_batch({"default": TAKEN}, train_step=TRAIN_STEP),
            f"{groups:,}",
            restore=put_back,
            answer=lambda batch: batch.trainable_tokens,
        ),
    )
