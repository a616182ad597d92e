"""Checkpoints of a trainer: a stream continues exactly, in another engine and another run."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Group, UsageError
from tests.engine.conftest import build_engine
from tests.servers import Answer, ModelServer
from tests.waiting import wait_for_groups


def row(n: int, **data: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "prompt": f"q{n}", "data": data}


def seeds(groups: list[Group]) -> dict[str, list[int]]:
    assert len({group.task.id for group in groups}) == len(groups), "a group was returned twice"
    return {group.task.id: [rollout.seed for rollout in group.rollouts] for group in groups}


TASKS = [row(n, score={"0": "half"}) for n in range(12)]


async def run_with_checkpoints(
    model: ModelServer, tmp_path: Path, takes: list[int | None], **stream: Any
) -> tuple[list[Group], Any]:
    taken: list[Group] = []
    state: Any = None
    for take in takes:
        async with build_engine(model, tmp_path, concurrency=3, seed=7) as engine:
            if state is not None:
                engine.load_state_dict(pickle.loads(state))
            source = engine.groups(TASKS, **{"k": 2, "buffer": 2, **stream})  # type: ignore[arg-type]
            left = take
            while left is None or left > 0:
                group = await anext(source, None)
                if group is None:
                    break
                taken.append(group)
                left = None if left is None else left - 1
            state = pickle.dumps(engine.state_dict())
    return taken, state


@pytest.mark.long
@pytest.mark.parametrize(
    "takes",
    [[None], [5, None], [0, None], [12, None], [1, 0, 0, 2, 1, None], [3, 3, 3, None]],
    ids=lambda takes: "-".join(map(str, takes)),
)
async def test_checkpoint_resumes_the_stream_exactly(
    model: ModelServer, tmp_path: Path, takes: list[int | None]
) -> None:
    async with build_engine(model, tmp_path, seed=7) as engine:
        whole = [group async for group in engine.groups(TASKS, k=2)]
    taken, _ = await run_with_checkpoints(model, tmp_path, takes)
    assert seeds(taken) == seeds(whole)
    for group in taken:
        assert [rollout.reward for rollout in group.rollouts] == [0.5, 1.0]
        assert [len(rollout.segments) for rollout in group.rollouts] == [1, 1]


@pytest.mark.long
async def test_open_groups_survive_several_checkpoints(model: ModelServer, tmp_path: Path) -> None:
    answer, gate = model.default, asyncio.Event()
    model.default = Answer("ok", hold=gate)
    async with build_engine(model, tmp_path, concurrency=3) as engine:
        held = engine.groups(TASKS)
        await model.wait_for_requests(3)
        state = engine.state_dict()
    model.default = answer
    for concurrency in (3, 1):  # first no group is admitted before the next checkpoint, then one is
        async with build_engine(model, tmp_path, concurrency=concurrency) as engine:
            engine.load_state_dict(state)
            held = engine.groups(TASKS)
            if concurrency == 1:
                model.default = Answer("ok", hold=gate)
                await model.wait_for_requests(4)
            state = engine.state_dict()
    model.default = answer
    async with build_engine(model, tmp_path) as engine:
        engine.load_state_dict(state)
        assert len(seeds([group async for group in engine.groups(TASKS)])) == 12
    del held


@pytest.mark.long
async def test_want_counts_from_the_call_after_a_checkpoint(model: ModelServer, tmp_path: Path) -> None:
    taken, _ = await run_with_checkpoints(model, tmp_path, [2, 1, None, None, None], want=5, oversample=2)
    assert len(seeds(taken)) == 2 + 1 + 5 + 4


async def test_checkpoint_does_not_need_the_run_that_wrote_it(tmp_path: Path) -> None:
    """Use a server without token IDs, so that there are turns without segments."""
    async with ModelServer(Answer("ok")) as plain:
        async with build_engine(plain, tmp_path) as engine:
            stream = engine.groups([row(0), row(1)])
            await anext(stream)

            await wait_for_groups(engine, 1)
            state = engine.state_dict()
        async with build_engine(plain, tmp_path / "elsewhere") as other:
            other.load_state_dict(state)
            groups = [group async for group in other.groups([row(0), row(1)])]
        assert len(groups) == 1
        assert len(plain.requests) == 2


async def test_checkpoint_restores_several_streams_by_name(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        train, test = engine.groups(TASKS, name="train"), engine.groups(TASKS, name="test")
        first = [await anext(train) for _ in range(3)] + [await anext(test)]
        assert len(first) == 4
        state = engine.state_dict()
    async with build_engine(model, tmp_path) as engine:
        engine.load_state_dict(state)
        assert len([group async for group in engine.groups(TASKS, name="test")]) == 11
        assert len([group async for group in engine.groups(TASKS, name="train")]) == 9
        assert len([group async for group in engine.groups(TASKS, name="new")]) == 12


@pytest.mark.long
async def test_unopened_stream_stays_in_the_next_checkpoint(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups(TASKS)
        for _ in range(5):
            await anext(stream)
        state = engine.state_dict()
    async with build_engine(model, tmp_path) as engine:
        engine.load_state_dict(state)
        again = engine.state_dict()
    async with build_engine(model, tmp_path) as engine:
        engine.load_state_dict(again)
        assert len([group async for group in engine.groups(TASKS)]) == 7


async def test_invalid_checkpoint_is_refused(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        state = engine.state_dict()
        for bad, named in [
            ({}, r"\b1\b.*None"),
            ({**state, "rookery": 2}, r"\b1\b.*\b2\b"),
            ({**state, "streams": b"\xff"}, "ValidationError"),
            ({"rookery": 1, "seed": 0}, "KeyError: 'streams'"),
            ({**state, "streams": "text"}, "Error"),
        ]:
            with pytest.raises(UsageError, match=named):
                engine.load_state_dict(bad)
    async with build_engine(model, tmp_path, seed=9) as engine:
        with pytest.raises(UsageError, match="seed"):
            engine.load_state_dict(state)


async def test_restarted_stream_uses_other_seeds_after_a_checkpoint(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, seed=7) as engine:
        first = [group async for group in engine.groups(TASKS)]
        stream = engine.groups(TASKS, restart=True)
        second = [await anext(stream) for _ in range(3)]
        state = engine.state_dict()
        second += [group async for group in stream]
    assert not set(map(tuple, seeds(first).values())) & set(map(tuple, seeds(second).values()))
    async with build_engine(model, tmp_path, seed=7) as engine:
        engine.load_state_dict(state)
        rest = seeds([group async for group in engine.groups(TASKS)])
    assert len(rest) == len(TASKS) - 3
    assert rest.items() <= seeds(second).items()
