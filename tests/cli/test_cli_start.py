"""Help, command names and usage errors of `rookery`."""

import subprocess
import sys
from pathlib import Path

import pytest

from rookery.cli.app import COMMANDS
from rookery.cli.errors import Exit, run_with_exit_code
from rookery.core import JournalError, UsageError
from tests.cli.helpers import environ, rookery

HEAVY = ("asyncio", "rich", "msgspec", "aiohttp", "numpy", "sqlite3", "orjson", "uvloop", "importlib.metadata")


@pytest.mark.parametrize("args", [["--help"], ["--version"], []])
def test_help_imports_click_and_nothing_heavier(args: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "rookery.cli", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ(), check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not {name for name in imported if name in HEAVY or name.partition(".")[0] in HEAVY}


async def test_help_names_every_command_and_the_exit_codes(tmp_path: Path) -> None:
    done = await rookery("--help", cwd=tmp_path)
    assert done.code == 0
    for named in (*COMMANDS, "130"):
        assert named in done.out


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
async def test_every_command_has_help(name: str, tmp_path: Path) -> None:
    done = await rookery(name, "--help", cwd=tmp_path)
    assert done.code == 0
    assert done.out.startswith(f"Usage: rookery {name}")
    assert done.err == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["rn"], "`run`"),
        (["zzz"], "demo, run, resume"),
        (["--polcy"], "--polcy"),
        (["run", "x.py", "--polcy", "u"], "--policy"),
        (["run", "x.py", "-k", "0"], "-k"),
        (["run", "x.py", "-k", "many"], "'many'"),
        (["run", "x.py", "--breaker", "2"], "'2'"),
        (["run", "x.py", "extra"], "extra"),
        (["run"], "rookery "),
        (["show"], "RUN"),
    ],
)
async def test_usage_error_is_one_sentence_and_exit_code_2(args: list[str], named: str, tmp_path: Path) -> None:
    (await rookery(*args, cwd=tmp_path)).assert_refused(named)


async def test_invalid_environment_variable_is_named(tmp_path: Path) -> None:
    (await rookery("run", "x.py", cwd=tmp_path, ROOKERY_CONCURRENCY="lots")).assert_refused(
        "$ROOKERY_CONCURRENCY", "'lots'"
    )


def test_internal_error_prints_its_traceback_and_is_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken() -> int:
        raise ZeroDivisionError("ours")

    assert run_with_exit_code(broken) == Exit.BUG == 1
    stderr = capsys.readouterr().err
    assert "Traceback" in stderr
    assert "ZeroDivisionError: ours" in stderr


@pytest.mark.parametrize("kind", [UsageError, JournalError])
def test_rookery_error_is_exit_code_2_without_a_traceback(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> int:
        raise kind("this cannot be\x1b[2J")

    assert run_with_exit_code(refused) == Exit.USAGE == 2
    assert capsys.readouterr().err == "error: this cannot be\\x1b[2J\n"


def test_ctrl_c_before_the_start_is_exit_code_130() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_with_exit_code(interrupted) == Exit.INTERRUPTED == 130
