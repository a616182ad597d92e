"""Common prefixes of the segments (token sequences) of a batch: compute them once, and compare their rollouts.

The segments of a group start with the same prompt, and many continue with the same tokens. In a prefix tree every
token has one node for all segments that agree up to it. A causal language model computes the same logits there as
in each of these segments, because a node attends to its ancestors only and its position is its depth.

Guarantees:
- Every trained token of the batch is in exactly one row, with its own log probability, advantage and weight. Only
  the computation is shared: loss and gradients are those of the unshared segments, up to rounding.
- The same batch gives the same rows.
"""

import msgspec
import numpy as np

from rookery.core import UsageError
from rookery.training.batches import Batch
from rookery.training.columns import Bool, Int32, Int64, TrainedTokens


class PrefixTreeRow(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One or more prefix trees as the input of a causal language model: one position per node."""

    tokens: Int32
    position_ids: Int64
    """Depth of each node, from 0."""
    attention_mask: Bool
    """Shape [nodes, nodes]; True where the node of the first axis attends to that of the second."""
    trained: TrainedTokens
    """The trained tokens of all segments in this row. Several of them may have the same position and label."""
    segments: Int64
    """Indices in the batch of the segments in this row."""

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self.tokens)


def pack_prefix_trees(batch: Batch, length: int) -> list[PrefixTreeRow]:
    """Pack the segments of a batch into rows of prefix trees, each with at most `length` nodes.

    A segment that is longer gets a row of its own.
    """
    if length < 1:
        raise UsageError(f"length must be a whole number of at least 1, not {length!r}")
    segments = [batch.tokens[start:end] for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)]
    rows = [_TreeBuilder(batch)]
    # In lexicographic order, a segment has its longest common prefix with the one before it.
    for segment in sorted(range(len(segments)), key=lambda one: segments[one].tolist()):
        if not rows[-1].fits(segments[segment], length):
            rows.append(_TreeBuilder(batch))
        rows[-1].add(segment, segments[segment])
    return [row.build() for row in rows if row.segments]


def compare_prefixes(batch: Batch) -> Batch:
    """Return the batch with advantages that compare rollouts with the same prefix.

    The advantage of a token is the reward of its rollout minus the mean reward of the other rollouts of its group
    that have the same tokens before it. It is 0 if there are none: the token cannot be compared then, like a
    rollout that is alone in its group. So the mistakes of a rollout have no effect on its earlier tokens if other
    rollouts show that these were not the cause, and what follows a rare token is not trained.

    Rewards are those of the rollouts in the batch. The advantages in the rollout table stay the same.
    """
    rollouts, rewards = batch.segments.rollout, batch.rollouts.reward
    groups = batch.rollouts.group[rollouts]
    segments = [batch.tokens[start:end] for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)]
    advantages = np.zeros_like(batch.advantages)
    for one, tokens in enumerate(segments):
        shared: dict[int, int] = {}  # for each other rollout, the length of the longest common prefix
        for other in np.flatnonzero((groups == groups[one]) & (rollouts != rollouts[one])):
            common = _count_common(tokens, segments[other])
            shared[int(rollouts[other])] = max(common, shared.get(int(rollouts[other]), 0))
        counts, sums = np.zeros(len(tokens)), np.zeros(len(tokens))
        for rollout, common in shared.items():
            counts[: common + 1] += 1
            sums[: common + 1] += rewards[rollout]
        compared = np.where(counts > 0, rewards[rollouts[one]] - sums / np.maximum(counts, 1), 0.0)
        advantages[batch.offsets[one] : batch.offsets[one + 1]] = compared
    return batch.replace_columns(advantages=np.where(batch.mask, advantages, np.float32(0)))


def _count_common(first: Int32, second: Int32) -> int:
    """Return the length of the longest common prefix."""
    count = min(len(first), len(second))
    differs = (first[:count] != second[:count]).nonzero()[0]
    return int(differs[0]) if len(differs) else count


class _TreeBuilder:
    """A row to which segments are added in lexicographic order."""

    def __init__(self, batch: Batch) -> None:
        self.segments: list[int] = []
        self._batch = batch
        self._size = 0
        self._last: Int32 = np.zeros(0, dtype=np.int32)
        """Tokens of the last segment."""
        self._path: Int64 = np.zeros(0, dtype=np.int64)
        """Nodes of the last segment."""
        self._branches: list[tuple[Int64, Int32]] = []
        """Nodes that each segment shares with earlier segments, and its other tokens."""
        self._targets: list[Int64] = []
        """Indices in the batch of the trained tokens of each segment."""
        self._positions: list[Int64] = []
        """Nodes that predict the trained tokens of each segment."""

    def fits(self, tokens: Int32, length: int) -> bool:
        return not self.segments or self._size + len(tokens) - _count_common(tokens, self._last) <= length

    def add(self, segment: int, tokens: Int32) -> None:
        shared = self._path[: _count_common(tokens, self._last)]
        new = tokens[len(shared) :]
        self._branches.append((shared, new))
        self._path = np.append(shared, np.arange(self._size, self._size + len(new)))
        self._size += len(new)
        self._last = tokens
        self.segments.append(segment)
        start = int(self._batch.offsets[segment])
        trained = self._batch.mask[start : start + len(tokens)].nonzero()[0]
        self._targets.append(start + trained)
        self._positions.append(self._path[trained - 1])  # the first token of a segment never trains

    def build(self) -> PrefixTreeRow:
        mask = np.zeros((self._size, self._size), dtype=np.bool_)
        depths = np.zeros(self._size, dtype=np.int64)
        first = 0
        for shared, new in self._branches:
            end = first + len(new)
            mask[first:end, shared] = True
            mask[first:end, first:end] = np.tri(len(new), dtype=np.bool_)
            depths[first:end] = len(shared) + np.arange(len(new))
            first = end
        batch, targets = self._batch, np.concatenate(self._targets)
        return PrefixTreeRow(
            tokens=np.concatenate([new for _, new in self._branches]),
            position_ids=depths,
            attention_mask=mask,
            trained=TrainedTokens(
                positions=np.concatenate(self._positions),
                labels=batch.tokens[targets].astype(np.int64),
                logprobs=batch.logprobs[targets],
                advantages=batch.advantages[targets],
                weights=batch.weights[targets],
            ),
            segments=np.array(self.segments, dtype=np.int64),
        )
