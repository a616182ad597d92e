"""Agents are installed once per machine, completely or not at all."""

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
    find_problems,
    host_python,
    install_agent,
    install_dir,
    list_platform_tags,
    parse_probe_output,
)
from tests.environments.agent.helpers import agents_directory, scripted_engine, scripted_model
from tests.servers import ModelServer
from tests.waiting import wait_until

SRC = Path(__file__).parents[3] / "src"


def make_launcher(*scripts: str, seconds: float = 60.0) -> Launcher:
    commands = tuple(("sh", "-c", script) for script in scripts)
    return Launcher(
        name="mine", command=("{agent}/x", "{prompt}"), install=Install(commands=commands, seconds=seconds)
    )


def find_staging_directories(home: Path) -> list[str]:
    return [path.name for path in home.iterdir() if path.name.endswith(".part")]


async def test_concurrent_requests_install_an_agent_once(tmp_path: Path) -> None:
    count = tmp_path / "count"
    agent = make_launcher(f"echo x >> {count}; echo hello > x; chmod 600 x; chmod 700 .; sleep 0.2")
    home = tmp_path / "home"
    reports: list[str] = []
    directories = await asyncio.gather(
        *(install_agent(agent, home=home, report=reports.append) for _ in range(100))
    )
    (directory,) = set(directories)
    assert count.read_text() == "x\n"
    assert (directory / "x").read_text() == "hello\n"
    assert (directory / "x").stat().st_mode & 0o444 == 0o444, "every user of a sandbox may read it"
    assert (directory / "start.py").is_file()
    assert find_staging_directories(home) == []
    assert len(reports) == 2
    assert await install_agent(agent, home=home) == directory
    assert count.read_text() == "x\n"


@pytest.mark.long
async def test_concurrent_processes_install_an_agent_once(tmp_path: Path) -> None:
    write_program = textwrap.dedent(f"""
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
            sys.executable, "-c", write_program, env=env, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(4)
    ]
    results = await asyncio.gather(*(one.communicate() for one in started))
    assert len({out for out, _ in results}) == 1
    assert (tmp_path / "count").read_text() == "x\n"


async def test_killed_installation_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    """The next installation waits for processes that survived the killed one."""
    home = tmp_path / "home"
    write_program = textwrap.dedent(f"""
        import asyncio, pathlib
        from rookery.environments.agent import Install, Launcher
        from rookery.environments.agent.installation import install_agent
        commands = (("sh", "-c", "echo half > x; echo $$; [ -e {tmp_path}/again ] || sleep 600"),)
        mine = Launcher(name="mine", command=("{{agent}}/x", "{{prompt}}"), install=Install(commands=commands))
        asyncio.run(install_agent(mine, home=pathlib.Path("{home}")))
    """)
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", write_program, env=env)
    await wait_until(lambda: list(home.glob(".*.part/x")))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    await process.wait()
    assert not [path for path in home.iterdir() if not path.name.startswith(".")]
    (tmp_path / "again").touch()
    commands = (("sh", "-c", f"echo half > x; echo $$; [ -e {tmp_path}/again ] || sleep 600"),)
    agent = Launcher(name="mine", command=("{agent}/x", "{prompt}"), install=Install(commands=commands))
    reports: list[str] = []
    installing = asyncio.create_task(install_agent(agent, home=home, report=reports.append))
    await wait_until(lambda: reports)
    assert len(reports) == 1
    for pid in children:
        os.killpg(int(pid), signal.SIGKILL)
    directory = await installing
    assert (directory / "installed.json").is_file()
    assert find_staging_directories(home) == []


async def test_installation_is_killed_when_all_its_callers_are_cancelled(tmp_path: Path) -> None:
    home = tmp_path / "home"
    agent = make_launcher(f"echo $$ > {tmp_path}/pid; sleep 600")
    installing = [asyncio.create_task(install_agent(agent, home=home)) for _ in range(2)]
    await wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = int((tmp_path / "pid").read_text())
    installing[0].cancel()
    await asyncio.wait({installing[0]})
    assert Path(f"/proc/{pid}").exists(), "another caller still waits"
    installing[1].cancel()
    await asyncio.wait({installing[1]})
    assert not Path(f"/proc/{pid}").exists()
    assert find_staging_directories(home) == []


async def test_failed_installation_reports_its_output_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RookeryError, match="no such package") as error:
        await install_agent(make_launcher("echo no such package >&2; exit 7"), home=tmp_path / "home")
    assert (error.value.code, error.value.fault) == ("agent.start", "infra")
    assert find_staging_directories(tmp_path / "home") == []
    with pytest.raises(RookeryError) as error:
        await install_agent(make_launcher("sleep 600", seconds=0.3), home=tmp_path / "home")
    assert error.value.code == "agent.start"
    assert find_staging_directories(tmp_path / "home") == []
    agent = Launcher(
        name="mine", command=("{agent}/x", "{prompt}"), install=Install(commands=(("no-such-program",),))
    )
    with pytest.raises(UsageError, match="no-such-program"):
        await install_agent(agent, home=tmp_path / "home")


def test_installation_directory_depends_on_packages_and_python(tmp_path: Path) -> None:
    assert find_problems(Install(commands=(("no-such-program",),))) != []
    one = Launcher(name="a", command=("{agent}/x", "{prompt}"), install=Install(python=("x==1",)))
    two = Launcher(name="a", command=("{agent}/x", "{prompt}"), install=Install(python=("x==2",)))
    old = PythonPlatform(version="3.9", machine="x86_64", libc="glibc-2.31")
    directories = {
        install_dir(launcher, python, tmp_path) for launcher in (one, two) for python in (host_python(), old)
    }
    assert len(directories) == 4
    other = Launcher(name="a", command=("{agent}/y", "{prompt}"), install=Install(python=("x==1",)))
    assert install_dir(other, old, tmp_path) == install_dir(one, old, tmp_path), "the command does not count"


async def test_python_platform_is_probed_and_mapped_to_platform_tags() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROBE, stdout=asyncio.subprocess.PIPE)
    reports, _ = await process.communicate()
    assert parse_probe_output(reports) == host_python()
    assert host_python().is_host
    old = PythonPlatform(version="3.9", machine="aarch64", libc="glibc-2.31")
    assert list_platform_tags(old)[0] == "manylinux_2_31_aarch64"
    assert "manylinux2014_aarch64" in list_platform_tags(old)
    musl = PythonPlatform(version="3.12", machine="x86_64", libc="musl-1.2")
    assert list_platform_tags(musl) == ["musllinux_1_2_x86_64", "musllinux_1_1_x86_64"]


@given(st.binary(max_size=40))
def test_invalid_probe_output_is_no_python(answer: bytes) -> None:
    found = parse_probe_output(answer)
    assert found is None or found.version.count(".") <= 1


def test_python_that_is_too_old_is_rejected() -> None:
    assert parse_probe_output(b"3.6 x86_64 glibc-2.28\n") is None
    assert parse_probe_output(b"2.7 x86_64 glibc-2.28\n") is None
    assert parse_probe_output(b"3.8 x86_64 glibc-2.28\n") is not None


async def test_engine_installs_the_agent_before_the_first_rollout(tmp_path: Path) -> None:
    agent = make_launcher("echo > x")
    reports: list[str] = []
    async with ModelServer(scripted_model("42")) as server:
        launcher = scripted_engine(server, AgentEnvironment(agent), tmp_path)
        launcher.on_preparation = reports.append
        with agents_directory(tmp_path / "agents"):
            async with launcher:
                assert (install_dir(agent, host_python(), tmp_path / "agents") / "x").is_file()
    assert reports
