"""Choose the host on which the next sandbox is created. A pure controller: time is an argument.

Guarantees:
- a host that failed is not chosen again before its back-off ends, which doubles with each failure in a row;
- a host that is full is not chosen again before one of its sandboxes is closed or a moment has passed;
- among the others, the host with the smallest part of its capacity in use is chosen.
"""

import msgspec

MIN_BACKOFF = 1.0
MAX_BACKOFF = 60.0
FULL_SECONDS = 0.5
DEFAULT_CAPACITY = 64
"""Assumed capacity, for the comparison of loads, of a host without a configured one."""


class PooledHost(msgspec.Struct, kw_only=True):
    """One host of the pool."""

    name: str
    capacity: int = 0
    """Maximum number of sandboxes; 0 for no limit."""
    open: int = 0
    """Number of sandboxes that exist there or are being created."""
    failures: int = 0
    """Number of failures since the last success."""
    closed_until: float = 0.0
    """Time before which the host is not chosen."""
    problem: str = ""
    """Why the host was not chosen last; empty if it is healthy."""

    @property
    def load(self) -> float:
        return self.open / (self.capacity or DEFAULT_CAPACITY)


class HostPool:
    """The hosts of a provider, with their load and health."""

    def __init__(self, hosts: "list[PooledHost]") -> None:
        self.hosts = hosts

    def choose(self, now: float) -> "PooledHost | float":
        """Return the best host and count one more sandbox there, or the time at which to ask again."""
        usable = [
            host
            for host in self.hosts
            if host.closed_until <= now and (not host.capacity or host.open < host.capacity)
        ]
        if usable:
            best = min(usable, key=lambda host: (host.load, host.open))
            best.open += 1
            return best
        times = [host.closed_until for host in self.hosts if host.closed_until > now]
        return min(times, default=now + FULL_SECONDS)

    def note_success(self, host: PooledHost) -> None:
        """Record that a sandbox was created on a host."""
        host.failures, host.problem = 0, ""

    def note_failure(self, host: PooledHost, problem: str, now: float) -> None:
        """Record that a host cannot be used, for example because it does not answer."""
        host.open -= 1
        host.failures += 1
        host.problem = problem
        host.closed_until = now + min(MAX_BACKOFF, MIN_BACKOFF * 2 ** (host.failures - 1))

    def note_full(self, host: PooledHost, now: float) -> None:
        """Record that a host has reached its limit of sandboxes."""
        host.open -= 1
        host.problem = "it is full"
        host.closed_until = now + FULL_SECONDS

    def note_closed(self, host: PooledHost) -> None:
        """Record that a sandbox of a host was closed or not created for another reason."""
        host.open -= 1
        if host.problem == "it is full":
            host.closed_until, host.problem = 0.0, ""
