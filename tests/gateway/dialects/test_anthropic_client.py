"""The unmodified anthropic library works with only a base URL and a key."""

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

from rookery.core import ToolCall, UpstreamError
from tests.gateway.dialects.kit import check_exact_turns, run_token_shard
from tests.gateway.kit import ADMIN_KEY, InProcessGateway, RegisteredSession, request
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream
from tests.gateway.test_openai_client import drop_first_responses

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {"name": name, "description": "", "input_schema": {"type": "object", "properties": {"at": {"type": "array"}}}}
    for name in ("look", "stop")
]
CALLS = (ToolCall("call_1", "look", '{"at": [1, 2.0]}'), ToolCall("call_2", "stop", "{}"))
THINK: Any = {"type": "adaptive"}


def anthropic_client(
    gateway: InProcessGateway, session: RegisteredSession, form: str = "", **more: Any
) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=f"{gateway.url}{session.path}{form}", api_key=session.secret, **more)


async def test_whole_and_streamed_messages_are_equal(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.default = ScriptedReply("the answer", reasoning="let me see")
    async with anthropic_client(gateway, session) as client:
        whole = await client.messages.create(
            model="m", max_tokens=9, messages=HELLO, system="Be kind.", thinking=THINK
        )
        async with client.messages.stream(
            model="m", max_tokens=9, messages=HELLO, system="Be kind.", thinking=THINK
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        plain = await client.messages.create(model="m", max_tokens=9, messages=HELLO)
    assert text == "the answer"
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "let me see"  # type: ignore[union-attr]
        assert (message.content[0].signature, message.stop_reason) == (whole.content[0].signature, "end_turn")  # type: ignore[union-attr]
        assert message.usage.output_tokens == len("the answer") + 1
        assert message.usage.input_tokens > 0
    assert [block.type for block in plain.content] == ["text"], "reasoning is returned only if requested"
    assert [model_call.request.sampling.max_tokens for model_call in upstream.calls] == [9, 9, 9]
    assert len(await gateway.turns(session)) == 3


async def test_stream_events_have_the_anthropic_order(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.default = ScriptedReply("ab", reasoning="hm", calls=CALLS)
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, "stream": True, "thinking": THINK, "tools": TOOLS}
    answer = await gateway.request("POST", f"{session.path}/v1/messages?beta=true", body, key=session.secret)
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [part.split(b"\n")[0].decode() for part in answer.body.split(b"\n\n")[:-1]]
    block = ["event: content_block_start", "event: content_block_delta", "event: content_block_stop"]
    thinking = [block[0], block[1], block[1], block[2]]  # the reasoning and its signature
    text = [block[0], block[1], block[1], block[2]]
    ends = ["event: message_delta", "event: message_stop"]
    assert names == ["event: message_start", "event: ping", *thinking, *text, *block, *block, *ends]


async def test_tool_results_continue_the_history(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("hm", calls=CALLS), ScriptedReply("hm", calls=CALLS), ScriptedReply("done"))
    async with anthropic_client(gateway, session) as client:
        choice: Any = {"type": "tool", "name": "look"}
        first = await client.messages.create(
            model="m", max_tokens=9, messages=HELLO, tools=TOOLS, tool_choice=choice
        )
        assert first.stop_reason == "tool_use"
        assert [(block.id, block.name, block.input) for block in first.content if block.type == "tool_use"] == [
            ("call_1", "look", {"at": [1, 2.0]}),
            ("call_2", "stop", {}),
        ]
        async with client.messages.stream(model="m", max_tokens=9, messages=HELLO, tools=TOOLS) as stream:
            final = await stream.get_final_message()
        assert [block.to_dict(exclude_none=True) for block in final.content] == [
            block.to_dict(exclude_none=True) for block in first.content
        ]
        results = [
            {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "seen"}]},
            {"type": "tool_result", "tool_use_id": "call_2", "content": "stopped", "is_error": True},
            {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
        ]
        content = [block.to_dict(exclude_none=True) for block in final.content]
        content[1]["input"]["at"][1] = 2  # as a client in JavaScript writes 2.0
        history: Any = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        last = await client.messages.create(
            model="m", max_tokens=9, messages=history, tools=TOOLS, tool_choice={"type": "any"}
        )
    assert last.content[0].text == "done"  # type: ignore[union-attr]
    assert [model_call.request.tool_choice for model_call in upstream.calls] == ["look", None, "required"]
    roles = [message.role for message in upstream.calls[-1].request.messages]  # type: ignore[union-attr]
    assert roles == ["user", "assistant", "tool", "tool", "user"]
    turns = await gateway.turns(session)
    assert [turn.get("parent") for turn in turns] == [None, None, 1]


async def test_model_list_and_token_count_have_the_anthropic_format(
    gateway: InProcessGateway, session: RegisteredSession
) -> None:
    async with anthropic_client(gateway, session) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        count = await client.messages.count_tokens(model="m", messages=HELLO, system="Be kind.", tools=TOOLS)
        assert count.input_tokens > 0
    async with await gateway.connect() as connection:
        connection.send(request("HEAD", session.path, Authorization=f"Bearer {session.secret}"))
        assert (await connection.read_response(head_only=True)).status == 200
    assert await gateway.turns(session) == []


async def test_sampling_options_reach_the_upstream(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.default = ScriptedReply("ab", finish="length")
    async with anthropic_client(gateway, session) as client:
        answer = await client.messages.create(
            model="m", max_tokens=3, messages=HELLO, stop_sequences=["x"], metadata={"user_id": "me"},
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            # Not every version of the library has a name for these.
            extra_body={
                "temperature": 0.5, "top_p": 0.5, "top_k": 4, "service_tier": "auto",
                "context_management": {"edits": []}, "unheard_of": {"x": 1},
            },
        )  # fmt: skip
    assert answer.stop_reason == "max_tokens"
    sampling = upstream.calls[0].request.sampling
    assert (sampling.stop, sampling.temperature, sampling.top_p, sampling.top_k) == (("x",), 0.5, 0.5, 4)
    assert b'"json_schema"' in bytes(sampling.extra["response_format"])


async def test_errors_map_to_the_exceptions_of_the_library(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    await gateway.register(id="past")
    await gateway.request("POST", "/rollouts/past/cancel")
    ended = RegisteredSession("past", "", session.secret)
    unknown = RegisteredSession("nobody", "", session.secret)
    wrong_key = RegisteredSession(session.id, "", ADMIN_KEY)
    exhausted = await gateway.register(id="spent", budgets={"max_turns": 1})

    async def raised(who: RegisteredSession, **fields: Any) -> Any:
        async with anthropic_client(gateway, who, max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(**({"model": "m", "max_tokens": 9, "messages": HELLO} | fields))
            return caught.value

    async with anthropic_client(gateway, exhausted) as client:
        await client.messages.create(model="m", max_tokens=9, messages=HELLO)
    image: Any = [{"role": "user", "content": [{"type": "image"}]}]
    for error, kind, status, name in [
        (await raised(wrong_key), anthropic.AuthenticationError, 401, "authentication_error"),
        (await raised(unknown), anthropic.NotFoundError, 404, "not_found_error"),
        (await raised(ended), anthropic.AuthenticationError, 401, "authentication_error"),
        (await raised(session, messages=[]), anthropic.BadRequestError, 400, "invalid_request_error"),
        (await raised(session, messages=image), anthropic.BadRequestError, 400, "invalid_request_error"),
        (await raised(session, tools=[{"name": 5}]), anthropic.BadRequestError, 400, "invalid_request_error"),
        (await raised(exhausted), anthropic.BadRequestError, 400, "invalid_request_error"),
    ]:
        assert isinstance(error, kind)
        assert error.status_code == status
        assert error.body["type"] == "error"  # type: ignore[index]
        assert error.body["error"]["type"] == name  # type: ignore[index]
        assert error.body["error"]["message"]  # type: ignore[index]
    upstream.default = ScriptedReply(error=UpstreamError("down", cause="upstream.unreachable"), after=0)
    error = await raised(session)
    assert (error.status_code, error.body["error"]["type"]) == (503, "api_error")
    upstream.default = ScriptedReply("abc", error=UpstreamError("down"), after=2)
    async with anthropic_client(gateway, session) as client:
        with pytest.raises(anthropic.APIError) as caught:
            async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
                await stream.get_final_message()
        assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
    assert len(await gateway.turns(session)) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_automatic_retry_of_a_lost_response_replays_it(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, stream: bool
) -> None:
    upstream.then(ScriptedReply("the first", calls=CALLS))
    async with drop_first_responses(gateway.port, 1) as (port, heads):
        base = f"http://127.0.0.1:{port}{session.path}"
        async with AsyncAnthropic(base_url=base, api_key=session.secret, max_retries=2) as client:
            if stream:
                async with client.messages.stream(model="m", max_tokens=9, messages=HELLO, tools=TOOLS) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(model="m", max_tokens=9, messages=HELLO, tools=TOOLS)
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert [b"x-stainless-retry-count: 1" in head.lower() for head in heads] == [False, True]
    assert (len(upstream.calls), len(await gateway.turns(session))) == (1, 1)


async def test_closing_the_stream_cancels_the_call(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("abc", stepwise=True))
    async with anthropic_client(gateway, session) as client:
        asking = asyncio.create_task(client.messages.create(model="m", max_tokens=9, messages=HELLO, stream=True))
        model_call = await upstream.wait_for_call()
        model_call.advance(2)
        stream = await asking
        assert (await anext(aiter(stream))).type == "message_start"
        await stream.close()
        await model_call.wait_until_ended()
        assert model_call.cancelled
    await gateway.wait_until_idle()
    assert [turn.get("partial") for turn in await gateway.turns(session)] == [True]


# ---- real tokens


async def test_tokens_of_the_embedded_policy_are_extended_and_train_once(tmp_path: Path) -> None:
    async with run_token_shard(tmp_path) as (gateway, noting):
        session = await gateway.register(id="real")
        fields: Any = {"model": "m", "max_tokens": 24, "system": "Help.", "tools": TOOLS}
        async with anthropic_client(gateway, session) as client:
            history: list[Any] = list(HELLO)
            for turn in range(3):
                if turn % 2:
                    async with client.messages.stream(messages=history, **fields) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(messages=history, **fields)
                results: list[Any] = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                text: Any = {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}
                for one in history[:-1]:  # the cache hint is on the last message only
                    if isinstance(one["content"], list) and one["role"] == "user":
                        one["content"][-1].pop("cache_control", None)
                history += [answer.to_param(), {"role": "user", "content": [*results, text]}]
                count = await client.messages.count_tokens(
                    model="m", messages=history, system="Help.", tools=TOOLS
                )
            last = await client.messages.create(messages=history, **fields)
            assert count.input_tokens == last.usage.input_tokens, "the count equals the rendered prompt"
            sub: Any = [{"role": "user", "content": "another task"}]
            await client.messages.create(messages=sub, **fields)
        turns = await check_exact_turns(gateway, session, noting, segments=2)
        assert [turn.get("parent") for turn in turns] == [None, 0, 1, 2, None]
        assert all(turn.get("prefix") for turn in turns[1:4])


async def test_synchronous_client_streams_a_message(gateway: InProcessGateway, session: RegisteredSession) -> None:
    def run() -> str:
        with (
            Anthropic(base_url=f"{gateway.url}{session.path}", auth_token=session.secret, api_key=None) as client,
            client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
        ):
            return "".join(stream.text_stream)

    assert await asyncio.to_thread(run) == "the answer"
