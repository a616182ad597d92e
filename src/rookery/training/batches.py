"""Build batches from groups: flat arrays with one value per token, and tables that describe them.

Guarantees:
- Every trained token is in the batch exactly once, after the tokens that precede it in its segment. Every other
  sampled token is counted under the reason why it does not train.
- A token trains only with the policy version that sampled it. It trains without a log probability only if
  `BatchConfig.without_logprob` is `train`.
- Advantages and denominators are computed per valid rollout (one with a reward), whatever its number of segments.
- `BatchConfig.segments`, which selects the segments in the batch, does not change a denominator.
- A rollout that cannot be put into the batch is left out and counted, and does not affect others. With `strict`,
  `BatchError` is raised instead.

Building a batch needs less additional memory than the arrays of the batch; `python -m benchmarks batches` measures
it.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.core import Failed, Group, Rollout, Segment, Truncated, label
from rookery.core.errors import BatchError
from rookery.training.advantages import Float64, compute_advantages, is_informative
from rookery.training.arrays import (
    compute_digests,
    concatenate_ranges,
    count_trained_tokens,
    get_offsets,
    get_token_versions,
    is_usable_logprob,
    join_buffers,
    join_extras,
    spread_over_tokens,
)
from rookery.training.columns import CONTEXT, EMPTY, Bool, Columns, Float32, Int64
from rookery.training.config import BatchConfig
from rookery.training.loss_weights import apply_quotas, compute_token_weights
from rookery.training.rollout_checks import check_rollouts, fail_rollout, get_use_rule
from rookery.training.tables import BatchCounts, GroupKind, GroupTable, RolloutTable, RolloutUse, SegmentTable

log = logging.getLogger("rookery.training")
_DEFAULT = BatchConfig()
_COUNTERS = (
    "sampled_tokens",
    "masked_tokens",
    "left_out_tokens",
    "dropped_tokens",
    "without_logprob",
    "unpredicted",
    "trained_without_logprob",
    "without_ids",
)


class Batch(Columns, frozen=True, eq=False, kw_only=True):
    """A training batch: per-token arrays of concatenated segments, and tables that describe them.

    Segment `s` is the range `[offsets[s], offsets[s + 1])` of every column.
    """

    offsets: Int64
    segments: SegmentTable
    rollouts: RolloutTable
    groups: GroupTable
    counts: BatchCounts
    denominator: float
    """The number of tokens, rollouts or groups that the mode `BatchConfig.normalise` divides the loss by."""
    config: BatchConfig

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        tokens = f"{len(self):,} tokens, {int(self.mask.sum()):,} of them train"
        rows = f"{len(self.segments)} segments, {len(self.rollouts)} rollouts, {len(self.groups)} groups"
        return f"Batch({tokens}, {rows})"

    @property
    def lengths(self) -> Int64:
        """The number of tokens of each segment."""
        return np.diff(self.offsets)

    @property
    def is_complete(self) -> bool:
        """True if the batch contains all segments that it was made with, so that it is not a part of a batch."""
        return len(self.segments) == self.counts.segments

    def select(self, segments: Sequence[int] | Int64) -> "Batch":
        """Return the part of the batch that consists of the segments with these indices.

        Weights do not change, so the losses of all parts add up to the loss of the batch. Raise `BatchError` if an
        index occurs twice.
        """
        rows = np.asarray(segments, dtype=np.int64).reshape(-1)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self.segments)):
            raise IndexError(f"the batch has segments 0 to {len(self.segments) - 1}, not {rows.tolist()}")
        if len(np.unique(rows)) != len(rows):
            raise BatchError("a segment is selected twice: its tokens would train twice")
        lengths = self.lengths[rows]
        positions = concatenate_ranges(self.offsets[rows], lengths)
        return msgspec.structs.replace(
            self,
            **self.map_columns(lambda _, column: column[positions]),
            offsets=get_offsets(lengths),
            segments=self.segments.take(rows),
        )

    def leave_out(self, rollouts: Mapping[int, str]) -> "Batch":
        """Return a copy of the batch in which some rollouts do not train.

        `rollouts` maps the row of each such rollout in the rollout table to the reason. Their segments stay in the
        batch, so that the indices of segments do not change, but none of their tokens trains. Advantages and
        weights of the other rollouts are computed again, as if these rollouts had failed. They are not computed
        again if the batch is a part made with `select`, or if its advantages or weights were replaced with
        `replace_columns`.
        """
        if not rollouts:
            return self
        recompute = self.is_complete and self._columns_match_tables()
        table, counts = self.rollouts, self.counts
        use: list[RolloutUse] = [
            "leave_out" if row in rollouts and one != "missing" else one for row, one in enumerate(table.use)
        ]
        advantage, weight, denominator, valid = table.advantage, table.weight, self.denominator, self.groups.valid
        kinds: Sequence[GroupKind] = self.groups.kind
        if recompute:
            compared = _compute_baselines(table.reward, use, table.group, self.groups.environment, self.config)
            advantage, use, valid, kinds = compared.advantage, compared.uses, compared.valid, compared.kinds
        left_out = np.array([new != old for new, old in zip(use, table.use, strict=True)], dtype=np.bool_)
        rows, lengths = self.segments.rollout, self.lengths
        trained_here = np.bincount(rows, weights=self.segments.trained, minlength=len(table)).astype(np.int64)
        removed = np.where(left_out, table.trained if recompute else trained_here, 0)
        trained = table.trained - removed
        if recompute:
            weight, denominator = compute_token_weights(
                trained, table.group.astype(np.int64), self.config.normalise, length=self.config.length
            )
            of_rollouts = [self.groups.environment[group] for group in table.group.tolist()]
            weight = apply_quotas(weight, trained, of_rollouts, self.config.quotas)
        cleared = np.repeat(left_out[rows], lengths)
        columns: dict[str, Any] = {}
        for name, empty in EMPTY.items():
            columns[name] = getattr(self, name).copy()
            columns[name][cleared] = empty
        if recompute:
            columns["advantages"] = spread_over_tokens(advantage[rows], lengths, columns["mask"])
            columns["weights"] = spread_over_tokens(weight[rows], lengths, columns["mask"])
        by_segment = count_trained_tokens(columns["mask"], self.offsets)
        untrained = int(self.segments.trained.sum() - by_segment.sum())
        problem = [rollouts.get(row, "") or known for row, known in enumerate(table.problem or [""] * len(table))]
        digest = compute_digests(
            self.tokens, columns["mask"], columns["logprobs"], columns["versions"], self.offsets
        )
        return msgspec.structs.replace(
            self,
            **columns,
            denominator=denominator,
            segments=msgspec.structs.replace(self.segments, trained=by_segment.astype(np.int32), digest=digest),
            rollouts=msgspec.structs.replace(
                table,
                advantage=advantage,
                weight=weight,
                trained=trained,
                use=tuple(use),
                problem=tuple(problem),
            ),
            groups=msgspec.structs.replace(self.groups, valid=valid, kind=tuple(kinds)),
            counts=msgspec.structs.replace(
                counts,
                trained_tokens=counts.trained_tokens - untrained,
                dropped_tokens=counts.dropped_tokens - (int(removed.sum()) - untrained),
                left_out_tokens=counts.left_out_tokens + int(removed.sum()),
                left_out_rollouts=sum(map(bool, problem)),
            ),
        )

    def _columns_match_tables(self) -> bool:
        """Return whether the columns of advantages and weights match the rollout table, that is, were not
        replaced.
        """
        rows, lengths = self.segments.rollout, self.lengths
        return all(
            np.array_equal(getattr(self, name), spread_over_tokens(value[rows], lengths, self.mask))
            for name, value in (("advantages", self.rollouts.advantage), ("weights", self.rollouts.weight))
        )


class _GroupBaselines(msgspec.Struct):
    """Advantage and use of each rollout; number of rewards in the baseline and kind of each group."""

    advantage: Float64
    uses: list[RolloutUse]
    valid: npt.NDArray[np.int32]
    kinds: list[GroupKind]


def _compute_baselines(
    rewards: Float64,
    uses: Sequence[RolloutUse],
    group_index: npt.NDArray[np.int32],
    environments: Sequence[str],
    config: BatchConfig,
) -> _GroupBaselines:
    """Compute advantages group by group. `environments` has the environment of each group.

    With `config.uninformative == "leave_out"`, the rollouts of groups whose advantages are all zero are left out.
    """
    groups = len(environments)
    baselines = _GroupBaselines(np.zeros(len(rewards)), list(uses), np.zeros(groups, dtype=np.int32), [])
    bounds = np.searchsorted(group_index, np.arange(groups + 1)).tolist()
    for group in range(groups):
        rows = range(bounds[group], bounds[group + 1])
        counted = [float(rewards[at]) if uses[at] in ("train", "mask") else None for at in rows]
        advantages = compute_advantages(counted, baseline=config.baseline, scale=config.scale)
        baselines.advantage[rows.start : rows.stop] = advantages
        baselines.valid[group] = sum(reward is not None for reward in counted)
        baselines.kinds.append(_get_group_kind(counted))
        if config.uninformative == "leave_out" and not advantages.any():
            for at in rows:
                baselines.uses[at] = "missing" if baselines.uses[at] == "missing" else "leave_out"
    if config.environment_scale == "std":
        of_rollouts = np.array(environments)[group_index]
        counted_rows = np.array([use in ("train", "mask") for use in baselines.uses], dtype=np.bool_)
        for name in set(environments):
            rows_of_one = of_rollouts == name
            size = _root_mean_square(baselines.advantage[rows_of_one & counted_rows])
            if size > 0:
                baselines.advantage[rows_of_one] /= size
    return baselines


def _root_mean_square(values: Float64) -> float:
    most = float(
        np.abs(values).max(initial=0.0)
    )  # squares of very large or small values would overflow or underflow
    return most * float(np.sqrt(np.square(values / most).mean())) if most > 0 else 0.0


def weigh_parts(group: Group, weights: Mapping[str, float]) -> Group:
    """Return the group with rewards that are the sums of their named parts times `weights`.

    A rollout that has none of these parts keeps its reward.
    """
    rollouts = []
    for rollout in group.rollouts:
        parts = [weights[name] * value for name, value in rollout.rewards.items() if name in weights]
        rollouts.append(
            msgspec.structs.replace(rollout, reward=math.fsum(parts)) if parts and rollout.valid else rollout
        )
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def _get_group_kind(rewards: Sequence[float | None]) -> GroupKind:
    count = sum(reward is not None for reward in rewards)
    if count < 2:
        return "short" if count else "failed"
    return "informative" if is_informative(rewards) else "uniform"


def make_batch(groups: Iterable[Group], config: BatchConfig = _DEFAULT, *, strict: bool | None = None) -> Batch:
    """Make a training batch from groups of rollouts, as `Engine.groups` yields them.

    A rollout that cannot be trained on (for example because a log probability is missing, or a segment contradicts
    the rollout's record) is left out as if it had failed. `counts.left_out_rollouts` of the batch counts these
    rollouts, and `rollouts.problem` has the reasons. With `strict` (default: `config.strict`), such a rollout
    raises `BatchError` instead. A group that occurs twice always raises `BatchError`.
    """
    if strict is not None:
        config = msgspec.structs.replace(config, strict=strict)
    if config.part_weights:
        groups = [weigh_parts(group, config.part_weights) for group in groups]
    return _BatchBuilder(list(groups), config).batch()


class _BatchBuilder:
    """Builds one batch from groups of rollouts."""

    def __init__(self, groups: list[Group], config: BatchConfig) -> None:
        self.config = config
        self.groups = groups
        _reject_duplicates(groups)
        given = [rollout for group in groups for rollout in group.rollouts]
        self.records = check_rollouts(groups, config)
        self.problems = [
            new.outcome.detail if old.valid and isinstance(new.outcome, Failed) else ""
            for old, new in zip(given, self.records, strict=True)
        ]
        sizes = np.array([len(group.rollouts) for group in groups], dtype=np.int64)
        self.group_index: Int64 = np.repeat(np.arange(len(groups)), sizes)
        self.uses: list[RolloutUse] = [_get_use(rollout, config) for rollout in self.records]
        self._leave_out_incomparable_groups()
        rewards = np.array([_reward_or_nan(rollout) for rollout in self.records], dtype=np.float64)
        environments = [group.environment for group in groups]
        compared = _compute_baselines(rewards, self.uses, self.group_index.astype(np.int32), environments, config)
        self.advantage, self.uses = compared.advantage, compared.uses
        self.kinds, self.baseline = compared.kinds, compared.valid
        self.trained: Int64 = np.zeros(len(self.records), dtype=np.int64)
        self.tally = dict.fromkeys(_COUNTERS, 0)

    def _leave_out_incomparable_groups(self) -> None:
        """Fail the rollouts of groups whose rewards are so far apart that advantages overflow."""
        row = 0
        for group in self.groups:
            rows = range(row, row + len(group.rollouts))
            row = rows.stop
            rewards = [self.records[at].reward if self.uses[at] in ("train", "mask") else None for at in rows]
            try:
                compute_advantages(rewards, baseline=self.config.baseline, scale=self.config.scale)
            except BatchError as error:
                problem = f"group {group.index} (task {group.task.id}): {error}"
                for at in rows:
                    if self.records[at].valid:
                        self.records[at] = fail_rollout(self.records[at], BatchError(problem), self.config)
                        self.uses[at], self.problems[at] = "missing", problem

    def _warn(self) -> None:
        first = next(filter(None, self.problems), "")
        if first:
            count = sum(map(bool, self.problems))
            log.warning(
                "%d of %d rollouts are left out of the batch; the first: %s", count, len(self.problems), first
            )

    def batch(self) -> Batch:
        self._warn()
        picked = self._select_segments()
        segments = [self.records[row].segments[number] for row, number in picked]
        lengths: Int64 = np.array([len(segment) for segment in segments], dtype=np.int64)
        offsets = get_offsets(lengths)
        rows: Int64 = np.array([row for row, _ in picked], dtype=np.int64)
        tokens = join_buffers([segment.tokens for segment in segments], "<i4")
        mask = join_buffers([segment.mask for segment in segments], np.bool_)
        logprobs = join_buffers([segment.logprobs for segment in segments], "<f4")
        sampled_by = get_token_versions(segments, mask)
        self._mask_untrained(mask, logprobs, offsets, rows)
        context = ~mask
        logprobs[context] = 0.0
        sampled_by[context] = CONTEXT
        del context
        by_segment = count_trained_tokens(mask, offsets)
        np.add.at(self.trained, rows, by_segment)
        weights, denominator = compute_token_weights(
            self.trained, self.group_index, self.config.normalise, length=self.config.length
        )
        of_rollouts = [self.groups[group].environment for group in self.group_index.tolist()]
        weights = apply_quotas(weights, self.trained, of_rollouts, self.config.quotas)
        columns: dict[str, Any] = {
            "tokens": tokens,
            "mask": mask,
            "logprobs": logprobs,
            "versions": sampled_by,
            "advantages": spread_over_tokens(self.advantage[rows], lengths, mask),
            "weights": spread_over_tokens(weights[rows], lengths, mask),
            "extras": join_extras(segments, [self.records[row].id for row in rows.tolist()], self.config.extras),
        }
        table = SegmentTable(
            rollout=rows.astype(np.int32),
            number=np.array([number for _, number in picked], dtype=np.int32),
            trained=by_segment.astype(np.int32),
            digest=compute_digests(tokens, mask, logprobs, sampled_by, offsets),
            turns=tuple(segment.turns for segment in segments),
        )
        counts = BatchCounts(
            groups=len(self.groups),
            rollouts=len(self.records),
            valid=sum(rollout.valid for rollout in self.records),
            segments=len(picked),
            tokens=len(tokens),
            trained_tokens=int(by_segment.sum()),
            left_out_rollouts=sum(map(bool, self.problems)),
            **self.tally,
        )
        made = Batch(
            **columns,
            offsets=offsets,
            segments=table,
            rollouts=self._rollout_table(weights),
            groups=self._group_table(),
            counts=counts,
            denominator=denominator,
            config=self.config,
        )
        if self.config.segments == "all" or by_segment.all():
            return made
        rest = made.select(np.flatnonzero(by_segment))  # the other segments do not train
        counts = msgspec.structs.replace(counts, segments=len(rest.segments), tokens=len(rest))
        return msgspec.structs.replace(rest, counts=counts)

    def _select_segments(self) -> list[tuple[int, int]]:
        """Return the segments in the batch, as pairs of row in the rollout table and index in the rollout.

        Also count the sampled tokens, and those of segments that are not selected.
        """
        included, picked = self.config.segments, []
        for row, (rollout, use) in enumerate(zip(self.records, self.uses, strict=True)):
            if not rollout.valid:
                continue
            self.tally["without_ids"] += _count_tokens_without_ids(rollout)
            zero = included == "nonzero" and self.advantage[row] == 0.0
            for number, segment in enumerate(rollout.segments):
                trains = segment.trained
                self.tally["sampled_tokens"] += trains
                if use == "mask":
                    self.tally["masked_tokens"] += trains
                elif use == "leave_out":
                    self.tally["left_out_tokens"] += trains
                elif zero:
                    self._drop(row, segment)
                    continue
                if len(segment) and (included == "all" or (use == "train" and trains)):
                    picked.append((row, number))
        if not self.tally["sampled_tokens"]:
            self._refuse_without_tokens()
        return picked

    def _refuse_without_tokens(self) -> None:
        """Raise `BatchError` if tokens were sampled, but no rollout has token IDs to train on."""
        if any(rollout.info.get("recorded") is False for rollout in self.records):
            raise BatchError(
                "the model calls of the rollouts were not recorded (record='off'), so nothing can train"
            )
        turns = sum(rollout.usage.without_tokens for rollout in self.records if rollout.valid)
        if turns:
            raise BatchError(
                f"the inference engine returned no token IDs for {turns} turns, so nothing can train: use one "
                "that returns them (such as vLLM or SGLang), or record='tokens' with the model's tokenizer"
            )
        if self.tally["without_ids"]:
            raise BatchError(
                f"the rollouts sampled {self.tally['without_ids']} tokens, but none of them has a "
                "segment: request the groups with load_tokens=True"
            )

    def _drop(self, row: int, segment: Segment) -> None:
        """Count the tokens of a segment that is dropped for a zero advantage, as if it were in the batch."""
        mask = np.frombuffer(segment.mask, dtype=np.bool_).copy()
        logprobs = np.frombuffer(segment.logprobs, dtype="<f4")
        rows, offsets = np.array([row]), np.array([0, len(segment)])
        if len(segment):
            self._mask_untrained(mask, logprobs, offsets, rows, dropped=True)
        count = int(mask.sum())
        self.trained[row] += count
        self.tally["dropped_tokens"] += count

    def _mask_untrained(
        self, mask: Bool, logprobs: Float32, offsets: Int64, rows: Int64, *, dropped: bool = False
    ) -> None:
        """Set the mask to False, in place, for sampled tokens that do not train, and count them by reason.

        With `without_logprob="train"`, also set missing log probabilities to NaN, unless the segment is `dropped`.
        """
        for at, row in enumerate(rows.tolist()):
            if self.uses[row] != "train":
                mask[offsets[at] : offsets[at + 1]] = False
        first = offsets[:-1]
        self.tally["unpredicted"] += int(mask[first].sum())
        mask[first] = False
        without = ~is_usable_logprob(logprobs)
        without &= mask
        count = int(without.sum())
        if not count:
            return
        match self.config.without_logprob:
            case "mask":
                mask[without] = False
                self.tally["without_logprob"] += count
            case "train":
                if not dropped:
                    logprobs[without] = np.nan
                    self.tally["trained_without_logprob"] += count

    def _rollout_table(self, weights: Float64) -> RolloutTable:
        records = self.records
        return RolloutTable(
            id=tuple(rollout.id for rollout in records),
            group=self.group_index.astype(np.int32),
            member=np.array([rollout.member for rollout in records], dtype=np.int32),
            task=tuple(rollout.task for rollout in records),
            valid=np.array([rollout.valid for rollout in records], dtype=np.bool_),
            reward=np.array([_reward_or_nan(rollout) for rollout in records], dtype=np.float64),
            advantage=self.advantage,
            weight=weights,
            trained=self.trained,
            outcome=tuple(label(rollout.outcome) for rollout in records),
            truncated=tuple(
                rollout.outcome.reason if isinstance(rollout.outcome, Truncated) else "" for rollout in records
            ),
            use=tuple(self.uses),
            turns=np.array([rollout.usage.turns for rollout in records], dtype=np.int32),
            parts=self._collect_parts(),
            problem=tuple(self.problems),
        )

    def _collect_parts(self) -> dict[str, Float64]:
        """Return a column for each named part of a reward, with NaN for rollouts that do not have it."""
        columns: dict[str, Float64] = {}
        for row, rollout in enumerate(self.records):
            for name, value in rollout.rewards.items() if rollout.valid else ():
                columns.setdefault(name, np.full(len(self.records), np.nan))[row] = value
        return columns

    def _group_table(self) -> GroupTable:
        return GroupTable(
            index=np.array([group.index for group in self.groups], dtype=np.int64),
            task=tuple(group.task.id for group in self.groups),
            valid=self.baseline,
            kind=tuple(self.kinds),
            environment=tuple(group.environment for group in self.groups),
        )


def _reward_or_nan(rollout: Rollout) -> float:
    return math.nan if rollout.reward is None else rollout.reward


def _get_use(rollout: Rollout, config: BatchConfig) -> RolloutUse:
    return get_use_rule(rollout, config) if rollout.valid else "missing"


def _reject_duplicates(groups: list[Group]) -> None:
    """Raise `BatchError` if a group, or a rollout of a group, occurs twice: its tokens would train twice."""
    seen: set[tuple[object, ...]] = set()
    for group in groups:
        # Each engine numbers its groups from 0, so an index alone does not identify a group.
        name = (group.index, group.task.id, *(rollout.seed for rollout in group.rollouts))
        if name in seen:
            raise BatchError(
                f"group {group.index} (task {group.task.id}) was passed twice, so its tokens would train twice: "
                "pass each group once"
            )
        seen.add(name)
        for member, count in Counter(rollout.member for rollout in group.rollouts).items():
            if count > 1:
                raise BatchError(
                    f"group {group.index} (task {group.task.id}) contains {count} rollouts with the member number "
                    f"{member}, so the same tokens may train twice: pass each rollout of a group once"
                )


def _count_tokens_without_ids(rollout: Rollout) -> int:
    """Return how many tokens the policy sampled in a rollout that are not in its segments."""
    sampled = rollout.usage.sampled_tokens
    return max(0, sampled - sum(segment.trained for segment in rollout.segments)) if sampled else 0
