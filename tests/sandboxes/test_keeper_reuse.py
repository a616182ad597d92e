"""Network namespaces and cgroups that a keeper reuses: nothing of the last sandbox is left in them."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rookery.core import SandboxSpec
from rookery.sandbox_runtime.cgroups import MIN_REUSED_MEMORY
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile.inspection import inspect_sandbox
from tests.sandboxes.owner_process import SPEC, wait_while

TALK = """
import socket
server = socket.create_server(("127.0.0.1", 8000))
client = socket.create_connection(("127.0.0.1", 8000))
server.accept()[0].close()
"""
"""Leaves a connection in TIME_WAIT, which keeps its port for a minute."""
BIND = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 8000)); s.listen(); print('mine')"


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


COOKIE = "import socket; print(socket.socket().getsockopt(socket.SOL_SOCKET, 71, 8).hex())"


async def read_network_cookie(sandbox: LocalSandbox) -> bytes:
    """Return the cookie of the network namespace, which unlike its inode number is never reused."""
    result = await sandbox.exec(Command(argv=("python3", "-c", COOKIE)))
    assert result.ok, result
    return result.stdout


async def close_completely(sandbox: LocalSandbox) -> None:
    known = inspect_sandbox(sandbox)
    await sandbox.close()
    await wait_while(known.find_leftovers)


async def test_unused_network_namespace_is_reused(local: LocalProvider) -> None:
    if os.geteuid() != 0:
        pytest.skip("probed: only a keeper of root reuses network namespaces")
    seen = set()
    for _ in range(12):
        sandbox = await local.create(SPEC, attempt="a")
        seen.add(await read_network_cookie(sandbox))
        await close_completely(sandbox)
    assert len(seen) < 12


@pytest.mark.long
async def test_used_network_namespace_is_never_reused(local: LocalProvider) -> None:
    used = set()
    for _ in range(4):
        sandbox = await local.create(SPEC, attempt="a")
        assert await read_network_cookie(sandbox) not in used
        assert (await sandbox.exec(Command(argv=("python3", "-c", TALK)))).ok
        used.add(await read_network_cookie(sandbox))
        await close_completely(sandbox)
    for _ in range(6):
        sandbox = await local.create(SPEC, attempt="b")
        assert await read_network_cookie(sandbox) not in used
        result = await sandbox.exec(Command(argv=("python3", "-c", BIND)))
        assert result.stdout == b"mine\n", result
        await close_completely(sandbox)


def read_limits(sandbox: LocalSandbox) -> dict[str, str]:
    found = {}
    for folder in inspect_sandbox(sandbox).cgroups:
        for name in ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.max", "cpu.cfs_quota_us"):
            path = Path(folder, name)
            if path.exists():
                found[name.split(".")[0]] = path.read_text().split()[0]
    return found


async def test_reused_cgroup_has_the_limits_of_the_new_sandbox(local: LocalProvider) -> None:
    specs = [
        SandboxSpec(provider="local", memory=128 << 20, pids=20, cpus=1.0),
        SandboxSpec(provider="local", memory=512 << 20, pids=64, cpus=0.5),
        SandboxSpec(provider="local", memory=MIN_REUSED_MEMORY, pids=21),
        SandboxSpec(provider="local", memory=None, pids=None),
        SandboxSpec(provider="local", memory=96 << 20, pids=22, cpus=1.5),
    ]
    for spec in specs * 3:
        sandbox = await local.create(spec, attempt="a")
        found = read_limits(sandbox)
        if not found:
            pytest.skip("probed: no cgroup has a limit here")
        endless = {"max", "-1", "9223372036854771712"}
        if "memory" in found:
            assert found["memory"] == str(spec.memory) if spec.memory else found["memory"] in endless
        if "pids" in found:
            assert found["pids"] == str(spec.pids or "max")
        if "cpu" in found:
            assert found["cpu"] == str(int(spec.cpus * 100_000)) if spec.cpus else found["cpu"] in endless
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        await close_completely(sandbox)


async def test_reused_cgroup_does_not_report_earlier_limit_hits(local: LocalProvider) -> None:
    spec = replace(SPEC, memory=MIN_REUSED_MEMORY, pids=20)
    for _ in range(3):
        sandbox = await local.create(spec, attempt="a")
        greedy = await sandbox.exec(Command(argv=("python3", "-c", "x = bytearray(10 ** 9)")))
        assert greedy.status == "memory_limit", greedy
        await close_completely(sandbox)
        sandbox = await local.create(spec, attempt="b")
        failed = await sandbox.exec(Command(argv=("sh", "-c", "exit 3")))
        assert (failed.status, failed.exit_code) == ("exited", 3), failed
        await close_completely(sandbox)
