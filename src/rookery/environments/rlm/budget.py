"""The budget of one tree of model calls, shared by the root and every sub-model.

Tokens granted to running calls and tokens already sampled never exceed the budget together, however many calls
overlap; unused tokens are returned. A tenth of the tokens is reserved for the root, so that it can still answer
when sub-calls have used the rest. A call waits for tokens only while running calls may return some; otherwise
it is refused.
"""

import asyncio
from typing import Any

import msgspec

RESERVE = 10
"""One part in this many is reserved for the root."""


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
        self.held = 0
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

        May wait until running calls return tokens. Call `settle` with the result on every path.
        """
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
                raise BudgetExhausted(
                    f"the {most} tokens of this task are used, but for those that are left for the final answer"
                    if spare
                    else f"all {most} tokens of this task are used"
                )
            back = asyncio.get_running_loop().create_future()
            self._waiting.append(back)
            await back

    def settle(self, granted: int | None, used: int) -> None:
        """Return a grant and count the tokens that the call used."""
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
        """Tokens left for sub-calls, or None if there is no limit."""
        most = self.limits.tokens
        return None if most is None else max(0, most - most // RESERVE - self.tokens - self.held)

    def left(self, depth: int, seconds: float) -> dict[str, Any]:
        """Return what is left for a model at this depth."""
        found: dict[str, Any] = {
            "calls_left": self.limits.calls - self.calls,
            "depth_left": self.limits.depth - depth,
        }
        if self.tokens_left is not None:
            found["tokens_left"] = self.tokens_left
        if seconds < 1e9:
            found["seconds_left"] = round(seconds, 1)
        return found
