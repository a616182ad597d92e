"""Where a named stream of groups stands: its cursor, within an engine and in a trainer's checkpoint.

- A stream of a name goes on where the one before it ended: in the same engine, and after a checkpoint.
- A group that was taken is not handed out again. One that was not taken is, also over several checkpoints.
- Rollouts that run again draw the seeds they had.
- A checkpoint needs nothing of the run that made it: finished groups travel in it, tokens and all.
- A rollout that cannot be loaded is `Failed` in the checkpoint, and the checkpoint is made all the same.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import Group, Task, UsageError
from rookery.core.errors import describe
from rookery.engine.channel import Channel, Sourced
from rookery.engine.pacing import oldest
from rookery.engine.streams import with_segments
from rookery.journal import TokenReader

FORMAT = 1


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """One stream at the moment of a checkpoint."""

    pulled: int
    """How many groups were admitted."""
    taken: int
    open: list[int]
    """Ordinals of groups that were admitted and neither finished nor taken: they run again."""
    round: int = 0
    """How many times the stream was started over."""
    finished: list[Group]
    """Groups nobody had taken yet, with their segments."""
    ordinals: list[int] = []
    """The ordinal of each finished group; empty in checkpoints of older versions."""
    steps: int = 0


class Cursor(msgspec.Struct, kw_only=True):
    """Where the next stream of a name goes on."""

    pulled: int
    taken: int
    steps: int
    round: int
    again: list[Sourced]
    """Groups to run again, where the tasks are known. `ordinals` has all of them."""
    ordinals: set[int]
    """Positions in the tasks to run again."""
    finished: list[tuple[int, Group]]
    """Groups to hand out first, each with the write it was recorded by."""
    of: dict[int, Sourced]
    """By index: where the finished groups come from, as far as that is known."""
    marks: dict[int, int]
    """By index: the version that the finished groups were admitted under, as far as that is known."""
    rest: Iterator[Sourced] | None = None
    """What is left of tasks that can be gone through only once."""

    @classmethod
    def of_channel(cls, channel: Channel, number: int) -> "Cursor":
        """Where a stream ended in this engine."""
        finished = [*((0, group) for group in channel.queue), *channel.pending, *channel.spare]
        waiting = {group.index for _, group in finished}
        again = [_anew(sourced) for index, sourced in channel.untaken.items() if index not in waiting]
        pace = channel.schedule.pace
        return cls(
            pulled=channel.pulled,
            taken=channel.taken,
            steps=channel.steps,
            round=number,
            again=again,
            ordinals={sourced.ordinal for sourced in again} | channel.owed,
            finished=finished,
            of={index: sourced for index, sourced in channel.untaken.items() if index in waiting},
            marks=dict(pace.marks) if pace is not None else {},
        )

    @classmethod
    def of_state(cls, state: StreamState, number: Callable[[Task], int]) -> "Cursor":
        """Where a stream stood in a checkpoint; `number` gives a task's number in this journal."""
        origins = zip(state.finished, state.ordinals, strict=False)
        return cls(
            pulled=state.pulled,
            taken=state.taken,
            steps=state.steps,
            round=state.round,
            again=[],
            ordinals=set(state.open),
            finished=[(0, group) for group in state.finished],
            of={group.index: Sourced(ordinal, number(group.task), group.task) for group, ordinal in origins},
            marks={},
        )

    def run_again_unless(self, k: int) -> None:
        """Run finished groups again that have another number of rollouts than k."""
        for index, sourced in [
            (group.index, self.of[group.index])
            for _, group in self.finished
            if len(group.rollouts) != k and group.index in self.of
        ]:
            self.again.append(_anew(sourced))
            self.ordinals.add(sourced.ordinal)
            del self.of[index]
            self.finished = [one for one in self.finished if one[1].index != index]

    def restore(self, channel: Channel) -> None:
        """Let a new channel go on from here. Finished groups beyond its `want` stay for the stream after it."""
        schedule = channel.schedule
        channel.pulled, channel.taken, channel.steps = self.pulled, self.taken, self.steps
        channel.owed = set(self.ordinals)
        channel.untaken.update(self.of)
        count = len(self.finished) if schedule.want is None else schedule.want
        channel.spare = self.finished[count:]
        for number, group in self.finished[:count]:
            channel.pending.append((number, group))
            schedule.buffered += 1
            schedule.handed += 1
            if schedule.pace is not None:
                schedule.pace.admitted(group.index, self.marks.get(group.index, oldest(group)))

    @property
    def next_group(self) -> int:
        """An index that none of the finished groups has."""
        return max((group.index + 1 for _, group in self.finished), default=0)


def _anew(sourced: Sourced) -> Sourced:
    """The same task at the same place, to be admitted as a new group."""
    return msgspec.structs.replace(sourced, index=None, finished={}, attempts={})


class _EngineState(msgspec.Struct, kw_only=True):
    format: int
    seed: int
    streams: dict[str, StreamState]


def dump_state(
    seed: int,
    channels: Mapping[str, Channel],
    rounds: Mapping[str, int],
    folder: Path,
    unopened: Mapping[str, StreamState] | None = None,
    on_loaded: Callable[[Group, Group], None] | None = None,
) -> dict[str, Any]:
    """Return plain data (numbers, strings and one bytes value) that any checkpoint format can hold.

    `unopened` are streams of an earlier checkpoint that nobody has opened since: they are kept as they were.
    `on_loaded` gets each finished group before and after its segments were loaded.
    """
    with TokenReader(folder / "tokens") as reader:

        def load(group: Group) -> Group:
            loaded = with_segments(group, reader)
            if on_loaded is not None:
                on_loaded(group, loaded)
            return _detached(loaded)

        streams = {name: _stream(channel, rounds[name], load) for name, channel in channels.items()}
    streams.update(unopened or {})
    packed = msgspec.msgpack.encode(_EngineState(format=FORMAT, seed=seed, streams=streams))
    return {"rookery": FORMAT, "seed": seed, "streams": packed}


def _stream(channel: Channel, number: int, load: Callable[[Group], Group]) -> StreamState:
    cursor = Cursor.of_channel(channel, number)
    known = all(group.index in cursor.of for _, group in cursor.finished)
    return StreamState(
        pulled=cursor.pulled,
        taken=cursor.taken,
        round=number,
        open=sorted(cursor.ordinals),
        finished=[load(group) for _, group in cursor.finished],
        ordinals=[cursor.of[group.index].ordinal for _, group in cursor.finished] if known else [],
        steps=cursor.steps,
    )


def _detached(group: Group) -> Group:
    """Without the places of its tokens: they lie in this run's folder, and the next run has another."""
    rollouts = (msgspec.structs.replace(rollout, tokens=()) for rollout in group.rollouts)
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def load_state(state: Mapping[str, Any]) -> tuple[int, dict[str, StreamState]]:
    """The seed and the streams of a checkpoint."""
    if state.get("rookery") != FORMAT:
        raise UsageError(f"this is not an engine state of format {FORMAT}: {state.get('rookery')!r}")
    try:
        decoded = msgspec.msgpack.decode(state["streams"], type=_EngineState)
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise UsageError(f"this engine state is damaged: {describe(error)}") from error
    return decoded.seed, decoded.streams
