"""SSH tunnels to a gateway, over a real SSH server that the tests start on loopback."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from rookery import Engine
from rookery.core import RookeryError, UsageError
from rookery.engine import run_services
from rookery.gateway import tunnels
from rookery.gateway.tunnels import SshTunnel, Tunnel, make_tunnel
from tests.gateway.shard_kit import eventually, run_gateway
from tests.processes import cmdline, descendants, send_signal
from tests.servers import ModelServer

ROOT = Path(__file__).parents[2] / ".peers" / "ssh" / "root"
SETUP = """
set -e
mount -t tmpfs none /run
mkdir -p /run/sshd
mount --bind "$1/passwd" /etc/passwd
exec "$2" -D -e -f "$1/config"
"""


needs_ssh = pytest.mark.needs("ssh")


class SshServer:
    """SSH server in its own mount namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name],
                check=True,
            )
        (folder / "keys").write_bytes((folder / "user.pub").read_bytes())
        (folder / "passwd").write_text(
            "root:x:0:0:root:/root:/bin/sh\nsshd:x:101:65534::/run/sshd:/usr/sbin/nologin\n"
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        (folder / "config").write_text(
            f"""ListenAddress 127.0.0.1
Port {self.port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/keys
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
"""
        )
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        libraries = ROOT / "usr/lib" / f"{os.uname().machine}-linux-gnu"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", SETUP, "sh", self.folder, ROOT / "usr/sbin/sshd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
            )

        def listens() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        await eventually(listens)

    def stop(self) -> None:
        """Stop the server and all its connections."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                for pid in descendants(self.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.process.kill()
            self.process.wait()

    @property
    def options(self) -> tuple[str, ...]:
        """Options with which `ssh` logs in to this server."""
        settings = ("StrictHostKeyChecking=no", f"UserKnownHostsFile={self.folder}/known", "LogLevel=DEBUG1")
        options = [word for setting in settings for word in ("-o", setting)]
        key = ("-F", "none", "-i", f"{self.folder}/user", "-o", "IdentitiesOnly=yes", "-p", str(self.port))
        return (*key, *options)

    def tunnel(self, destination: str, port: int) -> Tunnel:
        assert destination == "ssh:here"
        return SshTunnel("root@127.0.0.1", port, options=self.options)


def ssh_pids() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if cmdline(pid).startswith(b"ssh\0")}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[SshServer]:
    server = SshServer(tmp_path)
    await server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def short_reconnect_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tunnels, "MIN_WAIT", 0.02)
    before = ssh_pids()
    yield
    assert ssh_pids() <= before


async def healthy(url: str) -> bool:
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/nowhere") as answer:
            return answer.status in (401, 404)  # both statuses come from the gateway
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


@contextlib.asynccontextmanager
async def open_tunnel(tunnel: Tunnel) -> AsyncIterator[str]:
    """Open a tunnel and yield its URL."""
    await tunnel.open()
    try:
        yield tunnel.url
    finally:
        await tunnel.close()


@needs_ssh
async def test_closed_tunnel_leaves_no_ssh_process(server: SshServer) -> None:
    async with ModelServer() as model, run_gateway(model.url) as gateway:
        async with open_tunnel(server.tunnel("ssh:here", gateway.address.port)) as url:
            assert await healthy(url)
            assert len(ssh_pids()) == 1
        assert not await healthy(url)
        assert ssh_pids() == set()


@pytest.mark.long
@needs_ssh
async def test_lost_tunnel_is_reopened_at_the_same_address(server: SshServer) -> None:
    async with (
        ModelServer() as model,
        run_gateway(model.url) as gateway,
        open_tunnel(server.tunnel("ssh:here", gateway.address.port)) as url,
    ):
        assert await healthy(url)
        send_signal(ssh_pids(), signal.SIGKILL)
        await eventually(lambda: healthy(url))
        server.stop()  # the remote machine goes down and comes back
        await eventually(not_healthy(url))
        await server.start()
        await eventually(lambda: healthy(url))


def not_healthy(url: str) -> Callable[[], Awaitable[bool]]:
    async def is_unhealthy() -> bool:
        return not await healthy(url)

    return is_unhealthy


@needs_ssh
async def test_tunnel_ends_with_the_process_that_opened_it(server: SshServer, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = f"""
import asyncio
from rookery.gateway.tunnels import SshTunnel
async def main():
    tunnel = SshTunnel("root@127.0.0.1", {port}, options={server.options!r})
    await tunnel.open()
    print("open", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"open\n"
    (pid,) = (pid for pid in descendants(process.pid) if cmdline(pid).startswith(b"ssh\0"))
    process.kill()
    await process.wait()
    await eventually(lambda: not cmdline(pid))


@needs_ssh
async def test_failed_login_raises_an_error(server: SshServer, tmp_path: Path) -> None:
    (server.folder / "keys").write_text("")
    with pytest.raises(RookeryError, match=r"127\.0\.0\.1.*Permission denied"):
        await server.tunnel("ssh:here", 1).open()
    assert ssh_pids() == set()


@pytest.mark.parametrize(
    "destination",
    [
        "ssh:-oProxyCommand=touch x",
        "ssh:a b",
        "ssh:",
        "ssh:$(id)",
        "far.example",
    ],
)
def test_invalid_destination_is_rejected_at_construction(destination: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_tunnel(destination, 1)
    assert destination.removeprefix("ssh:") in str(caught.value)


@needs_ssh
async def test_run_opens_one_tunnel_for_all_sessions(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_services, "make_tunnel", server.tunnel)
    async with ModelServer() as model:
        async with Engine(
            "tests.engine.gateway_envs:RemoteProgram",
            policy=f"{model.url}/v1",
            out=tmp_path / "runs",
            runners=0,
            public="ssh:here",
        ) as engine:
            groups = [group async for group in engine.groups([{"prompt": "far"}] * 3)]
            assert len(ssh_pids()) == 1
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert [rollout.reward for rollout in rollouts] == [1.0] * 3, [rollout.outcome for rollout in rollouts]
        assert len({rollout.info["url"].partition("/v1/")[0] for rollout in rollouts}) == 1
        assert ssh_pids() == set()
