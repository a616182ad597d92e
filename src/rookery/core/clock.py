"""The clock of a stage. A pure controller: the caller passes the current time.

- Time for which the clock is stopped (a pause, the upstream's queue) is not charged to the budget.
- Stops nest: the clock continues after the last one is released.
"""


class StageClock:
    """Measures the time of one stage against its budget in seconds."""

    __slots__ = ("_holds", "_since", "budget", "held", "started")

    def __init__(self, now: float, budget: float) -> None:
        self.started = now
        self.budget = budget
        self.held = 0.0
        self._holds = 0
        self._since = 0.0

    def hold(self, now: float) -> None:
        if self._holds == 0:
            self._since = now
        self._holds += 1

    def release(self, now: float) -> bool:
        """Undo one `hold`. Return True if the clock runs again."""
        if self._holds == 0:
            raise ValueError("release() without a matching hold() of the stage clock")
        self._holds -= 1
        if self._holds == 0:
            self.held += now - self._since
        return self._holds == 0

    @property
    def stopped(self) -> bool:
        return self._holds > 0

    def held_by(self, now: float) -> float:
        """Return for how many seconds the clock was stopped so far."""
        return self.held + (now - self._since if self._holds else 0.0)

    def credit(self, now: float, held: float) -> None:
        """Make the total of stopped time at least `held` seconds, as measured by another process."""
        self.held += max(0.0, min(held, now - self.started) - self.held_by(now))

    def used(self, now: float) -> float:
        """Return the seconds charged so far."""
        return now - self.started - self.held_by(now)

    def remaining(self, now: float) -> float:
        return self.budget - self.used(now)
