"""Streams of training steps with a real engine, rollouts that wait for a gate, and a weight sync per step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, SyncEngine
from rookery.core import UsageError
from rookery.engine.staleness import oldest_version
from rookery.engine.steps import Step
from tests.engine.conftest import GatedEnvironment, build_engine, events
from tests.servers import Answer, ModelServer
from tests.waiting import wait_for_groups


@asynccontextmanager
async def gated_engine(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Engine, GatedEnvironment]]:
    environment = GatedEnvironment()
    answer = Answer("ok", prompt_ids=[1, 2, 3], ids=[4, 5], logprobs=[-0.5, -0.25])
    async with (
        ModelServer(lambda _: answer) as server,
        build_engine(server, tmp_path, env=environment, **options) as engine,
    ):
        yield engine, environment


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}"} for n in range(count)]


def question_numbers(step: Step) -> list[int]:
    return sorted(int(group.task.text.removeprefix("question ")) for group in step.groups)


async def sync_version(engine: Engine, version: int) -> None:
    async with engine.upstream.sync(version, mode="drain"):
        pass


async def test_steps_contain_every_task_and_no_group_older_than_the_lag(tmp_path: Path) -> None:
    async with gated_engine(tmp_path) as (engine, _):
        seen: list[int] = []
        async with asyncio.timeout(60):
            async for step in engine.steps(questions(10), k=2, groups=3, lag=1):
                assert step.version == step.number
                assert not step.stale
                assert all(
                    step.version - 1 <= (oldest_version(group) or 0) <= step.version for group in step.groups
                )
                seen += question_numbers(step)
                await sync_version(engine, step.version + 1)
        assert len(seen) == 10
        assert sorted(seen) == list(range(10))
        assert step.number == 3
        assert len(step.groups) == 1


async def test_step_waits_for_a_group_that_would_be_too_old_for_the_next_step(tmp_path: Path) -> None:
    async with gated_engine(tmp_path) as (engine, environment):
        environment.close(0)
        async with asyncio.timeout(60), engine.steps(questions(8), groups=2, lag=1) as steps:
            first = await anext(steps)
            assert question_numbers(first) == [
                1,
                2,
            ]  # the slow group is not needed yet: it may train one version later
            await sync_version(engine, 1)
            late = asyncio.ensure_future(anext(steps))
            await wait_for_groups(engine, 2)
            status = await engine.status()
            assert (status["policy_version"], status["streams"]["main"]["staleness"]) == (1, 1)
            assert (
                not late.done()
            )  # others are finished, but the slow group would be two versions old at the next step
            environment.open(0)
            second = await late
            assert 0 in question_numbers(second)
            assert (await engine.status())["streams"]["main"]["staleness"] == 0
            assert [oldest_version(group) for group in second.groups if group.task.text == "question 0"] == [0]


async def test_nothing_is_sampled_during_training_with_lag_zero(tmp_path: Path) -> None:
    async with gated_engine(tmp_path) as (engine, _):
        async with asyncio.timeout(60):
            async for step in engine.steps(questions(6), groups=2, lag=0):
                assert {oldest_version(group) for group in step.groups} == {step.version}
                now = await engine.status()
                assert now["streams"]["main"]["admitted"] == 2 * (step.number + 1)
                assert now["in_flight"] == 0
                await sync_version(engine, step.version + 1)


async def test_groups_that_become_too_old_by_skipped_versions_are_stale_and_replaced(
    tmp_path: Path,
) -> None:
    async with (
        gated_engine(tmp_path) as (engine, _),
        asyncio.timeout(60),
        engine.steps(questions(8), groups=2, lag=1) as steps,
    ):
        await anext(steps)
        await wait_for_groups(engine, 2)
        await sync_version(engine, 9)
        step = await anext(steps)
        assert step.version == 9
        assert len(step.stale) == 2
        assert [oldest_version(group) for group in step.groups] == [9, 9]
        assert len(question_numbers(step)) == 2
    assert [event["version"] for event in events(tmp_path, "groups.stale")] == [9]


async def test_cancelled_step_puts_its_groups_back(tmp_path: Path) -> None:
    async with gated_engine(tmp_path) as (engine, environment):
        environment.close(1)
        async with asyncio.timeout(60), engine.steps(questions(2), groups=2, lag=0) as steps:
            waiting = asyncio.ensure_future(anext(steps))
            await wait_for_groups(engine, 1)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()
            environment.open(1)
            assert question_numbers(await anext(steps)) == [0, 1]


async def test_checkpoint_between_steps_keeps_untaken_groups_and_their_age(tmp_path: Path) -> None:
    async with (
        gated_engine(tmp_path) as (engine, _),
        asyncio.timeout(60),
        engine.steps(questions(6), groups=2, lag=1) as steps,
    ):
        first = question_numbers(await anext(steps))
        await wait_for_groups(engine, 2)
        state = engine.state_dict()
    async with gated_engine(tmp_path) as (engine, _):
        engine.load_state_dict(state)
        await sync_version(engine, 1)
        seen: list[int] = []
        async with asyncio.timeout(60):
            async for step in engine.steps(questions(6), groups=2, lag=1):
                assert not step.stale
                assert all(step.version - (oldest_version(group) or 0) <= 1 for group in step.groups)
                seen += question_numbers(step)
                await sync_version(engine, step.version + 1)
    assert sorted(first + seen) == list(range(6))


async def test_invalid_step_options_are_refused(tmp_path: Path) -> None:
    async with gated_engine(tmp_path) as (engine, _):
        with pytest.raises(UsageError, match=r"\b0\b.*\b1\b"):
            engine.steps(questions(1), groups=0)
        with pytest.raises(UsageError, match=r"lag.*-1"):
            engine.steps(questions(1), groups=1, lag=-1)


def test_steps_without_an_event_loop(tmp_path: Path) -> None:
    with SyncEngine("arithmetic", policy="embedded", out=tmp_path / "runs", runners=0) as engine:
        numbers = []
        for step in engine.steps(k=2, groups=2, lag=1, epochs=None):
            numbers.append(step.number)
            with engine.sync(step.version + 1):
                pass
            if step.number == 2:
                break
    assert numbers == [0, 1, 2]
