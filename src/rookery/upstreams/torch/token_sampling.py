"""Sample one token for each row of a batch of logits, in one call on the model's device.

- The token of a row depends on its logits, its sampling parameters and its random number, and on no other row.
- The log probability of a token is that of the model, before temperature, top-k, top-p and min-p, as with the
  other upstreams, because that is what a trainer computes from the weights. At temperature 1 without filters it is
  also that of the distribution that the token was sampled from.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor


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


def sample_tokens(
    logits: Tensor, choices: Sequence[TokenChoice], numbers: Sequence[float], alternatives: int = 0
) -> SampledTokens:
    """Sample a token for each row of `logits`. `numbers` holds one random number in [0, 1) for each row.

    `alternatives` is how many of the most likely tokens to return for each row.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    greedy = logprobs.argmax(dim=-1)
    tokens = greedy
    if any(choice.temperature > 0 for choice in choices):
        settings = [(choice.temperature or 1.0, *choice[1:], choice.temperature <= 0) for choice in choices]
        rows = [(*setting, number) for setting, number in zip(settings, numbers, strict=True)]
        columns = torch.tensor(rows, dtype=torch.float64).to(logits.device).t()[:, :, None]
        temperature, top_p, top_k, min_p, is_greedy, number = columns
        chances = torch.softmax(logprobs / temperature.float(), dim=-1)
        if any(choice.filters for choice in choices):
            chances = _filter(chances, top_p, top_k, min_p)
        # Inverse transform sampling. Excluded tokens add nothing to the sum, so they are never chosen.
        bounds = chances.cumsum(dim=-1, dtype=torch.float64)
        drawn = torch.searchsorted(bounds, number * bounds[:, -1:], right=True)[:, 0]
        drawn = torch.minimum(drawn, bounds.argmax(dim=-1))  # rounding may move the target to the end
        tokens = torch.where(is_greedy[:, 0] > 0, greedy, drawn)
    found = logprobs.gather(1, tokens[:, None])[:, 0]
    pairs = torch.stack((tokens.double(), found.double())).tolist()  # one copy from the device
    tops: list[list[tuple[int, float]]] = []
    if alternatives:
        best = logprobs.topk(min(alternatives, logprobs.shape[1]), dim=-1)
        pairs_by_row = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        tops = [list(zip(ids, values, strict=True)) for ids, values in pairs_by_row]
    return SampledTokens([int(token) for token in pairs[0]], pairs[1], tops)


def _filter(chances: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Set the probabilities of excluded tokens to 0. Top-k is applied first, then top-p, then min-p."""
    ranked, order = chances.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(chances.shape[1], device=chances.device)
    keep = (ranks < top_k) | (top_k <= 0)
    ranked = ranked * keep
    before = ranked.cumsum(dim=-1, dtype=torch.float64)
    keep &= (before - ranked < top_p * before[:, -1:]) | (top_p >= 1)
    keep &= ranked >= min_p * ranked[:, :1]
    keep[:, 0] = True
    return chances * torch.zeros_like(keep).scatter_(1, order, keep)
