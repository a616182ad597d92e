"""The budget of one tree of model calls, shared by the root model and all sub-models of a rollout.

Before a call, tokens are reserved for it; afterwards, unused tokens are returned. The tokens reserved for running
calls and the tokens already sampled never exceed the budget together, however many calls run at the same time. A
tenth of the tokens is kept for the root, so that it can still answer when sub-calls have used the rest. If there
are not enough tokens, a call waits while running calls may return some; otherwise it is refused.
"""

import asyncio
from typing import Any

import msgspec

ROOT_RESERVE_DIVISOR = 10
"""The token limit divided by this number is reserved for the root."""


class BudgetExhausted(Exception):  # noqa: N818  (an observation for the model)
    """Raised if a limit for the whole tree of model calls is reached. The message is meant for the model."""


class CallFailed(Exception):  # noqa: N818  (an observation for the model)
    """Raised if one call of a sub-model or a tool failed. The message is meant for the model."""


class TreeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one rollout's tree of model calls, for all levels together."""

    calls: int
    """Maximum number of model calls below the root."""
    depth: int
    """Maximum number of levels below the root."""
    tokens: int | None = None
    """Maximum number of sampled tokens, including the root's."""


class TreeBudget:
    """Counts the model calls and tokens of one rollout against `TreeLimits`. Not thread-safe."""

    def __init__(self, limits: TreeLimits) -> None:
        self.limits = limits
        self.calls = 0
        self.tokens = 0
        self.reserved = 0
        """Tokens reserved for running calls."""
        self.deepest = 0
        """Largest depth of a call so far; the root's calls have depth 0."""
        self._waiting: list[asyncio.Future[None]] = []

    def call(self, depth: int) -> None:
        """Count one call of a sub-model at this depth (1 if the root makes it), or raise `BudgetExhausted`."""
        limits = self.limits
        if depth > limits.depth:
            raise BudgetExhausted(f"sub-calls may go {limits.depth} deep, and this would be {depth}")
        if self.calls >= limits.calls:
            raise BudgetExhausted(f"all {limits.calls} sub-calls of this task are used")
        self.calls += 1
        self.deepest = max(self.deepest, depth)

    async def grant(self, wanted: int | None, *, root: bool = False) -> int | None:
        """Reserve tokens for a model call and return how many it may sample; None means no limit.

        `wanted` is the number that the call asks for; None means as many as possible. May wait until running calls
        return tokens. Raise `BudgetExhausted` if none are left. The caller must pass the result to `release`, also
        if the call fails.
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
        """End the reservation `granted`, the result of `grant`, and count the tokens that the call sampled."""
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
        """Tokens that sub-models can still sample, or None if there is no limit."""
        limit = self.limits.tokens
        if limit is None:
            return None
        return max(0, limit - limit // ROOT_RESERVE_DIVISOR - self.tokens - self.reserved)

    def left(self, depth: int, seconds: float) -> dict[str, Any]:
        """Return what is left of the budget for a model at this depth, by name. `seconds` is the time left."""
        left: dict[str, Any] = {
            "calls_left": self.limits.calls - self.calls,
            "depth_left": self.limits.depth - depth,
        }
        if self.tokens_left is not None:
            left["tokens_left"] = self.tokens_left
        if seconds < 1e9:
            left["seconds_left"] = round(seconds, 1)
        return left
