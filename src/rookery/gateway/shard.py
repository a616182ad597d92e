"""The gateway shard process: `python -m rookery.gateway.shard`, started by `shards.Gateway`.

Guarantees:
- it serves HTTP on the public listening socket that all shards share, on its own Unix socket for the other shards,
  and on listening sockets inside sandboxes;
- it ends when its standard input is closed, so it never outlives its parent; if the parent was killed, the last
  shard to end removes the directory of the Unix sockets;
- if it cannot start, it writes the reason as one line to standard output;
- it reads its settings, including API keys, from standard input, so that they appear neither in its command line
  nor in its environment.
"""

import asyncio
import fcntl
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.gateway.admin import Admin
from rookery.gateway.app import App
from rookery.gateway.chat_renderers import open_threaded_renderer
from rookery.gateway.chat_renderers.threaded import ThreadedRenderer
from rookery.gateway.config import SHUTDOWN, START_FAILED, GatewayConfig, ShardSettings, choose_rendering
from rookery.gateway.http_messages import Request
from rookery.gateway.metrics import ShardMetrics
from rookery.gateway.quotas import DEFAULT_QUOTA, Quota
from rookery.gateway.registry import SessionRegistry
from rookery.gateway.server import Server
from rookery.gateway.session import ModelRole
from rookery.gateway.session_listeners import ListenerReceiver
from rookery.gateway.shard_peers import ShardPeers, shard_socket_path
from rookery.telemetry import REGISTRY
from rookery.telemetry.logs import set_log_format
from rookery.telemetry.tracing import start_tracing, stop_tracing
from rookery.upstreams import open_upstream
from rookery.upstreams.pause import PausableUpstream, PauseState, ShardPause
from rookery.upstreams.pause.shards import load_pause_state, read_pause_record
from rookery.upstreams.protocol import Upstream, UpstreamConfig
from rookery.upstreams.reply_cache import with_cache

log = logging.getLogger("rookery.gateway")

UNLOAD_SECONDS: Final = 600.0
"""Idle time after which a session is unloaded from memory; it is read from disk again when it is used."""
LATE_SECONDS: Final = 1.0
"""Delay of the event loop above which the shard reports itself as unhealthy."""
CLEANUP_SECONDS: Final = 1.0
"""After its parent was killed, a shard waits this long for the other shards to end, to remove the socket
directory. Then it leaves that to them."""
RESERVED_FILES: Final = 256
"""File descriptors reserved for everything except connections of clients and connections to upstreams."""
MAX_BODY_BYTES: Final = 4 << 30
"""Upper bound of a shard's quota for request bodies in memory, unless the default quota is larger."""


class Shard:
    """One gateway shard: its sessions, upstreams, request handlers and HTTP server."""

    def __init__(self, settings: ShardSettings) -> None:
        config = settings.config
        self.settings = settings
        self.metrics = ShardMetrics(settings.index)
        self.peers = ShardPeers(Path(settings.sockets), settings.index, config.shards)
        state = load_pause_state(settings.state)
        self.upstreams: dict[str, PausableUpstream] = {}
        self.called_upstreams: dict[str, Upstream] = {}
        """The upstreams that answer calls: those of `upstreams`, or wrappers of them with a cache of replies."""
        self.rendering = _rendering(config)
        roles = {name: self._role(name, upstream, state) for name, upstream in config.upstreams.items()}
        self.registry = SessionRegistry(
            Path(settings.folder),
            f"shard{settings.index}",
            roles,
            self.peers.is_local,
            paused=state.mode is not None,
            paused_seconds=lambda: read_pause_record(settings.state).paused_seconds(time.time()),
        )
        self.upstreams["policy"].on_resume = self.registry.restart_clocks
        self.upstreams["policy"].arm()
        self.pause = ShardPause(self.upstreams["policy"], self.registry, settings.state)
        admin = Admin(
            self.registry,
            self.peers,
            self.pause,
            base_url=self._base_url,
            health_problem=self.health_problem,
        )
        self.app = App(self.registry, admin, self.metrics, settings.key, self.peers, models=self._models)
        self.server: Server | None = None
        self.listeners: ListenerReceiver | None = None
        self._loop_delay = 0.0

    def _role(self, name: str, config: UpstreamConfig, state: PauseState) -> ModelRole:
        policy = name == "policy"
        config = msgspec.structs.replace(config, share=self.settings.config.shards)
        pausable = PausableUpstream(
            open_upstream(config, self.settings.keys.get(name)), state=state if policy else None
        )
        self.upstreams[name] = pausable
        cached = self.called_upstreams[name] = with_cache(pausable, config)
        return ModelRole(
            name=name,
            upstream=cached,
            model=config.model,
            sampling=config.sampling,
            record=self.settings.config.record if policy else "plain",
            rendering=self.rendering if policy else None,
            top_logprobs=self.settings.config.top_logprobs if policy else 0,
        )

    def _collect_metrics(self) -> None:
        self.metrics.set_gauges(
            sessions=len(self.registry.entries),
            connections=len(self.server.connections) if self.server is not None else 0,
            calls=sum(upstream.in_flight for upstream in self.upstreams.values()),
            paused=self.upstreams["policy"].paused,
        )
        for role, upstream in self.upstreams.items():
            upstream.collect_metrics(role)

    async def start(self) -> None:
        """Start the HTTP server on all listening sockets, and apply the stored pause state."""
        app = self.app
        internal_error = app.error("internal", "internal error of the gateway; see the log of its shard")[1]
        self.server = Server(
            app.handle, app.admit, format_error=app.format_error, internal_error=internal_error, quota=_quota()
        )
        REGISTRY.collectors.append(self._collect_metrics)
        path = shard_socket_path(Path(self.settings.sockets), self.settings.index)
        path.unlink(missing_ok=True)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.bind(str(path))
        await self.server.listen(own, trusted=True)
        if self.settings.listener >= 0:
            await self.server.listen(socket.socket(fileno=self.settings.listener))
        self.listeners = ListenerReceiver(Path(self.settings.sockets), self.settings.index, self.server)
        self.listeners.start()
        # A pause or resume while this shard could not be reached yet is in the pause file, which all shards share.
        await self.pause.apply_file()

    async def close(self) -> None:
        """Stop serving and close everything. Responses in progress get a grace period to end."""
        if self.listeners is not None:
            self.listeners.close()
        if self.server is not None:
            await self.server.close()
        self.registry.close()
        await self.peers.close()
        for upstream in self.called_upstreams.values():
            try:
                await upstream.close()
            except (RookeryError, OSError) as error:
                log.warning(
                    "an upstream (connection to an inference engine) could not be closed: %s", describe(error)
                )
        if self.rendering is not None:
            await self.rendering.close()

    def _base_url(self, request: Request) -> str:
        """Return the gateway's URL for the client of a request.

        This is the configured public URL, or else the host that the client has requested.
        """
        if self.settings.config.public:
            return self.settings.config.public.rstrip("/")
        host = request.headers.get("x-forwarded-host") or request.headers.get("host", "")
        return f"http://{host}"

    def _models(self) -> list[str]:
        models = [role.model for role in self.registry.roles.values() if role.model]
        return list(dict.fromkeys(models)) or ["policy"]

    def health_problem(self) -> str:
        """Return why model calls cannot be answered, for the health check; empty if they can be answered."""
        if self._loop_delay > LATE_SECONDS:
            return f"the event loop is delayed by {self._loop_delay:.1f} seconds"
        states = self.upstreams["policy"].states()
        if states and not any(state.healthy for state in states):
            return "no inference engine can be reached: " + "; ".join(
                f"{state.name}: {state.reason}" for state in states
            )
        return ""

    async def monitor(self) -> None:
        """Measure the delay of the event loop and unload idle sessions, until cancelled."""
        loop = asyncio.get_running_loop()
        last_unload = loop.time()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self._loop_delay = loop.time() - due
            if due - last_unload > UNLOAD_SECONDS / 10:
                last_unload = due
                self.registry.unload_idle(UNLOAD_SECONDS)


def _rendering(config: GatewayConfig) -> ThreadedRenderer | None:
    if config.record != "tokens":
        return None
    return open_threaded_renderer(choose_rendering(config.record, config.rendering, config.upstreams["policy"]))


async def _serve(settings: ShardSettings) -> bool:
    """Run the shard until its parent shuts it down or dies, or a signal arrives.

    Returns whether the parent died without shutting the shard down.
    """
    try:
        if settings.config.traces is not None:
            start_tracing(settings.config.traces, settings.config.run, f"gateway-{settings.index}")
        shard = Shard(settings)
        await shard.start()
    except (RookeryError, OSError) as error:
        reason = str(error) if isinstance(error, RookeryError) else describe(error)
        sys.stdout.buffer.write(START_FAILED + " ".join(reason.split()).encode() + b"\n")
        sys.stdout.flush()
        return False
    # The first long prompt needs it. Imported then, it would delay all calls by 0.1 s.
    import numpy  # noqa: F401, ICN001

    # Objects created until now live as long as the process. Each reply creates hundreds of small objects that die
    # together; with the default thresholds, every second reply would trigger a collection.
    gc.freeze()
    gc.set_threshold(20_000, 5, 10)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    parent = _ParentPipe(over)
    reader, _ = await loop.connect_read_pipe(lambda: parent, sys.stdin)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    watch = loop.create_task(shard.monitor())
    try:
        await over.wait()
    finally:
        watch.cancel()
        reader.close()
        await shard.close()
        await asyncio.to_thread(stop_tracing)
    return parent.lost


class _ParentPipe(asyncio.Protocol):
    """Watches standard input, which the parent process closes to shut this shard down, or by dying."""

    def __init__(self, closed: asyncio.Event) -> None:
        self._closed = closed
        self._shutdown_received = False
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self._shutdown_received = data == SHUTDOWN

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self._closed.is_set():  # otherwise this process closed it
            self.lost = not self._shutdown_received
            self._closed.set()


def main() -> None:
    """Read the shard's settings from standard input, and serve until standard input is closed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    head = os.read(0, 4)
    if len(head) < 4:
        return
    (size,) = struct.unpack("<I", head)
    data = b""
    while len(data) < size:
        if not (more := os.read(0, size - len(data))):
            return
        data += more
    settings = msgspec.msgpack.decode(data, type=ShardSettings)
    config = settings.config
    set_log_format(config.log_format, run=config.run, process=f"gateway-{settings.index}")
    _raise_file_limit()
    lock_fd = os.open(settings.sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock_fd, fcntl.LOCK_SH)
    with suppress(KeyboardInterrupt):
        try:
            import uvloop

            lost = uvloop.run(_serve(settings))
        except ImportError:
            lost = asyncio.run(_serve(settings))
        if lost:
            _remove_sockets(lock_fd, settings.sockets)


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    Each stream needs two: one to its client and one to the upstream.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    with suppress(ValueError, OSError):  # keep the limit as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _quota() -> Quota:
    """Return the shard's quota for client connections and request bodies.

    Connections get up to half of the file descriptors, and request bodies a sixteenth of the machine's memory,
    within fixed bounds.
    """
    usual = DEFAULT_QUOTA
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    connections = (
        usual.connections if files < 0 else min(usual.connections, max(64, (files - RESERVED_FILES) // 2))
    )
    return Quota(connections=connections, bytes=max(usual.bytes, min(MAX_BODY_BYTES, memory // 16)))


def _remove_sockets(lock_fd: int, folder: str) -> None:
    """Remove the directory of the Unix sockets, unless other shards still run after `CLEANUP_SECONDS`.

    Every running shard holds a shared lock on the directory; the last one gets the exclusive lock.
    """
    end = time.monotonic() + CLEANUP_SECONDS
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # the attempt has released the shared lock, so another shard can succeed
            if time.monotonic() > end:
                return
            time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
