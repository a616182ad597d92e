"""Groups in steps, for a trainer whose rollouts go on while it trains.

    async for step in engine.steps(tasks, k=8, groups=16, lag=1):
        train(step.groups)
        async with engine.upstream.sync(step.version + 1, load):
            pass

Promises:
- nothing that is older than `lag` versions trains; how that is so without dropping is in `pacing.py`;
- where versions were jumped over all the same, what became too old is handed out as `stale`, with an event, and
  other groups take its place in the step;
- a group counts as taken when the consumer has its step: a cancelled or failed `anext` puts it back.
"""

from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import msgspec

from rookery.core import Group
from rookery.engine.group_stream import ChooseGroups, GroupStream
from rookery.engine.staleness import StalenessBound, oldest_version
from rookery.engine.upstream import EngineUpstream


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to train on next."""

    number: int
    """Counts from 0 over all streams of its name, until one is started over."""
    version: int
    """Of the policy, when the step was handed out: ages count from it."""
    groups: tuple[Group, ...]
    stale: tuple[Group, ...] = ()
    """Too old to train; only where versions were jumped over."""


class StepStream(AsyncIterator[Step]):
    """`async for step in engine.steps(…)`. Closing it cancels what is still under way."""

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
        """Cancels the stream; rollouts under way end as Cancelled(user)."""
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
