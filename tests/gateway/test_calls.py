"""Model calls over HTTP: what reaches the upstream, the client and the record, also when clients disconnect."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Message, Sampling, ToolCall, Truncation, UpstreamError
from rookery.gateway import server
from rookery.gateway.server import HttpConnection
from rookery.journal.tokens import TokenWriter
from rookery.upstreams.protocol import Delta
from tests.gateway.kit import InProcessGateway, content_of, on_both_loops, run_shard, wait_until_busy
from tests.gateway.scripted_upstream import END, WAIT, ScriptedReply, ScriptedUpstream, char_ids, to_deltas

DOWN = UpstreamError("the engine is down", cause="upstream.error")


# ---- streaming and recording


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_turn_is_recorded_before_the_client_sees_its_end(
    gateway: InProcessGateway, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int
) -> None:
    session = await gateway.register()
    order: list[bytes] = []
    write, flush = HttpConnection.write, TokenWriter.flush
    monkeypatch.setattr(HttpConnection, "write", lambda self, data: (order.append(data), write(self, data))[1])
    monkeypatch.setattr(TokenWriter, "flush", lambda self: (flush(self), order.append(b"recorded"))[0])
    answer = await gateway.chat(session, stream=stream, n=n)
    assert answer.status == 200
    last = [at for at, what in enumerate(order) if what == b"recorded"][-1]
    assert order.count(b"recorded") == n
    complete = b'"finish_reason":"stop"' if stream else b"HTTP/1.1 200"
    assert [at for at, data in enumerate(order) if complete in data or b"[DONE]" in data] == [last + 1]


async def test_deltas_reach_the_client_as_they_arrive(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    upstream.then(ScriptedReply("abc", stepwise=True))
    async with await gateway.connect() as connection:
        connection.send(gateway.chat_request(session, stream=True))
        model_call = await upstream.wait_for_call()
        for letter in b"abc":
            model_call.advance()
            async with asyncio.timeout(WAIT):
                event = await connection.reader.readuntil(b"\n\n")
            assert b'"content":"%c"' % letter in event
            assert await gateway.turns(session) == []
        model_call.finish()
        await connection.reader.readuntil(b"data: [DONE]\n\n")
        assert len(await gateway.turns(session)) == 1


@pytest.mark.parametrize("error", [DOWN, ValueError("a bug with a secret"), Truncation("context", "too long")])
async def test_stream_that_breaks_anywhere_is_not_recorded_as_complete(
    gateway: InProcessGateway, upstream: ScriptedUpstream, error: Exception
) -> None:
    pieces = len(ScriptedReply("abc").stream_deltas())
    for after in range(pieces + 1):
        session = await gateway.register()
        upstream.then(ScriptedReply("abc", error=error, after=after))
        answer = await gateway.chat(session, stream=True)
        assert b'finish_reason":"stop' not in answer.body
        assert b"[DONE]" not in answer.body
        assert b"a bug with a secret" not in answer.body
        if after == 0:
            assert answer.status == (502 if error is DOWN else 400 if isinstance(error, Truncation) else 500)
            assert answer.error["message"]
        elif isinstance(error, ValueError):
            assert (answer.status, answer.complete) == (200, False)
        else:
            assert answer.complete
            assert set(answer.events[-1]) == {"error"}
        record = await gateway.trajectory(session)
        assert record["turns"] == []
        assert record["truncated"] == ("context" if isinstance(error, Truncation) else None)
        assert record["calls_under_way"] == 0


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        ("upstream.rejected", 400, None),
        ("upstream.unreachable", 503, "upstream_unavailable"),
        ("upstream.overloaded", 503, "upstream_unavailable"),
        ("upstream.timeout", 504, "upstream_timeout"),
        ("upstream.error", 502, "upstream_error"),
        ("upstream.unparsable", 502, "upstream_error"),
    ],
)
async def test_upstream_error_becomes_an_openai_error(
    gateway: InProcessGateway, upstream: ScriptedUpstream, cause: str, status: int, code: str | None
) -> None:
    session = await gateway.register()
    for stream in (False, True):
        for n in (1, 3):
            upstream.default = ScriptedReply(error=UpstreamError("no luck", cause=cause), after=0)
            answer = await gateway.chat(session, stream=stream, n=n)
            assert (answer.status, answer.error["code"]) == (status, code)
            assert "no luck" in answer.error["message"]
    assert await gateway.turns(session) == []


async def test_reply_aborted_by_the_engine_is_not_recorded(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    upstream.default = ScriptedReply("abc", finish="abort")
    answer = await gateway.chat(session)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert await gateway.turns(session) == []


# ---- disconnecting clients


@pytest.mark.long
@on_both_loops
async def test_disconnect_at_any_byte_records_a_complete_turn_only_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = ScriptedUpstream(ScriptedReply("ab", stepwise=True))
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register()
        steps = len(upstream.default.stream_deltas()) + 1
        ends: list[tuple[int, int]] = []  # (bytes written so far, steps that this takes)
        write, total = HttpConnection.write, 0

        def count_bytes(self: HttpConnection, data: bytes) -> None:
            nonlocal total
            total += len(data)
            ends.append((total, min(upstream.calls[-1].sent + 1, steps)))
            write(self, data)

        with monkeypatch.context() as patch:
            patch.setattr(HttpConnection, "write", count_bytes)
            async with await gateway.connect() as connection:
                connection.send(gateway.chat_request(session, stream=True))
                (await upstream.wait_for_call(1)).finish()
                await connection.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert ends[-1][1] == steps
        recorded = 1
        for cut in range(total + 1):
            connection = await gateway.connect()
            connection.send(gateway.chat_request(session, stream=True))
            model_call = await upstream.wait_for_call(cut + 2)
            needed = next(step for end, step in ends if end >= cut) if cut else 0
            model_call.advance(needed)
            async with asyncio.timeout(WAIT):
                await connection.reader.readexactly(cut)
            connection.abort()
            await model_call.wait_until_ended()
            await gateway.wait_until_idle()
            recorded += needed == steps
            assert model_call.cancelled == (needed < steps), (cut, needed, steps)
        turns = await gateway.turns(session)
        assert len([turn for turn in turns if not turn.get("partial")]) == recorded
        assert all(turn["finish"] == "abort" for turn in turns if turn.get("partial"))
        assert recorded > 100, "the last event consists of many bytes"
        assert gateway.shard.registry.entries[session.id].pending == {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_cancels_the_upstream_call(
    gateway: InProcessGateway, upstream: ScriptedUpstream, stream: bool, n: int
) -> None:
    session = await gateway.register()
    disconnects = await gateway.count("disconnects")
    upstream.default = ScriptedReply("abc", stepwise=True)
    connection = await gateway.connect()
    connection.send(gateway.chat_request(session, stream=stream, n=n))
    await upstream.wait_for_call(n)
    for model_call in upstream.calls:
        model_call.advance(2)
    async with asyncio.timeout(WAIT):
        while any(model_call.sent < 2 for model_call in upstream.calls):
            await asyncio.sleep(0)
    connection.abort()
    for model_call in upstream.calls:
        await model_call.wait_until_ended()
        assert model_call.cancelled
    await gateway.wait_until_idle()
    turns = await gateway.turns(session)
    assert [(turn["partial"], turn["response"]["content"]) for turn in turns] == [(True, "ab")] * n * stream
    assert await gateway.count("disconnects") == disconnects + 1


@pytest.mark.parametrize("n", [1, 2])
async def test_client_that_does_not_read_applies_backpressure_and_is_disconnected(
    gateway: InProcessGateway, upstream: ScriptedUpstream, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.05)
    piece = "x" * 50_000
    upstream.default = ScriptedReply(deltas=(Delta(content=piece),) * 2_000)  # 100 MB
    session = await gateway.register()
    connection = await gateway.connect()
    connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
    connection.send(gateway.chat_request(session, stream=True, n=n))
    await upstream.wait_for_call(n)
    for model_call in upstream.calls:
        await model_call.wait_until_ended()
        assert model_call.cancelled
        assert model_call.sent < 400, "more was read from the upstream than the client's buffers hold"
    await gateway.wait_until_idle()
    assert await gateway.turns(session) == []
    connection.abort()


# ---- requests to the upstream and their responses


async def test_sampling_of_the_registration_overrides_the_client(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register(
        sampling={"temperature": 0.5, "extra": {"min_p": 0.1}}, roles={"policy": {"sampling": {"top_p": 0.25}}}
    )
    await gateway.chat(
        session, temperature=1.5, top_p=0.75, top_k=7, max_tokens=9, max_completion_tokens=8, seed=3
    )
    sampling = upstream.calls[0].request.sampling
    expected = Sampling(temperature=0.5, top_p=0.25, top_k=7, max_tokens=8, seed=3, extra={"min_p": 0.1})
    assert sampling == expected


async def test_model_name_selects_the_role(tmp_path: Path) -> None:
    policy, judge = ScriptedUpstream("from the policy"), ScriptedUpstream("from the judge")
    async with run_shard(tmp_path, policy, judge=judge) as gateway:
        session = await gateway.register(
            model="tuned", roles={"judge": {"model": "special", "sampling": {"temperature": 0.0}}}
        )
        for model, text in [
            ("judge", "from the judge"),
            ("special", "from the judge"),
            ("policy", "from the policy"),
            ("tuned", "from the policy"),
            ("gpt-5", "from the policy"),
            ("", "from the policy"),
        ]:
            answer = await gateway.chat(session, model=model)
            assert (answer.text, answer.json["model"]) == (text, model)
        assert {model_call.request.model for model_call in judge.calls} == {"special"}
        assert {model_call.request.model for model_call in policy.calls} == {"tuned"}
        assert judge.calls[0].request.sampling.temperature == 0.0
        assert not judge.calls[0].request.want_tokens
        roles = [turn.get("role", "policy") for turn in await gateway.turns(session)]
        assert roles == ["judge", "judge", "policy", "policy", "policy", "policy"]


@pytest.mark.parametrize("stream", [False, True])
async def test_failing_choice_cancels_the_others_and_fails_the_call(
    gateway: InProcessGateway, upstream: ScriptedUpstream, stream: bool
) -> None:
    session = await gateway.register()
    upstream.then(
        ScriptedReply("kept"),
        ScriptedReply("late", stepwise=True),
        ScriptedReply("down", error=DOWN, after=2, stepwise=True),
    )
    asking = asyncio.create_task(gateway.chat(session, stream=stream, n=3))
    await upstream.wait_for_call(3)
    await upstream.calls[0].wait_until_ended()
    await wait_until_busy(gateway, 1)
    upstream.calls[2].finish()
    answer = await asking
    if stream:
        assert answer.events[-1]["error"]["code"] == "upstream_error"
        assert "[DONE]" not in answer.events
    else:
        assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert upstream.calls[1].cancelled
    assert [turn["response"]["content"] for turn in await gateway.turns(session)] == ["kept"]
    upstream.then(ScriptedReply("a"), ScriptedReply("b"), ScriptedReply("c"))
    retry = await gateway.chat(session, n=3, retry=1)
    assert [one["message"]["content"] for one in retry.json["choices"]] == ["a", "b", "c"]


async def test_tool_calls_are_streamed_in_pieces(gateway: InProcessGateway, upstream: ScriptedUpstream) -> None:
    tool_calls = (ToolCall("call_1", "look", '{"at": "héllo"}'), ToolCall("call_2", "stop", "{}"))
    upstream.default = ScriptedReply("thinking", calls=tool_calls, reasoning="why")
    session = await gateway.register()
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "stop")]
    whole = (await gateway.chat(session, tools=tools, tool_choice="required")).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert [(one["id"], one["type"], one["function"]) for one in whole["message"]["tool_calls"]] == [
        (call.id, "function", {"name": call.name, "arguments": call.arguments}) for call in tool_calls
    ]
    assert whole["message"]["reasoning_content"] == "why"
    answer = await gateway.chat(session, tools=tools, stream=True)
    (choice,) = content_of(answer)
    assert choice["finish"] == "tool_calls"
    assert [choice["calls"][at] for at in (0, 1)] == [
        {"id": call.id, "name": call.name, "arguments": call.arguments} for call in tool_calls
    ]
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert upstream.calls[0].request.tool_choice == "required"
    assert upstream.calls[1].request.tool_choice is None


async def test_stream_includes_usage_only_if_requested(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    upstream.default = ScriptedReply("ok")
    session = await gateway.register()
    usage = (await gateway.chat(session, n=2)).json["usage"]
    prompt = len("\x01user\x02hello\x03\x01assistant\x02")
    assert usage == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    plain = await gateway.chat(session, stream=True)
    assert all("usage" not in event for event in plain.events[:-1])
    model_call = await gateway.chat(session, stream=True, n=2, stream_options={"include_usage": True})
    assert model_call.events[-2]["usage"] == usage
    assert model_call.events[-2]["choices"] == []


@pytest.mark.parametrize("record", ["messages", "tokens"])
async def test_logprobs_and_top_logprobs_have_the_openai_format(tmp_path: Path, record: Any) -> None:
    def name(letter: str) -> dict[str, Any]:
        if record == "tokens":
            return {"token": letter, "bytes": list(letter.encode())}
        return {"token": f"token_id:{ord(letter)}", "bytes": None}

    def entry(letter: str, tops: int) -> dict[str, Any]:
        likely = [{**name(top), "logprob": -1.0 - at} for at, top in enumerate("ab"[:tops])]
        return {**name(letter), "logprob": -0.5, "top_logprobs": likely}

    async with run_shard(tmp_path, ScriptedUpstream("né"), record=record) as gateway:
        session = await gateway.register()
        for tops in (0, 2):
            answer = await gateway.chat(session, logprobs=True, top_logprobs=tops)
            assert answer.json["choices"][0]["logprobs"] == {"content": [entry(one, tops) for one in "né\x03"]}
        streamed = await gateway.chat(session, logprobs=True, stream=True)
        streamed_logprobs = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
        assert [one for part in streamed_logprobs if part for one in part["content"]] == [
            entry(one, 0) for one in "né\x03"
        ]
        assert (await gateway.chat(session)).json["choices"][0]["logprobs"] is None
        retry = await gateway.chat(session, logprobs=True, retry=1)
        assert retry.status == 200


async def test_raw_logprobs_of_the_engine_are_forwarded_unchanged(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    import msgspec

    raw = msgspec.Raw(b'[{"token":"ok","logprob":-0.1,"bytes":[111,107],"top_logprobs":[],"more":1}]')
    upstream.default = ScriptedReply(
        deltas=(Delta(content="ok", sampled=char_ids("ok"), logprob_content=raw),),
        reply_fields={"logprob_content": raw},
    )
    session = await gateway.register()
    expected = {"content": msgspec.json.decode(raw)}
    assert (await gateway.chat(session, logprobs=True)).json["choices"][0]["logprobs"] == expected
    streamed = await gateway.chat(session, logprobs=True, stream=True)
    assert streamed.events[0]["choices"][0]["logprobs"] == expected
    silent = await gateway.chat(session, stream=True)
    assert silent.events[0]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("record", ["messages", "tokens"])
async def test_token_ids_are_returned_only_if_requested(tmp_path: Path, record: Any) -> None:
    model_call = char_ids("\x01user\x02hello\x03\x01assistant\x02")
    prompt, sampled = memoryview(model_call).cast("i").tolist(), [ord("o"), ord("k"), 3]
    pieces = (Delta(prompt=model_call), *to_deltas("ok"), Delta(sampled=char_ids(END)))
    upstream = ScriptedUpstream(ScriptedReply("ok", deltas=pieces))
    async with run_shard(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register()
        answer = (await gateway.chat(session, return_token_ids=True)).json
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, sampled)
        streamed = await gateway.chat(session, return_token_ids=True, stream=True)
        assert [event["prompt_token_ids"] for event in streamed.events[:-1] if "prompt_token_ids" in event] == [
            prompt
        ]
        assert content_of(streamed)[0]["token_ids"] == sampled
        assert b"token_ids" not in (await gateway.chat(session, stream=True)).body


async def test_stop_string_ends_the_text_and_is_not_sent_in_tokens_mode(tmp_path: Path) -> None:
    upstream = ScriptedUpstream(ScriptedReply("one two STOP three"))
    async with run_shard(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        for stream in (False, True):
            answer = await gateway.chat(session, stop=["never", "STOP"], stream=stream)
            assert answer.text == "one two "
        recorded = [turn["response"]["content"] for turn in await gateway.turns(session)]
        assert recorded == ["one two "] * 2
        assert upstream.calls[0].request.stop_ids == (3,)
        assert upstream.calls[0].request.sampling.stop == ("never", "STOP")
        upstream.default = ScriptedReply("ends in ST")
        assert (await gateway.chat(session, stop="STOP", stream=True)).text == "ends in ST"


async def test_next_prompt_in_tokens_mode_extends_the_sampled_ids(
    tmp_path: Path,
) -> None:
    upstream = ScriptedUpstream()
    async with run_shard(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        history = [{"role": "user", "content": "a"}]
        await gateway.chat(session, history)
        history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "b"}]
        await gateway.chat(session, history)
        first, second = (model_call.request for model_call in upstream.calls)
        assert second.tokens == first.tokens + char_ids("ok" + END + "\x01user\x02b\x03\x01assistant\x02")
        assert (first.messages, second.messages) == ((), ())


async def test_invalid_message_or_tool_names_the_parameter(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register()
    for messages in ([{"role": "user"}, {"no": "role"}], [5], [{"role": "wizard", "content": "x"}]):
        answer = await gateway.chat(session, messages)
        assert (answer.status, answer.error["param"]) == (400, "messages")
    endless = [{"role": "user", "content": [{"type": "text", "text": "x", "n": 10**30}]}]
    answer = await gateway.chat(session, endless)
    assert (answer.status, answer.error["param"]) == (400, "messages")
    answer = await gateway.chat(session, tools=[{"type": "function", "function": {}}])
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert upstream.calls == []


async def test_embedded_policy_serves_calls_over_http(tmp_path: Path) -> None:
    async with run_shard(tmp_path) as gateway:
        session = await gateway.register(seed=1)
        answer = await gateway.chat(session, "What is 2 + 2?", max_tokens=20, model="")
        assert answer.status == 200
        streamed = await gateway.chat(session, "What is 2 + 2?", max_tokens=20, stream=True, n=2)
        assert streamed.events[-1] == "[DONE]"
        turns = await gateway.turns(session)
        assert len(turns) == 3
        assert answer.json["usage"]["completion_tokens"] == len(turns[0]["sampled"]) == len(turns[0]["logprobs"])
        assert answer.text == Message("assistant", turns[0]["response"]["content"]).text
        refused = await gateway.chat(session, "x", frequency_penalty=1.0)
        assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [7, 2**63 - 1, -5])
async def test_choices_of_a_seeded_call_differ_and_are_reproducible(
    gateway: InProcessGateway, upstream: ScriptedUpstream, stream: bool, seed: int
) -> None:
    session = await gateway.register()
    for _ in range(2):
        await gateway.chat(session, n=3, seed=seed, stream=stream)
    seeds = [model_call.request.sampling.seed for model_call in upstream.calls]
    assert sorted(map(str, seeds[:3])) == sorted(map(str, seeds[3:]))
    assert len(set(seeds)) == 3
    assert seed in seeds
    assert all(one is not None and -(2**63) <= one < 2**63 for one in seeds)


async def test_extra_options_of_registration_and_client_are_merged(
    gateway: InProcessGateway, upstream: ScriptedUpstream
) -> None:
    session = await gateway.register(sampling={"extra": {"min_p": 0.1}})
    await gateway.chat(session, response_format={"type": "json_object"}, min_p=0.5)
    extra = upstream.calls[0].request.sampling.extra
    assert extra["min_p"] == 0.1
    assert "response_format" in extra
