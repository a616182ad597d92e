"""Images of a real, private container engine: lookup, builds and loading."""

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
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, member
from tests.sandboxes.root_filesystems import build_root_filesystem


@asynccontextmanager
async def _run_engine(directory: Path) -> AsyncIterator[str]:
    (directory / "root").symlink_to(peers_folder() / "sandboxes" / "root")
    (directory / "data").mkdir()
    async with private_engine(directory) as socket:
        yield socket


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run an engine for all tests of this module, on an event loop in another thread."""
    if os.geteuid() != 0 or not (peers_folder() / "sandboxes/root/usr/sbin/dockerd").exists():
        pytest.skip("probed: no private Docker engine here (root and `make peers` make one)")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = _run_engine(tmp_path_factory.mktemp("engine"))
    try:
        yield asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture
def engine(socket: str, monkeypatch: pytest.MonkeyPatch) -> EngineImages:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    return EngineImages(BlockingEngineClient(socket))


def test_engine_image_is_found_by_name_and_refreshed(
    engine: EngineImages, store: ImageStore, tmp_path: Path
) -> None:
    first = BuiltImage(build_tar(member("a", b"a")), build_tar(member("b", b"b")), Env=["A=1"], WorkingDir="/")
    (name,) = engine.load(first.save_docker_archive(tmp_path / "1.tar", "team/app:1"))
    assert name in ("team/app:1", "localhost/team/app:1")  # as podman has it
    record = ImageInstaller(store, parse_reference("team/app:1")).install()
    assert (len(record.layers), record.config.env["A"]) == (2, "1")
    assert (store.layers / record.layers[1] / "b").read_bytes() == b"b"
    second = BuiltImage(build_tar(member("c", b"c")))
    engine.load(second.save_docker_archive(tmp_path / "2.tar", "team/app:1"))
    again = ImageInstaller(store, parse_reference("team/app:1")).install()
    assert (store.layers / again.layers[0] / "c").read_bytes() == b"c"
    with pytest.raises(SandboxError) as raised:
        ImageInstaller(store, parse_reference("engine:team/app:2")).install()
    assert raised.value.code == "task.image"


def test_dockerfile_is_built_once(engine: EngineImages, store: ImageStore, tmp_path: Path) -> None:
    engine.load(
        BuiltImage(build_tar(member("base", b"base"))).save_docker_archive(tmp_path / "base.tar", "base:1")
    )
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


@pytest.mark.long
def test_missing_images_are_loaded_into_the_engine(
    engine: EngineImages, store: ImageStore, tmp_path: Path
) -> None:
    made = BuiltImage(build_tar(member("x", b"x")), build_tar(member("y", b"y")), Env=["B=2"])
    system_directory = build_root_filesystem(tmp_path / "system_directory", ("sh",))
    engine.load(BuiltImage(build_tar(member("z", b"z"))).save_docker_archive(tmp_path / "other.tar", "given:1"))
    known = engine.find_id("given:1")
    loaded = [
        engine_loader.load_image(parse_reference(text), engine, store)
        for text in (
            f"oci:{made.write_layout(tmp_path / 'layout')}",
            str(made.save_docker_archive(tmp_path / "saved.tar", "given:1")),
            str(system_directory),
            "given:1",
        )
    ]
    assert loaded[3] == "given:1"
    assert all(engine.find_id(name) for name in loaded)
    assert engine.find_id(loaded[0]) == engine.find_id(loaded[1])
    assert engine.find_id("given:1") == known  # the archive has that name, too, but does not replace it
    assert engine_loader.load_image(parse_reference(str(system_directory)), engine, store) == loaded[2]
    # The engine pulls other names from a registry, and there is none here.
    with pytest.raises(SandboxError) as raised:
        engine_loader.load_image(parse_reference("127.0.0.1:9/none:1"), engine, store)
    assert raised.value.code in ("sandbox.image", "task.image")
    assert "none:1" in str(raised.value)
