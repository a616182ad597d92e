"""Find rollouts that cannot be put into a batch, such as those with missing log probabilities.

Such a rollout gets the outcome `Failed`, with the traceback. It has no token in the batch and does not count
in a baseline or denominator; other rollouts are not affected. With `BatchConfig.strict`, the first problem is
raised instead.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from rookery.core import Group, Rollout, Segment, Truncated, mark_failed
from rookery.core.errors import BatchError
from rookery.training.arrays import MAX_VERSION, is_usable_logprob
from rookery.training.config import BatchConfig, TruncatedRule

LOGPROB_CAUSE = "upstream.logprobs"
ExtrasLayout: TypeAlias = tuple[tuple[str, str, int], ...]
"""Name, dtype and width in bytes of each extra (additional per-token array) of a segment, sorted by name."""


def check_rollouts(groups: Sequence[Group], config: BatchConfig) -> list[Rollout]:
    """Return the rollouts of all groups in order. Those that cannot be trained on have the outcome `Failed`.

    Raise `BatchError` if no token of any rollout has a log probability, or for the first problem in strict mode.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _refuse_if_no_logprobs(rollouts, config)
    layout = _find_common_layout(rollouts, config)
    return [_check_or_fail(rollout, layout, config) for rollout in rollouts]


def fail_rollout(rollout: Rollout, error: Exception, config: BatchConfig) -> Rollout:
    """Return the rollout with the outcome `Failed`.

    With `config.strict`, or for a missing log probability with `without_logprob="refuse"`, raise the error
    instead.
    """
    no_logprob = isinstance(error, BatchError) and error.code == LOGPROB_CAUSE
    if config.strict or (no_logprob and config.without_logprob == "refuse"):
        raise error
    return mark_failed(rollout, error, cause="bug.batch")


def _check_or_fail(rollout: Rollout, layout: ExtrasLayout, config: BatchConfig) -> Rollout:
    if not rollout.valid:
        return rollout
    try:
        _check_rollout(rollout)
        trains = get_use_rule(rollout, config) == "train"
        for segment in rollout.segments:
            _check_segment(rollout, segment, config, trains=trains)
            if _in_batch(segment, config, trains=trains):
                _check_extras(rollout, segment, layout, config)
    except Exception as error:  # noqa: BLE001  (any problem concerns this rollout alone)
        return fail_rollout(rollout, error, config)
    return rollout


def get_use_rule(rollout: Rollout, config: BatchConfig) -> TruncatedRule:
    """Return what happens to a valid rollout: the rule for its truncation reason, or `train` if it completed."""
    return config.rule(rollout.outcome.reason) if isinstance(rollout.outcome, Truncated) else "train"


def _check_rollout(rollout: Rollout) -> None:
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise BatchError(
            f"rollout {rollout.id} of group {rollout.group} (task {rollout.task}): the reward of member "
            f"{rollout.member} is {rollout.reward}: a reward must be a finite number"
        )
    turns: set[int] = set()
    for segment in rollout.segments:
        twice = turns.intersection(segment.turns)
        if twice or len(set(segment.turns)) != len(segment.turns):
            raise BatchError(f"rollout {rollout.id} has turn {min(twice or segment.turns)} in two segments")
        turns.update(segment.turns)
    sampled, trained = rollout.usage.sampled_tokens, sum(segment.trained for segment in rollout.segments)
    if sampled and trained > sampled:
        raise BatchError(
            f"rollout {rollout.id} sampled {sampled} tokens, but {trained} would train: some train twice"
        )


def _check_segment(rollout: Rollout, segment: Segment, config: BatchConfig, *, trains: bool) -> None:
    if not len(segment):
        return
    versions = [span.version for span in segment.versions]
    if versions and not (min(versions) >= 0 and max(versions) <= MAX_VERSION):
        raise BatchError(
            f"policy versions are numbers from 0 to {MAX_VERSION}, not {min(versions)} to {max(versions)} "
            f"(rollout {rollout.id})"
        )
    mask = np.frombuffer(segment.mask, dtype=np.bool_)
    logprobs = np.frombuffer(segment.logprobs, dtype="<f4")
    stray = (logprobs != 0.0) & ~mask
    if stray.any():
        raise BatchError(
            f"token {int(stray.argmax())} of a segment of rollout {rollout.id} was not sampled and has a logprob: "
            "mask and logprobs of the segment do not match, as if one of them were shifted"
        )
    if trains and config.without_logprob in ("leave_out", "refuse"):
        without = mask & ~is_usable_logprob(logprobs)
        without[0] = False  # no logit predicts it, so it does not train
        if without.any():
            raise BatchError(
                f"{int(without.sum())} sampled tokens have no usable logprob, the first is token "
                f"{int(without.argmax())} of a segment of rollout {rollout.id}: let the upstream return logprobs, "
                "or set without_logprob='mask' (they do not train) or 'train' (the trainer computes its own)",
                cause=LOGPROB_CAUSE,
            )


def _in_batch(segment: Segment, config: BatchConfig, *, trains: bool) -> bool:
    return bool(len(segment)) and (config.segments == "all" or (trains and segment.trained > 0))


def _get_extras_layout(segment: Segment, config: BatchConfig) -> ExtrasLayout:
    names = segment.extras if config.extras is None else config.extras
    return tuple(
        (name, segment.extras[name].dtype, segment.extras[name].width)
        for name in sorted(names)
        if name in segment.extras
    )


def _find_common_layout(rollouts: Sequence[Rollout], config: BatchConfig) -> ExtrasLayout:
    """Return the most frequent layout of extras among the segments for the batch; on a tie, the first found."""
    found: Counter[ExtrasLayout] = Counter()
    for rollout in rollouts:
        if rollout.valid:
            trains = get_use_rule(rollout, config) == "train"
            found.update(
                {
                    _get_extras_layout(one, config): 1
                    for one in rollout.segments
                    if _in_batch(one, config, trains=trains)
                }
            )
    return found.most_common(1)[0][0] if found else ()


def _check_extras(rollout: Rollout, segment: Segment, layout: ExtrasLayout, config: BatchConfig) -> None:
    own = _get_extras_layout(segment, config)
    for name in config.extras or ():
        if name not in segment.extras:
            raise BatchError(f"a segment of rollout {rollout.id} has no extra {name!r}")
    if [name for name, _, _ in own] != [name for name, _, _ in layout]:
        raise BatchError(
            f"a segment of rollout {rollout.id} has the extras {[name for name, _, _ in own]}, others of the "
            f"batch have {[name for name, _, _ in layout]}: name those to include in BatchConfig(extras=(…))"
        )
    for (name, dtype, width), (_, usual, usual_width) in zip(own, layout, strict=True):
        if (dtype, width) != (usual, usual_width):
            raise BatchError(
                f"extra {name!r} of rollout {rollout.id} is {dtype} of {width} bytes per token, "
                f"in other segments {usual} of {usual_width}"
            )


def _refuse_if_no_logprobs(rollouts: Sequence[Rollout], config: BatchConfig) -> None:
    """Raise `BatchError` if no sampled token of any rollout has a log probability.

    In that case the inference engine returns none, and leaving out every rollout would hide that.
    """
    if config.without_logprob != "leave_out":
        return
    sampled = [
        rollout
        for rollout in rollouts
        if rollout.valid
        and get_use_rule(rollout, config) == "train"
        and any(one.trained for one in rollout.segments)
    ]
    if sampled and not any(_has_logprob(rollout) for rollout in sampled):
        raise BatchError(
            f"none of the tokens that {len(sampled)} rollouts sampled has a usable logprob: let the upstream "
            "return logprobs, or set without_logprob='mask' (these tokens do not train) or 'train' (the trainer "
            "computes its own)",
            cause=LOGPROB_CAUSE,
        )


def _has_logprob(rollout: Rollout) -> bool:
    for segment in rollout.segments:
        mask = np.frombuffer(segment.mask, dtype=np.bool_)
        if is_usable_logprob(np.frombuffer(segment.logprobs, dtype="<f4"))[mask].any():
            return True
    return False
