"""What attempts will ask sandboxes for soon, dealt over the runners: a pure controller.

Promises:
- never more is expected than the streams may still begin as they stand, nor than `most` in all;
- what is needed first is expected first, streams taking turns; a task that is out of the way is not expected;
- what was dealt to a runner stays there until it is begun or needed no more: its sandbox may be there already;
- otherwise it goes to the runner that has the least to do;
- nothing is taken from a source of tasks: what cannot be seen beforehand is not expected.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import TypeAlias, cast

from rookery.core import Task
from rookery.engine.channel import Channel, Sourced
from rookery.engine.schedule import Stream

Wanted: TypeAlias = tuple[Task, int]
"""A task, and how many of its rollouts will begin."""
LOOK = 4
"""Groups looked at for each that is expected: some are out of the way."""


def upcoming(source: Iterable[Task] | Sequence[Sourced], epochs: int | None, channel: Channel) -> Iterator[Wanted]:
    """The groups that a stream will open, where it goes over a list; of a resumed run, what is missing of them."""
    if not isinstance(source, Sequence) or not source:
        return iter(())
    if isinstance(source[0], Sourced):
        return _resumed(cast("Sequence[Sourced]", source), channel)
    return _listed(cast("Sequence[Task]", source), epochs, channel)


def _listed(tasks: Sequence[Task], epochs: int | None, channel: Channel) -> Iterator[Wanted]:
    """Those that a checkpoint owes come first."""
    owed = sorted(channel.owed)
    rest = count(channel.pulled) if epochs is None else range(channel.pulled, epochs * len(tasks))
    for ordinals in (owed, rest):
        for ordinal in ordinals:
            yield tasks[ordinal % len(tasks)], channel.schedule.k


def _resumed(sources: Sequence[Sourced], channel: Channel) -> Iterator[Wanted]:
    for sourced in islice(sources, channel.drawn, None):
        yield sourced.task, channel.schedule.k - len(sourced.finished)


def of_stream(schedule: Stream, groups: Iterable[Wanted]) -> Iterator[Wanted]:
    """What a stream will begin, in order: rollouts that wait for a runner, then groups that it may open now."""
    for pick in schedule.waiting():
        yield pick.group.task, 1
    yield from islice(groups, schedule.may_open_so_many())


def in_turns(streams: Iterable[Iterator[Wanted]]) -> Iterator[Wanted]:
    """One of each, until none has any."""
    left = list(streams)
    while left:
        for stream in list(left):
            found = next(stream, None)
            if found is None:
                left.remove(stream)
            else:
                yield found


class Ahead:
    """Remembers what was dealt to whom. Runners go by their names."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._dealt: dict[str, dict[str, int]] = {}
        """By runner: how many rollouts of a task."""

    def deal(
        self, wanted: Iterable[Wanted], busy: Mapping[str, int], without: Collection[str] = ()
    ) -> dict[str, list[Wanted]]:
        """What each runner is to expect, in order. `busy`: how many rollouts each has; `without`: tasks by id."""
        tasks, left = self._window(wanted, without)
        dealt: dict[str, dict[str, int]] = {name: {} for name in busy}
        load = dict(busy)
        for name in sorted(dealt, key=lambda name: load[name]):
            for task, number in self._dealt.get(name, {}).items():
                kept = min(number, left.get(task, 0))
                if kept:
                    dealt[name][task] = kept
                    left[task] -= kept
                    load[name] += kept
        for task in tasks if dealt else ():
            for _ in range(left[task]):
                name = min(load, key=load.__getitem__)
                dealt[name][task] = dealt[name].get(task, 0) + 1
                load[name] += 1
        self._dealt = dealt
        return {
            name: [(task, has[one]) for one, task in tasks.items() if one in has] for name, has in dealt.items()
        }

    def _window(
        self, wanted: Iterable[Wanted], without: Collection[str]
    ) -> tuple[dict[str, Task], dict[str, int]]:
        """The first `most` rollouts: their tasks by id, in order, and how many of each."""
        tasks: dict[str, Task] = {}
        counts: dict[str, int] = {}
        room = self.most
        for task, number in islice(wanted, LOOK * self.most):
            if room <= 0:
                break
            if task.id in without or task.invalid or number <= 0:
                continue
            taken = min(number, room)
            tasks.setdefault(task.id, task)
            counts[task.id] = counts.get(task.id, 0) + taken
            room -= taken
        return tasks, counts

    def begun(self, task: str, among: Sequence[str]) -> str | None:
        """A rollout of the task begins: the runner that expects it most, of these; None where none does."""
        best = max(among, key=lambda name: self._dealt.get(name, {}).get(task, 0), default=None)
        if best is None or not self._dealt.get(best, {}).get(task, 0):
            return None
        self._dealt[best][task] -= 1
        return best
