"""Streams of groups with a real engine: filters, replacement, epochs, concurrency and slow consumers."""

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Group, UsageError, label
from tests.engine.conftest import build_engine, records, run_groups
from tests.servers import Answer, ModelServer, Request
from tests.waiting import wait_for_status

MIXED = {"score": {"0": "half"}}
"""Two members, two rewards: informative. Without it both score 1."""


def row(n: int, **data: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "prompt": f"q{n}", "data": data}


def ids(groups: list[Group]) -> list[str]:
    return [group.task.id for group in groups]


def hold(model: ModelServer, prompts: set[str], gate: asyncio.Event) -> None:
    """Make replies to these prompts wait for the gate."""

    def play(request: Request) -> Answer:
        last = request.body["messages"][-1]["content"]
        return Answer("ok", prompt_ids=[1], ids=[2], logprobs=[-0.5], hold=gate if last in prompts else None)

    model.default = play


# ---- filters and replacement


async def test_dropped_groups_are_replaced_until_the_wanted_number_is_kept(
    model: ModelServer, tmp_path: Path
) -> None:
    tasks = [row(n, **(MIXED if n % 3 == 2 else {})) for n in range(30)]
    stream = {"want": 4, "keep": "informative"}
    groups = await run_groups(model, tmp_path, tasks, k=2, stream=stream, concurrency=4)
    assert ids(groups) == ["t2", "t5", "t8", "t11"]
    assert all(sorted(filter(None, group.rewards)) == [0.5, 1.0] for group in groups)
    # Every admitted rollout has a record, also in dropped and surplus groups, and there are few of those.
    written = Counter(record.group for record in records(tmp_path))
    assert set(written.values()) == {2}
    assert 12 <= len(written) <= 16


async def test_oversampling_delivers_the_first_kept_groups_by_admission(
    model: ModelServer, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    hold(model, {"q0", "q1"}, gate)
    tasks = [row(n, **MIXED) for n in range(12)]
    async with build_engine(model, tmp_path, concurrency=32) as engine:
        stream = engine.groups(tasks, k=2, want=4, oversample=3, keep="informative")
        first = [await anext(stream) for _ in range(2)]
        assert sorted(ids(first)) == ["t2", "t3"], "t4 to t6 have ended too, and must wait for t0 and t1"
        gate.set()
        groups = first + [group async for group in stream]
        assert sorted(ids(groups)) == ["t0", "t1", "t2", "t3"]
        assert (await engine.status())["streams"]["main"]["admitted"] == 7
    assert Counter(label(record.outcome) for record in records(tmp_path))["completed"] >= 8


async def test_surplus_groups_are_cancelled_and_recorded(model: ModelServer, tmp_path: Path) -> None:
    gate = asyncio.Event()
    hold(model, {"q3", "q4"}, gate)
    groups = await run_groups(
        model, tmp_path, [row(n) for n in range(9)], k=2, stream={"want": 3, "oversample": 2}, concurrency=32
    )
    assert ids(groups) == ["t0", "t1", "t2"]
    outcomes = {record.id: label(record.outcome) for record in records(tmp_path)}
    assert outcomes == {
        f"{group}.{member}": "completed" if group < 3 else "cancelled.filtered"
        for group in range(5)
        for member in range(2)
    }


async def test_stream_whose_filter_keeps_nothing_ends_with_the_tasks(model: ModelServer, tmp_path: Path) -> None:
    stream = {"want": 3, "oversample": 1, "keep": lambda group: False}
    assert await run_groups(model, tmp_path, [row(n) for n in range(7)], k=2, stream=stream) == []
    assert len(records(tmp_path)) == 14


async def test_exception_of_the_filter_is_raised_in_the_consumer(model: ModelServer, tmp_path: Path) -> None:
    def keep(group: Group) -> bool:
        if group.task.id == "t3":
            raise ZeroDivisionError("in the filter")
        return True

    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups([row(n) for n in range(20)], keep=keep)
        with pytest.raises(ZeroDivisionError, match="in the filter"):
            _ = [group async for group in stream]
        await stream.aclose()


async def test_unknown_filter_and_invalid_numbers_are_refused(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        for options, named in [
            ({"keep": "shiny"}, "shiny"),
            ({"k": 0}, "k.*0"),
            ({"buffer": 0}, "buffer.*0"),
            ({"oversample": -1}, "oversample.*-1"),
        ]:
            with pytest.raises(UsageError, match=named):
                engine.groups([row(0)], **options)  # type: ignore[arg-type]
        assert len([group async for group in engine.groups([row(0)])]) == 1


# ---- epochs, generators


async def test_each_epoch_uses_other_seeds(model: ModelServer, tmp_path: Path) -> None:
    groups = await run_groups(model, tmp_path, [row(n) for n in range(3)], k=2, stream={"epochs": 3})
    assert Counter(ids(groups)) == {"t0": 3, "t1": 3, "t2": 3}
    assert [group.index for group in groups] == list(range(9))
    assert len({rollout.seed for group in groups for rollout in group.rollouts}) == 18


async def test_endless_epochs_end_with_the_wanted_groups(model: ModelServer, tmp_path: Path) -> None:
    groups = await run_groups(model, tmp_path, [row(0), row(1)], stream={"epochs": None, "want": 7})
    assert Counter(ids(groups)) == {"t0": 4, "t1": 3}


async def test_stream_without_tasks_is_empty(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        for epochs in (1, 2, None):
            assert [group async for group in engine.groups(iter(()), epochs=epochs, want=3)] == []
        with pytest.raises(UsageError):
            engine.groups([])


async def test_generator_is_consumed_only_when_a_task_is_needed(model: ModelServer, tmp_path: Path) -> None:
    asked = 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal asked
        for n in itertools.count():
            asked += 1
            yield row(n)

    async with build_engine(model, tmp_path, concurrency=3) as engine:
        for epochs in (1, None):
            before = asked
            async with engine.groups(endless(), buffer=2, epochs=epochs, name=f"epochs {epochs}") as stream:
                taken = [await anext(stream) for _ in range(5)]
                assert len(taken) == 5
                assert asked - before <= 5 + 2 + 3


async def test_exception_of_the_task_source_is_raised_in_the_consumer(model: ModelServer, tmp_path: Path) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield row(0)
        yield row(1)
        raise LookupError("the file ended early")

    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups(source())
        with pytest.raises(LookupError, match="ended early"):
            _ = [group async for group in stream]
        await stream.aclose()
        assert len([group async for group in engine.groups([row(2)], name="another")]) == 1


# ---- several streams, a slow consumer


async def test_named_streams_run_concurrently_and_share_fairly(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, concurrency=2) as engine:
        train = engine.groups((row(n) for n in itertools.count()), epochs=1, name="train")
        evaluation = engine.groups([row(n) for n in range(20)], name="eval")
        trained: list[Group] = []

        async def consume() -> None:
            async for group in train:
                trained.append(group)  # noqa: PERF401  (the list is read while it grows)

        consumer = asyncio.create_task(consume())
        evaluated = [group async for group in evaluation]
        assert len(evaluated) == 20
        # Indices count admissions over the whole run: the streams alternated while both had rollouts to start.
        assert 36 <= max(group.index for group in evaluated) <= 44
        assert trained
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        await train.aclose()
    seeds = [rollout.seed for group in (*trained, *evaluated) for rollout in group.rollouts]
    assert len(set(seeds)) == len(seeds)


async def test_unread_stream_does_not_delay_another(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, concurrency=2) as engine:
        ignored = engine.groups([row(n) for n in range(50)], buffer=1, name="ignored")
        assert len([group async for group in engine.groups([row(n) for n in range(50)])]) == 50
        await ignored.aclose()


@pytest.mark.long
async def test_slow_consumer_stops_admission(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, concurrency=4) as engine:
        stream = engine.groups([row(n) for n in range(200)], k=2, buffer=3)
        await anext(stream)
        now = await wait_for_status(
            engine, lambda status: not status["in_flight"] and status["streams"]["main"]["waiting"] >= 3
        )
        status = now["streams"]["main"]
        assert status["admitted"] <= 1 + 3 + 4
        assert len(model.requests) == 2 * status["admitted"]
        rest = [group async for group in stream]
    assert len(rest) == 199


# ---- taking, closing


async def test_cancelled_anext_loses_no_group(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups([row(n) for n in range(6)])
        taken: list[Group] = []
        for _ in range(6):
            waiting = asyncio.create_task(stream.__anext__())
            async with asyncio.timeout(60):
                while not (waiting.done() or stream._loading.locked()):
                    await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            if not waiting.cancelled():
                taken.append(waiting.result())
        assert (await engine.status())["streams"]["main"]["taken"] == len(taken)
        taken += [group async for group in stream]
    assert sorted(ids(taken)) == [f"t{n}" for n in range(6)]


async def test_two_consumers_of_one_stream_share_its_groups(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups([row(n) for n in range(40)])

        async def consume() -> list[Group]:
            return [group async for group in stream]

        shares = await asyncio.gather(*(consume() for _ in range(3)))
    assert Counter(task for share in shares for task in ids(share)) == {f"t{n}": 1 for n in range(40)}


async def test_closing_a_stream_cancels_its_rollouts_and_frees_its_name(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, concurrency=4) as engine:
        stream = engine.groups([row(n, run="hang-in-policy") for n in range(9)], k=2)
        await model.wait_for_requests(4)
        with pytest.raises(UsageError, match="'main'"):
            engine.groups([row(0)])
        await stream.aclose()
        await model.wait_for_disconnects(4)
        assert (await engine.status())["in_flight"] == 0
        assert len([group async for group in engine.groups([row(20)])]) == 1
    outcomes = Counter(label(record.outcome) for record in records(tmp_path))
    assert outcomes == {"cancelled.user": 4, "completed": 1}


@pytest.mark.long
async def test_runner_that_dies_while_its_stream_is_closed_does_not_block_the_close(
    model: ModelServer, tmp_path: Path
) -> None:
    async with build_engine(model, tmp_path, runners=1, concurrency=2) as engine:
        stream = engine.groups([row(n, run="hang-in-policy") for n in range(2)])
        await model.wait_for_requests(2)
        (pid,) = engine.pids()[1:]
        os.kill(pid, signal.SIGSTOP)  # it cannot react to a cancellation any more
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await closing


async def test_stream_cut_short_by_closing_the_engine_raises(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        stream = engine.groups([row(0, run="hang-in-policy")])
        waiting = asyncio.create_task(stream.__anext__())
        await model.wait_for_requests(1)
    async with asyncio.timeout(60):
        with pytest.raises(UsageError):
            await waiting


async def test_use_of_a_closed_engine_raises(model: ModelServer, tmp_path: Path) -> None:
    engine = build_engine(model, tmp_path)
    for _ in ("before", "after"):
        with pytest.raises(UsageError, match="async with Engine"):
            engine.groups([row(0)])
        with pytest.raises(UsageError, match="async with Engine"):
            await engine.status()
        with pytest.raises(UsageError, match="async with Engine"):
            async with engine.paused():
                raise AssertionError("never paused")
        if engine.folder is None:
            async with engine:
                assert len([group async for group in engine.groups([row(0)])]) == 1


async def test_nested_pause_ends_with_the_outer_one(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path) as engine:
        async with engine.paused():
            async with engine.paused():
                pass
            assert (await engine.status())["paused"]
            stream = engine.groups([row(0)])
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(model.requests) == 0
        assert not (await engine.status())["paused"]
        assert len([group async for group in stream]) == 1


async def test_stream_left_by_break_is_cancelled(model: ModelServer, tmp_path: Path) -> None:
    async with build_engine(model, tmp_path, concurrency=2) as engine:
        async for group in engine.groups([row(n) for n in range(500)], k=2):
            assert len(group.rollouts) == 2
            break
        await wait_for_status(engine, lambda status: not status["in_flight"])
        asked = len(model.requests)
        assert len([group async for group in engine.groups([row(0)], name="after")]) == 1
        assert len(model.requests) == asked + 1
    assert asked < 200
