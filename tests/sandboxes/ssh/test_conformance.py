"""Conformance checks of the protocol for `ssh`, through a real SSH server."""

from types import ModuleType

import pytest

from rookery.sandboxes.conformance import commands, files, mounts, networks, shells, snapshots
from rookery.sandboxes.ssh_provider import SshProvider
from tests.ssh_server import needs_ssh

MODULES = [commands, files, mounts, networks, shells, snapshots]


@needs_ssh
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "checks", [commands, files, mounts, networks, shells, snapshots], ids=lambda one: one.__name__
)
async def test_provider_conforms(checks: ModuleType, provider: SshProvider) -> None:
    for check in checks.CHECKS:  # one connection for all
        try:
            await check(provider)
        except Exception as error:
            error.add_note(f"in the check {check.__name__}")
            raise
