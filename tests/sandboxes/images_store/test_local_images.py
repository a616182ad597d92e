"""Local sandboxes from images of the store: all layers combined, whatever their source."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.images.store import ImageStore
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, directory, member, symlink
from tests.sandboxes.owner_process import SPEC


@pytest.fixture
async def local(home: ProviderHome) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(home)
    yield provider
    await provider.close()


def spec_for(image: object, **more: object) -> SandboxSpec:
    return replace(SPEC, image=str(image), **more)


async def sh(sandbox: LocalSandbox, script: str) -> str:
    result = await sandbox.exec(Command(argv=("sh", "-c", script)))
    return (result.stdout + result.stderr).decode()


def build_layered_image(system_layer: bytes, **config: object) -> BuiltImage:
    second = build_tar(
        directory("srv/"),
        directory("srv/data/", 0o700, (1000, 1000)),
        member("srv/data/.wh.file"),
        directory("srv/new/"),
        member("srv/new/.wh..wh..opq"),
        member("srv/new/file", b"new\n"),
        member("etc/.wh.nothing"),
        member("opt/deep/file", b"deep\n"),
    )
    third = build_tar(
        directory("srv/"), symlink("srv/link", "new/file"), member("bin/.wh.touch"), member("opt/.wh.deep")
    )
    return BuiltImage(system_layer, second, third, **config)


@pytest.mark.parametrize("form", ["layout", "saved"])
async def test_sandbox_shows_all_layers_combined(
    local: LocalProvider, system_layer: bytes, tmp_path: Path, form: str
) -> None:
    made = build_layered_image(
        system_layer, Env=["PATH=/bin:/opt", "LEVEL=three"], WorkingDir="/srv/new", User="1000"
    )
    path = (
        made.write_layout(tmp_path / "layout")
        if form == "layout"
        else made.save_docker_archive(tmp_path / "saved.tar")
    )
    sandbox = await local.create(spec_for(path), attempt="a")
    assert await sh(sandbox, "cat /etc/of-the-image /srv/link; pwd; echo $PATH $LEVEL; id -u") == (
        "image\nnew\n/srv/new\n/bin:/opt three\n1000\n"
    )
    assert await sh(sandbox, "ls -a /srv/data /opt /srv/new | cat; ls /bin/touch 2>/dev/null") == (
        "/opt:\n.\n..\n\n/srv/data:\n.\n..\nlink\n\n/srv/new:\n.\n..\nfile\n"
    )
    assert "nothing" not in await sh(sandbox, "ls -a /etc")
    # A second sandbox unpacks nothing again.
    before = {
        path.name: path.stat().st_mtime_ns for path in Path(os.environ["ROOKERY_IMAGES"], "layers").iterdir()
    }
    assert len(before) == 3
    other = await local.create(spec_for(path, user="root", workdir="sub"), attempt="a")
    assert await sh(other, "pwd; id -u") == "/work/sub\n0\n"
    again = {path.name: path.stat().st_mtime_ns for path in Path(os.environ["ROOKERY_IMAGES"], "layers").iterdir()}
    assert again == before
    assert await sandbox.read("/srv/new/file") == b"new\n"


async def test_snapshot_of_a_layered_sandbox(local: LocalProvider, system_layer: bytes, tmp_path: Path) -> None:
    path = build_layered_image(system_layer).write_layout(tmp_path / "layout")
    sandbox = await local.create(spec_for(path, user="root"), attempt="a")
    name = await sandbox.snapshot()
    await sh(sandbox, "rm /srv/link; echo x > /srv/new/file; rm -r /root; echo > /opt/deep")
    assert await sandbox.diff(name) == {
        "/srv/link": "removed",
        "/srv/new/file": "changed",
        "/root": "removed",
        "/opt/deep": "added",
    }
    fork = await sandbox.fork(name)
    await sandbox.close()
    assert await sh(fork, "cat /srv/link; ls /srv") == "new\ndata\nlink\nnew\n"


async def test_user_of_the_image_is_used_on_request(
    local: LocalProvider, system_layer: bytes, tmp_path: Path
) -> None:
    passwd = build_tar(member("etc/passwd", b"root:x:0:0::/:/bin/sh\nagent:x:1234:1234::/:/bin/sh\n"))
    path = BuiltImage(system_layer, passwd, User="agent:agent").write_layout(tmp_path / "layout")
    sandbox = await local.create(spec_for(path, user="image"), attempt="a")
    assert await sh(sandbox, "id -u; id -un; echo x > /work/x; cat /work/x") == "1234\nagent\nx\n"


@pytest.mark.long
@pytest.mark.parametrize("count", [130])
async def test_image_can_have_many_layers(
    local: LocalProvider, system_layer: bytes, tmp_path: Path, count: int
) -> None:
    more = [build_tar(directory("n/"), member(f"n/{at}", str(at).encode())) for at in range(count - 1)]
    path = BuiltImage(system_layer, *more, compress=False).write_layout(tmp_path / "layout")
    sandbox = await local.create(spec_for(path), attempt="a")
    assert (await sh(sandbox, "cd /n; set -- *; echo $#")) == f"{count - 1}\n"
    assert (await sh(sandbox, f"cat /n/0 /n/{count - 2}")) == f"0{count - 2}"


async def test_image_is_installed_once_for_many_sandboxes(
    local: LocalProvider, home: ProviderHome, system_layer: bytes, tmp_path: Path, store: ImageStore
) -> None:
    """Two providers share the store, as two processes of a run do."""
    path = build_layered_image(system_layer).write_layout(tmp_path / "layout")
    other = LocalProvider(replace(home, run=home.run))
    try:
        sandboxes = await asyncio.gather(
            *(one.create(spec_for(path), attempt=str(n)) for n in range(10) for one in (local, other))
        )
        assert {(await sandbox.read("/srv/new/file")) for sandbox in sandboxes} == {b"new\n"}
        assert len(list(store.layers.iterdir())) == 3
        (listed,) = store.list_images()
        assert listed.used_by == (os.getpid(),)
    finally:
        await other.close()
    await local.close()
    assert store.list_images()[0].used_by == ()
    assert list((store.folder / "work").iterdir()) == []


async def test_missing_image_is_a_task_fault_with_advice(local: LocalProvider, tmp_path: Path) -> None:
    for image in (
        "UPPER:1",
        "./nowhere",
        "engine:nothing",
        f"oci:{tmp_path}/nowhere",
        f"dockerfile:{tmp_path}",
    ):
        with pytest.raises(SandboxError) as raised:
            await local.create(spec_for(image), attempt="a")
        assert raised.value.code == "task.image", image
        assert image.partition(":")[2].split("/")[-1] in str(raised.value)


async def test_broken_image_leaves_nothing(
    local: LocalProvider, system_layer: bytes, tmp_path: Path, store: ImageStore
) -> None:
    made = build_layered_image(system_layer)
    path = made.write_layout(tmp_path / "layout")
    victim = max((path / "blobs/sha256").iterdir(), key=lambda one: one.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(bytes(data))
    with pytest.raises(SandboxError, match=str(path)) as raised:
        await local.create(spec_for(path), attempt="a")
    assert raised.value.code == "task.image"
    assert store.list_images() == []
    assert list(store.layers.iterdir()) == list((store.folder / "work").iterdir()) == []
