"""Compute the weight of each token in the loss of a batch.

The loss of a batch is the sum of weight times loss over its trained tokens. No mean is taken anywhere else, so
packing, micro-batches and ranks do not change the loss. If each micro-batch computed its own denominator, the
step would depend on how the batch was divided.

Guarantees:
- A rollout counts once, however many segments it has.
- For means, the weights of the whole batch add up to 1.
- Only rollouts with trained tokens count in a denominator.
"""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rookery.core import UsageError
from rookery.training.advantages import Float64, check_choice

Normalise: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
"""Modes of aggregation. The first four are verl's `loss_agg_mode`, with rollouts as sequences; the last is the
prompt average of ScaleRL.

| here, and in verl | TRL `loss_type` | a trained token of rollout i weighs |
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
    """Return the weight of each trained token of each rollout, and the denominator.

    `trained` and `groups` have one entry per rollout: its number of trained tokens, and the index of its group. To
    make one optimizer step from several batches, multiply the weights of each by its share of all denominators.
    """
    check_choice("normalise", normalise, Normalise)
    if (normalise == "seq-mean-token-sum-norm") != (length is not None):
        raise UsageError("set length with, and only with, normalise='seq-mean-token-sum-norm'")
    if length is not None and length < 1:
        raise UsageError(f"the constant length must be at least 1, not {length}")
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
