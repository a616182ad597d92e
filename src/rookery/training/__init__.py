"""Groups become something that a trainer can use.

Promises:
- advantages are over valid rollouts, never over segments or over what is missing; fewer than two teach nothing;
- every trained token is in a batch exactly once, with the version and logprob it was sampled with;
- a loss is the sum of weights times losses: however a batch is packed, cut or dealt out, it is the same;
- nothing is imported that is heavier than NumPy.
"""

from rookery.training.advantages import Baseline, Scale, advantages, informative
from rookery.training.batches import Batch, make_batch
from rookery.training.checks import check
from rookery.training.columns import Columns
from rookery.training.config import BatchConfig, Included, LogprobRule, TruncatedRule, Uninformative
from rookery.training.errors import BatchError
from rookery.training.packing import Packed, Padded, Row, pack, padded, split
from rookery.training.report import Report, report
from rookery.training.tables import Counts, GroupTable, RolloutTable, SegmentTable
from rookery.training.targets import IGNORE, Targets, attention, targets
from rookery.training.weights import Normalise, rollout_weights

__all__ = [
    "IGNORE",
    "Baseline",
    "Batch",
    "BatchConfig",
    "BatchError",
    "Columns",
    "Counts",
    "GroupTable",
    "Included",
    "LogprobRule",
    "Normalise",
    "Packed",
    "Padded",
    "Report",
    "RolloutTable",
    "Row",
    "Scale",
    "SegmentTable",
    "Targets",
    "TruncatedRule",
    "Uninformative",
    "advantages",
    "attention",
    "check",
    "informative",
    "make_batch",
    "pack",
    "padded",
    "report",
    "rollout_weights",
    "split",
    "targets",
]
