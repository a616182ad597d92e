"""Who asks a keeper for something, and what: connections and their orders. Stand-alone, as the keeper is."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any

    from rookery.sandboxes.local.births import Box
    from rookery.sandboxes.local.works import Work

if TYPE_CHECKING or "rookery.sandboxes" in sys.modules:
    from rookery.sandboxes.small import deque
else:
    from small import deque


class Order:
    """One request: for a box, or for work on one."""

    __slots__ = ("asked", "channel", "client", "given_up", "number", "usual", "work")

    def __init__(self, client: Client, number: int, asked: dict[str, Any]) -> None:
        self.client = client
        self.number = number
        self.asked = asked
        self.channel: _socket.socket | None = None
        """The owner's end of the line to the box that it gets."""
        self.given_up = False
        self.work: Work | None = None
        self.usual = True
        """Whether any warm box will do."""


class Client:
    """A connection; its boxes end with it."""

    __slots__ = ("boxes", "late", "orders", "sock")

    def __init__(self, sock: _socket.socket) -> None:
        self.sock = sock
        self.boxes: set[Box] = set()
        self.orders: dict[int, Order] = {}
        self.late: deque[tuple[bytes, list[int]]] = deque()
        """Answers that it was too slow to take, with their descriptors; no more than it asked for."""
