"""File transfers through the engine's archive API, for owners that are not root: archives are not trusted."""

import errno
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rookery.core import SandboxError
from rookery.sandboxes import ProviderHome, archives
from rookery.sandboxes.conformance import Check, files
from rookery.sandboxes.docker import archive_transfer
from rookery.sandboxes.docker.provider import DockerProvider
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def unprivileged(
    engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[DockerProvider]:
    home = ProviderHome(
        folder=tmp_path_factory.mktemp("unprivileged") / "sandboxes", run=f"unprivileged-{os.getpid()}"
    )
    provider = DockerProvider(home, image=IMAGE, engine=engine.socket, direct=False)
    yield provider
    await provider.close()
    assert engine.containers() == []


@pytest.mark.long
@pytest.mark.needs("docker")
@pytest.mark.parametrize("check", files.CHECKS, ids=lambda check: check.__name__)
async def test_file_checks_pass_through_the_engine(check: Check, unprivileged: DockerProvider) -> None:
    await check(unprivileged)


@pytest.mark.parametrize("name", ["../out", "/etc/out", "top/../../out", "top/" + "d/" * 300 + "x"])
async def test_escaping_member_names_are_refused(name: str, tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        first = tarfile.TarInfo("top")
        first.type, first.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(first)
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    archive.seek(0)
    with pytest.raises(OSError):
        archives.unpack(archive, tmp_path / "host" / "got", "x", 1000)
    assert list((tmp_path / "host").iterdir()) == []


async def test_upload_packs_links_and_hard_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    source = tmp_path / "source"
    source.mkdir()
    (source / "plain").write_text("mine")
    os.link(source / "plain", source / "second")
    (source / "link").symlink_to(tmp_path / "secret")
    packer = archive_transfer.ArchiveTransfer(None, "", None, 1000)  # type: ignore[arg-type]
    packed = io.BytesIO()
    packer.pack(packed, source, None, ("w", "t"), 1)
    assert b"hunter2" not in packed.getvalue()
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        found = {info.name: (info.type, info.linkname, info.size) for info in tar}
    assert found == {
        "w/t": (tarfile.DIRTYPE, "", 0),
        "w/t/plain": (tarfile.REGTYPE, "", 4),
        "w/t/second": (tarfile.REGTYPE, "", 4),
        "w/t/link": (tarfile.SYMTYPE, str(tmp_path / "secret"), 0),
    }
    for path, number in ((source / "link", errno.ELOOP), (tmp_path / "missing", errno.ENOENT)):
        with pytest.raises(OSError) as refused:
            packer.pack(io.BytesIO(), path, None, ("x",), 0)
        assert refused.value.errno == number


async def test_hard_links_in_a_download_stay_inside_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind, link in (
            ("top", tarfile.DIRTYPE, ""),
            ("top/a", tarfile.REGTYPE, ""),
            ("top/b", tarfile.LNKTYPE, "top/a"),
            ("top/c", tarfile.LNKTYPE, "../../secret"),
            ("top/d", tarfile.LNKTYPE, str(tmp_path / "secret")),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname, info.size = kind, 0o755, link, 4 if name == "top/a" else 0
            tar.addfile(info, io.BytesIO(b"mine") if info.size else None)
    archive.seek(0)
    archives.unpack(archive, tmp_path / "host" / "got", "x", 1000)
    got = {path.name: path.read_text() for path in (tmp_path / "host" / "got").iterdir()}
    assert got == {"a": "mine", "b": "mine"}


async def test_download_never_writes_through_links(tmp_path: Path) -> None:
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
    with pytest.raises(FileNotFoundError):
        archives.unpack(archive, tmp_path / "host" / "got", "x", 1000)
    assert not (tmp_path / "x").exists()
    assert list((tmp_path / "host").iterdir()) == []


async def test_writing_into_a_read_only_container_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    transfer = archive_transfer.ArchiveTransfer(None, "", None, 1000, read_only=True)  # type: ignore[arg-type]
    with pytest.raises(SandboxError) as written:
        await transfer.write("file", b"x", mode=0o644, timeout=60.0)
    with pytest.raises(SandboxError) as uploaded:
        await transfer.upload(tmp_path / "file", "file", inside=None, timeout=60.0)
    assert {written.value.code, uploaded.value.code} == {"sandbox.refused"}
