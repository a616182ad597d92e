"""Places at a server: how many calls may be under way there at once, and who is next.

Promises:
- places are given in the order they were asked for, and never more than the limit at once;
- the limit may change at any time: a larger one lets those in who wait, a smaller one waits for those who leave;
- who gives up waiting keeps nothing and loses nobody's turn.
"""

import asyncio
from collections import deque


class Places:
    """A fair, resizable bound. Used in one event loop."""

    __slots__ = ("_waiting", "limit", "taken")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def resize(self, limit: int) -> None:
        self.limit = limit
        self._wake()

    def take_now(self) -> bool:
        """A place without waiting, where one is free and nobody waits already."""
        if self.taken < self.limit and not self._waiting:
            self.taken += 1
            return True
        return False

    async def take(self) -> None:
        if self.take_now():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()  # the place came in the same tick as the cancellation
            elif turn in self._waiting:  # else a place given in the same tick passed over it already
                self._waiting.remove(turn)
            raise

    def give(self) -> None:
        self.taken -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.taken < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.taken += 1
                turn.set_result(None)
