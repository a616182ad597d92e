"""Metrics of a gateway shard: the metrics of the process, labelled with the shard's index."""

from rookery.telemetry import catalogue


class ShardMetrics:
    """Counts requests and turns of one gateway shard."""

    def __init__(self, shard: int) -> None:
        self.shard = str(shard)

    def count(self, name: str, by: int = 1) -> None:
        """Increase one of the counters in `catalogue.GATEWAY_COUNTS`."""
        catalogue.GATEWAY_COUNTS[name].add(self.shard, by=by)

    def count_response(self, status: int) -> None:
        catalogue.GATEWAY_REQUESTS.add(self.shard, str(status))

    def count_truncated(self, reason: str) -> None:
        catalogue.GATEWAY_TRUNCATED.add(self.shard, reason)

    def count_upstream_error(self, cause: str) -> None:
        catalogue.GATEWAY_ERRORS.add(self.shard, cause)

    def observe_call(self, seconds: float) -> None:
        catalogue.GATEWAY_SECONDS.observe(seconds, self.shard)

    def observe_first_piece(self, seconds: float) -> None:
        catalogue.GATEWAY_FIRST_SECONDS.observe(seconds, self.shard)

    def set_gauges(self, *, sessions: int, connections: int, calls: int, paused: bool) -> None:
        catalogue.GATEWAY_SESSIONS.set(sessions, self.shard)
        catalogue.GATEWAY_CONNECTIONS.set(connections, self.shard)
        catalogue.GATEWAY_CALLS.set(calls, self.shard)
        catalogue.GATEWAY_PAUSED.set(paused, self.shard)
