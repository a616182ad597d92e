"""Index of a run's rollouts: one column per field, updated as the journal grows.

The viewer's table and the curves of a run are made from it. Each record is read once, and only about 30 of its
values are kept, so that the page can show 100,000 rollouts. If a record is replaced or discarded, the index is
rebuilt.

The page gets columns as float64 in native byte order, which it uses without parsing: as JSON, 100,000 rows would
have 12 MB. A missing value is NaN.
"""

import time
from array import array
from collections.abc import Sequence
from math import inf, nan
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from rookery.core import Failed, Rollout, label
from rookery.journal.export import get_price_table
from rookery.view.stats import Stats

if TYPE_CHECKING:
    from rookery.journal import RunReader

PAGE: Final = 1_000
MAX_ROWS: Final = 200_000
"""Maximum number of rows in one response to the page."""
MAX_METRICS: Final = 64
"""Maximum number of metrics and named rewards that become columns; the first that occur are kept."""
STAGES: Final = ("queue", "setup", "run", "score", "teardown", "model", "sandbox", "paused")
_NUMBERS: Final = (
    *("group", "member", "reward", "attempts", "started", "ended"),
    *("turns", "prompt_tokens", "sampled_tokens", "tool_calls", "drifted", "without_tokens"),
    *STAGES,
)


def _get_numbers(record: Rollout) -> tuple[float, ...]:
    """Return the values of `_NUMBERS` for a record. It is called for every record of a run, so it must be fast."""
    usage, timing, attempts = record.usage, record.timing, record.attempts
    return (
        record.group,
        record.member,
        record.reward if record.valid and record.reward is not None else nan,
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
        self.numbers: dict[str, array[float]] = {name: array("d") for name in _NUMBERS}
        self.metrics: dict[str, array[float]] = {}
        """Metrics and named parts of the reward by name; a part of the reward is named `reward.NAME`."""
        self.tasks: dict[str, int] = {}
        """Number of each task, in the order of appearance."""
        self.task: array[float] = array("d")
        self.labels: dict[str, int] = {}
        self.label: array[float] = array("d")
        self.failed: set[str] = set()
        """Labels of failed rollouts."""
        self._members: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self.task)

    def update(self, reader: "RunReader", *, seconds: float = inf) -> bool:
        """Add the records that were committed since the last update. Stop after `seconds`.

        Return True if the index contains all records.
        """
        end = time.monotonic() + seconds
        if not len(self):
            self.stats = Stats(get_price_table(reader.config()))
        superseded = reader.count_superseded()
        if superseded != self._superseded:
            if len(self):
                self.generation += 1
                self._clear()
            self._superseded = superseded
        while rows := reader.rollouts_after(self.last_seq, limit=PAGE):
            members = {(record.group, record.member) for _, record in rows}
            if len(members) < len(rows) or not members.isdisjoint(self._members):  # replaced while it was read
                self.generation += 1
                self._clear()
                return self.update(reader, seconds=seconds)
            self._members |= members
            self._add([record for _, record in rows])
            self.last_seq = rows[-1][0]
            if time.monotonic() > end:
                return False
        return True

    def _add(self, records: Sequence[Rollout]) -> None:
        for column, values in zip(
            self.numbers.values(), zip(*map(_get_numbers, records), strict=True), strict=True
        ):
            column.extend(values)
        for record in records:
            self.stats.add(record)
            self.groups[record.group] = self.groups.get(record.group, False) or (
                record.valid and record.reward == 1.0
            )
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
                self.metrics[name] = array("d", [nan]) * at
            self.metrics[name].append(value)
        for column in self.metrics.values():
            if len(column) <= at:
                column.append(nan)

    def encode_columns(self, start: int = 0, *, complete: bool = True) -> bytes:
        """Return the rows from `start` on for the page: a JSON header, and the columns that it names.

        Before the header come four bytes with its length. It is padded, so that the columns begin at a multiple
        of eight bytes. Tasks and labels are numbers. The header lists the labels, the environments of a mixture,
        with whose names the IDs of tasks begin, and the tasks that first occur in these rows. `complete` says that
        the index contains all records; otherwise the page requests the rest.
        """
        stop = min(len(self), start + MAX_ROWS)
        known = 1 + int(max(self.task[:start], default=-1))
        header = msgspec.json.encode(
            {
                "generation": self.generation,
                "start": start,
                "count": stop,
                "complete": complete and stop == len(self),
                "first_task": known,
                "tasks": list(self.tasks)[known:],
                "labels": list(self.labels),
                "environments": sorted(self.stats.environments),
                "failed": sorted(self.failed),
                "numbers": list(self.numbers),
                "metrics": list(self.metrics),
            }
        )
        header += b" " * (-(4 + len(header)) % 8)
        columns = (self.task, self.label, *self.numbers.values(), *self.metrics.values())
        parts = (np.frombuffer(column)[start:stop].tobytes() for column in columns if len(column))
        return b"".join((len(header).to_bytes(4, "little"), header, *parts))
