"""How losses of tokens become one number: a weight for each token.

The loss of a batch is the sum of weight times loss over its trained tokens, and nothing else: no mean is taken
anywhere, so that packing, micro-batches and ranks change nothing. A denominator that is computed where the loss
is, over whatever happens to be in one micro-batch, makes the step depend on how the batch was cut.

Promises:
- a rollout counts once, however many segments it has;
- the means weigh in all to 1, over the whole batch;
- only rollouts with trained tokens are in a denominator.
"""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rookery.core import UsageError
from rookery.training.advantages import Float64, chosen

Normalise: TypeAlias = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
"""The first four as verl's `loss_agg_mode`, where a sequence is a rollout; the last as ScaleRL's prompt average.

| here, and in verl | TRL `loss_type` | a trained token of rollout i weighs |
|---|---|---|
| `token-mean` | `dapo` | 1 / tokens of the batch |
| `seq-mean-token-mean` | `grpo` | 1 / (rollouts x tokens of i) |
| `seq-mean-token-sum` | | 1 / rollouts |
| `seq-mean-token-sum-norm` | `dr_grpo` | 1 / (rollouts x a constant length) |
| `prompt-mean` | | 1 / (groups x tokens of i's group) |
"""


def rollout_weights(
    trained: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    normalise: Normalise,
    *,
    length: int | None = None,
) -> tuple[Float64, float]:
    """The weight of each trained token of each rollout, and what was counted in the denominator.

    `trained` and `groups` have one entry for each rollout: its trained tokens, and which group it is of. What is
    counted are the batch's tokens, rollouts or groups: who makes one step of several batches multiplies the
    weights of each by its own count over the sum of the counts.
    """
    chosen("normalise", normalise, Normalise)
    if (normalise == "seq-mean-token-sum-norm") != (length is not None):
        raise UsageError("'seq-mean-token-sum-norm' needs a constant length, and nothing else takes one")
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
