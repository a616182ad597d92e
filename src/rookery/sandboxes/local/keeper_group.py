"""The keepers of one machine that a provider uses. Runs in the process that owns the sandboxes.

A keeper creates its sandboxes one after the other, so machines with many cores have several keepers. The first one
creates all sandboxes with an image or mounts, because keepers do not share unpacked images. A fork of a sandbox is
created by the keeper that has the snapshot.
"""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from rookery.core import SandboxError
from rookery.sandboxes.local.keeper_client import KeeperClient, socket_name

log = logging.getLogger("rookery.sandboxes")

CORES_PER_KEEPER = 4
MAX_KEEPERS = 8
CREATIONS_PER_KEEPER = 4
"""Number of creations in progress for each keeper above which another keeper is started or connected to."""


def count_keepers() -> int:
    """Return how many keepers this machine may have."""
    return max(1, min(MAX_KEEPERS, len(os.sched_getaffinity(0)) // CORES_PER_KEEPER))


class KeeperGroup:
    """Connections to the keepers in a directory: those of the run or, if there are none, keepers of our own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clients: dict[int, KeeperClient] = {}
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._count = self._limit = count_keepers()
        self._creating = 0
        self._last = 0
        self._adding: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """PIDs of the keepers that this process has started."""
        return [client.pid for client in self._clients.values() if client.pid]

    async def get(self, index: int = 0) -> KeeperClient:
        """Return the connection to a keeper. Open it if there is none yet or that keeper died."""
        async with self._locks[index]:
            client = self._clients.get(index)
            if client is None or client.dead.done():
                if client is not None:
                    await client.close()
                self._folder.mkdir(parents=True, exist_ok=True)
                client = self._clients[index] = await KeeperClient.open(self._folder.resolve(), index, self._count)
            return client

    async def start(self) -> None:
        """Start keepers to which other processes of the run can connect."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _raise_first(await asyncio.gather(*map(self._start, range(self._count)), return_exceptions=True))

    async def _start(self, index: int) -> None:
        async with self._locks[index]:
            if index not in self._clients:
                self._clients[index] = await KeeperClient.launch(
                    self._folder.resolve(), index, self._count, listen=True
                )

    @asynccontextmanager
    async def choose(self) -> AsyncIterator[KeeperClient]:
        """Choose a keeper for a sandbox without files of its own. The block creates that sandbox."""
        self._creating += 1
        try:
            yield await self.get(self._choose_index())
        finally:
            self._creating -= 1

    def _choose_index(self) -> int:
        ready = [index for index, client in self._clients.items() if not client.dead.done()]
        if not ready:
            # The processes of a run share its keepers, so each of them begins with another one.
            shared = self._limit > 1 and (self._folder / socket_name(1)).exists()
            return os.getpid() % self._limit if shared else 0
        if (
            len(ready) < self._limit
            and self._creating > CREATIONS_PER_KEEPER * len(ready)
            and (self._adding is None or self._adding.done())
        ):
            unused = next(index for index in range(self._limit) if index not in ready)
            self._adding = asyncio.get_running_loop().create_task(self._add(unused))
        self._last += 1
        return ready[self._last % len(ready)]

    async def _add(self, index: int) -> None:
        try:
            await self.get(index)
        except (SandboxError, OSError) as error:
            self._limit = max(1, len(self._clients))
            log.warning("another keeper could not be started, so sandboxes are created more slowly: %s", error)

    async def close(self) -> None:
        """Close all connections. Keepers that this process has started end, with their sandboxes."""
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.cancel()
            await asyncio.wait({adding})
        clients = list(self._clients.values())
        self._clients.clear()
        _raise_first(await asyncio.gather(*(client.close() for client in clients), return_exceptions=True))


def _raise_first(results: Iterable[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
