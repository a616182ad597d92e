"""The state of one open stream of groups, shared by the supervisor and the consumer. Runs in the supervisor."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from rookery.core import Group, Rollout, Task
from rookery.engine.scheduler import GroupScheduler, OpenGroup

GroupFilter: TypeAlias = Callable[[Group], bool]


def informative(group: Group) -> bool:
    """Keep groups whose valid rewards differ: in all others every advantage is zero."""
    rewards = {rollout.reward for rollout in group.valid}
    return len(rewards) > 1


class PlannedGroup(msgspec.Struct, frozen=True):
    """A group that is not admitted yet: its task, and what an earlier process already did."""

    ordinal: int
    """The position in the whole stream. Seeds depend on it, so that a resumed stream draws the same."""
    task_number: int
    """The task's number in the journal."""
    task: Task
    stream: str = ""
    """The stream that admitted the group in an earlier process. Seeds depend on it."""
    index: int | None = None
    """The group's index, if it was admitted by an earlier process."""
    finished: Mapping[int, Rollout] = {}
    attempts: Mapping[int, int] = {}
    """By member: the number of attempts that an earlier process may have started."""


class GroupChannel:
    """Connects `Engine.groups` with the supervisor: planned groups go in, finished groups come out."""

    def __init__(
        self, name: str, scheduler: GroupScheduler, source: Iterable[PlannedGroup], keep: GroupFilter | None
    ) -> None:
        self.name = name
        """The stream's name, with the number of its round if it was restarted. Seeds depend on it."""
        self.scheduler = scheduler
        self.keep = keep
        self.ready: deque[Group] = deque()
        """Finished and committed groups that the consumer has not taken."""
        self.pending: deque[tuple[int, Group]] = deque()
        """Finished groups whose records are not committed yet, with the number of their journal write."""
        self.error: BaseException | None = None
        self.closed = False
        self._running = 0
        self.admitted = 0
        """Number of groups admitted from the stream, including earlier processes."""
        self.untaken: dict[int, PlannedGroup] = {}
        """Admitted groups, by index, that were neither taken by the consumer nor dropped by the filter."""
        self.leftover: list[tuple[int, Group]] = []
        """Finished groups for the next stream of this name, each with the number of its journal write."""
        self.taken = 0
        """Number of groups taken from the stream of this name, including those before a checkpoint."""
        self.steps = 0
        """Number of training steps taken from the stream of this name."""
        self.tasks: object = None
        """The source of the tasks, to find out whether a later stream of this name has the same tasks."""
        self.abandoned = False
        """Set when the consumer dropped the stream without closing it."""
        self.needs_tokens = False
        """The consumer trains: a model server that returns no token IDs ends the stream with an error."""
        self.loads_segments = True
        """Groups are delivered with their segments."""
        self.to_rerun: set[int] = set()
        """Ordinals that were running at a checkpoint and are not admitted again yet."""
        self.drawn = 0
        """Number of groups drawn from the source in this process."""
        self.upcoming: Callable[[], Iterable[tuple[Task, int]]] = tuple
        """Returns the tasks of the groups to come and their number of rollouts, as far as they are known."""
        self._source: Iterator[PlannedGroup] = iter(source)
        self._changed = asyncio.Event()

    @property
    def source(self) -> Iterator[PlannedGroup]:
        """The groups that were not drawn yet. A later stream of this name may continue with them."""
        return self._source

    def next_group(self) -> PlannedGroup | None:
        """Return the next group, or None if there is none. An exception of the source ends the channel."""
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

    @property
    def running(self) -> int:
        """Number of running attempts. Waiters are notified when it becomes 0."""
        return self._running

    @running.setter
    def running(self, count: int) -> None:
        self._running = count
        if count == 0:
            self.notify()

    @property
    def ending(self) -> bool:
        """True if no further group will finish."""
        return self.closed or (self.scheduler.done and not self.pending)

    @property
    def done(self) -> bool:
        return self.ending and (self.closed or not self.ready)

    def build_group(self, group: OpenGroup) -> Group:
        """Return a complete group with its k records in order."""
        records = tuple(rollout.record for rollout in group.rollouts if rollout.record is not None)
        assert len(records) == self.scheduler.k
        return Group(index=group.index, task=group.task, rollouts=records)

    def close(self) -> None:
        """Deliver nothing more. Finished groups stay for the next stream of this name."""
        self.closed = True
        self.leftover = [*((0, group) for group in self.ready), *self.pending, *self.leftover]
        self.ready.clear()
        self.pending.clear()

    def fail(self, error: BaseException) -> None:
        """Raise this error in the consumer, unless there is an earlier one."""
        self.error = self.error or error
        self.notify()

    def notify(self) -> None:
        """Wake up the consumer to look at the channel again."""
        self._changed.set()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        self._changed.clear()
        await self._changed.wait()
