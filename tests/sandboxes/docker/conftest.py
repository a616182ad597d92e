"""Fixtures: one private engine per test process, and one provider per module."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rookery.sandbox_runtime import processes
from rookery.sandboxes import ProviderHome
from rookery.sandboxes.docker.provider import DockerProvider
from tests.sandboxes.conftest import find_marked_processes
from tests.sandboxes.docker import engine as engines


@pytest.fixture(scope="session")
def image_archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("images")
    return {
        engines.IMAGE: engines.build_test_image(folder / "test.tar"),
        engines.BARE: engines.build_bare_image(folder / "bare.tar"),
    }


@pytest.fixture(scope="session")
def engine(image_archives: dict[str, Path]) -> Iterator[engines.PrivateEngine]:
    folder = tempfile.mkdtemp(prefix="rookery-engine-")
    made = engines.PrivateEngine(Path(folder))
    try:
        made.start()
        for name, tar in image_archives.items():
            made.load(tar, name)
        yield made
    finally:
        made.stop()
        processes.remove_tree(folder)  # hostile programs leave trees that are too deep for `shutil`


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def docker(
    engine: engines.PrivateEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DockerProvider]:
    """Yield one provider for all tests of a module, which must leave nothing in the engine and on the host."""
    folder = tmp_path_factory.mktemp("home") / "sandboxes"
    home = ProviderHome(folder=folder, run=f"docker-{os.getpid()}-{folder.parent.name}")
    before = len(os.listdir("/proc/self/fd"))
    provider = DockerProvider(home, image=engines.IMAGE, engine=engine.socket)
    try:
        yield provider
    finally:
        await provider.close()
    assert engine.containers() == []
    assert engine.snapshots() == []
    assert find_marked_processes(home.run) == []
    assert [path for path in folder.rglob("*") if path != folder / "leases"] == []
    assert len(os.listdir("/proc/self/fd")) <= before + 3
