"""Behaviour of Podman that differs from Docker's engine, and the most important common behaviour."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.docker import client
from rookery.sandboxes.docker.client import BlockingEngineClient
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.images.engine_images import EngineImages
from tests.sandboxes.docker import test_failures as failures
from tests.sandboxes.docker.engine import IMAGE
from tests.sandboxes.docker.test_container import (
    SPEC,
    open_sandbox,
    sh,
    test_container_has_its_limits_and_no_privileges,
    test_killed_container_is_reported_as_lost,
    test_memory_and_process_limits_apply_to_the_container,
    test_read_only_container_has_a_writable_workdir,
)
from tests.sandboxes.images_store.image_builder import BuiltImage, build_tar, directory, member
from tests.sandboxes.podman.service import PrivatePodman

__all__ = [
    "test_container_has_its_limits_and_no_privileges",
    "test_killed_container_is_reported_as_lost",
    "test_memory_and_process_limits_apply_to_the_container",
    "test_read_only_container_has_a_writable_workdir",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


async def test_time_limit_kills_the_whole_tree(docker: DockerProvider) -> None:
    async with open_sandbox(docker) as sandbox:
        left = "setsid sh -c 'while :; do sleep 0.01; echo x >> alive; done' &"
        result = await sandbox.exec(sh(f"{left} trap '' TERM; while :; do sleep 1; done", wall=0.5))
        assert result.status == "time_limit"
        count = Command(argv=("sh", "-c", "ls -d /proc/[0-9]* | wc -l"))
        assert int((await sandbox.exec(count)).stdout) <= 4  # pid 1 and the shell with its pipeline
        size = Command(argv=("stat", "-c", "%s", "alive"))
        first = (await sandbox.exec(size)).stdout
        assert (await sandbox.exec(sh("sleep 0.1; stat -c %s alive"))).stdout == first


@pytest.mark.parametrize(
    "check",
    [
        failures.test_killed_owner_leaves_nothing_after_reaping,
        failures.test_only_containers_of_dead_owners_are_reaped,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
async def test_leases_of_dead_owners_are_reaped(
    check: Callable[..., None], engine: PrivatePodman, tmp_path: Path
) -> None:
    await asyncio.to_thread(check, engine, tmp_path)


async def test_preloads_of_an_image_do_not_affect_pid1_and_volumes_are_removed(
    docker: DockerProvider, engine: PrivatePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_IMAGES", str(tmp_path / "store"))
    library = _read_foreign_library()
    made = BuiltImage(
        build_tar(directory("lib/"), member("lib/loaded.so", library, mode=0o755), directory("data/")),
        Env=["LD_PRELOAD=/lib/loaded.so", "HOME=/data"],
        Volumes={"/data": {}},
        Healthcheck={"Test": ["CMD", "/none"], "Interval": 1_000_000_000},
        Entrypoint=["/none"],
    )
    async with open_sandbox(docker, image=f"oci:{made.write_layout(tmp_path / 'layout')}") as sandbox:
        assert sandbox.channel is not None
        maps = Path(f"/proc/{sandbox.channel.pid}/maps").read_text()
        assert "/.rookery/" in maps
        assert "loaded.so" not in maps
        assert await sandbox.read("/lib/loaded.so") == library
        assert len(client.BlockingEngineClient(engine.socket).call("GET", "/volumes")["Volumes"]) == 1
    assert not client.BlockingEngineClient(engine.socket).call("GET", "/volumes")["Volumes"]


def _read_foreign_library() -> bytes:
    """Return a shared library that pid 1 does not load."""
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    paths = [
        line.rpartition("=> ")[2] for line in found.splitlines() if "libcrypt.so" in line or "libgcc_s" in line
    ]
    return Path(os.path.realpath(paths[0])).read_bytes()


async def test_container_does_not_see_the_hosts_name_settings(docker: DockerProvider) -> None:
    async with open_sandbox(docker) as sandbox:
        hosts = (await sandbox.read("/etc/hosts")).decode()
        names = {name for line in hosts.splitlines() for name in line.split()[1:]}
        assert names == {"localhost", "ip6-localhost", "ip6-loopback", "sandbox"}
        assert await sandbox.read("/etc/resolv.conf") == b"nameserver 127.0.0.1\nsearch .\n"


async def test_containers_outlive_the_service_and_creations_wait_for_it(
    home: ProviderHome, engine: PrivatePodman
) -> None:
    provider = DockerProvider(home, image=IMAGE, engine=engine.socket)
    try:
        sandbox = await provider.create(SPEC, attempt="a")
        process = await sandbox.start(Command(argv=("cat",)))
        engine.kill_service()
        assert (await sandbox.exec(Command(argv=("echo", "x")))).stdout == b"x\n"
        other = await provider.create(SPEC, attempt="b")
        assert (await other.exec(Command(argv=("true",)))).ok
        assert len(engine.containers()) == 2
        engine.kill_service()
        await sandbox.close()
        assert (await process.wait(timeout=60)).status in ("lost", "killed", "signaled", "cancelled")
    finally:
        await provider.close()
    assert engine.containers() == []


async def test_imported_root_filesystem_gets_only_its_name(engine: PrivatePodman, tmp_path: Path) -> None:
    service = EngineImages(BlockingEngineClient(engine.socket))
    made = []
    for at in ("one", "two"):
        (tmp_path / at).write_bytes(build_tar(member(at, b"x")))
        made.append(f"rookery-given:{at}")
        service.import_rootfs(tmp_path / at, made[-1])
    assert len({service.find_id(name) for name in made} - {""}) == 2
    assert not service.find_id("rookery-given:latest")


async def test_gpus_are_refused_by_podman(docker: DockerProvider) -> None:
    assert "GPUs" in docker.check(msgspec.structs.replace(SPEC, gpus=1))[0]
    assert docker.check(SPEC) == []


async def test_doctor_names_podman(engine: PrivatePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    (report,) = DockerProvider(ProviderHome(folder=Path(), run="check")).diagnose()
    assert report.status == "ok"
    assert "podman " in str(report)
