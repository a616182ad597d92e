"""Stop a run in which too many attempts fail. Used by the supervisor; does no I/O.

- The breaker opens (the run stops) when the failure rate is too high over a minimum number of attempts. A few
  failures at the start do not open it.
- Failed attempts tend to end sooner than successful ones, so running attempts count as not failed.
- Only failures with fault infra or bug count. Invalid tasks and results of the policy never open the breaker.
"""

from collections import Counter, deque

from rookery.core import Cancelled, Failed, Outcome, get_cause

MIN_ATTEMPTS = 20


class CircuitBreaker:
    """Tracks the failure rate over a window of the latest attempts.

    The window has 100 attempts, or twice the concurrency if that is more. The breaker opens if more than `rate` of
    the attempts failed and at least `MIN_ATTEMPTS` have ended. It never opens if `rate` is None.
    """

    def __init__(self, rate: float | None = 0.5, *, concurrency: int = 1) -> None:
        self.rate = rate
        self._causes: deque[str] = deque(maxlen=max(100, 2 * concurrency))
        """The cause code of each of the latest attempts; an empty string for an attempt that does not count as
        failed."""
        self._failures = 0
        self.message = ""
        """The reason why the breaker is open, with the most frequent cause; empty while it is closed."""

    @property
    def is_open(self) -> bool:
        return bool(self.message)

    def observe(self, outcome: Outcome, running: int = 0) -> bool:
        """Count one ended attempt while `running` others run. Return True if it opened the breaker."""
        if self.rate is None or self.is_open or isinstance(outcome, Cancelled):
            return False
        cause = outcome.cause if isinstance(outcome, Failed) and outcome.fault != "task" else ""
        if len(self._causes) == self._causes.maxlen and self._causes[0]:
            self._failures -= 1
        self._causes.append(cause)
        self._failures += bool(cause)
        seen = len(self._causes)
        if not cause or seen < MIN_ATTEMPTS or self._failures <= self.rate * (seen + running):
            return False
        worst, count = Counter(filter(None, self._causes)).most_common(1)[0]
        self.message = (
            f"stopped: {self._failures} of the last {seen} attempts failed, mostly with {worst} ({count} times). "
            f"{get_cause(worst).meaning} {get_cause(worst).advice} Then continue with `rookery resume`."
        )
        return True
