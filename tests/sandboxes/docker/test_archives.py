"""Who is not root of the machine has files through the engine: the same checks, and nothing is believed."""

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rookery.sandboxes import Home
from rookery.sandboxes.conformance import Check, files
from rookery.sandboxes.docker import archives
from rookery.sandboxes.docker.provider import DockerProvider
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def asking(engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DockerProvider]:
    home = Home(folder=tmp_path_factory.mktemp("asking") / "sandboxes", run=f"asking-{os.getpid()}")
    provider = DockerProvider(home, image=IMAGE, engine=engine.socket, direct=False)
    yield provider
    await provider.close()
    assert engine.containers() == []


@pytest.mark.needs("docker")
@pytest.mark.parametrize("check", files.CHECKS, ids=lambda check: check.__name__)
async def test_files_go_through_the_engine(check: Check, asking: DockerProvider) -> None:
    await check(asking)


@pytest.mark.parametrize("name", ["../out", "/etc/out", "top/../../out", "top/" + "d/" * 300 + "x"])
async def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        first = tarfile.TarInfo("top")
        first.type, first.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(first)
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    archive.seek(0)
    with pytest.raises(OSError, match="impossible name"):
        archives._unpack(archive, tmp_path / "host" / "got", "x", 1000)
    assert list((tmp_path / "host").iterdir()) == []


async def test_a_link_in_an_archive_is_left_out_and_nothing_is_written_through_it(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind in (
            ("top", tarfile.DIRTYPE),
            ("top/link", tarfile.SYMTYPE),
            ("top/link/x", tarfile.REGTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname = kind, 0o755, str(tmp_path)
            tar.addfile(info, io.BytesIO() if kind == tarfile.REGTYPE else None)
    archive.seek(0)
    with pytest.raises(OSError, match="No such file"):
        archives._unpack(archive, tmp_path / "host" / "got", "x", 1000)
    assert not (tmp_path / "x").exists()
    assert list((tmp_path / "host").iterdir()) == []
