"""The position of a named stream of groups, within an engine and in a trainer's checkpoint.

Runs in the supervisor's process.

- A stream continues where the last stream of its name ended: in the same engine, and after a checkpoint.
- A group that was taken is not delivered again. A group that was not taken is, also over several checkpoints.
- Rollouts that run again get the same seeds.
- A checkpoint does not depend on the run that wrote it: it contains finished groups with their tokens.
- A rollout that cannot be loaded is `Failed` in the checkpoint; the checkpoint is still written.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import Group, Task, UsageError
from rookery.core.errors import describe
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.group_stream import with_segments
from rookery.engine.staleness import oldest_version
from rookery.journal import TokenReader

FORMAT = 1


class StreamCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One stream at the time of a checkpoint. The encoded names are part of the format."""

    admitted: int = msgspec.field(name="pulled")
    """Number of admitted groups."""
    taken: int
    open: list[int]
    """Ordinals of groups that were admitted and not finished. They run again."""
    round: int = 0
    """How often the stream was restarted."""
    finished: list[Group]
    """Finished groups that nobody had taken, with their segments."""
    ordinals: list[int] = []
    """The ordinal of each finished group; empty in checkpoints of older versions."""
    steps: int = 0


class StreamCursor(msgspec.Struct, kw_only=True):
    """The position at which the next stream of a name continues."""

    admitted: int
    taken: int
    steps: int
    round: int
    again: list[PlannedGroup]
    """Groups to run again whose tasks are known."""
    ordinals: set[int]
    """Ordinals of all groups to run again."""
    finished: list[tuple[int, Group]]
    """Groups to deliver first, each with the number of its journal write."""
    origins: dict[int, PlannedGroup]
    """By index: the plan of the finished groups, if it is known."""
    versions: dict[int, int]
    """By index: the policy version at the admission of the finished groups, if it is known."""
    rest: Iterator[PlannedGroup] | None = None
    """What is left of a source that can be iterated only once."""

    @classmethod
    def from_channel(cls, channel: GroupChannel, number: int) -> "StreamCursor":
        """Return the position at which a stream of this engine ended."""
        finished = [*((0, group) for group in channel.ready), *channel.pending, *channel.leftover]
        waiting = {group.index for _, group in finished}
        again = [_readmit(planned) for index, planned in channel.untaken.items() if index not in waiting]
        staleness = channel.scheduler.staleness
        return cls(
            admitted=channel.admitted,
            taken=channel.taken,
            steps=channel.steps,
            round=number,
            again=again,
            ordinals={planned.ordinal for planned in again} | channel.to_rerun,
            finished=finished,
            origins={index: planned for index, planned in channel.untaken.items() if index in waiting},
            versions=dict(staleness.versions) if staleness is not None else {},
        )

    @classmethod
    def from_checkpoint(cls, state: StreamCheckpoint, number: Callable[[Task], int]) -> "StreamCursor":
        """Return the position in a checkpoint. `number` returns a task's number in this run's journal."""
        origins = zip(state.finished, state.ordinals, strict=False)
        return cls(
            admitted=state.admitted,
            taken=state.taken,
            steps=state.steps,
            round=state.round,
            again=[],
            ordinals=set(state.open),
            finished=[(0, group) for group in state.finished],
            origins={
                group.index: PlannedGroup(ordinal, number(group.task), group.task) for group, ordinal in origins
            },
            versions={},
        )

    def rerun_unless_size(self, k: int) -> None:
        """Run finished groups again that do not have k rollouts."""
        for index, planned in [
            (group.index, self.origins[group.index])
            for _, group in self.finished
            if len(group.rollouts) != k and group.index in self.origins
        ]:
            self.again.append(_readmit(planned))
            self.ordinals.add(planned.ordinal)
            del self.origins[index]
            self.finished = [one for one in self.finished if one[1].index != index]

    def restore(self, channel: GroupChannel) -> None:
        """Let a new channel continue from here. Finished groups beyond its `want` stay for the next stream."""
        scheduler = channel.scheduler
        channel.admitted, channel.taken, channel.steps = self.admitted, self.taken, self.steps
        channel.to_rerun = set(self.ordinals)
        channel.untaken.update(self.origins)
        count = len(self.finished) if scheduler.want is None else scheduler.want
        channel.leftover = self.finished[count:]
        for number, group in self.finished[:count]:
            channel.pending.append((number, group))
            scheduler.buffered += 1
            scheduler.delivered += 1
            if scheduler.staleness is not None:
                version = self.versions.get(group.index, oldest_version(group))
                scheduler.staleness.add(group.index, version)

    @property
    def next_group(self) -> int:
        """A group index above those of all finished groups."""
        return max((group.index + 1 for _, group in self.finished), default=0)


def _readmit(planned: PlannedGroup) -> PlannedGroup:
    """Return the same task at the same ordinal, to be admitted as a new group."""
    return msgspec.structs.replace(planned, index=None, finished={}, attempts={})


class _EngineCheckpoint(msgspec.Struct, kw_only=True):
    format: int
    seed: int
    streams: dict[str, StreamCheckpoint]


def dump_checkpoint(
    seed: int,
    channels: Mapping[str, GroupChannel],
    rounds: Mapping[str, int],
    folder: Path,
    unopened: Mapping[str, StreamCheckpoint] | None = None,
    on_loaded: Callable[[Group, Group], None] | None = None,
) -> dict[str, Any]:
    """Return the streams as plain data (numbers, strings and one bytes value) for any checkpoint format.

    `unopened` are streams of an earlier checkpoint that nobody has opened since; they are passed on unchanged.
    `on_loaded` gets each finished group before and after its segments were loaded.
    """
    with TokenReader(folder / "tokens") as reader:

        def load(group: Group) -> Group:
            loaded = with_segments(group, reader)
            if on_loaded is not None:
                on_loaded(group, loaded)
            return _without_extents(loaded)

        streams = {name: _dump_stream(channel, rounds[name], load) for name, channel in channels.items()}
    streams.update(unopened or {})
    packed = msgspec.msgpack.encode(_EngineCheckpoint(format=FORMAT, seed=seed, streams=streams))
    return {"rookery": FORMAT, "seed": seed, "streams": packed}


def _dump_stream(channel: GroupChannel, number: int, load: Callable[[Group], Group]) -> StreamCheckpoint:
    cursor = StreamCursor.from_channel(channel, number)
    known = all(group.index in cursor.origins for _, group in cursor.finished)
    return StreamCheckpoint(
        admitted=cursor.admitted,
        taken=cursor.taken,
        round=number,
        open=sorted(cursor.ordinals),
        finished=[load(group) for _, group in cursor.finished],
        ordinals=[cursor.origins[group.index].ordinal for _, group in cursor.finished] if known else [],
        steps=cursor.steps,
    )


def _without_extents(group: Group) -> Group:
    """Remove the references to token files: they belong to this run's directory."""
    rollouts = (msgspec.structs.replace(rollout, tokens=()) for rollout in group.rollouts)
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def load_checkpoint(state: Mapping[str, Any]) -> tuple[int, dict[str, StreamCheckpoint]]:
    """Return the seed and the streams of a checkpoint. Raise `UsageError` if it is not valid."""
    if state.get("rookery") != FORMAT:
        raise UsageError(
            f"this is not an engine checkpoint of format {FORMAT} (its format is {state.get('rookery')!r}): pass "
            "what `state_dict` returned"
        )
    try:
        decoded = msgspec.msgpack.decode(state["streams"], type=_EngineCheckpoint)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise UsageError(f"this engine checkpoint is corrupt: {describe(error)}") from error
    return decoded.seed, decoded.streams
