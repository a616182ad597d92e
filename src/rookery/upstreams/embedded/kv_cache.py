"""KV cache of running sequences, and a prefix cache of finished ones.

Sequences are grouped into buckets by their attention span (length rounded up), so that batches need no padding.
The rows of a bucket are used without gaps, so that a step works on array views and copies nothing. Memory is
bounded by the slots of the batch and by the number of blocks in the prefix cache. Cached keys and values are
bit-identical to computed ones, because rows are computed independently of each other.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Generic, TypeVar

import numpy as np

from rookery.upstreams.embedded.llama import Floats, Ints, Llama

T = TypeVar("T")
BLOCK: Final = 16
"""Positions per block of the prefix cache."""


class CacheBucket(Generic[T]):
    """KV cache of the sequences with the same number of allocated positions (`span`), one row per sequence.

    The span of a sequence is its length rounded up. Attention is computed over the whole span; a mask hides the
    positions that are not used yet.
    """

    def __init__(self, llama: Llama, span: int) -> None:
        self._llama = llama
        self.span = span
        self.sequences: list[T] = []
        self.positions: Ints = np.zeros(0, dtype=np.int64)
        """Number of positions that are stored in each row, which is the index of the next one."""
        self.keys: Floats = np.zeros(0, dtype=np.float32)
        self.values: Floats = self.keys
        self.mask: Floats = self.keys
        self._grow(8)

    def _grow(self, rows: int) -> None:
        shape = self._llama.shape
        used = len(self.sequences)
        layers, kv, dim = shape.num_hidden_layers, self._llama.kv, self._llama.dim
        # Unwritten values must be finite. The kernel maps zero pages on demand, so unused rows cost no memory.
        keys: Floats = np.zeros((layers, rows, kv, dim, self.span), dtype=np.float32)
        values: Floats = np.zeros((layers, rows, kv, self.span, dim), dtype=np.float32)
        mask: Floats = np.full((rows, 1, 1, self.span), -np.inf, dtype=np.float32)
        positions = np.zeros(rows, dtype=np.int64)
        if used:
            keys[:, :used], values[:, :used] = self.keys[:, :used], self.values[:, :used]
            mask[:used], positions[:used] = self.mask[:used], self.positions[:used]
        self.keys, self.values, self.mask, self.positions = keys, values, mask, positions

    def add(self, item: T) -> int:
        """Add a row for an empty sequence and return its index."""
        row = len(self.sequences)
        if row == len(self.positions):
            self._grow(4 * row)
        self.sequences.append(item)
        self.positions[row] = 0
        self.mask[row] = -np.inf
        return row

    def extend(self, row: int, positions: int) -> None:
        """Mark the next `positions` positions of a row as stored and visible to attention."""
        first = self.positions[row]
        self.mask[row, 0, 0, first : first + positions] = 0.0
        self.positions[row] = first + positions

    def remove(self, row: int) -> T:
        """Remove the sequence in a row and return it. The last row is moved to its place."""
        last = len(self.sequences) - 1
        removed = self.sequences[row]
        if row != last:
            self._copy(self, last, row)
            self.sequences[row] = self.sequences[last]
        self.sequences.pop()
        return removed

    def move(self, row: int, other: "CacheBucket[T]") -> None:
        """Move a sequence to a bucket with a longer span."""
        there = other.add(self.sequences[row])
        other._copy(self, row, there)
        self.remove(row)

    def _copy(self, source: "CacheBucket[T]", row: int, there: int) -> None:
        length = int(source.positions[row])
        self.keys[:, there, ..., :length] = source.keys[:, row, ..., :length]
        self.values[:, there, :, :length] = source.values[:, row, :, :length]
        self.mask[there, ..., :length] = 0.0
        self.mask[there, ..., length:] = -np.inf
        self.positions[there] = length


class CacheBlock:
    """Keys and values of `BLOCK` positions in all layers."""

    def __init__(self, keys: Floats, values: Floats) -> None:
        self.keys = keys
        self.values = values


class PrefixCache:
    """Cache of the keys and values of earlier sequences, in blocks of `BLOCK` positions.

    A block is found by a hash of all tokens from the start of the sequence to the end of the block. At most
    `blocks` are kept; the least recently used one is evicted.
    """

    def __init__(self, blocks: int) -> None:
        self.max_blocks = blocks
        self._blocks: OrderedDict[bytes, CacheBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int]) -> list[CacheBlock]:
        """Return the cached blocks for the longest possible prefix of `tokens`, in order.

        The prefix never includes the last token, which must be computed because its logits are needed.
        """
        found: list[CacheBlock] = []
        for name in hash_blocks(tokens, (len(tokens) - 1) // BLOCK):
            block = self._blocks.get(name)
            if block is None:
                break
            self._blocks.move_to_end(name)
            found.append(block)
        return found

    def store(self, tokens: Sequence[int], bucket: CacheBucket[T], row: int) -> None:
        """Store copies of the keys and values of a row of `bucket`, in blocks of `BLOCK` tokens.

        `tokens` are the tokens at the row's positions. An incomplete last block is not stored.
        """
        if not self.max_blocks:
            return
        for number, name in enumerate(hash_blocks(tokens, len(tokens) // BLOCK)):
            if name in self._blocks:
                self._blocks.move_to_end(name)
                continue
            at = slice(number * BLOCK, (number + 1) * BLOCK)
            self._blocks[name] = CacheBlock(
                bucket.keys[:, row, ..., at].copy(), bucket.values[:, row, :, at].copy()
            )
            if len(self._blocks) > self.max_blocks:
                self._blocks.popitem(last=False)


def hash_blocks(tokens: Sequence[int], blocks: int) -> list[bytes]:
    """Return a hash for each of the first `blocks` blocks, computed from all tokens up to the end of the block."""
    data = np.asarray(tokens[: blocks * BLOCK], dtype="<i4").tobytes()
    found: list[bytes] = []
    name = b""
    for at in range(0, len(data), 4 * BLOCK):
        name = blake2b(name + data[at : at + 4 * BLOCK], digest_size=16).digest()
        found.append(name)
    return found
