"""Bursts of creations: few run in parallel, over few connections, and all of them end."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.docker import client, provider
from rookery.sandboxes.docker.provider import DockerProvider
from tests.processes import count_sockets
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine

SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=64 << 20, pids=32)


class FullEngine:
    """Stub of an engine that refuses every creation."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.creating = self.most_creating = 0
        self.all_waiting = asyncio.Event()
        self._peers: set[object] = set()

    async def answer(self, request: web.Request) -> web.Response:
        kind = f"{request.method} {request.path.split('/')[1]}"
        self.calls[kind] += 1
        self._peers.add(request.transport)
        match kind:
            case "GET info":
                return web.json_response({"OSType": "linux", "Driver": "overlay2"})
            case "GET images" if request.path.endswith("/images/json"):
                return web.json_response([])
            case "GET images":
                return web.json_response({"Id": "sha256:" + "0" * 64, "Config": {}})
            case "POST containers":
                return await self._refused()
            case "GET containers" if request.path.endswith("/containers/json"):
                return web.json_response([])
            case "DELETE containers" | "GET containers":
                return web.json_response({"message": "no such container"}, status=404)
        return web.Response(text="OK")

    async def _refused(self) -> web.Response:
        self.creating += 1
        self.most_creating = max(self.most_creating, self.creating)
        try:
            # The first response waits until as many creations run as ever will in parallel.
            if self.most_creating >= provider.PARALLEL_CREATIONS:
                self.all_waiting.set()
            await self.all_waiting.wait()
            return web.json_response({"message": "no space left"}, status=500)
        finally:
            self.creating -= 1

    @property
    def connections(self) -> int:
        return len(self._peers)


@pytest.mark.long
async def test_burst_of_creations_is_paced_over_few_connections(home: ProviderHome, tmp_path: Path) -> None:
    engine_stub = FullEngine()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", engine_stub.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    docker = DockerProvider(home, engine=str(tmp_path / "s"))
    try:
        async with asyncio.timeout(100):
            results = await asyncio.gather(
                *(docker.create(SPEC, attempt=str(at), timeout=90.0) for at in range(500)), return_exceptions=True
            )
        assert {type(one) for one in results} == {client.EngineAPIError}
        assert {one.status for one in results if isinstance(one, client.EngineAPIError)} == {500}
        assert engine_stub.calls["POST containers"] == 500
        assert engine_stub.calls["GET images"] == 2  # one by the reaper
        assert (engine_stub.calls["GET info"], engine_stub.calls["GET _ping"]) == (1, 0)  # once for all creations
        assert engine_stub.most_creating == provider.PARALLEL_CREATIONS <= client.MAX_CONNECTIONS // 2
        assert engine_stub.connections <= client.MAX_CONNECTIONS + 2  # two of the reaper
    finally:
        await docker.close()
        await runner.cleanup()


@pytest.mark.needs("docker")
@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.long)])
async def test_real_engine_creates_a_burst(home: ProviderHome, engine: PrivateEngine, count: int) -> None:
    docker = DockerProvider(home, engine=engine.socket)
    sockets = count_sockets()
    try:
        made = await asyncio.gather(
            *(docker.create(SPEC, attempt=str(at), timeout=300.0) for at in range(count)), return_exceptions=True
        )
        assert not [one for one in made if isinstance(one, BaseException)]
        assert len(engine.containers()) == count
        results = await asyncio.gather(
            *(
                sandbox.exec(Command(argv=("cat", "/proc/self/cgroup")))
                for sandbox in made
                if not isinstance(sandbox, BaseException)
            )
        )
        assert all(result.ok for result in results)
        guards = count  # each sandbox has a connection to its guard
        assert count_sockets() - sockets - guards <= client.MAX_CONNECTIONS
    finally:
        await docker.close()
    assert engine.containers() == []
