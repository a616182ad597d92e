"""Every hostile program ends contained: with the right status, without a survivor, on an unchanged host."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile import bombs, lifetime, visibility
from tests.sandboxes.hostile.all import CURIOUS, LETHAL
from tests.sandboxes.hostile.conftest import Bait
from tests.sandboxes.hostile.look import Box, look_at, look_at_host
from tests.sandboxes.hostile.stage import MB, Program

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPEC = SandboxSpec(provider="local", memory=96 * MB, pids=32, disk=16 * MB, wall=20.0, output=64 << 10)

OF_A_USER = {"becomes_somebody_else", "starts_privileged_programs", "looks_for_secrets_in_environments"}
"""Programs that expect not to be root."""


def check(program: Program, result: ExecResult) -> None:
    assert result.status in program.status, (result.status, result.detail, result.stderr[-2000:])
    assert program.signal in (None, result.signal)
    assert b"refused: this is no sandbox" not in result.stderr
    assert len(result.stdout) <= SPEC.output + 200
    assert len(result.stderr) <= SPEC.output + 200
    if program.says:
        assert result.stdout.decode().strip().splitlines()[-1:] == ["contained"], (result.stdout, result.stderr)
        assert result.exit_code == 0


async def create(provider: LocalProvider, program: Program | None = None) -> tuple[LocalSandbox, Box]:
    spec = msgspec.structs.replace(SPEC, **(program.limits if program else {}))
    sandbox = await provider.create(spec, attempt="hostile")
    return sandbox, look_at(sandbox)


async def limited(provider: LocalProvider) -> None:
    """Without groups it would not be the box alone that runs out."""
    missing = (await (await provider.keeper()).status())["missing_controllers"]
    if missing:
        pytest.skip(f"[probed] no group of ours can limit {missing} here")


async def gone(box: Box) -> None:
    """Its processes are gone when `close` returns; its groups and lease as soon as the keeper has seen it."""
    assert box.processes() == []
    async with asyncio.timeout(60):
        while box.left():
            await asyncio.sleep(0.005)


async def running(sandbox: LocalSandbox) -> list[str]:
    """Return the processes of the sandbox, without PID 1 and the shell that looks.

    Where Rookery is not root, a sandbox has one user only, and one of its processes is the warm interpreter.
    """
    script = """for one in /proc/[0-9]*; do
        case $one in /proc/1|/proc/$$) continue;; esac
        words=; { read -r words < $one/cmdline; } 2>/dev/null  # the shell drops the NUL bytes
        { read -r line < $one/stat && echo "$line $words"; } 2>/dev/null
    done; exit 0"""
    # The sandbox's own limit is meant for attackers; on a slow machine the shell that looks needs longer.
    result = await sandbox.exec(Command(argv=("sh", "-c", script), wall=60.0))
    assert result.ok, result
    lines = [line for line in result.stdout.decode().splitlines() if line.rpartition(") ")[2][:1] not in "ZX"]
    warm = [line for line in lines if line.endswith("/proc/self/fd/4")]
    if warm and os.geteuid() != 0:
        lines.remove(warm[0])
    return lines


@pytest.mark.parametrize("program", LETHAL, ids=lambda program: program.name)
async def test_a_lethal_program_ends_contained(
    program: Program, boxes: LocalProvider, ground: ProviderHome, bait: Bait
) -> None:
    if program in bombs.PROGRAMS:
        await limited(boxes)
    sandbox, box = await create(boxes, program)
    host = look_at_host(ground.folder)
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        result = await sandbox.exec(Command(argv=program.command, env=bait.env, warm=program.warm))
        check(program, result)
        if not program.leaves:
            assert await running(sandbox) == []
    finally:
        await sandbox.close()
    await gone(box)
    assert look_at_host(ground.folder) == host


@pytest.mark.parametrize("program", CURIOUS, ids=lambda program: program.name)
async def test_a_curious_program_finds_nothing(
    program: Program, boxes: LocalProvider, ground: ProviderHome, bait: Bait, tmp_path: Path
) -> None:
    other, _ = await create(boxes)
    sandbox, box = await create(boxes, program)
    host = look_at_host(ground.folder)
    try:
        left = "for folder in /work /tmp /dev/shm /run; do echo mine > $folder/other; done"
        assert (await other.exec(Command(argv=("sh", "-c", left)))).ok
        result = await sandbox.exec(Command(argv=program.command, env=bait.env, warm=program.warm))
        check(program, result)
        assert not bait.touched()
        if not program.warm:  # where a sandbox has one user, the warm interpreter is a process of its own
            assert await running(sandbox) == []
    finally:
        await sandbox.close()
        await other.close()
    await gone(box)
    assert look_at_host(ground.folder) == host


async def test_links_in_outputs_lead_nowhere(boxes: LocalProvider, bait: Bait, tmp_path: Path) -> None:
    program = next(p for p in visibility.PROGRAMS if p.name == "plants_links_in_its_outputs")
    sandbox, _ = await create(boxes)
    try:
        assert (await sandbox.exec(Command(argv=program.command, env=bait.env, warm=program.warm))).ok
        for name in ("absolute", "relative", "folder/secret", "magic", "descriptor", "loop", "fifo", "socket"):
            with pytest.raises((OSError, SandboxError)):
                await sandbox.read(f"outputs/{name}", timeout=5)
        with pytest.raises((OSError, SandboxError)):
            await sandbox.read("outputs/giant", limit=MB, timeout=5)
        assert await sandbox.read("outputs/sub/good") == b"good"
        with pytest.raises((OSError, SandboxError)):
            await sandbox.download("outputs", tmp_path / "got", limit=MB, timeout=10)
        for path in (tmp_path / "got").rglob("*"):
            assert path.is_symlink() or b"secret of the host" not in (path.read_bytes() if path.is_file() else b"")
    finally:
        await sandbox.close()


async def test_a_bomb_that_was_left_behind_is_the_next_commands_limit(boxes: LocalProvider) -> None:
    await limited(boxes)
    program = next(p for p in lifetime.PROGRAMS if p.name == "leaves_a_bomb")
    sandbox, box = await create(boxes, program)
    try:
        assert (await sandbox.exec(Command(argv=program.command))).ok
        async with asyncio.timeout(20):
            while (result := await sandbox.exec(Command(argv=("true",)))).ok:
                await asyncio.sleep(0.01)
        assert result.status == "process_limit", result
    finally:
        await sandbox.close()
    await gone(box)


async def test_what_an_earlier_command_left_survives_the_kill_of_a_bomb(boxes: LocalProvider) -> None:
    fast = next(p for p in lifetime.PROGRAMS if p.name == "runs_ahead_of_a_killer_through_sessions")
    sandbox, box = await create(boxes, fast)
    try:
        stay = "echo $$ > kept; exec sleep 600"
        kept = await sandbox.start(Command(argv=("sh", "-c", stay)))
        left = "(env -i sleep 600 >/dev/null 2>&1 & echo $! > left); while [ ! -s kept ]; do sleep 0.01; done"
        assert (await sandbox.exec(Command(argv=("sh", "-c", left)))).ok
        check(fast, await sandbox.exec(Command(argv=fast.command)))
        states = "for one in $(cat kept left); do sed 's/.*) //' /proc/$one/stat | cut -c1; done"
        result = await sandbox.exec(Command(argv=("sh", "-c", states)))
        assert set(result.stdout.split()) <= {b"S", b"R"}, result  # held for a moment, they may just go on
        assert len(result.stdout.split()) == 2
        assert (await kept.kill()).signal == 9
    finally:
        await sandbox.close()
    await gone(box)


async def test_a_process_that_was_stopped_on_purpose_stays_so(boxes: LocalProvider) -> None:
    fast = next(p for p in lifetime.PROGRAMS if p.name == "runs_ahead_of_a_killer_through_sessions")
    sandbox, _ = await create(boxes, fast)
    try:
        left = "(sleep 600 >/dev/null 2>&1 & echo $! > left; kill -STOP $!)"
        assert (await sandbox.exec(Command(argv=("sh", "-c", left)))).ok
        check(fast, await sandbox.exec(Command(argv=fast.command)))
        result = await sandbox.exec(Command(argv=("sh", "-c", "sed 's/.*) //' /proc/$(cat left)/stat | cut -c1")))
        assert result.stdout == b"T\n", result
    finally:
        await sandbox.close()


async def test_a_file_system_full_of_memory_does_not_cost_the_sandbox(boxes: LocalProvider) -> None:
    await limited(boxes)
    spec = msgspec.structs.replace(SPEC, memory=48 * MB, disk=256 * MB)
    sandbox = await boxes.create(spec, attempt="hostile")
    try:
        fill = "cat /dev/zero > /tmp/x"
        result = await sandbox.exec(Command(argv=("sh", "-c", fill)))
        assert result.status == "memory_limit", result
    finally:
        await sandbox.close()


async def test_root_of_a_sandbox_is_contained_too(boxes: LocalProvider, bait: Bait) -> None:
    spec = msgspec.structs.replace(SPEC, user="root")
    problems = boxes.check(spec)
    if problems:
        pytest.skip(f"[probed] {problems}")
    sandbox = await boxes.create(spec, attempt="hostile")
    try:
        for program in CURIOUS:
            if program.name in OF_A_USER:
                continue
            result = await sandbox.exec(
                Command(argv=program.command, env={**bait.env, "LC_CTYPE": "C.UTF-8"}, warm=program.warm)
            )
            assert result.status in program.status, (program.name, result)
            if program.says:
                assert result.stdout.endswith(b"contained\n"), (program.name, result.stdout, result.stderr)
    finally:
        await sandbox.close()
