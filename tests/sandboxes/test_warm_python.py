"""A warm interpreter runs programs as a new one does: same output, same errors, same end.

Each program runs twice: as a fork of pid 1, which runs on the same interpreter, and as a fork of a fork server in
the sandbox, for another interpreter than pid 1's (here, that of a virtual environment).
"""

import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rookery.core import ExecResult, SandboxSpec
from rookery.sandboxes import Command, ProviderHome
from rookery.sandboxes.local.provider import LocalProvider, LocalSandbox
from tests.sandboxes.python_programs import PROGRAMS, PythonProgram

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPEC = SandboxSpec(provider="local", memory=256 << 20, wall=60.0)
INTERPRETER = Path(sys.base_prefix).resolve() / "bin"
PATHS = {"fork": f"{INTERPRETER}:/usr/bin:/bin", "fork server": f"/tmp/venv/bin:{INTERPRETER}:/usr/bin:/bin"}
SEED = "print(hash('which interpreter this is'))"


class WarmSandbox:
    """A sandbox, and the search path that selects the `python3` of its commands."""

    def __init__(self, sandbox: LocalSandbox, path: str) -> None:
        self.sandbox = sandbox
        self.path = path

    async def run(self, program: PythonProgram, *, warm: bool, **more: object) -> ExecResult:
        for name, text in program.files.items():
            await self.sandbox.write(name, text.encode("latin-1" if "latin-1" in text else "utf-8"))
        env = {"PATH": self.path, **program.env}
        command = Command(argv=program.argv, stdin=program.stdin, env=env, warm=warm)
        result = await self.sandbox.exec(msgspec.structs.replace(command, **more))
        if program.files:
            await self.sandbox.exec(Command(argv=("find", ".", "-mindepth", "1", "-delete")))
        return result

    async def read_hash_seed(self, *options: str, **more: object) -> bytes:
        """Return a hash that differs between interpreters but not between forks of one."""
        program = PythonProgram(name="seed", argv=("python3", *options, "-c", SEED))
        return (await self.run(program, **{"warm": True, **more})).stdout  # type: ignore[arg-type]

    async def wait_until_warm(self, **more: object) -> bytes:
        """Wait until commands run as forks of a warm interpreter; return its hash."""
        last = await self.read_hash_seed(**more)
        while (now := await self.read_hash_seed(**more)) != last:
            last = now
        return now


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    made = LocalProvider(ProviderHome(folder=tmp_path_factory.mktemp("warm") / "sandboxes", run="warm"))
    yield made
    await made.close()


async def open_warm_sandbox(provider: LocalProvider, way: str) -> WarmSandbox:
    sandbox = await provider.create(SPEC, attempt="warm")
    warm_sandbox = WarmSandbox(sandbox, PATHS[way])
    script = (
        f"mkdir -p /tmp/venv/bin && ln -s {INTERPRETER}/python3 /tmp/venv/bin/python3 &&"
        f" echo 'home = {INTERPRETER}' > /tmp/venv/pyvenv.cfg && chmod -R a+rX /tmp/venv"
    )
    assert (await sandbox.exec(Command(argv=("sh", "-c", script)))).ok
    await warm_sandbox.wait_until_warm()
    return warm_sandbox


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=list(PATHS))
async def warm_sandbox(provider: LocalProvider, request: pytest.FixtureRequest) -> AsyncIterator[WarmSandbox]:
    made = await open_warm_sandbox(provider, request.param)
    yield made
    await made.sandbox.close()


def comparable(result: ExecResult) -> tuple[object, ...]:
    """Return what must be equal, without numbers that differ between any two runs."""
    texts = [
        re.sub(
            r"0x[0-9a-f]{6,}|ROOKERY_COMMAND=\d+|'ROOKERY_COMMAND', '\d+'|<frozen [a-z.]+>|in \d+\.\d+s", "·", text
        )
        for text in (result.stdout.decode("utf-8", "replace"), result.stderr.decode("utf-8", "replace"))
    ]
    return (result.status, result.exit_code, result.signal, *texts)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_warm_program_behaves_like_a_new_one(program: PythonProgram, warm_sandbox: WarmSandbox) -> None:
    new = await warm_sandbox.run(program, warm=False)
    warm = await warm_sandbox.run(program, warm=True)
    assert comparable(warm) == comparable(new)


async def test_program_names_are_unique_and_numerous() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) >= 100


@pytest.mark.long
async def test_which_command_lines_use_the_warm_interpreter(warm_sandbox: WarmSandbox) -> None:
    warm = await warm_sandbox.read_hash_seed()
    for options in (("-u",), ("-B",), ("-I",), ("-E", "-s"), ("-Bu",)):
        assert await warm_sandbox.read_hash_seed(*options) == warm, options
    assert await warm_sandbox.read_hash_seed(warm=False) != warm
    for options in (("-O",), ("-X", "dev"), ("-W", "error"), ("-S",)):
        assert await warm_sandbox.read_hash_seed(*options) != warm, options
    assert await warm_sandbox.read_hash_seed(env={"PATH": warm_sandbox.path, "PYTHONHASHSEED": "7"}) != warm


@pytest.mark.long
async def test_limits_apply_to_warm_programs(warm_sandbox: WarmSandbox) -> None:
    async def ends(text: str, **more: object) -> tuple[str, int | None]:
        result = await warm_sandbox.run(
            PythonProgram(name="limited", argv=("python3", "-c", text)), warm=True, **more
        )
        return result.status, result.signal

    apart = "os.setsid() if os.getpid() % 2 and os.getpgrp() != os.getpid() else 0"  # a group leader cannot
    tree = f"import os, time\nfor _ in range(3): os.fork()\n{apart}\ntime.sleep(600)"
    assert await ends(tree, wall=0.5) == ("time_limit", 9)
    assert (await ends("while True: pass", cpu_seconds=1.0))[0] == "time_limit"
    assert (await ends("x = bytearray(1 << 30)", memory=128 << 20))[0] in ("memory_limit", "exited")
    assert (await ends("x = [bytearray(1 << 20) for _ in range(1 << 10)]"))[0] == "memory_limit"
    left = await warm_sandbox.sandbox.exec(Command(argv=("sh", "-c", "cat /proc/[0-9]*/stat")))
    assert left.stdout.count(b"(python3) S") <= 1, left.stdout  # the warm interpreter, if it survived
    assert await warm_sandbox.wait_until_warm()


async def test_missing_directory_is_reported_alike(warm_sandbox: WarmSandbox) -> None:
    program = PythonProgram(name="nowhere", argv=("python3", "-c", "pass"))
    new = await warm_sandbox.run(program, warm=False, cwd="missing")
    warm = await warm_sandbox.run(program, warm=True, cwd="missing")
    assert (warm.exit_code, warm.detail) == (new.exit_code, new.detail)


async def test_warm_program_can_be_long(warm_sandbox: WarmSandbox) -> None:
    text = "x = 1\n" * 15000 + "print(x)"
    env = {"PATH": warm_sandbox.path, "LONG": "y" * 100_000}
    result = await warm_sandbox.run(PythonProgram(name="long", argv=("python3", "-c", text)), warm=True, env=env)
    assert result.stdout == b"1\n", result


async def test_background_program_can_be_warm(warm_sandbox: WarmSandbox) -> None:
    text = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    process = await warm_sandbox.sandbox.start(
        Command(argv=("python3", "-c", text), env={"PATH": warm_sandbox.path}, warm=True)
    )
    await process.send(b"one\n")
    async for _, chunk in process.output():
        assert chunk == b"ONE\n"
        break
    await process.send(b"", eof=True)
    assert (await process.wait(timeout=60)).ok
