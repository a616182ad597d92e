"""Tell runners which sandboxes to create before they are needed. Runs in the supervisor's process.

Used with providers whose sandboxes take long to create. `PrewarmPlan` remembers to which runner each upcoming
rollout is assigned; `Prewarmer` tells the runners. The work for an attempt depends on `limit`, not on the number
of runners.

- Sandboxes are prepared only for rollouts that the streams may start now, and for at most `limit` rollouts in
  total.
- Rollouts that start first are prepared first; streams take turns. Quarantined (broken) tasks are skipped.
- A rollout stays assigned to a runner until it starts or is not needed any more, because its sandbox may already
  exist there. A rollout without an assignment goes to the runner that would get it if it started now.
- Sandboxes are prepared only if the stream's tasks are a list: tasks are never drawn from a generator in advance.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import TypeAlias, cast

from rookery.core import Task
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.runner_handle import RunnerHandle
from rookery.engine.runner_pool import RunnerPool
from rookery.engine.runner_protocol import PrewarmRequest
from rookery.engine.scheduler import GroupScheduler

TaskDemand: TypeAlias = tuple[Task, int]
"""A task, and the number of its rollouts that will start."""
LOOK_AHEAD = 4
"""Number of upcoming groups that are examined for each sandbox that may be prepared, because some tasks are
skipped."""


def iter_upcoming(
    source: Iterable[Task] | Sequence[PlannedGroup], epochs: int | None, channel: GroupChannel
) -> Iterator[TaskDemand]:
    """Yield the tasks of the groups that a stream will start. Yield nothing if `source` is not a list."""
    if not isinstance(source, Sequence) or not source:
        return iter(())
    if isinstance(source[0], PlannedGroup):
        return _iter_resumed(cast("Sequence[PlannedGroup]", source), channel)
    return _iter_tasks(cast("Sequence[Task]", source), epochs, channel)


def _iter_tasks(tasks: Sequence[Task], epochs: int | None, channel: GroupChannel) -> Iterator[TaskDemand]:
    """Yield the tasks of groups that have to run again, then the tasks that were not started yet."""
    rest = count(channel.admitted) if epochs is None else range(channel.admitted, epochs * len(tasks))
    for ordinals in (sorted(channel.to_rerun), rest):
        for ordinal in ordinals:
            yield tasks[ordinal % len(tasks)], channel.scheduler.k


def _iter_resumed(groups: Sequence[PlannedGroup], channel: GroupChannel) -> Iterator[TaskDemand]:
    for planned in islice(groups, channel.drawn, None):
        yield planned.task, channel.scheduler.k - len(planned.finished)


def iter_demand(scheduler: GroupScheduler, upcoming: Iterable[TaskDemand]) -> Iterator[TaskDemand]:
    """Yield what a stream will start, in order: queued rollouts, then the new groups that it may start now."""
    for rollout in scheduler.queued():
        yield rollout.group.task, 1
    yield from islice(upcoming, scheduler.startable_groups())


def round_robin(streams: Iterable[Iterator[TaskDemand]]) -> Iterator[TaskDemand]:
    """Yield one item of each stream in turn until all are exhausted."""
    left = list(streams)
    while left:
        for stream in list(left):
            found = next(stream, None)
            if found is None:
                left.remove(stream)
            else:
                yield found


class PrewarmPlan:
    """Remembers which upcoming rollouts are assigned to which runner.

    `choose` returns the runner that should get the next attempt of a task if the assigned rollouts (`planned` of
    each runner) were already running, or None.
    """

    def __init__(self, limit: int, choose: Callable[[Task], RunnerHandle | None]) -> None:
        self.limit = limit
        self._choose = choose
        self._assigned: dict[str, dict[RunnerHandle, int]] = {}
        """The runners of the assigned rollouts of each task ID, with their numbers."""

    def assign(
        self, demand: Iterable[TaskDemand], excluded: Collection[str] = ()
    ) -> dict[RunnerHandle, list[TaskDemand]]:
        """Return the tasks for whose rollouts runners should prepare sandboxes, in order.

        The list of a runner is empty if it has no assigned rollout any more. `excluded` are IDs of tasks to skip.
        """
        tasks, left = self._first(demand, excluded)
        before, self._assigned = self._assigned, {task: {} for task in tasks}
        found: dict[RunnerHandle, list[TaskDemand]] = {}
        for runners in before.values():
            for runner in runners:
                runner.planned = 0
                found[runner] = []
        for task, runners in before.items():
            for runner in sorted(runners, key=lambda one: len(one.running)):
                kept = min(runners[runner], left.get(task, 0)) if runner.is_shared else 0
                if kept:
                    self._add(task, runner, kept)
                    left[task] -= kept
        for task, number in left.items():
            for _ in range(number):
                chosen = self._choose(tasks[task])
                if chosen is None:
                    break
                self._add(task, chosen, 1)
        for task, runners in self._assigned.items():
            for runner, number in runners.items():
                found.setdefault(runner, []).append((tasks[task], number))
        return found

    def _add(self, task: str, runner: RunnerHandle, number: int) -> None:
        runners = self._assigned[task]
        runners[runner] = runners.get(runner, 0) + number
        runner.planned += number

    def _first(
        self, demand: Iterable[TaskDemand], excluded: Collection[str]
    ) -> tuple[dict[str, Task], dict[str, int]]:
        """Return the tasks of the first `limit` rollouts, by ID and in order, and how many rollouts each has."""
        tasks: dict[str, Task] = {}
        counts: dict[str, int] = {}
        left = self.limit
        for task, number in islice(demand, LOOK_AHEAD * self.limit):
            if left <= 0:
                break
            if task.id in excluded or task.invalid or number <= 0:
                continue
            taken = min(number, left)
            tasks.setdefault(task.id, task)
            counts[task.id] = counts.get(task.id, 0) + taken
            left -= taken
        return tasks, counts

    def start_rollout(self, task: str) -> RunnerHandle | None:
        """Choose the runner with the most assigned rollouts of the task, and remove one of them.

        Return None if no rollout of the task is assigned to a runner.
        """
        runners = self._assigned.get(task, {})
        best = max(runners, key=runners.__getitem__, default=None)
        if best is None or not runners[best]:
            return None
        runners[best] -= 1
        best.planned -= 1
        return best


class Prewarmer:
    """Tells the runners of a pool which sandboxes to prepare. Does nothing if `limit` is 0."""

    def __init__(self, pool: RunnerPool, limit: int) -> None:
        self._plan = PrewarmPlan(limit, pool.find_runner_to_prewarm)

    def find_runner(self, task: str) -> RunnerHandle | None:
        """Return a runner that may have a sandbox ready for the task, or None."""
        return self._plan.start_rollout(task) if self._plan.limit else None

    def update(self, channels: Iterable[GroupChannel], quarantined: Collection[str] = ()) -> None:
        """Send each runner which sandboxes it should prepare for these streams, if that has changed."""
        if not self._plan.limit:
            return
        active = [channel for channel in channels if not (channel.closed or channel.error)]
        demand = round_robin(iter_demand(channel.scheduler, channel.upcoming()) for channel in active)
        for runner, assigned in self._plan.assign(demand, quarantined).items():
            counts = [(task.id, number) for task, number in assigned]
            if counts != runner.prewarmed:
                known = {task for task, _ in runner.prewarmed}
                runner.prewarmed = counts
                runner.send(PrewarmRequest(counts, [task for task, _ in assigned if task.id not in known]))
