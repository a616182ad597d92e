"""The pause of a gateway's policy, in every shard, whoever was asked.

Promises:
- a pause or a resume that was answered holds in every shard that is alive, and in those that are born later;
- asking twice is fine; asking any shard is fine;
- the version that a resume names is kept: a restarted shard records with it;
- a pause that nobody ends is over at its deadline, also in a shard that was born during it.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, cast, get_args

import msgspec

from rookery.core import UsageError
from rookery.core.errors import behind
from rookery.gateway.http import Request
from rookery.gateway.registry import Registry
from rookery.upstreams.protocol import PauseMode
from rookery.upstreams.valve import Valve, ValveState

DEADLINE: Final = 1800.0
"""Seconds after which a pause that says none is over."""
MAX_SECONDS: Final = 86_400.0
Tell: TypeAlias = Callable[[Request, float], Awaitable[list[bytes]]]
"""Asks the other shards for the same, within so many seconds."""
TELL_SECONDS: Final = 30.0
"""For the other shards to do as this one, beyond what a pause itself may take."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard that starts must know."""

    version: int = 0
    mode: PauseMode | None = None
    until: float = 0.0
    """When the pause is over by itself, as a time of day."""


def kept(path: Path) -> ValveState:
    """The state that was written last; a fresh one where none was."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        return ValveState()
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

    def __init__(
        self,
        valve: Valve,
        registry: Registry,
        path: Path,
        tell: Callable[[Request, float], Awaitable[list[bytes]]],
    ) -> None:
        self._valve = valve
        self._registry = registry
        self._path = path
        self._tell = tell

    async def pause(
        self, mode: str, timeout: float, deadline: float | None, request: Request | None = None
    ) -> dict[str, Any]:
        deadline = DEADLINE if deadline is None else deadline
        if mode not in get_args(PauseMode):
            raise UsageError(f"there is no pause mode {mode[:40]!r}; there is {', '.join(get_args(PauseMode))}")
        if not 0 < timeout <= MAX_SECONDS or not 0 < deadline <= MAX_SECONDS:
            raise UsageError("the timeout and the deadline of a pause are above 0 seconds and at most a day")
        wanted = cast("PauseMode", mode)
        keep(self._path, Kept(version=self._valve.version, mode=wanted, until=time.time() + deadline))
        self._registry.hold()
        await self._here_and_there(
            request,
            timeout + TELL_SECONDS,
            lambda: self._valve.pause(wanted, timeout=timeout, deadline=deadline),
        )
        return self.state()

    async def resume(self, version: int | None, request: Request | None = None) -> dict[str, Any]:
        version = self._valve.version if version is None else version
        keep(self._path, Kept(version=version))
        await self._here_and_there(request, TELL_SECONDS, lambda: self._valve.resume(version))
        self._registry.release()
        return self.state()

    async def _here_and_there(
        self, request: Request | None, within: float, here: Callable[[], Awaitable[None]]
    ) -> None:
        async def there() -> None:
            if request is not None:
                await self._tell(request, within)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(there())
                await here()
        except BaseExceptionGroup as errors:
            raise behind(errors) from None

    def state(self) -> dict[str, Any]:
        valve = self._valve
        return {
            "paused": valve.paused,
            "mode": valve.mode,
            "version": valve.version,
            "calls_under_way": valve.under_way,
            "calls_waiting": valve.waiting,
        }
