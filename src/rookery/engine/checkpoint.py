"""The position of a named stream of groups, within an engine and in a trainer's checkpoint.

Runs in the supervisor's process. The ordinal of a group is its position in its stream, counted from 0.

- A stream continues where the last stream of its name ended: in the same engine, and after a checkpoint is loaded.
- A group that the consumer took is not delivered again. A group that was not taken is delivered later, also if
  several checkpoints are written and loaded in between.
- Rollouts that run again get the same seeds as before.
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
from rookery.engine.length_predictor import LengthState
from rookery.engine.staleness import oldest_version
from rookery.journal import TokenReader
from rookery.tasks.task_order import TaskOrder, TaskOrderState

FORMAT = 1


class StreamCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one stream in a checkpoint. The encoded field names are part of the file format."""

    admitted: int = msgspec.field(name="pulled")
    """Number of groups that were started, in all streams of this name."""
    taken: int
    open: list[int]
    """Ordinals of groups that were started and had not finished. They run again after the checkpoint is loaded."""
    round: int = 0
    """Number of times that the stream was restarted with `restart=True`."""
    finished: list[Group]
    """Finished groups that the consumer had not taken, with their segments."""
    ordinals: list[int] = []
    """The ordinal of each group in `finished`. Empty if one of them is unknown, and in older checkpoints."""
    steps: int = 0
    order: TaskOrderState | None = None
    """State of the order of the tasks, if a task sampler chooses them."""


class StreamCursor(msgspec.Struct, kw_only=True):
    """The position at which the next stream of the same name continues."""

    admitted: int
    taken: int
    steps: int
    round: int
    rerun: list[PlannedGroup]
    """Groups to run again whose tasks are known."""
    ordinals: set[int]
    """Ordinals of all groups to run again."""
    finished: list[tuple[int, Group]]
    """Finished groups that are delivered first. The number is the journal write that commits the group's records;
    0 if they are committed."""
    origins: dict[int, PlannedGroup]
    """The task and ordinal of the finished groups, by group index, as far as they are known."""
    versions: dict[int, int]
    """The policy version when a finished group was started, by group index, as far as it is known."""
    order: TaskOrder | TaskOrderState | None = None
    """The order of the tasks, or its state, if a task sampler chooses them."""
    rest: Iterator[PlannedGroup] | None = None
    """The remaining groups, if the tasks come from an iterator, which cannot be started again."""

    @classmethod
    def from_channel(cls, channel: GroupChannel, number: int) -> "StreamCursor":
        """Return the position of a stream of this engine. `number` is how often the stream was restarted."""
        finished = [*((0, group) for group in channel.ready), *channel.pending, *channel.leftover]
        waiting = {group.index for _, group in finished}
        rerun = [_readmit(planned) for index, planned in channel.untaken.items() if index not in waiting]
        staleness = channel.scheduler.staleness
        return cls(
            admitted=channel.admitted,
            taken=channel.taken,
            steps=channel.steps,
            round=number,
            rerun=rerun,
            ordinals={planned.ordinal for planned in rerun} | channel.to_rerun,
            finished=finished,
            origins={index: planned for index, planned in channel.untaken.items() if index in waiting},
            versions=dict(staleness.versions) if staleness is not None else {},
            order=channel.order,
        )

    @classmethod
    def from_checkpoint(cls, state: StreamCheckpoint, number: Callable[[Task], int]) -> "StreamCursor":
        """Return the position in a checkpoint. `number` returns the number of a task in this run's journal."""
        origins = zip(state.finished, state.ordinals, strict=False)
        return cls(
            admitted=state.admitted,
            taken=state.taken,
            steps=state.steps,
            round=state.round,
            rerun=[],
            ordinals=set(state.open),
            finished=[(0, group) for group in state.finished],
            origins={
                group.index: PlannedGroup(ordinal, number(group.task), group.task) for group, ordinal in origins
            },
            versions={},
            order=state.order,
        )

    def rerun_unless_size(self, k: int) -> None:
        """Run finished groups again, instead of delivering them, if they do not have k rollouts.

        This applies only to groups whose task and ordinal are known.
        """
        for index, planned in [
            (group.index, self.origins[group.index])
            for _, group in self.finished
            if len(group.rollouts) != k and group.index in self.origins
        ]:
            self.rerun.append(_readmit(planned))
            self.ordinals.add(planned.ordinal)
            del self.origins[index]
            self.finished = [one for one in self.finished if one[1].index != index]

    def restore(self, channel: GroupChannel) -> None:
        """Let a new channel continue at this position.

        If there are more finished groups than the channel's `want`, the others stay for the next stream of the
        name.
        """
        scheduler = channel.scheduler
        channel.admitted, channel.taken, channel.steps = self.admitted, self.taken, self.steps
        channel.to_rerun = set(self.ordinals)
        channel.untaken.update(self.origins)
        channel.versions.update((index, one) for index, one in self.versions.items() if index in self.origins)
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
        """The lowest group index above those of all finished groups."""
        return max((group.index + 1 for _, group in self.finished), default=0)


def _readmit(planned: PlannedGroup) -> PlannedGroup:
    """Return a plan for a new group with the same task and ordinal, without results of earlier attempts."""
    return msgspec.structs.replace(planned, index=None, finished={}, attempts={})


class EngineCheckpoint(msgspec.Struct, kw_only=True):
    """Positions of all streams of an engine, which `Engine.state_dict` encodes."""

    format: int
    seed: int
    streams: dict[str, StreamCheckpoint]
    lengths: LengthState = LengthState()
    """State of the predictor of lengths, if the engine starts long rollouts first."""


def dump_checkpoint(
    seed: int,
    channels: Mapping[str, GroupChannel],
    rounds: Mapping[str, int],
    folder: Path,
    unopened: Mapping[str, StreamCheckpoint] | None = None,
    on_loaded: Callable[[Group, Group], None] | None = None,
    lengths: LengthState | None = None,
) -> dict[str, Any]:
    """Return the positions of the streams as plain data (numbers, strings and bytes) for a trainer's checkpoint.

    `rounds` is how often each stream was restarted, and `folder` is the run's directory. `unopened` are streams of
    a loaded checkpoint that were not opened since; they are copied unchanged. `on_loaded` is called for each
    finished group, with the group before and after its segments were loaded. `lengths` are predicted lengths.
    """
    with TokenReader(folder / "tokens") as reader:

        def load(group: Group) -> Group:
            loaded = with_segments(group, reader)
            if on_loaded is not None:
                on_loaded(group, loaded)
            return _without_extents(loaded)

        streams = {name: _dump_stream(channel, rounds[name], load) for name, channel in channels.items()}
    streams.update(unopened or {})
    checkpoint = EngineCheckpoint(format=FORMAT, seed=seed, streams=streams, lengths=lengths or LengthState())
    packed = msgspec.msgpack.encode(checkpoint)
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
        order=channel.order.get_state() if channel.order is not None else None,
    )


def _without_extents(group: Group) -> Group:
    """Remove the references to the files with recorded tokens, which exist only in this run's directory."""
    rollouts = (msgspec.structs.replace(rollout, tokens=()) for rollout in group.rollouts)
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def load_checkpoint(state: Mapping[str, Any]) -> EngineCheckpoint:
    """Return the content of a checkpoint. Raise `UsageError` if the checkpoint is not valid."""
    if state.get("rookery") != FORMAT:
        raise UsageError(
            f"this is not an engine checkpoint of format {FORMAT} (its format is {state.get('rookery')!r}): pass "
            "what `state_dict` returned"
        )
    try:
        return msgspec.msgpack.decode(state["streams"], type=EngineCheckpoint)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise UsageError(f"this engine checkpoint is corrupt: {describe(error)}") from error
