"""Tables that describe a batch: one row per segment, one row per rollout, and one row per group.

Guarantees:
- Every rollout of every group has a row in the rollout table, including rollouts without a reward.
- The counts of sampled tokens add up: each token trains, or is counted under exactly one reason why it does not.
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.training.advantages import Float64
from rookery.training.columns import Bool, Int32, Int64

GroupKind: TypeAlias = Literal["informative", "uniform", "short", "failed"]
"""State of a group. `informative`: its rewards differ. `uniform`: its rewards are all equal. `short`: only one
of its rollouts has a reward that counts. `failed`: none has."""
RolloutUse: TypeAlias = Literal["train", "mask", "leave_out", "missing"]
"""Use of a rollout. `train`: its tokens train. `mask`: its reward counts in the baseline, but its tokens do not
train. `leave_out`: a rule of `BatchConfig` or a call of `Batch.leave_out` excludes it. `missing`: it has no
reward, or could not be put into the batch."""


class SegmentTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row per segment of the batch, in the order in which the segments are concatenated."""

    rollout: Int32
    """Row of the segment's rollout in the rollout table."""
    number: Int32
    """Index of the segment in the list of segments of its rollout."""
    trained: Int32
    """Number of the segment's tokens that train."""
    digest: npt.NDArray[np.uint32]
    """CRC-32 of the segment's tokens, mask, log probabilities and versions when the batch was made."""
    turns: tuple[tuple[int, ...], ...]
    """Indices of the rollout's turns (model calls) whose sampled tokens are in the segment's loss mask."""

    def __len__(self) -> int:
        return len(self.rollout)

    def take(self, rows: Int64) -> "SegmentTable":
        """Return a table with the rows of these indices, in this order."""
        return SegmentTable(
            rollout=self.rollout[rows],
            number=self.number[rows],
            trained=self.trained[rows],
            digest=self.digest[rows],
            turns=tuple(self.turns[row] for row in rows.tolist()),
        )


class RolloutTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row per rollout of each group, with or without a reward, ordered by group and member."""

    id: tuple[str, ...]
    group: Int32
    """Row of the rollout's group in the group table."""
    member: Int32
    """Index of the rollout in its group."""
    task: tuple[str, ...]
    valid: Bool
    reward: Float64
    """Reward of the rollout; NaN if it has none."""
    advantage: Float64
    weight: Float64
    """Weight in the loss of each of the rollout's trained tokens."""
    trained: Int64
    """Number of trained tokens in all segments of the rollout, including segments dropped for a zero advantage."""
    outcome: tuple[str, ...]
    """Label of the outcome, for example `completed`, `truncated.time`, `sandbox.lost` or `cancelled.user`."""
    truncated: tuple[str, ...]
    """Reason of the truncation; an empty string if the rollout was not truncated."""
    use: tuple[RolloutUse, ...]
    turns: Int32
    """Number of model calls of the policy in the rollout."""
    parts: dict[str, Float64] = {}
    """The named parts of the rewards. A rollout without a part, or without a reward, has NaN."""
    problem: tuple[str, ...] = ()
    """The reason why a rollout with a reward could not be put into the batch; empty for all others."""

    def __len__(self) -> int:
        return len(self.id)


class GroupTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row per group, in the order in which `make_batch` received the groups."""

    index: Int64
    """`Group.index` of the group."""
    task: tuple[str, ...]
    """ID of the group's task."""
    valid: Int32
    """Number of rollouts whose reward counts in the group's baseline."""
    kind: tuple[GroupKind, ...]
    environment: tuple[str, ...] = ()
    """The environment of each group in a mixture; empty strings in other runs."""

    def __len__(self) -> int:
        return len(self.index)


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of groups, rollouts, segments and tokens of a batch, by what happened to them.

    `sampled_tokens` is the sum of `trained_tokens` and the five fields after `trained_tokens`.
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
    """Sampled tokens of truncated rollouts whose rewards count in the baseline, but whose tokens do not train."""
    left_out_tokens: int
    """Sampled tokens of rollouts and groups that are left out by a rule of `BatchConfig` or by
    `Batch.leave_out`."""
    dropped_tokens: int
    """Tokens of segments that are not in the batch because their advantage is 0. They count in the
    denominators."""
    without_logprob: int
    """Sampled tokens that do not train because the inference engine returned no usable log probability."""
    unpredicted: int
    """Sampled tokens that do not train because they are the first of their segment, so that no logit predicts
    them."""
    trained_without_logprob: int = 0
    """The number of `trained_tokens` whose log probability is NaN, as `without_logprob='train'` allows."""
    left_out_rollouts: int = 0
    """Rollouts with a reward that could not be put into the batch or, after packing, into a row."""
    without_ids: int = 0
    """Sampled tokens that the inference engine counted, but for which no token IDs were recorded."""
