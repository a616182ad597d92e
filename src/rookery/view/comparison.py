"""Compare two runs over the same tasks. `rookery compare` prints the result and the viewer shows it.

- Runs are paired by task ID. A task without a valid rollout in one of the runs is not compared.
- Each task counts once, whatever its number of rollouts, so the interval of the difference is clustered by task.
- No mean counts failed or cancelled rollouts.
"""

from math import sqrt
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec

from rookery.core.estimates import RewardEstimate, t_quantile_975
from rookery.view.summary import find_differing_settings, flatten_settings

if TYPE_CHECKING:
    from rookery.journal import RunReader

Change: TypeAlias = Literal["gained", "lost", "improved", "worsened", "same"]
"""Change of a task from the first run to the second. `gained` and `lost`: its pass rate rose above one half, or
fell to one half or less; only if all rewards are 0 or 1. `improved` and `worsened`: any other difference."""

TOLERANCE = 1e-12


class TaskPair(msgspec.Struct, frozen=True, kw_only=True):
    """Mean rewards of one task in the two runs, over its valid rollouts."""

    task: str
    a: float
    b: float
    a_valid: int
    b_valid: int
    change: Change

    @property
    def difference(self) -> float:
        return self.b - self.a


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of run B with run A, paired by task. Differences are B minus A."""

    a: str
    b: str
    binary: bool
    """True if all rewards are 0 or 1, so that means are pass rates."""
    pairs: tuple[TaskPair, ...]
    """The compared tasks, ordered by difference."""
    only_a: int
    """Number of tasks with valid rollouts in run A only."""
    only_b: int
    changed_tasks: tuple[str, ...]
    """Compared tasks whose content (prompt, scoring data, …) differs between the runs."""
    settings: dict[str, tuple[str | None, str | None]]
    """Settings in which the runs differ. A value of None is the default."""

    @property
    def a_mean(self) -> float | None:
        """Mean over the compared tasks of the task's mean reward in run A."""
        return _mean([pair.a for pair in self.pairs])

    @property
    def b_mean(self) -> float | None:
        return _mean([pair.b for pair in self.pairs])

    @property
    def difference(self) -> float | None:
        """Mean difference over the compared tasks, or None if there are none."""
        return _mean([pair.difference for pair in self.pairs])

    @property
    def standard_error(self) -> float | None:
        """Standard error of `difference` over tasks. It is None with fewer than two tasks."""
        mean, count = self.difference, len(self.pairs)
        if mean is None or count < 2:
            return None
        return sqrt(sum((pair.difference - mean) ** 2 for pair in self.pairs) / (count - 1) / count)

    @property
    def interval95(self) -> tuple[float, float] | None:
        """Student's t interval of `difference`, or None with fewer than two tasks."""
        mean, error = self.difference, self.standard_error
        if mean is None or error is None:
            return None
        half = t_quantile_975(len(self.pairs) - 1) * error
        return mean - half, mean + half

    def changed(self, *changes: Change) -> list[TaskPair]:
        """Return the pairs with one of these changes, the largest difference first."""
        found = [pair for pair in self.pairs if pair.change in changes]
        return sorted(found, key=lambda pair: (-abs(pair.difference), pair.task))

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain data, for `--json` and the viewer."""
        return {
            "a": self.a,
            "b": self.b,
            "binary": self.binary,
            "tasks": len(self.pairs),
            "only_a": self.only_a,
            "only_b": self.only_b,
            "a_mean": self.a_mean,
            "b_mean": self.b_mean,
            "difference": self.difference,
            "standard_error": self.standard_error,
            "interval95": self.interval95,
            "counts": {name: len(self.changed(name)) for name in get_args(Change)},
            "changed_tasks": self.changed_tasks,
            "settings": self.settings,
            "pairs": [{**msgspec.structs.asdict(pair), "difference": pair.difference} for pair in self.pairs],
        }


def compare_runs(a: "RunReader", b: "RunReader") -> Comparison:
    """Compare run B with run A. Both are read completely, one page of records at a time."""
    first, second = _read_estimate(a), _read_estimate(b)
    binary = first.binary and second.binary
    pairs = [_pair(task, first, second, binary=binary) for task in first.tasks.keys() & second.tasks.keys()]
    pairs.sort(key=lambda pair: (pair.difference, pair.task))
    return Comparison(
        a=a.folder.name,
        b=b.folder.name,
        binary=binary,
        pairs=tuple(pairs),
        only_a=len(first.tasks.keys() - second.tasks.keys()),
        only_b=len(second.tasks.keys() - first.tasks.keys()),
        changed_tasks=_find_changed_tasks(a, b, {pair.task for pair in pairs}),
        settings=_compare_settings(a, b),
    )


def _read_estimate(reader: "RunReader") -> RewardEstimate:
    estimate = RewardEstimate()
    for record in reader.iter_rollouts():
        if record.valid and record.reward is not None:
            estimate.add(record.task, record.reward)
    return estimate


def _pair(task: str, first: RewardEstimate, second: RewardEstimate, *, binary: bool) -> TaskPair:
    one, two = first.tasks[task], second.tasks[task]
    a, b = one.total / one.valid, two.total / two.valid
    return TaskPair(
        task=task, a=a, b=b, a_valid=one.valid, b_valid=two.valid, change=_get_change(a, b, binary=binary)
    )


def _get_change(a: float, b: float, *, binary: bool) -> Change:
    if binary and (a > 0.5) != (b > 0.5):
        return "gained" if b > a else "lost"
    if abs(b - a) <= TOLERANCE * max(1.0, abs(a), abs(b)):
        return "same"
    return "improved" if b > a else "worsened"


def _find_changed_tasks(a: "RunReader", b: "RunReader", paired: set[str]) -> tuple[str, ...]:
    contents = {row.id: row.payload for row in a.task_rows() if row.id in paired}
    return tuple(
        dict.fromkeys(row.id for row in b.task_rows() if row.id in contents and contents[row.id] != row.payload)
    )


def _compare_settings(a: "RunReader", b: "RunReader") -> dict[str, tuple[str | None, str | None]]:
    settings = [_read_settings(reader) for reader in (a, b)]
    return {name: (settings[0].get(name), settings[1].get(name)) for name in find_differing_settings(settings)}


def _read_settings(reader: "RunReader") -> dict[str, str]:
    meta = reader.meta()
    named = {
        "environment": meta.get("env", ""),
        "model": meta.get("model", ""),
        "rookery": meta.get("rookery", ""),
    }
    return {**{name: value for name, value in named.items() if value}, **flatten_settings(reader.config())}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
