"""A tool call that the length limit cuts off is never sent to a client as a call."""

from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rookery.core import Finish, Message, ToolCall
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.gateway.reply_reader import ToolCallBuffer, drop_incomplete_call
from rookery.upstreams.embedded import chat
from rookery.upstreams.protocol import CallDelta
from tests.gateway.dialects.kit import run_token_shard
from tests.gateway.kit import InProcessGateway, RegisteredSession
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream
from tests.gateway.session_kit import TokenScriptUpstream

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "", "parameters": SCHEMA}}]
TOOLS: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
BLOCK_TOOLS: Any = [{"name": "look", "input_schema": SCHEMA}]
WHOLE = ToolCall("call_1", "look", '{"at": "a"}')
HALF = ToolCall("call_2", "look", '{"at": "b')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls", [(HALF,), (WHOLE, HALF)])
async def test_every_dialect_omits_a_tool_call_cut_off_by_the_length_limit(
    gateway: InProcessGateway,
    session: RegisteredSession,
    upstream: ScriptedUpstream,
    stream: bool,
    calls: tuple[ToolCall, ...],
) -> None:
    complete_calls = [(call.name, call.arguments) for call in calls[:-1]]
    reply = ScriptedReply("so", calls=calls)
    reply.reply_fields = {"message": Message("assistant", "so", calls), "finish": "length"}
    upstream.default = reply
    base = f"{gateway.url}{session.path}"
    async with AsyncOpenAI(base_url=base, api_key=session.secret) as client:
        if stream:
            text, streamed_calls, finish = "", {}, None
            chunks = await client.chat.completions.create(model="m", messages=HELLO, tools=CHAT_TOOLS, stream=True)
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
                for call in chunk.choices[0].delta.tool_calls or ():
                    assert call.function is not None
                    name, arguments = streamed_calls.get(call.index, ("", ""))
                    streamed_calls[call.index] = (
                        name + (call.function.name or ""),
                        arguments + (call.function.arguments or ""),
                    )
            assert (text, list(streamed_calls.values()), finish) == ("so", complete_calls, "length")
            async with client.responses.stream(model="m", input="hello", tools=TOOLS) as events:
                async for event in events:
                    if event.type == "response.incomplete":
                        response: Any = event.response
        else:
            answer = await client.chat.completions.create(model="m", messages=HELLO, tools=CHAT_TOOLS)
            message: Any = answer.choices[0].message
            calls_seen = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            assert (message.content, calls_seen, answer.choices[0].finish_reason) == (
                "so",
                complete_calls,
                "length",
            )
            response = await client.responses.create(model="m", input="hello", tools=TOOLS)
    items = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    assert (items, response.status, response.output_text) == (complete_calls, "incomplete", "so")
    async with AsyncAnthropic(base_url=base, api_key=session.secret) as anthropic_client:
        params: Any = {"model": "m", "max_tokens": 9, "messages": HELLO, "tools": BLOCK_TOOLS}
        if stream:
            async with anthropic_client.messages.stream(**params) as blocks:
                final = await blocks.get_final_message()
        else:
            final = await anthropic_client.messages.create(**params)
    used = [block.name for block in final.content if block.type == "tool_use"]
    assert (used, final.stop_reason) == ([name for name, _ in complete_calls], "max_tokens")
    turns = await gateway.turns(session)
    assert all(len(turn["response"].get("tool_calls", ())) == len(complete_calls) for turn in turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_an_incomplete_call_are_kept_and_train(tmp_path: Path, stream: bool) -> None:
    script = TokenScriptUpstream(
        lambda _: [*b"so", chat.CALL, *b'look{"at": "somewhere"}', chat.END], EmbeddedRenderer()
    )
    async with run_token_shard(tmp_path, script) as (gateway, _):
        session = await gateway.register()
        answer = await gateway.chat(session, HELLO, tools=CHAT_TOOLS, max_tokens=12, stream=stream)
        assert answer.text == "so"
        history = [*HELLO, {"role": "assistant", "content": "so"}, {"role": "user", "content": "go on"}]
        assert (await gateway.chat(session, history, tools=CHAT_TOOLS, max_tokens=3)).status == 200
        calls_seen = await gateway.trajectory(session)
        assert [turn.get("parent") for turn in calls_seen["turns"]] == [None, 0]
        assert len(calls_seen["segments"]) == 1
        assert calls_seen["segments"][0]["mask"].count(1) == 12 + 3


@pytest.mark.parametrize(
    ("arguments", "finish", "kept"),
    [
        ('{"a": 1}', "length", True),
        ("[1]", "length", True),
        ('{"a"', "length", False),
        ("", "length", False),
        ('{"a"', "content_filter", False),
        ('{"a"', "tool_calls", True),
        ("", "stop", True),
    ],
)
def test_only_a_call_cut_off_by_the_end_is_dropped(arguments: str, finish: Finish, kept: bool) -> None:
    message = drop_incomplete_call(Message("assistant", None, (ToolCall("c", "look", arguments),)), finish)
    assert bool(message.tool_calls) == kept
    assert message.content == (None if kept else "")


def test_buffer_holds_a_call_until_the_next_one_starts() -> None:
    buffer = ToolCallBuffer()
    first = [CallDelta(0, "a", "look"), CallDelta(0, arguments='{"x":'), CallDelta(0, arguments="1}")]
    assert buffer.feed(first[:2]) == buffer.feed(first[2:]) == ()
    second = [CallDelta(1, "b", "look", "{"), CallDelta(1, arguments="}")]
    assert buffer.feed(second[:1]) == tuple(first)
    assert buffer.feed(second[1:]) == ()
    calls = (ToolCall("a", "look", '{"x":1}'), ToolCall("b", "look", "{}"))
    assert buffer.flush(calls) == tuple(second)
    assert buffer.flush(calls[:1]) == ()


async def test_stream_sends_empty_events_while_a_long_call_is_sampled(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    call = ToolCall("call_1", "look", '{"at": "%s"}' % ("x" * 500))
    upstream.default = ScriptedReply("so", calls=(call,))
    answer = await gateway.chat(session, HELLO, stream=True, tools=CHAT_TOOLS)
    empty = [one for one in answer.events[:-1] if one["choices"][0]["delta"] == {}]
    assert len(empty) >= 500 // 64
    assert [one["choices"][0]["finish_reason"] for one in empty].count(None) == len(empty) - 1
    base = f"{gateway.url}{session.path}"
    async with AsyncOpenAI(base_url=base, api_key=session.secret) as client:
        async with client.responses.stream(model="m", input="hello", tools=TOOLS) as events:
            final = await events.get_final_response()
        assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments]
    async with AsyncAnthropic(base_url=base, api_key=session.secret) as anthropic_client:
        params: Any = {"model": "m", "max_tokens": 9, "messages": HELLO, "tools": BLOCK_TOOLS}
        async with anthropic_client.messages.stream(**params) as blocks:
            message = await blocks.get_final_message()
        assert [block.input for block in message.content if block.type == "tool_use"] == [{"at": "x" * 500}]
