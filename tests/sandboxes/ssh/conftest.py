"""Fixtures: a real SSH server, and the `ssh` provider with that server as its host."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rookery.sandboxes import ProviderHome
from rookery.sandboxes.ssh_provider import HOSTS_VARIABLE, OPTIONS_VARIABLE, SshProvider
from tests.ssh_server import SshServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    made = SshServer(tmp_path_factory.mktemp("ssh"))
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
async def provider(
    server: SshServer, home: ProviderHome, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SshProvider]:
    monkeypatch.setenv(HOSTS_VARIABLE, "here")
    monkeypatch.setenv(OPTIONS_VARIABLE, f"-F {server.write_config()}")
    made = SshProvider(home)
    yield made
    await made.close()
