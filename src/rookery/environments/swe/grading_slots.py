"""Limit how many submissions of a run are graded at the same time on this machine.

Tests have time limits. If too many run at once, correct programs exceed theirs: with 200 on two cores, 49 of
113 did. The limit counts all processes of a run; other runs are independent. A slot is released when its holder
leaves, is cancelled or dies. Waiters are served in order within a process and at random between processes.
"""

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

LOOK: Final = 0.05
"""Seconds between two attempts to get a slot that other processes hold."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


def get_run_name() -> str:
    """Return a name that is the same in all processes of a run. Runners are children of the engine's process."""
    engine = sys.modules.get("rookery.engine.processes")
    return f"grading-{os.getppid() if getattr(engine, 'in_runner', False) else os.getpid()}"


class GradingSlots:
    """A semaphore with `places` slots that is shared by all processes with the same `name`."""

    def __init__(self, places: int, name: str) -> None:
        self.places = places
        self._name = f"rookery-{name}-{os.getuid()}"
        self._own: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Hold one slot inside the block."""
        loop = asyncio.get_running_loop()
        if self._own is None or self._loop is not loop:
            self._own, self._loop = asyncio.Semaphore(self.places), loop
        queued = self._own.locked()
        async with self._own:
            if queued:
                # Give other processes a chance to get the slot that was just released here; otherwise a process
                # with a long queue would take it again every time.
                await asyncio.sleep(random.uniform(0, 2 * LOOK))  # noqa: S311
            held = await self._place()
            try:
                yield
            finally:
                held.close()

    async def _place(self) -> socket.socket:
        """Bind an abstract socket address per slot: only one socket can have it, and the kernel releases it."""
        order = list(range(self.places))
        while True:
            random.shuffle(order)
            for number in order:
                held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                try:
                    held.bind(f"\0{self._name}-{number}")
                except OSError:
                    held.close()
                except BaseException:
                    held.close()
                    raise
                else:
                    return held
            await asyncio.sleep(LOOK)
