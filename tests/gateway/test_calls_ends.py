"""Budgets and the end of a session, in the middle of model calls over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Truncation, UpstreamError
from rookery.upstreams import UpstreamConfig, hang_detector, open_upstream
from tests.gateway.kit import Gateway, Registered, busy, said, served
from tests.gateway.scripted import Play, Scripted
from tests.servers import raw_server

DOWN = UpstreamError("the engine is down", cause="upstream.error")


# ---- budgets


async def spent(gateway: Gateway, session: Registered, reason: str) -> None:
    """The session is truncated, and every later call is told so."""
    for stream in (False, True):
        for n in (1, 2):
            answer = await gateway.chat(session, "once more", stream=stream, n=n)
            code = "context_length_exceeded" if reason == "context" else "rollout_truncated"
            assert (answer.status, answer.error["code"]) == (400, code)
            assert f"truncated ({reason})" in answer.error["message"]
    assert (await gateway.trajectory(session))["truncated"] == reason


@pytest.mark.parametrize(
    ("budgets", "reason", "fine"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_tokens": 5}, "tokens", 2),
        ({"max_sequence_length": 40}, "context", 1),
    ],
)
@pytest.mark.parametrize("record", ["messages", "tokens"])
async def test_a_spent_budget_ends_in_an_error_of_openais_shape_and_the_session_stays_truncated(
    tmp_path: Path, budgets: dict[str, int], reason: str, fine: int, record: Any
) -> None:
    upstream = Scripted()
    upstream.then(Play("abc"), Play(""))
    history: list[dict[str, str]] = []
    async with served(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register(budgets=budgets)
        for text in ("abc", "")[:fine]:
            history.append({"role": "user", "content": "x"})
            answer = await gateway.chat(session, history)
            assert answer.status == 200, answer.body
            history.append({"role": "assistant", "content": text})
        if reason == "tokens":
            assert upstream.calls[-1].request.sampling.max_tokens == 1
        if reason == "context":
            history.append({"role": "user", "content": "x" * 40})
            answer = await gateway.chat(session, history)
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            fine = len(upstream.calls)
            assert fine == (1 if record == "tokens" else 2), "with its ids known, the engine is not asked"
        await spent(gateway, session, reason)
        assert len(upstream.calls) == fine
        assert len(await gateway.turns(session)) == fine
    async with served(tmp_path, upstream, record=record) as gateway:
        await spent(gateway, session, reason)
        assert len(upstream.calls) == fine


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_cancels_the_call_and_truncates_the_session(
    gateway: Gateway, upstream: Scripted, stream: bool
) -> None:
    session = await gateway.register(budgets={"deadline": 1.0})
    upstream.then(Play("abc", held=True))
    asking = asyncio.create_task(gateway.chat(session, stream=stream))
    asked = await upstream.called()
    if stream:
        asked.go()
    answer = await asking
    assert asked.cancelled
    if stream:
        assert answer.events[-1]["error"]["code"] == "rollout_truncated"
    else:
        assert (answer.status, answer.error["code"]) == (400, "rollout_truncated")
    await spent(gateway, session, "time")
    assert await gateway.turns(session) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_at_a_hung_server_is_that_servers_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(hang_detector, "HEALTH_SECONDS", 1.0)

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(silent) as url:
        upstream = open_upstream(UpstreamConfig(urls=(url,), model="m"))
        async with served(tmp_path, upstream) as gateway:
            session = await gateway.register(budgets={"deadline": 1.0})
            for _ in range(2):  # the second is past the deadline from the start
                answer = await gateway.chat(session, stream=stream)
                assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
            record = await gateway.trajectory(session)
            assert (record["truncated"], record["turns"]) == (None, [])


async def test_a_recorded_answer_is_replayed_also_when_the_budget_is_spent(
    gateway: Gateway, upstream: Scripted
) -> None:
    session = await gateway.register(budgets={"max_turns": 1})
    first = await gateway.chat(session)
    assert (await gateway.chat(session, "more")).status == 400
    assert said(await gateway.chat(session, retry=1)) == said(first)


async def test_another_roles_calls_go_on_when_the_policys_budget_is_spent(tmp_path: Path) -> None:
    policy, judge = Scripted("p"), Scripted("j")
    async with served(tmp_path, policy, judge=judge) as gateway:
        session = await gateway.register(budgets={"max_turns": 1, "max_sequence_length": 60})
        await gateway.chat(session)
        await spent(gateway, session, "turns")
        answer = await gateway.chat(session, "x" * 100, model="judge")
        assert (answer.status, answer.text) == (200, "j")
        judge.then(Play(error=Truncation("context", "far too long"), after=0))
        answer = await gateway.chat(session, model="judge")
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert (await gateway.trajectory(session))["truncated"] == "turns"


# ---- the end of a session


@pytest.mark.parametrize("how", ["cancel", "delete"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_ending_a_session_ends_its_calls_up_to_the_engine(
    gateway: Gateway, upstream: Scripted, how: str, stream: bool, n: int
) -> None:
    session = await gateway.register(id="x")
    other = await gateway.register(id="y")
    upstream.default = Play("abc", held=True)
    asking = asyncio.create_task(gateway.chat(session, stream=stream, n=n))
    await upstream.called(n)
    theirs = asyncio.create_task(gateway.chat(other))
    await upstream.called(n + 1)
    retry = asyncio.create_task(gateway.chat(session, stream=stream, n=n, retry=1))
    await busy(gateway, 3)
    if stream:
        for asked in upstream.calls:
            asked.go()
    await busy(gateway, 3)
    if how == "cancel":
        assert (await gateway.ask("POST", "/rollouts/x/cancel")).json["turns_recorded"] == 0
    else:
        assert (await gateway.ask("DELETE", "/rollouts/x")).status == 200
    answer = await asking
    if stream:
        assert answer.events[-1]["error"]["code"] == "rollout_gone"
    else:
        assert (answer.status, answer.error["code"]) == (410, "rollout_gone")
    assert (await retry).status == 410
    assert [asked.cancelled for asked in upstream.calls] == [True] * n + [False]
    upstream.calls[n].finish()
    assert (await theirs).status == 200
    assert (await gateway.chat(session)).status == 410
    if how == "cancel":
        assert await gateway.turns(session) == []
    await gateway.settled()


async def test_a_keep_alive_connection_is_of_use_after_its_call_was_ended(
    gateway: Gateway, upstream: Scripted
) -> None:
    one, two = await gateway.register(id="x"), await gateway.register(id="y")
    upstream.then(Play("abc", held=True), Play("fine"))
    async with await gateway.wire() as wire:
        wire.send(gateway.chat_request(one))
        await upstream.called()
        await gateway.ask("POST", "/rollouts/x/cancel")
        assert (await wire.answer()).status == 410
        wire.send(gateway.chat_request(two))
        assert (await wire.answer()).text == "fine"
