"""One bucket for each client."""

from gate.bucket import Bucket

MOST = 10_000
"""How many buckets are kept; a full one can be forgotten, for a new one is the same."""


class Limiter:
    def __init__(self, burst, rate):
        self._burst = burst
        self._rate = rate
        self._buckets = {}

    def allows(self, at, client, cost):
        bucket = self._buckets.get(client)
        if bucket is None:
            if len(self._buckets) >= MOST:
                self._forget(at)
            bucket = self._buckets[client] = Bucket(self._burst, self._rate, at)
        return bucket.take(at, cost)

    def _forget(self, at):
        for client in [client for client, bucket in self._buckets.items() if bucket.is_full(at)]:
            del self._buckets[client]
