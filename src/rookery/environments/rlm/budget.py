"""The budget of one tree of model calls, shared by the root and every sub-model.

Tokens granted to running calls and tokens already sampled never exceed the budget together, however many calls
overlap; unused tokens are returned. A tenth of the tokens is reserved for the root, so that it can still answer
when sub-calls have used the rest. A call waits for tokens only while running calls may return some; otherwise
it is refused.
"""

import asyncio
from typing import Any

import msgspec

ROOT_RESERVE_DIVISOR = 10
"""The token limit divided by this number is reserved for the root."""


class BudgetExhausted(Exception):  # noqa: N818  (an observation for the model)
    """A limit of the whole tree is reached."""


class CallFailed(Exception):  # noqa: N818  (as above)
    """One sub-call or tool call failed."""


class TreeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one rollout, for all levels together."""

    calls: int
    """Maximum number of model calls below the root."""
    depth: int
    """Maximum number of levels below the root."""
    tokens: int | None = None
    """Maximum number of sampled tokens, including the root's."""


class TreeBudget:
    """Counts calls and tokens against `TreeLimits`. Not thread-safe."""

    def __init__(self, limits: TreeLimits) -> None:
        self.limits = limits
        self.calls = 0
        self.tokens = 0
        self.reserved = 0
        """Tokens granted to running calls."""
        self.deepest = 0
        self._waiting: list[asyncio.Future[None]] = []

    def call(self, depth: int) -> None:
        """Count one call at this depth, or raise `BudgetExhausted`."""
        limits = self.limits
        if depth > limits.depth:
            raise BudgetExhausted(f"sub-calls may go {limits.depth} deep, and this would be {depth}")
        if self.calls >= limits.calls:
            raise BudgetExhausted(f"all {limits.calls} sub-calls of this task are used")
        self.calls += 1
        self.deepest = max(self.deepest, depth)

    async def grant(self, wanted: int | None, *, root: bool = False) -> int | None:
        """Return how many tokens a call may sample; None means no limit.

        May wait until running calls return tokens. Call `release` with the result on every path.
        """
        limit = self.limits.tokens
        if limit is None:
            return wanted
        root_reserve = 0 if root else limit // ROOT_RESERVE_DIVISOR
        while True:
            available = limit - root_reserve - self.tokens - self.reserved
            request = available if wanted is None else wanted
            if 0 < request <= available or (available > 0 and not self.reserved):
                granted = min(request, available)
                self.reserved += granted
                return granted
            if not self.reserved:
                raise BudgetExhausted(
                    f"the {limit} tokens of this task are used, except those reserved for the final answer"
                    if root_reserve
                    else f"all {limit} tokens of this task are used"
                )
            returned = asyncio.get_running_loop().create_future()
            self._waiting.append(returned)
            await returned

    def release(self, granted: int | None, used: int) -> None:
        """Return a grant and count the tokens that the call used."""
        self.tokens += used
        if self.limits.tokens is None:
            return
        self.reserved -= granted or 0
        waiting, self._waiting = self._waiting, []
        for returned in waiting:
            if not returned.done():
                returned.set_result(None)

    @property
    def tokens_left(self) -> int | None:
        """Tokens left for sub-calls, or None if there is no limit."""
        limit = self.limits.tokens
        if limit is None:
            return None
        return max(0, limit - limit // ROOT_RESERVE_DIVISOR - self.tokens - self.reserved)

    def left(self, depth: int, seconds: float) -> dict[str, Any]:
        """Return what is left for a model at this depth."""
        left: dict[str, Any] = {
            "calls_left": self.limits.calls - self.calls,
            "depth_left": self.limits.depth - depth,
        }
        if self.tokens_left is not None:
            left["tokens_left"] = self.tokens_left
        if seconds < 1e9:
            left["seconds_left"] = round(seconds, 1)
        return left
