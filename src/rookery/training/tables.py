"""What a batch knows of its segments, rollouts and groups, a row for each.

Promises:
- every member of every group has its row, also those that are missing, so that nothing is hidden from the trainer;
- the counts of sampled tokens add up: each one trains, or stands under the one reason why it does not.
"""

from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.training.advantages import Float64
from rookery.training.columns import Bool, Int32, Int64

Kind: TypeAlias = Literal["informative", "uniform", "short", "failed"]
"""Of a group: its valid rewards differ; are all the same; there is one of them; there is none."""
Use: TypeAlias = Literal["train", "mask", "leave_out", "missing"]
"""Of a rollout: its tokens train; it is in the baseline only; it is left out by a rule; it has no reward."""


class SegmentTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A row for each segment in the batch, in the order of the columns."""

    rollout: Int32
    """Its row in the table of rollouts."""
    number: Int32
    """Which of its rollout's segments it is."""
    trained: Int32
    """How many of its tokens train."""
    digest: npt.NDArray[np.uint32]
    """CRC-32 of its tokens, mask, logprobs and versions, as they were when the batch was made."""
    turns: tuple[tuple[int, ...], ...]
    """The turns that train in it."""

    def __len__(self) -> int:
        return len(self.rollout)

    def take(self, rows: Int64) -> "SegmentTable":
        return SegmentTable(
            rollout=self.rollout[rows],
            number=self.number[rows],
            trained=self.trained[rows],
            digest=self.digest[rows],
            turns=tuple(self.turns[row] for row in rows.tolist()),
        )


class RolloutTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A row for each member of each group, valid or not, in order."""

    id: tuple[str, ...]
    group: Int32
    """Its row in the table of groups."""
    member: Int32
    task: tuple[str, ...]
    valid: Bool
    reward: Float64
    """NaN where there is none."""
    advantage: Float64
    weight: Float64
    """Of each of its trained tokens."""
    trained: Int64
    """Tokens of it that train, over all of its segments, in the batch or dropped for a zero advantage."""
    outcome: tuple[str, ...]
    """`completed`, `truncated.time`, `sandbox.lost`, `cancelled.user`."""
    truncated: tuple[str, ...]
    """The reason, or nothing."""
    use: tuple[Use, ...]
    turns: Int32
    """Model calls of the policy."""
    problem: tuple[str, ...] = ()
    """Why the rollout was left out although it has a reward; empty for the others."""

    def __len__(self) -> int:
        return len(self.id)


class GroupTable(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A row for each group, in the order given."""

    index: Int64
    task: tuple[str, ...]
    valid: Int32
    """Rollouts that are in the baseline."""
    kind: tuple[Kind, ...]

    def __len__(self) -> int:
        return len(self.index)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of everything. `sampled_tokens` is the sum of `trained_tokens` and the five after it."""

    groups: int
    rollouts: int
    valid: int
    """Rollouts with a reward."""
    segments: int
    """In the batch."""
    tokens: int
    """In the batch, prompts included."""
    sampled_tokens: int
    """In the segments of valid rollouts."""
    trained_tokens: int
    masked_tokens: int
    """Of truncated rollouts that are in the baseline only."""
    left_out_tokens: int
    """Of rollouts and groups that a rule leaves out."""
    dropped_tokens: int
    """Of segments that are not in the batch because their advantage is zero; they are in the denominators."""
    without_logprob: int
    """Masked because the engine gave no usable logprob."""
    unpredicted: int
    """Masked because nothing stands before them: no logit predicts the first token of a segment."""
    trained_without_logprob: int = 0
    """Among `trained_tokens`: their logprob is NaN, by the rule `train`."""
    left_out_rollouts: int = 0
    """Rollouts that were left out because they could not be put into the batch or into its rows."""
    without_ids: int = 0
    """Sampled tokens that the engine counted and gave no ids for: they are in no segment."""
