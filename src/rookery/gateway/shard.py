"""One shard of a gateway: a process that serves sessions and dies with whoever started it.

Promises:
- it serves the door that all shards share, its own Unix socket, and listeners that sandboxes' owners hand over;
- it ends when its standard input does: it never outlives who started it;
- what it is told, keys included, comes over its standard input: nothing of it is in its arguments or environment.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.gateway.admin import Admin
from rookery.gateway.app import App
from rookery.gateway.config import GatewayConfig, ShardSettings
from rookery.gateway.credits import Credits
from rookery.gateway.handed import Handed
from rookery.gateway.http import Request
from rookery.gateway.metrics import Metrics
from rookery.gateway.pausing import Pausing, kept
from rookery.gateway.registry import Registry
from rookery.gateway.renderings import open_offloop
from rookery.gateway.renderings.offloop import Offloop
from rookery.gateway.server import Server
from rookery.gateway.session import Role
from rookery.gateway.siblings import Siblings, socket_of
from rookery.upstreams import open_upstream
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.valve import Valve, ValveState

log = logging.getLogger("rookery.gateway")

LATE_SECONDS: Final = 1.0
"""A loop that is later than this does not answer in time."""


class Shard:
    """Everything of one shard."""

    def __init__(self, settings: ShardSettings) -> None:
        config = settings.config
        self.settings = settings
        self.metrics = Metrics(settings.index)
        self.siblings = Siblings(Path(settings.sockets), settings.index, config.shards)
        state = kept(settings.state)
        self.valves: dict[str, Valve] = {}
        self.rendering = _rendering(config)
        roles = {name: self._role(name, upstream, state) for name, upstream in config.upstreams.items()}
        self.registry = Registry(
            Path(settings.folder),
            f"shard{settings.index}",
            roles,
            self.siblings.mine,
            held=state.mode is not None,
        )
        self.pausing = Pausing(self.valves["policy"], self.registry, settings.state, self.siblings.everywhere)
        admin = Admin(
            self.registry,
            self.metrics,
            base=self._base,
            everywhere=self.siblings.everywhere,
            pausing=self.pausing,
            trouble=self.trouble,
            route=self.siblings.whose,
            forward=self.siblings.forward,
        )
        self.app = App(self.registry, admin, self.metrics, settings.key, self.siblings, models=self._models)
        self.server: Server | None = None
        self.handed: Handed | None = None
        self._late = 0.0

    def _role(self, name: str, config: UpstreamConfig, state: ValveState) -> Role:
        policy = name == "policy"
        config = msgspec.structs.replace(config, share=self.settings.config.shards)
        valve = Valve(open_upstream(config, self.settings.keys.get(name)), state=state if policy else None)
        self.valves[name] = valve
        return Role(
            name=name,
            upstream=valve,
            model=config.model,
            sampling=config.sampling,
            credits=Credits(1 << 30),  # the replicas' places are the bound
            record=self.settings.config.record if policy else "plain",
            rendering=self.rendering if policy else None,
        )

    async def start(self) -> None:
        """Serves."""
        app = self.app
        failure = app.error("internal", "this request met an error of the gateway's; its log has it")[1]
        self.server = Server(app.handle, app.admit, worded=app.worded, failure=failure)
        gauges = self.metrics.gauges
        gauges["sessions"] = lambda: len(self.registry.seats)
        gauges["connections"] = lambda: len(self.server.connections) if self.server is not None else 0
        gauges["calls"] = lambda: sum(valve.under_way for valve in self.valves.values())
        gauges["paused"] = lambda: self.valves["policy"].paused
        path = socket_of(Path(self.settings.sockets), self.settings.index)
        path.unlink(missing_ok=True)
        own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        own.bind(str(path))
        await self.server.listen(own)
        if self.settings.listener >= 0:
            await self.server.listen(socket.socket(fileno=self.settings.listener))
        self.handed = Handed(Path(self.settings.sockets), self.settings.index, self.server)
        self.handed.start()

    async def close(self) -> None:
        """Ends calls under way, after a grace."""
        if self.handed is not None:
            self.handed.close()
        if self.server is not None:
            await self.server.close()
        self.registry.close()
        await self.siblings.close()
        for valve in self.valves.values():
            try:
                await valve.close()
            except (RookeryError, OSError) as error:
                log.warning("an upstream could not be closed: %s", describe(error))
        if self.rendering is not None:
            await self.rendering.close()

    def _base(self, request: Request) -> str:
        """Where the client reached us: a session's base URL is there too."""
        if self.settings.config.public:
            return self.settings.config.public.rstrip("/")
        host = request.headers.get("x-forwarded-host") or request.headers.get("host", "")
        return f"http://{host}"

    def _models(self) -> list[str]:
        found = [role.model for role in self.registry.roles.values() if role.model]
        return list(dict.fromkeys(found)) or ["policy"]

    def trouble(self) -> str:
        """Why calls are not answered; empty where they are."""
        if self._late > LATE_SECONDS:
            return f"the event loop is late by {self._late:.1f} seconds"
        states = self.valves["policy"].states()
        if states and not any(state.well for state in states):
            return "no model server answers: " + "; ".join(f"{state.name}: {state.why}" for state in states)
        return ""

    async def watch(self) -> None:
        """Notices how late the loop is."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.5
            await asyncio.sleep(0.5)
            self._late = loop.time() - due


def _rendering(config: GatewayConfig) -> Offloop | None:
    if config.record != "tokens":
        return None
    return open_offloop(config.rendering or {})


async def _served(settings: ShardSettings) -> None:
    shard = Shard(settings)
    # What is here now stays. Answers come as hundreds of small objects that die together: the default thresholds
    # collect after every other one.
    gc.freeze()
    gc.set_threshold(20_000, 5, 10)
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    await shard.start()
    reader = await _stdin(over)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    watch = loop.create_task(shard.watch())
    try:
        await over.wait()
    finally:
        watch.cancel()
        reader.close()
        await shard.close()


async def _stdin(over: asyncio.Event) -> asyncio.ReadTransport:
    """Tells when nobody holds the other end any more."""

    class Until(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
            over.set()

    transport, _ = await asyncio.get_running_loop().connect_read_pipe(Until, sys.stdin)
    return transport


def main() -> None:
    """Reads its settings and serves until its standard input ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    (size,) = struct.unpack("<I", os.read(0, 4))
    data = b""
    while len(data) < size:
        if not (more := os.read(0, size - len(data))):
            return
        data += more
    settings = msgspec.msgpack.decode(data, type=ShardSettings)
    with suppress(KeyboardInterrupt):
        try:
            import uvloop

            uvloop.run(_served(settings))
        except ImportError:
            asyncio.run(_served(settings))


if __name__ == "__main__":
    main()
