"""A shard before a scripted upstream, and a session there."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.kit import Gateway, Registered, served
from tests.gateway.scripted import Scripted


@pytest.fixture
async def upstream() -> Scripted:
    return Scripted("the answer")


@pytest.fixture
async def gateway(tmp_path: Path, upstream: Scripted) -> AsyncIterator[Gateway]:
    async with served(tmp_path, upstream) as found:
        yield found


@pytest.fixture
async def session(gateway: Gateway) -> Registered:
    return await gateway.register(id="0.0-1")
