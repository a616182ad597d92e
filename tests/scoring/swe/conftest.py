"""Fixtures: local sandboxes for all tests of a module."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rookery.core import SandboxSpec
from rookery.sandboxes import ProviderHome, Sandbox, open_provider
from tests.scoring.swe.small_task import Open

LOCAL = SandboxSpec(provider="local", memory=256 << 20, disk=128 << 20, pids=128)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def open_sandbox(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Open]:
    folder = tmp_path_factory.mktemp("home")
    provider = open_provider("local", ProviderHome(folder=folder, run=f"swe-{os.getpid()}-{folder.name}"))
    sandboxes: list[Sandbox] = []

    async def opened(spec: SandboxSpec) -> Sandbox:
        sandboxes.append(await provider.create(spec, attempt="test"))
        return sandboxes[-1]

    try:
        yield opened
    finally:
        await provider.close()
