"""The cache of model replies: what a reply is found by, and what happens to damaged, large and shared caches."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery import Engine
from rookery.core import Message, Sampling, ToolCall, ToolSchema, UsageError, ints
from rookery.core.turns import REPLY_CACHE
from rookery.upstreams import reply_cache
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest, ToolSet, UpstreamConfig
from rookery.upstreams.reply_cache import FILE, CachedUpstream, ReplyCache, with_cache
from tests.environments.helpers import ScriptedUpstream
from tests.servers import Answer, ModelServer, Request

CONFIG = UpstreamConfig(kind="vllm", urls=("http://127.0.0.1:1",), model="m")
REQUEST = ModelRequest(model="m", messages=(Message("user", "Hi"),), sampling=Sampling(temperature=1.0), seed=1)
REPLY = ModelReply(
    message=Message("assistant", "Hello", (ToolCall("c", "add", "{}"),), reasoning="Hm."),
    finish="tool_calls",
    sampled=ints([4, 5]),
    sampled_tokens=2,
    replica="http://127.0.0.1:1",
)


def wrap(folder: Path, *replies: Any, config: UpstreamConfig = CONFIG) -> CachedUpstream:
    found = with_cache(ScriptedUpstream(replies), msgspec.structs.replace(config, cache=str(folder)))
    assert isinstance(found, CachedUpstream)
    return found


async def test_equal_call_gets_the_stored_reply(tmp_path: Path) -> None:
    first, second = wrap(tmp_path, REPLY), wrap(tmp_path)
    assert await first.complete(REQUEST, timeout=1) == REPLY
    deltas: list[Delta] = []

    async def on_delta(delta: Delta) -> None:
        deltas.append(delta)

    reply = await second.complete(REQUEST, timeout=1, on_delta=on_delta)
    assert reply == msgspec.structs.replace(REPLY, replica=REPLY_CACHE)
    assert second.hits == 1
    (delta,) = deltas
    assert (delta.content, delta.reasoning, delta.sampled) == ("Hello", "Hm.", REPLY.sampled)
    assert [(call.id, call.name) for call in delta.tool_calls] == [("c", "add")]
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"model": "n"},
            {"messages": (Message("user", "Ho"),)},
            {"messages": (), "tokens": ints([1])},
            {"seed": 2},
        ),
        *({"sampling": Sampling(temperature=0.5)}, {"sampling": Sampling(temperature=1.0, extra={"min_p": 0.1})}),
        *({"tools": ToolSet((ToolSchema("t", "", {}),))}, {"tool_choice": "none"}, {"want_tokens": False}),
        *({"top_logprobs": 2}, {"stop_ids": (7,)}),
    ],
    ids=str,
)
def test_every_part_of_a_request_is_in_the_key(change: dict[str, Any], tmp_path: Path) -> None:
    upstream = wrap(tmp_path)
    assert upstream.make_key(msgspec.structs.replace(REQUEST, **change)) != upstream.make_key(REQUEST)
    same = msgspec.structs.replace(REQUEST, affinity="other", avoid=("x",), id="9")
    assert upstream.make_key(same) == upstream.make_key(REQUEST)


def test_model_and_weights_are_in_the_key(tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"1")
    configs = [
        CONFIG,
        msgspec.structs.replace(CONFIG, kind="sglang"),
        msgspec.structs.replace(CONFIG, urls=("http://127.0.0.1:2",)),
        msgspec.structs.replace(CONFIG, seeded=True),
        UpstreamConfig(kind="embedded", urls=("embedded",)),
        UpstreamConfig(kind="embedded", urls=(f"embedded:{weights}",)),
    ]
    keys = [wrap(tmp_path / "cache", config=config).make_key(REQUEST) for config in configs]
    weights.write_bytes(b"22")
    keys.append(wrap(tmp_path / "cache", config=configs[-1]).make_key(REQUEST))
    versioned = wrap(tmp_path / "cache")
    versioned.version = 5
    keys.append(versioned.make_key(REQUEST))
    assert len(set(keys)) == len(keys)


async def test_aborted_and_unseeded_calls_are_not_stored(tmp_path: Path) -> None:
    aborted = msgspec.structs.replace(REPLY, finish="abort")
    upstream = wrap(tmp_path, aborted, REPLY, REPLY)
    unseeded = msgspec.structs.replace(REQUEST, seed=None)
    for request in (REQUEST, unseeded, unseeded):
        await upstream.complete(request, timeout=1)
    assert upstream.hits == 0
    await upstream.close()


def test_database_that_another_process_recovers_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [sqlite3.SQLITE_BUSY_RECOVERY]
    connect = sqlite3.connect

    class RecoveringConnection(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            if failures:
                error = sqlite3.OperationalError()
                error.sqlite_errorcode = failures.pop()
                raise error
            return super().execute(*args)

    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **options: connect(*args, factory=RecoveringConnection, **options)
    )
    ReplyCache(tmp_path).close()
    assert not failures


async def test_reply_with_other_fields_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    upstream = wrap(tmp_path, REPLY)
    key = upstream.make_key(REQUEST)
    assert key is not None
    cache = ReplyCache(tmp_path)
    cache.put(key, msgspec.msgpack.encode({"text": "Hello"}))
    cache.close()
    assert await upstream.complete(REQUEST, timeout=1) == REPLY
    assert (await upstream.complete(REQUEST, timeout=1)).replica == REPLY_CACHE
    assert upstream.hits == 1
    await upstream.close()


def test_damaged_reply_is_a_miss_and_a_foreign_file_is_refused(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path)
    cache.put(b"k", b"reply")
    assert cache.get(b"k") == b"reply"
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("UPDATE replies SET reply = x'00'")
    assert cache.get(b"k") is None
    cache.close()
    assert cache.get(b"k") is None  # an error of the database is a miss
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE).write_bytes(b"not a database, but long enough to be read" * 50)
    with pytest.raises(UsageError):
        ReplyCache(tmp_path / "other")


def test_size_is_bounded_and_the_newest_replies_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_cache, "_WRITES_PER_CHECK", 2)
    times = iter(range(1000))
    monkeypatch.setattr(reply_cache.time, "time", lambda: float(next(times)))
    cache = ReplyCache(tmp_path, max_bytes=1000)
    for n in range(100):
        cache.put(b"%d" % n, bytes(100))
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("SELECT total(size) FROM replies").fetchone()[0] <= 1100
    assert cache.get(b"99") is not None
    assert cache.get(b"0") is None
    cache.close()


def test_several_writers_share_a_cache(tmp_path: Path) -> None:
    def write(start: int) -> None:
        cache = ReplyCache(tmp_path)
        for n in range(start, start + 50):
            cache.put(b"%d" % n, b"%d" % n)
        cache.close()

    threads = [threading.Thread(target=write, args=(25 * at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache = ReplyCache(tmp_path)
    assert all(cache.get(b"%d" % n) == b"%d" % n for n in range(125))
    cache.close()


@pytest.mark.long
async def test_repeated_evaluation_samples_nothing_and_training_is_refused(tmp_path: Path) -> None:
    count = iter(range(1000))

    def reply(request: Request) -> Answer:
        return Answer(f"sample {next(count)}", prompt_ids=[1], ids=[2], logprobs=[-0.5])

    texts = []
    async with ModelServer(reply) as server:
        for _ in range(2):
            engine = Engine(
                "tools", policy=server.url, out=tmp_path / "runs", runners=0, cache=str(tmp_path / "cache")
            )
            async with engine:
                tasks = [{"prompt": "a", "answer": "a"}, {"prompt": "b", "answer": "b"}]
                groups = [group async for group in engine.groups(tasks, k=2)]
                texts.append({one.id: one.segments[0].tokens for group in groups for one in group.rollouts})
                with pytest.raises(UsageError):
                    engine.groups(tasks, name="training", need_tokens=True)
                with pytest.raises(UsageError):
                    await engine.upstream.resume(version=2)
        assert len(server.requests) == 4
    assert texts[0] == texts[1]
