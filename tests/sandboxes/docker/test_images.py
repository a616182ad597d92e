"""Images that the engine does not have: each is loaded once, from any source, or refused with a reason."""

import asyncio
import base64
import io
import json
import logging
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from rookery.core import SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.docker import client
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.images.installer import ImageInstaller
from rookery.sandboxes.images.progress import ImageProgress
from rookery.sandboxes.images.references import parse_reference
from rookery.sandboxes.images.store import ImageStore
from tests.sandboxes.docker.engine import BARE, PrivateEngine
from tests.sandboxes.images_store.fake_registry import PASSWORD, TOKEN, USER, FakeRegistry
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, directory, member, symlink
from tests.sandboxes.owner_process import wait_while
from tests.sandboxes.root_filesystems import build_root_filesystem, pack_root_filesystem

pytestmark = [pytest.mark.needs("docker"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]
SPEC = SandboxSpec(provider="docker", memory=64 << 20, pids=32)
MARKER = b"here\n"


@pytest.fixture(scope="module")
def image_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a directory with an image store and a Docker configuration for these tests."""
    directory = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROOKERY_IMAGES", str(directory / "store"))
        patch.setenv("DOCKER_CONFIG", str(directory / "config"))
        yield directory


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def docker(engine: PrivateEngine, image_home: Path) -> AsyncIterator[DockerProvider]:
    provider = DockerProvider(ProviderHome(folder=image_home / "home", run="images"), engine=engine.socket)
    yield provider
    await provider.close()
    assert engine.containers() == []
    assert list((image_home / "store/work").iterdir()) == []


@pytest.fixture(scope="module")
def system_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_root_filesystem(tmp_path_factory.mktemp("system_directory") / "root", ("sh", "cat", "id", "ls"))


@pytest.fixture(scope="module")
def system_tar(system_directory: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        file.add(system_directory, arcname=".")
    return out.getvalue()


def spec_for(image: object, **more: Any) -> SandboxSpec:
    return msgspec.structs.replace(SPEC, image=str(image), **more)


async def run_in_image(docker: DockerProvider, image: object, script: str, **more: Any) -> str:
    sandbox = await docker.create(spec_for(image, **more), attempt="a")
    try:
        result = await sandbox.exec(Command(argv=("sh", "-c", script)))
        return (result.stdout + result.stderr).decode()
    finally:
        await sandbox.close()


@pytest.mark.parametrize("form", ["layout", "saved", "folder", "tar", "dockerfile"])
async def test_image_files_are_loaded_into_the_engine(
    docker: DockerProvider,
    system_directory: Path,
    system_tar: bytes,
    tmp_path: Path,
    engine: PrivateEngine,
    form: str,
) -> None:
    made = BuiltImage(
        system_tar, build_tar(member("mark", MARKER)), build_tar(member("etc/.wh.of-the-image")), WorkingDir="/srv"
    )
    reports: list[ImageProgress] = []
    docker.on_image_progress = reports.append
    image: object
    if form == "layout":
        image = f"oci:{made.write_layout(tmp_path / 'layout')}"
    elif form == "saved":
        engine.tag(BARE, "mine:1")  # the engine and the archive both have this name
        image = made.save_docker_archive(tmp_path / "saved.tar", "mine:1")
    elif form == "dockerfile":
        (tmp_path / "context").mkdir()
        (tmp_path / "context/mark").write_bytes(MARKER)
        pack_root_filesystem(system_directory, tmp_path / "context/system.tar", "w")
        image = f"dockerfile:{tmp_path / 'context'}"
        lines = "FROM scratch", "ADD system.tar /", "COPY mark /mark", "WORKDIR /srv"
        (tmp_path / "context/Dockerfile").write_text("\n".join(lines))
    else:
        image = (
            pack_root_filesystem(system_directory, tmp_path / "system.tar") if form == "tar" else system_directory
        )
    before = engine.image_id(BARE)
    script = "cat /mark; pwd" if form not in ("folder", "tar") else "cat /etc/of-the-image; pwd"
    wanted = "here\n/srv\n" if form not in ("folder", "tar") else "image\n/work\n"
    assert await run_in_image(docker, image, script) == wanted
    assert engine.image_id(BARE) == before
    if form == "saved":
        assert engine.image_id("mine:1") == before
    if form in ("layout", "saved"):
        assert (
            await run_in_image(docker, image, "ls /etc") == "group\nhostname\nhosts\nmtab\npasswd\nresolv.conf\n"
        )
    steps = [one.step for one in reports]
    assert steps[-1] == "ready"
    assert ("fetching" in steps) == (form != "dockerfile")


async def test_image_is_pulled_once_with_progress(docker: DockerProvider, system_tar: bytes) -> None:
    reports: list[ImageProgress] = []
    docker.on_image_progress = reports.append
    with FakeRegistry() as registry:
        image = registry.push(
            "team/app:1", BuiltImage(system_tar, build_tar(member("mark", MARKER)), Env=["LEVEL=two"])
        )
        found = await asyncio.gather(*(docker.get_image(image) for _ in range(100)))
        assert {one["Id"] for one in found} == {found[0]["Id"]}
        assert set(Counter(registry.list_blob_requests()).values()) == {1}
    assert await run_in_image(docker, image, "cat /mark; echo $LEVEL") == "here\ntwo\n"
    assert reports[-1].step == "ready"
    assert {one.image for one in reports} == {image}


async def test_credentials_reach_the_registry_and_no_log(
    docker: DockerProvider, system_tar: bytes, image_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reports: list[ImageProgress] = []
    docker.on_image_progress = reports.append
    with FakeRegistry(auth="basic") as registry:
        image = registry.push("team/secret:1", BuiltImage(system_tar, build_tar(member("mark", MARKER))))
        with pytest.raises(SandboxError, match="docker login") as caught:
            await docker.create(spec_for(image), attempt="a")
        assert (caught.value.code, caught.value.fault) == ("task.image", "task")
        stored = {"auths": {registry.host: {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
        (image_home / "config").mkdir()
        (image_home / "config/config.json").write_text(json.dumps(stored))
        assert await run_in_image(docker, image, "cat /mark") == "here\n"
    kept = b"".join(path.read_bytes() for path in (image_home / "store").rglob("*") if path.is_file())
    for word in (PASSWORD, TOKEN, stored["auths"][registry.host]["auth"]):
        assert word not in caplog.text
        assert word not in str(caught.value)
        assert word not in repr(reports)
        assert word.encode() not in kept


async def test_unavailable_image_is_a_task_fault_with_advice(docker: DockerProvider, tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        for image in (
            f"{registry.host}/no/such:thing",
            "engine:no/such:thing",
            "UPPER:1",
            "./nowhere",
            f"oci:{tmp_path}/nowhere",
            f"dockerfile:{tmp_path}",
        ):
            with pytest.raises(SandboxError) as caught:
                await docker.create(spec_for(image), attempt="a")
            assert (caught.value.code, caught.value.fault) == ("task.image", "task"), image
            assert image.partition(":")[2].split("/")[-1] in str(caught.value)
    assert "nowhere" in docker.check(spec_for("./nowhere"))[0]
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY missing-file /\n")
    with pytest.raises(SandboxError, match="missing-file") as caught:
        await docker.create(spec_for(f"dockerfile:{tmp_path}"), attempt="a")
    assert caught.value.code == "task.image"


async def test_unreachable_registry_is_an_infra_fault(docker: DockerProvider) -> None:
    with FakeRegistry() as registry:
        image = f"{registry.host}/team/app:1"
    with pytest.raises(SandboxError, match="team/app:1") as caught:  # the registry has stopped
        await docker.create(spec_for(image), attempt="a")
    assert (caught.value.code, caught.value.fault) == ("sandbox.image", "infra")


async def test_removed_image_is_loaded_again(
    docker: DockerProvider, system_tar: bytes, tmp_path: Path, engine: PrivateEngine
) -> None:
    image = BuiltImage(system_tar, build_tar(member("mark", MARKER))).write_layout(tmp_path / "layout")
    assert await run_in_image(docker, image, "cat /mark") == "here\n"
    known = await docker.get_image(str(image))
    await docker.engine.call("DELETE", client.api_path("images", known["Id"], force="1"))
    assert await run_in_image(docker, image, "cat /mark") == "here\n"


async def test_image_of_the_store_is_loaded_with_all_layers(
    docker: DockerProvider, system_tar: bytes, image_home: Path, tmp_path: Path
) -> None:
    """An imported name is found in the store before any registry is asked."""
    second = build_tar(
        directory("srv/"),
        directory("srv/data/", 0o700, (1234, 1234)),
        member("srv/data/.wh.file"),
        directory("opt/"),
        member("opt/file", b"old\n"),
    )
    third = build_tar(
        directory("opt/"), member("opt/.wh..wh..opq"), symlink("opt/link", "new"), member("opt/new", MARKER)
    )
    passwd = build_tar(member("etc/passwd", b"root:x:0:0::/:/bin/sh\nagent:x:1234:1234::/:/bin/sh\n"))
    made = BuiltImage(system_tar, second, third, passwd, Env=["LEVEL=four"], WorkingDir="/opt", User="agent")
    store = ImageStore(image_home / "store")
    ImageInstaller(
        store,
        parse_reference(f"oci:{made.write_layout(tmp_path / 'layout')}"),
        name=parse_reference("mine/imported:1").name,
    ).install()
    script = "pwd; ls; cat link; echo $LEVEL; id -u; ls -l /srv/data | cat; ls -ldn /srv/data"
    text = await run_in_image(docker, "mine/imported:1", script, user="image")
    assert text.splitlines()[:6] == ["/opt", "link", "new", "here", "four", "1234"]
    assert [line.split()[-3:] for line in text.splitlines()[7:8]] == [["link", "->", "file"]]
    assert "drwx------ 1 1234 1234" in text


async def test_cancelled_request_does_not_cancel_the_load_but_close_does(
    engine: PrivateEngine, system_tar: bytes, image_home: Path, home: ProviderHome
) -> None:
    docker = DockerProvider(home, engine=engine.socket)
    with FakeRegistry() as registry:
        registry.busy_responses = 1 << 30  # retried for ever
        image = registry.push("team/slow:1", BuiltImage(system_tar))
        tasks = [asyncio.create_task(docker.create(spec_for(image), attempt="a")) for _ in range(3)]
        await wait_while(lambda: not registry.requests)
        tasks[0].cancel()
        assert isinstance((await asyncio.gather(tasks[0], return_exceptions=True))[0], asyncio.CancelledError)
        assert not tasks[1].done()
        async with asyncio.timeout(60):
            await docker.close()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, SandboxError | asyncio.CancelledError) for one in ended)
