"""Samples of slime, made from rows, and the two functions with which slime makes training data of samples."""

from collections import Counter
from typing import Any, Final, TypeAlias

from rookery.core import UsageError
from rookery.training.advantages import Scale, compute_advantages
from rookery.training.rows import Row, fill_row

ABOUT: Final = "rookery"
"""Key of a sample's metadata that has the outcome of its rollout."""
RolloutKey: TypeAlias = tuple[int | None, int]
"""The group of a rollout in slime, and its ID."""


def make_sample(row: Row, asked: Any) -> Any:
    """Return a row as a `Sample` of slime. `asked` is the sample that the data source provided for the rollout."""
    from slime.utils.types import Sample

    status = Sample.Status.TRUNCATED if row.truncated else Sample.Status.COMPLETED
    filled = fill_row(row, 0)
    return Sample(
        group_index=getattr(asked, "group_index", row.group),
        index=getattr(asked, "index", row.member),
        rollout_id=getattr(asked, "index", row.member),
        prompt=getattr(asked, "prompt", ""),
        tokens=filled.prompt_ids + filled.response_ids,
        response_length=len(filled.response_ids),
        loss_mask=filled.response_mask,
        rollout_log_probs=filled.response_logprobs,
        reward=row.reward if row.reward is not None else 0.0,
        remove_sample=not row.valid,
        status=status if row.valid else Sample.Status.FAILED,
        weight_versions=[str(version) for version in sorted(set(row.versions[row.mask].tolist()))],
        metadata={
            **(getattr(asked, "metadata", None) or {}),
            ABOUT: {"outcome": row.outcome},
        },
    )


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """slime's reward post-processing: return the raw rewards, and the advantages as normalised rewards.

    A missing rollout has the mean of the valid rewards as its raw reward, so that the mean in slime's log does not
    count it, and the advantage 0. Unless slime takes the mean over tokens, it divides the loss by the number of
    all rollouts; the advantages are multiplied to make up for the missing ones.
    """
    groups: dict[Any, dict[RolloutKey, float | None]] = {}
    for sample in samples:
        reward = None if sample.remove_sample else float(sample.reward)
        groups.setdefault(sample.group_index, {})[get_rollout_key(sample)] = reward
    scale: Scale = "std" if getattr(args, "grpo_std_normalization", False) else "none"
    gains: dict[RolloutKey, float] = {}
    for group in groups.values():
        advantages = compute_advantages(list(group.values()), scale=scale)
        gains |= zip(group, advantages.tolist(), strict=True)
    valid = [reward for group in groups.values() for reward in group.values() if reward is not None]
    mean = sum(valid) / len(valid) if valid else 0.0
    by_tokens = getattr(args, "calculate_per_token_loss", False)
    weight = 1.0 if by_tokens or not valid else len(gains) / len(valid)
    raw = [mean if sample.remove_sample else float(sample.reward) for sample in samples]
    return raw, [weight * gains[get_rollout_key(sample)] for sample in samples]


def get_rollout_key(sample: Any) -> RolloutKey:
    """Return the group and the ID of a sample's rollout, which is by default the index of the sample.

    A data source may number the samples of every group from 0, so the ID alone does not identify a rollout.
    """
    found = sample.index if sample.rollout_id is None else sample.rollout_id
    if found is None:
        raise UsageError(
            "a sample has neither a rollout_id nor an index, so its rollout is not known: set one of them in the "
            "data source"
        )
    return sample.group_index, found


def convert_samples(args: Any, samples: list[Any]) -> dict[str, Any]:
    """slime's conversion of samples to training data, without the rows of missing rollouts.

    For `--custom-convert-samples-to-train-data-path`, with settings under which the number of rollouts per step
    may vary, such as `--use-dynamic-global-batch-size`. If all rollouts are missing, they stay and train nothing.
    """
    raw, rewards = post_process_rewards(args, samples)
    kept = [at for at, sample in enumerate(samples) if not sample.remove_sample] or list(range(len(samples)))
    chosen = [samples[at] for at in kept]
    rollouts = [get_rollout_key(sample) for sample in chosen]
    share = len(set(rollouts)) / len({get_rollout_key(sample) for sample in samples})
    by_tokens = getattr(args, "calculate_per_token_loss", False)
    sums: Counter[RolloutKey] = Counter()
    for sample, rollout in zip(chosen, rollouts, strict=True):
        sums[rollout] += sum(sample.loss_mask)
    return {
        "tokens": [sample.tokens for sample in chosen],
        "response_lengths": [sample.response_length for sample in chosen],
        "rewards": [rewards[at] if by_tokens else share * rewards[at] for at in kept],
        "raw_reward": [raw[at] for at in kept],
        "truncated": [int(sample.status is sample.Status.TRUNCATED) for sample in chosen],
        "sample_indices": [sample.index for sample in chosen],
        "rollout_ids": [number for _, number in rollouts],
        "loss_masks": [sample.loss_mask for sample in chosen],
        "rollout_mask_sums": [sums[rollout] for rollout in rollouts],
        "rollout_log_probs": [sample.rollout_log_probs for sample in chosen],
    }
