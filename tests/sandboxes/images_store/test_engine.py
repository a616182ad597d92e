"""A real container engine, private to these tests: its images, its builder, and what it is given."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.docker_engine import private_engine
from benchmarks.peers import peers_folder
from rookery.core import SandboxError
from rookery.sandboxes.docker.client import BlockingEngineClient
from rookery.sandboxes.images import dockerfile, engine_loader
from rookery.sandboxes.images.engine_images import EngineImages
from rookery.sandboxes.images.installer import ImageInstaller
from rookery.sandboxes.images.references import parse_reference
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.images_store.image_builder import Made, member, tar_of
from tests.sandboxes.root_filesystems import build_root_filesystem


@asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[str]:
    (folder / "root").symlink_to(peers_folder() / "sandboxes" / "root")
    (folder / "data").mkdir()
    async with private_engine(folder) as socket:
        yield socket


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """For all tests of this file; on a loop of its own, in a thread."""
    if os.geteuid() != 0 or not (peers_folder() / "sandboxes/root/usr/sbin/dockerd").exists():
        pytest.skip("probed: no private Docker engine here (root and `make peers` make one)")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = _engine(tmp_path_factory.mktemp("engine"))
    try:
        yield asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture
def engine(socket: str, monkeypatch: pytest.MonkeyPatch) -> EngineImages:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    return EngineImages(BlockingEngineClient(socket))


def test_engine_image_is_found_by_name_and_refreshed(
    engine: EngineImages, store: ImageStore, tmp_path: Path
) -> None:
    first = Made(tar_of(member("a", b"a")), tar_of(member("b", b"b")), Env=["A=1"], WorkingDir="/")
    (name,) = engine.load(first.saved(tmp_path / "1.tar", "team/app:1"))
    assert name in ("team/app:1", "localhost/team/app:1")  # as podman has it
    record = ImageInstaller(store, parse_reference("team/app:1")).install()
    assert (len(record.layers), record.config.env["A"]) == (2, "1")
    assert (store.layers / record.layers[1] / "b").read_bytes() == b"b"
    second = Made(tar_of(member("c", b"c")))
    engine.load(second.saved(tmp_path / "2.tar", "team/app:1"))
    again = ImageInstaller(store, parse_reference("team/app:1")).install()
    assert (store.layers / again.layers[0] / "c").read_bytes() == b"c"
    with pytest.raises(SandboxError) as raised:
        ImageInstaller(store, parse_reference("engine:team/app:2")).install()
    assert raised.value.code == "task.image"


def test_dockerfile_is_built_once(engine: EngineImages, store: ImageStore, tmp_path: Path) -> None:
    engine.load(Made(tar_of(member("base", b"base"))).saved(tmp_path / "base.tar", "base:1"))
    context = tmp_path / "context"
    (context / "sub").mkdir(parents=True)
    (context / "Dockerfile").write_text("FROM base:1\nENV LEVEL=two\nWORKDIR /srv\nCOPY . /srv/\n")
    (context / "sub/file").write_text("copied")
    (context / "ignored.log").write_text("x")
    (context / ".dockerignore").write_text("*.log\n")
    reference = parse_reference(f"dockerfile:{context}")
    record = ImageInstaller(store, reference).install()
    assert (record.config.workdir, record.config.env["LEVEL"]) == ("/srv", "two")
    files = {
        str(path.relative_to(store.layers / layer))
        for layer in record.layers
        for path in (store.layers / layer).rglob("*")
    }
    assert {"base", "srv/sub/file"} <= files
    assert "srv/ignored.log" not in files
    assert ImageInstaller(store, reference).key == ImageInstaller(store, reference).key
    (context / "sub/file").write_text("changed!")
    assert ImageInstaller(store, reference).install().id != record.id
    (context / "Dockerfile").write_text("FROM base:1\nCOPY nowhere /\n")
    with pytest.raises(SandboxError, match="nowhere") as raised:
        ImageInstaller(store, reference).install()
    assert raised.value.code == "task.image"


def test_missing_builder_is_a_task_fault(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    monkeypatch.setattr(dockerfile, "_PROGRAMS", ("no-such-builder",))
    with pytest.raises(SandboxError) as raised:
        ImageInstaller(store, parse_reference(f"dockerfile:{tmp_path}/Dockerfile")).install()
    assert raised.value.code == "task.image"


def test_missing_images_are_loaded_into_the_engine(
    engine: EngineImages, store: ImageStore, tmp_path: Path
) -> None:
    made = Made(tar_of(member("x", b"x")), tar_of(member("y", b"y")), Env=["B=2"])
    system = build_root_filesystem(tmp_path / "system", ("sh",))
    engine.load(Made(tar_of(member("z", b"z"))).saved(tmp_path / "other.tar", "given:1"))
    known = engine.find_id("given:1")
    given = [
        engine_loader.load_image(parse_reference(text), engine, store)
        for text in (
            f"oci:{made.layout(tmp_path / 'layout')}",
            str(made.saved(tmp_path / "saved.tar", "given:1")),
            str(system),
            "given:1",
        )
    ]
    assert given[3] == "given:1"
    assert all(engine.find_id(name) for name in given)
    assert engine.find_id(given[0]) == engine.find_id(given[1])
    assert engine.find_id("given:1") == known  # the archive has that name too, and does not take it
    assert engine_loader.load_image(parse_reference(str(system)), engine, store) == given[2]
    # By the engine, from a registry: there is none here, which is nobody's fault but the network's or the name's.
    with pytest.raises(SandboxError) as raised:
        engine_loader.load_image(parse_reference("127.0.0.1:9/none:1"), engine, store)
    assert raised.value.code in ("sandbox.image", "task.image")
    assert "none:1" in str(raised.value)
