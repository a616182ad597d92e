"""Shift the per-token columns of a batch so that they are aligned with logits, and make attention masks.

The logits at position t predict the token at t + 1. All columns of a batch are aligned with tokens, while a
loss is computed at the positions of the logits.

Guarantees:
- A target is never a token of another sequence.
- Every trained token is the target of exactly one position.
"""

from typing import Any, Final

import msgspec
import numpy as np

from rookery.training.columns import EMPTY, Array, Bool, Float32, Int32, Int64
from rookery.training.packing import PackedRow, PaddedBatch

IGNORE: Final = -100
"""The label that loss functions ignore by convention, as in PyTorch's `cross_entropy`."""


class Targets(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Columns aligned with logits: at each position, the values of the next token of the same sequence."""

    labels: Int64
    """ID of the token that the position predicts; -100 if that token does not train."""
    mask: Bool
    logprobs: Float32
    versions: Int32
    advantages: Float32
    weights: Float32


def make_targets(form: PackedRow | PaddedBatch) -> Targets:
    """Return the columns of a packed row or padded batch, shifted left by one to align them with logits."""

    def moved(name: str, column: Array) -> Array:
        shifted = np.full(column.shape, EMPTY[name], dtype=column.dtype)
        shifted[..., :-1] = column[..., 1:]
        return shifted

    # The first token of a sequence never trains, so no value crosses a sequence boundary.
    columns: dict[str, Any] = {name: moved(name, getattr(form, name)) for name in EMPTY}
    labels = np.full(form.tokens.shape, IGNORE, dtype=np.int64)
    labels[..., :-1] = np.where(form.mask[..., 1:], form.tokens[..., 1:], IGNORE)
    return Targets(labels=labels, **columns)


def make_attention_mask(seq_idx: Int32) -> Bool:
    """Return a causal attention mask for a packed row, in which no sequence attends to another.

    `seq_idx` is the index of the sequence at each position. The mask has the shape [positions, positions] and is
    True where the position of the first axis may attend to that of the second. Use it for attention
    implementations that take a mask instead of sequence boundaries.
    """
    positions = np.arange(len(seq_idx))
    return np.asarray((seq_idx[:, None] == seq_idx[None, :]) & (positions[:, None] >= positions[None, :]))
