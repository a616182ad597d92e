"""How many submissions of a run are graded at once on this machine, whatever the number of rollouts and runners.

Tests have time limits of their own. With two hundred of them on two cores, right programs miss theirs and are paid
nothing: 49 of 113 were when it was measured. What waits here waits off the clock.

Promises:
- at most so many are inside, counted over all processes of a run on this machine; other runs are not waited for;
- a place is free again when its holder leaves, is cancelled or dies, in whatever way;
- who waits is served in the order of coming within a process, and between processes by chance, with none left out.
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
"""Seconds between two looks at places that other processes hold."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


def name_of_run() -> str:
    """The same in all processes of a run: runners are children of the one that leads it."""
    engine = sys.modules.get("rookery.engine.processes")
    return f"grading-{os.getppid() if getattr(engine, 'in_runner', False) else os.getpid()}"


class Gate:
    """Lets `places` through at a time. One for each process and kind of work."""

    def __init__(self, places: int, name: str) -> None:
        self.places = places
        self._name = f"rookery-{name}-{os.getuid()}"
        self._own: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Inside, one of the places is ours."""
        loop = asyncio.get_running_loop()
        if self._own is None or self._loop is not loop:
            self._own, self._loop = asyncio.Semaphore(self.places), loop
        queued = self._own.locked()
        async with self._own:
            if queued:
                # Others may look for the place that one of ours has just left: a process whose queue is long would
                # have it again before they did, every time.
                await asyncio.sleep(random.uniform(0, 2 * LOOK))  # noqa: S311
            held = await self._place()
            try:
                yield
            finally:
                held.close()

    async def _place(self) -> socket.socket:
        """A name that only one socket of the machine can have: the kernel frees it with its holder."""
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
