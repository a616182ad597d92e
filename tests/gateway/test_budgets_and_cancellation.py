"""Budgets, deadlines and the end of a session during model calls over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Truncation, UpstreamError
from rookery.upstreams import UpstreamConfig, hang_detector, open_upstream
from tests.gateway.kit import InProcessGateway, RegisteredSession, content_of, run_shard, wait_until_busy
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream
from tests.servers import raw_server

DOWN = UpstreamError("the engine is down", cause="upstream.error")


# ---- budgets


async def check_truncated(gateway: InProcessGateway, session: RegisteredSession, reason: str) -> None:
    """Check that the session is truncated and that every later call fails."""
    for stream in (False, True):
        for n in (1, 2):
            answer = await gateway.chat(session, "once more", stream=stream, n=n)
            code = "context_length_exceeded" if reason == "context" else "rollout_truncated"
            assert (answer.status, answer.error["code"]) == (400, code)
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
async def test_exhausted_budget_truncates_the_session_also_after_a_restart(
    tmp_path: Path, budgets: dict[str, int], reason: str, fine: int, record: Any
) -> None:
    upstream = ScriptedUpstream()
    upstream.then(ScriptedReply("abc"), ScriptedReply(""))
    history: list[dict[str, str]] = []
    async with run_shard(tmp_path, upstream, record=record) as gateway:
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
            assert fine == (1 if record == "tokens" else 2), "with a known prompt length the engine is not called"
        await check_truncated(gateway, session, reason)
        assert len(upstream.calls) == fine
        assert len(await gateway.turns(session)) == fine
    async with run_shard(tmp_path, upstream, record=record) as gateway:
        await check_truncated(gateway, session, reason)
        assert len(upstream.calls) == fine


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_cancels_the_call_and_truncates_the_session(
    gateway: InProcessGateway, upstream: ScriptedUpstream, stream: bool
) -> None:
    session = await gateway.register(budgets={"deadline": 1.0})
    upstream.then(ScriptedReply("abc", stepwise=True))
    asking = asyncio.create_task(gateway.chat(session, stream=stream))
    model_call = await upstream.wait_for_call()
    if stream:
        model_call.advance()
    answer = await asking
    assert model_call.cancelled
    if stream:
        assert answer.events[-1]["error"]["code"] == "rollout_truncated"
    else:
        assert (answer.status, answer.error["code"]) == (400, "rollout_truncated")
    await check_truncated(gateway, session, "time")
    assert await gateway.turns(session) == []


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_during_a_hung_upstream_is_an_upstream_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(hang_detector, "HEALTH_SECONDS", 1.0)

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with raw_server(silent) as url:
        upstream = open_upstream(UpstreamConfig(urls=(url,), model="m"))
        async with run_shard(tmp_path, upstream) as gateway:
            session = await gateway.register(budgets={"deadline": 1.0})
            for _ in range(2):  # the second call starts after the deadline
                answer = await gateway.chat(session, stream=stream)
                assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
            record = await gateway.trajectory(session)
            assert (record["truncated"], record["turns"]) == (None, [])


async def test_recorded_reply_is_replayed_after_the_budget_is_exhausted(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register(budgets={"max_turns": 1})
    first = await gateway.chat(session)
    assert (await gateway.chat(session, "more")).status == 400
    assert content_of(await gateway.chat(session, retry=1)) == content_of(first)


async def test_other_roles_are_not_limited_by_the_policy_budget(tmp_path: Path) -> None:
    policy, judge = ScriptedUpstream("p"), ScriptedUpstream("j")
    async with run_shard(tmp_path, policy, judge=judge) as gateway:
        session = await gateway.register(budgets={"max_turns": 1, "max_sequence_length": 60})
        await gateway.chat(session)
        await check_truncated(gateway, session, "turns")
        answer = await gateway.chat(session, "x" * 100, model="judge")
        assert (answer.status, answer.text) == (200, "j")
        judge.then(ScriptedReply(error=Truncation("context", "far too long"), after=0))
        answer = await gateway.chat(session, model="judge")
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        assert (await gateway.trajectory(session))["truncated"] == "turns"


# ---- cancelling and deleting sessions


@pytest.mark.parametrize("how", ["cancel", "delete"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_ending_a_session_cancels_its_upstream_calls(
    gateway: InProcessGateway, upstream: ScriptedUpstream, how: str, stream: bool, n: int
) -> None:
    session = await gateway.register(id="x")
    other = await gateway.register(id="y")
    upstream.default = ScriptedReply("abc", stepwise=True)
    asking = asyncio.create_task(gateway.chat(session, stream=stream, n=n))
    await upstream.wait_for_call(n)
    other_call = asyncio.create_task(gateway.chat(other))
    await upstream.wait_for_call(n + 1)
    retry = asyncio.create_task(gateway.chat(session, stream=stream, n=n, retry=1))
    await wait_until_busy(gateway, 3)
    if stream:
        for model_call in upstream.calls:
            model_call.advance()
    await wait_until_busy(gateway, 3)
    if how == "cancel":
        assert (await gateway.request("POST", "/rollouts/x/cancel")).json["turns_recorded"] == 0
    else:
        assert (await gateway.request("DELETE", "/rollouts/x")).status == 200
    answer = await asking
    if stream:
        assert answer.events[-1]["error"]["code"] == "rollout_gone"
    else:
        assert (answer.status, answer.error["code"]) == (410, "rollout_gone")
    assert (await retry).status == 410
    assert [model_call.cancelled for model_call in upstream.calls] == [True] * n + [False]
    upstream.calls[n].finish()
    assert (await other_call).status == 200
    assert (await gateway.chat(session)).status == 410
    if how == "cancel":
        assert await gateway.turns(session) == []
    await gateway.wait_until_idle()


async def test_keep_alive_connection_stays_usable_after_its_session_is_cancelled(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    one, two = await gateway.register(id="x"), await gateway.register(id="y")
    upstream.then(ScriptedReply("abc", stepwise=True), ScriptedReply("fine"))
    async with await gateway.connect() as connection:
        connection.send(gateway.chat_request(one))
        await upstream.wait_for_call()
        await gateway.request("POST", "/rollouts/x/cancel")
        assert (await connection.read_response()).status == 410
        connection.send(gateway.chat_request(two))
        assert (await connection.read_response()).text == "fine"
