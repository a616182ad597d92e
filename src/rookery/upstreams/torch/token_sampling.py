"""Sample one token for each row of a batch of logits, in one call on the model's device.

- The token of a row depends on its logits, its sampling parameters and its random number, and on no other row.
- The random numbers of a sequence depend only on its seed and on how many were drawn before.
- The log probability of a token is that of the model, before temperature, top-k, top-p and min-p, as with the
  other upstreams, because that is what a trainer computes from the weights. At temperature 1 without filters it is
  also that of the distribution that the token was sampled from.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)


class TokenChoice(NamedTuple):
    """Sampling parameters of one sequence. Temperature 0 selects the most likely token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample from this number of most likely tokens; 0 for all."""
    min_p: float = 0.0
    """Exclude tokens less likely than this share of the most likely token's probability."""

    @property
    def filters(self) -> bool:
        """True if some tokens are excluded."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


PLAIN: Final = TokenChoice()


class SampledTokens(NamedTuple):
    """Tokens, log probabilities and most likely alternatives of the rows of a batch."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    """For each row, the most likely tokens with their log probabilities; empty if none were requested."""


class BatchChoices:
    """The sampling parameters of all rows of a batch, as tensors on the model's device."""

    def __init__(self, choices: Sequence[TokenChoice], device: Any) -> None:
        self.choices = list(choices)
        self.all_greedy = all(choice.temperature <= 0 for choice in choices)
        self.filters = any(choice.filters for choice in choices)
        rows = [(choice.temperature or 1.0, *choice[1:]) for choice in choices]
        columns = torch.tensor(rows, dtype=torch.float64).to(device).t()[:, :, None]
        self.temperature, self.top_p, self.top_k, self.min_p = columns
        self.temperature = self.temperature.float()
        self.greedy = torch.tensor([choice.temperature <= 0 for choice in choices]).to(device)


def random_numbers(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return one random number in [0, 1) for each pair of a seed (of 64 bits) and an index.

    The numbers are those of the generator SplitMix64 with the hashed seed, so they are the same on every machine.
    """
    states = _mix(np.array(seeds, dtype=np.uint64)) + np.array(indices, dtype=np.uint64) * _STEP
    return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    states = states + _STEP
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def sample_tokens(
    logits: Tensor, batch: BatchChoices, numbers: npt.NDArray[np.float64], alternatives: int = 0
) -> SampledTokens:
    """Sample a token for each row of `logits`. `numbers` holds one random number in [0, 1) for each row.

    `alternatives` is how many of the most likely tokens to return for each row.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    tokens = logprobs.argmax(dim=-1)
    if not batch.all_greedy:
        chances = torch.softmax(logprobs / batch.temperature, dim=-1)
        if batch.filters:
            chances = _filter(chances, batch)
        # Inverse transform sampling. Excluded tokens add nothing to the sum, so they are never chosen.
        bounds = chances.cumsum(dim=-1, dtype=torch.float64)
        targets = torch.from_numpy(numbers).to(logits.device)[:, None] * bounds[:, -1:]
        drawn = torch.searchsorted(bounds, targets, right=True)[:, 0]
        drawn = torch.minimum(drawn, bounds.argmax(dim=-1))  # rounding may move the target to the end
        tokens = torch.where(batch.greedy, tokens, drawn)
    found = logprobs.gather(1, tokens[:, None])[:, 0]
    pairs = torch.stack((tokens.double(), found.double())).tolist()  # one copy from the device
    tops: list[list[tuple[int, float]]] = []
    if alternatives:
        best = logprobs.topk(min(alternatives, logprobs.shape[1]), dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        tops = [list(zip(ids, values, strict=True)) for ids, values in rows]
    return SampledTokens([int(token) for token in pairs[0]], pairs[1], tops)


def _filter(chances: Tensor, batch: BatchChoices) -> Tensor:
    """Set the probabilities of excluded tokens to 0. Top-k is applied first, then top-p, then min-p."""
    ranked, order = chances.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(chances.shape[1], device=chances.device)
    keep = (ranks < batch.top_k) | (batch.top_k <= 0)
    ranked = ranked * keep
    before = ranked.cumsum(dim=-1, dtype=torch.float64)
    keep &= (before - ranked < batch.top_p * before[:, -1:]) | (batch.top_p >= 1)
    keep &= ranked >= batch.min_p * ranked[:, :1]
    keep[:, 0] = True
    return chances * torch.zeros_like(keep).scatter_(1, order, keep)
