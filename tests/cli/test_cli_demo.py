"""`rookery demo` and `make demo`: real rollouts without setup, for any user and installation."""

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import click
import pytest

from rookery.cli.demo import describe_sandbox
from rookery.journal import RunReader
from rookery.sandboxes import ProviderChoice, best_provider
from tests.cli.helpers import SECONDS, CommandResult, environ, rookery, runs, start_command, wait_for_end
from tests.cli.sandbox_kit import own_folder, python_for
from tests.cli.test_cli_run import wait_for_records
from tests.cli.test_cli_terminal import HIDE, SHOW, Terminal
from tests.sandboxes.plugins import plugin

__all__ = ["own_folder"]
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SMALL = ("demo", "-n", "5", "-k", "2")


def check_summary(text: str, rollouts: int) -> None:
    """Check that the summary has every row and that the outcomes add up."""
    for row in ("tasks", "rollouts", "pass rate", "mean reward", "tokens", "tokens/s", "rollouts/s", "outcomes"):
        assert re.search(rf"^  {row}  ", text, re.MULTILINE), (row, text)
    outcomes = re.findall(
        r"^  (?:outcomes)? +([\d,]+)  (?:completed|truncated\.|cancelled\.|\w+\.)", text, re.MULTILINE
    )
    assert sum(int(count) for count in outcomes) == rollouts, text


def parse_suggestions(text: str) -> list[list[str]]:
    """Return the suggested commands, split like a shell does."""
    return [shlex.split(line) for line in text.splitlines() if line.startswith("  rookery ")]


async def test_demo_in_a_pipe_prints_plan_and_summary(tmp_path: Path) -> None:
    done = await rookery(*SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    (run,) = runs(tmp_path)
    intro = done.err.partition("arithmetic with embedded: 5 tasks x 2")[0]
    assert [line.split()[0] for line in intro.splitlines()[:3]] == ["policy", "tasks", "sandbox"]
    assert f"sandbox  {best_provider().name}" in intro
    assert "sandbox.not_isolated" not in done.err  # the demo has already printed this warning
    check_summary(done.out, 10)
    assert "  by level  " in done.out
    assert f" runs/{run.name}" in done.out
    assert "\x1b" not in done.out + done.err
    with RunReader(run) as reader:
        assert reader.status == "finished"
        assert sum(reader.counts().values()) == 10
        assert all(task.id.startswith("held-out-") for task in reader.tasks())


async def test_suggested_commands_work(tmp_path: Path) -> None:
    done = await rookery(*SMALL, cwd=tmp_path)
    commands = parse_suggestions(done.out)
    assert [command[1] for command in commands][-3:] == ["init", "run", "run"]
    shown = [command for command in commands if command[1] == "show"]
    assert len(shown) >= 2  # the run and at least one of its rollouts
    for command in (*shown, *commands[-3:-1]):
        again = await rookery(*command[1:], cwd=tmp_path)
        assert again.code == 0, (command, again.err)
    last = await rookery(*commands[-1][1:], "--dry-run", cwd=tmp_path)  # the last one needs an inference engine
    assert last.code == 0, last.err


async def test_demo_on_a_terminal_has_colours_and_live_progress_that_fits(tmp_path: Path) -> None:
    terminal = Terminal(*SMALL, cwd=tmp_path, COLUMNS="80")
    assert await terminal.end() == 0
    assert terminal.output.rindex(SHOW) > terminal.output.rindex(HIDE)
    assert "\x1b[1m" in terminal.output
    plain = click.unstyle(terminal.output.replace("\r\n", "\n"))
    table = plain[plain.rindex("arithmetic with embedded  finished") :]
    check_summary(table, 10)
    before = plain[: plain.index("arithmetic with embedded: 5 tasks")]
    assert max(map(len, [*before.splitlines(), *table.splitlines()])) <= 80


async def test_same_seed_gives_the_same_rollouts(tmp_path: Path) -> None:
    """The policy is deterministic, and its programs do not read the clock."""
    sampled = []
    for seed in ("7", "7", "8"):
        done = await rookery("demo", "-n", "3", "-k", "2", "--seed", seed, "--json", cwd=tmp_path)
        assert done.code == 0, done.err
        with RunReader(runs(tmp_path)[-1]) as reader:
            sampled.append([[turn.sampled for turn in reader.turns(record)] for record in reader.iter_rollouts()])
        shutil.rmtree(tmp_path / "runs")
    assert sampled[0] == sampled[1] != sampled[2]


async def test_demo_json_is_one_object_per_line_and_ends_with_the_summary(tmp_path: Path) -> None:
    done = await rookery(*SMALL, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    first, *_, last = done.events
    best = best_provider()
    assert (first["event"], first["policy"], first["tasks"]) == ("demo", "embedded", "arithmetic")
    assert (first["sandbox"], first["isolated"]) == (best.name, best.isolated)
    assert (last["event"], last["exit_code"], last["status"]) == ("finished", 0, "finished")
    assert sum(last["outcomes"].values()) == last["rollouts"] == 10
    assert [one["level"] for one in last["levels"]] == [1, 2, 3, 4, 5]
    assert last["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["-n", "0"], "-n"),
        (["-k", "many"], "'many'"),
        (["--seed", "x"], "'x'"),
        (["arithmetic"], "arithmetic"),
        (["--policy", "x"], "--policy"),
    ],
)
async def test_invalid_input_is_one_sentence_and_exit_code_2(args: list[str], named: str, tmp_path: Path) -> None:
    (await rookery("demo", *args, cwd=tmp_path)).assert_refused(named)


async def test_unwritable_directory_is_reported_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    done = await rookery(*SMALL, cwd=tmp_path)
    assert done.code == 2
    assert done.out == ""
    assert "runs" in done.err.splitlines()[-1]
    assert " -o" in done.err.splitlines()[-1]
    done = await rookery(*SMALL, "--json", cwd=tmp_path)
    assert done.events[-1]["event"] == "error"
    again = await rookery("demo", "-n", "1", "-k", "1", "-o", "elsewhere", cwd=tmp_path)
    assert again.code == 0, again.err
    assert " elsewhere/" in again.out


async def test_interrupted_demo_is_exit_code_130_and_can_be_resumed(tmp_path: Path) -> None:
    async with start_command("demo", "-n", "2000", "-k", "8", cwd=tmp_path) as process:
        assert process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while not (await process.stderr.readline()).startswith(b"run "):
                pass
            await wait_for_records(tmp_path, 1)
        process.send_signal(signal.SIGINT)
        done = await wait_for_end(process)
    assert done.code == 130, done.err
    assert "SIGINT" in done.err
    (run,) = runs(tmp_path)
    assert f"rookery resume runs/{run.name}" in done.out
    with RunReader(run) as reader:
        assert reader.status == "stopped"
        kept = sum(reader.counts().values())
    async with start_command("resume", "latest", cwd=tmp_path) as process:
        assert process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while b"16,000" not in (head := await process.stderr.readline()):
                assert head
            await wait_for_records(tmp_path, kept + 1)
        process.send_signal(signal.SIGINT)
        done = await wait_for_end(process)
    assert f"{kept:,} of 16,000 ".encode() in head
    assert done.code == 130, done.err


# ---- sandboxes


async def test_demo_uses_a_provider_that_isolates(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    plugin(plugins, "local", check="return []")  # this path precedes other plug-ins of the same name
    done = await rookery("demo", "-n", "1", "-k", "1", cwd=tmp_path, PYTHONPATH=str(plugins))
    assert done.code == 0, done.err
    assert "sandbox  local: " in done.err


def test_demo_without_isolation_says_why() -> None:
    lines = [click.unstyle(line) for line in describe_sandbox(ProviderChoice(name="subprocess", isolated=False))]
    assert lines[0].startswith("sandbox  subprocess, ")
    refused = ProviderChoice(
        name="subprocess", isolated=False, refused={"local": "This kernel has no cgroups." * 20}
    )
    lines = [click.unstyle(line) for line in describe_sandbox(refused)]
    assert re.match(r" {9}local\b.*: This kernel has no cgroups\.", lines[1])
    assert len(lines[1]) <= 120


async def test_plan_is_printed_before_the_machine_is_probed(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    flag = tmp_path / "probed"
    hold = f"import os, time\n        while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n        return []"
    plugin(plugins, "local", check=hold)
    async with start_command("demo", "-n", "1", "-k", "1", cwd=tmp_path, PYTHONPATH=str(plugins)) as process:
        assert process.stderr is not None
        async with asyncio.timeout(SECONDS):
            lines = [(await process.stderr.readline()).split()[0] for _ in range(2)]
        assert lines == [b"policy", b"tasks"]
        flag.touch()
        done = await wait_for_end(process, SECONDS)
    assert done.code == 0, done.err


# ---- users and installations


async def test_unprivileged_user_can_run_the_demo(own_folder: tuple[Path, int]) -> None:
    folder, user = own_folder
    python = python_for(user)
    site = Path(click.__file__).parents[1]
    env = environ(HOME=str(folder), PYTHONPATH=f"{ROOT / 'src'}:{site}", PYTHONDONTWRITEBYTECODE="1")
    switch = {"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 else {}
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "rookery.cli", "demo", "-n", "5", "-k", "1"),
        cwd=folder,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        **switch,
    )
    done = await wait_for_end(process)
    assert done.code == 0, done.err
    check_summary(done.out, 5)
    assert runs(folder)[0].stat().st_uid == user


def _core() -> set[str]:
    """Return the distributions of an installation without extras."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    asked = ["rookery-rl"]
    while asked:
        for text in distribution(asked.pop()).requires or ():
            needed = Requirement(text)
            name = canonicalize_name(needed.name)
            if name not in found and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                found.add(name)
                asked.append(name)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without build isolation, so that nothing is downloaded.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, cwd=folder, env=environ())
    (built,) = folder.glob("rookery_rl-*.whl")
    return built


def test_wheel_contains_the_policy_and_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "rookery/upstreams/embedded/policy.safetensors" in names
    assert "rookery/sandbox_runtime/pid1/native/commands.c" in names
    assert not [name for name in names if not name.startswith(("rookery/", "rookery_rl-"))]
    assert wheel.stat().st_size < 3_500_000


async def test_installed_wheel_runs_the_demo_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Create the environment without a network: install the wheel without dependencies and link those of a core
    installation from this environment."""
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    command = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environ())
    (site,) = home.glob("lib/python3*/site-packages")
    for name in _core():
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or () if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(here.locate_file(top))).resolve())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = await _ended(python, "-c", "import rookery; print(rookery.__file__)", cwd=elsewhere)
    assert Path(where.out.strip()).is_relative_to(site)
    done = await _ended(home / "bin" / "rookery", "demo", "-n", "2", "-k", "2", cwd=elsewhere)
    assert done.code == 0, done.err
    check_summary(done.out, 4)
    assert (
        f"  {home / 'bin' / 'rookery'} show runs/{runs(elsewhere)[0].name}" in done.out
    )  # the program is not on PATH


async def _ended(*command: str | Path, cwd: Path) -> CommandResult:
    pipe = asyncio.subprocess.PIPE
    env = {name: value for name, value in environ().items() if not name.startswith("PYTHON")}
    return await wait_for_end(
        await asyncio.create_subprocess_exec(*command, cwd=cwd, env=env, stdout=pipe, stderr=pipe)
    )


# ---- make demo


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose `rookery` and `python` only log their calls."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, code in (("rookery", 0), ("python", 0)):
        script = tmp_path / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\necho "{name} $*"\nexit {code}\n')
        script.chmod(0o755)
    return tmp_path


def _make(folder: Path, *args: str) -> str:
    # Ignore the variables of a make that may have started the tests.
    env = {
        name: value for name, value in environ().items() if not name.startswith(("MAKE", "MFLAGS", "DEMO_ARGS"))
    }
    done = subprocess.run(["make", "demo", *args], cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout


def test_make_demo_installs_the_core_once_and_passes_options_on(checkout: Path) -> None:
    first = _make(checkout, "DEMO_ARGS=-n 3")
    assert "pip install" in first
    assert "[dev]" not in first
    assert first.endswith("rookery demo -n 3\n")
    assert _make(checkout) == "rookery demo\n"
    later = (checkout / ".venv" / ".core").stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (later, later))
    assert "pip install" in _make(checkout)


def test_make_demo_uses_the_installation_of_the_tests(checkout: Path) -> None:
    stamp = checkout / ".venv" / ".installed"
    stamp.touch()
    later = (checkout / "pyproject.toml").stat().st_mtime + 10
    os.utime(stamp, (later, later))
    assert _make(checkout) == "rookery demo\n"
