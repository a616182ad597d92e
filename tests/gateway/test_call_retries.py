"""Marked retries of model calls replay the recorded reply of the same request and of no other."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery.core import ToolCall, UpstreamError
from rookery.gateway import model_calls as calls
from tests.gateway.kit import InProcessGateway, content_of, run_shard, wait_until_busy
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream

DOWN = UpstreamError("the engine is down", cause="upstream.error")


# ---- replayed replies


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("restart", [False, True])
async def test_marked_retry_replays_the_recorded_reply_and_an_unmarked_request_is_a_new_turn(
    tmp_path: Path, stream: bool, n: int, restart: bool
) -> None:
    tool_calls = (ToolCall("call_1", "look", '{"at": 1}'), ToolCall("call_2", "look", "not json"))
    upstream = ScriptedUpstream("unlike the others")
    upstream.then(*(ScriptedReply(f"answer {at}", calls=tool_calls) for at in range(n)))
    fields = {"stream": stream, "n": n, "return_token_ids": True, "tools": [{"function": {"name": "look"}}]}
    history = [{"role": "user", "content": "first"}]
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register()
        first = await gateway.chat(session, history, **fields)
        if not restart:
            for again in (stream, not stream):
                retry = await gateway.chat(session, history, retry=1, **(fields | {"stream": again}))
                assert (content_of(retry) == content_of(first)) == (again == stream)
                assert len(upstream.calls) == len(await gateway.turns(session)) == n
    async with run_shard(tmp_path, upstream) as gateway:
        replays = await gateway.count("replays")
        retry = await gateway.chat(session, history, retry=2, **fields)
        assert content_of(retry) == content_of(first)
        if not stream:
            assert retry.json["prompt_token_ids"] == first.json["prompt_token_ids"] != []
            assert retry.json["usage"] == first.json["usage"]
        assert len(upstream.calls) == len(await gateway.turns(session)) == n
        assert await gateway.count("replays") == replays + 1
        new = await gateway.chat(session, history, **fields)
        assert content_of(new) != content_of(first)
        assert len(upstream.calls) == len(await gateway.turns(session)) == 2 * n
        newest = await gateway.chat(session, history, retry=1, **fields)
        assert content_of(newest) == content_of(new)


async def test_retry_of_a_later_turn_returns_all_prompt_ids(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    history: list[dict[str, Any]] = []
    for turn in range(3):
        history.append({"role": "user", "content": f"turn {turn}"})
        upstream.then(ScriptedReply(f"said {turn}"))
        answer = await gateway.chat(session, history, return_token_ids=True)
        retry = await gateway.chat(session, history, return_token_ids=True, retry=1)
        assert {**retry.json, "id": 0} == {**answer.json, "id": 0, "created": retry.json["created"]}
        streamed = await gateway.chat(session, history, return_token_ids=True, retry=1, stream=True)
        assert streamed.events[0]["prompt_token_ids"] == answer.json["prompt_token_ids"]
        history.append({"role": "assistant", "content": f"said {turn}"})
    turns = await gateway.turns(session)
    assert [turn.get("prefix", 0) > 0 for turn in turns] == [False, True, True]


async def test_replayed_choices_keep_their_order(gateway: InProcessGateway, upstream: ScriptedUpstream) -> None:
    session = await gateway.register()
    upstream.then(ScriptedReply("zero", stepwise=True), ScriptedReply("one"), ScriptedReply("two", stepwise=True))
    asking = asyncio.create_task(gateway.chat(session, n=3))
    await upstream.wait_for_call(3)
    upstream.calls[2].finish()
    await upstream.calls[2].wait_until_ended()
    await wait_until_busy(gateway, 1)
    upstream.calls[0].finish()
    first = await asking
    assert [one["message"]["content"] for one in first.json["choices"]] == ["zero", "one", "two"]
    retry = await gateway.chat(session, n=3, retry=1)
    assert content_of(retry) == content_of(first)
    assert len(upstream.calls) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_retry_waits_for_the_original_call_in_flight(
    gateway: InProcessGateway, upstream: ScriptedUpstream, stream: bool
) -> None:
    session = await gateway.register()
    upstream.then(ScriptedReply("slow", stepwise=True))
    first = asyncio.create_task(gateway.chat(session, stream=stream))
    model_call = await upstream.wait_for_call()
    model_call.advance()
    retry = asyncio.create_task(gateway.chat(session, stream=stream, retry=1))
    await wait_until_busy(gateway, 2)
    assert not retry.done()
    model_call.finish()
    assert content_of(await retry) == content_of(await first)
    assert (len(upstream.calls), len(await gateway.turns(session))) == (1, 1)


async def test_retry_after_a_disconnect_calls_the_upstream_again(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    upstream.then(ScriptedReply("lost", stepwise=True), ScriptedReply("kept"))
    connection = await gateway.connect()
    connection.send(gateway.chat_request(session))
    await upstream.wait_for_call()
    retry = asyncio.create_task(gateway.chat(session, retry=1))
    await wait_until_busy(gateway, 2)
    connection.abort()
    assert (await retry).text == "kept"
    assert upstream.calls[0].cancelled
    assert [turn["response"]["content"] for turn in await gateway.turns(session)] == ["kept"]


async def test_retry_times_out_while_the_original_call_hangs(
    gateway: InProcessGateway, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "RETRY_SECONDS", 0.01)
    session = await gateway.register()
    upstream.then(ScriptedReply("slow", stepwise=True))
    first = asyncio.create_task(gateway.chat(session))
    model_call = await upstream.wait_for_call()
    answer = await gateway.chat(session, retry=1)
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    model_call.finish()
    assert (await first).status == 200


@pytest.mark.parametrize("mark", ["0", "", "no", "-1", "00", "1" * 5000])
async def test_only_a_positive_retry_count_marks_a_retry(
    gateway: InProcessGateway, upstream: ScriptedUpstream, mark: str
) -> None:
    session = await gateway.register()
    await gateway.chat(session)
    answer = await gateway.chat(session, headers={"x-stainless-retry-count": mark})
    assert answer.status == 200
    assert len(upstream.calls) == (1 if mark.startswith("1") else 2)


async def test_idempotency_key_replays_only_an_equal_request(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    upstream.then(ScriptedReply("one"), ScriptedReply("two"), ScriptedReply("three"))
    named = {"headers": {"Idempotency-Key": "k"}}
    assert (await gateway.chat(session, "hello", **named)).text == "one"
    assert (await gateway.chat(session, "hello", **named)).text == "one"
    assert (await gateway.chat(session, "hello", headers={"Idempotency-Key": "other"})).text == "two"
    assert (await gateway.chat(session, "another question", **named)).text == "three"
    assert len(upstream.calls) == 3


async def test_equal_concurrent_requests_are_separate_turns(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    upstream.then(ScriptedReply("one", stepwise=True), ScriptedReply("two", stepwise=True))
    both = [asyncio.create_task(gateway.chat(session)) for _ in range(2)]
    await upstream.wait_for_call(2)
    for model_call in reversed(upstream.calls):
        model_call.finish()
    assert {(await one).text for one in both} == {"one", "two"}
    assert len(await gateway.turns(session)) == 2
