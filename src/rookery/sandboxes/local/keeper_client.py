"""Client of the keeper, the daemon that creates local sandboxes: start or find a keeper, and request sandboxes.

Runs in the process that owns the sandboxes ("we").

- A keeper that we started dies with our process, however that ends.
- A cancelled request is cancelled in the keeper too: if its sandbox was created already, it is killed at once.
- When the keeper dies, every pending request fails.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rookery.core import SandboxError
from rookery.sandbox_runtime import launcher, processes
from rookery.sandbox_runtime.lightweight import receive_message, send_message
from rookery.sandbox_runtime.pid1.native_init import ZYGOTE_NAME
from rookery.sandboxes.local import native_library
from rookery.sandboxes.local.keeper_reaper import remove_keeper_directory

LOG = "keeper.log"
START_SECONDS = 20.0
STOP_SECONDS = 15.0
WARM_SANDBOXES = 2
KEEPER_MODULE = "rookery.sandboxes.local.keeper.daemon"


def socket_name(index: int) -> str:
    """Return the name of the socket of one of the keepers that the processes of a run share."""
    return f"keeper.{index}.sock" if index else "keeper.sock"


def list_keeper_children(keeper: int) -> list[int]:
    """Return the PIDs of a keeper's sandboxes and background jobs: its children without the zygote."""

    def is_zygote(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip() == ZYGOTE_NAME
        except OSError:  # it has ended
            return False

    return [pid for pid in processes.list_children(keeper) if not is_zygote(pid)]


class SandboxRequest(NamedTuple):
    """The parameters of a new sandbox. A limit of 0 means no limit."""

    lease: str = ""
    """Path of the lease file, which the keeper deletes when the sandbox is gone."""
    memory: int = 0
    """Memory limit in bytes."""
    pids: int = 0
    """Largest number of processes."""
    cpus: float = 0.0
    """CPU limit in cores."""
    disk: int = 1 << 24
    """Size of the writable disk in bytes."""
    uid: int = 1000
    """User ID, inside the sandbox, that commands run as by default."""
    image: str = ""
    """Path of a directory or an archive with a root file system; if empty, the host's system directories serve."""
    layers: tuple[str, ...] = ()
    """Names of the subdirectories of `image` that are its layers, uppermost first. If empty, `image` itself is the
    root file system."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Directories of the host to mount, each with its path in the sandbox."""
    snapshot: str = ""
    """Name of the snapshot whose files the sandbox starts with; empty for none."""
    network: str = "none"
    listen: int = 0
    """TCP port on the sandbox's loopback interface to which a socket for the owner is bound; 0 for none."""


class SandboxHandle(NamedTuple):
    """A sandbox that the keeper created for us, and the file descriptors through which we use it."""

    name: str
    """The keeper's name of the sandbox."""
    pid: int
    """PID of the sandbox's first process in the host's PID namespace."""
    memory_cgroup: str
    """Directory of the cgroup that limits the sandbox's memory; empty if there is none."""
    root_uid: int
    """The host's user ID of the sandbox's user 0; -1 if all users of the sandbox are our own user."""
    channel: socket.socket
    """Connection to the sandbox's first process, which starts its commands."""
    pidfd: int
    root: int
    """Descriptor of the sandbox's root directory."""
    layer: int
    """Descriptor of the overlay's writable layer; -1 if the sandbox has no overlay."""
    listener: socket.socket | None = None
    """Socket bound to the sandbox's loopback interface. While it is open, the network namespace exists."""

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
    """The keeper's response to a request. The receiver must close its file descriptors."""

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
        self.pid = pid
        """PID of the keeper if it is our child process; else 0."""
        self._directory = directory
        self._pending: dict[int, asyncio.Future[_Response]] = {}
        self._last_number = 0
        self._send_lock = asyncio.Lock()
        self._writable = asyncio.Event()
        self._unsent: deque[dict[str, Any]] = deque()
        """Messages without a response that wait for space in the socket's buffer."""
        self._unsent_task: asyncio.Task[None] | None = None
        self._status: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self.dead: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._receive)

    @classmethod
    async def open(
        cls, directory: Path, index: int = 0, count: int = 1, *, warm: int = WARM_SANDBOXES
    ) -> "KeeperClient":
        """Connect to a keeper whose socket is in `directory`. If there is none, start a keeper for this process.

        `index` is the keeper's number among the `count` keepers of `directory`. `warm` is the number of sandboxes
        that a new keeper creates in advance.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Through a descriptor: a socket address is limited to 108 bytes, a path is not.
            directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory_fd}/{socket_name(index)}")
            finally:
                os.close(directory_fd)
        except OSError:
            sock.close()
        else:
            return cls(sock)
        return await cls.launch(directory, index, count, warm=warm)

    @classmethod
    async def launch(
        cls, directory: Path, index: int = 0, count: int = 1, *, warm: int = WARM_SANDBOXES, listen: bool = False
    ) -> "KeeperClient":
        """Start a keeper as a child process. With `listen`, other processes of the run can connect to it.

        The keeper gets its own directory below `directory`. Raise `SandboxError` if it does not start.
        """
        library = await asyncio.to_thread(native_library.find_library)
        own_directory = directory / f"keeper-{os.getpid()}-{os.urandom(3).hex()}"
        own_directory.mkdir(parents=True)
        pid, ours = launcher.start_program(KEEPER_MODULE, {}, own_directory / LOG)
        settings = {
            "folder": str(own_directory),
            "extra": _list_interpreter_directories(),
            "listen": f"../{socket_name(index)}" if listen else "",
            "warm": warm,
            "name": f"{os.getpid()}-{os.urandom(4).hex()}",
            "parent": os.getpid(),
            "index": index,
            "count": count,
            "native": library.path,
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
        """Return what the keeper, which must be our child, found out about this machine's limits and features."""
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
        """Copy what the sandbox `name` has written. Return the name of the snapshot.

        `layer` is the descriptor of the sandbox's writable layer.
        """
        response, _ = await self._request({"op": "snapshot", "name": name}, layer)
        return str(response["snapshot"])

    async def diff(self, name: str, layer: int, snapshot: str) -> int:
        """Compare the files of the sandbox `name` with a snapshot.

        `layer` is the descriptor of the sandbox's writable layer. Return a descriptor of a file with
        NUL-terminated items, each a letter (`a`dded, `c`hanged, `r`emoved) and a path.
        """
        _, fds = await self._request({"op": "diff", "name": name, "snapshot": snapshot}, layer)
        return fds[0]

    async def _request(self, message: dict[str, Any], *fds: int) -> _Response:
        self._last_number += 1
        number = self._last_number
        response: asyncio.Future[_Response] = self._loop.create_future()
        if self.dead.done():
            raise _ended_error()
        self._pending[number] = response
        try:
            await self._send({**message, "number": number}, fds)
            return await asyncio.shield(response)
        except asyncio.CancelledError:
            if response.done() and not response.cancelled() and response.exception() is None:
                response.result().close()
            self._send_soon({"op": "cancel", "number": number})
            raise
        finally:
            self._pending.pop(number, None)

    def end(self, name: str) -> None:
        """Ask the keeper to kill a sandbox with all its processes. Does not wait until they are dead."""
        self._send_soon({"op": "end", "name": name})

    def _send_soon(self, message: dict[str, Any]) -> None:
        """Send a message that has no response: at once, or in the background if the socket's buffer is full."""
        with contextlib.suppress(SandboxError):  # a keeper that has exited has ended its sandboxes
            if self._unsent or not self._try_send(message):
                self._unsent.append(message)
                if len(self._unsent) == 1:
                    self._unsent_task = self._loop.create_task(self._send_unsent())

    async def _send_unsent(self) -> None:
        with contextlib.suppress(SandboxError):
            while self._unsent:
                await self._send(self._unsent[0], ())
                self._unsent.popleft()
        self._unsent.clear()

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
        """Send a message to the keeper without waiting. Return False if the socket's buffer is full."""
        if self._sock.fileno() < 0:
            raise _ended_error()
        try:
            send_message(self._sock, msgspec.json.encode(message), fds)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxError(
                f"the keeper, the process that runs local sandboxes, cannot be reached: {error}; try again",
                cause="sandbox.create",
            ) from error
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
                response.set_exception(_ended_error())
        self._pending.clear()
        if not self.dead.done():
            self.dead.set_result(None)

    async def close(self) -> None:
        """Disconnect, which ends our sandboxes.

        If we started the keeper, wait until it has ended all sandboxes and exited.
        """
        self._disconnect()
        pid, self.pid = self.pid, 0
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
    """Return the directories of our Python installation that sandboxes must see, too.

    The list is empty if Python is installed below /usr, which sandboxes see anyway.
    """
    prefixes = {str(Path(path).resolve()) for path in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted(path for path in prefixes if not path.startswith("/usr/") and path not in ("/", "/usr"))


def _ended_error() -> SandboxError:
    return SandboxError(
        "the keeper, the process that runs local sandboxes, has ended, and its sandboxes with it. The next "
        "sandbox starts a new keeper. If this happens again, look in the kernel log (dmesg) for a process that "
        "was killed for lack of memory",
        cause="sandbox.create",
    )


def _start_error(directory: Path) -> SandboxError:
    log = ""
    with contextlib.suppress(OSError):
        log = (directory / LOG).read_text(errors="replace").strip()[-1000:]
    return SandboxError(
        f"the keeper, the process that runs local sandboxes, did not start: {log or 'its log is empty'}; "
        "`rookery doctor` shows what this machine lacks",
        cause="sandbox.create",
    )
