"""The `ssh` provider: several hosts, capacity, lost hosts and owners, users without privileges."""

import asyncio
import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.conformance import networks
from rookery.sandboxes.remote import host_pool, resumable
from rookery.sandboxes.remote.host_pool import MIN_BACKOFF, HostPool, PooledHost
from rookery.sandboxes.remote.resumable import ResumableConnection
from rookery.sandboxes.ssh_provider import (
    HOSTS_VARIABLE,
    OPTIONS_VARIABLE,
    PYTHON_VARIABLE,
    SshProvider,
    parse_hosts,
)
from tests.processes import cmdline, descendants, send_signal
from tests.sandboxes.conftest import find_marked_processes
from tests.ssh_server import SshServer, needs_ssh
from tests.waiting import repeat_until, wait_until

SPEC = SandboxSpec(wall=30.0)
OWNER = """
import asyncio, sys
from pathlib import Path
from rookery.core import SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.remote import resumable
from rookery.sandboxes.ssh_provider import SshProvider

resumable.RESUME_SECONDS = 600.0  # the host must notice that the owner is gone

async def main():
    provider = SshProvider(ProviderHome(folder=Path(sys.argv[1]), run=sys.argv[2]))
    sandbox = await provider.create(SandboxSpec(), attempt="a")
    await sandbox.start(Command(argv=("sleep", "600")))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def find_host_programs(server: SshServer) -> list[int]:
    """Return the processes on the server that run sandboxes."""
    assert server.process is not None
    return [pid for pid in descendants(server.process.pid) if b"remote.host import main" in cmdline(pid)]


def test_pool_prefers_the_host_with_the_smallest_load() -> None:
    pool = HostPool([PooledHost(name="small", capacity=2), PooledHost(name="large", capacity=8)])
    names = [host.name for _ in range(10) if isinstance(host := pool.choose(0.0), PooledHost)]
    assert (names.count("small"), names.count("large")) == (2, 8)
    assert isinstance(pool.choose(0.0), float)
    pool.note_closed(pool.hosts[0])
    chosen = pool.choose(0.0)
    assert chosen is pool.hosts[0]


def test_pool_avoids_a_failed_host_for_a_growing_time() -> None:
    pool = HostPool([PooledHost(name="only")])
    for waited in (MIN_BACKOFF, 2 * MIN_BACKOFF, 4 * MIN_BACKOFF):
        chosen = pool.choose(100.0 * waited)
        assert isinstance(chosen, PooledHost)
        pool.note_failure(chosen, "it is down", 100.0 * waited)
        assert pool.choose(100.0 * waited) == 100.0 * waited + waited
    assert pool.hosts[0].open == 0


@pytest.mark.parametrize("text", ["a=0", "a=x", "-oProxyCommand=x", "a;b", "a=-1"])
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_hosts(text)


def test_provider_without_hosts_is_refused(home: ProviderHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOSTS_VARIABLE, raising=False)
    assert SshProvider(home).check(SPEC)


@needs_ssh
async def test_lost_host_is_an_infrastructure_failure_and_is_used_again(
    provider: SshProvider, server: SshServer
) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    running = asyncio.ensure_future(sandbox.exec(Command(argv=("sleep", "600"), wall=600.0)))
    send_signal(find_host_programs(server), signal.SIGKILL)
    with pytest.raises(SandboxError) as caught:
        await running
    assert (caught.value.code, caught.value.fault) == ("sandbox.host", "infra")
    with pytest.raises(SandboxError):
        await sandbox.read("x")
    await sandbox.close()
    async with asyncio.timeout(60):
        again = await provider.create(SPEC, attempt="b")
    assert (await again.exec(Command(argv=("true",)))).ok
    await again.close()


def cut_connection() -> list[int]:
    """Kill the ssh processes of this process, as a network failure would end them; return their PIDs."""
    found = [pid for pid in descendants(os.getpid()) if cmdline(pid).startswith(b"ssh\0")]
    send_signal(found, signal.SIGKILL)
    return found


@pytest.mark.long
@needs_ssh
async def test_broken_connection_is_resumed_without_loss(
    provider: SshProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "RESUME_SECONDS", 600.0)  # however slow this machine is
    sandbox = await provider.create(SandboxSpec(wall=120.0, network="model"), attempt="a")
    wait_for = "echo started >> {0}.log; until [ -e {0} ]; do sleep 0.05; done; cat {0}.log"

    # A command and a script of a shell: they go on while the connection is broken, and run once.
    running = asyncio.ensure_future(sandbox.exec(Command(argv=("sh", "-c", wait_for.format("one")))))
    shell = await sandbox.shell()
    assert (await shell.run("value=kept", timeout=60.0)).ok
    script = asyncio.ensure_future(shell.run(wait_for.format("two"), timeout=60.0))
    background = await sandbox.start(Command(argv=("cat",)))
    for name in ("one", "two"):
        await repeat_until(sandbox, Command(argv=("test", "-e", f"{name}.log")), ok=True)
        assert cut_connection()
        await sandbox.write(name, b"")
    assert [(await one).stdout for one in (running, script)] == [b"started\n"] * 2
    assert (await shell.run("echo $value", timeout=60.0)).stdout == b"kept\n"
    await background.send(b"still here", eof=True)
    assert [data async for _, data in background.output()] == [b"still here"]

    # An upload: the connection is cut three times while it is under way.
    content = random.Random(1).randbytes(32 << 20)
    (tmp_path / "large").write_bytes(content)
    upload = asyncio.ensure_future(sandbox.upload(tmp_path / "large", "large"))
    stream = provider._hosts["here"].link._connection
    assert isinstance(stream, ResumableConnection)
    for megabytes in (4, 8, 12):
        await wait_until(lambda received=megabytes << 20: stream._acked >= received)
        assert not upload.done()
        assert cut_connection()
    await upload
    summed = await sandbox.exec(Command(argv=("sha256sum", "large")))
    assert summed.stdout.split()[0].decode() == hashlib.sha256(content).hexdigest()

    # A model call: the program in the sandbox only waits longer.
    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        assert cut_connection()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    async with await asyncio.start_server(answer_late, sock=sandbox.listener()):
        fetch = Command(argv=("python3", "-c", networks.FETCH, sandbox.inside_url))
        assert (await sandbox.exec(fetch)).stdout == b"hello"
    await sandbox.close()


@pytest.mark.long
@needs_ssh
async def test_host_that_does_not_come_back_in_time_is_lost(
    provider: SshProvider, home: ProviderHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "RESUME_SECONDS", 2.0)
    sandbox = await provider.create(SPEC, attempt="a")
    running = asyncio.ensure_future(sandbox.exec(Command(argv=("sleep", "600"), wall=600.0)))
    monkeypatch.setenv(OPTIONS_VARIABLE, "-F /dev/null -o ProxyCommand=false")
    assert cut_connection()
    with pytest.raises(SandboxError) as caught:
        await running
    assert (caught.value.code, caught.value.fault) == ("sandbox.host", "infra")
    await sandbox.close()
    await wait_until(lambda: not find_marked_processes(home.run))


@needs_ssh
async def test_full_host_makes_creation_wait(
    provider: SshProvider, home: ProviderHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOSTS_VARIABLE, "here=1")
    other = SshProvider(home)
    try:
        await (await other.create(SPEC, attempt="a")).close()
        first = await provider.create(SPEC, attempt="a")
        for full in (provider, other):  # the capacity is that of the machine, not of one owner
            with monkeypatch.context() as patch:
                patch.setattr(host_pool, "FULL_SECONDS", 1000.0)  # it would be asked again after the deadline
                with pytest.raises(SandboxError) as caught:
                    await full.create(SPEC, attempt="b", timeout=60.0)
            assert caught.value.code == "sandbox.quota"
        other.pool.hosts[0].closed_until = 0.0
        waiting = asyncio.ensure_future(other.create(SPEC, attempt="c", timeout=60.0))
        await asyncio.sleep(0)
        await first.close()
        await (await waiting).close()
    finally:
        await other.close()


@needs_ssh
async def test_unusable_host_is_skipped(provider: SshProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS_VARIABLE, "nobody@here-2,here")
    made = [await provider.create(SPEC, attempt="a") for _ in range(2)]
    assert [host.open for host in provider.pool.hosts] == [0, 2]
    assert [bool(host.failures) for host in provider.pool.hosts] == [True, False]
    for sandbox in made:
        await sandbox.close()


@needs_ssh
async def test_host_without_python_is_named(provider: SshProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, "/no/such/python")
    with pytest.raises(SandboxError) as caught:
        await provider.create(SPEC, attempt="a", timeout=0.5)
    assert caught.value.code == "sandbox.host"
    assert [check.status for check in await asyncio.to_thread(provider.diagnose)] == ["info", "weaker"]


@needs_ssh
async def test_diagnosis_says_which_hosts_can_be_used(provider: SshProvider) -> None:
    checks = await asyncio.to_thread(provider.diagnose)
    assert [(check.name, check.status) for check in checks] == [("ssh", "ok"), ("here", "ok")]


@needs_ssh
async def test_plain_user_gets_isolated_sandboxes(provider: SshProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS_VARIABLE, "plain@here")
    sandbox = await provider.create(SPEC, attempt="a")
    await sandbox.write("greeting", b"hello")
    result = await sandbox.exec(Command(argv=("sh", "-c", "cat greeting; ls /sys/class/net; cat /run/keys")))
    assert (result.stdout.split(), result.exit_code) == ([b"hello"], 1)
    await sandbox.close()


@needs_ssh
async def test_killed_owner_leaves_nothing_on_the_host(
    provider: SshProvider, server: SshServer, home: ProviderHome, tmp_path: Path
) -> None:
    run = f"{home.run}-owner"
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(tmp_path / "home"), run, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    await wait_until(lambda: bool(find_marked_processes(run)))
    assert find_host_programs(server)
    owner.kill()
    await owner.wait()
    await wait_until(lambda: not find_marked_processes(run) and not find_host_programs(server))
