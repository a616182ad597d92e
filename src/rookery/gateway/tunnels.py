"""Ways from another machine to a gateway here.

    async with tunnels.to("ssh:trainer@far.example", port) as url:
        ...  # programs on the far machine call models at `url`

Promises:
- one tunnel for each place and gateway, however many use it; the last to leave closes it;
- nobody waits for the tunnel to another place;
- a tunnel that dies is made again, at the same address, for as long as somebody uses it;
- it ends with this process, however that ends;
- what cannot be is an error in words when the tunnel is made; nothing of a key is in a message.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from rookery.core import RookeryError, UsageError
from rookery.core.lifetimes import detached_context

log = logging.getLogger("rookery.gateway")

SSH: Final = "ssh:"
CONNECT_SECONDS: Final = 30.0
AGAIN_SECONDS: Final = 0.2
"""Before a tunnel that died is made again; doubled up to five."""
MOST_WAIT: Final = 5.0
CLOSE_SECONDS: Final = 5.0
_ALLOCATED = re.compile(rb"Allocated port (\d+) for remote forward")
_FORWARDED = re.compile(rb"remote forward success for: listen")
_PLACE = re.compile(r"[A-Za-z0-9_.@:\[\]%+-]+")
# Nobody else would end it when we are killed: the kernel does.
_DIES_WITH_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Tunnel(Protocol):
    """One way. Opened once; closed once."""

    url: str
    """Where the far machine reaches us, once it is open; the same for as long as it is."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class SshTunnel:
    """`ssh -R`: a port of the far machine's loopback leads here. Keys and hosts are those that ssh knows."""

    def __init__(self, place: str, port: int, *, options: tuple[str, ...] = (), program: str = "ssh") -> None:
        if not _PLACE.fullmatch(place) or place.startswith("-"):
            raise UsageError(
                f"{place!r:.100} is no place to log in at: write ssh:USER@HOST, or a host of ~/.ssh/config"
            )
        if shutil.which(program) is None:
            raise UsageError(f"a tunnel over ssh needs the program {program!r}, which is not installed here")
        self.place = place
        self.url = ""
        self.deaths = 0
        self._port = port
        self._far = 0
        self._program = program
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._said: deque[bytes] = deque(maxlen=8)
        self._up = asyncio.Event()

    async def open(self) -> None:
        try:
            await self._begin()
        except BaseException:
            await self._end()
            raise
        self.url = f"http://127.0.0.1:{self._far}"
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), context=detached_context())

    def _words(self) -> list[str]:
        settings = ("BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=10", "ServerAliveCountMax=3")
        return [
            self._program,
            *("-v", "-N", "-T"),
            *(word for setting in (*settings, f"ConnectTimeout={CONNECT_SECONDS:g}") for word in ("-o", setting)),
            *self._options,
            *("-R", f"127.0.0.1:{self._far}:127.0.0.1:{self._port}"),
            *("--", self.place),
        ]

    async def _begin(self) -> None:
        words = [sys.executable, "-I", "-S", "-c", _DIES_WITH_US, str(os.getpid()), *self._words()]
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us: tunnels end in order
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._forwarded(self._process)
        except TimeoutError:
            raise RookeryError(
                f"the tunnel to {self.place} was not there after {CONNECT_SECONDS:g} seconds{self._words_said()}"
            ) from None
        self._up.set()

    async def _forwarded(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line without an end: it is none that we look for
                continue
            if not line:
                await process.wait()
                raise RookeryError(f"the tunnel to {self.place} cannot be made{self._words_said()}")
            if not line.startswith(b"debug1:"):
                self._said.append(line.strip())
            if found := _ALLOCATED.search(line):
                self._far = int(found[1])
                return
            if _FORWARDED.search(line) and self._far:
                return

    def _words_said(self) -> str:
        said = b"; ".join(line for line in self._said if line).decode("utf-8", "replace")[-500:]
        return f": {said}" if said else ""

    async def _keep(self) -> None:
        """As long as it is used."""
        wait = AGAIN_SECONDS
        while True:
            process = self._process
            assert process is not None
            assert process.stderr is not None
            with contextlib.suppress(ValueError):
                while await process.stderr.read(1 << 16):
                    pass  # it must not wait for us
            await process.wait()
            self._up.clear()
            self.deaths += 1
            log.warning("the tunnel to %s ended (%s); it is made again", self.place, process.returncode)
            while not self._up.is_set():
                await asyncio.sleep(wait)
                self._said.clear()
                try:
                    await self._begin()
                    wait = AGAIN_SECONDS
                except (RookeryError, OSError) as error:
                    log.warning("%s", error)
                    await self._end()
                    wait = min(MOST_WAIT, 2 * wait)

    async def close(self) -> None:
        """Closing twice is fine."""
        keeping, self._keeping = self._keeping, None
        try:
            if keeping is not None:
                keeping.cancel()
                await asyncio.wait({keeping})
        finally:
            await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def tunnel_of(place: str, port: int) -> Tunnel:
    """What a public address that is none stands for: `ssh:USER@HOST`."""
    if place.startswith(SSH):
        return SshTunnel(place.removeprefix(SSH), port)
    raise UsageError(f"{place!r:.100} is neither a URL nor ssh:USER@HOST")


class _Way:
    """One place's tunnel, who uses it or waits for it, and whose turn it is to open or close it."""

    def __init__(self) -> None:
        self.tunnel: Tunnel | None = None
        self.users = 0
        self.turn = asyncio.Lock()


class Tunnels:
    """Those of one process, shared by all who need them."""

    def __init__(self, make: Callable[[str, int], Tunnel] = tunnel_of) -> None:
        self._make = make
        self._ways: dict[tuple[str, int], _Way] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def to(self, place: str, port: int) -> AsyncIterator[str]:
        """The address by which a far place reaches a port here, while somebody is in this block."""
        key = (place, port)
        way = self._ways.setdefault(key, _Way())
        way.users += 1
        try:
            async with way.turn:
                if way.tunnel is None:
                    tunnel = self._make(place, port)
                    await tunnel.open()
                    way.tunnel = tunnel
            yield way.tunnel.url
        finally:
            # Also where its user is cancelled once more: a tunnel without users is closed.
            leaving = asyncio.get_running_loop().create_task(self._leave(key), context=detached_context())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)

    async def _leave(self, key: tuple[str, int]) -> None:
        way = self._ways[key]
        way.users -= 1
        async with way.turn:
            if way.users:
                return
            tunnel, way.tunnel = way.tunnel, None
            try:
                if tunnel is not None:
                    await tunnel.close()
            finally:
                if not way.users and self._ways.get(key) is way:
                    del self._ways[key]
