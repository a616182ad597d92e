"""Which logit is about which token, and who may look at whom.

A model's logits at place t are about the token at t + 1. Everything in a batch stands at the token it is about; a
loss is computed where the logits are.

Promises:
- a target is never a token of another document;
- every trained token is the target of exactly one place.
"""

from typing import Any, Final

import msgspec
import numpy as np

from rookery.training.columns import EMPTY, Array, Bool, Float32, Int32, Int64
from rookery.training.packing import Padded, Row

IGNORE: Final = -100
"""The label that losses pass over, by convention."""


class Targets(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """At each place what its logits are about: the next token of the same document, if it trains."""

    labels: Int64
    """The token's id; -100 where there is none that trains."""
    mask: Bool
    logprobs: Float32
    versions: Int32
    advantages: Float32
    weights: Float32


def targets(form: Row | Padded) -> Targets:
    """The columns moved to the places of the logits: one to the left."""

    def moved(name: str, column: Array) -> Array:
        found = np.full(column.shape, EMPTY[name], dtype=column.dtype)
        found[..., :-1] = column[..., 1:]
        return found

    # The first token of a document never trains, so nothing crosses from one document into another.
    columns: dict[str, Any] = {name: moved(name, getattr(form, name)) for name in EMPTY}
    labels = np.full(form.tokens.shape, IGNORE, dtype=np.int64)
    labels[..., :-1] = np.where(form.mask[..., 1:], form.tokens[..., 1:], IGNORE)
    return Targets(labels=labels, **columns)


def attention(seq_idx: Int32) -> Bool:
    """Who may look at whom in a row: [places, places], True where the place of the row sees that of the column.

    For attention that takes a mask and knows nothing of documents. It grows with the square of the row.
    """
    places = np.arange(len(seq_idx))
    return np.asarray((seq_idx[:, None] == seq_idx[None, :]) & (places[:, None] >= places[None, :]))
