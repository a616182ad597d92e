"""Numbers about rollouts, added up one record at a time.

Promises:
- only valid rollouts are in a denominator; failed ones are counted by cause;
- every rollout is in exactly one outcome, so that the outcomes' counts add up to the rollouts;
- the time of a run is that in which something was under way, without the pauses before a resume;
- memory does not grow with the number of rollouts.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from math import sqrt
from typing import Any, Final

from rookery.core import Cancelled, Failed, Rollout, Truncated, label

Z95 = 1.959963984540054
LEVEL: Final = "level"
"""The metric by which rewards are also added up apart."""
MAX_LEVELS: Final = 12
"""A metric with more values than this is no level."""
MAX_SPANS: Final = 64


def wilson(passed: int, count: int) -> tuple[float, float]:
    """The 95% interval of a rate, after Wilson: also right near 0 and 1, where others leave the range."""
    if count == 0:
        return 0.0, 1.0
    z2 = Z95 * Z95
    share = passed / count
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


class Failure:
    """Failures of one cause: how many, and the first as an example."""

    __slots__ = ("count", "detail", "fault", "first")

    def __init__(self, record: Rollout, outcome: Failed) -> None:
        self.count = 0
        self.first = record.id
        self.fault = outcome.fault
        self.detail = outcome.detail


class Busy:
    """Seconds in which at least one attempt was under way, whatever the order they are told in."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def add(self, start: float, end: float) -> None:
        if not 0 < start <= end:
            return
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:  # spans that it touches become one with it
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


class Level:
    """The valid rollouts of one level."""

    __slots__ = ("mean", "valid")

    def __init__(self) -> None:
        self.valid = 0
        self.mean = 0.0

    def add(self, reward: float) -> None:
        self.valid += 1
        self.mean += (reward - self.mean) / self.valid


class Stats:
    """Sums over records."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.valid = 0
        self.labels: Counter[str] = Counter()
        """How many ended how; adds up to `rollouts`."""
        self.truncated: Counter[str] = Counter()
        self.cancelled = 0
        self.failures: dict[str, Failure] = {}
        self.failed = 0
        self.passed = 0
        self.binary = True
        """Whether every reward so far is 0 or 1: then their mean is a pass rate."""
        self.mean = 0.0
        self._m2 = 0.0
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.turns = 0
        self.drifted = 0
        self.attempts = 0
        self.busy = Busy()
        self._levels: dict[float, Level] | None = {}

    def add(self, record: Rollout) -> None:
        outcome = record.outcome
        self.rollouts += 1
        self.labels[label(outcome)] += 1
        for attempt in record.attempts:
            self.busy.add(attempt.started, attempt.ended)
        self.attempts += len(record.attempts)
        self.prompt_tokens += record.usage.prompt_tokens
        self.sampled_tokens += record.usage.sampled_tokens
        self.turns += record.usage.turns
        self.drifted += record.usage.drifted
        if isinstance(outcome, Failed):
            self.failed += 1
            self.failures.setdefault(outcome.cause, Failure(record, outcome)).count += 1
        elif isinstance(outcome, Truncated):
            self.truncated[outcome.reason] += 1
        elif isinstance(outcome, Cancelled):
            self.cancelled += 1
        if record.valid and record.reward is not None:
            reward = record.reward
            self.valid += 1
            self.binary = self.binary and reward in (0.0, 1.0)
            self.passed += reward == 1.0
            delta = reward - self.mean
            self.mean += delta / self.valid
            self._m2 += delta * (reward - self.mean)
            self._add_level(record.metrics.get(LEVEL), reward)

    def _add_level(self, level: float | None, reward: float) -> None:
        if level is None or self._levels is None:
            return
        self._levels.setdefault(level, Level()).add(reward)
        if len(self._levels) > MAX_LEVELS:
            self._levels = None

    @property
    def levels(self) -> list[tuple[float, Level]]:
        """By level, the lowest first; empty where the environment tells none, or too many to be levels."""
        return sorted((self._levels or {}).items())

    @property
    def completed(self) -> int:
        return self.rollouts - self.truncated.total() - self.failed - self.cancelled

    @property
    def standard_error(self) -> float | None:
        return sqrt(self._m2 / (self.valid - 1) / self.valid) if self.valid > 1 else None

    @property
    def short(self) -> str:
        """`pass 43.1%` or `reward 0.431`, for a line of progress."""
        if not self.valid:
            return ""
        return f"pass {self.passed / self.valid:.1%}" if self.binary else f"reward {self.mean:.3g}"

    def reward(self) -> dict[str, Any]:
        """The result as plain data."""
        if not self.valid:
            return {"mean": None, "valid": 0}
        found: dict[str, Any] = {"mean": self.mean, "valid": self.valid, "standard_error": self.standard_error}
        if self.binary:
            low, high = wilson(self.passed, self.valid)
            found |= {"pass_rate": self.passed / self.valid, "interval95": [low, high]}
        return found

    def causes(self) -> list[tuple[str, Failure]]:
        """The most frequent first."""
        return sorted(self.failures.items(), key=lambda pair: (-pair[1].count, pair[0]))


def facts(record: Rollout) -> dict[str, Any]:
    """One record as an event: what happened, without its content."""
    outcome = record.outcome
    found: dict[str, Any] = {
        "id": record.id,
        "group": record.group,
        "member": record.member,
        "task": record.task,
        "label": label(outcome),
        "valid": record.valid,
        "reward": record.reward,
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


def is_failure(name: str) -> bool:
    """Whether a label is a cause of failure, not a way to end."""
    return name != "completed" and not name.startswith(("truncated.", "cancelled."))
