"""Quotas of an HTTP server: how many connections and how many bytes of request bodies it holds, and for whom.

A sandbox reaches the gateway through a listener of its own, so one hostile program must not use up what all others
need. Connections and bytes are counted for each owner (a session, through its own listener and every other one
together) and for the whole server.

Promises:
- an owner never holds more connections or bytes than its quota;
- a server that is full makes room at the expense of the owner that holds most, so that others are served: it
  closes what is idle or unfinished before it cuts an answer;
- an owner that holds little is not rejected because the server is full of other owners' bytes.
"""

from typing import TYPE_CHECKING, Final

import msgspec

from rookery.gateway.http import HttpError

if TYPE_CHECKING:
    from rookery.gateway.server import Connection

FAIR_BYTES: Final = 4 << 20
"""Bytes that an owner may always hold."""
MANY: Final = 64
"""Connections of an owner from which on a full server without idle ones closes one that is being answered."""
_BUSY: Final = ((b"retry-after", b"1"),)


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a server holds at a time."""

    connections: int = 20_000
    connections_per_owner: int = 512
    """Of one owner."""
    bytes: int = 512 << 20
    """Of request bodies, from their first byte to the end of their answer."""
    bytes_per_owner: int = 128 << 20
    """Of one owner."""


DEFAULT_QUOTA: Final = Quota()


class QuotaTracker:
    """Counts what is held. The owner of connections that no session is known for yet is the empty string."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.bytes = 0
        self.rejected = 0
        """Connections and requests that were turned away or closed for others' sake."""
        self._count = 0
        self._connections: dict[str, dict[Connection, None]] = {}
        """By owner, the least recently used first."""
        self._bytes: dict[str, int] = {}

    # ---- connections

    def add(self, connection: "Connection") -> bool:
        """Count a connection; False if there is no room for it."""
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
        """Forget a connection; forgetting it twice is fine."""
        own = self._connections.get(connection.owner, {})
        if connection in own:
            del own[connection]
            self._count -= 1
            if not own:
                del self._connections[connection.owner]

    def touch(self, connection: "Connection", owner: str) -> None:
        """Note that a connection is used, and for whom from now on. `HttpError` if the owner has too many."""
        own = self._connections.get(connection.owner, {})
        if connection not in own:  # one that is not counted
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
        """Close the owner's least recently used connection that is not being answered; False if there is none."""
        for connection in self._connections.get(owner, {}):
            if connection.task is None:
                self.rejected += 1
                self.remove(connection)
                connection.abort()
                return True
        return False

    def _close_busy(self, owner: str) -> bool:
        """Close the owner's last used connection although it is being answered, if the owner has many."""
        own = self._connections.get(owner, {})
        if len(own) < MANY:
            return False
        connection = next(reversed(own))
        self.rejected += 1
        self.remove(connection)
        connection.abort()
        return True

    # ---- bytes of bodies

    def add_bytes(self, connection: "Connection", owner: str, size: int) -> None:
        """Count bytes of a request's body, which are held until `release`. `HttpError` if they cannot be kept."""
        own = self._bytes.get(owner, 0) + size
        if owner and own > self.quota.bytes_per_owner:
            self.rejected += 1
            raise HttpError(429, b"this rollout has sent too much that is not answered yet", _BUSY)
        if self.bytes + size > self.quota.bytes and own > FAIR_BYTES:
            self._free_bytes(connection, owner, own)
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        self.bytes += size

    def remove_bytes(self, owner: str, size: int) -> None:
        if not size:
            return
        self.bytes -= size
        left = self._bytes.get(owner, 0) - size
        if left > 0:
            self._bytes[owner] = left
        else:
            self._bytes.pop(owner, None)

    def _free_bytes(self, connection: "Connection", owner: str, own: int) -> None:
        """End the largest request of the owner that holds most, which may be the caller's own."""
        self.rejected += 1
        largest = max(self._bytes, key=lambda one: self._bytes[one], default=owner)
        if largest != owner and self._bytes[largest] > own:
            others = [
                one for one in self._connections.get(largest, {}) if one is not connection and one.body_bytes
            ]
            worst = max(others, key=lambda one: one.body_bytes, default=None)
            if worst is not None:
                if worst.unfinished_bytes:
                    worst.refuse(HttpError(503, b"the gateway holds too many unfinished requests", _BUSY))
                else:
                    worst.abort()
                return
        raise HttpError(503, b"the gateway holds too many unfinished requests", _BUSY)
