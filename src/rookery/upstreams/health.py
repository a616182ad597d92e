"""Decide whether a replica receives calls: a pure controller without clock, socket or task.

Guarantees:
- an unreachable replica is excluded at once; one that fails otherwise, after `STRIKES` failures in a row;
- the exclusion doubles with every failure, up to `LONGEST` seconds, and is followed by a single probe;
- one successful response makes the replica healthy again;
- the reason for the exclusion is stored.
"""

from typing import Final, Literal, TypeAlias

Sign: TypeAlias = Literal["gone", "failing"]
"""`gone`: no connection, or a dropped one. `failing`: the server responds with errors, or too late."""

STRIKES: Final = 3
SHORTEST: Final = 1.0
LONGEST: Final = 60.0


class Health:
    """The health of one replica. The caller passes the time, in seconds of any monotonic clock."""

    __slots__ = ("_exclusions", "_probing", "_strikes", "until", "why")

    def __init__(self) -> None:
        self.until: float | None = None
        """Until when the replica is excluded; None if it is healthy."""
        self.why = ""
        self._strikes = 0
        self._exclusions = 0
        self._probing = False

    @property
    def well(self) -> bool:
        return self.until is None

    def answered(self) -> bool:
        """Note a response. Return True if the replica was excluded before."""
        self._strikes = 0
        if self.until is None:
            return False
        self.until = None
        self._exclusions = 0
        self._probing = False
        self.why = ""
        return True

    def failed(self, sign: Sign, why: str, *, now: float) -> bool:
        """Note a failure. Return True if the replica is newly excluded."""
        self._strikes += 1
        if self.until is not None and now < self.until and not self._probing:
            return False  # a call from before the exclusion: its failure is already known
        if sign == "failing" and self.until is None and self._strikes < STRIKES:
            return False
        first = self.until is None
        self._probing = False
        self.why = why
        self.until = now + min(LONGEST, SHORTEST * 2.0 ** min(self._exclusions, 16))
        self._exclusions += 1
        return first

    def probe(self, *, now: float) -> bool:
        """Return True if the caller should probe the replica now: it is due, and no probe is running."""
        if self.until is None or self._probing or now < self.until:
            return False
        self._probing = True
        return True

    def unprobed(self, *, now: float) -> None:
        """Note that a probe ended without a result: the next one may begin after `SHORTEST` seconds."""
        if self._probing:
            self._probing = False
            self.until = now + SHORTEST
