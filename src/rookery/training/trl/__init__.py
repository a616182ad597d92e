"""Any Rookery environment under TRL: `rollout_func` for `GRPOTrainer`, a rollout worker for `AsyncGRPOTrainer`.

Promises:
- what trains is what was sampled: ids, mask and logprobs are those of the segments, never of a text;
- a rollout that failed is missing data: no token of it trains, and no baseline and no denominator counts it;
- a group without any valid rollout changes nothing and ends nothing;
- the policy samples with the weights that the trainer has: they are pushed before the rollouts that need them;
- nothing of TRL, torch or datasets is imported before it is used.
"""

from rookery.training.trl.embedded import embedded_tokenizer
from rookery.training.trl.prompts import dataset
from rookery.training.trl.rollouts import RolloutFunc, reward, rollout_func
from rookery.training.trl.weights import Push, WeightTransfer, push_weights
from rookery.training.trl.worker import RolloutWorker

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
