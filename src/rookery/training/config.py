"""What a batch is made by: one frozen struct, checked when it is built."""

from typing import Literal, TypeAlias, get_args

import msgspec

from rookery.core import TruncatedReason, UsageError
from rookery.training.advantages import Baseline, Scale, chosen
from rookery.training.weights import Normalise

TruncatedRule: TypeAlias = Literal["train", "mask", "leave_out"]
"""`train`: as scored. `mask`: in the baseline, but its tokens do not train. `leave_out`: as if it were missing."""
LogprobRule: TypeAlias = Literal["leave_out", "refuse", "mask", "train"]
"""What becomes of sampled tokens without a usable logprob (see `Batch.logprobs`). `leave_out`: their rollout is
left out of the batch. `refuse`: `BatchError`. `mask`: these tokens do not train. `train`: they train with NaN."""
Included: TypeAlias = Literal["trained", "nonzero", "all"]
"""Which segments are in the batch; the denominators are the same with all three."""
Uninformative: TypeAlias = Literal["count", "leave_out"]
"""Whether groups whose advantages are all zero are in the denominators."""


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How groups become a batch. A setting that cannot be is refused here."""

    baseline: Baseline = "leave_one_out"
    scale: Scale = "none"
    normalise: Normalise = "token-mean"
    length: int | None = None
    """The constant of `seq-mean-token-sum-norm`: the most tokens that a rollout may sample."""
    truncated: TruncatedRule = "train"
    """For every reason that `truncated_by` does not name."""
    truncated_by: dict[TruncatedReason, TruncatedRule] = {}
    without_logprob: LogprobRule = "leave_out"
    uninformative: Uninformative = "count"
    segments: Included = "trained"
    extras: tuple[str, ...] | None = None
    """Names of the extras to carry along; None: all, and every segment must have the same."""
    strict: bool = False
    """Raise `BatchError` for the first rollout that cannot be put into the batch, instead of leaving it out."""

    def __post_init__(self) -> None:
        chosen("baseline", self.baseline, Baseline)
        chosen("scale", self.scale, Scale)
        chosen("normalise", self.normalise, Normalise)
        chosen("truncated", self.truncated, TruncatedRule)
        chosen("without_logprob", self.without_logprob, LogprobRule)
        chosen("uninformative", self.uninformative, Uninformative)
        chosen("segments", self.segments, Included)
        for reason, rule in self.truncated_by.items():
            if reason not in get_args(TruncatedReason):
                known = ", ".join(get_args(TruncatedReason))
                raise UsageError(f"truncated_by: there is no reason {reason!r}; the reasons are {known}")
            chosen(f"truncated_by[{reason!r}]", rule, TruncatedRule)
        if self.normalise == "seq-mean-token-sum-norm":
            if self.length is None or isinstance(self.length, bool) or self.length < 1:
                raise UsageError(
                    f"normalise='seq-mean-token-sum-norm' divides by a constant: give length, at least 1, "
                    f"not {self.length}"
                )
        elif self.length is not None:
            raise UsageError(f"length is for normalise='seq-mean-token-sum-norm', not for {self.normalise!r}")

    def rule(self, reason: TruncatedReason) -> TruncatedRule:
        return self.truncated_by.get(reason, self.truncated)
