"""The state of one open stream of groups, shared by the supervisor and the stream's consumer.

Runs in the supervisor's process.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from rookery.core import Group, Rollout, RookeryError, Task
from rookery.engine.scheduler import GroupScheduler, OpenGroup
from rookery.tasks.task_order import TaskOrder

GroupFilter: TypeAlias = Callable[[Group], bool]
MAX_SKIPPED = 10_000
"""A stream ends with an error if this many groups in a row cannot be started because their environment is
stopped."""


def informative(group: Group) -> bool:
    """Return True if the group's valid rewards are not all equal. In other groups every advantage is zero."""
    rewards = {rollout.reward for rollout in group.valid}
    return len(rewards) > 1


class PlannedGroup(msgspec.Struct, frozen=True):
    """A group that is not started yet: its task, and the results of an earlier process of the same run."""

    ordinal: int
    """The group's position in its stream, counted from 0. Seeds are derived from it, so that a resumed stream uses
    the same seeds."""
    task_number: int
    """The task's number in the journal."""
    task: Task
    stream: str = ""
    """Name of the stream that started the group in an earlier process, from which seeds are derived; otherwise
    empty."""
    index: int | None = None
    """The group's index in the run if an earlier process started it, otherwise None."""
    finished: Mapping[int, Rollout] = {}
    """Final records that an earlier process wrote, by member."""
    attempts: Mapping[int, int] = {}
    """The number of attempts that an earlier process may have started, by member."""


class GroupChannel:
    """Connects `Engine.groups` with the supervisor: planned groups go in, finished groups come out."""

    def __init__(
        self, name: str, scheduler: GroupScheduler, source: Iterable[PlannedGroup], keep: GroupFilter | None
    ) -> None:
        self.name = name
        """The stream's name, followed by `#` and the number of restarts if there were any. Seeds are derived from
        it."""
        self.scheduler = scheduler
        self.keep = keep
        self.ready: deque[Group] = deque()
        """Finished groups whose records are committed to the journal and that the consumer has not taken."""
        self.pending: deque[tuple[int, Group]] = deque()
        """Finished groups whose records are not committed yet, each with the number of the journal write to wait
        for."""
        self.error: BaseException | None = None
        self.missing: RookeryError | None = None
        """The error to raise at the end of the stream because groups of a stopped environment are missing."""
        self.skipped = 0
        """Number of consecutive groups that were not started because their environment is stopped."""
        self.order: TaskOrder | None = None
        """The order of the tasks, if a task sampler chooses them. It gets the rewards of finished groups."""
        self.endless = False
        """True if the tasks are repeated for ever."""
        self.closed = False
        self._running = 0
        self.admitted = 0
        """Number of groups started in all streams of this name, including earlier processes."""
        self.untaken: dict[int, PlannedGroup] = {}
        """Started groups, by index, that were neither taken by the consumer nor dropped by the filter."""
        self.versions: dict[int, int] = {}
        """The policy version at which each of these groups was started, as far as it is known."""
        self.leftover: list[tuple[int, Group]] = []
        """Finished groups that the next stream of this name delivers, each with the number of the journal write
        that commits it (0 if it is committed)."""
        self.taken = 0
        """Number of groups taken from the stream of this name, including those before a checkpoint."""
        self.steps = 0
        """Number of training steps taken from the stream of this name."""
        self.tasks: object = None
        """The source of the tasks, to find out whether a later stream of this name has the same tasks."""
        self.abandoned = False
        """True if the consumer dropped the stream without closing it."""
        self.needs_tokens = False
        """True if the consumer trains. An inference engine that returns no token IDs then ends the stream with an
        error."""
        self.loads_segments = True
        """True if groups are delivered with their segments."""
        self.to_rerun: set[int] = set()
        """Ordinals of groups that have to run again, because they had not finished when the last stream of this
        name or the checkpoint ended, and that are not started again yet."""
        self.drawn = 0
        """Number of groups drawn from the source in this process."""
        self.upcoming: Callable[[], Iterable[tuple[Task, int]]] = tuple
        """Function that returns the tasks of future groups with their number of rollouts, as far as they are
        known."""
        self._source: Iterator[PlannedGroup] = iter(source)
        self._changed = asyncio.Event()

    @property
    def source(self) -> Iterator[PlannedGroup]:
        """Iterator over the groups that were not started yet. A later stream of this name may continue with it."""
        return self._source

    def next_group(self) -> PlannedGroup | None:
        """Return the next group to start, or None if there are no more groups.

        If the source of groups raises, return None and raise the exception in the consumer.
        """
        try:
            planned = next(self._source)
            self.drawn += 1
            self.admitted = max(self.admitted, planned.ordinal + 1)
            self.to_rerun.discard(planned.ordinal)
        except StopIteration:
            self.scheduler.exhausted = True
        except Exception as error:  # noqa: BLE001  (the consumer gets it unchanged)
            self.scheduler.exhausted = True
            self.fail(error)
        else:
            return planned
        return None

    def add_untaken(self, index: int, planned: PlannedGroup, version: int) -> None:
        """Record that a group was started at a policy version."""
        self.untaken[index] = planned
        self.versions[index] = version

    def remove_untaken(self, index: int) -> None:
        """Record that a group was taken by the consumer or dropped by the filter."""
        self.untaken.pop(index, None)
        self.versions.pop(index, None)

    def staleness(self, version: int) -> int:
        """Return how many policy versions ago the oldest group was started that the consumer has not taken."""
        return version - min(self.versions.values(), default=version)

    def skip(self, planned: PlannedGroup, error: RookeryError) -> None:
        """Do not start a group, because its environment is stopped.

        The stream ends with `error`. The group runs when the stream is continued, unless its task comes again.
        """
        self.missing = error
        if not self.endless:
            self.to_rerun.add(planned.ordinal)
        self.skipped += 1
        if self.skipped >= MAX_SKIPPED:
            self.fail(error)

    @property
    def running(self) -> int:
        """Number of this stream's running attempts. Setting it to 0 wakes up `wait`."""
        return self._running

    @running.setter
    def running(self, count: int) -> None:
        self._running = count
        if count == 0:
            self.notify()

    @property
    def ending(self) -> bool:
        """True if no further group will become ready: the stream is closed, or all its groups have finished."""
        return self.closed or (self.scheduler.done and not self.pending)

    @property
    def done(self) -> bool:
        return self.ending and (self.closed or not self.ready)

    def build_group(self, group: OpenGroup) -> Group:
        """Return the record of a group whose k rollouts have all ended."""
        records = tuple(rollout.record for rollout in group.rollouts if rollout.record is not None)
        assert len(records) == self.scheduler.k
        return Group(index=group.index, task=group.task, rollouts=records)

    def close(self) -> None:
        """Deliver no more groups. Finished groups are kept for the next stream of this name."""
        self.closed = True
        self.leftover = [*((0, group) for group in self.ready), *self.pending, *self.leftover]
        self.ready.clear()
        self.pending.clear()

    def fail(self, error: BaseException) -> None:
        """End the stream with this error, which the consumer gets. An earlier error is kept instead."""
        self.error = self.error or error
        self.notify()

    def notify(self) -> None:
        """Wake up the consumer, so that it checks the state of the channel again."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        self._changed.clear()
        await self._changed.wait()
