"""Pack the segments (token sequences) of a batch into rows, pad them, and distribute them to ranks.

Guarantees:
- Every segment is in exactly one row and is never cut. If a segment is longer than a row, its rollout is left out
  and counted by default; `oversize` selects an error or a longer row instead.
- The same batch gives the same rows. Within a row, segments are in the order of the batch.
- Sequence boundaries are given in three consistent forms: `position_ids`, `cu_seqlens` and `seq_idx`. Padding
  is a sequence of its own.
- The weights of tokens are those of the whole batch: however it is divided, the losses of the parts add up to the
  loss of the batch.
- `PackedBatch.split` gives every rank the same number of rows, so that no rank waits forever for another.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from rookery.core import UsageError
from rookery.core.errors import BatchError
from rookery.training.advantages import check_choice
from rookery.training.arrays import concatenate_ranges, get_offsets
from rookery.training.batches import Batch
from rookery.training.columns import EMPTY, Array, Bool, Columns, Int32, Int64, TrainedTokens

log = logging.getLogger("rookery.training")
Side: TypeAlias = Literal["left", "right"]
Oversize: TypeAlias = Literal["leave_out", "refuse", "alone"]
"""Treatment of a segment that is longer than a row. `leave_out`: its rollout is left out. `refuse`:
`BatchError` is raised. `alone`: the segment gets its own, longer row."""


class PackedRow(Columns, frozen=True, eq=False, kw_only=True):
    """A row of concatenated segments for attention kernels with variable sequence lengths.

    Each segment is one sequence. Padding, if any, is one more sequence at the end.
    """

    position_ids: Int64
    """Position of each token in its sequence, from 0."""
    cu_seqlens: Int32
    """Start offset of each sequence in the row, and the end of the last one."""
    seq_idx: Int32
    """Index of the sequence that each token belongs to."""
    max_seqlen: int
    """Length of the longest sequence."""
    segments: Int64
    """Indices in the batch of the segments in this row."""
    padding: int
    """Number of padding positions at the end of the row."""

    def __len__(self) -> int:
        """The number of positions, padding included."""
        return len(self.tokens)

    @property
    def trained(self) -> TrainedTokens:
        """The tokens that train. The first token of a sequence is never one of them."""
        at = self.mask.nonzero()[0]
        return TrainedTokens(
            positions=at - 1,
            labels=self.tokens[at].astype(np.int64),
            logprobs=self.logprobs[at],
            advantages=self.advantages[at],
            weights=self.weights[at],
        )


class PaddedBatch(Columns, frozen=True, eq=False, kw_only=True):
    """One segment per row, all rows of the same length: columns of shape [segments, length]."""

    attention_mask: Bool
    """True for tokens, False for padding."""
    position_ids: Int64
    """Position of each token in its segment, from 0, on whichever side the padding is; 0 for padding."""
    segments: Int64
    """Index in the batch of the segment in each row."""


class PackedBatch(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A batch and the assignment of its segments to rows. The arrays of a row are built when it is accessed."""

    batch: Batch
    """The batch that was packed. Rollouts that were left out do not train in it; their segments keep their
    indices."""
    length: int
    """Maximum number of tokens in a row."""
    plan: tuple[tuple[int, ...], ...]
    """Indices of the segments in each row."""
    pad: int | None = None
    """Token ID that fills rows up to `length`; if None, rows are not padded."""
    left_out: tuple[str, ...] = ()
    """IDs of rollouts with a segment longer than a row. None of their segments is in a row."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.plan)

    def __iter__(self) -> Iterator[PackedRow]:
        return (self.row(at) for at in range(len(self.plan)))

    def row(self, at: int) -> PackedRow:
        """Build the arrays of the row with index `at`."""
        return _make_row(self.batch, self.plan[at], self.length, self.pad)

    @property
    def efficiency(self) -> float:
        """Share of the positions of all rows, padded to `length`, that hold tokens; 1 if there are no rows."""
        lengths = self.batch.lengths
        used = [sum(int(lengths[one]) for one in row) for row in self.plan]
        positions = sum(max(self.length, tokens) for tokens in used)
        return sum(used) / positions if positions else 1.0

    def split(self, ranks: int) -> "list[PackedBatch]":
        """Distribute the rows to ranks; return one part per rank.

        Each rank gets the same number of rows; rows that contain only padding are added if needed. Rows are
        assigned greedily so that ranks have similar numbers of tokens. If gradients are averaged over ranks, as in
        data-parallel training, multiply the loss by the number of ranks.
        """
        _check_positive_int("ranks", ranks)
        lengths = self.batch.lengths
        tokens = [sum(int(lengths[one]) for one in row) for row in self.plan]
        each = -(-len(self.plan) // ranks)
        by_rank = _distribute(tokens, ranks, at_most=each)
        return [
            msgspec.structs.replace(self, plan=tuple(self.plan[at] for at in mine) + ((),) * (each - len(mine)))
            for mine in by_rank
        ]


def pack(
    batch: Batch, length: int, *, pad: int | None = None, oversize: Oversize = "leave_out", strict: bool = False
) -> PackedBatch:
    """Pack segments into rows of at most `length` tokens (best-fit decreasing).

    With `pad`, rows are filled up to `length` with that token ID. By default, a rollout with a segment longer than
    `length` is left out as if it had failed (see `Batch.leave_out`): `left_out` of the result contains its ID, and
    `batch.counts` of the result counts it. `oversize` selects other behaviour; `strict` is the same as
    `oversize="refuse"`, which raises `BatchError`.
    """
    _check_positive_int("length", length)
    check_choice("oversize", oversize, Oversize)
    if strict:
        oversize = "refuse"
    lengths = batch.lengths
    out: list[int] = []
    if oversize != "alone" and len(lengths) and lengths.max() > length:
        problem = _describe_oversize(batch, length)
        if oversize == "refuse":
            raise BatchError(problem)
        out = sorted(set(batch.segments.rollout[lengths > length].tolist()))
        batch = batch.leave_out(dict.fromkeys(out, f"a segment is longer than a row of {length} tokens"))
        log.warning("%d rollouts are left out of the rows: %s", len(out), problem)
    rows: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free positions, row), sorted
    packed = ~np.isin(batch.segments.rollout, out)
    for one in np.argsort(-lengths, kind="stable").tolist():
        if not packed[one]:
            continue
        size = int(lengths[one])
        at = bisect_left(free_space, (size, 0))
        if at < len(free_space):
            free, row = free_space.pop(at)
        else:
            free, row = max(length, size), len(rows)
            rows.append([])
        rows[row].append(one)
        insort(free_space, (free - size, row))
    return PackedBatch(
        batch=batch,
        length=length,
        plan=tuple(sorted(tuple(sorted(row)) for row in rows)),
        pad=pad,
        left_out=tuple(batch.rollouts.id[row] for row in out),
    )


def _describe_oversize(batch: Batch, length: int) -> str:
    lengths = batch.lengths
    at = int(lengths.argmax())
    rollout = batch.rollouts.id[int(batch.segments.rollout[at])]
    return (
        f"{int((lengths > length).sum())} segments are longer than a row of {length} tokens; the "
        f"longest has {int(lengths[at])} (rollout {rollout}): use longer rows, limit the context, or "
        "set oversize='alone'"
    )


def split_batch(batch: Batch, ranks: int) -> list[Batch]:
    """Divide a batch into one batch per rank, with similar numbers of tokens.

    Segments are not cut. The losses of all ranks add up to the loss of the batch.
    """
    _check_positive_int("ranks", ranks)
    return [batch.select(mine) for mine in _distribute(batch.lengths.tolist(), ranks)]


def pad_batch(batch: Batch, *, side: Side = "right", pad: int = 0, multiple: int = 1) -> PaddedBatch:
    """Return the batch as rectangular arrays with one segment per row.

    Rows are padded on `side` with the token ID `pad` to the length of the longest segment, rounded up to a
    multiple of `multiple`.
    """
    check_choice("side", side, Side)
    _check_positive_int("multiple", multiple)
    lengths, count = batch.lengths, len(batch.segments)
    width = -(-int(lengths.max(initial=0)) // multiple) * multiple
    first = np.zeros(count, dtype=np.int64) if side == "right" else width - lengths
    targets = concatenate_ranges(np.arange(count) * width + first, lengths)

    def put(name: str, column: Array) -> Array:
        fill = pad if name == "tokens" else EMPTY.get(name, 0)
        padded = np.full((count * width, *column.shape[1:]), fill, dtype=column.dtype)
        padded[targets] = column
        return padded.reshape(count, width, *column.shape[1:])

    holds_token = np.zeros(count * width, dtype=np.bool_)
    holds_token[targets] = True
    positions = np.zeros(count * width, dtype=np.int64)
    positions[targets] = concatenate_ranges(np.zeros(count, dtype=np.int64), lengths)
    return PaddedBatch(
        **batch.map_columns(put),
        attention_mask=holds_token.reshape(count, width),
        position_ids=positions.reshape(count, width),
        segments=np.arange(count),
    )


def _make_row(batch: Batch, plan: Sequence[int], length: int, pad: int | None) -> PackedRow:
    segments = np.array(plan, dtype=np.int64)
    lengths = batch.lengths[segments]
    tokens = int(lengths.sum())
    # An empty row also needs a position, because it passes through the model while other ranks have rows.
    padding = max(0, length - tokens) if pad is not None else int(not tokens)
    sources = concatenate_ranges(batch.offsets[segments], lengths)

    def put(name: str, column: Array) -> Array:
        fill: Any = (pad or 0) if name == "tokens" else EMPTY.get(name, 0)
        filled = np.full((tokens + padding, *column.shape[1:]), fill, dtype=column.dtype)
        filled[:tokens] = column[sources]
        return filled

    documents = np.append(lengths, padding) if padding else lengths
    return PackedRow(
        **batch.map_columns(put),
        position_ids=concatenate_ranges(np.zeros(len(documents), dtype=np.int64), documents),
        cu_seqlens=get_offsets(documents).astype(np.int32),
        seq_idx=np.repeat(np.arange(len(documents), dtype=np.int32), documents),
        max_seqlen=int(documents.max(initial=0)),
        segments=segments,
        padding=padding,
    )


def _distribute(sizes: Sequence[int], ranks: int, at_most: int | None = None) -> list[list[int]]:
    """Return the indices of the items for each rank.

    Items are assigned in order of size, largest first, to the rank with the smallest total size that has fewer
    than `at_most` items.
    """
    by_rank: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    heapify(least)
    for one in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        total, rank = least[0]
        by_rank[rank].append(one)
        full = at_most is not None and len(by_rank[rank]) == at_most
        heapreplace(least, (2**62 if full else total + sizes[one], rank))
    return [sorted(mine) for mine in by_rank]


def _check_positive_int(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
