"""Decide whether a replica (one server of an upstream) receives calls. Does no I/O and reads no clock.

Guarantees:
- an unreachable replica is excluded at once, and a replica that fails in another way after `STRIKES` failures in a
  row;
- an exclusion lasts `SHORTEST` seconds at first. A single probe request follows; each time it fails, the duration
  doubles, up to `LONGEST` seconds;
- one successful response makes the replica healthy again;
- the reason for the exclusion is stored in `Health.reason`.
"""

from typing import Final, Literal, TypeAlias

HealthSignal: TypeAlias = Literal["gone", "failing"]
"""The way a call to a replica failed. `gone`: the server could not be reached, or dropped the connection.
`failing`: it responded with an error, too late or incompletely."""
SIGNALS_BY_FAILURE: Final[dict[str, HealthSignal]] = {
    "connect": "gone",
    "dropped": "gone",
    "gateway": "gone",
    "error": "failing",
}
"""The signals of failures, by `FailureKind`. Failures of other kinds are no signal by themselves."""

STRIKES: Final = 3
SHORTEST: Final = 1.0
LONGEST: Final = 60.0


class Health:
    """The health of one replica. Methods take the current time as `now`, in seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.until: float | None = None
        """Time at which the exclusion ends and the replica may be probed; None if the replica is healthy."""
        self.reason = ""
        self._strikes = 0
        self._exclusions = 0
        self._probing = False

    @property
    def healthy(self) -> bool:
        return self.until is None

    def answered(self) -> bool:
        """Record a successful response, which ends an exclusion. Return True if the replica was excluded."""
        self._strikes = 0
        if self.until is None:
            return False
        self.until = None
        self._exclusions = 0
        self._probing = False
        self.reason = ""
        return True

    def failed(self, signal: HealthSignal, reason: str, *, now: float) -> bool:
        """Record a failure and its reason. Return True if the replica was healthy and is excluded now."""
        self._strikes += 1
        if self.until is not None and now < self.until and not self._probing:
            return False  # a call from before the exclusion: its failure is already known
        if signal == "failing" and self.until is None and self._strikes < STRIKES:
            return False
        first = self.until is None
        self._probing = False
        self.reason = reason
        self.until = now + min(LONGEST, SHORTEST * 2.0 ** min(self._exclusions, 16))
        self._exclusions += 1
        return first

    def probe(self, *, now: float) -> bool:
        """Return True if the caller must probe the replica now: its exclusion has expired, and no probe is
        running.

        A probe counts as running until `answered`, `failed` or `unprobed` is called.
        """
        if self.until is None or self._probing or now < self.until:
            return False
        self._probing = True
        return True

    def unprobed(self, *, now: float) -> None:
        """Record that a probe ended without a result. The next probe may begin after `SHORTEST` seconds.

        Has no effect if `answered` or `failed` has recorded the result of the probe.
        """
        if self._probing:
            self._probing = False
            self.until = now + SHORTEST
