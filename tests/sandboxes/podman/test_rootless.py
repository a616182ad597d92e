"""A service that is not root's: its containers are as good as root's, but for limits that are refused in words."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rookery.core import SandboxSpec
from rookery.sandbox_runtime import processes
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.docker.provider import DockerProvider
from tests.sandboxes.docker.engine import IMAGE
from tests.sandboxes.podman import rootless
from tests.sandboxes.podman.rootless import RootlessPodman

pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
SECOND = Path("/sys/fs/cgroup/cgroup.controllers").exists()
SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=None, pids=None, disk=8 << 20, wall=20.0)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user can reach: those of the tests are root's alone."""
    if not rootless.can_be_had():
        pytest.skip("[probed] other users cannot reach the programs of this checkout")
    folder = tempfile.mkdtemp(prefix="rookery-podman-")
    Path(folder).chmod(0o755)
    yield Path(folder)
    processes.remove_tree(folder)


@pytest.fixture(scope="module")
def service(place: Path, tars: dict[str, Path]) -> Iterator[RootlessPodman]:
    made = RootlessPodman(place / "service")
    try:
        made.start()
        made.load(tars[IMAGE], IMAGE)
        yield made
    finally:
        made.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(service: RootlessPodman, place: Path) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(ProviderHome(folder=place / "home", run="rootless"), engine=service.socket, direct=False)
    yield made
    await made.close()
    assert service.containers() == []


async def test_rootless_container_runs_as_another_user(provider: DockerProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="a")
    try:
        script = "id -u; while read -r _ outside _; do echo $outside; done < /proc/self/uid_map; cat in"
        await sandbox.write("in", b"data\n")
        result = await sandbox.exec(Command(argv=("sh", "-c", script)))
        assert result.stdout.split() == [b"1000", b"%d" % rootless.USER, b"%d" % (rootless.USER + 1), b"data"]
        assert (
            await sandbox.exec(Command(argv=("sh", "-c", "sleep 600 & sleep 600"), wall=0.3))
        ).status == "time_limit"
        left = await sandbox.exec(Command(argv=("sh", "-c", "cat /proc/[0-9]*/comm")))
        assert b"sleep" not in left.stdout.split()
        many = "while :; do i=$((i+1)); head -c 2000000 /dev/zero > f$i; done"
        assert (await sandbox.exec(Command(argv=("sh", "-c", many)))).status == "disk_limit"
        assert await sandbox.read("in") == b"data\n"
    finally:
        await sandbox.close()


@pytest.mark.skipif(SECOND, reason="[probed] version 2 of control groups: its limits may be delegated")
async def test_unenforceable_limits_are_refused(
    provider: DockerProvider, service: RootlessPodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provider.check(SPEC) == []
    for asked in ({"memory": 64 << 20}, {"pids": 32}, {"cpus": 1.0}):
        assert "cannot limit" in provider.check(msgspec.structs.replace(SPEC, **asked))[0]
    monkeypatch.setenv("DOCKER_HOST", f"unix://{service.socket}")
    (said,) = DockerProvider(ProviderHome(folder=Path(), run="check")).diagnose()
    assert (said.status, "cannot limit memory, processes, processors" in said.found) == ("weaker", True)
