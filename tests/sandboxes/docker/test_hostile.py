"""Every hostile program that makes sense in a container is contained: right status, no surviving process."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
import pytest_asyncio

from rookery.core import ExecStatus, SandboxError, SandboxSpec
from rookery.sandboxes import Command
from rookery.sandboxes.docker import orphans
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.docker.sandbox import DockerSandbox
from tests.sandboxes.docker.engine import PrivateEngine
from tests.sandboxes.hostile import bombs
from tests.sandboxes.hostile.catalogue import DESTRUCTIVE, PROBING
from tests.sandboxes.hostile.conftest import Bait, bait
from tests.sandboxes.hostile.program import MB, HostileProgram
from tests.sandboxes.hostile.test_hostile import check_result
from tests.sandboxes.hostile.test_memory_exhaustion import FILL, make_guard_the_first_oom_victim

__all__ = ["bait"]
pytestmark = [pytest.mark.long, pytest.mark.needs("docker"), pytest.mark.asyncio(loop_scope="module")]
SPEC = SandboxSpec(provider="docker", memory=96 * MB, pids=32, disk=16 * MB, wall=5.0, output=64 << 10)
NOT_APPLICABLE = {
    "takes_every_inode": "an engine's storage does not limit the number of files",
    "makes_the_deepest_folder": "folders are not counted; that such a container can be removed is tested below",
    "takes_every_terminal": "the engine mounts terminals without a limit for one container",
    "reads_files_of_the_host": "the engine mounts /sys, read-only, and the image has files of its own",
    "sees_mounts_of_the_host": "the engine's own mounts are there to be seen",
    "looks_at_control_groups": "the engine mounts those of the container, read-only",
    "opens_kernel_settings": "the engine hides them behind empty files",
    "reads_about_the_host_in_proc": "the engine mounts /proc, and hides what it chooses",
    "changes_device_files_of_the_host": "the engine makes device files for each container",
    "writes_to_proc": "the engine mounts /proc writable, and needs that itself",
    "becomes_somebody_else": "who is who in a container is the engine's setting (userns-remap)",
}
"""Programs that do not apply to containers, and why."""
ADDITIONAL_STATUSES: dict[str, tuple[ExecStatus, ...]] = {
    # The file size limit applies in every file system, and is reached before the memory limit.
    "takes_memory_through_memfd": ("exited",),
    "fills_shared_memory": ("exited",),
    "lowers_its_oom_score_and_fills_a_tmpfs": ("disk_limit",),
    "lowers_its_oom_score_and_fills_a_memfd": ("exited", "disk_limit"),
}
RUN_ALL = bool(os.environ.get("ROOKERY_DOCKER_ALL"))
SELECTED = {
    "forks_for_ever", "forks_into_sessions_of_their_own", "starts_threads_for_ever", "takes_memory_in_one_process",
    "takes_memory_in_many_processes", "takes_memory_through_sysv", "fills_the_disk", "floods_from_many_processes",
    "fills_the_disk_from_many_processes", "lowers_its_oom_score_and_fills_a_tmpfs", "spins_on_every_core",
    "lowers_its_oom_score_and_fills_a_memfd", "takes_netlink_sockets_from_many_threads",
    "raises_its_limits", "leaves_a_bomb", "leaves_a_daemon_that_writes", "leaves_a_fork_chain",
}  # fmt: skip
"""Programs that need their own container and run by default; the others run with ROOKERY_DOCKER_ALL=1. The same
guard contains all of them in local sandboxes."""


def needs_own_container(program: HostileProgram) -> bool:
    """Return whether a program may leave its container unusable for others."""
    return program in bombs.PROGRAMS or program.leaves_processes or bool(program.limits)


PROGRAMS = [
    program
    for program in (*DESTRUCTIVE, *PROBING)
    if program.name not in NOT_APPLICABLE
    and (RUN_ALL or not needs_own_container(program) or program.name in SELECTED)
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_sandbox(docker: DockerProvider) -> AsyncIterator[DockerSandbox]:
    """Yield a sandbox for programs that must leave it usable."""
    sandbox = await docker.create(SPEC, attempt="hostile")
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def list_processes(sandbox: DockerSandbox) -> list[str]:
    """Return the processes of the container, without pid 1 and the shell that lists them."""
    script = """for one in /proc/[0-9]*; do
        [ $one = /proc/1 ] || [ $one = /proc/$$ ] || { read -r line < $one/stat && echo "$line"; } 2>/dev/null
    done; exit 0"""
    result = await sandbox.exec(Command(argv=("sh", "-c", script), wall=60.0))
    assert result.ok, result
    return [line for line in result.stdout.decode().splitlines() if line.rpartition(") ")[2][:1] not in "ZX"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_hostile_program_is_contained(
    program: HostileProgram, docker: DockerProvider, shared_sandbox: DockerSandbox, bait: Bait
) -> None:
    spec = msgspec.structs.replace(SPEC, **program.limits)
    sandbox = await docker.create(spec, attempt="hostile") if needs_own_container(program) else shared_sandbox
    try:
        result = await sandbox.exec(Command(argv=program.command, env=bait.env))
        check_result(
            replace(program, status=(*program.status, *ADDITIONAL_STATUSES.get(program.name, ()))), result
        )
        assert not bait.was_contacted()
        if not program.leaves_processes:
            assert await list_processes(sandbox) == []
    finally:
        if sandbox is not shared_sandbox:
            await sandbox.close()


async def test_container_with_a_too_deep_tree_is_removed(docker: DockerProvider, engine: PrivateEngine) -> None:
    sandbox = await docker.create(SPEC, attempt="hostile")
    deep = "import os\nfor _ in range(12_000):\n    os.mkdir('d')\n    os.chdir('d')"
    try:
        assert (await sandbox.exec(Command(argv=("python3", "-c", deep), wall=60.0))).ok
    finally:
        await sandbox.close()
    assert orphans.container_name(sandbox.id) not in engine.names()


async def test_guard_killed_by_oom_is_a_memory_limit(docker: DockerProvider) -> None:
    spec = msgspec.structs.replace(SPEC, memory=64 * MB, disk=512 * MB, wall=60.0)
    sandbox = await docker.create(spec, attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        running = asyncio.ensure_future(sandbox.exec(Command(argv=("python3", "-c", FILL))))
        assert sandbox.channel is not None
        await make_guard_the_first_oom_victim(sandbox.channel.pid, "python3")
        await sandbox.write("go", b"")
        result = await running
        assert result.status == "memory_limit", result
        with pytest.raises(SandboxError) as caught:
            await sandbox.read("go")
        assert caught.value.code == "sandbox.exhausted"
    finally:
        await sandbox.close()


async def test_kill_all_works_at_the_containers_process_limit(
    docker: DockerProvider,
) -> None:
    program = next(one for one in DESTRUCTIVE if one.name == "leaves_a_bomb")
    sandbox = await docker.create(msgspec.structs.replace(SPEC, **program.limits), attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=program.command))).ok
        await sandbox.kill_all(timeout=60)
        assert await list_processes(sandbox) == []
    finally:
        await sandbox.close()
