"""Limit how many submissions of a run are graded at the same time on this machine.

Tests have time limits. If too many run at once, correct programs exceed these limits: in a measurement with 200 at
once on two cores, 49 of 113 did. The limit holds for all processes of a run together; other runs have their own. A
slot is released when its holder leaves the block, is cancelled or dies. Within a process, waiters get slots in
order; between processes, the order is random.
"""

import asyncio
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

POLL_SECONDS: Final = 0.05
"""Seconds between two attempts to get a slot while other processes hold all of them."""


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def get_run_name() -> str:
    """Return a name that is the same in all processes of a run on this machine.

    It contains the process ID of the supervisor, which is the parent of all runners.
    """
    engine = sys.modules.get("rookery.engine.processes")
    return f"grading-{os.getppid() if getattr(engine, 'in_runner', False) else os.getpid()}"


class GradingSlots:
    """A semaphore with `slots` slots, shared by all processes of this user and machine with the same `name`."""

    def __init__(self, slots: int, name: str) -> None:
        self.slots = slots
        self._name = f"rookery-{name}-{os.getuid()}"
        self._local: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Context manager that waits for a free slot and holds it inside the block."""
        loop = asyncio.get_running_loop()
        if self._local is None or self._loop is not loop:
            self._local, self._loop = asyncio.Semaphore(self.slots), loop
        waited = self._local.locked()
        async with self._local:
            if waited:
                # Give other processes a chance to get the slot that was just released here; otherwise a process
                # with a long queue would take it again every time.
                await asyncio.sleep(random.uniform(0, 2 * POLL_SECONDS))  # noqa: S311
            slot = await self._bind_slot()
            try:
                yield
            finally:
                slot.close()

    async def _bind_slot(self) -> socket.socket:
        """Wait for a free slot and return a socket that is bound to the slot's abstract Unix address.

        The kernel allows one socket per address, and frees the address when the socket is closed or the process
        dies.
        """
        order = list(range(self.slots))
        while True:
            random.shuffle(order)
            for number in order:
                slot = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                try:
                    slot.bind(f"\0{self._name}-{number}")
                except OSError:
                    slot.close()
                else:
                    return slot
            await asyncio.sleep(POLL_SECONDS)
