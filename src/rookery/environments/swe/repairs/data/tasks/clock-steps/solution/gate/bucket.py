"""Tokens that flow in with time. They are counted in thousandths, so that whole numbers do."""

WHOLE = 1000


class Bucket:
    def __init__(self, burst, rate, at):
        self._most = burst * WHOLE
        self._rate = rate
        self._held = self._most
        self._at = at

    def _fill(self, at):
        at = max(at, self._at)
        self._held = min(self._most, self._held + (at - self._at) * self._rate)
        self._at = at

    def take(self, at, cost):
        self._fill(at)
        if self._held < cost * WHOLE:
            return False
        self._held -= cost * WHOLE
        return True

    def is_full(self, at):
        self._fill(at)
        return self._held >= self._most
