"""Pause the policy's model calls in every shard of a gateway, whichever shard receives the request.

Runs in gateway shards, which are the processes of a gateway. The state is stored in a file that all shards share.

Guarantees:
- a pause or resume that succeeded holds in every live shard, and in shards that start later;
- pause and resume requests are idempotent, and any shard accepts them;
- a pause that fails in one shard, or whose requester disconnects, is undone in all shards;
- the policy version of a resume is stored, so that a restarted shard records it with new replies;
- a pause that nobody resumes ends at its deadline, also in a shard that started during the pause;
- the total duration of all pauses survives restarts of a shard, and does not count towards a session's deadline.
"""

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec

from rookery.core import RookeryError, UsageError
from rookery.core.errors import describe, unwrap_group
from rookery.upstreams.pause.upstream import DeadlineClocks, PausableUpstream, PauseState
from rookery.upstreams.protocol import PauseMode

log = logging.getLogger("rookery.gateway")

DEFAULT_DEADLINE: Final = 1800.0
MAX_SECONDS: Final = 86_400.0
SLACK_SECONDS: Final = 45.0
"""Seconds added to the timeout of a pause, for the inference engine to abort or continue its calls and for the
other shards to reply."""

Broadcast: TypeAlias = Callable[[Literal["pause", "resume"], float], Awaitable[None]]
"""A function that sends a pause or resume request to the other shards and waits for their replies. Its second
argument is the timeout in seconds."""


class PauseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The policy version of a gateway, and whether its model calls are paused, as stored in the pause file.

    All shards (processes) of a gateway read and write this one file. Times are seconds since the epoch.
    """

    version: int = 0
    mode: PauseMode | None = None
    until: float = 0.0
    """The deadline at which the pause ends without a resume."""
    since: float = 0.0
    """Time at which the pause began."""
    earlier_seconds: float = 0.0
    """The total duration of all earlier pauses in seconds."""

    def paused_seconds(self, now: float) -> float:
        """Return the total duration in seconds of all pauses, including the current one up to `now`."""
        return self.earlier_seconds + (
            max(0.0, min(now, self.until) - self.since) if self.mode is not None else 0.0
        )


def read_pause_record(path: Path) -> PauseRecord:
    """Read the pause file, in which the shards of a gateway store whether model calls are paused.

    Return a default record (not paused, version 0) if it does not exist. Raise `UsageError` if it is unreadable.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PauseRecord)
    except FileNotFoundError:
        return PauseRecord()
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(
            f"cannot read the file {path}, in which the gateway stores whether model calls are paused: "
            f"{describe(error)}; remove the file"
        ) from error


def load_pause_state(path: Path) -> PauseState:
    """Return the pause state with which a new shard must start, from the gateway's pause file at `path`."""
    record = read_pause_record(path)
    left = record.until - time.time()
    if record.mode is None or left <= 0:
        return PauseState(version=record.version)
    return PauseState(mode=record.mode, version=record.version, left=left)


def write_pause_record(path: Path, record: PauseRecord) -> None:
    """Replace the gateway's pause file atomically."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(msgspec.json.encode(record))
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class ShardPause:
    """Pause and resume the policy's model calls in this shard and, through `broadcast`, in all other shards."""

    def __init__(self, upstream: PausableUpstream, clocks: DeadlineClocks, path: Path) -> None:
        self._upstream = upstream
        self._clocks = clocks
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()

    async def pause(
        self, mode: str, timeout: float, deadline: float | None, broadcast: Broadcast | None = None
    ) -> dict[str, Any]:
        """Pause this shard and, if `broadcast` is given, all other shards. Returns `state()`.

        `timeout` bounds the time to stop the calls; `deadline` is the number of seconds after which the pause ends
        without a resume (`DEFAULT_DEADLINE` if None). If a shard fails, the pause is undone in all shards.
        """
        deadline = DEFAULT_DEADLINE if deadline is None else deadline
        if mode not in get_args(PauseMode):
            raise UsageError(f"unknown pause mode {mode[:40]!r}; use one of {', '.join(get_args(PauseMode))}")
        if not 0 < timeout <= MAX_SECONDS or not 0 < deadline <= MAX_SECONDS:
            raise UsageError(
                f"timeout and deadline of a pause must be above 0 and at most {MAX_SECONDS:g} seconds"
            )
        pause_mode = cast("PauseMode", mode)
        now, before = time.time(), read_pause_record(self._path)
        active = before.mode is not None and now < before.until
        record = PauseRecord(
            version=self._upstream.version,
            mode=pause_mode,
            until=max(now + deadline, before.until if active else 0.0),
            since=before.since if active else now,
            earlier_seconds=before.earlier_seconds if active else before.paused_seconds(now),
        )
        write_pause_record(self._path, record)
        self._clocks.stop_clocks()
        local = self._upstream.pause(pause_mode, timeout=timeout, deadline=deadline)
        try:
            await self._run("pause", local, broadcast, timeout + SLACK_SECONDS)
        except BaseException:
            undo = asyncio.get_running_loop().create_task(self._undo(broadcast))
            self._tasks.add(undo)
            undo.add_done_callback(self._tasks.discard)
            await asyncio.shield(undo)
            raise
        return self.state()

    async def _undo(self, broadcast: Broadcast | None) -> None:
        try:
            await self.resume(None, broadcast)
        except RookeryError as error:
            log.error("a pause of the gateway failed and could not be undone in all shards: %s", error)

    async def resume(self, version: int | None, broadcast: Broadcast | None = None) -> dict[str, Any]:
        """Resume this shard and, if `broadcast` is given, all other shards. Returns `state()`.

        `version` is the policy version of tokens sampled from now on; None keeps the current one.
        """
        version = self._upstream.version if version is None else version
        earlier_seconds = read_pause_record(self._path).paused_seconds(time.time())
        write_pause_record(self._path, PauseRecord(version=version, earlier_seconds=earlier_seconds))
        await self._run("resume", self._upstream.resume(version), broadcast, SLACK_SECONDS)
        self._clocks.restart_clocks()
        return self.state()

    async def apply_file(self) -> None:
        """Pause or resume this shard as the gateway's pause file says.

        Another shard may have changed the file while this one was starting.
        """
        state = load_pause_state(self._path)
        if state.mode is None:
            await self._upstream.resume(state.version)
            self._clocks.restart_clocks()
        elif not self._upstream.paused:
            if state.version is not None:
                self._upstream.version = state.version
            self._clocks.stop_clocks()
            await self._upstream.pause(state.mode, timeout=SLACK_SECONDS, deadline=state.left)

    async def _run(
        self,
        action: Literal["pause", "resume"],
        local: Awaitable[None],
        broadcast: Broadcast | None,
        seconds: float,
    ) -> None:
        async def remote() -> None:
            if broadcast is not None:
                await broadcast(action, seconds)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(remote())
                await local
        except BaseExceptionGroup as errors:
            raise unwrap_group(errors) from None

    def state(self) -> dict[str, Any]:
        """Return the pause state and the number of calls, as the body of the response to a pause or resume
        request."""
        upstream = self._upstream
        return {
            "paused": upstream.paused,
            "mode": upstream.mode,
            "version": upstream.version,
            "calls_under_way": upstream.in_flight,
            "calls_waiting": upstream.waiting,
        }
