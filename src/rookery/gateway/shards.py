"""Start a gateway: shard processes, which are restarted if they die, and the listening socket that they share.

    async with Gateway(config, folder) as gateway:
        session = await gateway.register({"id": "0.0-1", "model": "policy"})

Runs in the process that starts the gateway: the supervisor of a run, or `rookery gateway`.

Guarantees:
- the public listening socket stays open: while a shard restarts, clients wait or get a retryable error;
- a shard that dies is restarted, with a back-off if it dies soon after its start; its sessions continue from disk;
- when this process ends, even by SIGKILL, its shards end;
- closing the gateway ends every shard and removes the Unix sockets and temporary directories. Those of a gateway
  whose process was killed are removed when the next gateway of this user starts.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from rookery.core import RookeryError, UsageError
from rookery.core.child_processes import one_blas_thread
from rookery.core.errors import unwrap_group
from rookery.gateway.client import GatewayAddress, GatewayClient
from rookery.gateway.config import SHUTDOWN, START_FAILED, GatewayConfig, ShardSettings, resolve_rendering
from rookery.gateway.public_url import check_public_url, parse_public_url
from rookery.sandboxes.reaper import lock_directory
from rookery.telemetry import Snapshot
from rookery.upstreams.listeners import bind_listener
from rookery.upstreams.registry import detect_kind

log = logging.getLogger("rookery.gateway")

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
STABLE_SECONDS: Final = 30.0
"""A shard that dies after more than this time is restarted after `MIN_WAIT`; before, the delay doubles each
time."""
MAX_WAIT: Final = 10.0
MIN_WAIT: Final = 0.05
SOCKETS_PREFIX: Final = "rookery-gate-"
MAX_PATH: Final = 72
"""Maximum length of the system's temporary directory. In a longer one, paths of Unix sockets could be too long."""
MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_": "134217728", "MALLOC_TOP_PAD_": "16777216"}
"""Environment variables for shards. Without them, glibc returns the memory of each reply to the kernel and
requests it again for the next one, which costs a dozen page faults per call."""


class Gateway:
    """A gateway with its shard processes, as an async context manager.

    Sessions and turns are stored in `folder`; without it, in a temporary directory that is removed on close. `key`
    is the key of the admin API (random by default), `keys` are the API keys of upstreams by model role, and `logs`
    is a directory for the log files of the shards.
    """

    def __init__(
        self,
        config: GatewayConfig,
        folder: Path | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        keys: dict[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        rendering, self.no_tools = resolve_rendering(config.record, config.rendering, config.upstreams["policy"])
        self.config = msgspec.structs.replace(config, rendering=rendering or None)
        self.key = key or secrets.token_urlsafe(24)
        self.restarts = 0
        self.url = ""
        self._folder = folder
        self._host = host
        self._port = port
        self._keys = keys or {}
        self._logs = logs
        self._sockets: Path | None = None
        self._sockets_lock: int | None = None
        """File descriptor that holds a lock of the directory, so that other gateways do not remove it."""
        self._listener: socket.socket | None = None
        self._shards: list[_Process] = []
        self._client: GatewayClient | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self) -> None:
        upstreams = {
            role: await detect_kind(upstream, self._keys.get(role))
            for role, upstream in self.config.upstreams.items()
        }
        self.config = msgspec.structs.replace(self.config, upstreams=upstreams)
        await asyncio.to_thread(remove_stale_sockets)
        while self._sockets_lock is None:  # another gateway may have taken the directory for a stale one
            self._sockets = Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir=socket_directory_parent()))
            self._sockets_lock = lock_directory(self._sockets)
        fcntl.flock(self._sockets_lock, fcntl.LOCK_SH)  # the shards share the lock
        assert self._sockets is not None
        folder = self._folder or self._sockets / "kept"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to the directory {folder}: {error.strerror or error}") from error
        self._listener = bind_listener(self._host, self._port, backlog=4096)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._client = GatewayClient(
            GatewayAddress(
                host=host, port=port, key=self.key, sockets=str(self._sockets), shards=self.config.shards
            )
        )
        self._shards = [
            _Process(self, self._settings(folder, index), self._listener) for index in range(self.config.shards)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for shard in self._shards:
                    group.create_task(shard.start())
        except BaseExceptionGroup as several:
            raise unwrap_group(several) from None  # all shards fail for the same reason

    def _settings(self, folder: Path, index: int) -> ShardSettings:
        assert self._listener is not None
        return ShardSettings(
            config=self.config,
            index=index,
            key=self.key,
            folder=str(folder.absolute()),
            sockets=str(self._sockets),
            listener=self._listener.fileno(),
            keys=self._keys,
        )

    async def close(self) -> None:
        """End all shards, close the listening socket and remove temporary directories.

        Closing twice is allowed.
        """
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._shards:
            await asyncio.gather(*(shard.stop() for shard in self._shards))
            self._shards = []
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)
            self._sockets = None
        if self._sockets_lock is not None:
            os.close(self._sockets_lock)
            self._sockets_lock = None

    def pids(self) -> list[int]:
        """Return the process IDs of the shards."""
        return [shard.pid for shard in self._shards]

    # ---- admin API

    @property
    def address(self) -> GatewayAddress:
        """Address and admin key of the gateway, to pass to other processes. Do not write it to disk."""
        return self._open_client.address

    async def register(self, registration: dict[str, Any]) -> dict[str, str]:
        """Register a session with these options (`Registration`). Returns its `id`, `base_url` and `secret`."""
        return await self._open_client.register(registration)

    async def trajectory(self, session: str) -> dict[str, Any]:
        """Return the session's state, turns and segments (token sequences for training) as plain JSON data."""
        return await self._open_client.trajectory(session)

    async def read_metrics(self) -> Snapshot:
        """Return the metrics of all shards."""
        return await self._open_client.read_metrics()

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
        """Send a request to the admin API and return the decoded JSON response.

        Raises `RookeryError` if no response arrives within `timeout` seconds, and for an error response.
        """
        return await self._open_client.request(method, path, body, timeout=timeout)

    async def check_public_url(self, public: str) -> None:
        """Raise `UsageError` if a public URL is invalid or does not lead to this gateway."""
        await check_public_url(self._open_client, parse_public_url(public))

    async def attach_listener(self, session: str, listener: socket.socket) -> None:
        """Serve a session on a listening socket, for example one inside a sandbox.

        The socket stays attached when the session's shard is restarted. It is closed by `detach_listener`.
        """
        await self._open_client.attach_listener(session, listener)

    def detach_listener(self, session: str) -> None:
        """Stop serving the session on its listening socket, and close the socket. Does nothing if it has none."""
        self._open_client.detach_listener(session)

    @property
    def _open_client(self) -> GatewayClient:
        if self._client is None:
            raise RookeryError("the gateway is not running: use it inside `async with`")
        return self._client


class _Process:
    """The process of one shard. A process that dies is replaced by a new one."""

    def __init__(self, gateway: Gateway, settings: ShardSettings, listener: socket.socket) -> None:
        self._gateway = gateway
        self._settings = settings
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the shard, wait until it serves, and watch it. Raises `RookeryError` if it cannot start."""
        await self.launch()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def launch(self) -> None:
        settings = self._settings
        logs = self._gateway._logs
        log_fd = None
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            log_fd = os.open(logs / f"shard-{settings.index}.log", flags, 0o600)
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rookery.gateway.shard",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_fd,
                pass_fds=(self._listener.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only this process, which ends its shards in order
                env={**os.environ, **one_blas_thread(os.environ), **MALLOC},
            )
        finally:
            if log_fd is not None:
                os.close(log_fd)
        assert process.stdin is not None
        assert process.stdout is not None
        data = msgspec.msgpack.encode(settings)
        try:
            process.stdin.write(struct.pack("<I", len(data)) + data)
            await process.stdin.drain()
            async with asyncio.timeout(START_SECONDS):
                ready = await process.stdout.readline()
        except (TimeoutError, ConnectionError) as error:
            await self._kill()
            raise RookeryError(f"shard {settings.index} of the gateway did not start: {error}") from error
        except BaseException:
            await self._kill()
            raise
        if ready != b"ready\n":
            await self._kill()
            if ready.startswith(START_FAILED):
                raise RookeryError(ready.removeprefix(START_FAILED).decode("utf-8", "replace").strip())
            raise RookeryError(f"shard {settings.index} of the gateway ended while it was starting; see its log")

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        wait = MIN_WAIT
        while True:
            assert self._process is not None
            began = loop.time()
            code = await self._process.wait()
            if self._stopping:
                return
            wait = MIN_WAIT if loop.time() - began > STABLE_SECONDS else min(MAX_WAIT, 2 * wait)
            log.error(
                "shard %d of the gateway died (%s) and is being restarted",
                self._settings.index,
                _describe_exit(code),
            )
            while not self._stopping:
                await asyncio.sleep(wait)
                try:
                    await self.launch()
                    self._gateway.restarts += 1
                    break
                except RookeryError as error:
                    log.error("%s", error)
                    wait = min(MAX_WAIT, 2 * wait)

    async def stop(self) -> None:
        """Shut the shard down, and kill its process if it does not end within `STOP_SECONDS`."""
        self._stopping = True
        process = self._process
        if process is not None and process.stdin is not None:
            if process.returncode is None and not process.stdin.is_closing():
                process.stdin.write(SHUTDOWN)
            process.stdin.close()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                await self._kill()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    async def _kill(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.kill()
        await process.wait()


def _describe_exit(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code}"


def socket_directory_parent() -> str:
    """Return the parent directory for the directory of the Unix sockets.

    It is the system's temporary directory or, if its path is too long for Unix sockets, `/tmp`.
    """
    found = tempfile.gettempdir()
    return "/tmp" if len(found) > MAX_PATH else found  # noqa: S108  (0700, and a name of its own)


def remove_stale_sockets() -> None:
    """Remove the socket directories of gateways whose process was killed."""
    for directory in Path(socket_directory_parent()).glob(f"{SOCKETS_PREFIX}*"):
        lock = lock_directory(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
