"""Counters, gauges and histograms of one process, and their exchange between processes.

Every process counts in its own `Registry`. A runner process sends what it counted to the supervisor once a second,
and gateway shards return theirs on request; the receiver adds them up. `exposition` writes the sum for Prometheus.

`python -m benchmarks libraries` compares this module with prometheus_client, whose metrics take a lock and cannot
be added up over processes without files: on 2026-11-19 this module took 3.3 times less CPU per model call.

- Names and labels of metrics come from `catalogue`. Values of labels come from this code or from the run's
  configuration, never from a model or a client.
- A counter of the supervisor does not decrease when a runner process dies.
- Metrics are updated in the thread of the event loop. Updates from other threads can be lost.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec

Labels: TypeAlias = tuple[str, ...]
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Merge: TypeAlias = Literal["sum", "min", "max"]

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets for the time of one call."""
LONG_SECONDS: Final = (
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    14400.0,
)
"""Upper bounds of the buckets for the time of a stage or a rollout."""


class Metric:
    """A metric: its name, meaning and labels, and the values of this process by the values of its labels."""

    kind: ClassVar[Kind]

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name = name
        self.help = help_text
        self.labels = labels
        self.values: dict[Labels, list[float]] = {}

    def combine(self, values: list[float], others: list[float]) -> list[float]:
        """Return one value for those of two processes."""
        return [a + b for a, b in zip(values, others, strict=True)]


class Counter(Metric):
    """A number that only grows."""

    kind = "counter"

    def add(self, *labels: str, by: float = 1.0) -> None:
        cell = self.values.get(labels)
        if cell is None:
            self.values[labels] = [by]
        else:
            cell[0] += by


class Histogram(Metric):
    """A distribution: the number of observations in each bucket, then their sum."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, *labels: str, bounds: tuple[float, ...] = SECONDS) -> None:
        super().__init__(name, help_text, *labels)
        self.bounds = bounds

    def observe(self, value: float, *labels: str) -> None:
        cell = self.values.get(labels)
        if cell is None:
            cell = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        cell[bisect_left(self.bounds, value)] += 1.0
        cell[-1] += value


class Gauge(Metric):
    """A current value. Collectors of the registry set it whenever the metrics are read.

    `merge` says how the values of several processes, or of several collectors, become one.
    """

    kind = "gauge"

    def __init__(self, name: str, help_text: str, *labels: str, merge: Merge = "sum") -> None:
        super().__init__(name, help_text, *labels)
        self.merge = merge

    def set(self, value: float, *labels: str) -> None:
        known = self.values.get(labels)
        self.values[labels] = [float(value)] if known is None else self.combine(known, [float(value)])

    def combine(self, values: list[float], others: list[float]) -> list[float]:
        a, b = values[0], others[0]
        return [a + b if self.merge == "sum" else min(a, b) if self.merge == "min" else max(a, b)]


Snapshot: TypeAlias = dict[str, dict[Labels, list[float]]]
"""The values of each metric by name, as plain data that can be sent to another process."""

encode_snapshot = msgspec.msgpack.Encoder().encode
decode_snapshot = msgspec.msgpack.Decoder(Snapshot).decode


class Registry:
    """The metrics of one process, and the gauges that other processes reported last."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.collectors: list[Callable[[], None]] = []
        """Functions that set gauges. They are called whenever the metrics are read."""
        self._reported: dict[str, Snapshot] = {}

    def add(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            if metric.name in self.metrics:
                raise ValueError(f"two metrics have the name {metric.name}")
            self.metrics[metric.name] = metric

    def read(self, *others: Snapshot) -> Snapshot:
        """Return the values of this process and `others`, with the gauges that other processes reported last."""
        total: Snapshot = {}
        self._set_gauges()
        for snapshot in (self._values(), *self._reported.values(), *others):
            for name, samples in snapshot.items():
                if (metric := self.metrics.get(name)) is not None:
                    _combine(metric, total.setdefault(name, {}), samples)
        return total

    def drain(self) -> Snapshot:
        """Return what was counted since the last call, and the current gauges. The counts start again at zero."""
        self._set_gauges()
        drained = self._values()
        for name in drained:
            self.metrics[name].values = {}
        return drained

    def absorb(self, source: str, snapshot: Snapshot) -> None:
        """Add what the process `source` drained. Its gauges replace those that it reported before."""
        self._reported[source] = {}
        for name, samples in snapshot.items():
            metric = self.metrics.get(name)
            if isinstance(metric, Gauge):
                self._reported[source][name] = samples
            elif metric is not None:
                _combine(metric, metric.values, samples)

    def subtract(self, later: Snapshot, earlier: Snapshot) -> Snapshot:
        """Return what a process counted between two readings, with its later gauges, as `drain` would.

        If a value has decreased, because the process was restarted, its later value counts as a whole.
        """
        difference: Snapshot = {}
        for name, samples in later.items():
            before = {} if isinstance(self.metrics.get(name), Gauge) else earlier.get(name, {})
            difference[name] = {
                labels: _subtract(values, before[labels]) if labels in before else values
                for labels, values in samples.items()
            }
        return difference

    def forget(self, source: str) -> None:
        """Drop the gauges of a process that has ended. What it counted stays."""
        self._reported.pop(source, None)

    def _set_gauges(self) -> None:
        for metric in self.metrics.values():
            if isinstance(metric, Gauge):
                metric.values = {}
        for collect in self.collectors:
            collect()

    def _values(self) -> Snapshot:
        return {name: metric.values for name, metric in self.metrics.items() if metric.values}


def _subtract(values: list[float], earlier: list[float]) -> list[float]:
    less = [a - b for a, b in zip(values, earlier, strict=True)]
    restarted = any(one < 0 for one in (less[:-1] or less))  # the last value of a histogram is its sum
    return values if restarted else less


def _combine(metric: Metric, into: dict[Labels, list[float]], samples: dict[Labels, list[float]]) -> None:
    for labels, values in list(samples.items()):  # the trainer's thread may add one meanwhile
        known = into.get(labels)
        into[labels] = [*values] if known is None else metric.combine(known, values)
