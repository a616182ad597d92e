"""A stream that its client closes is a partial turn; it trains only if the client continues from it."""

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
from tests.gateway.dialects.kit import run_token_shard
from tests.gateway.kit import InProcessGateway, RegisteredSession, run_shard
from tests.gateway.scripted_upstream import WAIT, ScriptedReply, ScriptedUpstream, char_ids, render_chat, to_deltas
from tests.gateway.session_kit import TokenScriptUpstream

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


async def disconnect_after(
    gateway: InProcessGateway,
    upstream: ScriptedUpstream,
    session: RegisteredSession,
    pieces: int,
    messages: Any = "hello",
    **fields: Any,
) -> None:
    """Stream a reply and disconnect after `pieces` deltas."""
    before = len(upstream.calls)
    connection = await gateway.connect()
    connection.send(gateway.chat_request(session, messages, stream=True, **fields))
    model_call = await upstream.wait_for_call(before + 1)
    model_call.advance(pieces)
    async with asyncio.timeout(WAIT):
        while model_call.sent < pieces:
            await asyncio.sleep(0)
    connection.abort()
    await model_call.wait_until_ended()
    await gateway.wait_until_idle()
    assert model_call.cancelled


def trained_tokens(record: dict[str, Any]) -> list[list[int]]:
    return [
        [token for token, on in zip(one["tokens"], one["mask"], strict=True) if on] for one in record["segments"]
    ]


def char_codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.mark.parametrize("record", ["messages", "tokens", "plain"])
@pytest.mark.parametrize(
    ("budgets", "reason", "streams"), [({"max_turns": 2}, "turns", 2), ({"max_tokens": 12}, "tokens", 3)]
)
async def test_partial_turns_count_towards_the_budgets(
    tmp_path: Path, record: Any, budgets: dict[str, int], reason: str, streams: int
) -> None:
    upstream = ScriptedUpstream(ScriptedReply("abcdefgh", stepwise=True))
    async with run_shard(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register(budgets=budgets)
        partial = await gateway.count("partial")
        for _ in range(streams):
            await disconnect_after(gateway, upstream, session, 4)
        answer = await gateway.chat(session, stream=True)
        assert (answer.status, answer.error["code"]) == (400, "rollout_truncated")
        trajectory = await gateway.trajectory(session)
        assert trajectory["truncated"] == reason
        assert (trajectory["usage"]["turns"], trajectory["usage"]["sampled_tokens"]) == (streams, 4 * streams)
        assert trajectory["fidelity"]["partial"] == streams
        assert len(upstream.calls) == streams
        shown = [(turn["partial"], turn["finish"], turn["response"]["content"]) for turn in trajectory["turns"]]
        assert shown == [(True, "abort", "abcd")] * streams
        assert trajectory["segments"] == [], "no client continued from the partial turns"
        assert await gateway.count("partial") == partial + streams
    async with run_shard(tmp_path, upstream, record=record) as gateway:
        assert (await gateway.chat(session)).status == 400
        usage = (await gateway.trajectory(session))["usage"]
        assert (usage["turns"], usage["sampled_tokens"]) == (streams, 4 * streams)


async def test_disconnect_before_the_first_token_records_nothing(tmp_path: Path) -> None:
    upstream = ScriptedUpstream(ScriptedReply("abc", stepwise=True))
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register()
        await disconnect_after(gateway, upstream, session, 0)
        assert await gateway.turns(session) == []


async def test_marked_retry_of_a_partial_turn_samples_again(tmp_path: Path) -> None:
    upstream = ScriptedUpstream("whole")
    upstream.then(ScriptedReply("abcd", stepwise=True))
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register()
        await disconnect_after(gateway, upstream, session, 2)
        assert (await gateway.chat(session, stream=True, retry=1)).text == "whole"
        trajectory = await gateway.trajectory(session)
        assert trained_tokens(trajectory) == [char_codes("whole\x03")]
        assert [turn.get("partial", False) for turn in trajectory["turns"]] == [True, False]


@pytest.mark.parametrize("record", ["messages", "tokens"])
@pytest.mark.parametrize("read", [6, 3, 1])
@pytest.mark.parametrize("restart", [False, True])
async def test_continuing_from_a_partial_reply_trains_exactly_the_tokens_that_were_read(
    tmp_path: Path, record: Any, read: int, restart: bool
) -> None:
    upstream = ScriptedUpstream("fine")
    first, *others = to_deltas("abcdefgh")
    prompt = char_ids(render_chat([Message("user", "hello")]))
    upstream.then(ScriptedReply(deltas=(msgspec.structs.replace(first, prompt=prompt), *others), stepwise=True))
    history = [*HELLO, {"role": "assistant", "content": "abcdef"[:read]}, {"role": "user", "content": "go on"}]
    async with run_shard(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register()
        await disconnect_after(gateway, upstream, session, 6)
        if not restart:
            assert (await gateway.chat(session, history)).text == "fine"
    async with run_shard(tmp_path, upstream, record=record) as gateway:
        if restart:
            assert (await gateway.chat(session, history)).text == "fine"
        history += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
        assert (await gateway.chat(session, history, return_token_ids=True)).status == 200
        trajectory = await gateway.trajectory(session)
        assert trained_tokens(trajectory) == [char_codes("abcdef"[:read] + "fine\x03fine\x03")]
        assert trajectory["segments"][0]["turns"] == [0, 1, 2]
        assert trajectory["fidelity"]["drifted"] == 0
        assert [turn.get("parent") for turn in trajectory["turns"]] == [None, 0, 1]
        request = (await upstream.wait_for_call(3)).request
        if record == "tokens":
            sent = "".join(map(chr, memoryview(request.tokens).cast("i")))
            assert f"assistant\x02{'abcdef'[:read]}\x03" in sent


async def test_two_continuations_of_a_partial_turn_train_each_token_once(tmp_path: Path) -> None:
    upstream = ScriptedUpstream("x")
    upstream.then(ScriptedReply("abcdefgh", stepwise=True))
    async with run_shard(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        await disconnect_after(gateway, upstream, session, 6)
        for read in (5, 2):
            answer = {"role": "assistant", "content": "abcdef"[:read]}
            await gateway.chat(session, [*HELLO, answer, {"role": "user", "content": "go on"}])
        trajectory = await gateway.trajectory(session)
        assert sorted(trained_tokens(trajectory)) == sorted([char_codes("abcdex\x03"), char_codes("x\x03")])


async def test_continuing_from_an_edited_reply_trains_nothing_of_the_partial_turn(
    tmp_path: Path,
) -> None:
    upstream = ScriptedUpstream("x")
    upstream.then(ScriptedReply("abcdefgh", stepwise=True))
    async with run_shard(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        await disconnect_after(gateway, upstream, session, 6)
        edited = {"role": "assistant", "content": "abX"}
        await gateway.chat(session, [*HELLO, edited, {"role": "user", "content": "go on"}])
        assert trained_tokens(await gateway.trajectory(session)) == [char_codes("x\x03")]


async def test_every_choice_of_a_disconnected_stream_is_a_partial_turn(tmp_path: Path) -> None:
    upstream = ScriptedUpstream(ScriptedReply("abc", stepwise=True))
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register()
        connection = await gateway.connect()
        connection.send(gateway.chat_request(session, stream=True, n=3))
        await upstream.wait_for_call(3)
        for at, model_call in enumerate(upstream.calls):
            model_call.advance(at)
        async with asyncio.timeout(WAIT):
            while [model_call.sent for model_call in upstream.calls] != [0, 1, 2]:
                await asyncio.sleep(0)
        connection.abort()
        for model_call in upstream.calls:
            await model_call.wait_until_ended()
        await gateway.wait_until_idle()
        assert sorted(turn["response"]["content"] for turn in await gateway.turns(session)) == ["a", "ab"]


class StallingUpstream(TokenScriptUpstream):
    """Upstream with the embedded policy's chat format whose first streamed reply stalls after two deltas."""

    def __init__(self) -> None:
        super().__init__(lambda _: [*b"hello world", chat.END], EmbeddedRenderer())
        self.first = True

    async def complete(self, request: ModelRequest, *, on_delta: OnDelta | None = None, **more: Any) -> ModelReply:
        if on_delta is None or not self.first:
            return await super().complete(request, on_delta=on_delta, **more)
        self.first, count = False, 0

        async def send_two(delta: Delta) -> None:
            nonlocal count
            await on_delta(delta)
            count += 1
            if count == 2:
                await asyncio.Event().wait()

        return await super().complete(request, on_delta=send_two, **more)


async def test_openai_library_can_close_a_stream_and_continue_from_what_it_read(tmp_path: Path) -> None:
    async with run_token_shard(tmp_path, StallingUpstream()) as (gateway, recording):
        session = await gateway.register(sampling=msgspec.to_builtins(Sampling(temperature=1.0, seed=5)))
        async with AsyncOpenAI(base_url=f"{gateway.url}{session.path}", api_key=session.secret) as client:
            messages: Any = [{"role": "user", "content": "What is 2 + 2?"}]
            text = ""
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, max_tokens=200
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text:
                    break
            await stream.close()
            await gateway.wait_until_idle()
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            answer = await client.chat.completions.create(
                model="m", messages=messages, max_tokens=5, extra_body={"return_token_ids": True}
            )
            assert answer.choices[0].finish_reason
        trajectory = await gateway.trajectory(session)
        turns = trajectory["turns"]
        assert (turns[0]["partial"], turns[1]["parent"]) == (True, 0)
        assert text in ("hel", "hello ")
        read_ids = list(text.encode())
        assert turns[0]["sampled"][: len(read_ids)] == read_ids
        assert trained_tokens(trajectory) == [read_ids + turns[1]["sampled"]]
        assert trajectory["usage"]["sampled_tokens"] == sum(len(turn["sampled"]) for turn in turns)
        whole = turns[0]["prompt"] + read_ids + turns[1]["prompt"]
        assert memoryview(recording.calls[-1][0].tokens).cast("i").tolist() == whole
