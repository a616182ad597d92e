"""A stream's place, for a trainer's checkpoint.

Promises:
- a group that was taken before the checkpoint is not handed out again after it; one that was not taken is, also
  over several checkpoints in a row;
- rollouts that run again after a restore draw the seeds they had;
- a checkpoint needs nothing of the run that made it: finished groups travel in it, tokens and all;
- a rollout that cannot be loaded is `Failed` in the checkpoint, and the checkpoint is made all the same.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rookery.core import Group, UsageError
from rookery.core.errors import describe
from rookery.engine.channel import Channel
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
    """Ordinals of groups under way: they run again."""
    round: int = 0
    """How many streams of this name went before it."""
    finished: list[Group]
    """Groups nobody had taken yet, with their segments."""

    def left(self, want: int | None) -> int | None:
        """How many groups are still to be taken of those that were wanted."""
        return None if want is None else max(0, want - self.taken)

    def restore(self, channel: Channel) -> None:
        channel.pulled = self.pulled
        channel.taken = self.taken
        channel.owed = set(self.open)
        for group in self.finished:
            channel.queue.append(group)
            channel.schedule.buffered += 1
            channel.schedule.handed += 1
            if channel.schedule.pace is not None:
                channel.schedule.pace.admitted(group.index, oldest(group))


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
    waiting = [*channel.queue, *(group for _, group in channel.pending)]
    indices = {group.index for group in waiting}
    return StreamState(
        pulled=channel.pulled,
        taken=channel.taken,
        round=number,
        open=sorted({*(ordinal for at, ordinal in channel.ordinals.items() if at not in indices), *channel.owed}),
        finished=[load(group) for group in waiting],
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
