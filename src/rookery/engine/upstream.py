"""`engine.upstream`: pause model calls, load new weights into the policy's servers, and resume.

Runs in the supervisor's process or, through `RemoteEngine`, in a client.

    async with engine.upstream.sync(version, load):
        pass

- `sync` always resumes: with the new version if the load succeeded, else with the previous one.
- A pause delays model calls and does not fail them. No stream of groups ends because of a pause.
- Every wait is bounded. Pauses nest, and a holder can end only its own pause.
- If a pause ends at its deadline, `sync` raises: later tokens may come from the old or the new weights.
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
"""Default deadline of a pause in seconds, after which model calls resume without `resume`."""


class Pausable(Protocol):
    """Pauses the model calls of a run. Implemented by the supervisor's coordinator and by `RemoteEngine`."""

    @property
    def version(self) -> int: ...

    async def pause(
        self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = ""
    ) -> None: ...

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """End a pause of this holder. Return False if it had already ended."""
        ...


class EngineUpstream:
    """The model servers of the policy, as `engine.upstream` exposes them to a trainer."""

    def __init__(self, pausable: Callable[[], Pausable]) -> None:
        self._pausable = pausable

    @property
    def version(self) -> int:
        """The policy version that the last `resume` with a version set."""
        return self._pausable().version

    async def pause(
        self, mode: PauseMode = "drain", *, timeout: float = 60.0, deadline: float | None = DEADLINE
    ) -> None:
        """Stop admission and model calls. Return when no call is running in any process.

        `mode` decides about running calls. `keep` freezes them in the inference engine. `drain` lets them finish
        and aborts those that still run after `timeout` seconds. `abort` aborts them and, after the resume,
        continues each from the tokens that it has. Each pause needs a `resume`; otherwise model calls resume at
        the `deadline` and an event is recorded.
        """
        await self.hold(mode, timeout, deadline, "")

    async def hold(self, mode: PauseMode, timeout: float, deadline: float | None, holder: str) -> None:
        """Pause like `pause`. Only a `resume` of the same holder, or the deadline, ends it."""
        if mode not in ("keep", "drain", "abort"):
            raise UsageError(f"unknown pause mode {mode!r}: use keep, drain or abort")
        if not timeout > 0 or (deadline is not None and not deadline > 0):
            raise UsageError(
                f"the timeout and the deadline of a pause must be above 0 seconds, not {timeout} and {deadline}"
            )
        await self._pausable().pause(mode, timeout=timeout, deadline=deadline, holder=holder)

    async def resume(self, version: int | None = None) -> None:
        """End one pause. Later turns of the policy are recorded with `version`, unless it is None."""
        await self._pausable().resume(version)

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
        """Pause, call `load` to update the weights, and resume with `version` after the block.

        A `load` that is not a coroutine function runs in a thread. A `load` that is still running at the deadline
        is abandoned.
        """
        holder = secrets.token_hex(8)
        until = None if deadline is None else asyncio.get_running_loop().time() + deadline
        await self.hold(mode, timeout, deadline, holder)
        done: int | None = None
        try:
            if load is not None:
                await run_load(load, until, "the policy")
            yield
            done = version
        finally:
            still_held = await self._pausable().resume(done, holder)
        if not still_held:
            raise pause_expired_error(deadline)


def pause_expired_error(deadline: float | None) -> RookeryError:
    """Return the error of a weight sync whose pause ended before it was done."""
    return RookeryError(
        f"the pause for the weight sync ended at its deadline of {deadline or DEADLINE:g} seconds, before the "
        "sync was done: later replies may come from the old or the new weights; set a longer `deadline`"
    )
