"""One stream of groups as the supervisor drives it: its tasks, its schedule, and the consumer's end."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from rookery.core import Group, Rollout, Task
from rookery.engine.schedule import OpenGroup, Stream

GroupFilter: TypeAlias = Callable[[Group], bool]


def informative(group: Group) -> bool:
    """Keeps groups whose valid rewards differ: the others have no advantage to learn from."""
    rewards = {rollout.reward for rollout in group.valid}
    return len(rewards) > 1


class Sourced(msgspec.Struct, frozen=True):
    """The next group of a stream: a task, and what an earlier process already did with it."""

    ordinal: int
    """Where it stands in the whole stream; seeds depend on it, so a resumed stream draws the same."""
    number: int
    """The task's number in the journal."""
    task: Task
    stream: str = ""
    """The stream that admitted it, where that was an earlier process's; seeds depend on it."""
    index: int | None = None
    """The group's index, where it was already admitted."""
    finished: Mapping[int, Rollout] = {}
    attempts: Mapping[int, int] = {}
    """By member: how many attempts an earlier process may have begun."""


class Channel:
    """Between `engine.groups` and the supervisor."""

    def __init__(self, name: str, schedule: Stream, source: Iterable[Sourced], keep: GroupFilter | None) -> None:
        self.name = name
        """With the number of its round, where others of this name went before it; seeds depend on it."""
        self.schedule = schedule
        self.keep = keep
        self.queue: deque[Group] = deque()
        """Finished, committed, not yet taken."""
        self.pending: deque[tuple[int, Group]] = deque()
        """Finished, waiting for the commit of what was put up to this number."""
        self.error: BaseException | None = None
        self.closed = False
        self._in_flight = 0
        self.pulled = 0
        """How many tasks of the stream were admitted, in this process and before."""
        self.untaken: dict[int, Sourced] = {}
        """Admitted groups, by index, that the consumer has neither taken nor filtered out."""
        self.spare: list[tuple[int, Group]] = []
        """Finished groups that wait for the next stream of this name, each with the write it was recorded by."""
        self.taken = 0
        """Number of groups taken from the stream of this name, including those before a checkpoint."""
        self.steps = 0
        """Number of training steps taken from the stream of this name."""
        self.tasks: object = None
        """What the tasks came from, to tell whether a later stream of this name has the same ones."""
        self.abandoned = False
        """Nobody holds the stream any more; it is closed at the next opportunity."""
        self.needs_tokens = False
        """Its consumer trains: a server that returns no token IDs ends the stream with an error."""
        self.trains = True
        """Its groups are handed out with their segments."""
        self.owed: set[int] = set()
        """Ordinals that a checkpoint says were under way, and that are not admitted again yet."""
        self.drawn = 0
        """How many groups came from its source, in this process."""
        self.upcoming: Callable[[], Iterable[tuple[Task, int]]] = tuple
        """The groups that will come from its source, where they can be seen beforehand: task and rollouts."""
        self._source: Iterator[Sourced] = iter(source)
        self._changed = asyncio.Event()

    @property
    def source(self) -> Iterator[Sourced]:
        """The groups that were not drawn yet. A later stream of this name may go on with them."""
        return self._source

    def next_task(self) -> Sourced | None:
        """The next task, or None when there is none left; the source's own error ends the channel."""
        try:
            sourced = next(self._source)
            self.drawn += 1
            self.pulled = max(self.pulled, sourced.ordinal + 1)
            self.owed.discard(sourced.ordinal)
        except StopIteration:
            self.schedule.exhausted = True
        except Exception as error:  # noqa: BLE001  (the consumer gets it, as it is)
            self.schedule.exhausted = True
            self.fail(error)
        else:
            return sourced
        return None

    @property
    def in_flight(self) -> int:
        """Attempts under way; when the last one ends, whoever waits for that is woken."""
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._in_flight = count
        if count == 0:
            self.changed()

    @property
    def ending(self) -> bool:
        """Nothing more will be finished."""
        return self.closed or (self.schedule.done and not self.pending)

    @property
    def done(self) -> bool:
        return self.ending and (self.closed or not self.queue)

    def group(self, group: OpenGroup) -> Group:
        records = tuple(member.record for member in group.members if member.record is not None)
        assert len(records) == self.schedule.k
        return Group(index=group.index, task=group.task, rollouts=records)

    def close(self) -> None:
        """Hand out nothing more. Finished groups are kept for the next stream of this name."""
        self.closed = True
        self.spare = [*((0, group) for group in self.queue), *self.pending, *self.spare]
        self.queue.clear()
        self.pending.clear()

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.changed()

    def changed(self) -> None:
        self._changed.set()

    async def wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()
