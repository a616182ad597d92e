"""Streams that the client closes: what was sampled counts, and trains only where the client continues from it."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from rookery.core import Message, Sampling
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.upstreams.embedded import chat
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest, OnDelta
from tests.gateway.dialects.kit import rendered
from tests.gateway.kit import Gateway, Registered, served
from tests.gateway.rooms import Script
from tests.gateway.scripted import WAIT, Play, Scripted, letters, pieces_of
from tests.gateway.scripted import rendered as rendering_of

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


async def cut_after(
    gateway: Gateway, upstream: Scripted, session: Registered, pieces: int, messages: Any = "hello", **fields: Any
) -> None:
    """Streams an answer, and closes the connection when so many pieces were sent."""
    before = len(upstream.calls)
    wire = await gateway.wire()
    wire.send(gateway.chat_request(session, messages, stream=True, **fields))
    asked = await upstream.called(before + 1)
    asked.go(pieces)
    async with asyncio.timeout(WAIT):
        while asked.told < pieces:
            await asyncio.sleep(0)
    wire.cut()
    await asked.ended()
    await gateway.settled()
    assert asked.cancelled


def trained(record: dict[str, Any]) -> list[list[int]]:
    return [
        [token for token, on in zip(one["tokens"], one["mask"], strict=True) if on] for one in record["segments"]
    ]


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("record", ["messages", "tokens", "plain"])
@pytest.mark.parametrize(
    ("budgets", "reason", "streams"), [({"max_turns": 2}, "turns", 2), ({"max_tokens": 12}, "tokens", 3)]
)
async def test_cut_streams_spend_the_budgets_and_end_the_session(
    tmp_path: Path, record: Any, budgets: dict[str, int], reason: str, streams: int
) -> None:
    upstream = Scripted(Play("abcdefgh", held=True))
    async with served(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register(budgets=budgets)
        for _ in range(streams):
            await cut_after(gateway, upstream, session, 4)
        answer = await gateway.chat(session, stream=True)
        assert (answer.status, answer.error["code"]) == (400, "rollout_truncated")
        found = await gateway.trajectory(session)
        assert found["truncated"] == reason
        assert (found["usage"]["turns"], found["usage"]["sampled_tokens"]) == (streams, 4 * streams)
        assert found["fidelity"]["partial"] == streams
        assert len(upstream.calls) == streams
        shown = [(turn["partial"], turn["finish"], turn["response"]["content"]) for turn in found["turns"]]
        assert shown == [(True, "abort", "abcd")] * streams
        assert found["segments"] == [], "nobody continued from them"
        assert b'partial_total{shard="0"} %d' % streams in (await gateway.ask("GET", "/metrics")).body
    async with served(tmp_path, upstream, record=record) as gateway:
        assert (await gateway.chat(session)).status == 400
        usage = (await gateway.trajectory(session))["usage"]
        assert (usage["turns"], usage["sampled_tokens"]) == (streams, 4 * streams)


async def test_a_stream_that_is_cut_before_its_first_token_leaves_nothing(tmp_path: Path) -> None:
    upstream = Scripted(Play("abc", held=True))
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register()
        await cut_after(gateway, upstream, session, 0)
        assert await gateway.turns(session) == []


async def test_a_marked_retry_of_a_cut_stream_is_sampled_anew(tmp_path: Path) -> None:
    upstream = Scripted("whole")
    upstream.then(Play("abcd", held=True))
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register()
        await cut_after(gateway, upstream, session, 2)
        assert (await gateway.chat(session, stream=True, retry=1)).text == "whole"
        found = await gateway.trajectory(session)
        assert trained(found) == [codes("whole\x03")]
        assert [turn.get("partial", False) for turn in found["turns"]] == [True, False]


@pytest.mark.parametrize("record", ["messages", "tokens"])
@pytest.mark.parametrize("read", [6, 3, 1])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_client_that_continues_from_what_it_read_trains_exactly_those_tokens(
    tmp_path: Path, record: Any, read: int, restart: bool
) -> None:
    upstream = Scripted("fine")
    first, *others = pieces_of("abcdefgh")
    prompt = letters(rendering_of([Message("user", "hello")]))
    upstream.then(Play(pieces=(msgspec.structs.replace(first, prompt=prompt), *others), held=True))
    said = [*HELLO, {"role": "assistant", "content": "abcdef"[:read]}, {"role": "user", "content": "go on"}]
    async with served(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register()
        await cut_after(gateway, upstream, session, 6)
        if not restart:
            assert (await gateway.chat(session, said)).text == "fine"
    async with served(tmp_path, upstream, record=record) as gateway:
        if restart:
            assert (await gateway.chat(session, said)).text == "fine"
        said += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
        assert (await gateway.chat(session, said, return_token_ids=True)).status == 200
        found = await gateway.trajectory(session)
        assert trained(found) == [codes("abcdef"[:read] + "fine\x03fine\x03")]
        assert found["segments"][0]["turns"] == [0, 1, 2]
        assert found["fidelity"]["drifted"] == 0
        assert [turn.get("parent") for turn in found["turns"]] == [None, 0, 1]
        request = (await upstream.called(3)).request
        if record == "tokens":
            sent = "".join(map(chr, memoryview(request.tokens).cast("i")))
            assert f"assistant\x02{'abcdef'[:read]}\x03" in sent


async def test_two_continuations_from_different_places_train_each_token_once(tmp_path: Path) -> None:
    upstream = Scripted("x")
    upstream.then(Play("abcdefgh", held=True))
    async with served(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        await cut_after(gateway, upstream, session, 6)
        for read in (5, 2):
            answer = {"role": "assistant", "content": "abcdef"[:read]}
            await gateway.chat(session, [*HELLO, answer, {"role": "user", "content": "go on"}])
        found = await gateway.trajectory(session)
        assert sorted(trained(found)) == sorted([codes("abcdex\x03"), codes("x\x03")])


async def test_a_client_that_continues_from_something_else_trains_nothing_of_the_partial_turn(
    tmp_path: Path,
) -> None:
    upstream = Scripted("x")
    upstream.then(Play("abcdefgh", held=True))
    async with served(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        await cut_after(gateway, upstream, session, 6)
        edited = {"role": "assistant", "content": "abX"}
        await gateway.chat(session, [*HELLO, edited, {"role": "user", "content": "go on"}])
        assert trained(await gateway.trajectory(session)) == [codes("x\x03")]


async def test_every_choice_of_a_cut_stream_is_a_partial_turn(tmp_path: Path) -> None:
    upstream = Scripted(Play("abc", held=True))
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register()
        wire = await gateway.wire()
        wire.send(gateway.chat_request(session, stream=True, n=3))
        await upstream.called(3)
        for at, asked in enumerate(upstream.calls):
            asked.go(at)
        async with asyncio.timeout(WAIT):
            while [asked.told for asked in upstream.calls] != [0, 1, 2]:
                await asyncio.sleep(0)
        wire.cut()
        for asked in upstream.calls:
            await asked.ended()
        await gateway.settled()
        assert sorted(turn["response"]["content"] for turn in await gateway.turns(session)) == ["a", "ab"]


class Stopping(Script):
    """An engine with the embedded policy's chat format, whose first streamed answer stops in the middle."""

    def __init__(self) -> None:
        super().__init__(lambda _: [*b"hello world", chat.END], EmbeddedRenderer())
        self.first = True

    async def complete(self, request: ModelRequest, *, on_delta: OnDelta | None = None, **more: Any) -> ModelReply:
        if on_delta is None or not self.first:
            return await super().complete(request, on_delta=on_delta, **more)
        self.first, count = False, 0

        async def told(delta: Delta) -> None:
            nonlocal count
            await on_delta(delta)
            count += 1
            if count == 2:
                await asyncio.Event().wait()

        return await super().complete(request, on_delta=told, **more)


async def test_the_openai_library_closes_a_stream_and_continues_from_what_it_read(tmp_path: Path) -> None:
    async with rendered(tmp_path, Stopping()) as (gateway, noting):
        session = await gateway.register(sampling=msgspec.to_builtins(Sampling(temperature=1.0, seed=5)))
        async with AsyncOpenAI(base_url=f"{gateway.url}{session.path}", api_key=session.secret) as own:
            messages: Any = [{"role": "user", "content": "What is 2 + 2?"}]
            text = ""
            stream = await own.chat.completions.create(model="m", messages=messages, stream=True, max_tokens=200)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text:
                    break
            await stream.close()
            await gateway.settled()
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            answer = await own.chat.completions.create(
                model="m", messages=messages, max_tokens=5, extra_body={"return_token_ids": True}
            )
            assert answer.choices[0].finish_reason
        found = await gateway.trajectory(session)
        turns = found["turns"]
        assert (turns[0]["partial"], turns[1]["parent"]) == (True, 0)
        assert text in ("hel", "hello ")
        kept = list(text.encode())
        assert turns[0]["sampled"][: len(kept)] == kept
        assert trained(found) == [kept + turns[1]["sampled"]]
        assert found["usage"]["sampled_tokens"] == sum(len(turn["sampled"]) for turn in turns)
        whole = turns[0]["prompt"] + kept + turns[1]["prompt"]
        assert memoryview(noting.noted[-1][0].tokens).cast("i").tolist() == whole
