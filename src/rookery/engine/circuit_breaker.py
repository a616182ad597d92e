"""Stop a run in which too many attempts fail. A pure controller of the supervisor.

- The breaker opens on a failure rate over a minimum number of attempts, never on a few early failures.
- Failures are fast and successes slow, so running attempts count as not failed.
- Only infra faults and bugs count. Invalid tasks and results of the policy never open it.
"""

from collections import Counter, deque

from rookery.core import Cancelled, Failed, Outcome, get_cause


class CircuitBreaker:
    """Tracks the failure rate of the latest attempts: at least 100, and twice the concurrency."""

    def __init__(self, rate: float | None = 0.5, *, concurrency: int = 1, minimum: int = 20) -> None:
        self.rate = rate
        self.minimum = minimum
        self._causes: deque[str] = deque(maxlen=max(100, 2 * concurrency))
        """The causes of the latest attempts; empty for attempts that did not fail."""
        self._failures = 0
        self.message = ""
        """Why the breaker is open, with the most frequent cause; empty while it is closed."""

    @property
    def is_open(self) -> bool:
        return bool(self.message)

    def observe(self, outcome: Outcome, running: int = 0) -> bool:
        """Count one ended attempt. Return True if it opened the breaker."""
        if self.rate is None or self.is_open or isinstance(outcome, Cancelled):
            return False
        cause = outcome.cause if isinstance(outcome, Failed) and outcome.fault != "task" else ""
        if len(self._causes) == self._causes.maxlen and self._causes[0]:
            self._failures -= 1
        self._causes.append(cause)
        self._failures += bool(cause)
        seen = len(self._causes)
        if not cause or seen < self.minimum or self._failures <= self.rate * (seen + running):
            return False
        worst, count = Counter(filter(None, self._causes)).most_common(1)[0]
        self.message = (
            f"stopped: {self._failures} of the last {seen} attempts failed, mostly with {worst} ({count} times). "
            f"{get_cause(worst).meaning} {get_cause(worst).advice} Then continue with `rookery resume`."
        )
        return True
