"""Rootless Podman: containers work as with root, except for limits, which are refused."""

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
HAS_CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=None, pids=None, disk=8 << 20, wall=20.0)


@pytest.fixture(scope="module")
def public_directory() -> Iterator[Path]:
    """Yield a directory that every user can reach; those of pytest are private to root."""
    if not rootless.is_available():
        pytest.skip("[probed] other users cannot execute the programs of this checkout")
    folder = tempfile.mkdtemp(prefix="rookery-podman-")
    Path(folder).chmod(0o755)
    yield Path(folder)
    processes.remove_tree(folder)


@pytest.fixture(scope="module")
def service(public_directory: Path, image_archives: dict[str, Path]) -> Iterator[RootlessPodman]:
    made = RootlessPodman(public_directory / "service")
    try:
        made.start()
        made.load(image_archives[IMAGE], IMAGE)
        yield made
    finally:
        made.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(service: RootlessPodman, public_directory: Path) -> AsyncIterator[DockerProvider]:
    made = DockerProvider(
        ProviderHome(folder=public_directory / "home", run="rootless"), engine=service.socket, direct=False
    )
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


@pytest.mark.skipif(HAS_CGROUP_V2, reason="[probed] limits of cgroup v2 may be delegated")
async def test_unenforceable_limits_are_refused(
    provider: DockerProvider, service: RootlessPodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provider.check(SPEC) == []
    for changes in ({"memory": 64 << 20}, {"pids": 32}, {"cpus": 1.0}):
        assert len(provider.check(msgspec.structs.replace(SPEC, **changes))) == 1
    monkeypatch.setenv("DOCKER_HOST", f"unix://{service.socket}")
    (report,) = DockerProvider(ProviderHome(folder=Path(), run="check")).diagnose()
    assert (report.status, "memory, processes, processors" in report.found) == ("weaker", True)
