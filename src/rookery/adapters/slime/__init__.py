"""slime 0.3: a rollout function, a reward post-processing function, a conversion of samples, and a data source.

    --rollout-function-path rookery.adapters.slime.generate_rollout
    --custom-reward-post-process-path rookery.adapters.slime.post_process_rewards
    --data-source-path rookery.adapters.slime.RookeryDataSource
    --custom-config-path rookery.yaml      # rookery: {env: my_env.py, concurrency: 256}

The functions run in slime's rollout manager. slime and torch are imported only when they are used.

Guarantees:
- A failed rollout is a sample that slime removes from the loss (`remove_sample`). No baseline counts it.
- Advantages are those of `rookery.training`: over the valid rollouts of a group, each of which counts once.
- All segments of a rollout are samples with the same `rollout_id`, so that slime counts them as one rollout.
- After `load`, the data source continues with the group that was next when `save` was called.
"""

from rookery.adapters.slime.data_source import RookeryDataSource
from rookery.adapters.slime.rollout_function import close_rollouts, generate_rollout
from rookery.adapters.slime.samples import convert_samples, post_process_rewards

__all__ = ["RookeryDataSource", "close_rollouts", "convert_samples", "generate_rollout", "post_process_rewards"]
