"""Cursors of streams: later calls continue, `want` counts from the call, and a restart is explicit."""

import asyncio
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery import Engine, SyncEngine
from rookery.core import Group, UsageError, label
from tests.engine.conftest import ENV, QUICK, build_engine, events, records
from tests.servers import Answer, ModelServer, Request
from tests.waiting import wait_for_groups, wait_for_status


def row(n: int, **data: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "prompt": f"q{n}", "data": data}


TASKS = [row(n, score={"0": "half"}) for n in range(12)]


def ids(groups: list[Group]) -> list[str]:
    return sorted((group.task.id for group in groups), key=lambda name: int(name[1:]))


def names(*numbers: int) -> list[str]:
    return [f"t{n}" for n in numbers]


def seeds(groups: list[Group]) -> dict[str, list[int]]:
    return {group.task.id: [rollout.seed for rollout in group.rollouts] for group in groups}


async def take(engine: Engine, tasks: Any = None, **options: Any) -> list[Group]:
    chosen = TASKS if tasks is None else tasks
    return [group async for group in engine.groups(chosen, **{"k": 2, "want": 4, **options})]


async def test_one_call_per_training_step_iterates_over_the_tasks(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, seed=7) as engine:
        whole = [group async for group in engine.groups(TASKS, k=2, name="whole")]
        steps = [await take(engine) for _ in range(4)]
    assert [ids(groups) for groups in steps] == [names(0, 1, 2, 3), names(4, 5, 6, 7), names(8, 9, 10, 11), []]
    assert len({tuple(rollout) for groups in steps for rollout in seeds(groups).values()}) == len(whole)


@pytest.mark.long
async def test_stream_in_several_calls_uses_the_seeds_of_a_single_call(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, seed=7) as engine:
        whole = [group async for group in engine.groups(TASKS, k=2)]
    async with build_engine(model, tmp_path, seed=7) as engine:
        parts = [group for _ in range(3) for group in await take(engine)]
    assert seeds(parts) == seeds(whole)


@pytest.mark.long
@pytest.mark.parametrize("endless", [False, True])
async def test_epochs_continue_over_calls(model: ModelServer, tmp_path: Path, endless: bool) -> None:
    async with build_engine(model, tmp_path) as engine:
        steps = [await take(engine, TASKS[:3], epochs=None if endless else 2) for _ in range(2)]
        last = await take(engine, TASKS[:3], epochs=None if endless else 2, want=1)
    assert [ids(groups) for groups in steps] == [names(0, 0, 1, 2), names(0, 1, 1, 2) if endless else names(1, 2)]
    assert len(last) == endless


async def test_restart_uses_other_seeds(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        first, again = await take(engine), await take(engine, restart=True)
        after = await take(engine)
    assert ids(first) == ids(again) == names(0, 1, 2, 3)
    assert not set(map(tuple, seeds(first).values())) & set(map(tuple, seeds(again).values()))
    assert ids(after) == names(4, 5, 6, 7)


async def test_finished_stream_delivers_nothing_and_records_an_event(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert len([group async for group in engine.groups(TASKS, name="eval")]) == 12
        assert [group async for group in engine.groups(TASKS, name="eval")] == []
        assert len([group async for group in engine.groups(TASKS, name="eval", restart=True)]) == 12
    assert [event["stream"] for event in events(tmp_path, "stream.at_end")] == ["eval"]


async def test_another_list_of_tasks_starts_at_its_first_task(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert ids(await take(engine, TASKS[:6])) == names(0, 1, 2, 3)
        assert ids(await take(engine, TASKS[6:])) == names(6, 7, 8, 9)


async def test_iterator_of_tasks_is_not_consumed_twice(model: ModelServer, tmp_path: Path) -> None:
    asked: list[int] = []

    def endless() -> Iterator[dict[str, Any]]:
        for n in itertools.count():
            asked.append(n)
            yield row(n)

    async with build_engine(model, tmp_path, concurrency=2) as engine:
        source = endless()
        steps = [await take(engine, source, oversample=1) for _ in range(3)]
        assert [ids(groups) for groups in steps] == [names(0, 1, 2, 3), names(4, 5, 6, 7), names(8, 9, 10, 11)]
        assert asked == list(range(len(asked)))
        # A new iterator over the same tasks is consumed up to the cursor.
        assert ids(await take(engine, endless(), oversample=1)) == names(12, 13, 14, 15)


async def test_surplus_groups_are_delivered_first_by_the_next_call(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, concurrency=32) as engine:
        steps = [await take(engine, oversample=3) for _ in range(3)]
    assert [ids(groups) for groups in steps] == [names(0, 1, 2, 3), names(4, 5, 6, 7), names(8, 9, 10, 11)]


@pytest.mark.long
async def test_abandoned_stream_continues_without_losing_or_repeating_a_group(
    model: ModelServer, tmp_path: Path
) -> None:
    taken: list[Group] = []
    async with build_engine(model, tmp_path, concurrency=3, seed=7) as engine:
        whole = [group async for group in engine.groups(TASKS, k=2)]
    async with build_engine(model, tmp_path, concurrency=3, seed=7) as engine:
        while True:
            before = len(taken)
            async for group in engine.groups(TASKS, k=2, buffer=3):
                taken.append(group)
                if len(taken) == before + 2:
                    break  # the next call follows before the event loop runs again
            if len(taken) == before:
                break
    assert seeds(taken) == seeds(whole)
    assert len(taken) == len(whole)


async def test_untaken_finished_groups_are_delivered_first_and_not_run_again(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups(TASKS, k=2)
        first = await anext(stream)
        await wait_for_groups(engine, 11)
        await stream.aclose()
        asked = len(model.requests)
        groups = [first]
        for want in (1, 2, 3, None):
            groups += await take(engine, want=want)
        assert len(model.requests) == asked
    assert ids(groups) == names(*range(12))
    assert {label(record.outcome) for record in records(tmp_path)} == {"completed"}


@pytest.mark.long
async def test_untaken_groups_run_again_for_another_k(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups(TASKS[:4], k=2)
        await anext(stream)
        await wait_for_groups(engine, 3)
        state = engine.state_dict()
        await stream.aclose()
        groups = await take(engine, TASKS[:4], k=3)
    async with build_engine(model, tmp_path) as other:
        other.load_state_dict(state)
        restored = await take(other, TASKS[:4], k=3)
    for found in (groups, restored):
        assert len(found) == 3
        assert {len(group.rollouts) for group in found} == {3}


async def test_open_stream_cannot_be_opened_again(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups(TASKS)
        state = engine.state_dict()
        with pytest.raises(UsageError):
            engine.groups(TASKS)
        with pytest.raises(UsageError):
            engine.load_state_dict(state)
        await stream.aclose()


# ---- checkpoints


@pytest.mark.long
@pytest.mark.parametrize("wants", [[4, 4, 4], [5, 7], [1, 0, 3, 8]], ids=str)
async def test_stream_continues_over_calls_and_checkpoints(
    model: ModelServer, tmp_path: Path, wants: list[int]
) -> None:
    """Each call is in a new engine, restored from a checkpoint between two calls or before the stream ended."""
    async with build_engine(model, tmp_path, seed=7) as engine:
        whole = [group async for group in engine.groups(TASKS, k=2)]
    taken: list[Group] = []
    state: Any = None
    for want in wants:
        async with build_engine(model, tmp_path, concurrency=3, seed=7) as engine:
            if state is not None:
                engine.load_state_dict(pickle.loads(state))
            part = await take(engine, want=want, oversample=1)
            assert len(part) == want
            taken += part
            state = pickle.dumps(engine.state_dict())
            if len(taken) == len(TASKS):
                assert await take(engine, want=None) == []
    assert seeds(taken) == seeds(whole)
    assert len(taken) == len(whole)


async def test_loaded_checkpoint_replaces_the_cursor_of_a_used_engine(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        await take(engine)
        state = engine.state_dict()
        assert ids(await take(engine)) == names(4, 5, 6, 7)
        engine.load_state_dict(state)
        assert ids(await take(engine)) == names(4, 5, 6, 7)
        engine.load_state_dict(state)
        assert ids(await take(engine, restart=True)) == names(0, 1, 2, 3)


# ---- steps, sync engine, client process


@pytest.mark.long
async def test_steps_continue_over_calls_and_checkpoints(model: ModelServer, tmp_path: Path) -> None:
    numbers: list[int] = []
    taken: list[Group] = []
    state: Any = None
    for _ in range(2):
        async with build_engine(model, tmp_path) as engine:
            if state is not None:
                engine.load_state_dict(state)
            for _ in range(2):
                stream = engine.steps(TASKS, k=2, groups=3, lag=1)
                step = await anext(stream)
                numbers.append(step.number)
                taken += step.groups
                await stream.aclose()
            state = engine.state_dict()
    assert numbers == [0, 1, 2, 3]
    assert ids(taken) == names(*range(12))


async def test_steps_restart_on_request(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        for _ in range(2):
            async with engine.steps(TASKS, k=2, groups=3, lag=0, restart=True) as stream:
                step = await anext(stream)
                assert (step.number, ids(list(step.groups))) == (0, names(0, 1, 2))


async def test_remote_stream_continues_where_it_ended(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        assert engine.folder is not None
        taken: list[Group] = []
        async with await Engine.connect(engine.folder) as remote:
            for _ in range(2):
                taken += [group async for group in remote.groups(TASKS, k=2, want=3)]
            async for group in remote.groups(TASKS, k=2):
                taken.append(group)
                break  # the next call follows at once
            taken += [group async for group in remote.groups(TASKS, k=2, want=2)]
            state = await remote.state_dict()
        async with await Engine.connect(engine.folder) as other:  # the cursor is the engine's
            await other.load_state_dict(state)
            taken += [group async for group in other.groups(TASKS, k=2)]
            assert ids([group async for group in other.groups(TASKS, k=2, want=2, restart=True)]) == names(0, 1)
    assert ids(taken) == names(*range(12))


async def test_groups_that_a_disconnected_client_did_not_take_are_delivered_later(
    model: ModelServer, tmp_path: Path
) -> None:
    gate = asyncio.Event()

    def play(request: Request) -> Answer:
        slow = request.body["messages"][-1]["content"] == "q1"
        return Answer("ok", prompt_ids=[1], ids=[2], logprobs=[-0.5], hold=gate if slow else None)

    model.default = play
    async with build_engine(model, tmp_path, concurrency=1) as engine:
        assert engine.folder is not None
        remote = await Engine.connect(engine.folder)
        stream = remote.groups(TASKS[:4])
        first = await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await model.wait_for_requests(2)
        await remote.close()
        await asyncio.gather(waiting, return_exceptions=True)
        await wait_for_status(engine, lambda status: not status["in_flight"])
        gate.set()
        rest = [group async for group in engine.groups(TASKS[:4])]
    assert ids([first, *rest]) == names(0, 1, 2, 3)


async def test_sync_engine_continues_streams(model: ModelServer, tmp_path: Path) -> None:
    def work() -> list[list[str]]:
        with SyncEngine(ENV, policy=model.url, out=tmp_path / "runs", runners=0, retry=QUICK) as engine:
            found = [ids(list(engine.groups(TASKS, k=2, want=3))) for _ in range(2)]
            for group in engine.groups(TASKS, k=2):
                found.append(ids([group]))
                break
            state = engine.state_dict()
            rest = ids(list(engine.groups(TASKS, k=2)))
            engine.load_state_dict(state)
            assert ids(list(engine.groups(TASKS, k=2))) == rest
            found.append(rest)
            return [*found, ids(list(engine.groups(TASKS, k=2, want=1, restart=True)))]

    first, second, third, rest, again = await asyncio.to_thread(work)
    assert (first, second, again) == (names(0, 1, 2), names(3, 4, 5), names(0))
    assert sorted([*first, *second, *third, *rest]) == sorted(names(*range(12)))


# ---- a resumed run


@pytest.mark.long
async def test_resumed_run_continues_over_calls(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, stream={"k": 2}) as engine:
        assert len(await take(engine)) == 4
    folder = engine.folder
    assert folder is not None
    async with Engine.resume(folder) as again:
        parts = [[group async for group in again.groups(want=3)] for _ in range(3)]
        with pytest.raises(UsageError):
            again.groups(restart=True)
    assert [len(part) for part in parts] == [3, 3, 2]
    assert ids([group for part in parts for group in part]) == names(*range(4, 12))
