"""Sandboxes can be stopped, read and copied whatever hostile programs left in them."""

from pathlib import Path

import msgspec
import pytest

from rookery.sandboxes import Command
from rookery.sandboxes.local.provider import LocalProvider
from tests.sandboxes.hostile import lifetime
from tests.sandboxes.hostile.inspection import inspect_sandbox
from tests.sandboxes.hostile.test_hostile import SPEC, list_processes, require_limits
from tests.waiting import repeat_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LEASE_AND_FORKS = """
import fcntl, os, signal, time
open("file", "w").write("text")
for number in (signal.SIGIO, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
try:
    fcntl.fcntl(os.open("file", os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError:
    pass
if os.fork():
    time.sleep(0.2)
    os._exit(0)
os.setsid()
while True:
    try:
        if os.fork() == 0:
            time.sleep(600)
    except OSError:
        time.sleep(0.001)
"""
ATTRIBUTES = """
import os
open("file", "w").write("text")
for path in ("file", "."):
    for number in range(300):
        try:
            os.setxattr(path, f"user.{number:03}" + "x" * 240, b"y" * 100)
        except OSError:
            break
"""
LONG_PATH = """
import os
for _ in range(30):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
open("f" * 200, "w").write("text")
"""


async def test_kill_all_works_at_the_process_limit(provider: LocalProvider) -> None:
    await require_limits(provider)
    program = next(one for one in lifetime.PROGRAMS if one.name == "leaves_a_bomb")
    sandbox = await provider.create(msgspec.structs.replace(SPEC, **program.limits), attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=program.command))).ok
        await repeat_until(sandbox, Command(argv=("true",)), ok=False)
        await sandbox.kill_all(timeout=60)
        assert await list_processes(sandbox) == []
        await sandbox.kill_all(timeout=60)  # with nothing to kill
        assert (await sandbox.exec(Command(argv=("true",)))).ok
    finally:
        await sandbox.close()


async def test_kill_all_ends_running_commands(provider: LocalProvider) -> None:
    sandbox = await provider.create(SPEC, attempt="hostile")
    try:
        process = await sandbox.start(Command(argv=("sleep", "600")))
        shell = await sandbox.shell()
        assert (await shell.run("true", timeout=60)).ok
        await sandbox.kill_all(timeout=60)
        assert (await process.wait(timeout=60)).signal == 9
        assert (await shell.run("echo again", timeout=60)).stdout == b"again\n"
    finally:
        await sandbox.close()


async def test_files_can_be_read_despite_file_leases_and_fork_bombs(
    provider: LocalProvider, tmp_path: Path
) -> None:
    await require_limits(provider)
    sandbox = await provider.create(SPEC, attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=("python3", "-c", LEASE_AND_FORKS)))).exit_code == 0
        assert await sandbox.read("file") == b"text"
        await sandbox.kill_all(timeout=60)
        await sandbox.download("/work", tmp_path / "got")
        assert (tmp_path / "got" / "file").read_text() == "text"
    finally:
        await sandbox.close()


@pytest.mark.parametrize("program", [ATTRIBUTES, LONG_PATH], ids=["attributes", "long-path"])
async def test_unusual_files_can_be_copied(program: str, provider: LocalProvider, tmp_path: Path) -> None:
    sandbox = await provider.create(msgspec.structs.replace(SPEC, disk=64 << 20), attempt="hostile")
    try:
        before = await sandbox.snapshot()
        assert (await sandbox.exec(Command(argv=("python3", "-c", program)))).ok
        assert await sandbox.diff(before)
        await sandbox.download("/work", tmp_path / "got")
        fork = await sandbox.fork(await sandbox.snapshot())
        try:
            found = await fork.exec(Command(argv=("find", "/work", "-type", "f")))
            assert len(found.stdout.splitlines()) == 1
        finally:
            await fork.close()
    finally:
        await sandbox.close()


async def test_kill_all_of_one_user_spares_others(provider: LocalProvider) -> None:
    await require_limits(provider)
    sandbox = await provider.create(SPEC, attempt="hostile")
    try:
        if inspect_sandbox(sandbox).uid < 0:
            pytest.skip("[probed] only root can give a sandbox several users")
        kept = await sandbox.start(Command(argv=("sleep", "600"), user="1234"))
        assert (await sandbox.exec(Command(argv=("python3", "-c", LEASE_AND_FORKS)))).exit_code == 0
        await repeat_until(sandbox, Command(argv=("true",)), ok=False)
        await sandbox.kill_all(user="", timeout=60)
        (line,) = await list_processes(sandbox)
        assert "(sleep)" in line
        assert line.rpartition(") ")[2][0] in "SR"
        await sandbox.kill_all(user="1234", timeout=60)
        assert (await kept.wait(timeout=60)).signal == 9
    finally:
        await sandbox.close()
