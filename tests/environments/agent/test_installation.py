"""Agents are installed once for a machine, whole or not at all."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.core import RookeryError, UsageError
from rookery.environments.agent import AgentEnvironment, Install, Launcher
from rookery.environments.agent.installation import (
    PROBE,
    PythonPlatform,
    _list_platform_tags,
    find_problems,
    host_python,
    install_agent,
    install_dir,
    parse_probe_output,
)
from tests.environments.agent.kit import agents_at, scripted, scripted_engine
from tests.servers import ModelServer

SRC = Path(__file__).parents[3] / "src"


def launcher(*scripts: str, seconds: float = 60.0) -> Launcher:
    commands = tuple(("sh", "-c", script) for script in scripts)
    return Launcher(
        name="mine", command=("{agent}/x", "{prompt}"), install=Install(commands=commands, seconds=seconds)
    )


def left_over(home: Path) -> list[str]:
    return [path.name for path in home.iterdir() if path.name.endswith(".part")]


async def test_an_agent_is_installed_once_however_many_ask_together(tmp_path: Path) -> None:
    count = tmp_path / "count"
    mine = launcher(f"echo x >> {count}; echo hello > x; chmod 600 x; chmod 700 .; sleep 0.2")
    home = tmp_path / "home"
    said: list[str] = []
    folders = await asyncio.gather(*(install_agent(mine, home=home, report=said.append) for _ in range(100)))
    (folder,) = set(folders)
    assert count.read_text() == "x\n"
    assert (folder / "x").read_text() == "hello\n"
    assert (folder / "x").stat().st_mode & 0o444 == 0o444, "whoever the box's user is may read it"
    assert (folder / "start.py").is_file()
    assert left_over(home) == []
    assert any("step 1 of 1" in text for text in said)
    assert await install_agent(mine, home=home) == folder
    assert count.read_text() == "x\n"


async def test_processes_that_ask_together_install_it_once(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import asyncio, pathlib
        from rookery.environments.agent import Install, Launcher
        from rookery.environments.agent.installation import install_agent
        commands = (("sh", "-c", "echo x >> {tmp_path}/count; sleep 0.3"),)
        mine = Launcher(name="mine", command=("{{agent}}/x", "{{prompt}}"), install=Install(commands=commands))
        print(asyncio.run(install_agent(mine, home=pathlib.Path("{tmp_path}/home"))))
    """)
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, env=env, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(4)
    ]
    ends = await asyncio.gather(*(one.communicate() for one in started))
    assert len({out for out, _ in ends}) == 1
    assert (tmp_path / "count").read_text() == "x\n"


async def test_a_killed_install_leaves_nothing_that_counts(tmp_path: Path) -> None:
    """And the next one waits for what still lives of it."""
    home = tmp_path / "home"
    program = textwrap.dedent(f"""
        import asyncio, pathlib
        from rookery.environments.agent import Install, Launcher
        from rookery.environments.agent.installation import install_agent
        commands = (("sh", "-c", "echo half > x; echo $$; [ -e {tmp_path}/again ] || sleep 600"),)
        mine = Launcher(name="mine", command=("{{agent}}/x", "{{prompt}}"), install=Install(commands=commands))
        asyncio.run(install_agent(mine, home=pathlib.Path("{home}")))
    """)
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=env)
    async with asyncio.timeout(30):
        while not list(home.glob(".*.part/x")):
            await asyncio.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    await process.wait()
    assert not [path for path in home.iterdir() if not path.name.startswith(".")]
    (tmp_path / "again").touch()
    commands = (("sh", "-c", f"echo half > x; echo $$; [ -e {tmp_path}/again ] || sleep 600"),)
    mine = Launcher(name="mine", command=("{agent}/x", "{prompt}"), install=Install(commands=commands))
    said: list[str] = []
    asking = asyncio.create_task(install_agent(mine, home=home, report=said.append))
    async with asyncio.timeout(30):
        while not said:
            await asyncio.sleep(0.01)
    assert said == ["mine is being installed by another process"]
    for pid in children:
        os.killpg(int(pid), signal.SIGKILL)
    folder = await asking
    assert (folder / "installed.json").is_file()
    assert left_over(home) == []


async def test_an_install_that_nobody_wants_any_more_ends_with_all_that_it_began(tmp_path: Path) -> None:
    home = tmp_path / "home"
    mine = launcher(f"echo $$ > {tmp_path}/pid; sleep 600")
    asking = [asyncio.create_task(install_agent(mine, home=home)) for _ in range(2)]
    async with asyncio.timeout(30):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    asking[0].cancel()
    await asyncio.wait({asking[0]})
    assert Path(f"/proc/{pid}").exists(), "another still wants it"
    asking[1].cancel()
    await asyncio.wait({asking[1]})
    assert not Path(f"/proc/{pid}").exists()
    assert left_over(home) == []


async def test_a_failure_says_what_failed_and_the_end_of_its_output(tmp_path: Path) -> None:
    with pytest.raises(RookeryError, match="no such package") as error:
        await install_agent(launcher("echo no such package >&2; exit 7"), home=tmp_path / "home")
    assert (error.value.code, error.value.fault) == ("agent.start", "infra")
    assert left_over(tmp_path / "home") == []
    with pytest.raises(RookeryError, match="longer than"):
        await install_agent(launcher("sleep 600", seconds=0.3), home=tmp_path / "home")
    assert left_over(tmp_path / "home") == []
    lacking = Launcher(
        name="mine", command=("{agent}/x", "{prompt}"), install=Install(commands=(("no-such-program",),))
    )
    with pytest.raises(UsageError, match="no-such-program"):
        await install_agent(lacking, home=tmp_path / "home")


def test_another_install_or_another_python_is_another_directory(tmp_path: Path) -> None:
    assert find_problems(Install(commands=(("no-such-program",),))) != []
    one = Launcher(name="a", command=("{agent}/x", "{prompt}"), install=Install(python=("x==1",)))
    two = Launcher(name="a", command=("{agent}/x", "{prompt}"), install=Install(python=("x==2",)))
    old = PythonPlatform(version="3.9", machine="x86_64", libc="glibc-2.31")
    folders = {install_dir(made, python, tmp_path) for made in (one, two) for python in (host_python(), old)}
    assert len(folders) == 4
    other = Launcher(name="a", command=("{agent}/y", "{prompt}"), install=Install(python=("x==1",)))
    assert install_dir(other, old, tmp_path) == install_dir(one, old, tmp_path), "only what is installed counts"


async def test_a_python_tells_what_packages_have_to_fit() -> None:
    asked = await asyncio.create_subprocess_exec(sys.executable, "-c", PROBE, stdout=asyncio.subprocess.PIPE)
    said, _ = await asked.communicate()
    assert parse_probe_output(said) == host_python()
    assert host_python().is_host
    old = PythonPlatform(version="3.9", machine="aarch64", libc="glibc-2.31")
    assert _list_platform_tags(old)[0] == "manylinux_2_31_aarch64"
    assert "manylinux2014_aarch64" in _list_platform_tags(old)
    musl = PythonPlatform(version="3.12", machine="x86_64", libc="musl-1.2")
    assert _list_platform_tags(musl) == ["musllinux_1_2_x86_64", "musllinux_1_1_x86_64"]


@given(st.binary(max_size=40))
def test_an_answer_that_is_invalid_is_not_a_python(answer: bytes) -> None:
    found = parse_probe_output(answer)
    assert found is None or found.version.count(".") <= 1


def test_a_python_that_is_too_old_is_none() -> None:
    assert parse_probe_output(b"3.6 x86_64 glibc-2.28\n") is None
    assert parse_probe_output(b"2.7 x86_64 glibc-2.28\n") is None
    assert parse_probe_output(b"3.8 x86_64 glibc-2.28\n") is not None


async def test_an_engine_installs_the_agent_before_the_first_rollout(tmp_path: Path) -> None:
    mine = launcher("echo > x")
    reports: list[str] = []
    async with ModelServer(scripted("42")) as server:
        made = scripted_engine(server, AgentEnvironment(mine), tmp_path)
        made.on_preparation = reports.append
        with agents_at(tmp_path / "agents"):
            async with made:
                assert (install_dir(mine, host_python(), tmp_path / "agents") / "x").is_file()
    assert reports
