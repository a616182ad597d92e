"""Turn groups of rollouts into batches for a trainer.

Guarantees:
- Advantages are computed over the valid rollouts of a group (those with a reward), never over segments or missing
  rollouts. In a group with fewer than two valid rollouts, all advantages are zero.
- Every token that trains is in a batch exactly once, with the policy version and log probability it was sampled
  with.
- The loss of a batch is the sum over its tokens of weight times loss per token. It does not depend on how the
  batch is packed, split or distributed to ranks.
- Nothing heavier than NumPy is imported.
"""

from rookery.core.errors import BatchError
from rookery.training.advantages import Baseline, Scale, compute_advantages, is_informative
from rookery.training.batches import Batch, make_batch
from rookery.training.checks import check_batch
from rookery.training.columns import Columns, TrainedTokens
from rookery.training.config import BatchConfig, IncludedSegments, LogprobRule, TruncatedRule, Uninformative
from rookery.training.loss_weights import Normalise, compute_token_weights
from rookery.training.packing import PackedBatch, PackedRow, PaddedBatch, pack, pad_batch, split_batch
from rookery.training.prefix_trees import PrefixTreeRow, compare_prefixes, pack_prefix_trees
from rookery.training.report import GroupReport, build_report
from rookery.training.rows import (
    Row,
    count_left_out_tokens,
    describe_row,
    fill_row,
    keep_one_row,
    make_rows,
    mask_incomplete_groups,
    shape_rewards,
    split_by_group,
    split_by_rollout,
    summarize_rollouts,
    summarize_rows,
)
from rookery.training.tables import BatchCounts, GroupTable, RolloutTable, SegmentTable
from rookery.training.targets import IGNORE, Targets, make_attention_mask, make_targets

__all__ = [
    "IGNORE",
    "Baseline",
    "Batch",
    "BatchConfig",
    "BatchCounts",
    "BatchError",
    "Columns",
    "GroupReport",
    "GroupTable",
    "IncludedSegments",
    "LogprobRule",
    "Normalise",
    "PackedBatch",
    "PackedRow",
    "PaddedBatch",
    "PrefixTreeRow",
    "RolloutTable",
    "Row",
    "Scale",
    "SegmentTable",
    "Targets",
    "TrainedTokens",
    "TruncatedRule",
    "Uninformative",
    "build_report",
    "check_batch",
    "compare_prefixes",
    "compute_advantages",
    "compute_token_weights",
    "count_left_out_tokens",
    "describe_row",
    "fill_row",
    "is_informative",
    "keep_one_row",
    "make_attention_mask",
    "make_batch",
    "make_rows",
    "make_targets",
    "mask_incomplete_groups",
    "pack",
    "pack_prefix_trees",
    "pad_batch",
    "shape_rewards",
    "split_batch",
    "split_by_group",
    "split_by_rollout",
    "summarize_rollouts",
    "summarize_rows",
]
