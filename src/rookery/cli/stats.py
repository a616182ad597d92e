"""Numbers about rollouts, added up one record at a time.

Promises:
- only valid rollouts are in a denominator; failed ones are counted by cause;
- memory does not grow with the number of rollouts.
"""

from collections import Counter
from math import sqrt
from typing import Any

from rookery.core import Cancelled, Failed, Rollout, Truncated, label

Z95 = 1.959963984540054


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


class Stats:
    """Sums over records."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.valid = 0
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
        self.attempts = 0

    def add(self, record: Rollout) -> None:
        outcome = record.outcome
        self.rollouts += 1
        self.attempts += len(record.attempts)
        self.prompt_tokens += record.usage.prompt_tokens
        self.sampled_tokens += record.usage.sampled_tokens
        self.turns += record.usage.turns
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
