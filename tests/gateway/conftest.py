"""Fixtures: a shard over a scripted upstream, and a session registered with it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.kit import InProcessGateway, RegisteredSession, run_shard
from tests.gateway.scripted_upstream import ScriptedUpstream


@pytest.fixture
async def upstream() -> ScriptedUpstream:
    return ScriptedUpstream("the answer")


@pytest.fixture
async def gateway(tmp_path: Path, upstream: ScriptedUpstream) -> AsyncIterator[InProcessGateway]:
    async with run_shard(tmp_path, upstream) as shard:
        yield shard


@pytest.fixture
async def session(gateway: InProcessGateway) -> RegisteredSession:
    return await gateway.register(id="0.0-1")
