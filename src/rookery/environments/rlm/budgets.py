"""What a whole tree of model calls may use: a ledger that the root and every sub-model share.

Promises:
- no call below the root begins without a place in the count of calls, its depth, and a grant of tokens;
- grants that are out and tokens that were sampled are together never more than the budget, however many calls
  overlap; what a call did not use comes back;
- a tenth of the tokens is the root's alone, so that a tree that spent its budget can still answer;
- a call waits for tokens only while others hold some that may come back; else it is refused, in words.
"""

import asyncio
from typing import Any

import msgspec

RESERVE = 10
"""One part in so many is the root's."""


class BudgetSpent(Exception):  # noqa: N818  (the policy's doing, told to it in words)
    """The tree may not do that any more."""


class CallFailed(Exception):  # noqa: N818  (as above)
    """One sub-call gave no answer; others may."""


class TreeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rollout, all levels together."""

    calls: int
    """Model calls below the root."""
    depth: int
    """Levels below the root."""
    tokens: int | None = None
    """Sampled, the root's included."""


class Ledger:
    """Counts; belongs to one loop."""

    def __init__(self, limits: TreeLimits) -> None:
        self.limits = limits
        self.calls = 0
        self.tokens = 0
        self.held = 0
        self.deepest = 0
        self._waiting: list[asyncio.Future[None]] = []

    def call(self, depth: int) -> None:
        """Counts one call at this depth, or refuses it."""
        limits = self.limits
        if depth > limits.depth:
            raise BudgetSpent(f"sub-calls may go {limits.depth} deep, and this would be {depth}")
        if self.calls >= limits.calls:
            raise BudgetSpent(f"all {limits.calls} sub-calls of this task are used")
        self.calls += 1
        self.deepest = max(self.deepest, depth)

    async def grant(self, wanted: int | None, *, root: bool = False) -> int | None:
        """Tokens that one call may sample; None: as many as it likes. To be settled on every path."""
        most = self.limits.tokens
        if most is None:
            return wanted
        spare = 0 if root else most // RESERVE
        while True:
            room = most - spare - self.tokens - self.held
            whole = room if wanted is None else wanted
            if 0 < whole <= room or (room > 0 and not self.held):
                given = min(whole, room)
                self.held += given
                return given
            if not self.held:
                raise BudgetSpent(
                    f"the {most} tokens of this task are used, but for those that are left for the final answer"
                    if spare
                    else f"all {most} tokens of this task are used"
                )
            back = asyncio.get_running_loop().create_future()
            self._waiting.append(back)
            await back

    def settle(self, granted: int | None, used: int) -> None:
        """A call with this grant is over."""
        self.tokens += used
        if self.limits.tokens is None:
            return
        self.held -= granted or 0
        waiting, self._waiting = self._waiting, []
        for back in waiting:
            if not back.done():
                back.set_result(None)

    @property
    def tokens_left(self) -> int | None:
        """For sub-calls."""
        most = self.limits.tokens
        return None if most is None else max(0, most - most // RESERVE - self.tokens - self.held)

    def left(self, depth: int, seconds: float) -> dict[str, Any]:
        """For a model at this depth."""
        found: dict[str, Any] = {
            "calls_left": self.limits.calls - self.calls,
            "depth_left": self.limits.depth - depth,
        }
        if self.tokens_left is not None:
            found["tokens_left"] = self.tokens_left
        if seconds < 1e9:
            found["seconds_left"] = round(seconds, 1)
        return found
