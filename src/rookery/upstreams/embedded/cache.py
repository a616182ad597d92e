"""What a model remembers of its sequences: keys and values, on shelves by length, and of those that went before.

Promises:
- the rows of a shelf are in use from the first without a gap, so that a step works on views and copies nothing;
- memory is bounded: by the places of a batch, and by the blocks that past sequences may leave behind;
- what is found again is what would have been computed, to the last bit, since rows know nothing of each other.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Generic, TypeVar

import numpy as np

from rookery.upstreams.embedded.llama import Floats, Ints, Llama

T = TypeVar("T")
BLOCK: Final = 16
"""Positions that are kept and found again together."""


class Shelf(Generic[T]):
    """Sequences whose next position is looked at over the same span, in rows."""

    def __init__(self, llama: Llama, span: int) -> None:
        self._llama = llama
        self.span = span
        self.held: list[T] = []
        self.positions: Ints = np.zeros(0, dtype=np.int64)
        """Of each row: how many positions it has, which is where its next one goes."""
        self.keys: Floats = np.zeros(0, dtype=np.float32)
        self.values: Floats = self.keys
        self.mask: Floats = self.keys
        self._grow(8)

    def _grow(self, rows: int) -> None:
        shape = self._llama.shape
        used = len(self.held)
        layers, kv, dim = shape.num_hidden_layers, self._llama.kv, self._llama.dim
        # Zeros, which the kernel gives page by page: what was never written must be finite, and costs nothing.
        keys: Floats = np.zeros((layers, rows, kv, dim, self.span), dtype=np.float32)
        values: Floats = np.zeros((layers, rows, kv, self.span, dim), dtype=np.float32)
        mask: Floats = np.full((rows, 1, 1, self.span), -np.inf, dtype=np.float32)
        positions = np.zeros(rows, dtype=np.int64)
        if used:
            keys[:, :used], values[:, :used] = self.keys[:, :used], self.values[:, :used]
            mask[:used], positions[:used] = self.mask[:used], self.positions[:used]
        self.keys, self.values, self.mask, self.positions = keys, values, mask, positions

    def add(self, item: T) -> int:
        """A row for an empty sequence."""
        row = len(self.held)
        if row == len(self.positions):
            self._grow(4 * row)
        self.held.append(item)
        self.positions[row] = 0
        self.mask[row] = -np.inf
        return row

    def extend(self, row: int, positions: int) -> None:
        """The row has so many positions more, which its next ones may look at."""
        first = self.positions[row]
        self.mask[row, 0, 0, first : first + positions] = 0.0
        self.positions[row] = first + positions

    def remove(self, row: int) -> T:
        """Takes a sequence out; the last one takes its row."""
        last = len(self.held) - 1
        gone = self.held[row]
        if row != last:
            self._copy(self, last, row)
            self.held[row] = self.held[last]
        self.held.pop()
        return gone

    def move(self, row: int, other: "Shelf[T]") -> None:
        """To a longer shelf."""
        there = other.add(self.held[row])
        other._copy(self, row, there)
        self.remove(row)

    def _copy(self, source: "Shelf[T]", row: int, there: int) -> None:
        length = int(source.positions[row])
        self.keys[:, there, ..., :length] = source.keys[:, row, ..., :length]
        self.values[:, there, :, :length] = source.values[:, row, :, :length]
        self.mask[there, ..., :length] = 0.0
        self.mask[there, ..., length:] = -np.inf
        self.positions[there] = length


class Block:
    """Keys and values of `BLOCK` positions, all layers."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: Floats, values: Floats) -> None:
        self.keys = keys
        self.values = values


class Past:
    """Blocks of earlier sequences, found by the tokens up to their end. The oldest unused go first."""

    def __init__(self, blocks: int) -> None:
        self.most = blocks
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, tokens: Sequence[int]) -> list[Block]:
        """The blocks that `tokens` begins with. Not the last token's: its logits are still wanted."""
        found: list[Block] = []
        for name in names(tokens, (len(tokens) - 1) // BLOCK):
            block = self._blocks.get(name)
            if block is None:
                break
            self._blocks.move_to_end(name)
            found.append(block)
        return found

    def keep(self, tokens: Sequence[int], shelf: Shelf[T], row: int) -> None:
        """Copies of the row's whole blocks; `tokens` are those it has positions of."""
        if not self.most:
            return
        for number, name in enumerate(names(tokens, len(tokens) // BLOCK)):
            if name in self._blocks:
                self._blocks.move_to_end(name)
                continue
            at = slice(number * BLOCK, (number + 1) * BLOCK)
            self._blocks[name] = Block(shelf.keys[:, row, ..., at].copy(), shelf.values[:, row, :, at].copy())
            if len(self._blocks) > self.most:
                self._blocks.popitem(last=False)


def names(tokens: Sequence[int], blocks: int) -> list[bytes]:
    """One name for each block, made of every token up to its end."""
    data = np.asarray(tokens[: blocks * BLOCK], dtype="<i4").tobytes()
    found: list[bytes] = []
    name = b""
    for at in range(0, len(data), 4 * BLOCK):
        name = blake2b(name + data[at : at + 4 * BLOCK], digest_size=16).digest()
        found.append(name)
    return found
