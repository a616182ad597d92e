"""Prices of tokens, and what a rollout costs. Pure functions."""

from collections.abc import Mapping

import msgspec

from rookery.core.records import Usage

POLICY = "policy"


class Price(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Price of one model per million tokens, in any currency."""

    prompt: float = 0.0
    sampled: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.prompt, self.sampled):
            if not 0 <= value < float("inf"):
                raise ValueError(f"a price must be a finite number of at least 0, not {value}")


class PriceTable:
    """Prices by model name, applied to the model roles of one run."""

    def __init__(self, prices: Mapping[str, Price], models: Mapping[str, str]) -> None:
        """`models` is the name of the model of each role."""
        self._prices = {role: prices[model] for role, model in models.items() if model in prices}

    def compute_cost(self, usage: Usage) -> float | None:
        """Return the cost of a rollout's last attempt, or None if a model that it called has no price."""
        tokens = {role: (usage.other_prompts.get(role, 0), sampled) for role, sampled in usage.others.items()}
        tokens[POLICY] = (usage.prompt_tokens, usage.sampled_tokens)
        total = 0.0
        for role, (prompt, sampled) in tokens.items():
            price = self._prices.get(role)
            if price is not None:
                total += (prompt * price.prompt + sampled * price.sampled) / 1e6
            elif prompt or sampled:
                return None
        return total


def find_models(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the name of the model of each role, from the stored configuration of a run."""
    upstreams = settings.get("upstreams")
    found: dict[str, str] = {}
    if isinstance(upstreams, Mapping):
        for role, upstream in upstreams.items():
            if isinstance(upstream, Mapping):
                found[str(role)] = str(upstream.get("model", ""))
    return found
