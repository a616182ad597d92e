"""Statistics over rollouts, updated one record at a time.

- Denominators count only valid rollouts, which have a reward. Failed rollouts are counted by cause.
- Every rollout has exactly one outcome, so the counts of outcomes add up to the number of rollouts.
- Standard errors and intervals are clustered by task.
- The duration of a run is the time in which at least one attempt ran, without the gaps before a resume.
- Memory grows with the number of tasks, not with the number of rollouts.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from typing import Any, Final

from rookery.core import Cancelled, Failed, Rollout, Truncated, label
from rookery.core.estimates import RewardEstimate, TaskMean
from rookery.core.prices import PriceTable
from rookery.core.records import SUBMISSIONS

LEVEL: Final = "level"
"""Name of the metric of rollouts (their level of difficulty) by which mean rewards are also reported."""
MAX_LEVELS: Final = 12
"""If the levels have more different values than this, mean rewards by level are not reported."""
MAX_METRICS: Final = 32
MAX_SPANS: Final = 64
"""Maximum number of separate time spans that `BusyTime` keeps. Above that, it merges the two nearest ones."""


class FailureCount:
    """Number of failed rollouts with one cause, and the first of them as an example."""

    def __init__(self, record: Rollout, outcome: Failed) -> None:
        self.count = 0
        self.first = record.id
        self.fault = outcome.fault
        self.detail = outcome.detail


class BusyTime:
    """Adds up the time in which at least one attempt was running. Attempts can be added in any order."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, start: float, end: float) -> None:
        if not 0 < start <= end:
            return
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:  # merge overlapping spans
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]
        if len(self._starts) > MAX_SPANS:
            gaps = [self._starts[at + 1] - self._ends[at] for at in range(MAX_SPANS)]
            at = gaps.index(min(gaps))
            del self._starts[at + 1], self._ends[at]

    @property
    def seconds(self) -> float:
        return sum(self._ends) - sum(self._starts)


class LevelMean:
    """Number and mean reward of the valid rollouts of one level of difficulty."""

    def __init__(self) -> None:
        self.valid = 0
        self.mean = 0.0

    def add(self, reward: float) -> None:
        self.valid += 1
        self.mean += (reward - self.mean) / self.valid


class Stats:
    """Counts and estimates over the rollouts that were added. With `prices`, also their cost."""

    def __init__(self, prices: PriceTable | None = None) -> None:
        self._prices = prices
        self.cost: float | None = 0.0 if prices is not None else None
        """Cost of the last attempts of all rollouts. None without prices, or if a model has no price."""
        self.metrics: dict[str, RewardEstimate] = {}
        """Estimates of the metrics of the valid rollouts, by name; at most `MAX_METRICS`, the first ones."""
        self.rollouts = 0
        self.k = 0
        """Rollouts per task, as far as the records show: the highest member number plus 1."""
        self.tasks: set[str] = set()
        self.estimate = RewardEstimate()
        self.labels: Counter[str] = Counter()
        """Rollouts by outcome; the counts add up to `rollouts`."""
        self.truncated: Counter[str] = Counter()
        self.cancelled = 0
        self.ungraded = 0
        """Completed and truncated rollouts without a reward, because nothing graded them."""
        self.failures: dict[str, FailureCount] = {}
        self.failed = 0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.turns = 0
        self.drifted = 0
        self.without_tokens = 0
        self.attempts = 0
        self.busy = BusyTime()
        self.environments: dict[str, Stats] = {}
        """The statistics of each environment of a mixture, by name; empty for other runs."""
        self._levels: dict[float, LevelMean] | None = {}

    def add(self, record: Rollout, *, by_environment: bool = True) -> None:
        outcome = record.outcome
        if record.environment and by_environment:
            self.environments.setdefault(record.environment, Stats(self._prices)).add(record, by_environment=False)
        self.rollouts += 1
        self.k = max(self.k, record.member + 1)
        self.tasks.add(record.task)
        self.labels[label(outcome)] += 1
        for attempt in record.attempts:
            self.busy.add(attempt.started, attempt.ended)
        self.attempts += len(record.attempts)
        self.prompt_tokens += record.usage.prompt_tokens
        self.sampled_tokens += record.usage.sampled_tokens
        self.turns += record.usage.turns
        self.drifted += record.usage.drifted
        self.without_tokens += record.usage.without_tokens
        if self._prices is not None and self.cost is not None:
            cost = self._prices.compute_cost(record.usage)
            self.cost = self.cost + cost if cost is not None else None
        if isinstance(outcome, Failed):
            self.failed += 1
            self.failures.setdefault(outcome.cause, FailureCount(record, outcome)).count += 1
        elif isinstance(outcome, Truncated):
            self.truncated[outcome.reason] += 1
        elif isinstance(outcome, Cancelled):
            self.cancelled += 1
        self.ungraded += record.ungraded
        if record.valid and record.reward is not None:
            self.estimate.add(record.task, record.reward)
            self._add_level(record.metrics.get(LEVEL), record.reward)
            for name, value in record.metrics.items():
                if name in self.metrics or len(self.metrics) < MAX_METRICS:
                    self.metrics.setdefault(name, RewardEstimate()).add(record.task, value)

    def _add_level(self, level: float | None, reward: float) -> None:
        if level is None or self._levels is None:
            return
        self._levels.setdefault(level, LevelMean()).add(reward)
        if len(self._levels) > MAX_LEVELS:
            self._levels = None

    @property
    def levels(self) -> list[tuple[float, LevelMean]]:
        """Mean rewards by level, lowest first. Empty if rollouts have no level or if there are too many levels."""
        return sorted((self._levels or {}).items())

    @property
    def completed(self) -> int:
        return self.rollouts - self.truncated.total() - self.failed - self.cancelled

    @property
    def valid(self) -> int:
        return self.estimate.valid

    @property
    def binary(self) -> bool:
        return self.estimate.binary

    @property
    def mean(self) -> float:
        return self.estimate.mean

    @property
    def standard_error(self) -> float | None:
        return self.estimate.standard_error

    @property
    def short(self) -> str:
        """The mean for the progress line: `pass 43.1%` if all rewards are 0 or 1, else such as `reward 0.431`."""
        if not self.valid:
            return ""
        return f"pass {self.mean:.1%}" if self.binary else f"reward {self.mean:.3g}"

    def per_task(self) -> dict[str, TaskMean]:
        return self.estimate.per_task(self.k)

    def reward(self) -> dict[str, Any]:
        """Return the reward estimates as plain data. An estimate that needs more rollouts is None."""
        if not self.valid:
            return {"mean": None, "valid": 0}
        interval = self.estimate.interval95
        found: dict[str, Any] = {
            "mean": self.mean,
            "valid": self.valid,
            "tasks": len(self.estimate.tasks),
            "standard_error": self.standard_error,
            "interval95": list(interval) if interval is not None else None,
        }
        if self.binary:
            found["pass_rate"] = self.mean
        per_task = self.per_task()
        if per_task:
            found |= {name: one.mean for name, one in per_task.items()}
            found["per_task"] = {
                name: {
                    "mean": one.mean,
                    "standard_error": one.standard_error,
                    "tasks": one.tasks,
                    "tasks_left_out": len(self.tasks) - one.tasks,
                }
                for name, one in per_task.items()
            }
        return found

    def metric_means(self) -> dict[str, dict[str, Any]]:
        """Return the mean of each metric over the valid rollouts that have it, with its error, as plain data."""
        return {
            name: {"mean": one.mean, "standard_error": one.standard_error, "valid": one.valid}
            for name, one in sorted(self.metrics.items())
        }

    def causes(self) -> list[tuple[str, FailureCount]]:
        """Return the causes of failures, most frequent first."""
        return sorted(self.failures.items(), key=lambda pair: (-pair[1].count, pair[0]))


def summarize_rollout(record: Rollout) -> dict[str, Any]:
    """Return the main facts of a rollout's record as plain data, without messages and tokens."""
    outcome = record.outcome
    found: dict[str, Any] = {
        "id": record.id,
        "group": record.group,
        "member": record.member,
        "task": record.task,
        **({"environment": record.environment} if record.environment else {}),
        "label": label(outcome),
        "valid": record.valid,
        "reward": record.reward,
        **({"ungraded": True} if record.ungraded else {}),
        "attempts": len(record.attempts),
        "turns": record.usage.turns,
        "prompt_tokens": record.usage.prompt_tokens,
        "sampled_tokens": record.usage.sampled_tokens,
        "tool_calls": record.usage.tool_calls,
        "seconds": record.timing.setup + record.timing.run + record.timing.score,
    }
    if isinstance(outcome, Failed):
        found |= {"fault": outcome.fault, "cause": outcome.cause, "stage": outcome.stage, "detail": outcome.detail}
    return found


def get_readable_info(record: Rollout) -> dict[str, Any]:
    """Return the `info` of a rollout. Stored submissions, which are compressed, are replaced by their sizes."""
    stored = record.info.get(SUBMISSIONS)
    if not isinstance(stored, dict):
        return record.info
    sizes = {step: f"{len(text)} characters, compressed" for step, text in stored.items() if isinstance(text, str)}
    return {**record.info, SUBMISSIONS: sizes}


def is_failure(name: str) -> bool:
    """Return True if the label of an outcome is the cause code of a failed rollout."""
    return name != "completed" and not name.startswith(("truncated.", "cancelled."))
