"""The consumer's end of a stream of groups, and where its tasks come from."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from rookery.core import Group, Rollout, Task
from rookery.engine.channel import Channel, Sourced
from rookery.journal import Journal, RunReader, TokenReader, decode_turn
from rookery.trajectories import segments

if TYPE_CHECKING:
    from rookery.engine.state import StreamState
    from rookery.engine.supervisor import Supervisor


class GroupStream(AsyncIterator[Group]):
    """`async for group in engine.groups(…)`. Closing it cancels what is still under way."""

    def __init__(self, supervisor: "Supervisor", channel: Channel, folder: Path | None) -> None:
        self._supervisor = supervisor
        self._channel = channel
        self._reader = TokenReader(folder / "tokens") if folder is not None else None

    async def __anext__(self) -> Group:
        channel = self._channel
        while not channel.queue:
            if channel.error is not None:
                raise channel.error
            if channel.done or self._supervisor.closing:
                raise StopAsyncIteration
            await channel.wait()
        group = channel.queue.popleft()
        self._supervisor.taken(channel, group.index)
        return group if self._reader is None else await asyncio.to_thread(with_segments, group, self._reader)

    async def aclose(self) -> None:
        """Cancels the stream; rollouts under way end as Cancelled(user)."""
        self._supervisor.close_channel(self._channel, "user")
        while self._channel.in_flight and not self._supervisor.closing:
            await self._channel.wait()  # each attempt under way ends within its grace
        if self._reader is not None:
            self._reader.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def with_segments(group: Group, reader: TokenReader) -> Group:
    """The group with the segments of its valid rollouts loaded; the others have none, by contract."""
    return msgspec.structs.replace(group, rollouts=tuple(_loaded(rollout, reader) for rollout in group.rollouts))


def _loaded(rollout: Rollout, reader: TokenReader) -> Rollout:
    if not rollout.valid or rollout.segments:
        return rollout
    turns = [decode_turn(reader.read(extent)) for extent in rollout.tokens]
    return msgspec.structs.replace(rollout, segments=segments(turns))


def sourced(
    tasks: Iterable[Task], epochs: int | None, number: Callable[[Task], int], state: "StreamState | None"
) -> Iterator[Sourced]:
    """Tasks as groups to come; after a checkpoint first those that were under way, then the rest."""
    again = set(state.open) if state else set()
    skip = state.pulled if state else 0
    for ordinal, task in enumerate(_rounds(tasks, epochs)):
        if ordinal >= skip or ordinal in again:
            yield Sourced(ordinal, number(task), task)


def _rounds(tasks: Iterable[Task], epochs: int | None) -> Iterator[Task]:
    if epochs == 1:
        yield from tasks
        return
    kept = list(tasks)
    done = 0
    while kept and (epochs is None or done < epochs):
        yield from kept
        done += 1


class Resumed(msgspec.Struct, frozen=True):
    """What an earlier process left to do: groups with members missing first, then tasks never begun."""

    sources: list[Sourced]
    next_group: int
    numbers: dict[str, int]
    quarantined: dict[str, str]


def resumed(folder: Path, journal: Journal) -> Resumed:
    """Reads a run's journal back; records whose token data is gone are discarded and run again."""
    with RunReader(folder) as reader:
        todo = reader.unfinished()
        for rollout_id in todo.lost:
            journal.discard(rollout_id, "its token data is not in the files")
        rows = list(reader.task_rows())
        tasks = dict(zip((row.idx for row in rows), reader.tasks(), strict=True))
        begun: set[int] = set()
        next_group = 0
        for group in reader.groups():
            begun.add(group.task_idx)
            next_group = max(next_group, group.idx + 1)
        sources = []
        for missing in todo.groups:
            group = missing.group
            finished = {
                member: record
                for member in range(group.k)
                if member not in missing.members
                and (record := reader.rollout(f"{group.idx}.{member}")) is not None
            }
            sources.append(Sourced(group.position, group.task_idx, tasks[group.task_idx], group.idx, finished))
        ordinal = max((group.position for group in reader.groups()), default=-1) + 1
    for idx, task in tasks.items():
        if idx not in begun:
            sources.append(Sourced(ordinal, idx, task))
            ordinal += 1
    return Resumed(
        sources,
        next_group,
        {task.id: idx for idx, task in tasks.items()},
        {row.id: row.detail for row in rows if row.status == "quarantined" and not tasks[row.idx].invalid},
    )
