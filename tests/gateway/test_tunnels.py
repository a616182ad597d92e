"""SSH tunnels to a gateway, over a real SSH server that the tests start on loopback."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from rookery import Engine
from rookery.core import RookeryError, UsageError
from rookery.gateway import tunnels
from rookery.gateway.tunnels import Tunnel, make_tunnel
from rookery.sandboxes.ssh_provider import OPTIONS_VARIABLE, PYTHON_VARIABLE
from tests.gateway.shard_kit import HI, openai_client, run_gateway
from tests.processes import cmdline, descendants, send_signal
from tests.servers import Answer, ModelServer, free_port
from tests.ssh_server import SshServer, needs_ssh
from tests.waiting import wait_until


def ssh_pids() -> set[int]:
    return {pid for pid in descendants(os.getpid()) if cmdline(pid).startswith(b"ssh\0")}


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SshServer]:
    """A server that this process reaches as `here`."""
    server = SshServer(tmp_path)
    monkeypatch.setenv(OPTIONS_VARIABLE, f"-F {server.write_config()}")
    await asyncio.to_thread(server.start)
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
        timeout = aiohttp.ClientTimeout(total=30)
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
        async with open_tunnel(make_tunnel("ssh:here", gateway.address.port)) as url:
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
        open_tunnel(make_tunnel("ssh:here", gateway.address.port)) as url,
    ):
        assert await healthy(url)
        killed = ssh_pids()
        send_signal(killed, signal.SIGKILL)
        await wait_until(lambda: not ssh_pids() & killed)
        await wait_until(lambda: healthy(url))
        server.stop()  # the remote machine goes down and comes back
        await wait_until(not_healthy(url))
        await asyncio.to_thread(server.start)
        await wait_until(lambda: healthy(url))


@pytest.mark.long
@needs_ssh
async def test_call_in_flight_survives_a_broken_connection(server: SshServer) -> None:
    release = asyncio.Event()
    async with (
        ModelServer(lambda _: Answer("late", hold=release)) as model,
        run_gateway(model.url) as gateway,
        open_tunnel(make_tunnel("ssh:here", gateway.address.port)) as url,
    ):
        registered = await gateway.register({"id": "far"})
        path = urlsplit(registered["base_url"]).path
        client = openai_client({**registered, "base_url": f"{url}{path}"}, retries=0)
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HI))
        await model.wait_for_requests(1)
        before = ssh_pids()
        send_signal(before, signal.SIGKILL)
        await wait_until(lambda: bool(ssh_pids() - before))
        assert not asking.done()
        release.set()
        assert (await asking).choices[0].message.content == "late"
        assert len(model.requests) == 1
        await client.close()


@needs_ssh
async def test_machine_without_a_suitable_python_gets_a_forwarded_port(
    server: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "python"
    own = "import sys; sys.version_info, sys.version = (3, 9), '3.9.1'; exec(sys.argv.pop(2))"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{own}" "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(old))
    async with (
        ModelServer() as model,
        run_gateway(model.url) as gateway,
        open_tunnel(make_tunnel("ssh:here", gateway.address.port)) as url,
    ):
        assert await healthy(url)
        killed = ssh_pids()
        send_signal(killed, signal.SIGKILL)
        await wait_until(lambda: not ssh_pids() & killed)
        await wait_until(lambda: healthy(url))


def not_healthy(url: str) -> Callable[[], Awaitable[bool]]:
    async def is_unhealthy() -> bool:
        return not await healthy(url)

    return is_unhealthy


@needs_ssh
async def test_tunnel_ends_with_the_process_that_opened_it(server: SshServer, tmp_path: Path) -> None:
    port = free_port()
    program = f"""
import asyncio
from rookery.gateway.tunnels import SshTunnel
async def main():
    tunnel = SshTunnel("here", {port})
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
    await wait_until(lambda: not cmdline(pid))


@needs_ssh
async def test_failed_login_raises_an_error(server: SshServer, tmp_path: Path) -> None:
    (server.folder / "keys").write_text("")
    with pytest.raises(RookeryError, match=r"127\.0\.0\.1.*Permission denied"):
        await make_tunnel("ssh:here", 1).open()
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
async def test_run_opens_one_tunnel_for_all_sessions(server: SshServer, tmp_path: Path) -> None:
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
