"""Rows: training sequences, each with everything that another trainer must know about it.

The adapters in `rookery.adapters` convert these rows to the samples of their trainers and do not read segments.
(The servers `nemo_gym` and `verifiers` do.) All rules on what trains are applied once, by `make_batch`.

    rows = make_rows(groups, BatchConfig(...))    # list[Row], ordered by group, member and segment
    for rollout in split_by_rollout(rows):        # all rows of one rollout
        ...

    row.valid                                     # False: the rollout is missing data
    row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs   # lists
    row.tokens, row.mask, row.logprobs, row.versions, row.extras                 # arrays over the whole sequence
    row.reward, row.advantage, row.weight, row.truncated, row.record             # of the rollout

Trainers differ in what they can express. These functions adapt a list of rows:

- `keep_one_row`: for trainers that take one sequence per rollout.
- `clip_rows`: for trainers with a maximum sequence length.
- `fill_row`: for trainers that need a sequence for every member of a group. It adds two tokens that do not train.
- `shape_rewards`: for trainers that compute `reward - mean of the group` themselves.
- `mask_incomplete_groups`: for trainers whose baseline counts every member whatever its mask.
- `summarize_rows`: metrics for the trainer's log, with missing rollouts by cause.

Guarantees:
- Every member of every group has at least one row. A missing member (no reward, or left out by a rule of
  `BatchConfig`) has exactly one row. It has no tokens, no reward, and the advantage 0.
- A valid member none of whose tokens train also has one row without tokens. Its reward counts in the baseline.
- The trained tokens of all rows are those of `make_batch` with the same configuration, in the same order.
- The arrays of a row are views of the batch, so nothing is copied. Only NumPy is needed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from rookery.core import Group, Rollout, UsageError, label
from rookery.training.advantages import Baseline, compute_advantages
from rookery.training.batches import Batch, make_batch
from rookery.training.columns import CONTEXT, Array, Bool, Float32, Int32
from rookery.training.config import BatchConfig

_DEFAULT = BatchConfig()


class Row(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A segment of a rollout as a training sequence, or an empty sequence for a rollout that does not train."""

    record: Rollout
    """The final record of the rollout, without segments."""
    segment: int
    """Index of the segment in its rollout; -1 for a row without tokens."""
    tokens: Int32
    """Token IDs, as the inference engine received and sampled them."""
    mask: Bool
    """The loss mask: True for tokens that train."""
    logprobs: Float32
    """Log probability at sampling time; 0 where the mask is False. NaN only with `without_logprob='train'`."""
    versions: Int32
    """Policy version that sampled the token; -1 where the mask is False."""
    extras: dict[str, Array]
    """Additional per-token arrays by name, such as routed experts, with one more axis."""
    reward: float | None
    """Reward of the rollout; None if the rollout is missing, so that it counts in no baseline."""
    advantage: float
    """Advantage of the rollout among the valid members of its group."""
    weight: float
    """Weight of each trained token in the loss of all rows, as `BatchConfig.normalise` defines it."""
    truncated: str = ""
    """Reason of the rollout's truncation; empty if it was not truncated."""
    outcome: str = ""
    """Label of the rollout's outcome, such as `completed`, or the cause of a failure, such as `sandbox.lost`."""
    left_out: str = ""
    """Why a rollout with a reward was left out of training; empty for all others."""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def group(self) -> int:
        """Index of the group in its run."""
        return self.record.group

    @property
    def member(self) -> int:
        """Index of the rollout in its group."""
        return self.record.member

    @property
    def rollout(self) -> str:
        """ID of the rollout."""
        return self.record.id

    @property
    def task(self) -> str:
        """ID of the task."""
        return self.record.task

    @property
    def valid(self) -> bool:
        """True if the rollout's reward counts in the baseline of its group."""
        return self.reward is not None

    @property
    def trained(self) -> int:
        """Number of tokens that train."""
        return int(self.mask.sum())

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that trains. Without trained tokens, all tokens but the last."""
        return int(self.mask.argmax()) if self.mask.any() else max(0, len(self) - 1)

    @property
    def prompt_ids(self) -> list[int]:
        """Token IDs before the first token that trains."""
        return _as_list(self.tokens[: self.prompt_length])

    @property
    def response_ids(self) -> list[int]:
        """Token IDs from the first one that trains: sampled tokens, and what tools and users said in between."""
        return _as_list(self.tokens[self.prompt_length :])

    @property
    def response_mask(self) -> list[int]:
        """One number per response token: 1 if it trains, else 0."""
        return _as_list(self.mask[self.prompt_length :].astype(np.int64))

    @property
    def response_logprobs(self) -> list[float]:
        """Log probability of each response token at sampling time; 0.0 where the mask is 0."""
        found: list[float] = self.logprobs[self.prompt_length :].tolist()
        return found

    @property
    def version_range(self) -> tuple[int, int] | None:
        """The oldest and the newest policy version of the trained tokens; None if no token trains."""
        versions = self.versions[self.mask]
        return (int(versions.min()), int(versions.max())) if len(versions) else None


def make_rows(groups: Iterable[Group], config: BatchConfig = _DEFAULT) -> list[Row]:
    """Return the rows of all members of the groups, ordered by group, member and segment.

    `config` has the rules of `make_batch`: baseline, truncated rollouts, missing log probabilities, segments.
    A group that is passed twice, and groups without loaded tokens, raise `BatchError`.
    """
    groups = list(groups)
    batch = make_batch(groups, config)
    segments: dict[int, list[int]] = {}
    for segment, rollout in enumerate(batch.segments.rollout.tolist()):
        segments.setdefault(rollout, []).append(segment)
    records = [rollout for group in groups for rollout in group.rollouts]
    rows = []
    for at, record in enumerate(records):
        record = msgspec.structs.replace(record, segments=[]) if record.segments else record  # noqa: PLW2901
        counts = batch.rollouts.use[at] in ("train", "mask")
        rows += [
            _make_row(batch, at, record, segment) for segment in (segments.get(at, []) if counts else [])
        ] or [_make_row(batch, at, record, None)]
    return rows


def _make_row(batch: Batch, at: int, record: Rollout, segment: int | None) -> Row:
    """Return the row of a segment of the batch, or a row without tokens. `at` is a row of the rollout table."""
    table = batch.rollouts
    counts = table.use[at] in ("train", "mask")
    span = slice(0, 0) if segment is None else slice(batch.offsets[segment], batch.offsets[segment + 1])
    return Row(
        record=record,
        segment=-1 if segment is None else int(batch.segments.number[segment]),
        tokens=batch.tokens[span],
        mask=batch.mask[span],
        logprobs=batch.logprobs[span],
        versions=batch.versions[span],
        extras={name: extra[span] for name, extra in batch.extras.items()},
        reward=float(table.reward[at]) if counts else None,
        advantage=float(table.advantage[at]) if counts else 0.0,
        weight=float(table.weight[at]),
        truncated=table.truncated[at],
        outcome=table.outcome[at],
        left_out=table.problem[at] or ("a rule of BatchConfig" if table.use[at] == "leave_out" else ""),
    )


def split_by_rollout(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each rollout, in the order of `make_rows`."""
    return [list(part) for _, part in groupby(rows, key=lambda row: (row.group, row.member, row.record.seed))]


def split_by_group(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each group, in the order of `make_rows`."""
    return [list(part) for _, part in groupby(rows, key=lambda row: (row.group, row.task))]


def keep_one_row(rows: Iterable[Row]) -> list[Row]:
    """Return one row per rollout: the one with the most trained tokens, and of several such rows the last.

    The tokens of the others do not train. `count_left_out_tokens` returns their number.
    """
    return [max(reversed(part), key=lambda row: row.trained) for part in split_by_rollout(rows)]


def count_left_out_tokens(rows: Sequence[Row], kept: Iterable[Row]) -> int:
    """Return how many trained tokens of `rows` are not in `kept`, a selection of these rows."""
    return sum(row.trained for row in rows) - sum(row.trained for row in kept)


def clip_rows(rows: Iterable[Row], length: int | None) -> list[Row]:
    """Return the rows without the tokens after the first `length` ones; None keeps all tokens.

    The last reply of a rollout with the outcome `Truncated("context")` may be too long, if the inference engine
    renders prompts, because the length of a prompt is not known before the reply.
    """
    return [row if length is None or len(row) <= length else _keep_tokens(row, slice(0, length)) for row in rows]


def _keep_tokens(row: Row, kept: slice) -> Row:
    return msgspec.structs.replace(
        row,
        tokens=row.tokens[kept],
        mask=row.mask[kept],
        logprobs=row.logprobs[kept],
        versions=row.versions[kept],
        extras={name: extra[kept] for name, extra in row.extras.items()},
    )


def fill_row(row: Row, token: int) -> Row:
    """Return the row, or for a row without tokens one of two tokens that do not train.

    For trainers that need a prompt and a response for every member of a group. `token` is an ID that the model
    knows, such as that of the end of a sequence.
    """
    if len(row):
        return row
    return msgspec.structs.replace(
        row,
        tokens=np.full(2, token, dtype=np.int32),
        mask=np.zeros(2, dtype=np.bool_),
        logprobs=np.zeros(2, dtype=np.float32),
        versions=np.full(2, CONTEXT, dtype=np.int32),
    )


def mask_incomplete_groups(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with whole groups masked in which a member is missing.

    For trainers that take a number as the reward of every member and count it in the baseline. All members of such
    a group become missing: no tokens, no reward, advantage 0. `left_out` names the reason, and `summarize_rows`
    counts them.
    """
    masked: list[Row] = []
    for part in split_by_group(rows):
        if all(row.valid for row in part):
            masked += part
            continue
        for first, *_ in split_by_rollout(part):
            masked.append(
                _make_missing(first, first.left_out or ("" if not first.valid else "an incomplete group"))
            )
    return masked


def _make_missing(row: Row, reason: str) -> Row:
    return msgspec.structs.replace(
        _keep_tokens(row, slice(0, 0)), segment=-1, reward=None, advantage=0.0, left_out=reason
    )


def shape_rewards(
    rewards: Sequence[float | None],
    *,
    baseline: Baseline = "leave_one_out",
    weight: float = 1.0,
    fill_missing: bool = False,
) -> list[float | None]:
    """Return adjusted rewards of one group, from which `reward - mean of the group` is the advantage wanted here.

    The adjusted reward is the mean of the valid rewards plus the advantage. Advantages of a group add up to zero,
    so the mean does not change, and the trainer's subtraction leaves the advantage. `weight` multiplies the
    advantages. A missing reward stays None. With `fill_missing` it becomes the mean of the valid rewards (0.0 if
    there are none): a trainer that counts every member then computes the same mean, and the advantage 0 for the
    missing one. Use `fill_missing` only if the trainer does not divide by the standard deviation, which the filled
    value would change.
    """
    if baseline == "none":
        raise UsageError("baseline 'none' cannot be expressed for a trainer that subtracts the mean of the group")
    valid = [reward for reward in rewards if reward is not None]
    level = math.fsum(valid) / len(valid) if valid else 0.0
    gains = compute_advantages(rewards, baseline=baseline).tolist()
    missing = level if fill_missing else None
    return [
        missing if reward is None else level + weight * gain for reward, gain in zip(rewards, gains, strict=True)
    ]


def summarize_rows(rows: Iterable[Row]) -> dict[str, float]:
    """Return metrics for the log of a trainer, over rollouts and not rows. See `summarize_rollouts`."""
    return summarize_rollouts([describe_row(part[0]) for part in split_by_rollout(rows)])


def summarize_rollouts(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return metrics for the log of a trainer from the descriptions of rollouts that `describe_row` returned.

    `rookery/missing` is the share of rollouts without a reward, `rookery/missing/CAUSE` the share by cause, and
    `rookery/missing/left_out` the share with a reward that was left out of training. The others are means over the
    valid rollouts.
    """
    if not rollouts:
        return {}
    valid = [one for one in rollouts if one["reward"] is not None]
    found = {"rookery/missing": 1.0 - len(valid) / len(rollouts)}
    causes = Counter(one["missing"] for one in rollouts if one["reward"] is None)
    found |= {f"rookery/missing/{cause}": count / len(rollouts) for cause, count in sorted(causes.items())}
    for name in ("reward", "truncated", "turns", "tool_calls", "tokens_left_out"):
        if values := [float(one[name]) for one in valid if name in one]:
            found[f"rookery/{name}"] = _mean(values)
    for kind in ("rewards", "metrics"):
        for name in sorted({name for one in valid for name in one[kind]}):
            found[f"rookery/{kind}/{name}"] = _mean([one[kind][name] for one in valid if name in one[kind]])
    return found


def describe_row(row: Row) -> dict[str, Any]:
    """Return plain data about the rollout of a row, for trainers that pass it to reward functions and logs."""
    record = row.record
    return {
        "id": record.id,
        "task": record.task,
        "outcome": row.outcome or label(record.outcome),
        "missing": _get_missing_cause(row),
        "reward": row.reward,
        "truncated": bool(row.truncated),
        "rewards": dict(record.rewards),
        "metrics": dict(record.metrics),
        "info": dict(record.info),
        "turns": record.usage.turns,
        "tool_calls": record.usage.tool_calls,
        "versions": sorted({int(version) for version in row.versions[row.mask]}),
    }


def describe_rollout(part: Sequence[Row], kept: Row) -> dict[str, Any]:
    """Return plain data about a rollout, of whose rows only `kept` trains."""
    return {
        **describe_row(kept),
        "versions": sorted({int(version) for row in part for version in row.versions[row.mask]}),
        "segments": sum(bool(len(row)) for row in part),
        "tokens_left_out": count_left_out_tokens(part, [kept]),
    }


def _get_missing_cause(row: Row) -> str:
    """Return why a rollout is missing, for metrics; empty for a valid one."""
    if row.valid:
        return ""
    return "left_out" if row.left_out else "ungraded" if row.record.ungraded else row.outcome


def _as_list(values: Array) -> list[int]:
    found: list[int] = values.tolist()
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
