"""Containers of an engine that is reached over TLS or SSH, and how the engine is found."""

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rookery.core import SandboxError, SandboxSpec, UsageError
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.conformance import files, networks
from rookery.sandboxes.docker.endpoint import EngineEndpoint, find_endpoint
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.docker.remote_service import RemoteDocker, open_docker
from rookery.sandboxes.remote import ServiceProvider, resumable
from rookery.sandboxes.ssh_provider import OPTIONS_VARIABLE
from tests.certificates import make_certificates
from tests.sandboxes.docker import engine as engines
from tests.ssh_server import SshServer, needs_ssh
from tests.waiting import repeat_until

VARIABLES = ("DOCKER_HOST", "CONTAINER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
CHECKS = (
    files.directories_are_transferred_with_their_modes,
    files.no_symbolic_link_of_the_sandbox_is_followed,
    networks.without_a_network_the_host_is_unreachable,
    networks.the_network_model_reaches_only_its_server,
)


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def write_context(folder: Path, name: str, host: str, *, tls: bool = False) -> None:
    identity = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "contexts/meta" / identity
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host}}}))
    if tls:
        (folder / "contexts/tls" / identity / "docker").mkdir(parents=True)


def test_engine_is_found_in_the_variable_then_the_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "docker"
    write_context(folder, "build", "ssh://me@build:2222")
    write_context(folder, "safe", "tcp://safe:1234", tls=True)
    (folder / "config.json").write_text(json.dumps({"currentContext": "build"}))
    assert find_endpoint() == EngineEndpoint(path="/var/run/docker.sock", ssh=("-p", "2222", "me@build"))
    monkeypatch.setenv("DOCKER_CONTEXT", "safe")
    safe = find_endpoint()
    assert (safe.host, safe.port, safe.certificates.endswith("/docker"), safe.verify) == ("safe", 1234, True, True)
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere.sock")
    assert find_endpoint() == EngineEndpoint(path="/somewhere.sock")
    monkeypatch.setenv("DOCKER_HOST", "tcp://plain:99")
    assert find_endpoint() == EngineEndpoint(host="plain", port=99)


@pytest.mark.parametrize("value", ["tcp://", "ssh://-oX@h", "ssh://me:secret@h", "npipe://x", "tcp://h:x", "h:1"])
def test_invalid_engine_is_refused(value: str, monkeypatch: pytest.MonkeyPatch, home: ProviderHome) -> None:
    monkeypatch.setenv("DOCKER_HOST", value)
    with pytest.raises(UsageError):
        find_endpoint()
    provider = open_docker(home)
    assert isinstance(provider, DockerProvider)
    assert provider.check(SandboxSpec(image="x"))


def test_missing_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONTEXT", "nowhere")
    with pytest.raises(UsageError):
        find_endpoint()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority, and with certificates of a server and of a client that it signed."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@asynccontextmanager
async def serve_tls(socket: str, certificates: Path) -> AsyncIterator[int]:
    """Serve an engine's socket over TLS to clients with a certificate, as a proxy in front of it does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server-cert.pem", certificates / "server-key.pem")
    context.load_verify_locations(certificates / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(socket)
        tasks.add(asyncio.ensure_future(copy(reader, inner_writer)))
        tasks.add(asyncio.ensure_future(copy(inner_reader, writer)))

    tasks: set[asyncio.Future[None]] = set()
    async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.needs("docker")
async def test_engine_behind_tls_runs_sandboxes(
    engine: engines.PrivateEngine, certificates: Path, home: ProviderHome
) -> None:
    async with serve_tls(engine.socket, certificates) as port:
        endpoint = EngineEndpoint(host="127.0.0.1", port=port, certificates=str(certificates))
        provider = ServiceProvider(RemoteDocker(endpoint, image=engines.IMAGE), home)
        try:
            for check in CHECKS:
                await check(provider)
            sandbox = await provider.create(SandboxSpec(memory=256 << 20), attempt="a")
            result = await sandbox.exec(
                Command(argv=("sh", "-c", "id -u; kill -TERM 1; kill -9 1; ls /sys/class/net"))
            )
            assert result.stdout.split() == [b"1000", b"lo"]
            await sandbox.close()
        finally:
            await provider.close()
        stranger = EngineEndpoint(host="127.0.0.1", port=port, certificates="", verify=True)
        unverified = ServiceProvider(RemoteDocker(stranger, image=engines.IMAGE), home)
        with pytest.raises(SandboxError) as caught:
            await unverified.create(SandboxSpec(), attempt="a", timeout=0.3)
        assert caught.value.code == "sandbox.create"
        await unverified.close()
    assert engine.containers() == []


@pytest.fixture
def ssh_server(tmp_path: Path) -> Iterator[SshServer]:
    server = SshServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.mark.long
@pytest.mark.timeout(600)
@needs_ssh
@pytest.mark.needs("docker")
async def test_engine_behind_ssh_is_reached_again_after_a_broken_connection(
    engine: engines.PrivateEngine, ssh_server: SshServer, home: ProviderHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, f"-F {ssh_server.write_config()}")
    monkeypatch.setenv("DOCKER_HOST", f"ssh://here{engine.socket}")
    monkeypatch.setattr(resumable, "RESUME_SECONDS", 600.0)  # however slow this machine is
    provider = open_docker(home)
    assert isinstance(provider, ServiceProvider)
    spec = SandboxSpec(image=engines.IMAGE)
    try:
        sandbox = await provider.create(spec, attempt="a")
        assert (await sandbox.exec(Command(argv=("cat",), stdin=b"hello"))).stdout == b"hello"
        running = asyncio.ensure_future(
            sandbox.exec(
                Command(argv=("sh", "-c", "echo started >> log; until [ -e go ]; do sleep 0.1; done; cat log"))
            )
        )
        await repeat_until(sandbox, Command(argv=("test", "-e", "log")), ok=True)
        ssh_server.stop()
        await asyncio.to_thread(ssh_server.start)
        await sandbox.write("go", b"")
        assert (await running).stdout == b"started\n"
        await sandbox.close()
        again = await provider.create(spec, attempt="b")
        assert (await again.exec(Command(argv=("true",)))).ok
        await again.close()
    finally:
        await provider.close()
    assert engine.containers() == []
    assert [check.status for check in await asyncio.to_thread(open_docker(home).diagnose)] == ["ok"]
