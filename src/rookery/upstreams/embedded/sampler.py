"""Sample tokens from logits.

The random numbers of a sequence depend only on its seed and on how many were drawn before, on every machine and in
every version. Sequences do not influence each other. The log probability of a token is that of the model, before
temperature, top-p and top-k, because that is what a trainer computes from the weights.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rookery.upstreams.embedded.llama import Floats

_AT_ONCE: Final = 16


class TokenChoice(NamedTuple):
    """Sampling parameters of one sequence. Temperature 0 selects the most likely token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample from this number of most likely tokens; 0 for all."""
    banned_id: int = -1
    """ID of a token that is never sampled; -1 for none."""
    single_use_id: int = -1
    """ID of a token that is sampled at most once; -1 for none. `SamplingJob.take` enforces it."""


PLAIN: Final = TokenChoice()


class RandomStream:
    """Deterministic stream of random numbers in [0, 1) with 53 bits each, derived from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = (seed & (2**64 - 1)).to_bytes(8, "little")
        self._number = 0
        self._buffer: list[float] = []

    def next(self) -> float:
        if not self._buffer:
            data = b"".join(
                blake2b(self._seed + number.to_bytes(8, "little")).digest()
                for number in range(self._number, self._number + _AT_ONCE // 8)
            )
            self._number += _AT_ONCE // 8
            self._buffer = [
                (int.from_bytes(data[at : at + 8], "little") >> 11) * 2.0**-53 for at in range(0, len(data), 8)
            ]
            self._buffer.reverse()
        return self._buffer.pop()


def draw(
    logits: Floats, choices: Sequence[TokenChoice], numbers: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token for each row of `logits`. Return the token IDs and their log probabilities.

    `choices` are the sampling parameters of each row, `numbers` one random number in [0, 1) for each row.
    """
    count, words = logits.shape
    top = logits.max(axis=1, keepdims=True)
    low = logits - top
    chances = np.exp(low)
    logs = np.log(chances.sum(axis=1))
    for row, choice in enumerate(choices):
        if choice is not PLAIN and choice != PLAIN:
            chances[row] = _shaped(low[row], choice)
    bounds = np.cumsum(chances, axis=1, dtype=np.float64)
    targets = np.asarray(numbers) * bounds[:, -1]
    tokens = (bounds <= targets[:, None]).sum(axis=1)
    if (tokens >= words).any():  # rounding moved a target past the end: take the last possible token
        tokens = np.minimum(tokens, bounds.argmax(axis=1))
    logprobs = low[np.arange(count), tokens] - logs
    return tokens.tolist(), logprobs.tolist()


def find_most_likely(logits: Floats, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens for one row of logits, with their log probabilities."""
    tokens = np.argsort(-logits, kind="stable")[:count]
    low = logits - logits.max()
    logprobs = low[tokens] - np.log(np.exp(low).sum())
    return tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))


def _shaped(low: Floats, choice: TokenChoice) -> Floats:
    """Return the unnormalised probabilities of one row after temperature, top-k and top-p."""
    allowed = low
    if choice.banned_id >= 0:
        allowed = low.copy()
        allowed[choice.banned_id] = -np.inf
        allowed -= allowed.max()
    if choice.temperature <= 0:
        only = np.zeros_like(low)
        only[int(allowed.argmax())] = 1.0
        return only
    chances: Floats = np.exp(allowed / np.float32(max(choice.temperature, 1e-4)))
    keep: npt.NDArray[np.int64] | None = None
    if 0 < choice.top_k < len(low) or choice.top_p < 1.0:
        keep = np.argsort(-chances, kind="stable")
    if keep is None:
        return chances
    if 0 < choice.top_k < len(low):
        keep = keep[: choice.top_k]
    if choice.top_p < 1.0:
        ranked = np.cumsum(chances[keep], dtype=np.float64)
        keep = keep[: 1 + int((ranked < choice.top_p * ranked[-1]).sum())]
    cut = np.zeros_like(chances)
    cut[keep] = chances[keep]
    return cut
