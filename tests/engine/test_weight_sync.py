"""Weight syncs during a run: modes, clients, failures and dying runners."""

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
from tests.engine.conftest import events, wait_for_heartbeats
from tests.engine.sync_kit import (
    NEW,
    TALKING,
    build_engine,
    check_logprobs,
    check_segments,
    consuming,
    conversations,
    load_new_weights,
    mixed_turns,
    versions,
)
from tests.engine_standins import StandinServer, small_weights, standin
from tests.processes import send_signal
from tests.waiting import wait_for_status, wait_until

# ---- syncs during rollouts


@pytest.mark.parametrize("runners", [0, pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
@pytest.mark.parametrize("streams", [True, False])
async def test_weight_sync_only_delays_running_calls(
    runners: int, mode: PauseMode, streams: bool, tmp_path: Path
) -> None:
    async def load() -> None:
        # A runner that reads the tokens before and after the sync at once cannot tell them apart.
        if runners:
            await wait_for_heartbeats(engine)
        await load_new_weights(server)

    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=runners) as engine,
        consuming(engine, server, conversations(12, streams=streams), 0 if mode == "drain" else 20) as groups,
    ):
        async with engine.upstream.sync(NEW, load, mode=mode):
            assert (await engine.status())["paused"]
            if mode != "keep":
                assert await server.running() == (0, 0)
        assert engine.upstream.version == NEW
        assert not (await engine.status())["paused"]
    segments = check_segments(groups, 12, mode)
    assert versions(segments) == {0, NEW}
    if mode == "abort" or (mode == "keep" and streams):
        assert mixed_turns(segments) > 0
    if mode == "drain":
        assert mixed_turns(segments) == 0
    assert events(tmp_path, "cleanup.failed") == []


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 2])
@pytest.mark.parametrize("ends", ["load", "block", "cancelled in load", "cancelled in block", "thread"])
async def test_failed_sync_resumes_with_the_previous_version(runners: int, ends: str, tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def load() -> None:
        reached.set()
        if ends == "load":
            raise ZeroDivisionError
        if ends == "cancelled in load":
            await asyncio.Event().wait()

    def blocking() -> None:
        raise ZeroDivisionError

    async def sync(engine: Engine) -> None:
        async with engine.upstream.sync(NEW, blocking if ends == "thread" else load):
            if ends == "block":
                raise ZeroDivisionError
            await asyncio.Event().wait()

    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=runners) as engine,
        consuming(engine, server, conversations(6), 10) as groups,
    ):
        task = asyncio.create_task(sync(engine))
        if ends.startswith("cancelled"):
            await reached.wait()
            task.cancel()
        with pytest.raises(asyncio.CancelledError if ends.startswith("cancelled") else ZeroDivisionError):
            await task
        assert not (await engine.status())["paused"]
    assert versions(check_segments(groups, 6)) == {0}


async def test_load_that_is_not_a_coroutine_runs_in_a_thread(tmp_path: Path) -> None:
    names: list[str] = []
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path) as engine,
        engine.upstream.sync(NEW, lambda: names.append(threading.current_thread().name)),
    ):
        pass
    assert names
    assert names != [threading.main_thread().name]


# ---- runners that die


async def kill_runner_and_wait_for_replacement(engine: Engine) -> None:
    """Kill the runner with the most rollouts and wait until its replacement is ready."""
    pool = engine.supervisor.pool
    count = len(pool.runners)
    (pid,) = max(pool.runners, key=lambda link: len(link.running)).pids()
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: pid not in engine.pids() and len(pool.runners) >= count)
    await wait_until(lambda: all(link.ready for link in pool.runners))


@pytest.mark.long
async def test_runner_killed_during_a_pause_is_replaced_by_a_paused_one(
    tmp_path: Path,
) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=2) as engine,
        consuming(engine, server, conversations(12, streams=True), 20) as groups,
        engine.upstream.sync(NEW, lambda: load_new_weights(server)),
    ):
        await kill_runner_and_wait_for_replacement(engine)
        asked = len(await server.requests())
        await wait_for_heartbeats(engine)
        sampling = [each for each in (await server.requests())[asked:] if "generate" in each["path"]]
        assert sampling == []
        assert await server.running() == (0, 0)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 12
    assert max(len(rollout.attempts) for rollout in rollouts) == 2
    segments = [segment for rollout in rollouts for segment in rollout.segments]
    for segment in segments:
        check_logprobs(segment, "abort")
    assert NEW in versions(segments)
    again = [segment for rollout in rollouts if len(rollout.attempts) == 2 for segment in rollout.segments]
    assert versions(again) == {NEW}


@pytest.mark.long
async def test_runner_replaced_while_a_pause_starts_does_not_block_the_pause(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=2, sampling=Sampling(max_tokens=200)) as engine,
        consuming(engine, server, conversations(8, turns=1), 5) as groups,
    ):
        # The server is frozen, so no call can drain until it resumes.
        pause = asyncio.create_task(engine.upstream.pause("drain", timeout=60))
        await kill_runner_and_wait_for_replacement(engine)
        assert not pause.done()
        assert (await server.post("/resume"))[0] == 200
        async with asyncio.timeout(
            20
        ):  # far below the timeout of the pause, which does not wait for the new runner
            await pause
        await engine.upstream.resume()
    assert {label(group.rollouts[0].outcome) for group in groups} == {"completed"}


@pytest.mark.long
async def test_version_set_without_a_pause_reaches_all_runners_and_later_ones(
    tmp_path: Path,
) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path, runners=2, concurrency=2) as engine:
        await engine.upstream.resume(NEW)
        assert not (await engine.status())["paused"]
        first = [group async for group in engine.groups(conversations(4, turns=1), name="first")]
        send_signal(engine.pids()[1:], signal.SIGKILL)
        second = [group async for group in engine.groups(conversations(4, turns=1), name="second")]
    for groups in (first, second):
        assert {
            span.version for group in groups for segment in group.rollouts[0].segments for span in segment.versions
        } == {NEW}


async def test_pause_without_a_version_keeps_the_upstreams_own(tmp_path: Path) -> None:
    policy = f"embedded:{small_weights(3, 5)}"
    async with Engine(
        TALKING, policy=policy, runners=0, out=tmp_path / "runs", sampling=Sampling(max_tokens=5)
    ) as engine:
        async with engine.paused():
            pass
        groups = [group async for group in engine.groups(conversations(2, turns=1))]
    found = {
        span.version for group in groups for segment in group.rollouts[0].segments for span in segment.versions
    }
    assert found == {5}


# ---- other clients


@pytest.mark.long
async def test_client_process_can_sync_weights(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=1) as engine,
        consuming(engine, server, conversations(8), 20) as groups,
        await Engine.connect(str(engine.folder)) as remote,
    ):
        with pytest.raises(ZeroDivisionError):
            async with remote.upstream.sync(3, lambda: 1 / 0):
                raise AssertionError("never loaded")
        assert (remote.upstream.version, engine.upstream.version) == (0, 0)
        async with remote.upstream.sync(NEW, lambda: load_new_weights(server)):
            assert (await remote.status())["paused"]
        assert (remote.upstream.version, engine.upstream.version) == (NEW, NEW)
    assert versions(check_segments(groups, 8)) == {0, NEW}


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


@pytest.mark.long
async def test_client_that_dies_in_its_sync_leaves_no_pause_and_no_version(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=1) as engine,
        consuming(engine, server, conversations(6), 10) as groups,
    ):
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            DIES,
            str(engine.folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout is not None
        async with asyncio.timeout(60):
            assert await client.stdout.readline() == b"paused\n"
            assert (await engine.status())["paused"]
            client.kill()
            await client.wait()
            await wait_for_status(engine, lambda status: not status["paused"])
    assert versions(check_segments(groups, 6)) == {0}


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
async def test_sync_engine_loads_weights_in_the_callers_thread(fails: bool, tmp_path: Path) -> None:
    seen: list[str] = []

    def load(load_new_weights: Callable[[], None]) -> None:
        seen.append(threading.current_thread().name)
        load_new_weights()
        if fails:
            raise ZeroDivisionError

    def use(server: StandinServer, loop: asyncio.AbstractEventLoop) -> tuple[list[Group], int]:
        def pushed() -> None:
            asyncio.run_coroutine_threadsafe(load_new_weights(server), loop).result(60)

        policy = UpstreamConfig(kind="vllm", urls=(server.root,))
        with SyncEngine(
            TALKING,
            policy=policy,
            runners=0,
            record="tokens",
            rendering={"name": "embedded"},
            sampling=Sampling(max_tokens=20),
            out=tmp_path / "runs",
        ) as engine:
            try:
                with engine.sync(NEW, lambda: load(pushed)):
                    assert engine.status()["paused"]
            except ZeroDivisionError:
                assert fails
            assert not engine.status()["paused"]
            return list(engine.groups(conversations(3))), engine._engine.upstream.version

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
