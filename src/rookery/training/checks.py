"""Verify that a batch is consistent.

Batches are padded, sliced and moved between processes before they train. With a loss mask that is off by one,
training still runs and the loss still falls.

Guarantees:
- A mask, log probabilities or policy versions that are aligned with the wrong tokens are detected, even if all of
  them were shifted together.
- A token that is duplicated or lost, or that trains without a policy version, is detected.
- Weights and advantages that differ from those of the token's rollout are detected.
- The error names the rollout and, for a wrong token, the segment and the position.
"""

import numpy as np

from rookery.core import Group
from rookery.core.errors import BatchError
from rookery.training.arrays import compute_digests, count_trained_tokens, is_usable_logprob
from rookery.training.batches import Batch
from rookery.training.columns import CONTEXT, DTYPES, EMPTY, Array, Bool


def check_batch(batch: Batch, groups: list[Group] | None = None) -> None:
    """Raise `BatchError` for the first inconsistency in the columns and tables of a batch.

    With `groups`, the groups that the batch was made from, also compare the batch with their recorded tokens,
    masks, log probabilities and policy versions.
    """
    _check_shapes(batch)
    _check_columns(batch)
    _check_tables(batch)
    now = compute_digests(batch.tokens, batch.mask, batch.logprobs, batch.versions, batch.offsets)
    _raise_if_any(
        batch,
        np.repeat(now != batch.segments.digest, batch.lengths),
        "differs from the record: the data of its segment has changed since the batch was made",
    )
    if groups is not None:
        _check_source(batch, groups)


def _check_shapes(batch: Batch) -> None:
    offsets, tokens = batch.offsets, len(batch.tokens)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 1).any():
        raise BatchError(f"the batch's offsets do not divide its {tokens} tokens into segments")
    for name, dtype in DTYPES.items():
        column: Array = getattr(batch, name)
        if column.shape != (tokens,) or column.dtype != dtype:
            raise BatchError(
                f"column {name} has the wrong shape or dtype for a batch of {tokens} tokens: "
                f"{column.dtype}{list(column.shape)}"
            )
    for name, extra in batch.extras.items():
        if extra.ndim < 2 or len(extra) != tokens:
            raise BatchError(
                f"extra {name!r} has the wrong shape for a batch of {tokens} tokens: {list(extra.shape)}"
            )
    table = batch.segments
    for name in ("rollout", "number", "trained", "digest", "turns"):
        if len(getattr(table, name)) != len(offsets) - 1:
            raise BatchError(
                f"the segment table has {len(getattr(table, name))} entries of {name} for "
                f"{len(offsets) - 1} segments"
            )
    if len(table) and not (table.rollout.min() >= 0 and table.rollout.max() < len(batch.rollouts)):
        raise BatchError("a segment refers to a row that the rollout table does not have")


def _check_columns(batch: Batch) -> None:
    mask = batch.mask
    _raise_if_any(
        batch, mask != (batch.versions != CONTEXT), "trains without a version, or has a version and does not train"
    )
    _raise_if_any(batch, batch.versions < CONTEXT, "has a version below 0")
    for name, empty in EMPTY.items():
        _raise_if_any(batch, (getattr(batch, name) != empty) & ~mask, f"does not train and has {name}")
    good = is_usable_logprob(batch.logprobs)
    if batch.config.without_logprob == "train":
        good |= np.isnan(batch.logprobs)
    _raise_if_any(batch, mask & ~good, "trains without a usable logprob")
    first = np.zeros(len(mask), dtype=np.bool_)
    first[batch.offsets[:-1]] = True
    _raise_if_any(batch, mask & first, "trains without a preceding token")
    rows = np.repeat(batch.segments.rollout, batch.lengths)
    for name, value in (("weights", batch.rollouts.weight), ("advantages", batch.rollouts.advantage)):
        wrong = getattr(batch, name) != value.astype(np.float32)[rows]
        _raise_if_any(batch, wrong & mask, f"has {name} of another rollout")


def _check_tables(batch: Batch) -> None:
    segments, rollouts, counts = batch.segments, batch.rollouts, batch.counts
    trained = count_trained_tokens(batch.mask, batch.offsets)
    _raise_if_any(
        batch,
        np.repeat(trained != segments.trained, batch.lengths),
        "is in a segment with more or fewer trained tokens than the segment table says",
    )
    names = list(zip(segments.rollout.tolist(), segments.number.tolist(), strict=True))
    if len(set(names)) != len(names):
        raise BatchError("a segment is in the batch twice: its tokens would train twice")
    by_rollout = np.bincount(segments.rollout, weights=trained, minlength=len(rollouts))
    if (by_rollout > rollouts.trained).any():
        row = int((by_rollout > rollouts.trained).argmax())
        raise BatchError(f"more tokens of rollout {rollouts.id[row]} train than the rollout table says")
    for row in np.flatnonzero(by_rollout).tolist():
        if rollouts.use[row] != "train":
            raise BatchError(f"rollout {rollouts.id[row]} trains, although its use is {rollouts.use[row]!r}")
    if batch.is_complete and (trained.sum() != counts.trained_tokens or len(batch.tokens) != counts.tokens):
        raise BatchError(
            f"{int(trained.sum())} of {len(batch.tokens)} tokens train, not {counts.trained_tokens} "
            f"of {counts.tokens}"
        )
    parts = (counts.trained_tokens, counts.masked_tokens, counts.left_out_tokens, counts.dropped_tokens)
    if sum(parts) + counts.without_logprob + counts.unpredicted != counts.sampled_tokens:
        raise BatchError(f"sampled_tokens is not the sum of the tokens that train and those that do not: {counts}")
    if rollouts.trained.sum() != counts.trained_tokens + counts.dropped_tokens:
        raise BatchError(
            "the trained tokens in the rollout table do not add up to trained_tokens + dropped_tokens"
        )


def _check_source(batch: Batch, groups: list[Group]) -> None:
    """Compare the batch with the recorded bytes of each segment."""
    records = [rollout for group in groups for rollout in group.rollouts]
    if tuple(rollout.id for rollout in records) != batch.rollouts.id:
        raise BatchError("the batch was made from other groups: the rollout IDs differ")
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
            raise BatchError(
                f"segment {number} of rollout {records[row].id} trains tokens that were not sampled, or "
                "with another version"
            )
        same = (batch.logprobs[part] == logprobs) | ~is_usable_logprob(logprobs)
        if not same[mask].all():
            raise BatchError(
                f"segment {number} of rollout {records[row].id} has other log probabilities than recorded"
            )


def _raise_if_any(batch: Batch, wrong: Bool, what: str) -> None:
    if wrong.any():
        token = int(wrong.argmax())
        at = int(np.searchsorted(batch.offsets, token, side="right")) - 1
        row = int(batch.segments.rollout[at])
        raise BatchError(
            f"token {token - int(batch.offsets[at])} of segment {int(batch.segments.number[at])} of rollout "
            f"{batch.rollouts.id[row]} {what}"
        )
