"""Client of the keeper: starts one or connects to the run's, and requests sandboxes. Runs in our process.

- A keeper that we started dies with us, however we end.
- A cancelled request is cancelled in the keeper too: if its sandbox was created, it ends at once.
- When the keeper dies, every pending request fails.
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
from rookery.sandbox_runtime import launcher
from rookery.sandbox_runtime.lightweight import receive_message, send_message
from rookery.sandboxes.local.keeper_reaper import remove_keeper_directory

SOCKET = "keeper.sock"
LOG = "keeper.log"
START_SECONDS = 20.0
STOP_SECONDS = 15.0
WARM_SANDBOXES = 2
KEEPER_MODULE = "rookery.sandboxes.local.keeper.daemon"


class SandboxRequest(NamedTuple):
    """What a sandbox is created with. 0: no limit."""

    lease: str = ""
    """File that is deleted with the sandbox."""
    memory: int = 0
    pids: int = 0
    cpus: float = 0.0
    disk: int = 1 << 24
    uid: int = 1000
    image: str = ""
    """Directory or archive; empty: the host's system."""
    layers: tuple[str, ...] = ()
    """Subdirectories of the image that are its layers, uppermost first; empty: the image is one directory."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Directories of the host, each with its target."""
    snapshot: str = ""
    network: str = "none"
    listen: int = 0
    """Port of the sandbox's loopback that is bound for us."""


class SandboxHandle(NamedTuple):
    """A sandbox that the keeper created for us, and our file descriptors of it."""

    name: str
    pid: int
    memory_cgroup: str
    """Directory of the cgroup that limits its memory; empty if there is none."""
    root_uid: int
    """The host's user ID of the sandbox's user 0; -1 if the sandbox has our own user."""
    channel: socket.socket
    pidfd: int
    root: int
    layer: int
    """The writable layer; -1 if the sandbox has no overlay."""
    listener: socket.socket | None = None
    """Bound to the sandbox's loopback. The network namespace exists as long as it is open."""

    def close(self) -> None:
        self.close_files()
        self.close_listener()
        self.close_channel()

    def close_channel(self) -> None:
        self.channel.close()
        os.close(self.pidfd)

    def close_files(self) -> None:
        os.close(self.root)
        if self.layer >= 0:
            os.close(self.layer)

    def close_listener(self) -> None:
        if self.listener is not None:
            self.listener.close()


class _Response(NamedTuple):
    """Response to a request. Its file descriptors belong to the receiver."""

    message: dict[str, Any]
    fds: list[int]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class KeeperClient:
    """One connection to a keeper, bound to the event loop on which it was created."""

    def __init__(self, sock: socket.socket, pid: int = 0, directory: Path | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._pid = pid
        """Pid of the keeper if it is our child."""
        self._directory = directory
        self._pending: dict[int, asyncio.Future[_Response]] = {}
        self._last_number = 0
        self._send_lock = asyncio.Lock()
        self._writable = asyncio.Event()
        self._status: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.dead: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def open(cls, directory: Path, *, warm: int = WARM_SANDBOXES) -> "KeeperClient":
        """Connect to the keeper that listens in this directory. If there is none, start one."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Through a descriptor: a socket address is limited to 108 bytes, a path is not.
            directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory_fd}/{SOCKET}")
            finally:
                os.close(directory_fd)
        except OSError:
            sock.close()
        else:
            return cls(sock)
        return await cls.launch(directory, warm=warm)

    @classmethod
    async def launch(cls, directory: Path, *, warm: int = WARM_SANDBOXES, listen: bool = False) -> "KeeperClient":
        """Start a keeper. With `listen`, other processes of the run can connect to it."""
        own_directory = directory / f"keeper-{os.getpid()}-{os.urandom(3).hex()}"
        own_directory.mkdir(parents=True)
        pid, ours = launcher.start_program(KEEPER_MODULE, {}, own_directory / LOG)
        settings = {
            "folder": str(own_directory),
            "extra": _list_interpreter_directories(),
            "listen": f"../{SOCKET}" if listen else "",
            "warm": warm,
            "name": f"{os.getpid()}-{os.urandom(4).hex()}",
            "parent": os.getpid(),
        }
        client = cls(ours, pid, own_directory)
        try:
            ours.send(msgspec.json.encode(settings))
            async with asyncio.timeout(START_SECONDS):
                either: set[asyncio.Future[Any]] = {client._status, client.dead}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not client._status.done():
                    raise _start_error(own_directory)
                client._status.result()
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise _start_error(own_directory) from error
            raise
        return client

    async def status(self) -> dict[str, Any]:
        """Return what the keeper that we started found out about this machine."""
        return await self._status

    async def create(self, request: SandboxRequest) -> SandboxHandle:
        message = {"op": "create", **request._asdict()}
        # The lease is sent as a descriptor: sandboxes are forks of the keeper and could read its name in memory.
        lease = message.pop("lease")
        lease_fds = [os.open(lease, os.O_PATH | os.O_CLOEXEC)] if lease else []
        try:
            response, fds = await self._request(message, *lease_fds)
        finally:
            for fd in lease_fds:
                os.close(fd)
        named = dict(zip(response["fds"], fds, strict=True))
        channel = socket.socket(fileno=named["channel"])
        channel.setblocking(False)
        listener = socket.socket(fileno=named["listener"]) if "listener" in named else None
        if listener is not None:
            listener.setblocking(False)
        return SandboxHandle(
            response["name"],
            response["pid"],
            response["memory_cgroup"],
            response["root_uid"],
            channel,
            named["pidfd"],
            named["root"],
            named.get("layer", -1),
            listener,
        )

    async def snapshot(self, name: str, layer: int) -> str:
        """Take a snapshot of what a sandbox has written. Return the snapshot's name."""
        response, _ = await self._request({"op": "snapshot", "name": name}, layer)
        return str(response["snapshot"])

    async def diff(self, name: str, layer: int, snapshot: str) -> int:
        """Compare a sandbox with a snapshot.

        Return a descriptor of NUL-terminated items: a letter (`a`dded, `c`hanged, `r`emoved) and a path.
        """
        _, fds = await self._request({"op": "diff", "name": name, "snapshot": snapshot}, layer)
        return fds[0]

    async def _request(self, message: dict[str, Any], *fds: int) -> _Response:
        self._last_number += 1
        number = self._last_number
        response: asyncio.Future[_Response] = self._loop.create_future()
        if self.dead.done():
            raise SandboxError("the keeper has exited", cause="sandbox.create")
        self._pending[number] = response
        try:
            await self._send({**message, "number": number}, fds)
            return await asyncio.shield(response)
        except asyncio.CancelledError:
            if response.done() and not response.cancelled() and response.exception() is None:
                response.result().close()
            with contextlib.suppress(SandboxError):
                self._try_send({"op": "cancel", "number": number})
            raise
        finally:
            self._pending.pop(number, None)

    def end(self, name: str) -> None:
        """Kill a sandbox with everything in it. Does not wait."""
        with contextlib.suppress(SandboxError):
            self._try_send({"op": "end", "name": name})

    async def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        # One sender at a time: an event loop keeps one writer callback per socket.
        async with self._send_lock:
            while not self._try_send(message, fds):
                writable = self._writable = asyncio.Event()
                self._loop.add_writer(self._sock.fileno(), writable.set)
                try:
                    await writable.wait()
                finally:
                    if self._sock.fileno() >= 0:
                        self._loop.remove_writer(self._sock.fileno())

    def _try_send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> bool:
        """Send a message. Return False if the socket is full."""
        if self._sock.fileno() < 0:
            raise SandboxError("the keeper has exited", cause="sandbox.create")
        try:
            send_message(self._sock, msgspec.json.encode(message), fds)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxError(f"the keeper cannot be reached: {error}", cause="sandbox.create") from error
        return True

    def _receive(self) -> None:
        while True:
            try:
                data, fds = receive_message(self._sock, 1 << 16, 8)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._disconnect()
                return
            message = msgspec.json.decode(data)
            if "status" in message:
                if not self._status.done():
                    self._status.set_result(message["status"])
                continue
            response = self._pending.pop(message.get("number", -1), None)
            if response is None or response.done():
                for fd in fds:
                    os.close(fd)
                if "number" not in message and not self._status.done():
                    self._status.set_exception(SandboxError(message["error"], cause="sandbox.create"))
            elif "error" in message:
                response.set_exception(SandboxError(message["error"], cause=message["cause"]))
            else:
                response.set_result(_Response(message, fds))

    def _disconnect(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
        self._writable.set()
        for response in self._pending.values():
            if not response.done():
                response.set_exception(SandboxError("the keeper died", cause="sandbox.create"))
        self._pending.clear()
        if not self.dead.done():
            self.dead.set_result(None)

    async def close(self) -> None:
        """Disconnect. A keeper that we started ends all its sandboxes and exits, which is awaited."""
        self._disconnect()
        pid, self._pid = self._pid, 0
        if pid:
            await asyncio.shield(asyncio.to_thread(_wait_for_keeper, pid, self._directory))


def _wait_for_keeper(pid: int, directory: Path | None) -> None:
    """Wait until the keeper has exited, then remove its directory."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], STOP_SECONDS)[0]:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
    finally:
        os.close(handle)
        if directory is not None:
            remove_keeper_directory(directory)


def _list_interpreter_directories() -> list[str]:
    """Return the directories of our Python installation, if it is not below /usr, which sandboxes see anyway."""
    prefixes = {str(Path(path).resolve()) for path in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted(path for path in prefixes if not path.startswith("/usr/") and path not in ("/", "/usr"))


def _start_error(directory: Path) -> SandboxError:
    log = ""
    with contextlib.suppress(OSError):
        log = (directory / LOG).read_text(errors="replace").strip()[-1000:]
    return SandboxError(f"the keeper did not start: {log or 'its log is empty'}", cause="sandbox.create")
