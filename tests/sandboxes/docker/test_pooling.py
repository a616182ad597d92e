"""Runs with warm containers: they are used, their leases name the attempts, and none is left."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.core import label
from rookery.journal import RunReader
from rookery.sandboxes import ProviderHome, leases
from rookery.sandboxes.docker.provider import DockerProvider
from rookery.sandboxes.pools import Pool
from tests.sandboxes.docker.engine import IMAGE, PrivateEngine
from tests.sandboxes.docker.pooled_run import SECOND_IMAGE, SPEC, ReportingEnvironment
from tests.servers import Answer, ModelServer, Request
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("docker")
OK = Answer("ok", prompt_ids=[1, 2], ids=[3], logprobs=[-1.0])


@pytest.mark.long
async def test_run_over_two_images_uses_warm_containers(
    engine: PrivateEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 60.0)  # also on a slow machine
    engine.tag(IMAGE, SECOND_IMAGE)
    tasks = [{"prompt": str(n), "image": (IMAGE, SECOND_IMAGE)[n % 2]} for n in range(4)]
    async with ModelServer(lambda _: OK) as model:
        made = Engine(
            ReportingEnvironment(), policy=model.url, out=tmp_path / "runs", runners=0, concurrency=1, warm=3
        )
        async with made:
            monkeypatch.setattr(ReportingEnvironment, "home", made.folder)
            groups = [group async for group in made.groups(tasks, k=2)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 8
    assert [one.info["files"] for one in rollouts] == [""] * 8
    assert {one.info["pids"] for one in rollouts} == {40}
    for group in groups:
        assert {one.info["image"] for one in group.rollouts} == {group.task.image}
    assert [one.info["leased"] for one in rollouts] == [one.attempts[-1].id for one in rollouts]
    assert made.folder is not None
    with RunReader(made.folder) as reader:
        (opened,) = [
            dict[str, Any](event.payload) for event in reader.events() if event.kind == "sandboxes.opened"
        ]
    assert opened["prewarmed"] + opened["on_demand"] == 8
    assert opened["prewarmed"] >= 6
    assert engine.containers() == []


async def test_lease_of_a_warm_container_names_its_attempt(
    engine: PrivateEngine, home: ProviderHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.sandboxes.pools.WAIT_SECONDS", 60.0)
    pool = Pool(DockerProvider(home, engine=engine.socket))
    try:
        pool.expect([(SPEC, 1)])
        sandbox = await pool.create(SPEC, attempt="7.0.1")
        (lease,) = [lease for lease in leases.read_leases(home.folder) if lease.id == sandbox.id]
        assert (pool.hits, lease.attempt, lease.owner_pid) == (1, "7.0.1", os.getpid())
    finally:
        await pool.close()
    assert engine.containers() == []


@pytest.mark.long
async def test_killed_run_leaves_no_warm_containers(
    engine: PrivateEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.socket}")
    hold, requested = asyncio.Event(), asyncio.Event()

    def respond(_: Request) -> Answer:
        requested.set()
        return Answer("ok", prompt_ids=[1, 2], ids=[3], logprobs=[-1.0], hold=None if hold.is_set() else hold)

    async with ModelServer(respond) as model:
        arguments = ("-m", "tests.sandboxes.docker.pooled_run", str(tmp_path / "runs"), model.url)
        run = await asyncio.create_subprocess_exec(sys.executable, *arguments, start_new_session=True)
        try:
            async with asyncio.timeout(60):
                await requested.wait()
                await wait_until(lambda: len(engine.containers()) >= 3)  # one at work, two warm
        finally:
            run.send_signal(signal.SIGKILL)
            await run.wait()
        hold.set()
        again = Engine.resume(tmp_path / "runs" / "latest")
        async with again:
            groups = [group async for group in again.groups()]
    assert [label(group.rollouts[0].outcome) for group in groups] == ["completed"] * 4

    assert engine.containers() == []
    folder = tmp_path / "runs" / "latest" / "sandboxes"
    assert not folder.exists() or leases.read_leases(folder) == []
