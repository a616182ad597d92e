"""What podman's service does unlike Docker's engine, and the most important of what both do."""

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
from tests.sandboxes.docker import test_ends as ends
from tests.sandboxes.docker.engine import IMAGE
from tests.sandboxes.docker.test_container import (
    SPEC,
    box,
    sh,
    test_a_container_is_held_to_its_spec_and_programs_in_it_have_no_right,
    test_a_lost_container_is_reported_as_lost_at_once,
    test_a_read_only_container_has_its_working_folder,
    test_memory_and_processes_are_the_containers,
)
from tests.sandboxes.images_store.kit import Made, folder, member, tar_of
from tests.sandboxes.podman.service import PrivatePodman

__all__ = [
    "test_a_container_is_held_to_its_spec_and_programs_in_it_have_no_right",
    "test_a_lost_container_is_reported_as_lost_at_once",
    "test_a_read_only_container_has_its_working_folder",
    "test_memory_and_processes_are_the_containers",
]
pytestmark = [pytest.mark.needs("podman"), pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


async def test_a_command_that_ran_out_of_time_is_dead_with_all_that_it_started(docker: DockerProvider) -> None:
    async with box(docker) as sandbox:
        left = "setsid sh -c 'while :; do sleep 0.01; echo x >> alive; done' &"
        result = await sandbox.exec(sh(f"{left} trap '' TERM; while :; do sleep 1; done", wall=0.5))
        assert result.status == "time_limit"
        count = Command(argv=("sh", "-c", "ls -d /proc/[0-9]* | wc -l"))
        assert int((await sandbox.exec(count)).stdout) <= 4  # pid 1, and who looks
        size = Command(argv=("stat", "-c", "%s", "alive"))
        first = (await sandbox.exec(size)).stdout
        assert (await sandbox.exec(sh("sleep 0.1; stat -c %s alive"))).stdout == first


@pytest.mark.parametrize(
    "proof",
    [
        ends.test_nothing_is_left_of_an_owner_that_was_killed,
        ends.test_only_containers_of_dead_owners_are_reaped,
    ],
    ids=lambda proof: proof.__name__.removeprefix("test_"),
)
async def test_leases(proof: Callable[..., None], engine: PrivatePodman, tmp_path: Path) -> None:
    await asyncio.to_thread(proof, engine, tmp_path)


async def test_what_an_image_wants_loaded_is_not_loaded_into_pid_1_and_its_volumes_go(
    docker: DockerProvider, engine: PrivatePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOKERY_IMAGES", str(tmp_path / "store"))
    library = _library()
    made = Made(
        tar_of(folder("lib/"), member("lib/loaded.so", library, mode=0o755), folder("data/")),
        Env=["LD_PRELOAD=/lib/loaded.so", "HOME=/data"],
        Volumes={"/data": {}},
        Healthcheck={"Test": ["CMD", "/none"], "Interval": 1_000_000_000},
        Entrypoint=["/none"],
    )
    async with box(docker, image=f"oci:{made.layout(tmp_path / 'layout')}") as sandbox:
        assert sandbox._channel is not None
        maps = Path(f"/proc/{sandbox._channel.pid}/maps").read_text()
        assert "/.rookery/" in maps
        assert "loaded.so" not in maps
        assert await sandbox.read("/lib/loaded.so") == library
        assert len(client.BlockingEngineClient(engine.socket).call("GET", "/volumes")["Volumes"]) == 1
    assert not client.BlockingEngineClient(engine.socket).call("GET", "/volumes")["Volumes"]


def _library() -> bytes:
    """One that pid 1 does not have."""
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    paths = [
        line.rpartition("=> ")[2] for line in found.splitlines() if "libcrypt.so" in line or "libgcc_s" in line
    ]
    return Path(os.path.realpath(paths[0])).read_bytes()


async def test_a_container_does_not_know_the_machines_hosts(docker: DockerProvider) -> None:
    async with box(docker) as sandbox:
        hosts = (await sandbox.read("/etc/hosts")).decode()
        names = {name for line in hosts.splitlines() for name in line.split()[1:]}
        assert names == {"localhost", "ip6-localhost", "ip6-loopback", "sandbox"}
        assert await sandbox.read("/etc/resolv.conf") == b"nameserver 127.0.0.1\nsearch .\n"


async def test_containers_outlive_the_service_and_those_to_come_wait_for_it(
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
        assert (await process.wait(timeout=5)).status in ("lost", "killed", "signaled", "cancelled")
    finally:
        await provider.close()
    assert engine.containers() == []


async def test_a_system_is_given_under_its_own_name_and_takes_no_other(
    engine: PrivatePodman, tmp_path: Path
) -> None:
    service = EngineImages(BlockingEngineClient(engine.socket))
    made = []
    for at in ("one", "two"):
        (tmp_path / at).write_bytes(tar_of(member(at, b"x")))
        made.append(f"rookery-given:{at}")
        service.import_rootfs(tmp_path / at, made[-1])
    assert len({service.find_id(name) for name in made} - {""}) == 2
    assert not service.find_id("rookery-given:latest")


async def test_gpus_are_refused_since_the_service_would_leave_them_out(docker: DockerProvider) -> None:
    assert "GPUs" in docker.check(msgspec.structs.replace(SPEC, gpus=1))[0]
    assert docker.check(SPEC) == []


async def test_the_doctor_names_podman(engine: PrivatePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    (said,) = DockerProvider(ProviderHome(folder=Path(), run="check")).diagnose()
    assert said.status == "ok"
    assert "podman " in str(said)
