"""New weights under a run: who asks, in which mode, and what goes wrong."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rookery import Engine, SyncEngine
from rookery.core import Group, Sampling, label
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.protocol import PauseMode
from tests.engine.conftest import events
from tests.engine.sync_kit import (
    NEW,
    TALKING,
    engine,
    judged,
    matches,
    mixed_turns,
    push,
    taken,
    talks,
    versions,
)
from tests.engine_standins import StandinServer, small_weights, standin

# ---- new weights while rollouts are under way


@pytest.mark.parametrize("runners", [0, pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
@pytest.mark.parametrize("streams", [True, False])
async def test_new_weights_under_way_cost_callers_nothing_but_time(
    runners: int, mode: PauseMode, streams: bool, tmp_path: Path
) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=runners) as made,
        taken(made, server, talks(12, streams=streams), 0 if mode == "drain" else 20) as groups,
    ):
        async with made.upstream.sync(NEW, lambda: push(server), mode=mode):
            assert (await made.status())["paused"]
            if mode != "keep":
                assert await server.running() == (0, 0)
        assert made.upstream.version == NEW
        assert not (await made.status())["paused"]
    segments = judged(groups, 12, mode)
    assert versions(segments) == {0, NEW}
    if mode == "abort" or (mode == "keep" and streams):
        assert mixed_turns(segments) > 0
    if mode == "drain":
        assert mixed_turns(segments) == 0
    assert events(tmp_path, "cleanup.failed") == []


@pytest.mark.parametrize("runners", [0, 2])
@pytest.mark.parametrize("ends", ["load", "block", "cancelled in load", "cancelled in block", "thread"])
async def test_a_sync_that_does_not_come_to_its_end_resumes_with_the_version_before(
    runners: int, ends: str, tmp_path: Path
) -> None:
    reached = asyncio.Event()

    async def load() -> None:
        reached.set()
        if ends == "load":
            raise ZeroDivisionError
        if ends == "cancelled in load":
            await asyncio.Event().wait()

    def blocking() -> None:
        raise ZeroDivisionError

    async def sync(made: Engine) -> None:
        async with made.upstream.sync(NEW, blocking if ends == "thread" else load):
            if ends == "block":
                raise ZeroDivisionError
            await asyncio.Event().wait()

    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=runners) as made,
        taken(made, server, talks(6), 10) as groups,
    ):
        task = asyncio.create_task(sync(made))
        if ends.startswith("cancelled"):
            await reached.wait()
            task.cancel()
        with pytest.raises(asyncio.CancelledError if ends.startswith("cancelled") else ZeroDivisionError):
            await task
        assert not (await made.status())["paused"]
    assert versions(judged(groups, 6)) == {0}


async def test_a_load_that_is_no_coroutine_runs_beside_the_loop(tmp_path: Path) -> None:
    names: list[str] = []
    async with (
        standin("vllm") as server,
        engine(server, tmp_path) as made,
        made.upstream.sync(NEW, lambda: names.append(threading.current_thread().name)),
    ):
        pass
    assert names
    assert names != [threading.main_thread().name]


# ---- runners that die


async def killed_and_replaced(made: Engine) -> None:
    """SIGKILL for the runner with the most rollouts; returns when there is another one, ready."""
    fleet = made.supervisor.pool
    count = len(fleet.runners)
    (pid,) = max(fleet.runners, key=lambda link: len(link.running)).pids()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while pid in made.pids() or len(fleet.runners) < count or not all(link.ready for link in fleet.runners):
            await asyncio.sleep(0.01)


@pytest.mark.long
async def test_a_runner_that_is_killed_during_a_pause_is_replaced_by_one_that_starts_paused(
    tmp_path: Path,
) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=2) as made,
        taken(made, server, talks(12, streams=True), 20) as groups,
        made.upstream.sync(NEW, lambda: push(server)),
    ):
        await killed_and_replaced(made)
        asked = len(await server.requests())
        await asyncio.sleep(0.2)  # a chance for a call that must not come
        sampling = [each for each in (await server.requests())[asked:] if "generate" in each["path"]]
        assert sampling == []
        assert await server.running() == (0, 0)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 12
    assert max(len(rollout.attempts) for rollout in rollouts) == 2
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    for segment in segments:
        matches(segment, "abort")
    assert NEW in versions(segments)
    again = [segment for rollout in rollouts if len(rollout.attempts) == 2 for segment in rollout.segments]
    assert versions(again) == {NEW}


async def test_a_runner_that_dies_and_is_born_while_a_pause_settles_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=2, sampling=Sampling(max_tokens=200)) as made,
        taken(made, server, talks(8, turns=1), 5) as groups,
    ):
        # Frozen behind our back: nothing can drain until the engine goes on.
        pause = asyncio.create_task(made.upstream.pause("drain", timeout=60))
        await killed_and_replaced(made)
        assert not pause.done()
        assert (await server.post("/resume"))[0] == 200
        async with asyncio.timeout(20):  # far below the pause's own timeout: the newborn is not waited for
            await pause
        await made.upstream.resume()
    assert {label(group.rollouts[0].outcome) for group in groups} == {"completed"}


async def test_a_version_that_is_named_without_a_pause_reaches_every_runner_and_those_born_later(
    tmp_path: Path,
) -> None:
    async with standin("vllm") as server, engine(server, tmp_path, runners=2, concurrency=2) as made:
        await made.upstream.resume(NEW)
        assert not (await made.status())["paused"]
        first = [group async for group in made.groups(talks(4, turns=1), name="first")]
        for pid in made.pids()[1:]:
            os.kill(pid, signal.SIGKILL)
        second = [group async for group in made.groups(talks(4, turns=1), name="second")]
    for groups in (first, second):
        assert {
            span.version for group in groups for segment in group.rollouts[0].segments for span in segment.versions
        } == {NEW}


async def test_pausing_without_naming_a_version_leaves_the_upstreams_own(tmp_path: Path) -> None:
    policy = f"embedded:{small_weights(3, 5)}"
    async with Engine(
        TALKING, policy=policy, runners=0, out=tmp_path / "runs", sampling=Sampling(max_tokens=5)
    ) as made:
        async with made.paused():
            pass
        groups = [group async for group in made.groups(talks(2, turns=1))]
    found = {
        span.version for group in groups for segment in group.rollouts[0].segments for span in segment.versions
    }
    assert found == {5}


# ---- from elsewhere


async def test_another_process_syncs_as_the_engines_own_does(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=1) as made,
        taken(made, server, talks(8), 20) as groups,
        await Engine.connect(str(made.folder)) as far,
    ):
        with pytest.raises(ZeroDivisionError):
            async with far.upstream.sync(3, lambda: 1 / 0):
                raise AssertionError("never loaded")
        assert (far.upstream.version, made.upstream.version) == (0, 0)
        async with far.upstream.sync(NEW, lambda: push(server)):
            assert (await far.status())["paused"]
        assert (far.upstream.version, made.upstream.version) == (NEW, NEW)
    assert versions(judged(groups, 8)) == {0, NEW}


DIES = """
import asyncio, os, signal, sys
from rookery import Engine

async def main():
    engine = await Engine.connect(sys.argv[1])
    await engine.upstream.pause("abort")
    async with engine.upstream.sync(9):
        print("paused", flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


async def test_a_client_that_dies_in_its_sync_leaves_nothing_paused_and_no_version(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=1) as made,
        taken(made, server, talks(6), 10) as groups,
    ):
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            DIES,
            str(made.folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout is not None
        async with asyncio.timeout(60):
            assert await client.stdout.readline() == b"paused\n"
            assert (await made.status())["paused"]
            client.kill()
            await client.wait()
            while (await made.status())["paused"]:
                await asyncio.sleep(0.01)
    assert versions(judged(groups, 6)) == {0}


@pytest.mark.parametrize("fails", [False, True])
async def test_the_synchronous_twin_syncs_from_its_callers_thread(fails: bool, tmp_path: Path) -> None:
    seen: list[str] = []

    def load(push: Callable[[], None]) -> None:
        seen.append(threading.current_thread().name)
        push()
        if fails:
            raise ZeroDivisionError

    def use(server: StandinServer, loop: asyncio.AbstractEventLoop) -> tuple[list[Group], int]:
        def pushed() -> None:
            asyncio.run_coroutine_threadsafe(push(server), loop).result(30)

        policy = UpstreamConfig(kind="vllm", urls=(server.root,))
        with SyncEngine(
            TALKING,
            policy=policy,
            runners=0,
            record="tokens",
            rendering={"name": "embedded"},
            sampling=Sampling(max_tokens=20),
            out=tmp_path / "runs",
        ) as made:
            try:
                with made.sync(NEW, lambda: load(pushed)):
                    assert made.status()["paused"]
            except ZeroDivisionError:
                assert fails
            assert not made.status()["paused"]
            return list(made.groups(talks(3))), made._engine.upstream.version

    async with standin("vllm") as server:
        loop = asyncio.get_running_loop()
        groups, version = await asyncio.to_thread(use, server, loop)
    assert seen
    assert seen[0] != "rookery-engine"
    assert version == (0 if fails else NEW)
    assert {label(group.rollouts[0].outcome) for group in groups} == {"completed"}
    spans = {
        span.version for group in groups for segment in group.rollouts[0].segments for span in segment.versions
    }
    assert spans == {version}
