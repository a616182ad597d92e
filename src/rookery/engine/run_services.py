"""Services that the supervisor starts once for all runners of a run: the gateway and the sandbox keeper.

The gateway is the HTTP service through which agents call models. The keeper is the daemon that creates and
supervises local sandboxes.

- Both are available before the first runner needs them, and are closed after the last runner.
- The gateway is started only for environments that open gateway sessions. A pause of the run pauses it too.
- A run can use a gateway that already runs. It is not closed with the run, and a pause of the run pauses it, too.
- If the public address of the gateway is a tunnel, there is one tunnel for the whole run.
- A public address that does not lead to the gateway raises `UsageError` before anything is admitted.
- The gateway keeps no state between two starts of a run: its sessions belong to attempts, and those have ended.
- If the keeper cannot be started, the run continues: attempts that need a sandbox report the problem.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rookery.core import RookeryError, SandboxError, UsageError
from rookery.core.errors import describe
from rookery.engine.runner_protocol import RunSettings
from rookery.gateway.client import GatewayAddress, GatewayClient
from rookery.gateway.config import GatewayConfig
from rookery.gateway.listener_forwarder import ForwardTarget
from rookery.gateway.public_url import check_public_url, is_url, parse_gateway_url, parse_listen_address
from rookery.gateway.shards import Gateway
from rookery.gateway.tunnels import Tunnel, make_tunnel
from rookery.sandboxes import open_provider, reap
from rookery.sandboxes.protocol import KeeperProvider, Provider
from rookery.sandboxes.reaper import reap_machine
from rookery.telemetry import Snapshot
from rookery.upstreams.protocol import PauseMode

log = logging.getLogger("rookery.engine")
GATEWAY_KEY_VARIABLE = "ROOKERY_GATEWAY_KEY"
NO_DEADLINE = 86_400.0
"""Deadline in seconds that is sent to the gateway with each pause. It is long, because the supervisor enforces the
real deadline of a pause."""


class RunGateway:
    """The run's gateway and, if configured, the tunnel to it."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder) / "gateway"
        self._gateway: Gateway | None = None
        self._tunnel: Tunnel | None = None
        self._external: GatewayClient | None = None
        """Client of an existing gateway that the run uses instead of its own."""
        self._lock = asyncio.Lock()
        """Keeps pause and resume requests to the gateway in order."""

    async def open(self) -> None:
        settings = self._settings
        if settings.gateway_url:
            await self._connect(settings.gateway_url)
            return
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        config = GatewayConfig(
            upstreams={
                role: msgspec.structs.replace(upstream, share=max(1, settings.runner_count))
                for role, upstream in settings.upstreams.items()
            },
            record=settings.record,
            rendering=settings.rendering or None,
            top_logprobs=settings.top_logprobs,
            shards=max(1, settings.runner_count),
            public=settings.public if is_url(settings.public) else "",
            traces=settings.traces,
            log_format=settings.log_format,
            run=settings.run,
        )
        host, port = parse_listen_address(settings.gateway_listen) if settings.gateway_listen else ("127.0.0.1", 0)
        gateway = Gateway(config, self._folder, host=host, port=port, logs=Path(settings.folder) / "logs")
        self._gateway = await gateway.__aenter__()
        if config.public:
            await gateway.check_public_url(config.public)
        elif settings.public:
            tunnel = make_tunnel(settings.public, gateway.address.port)
            await tunnel.open()
            self._tunnel = tunnel

    async def _connect(self, url: str) -> None:
        """Use the gateway at `url`. Raise `UsageError` if it does not answer or refuses the key."""
        url = parse_gateway_url(url)
        key = os.environ.get(GATEWAY_KEY_VARIABLE, "")
        if not key:
            raise UsageError(f"the gateway {url} needs its admin key: set the variable {GATEWAY_KEY_VARIABLE}")
        target = ForwardTarget.parse(url)
        address = GatewayAddress(
            host=target.host,
            port=target.port,
            tls=target.tls,
            prefix=target.prefix,
            key=key,
            sockets="",
            public=url if target.rewrites else "",
        )
        client = GatewayClient(address)
        try:
            await check_public_url(client, url)  # opens and deletes a session
        except RookeryError as error:
            await client.close()
            raise UsageError(f"the gateway {url} cannot be used: {error}") from error
        self._external = client

    @property
    def address(self) -> GatewayAddress | None:
        if self._external is not None:
            return self._external.address
        if self._gateway is None:
            return None
        return replace(self._gateway.address, public=self._tunnel.url if self._tunnel is not None else "")

    def pids(self) -> list[int]:
        return self._gateway.pids() if self._gateway is not None else []

    async def pause(self, mode: PauseMode, timeout: float) -> None:
        if (requests := self._external or self._gateway) is not None:
            async with self._lock:
                request = {"mode": mode, "timeout": timeout, "deadline": NO_DEADLINE}
                await requests.request("POST", "/pause", request, timeout=timeout + 60.0)

    async def resume(self, version: int | None, event: Callable[[str, dict[str, Any]], None]) -> None:
        """Resume model calls through the gateway. If that fails, call `event` to record it; the run continues."""
        requests = self._external or self._gateway
        if requests is None:
            return
        try:
            async with self._lock:
                await requests.request("POST", "/resume", {} if version is None else {"version": version})
        except RookeryError as error:
            event("gateway.resume_failed", {"detail": describe(error)})

    async def read_metrics(self) -> Snapshot:
        """Return the metrics of all shards; nothing if the gateway is not open."""
        return await self._gateway.read_metrics() if self._gateway is not None else {}

    async def close(self) -> None:
        external, self._external = self._external, None
        if external is not None:
            await external.close()
        tunnel, self._tunnel = self._tunnel, None
        gateway, self._gateway = self._gateway, None
        try:
            if tunnel is not None:
                await tunnel.close()
        finally:
            if gateway is not None:
                await gateway.close()
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


class RunKeeper:
    """Starts the keeper (the daemon that creates local sandboxes), if the run's sandbox provider uses one."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._provider: Provider | None = None

    async def open(self) -> str:
        """Start the keeper if it is needed. Return why it could not be started; an empty string means success."""
        settings = self._settings
        names = dict.fromkeys(spec.provider for spec in (settings.sandbox, *settings.sandboxes.values()))
        for name in filter(None, names):
            try:
                provider = open_provider(name, settings.provider_home)
            except UsageError as error:
                return describe(error)
            if isinstance(provider, KeeperProvider):
                self._provider = provider
                try:
                    await provider.start_keeper()
                except (SandboxError, OSError) as error:
                    return describe(error)
                break
        return ""

    async def close(self) -> None:
        provider, self._provider = self._provider, None
        if provider is not None:
            await provider.close()


def reap_run(settings: RunSettings) -> None:
    """Remove sandboxes that killed runners of this run left behind. No runner may be alive."""
    folder = Path(settings.folder) / "sandboxes"
    if folder.exists():
        reap(folder, now=time.time())
        if not list(folder.glob("leases/*.json")):
            shutil.rmtree(folder, ignore_errors=True)  # a killed process can leave a partial lease


def reap_other_runs(settings: RunSettings) -> None:
    """Remove sandboxes that killed runs left at the providers of this run, for example at a service."""
    specs = (settings.sandbox, *settings.sandboxes.values())
    if removed := reap_machine({spec.provider for spec in specs if spec.provider}):
        log.info("removed %d sandboxes of killed runs: %s", len(removed), ", ".join(removed)[:500])
