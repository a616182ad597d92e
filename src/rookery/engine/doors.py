"""The gateway of a run, for environments whose attempts open doors.

Promises:
- it is there before a runner could open a door, and gone when the last runner is;
- a pause of the run holds the calls at its doors too, and a resume lets them go on with the version it names;
- where its public address is a tunnel's, that is one for the whole run, and is kept up;
- a public address that does not lead to it is a `UsageError` before anything is admitted;
- it keeps nothing from one start of the run to the next: sessions belong to attempts, and those ended.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.engine.wire import RunSettings
from rookery.gateway.client import GatewayAddress
from rookery.gateway.config import GatewayConfig
from rookery.gateway.public import is_url, listened
from rookery.gateway.shards import Gateway
from rookery.gateway.tunnels import Tunnel, tunnel_of
from rookery.upstreams.protocol import PauseMode

NEVER = 86_400.0
"""A pause's deadline is the run's, which ends it."""


class RunGateway:
    """In the supervisor."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder) / "gateway"
        self._gateway: Gateway | None = None
        self._tunnel: Tunnel | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        settings = self._settings
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        config = GatewayConfig(
            upstreams={
                role: msgspec.structs.replace(upstream, share=max(1, settings.share))
                for role, upstream in settings.upstreams.items()
            },
            record=settings.record,
            rendering=settings.rendering or None,
            shards=max(1, settings.share),
            public=settings.public if is_url(settings.public) else "",
        )
        host, port = listened(settings.gateway_listen) if settings.gateway_listen else ("127.0.0.1", 0)
        gateway = Gateway(config, self._folder, host=host, port=port, logs=Path(settings.folder) / "logs")
        self._gateway = await gateway.__aenter__()
        if config.public:
            await gateway.prove(config.public)
        elif settings.public:
            tunnel = tunnel_of(settings.public, gateway.address.port)
            await tunnel.open()
            self._tunnel = tunnel

    @property
    def address(self) -> GatewayAddress | None:
        if self._gateway is None:
            return None
        return replace(self._gateway.address, public=self._tunnel.url if self._tunnel is not None else "")

    def pids(self) -> list[int]:
        return self._gateway.pids() if self._gateway is not None else []

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        if self._gateway is not None:
            async with self._turn:
                wish = {"mode": mode, "timeout": timeout, "deadline": NEVER}
                await self._gateway.ask("POST", "/pause", wish, timeout=timeout + 60.0)

    async def resume(self, version: int | None, event: Callable[[str, dict[str, Any]], None]) -> None:
        """What goes wrong here is an event: the run goes on."""
        if self._gateway is None:
            return
        try:
            async with self._turn:
                await self._gateway.ask("POST", "/resume", {} if version is None else {"version": version})
        except RookeryError as error:
            event("gateway.resume_failed", {"detail": describe(error)})

    async def close(self) -> None:
        tunnel, self._tunnel = self._tunnel, None
        gateway, self._gateway = self._gateway, None
        try:
            if tunnel is not None:
                await tunnel.close()
        finally:
            if gateway is not None:
                await gateway.close()
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
