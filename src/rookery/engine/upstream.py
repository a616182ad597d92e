"""The policy's upstream as a trainer sees it: held back, given new weights, let go on.

    async with engine.upstream.sync(version, load):
        pass

Promises:
- `sync` resumes on every path: with the new version where the load went well, else with the one before;
- callers of the model see nothing but latency; no consumer of groups ends because of a pause;
- every wait is bounded; asking twice is fine; nobody ends the pause of another;
- a `sync` whose pause ended at its deadline says so: what was sampled since then may be of either weights.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rookery.core import RookeryError, UsageError
from rookery.upstreams.pause import run_load
from rookery.upstreams.protocol import PauseMode

DEADLINE = 1800.0
"""Seconds after which a pause that nobody ended is over."""


class Holding(Protocol):
    """Who holds model calls back."""

    @property
    def version(self) -> int: ...

    async def pause(
        self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = ""
    ) -> None: ...

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """Whether the holder still had a pause."""
        ...


class EngineUpstream:
    """`engine.upstream`."""

    def __init__(self, holding: Callable[[], Holding]) -> None:
        self._holding = holding

    @property
    def version(self) -> int:
        """Of the policy, as of the last resume that said one."""
        return self._holding().version

    async def pause(
        self, mode: PauseMode = "drain", *, timeout: float = 60.0, deadline: float | None = DEADLINE
    ) -> None:
        """Nothing is admitted any more and model calls are held back; returns when that is so everywhere.

        Calls under way are kept frozen in the engine (`keep`), finished first, those not done after `timeout`
        seconds aborted (`drain`), or aborted and, after the resume, continued from what they have (`abort`). Each
        pause wants its `resume`; without one, work goes on at the `deadline`, with an event that says so.
        """
        await self.hold(mode, timeout, deadline, "")

    async def hold(self, mode: PauseMode, timeout: float, deadline: float | None, holder: str) -> None:
        """A pause that only this holder ends."""
        if mode not in ("keep", "drain", "abort"):
            raise UsageError(f"there is no pause mode {mode!r}; there is keep, drain and abort")
        if not timeout > 0 or (deadline is not None and not deadline > 0):
            raise UsageError("the timeout and the deadline of a pause are above 0 seconds")
        await self._holding().pause(mode, timeout=timeout, deadline=deadline, holder=holder)

    async def resume(self, version: int | None = None) -> None:
        """Ends one pause. From then on the policy's turns carry `version`, where one is given."""
        await self._holding().resume(version)

    @asynccontextmanager
    async def sync(
        self,
        version: int,
        load: Callable[[], Any] | None = None,
        *,
        mode: PauseMode = "abort",
        timeout: float = 60.0,
        deadline: float | None = DEADLINE,
    ) -> AsyncIterator[None]:
        """A weight sync: pauses, calls `load`, and resumes with `version` after the block.

        A `load` that is no coroutine function runs in a thread. One that is not done at the pause's deadline is
        given up."""
        holder = secrets.token_hex(8)
        until = None if deadline is None else asyncio.get_running_loop().time() + deadline
        await self.hold(mode, timeout, deadline, holder)
        done: int | None = None
        held = False
        try:
            if load is not None:
                await run_load(load, until, "the policy")
            yield
            done = version
        finally:
            held = await self._holding().resume(done, holder)
        if not held:
            raise overdue(deadline)


def overdue(deadline: float | None) -> RookeryError:
    """What a weight sync says that took too long."""
    return RookeryError(
        f"the pause for the weight sync ended at its deadline of {deadline or DEADLINE:g} seconds, before it was "
        "resumed: calls since then may have been answered by either weights; give it a longer deadline"
    )
