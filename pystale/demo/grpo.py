"""Training: GRPO on what the buffer hands out, and the supervised start that makes a base model.

The loss of one trainable token with behaviour log-probability `old`, advantage `A` and current log-probability `new`
is ``-min(r * A, clip(r, 1 - 0.2, 1 + 0.2) * A)`` with ``r = exp(new - old)``. It is summed over the tokens the
effective mask leaves and divided by their number, which the batch reports.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pystale import RolloutState
from pystale.demo.policy import Contexts, Floats, Policy, contexts
from pystale.demo.task import OUTPUTS, counting_text, sample_prompt

__all__ = ["Adam", "BaseModel", "TokenBatch", "Trainer", "loss_gradient"]

CLIP = 0.2
LEARNING_RATE, BASE_LEARNING_RATE = 2.5e-3, 1e-2
PASSES = 3
TEXTS, LONGEST_TEXT, SLIPS = 48, 40, 0.05
ROWS = 512  # forward and backward of this many tokens stay in the cache of one core


class Adam:
    """Adam with a bound on the gradient's norm."""

    def __init__(self, size: int, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._mean = np.zeros(size, dtype=np.float32)
        self._square = np.zeros(size, dtype=np.float32)
        self._count = 0

    def state(self) -> tuple[dict[str, Floats], int]:
        """Copies of both averages, and how many updates are in them."""
        return {"mean": self._mean.copy(), "square": self._square.copy()}, self._count

    def load(self, arrays: Mapping[str, Floats], count: int) -> None:
        """Go on from what :meth:`state` gave."""
        self._mean[...], self._square[...], self._count = arrays["mean"], arrays["square"], count

    def update(self, parameters: Floats, gradient: Floats) -> Floats:
        """New parameters."""
        gradient = gradient * min(1.0, 1.0 / (float(np.linalg.norm(gradient)) + 1e-8))
        self._count += 1
        self._mean += 0.1 * (gradient - self._mean)
        self._square += 0.001 * (gradient * gradient - self._square)
        mean = self._mean / (1 - 0.9**self._count)
        square = self._square / (1 - 0.999**self._count)
        new: Floats = (parameters - self._learning_rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
        return new


@dataclass(frozen=True)
class TokenBatch:
    """Trainable tokens of a batch, laid end to end.

    The members of a group write much the same text, so many tokens were chosen in the same context. The policy runs
    once for each distinct one: the gradient is the same, at a third of the time.
    """

    contexts: Contexts  # distinct ones
    context: npt.NDArray[np.intp]  # of each token, where in `contexts` its own is
    tokens: npt.NDArray[np.uint8]
    behaviour: Floats
    advantages: Floats

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[RolloutState]]) -> "TokenBatch":
        """Tokens that the effective mask (``response_mask``; None: all) leaves, and the advantage of their response."""
        members = [member for group in groups for member in group]
        rewards = np.array([[member.reward for member in group] for group in groups], dtype=np.float64)
        spread = rewards.std(axis=1, keepdims=True)
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (spread + 1e-4)
        ids: list[Any] = [member.response_ids for member in members]
        prompts: list[Any] = [member.prompt_ids for member in members]
        logprobs: list[Any] = [member.logprobs for member in members]
        lengths = np.array([len(response) for response in ids])
        masks: list[Any] = [
            np.ones(length, dtype=np.uint8) if member.response_mask is None else member.response_mask
            for member, length in zip(members, lengths, strict=True)
        ]
        tokens = np.concatenate(ids).astype(np.uint8)
        behaviour = np.concatenate(logprobs).astype(np.float32)
        trainable = np.concatenate(masks) != 0
        seen = contexts(prompts, tokens, lengths)
        distinct, context = np.unique(seen[trainable], return_inverse=True)
        return cls(
            distinct,
            context,
            tokens[trainable],
            behaviour[trainable],
            np.repeat(advantages.ravel(), lengths)[trainable].astype(np.float32),
        )


def loss_gradient(policy: Policy, batch: TokenBatch, denominator: int) -> tuple[float, Floats]:
    """Loss, and its gradient with respect to all weights.

    Parameters
    ----------
    denominator : int
        Number of trainable tokens of the whole batch.
    """
    chunks = [policy.forward(batch.contexts[i : i + ROWS]) for i in range(0, len(batch.contexts), ROWS)]
    log_probs = np.concatenate([chunk.log_probs for chunk in chunks])
    chosen = batch.context * OUTPUTS + batch.tokens
    ratio = np.exp(np.clip(log_probs.ravel()[chosen] - batch.behaviour, -20, 20))
    plain, clipped = ratio * batch.advantages, np.clip(ratio, 1 - CLIP, 1 + CLIP) * batch.advantages
    # Where the clipped product is the smaller one, it does not depend on the weights.
    slope = np.where(plain <= clipped, -plain, 0)
    slopes = np.bincount(chosen, slope, minlength=log_probs.size).reshape(log_probs.shape)
    logit_gradient = (slopes - slopes.sum(axis=1, keepdims=True) * np.exp(log_probs)) / denominator
    logit_gradient = logit_gradient.astype(log_probs.dtype)
    gradient = np.zeros_like(policy.parameters)
    for i, chunk in enumerate(chunks):
        gradient += policy.backward(chunk, logit_gradient[i * ROWS : (i + 1) * ROWS])
    return -float(np.minimum(plain, clipped).sum()) / denominator, gradient


class Trainer:
    """Owns the weights that learn.

    Parameters
    ----------
    parameters : float32[34828]
        Weights to start from.

    Attributes
    ----------
    adam : Adam
        The optimiser.
    """

    def __init__(self, parameters: Floats) -> None:
        self._policy = Policy(parameters)
        self.adam = Adam(len(parameters), LEARNING_RATE)

    @property
    def parameters(self) -> Floats:
        """Current weights."""
        return self._policy.parameters

    def step(self, groups: Sequence[Sequence[RolloutState]], trainable_tokens: int) -> None:
        """Train on the groups of one batch."""
        batch = TokenBatch.from_groups(groups)
        if not len(batch.tokens):
            return
        for _ in range(PASSES):
            _, gradient = loss_gradient(self._policy, batch, trainable_tokens)
            self._policy.load(self.adam.update(self._policy.parameters, gradient))


class BaseModel:
    """Teaches counting from text, with slips and with endings that have nothing to do with the prompt.

    Reinforcement learning then has something to reward, and everything to teach: care, and where to stop. From random
    weights the same minute of it stays under a reward of 0.3.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._policy = Policy.initial(rng)
        self._adam = Adam(len(self._policy.parameters), BASE_LEARNING_RATE)

    @property
    def parameters(self) -> Floats:
        """Current weights."""
        return self._policy.parameters

    def train(self, steps: int) -> None:
        """Take supervised steps."""
        rng = self._rng
        for _ in range(steps):
            prompts = [sample_prompt(rng) for _ in range(TEXTS)]
            texts = [counting_text(prompt, int(rng.integers(1, LONGEST_TEXT + 1))) for prompt in prompts]
            tokens = np.concatenate(texts)
            # Neighbours in a text say much the same; a fifth of the tokens teaches as well in a fifth of the time.
            drawn = rng.choice(len(tokens), ROWS, replace=False)
            targets = np.where(rng.random(ROWS) < SLIPS, rng.integers(0, OUTPUTS, ROWS), tokens[drawn])
            activations = self._policy.forward(contexts(prompts, tokens, [len(text) for text in texts])[drawn])
            logit_gradient = np.exp(activations.log_probs)
            logit_gradient[np.arange(ROWS), targets] -= 1
            gradient = self._policy.backward(activations, logit_gradient / ROWS)
            self._policy.load(self._adam.update(self.parameters, gradient))
