"""Quotas of an HTTP server: limits on connections and on bytes of request bodies, per owner and in total.

Runs in gateway shards. A sandbox reaches the gateway through its own listener, and one hostile program must not
use up what all others need. An owner is a session; its use of all listeners is added up.

Guarantees:
- an owner never has more connections or bytes than its quota;
- if the server is full, it closes connections of the owner that has most: idle and unfinished ones before those
  with a response in progress;
- an owner that uses little is not rejected because other owners' bytes fill the server.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from rookery.gateway.http import HttpError

if TYPE_CHECKING:
    from rookery.gateway.server import Connection

FAIR_BYTES: Final = 4 << 20
"""Bytes of request bodies that an owner may have even if the server is full."""
MANY_CONNECTIONS: Final = 64
"""If the server is full, an owner with this many connections loses one although a response is in progress."""
_BUSY: Final = ((b"retry-after", b"1"),)


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one server."""

    connections: int = 20_000
    connections_per_owner: int = 512
    """Connections of one owner."""
    bytes: int = 512 << 20
    """Bytes of request bodies, each counted from its first byte to the end of its response."""
    bytes_per_owner: int = 128 << 20
    """Bytes of request bodies of one owner."""


DEFAULT_QUOTA: Final = Quota()


class QuotaTracker:
    """Counts connections and bytes, and makes room if the server is full.

    Connections whose session is not known yet belong to the owner with the empty name.
    """

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.bytes = 0
        self.rejected = 0
        """Number of connections and requests that were rejected, or closed to make room."""
        self._count = 0
        self._connections: dict[str, dict[Connection, None]] = {}
        """By owner; the least recently used connection is first."""
        self._bytes: dict[str, int] = {}

    # ---- connections

    def add(self, connection: "Connection") -> bool:
        """Count a connection. Return False if it exceeds a limit."""
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

    def remove(self, connection: "Connection") -> None:
        """Stop counting a connection. Removing it twice is allowed."""
        own = self._connections.get(connection.owner, {})
        if connection in own:
            del own[connection]
            self._count -= 1
            if not own:
                del self._connections[connection.owner]

    def touch(self, connection: "Connection", owner: str) -> None:
        """Mark a connection as used, and set its owner. Raise `HttpError` if the owner has too many."""
        own = self._connections.get(connection.owner, {})
        if connection not in own:  # a trusted connection
            return
        if owner == connection.owner:
            own[connection] = own.pop(connection)
            return
        others = self._connections.get(owner, {})
        if owner and len(others) >= self.quota.connections_per_owner and not self._close_idle(owner):
            self.rejected += 1
            raise HttpError(429, b"this rollout has too many connections", _BUSY)
        self.remove(connection)
        connection.owner = owner
        self._connections.setdefault(owner, {})[connection] = None
        self._count += 1

    def _close_idle(self, owner: str) -> bool:
        """Close the owner's least recently used connection without a request in progress; False if it has none."""
        for connection in self._connections.get(owner, {}):
            if connection.task is None:
                self.rejected += 1
                self.remove(connection)
                connection.abort()
                return True
        return False

    def _close_busy(self, owner: str) -> bool:
        """Close the owner's most recently used connection if the owner has many; False if it has few."""
        own = self._connections.get(owner, {})
        if len(own) < MANY_CONNECTIONS:
            return False
        connection = next(reversed(own))
        self.rejected += 1
        self.remove(connection)
        connection.abort()
        return True

    # ---- bytes of bodies

    def add_bytes(self, connection: "Connection", owner: str, size: int) -> None:
        """Count bytes of a request body until `remove_bytes`. Raise `HttpError` if they exceed a limit."""
        own = self._bytes.get(owner, 0) + size
        if owner and own > self.quota.bytes_per_owner:
            self.rejected += 1
            raise HttpError(429, b"this rollout has too many bytes in unanswered requests", _BUSY)
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

    def _free_bytes(self, connection: "Connection", owner: str, own: int) -> None:
        """End the largest request of the owner with most bytes; raise `HttpError` if that is the caller."""
        self.rejected += 1
        largest = max(self._bytes, key=lambda one: self._bytes[one], default=owner)
        if largest != owner and self._bytes[largest] > own:
            others = [
                one for one in self._connections.get(largest, {}) if one is not connection and one.body_bytes
            ]
            worst = max(others, key=lambda one: one.body_bytes, default=None)
            if worst is not None:
                if worst.unfinished_bytes:
                    worst.reject(HttpError(503, b"the gateway holds too many unfinished requests", _BUSY))
                else:
                    worst.abort()
                return
        raise HttpError(503, b"the gateway holds too many unfinished requests", _BUSY)
