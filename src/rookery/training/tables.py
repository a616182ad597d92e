"""Tables of a batch, with one row per segment, rollout and group.

Guarantees:
- Every member of every group has a row, missing ones included.
- The counts of sampled tokens add up: each token trains, or is counted under the one reason why it does not.
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.training.advantages import Float64
from rookery.training.columns import Bool, Int32, Int64

GroupKind: TypeAlias = Literal["informative", "uniform", "short", "failed"]
"""State of a group: its valid rewards differ, are all equal, there is only one, or there is none."""
RolloutUse: TypeAlias = Literal["train", "mask", "leave_out", "missing"]
"""Use of a rollout: its tokens train; it only counts in the baseline; a rule leaves it out; it has no reward."""


class SegmentTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row per segment of the batch, in the order of the columns."""

    rollout: Int32
    """Index in the rollout table."""
    number: Int32
    """Index among the segments of its rollout."""
    trained: Int32
    """Number of trained tokens."""
    digest: npt.NDArray[np.uint32]
    """CRC-32 of tokens, mask, log probabilities and versions when the batch was made."""
    turns: tuple[tuple[int, ...], ...]
    """Turns that train in it."""

    def __len__(self) -> int:
        return len(self.rollout)

    def take(self, rows: Int64) -> "SegmentTable":
        """Return a table with these rows."""
        return SegmentTable(
            rollout=self.rollout[rows],
            number=self.number[rows],
            trained=self.trained[rows],
            digest=self.digest[rows],
            turns=tuple(self.turns[row] for row in rows.tolist()),
        )


class RolloutTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row per member of each group, valid or not, in order."""

    id: tuple[str, ...]
    group: Int32
    """Index in the group table."""
    member: Int32
    task: tuple[str, ...]
    valid: Bool
    reward: Float64
    """NaN if there is none."""
    advantage: Float64
    weight: Float64
    """Weight of each of its trained tokens."""
    trained: Int64
    """Number of trained tokens in all its segments, including segments dropped for a zero advantage."""
    outcome: tuple[str, ...]
    """For example `completed`, `truncated.time`, `sandbox.lost` or `cancelled.user`."""
    truncated: tuple[str, ...]
    """Reason of the truncation, or an empty string."""
    use: tuple[RolloutUse, ...]
    turns: Int32
    """Number of model calls of the policy."""
    problem: tuple[str, ...] = ()
    """Why a rollout with a reward was left out; empty for all others."""

    def __len__(self) -> int:
        return len(self.id)


class GroupTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row per group, in the order given."""

    index: Int64
    task: tuple[str, ...]
    valid: Int32
    """Number of rollouts in the baseline."""
    kind: tuple[GroupKind, ...]

    def __len__(self) -> int:
        return len(self.index)


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of rollouts and tokens by what happened to them.

    `sampled_tokens` is the sum of `trained_tokens` and the five fields after it.
    """

    groups: int
    rollouts: int
    valid: int
    """Rollouts with a reward."""
    segments: int
    """Segments in the batch."""
    tokens: int
    """Tokens in the batch, prompts included."""
    sampled_tokens: int
    """Sampled tokens in the segments of valid rollouts."""
    trained_tokens: int
    masked_tokens: int
    """Tokens of truncated rollouts that only count in the baseline."""
    left_out_tokens: int
    """Tokens of rollouts and groups that a rule leaves out."""
    dropped_tokens: int
    """Tokens of segments left out for a zero advantage; they count in the denominators."""
    without_logprob: int
    """Tokens masked because the inference engine returned no usable log probability."""
    unpredicted: int
    """Masked first tokens of segments, which no logit predicts."""
    trained_without_logprob: int = 0
    """Part of `trained_tokens`: tokens whose log probability is NaN, by the rule `train`."""
    left_out_rollouts: int = 0
    """Rollouts that could not be put into the batch or its rows."""
    without_ids: int = 0
    """Sampled tokens that the inference engine counted but returned no token IDs for."""
