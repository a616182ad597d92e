"""A model call over HTTP: what is asked of the upstream, told to the client and recorded; clients that go away."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery.core import Message, Sampling, ToolCall, Truncation, UpstreamError
from rookery.gateway import server
from rookery.gateway.server import Connection
from rookery.journal.tokens import TokenWriter
from rookery.upstreams.protocol import Delta
from tests.gateway.kit import Gateway, busy, on_both_loops, said, served
from tests.gateway.scripted import END, WAIT, Play, Scripted, letters, pieces_of

DOWN = UpstreamError("the engine is down", cause="upstream.error")


# ---- streaming and the record


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_the_turn_is_recorded_before_the_events_that_say_it_is_complete(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool, n: int
) -> None:
    session = await gateway.register()
    order: list[bytes] = []
    write, flush = Connection.write, TokenWriter.flush
    monkeypatch.setattr(Connection, "write", lambda self, data: (order.append(data), write(self, data))[1])
    monkeypatch.setattr(TokenWriter, "flush", lambda self: (flush(self), order.append(b"recorded"))[0])
    answer = await gateway.chat(session, stream=stream, n=n)
    assert answer.status == 200
    last = [at for at, what in enumerate(order) if what == b"recorded"][-1]
    assert order.count(b"recorded") == n
    complete = b'"finish_reason":"stop"' if stream else b"HTTP/1.1 200"
    assert [at for at, data in enumerate(order) if complete in data or b"[DONE]" in data] == [last + 1]


async def test_bytes_reach_the_client_as_they_arrive(gateway: Gateway, upstream: Scripted) -> None:
    session = await gateway.register()
    upstream.then(Play("abc", held=True))
    async with await gateway.wire() as wire:
        wire.send(gateway.chat_request(session, stream=True))
        asked = await upstream.called()
        for letter in b"abc":
            asked.go()
            async with asyncio.timeout(WAIT):
                event = await wire.reader.readuntil(b"\n\n")
            assert b'"content":"%c"' % letter in event
            assert await gateway.turns(session) == []
        asked.finish()
        await wire.reader.readuntil(b"data: [DONE]\n\n")
        assert len(await gateway.turns(session)) == 1


@pytest.mark.parametrize("error", [DOWN, ValueError("a bug with a secret"), Truncation("context", "too long")])
async def test_a_broken_upstream_stream_is_never_a_completed_turn_wherever_it_breaks(
    gateway: Gateway, upstream: Scripted, error: Exception
) -> None:
    pieces = len(Play("abc").deltas())
    for after in range(pieces + 1):
        session = await gateway.register()
        upstream.then(Play("abc", error=error, after=after))
        answer = await gateway.chat(session, stream=True)
        assert b'finish_reason":"stop' not in answer.body
        assert b"[DONE]" not in answer.body
        assert b"a bug with a secret" not in answer.body
        if after == 0:
            assert answer.status == (502 if error is DOWN else 400 if isinstance(error, Truncation) else 500)
            assert answer.error["message"]
        elif isinstance(error, ValueError):
            assert (answer.status, answer.whole) == (200, False)
        else:
            assert answer.whole
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
async def test_what_the_upstream_did_not_answer_has_openais_shape(
    gateway: Gateway, upstream: Scripted, cause: str, status: int, code: str | None
) -> None:
    session = await gateway.register()
    for stream in (False, True):
        for n in (1, 3):
            upstream.default = Play(error=UpstreamError("no luck", cause=cause), after=0)
            answer = await gateway.chat(session, stream=stream, n=n)
            assert (answer.status, answer.error["code"]) == (status, code)
            assert "no luck" in answer.error["message"]
    assert await gateway.turns(session) == []


async def test_an_answer_that_the_engine_aborted_is_no_turn(gateway: Gateway, upstream: Scripted) -> None:
    session = await gateway.register()
    upstream.default = Play("abc", finish="abort")
    answer = await gateway.chat(session)
    assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert await gateway.turns(session) == []


# ---- clients that go away


@on_both_loops
async def test_disconnects_at_every_byte_of_a_stream_record_only_what_was_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = Scripted(Play("ab", held=True))
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register()
        steps = len(upstream.default.deltas()) + 1
        ends: list[tuple[int, int]] = []  # bytes that are there after so many steps
        write, total = Connection.write, 0

        def counted(self: Connection, data: bytes) -> None:
            nonlocal total
            total += len(data)
            ends.append((total, min(upstream.calls[-1].told + 1, steps)))
            write(self, data)

        with monkeypatch.context() as patch:
            patch.setattr(Connection, "write", counted)
            async with await gateway.wire() as wire:
                wire.send(gateway.chat_request(session, stream=True))
                (await upstream.called(1)).finish()
                await wire.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert ends[-1][1] == steps
        recorded = 1
        for cut in range(total + 1):
            wire = await gateway.wire()
            wire.send(gateway.chat_request(session, stream=True))
            asked = await upstream.called(cut + 2)
            needed = next(step for end, step in ends if end >= cut) if cut else 0
            asked.go(needed)
            async with asyncio.timeout(WAIT):
                await wire.reader.readexactly(cut)
            wire.cut()
            await asked.ended()
            await gateway.settled()
            recorded += needed == steps
            assert asked.cancelled == (needed < steps), (cut, needed, steps)
        turns = await gateway.turns(session)
        assert len([turn for turn in turns if not turn.get("partial")]) == recorded
        assert all(turn["finish"] == "abort" for turn in turns if turn.get("partial"))
        assert recorded > 100, "the last event has its bytes too"
        assert gateway.shard.registry.entries[session.id].pending == {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_call_with_it_up_to_the_engine(
    gateway: Gateway, upstream: Scripted, stream: bool, n: int
) -> None:
    session = await gateway.register()
    upstream.default = Play("abc", held=True)
    wire = await gateway.wire()
    wire.send(gateway.chat_request(session, stream=stream, n=n))
    await upstream.called(n)
    for asked in upstream.calls:
        asked.go(2)
    async with asyncio.timeout(WAIT):
        while any(asked.told < 2 for asked in upstream.calls):
            await asyncio.sleep(0)
    wire.cut()
    for asked in upstream.calls:
        await asked.ended()
        assert asked.cancelled
    await gateway.settled()
    turns = await gateway.turns(session)
    assert [(turn["partial"], turn["response"]["content"]) for turn in turns] == [(True, "ab")] * n * stream
    assert b'disconnects_total{shard="0"} 1' in (await gateway.ask("GET", "/metrics")).body


@pytest.mark.parametrize("n", [1, 2])
async def test_a_reader_that_does_not_read_slows_the_upstream_and_is_left_behind(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.05)
    piece = "x" * 50_000
    upstream.default = Play(pieces=(Delta(content=piece),) * 2_000)  # 100 MB
    session = await gateway.register()
    wire = await gateway.wire()
    wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
    wire.send(gateway.chat_request(session, stream=True, n=n))
    await upstream.called(n)
    for asked in upstream.calls:
        await asked.ended()
        assert asked.cancelled
        assert asked.told < 400, "more was taken from the upstream than the reader's buffers hold"
    await gateway.settled()
    assert await gateway.turns(session) == []
    wire.cut()


# ---- what is asked of the upstream


async def test_sampling_set_for_the_rollout_goes_over_what_the_client_asks_for(
    gateway: Gateway, upstream: Scripted
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


async def test_a_models_name_says_which_role_is_meant(tmp_path: Path) -> None:
    policy, judge = Scripted("from the policy"), Scripted("from the judge")
    async with served(tmp_path, policy, judge=judge) as gateway:
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
        assert {asked.request.model for asked in judge.calls} == {"special"}
        assert {asked.request.model for asked in policy.calls} == {"tuned"}
        assert judge.calls[0].request.sampling.temperature == 0.0
        assert not judge.calls[0].request.want_tokens
        roles = [turn.get("role", "policy") for turn in await gateway.turns(session)]
        assert roles == ["judge", "judge", "policy", "policy", "policy", "policy"]


@pytest.mark.parametrize("stream", [False, True])
async def test_where_one_choice_fails_the_others_are_cancelled_and_the_call_fails(
    gateway: Gateway, upstream: Scripted, stream: bool
) -> None:
    session = await gateway.register()
    upstream.then(Play("kept"), Play("late", held=True), Play("down", error=DOWN, after=2, held=True))
    asking = asyncio.create_task(gateway.chat(session, stream=stream, n=3))
    await upstream.called(3)
    await upstream.calls[0].ended()
    await busy(gateway, 1)
    upstream.calls[2].finish()
    answer = await asking
    if stream:
        assert answer.events[-1]["error"]["code"] == "upstream_error"
        assert "[DONE]" not in answer.events
    else:
        assert (answer.status, answer.error["code"]) == (502, "upstream_error")
    assert upstream.calls[1].cancelled
    assert [turn["response"]["content"] for turn in await gateway.turns(session)] == ["kept"]
    upstream.then(Play("a"), Play("b"), Play("c"))
    retry = await gateway.chat(session, n=3, retry=1)
    assert [one["message"]["content"] for one in retry.json["choices"]] == ["a", "b", "c"]


async def test_tool_calls_reach_the_client_piece_by_piece(gateway: Gateway, upstream: Scripted) -> None:
    calls_ = (ToolCall("call_1", "look", '{"at": "héllo"}'), ToolCall("call_2", "stop", "{}"))
    upstream.default = Play("thinking", calls=calls_, reasoning="why")
    session = await gateway.register()
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "stop")]
    whole = (await gateway.chat(session, tools=tools, tool_choice="required")).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert [(one["id"], one["type"], one["function"]) for one in whole["message"]["tool_calls"]] == [
        (call.id, "function", {"name": call.name, "arguments": call.arguments}) for call in calls_
    ]
    assert whole["message"]["reasoning_content"] == "why"
    answer = await gateway.chat(session, tools=tools, stream=True)
    (choice,) = said(answer)
    assert choice["finish"] == "tool_calls"
    assert [choice["calls"][at] for at in (0, 1)] == [
        {"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls_
    ]
    deltas = [event["choices"][0]["delta"] for event in answer.events[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert upstream.calls[0].request.tool_choice == "required"
    assert upstream.calls[1].request.tool_choice is None


async def test_usage_is_told_where_it_is_asked_for(gateway: Gateway, upstream: Scripted) -> None:
    upstream.default = Play("ok")
    session = await gateway.register()
    usage = (await gateway.chat(session, n=2)).json["usage"]
    prompt = len("\x01user\x02hello\x03\x01assistant\x02")
    assert usage == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    plain = await gateway.chat(session, stream=True)
    assert all("usage" not in event for event in plain.events[:-1])
    asked = await gateway.chat(session, stream=True, n=2, stream_options={"include_usage": True})
    assert asked.events[-2]["usage"] == usage
    assert asked.events[-2]["choices"] == []


@pytest.mark.parametrize("record", ["messages", "tokens"])
async def test_logprobs_and_alternatives_have_openais_shape(tmp_path: Path, record: Any) -> None:
    def name(letter: str) -> dict[str, Any]:
        if record == "tokens":
            return {"token": letter, "bytes": list(letter.encode())}
        return {"token": f"token_id:{ord(letter)}", "bytes": None}

    def entry(letter: str, tops: int) -> dict[str, Any]:
        likely = [{**name(top), "logprob": -1.0 - at} for at, top in enumerate("ab"[:tops])]
        return {**name(letter), "logprob": -0.5, "top_logprobs": likely}

    async with served(tmp_path, Scripted("né"), record=record) as gateway:
        session = await gateway.register()
        for tops in (0, 2):
            answer = await gateway.chat(session, logprobs=True, top_logprobs=tops)
            assert answer.json["choices"][0]["logprobs"] == {"content": [entry(one, tops) for one in "né\x03"]}
        streamed = await gateway.chat(session, logprobs=True, stream=True)
        told = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
        assert [one for part in told if part for one in part["content"]] == [entry(one, 0) for one in "né\x03"]
        assert (await gateway.chat(session)).json["choices"][0]["logprobs"] is None
        retry = await gateway.chat(session, logprobs=True, retry=1)
        assert retry.status == 200


async def test_the_engines_own_logprobs_go_on_as_they_came(gateway: Gateway, upstream: Scripted) -> None:
    import msgspec

    own = msgspec.Raw(b'[{"token":"ok","logprob":-0.1,"bytes":[111,107],"top_logprobs":[],"more":1}]')
    upstream.default = Play(
        pieces=(Delta(content="ok", sampled=letters("ok"), logprob_content=own),), more={"logprob_content": own}
    )
    session = await gateway.register()
    expected = {"content": msgspec.json.decode(own)}
    assert (await gateway.chat(session, logprobs=True)).json["choices"][0]["logprobs"] == expected
    streamed = await gateway.chat(session, logprobs=True, stream=True)
    assert streamed.events[0]["choices"][0]["logprobs"] == expected
    silent = await gateway.chat(session, stream=True)
    assert silent.events[0]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("record", ["messages", "tokens"])
async def test_token_ids_are_told_to_who_wants_them(tmp_path: Path, record: Any) -> None:
    asked = letters("\x01user\x02hello\x03\x01assistant\x02")
    prompt, sampled = memoryview(asked).cast("i").tolist(), [ord("o"), ord("k"), 3]
    pieces = (Delta(prompt=asked), *pieces_of("ok"), Delta(sampled=letters(END)))
    upstream = Scripted(Play("ok", pieces=pieces))
    async with served(tmp_path, upstream, record=record) as gateway:
        session = await gateway.register()
        answer = (await gateway.chat(session, return_token_ids=True)).json
        assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (prompt, sampled)
        streamed = await gateway.chat(session, return_token_ids=True, stream=True)
        assert [event["prompt_token_ids"] for event in streamed.events[:-1] if "prompt_token_ids" in event] == [
            prompt
        ]
        assert said(streamed)[0]["token_ids"] == sampled
        assert b"token_ids" not in (await gateway.chat(session, stream=True)).body


async def test_stop_strings_in_tokens_mode_end_the_text_and_are_never_told(tmp_path: Path) -> None:
    upstream = Scripted(Play("one two STOP three"))
    async with served(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        for stream in (False, True):
            answer = await gateway.chat(session, stop=["never", "STOP"], stream=stream)
            assert answer.text == "one two "
        recorded = [turn["response"]["content"] for turn in await gateway.turns(session)]
        assert recorded == ["one two "] * 2
        assert upstream.calls[0].request.stop_ids == (3,)
        assert upstream.calls[0].request.sampling.stop == ("never", "STOP")
        upstream.default = Play("ends in ST")
        assert (await gateway.chat(session, stop="STOP", stream=True)).text == "ends in ST"


async def test_in_tokens_mode_the_next_prompt_is_the_sampled_ids_with_the_new_messages_after_them(
    tmp_path: Path,
) -> None:
    upstream = Scripted()
    async with served(tmp_path, upstream, record="tokens") as gateway:
        session = await gateway.register()
        history = [{"role": "user", "content": "a"}]
        await gateway.chat(session, history)
        history += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "b"}]
        await gateway.chat(session, history)
        first, second = (asked.request for asked in upstream.calls)
        assert second.tokens == first.tokens + letters("ok" + END + "\x01user\x02b\x03\x01assistant\x02")
        assert (first.messages, second.messages) == ((), ())


async def test_a_message_that_cannot_be_read_is_named(gateway: Gateway, upstream: Scripted) -> None:
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


async def test_the_embedded_policy_answers_through_the_same_door(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
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
async def test_choices_with_a_seed_differ_and_are_the_same_each_time(
    gateway: Gateway, upstream: Scripted, stream: bool, seed: int
) -> None:
    session = await gateway.register()
    for _ in range(2):
        await gateway.chat(session, n=3, seed=seed, stream=stream)
    seeds = [asked.request.sampling.seed for asked in upstream.calls]
    assert sorted(map(str, seeds[:3])) == sorted(map(str, seeds[3:]))
    assert len(set(seeds)) == 3
    assert seed in seeds
    assert all(one is not None and -(2**63) <= one < 2**63 for one in seeds)


async def test_options_of_the_registration_and_of_the_client_are_merged(
    gateway: Gateway, upstream: Scripted
) -> None:
    session = await gateway.register(sampling={"extra": {"min_p": 0.1}})
    await gateway.chat(session, response_format={"type": "json_object"}, min_p=0.5)
    extra = upstream.calls[0].request.sampling.extra
    assert extra["min_p"] == 0.1
    assert "response_format" in extra
