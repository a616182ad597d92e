"""Groups become a batch: flat arrays, one value for each token, and tables that say what they are.

Promises:
- every trained token is in the batch exactly once, after what it was sampled from, and every other sampled token
  is counted under the reason why it does not train;
- a token trains only with the version that sampled it, and never without a logprob, unless a rule says so;
- baselines, denominators and advantages are per rollout, over valid rollouts: five segments weigh as one;
- which segments are in the batch changes no denominator;
- a rollout that cannot be put into the batch is left out and counted, and affects no other, unless `strict`;
- memory beyond the batch's own arrays is less than they take.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rookery.core import Failed, Group, Rollout, Segment, Truncated, label
from rookery.training.advantages import Float64, advantages, informative
from rookery.training.arrays import (
    digests,
    extras,
    joined,
    ranges,
    spread,
    starts,
    trained_by_segment,
    usable,
    versions,
)
from rookery.training.columns import CONTEXT, EMPTY, Bool, Columns, Float32, Int64
from rookery.training.config import BatchConfig
from rookery.training.errors import BatchError
from rookery.training.screening import left_out, screened, use_by_rule
from rookery.training.tables import Counts, GroupTable, Kind, RolloutTable, SegmentTable, Use
from rookery.training.weights import rollout_weights

log = logging.getLogger("rookery.training")
_DEFAULT = BatchConfig()
_TALLIED = (
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
    """The segments one after another: segment `s` is `[offsets[s], offsets[s + 1])` of every column."""

    offsets: Int64
    segments: SegmentTable
    rollouts: RolloutTable
    groups: GroupTable
    counts: Counts
    denominator: float
    """What `normalise` counted: tokens, rollouts or groups."""
    config: BatchConfig

    def __len__(self) -> int:
        """Tokens."""
        return len(self.tokens)

    def __repr__(self) -> str:
        tokens = f"{len(self):,} tokens, {int(self.mask.sum()):,} of them train"
        rows = f"{len(self.segments)} segments, {len(self.rollouts)} rollouts, {len(self.groups)} groups"
        return f"Batch({tokens}, {rows})"

    @property
    def lengths(self) -> Int64:
        """Tokens of each segment."""
        return np.diff(self.offsets)

    @property
    def whole(self) -> bool:
        """Whether all segments that the batch was made with are still in it."""
        return len(self.segments) == self.counts.segments

    def select(self, segments: Sequence[int] | Int64) -> "Batch":
        """A part of the batch. Weights stay: the losses of parts add up to the loss of the whole."""
        rows = np.asarray(segments, dtype=np.int64).reshape(-1)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self.segments)):
            raise IndexError(f"the batch has segments 0 to {len(self.segments) - 1}, not {rows.tolist()}")
        if len(np.unique(rows)) != len(rows):
            raise BatchError("a segment is selected twice: its tokens would train twice")
        lengths = self.lengths[rows]
        places = ranges(self.offsets[rows], lengths)
        return msgspec.structs.replace(
            self,
            **self.each(lambda _, column: column[places]),
            offsets=starts(lengths),
            segments=self.segments.take(rows),
        )

    def leave_out(self, rollouts: Mapping[int, str]) -> "Batch":
        """Return the batch without these rollouts: rows of its table, and why each is left out.

        Their segments stay in place, so that numbers of segments keep their meaning, and no token of them trains.
        Advantages and weights are computed again over the others, as if these had failed. Columns of your own
        (`changed`) and the weights of a part of a batch (`select`) stay as they are.
        """
        if not rollouts:
            return self
        whole = self.whole and self._has_own_rules()
        table, counts = self.rollouts, self.counts
        use: list[Use] = [
            "leave_out" if row in rollouts and one != "missing" else one for row, one in enumerate(table.use)
        ]
        advantage, weight, denominator, valid = table.advantage, table.weight, self.denominator, self.groups.valid
        kinds: Sequence[Kind] = self.groups.kind
        if whole:
            compared = _compared(table.reward, use, table.group, len(self.groups), self.config)
            advantage, use, valid, kinds = compared.advantage, compared.uses, compared.valid, compared.kinds
        gone = np.array([new != old for new, old in zip(use, table.use, strict=True)], dtype=np.bool_)
        rows, lengths = self.segments.rollout, self.lengths
        here = np.bincount(rows, weights=self.segments.trained, minlength=len(table)).astype(np.int64)
        removed = np.where(gone, table.trained if whole else here, 0)
        trained = table.trained - removed
        if whole:
            weight, denominator = rollout_weights(
                trained, table.group.astype(np.int64), self.config.normalise, length=self.config.length
            )
        off = np.repeat(gone[rows], lengths)
        columns: dict[str, Any] = {}
        for name, empty in EMPTY.items():
            columns[name] = getattr(self, name).copy()
            columns[name][off] = empty
        if whole:
            columns["advantages"] = spread(advantage[rows], lengths, columns["mask"])
            columns["weights"] = spread(weight[rows], lengths, columns["mask"])
        by_segment = trained_by_segment(columns["mask"], self.offsets)
        untrained = int(self.segments.trained.sum() - by_segment.sum())
        problem = [rollouts.get(row, "") or said for row, said in enumerate(table.problem or [""] * len(table))]
        digest = digests(self.tokens, columns["mask"], columns["logprobs"], columns["versions"], self.offsets)
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

    def _has_own_rules(self) -> bool:
        """Whether advantages and weights are those of the tables, and not a trainer's own."""
        rows, lengths = self.segments.rollout, self.lengths
        return all(
            np.array_equal(getattr(self, name), spread(value[rows], lengths, self.mask))
            for name, value in (("advantages", self.rollouts.advantage), ("weights", self.rollouts.weight))
        )


class _Compared(msgspec.Struct):
    """The rollouts of all groups, each compared with the others of its group."""

    advantage: Float64
    uses: list[Use]
    valid: npt.NDArray[np.int32]
    kinds: list[Kind]


def _compared(
    rewards: Float64, uses: Sequence[Use], of_group: npt.NDArray[np.int32], groups: int, config: BatchConfig
) -> _Compared:
    """Compute advantages group by group; leave out a group that teaches nothing if the config says so."""
    found = _Compared(np.zeros(len(rewards)), list(uses), np.zeros(groups, dtype=np.int32), [])
    bounds = np.searchsorted(of_group, np.arange(groups + 1)).tolist()
    for group in range(groups):
        rows = range(bounds[group], bounds[group + 1])
        counted = [float(rewards[at]) if uses[at] in ("train", "mask") else None for at in rows]
        own = advantages(counted, baseline=config.baseline, scale=config.scale)
        found.advantage[rows.start : rows.stop] = own
        found.valid[group] = sum(reward is not None for reward in counted)
        found.kinds.append(_kind(counted))
        if config.uninformative == "leave_out" and not own.any():
            for at in rows:
                found.uses[at] = "missing" if found.uses[at] == "missing" else "leave_out"
    return found


def _kind(rewards: Sequence[float | None]) -> Kind:
    count = sum(reward is not None for reward in rewards)
    if count < 2:
        return "short" if count else "failed"
    return "informative" if informative(rewards) else "uniform"


def make_batch(groups: Iterable[Group], config: BatchConfig = _DEFAULT, *, strict: bool | None = None) -> Batch:
    """Make a batch of groups as `engine.groups` hands them out.

    A rollout that cannot be trained on (a missing logprob, a segment that contradicts its record) is left out as
    if it had failed: `batch.counts.left_out_rollouts` counts these, `batch.rollouts.problem` has the reasons. With
    `strict` (by default `config.strict`) it raises `BatchError`. A group given twice always does.
    """
    if strict is not None:
        config = msgspec.structs.replace(config, strict=strict)
    return _Making(list(groups), config).batch()


class _Making:
    """One batch while it is made. `picked` are the segments that will be in it, by rollout row and number."""

    def __init__(self, groups: list[Group], config: BatchConfig) -> None:
        self.config = config
        self.groups = groups
        _no_group_twice(groups)
        given = [rollout for group in groups for rollout in group.rollouts]
        self.records = screened(groups, config)
        self.problems = [
            new.outcome.detail if old.valid and isinstance(new.outcome, Failed) else ""
            for old, new in zip(given, self.records, strict=True)
        ]
        sizes = np.array([len(group.rollouts) for group in groups], dtype=np.int64)
        self.of_group: Int64 = np.repeat(np.arange(len(groups)), sizes)
        self.uses: list[Use] = [_use(rollout, config) for rollout in self.records]
        self._leave_out_groups_too_far_apart()
        rewards = np.array([_reward(rollout) for rollout in self.records], dtype=np.float64)
        compared = _compared(rewards, self.uses, self.of_group.astype(np.int32), len(groups), config)
        self.advantage, self.uses = compared.advantage, compared.uses
        self.kinds, self.baseline = compared.kinds, compared.valid
        self.trained: Int64 = np.zeros(len(self.records), dtype=np.int64)
        self.tally = dict.fromkeys(_TALLIED, 0)

    def _leave_out_groups_too_far_apart(self) -> None:
        """Leave out groups whose rewards are so far apart that floats cannot compare them."""
        row = 0
        for group in self.groups:
            rows = range(row, row + len(group.rollouts))
            row = rows.stop
            rewards = [self.records[at].reward if self.uses[at] in ("train", "mask") else None for at in rows]
            try:
                advantages(rewards, baseline=self.config.baseline, scale=self.config.scale)
            except BatchError as error:
                problem = f"group {group.index} (task {group.task.id}): {error}"
                for at in rows:
                    if self.records[at].valid:
                        self.records[at] = left_out(self.records[at], BatchError(problem), self.config)
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
        picked = self._picked()
        segments = [self.records[row].segments[number] for row, number in picked]
        lengths: Int64 = np.array([len(segment) for segment in segments], dtype=np.int64)
        offsets = starts(lengths)
        rows: Int64 = np.array([row for row, _ in picked], dtype=np.int64)
        tokens = joined([segment.tokens for segment in segments], "<i4")
        mask = joined([segment.mask for segment in segments], np.bool_)
        logprobs = joined([segment.logprobs for segment in segments], "<f4")
        sampled_by = versions(segments, mask)
        self._only_what_trains(mask, logprobs, offsets, rows)
        context = ~mask
        logprobs[context] = 0.0
        sampled_by[context] = CONTEXT
        del context
        by_segment = trained_by_segment(mask, offsets)
        np.add.at(self.trained, rows, by_segment)
        weights, denominator = rollout_weights(
            self.trained, self.of_group, self.config.normalise, length=self.config.length
        )
        columns: dict[str, Any] = {
            "tokens": tokens,
            "mask": mask,
            "logprobs": logprobs,
            "versions": sampled_by,
            "advantages": spread(self.advantage[rows], lengths, mask),
            "weights": spread(weights[rows], lengths, mask),
            "extras": extras(segments, [self.records[row].id for row in rows.tolist()], self.config.extras),
        }
        table = SegmentTable(
            rollout=rows.astype(np.int32),
            number=np.array([number for _, number in picked], dtype=np.int32),
            trained=by_segment.astype(np.int32),
            digest=digests(tokens, mask, logprobs, sampled_by, offsets),
            turns=tuple(segment.turns for segment in segments),
        )
        counts = Counts(
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
        rest = made.select(np.flatnonzero(by_segment))  # no logprob in the others: nothing of them trains
        counts = msgspec.structs.replace(counts, segments=len(rest.segments), tokens=len(rest))
        return msgspec.structs.replace(rest, counts=counts)

    def _picked(self) -> list[tuple[int, int]]:
        """The segments that go into the batch, and the count of what does not."""
        included, picked = self.config.segments, []
        for row, (rollout, use) in enumerate(zip(self.records, self.uses, strict=True)):
            if not rollout.valid:
                continue
            self.tally["without_ids"] += _without_ids(rollout)
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
        """Raise if rollouts sampled something and none of them has token IDs to train on."""
        turns = sum(rollout.usage.without_tokens for rollout in self.records if rollout.valid)
        if turns:
            raise BatchError(
                f"the model server returned no token IDs for {turns} turns, so nothing can train: use a server "
                "that returns them (upstream kind vllm or sglang), or record='tokens' with the model's tokenizer"
            )
        if self.tally["without_ids"]:
            raise BatchError(
                f"the rollouts sampled {self.tally['without_ids']} tokens, and none of them has a segment: "
                "ask for groups with load_tokens=True"
            )

    def _drop(self, row: int, segment: Segment) -> None:
        """Counts a segment as if it were there: the same tokens train, under the same rules."""
        mask = np.frombuffer(segment.mask, dtype=np.bool_).copy()
        logprobs = np.frombuffer(segment.logprobs, dtype="<f4")
        rows, offsets = np.array([row]), np.array([0, len(segment)])
        if len(segment):
            self._only_what_trains(mask, logprobs, offsets, rows, dropped=True)
        count = int(mask.sum())
        self.trained[row] += count
        self.tally["dropped_tokens"] += count

    def _only_what_trains(
        self, mask: Bool, logprobs: Float32, offsets: Int64, rows: Int64, *, dropped: bool = False
    ) -> None:
        """Clears the mask where a token does not train after all."""
        for at, row in enumerate(rows.tolist()):
            if self.uses[row] != "train":
                mask[offsets[at] : offsets[at + 1]] = False
        first = offsets[:-1]
        self.tally["unpredicted"] += int(mask[first].sum())
        mask[first] = False
        without = ~usable(logprobs)
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
            group=self.of_group.astype(np.int32),
            member=np.array([rollout.member for rollout in records], dtype=np.int32),
            task=tuple(rollout.task for rollout in records),
            valid=np.array([rollout.valid for rollout in records], dtype=np.bool_),
            reward=np.array([_reward(rollout) for rollout in records], dtype=np.float64),
            advantage=self.advantage,
            weight=weights,
            trained=self.trained,
            outcome=tuple(label(rollout.outcome) for rollout in records),
            truncated=tuple(
                rollout.outcome.reason if isinstance(rollout.outcome, Truncated) else "" for rollout in records
            ),
            use=tuple(self.uses),
            turns=np.array([rollout.usage.turns for rollout in records], dtype=np.int32),
            problem=tuple(self.problems),
        )

    def _group_table(self) -> GroupTable:
        return GroupTable(
            index=np.array([group.index for group in self.groups], dtype=np.int64),
            task=tuple(group.task.id for group in self.groups),
            valid=self.baseline,
            kind=tuple(self.kinds),
        )


def _reward(rollout: Rollout) -> float:
    return math.nan if rollout.reward is None else rollout.reward


def _use(rollout: Rollout, config: BatchConfig) -> Use:
    return use_by_rule(rollout, config) if rollout.valid else "missing"


def _no_group_twice(groups: list[Group]) -> None:
    """Raise if a group or a member of a group is given twice: it would train twice."""
    seen: set[tuple[object, ...]] = set()
    for group in groups:
        # Engines count their groups from 0, so that an index alone does not tell two of them apart.
        name = (group.index, group.task.id, *(rollout.seed for rollout in group.rollouts))
        if name in seen:
            raise BatchError(f"group {group.index} (task {group.task.id}) is there twice: it would train twice")
        seen.add(name)
        if len({rollout.member for rollout in group.rollouts}) != len(group.rollouts):
            raise BatchError(f"group {group.index} (task {group.task.id}) has a member twice")


def _without_ids(rollout: Rollout) -> int:
    """Sampled tokens of a rollout that its segments lack."""
    sampled = rollout.usage.sampled_tokens
    return max(0, sampled - sum(segment.trained for segment in rollout.segments)) if sampled else 0
