"""Tell runners which sandboxes to create before they are needed. Runs in the supervisor.

Used with providers whose sandboxes take long to create. `PrewarmPlan` is a pure controller that assigns upcoming
rollouts to runners; `Prewarmer` sends its decisions to the runners.

- No more sandboxes are prepared than the streams may currently start, and at most `limit` in total.
- Rollouts that start first are prepared first; streams take turns. Quarantined tasks are skipped.
- A rollout stays assigned to a runner until it starts or is not needed any more, because its sandbox may already
  exist there. Otherwise it goes to the runner with the least load.
- Tasks are never drawn from a generator in advance: only lists can be prepared.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import TypeAlias, cast

from rookery.core import Task
from rookery.engine.group_channel import GroupChannel, PlannedGroup
from rookery.engine.runner_handle import RunnerHandle
from rookery.engine.runner_pool import RunnerPool
from rookery.engine.runner_protocol import PrewarmRequest
from rookery.engine.scheduler import GroupScheduler

TaskDemand: TypeAlias = tuple[Task, int]
"""A task, and how many of its rollouts will start."""
LOOK_AHEAD = 4
"""Groups examined for each sandbox that may be prepared: some of them may be quarantined."""


def iter_upcoming(
    source: Iterable[Task] | Sequence[PlannedGroup], epochs: int | None, channel: GroupChannel
) -> Iterator[TaskDemand]:
    """Yield the groups that a stream will open, if its source is a list."""
    if not isinstance(source, Sequence) or not source:
        return iter(())
    if isinstance(source[0], PlannedGroup):
        return _iter_resumed(cast("Sequence[PlannedGroup]", source), channel)
    return _iter_tasks(cast("Sequence[Task]", source), epochs, channel)


def _iter_tasks(tasks: Sequence[Task], epochs: int | None, channel: GroupChannel) -> Iterator[TaskDemand]:
    """Yield the tasks that a checkpoint left to rerun, then the tasks after the cursor."""
    rest = count(channel.admitted) if epochs is None else range(channel.admitted, epochs * len(tasks))
    for ordinals in (sorted(channel.to_rerun), rest):
        for ordinal in ordinals:
            yield tasks[ordinal % len(tasks)], channel.scheduler.k


def _iter_resumed(groups: Sequence[PlannedGroup], channel: GroupChannel) -> Iterator[TaskDemand]:
    for planned in islice(groups, channel.drawn, None):
        yield planned.task, channel.scheduler.k - len(planned.finished)


def iter_demand(scheduler: GroupScheduler, upcoming: Iterable[TaskDemand]) -> Iterator[TaskDemand]:
    """Yield what a stream will start, in order: queued rollouts, then the groups that it may open now."""
    for rollout in scheduler.queued():
        yield rollout.group.task, 1
    yield from islice(upcoming, scheduler.openable_groups())


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
    """Remembers which upcoming rollouts are assigned to which runner. Runners are identified by name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._assigned: dict[str, dict[str, int]] = {}
        """By runner: the number of rollouts by task ID."""

    def assign(
        self, demand: Iterable[TaskDemand], load: Mapping[str, int], excluded: Collection[str] = ()
    ) -> dict[str, list[TaskDemand]]:
        """Return what each runner should prepare, in order.

        `load` is the number of rollouts that each runner has; `excluded` are IDs of tasks to skip.
        """
        tasks, left = self._first(demand, excluded)
        assigned: dict[str, dict[str, int]] = {name: {} for name in load}
        total = dict(load)
        for name in sorted(assigned, key=lambda name: total[name]):
            for task, number in self._assigned.get(name, {}).items():
                kept = min(number, left.get(task, 0))
                if kept:
                    assigned[name][task] = kept
                    left[task] -= kept
                    total[name] += kept
        for task in tasks if assigned else ():
            for _ in range(left[task]):
                name = min(total, key=total.__getitem__)
                assigned[name][task] = assigned[name].get(task, 0) + 1
                total[name] += 1
        self._assigned = assigned
        return {
            name: [(task, has[task_id]) for task_id, task in tasks.items() if task_id in has]
            for name, has in assigned.items()
        }

    def _first(
        self, demand: Iterable[TaskDemand], excluded: Collection[str]
    ) -> tuple[dict[str, Task], dict[str, int]]:
        """Return the tasks of the first `limit` rollouts by ID, in order, and the number of rollouts of each."""
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

    def start_rollout(self, task: str, runners: Sequence[str]) -> str | None:
        """Take a rollout of the task from the runner that has the most of them; None if no runner has one."""
        best = max(runners, key=lambda name: self._assigned.get(name, {}).get(task, 0), default=None)
        if best is None or not self._assigned.get(best, {}).get(task, 0):
            return None
        self._assigned[best][task] -= 1
        return best


class Prewarmer:
    """Sends changes of the plan to the runners. Does nothing if `limit` is 0."""

    def __init__(self, pool: RunnerPool, limit: int) -> None:
        self._pool = pool
        self._plan = PrewarmPlan(limit)

    def find_runner(self, task: str) -> RunnerHandle | None:
        """Return the runner that may have a sandbox ready for the task, unless it has twice its share of work."""
        if not self._plan.limit:
            return None
        most = 2 * self._pool.capacity
        able = {one.name: one for one in self._pool.runners if one.is_shared and len(one.running) < most}
        name = self._plan.start_rollout(task, list(able))
        return able[name] if name is not None else None

    def update(self, channels: Iterable[GroupChannel], quarantined: Collection[str] = ()) -> None:
        """Send each runner what it should prepare for these streams, if that has changed."""
        if not self._plan.limit:
            return
        active = [channel for channel in channels if not (channel.closed or channel.error)]
        demand = round_robin(iter_demand(channel.scheduler, channel.upcoming()) for channel in active)
        runners = {one.name: one for one in self._pool.runners if one.is_shared}
        load = {name: len(one.running) for name, one in runners.items()}
        for name, assigned in self._plan.assign(demand, load, quarantined).items():
            runner, counts = runners[name], [(task.id, number) for task, number in assigned]
            if counts != runner.prewarmed:
                known = {task for task, _ in runner.prewarmed}
                runner.prewarmed = counts
                runner.send(PrewarmRequest(counts, [task for task, _ in assigned if task.id not in known]))
