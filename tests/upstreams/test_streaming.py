"""Streams of the OpenAI protocol: deltas arrive at once, and a cut stream is never a complete reply."""

import asyncio
import gc

import orjson
import pytest

from rookery.core import Message, ToolCall, Truncation, UpstreamError, floats, ints
from rookery.upstreams import ModelRequest
from rookery.upstreams.format import ErrorReply, ReplyContext, ReplyFormatError
from rookery.upstreams.http_client import Response
from rookery.upstreams.openai_stream import Chunks
from rookery.upstreams.protocol import Delta
from tests.upstreams.engines import DONE, Engine, Play, event
from tests.upstreams.helpers import KEY, REQUEST, DeltaLog, of_kind, overdue
from tests.upstreams.http_kit import until

CHAT = "/v1/chat/completions"


def chunk(index=0, **choice):
    return event({"id": "x", "object": "chat.completion.chunk", "choices": [{"index": index, **choice}]})


def text_event(text, *ids, finish=None, **more):
    logprobs = {"content": [{"token": "t", "logprob": -i / 8, "bytes": None, "top_logprobs": []} for i in ids]}
    return chunk(delta={"content": text, **more}, token_ids=list(ids), logprobs=logprobs, finish_reason=finish)


FIRST = event(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}
)
USAGE = event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})
STREAM = [
    FIRST,
    b": ping\n\n",
    text_event("héllo", 5),
    text_event(" wor", 6, 7),
    text_event("ld", 8, finish="stop"),
    USAGE,
    DONE,
]
SAMPLED, LOGPROBS = ints([5, 6, 7, 8]), floats([-5 / 8, -6 / 8, -7 / 8, -1.0])


async def test_reply_is_delivered_in_pieces_and_returned_completely():
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=STREAM))
        on_delta = DeltaLog()
        reply = await up.complete(REQUEST, timeout=60, on_delta=on_delta)
        on_delta.begins(reply)
        assert (reply.message, reply.finish) == (Message("assistant", "héllo world"), "stop")
        assert (reply.prompt, reply.sampled, reply.logprobs) == (ints([1, 2]), SAMPLED, LOGPROBS)
        assert (reply.prompt_tokens, reply.sampled_tokens) == (2, 4)
        assert on_delta.prompt == ints([1, 2])
        assert on_delta.deltas[0].prompt == ints([1, 2])
        body = engine.requests[0].body
        assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


async def test_first_piece_is_delivered_before_the_second_arrives():
    permits = asyncio.Semaphore(0)
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=STREAM, between=permits))
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        call = asyncio.create_task(up.complete(REQUEST, timeout=60, on_delta=deltas.put))
        for expected in ("", "héllo", " wor", "ld"):
            permits.release()
            if expected == "héllo":
                permits.release()  # the comment
            assert (await deltas.get()).content == expected
        for _ in range(2):
            permits.release()
        assert (await call).finish == "stop"


@pytest.mark.parametrize("together", [1, 2, 3, 100])
async def test_events_that_come_together_are_delivered_together(together):
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        pieces = [b"".join(STREAM[at : at + together]) for at in range(0, len(STREAM), together)]
        engine.on(CHAT, Play(events=pieces))
        on_delta = DeltaLog()
        on_delta.begins(await up.complete(REQUEST, timeout=60, on_delta=on_delta))
        assert len(on_delta.deltas) <= len(pieces)


async def test_stream_cut_at_any_byte_is_an_error_or_complete_and_its_deltas_are_a_prefix():
    whole = Play(events=STREAM).raw()
    raw = b"".join(whole)
    finished = raw.index(b'"stop"')
    outcomes = set()
    async with Engine() as engine, of_kind("openai", engine.url, retries=0) as up:
        for cut in range(1, len(raw) + 1):
            engine.on(CHAT, Play(events=STREAM, cut=cut))
            on_delta = DeltaLog()
            (reply,) = await asyncio.gather(
                up.complete(REQUEST, timeout=60, on_delta=on_delta), return_exceptions=True
            )
            if isinstance(reply, UpstreamError):
                assert KEY not in str(reply)
                outcomes.add(reply.code)
                assert "héllo world".startswith(on_delta.content)
                assert SAMPLED.startswith(on_delta.sampled)
                assert LOGPROBS.startswith(on_delta.logprobs)
                assert len(on_delta.sampled) == len(on_delta.logprobs)
            else:
                assert cut > finished, "a stream without a finish reason is not a complete reply"
                assert (reply.sampled, reply.message.text) == (SAMPLED, "héllo world")
                on_delta.begins(reply)
                outcomes.add("whole")
        assert outcomes == {"upstream.cut", "upstream.unreachable", "whole"}
        assert up.replicas[0].load == up.replicas[0].gate.in_use == 0


@pytest.mark.parametrize(
    "stream",
    [
        [FIRST, text_event("a", 1), DONE],
        [FIRST, text_event("a", 1)],
        [FIRST, text_event("a", 1), b'data: {"choi'],
        [],
        [b": nothing\n\n"],
    ],
)
async def test_stream_that_ends_without_its_finish_is_cut(stream):
    async with Engine() as engine, of_kind("openai", engine.url, retries=0) as up:
        engine.on(CHAT, Play(events=stream))
        with pytest.raises(UpstreamError) as caught:
            await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())
        assert caught.value.code == "upstream.cut"


@pytest.mark.parametrize(
    "stream",
    [
        STREAM[:-1],
        [*STREAM[:-2]],
        [*STREAM[:-2], b"data: half an ev"],
        [one.replace(b"\n", b"\r\n") for one in STREAM],
        [one.replace(b"data: ", b"data:") for one in STREAM],
    ],
)
async def test_events_after_the_finish_reason_are_not_needed(stream):
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=stream))
        assert (await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())).sampled == SAMPLED


async def test_stream_that_never_closes_is_left_after_the_reply(monkeypatch):
    monkeypatch.setattr("rookery.upstreams.replica.STREAM_END_SECONDS", 0.05)
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=STREAM, stall=asyncio.Event()))
        assert (await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())).sampled == SAMPLED
        await engine.until(lambda: engine.disconnects == 1)


async def test_stream_that_stalls_is_a_timeout_and_its_connection_is_closed():
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=[FIRST, text_event("a", 1), text_event("b", 2)], stall=asyncio.Event()))
        on_delta = DeltaLog()
        call = asyncio.create_task(up.complete(REQUEST, timeout=60, on_delta=on_delta))
        await until(lambda: on_delta.content == "a")
        overdue(up)
        with pytest.raises(UpstreamError) as caught:
            await call
        assert (caught.value.code, on_delta.content) == ("upstream.timeout", "a")
        await engine.until(lambda: engine.disconnects == 1)
        assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (event(b"garbage"), "upstream.protocol"),
        (event({"choices": [{"index": 0, "delta": {"content": 3}}]}), "upstream.protocol"),
        (event({"choices": [{"delta": {}, "token_ids": [-1]}]}), "upstream.protocol"),
        (event({"choices": [{"delta": {}, "token_ids": [1], "logprobs": {"content": []}}]}), "upstream.protocol"),
        (event({"choices": [{"delta": {}, "token_ids": [3]}]}), "upstream.protocol"),
        (event({"choices": [{"delta": {}, "finish_reason": "why"}]}), "upstream.protocol"),
        (event({"choices": [{"delta": {"tool_calls": [{"index": 4}]}}]}), "upstream.protocol"),
        (event({"error": {"message": f"dead {KEY}", "code": 500}}), "upstream.error"),
        (event({"error": {"message": "busy", "code": 503}}), "upstream.overloaded"),
        (event({"object": "error", "message": "dead"}), "upstream.error"),
    ],
)
@pytest.mark.parametrize("last", [b"", DONE])
async def test_bad_event_in_the_middle_ends_the_call_and_is_not_retried(bad, cause, last):
    permits = asyncio.Semaphore(2)

    class Letting(DeltaLog):
        async def __call__(self, delta: Delta) -> None:
            await super().__call__(delta)
            if delta.content:
                for _ in range(3):
                    permits.release()

    async with Engine() as engine, of_kind("openai", engine.url) as up:
        events = [FIRST, text_event("a", 1), bad, text_event("b", 2, finish="stop"), last or b":\n\n"]
        engine.on(CHAT, Play(events=events, between=permits))
        on_delta = Letting()
        with pytest.raises(UpstreamError) as caught:
            await up.complete(REQUEST, timeout=60, on_delta=on_delta)
        assert caught.value.code == cause
        assert KEY not in str(caught.value)
        assert (on_delta.content, len(engine.requests)) == ("a", 1)


async def test_full_context_reported_in_a_stream_truncates():
    words = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=[event({"error": {"message": words, "code": 400}}), DONE]))
        with pytest.raises(Truncation):
            await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())


# ---------------------------------------------------------------------------------------------- trying again


@pytest.mark.parametrize(
    "first",
    [
        Play(events=STREAM, cut=0),
        Play(events=[], cut=None),
        Play(events=[b": ping\n\n"]),
        Play(events=STREAM, cut=90),
        Play(status=503, body={"error": {"message": "busy"}}),
        Play(events=[event({"error": {"message": "busy", "code": 503}})]),
    ],
)
async def test_call_is_retried_when_nothing_was_delivered(first):
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, first, Play(events=STREAM))
        on_delta = DeltaLog()
        on_delta.begins(await up.complete(REQUEST, timeout=60, on_delta=on_delta))
        assert len(engine.requests) == 2


async def test_call_is_never_retried_after_a_piece_was_delivered():
    async with Engine() as one, Engine() as two, of_kind("openai", one.url, two.url) as up:
        for engine in (one, two):
            engine.on(CHAT, Play(events=[FIRST, text_event("a", 1)]))
        with pytest.raises(UpstreamError) as caught:
            await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())
        assert caught.value.code == "upstream.cut"
        assert len(one.requests) + len(two.requests) == 1


async def test_reply_without_streaming_is_delivered_in_one_delta():
    whole = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop", "token_ids": [4]}]}
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(body=whole))
        on_delta = DeltaLog()
        on_delta.begins(await up.complete(REQUEST, timeout=60, on_delta=on_delta))
        assert len(on_delta.deltas) == 1


async def test_stream_options_are_omitted_after_a_rejection():
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(status=400, body={"error": "Unknown: stream_options"}), Play(events=STREAM))
        for _ in range(2):
            await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())
        assert ["stream_options" in request.body for request in engine.requests] == [True, False, False]


# -------------------------------------------------------------------------------------------------- the on_delta


@pytest.mark.parametrize("error", [ConnectionResetError("the client went away"), TimeoutError(), ValueError("x")])
async def test_exception_of_on_delta_propagates_unchanged(error):
    async def on_delta(_: Delta) -> None:
        raise error

    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=STREAM, stall=asyncio.Event()))
        with pytest.raises(type(error)) as caught:
            await up.complete(REQUEST, timeout=60, on_delta=on_delta)
        assert caught.value is error
        await engine.until(lambda: engine.disconnects == 1)
        assert up.replicas[0].health.healthy
        assert up.replicas[0].gate.in_use == 0


async def test_cancelling_a_stream_closes_its_connection():
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=STREAM, stall=asyncio.Event()))
        begun = asyncio.Event()

        async def on_delta(_: Delta) -> None:
            begun.set()

        call = asyncio.create_task(up.complete(REQUEST, timeout=60, on_delta=on_delta))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.until(lambda: engine.disconnects == 1)
        assert up.replicas[0].load == 0


def open_responses() -> list[Response]:
    return [one for one in gc.get_objects() if isinstance(one, Response) and one.connection is not None]


async def test_slow_reader_costs_no_memory():
    """20 MB for a reader that does not read stay in the server."""
    block = text_event("x" * 50_000, 1)
    slow, hold = asyncio.Event(), asyncio.Event()

    async def on_delta(_: Delta) -> None:
        slow.set()
        await hold.wait()

    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=[*[block] * 400, text_event("", 2, finish="stop"), DONE]))
        before = open_responses()
        call = asyncio.create_task(up.complete(REQUEST, timeout=60, on_delta=on_delta))
        await slow.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        (response,) = [one for one in open_responses() if one not in before]
        assert response.unread < 1 << 20, "the buffered data is bounded"
        hold.set()
        assert (await call).sampled_tokens == 401


async def test_connections_of_streams_are_reused():
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=STREAM))
        for _ in range(5):
            await up.complete(REQUEST, timeout=60, on_delta=DeltaLog())
            await asyncio.gather(*up.replicas[0].draining)
        assert (len(engine.requests), engine.connections) == (5, 1)


# ------------------------------------------------------------------------------------------ what is in a chunk


async def test_tool_calls_and_reasoning_come_in_pieces():
    def call(index, **function):
        name_of = {"id": function.pop("id")} if "id" in function else {}
        return chunk(delta={"tool_calls": [{"index": index, **name_of, "function": function}]})

    stream = [
        chunk(delta={"reasoning_content": "let "}),
        chunk(delta={"reasoning": "me"}),
        call(0, id="c0", name="add", arguments=""),
        call(0, arguments='{"a"'),
        call(0, name="add", arguments=": 1}"),
        call(1, name="sub"),
        chunk(delta={}, finish_reason="tool_calls"),
        DONE,
    ]
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(CHAT, Play(events=stream))
        on_delta = DeltaLog()
        reply = await up.complete(REQUEST, timeout=60, on_delta=on_delta)
        assert reply.message.tool_calls == (ToolCall("c0", "add", '{"a": 1}'), ToolCall("call_1", "sub", "{}"))
        assert (reply.message.reasoning, reply.message.content) == ("let me", None)
        assert on_delta.calls() == [("c0", "add", '{"a": 1}'), ("call_1", "sub", "")]


async def test_raw_logprobs_are_returned_unchanged():
    entry = {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "b", "logprob": -1.0, "x": 1}],
    }
    stream = [
        chunk(delta={"content": "a"}, token_ids=[1], logprobs={"content": [entry]}),
        chunk(delta={"content": "aa"}, token_ids=[1, 1], logprobs={"content": [entry, entry]}),
        chunk(delta={}, token_ids=[], logprobs=None, finish_reason="stop"),
        DONE,
    ]
    request = ModelRequest(model="m", messages=REQUEST.messages, top_logprobs=1)
    whole = {"message": {"content": "aaa"}, "finish_reason": "stop", "token_ids": [1, 1, 1]}
    async with Engine() as engine, of_kind("openai", engine.url) as up:
        engine.on(
            CHAT, Play(events=stream), Play(body={"choices": [{**whole, "logprobs": {"content": [entry] * 3}}]})
        )
        on_delta = DeltaLog()
        streamed = await up.complete(request, timeout=60, on_delta=on_delta)
        at_once = await up.complete(request, timeout=60)
        for reply in (streamed, at_once):
            assert reply.logprob_content is not None
            assert orjson.loads(bytes(reply.logprob_content)) == [entry] * 3
            assert reply.logprobs == floats([-0.5] * 3)
        entries = [one for delta in on_delta.deltas for one in orjson.loads(bytes(delta.logprob_content or b"[]"))]
        assert entries == [entry] * 3
        assert engine.requests[0].body["top_logprobs"] == 1


CALL = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}]}


@pytest.mark.parametrize("want_logprobs", [False, True])
@pytest.mark.parametrize(
    "middle",
    [
        [text_event("a", 9), text_event("", 10, 11)],
        [text_event("a", 9, **CALL), text_event("b", 10, reasoning="why")],
        [chunk(1, delta={"content": "other"}, token_ids=[3], logprobs={"content": [{"logprob": -1.0}]})],
        [event({"choices": [], "weight_version": "7"}), text_event("a", 9)],
        [chunk(delta={"content": "a"}, token_ids=[9], logprobs=None)],  # logprobs for some tokens only
        [chunk(delta={"content": "a"}, logprobs={"content": [{"logprob": -1.0}]})],  # without their token IDs
        [event({"error": {"message": "out of memory", "code": 500}})],
        [b'data: {"choices":\n\n', b"data: []}\n\n"],
    ],
)
def test_events_parsed_together_equal_events_parsed_one_by_one(want_logprobs, middle):
    request = ModelRequest(messages=REQUEST.messages, want_logprobs=want_logprobs)
    stream = [FIRST, text_event("héllo", 5), *middle, text_event(" end", 8, finish="stop"), USAGE, DONE]
    results = []
    for pieces in (stream, [b"".join(stream)]):
        parser = Chunks(request)
        try:
            for piece in pieces:
                parser.feed(piece)
            results.append(parser.reply(ReplyContext()))
        except (ReplyFormatError, ErrorReply) as error:
            results.append(type(error))
    assert results[0] == results[1]
