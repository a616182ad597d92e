"""Every hostile program that makes sense in a container ends contained: the right status, and no survivor."""

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
from tests.sandboxes.hostile.all import CURIOUS, LETHAL
from tests.sandboxes.hostile.conftest import Bait, bait
from tests.sandboxes.hostile.stage import MB, Program
from tests.sandboxes.hostile.test_exhausted import FILL, make_the_guard_the_first_to_die
from tests.sandboxes.hostile.test_hostile import check

__all__ = ["bait"]
pytestmark = [pytest.mark.long, pytest.mark.needs("docker"), pytest.mark.asyncio(loop_scope="module")]
SPEC = SandboxSpec(provider="docker", memory=96 * MB, pids=32, disk=16 * MB, wall=5.0, output=64 << 10)
OTHERS = {
    "takes_every_inode": "an engine's storage does not limit the number of files",
    "makes_the_deepest_folder": "folders are not counted; that such a container can be removed is tested below",
    "takes_every_terminal": "the engine mounts terminals without a limit for one container",
    "reads_files_of_the_host": "the engine mounts /sys, read-only, and the image has files of its own",
    "sees_mounts_of_the_host": "the engine's own mounts are there to be seen",
    "looks_at_control_groups": "the engine mounts those of the container, read-only",
    "opens_switches_of_the_kernel": "the engine hides them behind empty files",
    "reads_about_the_host_in_proc": "the engine mounts /proc, and hides what it chooses",
    "changes_device_files_of_the_host": "the engine makes device files for each container",
    "writes_to_proc": "the engine mounts /proc writable, and needs that itself",
    "becomes_somebody_else": "who is who in a container is the engine's setting (userns-remap)",
}
"""Programs that an engine's containers do not contain, or not in that way, and why."""
AS_WELL: dict[str, tuple[ExecStatus, ...]] = {
    # One file is held to the disk's size, in whatever file system it lies, before memory is short.
    "takes_memory_through_memfd": ("exited",),
    "fills_shared_memory": ("exited",),
    "makes_itself_dear_and_the_first_process_pay": ("disk_limit",),
    "lowers_its_oom_score_and_fills_a_memfd": ("exited", "disk_limit"),
}
ALL = bool(os.environ.get("ROOKERY_DOCKER_ALL"))
BOMBS = {
    "forks_for_ever", "forks_into_sessions_of_their_own", "starts_threads_for_ever", "takes_memory_in_one_process",
    "takes_memory_in_many_processes", "takes_memory_through_sysv", "fills_the_disk", "floods_from_many_processes",
    "fills_the_disk_from_many_processes", "makes_itself_dear_and_the_first_process_pay", "spins_on_every_core",
    "lowers_its_oom_score_and_fills_a_memfd", "takes_netlink_sockets_from_many_threads",
    "raises_its_limits", "leaves_a_bomb", "leaves_a_daemon_that_writes", "leaves_a_fork_chain",
}  # fmt: skip
"""Of those that each need a container of their own; the rest with ROOKERY_DOCKER_ALL=1: the same guard holds them
in local boxes, where all of them run."""


def alone(program: Program) -> bool:
    """Whether it may leave its container unfit for others."""
    return program in bombs.PROGRAMS or program.leaves or bool(program.limits)


PROGRAMS = [
    program
    for program in (*LETHAL, *CURIOUS)
    if program.name not in OTHERS and (ALL or not alone(program) or program.name in BOMBS)
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(docker: DockerProvider) -> AsyncIterator[DockerSandbox]:
    """For programs that are to leave a sandbox as it was."""
    sandbox = await docker.create(SPEC, attempt="hostile")
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def running(sandbox: DockerSandbox) -> list[str]:
    """Processes of the container but pid 1 and who looks."""
    script = """for one in /proc/[0-9]*; do
        [ $one = /proc/1 ] || [ $one = /proc/$$ ] || { read -r line < $one/stat && echo "$line"; } 2>/dev/null
    done; exit 0"""
    result = await sandbox.exec(Command(argv=("sh", "-c", script), wall=60.0))
    assert result.ok, result
    return [line for line in result.stdout.decode().splitlines() if line.rpartition(") ")[2][:1] not in "ZX"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_hostile_program_ends_contained(
    program: Program, docker: DockerProvider, shared: DockerSandbox, bait: Bait
) -> None:
    spec = msgspec.structs.replace(SPEC, **program.limits)
    sandbox = await docker.create(spec, attempt="hostile") if alone(program) else shared
    try:
        result = await sandbox.exec(Command(argv=program.command, env=bait.env))
        check(replace(program, status=(*program.status, *AS_WELL.get(program.name, ()))), result)
        assert not bait.touched()
        if not program.leaves:
            assert await running(sandbox) == []
    finally:
        if sandbox is not shared:
            await sandbox.close()


async def test_a_tree_that_an_engine_cannot_remove_does_not_keep_its_container(
    docker: DockerProvider, engine: PrivateEngine
) -> None:
    sandbox = await docker.create(SPEC, attempt="hostile")
    deep = "import os\nfor _ in range(12_000):\n    os.mkdir('d')\n    os.chdir('d')"
    try:
        assert (await sandbox.exec(Command(argv=("python3", "-c", deep), wall=60.0))).ok
    finally:
        await sandbox.close()
    assert orphans.container_name(sandbox.id) not in engine.names()


async def test_a_guard_killed_for_want_of_memory_is_the_commands_memory_limit(docker: DockerProvider) -> None:
    spec = msgspec.structs.replace(SPEC, memory=64 * MB, disk=512 * MB, wall=60.0)
    sandbox = await docker.create(spec, attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        running = asyncio.ensure_future(sandbox.exec(Command(argv=("python3", "-c", FILL))))
        assert sandbox._channel is not None
        await make_the_guard_the_first_to_die(sandbox._channel.pid, "python3")
        await sandbox.write("go", b"")
        result = await running
        assert result.status == "memory_limit", result
        with pytest.raises(SandboxError) as caught:
            await sandbox.read("go")
        assert caught.value.code == "sandbox.exhausted"
    finally:
        await sandbox.close()


async def test_all_processes_of_a_container_can_be_killed_when_a_program_took_every_one(
    docker: DockerProvider,
) -> None:
    program = next(one for one in LETHAL if one.name == "leaves_a_bomb")
    sandbox = await docker.create(msgspec.structs.replace(SPEC, **program.limits), attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=program.command))).ok
        await sandbox.kill_all(timeout=60)
        assert await running(sandbox) == []
    finally:
        await sandbox.close()
