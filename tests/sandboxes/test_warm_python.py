"""A warm interpreter runs a program as a new one does: same output, same errors, same end.

Twice: as a fork of pid 1, which runs on the same interpreter, and as a fork of a warm interpreter in the box, for
one that pid 1 does not run on (here, that of a virtual environment).
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
from tests.sandboxes.python_programs import PROGRAMS, Small

pytestmark = pytest.mark.asyncio(loop_scope="module")
SPEC = SandboxSpec(provider="local", memory=256 << 20, wall=60.0)
INTERPRETER = Path(sys.base_prefix).resolve() / "bin"
PATHS = {"fork": f"{INTERPRETER}:/usr/bin:/bin", "zygote": f"/tmp/venv/bin:{INTERPRETER}:/usr/bin:/bin"}
SEED = "print(hash('which interpreter this is'))"


class Ground:
    """A box, and which `python3` is first on the path of its commands."""

    def __init__(self, sandbox: LocalSandbox, path: str) -> None:
        self.sandbox = sandbox
        self.path = path

    async def run(self, small: Small, *, warm: bool, **more: object) -> ExecResult:
        for name, text in small.files.items():
            await self.sandbox.write(name, text.encode("latin-1" if "latin-1" in text else "utf-8"))
        env = {"PATH": self.path, **small.env}
        command = Command(argv=small.argv, stdin=small.stdin, env=env, warm=warm)
        result = await self.sandbox.exec(msgspec.structs.replace(command, **more))
        if small.files:
            await self.sandbox.exec(Command(argv=("find", ".", "-mindepth", "1", "-delete")))
        return result

    async def seed(self, *options: str, **more: object) -> bytes:
        """Interpreters differ by it, forks of one do not."""
        small = Small(name="seed", argv=("python3", *options, "-c", SEED))
        return (await self.run(small, **{"warm": True, **more})).stdout  # type: ignore[arg-type]

    async def ready(self, **more: object) -> bytes:
        """Until a warm interpreter is there."""
        last = await self.seed(**more)
        while (now := await self.seed(**more)) != last:
            last = now
        return now


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    made = LocalProvider(ProviderHome(folder=tmp_path_factory.mktemp("warm") / "sandboxes", run="warm"))
    yield made
    await made.close()


async def ground_of(provider: LocalProvider, way: str) -> Ground:
    sandbox = await provider.create(SPEC, attempt="warm")
    ground = Ground(sandbox, PATHS[way])
    script = (
        f"mkdir -p /tmp/venv/bin && ln -s {INTERPRETER}/python3 /tmp/venv/bin/python3 &&"
        f" echo 'home = {INTERPRETER}' > /tmp/venv/pyvenv.cfg && chmod -R a+rX /tmp/venv"
    )
    assert (await sandbox.exec(Command(argv=("sh", "-c", script)))).ok
    await ground.ready()
    return ground


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=list(PATHS))
async def ground(provider: LocalProvider, request: pytest.FixtureRequest) -> AsyncIterator[Ground]:
    made = await ground_of(provider, request.param)
    yield made
    await made.sandbox.close()


def told(result: ExecResult) -> tuple[object, ...]:
    """What must be the same; numbers that differ between any two runs left out."""
    texts = [
        re.sub(
            r"0x[0-9a-f]{6,}|ROOKERY_COMMAND=\d+|'ROOKERY_COMMAND', '\d+'|<frozen [a-z.]+>|in \d+\.\d+s", "·", text
        )
        for text in (result.stdout.decode("utf-8", "replace"), result.stderr.decode("utf-8", "replace"))
    ]
    return (result.status, result.exit_code, result.signal, *texts)


@pytest.mark.parametrize("small", PROGRAMS, ids=lambda small: small.name)
async def test_warm_program_behaves_like_a_new_one(small: Small, ground: Ground) -> None:
    new = await ground.run(small, warm=False)
    warm = await ground.run(small, warm=True)
    assert told(warm) == told(new)


async def test_program_names_are_unique_and_numerous() -> None:
    assert len({small.name for small in PROGRAMS}) == len(PROGRAMS) >= 100


async def test_which_command_lines_use_the_warm_interpreter(ground: Ground) -> None:
    warm = await ground.seed()
    for options in (("-u",), ("-B",), ("-I",), ("-E", "-s"), ("-Bu",)):
        assert await ground.seed(*options) == warm, options
    assert await ground.seed(warm=False) != warm
    for options in (("-O",), ("-X", "dev"), ("-W", "error"), ("-S",)):
        assert await ground.seed(*options) != warm, options
    assert await ground.seed(env={"PATH": ground.path, "PYTHONHASHSEED": "7"}) != warm


async def test_limits_apply_to_warm_programs(ground: Ground) -> None:
    async def ends(text: str, **more: object) -> tuple[str, int | None]:
        result = await ground.run(Small(name="limited", argv=("python3", "-c", text)), warm=True, **more)
        return result.status, result.signal

    apart = "os.setsid() if os.getpid() % 2 and os.getpgrp() != os.getpid() else 0"  # a leader may not
    tree = f"import os, time\nfor _ in range(3): os.fork()\n{apart}\ntime.sleep(600)"
    assert await ends(tree, wall=0.5) == ("time_limit", 9)
    assert (await ends("while True: pass", cpu_seconds=1.0))[0] == "time_limit"
    assert (await ends("x = bytearray(1 << 30)", memory=128 << 20))[0] in ("memory_limit", "exited")
    assert (await ends("x = [bytearray(1 << 20) for _ in range(1 << 10)]"))[0] == "memory_limit"
    left = await ground.sandbox.exec(Command(argv=("sh", "-c", "cat /proc/[0-9]*/stat")))
    assert left.stdout.count(b"(python3) S") <= 1, left.stdout  # a warm interpreter, where it survived
    assert await ground.ready()


async def test_missing_directory_is_reported_alike(ground: Ground) -> None:
    small = Small(name="nowhere", argv=("python3", "-c", "pass"))
    new = await ground.run(small, warm=False, cwd="missing")
    warm = await ground.run(small, warm=True, cwd="missing")
    assert (warm.exit_code, warm.detail) == (new.exit_code, new.detail)


async def test_warm_program_can_be_long(ground: Ground) -> None:
    text = "x = 1\n" * 15000 + "print(x)"
    env = {"PATH": ground.path, "LONG": "y" * 100_000}
    result = await ground.run(Small(name="long", argv=("python3", "-c", text)), warm=True, env=env)
    assert result.stdout == b"1\n", result


async def test_background_program_can_be_warm(ground: Ground) -> None:
    text = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    process = await ground.sandbox.start(
        Command(argv=("python3", "-c", text), env={"PATH": ground.path}, warm=True)
    )
    await process.send(b"one\n")
    async for _, chunk in process.output():
        assert chunk == b"ONE\n"
        break
    await process.send(b"", eof=True)
    assert (await process.wait(timeout=20)).ok
