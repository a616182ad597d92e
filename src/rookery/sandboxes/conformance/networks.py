"""Conformance checks of the networks: each works as specified or is refused.

The checks send nothing to another machine.
"""

# One assertion for one property.
# ruff: noqa: PT018

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes.conformance.tools import Check, open_sandbox
from rookery.sandboxes.protocol import Command, Provider, Sandbox, SupportsEgressRecords, SupportsModelNetwork

FETCH = """
import sys, urllib.error, urllib.request
try:
    sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code} {error.read().decode()}")
except urllib.error.URLError as error:
    sys.exit(f"none {error}")
"""


async def serve_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _start_server() -> AsyncIterator[int]:
    """Start a server on the host's loopback interface; yield its port."""
    async with await asyncio.start_server(serve_hello, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def _fetch(sandbox: Sandbox, url: str) -> ExecResult:
    return await sandbox.exec(Command(argv=("python3", "-c", FETCH, url)))


async def _supports(provider: Provider, spec: SandboxSpec) -> bool:
    """Return whether the provider supports a spec. If `check` refuses it, `create` must refuse it, too."""
    if not provider.check(spec):
        return True
    await _assert_refused(provider, spec)
    return False


async def _assert_refused(provider: Provider, spec: SandboxSpec) -> None:
    try:
        sandbox = await provider.create(spec, attempt="conformance")
    except SandboxError as error:
        refused = error
    else:
        await sandbox.close()
        raise AssertionError(f"a sandbox was created although the provider must refuse the spec {spec}")
    assert refused.code == "sandbox.refused" and str(refused), repr(refused)


async def without_a_network_the_host_is_unreachable(provider: Provider) -> None:
    if not provider.isolated:
        return
    async with _start_server() as port, open_sandbox(provider) as sandbox:
        result = await _fetch(sandbox, f"http://127.0.0.1:{port}/")
        assert not result.ok and result.stderr.startswith(b"none "), result


async def the_network_model_reaches_only_its_server(provider: Provider) -> None:
    spec = SandboxSpec(network="model", wall=30.0)
    if not await _supports(provider, spec):
        return
    async with _start_server() as port, open_sandbox(provider, spec) as sandbox:
        assert isinstance(sandbox, SupportsModelNetwork) and sandbox.inside_url.startswith("http://")
        assert (await _fetch(sandbox, sandbox.inside_url)).stderr.startswith(b"none "), "no server listens yet"
        async with await asyncio.start_server(serve_hello, sock=sandbox.listener(), backlog=1024):
            assert (await _fetch(sandbox, sandbox.inside_url)).stdout == b"hello"
            result = await _fetch(sandbox, f"http://127.0.0.1:{port}/")
            assert not result.ok and result.stderr.startswith(b"none "), result


async def the_network_allow_reaches_only_allowed_hosts(provider: Provider) -> None:
    async with _start_server() as port, _start_server() as other:
        spec = SandboxSpec(network="allow", allow=(f"127.0.0.1:{port}",), wall=30.0)
        if not await _supports(provider, spec):
            return
        async with open_sandbox(provider, spec) as sandbox:
            result = await _fetch(sandbox, f"http://127.0.0.1:{port}/")
            assert result.stdout == b"hello", result
            for host in (f"127.0.0.1:{other}", "host.invalid"):
                result = await _fetch(sandbox, f"http://{host}/")
                assert not result.ok and result.stderr.startswith(b"403 "), result
                assert host.partition(":")[0].encode() in result.stderr, result
            if isinstance(sandbox, SupportsEgressRecords):
                found = {(one.host, one.port, one.verdict) for one in sandbox.egress()}
                wanted = {("127.0.0.1", port, "allowed"), ("127.0.0.1", other, "refused")}
                assert found == wanted | {("host.invalid", 80, "refused")}, found


async def invalid_rules_are_refused(provider: Provider) -> None:
    for allow in (("http://a.invalid",), ("a b",), ("",), ("a.*.invalid",), ("a.invalid:0",), ()):
        await _assert_refused(provider, SandboxSpec(network="allow", allow=allow))
    await _assert_refused(provider, SandboxSpec(network="none", allow=("a.invalid",)))


CHECKS: tuple[Check, ...] = (
    without_a_network_the_host_is_unreachable,
    the_network_model_reaches_only_its_server,
    the_network_allow_reaches_only_allowed_hosts,
    invalid_rules_are_refused,
)
