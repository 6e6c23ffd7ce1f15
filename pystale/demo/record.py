"""What is remembered of a run; everything shown on the way and at the end is read from here."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pystale import RolloutState
from pystale.demo.settings import Settings
from pystale.demo.task import MAX_TOKENS, text

__all__ = ["Record", "Response", "Stretch"]

NOT_KEPT = {"settings", "began", "ended"}


@dataclass(frozen=True)
class Stretch:
    """Part of a response that one model step wrote."""

    model_step: int
    trained: bool  # False: the effective mask left it out of the loss
    characters: str


@dataclass(frozen=True)
class Response:
    """A trained response, as it is shown."""

    train_step: int
    prompt: str
    reward: float
    stretches: list[Stretch]

    @classmethod
    def of(cls, state: RolloutState, train_step: int) -> "Response":
        """Copy of what a state says after it was taken for training."""
        ids, mask, steps = _per_token(state)
        stretches, start = [], 0
        for model_step, count in steps.runs():
            stretches.append(Stretch(model_step, bool(mask[start]), text(ids[start : start + count])))
            start += count
        return cls(train_step, text(state.prompt_ids), float(state.reward), stretches)

    @property
    def tokens(self) -> int:
        """Length of the response."""
        return sum(len(stretch.characters) for stretch in self.stretches)


@dataclass
class Record:
    """Counts and times of a run so far; of all its processes, where it was continued."""

    settings: Settings
    began: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    pretrained: float = 0.0  # share of the supervised start that is done
    rewards: list[float] = field(default_factory=list)  # mean of the batch, one per trainer step
    batches: list[list[int]] = field(default_factory=list)  # ids of the groups trained, one list per trainer step
    continued_after: list[int] = field(default_factory=list)  # steps that were done when a new process went on
    tokens: int = 0  # response tokens of the batches taken for training
    trainable_tokens: int = 0  # of these, tokens in the loss
    # Per trainer step, what its batch holds of every age: staleness, tokens in the loss, tokens left out of it.
    ages: list[list[tuple[int, int, int]]] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)  # responses by seq_staleness when taken
    versions: Counter[int] = field(default_factory=Counter)  # responses by number of model steps
    groups_expired: int = 0
    groups_rerolled: int = 0
    groups_continued: int = 0
    generated_tokens: int = 0
    generation_s: float = 0.0
    training_s: float = 0.0
    waiting_s: float = 0.0  # the trainer waited for a batch, while the engine worked beside it
    pausing_s: float = 0.0  # the engine stood still, for weight syncs and checkpoints
    tokens_beside_training: int = 0  # generated while the trainer worked
    checkpoints: list[float] = field(default_factory=list)  # seconds that each one took
    refreshes: list[tuple[float, int]] = field(default_factory=list)  # microseconds, groups that expired
    gap_ms: float = 0.0  # longest gap of the event loop since the last trainer step
    gaps_ms: list[float] = field(default_factory=list)  # the same, one per trainer step
    longest_gap_ms: float = 0.0
    ledger: dict[str, Any] = field(default_factory=dict)
    sample: Response | None = None
    best: float = 0.0  # how much the sample is worth showing

    def as_dict(self) -> dict[str, Any]:
        """All of it but the settings, as plain data."""
        content = {name: value for name, value in vars(self).items() if name not in NOT_KEPT}
        return {
            **content,
            "seconds": self.seconds,
            "rewards": list(self.rewards),
            "batches": list(self.batches),
            "ages": [[list(each) for each in step] for step in self.ages],
            "gaps_ms": list(self.gaps_ms),
            "refreshes": [list(pair) for pair in self.refreshes],
            "staleness": dict(self.staleness),
            "versions": dict(self.versions),
            "checkpoints": list(self.checkpoints),
            "continued_after": list(self.continued_after),
            "ledger": {**self.ledger, "discarded": dict(self.ledger.get("discarded", {}))},
            "sample": None if self.sample is None else asdict(self.sample),
        }

    @classmethod
    def from_dict(cls, settings: Settings, content: Mapping[str, Any]) -> "Record":
        """What :meth:`as_dict` gave; its clock goes on where it stood.

        Raises
        ------
        KeyError, TypeError, ValueError
            If it is not that.
        """
        record, content = cls(settings), dict(content)
        record.began -= float(content.pop("seconds"))
        if set(content) != set(vars(record)) - NOT_KEPT:
            raise ValueError(f"a record does not consist of {', '.join(sorted(content))}")
        for name, value in content.items():
            setattr(record, name, value)
        record.staleness, record.versions = Counter(content["staleness"]), Counter(content["versions"])
        record.refreshes = [(us, expired) for us, expired in content["refreshes"]]
        record.ages = [[(age, trained, masked) for age, trained, masked in step] for step in content["ages"]]
        if (sample := content["sample"]) is not None:
            record.sample = Response(**{**sample, "stretches": [Stretch(**each) for each in sample["stretches"]]})
        if not len(record.rewards) == len(record.batches) == len(record.ages) == len(record.gaps_ms) <= settings.steps:
            raise ValueError(
                f"{len(record.rewards)} rewards, {len(record.batches)} batches, {len(record.ages)} ages and "
                f"{len(record.gaps_ms)} gaps of a run of {settings.steps} steps"
            )
        return record

    @property
    def steps(self) -> int:
        """Trainer steps done."""
        return len(self.rewards)

    @property
    def seconds(self) -> float:
        """Wall time."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.began

    @property
    def refresh_us(self) -> list[float]:
        """Microseconds of every refresh."""
        return [us for us, _ in self.refreshes]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second while generating."""
        return self.generated_tokens / self.generation_s if self.generation_s else 0.0

    @property
    def masked(self) -> float:
        """Share of the tokens of trained batches that the effective mask left out."""
        return 1 - self.trainable_tokens / max(self.tokens, 1)

    def tenths(self) -> tuple[float, float] | None:
        """Mean reward of the first and the last tenth of the steps; None where a tenth is too few steps to compare."""
        tenth = self.steps // 10
        return (float(np.mean(self.rewards[:tenth])), float(np.mean(self.rewards[-tenth:]))) if tenth >= 5 else None

    def add_gap(self, milliseconds: float) -> None:
        """Note how long the event loop was away."""
        self.gap_ms = max(self.gap_ms, milliseconds)
        self.longest_gap_ms = max(self.longest_gap_ms, milliseconds)

    def add_expired(self, released: Sequence[tuple[RolloutState, dict[str, Any]]]) -> None:
        """Count the groups of responses that were reset or discarded in one operation of the buffer."""
        self.groups_expired += len({state.group_id for state, _ in released})

    def add_batch(self, groups: Sequence[Sequence[RolloutState]], trainable_tokens: int, train_step: int) -> None:
        """Count a batch that was taken for training."""
        members = [member for group in groups for member in group]
        self.batches.append([int(group[0].group_id or 0) for group in groups])
        self.rewards.append(float(np.mean([member.reward for member in members])))
        self.trainable_tokens += trainable_tokens
        self.gaps_ms.append(self.gap_ms)
        self.gap_ms = 0.0
        ages: Counter[tuple[int, bool]] = Counter()
        for member in members:
            ids, mask, steps = _per_token(member)
            start = 0
            for model_step, count in steps.runs():
                trained = int(mask[start : start + count].sum())
                ages[train_step - model_step - 1, True] += trained
                ages[train_step - model_step - 1, False] += count - trained
                start += count
            versions = len(steps.runs())
            self.tokens += len(ids)
            self.staleness[member.seq_staleness] += 1
            self.versions[versions] += 1
            # Worth showing: several versions, a masked part, long, right, and late in the run.
            worth = min(versions, 4) + (not mask.all()) + len(ids) / MAX_TOKENS + 2 * float(member.reward)
            if versions > 1 and worth >= self.best:
                self.best, self.sample = worth, Response.of(member, train_step)
        self.ages.append([(age, ages[age, True], ages[age, False]) for age in sorted({age for age, _ in ages})])


def _per_token(state: RolloutState) -> tuple[Any, Any, Any]:
    """Ids, mask and steps of a response."""
    ids: Any = state.response_ids
    mask: Any = np.ones(len(ids)) if state.response_mask is None else state.response_mask
    return ids, np.asarray(mask) != 0, state.response_model_steps
