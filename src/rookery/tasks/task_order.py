"""The order in which tasks are run: environments of a mixture take turns, and samplers choose among their tasks.

- In every prefix of the order, the number of tasks of an environment differs from its share, which follows from
  the weights, by less than the number of environments, as long as no environment has run out of tasks.
- Without a sampler, the tasks of one environment keep their order, and the whole order depends only on the tasks,
  the weights and the seed.
- A `TaskOrder` that is restored from its state draws the same tasks again, then continues in the same way.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from rookery.core import Group, Task, UsageError, derive_seed
from rookery.tasks.samplers import SamplerFactory, find_sampler


class EnvironmentTurns:
    """Decides which environment of a mixture is next, so that their shares follow their weights.

    The environment whose next turn is due first is chosen. Turn number n of an environment is due at
    `(n + offset) / weight`; the offsets, from 0 to 1, are derived from the seed.
    """

    def __init__(self, weights: Mapping[str, float], seed: int, turns: Mapping[str, int] | None = None) -> None:
        """`turns` is the number of turns that each environment has had."""
        self._weights = dict(weights)
        self._offsets = {name: derive_seed(seed, "mixture", name) / 2**63 for name in weights}
        self._turns = dict.fromkeys(weights, 0) | dict(turns or {})

    def next(self, candidates: Collection[str]) -> str:
        """Return the name of the environment, one of `candidates`, whose turn it is, and count the turn."""
        chosen = min(candidates, key=self._due)
        self._turns[chosen] += 1
        return chosen

    def _due(self, name: str) -> tuple[float, str]:
        return (self._turns[name] + self._offsets[name]) / self._weights[name], name


def group_by_environment(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Return the tasks of each environment, in their order."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(task.environment, []).append(task)
    return found


def interleave_tasks(tasks: Iterable[Task], weights: Mapping[str, float], seed: int) -> list[Task]:
    """Return the tasks of several environments in the order in which they take turns, each task once.

    When an environment has no more tasks, the others continue.
    """
    left = {name: deque(own) for name, own in group_by_environment(tasks).items()}
    turns = EnvironmentTurns(weights, seed)
    ordered: list[Task] = []
    while left:
        name = turns.next(left)
        ordered.append(left[name].popleft())
        if not left[name]:
            del left[name]
    return ordered


SamplerOption: TypeAlias = str | SamplerFactory | Mapping[str, str | SamplerFactory]
"""A task sampler by name, its factory, or one of them for each environment of a mixture, by name."""


class TaskOrderState(msgspec.Struct, kw_only=True):
    """State of a `TaskOrder`, for a checkpoint."""

    tasks: int
    """Number of tasks."""
    drawn: list[int]
    """The numbers of all tasks drawn so far. Tasks are numbered from 0."""
    samplers: dict[str, Any]
    """The state of the sampler of each environment."""


class TaskOrder:
    """The tasks of a stream without end: environments take turns, and their samplers choose the tasks.

    Iterating and `record` happen in one thread; `get_state` may be called from another.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        sampler: SamplerOption = "uniform",
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        state: TaskOrderState | None = None,
    ) -> None:
        """`weights` are those of the environments of a mixture, and `seed` determines the order of their turns.

        Raise `UsageError` if there are no tasks, if a sampler is unknown, or if `state` has other tasks.
        """
        if not tasks:
            raise UsageError("a task sampler needs at least one task")
        self._tasks = tasks
        self._numbers = {task.id: number for number, task in enumerate(tasks)}
        self._by_environment: dict[str, list[int]] = {}
        self._places: list[int] = []
        """The number of each task among the tasks of its environment."""
        for number, task in enumerate(tasks):
            own = self._by_environment.setdefault(task.environment, [])
            self._places.append(len(own))
            own.append(number)
        self._samplers = {
            name: find_sampler(sampler.get(name, "uniform") if isinstance(sampler, Mapping) else sampler)(len(own))
            for name, own in self._by_environment.items()
        }
        self._drawn = list(state.drawn) if state is not None else []
        if state is not None:
            if state.tasks != len(tasks) or state.samplers.keys() != self._samplers.keys():
                raise UsageError(
                    f"the checkpoint has {state.tasks} tasks of {', '.join(map(repr, state.samplers))}, but this "
                    f"stream has {len(tasks)} of {', '.join(map(repr, self._samplers))}: pass the same tasks"
                )
            try:
                for name, one in self._samplers.items():
                    one.set_state(state.samplers[name])
            except (KeyError, TypeError, ValueError) as error:
                problem = "the checkpoint was written with another task sampler: pass the same one"
                raise UsageError(problem) from error
        turns = Counter(tasks[number].environment for number in self._drawn)
        all_weights = {name: (weights or {}).get(name, 1.0) for name in self._by_environment}
        self._turns = EnvironmentTurns(all_weights, seed, turns)

    def __iter__(self) -> Iterator[Task]:
        """Yield the tasks from the first draw on, also those that were drawn before."""
        for number in list(self._drawn):
            yield self._tasks[number]
        while True:
            name = self._turns.next(self._by_environment)
            number = self._by_environment[name][self._samplers[name].next()]
            self._drawn.append(number)
            yield self._tasks[number]

    def record(self, group: Group) -> None:
        """Pass the rewards of a finished group to the sampler of its environment."""
        rewards = [rollout.reward for rollout in group.valid if rollout.reward is not None]
        number = self._numbers.get(group.task.id)
        if rewards and number is not None:
            self._samplers[group.environment].record(self._places[number], rewards)

    def get_state(self) -> TaskOrderState:
        """Return a copy of the state."""
        return TaskOrderState(
            tasks=len(self._tasks),
            drawn=list(self._drawn),
            samplers={name: one.get_state() for name, one in self._samplers.items()},
        )
