"""Frames and messages between processes, and the conversion of user data to plain data."""

import asyncio
import gc
import math
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.core import Attempt, Completed, Outcome, Task, label
from rookery.engine import framing, runner_protocol
from rookery.engine.framing import MAX_FRAME, FramedConnection, FramingError
from rookery.engine.plain_data import LEFT_OUT, MAX_DEPTH, MAX_SIZE, plain_data, plain_numbers
from tests.core.strategies import json_values, values_of
from tests.engine.conftest import build_engine
from tests.servers import ModelServer

TO_RUNNER = [
    runner_protocol.Hello,
    runner_protocol.AttemptSpec,
    runner_protocol.Cancel,
    runner_protocol.Pause,
    runner_protocol.Resume,
    runner_protocol.Stop,
]
FROM_RUNNER = [
    runner_protocol.Ready,
    runner_protocol.RunnerFailed,
    runner_protocol.AttemptResult,
    runner_protocol.RunnerEvent,
    runner_protocol.Heartbeat,
    runner_protocol.Paused,
    runner_protocol.LoopBlocked,
]


def frame(message: object) -> bytes:
    data = framing.encoder.encode(message)
    return struct.pack("<I", len(data)) + data


def receiver(decoder: Any = runner_protocol.from_runner_decoder) -> tuple[FramedConnection, list[Any]]:
    got: list[Any] = []
    return FramedConnection(decoder, got.append, lambda _: None), got


# ---- messages and frames


@pytest.mark.parametrize("kind", [*TO_RUNNER, *FROM_RUNNER], ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_messages_survive_encoding_and_decoding(kind: Any, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    decoder: Any = runner_protocol.to_runner_decoder if kind in TO_RUNNER else runner_protocol.from_runner_decoder
    again = decoder.decode(framing.encoder.encode(message))
    assert again == message
    assert type(again) is kind


messages = st.lists(
    st.one_of(
        st.builds(runner_protocol.Ready, st.integers(0, 2**31)),
        st.builds(
            runner_protocol.RunnerEvent,
            st.text(max_size=5),
            st.dictionaries(st.text(max_size=3), json_values, max_size=2),
        ),
        st.builds(runner_protocol.Heartbeat),
        st.builds(
            runner_protocol.AttemptResult,
            st.builds(
                Attempt,
                id=st.text(max_size=5),
                number=st.just(1),
                outcome=values_of(Outcome),
                started=st.just(0.0),
                ended=st.just(1.0),
            ),
        ),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(messages, st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_frames_survive_any_chunking_of_the_bytes(sent: list[Any], sizes: list[int]) -> None:
    reader, got = receiver()
    data = b"".join(frame(message) for message in sent)
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        reader.data_received(data[at : at + size])
        at, turn = at + size, turn + 1
    assert got == sent
    whole, at_once = receiver()
    whole.data_received(data)
    assert at_once == sent


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    reader, got = receiver()
    head = struct.pack("<I", MAX_FRAME + 1)
    with pytest.raises(FramingError, match=f"{MAX_FRAME + 1:,}"):
        reader.data_received(frame(runner_protocol.Heartbeat()) + head)
    assert got == [runner_protocol.Heartbeat()]
    narrow, _ = receiver()
    narrow.limit = 10
    with pytest.raises(FramingError, match=r"\b10$"):
        narrow.data_received(struct.pack("<I", 11))


def test_invalid_frame_is_an_error() -> None:
    reader, got = receiver()
    with pytest.raises(msgspec.DecodeError):
        reader.data_received(struct.pack("<I", 2) + b"\xc1\xc1")
    assert got == []


@asynccontextmanager
async def connected_pair(
    before_write: Any = None,
) -> AsyncIterator[tuple[FramedConnection, list[Any], asyncio.Event]]:
    """Yield a connection and the socket at its other end."""
    got: list[Any] = []
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    remote = FramedConnection(runner_protocol.from_runner_decoder, got.append, lambda _: gone.set())
    near = FramedConnection(runner_protocol.to_runner_decoder, got.append, lambda _: None, before_write)
    await loop.create_unix_connection(lambda: remote, sock=theirs)
    await loop.create_unix_connection(lambda: near, sock=ours)
    try:
        yield near, got, gone
    finally:
        near.close()
        remote.close()
        await asyncio.sleep(0)


async def test_messages_of_one_loop_iteration_are_written_at_once_in_order() -> None:
    writes: list[int] = []
    async with connected_pair(lambda: writes.append(1)) as (near, got, gone):
        for number in range(50):
            near.send(runner_protocol.Paused(number))
        assert writes == []
        await asyncio.sleep(0)
        assert writes == [1]
        near.close()
        await gone.wait()
    assert got == [runner_protocol.Paused(number) for number in range(50)]


async def test_closing_sends_queued_messages() -> None:
    async with connected_pair() as (near, got, gone):
        near.send(runner_protocol.Heartbeat())
        near.close()
        near.send(runner_protocol.Heartbeat())  # the peer is gone
        await gone.wait()
    assert got == [runner_protocol.Heartbeat()]


async def test_dropped_messages_are_not_sent() -> None:
    async with connected_pair() as (near, got, gone):
        near.send(runner_protocol.Paused(1))
        near.drop_unsent()
        near.send(runner_protocol.Paused(2))
        near.close()
        await gone.wait()
    assert got == [runner_protocol.Paused(2)]


# ---- plain data


class Colour(Enum):
    RED = "red"


class RaisingRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class RaisingMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("not for you")


@dataclass
class Point:
    x: int
    y: Any


def make_nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def make_cycle() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


ODD: dict[str, Any] = {
    "surrogate": "\udcff",
    "cycle": make_cycle(),
    "int key": {1: 2},
    "tuple key": {(1, 2): 3},
    "surrogate key": {"\ud800": 1},
    "huge int": 10**5000,
    "silent": RaisingRepr(),
    "sly": RaisingMapping(a=1),
    "set": {1, 2},
    "array": np.arange(3),
    "scalar": np.float32(0.5),
    "infinite": math.inf,
    "deep": make_nested(5000),
    "point": Point(1, Point(2, make_cycle())),
    "point of silence": Point(1, RaisingRepr()),
    "enum": Colour.RED,
    "time": datetime(2020, 1, 1, tzinfo=UTC),
    "exception": ValueError("\udcff"),
    "function": len,
    "class": RaisingRepr,
    "bytes": b"\xff\x00",
    "range": range(10**9),
    "large": "x" * (MAX_SIZE + 1),
    "many": [0] * (MAX_SIZE // 4),
    "large array": np.zeros(MAX_SIZE),
}


@pytest.mark.parametrize("name", ODD)
def test_any_stored_value_can_be_encoded(name: str) -> None:
    for fields in ({"x": ODD[name]}, ODD[name]):
        kept = plain_data(fields)
        packed = msgspec.msgpack.encode(kept)
        assert msgspec.msgpack.decode(packed, type=dict[str, Any]) == kept
        assert msgspec.json.decode(msgspec.json.encode(kept), type=dict[str, Any]).keys() == kept.keys()
        assert len(packed) <= 2 * MAX_SIZE


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4))
def test_plain_data_is_returned_unchanged(fields: dict[str, Any]) -> None:
    assert plain_data(fields) == fields


def test_objects_become_their_repr_and_large_values_placeholders() -> None:
    kept = plain_data(
        {name: ODD[name] for name in ("set", "array", "scalar", "time", "silent", "enum", "int key")}
    )
    assert kept == {
        "set": [1, 2],
        "array": [0, 1, 2],
        "scalar": 0.5,
        "time": "2020-01-01T00:00:00Z",
        "silent": "(a RaisingRepr whose repr raised RuntimeError)",
        "enum": "red",
        "int key": {"1": 2},
    }
    assert plain_data({"x": ODD["large"], "y": 1}) == {"x": LEFT_OUT, "y": 1}
    assert plain_data({"x": ODD["many"]})["x"][-1] == LEFT_OUT
    deep: Any = plain_data({"x": make_nested(MAX_DEPTH + 5)})
    assert LEFT_OUT in repr(deep)
    assert plain_data(None) == {}
    assert plain_data([1]) == {"value": [1]}


def test_numeric_metrics_become_floats_and_others_plain_data() -> None:
    numbers, others = plain_numbers(
        {"a": 1, "b": np.float32(0.5), "c": True, "d": "x", "e": None, "f": 10**400, 7: 2}
    )
    assert numbers == {"a": 1.0, "b": 0.5, "c": 1.0, "7": 2.0}
    assert list(others) == ["d", "e", "f"]
    done = runner_protocol.AttemptResult.to_plain_data(
        runner_protocol.AttemptResult(
            Attempt(id="0.0.1", number=1, outcome=Completed()), metrics={"a": "x"}, info={"b": {1}}
        )
    )  # type: ignore[dict-item]
    assert (done.metrics, done.info) == ({}, {"b": [1], "metrics that are no numbers": {"a": "x"}})


@pytest.mark.long
@pytest.mark.parametrize("runners", [0, 1], ids=["in-process", "one-runner"])
async def test_unusual_stored_values_fail_no_rollout(model: ModelServer, tmp_path: Path, runners: int) -> None:
    names = [*ODD, "(metrics)", "(log)", "(no info)", "(raises)"]
    tasks = [Task(id=name, data={"name": name}) for name in names]
    async with build_engine(
        model, tmp_path, env="tests.engine.test_runner_protocol:StoresValues", runners=runners
    ) as made_engine:
        groups = {group.task.id: group async for group in made_engine.groups(tasks)}
    assert {name: label(groups[name].rollouts[0].outcome) for name in names} == {
        name: "bug.environment" if name == "(raises)" else "completed" for name in names
    }
    assert all(len(group.rollouts[0].attempts) == 1 for group in groups.values())


async def test_metrics_that_are_not_a_mapping_do_not_block_the_run(model: ModelServer, tmp_path: Path) -> None:
    try:
        async with (
            asyncio.timeout(60),
            build_engine(model, tmp_path, env="tests.engine.test_runner_protocol:StoresValues") as made_engine,
        ):
            tasks = [Task(id="m", data={"name": "(no metrics)"})]
            assert len([group async for group in made_engine.groups(tasks)]) == 1
    finally:
        gc.collect()  # an unretrieved exception is logged here, not during the next test


from rookery import Context, Environment  # noqa: E402  (the environment of the test above)


class StoresValues(Environment):
    """Stores the values that its task names."""

    async def run(self, ctx: Context) -> None:
        match ctx.task.data["name"]:
            case "(metrics)":
                ctx.metrics.update({"text": "x", "none": None, "cycle": make_cycle()})  # type: ignore[dict-item]
            case "(log)":
                ctx.log.info("\udcff", silent=RaisingRepr(), make_cycle=make_cycle())
            case "(no info)":
                ctx.info = None  # type: ignore[assignment]
            case "(no metrics)":
                ctx.metrics = []  # type: ignore[assignment]
            case "(raises)":
                raise ValueError("\udcff", RaisingRepr())
            case name:
                ctx.info["kept"] = ODD[name]

    async def score(self, ctx: Context) -> float:
        return 1.0
