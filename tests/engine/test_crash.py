"""SIGKILL at any moment: resume keeps finished rollouts, runs the others again and leaves nothing behind."""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rookery.core import Completed, UsageError
from rookery.engine import Engine
from rookery.journal import RunReader
from rookery.sandbox_runtime import processes
from tests.engine.conftest import build_engine, records
from tests.engine.crash_run import TASKS, K
from tests.processes import cmdline, descendants
from tests.servers import ModelServer

KINDS = ["supervisor", "runner", "guard", "payload"]


def victim(kind: str, supervisor: int, rng: random.Random) -> int | None:
    """Return a process of this kind, or None if there is none at the moment."""
    if kind == "supervisor":
        return supervisor
    tree = descendants(supervisor)
    sandboxed = [pid for pid in tree if processes.read_variable(pid, processes.SANDBOX_VARIABLE)]
    runners = [pid for pid in tree if b"rookery.engine.runner" in cmdline(pid)]
    guards = [pid for pid in tree if pid not in sandboxed and pid not in runners]
    choice = {"runner": runners, "guard": guards, "payload": sandboxed}[kind]
    return rng.choice(choice) if choice else None


Launch = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start() -> AsyncIterator[Launch]:
    """Return a function that starts a run in its own process; all of them are killed after the test."""
    started: list[asyncio.subprocess.Process] = []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    async def launch(what: str, folder: Path, url: str, *options: str) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "tests.engine.crash_run", what, str(folder), url, *options]
        run = await asyncio.create_subprocess_exec(*command, env=env, stdout=asyncio.subprocess.DEVNULL)
        started.append(run)
        return run

    yield launch
    for run in started:
        if run.returncode is None:
            run.kill()
            await run.wait()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
async def test_sigkill_at_any_moment_loses_duplicates_and_leaves_nothing(
    model: ModelServer, tmp_path: Path, start: Launch, seed: int
) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "runs"
    run = await start("new", folder, model.url)
    kills = Counter[str]()
    for _ in range(10):
        before = len(model.requests)
        reached = asyncio.create_task(model.wait_for_requests(before + rng.randrange(1, 12)))
        ended = asyncio.create_task(run.wait())
        await asyncio.wait({reached, ended}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if ended.done():
            assert run.returncode == 0
            break
        ended.cancel()
        kind = rng.choice(KINDS)
        pid = victim(kind, run.pid, rng)
        if pid is None:
            continue
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        kills[kind] += 1
        if kind == "supervisor":
            assert await run.wait() == -signal.SIGKILL
            run = await start("resume" if (folder / "latest").exists() else "new", folder, model.url)
    assert await asyncio.wait_for(run.wait(), 120) == 0
    assert kills
    with RunReader(folder / "latest") as reader:
        written = list(reader.iter_rollouts())
        assert Counter(record.id for record in written) == {f"{g}.{m}": 1 for g in range(TASKS) for m in range(K)}
        assert {record.task for record in written} == {task.id for task in reader.tasks()}
        assert reader.status == "finished"
        assert not reader.unfinished(checksums=True).groups
        for record in written:
            assert record.outcome == Completed(), record
            assert record.reward == 1.0
            assert len(reader.turns(record)) == 1
        run_name = (folder / "latest").resolve().name
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    assert [
        pid
        for pid in everyone
        if (processes.read_variable(pid, processes.SANDBOX_VARIABLE) or "").startswith(run_name)
    ] == []


@pytest.mark.long
async def test_killed_supervisor_ends_all_its_processes_within_seconds(
    model: ModelServer, tmp_path: Path, start: Launch
) -> None:
    folder = tmp_path / "runs"
    run = await start("new", folder, model.url)
    await model.wait_for_requests(6)
    tree = []
    for pid in descendants(run.pid):
        with suppress(ProcessLookupError):  # short commands start and end
            tree.append(os.pidfd_open(pid))
    run.kill()
    await run.wait()
    assert len(tree) >= 4
    loop = asyncio.get_running_loop()
    for fd in tree:
        gone = asyncio.Event()
        loop.add_reader(fd, gone.set)
        await asyncio.wait_for(gone.wait(), 60)
        loop.remove_reader(fd)
        os.close(fd)
    again = await start("resume", folder, model.url)
    assert await asyncio.wait_for(again.wait(), 60) == 0
    assert len(records(tmp_path)) == TASKS * K


async def test_second_resume_of_a_live_run_is_refused(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert engine.folder is not None
        with pytest.raises(Exception, match=str(os.getpid())):
            async with Engine.resume(engine.folder, env="tests.engine.envs:Misbehaving"):
                pass
        groups = [group async for group in engine.groups(["a"])]
    assert len(groups) == 1


async def test_resume_of_a_finished_run_runs_nothing(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert [group.index async for group in engine.groups(["a", "b"])] == [0, 1]
    async with Engine.resume(tmp_path / "runs" / "latest") as again:
        assert [group async for group in again.groups()] == []
    assert len(model.requests) == 2


async def test_run_with_an_environment_object_is_resumed_from_python(model: ModelServer, tmp_path: Path) -> None:
    from tests.engine.envs import Misbehaving

    async with build_engine(model, tmp_path, env=Misbehaving()) as engine:
        await anext(engine.groups(["a", "b"]))
    with pytest.raises(UsageError, match=r"Engine\.resume"):
        Engine.resume(tmp_path / "runs" / "latest")
    async with Engine.resume(tmp_path / "runs" / "latest", env=Misbehaving()) as again:
        assert [group.index async for group in again.groups()] in ([], [1])
    assert len(records(tmp_path)) == 2
