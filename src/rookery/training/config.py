"""Configuration of batches, validated on construction."""

from typing import Literal, TypeAlias, get_args

import msgspec

from rookery.core import TruncatedReason, UsageError
from rookery.training.advantages import Baseline, Scale, check_choice
from rookery.training.loss_weights import Normalise

TruncatedRule: TypeAlias = Literal["train", "mask", "leave_out"]
"""`train`: as scored. `mask`: counts in the baseline, but does not train. `leave_out`: treated as missing."""
LogprobRule: TypeAlias = Literal["leave_out", "refuse", "mask", "train"]
"""What happens to sampled tokens without a usable log probability. `leave_out`: their rollout is left out.
`refuse`: `BatchError`. `mask`: these tokens do not train. `train`: they train with NaN."""
IncludedSegments: TypeAlias = Literal["trained", "nonzero", "all"]
"""Which segments are in the batch. The denominators are the same for all three."""
Uninformative: TypeAlias = Literal["count", "leave_out"]
"""Whether groups whose advantages are all zero count in the denominators."""


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How groups become a batch."""

    baseline: Baseline = "leave_one_out"
    scale: Scale = "none"
    normalise: Normalise = "token-mean"
    length: int | None = None
    """The constant of `seq-mean-token-sum-norm`: the maximum number of tokens that a rollout may sample."""
    truncated: TruncatedRule = "train"
    """For every reason that is not in `truncated_by`."""
    truncated_by: dict[TruncatedReason, TruncatedRule] = {}
    without_logprob: LogprobRule = "leave_out"
    uninformative: Uninformative = "count"
    segments: IncludedSegments = "trained"
    extras: tuple[str, ...] | None = None
    """Names of the extras to include; None: all, and every segment must have the same."""
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
        for reason, rule in self.truncated_by.items():
            if reason not in get_args(TruncatedReason):
                known = ", ".join(get_args(TruncatedReason))
                raise UsageError(f"truncated_by: there is no reason {reason!r}; the reasons are {known}")
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
