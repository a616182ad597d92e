"""Index of a run's rollouts: one column per field, updated as the journal grows.

The viewer's table and the curves of a run are made from it. Each record is read once, and about 30 numbers of it
are kept, so that the page can show 100,000 rollouts. If a record is replaced or discarded, the index is rebuilt.
"""

from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from rookery.core import Failed, Rollout, label
from rookery.core.records import Timing, Usage
from rookery.view.stats import Stats

if TYPE_CHECKING:
    from rookery.journal import RunReader

PAGE: Final = 2_000
MAX_METRICS: Final = 64
"""Maximum number of metrics and named rewards that become columns; the first that occur are kept."""
STAGES: Final = ("queue", "setup", "run", "score", "teardown", "model", "sandbox", "paused")
_COUNTS: Final = ("turns", "prompt_tokens", "sampled_tokens", "tool_calls", "drifted", "without_tokens")
_NUMBERS: Final[dict[str, Callable[[Rollout], float | None]]] = {
    "group": lambda record: record.group,
    "member": lambda record: record.member,
    "reward": lambda record: record.reward if record.valid else None,
    "attempts": lambda record: len(record.attempts),
    "started": lambda record: min((one.started for one in record.attempts), default=0.0),
    "ended": lambda record: max((one.ended for one in record.attempts), default=0.0),
}


class RunIndex:
    """Columns over the rollout records of one run, in the order in which they were committed."""

    def __init__(self) -> None:
        self.generation = 0
        """Number of rebuilds. Positions of rows are comparable only within a generation."""
        self._superseded = 0
        self._clear()

    def _clear(self) -> None:
        self.stats = Stats()
        self.groups: dict[int, bool] = {}
        """For each group with a record: whether one of its rewards is 1."""
        self.last_seq = 0
        self.numbers: dict[str, list[float | None]] = {name: [] for name in (*_NUMBERS, *_COUNTS, *STAGES)}
        self.metrics: dict[str, list[float | None]] = {}
        """Metrics and named parts of the reward by name; a part of the reward is named `reward.NAME`."""
        self.tasks: dict[str, int] = {}
        """Number of each task, in the order of appearance."""
        self.task: list[int] = []
        self.labels: dict[str, int] = {}
        self.label: list[int] = []
        self.failed: set[str] = set()
        """Labels of failed rollouts."""
        self._members: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self.task)

    def update(self, reader: "RunReader") -> int:
        """Add the records that were committed since the last update; return how many rows the index has now."""
        superseded = reader.count_superseded()
        if superseded != self._superseded:
            if len(self):
                self.generation += 1
                self._clear()
            self._superseded = superseded
        while rows := reader.rollouts_after(self.last_seq, limit=PAGE):
            for seq, record in rows:
                if (record.group, record.member) in self._members:  # replaced while it was read
                    self.generation += 1
                    self._clear()
                    return self.update(reader)
                self._add(seq, record)
        return len(self)

    def _add(self, seq: int, record: Rollout) -> None:
        self.last_seq = seq
        self._members.add((record.group, record.member))
        self.stats.add(record)
        self.groups[record.group] = self.groups.get(record.group, False) or (record.valid and record.reward == 1.0)
        for name, get in _NUMBERS.items():
            self.numbers[name].append(_finite(get(record)))
        _append_fields(self.numbers, record.usage, _COUNTS)
        _append_fields(self.numbers, record.timing, STAGES)
        self.task.append(self.tasks.setdefault(record.task, len(self.tasks)))
        name = label(record.outcome)
        self.label.append(self.labels.setdefault(name, len(self.labels)))
        if isinstance(record.outcome, Failed):
            self.failed.add(name)
        self._add_metrics(record)

    def _add_metrics(self, record: Rollout) -> None:
        found = {**record.metrics, **{f"reward.{name}": value for name, value in record.rewards.items()}}
        at = len(self.task) - 1
        for name, value in found.items():
            if name not in self.metrics:
                if len(self.metrics) >= MAX_METRICS:
                    continue
                self.metrics[name] = [None] * at
            self.metrics[name].append(_finite(value))
        for column in self.metrics.values():
            if len(column) <= at:
                column.append(None)

    def columns(self, start: int = 0) -> dict[str, Any]:
        """Return the rows from `start` on as plain data, column by column, for the page.

        Tasks and labels are numbers that index the lists `tasks` and `labels`, which are complete.
        """
        return {
            "generation": self.generation,
            "start": start,
            "count": len(self),
            "tasks": list(self.tasks),
            "labels": list(self.labels),
            "failed": sorted(self.failed),
            "task": self.task[start:],
            "label": self.label[start:],
            "numbers": {name: column[start:] for name, column in self.numbers.items()},
            "metrics": {name: column[start:] for name, column in self.metrics.items()},
        }


def _append_fields(numbers: dict[str, list[float | None]], source: Usage | Timing, names: tuple[str, ...]) -> None:
    for name in names:
        numbers[name].append(_finite(getattr(source, name)))


def _finite(value: float | None) -> float | None:
    if value is None or not isfinite(value):
        return None
    return round(value, 6) if isinstance(value, float) else value
