"""Groups become a batch: flat arrays, one value for each token, and tables that say what they are.

Promises:
- every trained token is in the batch exactly once, after what it was sampled from, and every other sampled token
  is counted under the reason why it does not train;
- a token trains only with the version that sampled it, and never without a logprob, unless a rule says so;
- baselines, denominators and advantages are per rollout, over valid rollouts: five segments weigh as one;
- which segments are in the batch changes no denominator;
- memory beyond the batch's own arrays is less than they take.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from rookery.core import Group, Rollout, Segment, Truncated, label
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
from rookery.training.columns import CONTEXT, Bool, Columns, Float32, Int64
from rookery.training.config import BatchConfig
from rookery.training.errors import BatchError
from rookery.training.tables import Counts, GroupTable, Kind, RolloutTable, SegmentTable, Use
from rookery.training.weights import rollout_weights

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


def make_batch(groups: Iterable[Group], config: BatchConfig = _DEFAULT) -> Batch:
    """The batch of some groups, as `engine.groups` hands them out."""
    return _Making(list(groups), config).batch()


class _Making:
    """One batch while it is made. `picked` are the segments that will be in it, by rollout row and number."""

    def __init__(self, groups: list[Group], config: BatchConfig) -> None:
        self.config = config
        self.groups = groups
        self.records = [rollout for group in groups for rollout in group.rollouts]
        _looked_over(groups, self.records)
        sizes = np.array([len(group.rollouts) for group in groups], dtype=np.int64)
        self.of_group: Int64 = np.repeat(np.arange(len(groups)), sizes)
        self.uses: list[Use] = [_use(rollout, config) for rollout in self.records]
        self.advantage: Float64 = np.zeros(len(self.records))
        self.kinds: list[Kind] = []
        self.baseline: list[int] = []
        self._compare()
        self.trained: Int64 = np.zeros(len(self.records), dtype=np.int64)
        self.tally = dict.fromkeys(_TALLIED, 0)

    def _compare(self) -> None:
        """Advantages, group by group; a group that teaches nothing is left out where the config says so."""
        config, row = self.config, 0
        for group in self.groups:
            rows = range(row, row + len(group.rollouts))
            row = rows.stop
            rewards = [
                rollout.reward if self.uses[at] in ("train", "mask") else None
                for at, rollout in zip(rows, group.rollouts, strict=True)
            ]
            try:
                found = advantages(rewards, baseline=config.baseline, scale=config.scale)
            except BatchError as error:
                raise BatchError(f"group {group.index} (task {group.task.id}): {error}") from None
            self.advantage[rows.start : rows.stop] = found
            count = sum(reward is not None for reward in rewards)
            self.baseline.append(count)
            self.kinds.append(
                "informative" if informative(rewards) else ("failed", "short")[count] if count < 2 else "uniform"
            )
            if config.uninformative == "leave_out" and not found.any():
                for at in rows:
                    self.uses[at] = "missing" if self.uses[at] == "missing" else "leave_out"

    def batch(self) -> Batch:
        picked = self._picked()
        segments = [self.records[row].segments[number] for row, number in picked]
        lengths: Int64 = np.array([len(segment) for segment in segments], dtype=np.int64)
        offsets = starts(lengths)
        rows: Int64 = np.array([row for row, _ in picked], dtype=np.int64)
        tokens = joined([segment.tokens for segment in segments], "<i4")
        mask = joined([segment.mask for segment in segments], np.bool_)
        logprobs = joined([segment.logprobs for segment in segments], "<f4")
        sampled_by = versions(segments, mask)
        self._silent_context(mask, logprobs, offsets, rows)
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
            self._silent_context(mask, logprobs, offsets, rows)
            self._only_what_trains(mask, logprobs, offsets, rows, dropped=True)
        count = int(mask.sum())
        self.trained[row] += count
        self.tally["dropped_tokens"] += count

    def _silent_context(self, mask: Bool, logprobs: Float32, offsets: Int64, rows: Int64) -> None:
        """A logprob where nothing was sampled: mask and logprobs are not of the same tokens."""
        loud = logprobs != 0.0
        loud &= ~mask
        if loud.any():
            raise BatchError(
                f"{self._place(int(loud.argmax()), offsets, rows)} was not sampled and has a logprob: "
                "the mask does not fit the logprobs, as if one of them were shifted"
            )

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
            case "refuse":
                raise BatchError(
                    f"{count} sampled tokens have no usable logprob, the first is "
                    f"{self._place(int(without.argmax()), offsets, rows)}: let the upstream return logprobs, or "
                    "say without_logprob='mask' (they do not train) or 'train' (the trainer computes its own)"
                )
            case "mask":
                mask[without] = False
                self.tally["without_logprob"] += count
            case "train":
                if not dropped:
                    logprobs[without] = np.nan
                    self.tally["trained_without_logprob"] += count

    def _place(self, token: int, offsets: Int64, rows: Int64) -> str:
        at = int(np.searchsorted(offsets, token, side="right")) - 1
        return f"token {token - int(offsets[at])} of a segment of rollout {self.records[int(rows[at])].id}"

    def _rollout_table(self, weights: Float64) -> RolloutTable:
        records = self.records
        return RolloutTable(
            id=tuple(rollout.id for rollout in records),
            group=self.of_group.astype(np.int32),
            member=np.array([rollout.member for rollout in records], dtype=np.int32),
            task=tuple(rollout.task for rollout in records),
            valid=np.array([rollout.valid for rollout in records], dtype=np.bool_),
            reward=np.array(
                [np.nan if rollout.reward is None else rollout.reward for rollout in records], dtype=np.float64
            ),
            advantage=self.advantage,
            weight=weights,
            trained=self.trained,
            outcome=tuple(label(rollout.outcome) for rollout in records),
            truncated=tuple(
                rollout.outcome.reason if isinstance(rollout.outcome, Truncated) else "" for rollout in records
            ),
            use=tuple(self.uses),
            turns=np.array([rollout.usage.turns for rollout in records], dtype=np.int32),
        )

    def _group_table(self) -> GroupTable:
        return GroupTable(
            index=np.array([group.index for group in self.groups], dtype=np.int64),
            task=tuple(group.task.id for group in self.groups),
            valid=np.array(self.baseline, dtype=np.int32),
            kind=tuple(self.kinds),
        )


def _use(rollout: Rollout, config: BatchConfig) -> Use:
    if not rollout.valid:
        return "missing"
    return config.rule(rollout.outcome.reason) if isinstance(rollout.outcome, Truncated) else "train"


def _looked_over(groups: list[Group], records: list[Rollout]) -> None:
    """Nothing twice: no group, no member of a group, no turn of a rollout."""
    seen: set[tuple[object, ...]] = set()
    for group in groups:
        # Engines count their groups from 0, so that an index alone does not tell two of them apart.
        name = (group.index, group.task.id, *(rollout.seed for rollout in group.rollouts))
        if name in seen:
            raise BatchError(f"group {group.index} (task {group.task.id}) is there twice: it would train twice")
        seen.add(name)
        if len({rollout.member for rollout in group.rollouts}) != len(group.rollouts):
            raise BatchError(f"group {group.index} (task {group.task.id}) has a member twice")
    for rollout in records:
        turns: set[int] = set()
        for segment in rollout.segments if rollout.valid else ():
            twice = turns.intersection(segment.turns)
            if twice or len(set(segment.turns)) != len(segment.turns):
                raise BatchError(f"rollout {rollout.id} has turn {min(twice or segment.turns)} in two places")
            turns.update(segment.turns)


def _without_ids(rollout: Rollout) -> int:
    """Sampled tokens of a rollout that its segments lack; more than were sampled is a doubled token."""
    sampled, there = rollout.usage.sampled_tokens, sum(segment.trained for segment in rollout.segments)
    if not sampled:
        return 0
    if there > sampled:
        raise BatchError(
            f"rollout {rollout.id} sampled {sampled} tokens, but {there} would train: some train twice"
        )
    return sampled - there
