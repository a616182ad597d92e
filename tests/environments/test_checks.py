"""Invalid environments and unreachable servers are refused before a run starts."""

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment, environment
from rookery.core import UsageError
from rookery.environments.checks import check_environment
from tests.cli.sandbox_kit import run_cli
from tests.servers import Answer, ModelServer


class Whole(Environment):
    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat("x")

    async def score(self, ctx: Context) -> float:
        return 1.0


class Scoreless(Environment):
    async def run(self, ctx: Context) -> None: ...


class Runless(Environment):
    async def score(self, ctx: Context) -> float:
        return 1.0


class NotCallable(Whole):
    score = None  # type: ignore[assignment]


class Undeclared(Whole):
    async def run(self, ctx: Context) -> None:
        async with ctx.gateway_session() as session:
            ctx.info["url"] = session.url


class Declared(Undeclared):
    needs_gateway = "a program that calls the model"


class DeclaredAtConstruction(Undeclared):
    def __init__(self, wanted: Any = "a program that calls the model") -> None:
        self.needs_gateway = wanted


class Hidden(Whole):
    """Opens a session in a way that the check of its source does not find."""

    async def run(self, ctx: Context) -> None:
        async with getattr(ctx, "gateway_session")() as session:  # noqa: B009
            ctx.info["url"] = session.url


class Unrelated(Whole):
    """Has an unrelated method with the name `gateway_session`."""

    async def run(self, ctx: Context) -> None:
        self.gateway_session()

    def gateway_session(self) -> None: ...


@pytest.mark.parametrize("kind", [Scoreless, Runless, NotCallable])
def test_missing_stage_is_refused_at_construction(kind: type[Environment], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Engine(kind(), policy="embedded", runners=0, out=tmp_path)


@pytest.mark.parametrize("env", [Whole(), Declared(), DeclaredAtConstruction(), Hidden(), Unrelated()])
def test_sound_environments_pass(env: Environment) -> None:
    check_environment(env)


def test_gateway_session_without_declaration_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Engine(Undeclared(), policy="embedded", runners=0, out=tmp_path)


async def opens(ctx: Context) -> float:
    async with ctx.gateway_session():
        return 1.0


def test_function_environment_declares_the_gateway_too() -> None:
    with pytest.raises(UsageError):
        check_environment(environment(opens))
    check_environment(environment(needs_gateway="a program")(opens))


@pytest.mark.parametrize("wanted", ["", " ", 3, None])
def test_declaration_is_a_flag_or_a_purpose(wanted: Any) -> None:
    with pytest.raises(UsageError):
        check_environment(DeclaredAtConstruction(wanted))


@pytest.mark.long
async def test_gateway_declared_in_the_constructor_is_there(tmp_path: Path) -> None:
    async with Engine(DeclaredAtConstruction(), policy="embedded", runners=0, out=tmp_path) as engine:
        (group,) = [group async for group in engine.groups([{"prompt": "x"}], k=1)]
    assert group.rollouts[0].info["url"].startswith("http://")


async def test_undeclared_session_that_is_not_seen_beforehand_ends_the_run_once(tmp_path: Path) -> None:
    records = []
    async with Engine(Hidden(), policy="embedded", runners=0, out=tmp_path, concurrency=1) as engine:
        engine.on_record = records.append
        with pytest.raises(UsageError):
            [group async for group in engine.groups([{"prompt": str(n)} for n in range(20)], k=2)]
    assert len(records) <= 1


@pytest.mark.long
def test_run_of_an_environment_without_score_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(
        "from rookery import Environment\n\n\n"
        "class NoScore(Environment):\n"
        "    def tasks(self):\n"
        '        return ["x"]\n\n'
        "    async def run(self, ctx):\n"
        "        pass\n"
    )
    done = run_cli("run", "env.py", "--policy", "embedded", cwd=tmp_path)
    assert done.code == 2, done
    assert "score" in done.err
    assert not (tmp_path / "runs").exists()


WATCHED = """
import sys, time, types
from rookery.environments import import_watchdog
import_watchdog.IDLE_SECONDS, import_watchdog.BUSY_SECONDS = {idle}, {busy}
try:
    with import_watchdog.import_watchdog("env.py"):
        {work}
except import_watchdog.ImportHangError as error:
    print("hangs", error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("idle", "busy", "work", "hangs"),
    [
        (1.0, 60.0, "time.sleep(60)", True),
        (60.0, 1.0, "while True: pass", True),
        (3.0, 3.0, "for n in range(9): time.sleep(0.5); sys.modules[str(n)] = types.ModuleType('x')", False),
    ],
)
def test_import_hangs_when_it_neither_ends_nor_imports_more(
    idle: float, busy: float, work: str, hangs: bool
) -> None:
    """Runs in a separate process, because the timeouts of tests use the same timer."""
    script = WATCHED.format(idle=idle, busy=busy, work=work)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True)
    assert done.stdout.startswith(b"hangs") == hangs, done


@pytest.mark.long
def test_run_of_an_environment_whose_import_hangs_exits_with_2_and_its_line(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("import time\n\ntime.sleep(3600)\n")
    done = run_cli("run", "env.py", "--policy", "embedded", cwd=tmp_path)
    assert done.code == 2, done
    assert re.search(r"env\.py\W.*\b3\b", done.err)
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "gateway"])
async def test_server_that_fails_at_the_start_is_named_with_its_error(command: str, tmp_path: Path) -> None:
    async with ModelServer(models=Answer(status=500, error="CUDA out of memory")) as server:  # type: ignore[arg-type]
        done = await asyncio.to_thread(lambda: run_against(command, server.url, tmp_path))
    assert done.code == 2, done
    assert server.url in done.err
    assert "CUDA out of memory" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "gateway"])
def test_server_that_hangs_at_the_start_is_reported_to_hang(command: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts connections, but nothing responds
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = run_against(command, url, tmp_path)
    assert done.code == 2, done
    assert url in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.parametrize("command", ["run", "gateway"])
def test_unreachable_server_is_named_at_the_start(command: str, tmp_path: Path) -> None:
    done = run_against(command, "http://127.0.0.1:9", tmp_path)
    assert done.code == 2, done
    assert "http://127.0.0.1:9" in done.err


def run_against(command: str, url: str, folder: Path) -> Any:
    if command == "gateway":
        return run_cli("gateway", "--upstream", url, "--port", "0", cwd=folder)
    return run_cli("run", "arithmetic", "-n", "1", "--policy", url, "--runners", "1", cwd=folder)
