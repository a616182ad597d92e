"""Task samplers: choose the next task of an environment in a stream that repeats its tasks.

A sampler sees the rewards of finished groups, so it can skip tasks that teach nothing at the moment. A task that
is skipped is tried again later, because the policy changes.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import fsum
from typing import Any, Final, Protocol, TypeAlias

from rookery.core import UsageError
from rookery.core.errors import suggestion
from rookery.core.options import import_attribute


class TaskSampler(Protocol):
    """Chooses the next task of one environment. Tasks are numbered from 0."""

    def next(self) -> int:
        """Return the number of the next task to run."""
        ...

    def record(self, task: int, rewards: Sequence[float]) -> None:
        """Note the rewards of a finished group. Failed rollouts have none; there is at least one reward."""
        ...

    def get_state(self) -> Any:
        """Return the state as plain data, for a checkpoint."""
        ...

    def set_state(self, state: Any) -> None:
        """Restore what `get_state` returned."""
        ...


class UniformSampler:
    """Repeats the tasks in their order. A subclass can let tasks rest: they are skipped for some epochs."""

    def __init__(self, tasks: int) -> None:
        """`tasks` is the number of tasks."""
        self._rests = [0] * tasks
        """The number of epochs that each task still rests."""
        self._position = 0
        """Number of tasks that were chosen or skipped."""

    def next(self) -> int:
        for position in count(self._position):
            task = position % len(self._rests)
            if not self._rests[task]:
                self._position = position + 1
                return task
            self._rests[task] -= 1
        raise AssertionError  # the loop has no end, since rests only get shorter

    def record(self, task: int, rewards: Sequence[float]) -> None:
        self._rests[task] = self.rest_after(task, rewards)

    def rest_after(self, task: int, rewards: Sequence[float]) -> int:  # noqa: ARG002  (for subclasses)
        """Return the number of epochs for which a task rests whose group had these rewards."""
        return 0

    def get_state(self) -> dict[str, Any]:
        return {"rests": list(self._rests), "position": self._position}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._rests, self._position = list(state["rests"]), int(state["position"])


class SkipSettledSampler(UniformSampler):
    """Skips tasks whose last group had equal rewards, because such a group has no gradient.

    A task that every rollout solved (a reward of 1) rests for `solved` epochs, other tasks for `unsolved`.
    """

    def __init__(self, tasks: int, *, solved: int = 3, unsolved: int = 1) -> None:
        super().__init__(tasks)
        self._solved = check_count("solved", solved)
        self._unsolved = check_count("unsolved", unsolved)

    def rest_after(self, task: int, rewards: Sequence[float]) -> int:  # noqa: ARG002
        if len(rewards) > 1 and min(rewards) < max(rewards):
            return 0
        return self._solved if min(rewards) >= 1 else self._unsolved


class DifficultySampler(UniformSampler):
    """Skips tasks whose mean reward is outside of a window, so that tasks are neither too easy nor too hard.

    The mean reward of a task is a moving average over its groups, in which each group has the weight `memory` of
    the group after it. A task outside of the window `low` to `high` is checked again after `recheck` epochs.
    """

    def __init__(
        self, tasks: int, *, low: float = 0.1, high: float = 0.9, recheck: int = 4, memory: float = 0.5
    ) -> None:
        super().__init__(tasks)
        if not low <= high:
            raise UsageError(f"the difficulty window must have low <= high, got {low} and {high}")
        if not 0 <= memory < 1:
            raise UsageError(f"memory must be at least 0 and below 1, got {memory}")
        self._low, self._high, self._memory = low, high, memory
        self._recheck = check_count("recheck", recheck)
        self._means: list[float | None] = [None] * tasks

    def rest_after(self, task: int, rewards: Sequence[float]) -> int:
        mean, before = fsum(rewards) / len(rewards), self._means[task]
        if before is not None:
            mean = self._memory * before + (1 - self._memory) * mean
        self._means[task] = mean
        return 0 if self._low <= mean <= self._high else self._recheck

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "means": list(self._means)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._means = list(state["means"])


SamplerFactory: TypeAlias = Callable[[int], TaskSampler]
"""A function that makes the sampler of an environment with this number of tasks, such as a sampler class."""
SAMPLERS: Final[Mapping[str, SamplerFactory]] = {
    "uniform": UniformSampler,
    "skip-settled": SkipSettledSampler,
    "difficulty": DifficultySampler,
}


def check_count(name: str, value: int) -> int:
    """Return `value`. Raise `UsageError` if it is below 0."""
    if value < 0:
        raise UsageError(f"{name} must be at least 0 epochs, got {value}")
    return value


def find_sampler(sampler: str | SamplerFactory) -> SamplerFactory:
    """Return the factory of a sampler: one of `SAMPLERS` by name, `module:attribute`, or a function itself."""
    if not isinstance(sampler, str):
        return sampler
    if (found := SAMPLERS.get(sampler)) is not None:
        return found
    if ":" not in sampler:
        raise UsageError(
            f"unknown task sampler {sampler!r:.80}: known are {', '.join(SAMPLERS)}; or name "
            f"module:attribute{suggestion(sampler, SAMPLERS)}"
        )
    factory: SamplerFactory = import_attribute(sampler, "task sampler")
    return factory
