"""The line to a keeper: starts one or finds the run's, asks it for boxes, hears when it dies.

Promises:
- a keeper that we started dies with us, in whatever way we go;
- a request that is cancelled is given up: its box, if there comes one, ends at once;
- when the keeper dies, everyone who waits for it is told.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rookery.core import SandboxError
from rookery.sandboxes import reaper, stubs
from rookery.sandboxes.small import receive, send

SOCKET = "keeper.sock"
LOG = "keeper.log"
START_SECONDS = 20.0
END_SECONDS = 15.0
WARM = 2
_HERE = Path(__file__).parent


class Asked(NamedTuple):
    """For a box. 0 is no limit."""

    lease: str = ""
    """A file that goes with it."""
    memory: int = 0
    pids: int = 0
    cpus: float = 0.0
    disk: int = 1 << 24
    uid: int = 1000
    image: str = ""
    """A folder or an archive; empty: the host's system."""
    layers: tuple[str, ...] = ()
    """Folders in it that it is made of, uppermost first; none: it is the system itself."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Folders of the host, each with where it goes."""
    snapshot: str = ""
    network: str = "none"
    listen: int = 0
    """A port of its loopback to be bound for whoever asked."""


class Given(NamedTuple):
    """A box that is there: who made it, and our ends of it."""

    name: str
    pid: int
    memory: str
    """The folder of the group that limits its memory; empty where none does."""
    uid: int
    """The host's id of its user 0; -1 where it is our own user."""
    channel: socket.socket
    pidfd: int
    top: int
    layer: int
    """The folder that holds what it writes; -1 where it has none of its own."""
    listener: socket.socket | None = None
    """Bound to its loopback, where it was asked for. It keeps the network of the box for as long as it is open."""

    def close(self) -> None:
        self.close_files()
        self.close_listener()
        self.close_line()

    def close_line(self) -> None:
        self.channel.close()
        os.close(self.pidfd)

    def close_files(self) -> None:
        os.close(self.top)
        if self.layer >= 0:
            os.close(self.layer)

    def close_listener(self) -> None:
        if self.listener is not None:
            self.listener.close()


class _Answer(NamedTuple):
    """To one request; its descriptors belong to whoever gets it."""

    said: dict[str, Any]
    fds: list[int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Line:
    """One connection. Bound to the loop it was made on."""

    def __init__(self, sock: socket.socket, pid: int = 0, place: Path | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._pid = pid
        """Of the keeper, where it is our child."""
        self._place = place
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._last = 0
        self._room = asyncio.Lock()
        self._blocked = asyncio.Event()
        """Of whoever waits for room on the line."""
        self._about: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.dead: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def open(cls, folder: Path, *, warm: int = WARM) -> "Line":
        """To the keeper that listens in this folder; where there is none, to a new one of our own."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Through a descriptor: the address of a socket has room for a hundred letters, a path has more.
            here = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{here}/{SOCKET}")
            finally:
                os.close(here)
        except OSError:
            sock.close()
        else:
            return cls(sock)
        return await cls.launch(folder, warm=warm)

    @classmethod
    async def launch(cls, folder: Path, *, warm: int = WARM, listen: bool = False) -> "Line":
        """A keeper of our own; with `listen`, for others too."""
        place = folder / f"keeper-{os.getpid()}-{os.urandom(3).hex()}"
        place.mkdir(parents=True)
        words = [str(path) for path in (_HERE / "keeper.py", _HERE.parent, _HERE)]
        pid, ours = stubs.launch(words, {}, place / LOG)
        settings = {
            "folder": str(place),
            "extra": _interpreter(),
            "listen": f"../{SOCKET}" if listen else "",
            "warm": warm,
            "name": f"{os.getpid()}-{os.urandom(4).hex()}",
            "parent": os.getpid(),
        }
        line = cls(ours, pid, place)
        try:
            ours.send(msgspec.json.encode(settings))
            async with asyncio.timeout(START_SECONDS):
                either: set[asyncio.Future[Any]] = {line._about, line.dead}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not line._about.done():
                    raise SandboxError(f"the keeper did not start: {_said(place)}", cause="sandbox.create")
                line._about.result()
        except BaseException as error:
            await line.close()
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the keeper did not start: {_said(place)}", cause="sandbox.create") from error
            raise
        return line

    async def about(self) -> dict[str, Any]:
        """What the keeper of ours found on this machine."""
        return await self._about

    async def create(self, asked: Asked) -> Given:
        message = {"op": "create", **asked._asdict()}
        # Opened, not named: sandboxes are forks of the keeper, and could find the name in its memory.
        lease = message.pop("lease")
        held = [os.open(lease, os.O_PATH | os.O_CLOEXEC)] if lease else []
        try:
            said, fds = await self._ask(message, *held)
        finally:
            for fd in held:
                os.close(fd)
        named = dict(zip(said["fds"], fds, strict=True))
        channel = socket.socket(fileno=named["channel"])
        channel.setblocking(False)
        listener = socket.socket(fileno=named["listener"]) if "listener" in named else None
        if listener is not None:
            listener.setblocking(False)
        return Given(
            said["name"],
            said["pid"],
            said["memory"],
            said["uid"],
            channel,
            named["pidfd"],
            named["top"],
            named.get("layer", -1),
            listener,
        )

    async def snapshot(self, name: str, layer: int) -> str:
        """A name for what a box wrote, as it is now."""
        said, _ = await self._ask({"op": "snapshot", "name": name}, layer)
        return str(said["snapshot"])

    async def diff(self, name: str, layer: int, snapshot: str) -> int:
        """A descriptor of letters and paths, each ended by a NUL."""
        _, fds = await self._ask({"op": "diff", "name": name, "snapshot": snapshot}, layer)
        return fds[0]

    async def _ask(self, asked: dict[str, Any], *fds: int) -> _Answer:
        self._last += 1
        number = self._last
        promise: asyncio.Future[_Answer] = self._loop.create_future()
        if self.dead.done():
            raise SandboxError("the keeper is gone", cause="sandbox.create")
        self._waiting[number] = promise
        try:
            await self._send({**asked, "number": number}, fds)
            return await asyncio.shield(promise)
        except asyncio.CancelledError:
            if promise.done() and not promise.cancelled() and promise.exception() is None:
                promise.result().close()
            with contextlib.suppress(SandboxError):
                self._send_now({"op": "give-up", "number": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def end(self, name: str) -> None:
        """Ends a box at once, with everything in it."""
        with contextlib.suppress(SandboxError):
            self._send_now({"op": "end", "name": name})

    async def _send(self, said: dict[str, Any], fds: Sequence[int]) -> None:
        # One at a time: a loop has room for one who waits for a socket, and forgets the one before.
        async with self._room:
            while not self._send_now(said, fds):
                ready = self._blocked = asyncio.Event()
                self._loop.add_writer(self._sock.fileno(), ready.set)
                try:
                    await ready.wait()
                finally:
                    if self._sock.fileno() >= 0:
                        self._loop.remove_writer(self._sock.fileno())

    def _send_now(self, said: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        if self._sock.fileno() < 0:
            raise SandboxError("the keeper is gone", cause="sandbox.create")
        try:
            send(self._sock, msgspec.json.encode(said), fds)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxError(f"the keeper is gone: {error}", cause="sandbox.create") from error
        return True

    def _receive(self) -> None:
        while True:
            try:
                data, fds = receive(self._sock, 1 << 16, 8)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._lost()
                return
            said = msgspec.json.decode(data)
            if "about" in said:
                if not self._about.done():
                    self._about.set_result(said["about"])
                continue
            promise = self._waiting.pop(said.get("number", -1), None)
            if promise is None or promise.done():
                for fd in fds:
                    os.close(fd)
                if "number" not in said and not self._about.done():
                    self._about.set_exception(SandboxError(said["error"], cause="sandbox.create"))
            elif "error" in said:
                promise.set_exception(SandboxError(said["error"], cause=said["cause"]))
            else:
                promise.set_result(_Answer(said, fds))

    def _lost(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
        self._blocked.set()
        for promise in self._waiting.values():
            if not promise.done():
                promise.set_exception(SandboxError("the keeper died", cause="sandbox.create"))
        self._waiting.clear()
        if not self.dead.done():
            self.dead.set_result(None)

    async def close(self) -> None:
        """Hangs up. A keeper of ours ends all of its boxes and goes; it is waited for."""
        self._lost()
        pid, self._pid = self._pid, 0
        if pid:
            await asyncio.shield(asyncio.to_thread(_waited, pid, self._place))


def _waited(pid: int, place: Path | None) -> None:
    """Until the keeper is gone, and its folder with it."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], END_SECONDS)[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
    finally:
        os.close(handle)
        if place is not None:
            reaper.remove_place(place)


def _interpreter() -> list[str]:
    """Where the Python that we run on lies, for boxes whose `python3` it is."""
    places = {str(Path(path).resolve()) for path in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted(place for place in places if not place.startswith("/usr/") and place not in ("/", "/usr"))


def _said(place: Path) -> str:
    with contextlib.suppress(OSError):
        return (place / LOG).read_text(errors="replace").strip()[-1000:] or "it said nothing"
    return "it said nothing"
