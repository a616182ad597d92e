"""Whether a batch still is what it was made to be.

Arrays pass through many hands before they train: padding, slicing, moving between processes. A mask that is off
by one still trains, and the loss still falls.

Promises:
- a mask, logprobs or versions that are not of the same tokens are found, also when all have moved together;
- a token that is there twice, is lost, or has lost its version is found;
- weights and advantages that are not their rollout's are found;
- what is wrong is said with its place.
"""

import numpy as np

from rookery.core import Group
from rookery.training.arrays import digests, trained_by_segment, usable
from rookery.training.batches import Batch
from rookery.training.columns import CONTEXT, DTYPES, EMPTY, Array, Bool
from rookery.training.errors import BatchError


def check(batch: Batch, groups: list[Group] | None = None) -> None:
    """Raises `BatchError` for the first thing that is wrong. With the groups, the bytes are compared to theirs."""
    _shape(batch)
    _columns(batch)
    _tables(batch)
    now = digests(batch.tokens, batch.mask, batch.logprobs, batch.versions, batch.offsets)
    _none(
        batch,
        np.repeat(now != batch.segments.digest, batch.lengths),
        "is not as recorded: its segment has changed",
    )
    if groups is not None:
        _source(batch, groups)


def _shape(batch: Batch) -> None:
    offsets, tokens = batch.offsets, len(batch.tokens)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 1).any():
        raise BatchError(f"the offsets do not cut {tokens} tokens into segments")
    for name, dtype in DTYPES.items():
        column: Array = getattr(batch, name)
        if column.shape != (tokens,) or column.dtype != dtype:
            raise BatchError(f"{name}: {column.dtype}{list(column.shape)}, for {tokens} tokens")
    for name, extra in batch.extras.items():
        if extra.ndim < 2 or len(extra) != tokens:
            raise BatchError(f"extra {name!r} has the shape {list(extra.shape)}, for {tokens} tokens")
    table = batch.segments
    for name in ("rollout", "number", "trained", "digest", "turns"):
        if len(getattr(table, name)) != len(offsets) - 1:
            raise BatchError(f"{len(getattr(table, name))} entries of {name} for {len(offsets) - 1} segments")
    if len(table) and not (table.rollout.min() >= 0 and table.rollout.max() < len(batch.rollouts)):
        raise BatchError("a segment is of a rollout that the batch does not know")


def _columns(batch: Batch) -> None:
    mask = batch.mask
    _none(batch, mask != (batch.versions != CONTEXT), "trains without a version, or has one and does not train")
    _none(batch, batch.versions < CONTEXT, "has a version below 0")
    for name, empty in EMPTY.items():
        _none(batch, (getattr(batch, name) != empty) & ~mask, f"does not train and has {name}")
    good = usable(batch.logprobs)
    if batch.config.without_logprob == "train":
        good |= np.isnan(batch.logprobs)
    _none(batch, mask & ~good, "trains without a usable logprob")
    first = np.zeros(len(mask), dtype=np.bool_)
    first[batch.offsets[:-1]] = True
    _none(batch, mask & first, "trains with nothing before it")
    rows = np.repeat(batch.segments.rollout, batch.lengths)
    for name, value in (("weights", batch.rollouts.weight), ("advantages", batch.rollouts.advantage)):
        wrong = getattr(batch, name) != value.astype(np.float32)[rows]
        _none(batch, wrong & mask, f"has {name} that are not its rollout's")


def _tables(batch: Batch) -> None:
    segments, rollouts, counts = batch.segments, batch.rollouts, batch.counts
    trained = trained_by_segment(batch.mask, batch.offsets)
    _none(
        batch,
        np.repeat(trained != segments.trained, batch.lengths),
        "is of a segment with more or fewer trained tokens",
    )
    names = list(zip(segments.rollout.tolist(), segments.number.tolist(), strict=True))
    if len(set(names)) != len(names):
        raise BatchError("a segment is in the batch twice: its tokens would train twice")
    by_rollout = np.bincount(segments.rollout, weights=trained, minlength=len(rollouts))
    if (by_rollout > rollouts.trained).any():
        row = int((by_rollout > rollouts.trained).argmax())
        raise BatchError(f"more tokens of rollout {rollouts.id[row]} train than it has")
    for row in np.flatnonzero(by_rollout).tolist():
        if rollouts.use[row] != "train":
            raise BatchError(f"rollout {rollouts.id[row]} trains, and its use is {rollouts.use[row]!r}")
    if batch.whole and (trained.sum() != counts.trained_tokens or len(batch.tokens) != counts.tokens):
        raise BatchError(
            f"{int(trained.sum())} of {len(batch.tokens)} tokens train, not {counts.trained_tokens} "
            f"of {counts.tokens}"
        )
    parts = (counts.trained_tokens, counts.masked_tokens, counts.left_out_tokens, counts.dropped_tokens)
    if sum(parts) + counts.without_logprob + counts.unpredicted != counts.sampled_tokens:
        raise BatchError(f"the sampled tokens do not add up: {counts}")
    if rollouts.trained.sum() != counts.trained_tokens + counts.dropped_tokens:
        raise BatchError("the rollouts' trained tokens do not add up to the batch's")


def _source(batch: Batch, groups: list[Group]) -> None:
    """The recorded bytes, segment by segment, without anything that the batch says of itself."""
    records = [rollout for group in groups for rollout in group.rollouts]
    if tuple(rollout.id for rollout in records) != batch.rollouts.id:
        raise BatchError("the batch was not made of these groups")
    bounds = batch.offsets.tolist()
    for at, (row, number) in enumerate(zip(batch.segments.rollout, batch.segments.number, strict=True)):
        part, source = slice(bounds[at], bounds[at + 1]), records[row].segments[number]
        mask = batch.mask[part]
        sampled: Bool = np.frombuffer(source.mask, dtype=np.bool_)
        logprobs = np.frombuffer(source.logprobs, dtype="<f4")
        versions = np.full(len(source), CONTEXT)
        for span in source.versions:
            versions[span.start : span.end] = span.version
        if len(mask) != len(source) or batch.tokens[part].astype("<i4").tobytes() != source.tokens:
            raise BatchError(f"the tokens of segment {number} of rollout {records[row].id} are not those recorded")
        if (mask & ~sampled).any() or (batch.versions[part] != versions)[mask].any():
            raise BatchError(f"segment {number} of rollout {records[row].id} trains what was not sampled so")
        same = (batch.logprobs[part] == logprobs) | ~usable(logprobs)
        if not same[mask].all():
            raise BatchError(f"segment {number} of rollout {records[row].id} has other logprobs than recorded")


def _none(batch: Batch, wrong: Bool, what: str) -> None:
    if wrong.any():
        token = int(wrong.argmax())
        at = int(np.searchsorted(batch.offsets, token, side="right")) - 1
        row = int(batch.segments.rollout[at])
        raise BatchError(
            f"token {token - int(batch.offsets[at])} of segment {int(batch.segments.number[at])} of rollout "
            f"{batch.rollouts.id[row]} {what}"
        )
