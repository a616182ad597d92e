"""Warm interpreters leak nothing of pid 1, and users of one sandbox are isolated from each other."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rookery.core import SandboxError
from rookery.sandboxes import Command, ProviderHome, guarded_sandbox
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.hostile import bombs, warm_programs
from tests.sandboxes.hostile.catalogue import PROBING
from tests.sandboxes.hostile.conftest import Bait
from tests.sandboxes.hostile.inspection import read_host_state
from tests.sandboxes.hostile.program import HostileProgram, isolation_check
from tests.sandboxes.hostile.test_hostile import (
    check_result,
    create_sandbox,
    list_processes,
    require_limits,
    wait_until_gone,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
INTERPRETER = Path(sys.base_prefix).resolve() / "bin"
PATH = f"{INTERPRETER}:/usr/local/bin:/usr/bin:/bin"
needs_user_mapping = pytest.mark.skipif(
    os.geteuid() != 0, reason="[probed] without root, sandboxes have a single user"
)
SEED = Command(argv=("python3", "-c", "print(hash('x'))"), env={"PATH": PATH}, warm=True)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(provider: LocalProvider) -> AsyncIterator[LocalSandbox]:
    made, footprint = await create_sandbox(provider)
    yield made
    await made.close()
    await wait_until_gone(footprint)


async def check_cold_and_warm(
    sandbox: LocalSandbox, program: HostileProgram, user: str | None = None, **env: str
) -> None:
    for warm in (False, True):
        command = Command(argv=program.command, env={"PATH": PATH, **env}, user=user, warm=warm)
        check_result(program, await sandbox.exec(command))


@needs_user_mapping
async def test_commands_use_the_warm_interpreter(sandbox: LocalSandbox) -> None:
    assert (await sandbox.exec(SEED)).stdout == (await sandbox.exec(SEED)).stdout


@pytest.mark.parametrize("program", [*PROBING, *warm_programs.WARM], ids=lambda program: program.name)
async def test_warm_probing_program_finds_nothing(
    program: HostileProgram, provider: LocalProvider, home: ProviderHome, bait: Bait
) -> None:
    sandbox, footprint = await create_sandbox(provider, program)
    host = read_host_state(home.folder)
    try:
        command = Command(argv=program.command, env={**bait.env, "PATH": PATH}, warm=program.argv[0] == "python3")
        check_result(program, await sandbox.exec(command))
        assert not bait.was_contacted()
        assert await list_processes(sandbox) == []
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)
    assert read_host_state(home.folder) == host


@pytest.mark.long
@pytest.mark.parametrize("program", [p for p in bombs.PROGRAMS if p.argv[0] == "python3"], ids=lambda p: p.name)
async def test_warm_resource_bomb_is_contained(
    program: HostileProgram, provider: LocalProvider, home: ProviderHome
) -> None:
    await require_limits(provider)
    sandbox, footprint = await create_sandbox(provider, program)
    host = read_host_state(home.folder)
    try:
        result = await sandbox.exec(Command(argv=program.command, env={"PATH": PATH}, warm=True))
        check_result(program, result)
        if not program.leaves_processes:
            assert await list_processes(sandbox) == []
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)
    assert read_host_state(home.folder) == host


@pytest.mark.long
@pytest.mark.parametrize("size", [40, 100_000], ids=["small", "large"])
async def test_input_of_a_command_is_not_visible_to_later_ones(sandbox: LocalSandbox, size: int) -> None:
    """Arguments, variables and input must not stay in the memory that warm commands are forked from."""
    secret = f"secret-{os.urandom(16).hex()}"
    padded = secret.ljust(size, ".")
    inputs = {"argv": ("sh", "-c", "exec sleep 600", padded), "env": {"GIVEN": padded}, "stdin": padded.encode()}
    for user in (None, "root") if os.geteuid() == 0 else (None,):
        command = Command(**inputs, user=user, wall=0.1)  # type: ignore[arg-type]
        assert (await sandbox.exec(command)).status == "time_limit"
        warm = Command(
            argv=("python3", "-c", "pass", padded), env={"GIVEN": padded, "PATH": PATH}, user=user, warm=True
        )
        assert (await sandbox.exec(warm)).ok
    shell = await sandbox.shell()
    assert (await shell.run(f"export GIVEN={secret}; sleep 600", timeout=0.3)).status == "time_limit"
    await shell.close()
    inverted = bytes(byte ^ 0x55 for byte in secret.removeprefix("secret-").encode()).hex()
    program = isolation_check("looks_for_a_secret", warm_programs.MEMORY_SCAN)
    for one in (SEED, SEED):
        await sandbox.exec(one)
    command = Command(argv=program.command, env={"PATH": PATH, "INVERTED": inverted}, warm=True)
    check_result(program, await sandbox.exec(command))
    own = msgspec.structs.replace(command, env={**command.env, "GIVEN": secret})
    assert b"ESCAPED" in (await sandbox.exec(own)).stdout  # the scan finds a secret that is there


# ---- users


@pytest.mark.long
@needs_user_mapping
@pytest.mark.parametrize("user", ["root", "nobody", "4711", None])
async def test_program_has_no_privileges_as_any_user(sandbox: LocalSandbox, user: str | None) -> None:
    await check_cold_and_warm(sandbox, warm_programs.WARM[1], user)
    await check_cold_and_warm(sandbox, isolation_check("reaches_for_pid_1", warm_programs.ATTACK_PID_1), user)


@needs_user_mapping
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("one", "other"), [("nobody", None), (None, "nobody"), ("root", None), (None, "root")])
async def test_users_are_isolated_from_each_other(
    sandbox: LocalSandbox, one: str | None, other: str | None, warm: bool
) -> None:
    file = "/tmp/theirs"
    text = f"import os, time; os.umask(0o77); open('{file}', 'w'); print(os.getpid(), flush=True); time.sleep(600)"
    process = await sandbox.start(Command(argv=("python3", "-c", text), env={"PATH": PATH}, user=one, warm=warm))
    _, output = await anext(process.output())
    await check_cold_and_warm(
        sandbox,
        isolation_check("reaches_for_another", warm_programs.ATTACK_OTHER_USER),
        other,
        PID=str(int(output)),
        THEIRS=file,
    )
    assert (await process.kill()).signal == 9
    assert await list_processes(sandbox) == []


@pytest.mark.long
@needs_user_mapping
async def test_process_tree_of_another_user_is_killed(provider: LocalProvider) -> None:
    sandbox, footprint = await create_sandbox(provider)
    tree = (
        "import os, time\nfor _ in range(3): os.fork()\nos.setsid() if os.getppid() != 1 else 0\ntime.sleep(600)"
    )
    try:
        for warm in (False, True):
            kept = await sandbox.start(Command(argv=("sleep", "600"), user="nobody"))
            command = Command(argv=("python3", "-c", tree), env={"PATH": PATH}, user="4711", wall=1.0, warm=warm)
            assert (await sandbox.exec(command)).status == "time_limit"
            assert len(await list_processes(sandbox)) == 1
            await kept.kill()
            assert await list_processes(sandbox) == []
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)


@needs_user_mapping
async def test_working_directory_is_entered_as_the_commands_user(sandbox: LocalSandbox) -> None:
    made = "mkdir -m 700 private && mkdir private/bin && cp /bin/true private/bin/mine && mkdir -m 711 through"
    assert (await sandbox.exec(Command(argv=("sh", "-c", made)))).ok
    for warm in (False, True):
        command = Command(argv=("python3", "-c", "pass"), env={"PATH": PATH}, cwd="private", warm=warm)
        assert (await sandbox.exec(command)).ok
        refused = await sandbox.exec(msgspec.structs.replace(command, user="nobody"))
        assert (refused.exit_code, "private" in refused.detail) == (126, True), refused
        assert (await sandbox.exec(msgspec.structs.replace(command, user="nobody", cwd="through"))).ok
    mine = Command(argv=("mine",), env={"PATH": "/work/private/bin"})
    assert (await sandbox.exec(mine)).ok
    assert (await sandbox.exec(msgspec.structs.replace(mine, user="nobody"))).exit_code in (126, 127)


@needs_user_mapping
async def test_files_belong_to_the_commands_user(sandbox: LocalSandbox) -> None:
    for user, uid in (("root", 0), ("nobody", 65534), ("4711", 4711), ("user", 1000), ("1000", 1000), ("0", 0)):
        for warm in (False, True):
            text = "import os, sys; f = open(sys.argv[1], 'w'); s = os.stat(f.name); print(s.st_uid, s.st_gid)"
            argv = ("python3", "-c", text, f"/tmp/{user}{warm}")
            command = Command(argv=argv, env={"PATH": PATH}, user=user, warm=warm)
            assert (await sandbox.exec(command)).stdout.split() == [str(uid).encode()] * 2
    shell = await sandbox.shell()
    assert (await shell.run("id -u", timeout=60)).stdout == b"1000\n"


@needs_user_mapping
@pytest.mark.parametrize("user", ["bob", "65535", "99999", "-1", "", "root ", "٣", "a:b", "../root", "+5"])
async def test_unknown_user_is_refused(sandbox: LocalSandbox, user: str) -> None:
    for call in (sandbox.exec, sandbox.start):
        with pytest.raises(SandboxError) as refused:
            await call(Command(argv=("true",), user=user))
        assert refused.value.code == "sandbox.refused"


async def test_user_lookup_validates_the_sandboxs_passwd() -> None:
    lines = (
        b"grader:x:4242:4243:g:/:/bin/sh\npid1:x:65535:65535::/:\nhuge:x:99999999999:1::/:\nodd:x:a:b\nbad\n"
        b"under:x:-1:0::/:\nroot:x:5:5::/:\n\xff\xfe:x:1:1:\n"
    )

    async def read(path: str) -> bytes:
        assert path == "/etc/passwd"
        return lines

    async def read_nothing(path: str) -> bytes:
        raise FileNotFoundError(path)

    assert await guarded_sandbox.find_user("grader", read) == (4242, 4243, "grader")
    assert await guarded_sandbox.find_user("root", read) == (0, 0, "root")
    assert await guarded_sandbox.find_user("65534", read_nothing) == (65534, 65534, "nobody")
    for name in ("pid1", "huge", "odd", "bad", "under", "nobody\n", "\udcff", ":", ""):
        with pytest.raises(SandboxError) as refused:
            await guarded_sandbox.find_user(name, read)
        assert (refused.value.code, refused.value.__cause__) == ("sandbox.refused", None)
    with pytest.raises(SandboxError) as refused:
        await guarded_sandbox.find_user("grader", read_nothing)
    assert refused.value.code == "sandbox.refused"
    assert isinstance(refused.value.__cause__, FileNotFoundError)


# ---- a warm interpreter that is hostile


@pytest.mark.long
@pytest.mark.parametrize("lie", warm_programs.LIES)
async def test_hostile_fork_server_does_not_prevent_commands(provider: LocalProvider, lie: str) -> None:
    sandbox, footprint = await create_sandbox(provider)
    try:
        text = warm_programs.FAKE_FORK_SERVER.replace("{interpreter}", f"{INTERPRETER}/python3").replace(
            "{lie}", warm_programs.LIES[lie].strip()
        )
        await sandbox.write("fake/python3", text.encode(), mode=0o755)
        command = Command(argv=("python3", "-c", "pass"), env={"PATH": f"/work/fake:{PATH}"}, warm=True)
        asked = b""
        async with asyncio.timeout(60):
            while not asked:
                result = await sandbox.exec(command)
                assert (result.exit_code, result.stdout) == (0, b"started normally\n"), result
                asked = (await sandbox.exec(Command(argv=("sh", "-c", "cat /tmp/asked; true")))).stdout
        results = await asyncio.gather(*(sandbox.exec(command) for _ in range(5)))
        assert {result.stdout for result in results} == {b"started normally\n"}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.exec(Command(argv=("sleep", "600"), env=command.env))
        process = await sandbox.start(command)
        await process.kill()
        assert (await sandbox.exec(Command(argv=("true",)))).ok
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)


@pytest.mark.long
async def test_killed_or_stopped_fork_server_is_replaced(provider: LocalProvider) -> None:
    sandbox, footprint = await create_sandbox(provider)
    cfg = (
        f"mkdir -p /tmp/v/bin && ln -s {INTERPRETER}/python3 /tmp/v/bin/"
        f" && echo home={INTERPRETER} > /tmp/v/pyvenv.cfg"
    )
    try:
        assert (await sandbox.exec(Command(argv=("sh", "-c", cfg)))).ok
        warm = msgspec.structs.replace(SEED, env={"PATH": f"/tmp/v/bin:{PATH}"})
        for number in (9, 19):
            seeds: list[bytes] = []
            async with asyncio.timeout(60):
                while len(seeds) < 2 or seeds[-1] != seeds[-2]:
                    result = await sandbox.exec(warm)
                    assert re.fullmatch(rb"-?\d+\n", result.stdout), result
                    seeds.append(result.stdout)
            everyone = f"kill -{number} $(grep -l self/fd/ /proc/[0-9]*/cmdline | cut -d/ -f3 | grep -vx $$); true"
            await sandbox.exec(Command(argv=("sh", "-c", everyone)))
            results = await asyncio.gather(*(sandbox.exec(warm) for _ in range(4)))
            assert all(result.ok and result.stdout != seeds[-1] for result in results), results
    finally:
        await sandbox.close()
    await wait_until_gone(footprint)
