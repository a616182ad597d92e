"""A gateway as a whole: its shards started, watched, restarted; its door kept open meanwhile.

    async with Gateway(config, folder) as gateway:
        entry = await gateway.register({"id": "0.0-1", "model": "policy"})

Promises:
- the door is open as long as the gateway lives: while a shard starts again, its clients wait or may try again;
- a shard that dies is started again, with a growing wait where it dies at once; its sessions go on from the disk;
- when this process ends, in whatever way, its shards end;
- closing ends every shard and leaves no socket and no folder that was not asked for.
"""

import asyncio
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
from rookery.core.blas_threads import one_blas_thread
from rookery.core.errors import unwrap_group
from rookery.gateway.client import GatewayAddress, GatewayClient
from rookery.gateway.config import SHUTDOWN, START_FAILED, GatewayConfig, ShardSettings, resolve_rendering
from rookery.gateway.public_url import check_public_url, parse_public_url
from rookery.upstreams.detection import detect_kind
from rookery.upstreams.listeners import bind_listener

log = logging.getLogger("rookery.gateway")

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
STABLE_SECONDS: Final = 30.0
"""A shard that lived so long did not die of its start."""
MAX_WAIT: Final = 10.0
MIN_WAIT: Final = 0.05
MAX_PATH: Final = 72
"""Of the temporary folder, so that the sockets in it can be bound."""
MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_": "134217728", "MALLOC_TOP_PAD_": "16777216"}
"""Without them the C library gives the memory of each answer back to the kernel and takes it again for the next:
a dozen page faults for each call."""


class Gateway:
    """Shards behind one door. Without a folder, what is kept is kept for as long as this lives."""

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
        self._sockets = Path(
            tempfile.mkdtemp(prefix="rookery-gw-", dir=_socket_directory_parent())
        )  # sockets have short names only
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
            raise unwrap_group(several) from None  # one shard's reason is all shards'

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
        """Ends everything. Closing twice is fine."""
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

    def pids(self) -> list[int]:
        return [shard.pid for shard in self._shards]

    # ---- for programs that have a gateway of their own

    @property
    def address(self) -> GatewayAddress:
        """How other processes reach it: not to be written anywhere."""
        return self._open_client.address

    async def register(self, registration: dict[str, Any]) -> dict[str, str]:
        """A session: its id, base URL and secret."""
        return await self._open_client.register(registration)

    async def trajectory(self, session: str) -> dict[str, Any]:
        return await self._open_client.trajectory(session)

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
        """One of the admin's addresses; raises what it says is wrong."""
        return await self._open_client.request(method, path, body, timeout=timeout)

    async def check_public_url(self, public: str) -> None:
        """`UsageError` where this address does not lead here."""
        await check_public_url(self._open_client, parse_public_url(public))

    async def attach_listener(self, session: str, listener: socket.socket) -> None:
        """Serves a session at a listener of its own; kept, and handed over again after a restart."""
        await self._open_client.attach_listener(session, listener)

    def detach_listener(self, session: str) -> None:
        """Ends what `hand` began."""
        self._open_client.detach_listener(session)

    @property
    def _open_client(self) -> GatewayClient:
        if self._client is None:
            raise RookeryError("the gateway is closed")
        return self._client


class _Process:
    """One shard's process, and the next when it dies."""

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
        """The first life; a shard that cannot start at all is an error."""
        await self._launch()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def _launch(self) -> None:
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
                start_new_session=True,  # Ctrl-C is for us: shards are ended in order
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
            raise RookeryError(f"shard {settings.index} of the gateway did not start; its error is in its log")

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
                "shard %d of the gateway died (%s) and is restarted", self._settings.index, _describe_exit(code)
            )
            while not self._stopping:
                await asyncio.sleep(wait)
                try:
                    await self._launch()
                    self._gateway.restarts += 1
                    break
                except RookeryError as error:
                    log.error("%s", error)
                    wait = min(MAX_WAIT, 2 * wait)

    async def stop(self) -> None:
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


def _socket_directory_parent() -> str | None:
    """Where a folder for sockets can be: their paths hold 107 bytes, and a temporary folder may be far down."""
    return "/tmp" if len(tempfile.gettempdir()) > MAX_PATH else None  # noqa: S108  (0700, and a name of its own)
