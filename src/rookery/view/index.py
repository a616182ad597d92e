"""Index of a run's rollouts: one column per field, updated as the journal grows.

The viewer's table and the curves of a run are made from it. Each record is read once, and only about 30 of its
values are kept, so that the page can show 100,000 rollouts. If a record is replaced or discarded, the index is
rebuilt.
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rookery.core import Failed, Rollout, label
from rookery.view.stats import Stats

if TYPE_CHECKING:
    from rookery.journal import RunReader

PAGE: Final = 2_000
MAX_METRICS: Final = 64
"""Maximum number of metrics and named rewards that become columns; the first that occur are kept."""
STAGES: Final = ("queue", "setup", "run", "score", "teardown", "model", "sandbox", "paused")
_NUMBERS: Final = (
    *("group", "member", "reward", "attempts", "started", "ended"),
    *("turns", "prompt_tokens", "sampled_tokens", "tool_calls", "drifted", "without_tokens"),
    *STAGES,
)


def _get_numbers(record: Rollout) -> tuple[float | None, ...]:
    """Return the values of `_NUMBERS` for a record. It is called for every record of a run, so it must be fast."""
    usage, timing, attempts = record.usage, record.timing, record.attempts
    return (
        record.group,
        record.member,
        record.reward if record.valid else None,
        len(attempts),
        attempts[0].started if attempts else 0.0,
        attempts[-1].ended if attempts else 0.0,
        usage.turns,
        usage.prompt_tokens,
        usage.sampled_tokens,
        usage.tool_calls,
        usage.drifted,
        usage.without_tokens,
        timing.queue,
        timing.setup,
        timing.run,
        timing.score,
        timing.teardown,
        timing.model,
        timing.sandbox,
        timing.paused,
    )


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
        self.numbers: dict[str, list[float | None]] = {name: [] for name in _NUMBERS}
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
        for column, value in zip(self.numbers.values(), _get_numbers(record), strict=True):
            column.append(value)
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
            self.metrics[name].append(value)
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
            "numbers": {name: _round(column[start:]) for name, column in self.numbers.items()},
            "metrics": {name: _round(column[start:]) for name, column in self.metrics.items()},
        }


def _round(values: list[float | None]) -> list[float]:
    """Return the values with six decimals, which keeps the JSON short. A missing value is NaN, in JSON null."""
    found: list[float] = np.round(np.array(values, dtype=np.float64), 6).tolist()
    return found
