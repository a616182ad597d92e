"""When to stop admitting: a pure controller.

Promises:
- the breaker opens only on a rate over a minimum of attempts, never on a few early failures;
- failures are quick and successes slow, so attempts still under way count among those that did not fail;
- it counts attempts that infra or a bug ended; invalid tasks and what the policy does never open it;
- its message names the most frequent cause.
"""

from collections import Counter, deque

from rookery.core import Cancelled, Failed, Outcome, cause_of


class Breaker:
    """Watches the share of failed attempts among the last ones, at least a hundred and twice the concurrency."""

    def __init__(self, rate: float | None = 0.5, *, concurrency: int = 1, minimum: int = 20) -> None:
        self.rate = rate
        self.minimum = minimum
        self._last: deque[str] = deque(maxlen=max(100, 2 * concurrency))
        self._failures = 0
        self.opened = ""
        """Why it is open, in words; empty while it is closed."""

    def observe(self, outcome: Outcome, under_way: int = 0) -> bool:
        """Counts one ended attempt; True when this one opened the breaker."""
        if self.rate is None or self.opened or isinstance(outcome, Cancelled):
            return False
        cause = outcome.cause if isinstance(outcome, Failed) and outcome.fault != "task" else ""
        if len(self._last) == self._last.maxlen and self._last[0]:
            self._failures -= 1
        self._last.append(cause)
        self._failures += bool(cause)
        seen = len(self._last)
        if not cause or seen < self.minimum or self._failures <= self.rate * (seen + under_way):
            return False
        worst, count = Counter(filter(None, self._last)).most_common(1)[0]
        self.opened = (
            f"stopped: {self._failures} of the last {seen} attempts failed, most often {worst} ({count} times). "
            f"{cause_of(worst).meaning} {cause_of(worst).advice} Then `rookery resume` this run."
        )
        return True
