"""Assign the slots of the KV cache to sequences, and find prompts whose beginning is already in the cache.

A slot keeps its tokens after its sequence has ended, until another sequence needs the slot. A prompt that
begins with the tokens of a slot (the next turn of a conversation, or another rollout of the same task) needs no
new keys and values for them. This module is plain code without torch.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

MIN_COPY: Final = 32
"""A common prefix is copied from another slot if it has at least this many tokens."""


class Assignment(NamedTuple):
    """The slot of a new sequence."""

    slot: int
    reused: int
    """Number of prompt tokens whose keys and values are in the cache."""
    source: int | None = None
    """The slot from which those keys and values have to be copied first; None if they are in `slot` already."""


class SlotTable:
    """The slots of a KV cache: the token IDs that each holds, and whether a sequence uses it."""

    def __init__(self, slots: int, context: int) -> None:
        self._tokens = np.zeros((slots, context), dtype=np.int32)
        self._lengths = np.zeros(slots, dtype=np.int64)
        """Number of tokens of each slot whose keys and values are computed and may be reused."""
        self._busy = np.zeros(slots, dtype=np.bool_)
        self._stale = np.zeros(slots, dtype=np.bool_)
        """Slots with keys and values that replaced weights computed. They serve only their own sequence."""
        self._last_use = np.zeros(slots, dtype=np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        """Number of slots that no sequence uses."""
        return int((~self._busy).sum())

    def assign(self, prompt: Sequence[int]) -> Assignment:
        """Take a free slot for a sequence. There must be one.

        At least the last token of the prompt is computed again, because its logits are needed.
        """
        wanted = np.asarray(prompt[:-1], dtype=np.int32)
        lengths = np.minimum(self._lengths, len(wanted))
        same = self._tokens[:, : len(wanted)] == wanted
        same &= np.arange(len(wanted)) < lengths[:, None]
        common = np.where(same.all(axis=1), len(wanted), same.argmin(axis=1)) if len(wanted) else lengths
        extends = ~self._busy & (common == self._lengths)
        best = int((2 * common + extends).argmax())
        reused = int(common[best])
        if reused and (extends[best] or (self.free == 1 and not self._busy[best])):
            return self._take(best, prompt, Assignment(best, reused))
        if reused < MIN_COPY:
            return self._take(target := self._choose(), prompt, Assignment(target, 0))
        target = self._choose(avoid=best)
        return self._take(target, prompt, Assignment(target, reused, best))

    def _choose(self, avoid: int = -1) -> int:
        """Return a free slot: the first empty one, because low slots make small batches, else the least recently
        used one."""
        free = [slot for slot in np.flatnonzero(~self._busy).tolist() if slot != avoid]
        return min(free, key=lambda slot: (self._lengths[slot] > 0, self._last_use[slot], slot))

    def _take(self, slot: int, prompt: Sequence[int], assignment: Assignment) -> Assignment:
        self._busy[slot] = True
        self._stale[slot] = False
        self._tokens[slot, : len(prompt)] = prompt
        self._lengths[slot] = assignment.reused
        self._use(slot)
        return assignment

    def extend(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Record that one token of each slot was computed, at the given position."""
        self._tokens[slots, positions] = tokens
        self.set_lengths(slots, [position + 1 for position in positions])

    def set_lengths(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Record how many tokens of each slot are computed."""
        self._lengths[slots] = np.where(self._stale[slots], 0, lengths)

    def release(self, slot: int) -> None:
        """Give back the slot of a sequence that has ended. Its tokens stay in the cache."""
        self._busy[slot] = False
        self._use(slot)

    def invalidate(self) -> None:
        """Forget all cached tokens, because the weights have changed. Running sequences keep theirs."""
        self._lengths[:] = 0
        self._stale[:] = self._busy

    def _use(self, slot: int) -> None:
        self._clock += 1
        self._last_use[slot] = self._clock
