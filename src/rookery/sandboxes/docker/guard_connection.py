"""The connection between a sandbox's owner and the guard, which is PID 1 of the container and starts its commands.

The guard connects to a Unix socket in a directory that is mounted into the container. This module runs in the
owner, the process that created the sandbox.

Guarantees:
- the listener accepts only a peer that sends the token which PID 1 was started with, and it is closed before any
  other program of the container can run;
- a container that ends before its guard is ready is noticed at once;
- every file descriptor that the guard sends is either stored in the connection or closed.
"""

import asyncio
import contextlib
import functools
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rookery.core import SandboxError
from rookery.sandbox_runtime import cgroups
from rookery.sandboxes.channel import GuardChannel

if TYPE_CHECKING:
    import aiohttp

SOCKET_NAME = "socket"
_MAX_FDS = 4
_MAX_MESSAGE = 4096
_TOKEN_SECONDS = 5.0
_PEER_CREDENTIALS = struct.Struct("<iII")


class GuardConnection(NamedTuple):
    """The connection to a guard that is ready to start commands."""

    sock: socket.socket
    pid: int
    """PID of the guard in the owner's PID namespace; 0 if it is not visible there."""
    uid: int
    """User ID, inside the container, that commands run as."""
    fds: dict[str, int]
    """Descriptors that the guard sent, by name: `exit_pipe`, `root`, and possibly `listener` and `work_tmpfs`."""


class GuardListener:
    """A listening Unix socket to which the guard of one container connects."""

    def __init__(self, directory: Path) -> None:
        self.token = secrets.token_hex(16)
        self._directory = directory
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The path of a Unix socket is limited to 107 bytes, and run directories are longer.
            self._socket.bind(f"/proc/self/fd/{handle}/{SOCKET_NAME}")
            (directory / SOCKET_NAME).chmod(0o666)  # root in the container can be an unprivileged user here
            self._socket.listen(1)
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(handle)

    def close(self) -> None:
        self._socket.close()
        (self._directory / SOCKET_NAME).unlink(missing_ok=True)

    async def accept(self, settings: dict[str, Any], output: "aiohttp.StreamReader") -> GuardConnection:
        """Wait until the guard connects, send it `settings`, and return when it is ready to start commands.

        `output` is the output of the container: its end means that the container has ended. In that case, raise
        `SandboxError` with the last output.
        """
        ended = asyncio.ensure_future(_read_last_output(output))
        sock: socket.socket | None = None
        try:
            while sock is None:
                sock = await _wait_unless_ended(asyncio.ensure_future(self._accept_peer()), ended)
            self.close()
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            pid = _PEER_CREDENTIALS.unpack(credentials)[0]
            sock.send(json.dumps(settings, separators=(",", ":")).encode())
            message, fds = await _wait_unless_ended(asyncio.ensure_future(_receive(sock)), ended)
            text = message.decode("utf-8", "replace")
            if not text.startswith("ready"):
                for fd in fds:
                    os.close(fd)
                raise SandboxError(
                    f"PID 1 of the container failed to start: {text[2:] or 'no message'}", cause="sandbox.create"
                )
            _, uid, *names = text.split()
            return GuardConnection(sock, pid, int(uid), dict(zip(names, fds, strict=True)))
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        finally:
            ended.cancel()

    async def _accept_peer(self) -> socket.socket | None:
        """Accept one connection; close it and return None if the peer does not send the expected token."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_TOKEN_SECONDS):
                message, fds = await _receive(sock)
            for fd in fds:
                os.close(fd)
        except TimeoutError:
            message = b""
        except BaseException:
            sock.close()
            raise
        if secrets.compare_digest(message, self.token.encode()):
            return sock
        sock.close()
        return None


async def _wait_unless_ended(task: "asyncio.Task[Any]", ended: "asyncio.Task[str]") -> Any:
    """Return the result of `task`; raise `SandboxError` if `ended` (the end of the container) completes first."""
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise SandboxError(
                f"the container ended before it was ready: {ended.result() or 'it wrote nothing'}",
                cause="sandbox.create",
            )
        return task.result()
    finally:
        task.cancel()


async def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
        message, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, _MAX_FDS)
    finally:
        loop.remove_reader(sock.fileno())
    for fd in fds:
        os.set_inheritable(fd, False)
    return message, list(fds)


async def _read_last_output(output: "aiohttp.StreamReader") -> str:
    """Read a container's output until the container ends; return the last part as text.

    The headers that the container engine inserts between chunks are removed.
    """
    import aiohttp

    tail = b""
    try:
        while data := await output.readany():
            tail = (tail + data)[-_MAX_MESSAGE:]
    except (aiohttp.ClientError, OSError) as error:
        return f"the connection to the container engine broke: {error}"
    return bytes(byte for byte in tail if byte >= 32 or byte == 10).decode("utf-8", "replace").strip()[-1000:]


class DockerChannel(GuardChannel):
    """Connection to a container's guard, which can belong to another user or be invisible in our PID namespace."""

    def __init__(self, connection: GuardConnection, remove_container: Callable[[], None]) -> None:
        super().__init__(connection.pid, connection.sock, None, _open_death_notification(connection))
        self._remove_container = remove_container

    def kill_guard(self) -> None:
        # The signal can be refused, and a frozen guard does not notice the hang-up: the container engine removes
        # it, too.
        with contextlib.suppress(OSError):
            super().kill_guard()
        self.hang_up()
        self._remove_container()


def _open_death_notification(connection: GuardConnection) -> int:
    """Return a descriptor that becomes readable when PID 1 of the container, and so the container, has ended."""
    if connection.pid > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(connection.pid)
    return connection.fds.pop("exit_pipe")


def find_memory_cgroup(pid: int) -> str:
    """Return the directory of the memory cgroup of the process `pid`, or "" if this process cannot see it."""
    if pid <= 0:
        return ""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for mount, kind, options in cgroups.list_cgroup_mounts():
        controller = "" if kind == "cgroup2" else cgroups.MEMORY
        if (kind == "cgroup2" or cgroups.MEMORY in options) and paths.get(controller, "/") != "/":
            directory = f"{mount}{paths[controller]}"
            counters = "memory.events" if kind == "cgroup2" else "memory.oom_control"
            if (Path(directory) / counters).exists():
                return directory
    return ""


def map_uid_to_host(pid: int, uid: int) -> int:
    """Return the host's user ID for the container's user ID `uid`, as the user namespace of `pid` maps it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/uid_map").read_text().splitlines():
            inside, outside, count = map(int, line.split())
            if inside <= uid < inside + count:
                return outside + uid - inside
    return uid


@functools.cache
def has_ipv6() -> bool:
    """Return whether the kernel supports IPv6."""
    return Path("/proc/sys/net/ipv6/conf/lo").exists()
