"""The policy's upstream as a trainer sees it: held back, given new weights, let go on.

    async with engine.upstream.sync(version, load):
        pass

Promises:
- `sync` resumes on every path: with the new version where the load went well, else with the one before;
- callers of the model see nothing but latency; no consumer of groups ends because of a pause;
- every wait is bounded; asking twice is fine.
"""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rookery.core import UsageError
from rookery.upstreams.protocol import PauseMode

DEADLINE = 1800.0
"""Seconds after which a pause that nobody ended is over."""


class Holding(Protocol):
    """Who holds model calls back."""

    version: int

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None) -> None: ...

    async def resume(self, version: int | None) -> None: ...


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
        if mode not in ("keep", "drain", "abort"):
            raise UsageError(f"there is no pause mode {mode!r}; there is keep, drain and abort")
        if not timeout > 0 or (deadline is not None and not deadline > 0):
            raise UsageError("the timeout and the deadline of a pause are above 0 seconds")
        await self._holding().pause(mode, timeout=timeout, deadline=deadline)

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
        """A weight sync: pauses, calls `load` (plain or async), and resumes with `version` after the block."""
        await self.pause(mode, timeout=timeout, deadline=deadline)
        done: int | None = None
        try:
            if load is not None:
                loading = load()
                if inspect.isawaitable(loading):
                    await loading
            yield
            done = version
        finally:
            await self.resume(done)
