"""The clock of a rollout's stage, such as setup or run. It reads no time itself: the caller passes the current
time.

- Time for which the clock is stopped is not charged to the stage's budget. It is stopped during a pause of the
  engine and while a model call waits in the queue of the inference engine.
- Stops nest: after `n` calls of `stop`, the clock continues with the `n`th call of `restart`.
"""


class StageClock:
    """Measures the time of one stage against its budget in seconds."""

    def __init__(self, now: float, budget: float) -> None:
        self.started = now
        self.budget = budget
        self.stopped_seconds = 0.0
        self._stops = 0
        self._since = 0.0

    def stop(self, now: float) -> None:
        """Stop the clock until `restart` was called as often as `stop`."""
        if self._stops == 0:
            self._since = now
        self._stops += 1

    def restart(self, now: float) -> bool:
        """Undo one `stop`. Return True if no other `stop` is left, so that the clock runs again."""
        if self._stops == 0:
            raise ValueError("restart() without a matching stop() of the stage clock")
        self._stops -= 1
        if self._stops == 0:
            self.stopped_seconds += now - self._since
        return self._stops == 0

    @property
    def stopped(self) -> bool:
        return self._stops > 0

    def stopped_seconds_at(self, now: float) -> float:
        """Return for how many seconds in total the clock was stopped until `now`."""
        return self.stopped_seconds + (now - self._since if self._stops else 0.0)

    def exclude_at_least(self, now: float, total_seconds: float) -> None:
        """Raise the total stopped time to `total_seconds` if it is lower, but not above the age of the stage.

        The gateway, another process, measured this total: how long an agent's model calls have waited.
        """
        self.stopped_seconds += max(0.0, min(total_seconds, now - self.started) - self.stopped_seconds_at(now))

    def used(self, now: float) -> float:
        """Return the seconds since the start for which the clock was not stopped."""
        return now - self.started - self.stopped_seconds_at(now)

    def remaining(self, now: float) -> float:
        return self.budget - self.used(now)
