"""Find out which optional features a provider has, by using each of them."""

import tempfile

from msgspec.structs import replace

from rookery.core import Mount, SandboxError
from rookery.sandboxes.conformance.tools import SPEC, open_fork, open_sandbox
from rookery.sandboxes.protocol import (
    Provider,
    Sandbox,
    SupportsEgressRecords,
    SupportsKillAll,
    SupportsLimitCounters,
    SupportsUsage,
)


async def find_capabilities(provider: Provider) -> dict[str, bool]:
    """Return for each optional feature whether the provider has it. Creates one sandbox, and a fork of it."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = replace(SPEC, mounts=(Mount(source=folder, target="/opt/tool"),))
        found = {
            "isolation": provider.isolated,
            "network model": not provider.check(replace(SPEC, network="model")),
            "network allow": not provider.check(replace(SPEC, network="allow", allow=("a.invalid",))),
            "network all": not provider.check(replace(SPEC, network="all")),
            "mounts": not provider.check(mounted),
            "read-only file system": not provider.check(replace(SPEC, read_only=True)),
            "other users": not provider.check(replace(SPEC, user="root")),
        }
    async with open_sandbox(provider) as sandbox:
        found["snapshots"] = await _can_fork(sandbox)
        found["kill all"] = await _can_kill_all(sandbox)
        found["memory limit of all processes together"] = (
            isinstance(sandbox, SupportsLimitCounters) and sandbox.memory_limit_is_shared
        )
        found["limit counters"] = isinstance(sandbox, SupportsLimitCounters)
        found["usage"] = isinstance(sandbox, SupportsUsage)
        found["egress records"] = found["network allow"] and isinstance(sandbox, SupportsEgressRecords)
    return found


async def _can_fork(sandbox: Sandbox) -> bool:
    try:
        async with open_fork(sandbox, await sandbox.snapshot()):
            return True
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        return False


async def _can_kill_all(sandbox: Sandbox) -> bool:
    if not isinstance(sandbox, SupportsKillAll):
        return False
    try:
        await sandbox.kill_all()
    except SandboxError as error:
        if error.code != "sandbox.refused":
            raise
        return False
    return True
