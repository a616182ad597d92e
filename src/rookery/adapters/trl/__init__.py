"""Train in any Rookery environment with TRL: `rollout_func` for `GRPOTrainer`, `RolloutWorker` for
`AsyncGRPOTrainer`.

Guarantees:
- Exactly the sampled tokens train: token IDs, loss mask and log probabilities come from the segments and are
  never re-tokenised.
- A failed rollout is missing data: none of its tokens trains, and no baseline or denominator counts it.
- A group in which all rollouts failed contributes nothing to the loss and does not stop the training.
- The policy samples with weights that the trainer transfers to it. With `rollout_func`, these are the weights of
  the current training step.
- TRL, torch and datasets are imported only when they are used.
"""

from rookery.adapters.embedded import Push, embedded_tokenizer, push_weights
from rookery.adapters.trl.columns import reward
from rookery.adapters.trl.rollout_function import RolloutFunc, rollout_func
from rookery.adapters.trl.rollout_worker import RolloutWorker
from rookery.adapters.trl.settings import dataset
from rookery.adapters.trl.weight_transfer import WeightTransfer

__all__ = [
    "Push",
    "RolloutFunc",
    "RolloutWorker",
    "WeightTransfer",
    "dataset",
    "embedded_tokenizer",
    "push_weights",
    "reward",
    "rollout_func",
]
