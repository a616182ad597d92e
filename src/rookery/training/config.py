"""Configuration of how a training batch is made from groups of rollouts. It is validated on construction."""

from math import isfinite
from typing import Literal, TypeAlias, get_args

import msgspec

from rookery.core import TruncatedReason, UsageError
from rookery.training.advantages import Baseline, Scale, check_choice
from rookery.training.loss_weights import Normalise

TruncatedRule: TypeAlias = Literal["train", "mask", "leave_out"]
"""Treatment of a truncated rollout. `train`: it trains like a completed one. `mask`: its reward counts in the
baseline of its group, but its tokens do not train. `leave_out`: it is treated as if it had no reward."""
LogprobRule: TypeAlias = Literal["leave_out", "refuse", "mask", "train"]
"""Treatment of sampled tokens without a usable log probability. `leave_out`: the rollout that contains them
is left out of the batch. `refuse`: `BatchError` is raised. `mask`: these tokens do not train. `train`: they
train, and their log probability in the batch is NaN."""
IncludedSegments: TypeAlias = Literal["trained", "nonzero", "all"]
"""Which segments (token sequences) are in the batch. `trained`: those with tokens that train. `nonzero`: of
these, only those with an advantage other than 0. `all`: also those without tokens that train. The choice does
not change the denominators of the loss."""
Uninformative: TypeAlias = Literal["count", "leave_out"]
"""Treatment of groups whose advantages are all zero. `count`: their tokens count in the denominators of the
loss. `leave_out`: these groups are left out, as if they were not in the batch."""


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for making a training batch from groups of rollouts with `make_batch`."""

    baseline: Baseline = "leave_one_out"
    scale: Scale = "none"
    normalise: Normalise = "token-mean"
    length: int | None = None
    """The constant that `normalise='seq-mean-token-sum-norm'` divides by, usually the maximum number of tokens
    that a rollout may sample. None for all other modes."""
    truncated: TruncatedRule = "train"
    """Rule for truncated rollouts, unless `truncated_by` has a rule for the reason of the truncation."""
    truncated_by: dict[TruncatedReason, TruncatedRule] = {}
    """Rules for truncated rollouts by the reason of the truncation."""
    without_logprob: LogprobRule = "leave_out"
    uninformative: Uninformative = "count"
    segments: IncludedSegments = "trained"
    extras: tuple[str, ...] | None = None
    """Names of the extras (additional per-token arrays of a segment) to include in the batch. None includes all of
    them; all segments must then have the same extras."""
    environment_scale: Scale = "none"
    """`std` divides the advantages of each environment of a mixture by their root mean square over the
    environment's rollouts in the batch, so that environments with different ranges of rewards have the same
    influence."""
    quotas: dict[str, float] = {}
    """Share of the total loss weight for environments of a mixture, by name. The others share the rest in
    proportion to their weight. Empty: every token has the weight that `normalise` gives it."""
    part_weights: dict[str, float] = {}
    """Weights of the named parts of a reward. If a rollout has one of these parts, its reward is the sum of its
    parts times these weights, in place of the reward that its environment computed; parts that are not listed do
    not count."""
    strict: bool = False
    """Raise `BatchError` for a rollout that cannot be put into the batch, instead of leaving it out."""

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, Baseline)
        check_choice("scale", self.scale, Scale)
        check_choice("normalise", self.normalise, Normalise)
        check_choice("truncated", self.truncated, TruncatedRule)
        check_choice("without_logprob", self.without_logprob, LogprobRule)
        check_choice("uninformative", self.uninformative, Uninformative)
        check_choice("segments", self.segments, IncludedSegments)
        check_choice("environment_scale", self.environment_scale, Scale)
        if not all(0 < share <= 1 for share in self.quotas.values()) or sum(self.quotas.values()) > 1 + 1e-9:
            raise UsageError(f"quotas must be above 0, and their sum at most 1, got {self.quotas}")
        if not all(map(isfinite, self.part_weights.values())):
            raise UsageError(f"part_weights must be finite numbers, got {self.part_weights}")
        for reason, rule in self.truncated_by.items():
            if reason not in get_args(TruncatedReason):
                known = ", ".join(get_args(TruncatedReason))
                raise UsageError(f"truncated_by: {reason!r} is not a reason of a truncation: use one of {known}")
            check_choice(f"truncated_by[{reason!r}]", rule, TruncatedRule)
        if self.normalise == "seq-mean-token-sum-norm":
            if self.length is None or isinstance(self.length, bool) or self.length < 1:
                raise UsageError(
                    "normalise='seq-mean-token-sum-norm' divides by a constant: set length to at least "
                    f"1, not {self.length}"
                )
        elif self.length is not None:
            raise UsageError(
                f"length applies only to normalise='seq-mean-token-sum-norm', not to {self.normalise!r}"
            )

    def rule(self, reason: TruncatedReason) -> TruncatedRule:
        """Return the rule for rollouts that were truncated for this reason."""
        return self.truncated_by.get(reason, self.truncated)
