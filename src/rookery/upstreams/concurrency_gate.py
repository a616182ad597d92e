"""A fair, resizable limit on the model calls in flight at one server.

Guarantees:
- slots are granted in the order in which they were requested, and never more than the limit at once;
- the limit may change at any time: a larger one admits waiting calls, a smaller one takes effect as calls end;
- a cancelled waiter keeps no slot and does not delay the waiters behind it.
"""

import asyncio
from collections import deque

from rookery.upstreams.protocol import OnWait


class ConcurrencyGate:
    """A first-in, first-out semaphore for the calls in flight at one server, with a limit that can change.

    Use one instance from one event loop only.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of calls that currently wait for a slot."""
        return len(self._waiters)

    def resize(self, limit: int) -> None:
        """Change the limit and admit as many waiting calls as it now allows."""
        self.limit = limit
        self._admit_waiters()

    def acquire_nowait(self) -> bool:
        """Take a slot without waiting. Return False if no slot is free or other calls wait for one already."""
        if self.in_use < self.limit and not self._waiters:
            self.in_use += 1
            return True
        return False

    async def acquire(self, on_wait: OnWait | None = None) -> float:
        """Take a slot, waiting for one if necessary. Return the seconds spent waiting.

        `on_wait` is called with True when the wait begins and with False when it ends, also by cancellation.
        """
        if self.acquire_nowait():
            return 0.0
        loop = asyncio.get_running_loop()
        since = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        if on_wait is not None:
            on_wait(True)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot was granted in the same loop iteration as the cancellation
            elif waiter in self._waiters:  # otherwise `_admit_waiters` has already skipped it
                self._waiters.remove(waiter)
            raise
        finally:
            if on_wait is not None:
                on_wait(False)
        return loop.time() - since

    def release(self) -> None:
        """Give back a slot that `acquire` or `acquire_nowait` took, and admit the next waiting call."""
        self.in_use -= 1
        self._admit_waiters()

    def _admit_waiters(self) -> None:
        while self._waiters and self.in_use < self.limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.in_use += 1
                waiter.set_result(None)
