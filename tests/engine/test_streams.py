"""Streams of groups, against a real engine: filters and refill, epochs, several at once, and a consumer's pace."""

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
from tests.engine.conftest import engine, gather, records
from tests.servers import Answer, ModelServer, Request

MIXED = {"score": {"0": "half"}}
"""Two members, two rewards: informative. Without it both score 1."""


def row(n: int, **data: Any) -> dict[str, Any]:
    return {"id": f"t{n}", "prompt": f"q{n}", "data": data}


def ids(groups: list[Group]) -> list[str]:
    return [group.task.id for group in groups]


def hold(model: ModelServer, prompts: set[str], gate: asyncio.Event) -> None:
    """Answers to these prompts wait for the gate."""

    def play(request: Request) -> Answer:
        last = request.body["messages"][-1]["content"]
        return Answer("ok", prompt_ids=[1], ids=[2], logprobs=[-0.5], hold=gate if last in prompts else None)

    model.default = play


# ---- filters and refill


async def test_dropped_groups_are_replaced_until_the_wanted_number_is_kept(
    model: ModelServer, tmp_path: Path
) -> None:
    tasks = [row(n, **(MIXED if n % 3 == 2 else {})) for n in range(30)]
    stream = {"want": 4, "keep": "informative"}
    groups = await gather(model, tmp_path, tasks, k=2, stream=stream, concurrency=4)
    assert ids(groups) == ["t2", "t5", "t8", "t11"]
    assert all(sorted(filter(None, group.rewards)) == [0.5, 1.0] for group in groups)
    # Every admitted rollout has its record, also those of dropped and surplus groups; little is admitted too much.
    written = Counter(record.group for record in records(tmp_path))
    assert set(written.values()) == {2}
    assert 12 <= len(written) <= 16


async def test_over_sampling_takes_the_first_kept_in_order_of_admission_not_of_speed(
    model: ModelServer, tmp_path: Path
) -> None:
    gate = asyncio.Event()
    hold(model, {"q0", "q1"}, gate)
    tasks = [row(n, **MIXED) for n in range(12)]
    async with engine(model, tmp_path, concurrency=32) as made:
        stream = made.groups(tasks, k=2, want=4, oversample=3, keep="informative")
        first = [await anext(stream) for _ in range(2)]
        assert sorted(ids(first)) == ["t2", "t3"], "t4 to t6 have ended too, and must wait for t0 and t1"
        gate.set()
        groups = first + [group async for group in stream]
        assert sorted(ids(groups)) == ["t0", "t1", "t2", "t3"]
        assert (await made.status())["streams"]["main"]["admitted"] == 7
    assert Counter(label(record.outcome) for record in records(tmp_path))["completed"] >= 8


async def test_surplus_groups_are_cancelled_and_recorded(model: ModelServer, tmp_path: Path) -> None:
    gate = asyncio.Event()
    hold(model, {"q3", "q4"}, gate)
    groups = await gather(
        model, tmp_path, [row(n) for n in range(9)], k=2, stream={"want": 3, "oversample": 2}, concurrency=32
    )
    assert ids(groups) == ["t0", "t1", "t2"]
    outcomes = {record.id: label(record.outcome) for record in records(tmp_path)}
    assert outcomes == {
        f"{group}.{member}": "completed" if group < 3 else "cancelled.filtered"
        for group in range(5)
        for member in range(2)
    }


async def test_a_filter_that_keeps_nothing_ends_with_the_tasks(model: ModelServer, tmp_path: Path) -> None:
    stream = {"want": 3, "oversample": 1, "keep": lambda group: False}
    assert await gather(model, tmp_path, [row(n) for n in range(7)], k=2, stream=stream) == []
    assert len(records(tmp_path)) == 14


async def test_an_error_of_the_filter_reaches_the_consumer_as_it_is(model: ModelServer, tmp_path: Path) -> None:
    def keep(group: Group) -> bool:
        if group.task.id == "t3":
            raise ZeroDivisionError("in the filter")
        return True

    async with engine(model, tmp_path) as made:
        stream = made.groups([row(n) for n in range(20)], keep=keep)
        with pytest.raises(ZeroDivisionError, match="in the filter"):
            _ = [group async for group in stream]
        await stream.aclose()


async def test_an_unknown_filter_or_impossible_numbers_are_refused(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        for options, words in [
            ({"keep": "shiny"}, "unknown filter 'shiny'; known: informative"),
            ({"k": 0}, "at least 1"),
            ({"buffer": 0}, "at least 1"),
            ({"oversample": -1}, "at least 0"),
        ]:
            with pytest.raises(UsageError, match=words):
                made.groups([row(0)], **options)  # type: ignore[arg-type]
        assert len([group async for group in made.groups([row(0)])]) == 1


# ---- epochs, generators


async def test_epochs_go_round_and_draw_other_seeds_each_time(model: ModelServer, tmp_path: Path) -> None:
    groups = await gather(model, tmp_path, [row(n) for n in range(3)], k=2, stream={"epochs": 3})
    assert Counter(ids(groups)) == {"t0": 3, "t1": 3, "t2": 3}
    assert [group.index for group in groups] == list(range(9))
    assert len({rollout.seed for group in groups for rollout in group.rollouts}) == 18


async def test_endless_epochs_end_when_there_are_enough(model: ModelServer, tmp_path: Path) -> None:
    groups = await gather(model, tmp_path, [row(0), row(1)], stream={"epochs": None, "want": 7})
    assert Counter(ids(groups)) == {"t0": 4, "t1": 3}


async def test_no_tasks_are_no_groups(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        for epochs in (1, 2, None):
            assert [group async for group in made.groups(iter(()), epochs=epochs, want=3)] == []
        with pytest.raises(UsageError, match="no tasks"):
            made.groups([])


async def test_a_generator_is_asked_only_when_a_task_is_needed(model: ModelServer, tmp_path: Path) -> None:
    asked = 0

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal asked
        for n in itertools.count():
            asked += 1
            yield row(n)

    async with engine(model, tmp_path, concurrency=3) as made:
        for epochs in (1, None):
            before = asked
            async with made.groups(endless(), buffer=2, epochs=epochs, name=f"epochs {epochs}") as stream:
                taken = [await anext(stream) for _ in range(5)]
                assert len(taken) == 5
                assert asked - before <= 5 + 2 + 3


async def test_an_error_of_the_source_reaches_the_consumer_as_it_is(model: ModelServer, tmp_path: Path) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield row(0)
        yield row(1)
        raise LookupError("the file ended early")

    async with engine(model, tmp_path) as made:
        stream = made.groups(source())
        with pytest.raises(LookupError, match="ended early"):
            _ = [group async for group in stream]
        await stream.aclose()
        assert len([group async for group in made.groups([row(2)], name="another")]) == 1


# ---- several streams, a slow consumer


async def test_streams_of_different_names_run_side_by_side_and_share_fairly(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, concurrency=2) as made:
        train = made.groups((row(n) for n in itertools.count()), epochs=1, name="train")
        evaluation = made.groups([row(n) for n in range(20)], name="eval")
        trained: list[Group] = []

        async def consume() -> None:
            async for group in train:
                trained.append(group)  # noqa: PERF401  (looked at while it grows)

        consumer = asyncio.create_task(consume())
        evaluated = [group async for group in evaluation]
        assert len(evaluated) == 20
        # Indices count admissions over the whole run: the two took turns while both had something to run.
        assert 36 <= max(group.index for group in evaluated) <= 44
        assert trained
        consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        await train.aclose()
    seeds = [rollout.seed for group in (*trained, *evaluated) for rollout in group.rollouts]
    assert len(set(seeds)) == len(seeds)


async def test_a_stream_nobody_takes_from_does_not_hold_up_another(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path, concurrency=2) as made:
        ignored = made.groups([row(n) for n in range(50)], buffer=1, name="ignored")
        assert len([group async for group in made.groups([row(n) for n in range(50)])]) == 50
        await ignored.aclose()


async def test_a_slow_consumer_stops_admission(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path, concurrency=4) as made:
        stream = made.groups([row(n) for n in range(200)], k=2, buffer=3)
        await anext(stream)
        at_rest = 0
        async with asyncio.timeout(60):
            while at_rest < 20:  # twenty looks in a row at an engine with nothing to do
                await asyncio.sleep(0.005)
                at_rest = at_rest + 1 if (await made.status())["in_flight"] == 0 else 0
        status = (await made.status())["streams"]["main"]
        assert status["admitted"] <= 1 + 3 + 4
        assert len(model.requests) == 2 * status["admitted"]
        rest = [group async for group in stream]
    assert len(rest) == 199


# ---- taking, closing


async def test_a_cancelled_anext_loses_no_group(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        stream = made.groups([row(n) for n in range(6)])
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
        assert (await made.status())["streams"]["main"]["taken"] == len(taken)
        taken += [group async for group in stream]
    assert sorted(ids(taken)) == [f"t{n}" for n in range(6)]


async def test_two_consumers_of_one_stream_share_its_groups(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        stream = made.groups([row(n) for n in range(40)])

        async def consume() -> list[Group]:
            return [group async for group in stream]

        shares = await asyncio.gather(*(consume() for _ in range(3)))
    assert Counter(task for share in shares for task in ids(share)) == {f"t{n}": 1 for n in range(40)}


async def test_closing_a_stream_cancels_what_is_under_way_and_frees_its_name(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, concurrency=4) as made:
        stream = made.groups([row(n, run="hang-in-policy") for n in range(9)], k=2)
        await model.wait_for_requests(4)
        with pytest.raises(UsageError, match="'main' is still open"):
            made.groups([row(0)])
        await stream.aclose()
        await model.wait_for_disconnects(4)
        assert (await made.status())["in_flight"] == 0
        assert len([group async for group in made.groups([row(20)])]) == 1
    outcomes = Counter(label(record.outcome) for record in records(tmp_path))
    assert outcomes == {"cancelled.user": 4, "completed": 1}


async def test_a_runner_that_dies_while_its_stream_is_closed_keeps_nobody_waiting(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path, runners=1, concurrency=2) as made:
        stream = made.groups([row(n, run="hang-in-policy") for n in range(2)])
        await model.wait_for_requests(2)
        (pid,) = made.pids()[1:]
        os.kill(pid, signal.SIGSTOP)  # it can answer no cancellation any more
        closing = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await closing


async def test_a_stream_cut_short_by_closing_the_engine_never_looks_like_one_that_ended(
    model: ModelServer, tmp_path: Path
) -> None:
    async with engine(model, tmp_path) as made:
        stream = made.groups([row(0, run="hang-in-policy")])
        waiting = asyncio.create_task(stream.__anext__())
        await model.wait_for_requests(1)
    async with asyncio.timeout(60):
        with pytest.raises(UsageError, match="engine was closed"):
            await waiting


async def test_using_a_closed_engine_is_an_error_in_words(model: ModelServer, tmp_path: Path) -> None:
    made = engine(model, tmp_path)
    for _ in ("before", "after"):
        with pytest.raises(UsageError, match="not open"):
            made.groups([row(0)])
        with pytest.raises(UsageError, match="not open"):
            await made.status()
        with pytest.raises(UsageError, match="not open"):
            async with made.paused():
                raise AssertionError("never paused")
        if made.folder is None:
            async with made:
                assert len([group async for group in made.groups([row(0)])]) == 1


async def test_a_pause_inside_a_pause_ends_with_the_outer_one(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path) as made:
        async with made.paused():
            async with made.paused():
                pass
            assert (await made.status())["paused"]
            stream = made.groups([row(0)])
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(model.requests) == 0
        assert not (await made.status())["paused"]
        assert len([group async for group in stream]) == 1


async def test_a_stream_left_by_break_is_cancelled(model: ModelServer, tmp_path: Path) -> None:
    async with engine(model, tmp_path, concurrency=2) as made:
        async for group in made.groups([row(n) for n in range(500)], k=2):
            assert len(group.rollouts) == 2
            break
        async with asyncio.timeout(60):
            while (await made.status())["in_flight"]:
                await asyncio.sleep(0.01)
        asked = len(model.requests)
        assert len([group async for group in made.groups([row(0)], name="after")]) == 1
        assert len(model.requests) == asked + 1
    assert asked < 200
