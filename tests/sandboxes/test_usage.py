"""Resources that sandboxes measure: of ended commands, and of shells that run until the sandbox is closed."""

import pytest

from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome, open_provider
from rookery.sandboxes.guarded_sandbox import GuardedSandbox

SPIN = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"


@pytest.mark.long
@pytest.mark.parametrize("name", ["subprocess", "local"])
async def test_usage_contains_ended_commands_and_running_shells(name: str, home: ProviderHome) -> None:
    provider = open_provider(name, home)
    try:
        sandbox = await provider.create(SandboxSpec(untrusted_ok=True), attempt="1.0.1")
        assert isinstance(sandbox, GuardedSandbox)
        before = sandbox.read_usage()
        grow = Command(argv=("python3", "-c", "x = bytearray(64 << 20)"))
        assert (await sandbox.exec(grow)).ok
        command = sandbox.read_usage()
        assert (command.provider, command.commands) == (name, before.commands + 1)
        assert command.peak_memory >= 48 << 20
        assert (await (await sandbox.shell()).run(SPIN, timeout=60)).ok
        await sandbox.close()
        usage = sandbox.read_usage()
        assert usage == sandbox.read_usage()
        assert usage.commands == command.commands + 1
        assert usage.cpu > command.cpu > 0
        assert usage.peak_processes >= 1
        assert usage.seconds > 0
    finally:
        await provider.close()
