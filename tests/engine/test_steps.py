"""Groups in steps: a real engine, a model server that answers when it is told to, new weights at every step."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rookery import Context, Engine, Environment, SyncEngine
from rookery.core import UsageError
from rookery.engine.staleness import oldest_version
from rookery.engine.steps import Step
from tests.engine.conftest import engine, events
from tests.servers import Answer, ModelServer


class Doors(Environment):
    """A rollout asks once, then waits at the door of its question until that is open."""

    name = "doors"

    def __init__(self) -> None:
        self.closed: dict[str, asyncio.Event] = {}

    def close(self, *questions: int) -> None:
        self.closed = {f"question {n}": asyncio.Event() for n in questions}

    def open(self, question: int) -> None:
        self.closed.pop(f"question {question}").set()

    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat(ctx.task.prompt)
        if (door := self.closed.get(ctx.task.text)) is not None:
            await door.wait()

    async def score(self, ctx: Context) -> float:
        return 1.0


@asynccontextmanager
async def stepping(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Engine, Doors]]:
    doors = Doors()
    answer = Answer("ok", prompt_ids=[1, 2, 3], ids=[4, 5], logprobs=[-0.5, -0.25])
    async with ModelServer(lambda _: answer) as server, engine(server, tmp_path, env=doors, **options) as made:
        yield made, doors


def questions(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}"} for n in range(count)]


def asked(step: Step) -> list[int]:
    return sorted(int(group.task.text.removeprefix("question ")) for group in step.groups)


async def synced(made: Engine, version: int) -> None:
    async with made.upstream.sync(version, mode="drain"):
        pass


async def test_nothing_older_than_the_lag_trains_and_every_task_does(tmp_path: Path) -> None:
    async with stepping(tmp_path) as (made, _):
        seen: list[int] = []
        async with asyncio.timeout(60):
            async for step in made.steps(questions(10), k=2, groups=3, lag=1):
                assert step.version == step.number
                assert not step.stale
                assert all(
                    step.version - 1 <= (oldest_version(group) or 0) <= step.version for group in step.groups
                )
                seen += asked(step)
                await synced(made, step.version + 1)
        assert len(seen) == 10
        assert sorted(seen) == list(range(10))
        assert step.number == 3
        assert len(step.groups) == 1


async def test_a_step_waits_for_what_would_be_too_old_for_the_next_one(tmp_path: Path) -> None:
    async with stepping(tmp_path) as (made, doors):
        doors.close(0)
        async with asyncio.timeout(60), made.steps(questions(8), groups=2, lag=1) as steps:
            first = await anext(steps)
            assert asked(first) == [1, 2]  # the slow one is not waited for: it may train a version later
            await synced(made, 1)
            late = asyncio.ensure_future(anext(steps))
            while (await made.status())["streams"]["main"]["waiting"] < 2:
                await asyncio.sleep(0.001)
            assert not late.done()  # others are finished, but this one would be two versions old at the next step
            doors.open(0)
            second = await late
            assert 0 in asked(second)
            assert [oldest_version(group) for group in second.groups if group.task.text == "question 0"] == [0]


async def test_with_a_lag_of_none_nothing_is_sampled_while_the_trainer_trains(tmp_path: Path) -> None:
    async with stepping(tmp_path) as (made, _):
        async with asyncio.timeout(60):
            async for step in made.steps(questions(6), groups=2, lag=0):
                assert {oldest_version(group) for group in step.groups} == {step.version}
                now = await made.status()
                assert now["streams"]["main"]["admitted"] == 2 * (step.number + 1)
                assert now["in_flight"] == 0
                await synced(made, step.version + 1)


async def test_where_versions_are_jumped_over_what_is_too_old_is_stale_and_others_take_its_place(
    tmp_path: Path,
) -> None:
    async with (
        stepping(tmp_path) as (made, _),
        asyncio.timeout(60),
        made.steps(questions(8), groups=2, lag=1) as steps,
    ):
        await anext(steps)
        while (await made.status())["streams"]["main"]["waiting"] < 2:
            await asyncio.sleep(0.001)
        await synced(made, 9)
        step = await anext(steps)
        assert step.version == 9
        assert len(step.stale) == 2
        assert [oldest_version(group) for group in step.groups] == [9, 9]
        assert len(asked(step)) == 2
    assert [event["version"] for event in events(tmp_path, "groups.stale")] == [9]


async def test_a_cancelled_step_puts_its_groups_back(tmp_path: Path) -> None:
    async with stepping(tmp_path) as (made, doors):
        doors.close(1)
        async with asyncio.timeout(60), made.steps(questions(2), groups=2, lag=0) as steps:
            waiting = asyncio.ensure_future(anext(steps))
            while (await made.status())["streams"]["main"]["waiting"] < 1:
                await asyncio.sleep(0.001)
            waiting.cancel()
            await asyncio.wait({waiting})
            assert waiting.cancelled()
            doors.open(1)
            assert asked(await anext(steps)) == [0, 1]


async def test_a_checkpoint_between_steps_keeps_what_is_not_taken_and_its_age(tmp_path: Path) -> None:
    async with (
        stepping(tmp_path) as (made, _),
        asyncio.timeout(60),
        made.steps(questions(6), groups=2, lag=1) as steps,
    ):
        first = asked(await anext(steps))
        while (await made.status())["streams"]["main"]["waiting"] < 2:
            await asyncio.sleep(0.001)
        state = made.state_dict()
    async with stepping(tmp_path) as (made, _):
        made.load_state_dict(state)
        await synced(made, 1)
        seen: list[int] = []
        async with asyncio.timeout(60):
            async for step in made.steps(questions(6), groups=2, lag=1):
                assert not step.stale
                assert all(step.version - (oldest_version(group) or 0) <= 1 for group in step.groups)
                seen += asked(step)
                await synced(made, step.version + 1)
    assert sorted(first + seen) == list(range(6))


async def test_a_pace_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async with stepping(tmp_path) as (made, _):
        with pytest.raises(UsageError, match="at least 1 group"):
            made.steps(questions(1), groups=0)
        with pytest.raises(UsageError, match="lag"):
            made.steps(questions(1), groups=1, lag=-1)


def test_steps_without_an_event_loop(tmp_path: Path) -> None:
    with SyncEngine("arithmetic", policy="embedded", out=tmp_path / "runs", runners=0) as made:
        numbers = []
        for step in made.steps(k=2, groups=2, lag=1, epochs=None):
            numbers.append(step.number)
            with made.sync(step.version + 1):
                pass
            if step.number == 2:
                break
    assert numbers == [0, 1, 2]
