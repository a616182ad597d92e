"""`engine.upstream`: pause model calls, load new weights into the policy's servers, and resume.

Runs in the supervisor's process or, through `RemoteEngine`, in a client.

    async with engine.upstream.sync(version, load):
        pass

- `sync` always resumes: with the new policy version if loading succeeded, else with the previous one.
- A pause delays model calls and does not fail them. No stream of groups ends because of a pause.
- A pause ends at its deadline, unless the deadline is None. Pauses nest: model calls resume when the last pause
  ends. A pause is identified by its holder, and a holder can end only its own pause.
- If a pause ends at its deadline, `sync` raises: later tokens may come from the old or the new weights.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rookery.core import RookeryError, UsageError
from rookery.engine.config import refuse_cached_training
from rookery.upstreams.pause import run_load
from rookery.upstreams.protocol import PauseMode

DEADLINE = 1800.0
"""Default deadline of a pause in seconds, after which model calls resume without `resume`."""


class Pausable(Protocol):
    """Pauses the model calls of a run. Implemented by `PauseCoordinator` and by `RemoteEngine`."""

    @property
    def version(self) -> int: ...

    async def pause(
        self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = ""
    ) -> None: ...

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """End the pause of `holder`, and set the policy version unless it is None.

        Return False if the pause had already ended.
        """
        ...


class EngineUpstream:
    """The policy's upstream, as `engine.upstream` exposes it to a trainer."""

    def __init__(self, pausable: Callable[[], Pausable], *, cache: str = "") -> None:
        """Control `pausable`. `cache` is the run's cache of replies, with which new weights are refused."""
        self._pausable = pausable
        self._cache = cache

    @property
    def version(self) -> int:
        """The current policy version, as set by the last `resume` or `sync`."""
        return self._pausable().version

    async def pause(
        self, mode: PauseMode = "drain", *, timeout: float = 60.0, deadline: float | None = DEADLINE
    ) -> None:
        """Start no more rollouts and no more model calls. Return when every process has confirmed the pause.

        `mode` decides what happens to model calls in progress. `keep` freezes them in the inference engine.
        `drain` lets them finish and aborts those that are not done after `timeout` seconds. `abort` aborts them
        and, after the resume, continues each from the tokens that it has. Each pause needs a `resume`. Without it,
        model calls resume after `deadline` seconds and an event is recorded; None means no deadline.
        """
        await self.hold(mode, timeout, deadline, "")

    async def hold(self, mode: PauseMode, timeout: float, deadline: float | None, holder: str) -> None:
        """Pause like `pause`. Only a `resume` with the same `holder`, or the deadline, ends the pause.

        Raise `UsageError` if the mode, the timeout or the deadline is not valid.
        """
        if mode not in ("keep", "drain", "abort"):
            raise UsageError(f"unknown pause mode {mode!r}: use keep, drain or abort")
        if not timeout > 0 or (deadline is not None and not deadline > 0):
            raise UsageError(
                f"the timeout and the deadline of a pause must be above 0 seconds, not {timeout} and {deadline}"
            )
        await self._pausable().pause(mode, timeout=timeout, deadline=deadline, holder=holder)

    async def resume(self, version: int | None = None) -> None:
        """End one pause that `pause` started. From now on, model calls of the policy are recorded with `version`.

        If `version` is None, the policy version does not change.
        """
        if version is not None:
            refuse_cached_training(self._cache)
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
        """Pause model calls, call `load` to update the weights, and resume with `version` after the block.

        A `load` that is not a coroutine function is called in a thread. If `load` is not done at the deadline, it
        is no longer awaited. If `load` or the block raises, model calls resume with the previous version.
        """
        refuse_cached_training(self._cache)
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
    """Return the error for a weight sync whose pause ended at its deadline, before the sync was done."""
    return RookeryError(
        f"the pause for the weight sync ended at its deadline of {deadline or DEADLINE:g} seconds, before the "
        "sync was done: later replies may come from the old or the new weights; set a longer `deadline`"
    )
