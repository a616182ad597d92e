"""Segments in rows: packed, padded, and dealt out to ranks.

Promises:
- every segment is in exactly one row, whole and in one piece; a segment that does not fit is never cut: its
  rollout is left out and counted, or refused with `strict`;
- the same batch gives the same rows; within a row, segments stand in the batch's order;
- document boundaries are told three ways (`position_ids`, `cu_seqlens`, `seq_idx`), which agree; padding is a
  document of its own;
- weights are those of the batch: whichever way it is cut, the losses of the parts add up to the loss of the whole;
- every rank gets as many rows as any other, so that none waits for another for ever.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from rookery.core import UsageError
from rookery.training.advantages import chosen
from rookery.training.arrays import ranges, starts
from rookery.training.batches import Batch
from rookery.training.columns import EMPTY, Array, Bool, Columns, Int32, Int64
from rookery.training.errors import BatchError

log = logging.getLogger("rookery.training")
Side: TypeAlias = Literal["left", "right"]
Oversize: TypeAlias = Literal["leave_out", "refuse", "alone"]
"""What becomes of a segment that is longer than a row: its rollout is left out, `BatchError` is raised, or the
segment gets a row of its own that is as long as it is."""


class Row(Columns, frozen=True, eq=False, kw_only=True):
    """Segments one after another, as kernels for variable lengths want them. Each is a document."""

    position_ids: Int64
    """From 0 at the beginning of each document."""
    cu_seqlens: Int32
    """Where each document begins, and where the last one ends."""
    seq_idx: Int32
    """Which document of the row each token is of."""
    max_seqlen: int
    """Of the longest document."""
    segments: Int64
    """The batch's segments in it, in order; padding is a document after them."""
    padding: int
    """Places at the end that hold no token."""

    def __len__(self) -> int:
        """Places, padding included."""
        return len(self.tokens)


class Padded(Columns, frozen=True, eq=False, kw_only=True):
    """One segment a row, all rows of one length: columns of shape [segments, length]."""

    attention_mask: Bool
    """True where there is a token."""
    position_ids: Int64
    """From 0 at the first token of each segment, on whichever side the padding is."""
    segments: Int64


class Packed(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Which segments share a row. Rows are made when they are asked for: a plan costs next to nothing."""

    batch: Batch
    """The batch that was packed, without the rollouts that were left out. Its segments have the same numbers."""
    length: int
    """Tokens that a row may have."""
    plan: tuple[tuple[int, ...], ...]
    """The segments of each row."""
    pad: int | None = None
    """The id that fills rows up to `length`; None: rows are as long as what is in them."""
    left_out: tuple[str, ...] = ()
    """IDs of rollouts that have a segment longer than a row: no segment of them is in any row."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.plan)

    def __iter__(self) -> Iterator[Row]:
        return (self.row(at) for at in range(len(self.plan)))

    def row(self, at: int) -> Row:
        return _row(self.batch, self.plan[at], self.length, self.pad)

    @property
    def efficiency(self) -> float:
        """The share of the rows' places that hold tokens; 1 where there is nothing to hold."""
        lengths = self.batch.lengths
        used = [sum(int(lengths[one]) for one in row) for row in self.plan]
        places = sum(max(self.length, tokens) for tokens in used)
        return sum(used) / places if places else 1.0

    def split(self, ranks: int) -> "list[Packed]":
        """For each rank its rows, as many as any other's: rows of nothing but padding make up for what is missing.

        The tokens of the ranks are as even as whole rows allow. Where gradients are averaged over ranks, as
        data-parallel trainers do, multiply the loss by the number of ranks.
        """
        _whole_number("ranks", ranks)
        lengths = self.batch.lengths
        tokens = [sum(int(lengths[one]) for one in row) for row in self.plan]
        each = -(-len(self.plan) // ranks)
        dealt = _dealt(tokens, ranks, at_most=each)
        return [
            msgspec.structs.replace(self, plan=tuple(self.plan[at] for at in mine) + ((),) * (each - len(mine)))
            for mine in dealt
        ]


def pack(
    batch: Batch, length: int, *, pad: int | None = None, oversize: Oversize = "leave_out", strict: bool = False
) -> Packed:
    """Put segments into rows of at most `length` tokens: each, longest first, into the fullest row with room.

    With `pad`, rows are filled up to `length` with that ID. A rollout with a longer segment is left out as if it
    had failed (see `Batch.leave_out`); `packed.left_out` names it, `packed.batch.counts` counts it. `strict`
    raises `BatchError` instead, as `oversize="refuse"` does.
    """
    _whole_number("length", length)
    chosen("oversize", oversize, Oversize)
    if strict:
        oversize = "refuse"
    lengths = batch.lengths
    out: list[int] = []
    if oversize != "alone" and len(lengths) and lengths.max() > length:
        problem = _oversize(batch, length)
        if oversize == "refuse":
            raise BatchError(problem)
        out = sorted(set(batch.segments.rollout[lengths > length].tolist()))
        batch = batch.leave_out(dict.fromkeys(out, f"a segment is longer than a row of {length} tokens"))
        log.warning("%d rollouts are left out of the rows: %s", len(out), problem)
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free places, row), in order
    packed = ~np.isin(batch.segments.rollout, out)
    for one in np.argsort(-lengths, kind="stable").tolist():
        if not packed[one]:
            continue
        size = int(lengths[one])
        at = bisect_left(room, (size, 0))
        if at < len(room):
            free, row = room.pop(at)
        else:
            free, row = max(length, size), len(rows)
            rows.append([])
        rows[row].append(one)
        insort(room, (free - size, row))
    return Packed(
        batch=batch,
        length=length,
        plan=tuple(sorted(tuple(sorted(row)) for row in rows)),
        pad=pad,
        left_out=tuple(batch.rollouts.id[row] for row in out),
    )


def _oversize(batch: Batch, length: int) -> str:
    lengths = batch.lengths
    at = int(lengths.argmax())
    rollout = batch.rollouts.id[int(batch.segments.rollout[at])]
    return (
        f"{int((lengths > length).sum())} segments are longer than a row of {length} tokens, the longest has "
        f"{int(lengths[at])} (rollout {rollout}): make rows longer, limit the context, or set oversize='alone'"
    )


def split(batch: Batch, ranks: int) -> list[Batch]:
    """A batch for each rank, even in tokens. Weights stay: the losses of all ranks add up to the whole loss."""
    _whole_number("ranks", ranks)
    return [batch.select(mine) for mine in _dealt(batch.lengths.tolist(), ranks)]


def padded(batch: Batch, *, side: Side = "right", pad: int = 0, multiple: int = 1) -> Padded:
    """One segment a row, filled up with `pad` to the longest, or to the next multiple above it."""
    chosen("side", side, Side)
    _whole_number("multiple", multiple)
    lengths, count = batch.lengths, len(batch.segments)
    width = -(-int(lengths.max(initial=0)) // multiple) * multiple
    first = np.zeros(count, dtype=np.int64) if side == "right" else width - lengths
    places = ranges(np.arange(count) * width + first, lengths)

    def put(name: str, column: Array) -> Array:
        fill = pad if name == "tokens" else EMPTY.get(name, 0)
        found = np.full((count * width, *column.shape[1:]), fill, dtype=column.dtype)
        found[places] = column
        return found.reshape(count, width, *column.shape[1:])

    there = np.zeros(count * width, dtype=np.bool_)
    there[places] = True
    positions = np.zeros(count * width, dtype=np.int64)
    positions[places] = ranges(np.zeros(count, dtype=np.int64), lengths)
    return Padded(
        **batch.each(put),
        attention_mask=there.reshape(count, width),
        position_ids=positions.reshape(count, width),
        segments=np.arange(count),
    )


def _row(batch: Batch, plan: Sequence[int], length: int, pad: int | None) -> Row:
    segments = np.array(plan, dtype=np.int64)
    lengths = batch.lengths[segments]
    tokens = int(lengths.sum())
    # A row of nothing still goes through the model where other ranks have rows: it needs a place.
    padding = max(0, length - tokens) if pad is not None else int(not tokens)
    places = ranges(batch.offsets[segments], lengths)

    def put(name: str, column: Array) -> Array:
        fill: Any = (pad or 0) if name == "tokens" else EMPTY.get(name, 0)
        found = np.full((tokens + padding, *column.shape[1:]), fill, dtype=column.dtype)
        found[:tokens] = column[places]
        return found

    documents = np.append(lengths, padding) if padding else lengths
    return Row(
        **batch.each(put),
        position_ids=ranges(np.zeros(len(documents), dtype=np.int64), documents),
        cu_seqlens=starts(documents).astype(np.int32),
        seq_idx=np.repeat(np.arange(len(documents), dtype=np.int32), documents),
        max_seqlen=int(documents.max(initial=0)),
        segments=segments,
        padding=padding,
    )


def _dealt(sizes: Sequence[int], hands: int, at_most: int | None = None) -> list[list[int]]:
    """Numbers of the sizes for each hand: the largest first, to the hand that has least and may have more."""
    dealt: list[list[int]] = [[] for _ in range(hands)]
    least = [(0, hand) for hand in range(hands)]
    heapify(least)
    for one in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        total, hand = least[0]
        dealt[hand].append(one)
        full = at_most is not None and len(dealt[hand]) == at_most
        heapreplace(least, (2**62 if full else total + sizes[one], hand))
    return [sorted(mine) for mine in dealt]


def _whole_number(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
