"""The networks `model` and `allow` of a local box: one address, or the hosts of the rules, and nothing else."""

import asyncio
import contextlib
import functools
import http.server
import os
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
from rookery.sandboxes.local.provider import PORT, URL, LocalProvider, LocalSandbox
from rookery.sandboxes.protocol import SupportsEgressRecords, SupportsModelNetwork
from tests.cli.sandbox_kit import local_sandboxes
from tests.sandboxes.fake_hosts import GOOD, Mapped, Site, ok, served
from tests.sandboxes.hostile.inspection import get_keeper_pid, inspect_sandbox
from tests.sandboxes.owner_process import wait_while

__all__ = ["local_sandboxes"]
pytestmark = pytest.mark.usefixtures("local_sandboxes")

SO_NETNS_COOKIE = 71
MODEL = SandboxSpec(provider="local", network="model", memory=256 << 20, disk=16 << 20, wall=30.0)
ALLOW = SandboxSpec(
    provider="local", network="allow", allow=("good.test",), memory=256 << 20, disk=16 << 20, wall=30.0
)
OPEN = f"exec 3<>/dev/tcp/127.0.0.1/{PORT};"
FETCH = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=20).read().decode())"
WAYS_OUT = """
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
            assert kind == socket.SOCK_DGRAM, "the place of the listener was taken"
print("contained")
""".replace("@", str(PORT))


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


async def run(box: LocalSandbox, *argv: str, **more: object) -> ExecResult:
    return await box.exec(Command(argv=argv, **more))  # type: ignore[arg-type]


def foreign() -> list[str]:
    """Sockets that we hold of a network that is not ours: each keeps one alive."""
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


async def hello(request: web.Request) -> web.Response:
    return web.Response(text=f"hello {request.path}")


@contextlib.asynccontextmanager
async def serving(listener: socket.socket) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        yield
    finally:
        await runner.cleanup()


# -------------------------------------------------------------------------------------------------------- model


async def test_model_network_reaches_its_listener(local: LocalProvider) -> None:
    box = await local.create(MODEL, attempt="a")
    assert isinstance(box, SupportsModelNetwork)
    assert box.inside_url == URL
    async with serving(box.listener()):
        result = await run(box, "python3", "-c", FETCH, f"{box.inside_url}/v1/models")
        assert (result.stdout, result.stderr) == (b"hello /v1/models", b"")
        result = await run(box, "curl", "-sS", "--fail", f"{box.inside_url}/curl")
        assert result.exit_code == 127 or result.stdout == b"hello /curl"

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(100))
        writer.close()

    script = f"{OPEN} touch asked; echo again >&3; cat <&3"
    waiting = asyncio.create_task(run(box, "bash", "-c", script))
    await run(box, "sh", "-c", "until [ -e asked ]; do sleep 0.01; done")
    async with await asyncio.start_server(echo, sock=box.listener(), backlog=1024):  # somebody else, later
        assert (await waiting).stdout == b"again\n"
        assert (await run(box, "bash", "-c", script)).stdout == b"again\n"


async def test_model_network_reaches_nothing_else(local: LocalProvider) -> None:
    box = await local.create(MODEL, attempt="a")
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        async with serving(box.listener()):
            result = await run(box, "python3", "-c", WAYS_OUT, str(theirs.getsockname()[1]))
            assert (result.stdout, result.stderr) == (b"contained\n", b"")


async def test_unserved_listener_refuses_connections(local: LocalProvider) -> None:
    box = await local.create(MODEL, attempt="a")
    probe = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 20)"
    assert b"ConnectionRefusedError" in (await run(box, "python3", "-c", probe)).stderr
    held = box.listener()
    assert b"ConnectionRefusedError" in (await run(box, "python3", "-c", probe)).stderr
    async with serving(held):
        assert (await run(box, "python3", "-c", probe)).ok
    for _ in range(2):
        box.refuse_connections()
        assert b"ConnectionRefusedError" in (await run(box, "python3", "-c", probe)).stderr
    with pytest.raises(SandboxError):
        box.listener()
    taken = (
        f"import socket; socket.create_server(('127.0.0.1', {PORT}), reuse_port=False)"  # which reuses addresses
    )
    assert b"Address already in use" in (await run(box, "python3", "-c", taken)).stderr


async def test_each_sandbox_has_its_own_listener(local: LocalProvider) -> None:
    one, other = await local.create(MODEL, attempt="a"), await local.create(MODEL, attempt="b")
    async with serving(one.listener()):
        assert (await run(one, "python3", "-c", FETCH, URL)).ok
        assert b"refused" in (await run(other, "python3", "-c", FETCH, URL)).stderr


@pytest.mark.parametrize("network", ["none", "allow"])
async def test_other_networks_have_no_listener(network: str, local: LocalProvider) -> None:
    box = await local.create(ALLOW if network == "allow" else SandboxSpec(provider="local"), attempt="a")
    assert box.inside_url == ""
    with pytest.raises(SandboxError):
        box.listener()
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        box.listener()


async def test_closed_networks_leave_no_sockets(local: LocalProvider) -> None:
    keeper = await get_keeper_pid(local)
    before = len(os.listdir(f"/proc/{keeper}/fd")), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        made = [await local.create(spec, attempt="a") for spec in (MODEL, ALLOW, MODEL, ALLOW)]
        async with serving(made[0].listener()):
            assert all([(await run(box, "true")).ok for box in made])
            assert len(foreign()) == 4 + 2 + 1
        known = [inspect_sandbox(box) for box in made]
        await asyncio.gather(*(box.close() for box in made))
        assert foreign() == []
        for box in known:
            await wait_while(box.left)
    # A warm box may be settled, with all of its descriptors; networks are kept for the next ones.
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
    assert local._open == set()
    await wait_while(foreign)
    await wait_while(lambda: len(os.listdir("/proc/self/fd")) > fds)
    assert local.resolver is None or local.resolver.proxies == set()


# -------------------------------------------------------------------------------------------------------- allow


@contextlib.asynccontextmanager
async def hosts(local: LocalProvider, site: Site) -> AsyncIterator[Mapped]:
    async with served(site.talk) as port:
        local.resolver = outside = Mapped({"good.test": [GOOD], "inside.test": ["127.0.0.1"]}, {GOOD: port})
        yield outside


async def test_allow_network_reaches_only_allowed_hosts(local: LocalProvider) -> None:
    async with hosts(local, Site(ok("hello"))) as outside:
        box = await local.create(ALLOW, attempt="a")
        assert isinstance(box, SupportsEgressRecords)
        assert (await run(box, "python3", "-c", FETCH, "http://good.test/")).stdout == b"hello"
        refused = await run(box, "python3", "-c", FETCH, "http://other.test/")
        assert b"HTTP Error 403: Forbidden" in refused.stderr
        refused = await run(box, "python3", "-c", FETCH, "https://other.test/")
        assert b"403" in refused.stderr
        if (await run(box, "sh", "-c", "command -v curl")).ok:
            assert (await run(box, "curl", "-sS", "http://good.test/")).stdout == b"hello"
            assert (await run(box, "curl", "-sSp", "http://good.test/")).stdout == b"hello"
            assert (
                await run(box, "curl", "-sSx", f"socks5h://127.0.0.1:{PORT}", "http://good.test/")
            ).stdout == b"hello"
            said = (await run(box, "curl", "-sS", "http://other.test/")).stdout
            assert said == b"other.test port 80 is refused: no rule allows it. Allowed: good.test\n"
        if (await run(box, "sh", "-c", "command -v git")).ok:
            assert b"403" in (await run(box, "git", "ls-remote", "https://other.test/a")).stderr
        assert {address for address, _ in outside.dialled} == {GOOD}
        assert {(one.host, one.verdict) for one in box.egress()} == {
            ("good.test", "allowed"),
            ("other.test", "refused"),
        }
        record = box.egress()
        await box.close()
        assert box.egress() == record


async def test_allow_network_has_no_other_route(local: LocalProvider) -> None:
    async with hosts(local, Site(ok("hello"))) as outside:
        box = await local.create(ALLOW, attempt="a")
        with socket.create_server(("127.0.0.1", 0)) as theirs:
            port = theirs.getsockname()[1]
            result = await run(box, "python3", "-c", WAYS_OUT, str(port))
            assert (result.stdout, result.stderr) == (b"contained\n", b"")
            for way in (f"127.0.0.1:{port}", f"localhost:{port}", f"inside.test:{port}", f"[::1]:{port}"):
                script = f"{OPEN} printf 'CONNECT {way} HTTP/1.1\\r\\n\\r\\n' >&3; head -1 <&3"
                assert b"403 Forbidden" in (await run(box, "bash", "-c", script)).stdout
        assert outside.dialled == []


async def test_rule_can_allow_the_hosts_loopback(local: LocalProvider) -> None:
    async with served(Site(ok("hello")).talk) as port:
        for name in ("localhost", "127.0.0.1"):
            spec = SandboxSpec(provider="local", network="allow", allow=(f"{name}:{port}",))
            box = await local.create(spec, attempt="a")
            assert (await run(box, "python3", "-c", FETCH, f"http://{name}:{port}/")).stdout == b"hello"
            await box.close()


@pytest.mark.skipif(shutil.which("git") is None, reason="[probed] there is no git here")
async def test_git_clones_from_an_allowed_host(local: LocalProvider, tmp_path: Path) -> None:
    def made() -> None:
        env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        for words in (
            "init -q -b main here",
            "-C here -c user.name=a -c user.email=a@b commit -q --allow-empty -m first",
            "clone -q --bare here there.git",
            "-C there.git update-server-info",
        ):
            subprocess.run(["git", *words.split()], cwd=tmp_path, env=env, check=True)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    await asyncio.to_thread(made)
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            local.resolver = Mapped({"good.test": [GOOD]}, {GOOD: server.server_port})
            box = await local.create(ALLOW, attempt="a")
            done = await run(box, "git", "clone", "-q", "http://good.test/there.git", "clone")
            assert (done.exit_code, done.stderr) == (0, b"")
            assert (await run(box, "git", "-C", "clone", "log", "--format=%s")).stdout == b"first\n"
        finally:
            await asyncio.to_thread(server.shutdown)
            thread.join()


async def test_spec_can_override_proxy_variables(local: LocalProvider) -> None:
    spec = SandboxSpec(provider="local", network="allow", allow=("good.test",), env={"HTTP_PROXY": "mine"})
    box = await local.create(spec, attempt="a")
    said = (await run(box, "sh", "-c", "echo $HTTP_PROXY $https_proxy $NO_PROXY")).stdout.decode()
    assert said == f"mine {URL} localhost,127.0.0.1,::1\n"


SWARM = """
import socket, sys, time
SAID = (b"", b"GET http://good.test/ HT", b"\\x05", b"CONNECT good.test:443 HTTP/1.1\\r\\n\\r\\n")
held = []
for number in range(2000):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", @))
    held.append(sock)
for number, sock in enumerate(held):
    try:
        sock.send(SAID[number % 4])
    except OSError:
        pass
print("up", flush=True)
time.sleep(600)
""".replace("@", str(PORT))


async def test_many_connections_do_not_affect_other_sandboxes(local: LocalProvider) -> None:
    async with hosts(local, Site(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")):
        bad, good = await local.create(ALLOW, attempt="bad"), await local.create(ALLOW, attempt="good")
        fds = len(os.listdir("/proc/self/fd"))
        process = await bad.start(Command(argv=("python3", "-c", SWARM)))
        async for _, chunk in process.output():
            if b"up" in chunk:
                break
        assert (await run(good, "python3", "-c", FETCH, "http://good.test/")).stdout == b"hello"
        assert len(os.listdir("/proc/self/fd")) - fds <= 3 * 128 + 20  # the host's end of each is ours too, here
        assert (await run(bad, "true")).ok
        await bad.close()
        assert (await run(good, "python3", "-c", FETCH, "http://good.test/")).stdout == b"hello"
        await wait_while(lambda: len(os.listdir("/proc/self/fd")) > fds)


async def test_proxy_ends_with_a_dead_sandbox(local: LocalProvider) -> None:
    async with hosts(local, Site(b"hold")) as outside:
        box = await local.create(ALLOW, attempt="a")
        script = f"{OPEN} printf 'CONNECT good.test:443 HTTP/1.1\\r\\n\\r\\nGET\\r\\n\\r\\n' >&3; cat <&3"
        running = asyncio.create_task(run(box, "bash", "-c", script))
        await wait_while(lambda: not outside.dialled)
        os.kill(inspect_sandbox(box).pid, 9)
        assert (await running).status == "lost"
        (proxy,) = outside.proxies
        await box.close()
        assert (outside.proxies, proxy._tasks) == (set(), set())
