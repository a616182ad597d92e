"""Quotas of an HTTP server: limits on connections and on bytes of request bodies, per owner and in total.

Runs in gateway shards. One hostile program in a sandbox must not use up what all others need. An owner is a
session; its connections on all listening sockets of the server are added up.

Guarantees:
- an owner never has more connections, or bytes of request bodies in memory, than its quota;
- if the server has reached its total of connections, it closes a connection of the owner that has most, preferably
  one without a response in progress;
- an owner with few bytes is not rejected because request bodies of other owners have reached the server's total.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from rookery.gateway.http_messages import HttpError

if TYPE_CHECKING:
    from rookery.gateway.server import HttpConnection

FAIR_BYTES: Final = 4 << 20
"""Bytes of request bodies that an owner may have even if the server's total is reached."""
MANY_CONNECTIONS: Final = 64
"""If the server's total of connections is reached, only an owner with at least this many connections loses one
that has a response in progress."""
_BUSY: Final = ((b"retry-after", b"1"),)


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one HTTP server. `connections` is the maximum number of all its client connections."""

    connections: int = 20_000
    connections_per_owner: int = 512
    """Maximum number of connections of one owner (session)."""
    bytes: int = 512 << 20
    """Maximum bytes of all request bodies in memory. A body counts from its first byte until its request is
    handled."""
    bytes_per_owner: int = 128 << 20
    """Maximum bytes of request bodies in memory of one owner (session)."""


DEFAULT_QUOTA: Final = Quota()


class QuotaTracker:
    """Counts connections and bytes of request bodies per owner, and enforces a `Quota`.

    An owner is a session. Connections whose session is not known yet belong to the owner with the empty name,
    which has no quota of its own. If a total of the server is reached, connections of the largest owner are
    closed.
    """

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.bytes = 0
        self.rejected = 0
        """Number of connections and requests that were rejected, or closed to make room for others."""
        self._count = 0
        self._connections: dict[str, dict[HttpConnection, None]] = {}
        """Connections by owner, the least recently used one first."""
        self._bytes: dict[str, int] = {}

    @property
    def owners(self) -> frozenset[str]:
        """The owners that have a connection or a request body in memory."""
        return frozenset(self._connections) | frozenset(self._bytes)

    def count_connections(self, owner: str) -> int:
        """Return the number of open connections of an owner."""
        return len(self._connections.get(owner, ()))

    # ---- connections

    def add(self, connection: "HttpConnection") -> bool:
        """Count a new connection, closing another one if that is needed and fair.

        Return False if it is rejected.
        """
        owner = connection.owner
        own = self._connections.get(owner, {})
        if owner and len(own) >= self.quota.connections_per_owner and not self._close_idle(owner):
            self.rejected += 1
            return False
        if self._count >= self.quota.connections:
            largest = max(self._connections, key=lambda one: len(self._connections[one]), default=owner)
            fair = len(self._connections.get(largest, ())) > len(self._connections.get(owner, ()))
            if not (fair and (self._close_idle(largest) or self._close_busy(largest))):
                self.rejected += 1
                return False
        self._connections.setdefault(owner, {})[connection] = None
        self._count += 1
        return True

    def remove(self, connection: "HttpConnection") -> None:
        """Stop counting a connection. Removing it twice is allowed."""
        own = self._connections.get(connection.owner, {})
        if connection in own:
            del own[connection]
            self._count -= 1
            if not own:
                del self._connections[connection.owner]

    def touch(self, connection: "HttpConnection", owner: str) -> None:
        """Mark a connection as most recently used, and set its owner.

        Raises `HttpError` if the owner has too many connections and none of them is idle.
        """
        own = self._connections.get(connection.owner, {})
        if connection not in own:  # a trusted connection
            return
        if owner == connection.owner:
            own[connection] = own.pop(connection)
            return
        others = self._connections.get(owner, {})
        if owner and len(others) >= self.quota.connections_per_owner and not self._close_idle(owner):
            self.rejected += 1
            raise HttpError(429, b"this rollout has too many connections; close some of them", _BUSY)
        self.remove(connection)
        connection.owner = owner
        self._connections.setdefault(owner, {})[connection] = None
        self._count += 1

    def _close_idle(self, owner: str) -> bool:
        """Close the owner's least recently used connection without a request in progress.

        Return False if the owner has no such connection.
        """
        for connection in self._connections.get(owner, {}):
            if connection.task is None:
                self.rejected += 1
                self.remove(connection)
                connection.abort()
                return True
        return False

    def _close_busy(self, owner: str) -> bool:
        """Close the owner's most recently used connection, even if a request is in progress.

        Return False, and close none, if the owner has fewer than `MANY_CONNECTIONS`.
        """
        own = self._connections.get(owner, {})
        if len(own) < MANY_CONNECTIONS:
            return False
        connection = next(reversed(own))
        self.rejected += 1
        self.remove(connection)
        connection.abort()
        return True

    # ---- bytes of bodies

    def add_bytes(self, connection: "HttpConnection", owner: str, size: int) -> None:
        """Count `size` received bytes of a request body, until `remove_bytes`.

        Raise `HttpError` if a limit is reached.
        """
        own = self._bytes.get(owner, 0) + size
        if owner and own > self.quota.bytes_per_owner:
            self.rejected += 1
            raise HttpError(
                429, b"the unanswered requests of this rollout are too large; wait for responses", _BUSY
            )
        if self.bytes + size > self.quota.bytes and own > FAIR_BYTES:
            self._free_bytes(connection, owner, own)
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self.bytes += size

    def remove_bytes(self, owner: str, size: int) -> None:
        """Stop counting bytes of a request body."""
        if not size:
            return
        self.bytes -= size
        left = self._bytes.get(owner, 0) - size
        if left > 0:
            self._bytes[owner] = left
        else:
            self._bytes.pop(owner, None)

    def _free_bytes(self, connection: "HttpConnection", owner: str, own: int) -> None:
        """End the largest request of the owner that has most bytes.

        Raises `HttpError` instead, to reject the caller's request, if no other owner has more bytes than the
        caller or it has no request to end.
        """
        self.rejected += 1
        largest = max(self._bytes, key=lambda one: self._bytes[one], default=owner)
        if largest != owner and self._bytes[largest] > own:
            others = [
                one for one in self._connections.get(largest, {}) if one is not connection and one.body_bytes
            ]
            worst = max(others, key=lambda one: one.body_bytes, default=None)
            if worst is not None:
                if worst.unfinished_bytes:
                    worst.reject(
                        HttpError(
                            503,
                            b"the gateway has too many bytes of unfinished requests in memory; try again",
                            _BUSY,
                        )
                    )
                else:
                    worst.abort()
                return
        raise HttpError(503, b"the gateway has too many bytes of unfinished requests in memory; try again", _BUSY)
