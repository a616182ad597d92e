"""Pauses of a run: deadlines, holders, nesting and failures."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine
from rookery.core import Limits, RookeryError, UsageError, label
from tests.engine.conftest import events
from tests.engine.sync_kit import (
    LONG,
    NEW,
    build_engine,
    check_segments,
    consuming,
    conversations,
    load_new_weights,
    versions,
)
from tests.engine_standins import standin
from tests.waiting import advance_clock, wait_for_status


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 2])
async def test_pause_without_resume_ends_at_its_deadline_with_an_event(runners: int, tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=runners) as engine,
        consuming(engine, server, conversations(6), 10) as groups,
    ):
        await engine.upstream.pause("abort", deadline=0.5)
    check_segments(groups, 6)
    (overdue,) = events(tmp_path, "pause.overdue")
    assert "0.5" in overdue["detail"]


async def test_sync_past_its_deadline_raises(tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path) as engine:
        with pytest.raises(RookeryError):
            async with engine.upstream.sync(NEW, lambda: asyncio.Event().wait(), deadline=0.2):
                raise AssertionError("never loaded")
        assert engine.upstream.version == 0
        with pytest.raises(RookeryError, match=r"\b0\.2\b"):
            async with engine.upstream.sync(NEW, deadline=0.2):
                await wait_for_status(engine, lambda status: not status["paused"])
        assert not (await engine.status())["paused"]


async def test_a_holder_cannot_end_the_pause_of_another(tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path) as engine:
        async with engine.upstream.sync(NEW):
            await engine.upstream.resume()  # no pause of this caller
            assert (await engine.status())["paused"]
            await engine.upstream.pause("keep")
            await engine.upstream.resume()
            await engine.upstream.resume()
            assert (await engine.status())["paused"]
            async with await Engine.connect(str(engine.folder)) as remote:
                await remote.upstream.resume(3)
                assert (await engine.status())["paused"]
                async with remote.paused():
                    pass
                assert (await engine.status())["paused"]
        assert not (await engine.status())["paused"]
        assert engine.upstream.version == NEW


async def test_pauses_nest_and_a_stronger_mode_replaces_a_weaker_one(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path) as engine,
        consuming(engine, server, conversations(6, streams=True), 10) as groups,
    ):
        pool = engine.supervisor.pool
        await engine.upstream.pause("keep")
        assert sum(await server.running()) > 0
        await engine.upstream.pause("abort")
        assert pool.pauses.mode == "abort"
        assert await server.running() == (0, 0)
        await engine.upstream.pause("keep")
        assert pool.pauses.mode == "abort"
        await engine.upstream.resume()
        await engine.upstream.resume(NEW)
        assert (await engine.status())["paused"]
        await load_new_weights(server)
        await engine.upstream.resume()
        assert not (await engine.status())["paused"]
        await engine.upstream.resume()
    assert versions(check_segments(groups, 6)) == {0, NEW}


async def test_failed_pause_raises_and_the_run_continues(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=1) as engine,
        consuming(engine, server, conversations(6)) as groups,
    ):
        await server.fault(path="/pause", status=500, count=10)
        async with asyncio.timeout(60):
            with pytest.raises(RookeryError, match=r"runner-1.*500"):
                await engine.upstream.pause("keep", timeout=60)
        assert not (await engine.status())["paused"]
    check_segments(groups, 6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "stop"}, "'stop'"),
        ({"timeout": 0}, r"\b0 .*"),
        ({"deadline": -1.0}, r"-1\.0\b"),
    ],
)
async def test_invalid_pause_options_are_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    async with standin("vllm") as server, build_engine(server, tmp_path) as engine:
        with pytest.raises(UsageError, match=named):
            await engine.upstream.pause(**options)
        async with await Engine.connect(str(engine.folder)) as remote:
            with pytest.raises(UsageError, match=named):
                await remote.upstream.pause(**options)
        assert not (await engine.status())["paused"]


async def test_run_clock_excludes_a_pause_during_model_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        standin("vllm") as server,
        # So long that no reply is complete before the first pause.
        build_engine(server, tmp_path, limits=Limits(run=60.0), sampling=LONG) as engine,
        consuming(engine, server, conversations(2, turns=1, streams=True), 10) as groups,
    ):
        assert (await server.running())[0] > 0
        for mode in ("keep", "abort"):
            async with engine.upstream.sync(NEW, mode=mode):
                advance_clock(monkeypatch, 40.0)  # both pauses together are longer than the limit
                await engine.status()
    rollouts = [group.rollouts[0] for group in groups]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 2
    assert max(rollout.timing.paused for rollout in rollouts) > 80.0, [
        (rollout.timing, rollout.attempts) for rollout in rollouts
    ]


@pytest.mark.long
async def test_paused_block_has_no_running_model_call_and_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.upstreams.pause.coordinator.SLACK_SECONDS", 5.0)
    async with (
        standin("vllm") as server,
        build_engine(server, tmp_path, runners=1) as engine,
        consuming(engine, server, conversations(6)) as groups,
        engine.paused(),
    ):
        assert await server.running() == (0, 0)
        assert not engine.supervisor.pool.pauses.has_deadline
    assert versions(check_segments(groups, 6)) == {0}
