"""Containers: limits, privileges, images without Python, unsupported specs and cancelled creations."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import SandboxError, SandboxSpec, WorkerRecoveryError
from rookery.sandboxes import Command, ProviderHome, jobs
from rookery.sandboxes.docker import client, orphans
from rookery.sandboxes.docker.client import api_path
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.docker.sandbox import DockerSandbox
from rookery.workers import Worker, sandbox_for
from tests.processes import count_sockets
from tests.sandboxes.docker.engine import BARE, IMAGE, PrivateEngine
from tests.workers.conftest import LIMITS
from tests.workers.random_cells import RandomCells

pytestmark = [pytest.mark.needs("docker"), pytest.mark.asyncio(loop_scope="module")]
MB = 1 << 20
SPEC = SandboxSpec(provider="docker", image=IMAGE, memory=64 * MB, pids=32, wall=20.0)


@asynccontextmanager
async def open_sandbox(docker: DockerProvider, **changes: Any) -> AsyncIterator[DockerSandbox]:
    sandbox = await docker.create(msgspec.structs.replace(SPEC, **changes), attempt="a1")
    try:
        yield sandbox
    finally:
        await sandbox.close()


def sh(script: str, **more: Any) -> Command:
    return Command(argv=("sh", "-c", script), **more)


@pytest.mark.long
async def test_container_has_its_limits_and_no_privileges(docker: DockerProvider) -> None:
    async with open_sandbox(docker, cpus=0.5, labels={"team": "blue"}) as sandbox:
        details = await docker.engine.call(
            "GET", api_path("containers", orphans.container_name(sandbox.id), "json")
        )
        host, config = details["HostConfig"], details["Config"]
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (64 * MB, 64 * MB, 32)
        assert (host["NanoCpus"], host["NetworkMode"], host["Privileged"]) == (500_000_000, "none", False)
        assert config["Labels"]["team"] == "blue"
        assert config["Labels"][orphans.ATTEMPT] == "a1"
        result = await sandbox.exec(
            sh("id -u; grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status; ls /sys/class/net")
        )
        words = result.stdout.decode().split()
        assert words[0] == "1000"
        rights = dict(zip(words[1:-1:2], words[2:-1:2], strict=True))
        assert {int(value, 16) for name, value in rights.items() if name.startswith("Cap")} == {0}
        assert (rights["NoNewPrivs:"], rights["Seccomp:"], words[-1]) == ("1", "2", "lo")


async def test_memory_and_process_limits_apply_to_the_container(docker: DockerProvider) -> None:
    async with open_sandbox(docker) as sandbox:
        grow = Command(argv=("python3", "-c", "x = []\nwhile True: x.append(bytearray(4 << 20))"))
        assert (await sandbox.exec(grow)).status == "memory_limit"
        many = "i=0; while [ $i -lt 60 ]; do sleep 20 & i=$((i+1)); done; exit 3"
        assert (await sandbox.exec(sh(many))).status == "process_limit"


@pytest.mark.long
@pytest.mark.parametrize(
    "script",
    ["head -c 20000000 /dev/zero > big", "while :; do i=$((i+1)); head -c 2000000 /dev/zero > f$i; done"],
    ids=["one file", "many"],
)
async def test_disk_is_limited_without_storage_quotas(docker: DockerProvider, script: str) -> None:
    async with open_sandbox(docker, disk=8 * MB) as sandbox:
        result = await sandbox.exec(sh(f"trap '' XFSZ; {script}" if "while" in script else script))
        assert result.status == "disk_limit", result
        assert (await sandbox.exec(sh("rm -f big f*"))).ok
        assert (await sandbox.exec(sh("echo x > small"))).ok


async def test_read_only_container_has_a_writable_workdir(docker: DockerProvider) -> None:
    async with open_sandbox(docker, read_only=True, disk=4 * MB) as sandbox:
        assert (await sandbox.exec(sh("echo x > /work/x && echo y > /tmp/y"))).ok
        assert not (await sandbox.exec(sh("echo x > /etc/x"), on_output=None)).ok
        await sandbox.write("in", b"data")
        assert (await sandbox.exec(Command(argv=("cat", "in")))).stdout == b"data"
        assert (await sandbox.exec(sh("head -c 8000000 /dev/zero > big"))).status == "disk_limit"


async def test_an_image_needs_neither_python_nor_a_shell(docker: DockerProvider) -> None:
    async with open_sandbox(docker, image=BARE) as sandbox:
        assert await sandbox.read("/only") == b"this is no program\n"
        await sandbox.write("/work/file", b"x")
        result = await sandbox.exec(sh("true"))
        assert (result.status, result.exit_code) == ("exited", 127)
        with pytest.raises(SandboxError, match="bash"):
            await (await sandbox.shell()).run("true", timeout=60)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpus": 2}, "GPU"),
        ({"labels": {"rookery.run": "x"}}, "rookery.run"),
        ({"user": "somebody"}, "somebody"),
        ({"workdir": "../x"}, "'..'"),
        ({"memory": 1 * MB}, "memory"),
    ],
)
async def test_unsupported_spec_is_refused_with_the_reason(
    docker: DockerProvider, changes: dict[str, Any], named: str
) -> None:
    spec = msgspec.structs.replace(SPEC, **changes)
    assert named in " ".join(docker.check(spec))
    with pytest.raises(SandboxError, match=named) as caught:
        await docker.create(spec, attempt="a")
    assert caught.value.code == "sandbox.refused"


async def test_missing_engine_network_is_refused(docker: DockerProvider) -> None:
    spec = msgspec.structs.replace(SPEC, network="all")
    assert "'bridge'" in " ".join(docker.check(spec))
    with pytest.raises(SandboxError, match="'bridge'") as caught:
        await docker.create(spec, attempt="a")
    assert caught.value.code == "sandbox.refused"


async def test_missing_image_is_reported(home: ProviderHome, engine: PrivateEngine) -> None:
    bare = DockerProvider(home, engine=engine.socket)
    assert "image" in bare.check(SandboxSpec())[0]


async def test_missing_engine_is_reported(
    home: ProviderHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = DockerProvider(home, image=IMAGE, engine=str(tmp_path / "nobody"))
    assert str(tmp_path / "nobody") in provider.check(SandboxSpec())[0]
    with pytest.raises(client.EngineUnreachable):
        await provider.create(SandboxSpec(), attempt="a", timeout=0.2)
    await provider.close()
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    assert "tcp://elsewhere:2375" in DockerProvider(home, image=IMAGE).check(SandboxSpec())[0]


async def test_killed_container_is_reported_as_lost(docker: DockerProvider) -> None:
    async with open_sandbox(docker) as sandbox:
        shell = await sandbox.shell()
        assert (await shell.run("x=5", timeout=60)).ok
        task = asyncio.create_task(sandbox.exec(sh("echo $$ > here; sleep 600", wall=60.0)))
        await sandbox.exec(sh("while [ ! -e here ]; do sleep 0.02; done"))
        await docker.engine.call("POST", api_path("containers", orphans.container_name(sandbox.id), "kill"))
        async with asyncio.timeout(60):
            assert (await task).status == "lost"
            for call in (sandbox.exec(sh("true")), sandbox.read("here"), shell.run("echo $x", timeout=60)):
                with pytest.raises(SandboxError) as caught:
                    await call
                assert caught.value.code == "sandbox.lost"


@pytest.mark.parametrize("at", range(1, 5))
async def test_cancelled_creation_leaks_nothing(
    docker: DockerProvider, engine: PrivateEngine, home: ProviderHome, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The creation is cancelled at the n-th call to the engine."""
    calls = 0
    call = docker.engine.call
    task: asyncio.Task[Any] | None = None

    async def count_calls(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and task is not None:
            asyncio.get_running_loop().call_soon(task.cancel)
        return await call(*args, **more)

    monkeypatch.setattr(docker.engine, "call", count_calls)
    task = asyncio.create_task(docker.create(SPEC, attempt="a"))
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    if not isinstance(ended, asyncio.CancelledError):  # the creation made fewer calls
        assert isinstance(ended, DockerSandbox)
        await ended.close()
    assert engine.containers() == []
    left = {path.name for path in home.folder.iterdir()} - {"leases"}
    assert all(name.startswith("g") for name in left), left  # the bundle of pid 1 stays until the provider closes


async def test_connections_to_the_engine_are_limited(docker: DockerProvider) -> None:
    before = count_sockets()
    calls = asyncio.gather(*(docker.engine.call("GET", "/_ping") for _ in range(200)))
    most = 0
    while not calls.done():
        most = max(most, count_sockets() - before)
        await asyncio.sleep(0)
    await calls
    assert 1 < most <= client.MAX_CONNECTIONS
    assert count_sockets() - before <= client.MAX_CONNECTIONS


@pytest.mark.long
async def test_frozen_guard_is_removed_by_the_engine(
    docker: DockerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_SECONDS", 0.5)
    async with open_sandbox(docker) as sandbox:
        await docker.engine.call("POST", api_path("containers", orphans.container_name(sandbox.id), "pause"))
        async with asyncio.timeout(60):
            assert (await sandbox.exec(sh("true", wall=0.5))).status == "lost"


@pytest.mark.long
async def test_worker_recovers_in_a_container_and_is_lost_with_it(docker: DockerProvider) -> None:
    """All tests in tests/workers also run in containers, with `make test-long`."""
    spec = msgspec.structs.replace(sandbox_for(LIMITS), image=IMAGE)
    sandbox = await docker.create(spec, attempt="worker")
    try:
        async with await Worker.open(sandbox, limits=LIMITS) as worker:
            cells = RandomCells(worker, seed=8)
            for _ in range(30):
                await cells.step()
            assert worker.restarts_left == 16
            begun = asyncio.Event()
            cell = asyncio.create_task(worker.run("print(1)\nwhile True: pass", on_output=lambda *_: begun.set()))
            async with asyncio.timeout(60):
                await begun.wait()
                await docker.engine.call(
                    "POST", api_path("containers", orphans.container_name(sandbox.id), "kill")
                )
                with pytest.raises(WorkerRecoveryError) as caught:
                    await cell
            assert caught.value.fault == "infra"
    finally:
        await sandbox.close()


@pytest.mark.long
async def test_fork_is_compared_with_its_snapshot(docker: DockerProvider, engine: PrivateEngine) -> None:
    async with open_sandbox(docker, user="root") as sandbox:
        assert (await sandbox.exec(sh("echo one > one; echo two > two"))).ok
        name = await sandbox.snapshot()
        fork = await sandbox.fork(name)
        try:
            assert (await fork.exec(sh("echo x > /etc/passwd; rm one; touch two; echo three > three"))).ok
            found = await fork.diff(name)
            assert found["/etc/passwd"] == "changed"
            assert (found["/work/one"], found["/work/three"]) == ("removed", "added")
            assert await sandbox.diff(name) == {}
            other = await fork.snapshot()
            with pytest.raises(SandboxError):
                await sandbox.diff(other)
        finally:
            await fork.close()
        assert len(engine.snapshots()) == 2  # the fork tree still has a member
    assert engine.snapshots() == []
