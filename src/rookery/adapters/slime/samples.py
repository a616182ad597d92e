"""Samples of slime, made from rows, and the two functions with which slime makes training data of samples."""

from typing import Any, Final

from rookery.training.rows import Row, fill_row

ABOUT: Final = "rookery"
"""Key of a sample's metadata that has the advantage and the validity of its rollout."""


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
            ABOUT: {"advantage": row.advantage, "valid": row.valid, "outcome": row.outcome},
        },
    )


def post_process_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """slime's reward post-processing: return the raw rewards, and the advantages as normalised rewards.

    A missing rollout has the mean of the valid rewards as its raw reward, so that the mean in slime's log does not
    count it, and the advantage 0. Unless slime takes the mean over tokens, it divides the loss by the number of
    all rollouts; the advantages are multiplied to make up for the missing ones.
    """
    about = [sample.metadata[ABOUT] for sample in samples]
    valid = {sample.rollout_id: sample.reward for sample, one in zip(samples, about, strict=True) if one["valid"]}
    mean = sum(valid.values()) / len(valid) if valid else 0.0
    everyone = len({sample.rollout_id for sample in samples})
    by_tokens = getattr(args, "calculate_per_token_loss", False)
    weight = 1.0 if by_tokens or not valid else everyone / len(valid)
    raw = [sample.reward if one["valid"] else mean for sample, one in zip(samples, about, strict=True)]
    return raw, [weight * one["advantage"] for one in about]


def convert_samples(args: Any, samples: list[Any]) -> dict[str, Any]:
    """slime's conversion of samples to training data, without the rows of missing rollouts.

    For `--custom-convert-samples-to-train-data-path`, with settings under which the number of rollouts per step
    may vary, such as `--use-dynamic-global-batch-size`. If all rollouts are missing, they stay and train nothing.
    """
    raw, rewards = post_process_rewards(args, samples)
    kept = [at for at, sample in enumerate(samples) if not sample.remove_sample] or list(range(len(samples)))
    share = len({samples[at].rollout_id for at in kept}) / len({sample.rollout_id for sample in samples})
    by_tokens = getattr(args, "calculate_per_token_loss", False)
    chosen = [samples[at] for at in kept]
    sums: dict[int, int] = {}
    for sample in chosen:
        sums[sample.rollout_id] = sums.get(sample.rollout_id, 0) + sum(sample.loss_mask)
    return {
        "tokens": [sample.tokens for sample in chosen],
        "response_lengths": [sample.response_length for sample in chosen],
        "rewards": [rewards[at] if by_tokens else share * rewards[at] for at in kept],
        "raw_reward": [raw[at] for at in kept],
        "truncated": [int(sample.status is sample.Status.TRUNCATED) for sample in chosen],
        "sample_indices": [sample.index for sample in chosen],
        "rollout_ids": [sample.rollout_id for sample in chosen],
        "loss_masks": [sample.loss_mask for sample in chosen],
        "rollout_mask_sums": [sums[sample.rollout_id] for sample in chosen],
        "rollout_log_probs": [sample.rollout_log_probs for sample in chosen],
    }
