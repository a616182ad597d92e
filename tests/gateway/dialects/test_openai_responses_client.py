"""The unmodified openai library with the responses API works with only a base URL and a key."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from rookery.core import Message, ToolCall, UpstreamError
from tests.gateway.dialects.kit import check_exact_turns, run_token_shard
from tests.gateway.kit import InProcessGateway, RegisteredSession, run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream
from tests.gateway.test_openai_client import drop_first_responses, openai_client

TOOLS: Any = [
    {"type": "function", "name": name, "description": "", "parameters": {"type": "object"}, "strict": False}
    for name in ("look", "stop")
]
CALLS = (ToolCall("call_1", "look", '{"at": [1, 2]}'), ToolCall("call_2", "stop", "{}"))
SEALED: Any = ["reasoning.encrypted_content"]


def comparable_output(response: Any) -> list[dict[str, Any]]:
    """Return the output items without the fields that differ in every response."""
    items = [item.to_dict(exclude_none=True, mode="json") for item in response.output]
    for item in items:
        item.pop("id")
        for part in item.get("content", ()):
            part.pop("parsed", None)
        item.pop("parsed_arguments", None)
    return items


@pytest.mark.long
async def test_whole_and_streamed_responses_are_equal(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.default = ScriptedReply("the answer", reasoning="let me see", calls=CALLS)
    async with openai_client(gateway, session) as client:
        whole = await client.responses.create(model="m", input="hello", tools=TOOLS, include=SEALED, store=False)
        async with client.responses.stream(model="m", input="hello", tools=TOOLS, include=SEALED) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert (whole.output_text, final.output_text) == ("the answer", "the answer")
    assert whole.status == final.status == "completed"
    assert [item["type"] for item in comparable_output(whole)] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert comparable_output(final) == comparable_output(whole)
    assert whole.usage is not None
    assert final.usage == whole.usage
    assert whole.usage.output_tokens == len("the answer") + 1
    item = "response.output_item"
    part = "response.content_part"
    arguments = "response.function_call_arguments"
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(f"{item}.added", f"{part}.added", "response.reasoning_text.delta", "response.reasoning_text.done"),
        *(f"{part}.done", f"{item}.done", f"{item}.added", f"{part}.added"),
        *["response.output_text.delta"] * len("the answer"),
        *("response.output_text.done", f"{part}.done", f"{item}.done"),
        *(f"{item}.added", *[f"{arguments}.delta"] * len(CALLS[0].arguments), f"{arguments}.done", f"{item}.done"),
        *(f"{item}.added", *[f"{arguments}.delta"] * 2, f"{arguments}.done", f"{item}.done"),
        "response.completed",
    ]


async def test_history_continues_by_items_and_by_response_id(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("a", reasoning="hm", calls=CALLS), ScriptedReply("b"), ScriptedReply("c"))
    outputs: Any = [{"type": "function_call_output", "call_id": call.id, "output": "seen"} for call in CALLS]
    more: Any = {"model": "m", "tools": TOOLS, "instructions": "Be kind."}
    async with openai_client(gateway, session) as client:
        first = await client.responses.create(input="hello", **more)
        items = [item.to_dict(mode="json") for item in first.output]
        by_items = await client.responses.create(
            input=[{"role": "user", "content": "hello"}, *items, *outputs], store=False, **more
        )
        by_name = await client.responses.create(input=outputs, previous_response_id=first.id, **more)
        assert (by_items.output_text, by_name.output_text) == ("b", "c")
        assert by_name.previous_response_id == first.id
        again = await client.responses.retrieve(first.id)
        assert (again.output_text, again.id, comparable_output(again)[-1]) == (
            "a",
            first.id,
            comparable_output(first)[-1],
        )
        await client.responses.delete(first.id)
        for gone in (first.id, by_items.id, "resp_nothing"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input="x", previous_response_id=first.id, **more)
        assert caught.value.param == "previous_response_id"
        count = await client.responses.input_tokens.count(model="m", input="hello")
        assert count.input_tokens > 0
    turns = await gateway.turns(session)
    assert [turn.get("parent") for turn in turns] == [None, 0, 0]
    assert [message["role"] for message in turns[0]["messages"]] == ["system", "user"]
    assert [turn["messages"] for turn in turns[1:]] == [turns[1]["messages"]] * 2


async def test_response_id_survives_a_restart_and_instructions_are_not_inherited(tmp_path: Path) -> None:
    async with run_shard(tmp_path, ScriptedUpstream("a")) as gateway:
        session = await gateway.register(id="one")
        async with openai_client(gateway, session) as client:
            first = await client.responses.create(
                model="m", input=[{"role": "developer", "content": "D"}, {"role": "user", "content": "u"}],
                instructions="I",
            )  # fmt: skip
    upstream = ScriptedUpstream("b")
    async with run_shard(tmp_path, upstream) as gateway:
        async with openai_client(gateway, session) as client:
            for instructions in ("I", "J", None):
                await client.responses.create(
                    model="m", input="more", previous_response_id=first.id, instructions=instructions
                )
        heads = [model_call.request.messages[0] for model_call in upstream.calls]
        assert [(head.role, head.content) for head in heads] == [  # type: ignore[union-attr]
            ("system", "I\n\nD"),
            ("system", "J\n\nD"),
            ("system", "D"),
        ]
        assert [turn.get("parent") for turn in await gateway.turns(session)] == [None, 0, None, None]


class Answer(BaseModel):
    x: int


async def test_formats_limits_tool_choice_and_logprobs(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply('{"x": 1}'), ScriptedReply("ab", finish="length"), ScriptedReply("ab"))
    async with openai_client(gateway, session) as client:
        parsed = await client.responses.parse(model="m", input="hello", text_format=Answer)
        assert parsed.output_parsed == Answer(x=1)
        cut = await client.responses.create(
            model="m", input="hello", tools=TOOLS, max_output_tokens=3, temperature=0.5, top_p=0.5,
            tool_choice={"type": "function", "name": "stop"}, metadata={"a": "b"}, truncation="auto",
            reasoning={"effort": "high"}, prompt_cache_key="k", extra_body={"unheard_of": [1]},
        )  # fmt: skip
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
        seen = await client.responses.create(
            model="m", input="hello", top_logprobs=2, include=["message.output_text.logprobs"]
        )
    part = seen.output[0].content[0]  # type: ignore[union-attr,index]
    assert [(one.logprob, len(one.top_logprobs)) for one in part.logprobs] == [(-0.5, 2)] * 3  # type: ignore[union-attr]
    schema, limited, _ = (model_call.request for model_call in upstream.calls)
    assert b'"json_schema"' in bytes(schema.sampling.extra["response_format"])
    assert (limited.sampling.max_tokens, limited.sampling.temperature, limited.tool_choice) == (3, 0.5, "stop")


async def test_errors_map_to_the_exceptions_of_the_library(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    async def raised(**fields: Any) -> Any:
        async with openai_client(gateway, session, max_retries=0) as client:
            with pytest.raises(openai.APIError) as caught:
                await client.responses.create(**({"model": "m", "input": "hello"} | fields))
            return caught.value

    for fields, param in [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call"}]}, "input[0].call_id"),
        ({"input": [{"role": "nobody"}]}, "input[0].role"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ]:
        error = await raised(**fields)
        assert isinstance(error, openai.BadRequestError)
        assert (error.param, bool(error.message)) == (param, True)
    upstream.default = ScriptedReply(error=UpstreamError("down", cause="upstream.unreachable"), after=0)
    assert (await raised()).status_code == 503
    upstream.default = ScriptedReply("abc", error=UpstreamError("down"), after=2)
    async with openai_client(gateway, session) as client:
        stream = await client.responses.create(model="m", input="hello", stream=True)
        with pytest.raises(openai.APIError) as caught:
            _ = [event async for event in stream]
        assert caught.value.code == "upstream_error"
    body = {"model": "m", "input": "hello", "stream": True}
    answer = await gateway.request("POST", f"{session.path}/responses", body, key=session.secret)
    assert [part.split(b"\n")[0] for part in answer.body.split(b"\n\n")[-3:-1]] == [
        b"event: error",
        b"event: response.failed",
    ]
    assert await gateway.turns(session) == []


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_automatic_retry_of_a_lost_response_replays_it_under_its_id(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, stream: bool
) -> None:
    upstream.then(ScriptedReply("the first", calls=CALLS))
    async with drop_first_responses(gateway.port, 1) as (port, heads):
        base = f"http://127.0.0.1:{port}{session.path}"
        async with AsyncOpenAI(base_url=base, api_key=session.secret, max_retries=2) as client:
            if stream:
                async with client.responses.stream(model="m", input="hello", tools=TOOLS) as events:
                    answer: Any = await events.get_final_response()
            else:
                answer = await client.responses.create(model="m", input="hello", tools=TOOLS)
    async with openai_client(gateway, session) as client:
        assert (await client.responses.retrieve(answer.id)).output_text == "the first"
    assert [b"x-stainless-retry-count: 1" in head.lower() for head in heads][:2] == [False, True]
    assert (len(upstream.calls), len(await gateway.turns(session))) == (1, 1)


async def test_closing_the_stream_cancels_the_call(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("abc", stepwise=True))
    async with openai_client(gateway, session) as client:
        asking = asyncio.create_task(client.responses.create(model="m", input="hello", stream=True))
        model_call = await upstream.wait_for_call()
        model_call.advance(2)
        stream = await asking
        assert (await anext(aiter(stream))).type == "response.created"
        await stream.close()
        await model_call.wait_until_ended()
        assert model_call.cancelled
    await gateway.wait_until_idle()
    assert [turn.get("partial") for turn in await gateway.turns(session)] == [True]


async def test_tokens_of_the_embedded_policy_are_extended_and_train_once(tmp_path: Path) -> None:
    async with run_token_shard(tmp_path) as (gateway, noting):
        session = await gateway.register(id="real")
        fields: Any = {"model": "m", "max_output_tokens": 24, "instructions": "Help.", "tools": TOOLS}
        async with openai_client(gateway, session) as client:
            history: list[Any] = [{"role": "user", "content": "hello"}]
            answer: Any = None
            for turn in range(3):
                if turn % 2:
                    async with client.responses.stream(input=history, **fields) as stream:
                        async for event in stream:
                            if event.type in ("response.completed", "response.incomplete"):
                                answer = event.response
                else:
                    answer = await client.responses.create(input=history, **fields)
                history += [item.to_dict(mode="json") for item in answer.output]
                history += [
                    {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
                    for item in answer.output
                    if item.type == "function_call"
                ] or [{"role": "user", "content": "go on"}]
            named = await client.responses.create(input="go on", previous_response_id=answer.id, **fields)
            compacted: Any = [{"role": "user", "content": "so far: nothing"}]
            await client.responses.create(input=compacted, **fields)
        assert named.output
        turns = await check_exact_turns(gateway, session, noting, segments=2)
        assert [turn.get("parent") for turn in turns] == [None, 0, 1, 2, None]
        assert all(turn.get("prefix") for turn in turns[1:4])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("restart", [False, True])
async def test_item_references_resolve_to_the_items(tmp_path: Path, stream: bool, restart: bool) -> None:
    upstream = ScriptedUpstream("b")
    upstream.then(ScriptedReply("a", reasoning="hm", calls=CALLS))
    outputs: Any = [{"type": "function_call_output", "call_id": call.id, "output": "seen"} for call in CALLS]
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        async with openai_client(gateway, session) as client:
            if stream:
                async with client.responses.stream(model="m", input="hello", tools=TOOLS) as events:
                    items = (await events.get_final_response()).output
            else:
                items = (await client.responses.create(model="m", input="hello", tools=TOOLS)).output
            input_items: Any = [
                {"type": "message", "role": "user", "content": "hello"},
                *({"type": "item_reference", "id": item.id} for item in items[:-1]),
                {"id": items[-1].id},
                *outputs,
            ]
            if not restart:
                counted = await client.responses.input_tokens.count(model="m", input=input_items, tools=TOOLS)
                assert counted.input_tokens > 0
                await client.responses.create(model="m", input=input_items, tools=TOOLS)
    async with run_shard(tmp_path, upstream) as gateway, openai_client(gateway, session) as client:
        if restart:
            await client.responses.create(model="m", input=input_items, tools=TOOLS)
        turns = await gateway.turns(session)
        assert [turn.get("parent") for turn in turns] == [None, 0]
        assert [message["role"] for message in turns[1]["messages"]] == ["tool", "tool"]


async def test_reference_to_one_item_resolves_to_that_item_only(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("a", reasoning="hm", calls=CALLS), ScriptedReply("b"))
    async with openai_client(gateway, session) as client:
        first = await client.responses.create(model="m", input="hello", tools=TOOLS)
        input_items: Any = [
            {"role": "user", "content": "hello"},
            {"type": "item_reference", "id": first.output[3].id},
            {"type": "function_call_output", "call_id": CALLS[1].id, "output": "seen"},
        ]
        await client.responses.create(model="m", input=input_items, tools=TOOLS)
    message = upstream.calls[1].request.messages[1]
    assert isinstance(message, Message)
    assert (message.text, message.tool_calls) == ("", (CALLS[1],))


@pytest.mark.parametrize("kind", ["unknown", "unstored", "forgotten", "beyond", "odd", "other"])
async def test_reference_to_an_unknown_item_is_rejected(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, kind: str
) -> None:
    async with openai_client(gateway, session) as client:
        first = await client.responses.create(model="m", input="hello", store=kind != "unstored")
        name = first.output[0].id or ""
        if kind == "forgotten":
            await client.responses.delete(first.id)
        names = {
            "unknown": "rs_0123456789abcdef01234567_0",
            "beyond": name.rpartition("_")[0] + "_77",
            "odd": "msg_" + "9" * 5000,
            "other": name.replace("msg_", "fc_"),
        }
        input_items: Any = [
            {"type": "item_reference", "id": names.get(kind, name)},
            {"role": "user", "content": "x"},
        ]
        for call in (client.responses.create, client.responses.input_tokens.count):
            with pytest.raises(openai.BadRequestError) as raised:
                await call(model="m", input=input_items)
            assert (raised.value.param or "").startswith("input")
    assert len(upstream.calls) == 1
