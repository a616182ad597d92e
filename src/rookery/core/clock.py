"""A stage's clock, as a pure controller: times come in as arguments, no clock is read here.

Promises:
- held time (a pause, waiting for a place at the upstream) is not charged to the budget;
- holds nest: the clock runs again when the last one is released.
"""


class StageClock:
    """Counts one stage's own time against its budget in seconds."""

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
        """True when the clock runs again."""
        if self._holds == 0:
            raise ValueError("released a stage clock that nobody holds")
        self._holds -= 1
        if self._holds == 0:
            self.held += now - self._since
        return self._holds == 0

    @property
    def stopped(self) -> bool:
        return self._holds > 0

    def held_by(self, now: float) -> float:
        """Seconds that were held so far."""
        return self.held + (now - self._since if self._holds else 0.0)

    def credit(self, now: float, held: float) -> None:
        """Others saw `held` seconds of waiting in all: what was not held here is not charged either."""
        self.held += max(0.0, min(held, now - self.started) - self.held_by(now))

    def used(self, now: float) -> float:
        """Seconds charged so far."""
        return now - self.started - self.held_by(now)

    def remaining(self, now: float) -> float:
        return self.budget - self.used(now)
