"""The stream of groups that `Engine.groups` returns. Runs in the supervisor's process.

- A group counts as taken when the consumer has it: if `anext` is cancelled or fails, the group is put back.
- A stream continues where the last stream of its name ended. It first delivers finished groups that were not
  taken.
- A stream that the consumer dropped is cancelled, as if it had been closed.
- A stream that ended early, by an error or because the engine was closed, raises, so that it never looks complete.
- A rollout that cannot be loaded becomes `Failed`. Its group still has k records and the stream continues.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from rookery.core import Group, UsageError
from rookery.core.lifetimes import ClosableStream
from rookery.engine.group_channel import GroupChannel
from rookery.journal import TokenReader, load_segments

if TYPE_CHECKING:
    from rookery.engine.supervisor import Supervisor


ChooseGroups: TypeAlias = Callable[[deque[Group], bool], list[Group]]
"""A function that gets the finished groups and whether no others will follow, and returns the groups to take. If
it returns an empty list, the caller waits for more finished groups."""


def choose_first(ready: deque[Group], ending: bool) -> list[Group]:  # noqa: ARG001
    """Choose the group that finished first."""
    return [ready[0]] if ready else []


class GroupStream(ClosableStream[Group]):
    """Iterates over finished groups: `async for group in engine.groups(…)`. Closing it cancels its rollouts."""

    def __init__(self, supervisor: "Supervisor", channel: GroupChannel, folder: Path | None) -> None:
        self._supervisor = supervisor
        self._channel = channel
        self._reader = TokenReader(folder / "tokens") if folder is not None else None
        self._loading = asyncio.Lock()
        # A consumer may leave its loop with `break` and not close the stream.
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _close_abandoned, loop, supervisor, channel, self._reader).atexit = False

    async def __anext__(self) -> Group:
        groups = await self.take(choose_first)
        if not groups:
            raise StopAsyncIteration
        self.mark_taken(groups)
        return groups[0]

    async def take(self, choose: ChooseGroups) -> list[Group]:
        """Wait until `choose` selects finished groups, and return them with their segments.

        Return an empty list at the end of the stream. The caller must pass the groups to `mark_taken` or
        `put_back`.
        """
        channel = self._channel
        self._supervisor.refuse_without_tokens(channel)
        while not (chosen := choose(channel.ready, channel.ending)):
            if channel.error is not None:
                raise channel.error
            if channel.done:
                await self._close_reader()
                if channel.missing is not None and not channel.closed and not channel.scheduler.fulfilled:
                    channel.fail(channel.missing)
                    raise channel.missing
                return []
            if self._supervisor.closing:
                raise UsageError("the engine was closed before this stream of groups ended")
            await channel.wait()
            self._supervisor.refuse_without_tokens(channel)
        for group in chosen:
            channel.ready.remove(group)
        try:
            return [await self._load(group) for group in chosen]
        except BaseException:
            self.put_back(chosen)
            raise

    def put_back(self, groups: Sequence[Group]) -> None:
        """Put back groups from `take` that the consumer did not get. They are delivered next."""
        channel = self._channel
        if groups and channel.closed:
            channel.leftover[:0] = [(0, group) for group in groups]
        elif groups:
            channel.ready.extendleft(reversed(groups))
            channel.notify()

    def mark_taken(self, groups: Iterable[Group]) -> None:
        """Record that the consumer has these groups, so that they are not delivered again."""
        for group in groups:
            self._supervisor.mark_taken(self._channel, group.index)

    def next_step(self) -> int:
        """Count a training step and return its number, counted from 0 over all streams of this name."""
        self._channel.steps += 1
        return self._channel.steps - 1

    @property
    def taken(self) -> int:
        """Number of groups that the consumer took from this stream."""
        scheduler = self._channel.scheduler
        return scheduler.delivered - scheduler.buffered

    def admit_more(self) -> None:
        """Make the supervisor check again which groups it may start."""
        self._supervisor.schedule_admission()

    def record_event(self, kind: str, payload: dict[str, Any]) -> None:
        self._supervisor.record_event(kind, payload)

    async def _load(self, group: Group) -> Group:
        if self._reader is None:
            return group
        async with self._loading:  # a reader is not thread-safe
            loading = asyncio.ensure_future(asyncio.to_thread(with_segments, group, self._reader))
            try:
                loaded = await asyncio.shield(loading)
            except asyncio.CancelledError:
                await asyncio.wait({loading})  # the thread still uses the reader
                raise
        self.record_failures(group, loaded)
        return loaded

    def record_failures(self, before: Group, after: Group) -> None:
        """Write `Failed` records for rollouts that are valid in `before` and failed in `after`.

        They failed while their tokens were loaded, or while the group was sent to another process.
        """
        self._supervisor.records.record_load_failures(before, after)

    async def _close_reader(self) -> None:
        if self._reader is not None:
            async with self._loading:
                self._reader.close()

    async def aclose(self) -> None:
        """Close the stream and wait until its running rollouts have ended as `Cancelled("user")`.

        A later stream of the same name continues where this one ended.
        """
        self._supervisor.close_channel(self._channel, "user")
        while self._channel.running and not self._supervisor.closing:
            await self._channel.wait()  # a cancelled attempt ends within its grace period
        await self._close_reader()


def _close_abandoned(
    loop: asyncio.AbstractEventLoop, supervisor: "Supervisor", channel: GroupChannel, reader: TokenReader | None
) -> None:
    channel.abandoned = True
    if reader is not None:
        reader.close()
    if not loop.is_closed():
        loop.call_soon_threadsafe(supervisor.close_channel, channel, "user")


def with_segments(group: Group, reader: TokenReader) -> Group:
    """Return the group with the segments of its valid rollouts loaded from the run's files with recorded tokens.

    A rollout that cannot be loaded becomes `Failed`.
    """
    return msgspec.structs.replace(
        group, rollouts=tuple(load_segments(rollout, reader) for rollout in group.rollouts)
    )
