"""The order in which the tasks of a mixture of environments are run.

- In every prefix of the order, the number of tasks of an environment differs from its share, which follows from
  the weights, by less than the number of environments, as long as no environment has run out of tasks.
- The tasks of one environment keep their order.
- The order depends only on the tasks, the weights and the seed.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from rookery.core import Task, derive_seed


class EnvironmentTurns:
    """Decides which environment of a mixture is next, so that their shares follow their weights.

    The environment whose next turn is due first is chosen. Turn number n of an environment is due at
    `(n + offset) / weight`; the offsets, from 0 to 1, are derived from the seed.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        self._weights = dict(weights)
        self._offsets = {name: derive_seed(seed, "mixture", name) / 2**63 for name in weights}
        self._turns = dict.fromkeys(weights, 0)

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
