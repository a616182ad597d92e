"""Networks: each is what it says, or is refused. Nothing is sent to another machine."""

# One assertion, one thing that must hold.
# ruff: noqa: PT018

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes.conformance.tools import Check, box
from rookery.sandboxes.protocol import Command, Listening, Provider, Reaching, Sandbox

FETCH = """
import sys, urllib.error, urllib.request
try:
    sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code} {error.read().decode()}")
except urllib.error.URLError as error:
    sys.exit(f"none {error}")
"""


async def _hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _host() -> AsyncIterator[int]:
    """The port of a server on the loopback of the machine that we are on."""
    async with await asyncio.start_server(_hello, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _fetch(sandbox: Sandbox, url: str) -> ExecResult:
    return await sandbox.exec(Command(argv=("python3", "-c", FETCH, url)))


async def _given(provider: Provider, spec: SandboxSpec) -> bool:
    """Whether the provider has such sandboxes; where it says that it does not, creating one must say so too."""
    if not provider.check(spec):
        return True
    await _is_refused(provider, spec)
    return False


async def _is_refused(provider: Provider, spec: SandboxSpec) -> None:
    try:
        sandbox = await provider.create(spec, attempt="conformance")
    except SandboxError as error:
        refused = error
    else:
        await sandbox.close()
        raise AssertionError(f"it was made: {spec}")
    assert refused.code == "sandbox.refused" and str(refused), repr(refused)


async def without_a_network_the_host_is_not_reached(provider: Provider) -> None:
    if not provider.isolated:
        return
    async with _host() as port, box(provider) as sandbox:
        result = await _fetch(sandbox, f"http://127.0.0.1:{port}/")
        assert not result.ok and result.stderr.startswith(b"none "), result


async def the_network_model_reaches_who_serves_it_and_nothing_else(provider: Provider) -> None:
    spec = SandboxSpec(network="model", wall=30.0)
    if not await _given(provider, spec):
        return
    async with _host() as port, box(provider, spec) as sandbox:
        assert isinstance(sandbox, Listening) and sandbox.inside_url.startswith("http://")
        assert (await _fetch(sandbox, sandbox.inside_url)).stderr.startswith(b"none "), "nobody serves it yet"
        async with await asyncio.start_server(_hello, sock=sandbox.listener(), backlog=1024):
            assert (await _fetch(sandbox, sandbox.inside_url)).stdout == b"hello"
            result = await _fetch(sandbox, f"http://127.0.0.1:{port}/")
            assert not result.ok and result.stderr.startswith(b"none "), result


async def the_network_allow_reaches_its_hosts_and_nothing_else(provider: Provider) -> None:
    async with _host() as port, _host() as other:
        spec = SandboxSpec(network="allow", allow=(f"127.0.0.1:{port}",), wall=30.0)
        if not await _given(provider, spec):
            return
        async with box(provider, spec) as sandbox:
            result = await _fetch(sandbox, f"http://127.0.0.1:{port}/")
            assert result.stdout == b"hello", result
            for host in (f"127.0.0.1:{other}", "host.invalid"):
                result = await _fetch(sandbox, f"http://{host}/")
                assert not result.ok and result.stderr.startswith(b"403 "), result
                assert host.partition(":")[0].encode() in result.stderr, result
            if isinstance(sandbox, Reaching):
                found = {(one.host, one.port, one.verdict) for one in sandbox.egress()}
                wanted = {("127.0.0.1", port, "allowed"), ("127.0.0.1", other, "refused")}
                assert found == wanted | {("host.invalid", 80, "refused")}, found


async def what_cannot_be_allowed_is_refused(provider: Provider) -> None:
    for allow in (("http://a.invalid",), ("a b",), ("",), ("a.*.invalid",), ("a.invalid:0",), ()):
        await _is_refused(provider, SandboxSpec(network="allow", allow=allow))
    await _is_refused(provider, SandboxSpec(network="none", allow=("a.invalid",)))


CHECKS: tuple[Check, ...] = (
    without_a_network_the_host_is_not_reached,
    the_network_model_reaches_who_serves_it_and_nothing_else,
    the_network_allow_reaches_its_hosts_and_nothing_else,
    what_cannot_be_allowed_is_refused,
)
