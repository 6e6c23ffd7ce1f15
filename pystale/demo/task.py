"""The task: count from a to b in steps of one, then stop.

The prompt is four digits, ``3841`` for "from 38 to 41"; the right answer is ``38 39 40 41.``. Right answers are 6 to
180 tokens long, so that a weight sync lands in the middle of the long ones, and any answer can be checked.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "END",
    "MAX_TOKENS",
    "OUTPUTS",
    "PAD",
    "PROMPT_TOKENS",
    "SPACE",
    "SYMBOLS",
    "answer",
    "counting_text",
    "reward",
    "sample_prompt",
    "text",
]

Tokens = npt.NDArray[np.uint8]

SPACE, END, PAD = 10, 11, 12  # the digits are their own tokens; PAD is only ever an input
SYMBOLS = 13
OUTPUTS = 12
PROMPT_TOKENS = 4
MAX_TOKENS = 192  # the longest right answer has 180
LONGEST_COUNT = 60
_CHARACTERS = b"0123456789 ._".ljust(256, b"?")


@cache
def _counted(first: int, last: int) -> Tokens:
    numbers = np.arange(first, last + 1)
    tokens = np.stack([numbers // 10, numbers % 10, np.full_like(numbers, SPACE)], axis=1).astype(np.uint8).ravel()
    tokens[-1] = END
    tokens.flags.writeable = False
    return tokens


def sample_prompt(rng: np.random.Generator) -> Tokens:
    """Draw a prompt: how far to count is log-uniform on 2 to 60 numbers, where to start is uniform.

    Returns
    -------
    uint8[4]
        Tens and units of the first number, tens and units of the last.
    """
    count = min(int(np.exp(rng.uniform(np.log(2), np.log(LONGEST_COUNT + 1)))), LONGEST_COUNT)
    first = int(rng.integers(0, 100 - count + 1))
    last = first + count - 1
    return np.array([first // 10, first % 10, last // 10, last % 10], dtype=np.uint8)


def answer(prompt_ids: Any) -> Tokens:
    """Right answer to a prompt, with its end token; read-only.

    Examples
    --------
    >>> text(answer([3, 8, 4, 1]))
    '38 39 40 41.'
    """
    a, b, c, d = (int(token) for token in prompt_ids)
    return _counted(10 * a + b, 10 * c + d)


def counting_text(prompt_ids: Any, count: int) -> Tokens:
    """Counting that starts where the prompt says and ends after `count` numbers, or at 99, whatever the prompt says."""
    first = 10 * int(prompt_ids[0]) + int(prompt_ids[1])
    return _counted(first, min(first + count - 1, 99))


def reward(prompt_ids: Any, response_ids: Any) -> float:
    """Share of the answer that is right, 0 to 1; one fifth of it is for the exact answer.

    The longer of answer and response is the denominator: going on past the end costs reward, else the policy would
    learn never to stop.

    Examples
    --------
    >>> round(reward([3, 8, 4, 1], answer([3, 8, 4, 1])), 3)
    1.0
    >>> round(reward([3, 8, 4, 1], answer([3, 8, 4, 0])), 3)
    0.533
    """
    right = answer(prompt_ids)
    given = np.asarray(response_ids, dtype=np.uint8)
    shared = min(len(right), len(given))
    wrong = (right[:shared] != given[:shared]).nonzero()[0]
    prefix = int(wrong[0]) if len(wrong) else shared
    exact = prefix == len(right) == len(given)
    return 0.8 * (prefix / max(len(right), len(given))) + 0.2 * exact


def text(tokens: Any) -> str:
    """Tokens as they read."""
    return np.asarray(tokens, dtype=np.uint8).tobytes().translate(_CHARACTERS).decode("ascii")
