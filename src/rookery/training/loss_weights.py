"""Compute the weight of each token in the loss of a batch.

The loss of a batch is the sum of weight times loss over its trained tokens. No mean is taken anywhere else, so
packing, micro-batches and ranks do not change the loss. If each micro-batch computed its own denominator, the
optimizer step would depend on how the batch was divided.

Guarantees:
- A rollout counts once, however many segments it has.
- In the modes that take a mean over tokens, the weights of all trained tokens of the batch add up to 1.
- Only rollouts with trained tokens count in a denominator.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rookery.core import UsageError
from rookery.training.advantages import Float64, check_choice

Normalise: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
"""The way the losses of tokens are aggregated to the loss of a batch. The first four modes are those of verl's
`loss_agg_mode`, where a sequence is a rollout here. The last is the prompt average of ScaleRL. In the table,
tokens are trained tokens, and rollouts and groups are those with trained tokens.

| here, and in verl | TRL `loss_type` | weight of a trained token of rollout i |
|---|---|---|
| `token-mean` | `dapo` | 1 / tokens of the batch |
| `seq-mean-token-mean` | `grpo` | 1 / (rollouts x tokens of i) |
| `seq-mean-token-sum` | | 1 / rollouts |
| `seq-mean-token-sum-norm` | `dr_grpo` | 1 / (rollouts x a constant length) |
| `prompt-mean` | | 1 / (groups x tokens of i's group) |
"""


def compute_token_weights(
    trained: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    normalise: Normalise,
    *,
    length: int | None = None,
) -> tuple[Float64, float]:
    """Return, for each rollout, the weight of each of its trained tokens; and the denominator.

    `trained` and `groups` have one entry per rollout: its number of trained tokens, and the index of its group.
    The denominator is the number of tokens, rollouts or groups that the mode `normalise` divides by. To make one
    optimizer step from several batches, multiply the weights of each batch by its share of the sum of all
    denominators.
    """
    check_choice("normalise", normalise, Normalise)
    if (normalise == "seq-mean-token-sum-norm") != (length is not None):
        raise UsageError(
            f"length is {length} and normalise is {normalise!r}: set length if and only if normalise is "
            "'seq-mean-token-sum-norm'"
        )
    if length is not None and length < 1:
        raise UsageError(f"length must be at least 1, not {length}")
    some = trained > 0
    weights = np.zeros(len(trained))
    if not some.any():
        return weights, 0.0
    rollouts = float(some.sum())
    match normalise:
        case "token-mean":
            count = float(trained.sum())
            weights[some] = 1 / count
        case "seq-mean-token-mean":
            count = rollouts
            weights[some] = 1 / (rollouts * trained[some])
        case "seq-mean-token-sum" | "seq-mean-token-sum-norm":
            count = rollouts
            weights[some] = 1 / (rollouts * (length or 1))
        case "prompt-mean":
            tokens = np.bincount(groups, weights=trained)
            count = float((tokens > 0).sum())
            weights[some] = 1 / (count * tokens[groups[some]])
    return weights, count


def apply_quotas(
    weights: Float64, trained: npt.NDArray[np.int64], environments: Sequence[str], quotas: Mapping[str, float]
) -> Float64:
    """Return the token weights, changed so that each environment of `quotas` has its share of the total weight.

    All arguments but the last have one entry per rollout. Environments without a quota share the rest in
    proportion to their weights. The share of an environment without trained tokens goes to the others, in
    proportion to theirs. The total weight does not change.
    """
    if not quotas or not len(weights):
        return weights
    names = np.array(environments)
    before = {name: float((weights * trained)[names == name].sum()) for name in sorted(set(environments))}
    total = sum(before.values())
    unlisted = sum(weight for name, weight in before.items() if name not in quotas)
    shares = {name: quotas[name] for name, weight in before.items() if name in quotas and weight > 0}
    left = max(0.0, 1 - sum(quotas.values())) if unlisted > 0 else 0.0
    shares |= {
        name: left * weight / unlisted for name, weight in before.items() if name not in quotas and weight > 0
    }
    assigned = sum(shares.values())
    if not assigned > 0:
        return weights
    changed = weights.copy()
    for name, share in shares.items():
        changed[names == name] *= share / assigned * total / before[name]
    return changed
