"""Whether a replica is asked at all: a pure controller without clock, socket or task.

Promises:
- a replica that cannot be reached is left out at once, one that fails otherwise after `STRIKES` failures in a row;
- it is left out for a while that doubles with every failure, up to `LONGEST`, and then looked at, by one only;
- one answer makes it well again, and says so to nobody who did not ask;
- why it is left out is kept, in words.
"""

from typing import Final, Literal, TypeAlias

Sign: TypeAlias = Literal["gone", "failing"]
"""`gone`: no connection, or one that was dropped. `failing`: it answers, but with errors, or not in time."""

STRIKES: Final = 3
SHORTEST: Final = 1.0
LONGEST: Final = 60.0


class Health:
    """One replica's. Times are those of whoever asks, in seconds, from any beginning."""

    __slots__ = ("_probing", "_strikes", "_whiles", "until", "why")

    def __init__(self) -> None:
        self.until: float | None = None
        """Until when it is left out; None where it is well."""
        self.why = ""
        self._strikes = 0
        self._whiles = 0
        self._probing = False

    @property
    def well(self) -> bool:
        return self.until is None

    def answered(self) -> bool:
        """It gave an answer; whether that was news."""
        self._strikes = 0
        if self.until is None:
            return False
        self.until = None
        self._whiles = 0
        self._probing = False
        self.why = ""
        return True

    def failed(self, sign: Sign, why: str, *, now: float) -> bool:
        """It gave none; whether it is left out from now on."""
        self._strikes += 1
        if self.until is not None and now < self.until and not self._probing:
            return False  # a call that began before: its failure is the one that is known
        if sign == "failing" and self.until is None and self._strikes < STRIKES:
            return False
        first = self.until is None
        self._probing = False
        self.why = why
        self.until = now + min(LONGEST, SHORTEST * 2.0 ** min(self._whiles, 16))
        self._whiles += 1
        return first

    def probe(self, *, now: float) -> bool:
        """Whether to look at it now: its while is over, and nobody else looks."""
        if self.until is None or self._probing or now < self.until:
            return False
        self._probing = True
        return True

    def unprobed(self, *, now: float) -> None:
        """A probe that came to no end: the next one may begin after the shortest while."""
        if self._probing:
            self._probing = False
            self.until = now + SHORTEST
