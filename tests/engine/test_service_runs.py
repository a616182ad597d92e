"""Whole runs with the documentation's example of a service that rents machines, which fails in every way."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rookery import Engine
from rookery.core import Failed, Rollout, SandboxSpec, label
from rookery.engine import sandbox_factory
from rookery.sandboxes.remote import QuotaExceeded, service
from tests.docs.test_docs import ROOT, blocks
from tests.engine.conftest import records, run_groups
from tests.engine.envs import WithSandbox
from tests.processes import cmdline, descendants, send_signal
from tests.servers import ModelServer
from tests.waiting import wait_until

SPEC = SandboxSpec(provider="folders", untrusted_ok=True)
KILLED_RUN = """
import asyncio, sys
from rookery import Engine, SandboxSpec
from tests.engine.envs import WithSandbox

class Waiting(WithSandbox):
    async def run(self, ctx):
        await ctx.sandbox()
        print("ready", flush=True)
        await asyncio.sleep(600)

async def main():
    sandbox = SandboxSpec(provider="folders", untrusted_ok=True)
    async with Engine(Waiting(), policy=sys.argv[1], out=sys.argv[2], runners=0, sandbox=sandbox) as engine:
        [group async for group in engine.groups(["a task"])]

asyncio.run(main())
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as an installed package. Tests replace methods of its class `Folders`."""
    packages = tmp_path / "packages"
    info = packages / "rented_folders-1.0.dist-info"
    info.mkdir(parents=True)
    text = blocks(ROOT / "docs/guides/remote-sandboxes.md", "python")[0]
    text = text.replace('Path(tempfile.gettempdir()) / "rented-folders"', f"Path({str(tmp_path / 'rented')!r})")
    (packages / "rented_folders.py").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rented-folders\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rookery.sandboxes]\nfolders = rented_folders:open_folders\n")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(service, "MIN_WAIT", 0.01)
    sys.modules.pop("rented_folders", None)
    return importlib.import_module("rented_folders")


def list_machines(folders: ModuleType) -> list[str]:
    return [path.parent.name for path in folders.FOLDER.glob("*/labels.json")]


async def run(model: ModelServer, tmp_path: Path, tasks: int = 1, **options: Any) -> list[Rollout]:
    options = {"concurrency": 6, "warm": 0, "sandbox": SPEC, "breaker": None, **options}
    await run_groups(model, tmp_path, [f"task {n}" for n in range(tasks)], env=WithSandbox(), **options)
    return records(tmp_path)


def causes(rollout: Rollout) -> list[str]:
    """Return the causes of the failed attempts of a rollout."""
    return [one.outcome.cause for one in rollout.attempts if isinstance(one.outcome, Failed)]


def fail(
    monkeypatch: pytest.MonkeyPatch, folders: ModuleType, method: str, times: float, error: Exception
) -> list[str]:
    """Let the first calls of a method of the service fail; return a list to which each call is added."""
    calls: list[str] = []
    works = getattr(folders.Folders, method)

    async def call(*args: Any, **options: Any) -> Any:
        calls.append(method)
        if len(calls) <= times:
            raise error
        return await works(*args, **options)

    monkeypatch.setattr(folders.Folders, method, call)
    return calls


@pytest.mark.long
async def test_built_in_tools_work_on_other_machines(folders: ModuleType, tmp_path: Path) -> None:
    options: dict[str, Any] = {"runners": 0, "warm": 0, "breaker": None}
    async with Engine("arithmetic", policy="embedded", out=tmp_path, sandbox=SPEC, **options) as engine:
        groups = [group async for group in engine.groups(k=2, want=4)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert not [rollout.outcome for rollout in rollouts if isinstance(rollout.outcome, Failed)]
    assert sum(rollout.usage.tool_calls for rollout in rollouts) > 0
    assert not list_machines(folders)


@pytest.mark.parametrize("method", ["create", "exec", "delete"])
async def test_service_that_is_down_for_a_while_fails_no_rollout(
    method: str, folders: ModuleType, model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = 1 if method == "exec" else 2
    calls = fail(monkeypatch, folders, method, times, ConnectionError("down"))
    (rollout,) = await run(model, tmp_path)
    assert (label(rollout.outcome), rollout.reward) == ("completed", 1.0)
    assert causes(rollout) == (["sandbox.host"] if method == "exec" else [])
    assert len(calls) > times
    assert not list_machines(folders)


@pytest.mark.parametrize("full", [False, True], ids=["down", "full"])
async def test_service_that_stays_unavailable_is_an_infrastructure_failure(
    full: bool, folders: ModuleType, model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MIN_WAIT", 10_000.0)  # it would be asked again after the deadline
    fail(monkeypatch, folders, "create", 1e9, QuotaExceeded("full") if full else ConnectionError("down"))
    (rollout,) = await run(model, tmp_path)
    assert isinstance(rollout.outcome, Failed)
    cause = "sandbox.quota" if full else "sandbox.create"
    assert (rollout.outcome.fault, causes(rollout)) == ("infra", [cause] * 3)


async def test_creation_beyond_the_deadline_leaves_no_machine(
    folders: ModuleType, model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_factory, "CREATE_SECONDS", 0.2)
    monkeypatch.setattr(sandbox_factory, "START_SECONDS", 0.2)
    works = folders.Folders.create

    async def create(*args: Any, **options: Any) -> str:
        await works(*args, **options)
        await asyncio.sleep(600)
        raise AssertionError

    monkeypatch.setattr(folders.Folders, "create", create)
    (rollout,) = await run(model, tmp_path)
    assert isinstance(rollout.outcome, Failed)
    assert (rollout.outcome.fault, causes(rollout)) == ("infra", ["sandbox.create"] * 3)
    assert not list_machines(folders)


@pytest.mark.long
async def test_quota_slows_the_run_and_fails_nothing(
    folders: ModuleType, model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, most = folders.Folders.create, 0

    async def create(*args: Any, **options: Any) -> str:
        nonlocal most
        if len(list_machines(folders)) >= 2:
            raise QuotaExceeded("only two machines")
        machine: str = await works(*args, **options)
        most = max(most, len(list_machines(folders)))
        return machine

    monkeypatch.setattr(folders.Folders, "create", create)
    rollouts = await run(model, tmp_path, 6)
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 6
    assert (most, [len(rollout.attempts) for rollout in rollouts]) == (2, [1] * 6)


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 3])
async def test_machine_that_disappears_is_replaced(
    times: int, folders: ModuleType, model: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = 0

    class Losing(WithSandbox):
        async def run(self, ctx: Any) -> None:
            nonlocal lost
            await ctx.sandbox()
            if lost < times:
                lost += 1
                hosts = [pid for pid in descendants(os.getpid()) if b"remote.host import main" in cmdline(pid)]
                send_signal(hosts, signal.SIGKILL)
            await super().run(ctx)

    groups = await run_groups(model, tmp_path, ["a task"], env=Losing(), sandbox=SPEC, warm=0, breaker=None)
    (rollout,) = groups[0].rollouts
    assert label(rollout.outcome) == ("completed" if times == 1 else "sandbox.lost"), rollout.outcome
    assert causes(rollout) == ["sandbox.lost"] * times
    assert not list_machines(folders)


@pytest.mark.long
async def test_next_run_removes_the_machines_of_a_killed_run(
    folders: ModuleType, model: ModelServer, tmp_path: Path
) -> None:
    path = os.pathsep.join((str(tmp_path / "packages"), str(ROOT)))
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED_RUN, model.url, str(tmp_path / "killed")),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert killed.stdout is not None
    assert await killed.stdout.readline() == b"ready\n"
    (left,) = list_machines(folders)
    killed.kill()
    await killed.wait()
    assert list_machines(folders) == [left]
    (rollout,) = await run(model, tmp_path)
    assert label(rollout.outcome) == "completed"
    await wait_until(lambda: not list_machines(folders))
