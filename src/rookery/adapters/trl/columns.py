"""Columns that `GRPOTrainer` gets from a rollout function, and the reward function that reads two of them."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rookery.training.advantages import Baseline
from rookery.training.rows import (
    Row,
    clip_rows,
    describe_rollout,
    fill_row,
    keep_one_row,
    shape_rewards,
    summarize_rollouts,
)

LOSSES_DIVIDED_BY_ROWS: Final = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Values of TRL's `loss_type` whose loss is divided by the number of rows, including rows that do not train."""
COLUMNS: Final = {
    "prompt_ids": "prompt_ids",
    "completion_ids": "response_ids",
    "logprobs": "response_logprobs",
    "env_mask": "response_mask",
}
"""TRL's names of the columns, and the attributes of a row."""

log = logging.getLogger("rookery.adapters.trl")


def make_columns(
    rollouts: Sequence[list[Row]], trainer: Any, k: int, baseline: Baseline, context: int | None = None
) -> dict[str, list[Any]]:
    """Return the columns for the rows of these rollouts, one row per rollout, clipped to `context` tokens.

    The additional columns `rookery_reward` and `rollout` (from `describe_rollout`) are for reward functions.
    """
    kept = keep_one_row(clip_rows([row for part in rollouts for row in part], context))
    all_rewards, first = _gather_rewards([row.reward for row in kept], trainer)
    weight = get_weight(all_rewards, trainer)
    shaped = [
        reward
        for start in range(0, len(all_rewards), k)
        for reward in shape_rewards(all_rewards[start : start + k], baseline=baseline, weight=weight)
    ]
    rows = [fill_row(row, trainer.eos_token_ids[0]) for row in kept]
    return {
        **{name: [getattr(row, attribute) for row in rows] for name, attribute in COLUMNS.items()},
        "rookery_reward": shaped[first : first + len(kept)],
        "rollout": [describe_rollout(part, row) for part, row in zip(rollouts, kept, strict=True)],
    }


def is_scaled_wrongly(trainer: Any) -> bool:
    """Return whether missing rows weaken the others: TRL divides by all rows and by the standard deviation."""
    return trainer.loss_type in LOSSES_DIVIDED_BY_ROWS and trainer.scale_rewards != "none"


def get_weight(rewards: Sequence[float | None], trainer: Any) -> float:
    """Return the factor for advantages that compensates for rows that do not train.

    It differs from 1 only if TRL divides the loss by the number of rows and some rollouts have no reward.
    """
    valid = sum(reward is not None for reward in rewards)
    if trainer.loss_type not in LOSSES_DIVIDED_BY_ROWS or valid in (0, len(rewards)) or is_scaled_wrongly(trainer):
        return 1.0
    return len(rewards) / valid


def _gather_rewards(rewards: Sequence[float | None], trainer: Any) -> tuple[list[float | None], int]:
    """Return the rewards of all trainer processes in order, and the index of the first reward of this process.

    They are gathered because a group may span two processes.
    """
    processes = trainer.accelerator.num_processes
    if processes == 1:
        return list(rewards), 0
    import torch

    own = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    gathered = trainer.accelerator.gather(own.to(trainer.accelerator.device)).tolist()
    all_rewards = [None if math.isnan(reward) else reward for reward in gathered]
    return all_rewards, trainer.accelerator.process_index * len(rewards)


def reward(
    *,
    rookery_reward: Sequence[float | None],
    rollout: Sequence[Mapping[str, Any]],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Reward function for `GRPOTrainer`: return the adjusted rewards of Rookery's rollouts, None for failed ones.

    The rewards are adjusted so that TRL computes the requested advantages. `log_metric` receives metrics.
    """
    if log_metric is not None:
        for name, value in summarize_rollouts(rollout).items():
            log_metric(name, value)
    return list(rookery_reward)
