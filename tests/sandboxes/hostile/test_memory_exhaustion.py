"""A program that destroys its sandbox by exhausting its memory gets `memory_limit`, not `lost`."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from rookery.core import SandboxError
from rookery.sandboxes import Command
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile import lifetime
from tests.sandboxes.hostile.inspection import inspect_sandbox
from tests.sandboxes.hostile.test_hostile import SPEC, require_limits
from tests.waiting import wait_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILL = """
import os, time
while not os.path.exists("/work/go"):
    time.sleep(0.01)
held = os.memfd_create("x")
os.dup2(held, 7)
os.execv("/bin/sh", ["sh", "-c", "cat /dev/zero >&7"])
"""


async def create_sandbox(provider: LocalProvider) -> LocalSandbox:
    await require_limits(provider)
    return await provider.create(
        msgspec.structs.replace(SPEC, memory=48 << 20, disk=512 << 20, wall=60.0), attempt="hostile"
    )


async def wait_for_program(guard: int, program: str) -> list[str]:
    """Wait until a guard runs a program of this name; return the pids of the guard's children."""

    def running() -> list[str]:
        children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        names = [Path(f"/proc/{pid}/comm").read_text() for pid in children]
        return children if f"{program}\n" in names else []

    children: list[str] = await wait_until(running)
    return children


async def make_guard_the_first_oom_victim(guard: int, program: str) -> None:
    """Make a guard the OOM killer's first choice once it runs `program`: something that no program can do."""
    children = await wait_for_program(guard, program)
    Path(f"/proc/{guard}/oom_score_adj").write_text("1000")
    for pid in children:
        Path(f"/proc/{pid}/oom_score_adj").write_text("0")


async def exhaust_guard_memory(sandbox: LocalSandbox, program: str) -> None:
    await make_guard_the_first_oom_victim(inspect_sandbox(sandbox).pid, program)
    await sandbox.write("go", b"")


async def test_guard_killed_by_oom_is_a_memory_limit(provider: LocalProvider, tmp_path: Path) -> None:
    sandbox = await create_sandbox(provider)
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        running = asyncio.ensure_future(sandbox.exec(Command(argv=("python3", "-c", FILL))))
        await exhaust_guard_memory(sandbox, "python3")
        result = await running
        assert result.status == "memory_limit", result
        calls = (
            lambda: sandbox.exec(Command(argv=("true",))),
            lambda: sandbox.start(Command(argv=("true",))),
            sandbox.shell,
            lambda: sandbox.read("go"),
            lambda: sandbox.write("other", b""),
            lambda: sandbox.download("go", tmp_path / "got"),
            sandbox.snapshot,
        )
        for call in calls:
            with pytest.raises(SandboxError) as caught:
                await call()
            assert caught.value.code == "sandbox.exhausted"
    finally:
        await sandbox.close()


async def test_shell_reports_a_guard_killed_by_oom(provider: LocalProvider) -> None:
    sandbox = await create_sandbox(provider)
    try:
        shell = await sandbox.shell()
        script = "while [ ! -e /work/go ]; do sleep 0.01; done; cat /dev/zero > /dev/shm/x"
        running = asyncio.ensure_future(shell.run(script, timeout=60))
        await exhaust_guard_memory(sandbox, "bash")
        assert (await running).status == "memory_limit"
        with pytest.raises(SandboxError) as caught:
            await shell.run("true", timeout=60)
        assert caught.value.code == "sandbox.exhausted"
    finally:
        await sandbox.close()


async def test_process_reports_a_guard_killed_by_oom(provider: LocalProvider) -> None:
    sandbox = await create_sandbox(provider)
    try:
        process = await sandbox.start(Command(argv=("python3", "-c", FILL)))
        await exhaust_guard_memory(sandbox, "python3")
        assert (await process.wait(timeout=60)).status == "memory_limit"
    finally:
        await sandbox.close()


async def test_guard_killed_without_oom_is_lost(provider: LocalProvider) -> None:
    sandbox = await create_sandbox(provider)
    try:
        # An earlier program ran out of memory; the guard's death has nothing to do with that.
        take = "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 20))"
        fill = await sandbox.exec(Command(argv=("python3", "-c", take)))
        assert fill.status == "memory_limit", fill
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        running = asyncio.ensure_future(sandbox.exec(Command(argv=("sleep", "600"))))
        guard = inspect_sandbox(sandbox).pid
        await wait_for_program(guard, "sleep")
        os.kill(guard, 9)
        assert (await running).status == "lost"
        with pytest.raises(SandboxError) as caught:
            await sandbox.exec(Command(argv=("true",)))
        assert caught.value.code == "sandbox.lost"
    finally:
        await sandbox.close()


async def test_shell_reports_the_process_limit(provider: LocalProvider) -> None:
    await require_limits(provider)
    program = next(one for one in lifetime.PROGRAMS if one.name == "leaves_a_bomb")
    sandbox = await provider.create(msgspec.structs.replace(SPEC, **program.limits), attempt="hostile")
    try:
        assert (await sandbox.exec(Command(argv=program.command))).ok
        async with asyncio.timeout(60):
            while True:
                shell = await sandbox.shell()
                result = await shell.run("true", timeout=60)
                if result.status != "exited":
                    break
        assert result.status == "process_limit", result
    finally:
        await sandbox.close()
