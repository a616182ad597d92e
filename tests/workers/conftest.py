"""Fixtures: workers in sandboxes of all providers. Every test must leave no process, directory or descriptor.

Tests in containers are `long`, because each creates its own. A short one is in tests/sandboxes/docker.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import pytest
import pytest_asyncio

from rookery.core import SandboxSpec
from rookery.sandboxes import Provider, ProviderHome, Sandbox, open_provider
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.workers import Worker, WorkerLimits, sandbox_for
from tests.sandboxes.conftest import find_marked_processes, find_orphans
from tests.sandboxes.docker.conftest import engine, image_archives
from tests.sandboxes.docker.engine import IMAGE

__all__ = ["engine", "image_archives"]

MB = 1 << 20
LIMITS = WorkerLimits(wall=60.0, memory=192 * MB, processes=32, output=4096)


class OpenWorker(Protocol):
    def __call__(self, limits: WorkerLimits = LIMITS, **more: Any) -> AbstractAsyncContextManager[Worker]: ...


KINDS = ["local", "subprocess", pytest.param("docker", marks=[pytest.mark.long, pytest.mark.needs("docker")])]


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProviderHome]:
    folder = tmp_path_factory.mktemp("workers")
    run = f"run-{os.getpid()}-{folder.name}"
    before = len(os.listdir("/proc/self/fd"))
    yield ProviderHome(folder=folder, run=run)
    assert find_marked_processes(run) == []
    assert find_orphans(folder) == []
    assert [path for path in folder.rglob("*") if path != folder / "leases"] == []
    assert len(os.listdir("/proc/self/fd")) <= before + 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(kind: str, home: ProviderHome, request: pytest.FixtureRequest) -> AsyncIterator[Provider]:
    """Yield one provider for all tests of a module: starting a keeper or an engine is slow."""
    if kind == "docker":
        socket = request.getfixturevalue("engine").socket
        made: Provider = DockerProvider(home, image=IMAGE, engine=socket)
    else:
        made = open_provider(kind, home)
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider: Provider) -> AsyncIterator[Sandbox]:
    made = await provider.create(sandbox_for(LIMITS), attempt="worker")
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def worker(sandbox: Sandbox) -> AsyncIterator[Worker]:
    async with await Worker.open(sandbox, limits=LIMITS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def open_worker(provider: Provider) -> OpenWorker:
    @asynccontextmanager
    async def open_with(limits: WorkerLimits = LIMITS, **more: Any) -> AsyncIterator[Worker]:
        spec: SandboxSpec = more.pop("spec", None) or sandbox_for(limits)
        made = await provider.create(spec, attempt="worker")
        try:
            async with await Worker.open(made, limits=limits, **more) as worker:
                yield worker
        finally:
            await made.close()

    return open_with
