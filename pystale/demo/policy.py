"""A small autoregressive policy in NumPy, with its own gradient.

It sees the prompt and the last six response tokens, one-hot, through two hidden layers of ReLUs. What it remembers of
a response is the tokens themselves, so a response continues under new weights without any cache to rebuild.

What it sees, ten symbols, is written as one number, the *context*: ten digits to the base of 13, the prompt first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pystale.demo.task import OUTPUTS, PAD, PROMPT_TOKENS, SYMBOLS

__all__ = ["Activations", "Contexts", "Floats", "Policy", "contexts", "first_context", "next_context"]

Floats = npt.NDArray[np.floating[Any]]
Contexts = npt.NDArray[np.int64]

WINDOW = 6
SEEN = PROMPT_TOKENS + WINDOW
HIDDEN = 128

_SHAPES = {
    "embedding": (SEEN * SYMBOLS, HIDDEN),
    "bias1": (HIDDEN,),
    "weight2": (HIDDEN, HIDDEN),
    "bias2": (HIDDEN,),
    "weight3": (HIDDEN, OUTPUTS),
    "bias3": (OUTPUTS,),
}
SIZE = sum(int(np.prod(shape)) for shape in _SHAPES.values())
_PLACES = SYMBOLS ** np.arange(SEEN - 1, -1, -1, dtype=np.int64)
_PAIR_PLACES = _PLACES[1::2]
_WINDOWS = SYMBOLS**WINDOW


def first_context(prompt_ids: Any, response_ids: Any) -> int:
    """What the policy sees next, after a prompt and a response so far."""
    window = [PAD] * WINDOW + [int(token) for token in response_ids[-WINDOW:]]
    context = 0
    for symbol in (*prompt_ids, *window[-WINDOW:]):
        context = context * SYMBOLS + int(symbol)
    return context


def contexts(prompts: Any, tokens: npt.NDArray[np.uint8], lengths: Sequence[int] | npt.NDArray[np.intp]) -> Contexts:
    """What the policy saw before each token of r responses that are laid end to end.

    Parameters
    ----------
    prompts : int[r, 4]
    tokens : uint8[n]
    lengths : int[r]
        Tokens of each response; their sum is n.
    """
    ends = np.cumsum(lengths)
    position = np.arange(len(tokens)) - np.repeat(ends - lengths, lengths)
    seen: Contexts = np.repeat(np.asarray(prompts, dtype=np.int64) @ _PLACES[:PROMPT_TOKENS], lengths)
    for back in range(1, WINDOW + 1):
        earlier = np.where(position >= back, np.roll(tokens, back), PAD)
        seen += earlier * _PLACES[-back]
    return seen


def next_context(context: Contexts, token: npt.NDArray[np.integer[Any]]) -> Contexts:
    """What the policy sees after one more token."""
    window = context % _WINDOWS
    following: Contexts = context - window + (window * SYMBOLS + token) % _WINDOWS
    return following


@dataclass(frozen=True)
class Activations:
    """What a forward pass leaves for the backward pass; n rows each."""

    contexts: Contexts
    hidden1: Floats
    hidden2: Floats
    log_probs: Floats


class Policy:
    """Log-probabilities of the next token, and their gradient.

    Parameters
    ----------
    parameters : float[34828]
        All weights, end to end; copied.
    """

    def __init__(self, parameters: Floats) -> None:
        self.parameters: Floats = parameters.copy()
        self._views = _split(self.parameters)
        self._pairs = np.empty((SEEN // 2, SYMBOLS * SYMBOLS, HIDDEN), dtype=parameters.dtype)
        # A row of zeros, not 0: NumPy's maximum has no vector loop for a scalar, which is five times slower.
        self._zeros = np.zeros(HIDDEN, dtype=parameters.dtype)
        self.load(parameters)

    @classmethod
    def initial(cls, rng: np.random.Generator, dtype: Any = np.float32) -> "Policy":
        """He-initialised hidden layers, and a last layer small enough that every token starts about equally likely."""
        parameters = np.zeros(SIZE, dtype=dtype)
        views = _split(parameters)
        for name, inputs, gain in (("embedding", SEEN, 2.0), ("weight2", HIDDEN, 2.0), ("weight3", HIDDEN, 0.01)):
            views[name][...] = rng.standard_normal(views[name].shape) * np.sqrt(gain / inputs)
        return cls(parameters)

    def load(self, parameters: Floats) -> None:
        """Copy new weights in."""
        self.parameters[...] = parameters
        # The first layer sums one embedding row per input token. Summing rows of two neighbours beforehand, one row per
        # pair of symbols, leaves five gathers: a sixth of the time of a product with one-hot rows.
        embedding = self._views["embedding"].reshape(SEEN // 2, 2, SYMBOLS, HIDDEN)
        np.add(
            embedding[:, 0, :, None, :],
            embedding[:, 1, None, :, :],
            out=self._pairs.reshape(SEEN // 2, SYMBOLS, SYMBOLS, HIDDEN),
        )
        self._pairs[0] += self._views["bias1"]

    def forward(self, context: Contexts) -> Activations:
        """Log-probabilities of the 12 possible next tokens, float[n, 12], in n contexts."""
        views = self._views
        pair = context[:, None] // _PAIR_PLACES % (SYMBOLS * SYMBOLS)
        hidden1 = self._pairs[0].take(pair[:, 0], axis=0)
        for position in range(1, SEEN // 2):
            hidden1 += self._pairs[position].take(pair[:, position], axis=0)
        np.maximum(hidden1, self._zeros, out=hidden1)
        hidden2 = hidden1 @ views["weight2"]
        hidden2 += views["bias2"]
        np.maximum(hidden2, self._zeros, out=hidden2)
        log_probs = hidden2 @ views["weight3"]
        log_probs += views["bias3"]
        log_probs -= log_probs.max(axis=1, keepdims=True)
        log_probs -= np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
        return Activations(context, hidden1, hidden2, log_probs)

    def backward(self, activations: Activations, logit_gradient: Floats) -> Floats:
        """Gradient of the weights, float[34828], from that of the logits, float[n, 12]."""
        views = self._views
        gradient = np.empty_like(self.parameters)
        out = _split(gradient)
        np.matmul(activations.hidden2.T, logit_gradient, out=out["weight3"])
        np.sum(logit_gradient, axis=0, out=out["bias3"])
        hidden = logit_gradient @ views["weight3"].T
        hidden *= activations.hidden2 > 0
        np.matmul(activations.hidden1.T, hidden, out=out["weight2"])
        np.sum(hidden, axis=0, out=out["bias2"])
        hidden = hidden @ views["weight2"].T
        hidden *= activations.hidden1 > 0
        np.matmul(_one_hot(activations.contexts, hidden.dtype).T, hidden, out=out["embedding"])
        np.sum(hidden, axis=0, out=out["bias1"])
        return gradient


def _split(parameters: Floats) -> dict[str, Floats]:
    """Views of the weights by name."""
    views, start = {}, 0
    for name, shape in _SHAPES.items():
        stop = start + int(np.prod(shape))
        views[name] = parameters[start:stop].reshape(shape)
        start = stop
    return views


def _one_hot(context: Contexts, dtype: Any) -> Floats:
    rows: Floats = np.zeros((len(context), SEEN * SYMBOLS), dtype=dtype)
    symbols = context[:, None] // _PLACES % SYMBOLS
    rows[np.arange(len(context))[:, None], symbols + np.arange(SEEN) * SYMBOLS] = 1
    return rows
