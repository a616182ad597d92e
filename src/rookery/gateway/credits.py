"""What all sessions of a process share: credits for calls under way."""

import asyncio
from collections import deque


class Credits:
    """A fair, resizable bound on calls under way at one upstream; the supervisor grants the size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def resize(self, limit: int) -> None:
        self._limit = limit
        self._wake()

    def take_now(self) -> bool:
        """A credit without waiting, where one is free and nobody waits already."""
        if self._used < self._limit and not self._waiting:
            self._used += 1
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
                self.give()  # the credit came in the same tick as the cancellation
            elif turn in self._waiting:  # else a credit given in the same tick passed over it already
                self._waiting.remove(turn)
            raise

    def give(self) -> None:
        self._used -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._used < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._used += 1
                turn.set_result(None)
