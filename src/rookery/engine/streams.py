"""The consumer's end of a stream of groups, and where its tasks come from.

Promises:
- a group counts as taken when the consumer has it: a cancelled or failed `anext` puts it back;
- a stream of a name goes on where the last one ended, with finished groups that nobody took first;
- a stream that nobody holds any more is cancelled, as if it had been closed;
- a stream that was cut short, by an error or by closing the engine, never looks like one that ended;
- a rollout that cannot be loaded becomes `Failed`; its group still has k records and the stream goes on.
"""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import msgspec

from rookery.core import Group, Task, UsageError
from rookery.engine.channel import Channel, Sourced
from rookery.journal import FailedRollout, Journal, RunReader, TokenReader, Unfinished, load_segments
from rookery.journal.loading import UNREADABLE

if TYPE_CHECKING:
    from rookery.engine.state import Cursor
    from rookery.engine.supervisor import Supervisor


Choose: TypeAlias = Callable[[deque[Group], bool], list[Group]]
"""Which of the finished groups to take, none to wait; with whether no others will come."""


def first_group(ready: deque[Group], ending: bool) -> list[Group]:  # noqa: ARG001
    """Choose the group that finished first."""
    return [ready[0]] if ready else []


class GroupStream(AsyncIterator[Group]):
    """`async for group in engine.groups(…)`. Closing it cancels what is still under way."""

    def __init__(self, supervisor: "Supervisor", channel: Channel, folder: Path | None) -> None:
        self._supervisor = supervisor
        self._channel = channel
        self._reader = TokenReader(folder / "tokens") if folder is not None else None
        self._loading = asyncio.Lock()
        # A consumer may leave its loop by `break`, without closing the stream: it wants no more.
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _abandoned, loop, supervisor, channel, self._reader).atexit = False

    async def __anext__(self) -> Group:
        groups = await self.take(first_group)
        if not groups:
            raise StopAsyncIteration
        self.count(groups)
        return groups[0]

    async def take(self, choose: Choose) -> list[Group]:
        """Finished groups, chosen when there are any and whenever that changes; none at the end of the stream.

        They are the caller's to `count`, or to `put_back`."""
        channel = self._channel
        self._supervisor.refuse_without_tokens(channel)
        while not (chosen := choose(channel.queue, channel.ending)):
            if channel.error is not None:
                raise channel.error
            if channel.done:
                await self._close_reader()
                return []
            if self._supervisor.closing:
                raise UsageError("the engine was closed before this stream of groups had ended")
            await channel.wait()
            self._supervisor.refuse_without_tokens(channel)
        for group in chosen:
            channel.queue.remove(group)
        try:
            return [await self._loaded(group) for group in chosen]
        except BaseException:
            self.put_back(chosen)
            raise

    def put_back(self, groups: Sequence[Group]) -> None:
        """Hand these groups out next, in this stream or in the next one of its name: nobody has them."""
        channel = self._channel
        if groups and channel.closed:
            channel.spare[:0] = [(0, group) for group in groups]
        elif groups:
            channel.queue.extendleft(reversed(groups))
            channel.changed()

    def next_step(self) -> int:
        """Count a step; return its number, from 0 over all streams of this name."""
        self._channel.steps += 1
        return self._channel.steps - 1

    @property
    def taken(self) -> int:
        """How many groups were taken, before a restart too."""
        schedule = self._channel.schedule
        return schedule.handed - schedule.buffered

    def pump(self) -> None:
        """What may be admitted has changed."""
        self._supervisor.pump()

    def event(self, kind: str, payload: dict[str, Any]) -> None:
        self._supervisor.event(kind, payload)

    def count(self, groups: Iterable[Group]) -> None:
        """The consumer has them."""
        for group in groups:
            self._supervisor.taken(self._channel, group.index)

    async def _loaded(self, group: Group) -> Group:
        if self._reader is None:
            return group
        async with self._loading:  # a reader is for one thread at a time
            work = asyncio.ensure_future(asyncio.to_thread(with_segments, group, self._reader))
            try:
                loaded = await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait({work})  # the thread still reads; disk reads end
                raise
        self.failed(group, loaded)
        return loaded

    def failed(self, before: Group, after: Group) -> None:
        """Record the rollouts of a group that failed after the environment returned."""
        self._supervisor.ledger.loaded(before, after)

    async def _close_reader(self) -> None:
        if self._reader is not None:
            async with self._loading:
                self._reader.close()

    async def aclose(self) -> None:
        """Close the stream. Rollouts under way end as Cancelled(user); the next stream of its name goes on."""
        self._supervisor.close_channel(self._channel, "user")
        while self._channel.in_flight and not self._supervisor.closing:
            await self._channel.wait()  # each attempt under way ends within its grace
        await self._close_reader()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _abandoned(
    loop: asyncio.AbstractEventLoop, supervisor: "Supervisor", channel: Channel, reader: TokenReader | None
) -> None:
    channel.abandoned = True
    if reader is not None:
        reader.close()
    if not loop.is_closed():
        loop.call_soon_threadsafe(supervisor.close_channel, channel, "user")


def with_segments(group: Group, reader: TokenReader) -> Group:
    """Return the group with the segments of its valid rollouts; one that cannot be loaded becomes `Failed`."""
    return msgspec.structs.replace(
        group, rollouts=tuple(load_segments(rollout, reader) for rollout in group.rollouts)
    )


def sourced(
    tasks: Iterable[Task], epochs: int | None, number: Callable[[Task], int], cursor: "Cursor | None"
) -> Iterator[Sourced]:
    """Yield the groups to come from a cursor on: first those to run again, then those that were never begun."""
    again = set(cursor.ordinals) if cursor else set()
    skip = cursor.pulled if cursor else 0
    for ordinal, task in enumerate(_rounds(tasks, epochs)):
        if ordinal >= skip or ordinal in again:
            yield Sourced(ordinal, number(task), task)


def _rounds(tasks: Iterable[Task], epochs: int | None) -> Iterator[Task]:
    if epochs == 1:
        yield from tasks
        return
    kept: list[Task] = []
    if epochs is None or epochs > 0:
        for task in tasks:  # in its own time: a generator may be slow, or draw each task when it is asked
            kept.append(task)
            yield task
    done = 1
    while kept and (epochs is None or done < epochs):
        yield from kept
        done += 1


class Resumed(msgspec.Struct, frozen=True):
    """What an earlier process left to do: groups with members missing first, then tasks never begun."""

    sources: list[Sourced]
    next_group: int
    numbers: dict[str, int]
    quarantined: dict[str, str]


def matches(cause: str, wanted: Collection[str]) -> bool:
    """Whether a cause is one of these, or begins with one of these (`upstream` for `upstream.error`)."""
    return any(cause == one or cause.startswith(f"{one}.") for one in wanted)


class LeftToRun(msgspec.Struct, frozen=True):
    """What a resume runs: members without a usable record, and failed rollouts that run again."""

    unfinished: Unfinished
    again: list[FailedRollout]


def left_to_run(reader: RunReader, *, failed: bool, causes: Collection[str] = ()) -> LeftToRun:
    """Find what a resume has to run. With `failed` also failed rollouts, and records whose tokens are corrupt."""
    if not failed:
        return LeftToRun(reader.unfinished(), [])
    again = [one for one in reader.failed() if not causes or matches(one.cause, causes)]
    checksums = not causes or matches(UNREADABLE, causes)
    return LeftToRun(reader.unfinished(checksums=checksums, again={one.id for one in again}), again)


def resumed(folder: Path, journal: Journal, *, failed: bool = False, causes: Collection[str] = ()) -> Resumed:
    """Read a run's journal back and return what is left to run.

    Records whose token data is gone are superseded and run again. With `failed`, so are failed rollouts: all, or
    those with one of these causes. Their earlier records stay in the journal.
    """
    with RunReader(folder) as reader:
        left = left_to_run(reader, failed=failed, causes=causes)
        todo, again = left.unfinished, left.again
        for rollout_id in todo.lost:
            journal.discard(rollout_id, "its token data cannot be read back")
        for one in again:
            journal.discard(one.id, f"run again after {one.cause}")
        if todo.lost or again:
            journal.flush()  # from here on they are unfinished, whatever becomes of this process
        rerun, ended = {one.group for one in again}, {one.id for one in again}
        rows = list(reader.task_rows())
        tasks = dict(zip((row.idx for row in rows), reader.tasks(), strict=True))
        begun: set[int] = set()
        next_group = 0
        lifted: set[int] = set()
        for group in reader.groups():
            begun.add(group.task_idx)
            next_group = max(next_group, group.idx + 1)
            if group.idx in rerun:
                lifted.add(group.task_idx)
        sources = []
        for missing in todo.groups:
            group = missing.group
            finished = {
                member: record
                for member in range(group.k)
                if member not in missing.members
                and (record := reader.rollout(f"{group.idx}.{member}")) is not None
            }
            # One more than was written: an attempt that was under way when the process died wrote nothing.
            # Those of a failed rollout have all ended.
            begun_before = {
                member: (f"{group.idx}.{member}" not in ended)
                + max((attempt.number for attempt in reader.attempts(f"{group.idx}.{member}")), default=0)
                for member in missing.members
            }
            task = tasks[group.task_idx]
            sources.append(
                Sourced(
                    group.position,
                    group.task_idx,
                    task,
                    stream=group.stream,
                    index=group.idx,
                    finished=finished,
                    attempts=begun_before,
                )
            )
        for row in rows:
            if row.idx in lifted and row.status == "quarantined":
                journal.lift_quarantine(row.idx)
        ordinal = max((group.position for group in reader.groups()), default=-1) + 1
    for idx, task in tasks.items():
        if idx not in begun:
            sources.append(Sourced(ordinal, idx, task))
            ordinal += 1
    return Resumed(
        sources,
        next_group,
        {task.id: idx for idx, task in tasks.items()},
        {
            row.id: row.detail
            for row in rows
            if row.status == "quarantined" and row.idx not in lifted and not tasks[row.idx].invalid
        },
    )
