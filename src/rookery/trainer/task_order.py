"""The order in which a training run draws its tasks if settled tasks are skipped.

The tasks are repeated in their order, but a task whose last group had equal rewards is skipped for a few epochs,
because such a group has no gradient: three epochs if every rollout solved it, otherwise one. Then it is tried
again, because the policy may have changed.

A resumed run draws the same tasks again, so the draws are part of a checkpoint.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

import msgspec

from rookery.core import Group, Task

SOLVED_REST: Final = 3
"""Epochs for which a task rests that every rollout of its last group solved."""
UNSOLVED_REST: Final = 1
"""Epochs for which a task rests whose last group had equal rewards otherwise."""


class TaskOrderState(msgspec.Struct, kw_only=True):
    """State of a `TaskOrder`, for a checkpoint. All lists hold indices of tasks or one number per task."""

    drawn: list[int] = []
    """All draws so far."""
    rests: list[int] = []
    """For each task, the number of epochs that it still rests."""
    position: int = 0
    """Number of tasks that were drawn or left out."""


class TaskOrder:
    """The tasks of a training run, repeated for ever, without those that rest.

    Iterating and `record` happen in one thread; `get_state` may be called from another.
    """

    def __init__(self, tasks: Sequence[Task], state: TaskOrderState | None = None) -> None:
        self._tasks = tasks
        state = state or TaskOrderState()
        self._numbers = {task.id: number for number, task in enumerate(tasks)}
        self._drawn = list(state.drawn)
        self._rests = list(state.rests) or [0] * len(tasks)
        self._position = state.position

    def __iter__(self) -> Iterator[Task]:
        """Yield the tasks from the first draw on, also in a resumed run."""
        for number in list(self._drawn):
            yield self._tasks[number]
        for position in count(self._position):
            number = position % len(self._tasks)
            self._position = position + 1
            if self._rests[number]:
                self._rests[number] -= 1
                continue
            self._drawn.append(number)
            yield self._tasks[number]

    def record(self, group: Group) -> None:
        """Note the rewards of a finished group."""
        from rookery.training import is_informative  # imports numpy, which `rookery train --help` does not need

        rewards = [reward for reward in group.rewards if reward is not None]
        if rewards:
            solved = min(rewards) >= 1
            rest = 0 if is_informative(group.rewards) else SOLVED_REST if solved else UNSOLVED_REST
            self._rests[self._numbers[group.task.id]] = rest

    def get_state(self) -> TaskOrderState:
        """Return a copy of the state."""
        return TaskOrderState(drawn=list(self._drawn), rests=list(self._rests), position=self._position)
