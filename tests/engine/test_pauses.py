"""Pauses of a run: their ends, their holders, and those that are not as they should be."""

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
    engine,
    judged,
    push,
    taken,
    talks,
    versions,
)
from tests.engine_standins import standin


@pytest.mark.parametrize("runners", [0, 2])
async def test_a_missing_resume_ends_at_its_deadline_with_an_event_and_fails_nobody(
    runners: int, tmp_path: Path
) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=runners) as made,
        taken(made, server, talks(6), 10) as groups,
    ):
        await made.upstream.pause("abort", deadline=0.5)
    judged(groups, 6)
    assert [event["detail"] for event in events(tmp_path, "pause.overdue")] == [
        "nobody resumed within 0.5 seconds: model calls continue with the old version"
    ]


async def test_a_sync_that_takes_longer_than_its_deadline_says_so(tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path) as made:
        with pytest.raises(RookeryError, match="the weights were not loaded before the pause's deadline"):
            async with made.upstream.sync(NEW, lambda: asyncio.Event().wait(), deadline=0.2):
                raise AssertionError("never loaded")
        assert made.upstream.version == 0
        with pytest.raises(RookeryError, match=r"ended at its deadline of 0\.2 seconds"):  # noqa: PT012
            async with made.upstream.sync(NEW, deadline=0.2):
                while (await made.status())["paused"]:
                    await asyncio.sleep(0.01)
        assert not (await made.status())["paused"]


async def test_nobody_ends_the_pause_of_another(tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path) as made:
        async with made.upstream.sync(NEW):
            await made.upstream.resume()  # holds none
            assert (await made.status())["paused"]
            await made.upstream.pause("keep")
            await made.upstream.resume()
            await made.upstream.resume()
            assert (await made.status())["paused"]
            async with await Engine.connect(str(made.folder)) as far:
                await far.upstream.resume(3)
                assert (await made.status())["paused"]
                async with far.paused():
                    pass
                assert (await made.status())["paused"]
        assert not (await made.status())["paused"]
        assert made.upstream.version == NEW


async def test_pauses_nest_and_a_stronger_mode_replaces_a_weaker_one(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path) as made,
        taken(made, server, talks(6, streams=True), 10) as groups,
    ):
        fleet = made.supervisor.pool
        await made.upstream.pause("keep")
        assert sum(await server.running()) > 0
        await made.upstream.pause("abort")
        assert fleet.pauses.mode == "abort"
        assert await server.running() == (0, 0)
        await made.upstream.pause("keep")
        assert fleet.pauses.mode == "abort"
        await made.upstream.resume()
        await made.upstream.resume(NEW)
        assert (await made.status())["paused"]
        await push(server)
        await made.upstream.resume()
        assert not (await made.status())["paused"]
        await made.upstream.resume()
    assert versions(judged(groups, 6)) == {0, NEW}


async def test_a_server_that_cannot_be_paused_is_an_error_in_words_and_the_run_goes_on(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=1) as made,
        taken(made, server, talks(6)) as groups,
    ):
        await server.fault(path="/pause", status=500, count=10)
        async with asyncio.timeout(20):
            with pytest.raises(RookeryError, match=r"cannot pause the model calls of runner-1: .*500"):
                await made.upstream.pause("keep", timeout=60)
        assert not (await made.status())["paused"]
    judged(groups, 6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "stop"}, "unknown pause mode 'stop'"),
        ({"timeout": 0}, "must be above 0 seconds"),
        ({"deadline": -1.0}, "must be above 0 seconds"),
    ],
)
async def test_a_pause_that_cannot_be_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    async with standin("vllm") as server, engine(server, tmp_path) as made:
        with pytest.raises(UsageError, match=words):
            await made.upstream.pause(**options)
        async with await Engine.connect(str(made.folder)) as far:
            with pytest.raises(UsageError, match=words):
                await far.upstream.pause(**options)
        assert not (await made.status())["paused"]


@pytest.mark.long
async def test_the_run_clock_excludes_a_pause_with_calls_under_way(tmp_path: Path) -> None:
    async with (
        standin("vllm") as server,
        # Long enough that no answer is whole before the first pause is there.
        engine(server, tmp_path, limits=Limits(run=5.0), sampling=LONG) as made,
        taken(made, server, talks(2, turns=1, streams=True), 10) as groups,
    ):
        assert (await server.running())[0] > 0
        for mode in ("keep", "abort"):
            async with made.upstream.sync(NEW, mode=mode):
                await asyncio.sleep(2.6)  # together longer than the whole run stage may take
    rollouts = [group.rollouts[0] for group in groups]
    assert [label(rollout.outcome) for rollout in rollouts] == ["completed"] * 2
    assert max(rollout.timing.paused for rollout in rollouts) > 5.0, [
        (rollout.timing, rollout.attempts) for rollout in rollouts
    ]


async def test_paused_has_no_model_call_under_way_and_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rookery.upstreams.pause.coordinator.SLACK_SECONDS", 5.0)
    async with (
        standin("vllm") as server,
        engine(server, tmp_path, runners=1) as made,
        taken(made, server, talks(6)) as groups,
        made.paused(),
    ):
        assert await server.running() == (0, 0)
        assert not made.supervisor.pool.pauses.has_deadline
    assert versions(judged(groups, 6)) == {0}
