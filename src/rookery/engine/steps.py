"""The stream of training steps that `Engine.steps` returns. Rollouts continue while the consumer trains.

Runs in the supervisor's process.

    async for step in engine.steps(tasks, k=8, groups=16, lag=1):
        train(step.groups)
        async with engine.upstream.sync(step.version + 1, load):
            pass

- `Step.groups` contains no group whose tokens are older than `lag` policy versions (`staleness.py`).
- If the trainer skipped versions, groups that became too old are delivered as `Step.stale`, and an event is
  recorded. Other groups replace them in the step.
- A group counts as taken when the consumer has its step. A cancelled or failed `anext` puts the groups back.
"""

from collections import deque

import msgspec

from rookery.core import Group
from rookery.core.lifetimes import ClosableStream
from rookery.engine.group_stream import ChooseGroups, GroupStream
from rookery.engine.staleness import StalenessBound, oldest_version
from rookery.engine.upstream import EngineUpstream


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one training step."""

    number: int
    """The step's number, counted from 0 over all streams of the same name. A stream with `restart=True` begins at
    0."""
    version: int
    """Policy version at the time of delivery. The age of a group is the number of versions up to this one."""
    groups: tuple[Group, ...]
    """The groups to train on. The last step of a stream may have fewer than the others."""
    stale: tuple[Group, ...] = ()
    """Groups that are too old to train on. The tuple is empty unless the trainer skipped versions."""


class StepStream(ClosableStream[Step]):
    """Iterates over training steps: `async for step in engine.steps(…)`. Closing it cancels running rollouts."""

    def __init__(self, stream: GroupStream, staleness: StalenessBound, upstream: EngineUpstream) -> None:
        self._stream = stream
        self._staleness = staleness
        self._upstream = upstream

    async def __anext__(self) -> Step:
        stream, staleness = self._stream, self._staleness
        staleness.start_step(self._upstream.version, stream.taken)
        stream.admit_more()
        took: list[Group] = []
        stale: list[Group] = []
        try:
            while len(took) < staleness.size:
                more = await stream.take(self._chooser(staleness.size - len(took)))
                if not more:
                    break
                took += more
                old = [group for group in took if self._is_stale(group)]
                took = [group for group in took if group not in old]
                stale += old
        except BaseException:
            stream.put_back([*stale, *took])
            raise
        if not took and not stale:
            raise StopAsyncIteration
        stream.mark_taken([*stale, *took])
        for group in (*stale, *took):
            staleness.remove(group.index)
        number = self._stream.next_step()
        version = self._upstream.version
        if stale:
            stream.record_event("groups.stale", {"groups": [group.index for group in stale], "version": version})
        return Step(number=number, version=version, groups=tuple(took), stale=tuple(stale))

    def _is_stale(self, group: Group) -> bool:
        version = oldest_version(group)
        return version is not None and version < self._upstream.version - self._staleness.lag

    def _chooser(self, count: int) -> ChooseGroups:
        def choose(ready: deque[Group], ending: bool) -> list[Group]:
            finished = {group.index: group for group in ready}
            return [finished[at] for at in self._staleness.choose(list(finished), count, ending=ending)]

        return choose

    async def aclose(self) -> None:
        """Close the stream and wait until its running rollouts have ended as `Cancelled("user")`."""
        await self._stream.aclose()
