"""Every hostile program is contained: right status, no surviving process, unchanged host."""

import os
from pathlib import Path

import msgspec
import pytest

from rookery.core import ExecResult, SandboxError, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile import bombs, lifetime, visibility
from tests.sandboxes.hostile.catalogue import DESTRUCTIVE, PROBING
from tests.sandboxes.hostile.conftest import Bait
from tests.sandboxes.hostile.inspection import SandboxFootprint, inspect_sandbox, read_host_state
from tests.sandboxes.hostile.program import MB, HostileProgram
from tests.sandboxes.owner_process import wait_while
from tests.waiting import repeat_until

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPEC = SandboxSpec(provider="local", memory=96 * MB, pids=32, disk=16 * MB, wall=120.0, output=64 << 10)

NOT_AS_ROOT = {"becomes_somebody_else", "starts_privileged_programs", "looks_for_secrets_in_environments"}
"""Programs that expect not to be root."""


def check_result(program: HostileProgram, result: ExecResult) -> None:
    assert result.status in program.status, (result.status, result.detail, result.stderr[-2000:])
    assert program.signal in (None, result.signal)
    assert b"refused: this is no sandbox" not in result.stderr
    assert len(result.stdout) <= SPEC.output + 200
    assert len(result.stderr) <= SPEC.output + 200
    if program.reports:
        assert result.stdout.decode().strip().splitlines()[-1:] == ["contained"], (result.stdout, result.stderr)
        assert result.exit_code == 0


async def create_sandbox(
    provider: LocalProvider, program: HostileProgram | None = None
) -> tuple[LocalSandbox, SandboxFootprint]:
    spec = msgspec.structs.replace(SPEC, **(program.limits if program else {}))
    sandbox = await provider.create(spec, attempt="hostile")
    return sandbox, inspect_sandbox(sandbox)


async def require_limits(provider: LocalProvider) -> None:
    """Skip the test if cgroups cannot limit sandboxes here: the machine itself would run out."""
    missing = (await (await provider.keeper()).status())["missing_controllers"]
    if missing:
        pytest.skip(f"[probed] cgroups cannot limit {missing} here")


async def wait_until_gone(footprint: SandboxFootprint) -> None:
    """Check that no process is left after `close`, and wait until the keeper has removed the lease."""
    assert footprint.list_processes() == []
    await wait_while(footprint.find_leftovers)


async def list_processes(sandbox: LocalSandbox) -> list[str]:
    """Return the processes of the sandbox, without PID 1 and the shell that lists them.

    Where Rookery is not root, a sandbox has one user only, and one of its processes is the warm interpreter.
    """
    script = """for one in /proc/[0-9]*; do
        case $one in /proc/1|/proc/$$) continue;; esac
        words=; { read -r words < $one/cmdline; } 2>/dev/null  # the shell drops the NUL bytes
        { read -r line < $one/stat && echo "$line $words"; } 2>/dev/null
    done; exit 0"""
    # The sandbox's own limit is meant for attackers; on a slow machine the shell that lists them needs longer.
    result = await sandbox.exec(Command(argv=("sh", "-c", script), wall=60.0))
    assert result.ok, result
    lines = [line for line in result.stdout.decode().splitlines() if line.rpartition(") ")[2][:1] not in "ZX"]
    warm = [line for line in lines if line.endswith("/proc/self/fd/4")]
    if warm and os.geteuid() != 0:
        lines.remove(warm[0])
    return lines


@pytest.mark.long
@pytest.mark.parametrize("program", DESTRUCTIVE, ids=lambda program: program.name)
async def test_destructive_program_is_contained(
    program: HostileProgram, provider: LocalProvider, home: ProviderHome, bait: Bait
) -> None:
    if program in bombs.PROGRAMS:
        await require_limits(provider)
    sandbox, footprint = await create_sandbox(provider, program)
    host = read_host_state(home.folder)
    try:
        assert (await sandbox.exec(Command(argv=("true",)))).ok
        result = await sandbox.exec(Command(argv=program.command, env=bait.env, warm=program.warm))
        check_result(program, result)
        if not program.leaves_processes:
            assert await list_processes(sandbox) == []
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)
    assert read_host_state(home.folder) == host


@pytest.mark.long
@pytest.mark.parametrize("program", PROBING, ids=lambda program: program.name)
async def test_probing_program_finds_nothing(
    program: HostileProgram, provider: LocalProvider, home: ProviderHome, bait: Bait, tmp_path: Path
) -> None:
    other, _ = await create_sandbox(provider)
    sandbox, footprint = await create_sandbox(provider, program)
    host = read_host_state(home.folder)
    try:
        left = "for folder in /work /tmp /dev/shm /run; do echo mine > $folder/other; done"
        assert (await other.exec(Command(argv=("sh", "-c", left)))).ok
        result = await sandbox.exec(Command(argv=program.command, env=bait.env, warm=program.warm))
        check_result(program, result)
        assert not bait.was_contacted()
        if not program.warm:  # where a sandbox has one user, the warm interpreter is a process of its own
            assert await list_processes(sandbox) == []
    finally:
        await sandbox.close()
        await other.close()
    await wait_until_gone(footprint)
    assert read_host_state(home.folder) == host


async def test_links_in_outputs_are_not_followed(provider: LocalProvider, bait: Bait, tmp_path: Path) -> None:
    program = next(p for p in visibility.PROGRAMS if p.name == "plants_links_in_its_outputs")
    sandbox, _ = await create_sandbox(provider)
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


async def test_leftover_fork_bomb_is_reported_as_process_limit(provider: LocalProvider) -> None:
    await require_limits(provider)
    program = next(p for p in lifetime.PROGRAMS if p.name == "leaves_a_bomb")
    sandbox, footprint = await create_sandbox(provider, program)
    try:
        assert (await sandbox.exec(Command(argv=program.command))).ok
        result = await repeat_until(sandbox, Command(argv=("true",)), ok=False)
        assert result.status == "process_limit", result
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)


async def test_earlier_processes_survive_the_kill_of_a_fork_bomb(provider: LocalProvider) -> None:
    fast = next(p for p in lifetime.PROGRAMS if p.name == "runs_ahead_of_a_killer_through_sessions")
    sandbox, footprint = await create_sandbox(provider, fast)
    try:
        stay = "echo $$ > kept; exec sleep 600"
        kept = await sandbox.start(Command(argv=("sh", "-c", stay)))
        left = "(env -i sleep 600 >/dev/null 2>&1 & echo $! > left); while [ ! -s kept ]; do sleep 0.01; done"
        assert (await sandbox.exec(Command(argv=("sh", "-c", left), wall=60))).ok
        check_result(fast, await sandbox.exec(Command(argv=fast.command)))
        states = "for one in $(cat kept left); do sed 's/.*) //' /proc/$one/stat | cut -c1; done"
        result = await sandbox.exec(Command(argv=("sh", "-c", states), wall=60))
        assert set(result.stdout.split()) <= {b"S", b"R"}, (
            result
        )  # stopped for a moment, they may just have continued
        assert len(result.stdout.split()) == 2
        assert (await kept.kill()).signal == 9
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)


async def test_stopped_process_stays_stopped(provider: LocalProvider) -> None:
    fast = next(p for p in lifetime.PROGRAMS if p.name == "runs_ahead_of_a_killer_through_sessions")
    sandbox, _ = await create_sandbox(provider, fast)
    try:
        left = "(sleep 600 >/dev/null 2>&1 & echo $! > left; kill -STOP $!)"
        assert (await sandbox.exec(Command(argv=("sh", "-c", left)))).ok
        check_result(fast, await sandbox.exec(Command(argv=fast.command)))
        result = await sandbox.exec(Command(argv=("sh", "-c", "sed 's/.*) //' /proc/$(cat left)/stat | cut -c1")))
        assert result.stdout == b"T\n", result
    finally:
        await sandbox.close()


async def test_full_tmpfs_is_a_memory_limit(provider: LocalProvider) -> None:
    await require_limits(provider)
    spec = msgspec.structs.replace(SPEC, memory=48 * MB, disk=256 * MB)
    sandbox = await provider.create(spec, attempt="hostile")
    try:
        fill = "cat /dev/zero > /tmp/x"
        result = await sandbox.exec(Command(argv=("sh", "-c", fill)))
        assert result.status == "memory_limit", result
    finally:
        await sandbox.close()


@pytest.mark.long
async def test_root_in_a_sandbox_is_contained(provider: LocalProvider, bait: Bait) -> None:
    spec = msgspec.structs.replace(SPEC, user="root")
    problems = provider.check(spec)
    if problems:
        pytest.skip(f"[probed] {problems}")
    sandbox = await provider.create(spec, attempt="hostile")
    try:
        for program in PROBING:
            if program.name in NOT_AS_ROOT:
                continue
            result = await sandbox.exec(
                Command(argv=program.command, env={**bait.env, "LC_CTYPE": "C.UTF-8"}, warm=program.warm)
            )
            assert result.status in program.status, (program.name, result)
            if program.reports:
                assert result.stdout.endswith(b"contained\n"), (program.name, result.stdout, result.stderr)
    finally:
        await sandbox.close()
