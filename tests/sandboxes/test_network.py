"""Networks `model` and `allow` of local sandboxes: one address, or the allowed hosts, and nothing else."""

import asyncio
import contextlib
import functools
import http.server
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.keeper_client import WARM_SANDBOXES
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from rookery.sandboxes.networked_sandbox import PORT, URL
from rookery.sandboxes.protocol import SupportsEgressRecords, SupportsModelNetwork
from tests.cli.sandbox_kit import local_sandboxes
from tests.sandboxes.fake_hosts import GOOD, FakeResolver, FakeSite, ok, serve
from tests.sandboxes.hostile.inspection import get_keeper_pid, inspect_sandbox
from tests.sandboxes.owner_process import wait_while

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

SO_NETNS_COOKIE = 71
MODEL = SandboxSpec(provider="local", network="model", memory=256 << 20, disk=16 << 20, wall=30.0)
ALLOW = SandboxSpec(
    provider="local", network="allow", allow=("good.test",), memory=256 << 20, disk=16 << 20, wall=30.0
)
OPEN_LISTENER = f"exec 3<>/dev/tcp/127.0.0.1/{PORT};"
FETCH = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=20).read().decode())"
TRY_OTHER_ROUTES = """
import errno, socket, sys
assert [name for _, name in socket.if_nameindex()] == ["lo"]
assert len(open("/proc/net/route").readlines()) == 1
assert all(line.split()[-1] == "lo" for line in open("/proc/net/ipv6_route"))
host = int(sys.argv[1])
tried = [("127.0.0.1", host), ("127.0.0.2", host), ("127.0.0.1", 80), ("127.0.0.1", @ + 1), ("0.0.0.0", host)]
for where in tried + [("::1", host), ("192.0.2.1", 80), ("2001:db8::1", 80)]:  # no route: nothing is sent
    try:
        socket.create_connection(where, 3)
    except OSError as error:
        assert error.errno in (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EADDRNOTAVAIL), (where, error)
    else:
        raise SystemExit(f"{where} was reached")
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock = socket.socket(socket.AF_INET, kind)
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            sock.bind(("127.0.0.1", @))
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
        else:
            assert kind == socket.SOCK_DGRAM, "the port of the listener was taken"
print("contained")
""".replace("@", str(PORT))


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


async def run(sandbox: LocalSandbox, *argv: str, **more: object) -> ExecResult:
    return await sandbox.exec(Command(argv=argv, **more))  # type: ignore[arg-type]


def list_foreign_sockets() -> list[str]:
    """Return our sockets of other network namespaces: each keeps its namespace alive."""
    with socket.socket() as own:
        ours = own.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd))) as sock:
                    if sock.family != socket.AF_UNIX and sock.getsockopt(1, SO_NETNS_COOKIE, 8) != ours:
                        found.append(str(sock))
    return found


async def respond_hello(request: web.Request) -> web.Response:
    return web.Response(text=f"hello {request.path}")


@contextlib.asynccontextmanager
async def serve_http(listener: socket.socket) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond_hello)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        yield
    finally:
        await runner.cleanup()


# -------------------------------------------------------------------------------------------------------- model


async def test_model_network_reaches_its_listener(local: LocalProvider) -> None:
    sandbox = await local.create(MODEL, attempt="a")
    assert isinstance(sandbox, SupportsModelNetwork)
    assert sandbox.inside_url == URL
    async with serve_http(sandbox.listener()):
        result = await run(sandbox, "python3", "-c", FETCH, f"{sandbox.inside_url}/v1/models")
        assert (result.stdout, result.stderr) == (b"hello /v1/models", b"")
        result = await run(sandbox, "curl", "-sS", "--fail", f"{sandbox.inside_url}/curl")
        assert result.exit_code == 127 or result.stdout == b"hello /curl"

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        writer.close()

    script = f"{OPEN_LISTENER} touch asked; echo again >&3; cat <&3"
    waiting = asyncio.create_task(run(sandbox, "bash", "-c", script))
    await run(sandbox, "sh", "-c", "until [ -e asked ]; do sleep 0.01; done")
    async with await asyncio.start_server(echo, sock=sandbox.listener(), backlog=1024):  # another server, later
        assert (await waiting).stdout == b"again\n"
        assert (await run(sandbox, "bash", "-c", script)).stdout == b"again\n"


async def test_model_network_reaches_nothing_else(local: LocalProvider) -> None:
    sandbox = await local.create(MODEL, attempt="a")
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        async with serve_http(sandbox.listener()):
            result = await run(sandbox, "python3", "-c", TRY_OTHER_ROUTES, str(theirs.getsockname()[1]))
            assert (result.stdout, result.stderr) == (b"contained\n", b"")


async def test_unserved_listener_refuses_connections(local: LocalProvider) -> None:
    sandbox = await local.create(MODEL, attempt="a")
    probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 20)"
    assert b"ConnectionRefusedError" in (await run(sandbox, "python3", "-c", probe)).stderr
    held = sandbox.listener()
    assert b"ConnectionRefusedError" in (await run(sandbox, "python3", "-c", probe)).stderr
    async with serve_http(held):
        assert (await run(sandbox, "python3", "-c", probe)).ok
    for _ in range(2):
        sandbox.refuse_connections()
        assert b"ConnectionRefusedError" in (await run(sandbox, "python3", "-c", probe)).stderr
    with pytest.raises(SandboxError):
        sandbox.listener()
    taken = f"import socket; socket.create_server(('127.0.0.1', {PORT}), reuse_port=False)"  # it sets SO_REUSEADDR
    assert b"Address already in use" in (await run(sandbox, "python3", "-c", taken)).stderr


async def test_each_sandbox_has_its_own_listener(local: LocalProvider) -> None:
    one, other = await local.create(MODEL, attempt="a"), await local.create(MODEL, attempt="b")
    async with serve_http(one.listener()):
        assert (await run(one, "python3", "-c", FETCH, URL)).ok
        assert b"refused" in (await run(other, "python3", "-c", FETCH, URL)).stderr


@pytest.mark.parametrize("network", ["none", "allow"])
async def test_other_networks_have_no_listener(network: str, local: LocalProvider) -> None:
    sandbox = await local.create(ALLOW if network == "allow" else SandboxSpec(provider="local"), attempt="a")
    assert sandbox.inside_url == ""
    with pytest.raises(SandboxError):
        sandbox.listener()
    await sandbox.close()
    with pytest.raises(SandboxError, match=sandbox.id):
        sandbox.listener()


async def test_closed_networks_leave_no_sockets(local: LocalProvider) -> None:
    keeper = await get_keeper_pid(local)
    before = len(os.listdir(f"/proc/{keeper}/fd")), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        made = [await local.create(spec, attempt="a") for spec in (MODEL, ALLOW, MODEL, ALLOW)]
        async with serve_http(made[0].listener()):
            assert all([(await run(sandbox, "true")).ok for sandbox in made])
            assert len(list_foreign_sockets()) == 4 + 2 + 1
        known = [inspect_sandbox(sandbox) for sandbox in made]
        await asyncio.gather(*(sandbox.close() for sandbox in made))
        assert list_foreign_sockets() == []
        for footprint in known:
            await wait_while(footprint.find_leftovers)
    # The keeper holds descriptors of its warm sandboxes and of reusable network namespaces.
    await wait_while(lambda: len(os.listdir(f"/proc/{keeper}/fd")) > before[0] + 8 * WARM_SANDBOXES)
    assert len(os.listdir("/proc/self/fd")) <= before[1]
    assert [task for task in asyncio.all_tasks() if "egress" in repr(task)] == []


async def test_cancelled_creation_leaves_no_listener(local: LocalProvider) -> None:
    await (await local.create(MODEL, attempt="first")).close()
    fds = len(os.listdir("/proc/self/fd"))
    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        tasks = [asyncio.create_task(local.create(spec, attempt="c")) for spec in (MODEL, ALLOW) * 3]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
    assert local.open_sandboxes == set()
    await wait_while(list_foreign_sockets)
    await wait_while(lambda: len(os.listdir("/proc/self/fd")) > fds)
    assert local.resolver is None or local.resolver.proxies == set()


# -------------------------------------------------------------------------------------------------------- allow


@contextlib.asynccontextmanager
async def fake_hosts(local: LocalProvider, site: FakeSite) -> AsyncIterator[FakeResolver]:
    async with serve(site.respond) as port:
        local.resolver = resolver = FakeResolver({"good.test": [GOOD], "inside.test": ["127.0.0.1"]}, {GOOD: port})
        yield resolver


async def test_allow_network_reaches_only_allowed_hosts(local: LocalProvider) -> None:
    async with fake_hosts(local, FakeSite(ok("hello"))) as resolver:
        sandbox = await local.create(ALLOW, attempt="a")
        assert isinstance(sandbox, SupportsEgressRecords)
        assert (await run(sandbox, "python3", "-c", FETCH, "http://good.test/")).stdout == b"hello"
        refused = await run(sandbox, "python3", "-c", FETCH, "http://other.test/")
        assert b"HTTP Error 403: Forbidden" in refused.stderr
        refused = await run(sandbox, "python3", "-c", FETCH, "https://other.test/")
        assert b"403" in refused.stderr
        if (await run(sandbox, "sh", "-c", "command -v curl")).ok:
            assert (await run(sandbox, "curl", "-sS", "http://good.test/")).stdout == b"hello"
            assert (await run(sandbox, "curl", "-sSp", "http://good.test/")).stdout == b"hello"
            assert (
                await run(sandbox, "curl", "-sSx", f"socks5h://127.0.0.1:{PORT}", "http://good.test/")
            ).stdout == b"hello"
            output = (await run(sandbox, "curl", "-sS", "http://other.test/")).stdout
            assert re.fullmatch(rb"other\.test\b.*\b80\b.*\bgood\.test\n", output)
        if (await run(sandbox, "sh", "-c", "command -v git")).ok:
            assert b"403" in (await run(sandbox, "git", "ls-remote", "https://other.test/a")).stderr
        assert {address for address, _ in resolver.dialled} == {GOOD}
        assert {(one.host, one.verdict) for one in sandbox.egress()} == {
            ("good.test", "allowed"),
            ("other.test", "refused"),
        }
        record = sandbox.egress()
        await sandbox.close()
        assert sandbox.egress() == record


async def test_allow_network_has_no_other_route(local: LocalProvider) -> None:
    async with fake_hosts(local, FakeSite(ok("hello"))) as resolver:
        sandbox = await local.create(ALLOW, attempt="a")
        with socket.create_server(("127.0.0.1", 0)) as theirs:
            port = theirs.getsockname()[1]
            result = await run(sandbox, "python3", "-c", TRY_OTHER_ROUTES, str(port))
            assert (result.stdout, result.stderr) == (b"contained\n", b"")
            for way in (f"127.0.0.1:{port}", f"localhost:{port}", f"inside.test:{port}", f"[::1]:{port}"):
                script = f"{OPEN_LISTENER} printf 'CONNECT {way} HTTP/1.1\\r\\n\\r\\n' >&3; head -1 <&3"
                assert b"403 Forbidden" in (await run(sandbox, "bash", "-c", script)).stdout
        assert resolver.dialled == []


async def test_rule_can_allow_the_hosts_loopback(local: LocalProvider) -> None:
    async with serve(FakeSite(ok("hello")).respond) as port:
        for name in ("localhost", "127.0.0.1"):
            spec = SandboxSpec(provider="local", network="allow", allow=(f"{name}:{port}",))
            sandbox = await local.create(spec, attempt="a")
            assert (await run(sandbox, "python3", "-c", FETCH, f"http://{name}:{port}/")).stdout == b"hello"
            await sandbox.close()


@pytest.mark.skipif(shutil.which("git") is None, reason="[probed] there is no git here")
async def test_git_clones_from_an_allowed_host(local: LocalProvider, tmp_path: Path) -> None:
    def create_repository() -> None:
        env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        for words in (
            "init -q -b main here",
            "-C here -c user.name=a -c user.email=a@b commit -q --allow-empty -m first",
            "clone -q --bare here there.git",
            "-C there.git update-server-info",
        ):
            subprocess.run(["git", *words.split()], cwd=tmp_path, env=env, check=True)

    class QuietHandler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    await asyncio.to_thread(create_repository)
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            local.resolver = FakeResolver({"good.test": [GOOD]}, {GOOD: server.server_port})
            sandbox = await local.create(ALLOW, attempt="a")
            done = await run(sandbox, "git", "clone", "-q", "http://good.test/there.git", "clone")
            assert (done.exit_code, done.stderr) == (0, b"")
            assert (await run(sandbox, "git", "-C", "clone", "log", "--format=%s")).stdout == b"first\n"
        finally:
            await asyncio.to_thread(server.shutdown)
            thread.join()


async def test_spec_can_override_proxy_variables(local: LocalProvider) -> None:
    spec = SandboxSpec(provider="local", network="allow", allow=("good.test",), env={"HTTP_PROXY": "mine"})
    sandbox = await local.create(spec, attempt="a")
    output = (await run(sandbox, "sh", "-c", "echo $HTTP_PROXY $https_proxy $NO_PROXY")).stdout.decode()
    assert output == f"mine {URL} localhost,127.0.0.1,::1\n"


SWARM = """
import socket, sys, time
REQUESTS = (b"", b"GET http://good.test/ HT", b"\\x05", b"CONNECT good.test:443 HTTP/1.1\\r\\n\\r\\n")
held = []
for number in range(2000):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", @))
    held.append(sock)
for number, sock in enumerate(held):
    try:
        sock.send(REQUESTS[number % 4])
    except OSError:
        pass
print("up", flush=True)
time.sleep(600)
""".replace("@", str(PORT))


async def test_many_connections_do_not_affect_other_sandboxes(local: LocalProvider) -> None:
    async with fake_hosts(local, FakeSite(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")):
        bad, good = await local.create(ALLOW, attempt="bad"), await local.create(ALLOW, attempt="good")
        fds = len(os.listdir("/proc/self/fd"))
        process = await bad.start(Command(argv=("python3", "-c", SWARM)))
        async for _, chunk in process.output():
            if b"up" in chunk:
                break
        assert (await run(good, "python3", "-c", FETCH, "http://good.test/")).stdout == b"hello"
        # Both ends of each connection to the host are in this process.
        assert len(os.listdir("/proc/self/fd")) - fds <= 3 * 128 + 20
        assert (await run(bad, "true")).ok
        await bad.close()
        assert (await run(good, "python3", "-c", FETCH, "http://good.test/")).stdout == b"hello"
        await wait_while(lambda: len(os.listdir("/proc/self/fd")) > fds)


async def test_proxy_ends_with_a_dead_sandbox(local: LocalProvider) -> None:
    async with fake_hosts(local, FakeSite(b"hold")) as resolver:
        sandbox = await local.create(ALLOW, attempt="a")
        script = f"{OPEN_LISTENER} printf 'CONNECT good.test:443 HTTP/1.1\\r\\n\\r\\nGET\\r\\n\\r\\n' >&3; cat <&3"
        running = asyncio.create_task(run(sandbox, "bash", "-c", script))
        await wait_while(lambda: not resolver.dialled)
        os.kill(inspect_sandbox(sandbox).pid, 9)
        assert (await running).status == "lost"
        (proxy,) = resolver.proxies
        await sandbox.close()
        assert (resolver.proxies, proxy.connections) == (set(), 0)
