"""A small autoregressive policy in NumPy, with its own gradient.

It sees the prompt and the last six response tokens, one-hot, through two hidden layers of ReLUs. What it remembers of
a response is the tokens themselves, so a response continues under new weights without any cache to rebuild.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pystale.demo.task import OUTPUTS, PAD, PROMPT_TOKENS, SYMBOLS

__all__ = ["FEATURES", "WINDOW", "Policy", "distinct", "response_features"]

Floats = npt.NDArray[np.floating[Any]]
Features = npt.NDArray[np.uint8]

WINDOW = 6
FEATURES = PROMPT_TOKENS + WINDOW
HIDDEN = 128

_SHAPES = {
    "embedding": (FEATURES * SYMBOLS, HIDDEN),
    "bias1": (HIDDEN,),
    "weight2": (HIDDEN, HIDDEN),
    "bias2": (HIDDEN,),
    "weight3": (HIDDEN, OUTPUTS),
    "bias3": (OUTPUTS,),
}
SIZE = sum(int(np.prod(shape)) for shape in _SHAPES.values())


def response_features(prompt_ids: Any, response_ids: Any) -> Features:
    """What the policy saw before each token of a response: prompt and window, uint8[tokens, 10]."""
    tokens = np.asarray(response_ids, dtype=np.uint8)
    padded = np.concatenate([np.full(WINDOW, PAD, dtype=np.uint8), tokens])
    features = np.empty((len(tokens), FEATURES), dtype=np.uint8)
    features[:, :PROMPT_TOKENS] = prompt_ids
    features[:, PROMPT_TOKENS:] = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: len(tokens)]
    return features


def distinct(features: Features) -> tuple[Features, npt.NDArray[np.intp]]:
    """Rows of `features` without repetition, and for each row of `features` which of them it is.

    The members of a group write much the same text, and the policy needs one forward pass for all rows that are alike.
    """
    _, first, inverse = np.unique(features @ _PLACES, return_index=True, return_inverse=True)
    return features[first], inverse


# Reads a row of features as one number.
_PLACES = SYMBOLS ** np.arange(FEATURES, dtype=np.int64)


@dataclass(frozen=True)
class Activations:
    """What a forward pass leaves for the backward pass; arrays of n rows."""

    features: Features
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
        self.parameters = parameters.copy()
        self._views = _split(self.parameters)
        self._pairs = np.empty((FEATURES // 2, SYMBOLS * SYMBOLS, HIDDEN), dtype=parameters.dtype)
        # A row of zeros, not 0: NumPy's maximum has no vector loop for a scalar, which is five times slower.
        self._zeros = np.zeros(HIDDEN, dtype=parameters.dtype)
        self.load(parameters)

    @classmethod
    def initial(cls, rng: np.random.Generator, dtype: Any = np.float32) -> "Policy":
        """He-initialised hidden layers, and a last layer small enough that every token starts about equally likely."""
        parameters = np.zeros(SIZE, dtype=dtype)
        views = _split(parameters)
        for name, inputs, gain in (("embedding", FEATURES, 2.0), ("weight2", HIDDEN, 2.0), ("weight3", HIDDEN, 0.01)):
            views[name][...] = rng.standard_normal(views[name].shape) * np.sqrt(gain / inputs)
        return cls(parameters)

    def load(self, parameters: Floats) -> None:
        """Copy new weights in."""
        self.parameters[...] = parameters
        # The first layer sums one embedding row per input token. Summing rows of two neighbours beforehand, one row per
        # pair of symbols, leaves five gathers: a sixth of the time of a product with one-hot rows.
        embedding = self._views["embedding"].reshape(FEATURES // 2, 2, SYMBOLS, HIDDEN)
        np.add(
            embedding[:, 0, :, None, :],
            embedding[:, 1, None, :, :],
            out=self._pairs.reshape(FEATURES // 2, SYMBOLS, SYMBOLS, HIDDEN),
        )
        self._pairs[0] += self._views["bias1"]

    def forward(self, features: Features) -> Activations:
        """Log-probabilities of the 12 possible next tokens, float[n, 12], for n rows of prompt and window."""
        views = self._views
        pair = features[:, 0::2].astype(np.intp) * SYMBOLS + features[:, 1::2]
        hidden1 = self._pairs[0].take(pair[:, 0], axis=0)
        for position in range(1, FEATURES // 2):
            hidden1 += self._pairs[position].take(pair[:, position], axis=0)
        np.maximum(hidden1, self._zeros, out=hidden1)
        hidden2 = hidden1 @ views["weight2"]
        hidden2 += views["bias2"]
        np.maximum(hidden2, self._zeros, out=hidden2)
        log_probs = hidden2 @ views["weight3"]
        log_probs += views["bias3"]
        log_probs -= log_probs.max(axis=1, keepdims=True)
        log_probs -= np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
        return Activations(features, hidden1, hidden2, log_probs)

    def log_probs(self, features: Features) -> Floats:
        """The log-probabilities of :meth:`forward`, computed once for rows that are alike."""
        rows, inverse = distinct(features)
        return self.forward(rows).log_probs[inverse]

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
        np.matmul(_one_hot(activations.features, hidden.dtype).T, hidden, out=out["embedding"])
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


def _one_hot(features: Features, dtype: Any) -> Floats:
    rows = np.zeros((len(features), FEATURES * SYMBOLS), dtype=dtype)
    rows[np.arange(len(features))[:, None], features + np.arange(FEATURES) * SYMBOLS] = 1
    return rows
