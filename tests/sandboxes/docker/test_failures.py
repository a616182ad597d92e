"""Deaths of engines and owners: lost sandboxes are reported, the rest continues, and nothing is left."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from rookery import Context, Engine, Environment
from rookery.core import SandboxError, SandboxSpec, label
from rookery.engine.retry import RetryPolicy
from rookery.sandboxes import Command, ProviderHome, leases
from rookery.sandboxes.docker import client, orphans
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.reaper import reap
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.servers import Answer, ModelServer
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("docker")
WAIT_FOR_GO = "i=0; while [ ! -e /work/go ] && [ $i -lt 600 ]; do sleep 0.1; i=$((i+1)); done"
SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=64 << 20, pids=32)


@pytest.fixture
def restartable_engine(engine: PrivateEngine) -> Iterator[PrivateEngine]:
    """Yield an engine that the test may kill; it is started again afterwards."""
    yield engine
    if not engine.is_alive():
        engine.start()


@pytest.mark.long
async def test_dead_engine_loses_containers_and_creations_wait_for_it(
    home: ProviderHome, restartable_engine: PrivateEngine
) -> None:
    provider = DockerProvider(home, image=IMAGE, engine=restartable_engine.socket)
    try:
        sandbox = await provider.create(SPEC, attempt="a")
        process = await sandbox.start(Command(argv=("sleep", "600")))
        restartable_engine.kill()
        assert (await process.wait(timeout=60)).status == "lost"
        with pytest.raises(SandboxError) as lost:
            await sandbox.exec(Command(argv=("true",)))
        assert lost.value.code == "sandbox.lost"
        with pytest.raises(client.EngineUnreachable) as caught:
            await provider.create(SPEC, attempt="b", timeout=0.3)
        assert caught.value.fault == "infra"
        creation = asyncio.create_task(provider.create(SPEC, attempt="c"))
        await asyncio.wait({creation}, timeout=0.2)
        restartable_engine.start()
        other = await creation
        assert (await other.exec(Command(argv=("true",)))).ok
        assert other.id != sandbox.id
    finally:
        await provider.close()
    assert restartable_engine.containers() == []


@pytest.mark.long
async def test_failed_removal_is_retried_later(
    home: ProviderHome, restartable_engine: PrivateEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        DockerProvider, "remove_container", partialmethod(DockerProvider.remove_container, seconds=0.2)
    )
    provider = DockerProvider(home, image=IMAGE, engine=restartable_engine.socket)
    sandbox = await provider.create(SPEC, attempt="a")
    restartable_engine.kill()
    await sandbox.close()
    assert leases.lease_path(home.folder, sandbox.id).exists()
    restartable_engine.start()
    await provider.close()
    assert restartable_engine.containers() == []


class WaitingEnvironment(Environment):
    """Environment that waits in its sandbox for the file `go`."""

    name = "waiting"
    started: ClassVar[set[str]] = set()
    go: ClassVar[asyncio.Event]

    async def run(self, ctx: Context) -> None:
        sandbox = await ctx.sandbox()
        WaitingEnvironment.started.add(sandbox.id)
        for _ in range(2):
            result = await sandbox.exec(Command(argv=("sh", "-c", WAIT_FOR_GO), wall=60.0))
            if result.status == "lost":
                raise SandboxError(f"the sandbox was lost: {result.detail}")
            if WaitingEnvironment.go.is_set():
                break
        await ctx.policy.chat(ctx.task.prompt)

    async def score(self, ctx: Context) -> float:
        return 1.0


# Creating the containers takes most of the time.
@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.long)])
async def test_attempts_of_a_killed_engine_are_retried(
    restartable_engine: PrivateEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{restartable_engine.socket}")
    WaitingEnvironment.started, WaitingEnvironment.go = set(), asyncio.Event()
    async with ModelServer(lambda _: Answer("ok", prompt_ids=[1, 2], ids=[3], logprobs=[-1.0])) as model:
        engine = Engine(
            WaitingEnvironment(),
            policy=model.url,
            out=tmp_path / "runs",
            sandbox=SPEC,
            runners=0,
            concurrency=count,
            breaker=None,
            retry=RetryPolicy(attempts=4, base=0.01),
        )
        async with engine:

            async def groups() -> list[object]:
                tasks = [f"question {n}" for n in range(count)]
                return [group async for group in engine.groups(tasks, k=1)]

            running = asyncio.create_task(groups())
            async with asyncio.timeout(100):
                await wait_until(lambda: len(WaitingEnvironment.started) >= count)
                restartable_engine.kill()
                WaitingEnvironment.go.set()
                restartable_engine.start()
                # The second attempts find the file that they wait for.
                found = await asyncio.gather(running, _release_all(restartable_engine, running))
    rollouts = [rollout for group in found[0] for rollout in group.rollouts]  # type: ignore[attr-defined]
    assert len(rollouts) == count
    for rollout in rollouts:
        assert label(rollout.outcome) == "completed"
        first, *_, last = [label(attempt.outcome) for attempt in rollout.attempts]
        assert first in ("sandbox.lost", "sandbox.create"), rollout.attempts
        assert rollout.attempts[0].outcome.fault == "infra"  # type: ignore[union-attr]
        assert last == "completed"
    assert restartable_engine.containers() == []


async def _release_all(engine: PrivateEngine, running: "asyncio.Task[list[object]]") -> None:
    """Create the file `go` in every container until the run has ended."""
    done: set[str] = set()
    engine_client = client.EngineClient(engine.socket)
    try:
        while not running.done():
            for one in await engine_client.call("GET", client.api_path("containers", "json")):
                if one["Id"] not in done:
                    body = {"Cmd": ["touch", "/work/go"], "User": "1000", "AttachStdout": True}
                    created = await engine_client.call(
                        "POST", client.api_path("containers", one["Id"], "exec"), body, ok=(404, 409)
                    )
                    if created is not None:
                        started = client.api_path("exec", created["Id"], "start")
                        await engine_client.call("POST", started, {"Detach": False}, ok=(404, 409))
                        ended = await engine_client.call(
                            "GET", client.api_path("exec", created["Id"], "json"), ok=(404,)
                        )
                        # Its pid 1 may not have created /work yet.
                        if ended is not None and ended["ExitCode"] == 0:
                            done.add(one["Id"])
            await asyncio.wait({running}, timeout=0.2)
    finally:
        await engine_client.close()


@pytest.mark.long
def test_killed_owner_leaves_nothing_after_reaping(engine: PrivateEngine, tmp_path: Path) -> None:
    folder = tmp_path / "sandboxes"
    command = [sys.executable, "-m", "tests.sandboxes.docker.owner", str(folder), engine.socket, "3"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        assert len(engine.containers()) == 3
        assert orphans.reap(client.BlockingEngineClient(engine.socket)) == []
        assert reap(folder, now=time.time()) == []
        assert len(engine.containers()) == 3
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    assert len(reap(folder, now=time.time())) == 4  # three sandboxes and the bundle of pid 1
    assert engine.containers() == []
    assert [path.name for path in folder.iterdir()] == ["leases"]


@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.long)])
async def test_next_provider_removes_containers_of_a_killed_owner(
    home: ProviderHome, engine: PrivateEngine, tmp_path: Path, count: int
) -> None:
    """The containers are paused, so they do not notice the death of their owner."""
    command = [
        sys.executable,
        "-m",
        "tests.sandboxes.docker.owner",
        str(tmp_path / "dead"),
        engine.socket,
        str(count),
    ]
    owner = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"ready\n"
        names = engine.names()
        assert len(names) == count
        for name in names:
            engine.pause(name)
    finally:
        owner.kill()
        await owner.wait()
    assert sorted(engine.names()) == sorted(names)
    provider = DockerProvider(home, image=IMAGE, engine=engine.socket)
    try:
        sandbox = await provider.create(SPEC, attempt="next", timeout=200.0)
        assert engine.names() == [orphans.container_name(sandbox.id)]
    finally:
        await provider.close()
    assert engine.containers() == []
    assert len(reap(tmp_path / "dead", now=time.time())) == count + 1


def test_boot_label_is_empty_if_the_boot_id_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leases, "read_boot_id", lambda: "")
    labels = orphans.make_labels(leases.create_lease("one", "r", "a", "docker", tmp_path))
    assert labels[orphans.BOOT] == ""


def test_only_containers_of_dead_owners_are_reaped(engine: PrivateEngine, tmp_path: Path) -> None:
    """The containers are never started, so they do not end by themselves."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    mine = leases.create_lease("mine", "r", "a", "docker", tmp_path)
    dead_lease = msgspec.structs.replace(mine, id="gone", owner_pid=dead.pid, owner_started=1)
    overdue = msgspec.structs.replace(mine, id="late", deadline=1.0)
    boot = orphans.read_boot_label().partition("/")[0]
    labels_by_name = {
        "mine": orphans.make_labels(mine),
        "gone": orphans.make_labels(dead_lease),
        "late": orphans.make_labels(overdue),
        "elsewhere": {**orphans.make_labels(dead_lease), orphans.MACHINE: "another"},
        "unseen": {
            **orphans.make_labels(dead_lease),
            orphans.BOOT: f"{boot}/1",
        },
        "reborn": {**orphans.make_labels(mine), orphans.BOOT: "before/1"},
        "foreign": {"team": "blue"},
    }
    for name, labels in labels_by_name.items():
        engine.create(f"reap-{name}", labels)
    for name in ("mine", "gone", "foreign"):
        engine.commit(f"reap-{name}", f"rookery-snapshot:{name}")
    try:
        reaped = orphans.reap(client.BlockingEngineClient(engine.socket))
        assert sorted(reaped) == ["gone", "late", "mine"]  # `mine` is the lease of `reborn`
        assert sorted(engine.names()) == ["reap-elsewhere", "reap-foreign", "reap-mine", "reap-unseen"]
    finally:
        for name in engine.names():
            orphans.remove_container(client.BlockingEngineClient(engine.socket), name)
        left = engine.snapshots()
        for name in left:
            client.BlockingEngineClient(engine.socket).call("DELETE", f"/images/{name}?force=1", timeout=10.0)
    assert sorted(left) == ["rookery-snapshot:foreign", "rookery-snapshot:mine"]
