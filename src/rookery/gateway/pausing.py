"""The pause of a gateway's policy, in every shard, whoever was asked.

Promises:
- a pause or a resume that was answered holds in every shard that is alive, and in those that are born later;
- asking twice is fine; asking any shard is fine;
- a pause that fails in one shard, or whose asker goes away, is undone in all;
- the version that a resume names is kept: a restarted shard records with it;
- a pause that nobody ends is over at its deadline, also in a shard that was born during it;
- how long calls stood still is known over restarts: it is no time of a session's.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, cast, get_args

import msgspec

from rookery.core import RookeryError, UsageError
from rookery.core.errors import behind, describe
from rookery.gateway.http import Request
from rookery.gateway.registry import Registry
from rookery.upstreams.protocol import PauseMode
from rookery.upstreams.valve import Valve, ValveState

log = logging.getLogger("rookery.gateway")

DEADLINE: Final = 1800.0
"""Seconds after which a pause that says none is over."""
MAX_SECONDS: Final = 86_400.0
Tell: TypeAlias = Callable[[Request, float], Awaitable[None]]
"""Asks the other shards for the same, within so many seconds."""
SLACK: Final = 45.0
"""Beyond a pause's timeout: for the engine to abort or go on, and the answers of the shards."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard that starts must know."""

    version: int = 0
    mode: PauseMode | None = None
    until: float = 0.0
    """When the pause is over by itself, as a time of day."""
    since: float = 0.0
    """When it began, likewise."""
    stood: float = 0.0
    """Seconds of all pauses before it."""

    def stood_at(self, now: float) -> float:
        """Seconds of all pauses up to a time of day."""
        return self.stood + (max(0.0, min(now, self.until) - self.since) if self.mode is not None else 0.0)


def read(path: Path) -> Kept:
    """What was written last; something fresh where nothing was."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        return Kept()
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the gateway's state {path} cannot be read ({describe(error)}); remove it") from error


def kept(path: Path) -> ValveState:
    """The state for a valve that is made now."""
    found = read(path)
    left = found.until - time.time()
    if found.mode is None or left <= 0:
        return ValveState(version=found.version)
    return ValveState(mode=found.mode, version=found.version, left=left)


def keep(path: Path, state: Kept) -> None:
    """Whole or not at all, whenever we are killed."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        new.write_bytes(msgspec.json.encode(state))
        os.replace(new, path)  # noqa: PTH105
    except BaseException:
        new.unlink(missing_ok=True)
        raise


class Pausing:
    """Of one shard, which tells the others."""

    def __init__(self, valve: Valve, registry: Registry, path: Path, tell: Tell) -> None:
        self._valve = valve
        self._registry = registry
        self._path = path
        self._tell = tell
        self._tasks: set[asyncio.Task[None]] = set()

    async def pause(
        self, mode: str, timeout: float, deadline: float | None, request: Request | None = None
    ) -> dict[str, Any]:
        deadline = DEADLINE if deadline is None else deadline
        if mode not in get_args(PauseMode):
            raise UsageError(f"there is no pause mode {mode[:40]!r}; there is {', '.join(get_args(PauseMode))}")
        if not 0 < timeout <= MAX_SECONDS or not 0 < deadline <= MAX_SECONDS:
            raise UsageError("the timeout and the deadline of a pause are above 0 seconds and at most a day")
        wanted = cast("PauseMode", mode)
        now, before = time.time(), read(self._path)
        on = before.mode is not None and now < before.until
        until = max(now + deadline, before.until if on else 0.0)
        since = before.since if on else now
        stood = before.stood if on else before.stood_at(now)
        version = self._valve.version
        keep(self._path, Kept(version=version, mode=wanted, until=until, since=since, stood=stood))
        self._registry.hold()
        here = self._valve.pause(wanted, timeout=timeout, deadline=deadline)
        try:
            await self._here_and_there(request, here, timeout + SLACK)
        except BaseException:
            undone = asyncio.get_running_loop().create_task(self._undone(request))
            self._tasks.add(undone)
            undone.add_done_callback(self._tasks.discard)
            await asyncio.shield(undone)
            raise
        return self.state()

    async def _undone(self, request: Request | None) -> None:
        back = request and msgspec.structs.replace(request, path="/resume", body=b"{}")
        try:
            await self.resume(None, back)
        except RookeryError as error:
            log.error("a pause that failed could not be undone everywhere: %s", error)

    async def resume(self, version: int | None, request: Request | None = None) -> dict[str, Any]:
        version = self._valve.version if version is None else version
        keep(self._path, Kept(version=version, stood=read(self._path).stood_at(time.time())))
        await self._here_and_there(request, self._valve.resume(version), SLACK)
        self._registry.release()
        return self.state()

    async def follow(self) -> None:
        """Does what was written since this shard was made, while nobody could reach it."""
        state = kept(self._path)
        if state.mode is None:
            await self._valve.resume(state.version)
            self._registry.release()
        elif not self._valve.paused:
            if state.version is not None:
                self._valve.version = state.version
            self._registry.hold()
            await self._valve.pause(state.mode, timeout=SLACK, deadline=state.left)

    async def _here_and_there(self, request: Request | None, here: Awaitable[None], seconds: float) -> None:
        async def there() -> None:
            if request is not None:
                await self._tell(request, seconds)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(there())
                await here
        except BaseExceptionGroup as several:
            raise behind(several) from None

    def state(self) -> dict[str, Any]:
        valve = self._valve
        return {
            "paused": valve.paused,
            "mode": valve.mode,
            "version": valve.version,
            "calls_under_way": valve.under_way,
            "calls_waiting": valve.waiting,
        }
