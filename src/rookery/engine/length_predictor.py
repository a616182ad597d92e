"""Predict how long a rollout will be, so that long rollouts can start early. Used by the supervisor; does no I/O.

If the longest rollout of a batch starts last, everything else waits for it at the end. Predictions change only the
order in which rollouts start, never which groups are run or delivered.
"""

from collections.abc import Iterable

import msgspec

from rookery.core import Rollout, Task

MAX_TASKS = 100_000
"""Number of tasks whose lengths are remembered. If there are more, the task that was seen first is forgotten."""


class LengthState(msgspec.Struct, frozen=True):
    """State of a `LengthPredictor`, for a checkpoint."""

    tasks: dict[str, float] = {}
    """Moving average of the lengths of a task's rollouts, by task ID."""
    environments: dict[str, tuple[int, float]] = {}
    """The number of rollouts and their mean length, by environment."""


class LengthPredictor:
    """Predicts the number of tokens that the policy samples in a rollout, from earlier rollouts.

    The prediction is a moving average over the rollouts of the same task or, for a new task, the mean over its
    environment. It is infinite for the first tasks of an environment, since they may be long.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, float] = {}
        self._environments: dict[str, tuple[int, float]] = {}
        """The number of rollouts and their mean length, by environment."""

    def get_state(self) -> LengthState:
        """Return a copy of the state. Another thread may call this."""
        return LengthState(dict(self._tasks), dict(self._environments))

    def set_state(self, state: LengthState) -> None:
        """Restore what `get_state` returned."""
        self._tasks, self._environments = dict(state.tasks), dict(state.environments)

    def record_all(self, rollouts: Iterable[Rollout]) -> None:
        """Note the lengths of several rollouts, in order."""
        for rollout in rollouts:
            self.record(rollout)

    def record(self, rollout: Rollout) -> None:
        """Note the length of a rollout. Rollouts without a reward are ignored, because they ended early."""
        if not rollout.valid:
            return
        length = float(rollout.usage.sampled_tokens)
        before = self._tasks.get(rollout.task)
        self._tasks[rollout.task] = length if before is None else (before + length) / 2
        if len(self._tasks) > MAX_TASKS:
            del self._tasks[next(iter(self._tasks))]
        count, mean = self._environments.get(rollout.environment, (0, 0.0))
        self._environments[rollout.environment] = count + 1, mean + (length - mean) / (count + 1)

    def predict(self, task: Task) -> float:
        """Return the expected number of sampled tokens of a rollout of the task."""
        found = self._tasks.get(task.id)
        if found is not None:
            return found
        _, mean = self._environments.get(task.environment, (0, float("inf")))
        return mean
