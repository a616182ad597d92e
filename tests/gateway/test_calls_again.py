"""Marked retries of model calls over HTTP: the recorded answer again, and never somebody else's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery.core import ToolCall, UpstreamError
from rookery.gateway import model_calls as calls
from tests.gateway.kit import Gateway, busy, said, served
from tests.gateway.scripted import Play, Scripted

DOWN = UpstreamError("the engine is down", cause="upstream.error")


# ---- the same again


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_marked_retry_gets_the_recorded_answer_again_and_an_equal_request_without_the_mark_is_a_new_turn(
    tmp_path: Path, stream: bool, n: int, restart: bool
) -> None:
    calls_ = (ToolCall("call_1", "look", '{"at": 1}'), ToolCall("call_2", "look", "not json"))
    upstream = Scripted("unlike the others")
    upstream.then(*(Play(f"answer {at}", calls=calls_) for at in range(n)))
    wish = {"stream": stream, "n": n, "return_token_ids": True, "tools": [{"function": {"name": "look"}}]}
    history = [{"role": "user", "content": "first"}]
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register()
        first = await gateway.chat(session, history, **wish)
        if not restart:
            for again in (stream, not stream):
                retry = await gateway.chat(session, history, retry=1, **(wish | {"stream": again}))
                assert (said(retry) == said(first)) == (again == stream)
                assert len(upstream.calls) == len(await gateway.turns(session)) == n
    async with served(tmp_path, upstream) as gateway:
        retry = await gateway.chat(session, history, retry=2, **wish)
        assert said(retry) == said(first)
        if not stream:
            assert retry.json["prompt_token_ids"] == first.json["prompt_token_ids"] != []
            assert retry.json["usage"] == first.json["usage"]
        assert len(upstream.calls) == len(await gateway.turns(session)) == n
        assert b'replays_total{shard="0"} 1' in (await gateway.ask("GET", "/metrics")).body
        new = await gateway.chat(session, history, **wish)
        assert said(new) != said(first)
        assert len(upstream.calls) == len(await gateway.turns(session)) == 2 * n
        newest = await gateway.chat(session, history, retry=1, **wish)
        assert said(newest) == said(new)


async def test_a_retry_in_a_later_turn_tells_all_ids_of_its_prompt(gateway: Gateway, upstream: Scripted) -> None:
    session = await gateway.register()
    history: list[dict[str, Any]] = []
    for turn in range(3):
        history.append({"role": "user", "content": f"turn {turn}"})
        upstream.then(Play(f"said {turn}"))
        answer = await gateway.chat(session, history, return_token_ids=True)
        retry = await gateway.chat(session, history, return_token_ids=True, retry=1)
        assert {**retry.json, "id": 0} == {**answer.json, "id": 0, "created": retry.json["created"]}
        streamed = await gateway.chat(session, history, return_token_ids=True, retry=1, stream=True)
        assert streamed.events[0]["prompt_token_ids"] == answer.json["prompt_token_ids"]
        history.append({"role": "assistant", "content": f"said {turn}"})
    turns = await gateway.turns(session)
    assert [turn.get("prefix", 0) > 0 for turn in turns] == [False, True, True]


async def test_the_choices_of_a_retry_have_their_order_whichever_was_done_first(
    gateway: Gateway, upstream: Scripted
) -> None:
    session = await gateway.register()
    upstream.then(Play("zero", held=True), Play("one"), Play("two", held=True))
    asking = asyncio.create_task(gateway.chat(session, n=3))
    await upstream.called(3)
    upstream.calls[2].finish()
    await upstream.calls[2].ended()
    await busy(gateway, 1)
    upstream.calls[0].finish()
    first = await asking
    assert [one["message"]["content"] for one in first.json["choices"]] == ["zero", "one", "two"]
    retry = await gateway.chat(session, n=3, retry=1)
    assert said(retry) == said(first)
    assert len(upstream.calls) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_waits_for_a_call_that_is_still_under_way(
    gateway: Gateway, upstream: Scripted, stream: bool
) -> None:
    session = await gateway.register()
    upstream.then(Play("slow", held=True))
    first = asyncio.create_task(gateway.chat(session, stream=stream))
    asked = await upstream.called()
    asked.go()
    retry = asyncio.create_task(gateway.chat(session, stream=stream, retry=1))
    await busy(gateway, 2)
    assert not retry.done()
    asked.finish()
    assert said(await retry) == said(await first)
    assert (len(upstream.calls), len(await gateway.turns(session))) == (1, 1)


async def test_a_retry_of_a_call_whose_client_went_away_asks_again(gateway: Gateway, upstream: Scripted) -> None:
    session = await gateway.register()
    upstream.then(Play("lost", held=True), Play("kept"))
    wire = await gateway.wire()
    wire.send(gateway.chat_request(session))
    await upstream.called()
    retry = asyncio.create_task(gateway.chat(session, retry=1))
    await busy(gateway, 2)
    wire.cut()
    assert (await retry).text == "kept"
    assert upstream.calls[0].cancelled
    assert [turn["response"]["content"] for turn in await gateway.turns(session)] == ["kept"]


async def test_a_retry_does_not_wait_for_ever(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "RETRY_SECONDS", 0.01)
    session = await gateway.register()
    upstream.then(Play("slow", held=True))
    first = asyncio.create_task(gateway.chat(session))
    asked = await upstream.called()
    answer = await gateway.chat(session, retry=1)
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    asked.finish()
    assert (await first).status == 200


@pytest.mark.parametrize("mark", ["0", "", "no", "-1", "00", "1" * 5000])
async def test_what_marks_a_retry_is_a_count_above_zero(gateway: Gateway, upstream: Scripted, mark: str) -> None:
    session = await gateway.register()
    await gateway.chat(session)
    answer = await gateway.chat(session, headers={"x-stainless-retry-count": mark})
    assert answer.status == 200
    assert len(upstream.calls) == (1 if mark.startswith("1") else 2)


async def test_a_request_with_an_idempotency_key_is_answered_once_and_its_name_alone_means_nothing(
    gateway: Gateway, upstream: Scripted
) -> None:
    session = await gateway.register()
    upstream.then(Play("one"), Play("two"), Play("three"))
    named = {"headers": {"Idempotency-Key": "k"}}
    assert (await gateway.chat(session, "hello", **named)).text == "one"
    assert (await gateway.chat(session, "hello", **named)).text == "one"
    assert (await gateway.chat(session, "hello", headers={"Idempotency-Key": "other"})).text == "two"
    assert (await gateway.chat(session, "another question", **named)).text == "three"
    assert len(upstream.calls) == 3


async def test_equal_requests_side_by_side_are_turns_of_their_own(gateway: Gateway, upstream: Scripted) -> None:
    session = await gateway.register()
    upstream.then(Play("one", held=True), Play("two", held=True))
    both = [asyncio.create_task(gateway.chat(session)) for _ in range(2)]
    await upstream.called(2)
    for asked in reversed(upstream.calls):
        asked.finish()
    assert {(await one).text for one in both} == {"one", "two"}
    assert len(await gateway.turns(session)) == 2
