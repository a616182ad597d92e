"""The unmodified openai library, synchronous and asynchronous, works with only a base URL and a key."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from rookery.core import ToolCall, UpstreamError, floats, ints
from rookery.upstreams.protocol import CallDelta, Delta
from tests.gateway.kit import ADMIN_KEY, InProcessGateway, RegisteredSession
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("look", "stop")
]
CALLS = (ToolCall("call_1", "look", '{"at": [1, 2]}'), ToolCall("call_2", "stop", "{}"))


def openai_client(
    gateway: InProcessGateway, session: RegisteredSession, form: str = "", **more: Any
) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}{session.path}{form}", api_key=session.secret, **more)


async def run_synchronous_client(
    gateway: InProcessGateway, session: RegisteredSession, use_client: Callable[[OpenAI], Any], **more: Any
) -> Any:
    """Use the synchronous client in a thread, because the shard runs on this event loop."""

    def run() -> Any:
        with OpenAI(base_url=f"{gateway.url}{session.path}", api_key=session.secret, **more) as client:
            return use_client(client)

    return await asyncio.to_thread(run)


# ---- responses


@pytest.mark.parametrize("form", ["", "/", "/v1", "/v1/"])
async def test_base_url_works_with_and_without_v1(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, form: str
) -> None:
    async with openai_client(gateway, session, form) as client:
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the answer", "stop")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len("the answer") + 1
        assert [model.id async for model in await client.models.list()] == ["m"]
    assert len(await gateway.turns(session)) == 1


async def test_synchronous_client_works_with_and_without_streaming(
    gateway: InProcessGateway, session: RegisteredSession
) -> None:
    def use_client(client: OpenAI) -> tuple[str | None, str, list[str]]:
        whole = client.chat.completions.create(model="m", messages=HELLO)
        with client.chat.completions.create(model="m", messages=HELLO, stream=True) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return whole.choices[0].message.content, text, [model.id for model in client.models.list()]

    assert await run_synchronous_client(gateway, session, use_client) == ("the answer", "the answer", ["m"])
    assert len(await gateway.turns(session)) == 2


async def test_stream_ends_with_usage_if_requested(gateway: InProcessGateway, session: RegisteredSession) -> None:
    async with openai_client(gateway, session) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "the answer"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 11


async def test_parallel_tool_calls_and_their_results_round_trip(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("", calls=CALLS), ScriptedReply("", calls=CALLS), ScriptedReply("done"))
    async with openai_client(gateway, session) as client:
        choices: Any = {"type": "function", "function": {"name": "look"}}
        answer = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, tool_choice=choices)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [call.model_dump() for call in message.tool_calls or ()] == [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in CALLS
        ]
        async with client.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        assert [call.function.arguments for call in final.choices[0].message.tool_calls or ()] == [
            call.arguments for call in CALLS
        ]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in CALLS]
        history: Any = [*HELLO, message.model_dump(exclude_none=True), *results]
        last = await client.chat.completions.create(model="m", messages=history, tools=TOOLS, tool_choice="none")
        assert last.choices[0].message.content == "done"
    assert [model_call.request.tool_choice for model_call in upstream.calls] == ["look", None, "none"]
    assert len(await gateway.turns(session)) == 3


async def test_sampling_options_reach_the_upstream(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(*(ScriptedReply(text) for text in ("a", "b", "c")))
    async with openai_client(gateway, session) as client:
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, n=3, stop=["x", "y"], logprobs=True, top_logprobs=2, temperature=0.5,
            seed=1, max_completion_tokens=9, frequency_penalty=0.5, user="me", metadata={"a": "b"}, store=False,
            extra_body={"min_p": 0.25, "unheard_of": {"x": 1}},
        )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.logprob, len(entry.top_logprobs)) for entry in content] == [(-0.5, 2)] * 2
    sampling = upstream.calls[0].request.sampling
    assert (sampling.stop, sampling.temperature, sampling.seed, sampling.max_tokens) == (("x", "y"), 0.5, 1, 9)
    assert {name: bytes(value) for name, value in sampling.extra.items()} == {
        "frequency_penalty": b"0.5",
        "min_p": b"0.25",
    }


async def test_raw_and_streaming_response_interfaces_work(
    gateway: InProcessGateway, session: RegisteredSession
) -> None:
    async with openai_client(gateway, session) as client:
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
        assert raw.parse().choices[0].message.content == "the answer"
        async with client.chat.completions.with_streaming_response.create(
            model="m", messages=HELLO, stream=True
        ) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


async def test_closing_the_stream_cancels_the_call(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply("abc", stepwise=True))
    async with openai_client(gateway, session) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO, stream=True))
        model_call = await upstream.wait_for_call()
        model_call.advance(2)
        stream = await asking
        assert (await anext(aiter(stream))).choices[0].delta.content == "a"
        await stream.close()
        await model_call.wait_until_ended()
        assert model_call.cancelled
    await gateway.wait_until_idle()
    assert [turn.get("partial") for turn in await gateway.turns(session)] == [True]


# ---- errors


async def test_errors_map_to_the_exceptions_of_the_library(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    ended = await gateway.register(id="past")
    await gateway.request("POST", "/rollouts/past/cancel")
    unknown = RegisteredSession("nobody", "", session.secret)
    wrong_key = RegisteredSession(session.id, "", ADMIN_KEY)
    exhausted = await gateway.register(id="spent", budgets={"max_turns": 1})
    too_long = await gateway.register(id="long", budgets={"max_sequence_length": 1})

    async def raised(who: RegisteredSession, **fields: Any) -> Any:
        async with openai_client(gateway, who, max_retries=0) as client:
            with pytest.raises(openai.APIError) as caught:
                await client.chat.completions.create(**({"model": "m", "messages": HELLO} | fields))
            return caught.value

    async with openai_client(gateway, exhausted) as client:
        await client.chat.completions.create(model="m", messages=HELLO)
    for error, kind, status, code in [
        (await raised(wrong_key), openai.AuthenticationError, 401, "invalid_api_key"),
        (await raised(unknown), openai.NotFoundError, 404, "not_found"),
        (await raised(ended), openai.APIStatusError, 410, "rollout_gone"),
        (await raised(session, messages=[]), openai.BadRequestError, 400, None),
        (await raised(session, n=1000), openai.BadRequestError, 400, None),
        (await raised(exhausted), openai.BadRequestError, 400, "rollout_truncated"),
        (await raised(too_long), openai.BadRequestError, 400, "context_length_exceeded"),
    ]:
        assert isinstance(error, kind)
        assert (error.status_code, error.code) == (status, code)
        assert error.message
        assert error.type
    upstream.default = ScriptedReply(error=UpstreamError("down", cause="upstream.unreachable"), after=0)
    error = await raised(session)
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "upstream_unavailable")
    upstream.default = ScriptedReply("abc", error=UpstreamError("down"), after=2)
    async with openai_client(gateway, session) as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in stream]
        assert caught.value.code == "upstream_error"


@pytest.mark.parametrize(
    "budgets", [{"max_turns": 1}, {"max_tokens": 1}, {"max_sequence_length": 1}, {"deadline": 0.001}]
)
async def test_exhausted_budget_is_not_retried(
    gateway: InProcessGateway, upstream: ScriptedUpstream, budgets: dict[str, Any]
) -> None:
    async def count_rejected() -> int:
        return await gateway.count("requests", status="400")

    session = await gateway.register(budgets=budgets)
    rejected = await count_rejected()
    upstream.default = ScriptedReply("", stepwise="deadline" in budgets)
    async with openai_client(gateway, session, max_retries=3) as client:
        if "max_turns" in budgets or "max_tokens" in budgets:
            await client.chat.completions.create(model="m", messages=HELLO)
        for _ in range(2):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=HELLO)
            assert caught.value.code in ("rollout_truncated", "context_length_exceeded")
    assert await count_rejected() == rejected + 2, "a request was retried"


# ---- automatic retries


@asynccontextmanager
async def drop_first_responses(port: int, count: int) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a proxy to the gateway that drops its first `count` responses; yield its port and the request heads."""
    heads: list[bytes] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            lost = len(heads) <= count
            size = int(head.lower().partition(b"content-length:")[2].split()[0])
            outer.write(
                head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + await reader.readexactly(size)
            )
            answer = await inner.read()
            if not lost:
                writer.write(answer)
                await writer.drain()
        finally:
            outer.close()
            writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heads


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_automatic_retry_of_a_lost_response_replays_it(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, stream: bool
) -> None:
    upstream.then(ScriptedReply("the first", calls=CALLS))
    async with drop_first_responses(gateway.port, 1) as (port, heads):
        base = f"http://127.0.0.1:{port}{session.path}"
        async with AsyncOpenAI(base_url=base, api_key=session.secret, max_retries=2) as client:
            if stream:
                async with client.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as events:
                    answer: Any = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
    assert answer.choices[0].message.content == "the first"
    assert [call.id for call in answer.choices[0].message.tool_calls] == [call.id for call in CALLS]
    assert [b"x-stainless-retry-count: 1" in head.lower() for head in heads] == [False, True]
    assert (len(upstream.calls), len(await gateway.turns(session))) == (1, 1)


async def test_automatic_retry_of_an_unavailable_upstream_calls_it_again(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream
) -> None:
    upstream.then(ScriptedReply(error=UpstreamError("busy", cause="upstream.overloaded"), after=0))

    def use_client(client: OpenAI) -> Any:
        return client.chat.completions.create(model="m", messages=HELLO).choices[0].message.content

    assert await run_synchronous_client(gateway, session, use_client, max_retries=1) == "the answer"
    assert (len(upstream.calls), len(await gateway.turns(session))) == (2, 1)


# ---- tool calls in streams


def merged_by_last_index(chunks: list[Any]) -> list[tuple[str, str, str]]:
    """Merge the tool calls of a stream as llama-index does.

    It uses only the first entry of a chunk, and starts a new call when the index differs from the latest call.
    """
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for entry in (choice.delta.tool_calls or [])[:1]:
                if not calls or calls[-1]["index"] != entry.index:
                    calls.append({"index": entry.index, "id": "", "name": "", "arguments": ""})
                calls[-1]["id"] += entry.id or ""
                calls[-1]["name"] += entry.function.name or ""
                calls[-1]["arguments"] += entry.function.arguments or ""
    return [(call["id"], call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize(
    "pieces",
    [
        (Delta(tool_calls=tuple(CallDelta(n, c.id, c.name, c.arguments) for n, c in enumerate(CALLS))),),
        (
            Delta(
                content="so:",
                tool_calls=(
                    CallDelta(0, "call_1", "look"),
                    CallDelta(0, arguments='{"at": '),
                    CallDelta(0, arguments="[1, 2]}"),
                    CallDelta(1, "call_2", "stop", "{"),
                    CallDelta(1, arguments="}"),
                ),
            ),
        ),
    ],
    ids=["whole-calls", "several-pieces"],
)
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "extra_body": {"return_token_ids": True}}])
async def test_stream_chunk_has_at_most_one_tool_call_entry(
    gateway: InProcessGateway,
    session: RegisteredSession,
    upstream: ScriptedUpstream,
    pieces: tuple[Delta, ...],
    fields: dict[str, Any],
) -> None:
    deltas = tuple(
        msgspec.structs.replace(one, sampled=ints([7, 8]), logprobs=floats([-1.0] * 2)) for one in pieces
    )
    upstream.default = ScriptedReply(
        "", calls=CALLS, deltas=deltas, reply_fields={"sampled": ints([7, 8]), "logprobs": floats([-1.0] * 2)}
    )
    async with openai_client(gateway, session) as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, stream=True, **fields
        )
        chunks = [chunk async for chunk in stream]
        entries = [chunk.choices[0].delta.tool_calls or [] for chunk in chunks if chunk.choices]
        assert max(map(len, entries)) == 1
        assert merged_by_last_index(chunks) == [(call.id, call.name, call.arguments) for call in CALLS]
        if fields:
            assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])] == [7, 8]
            assert (
                sum(len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices[0].logprobs) == 2
            )
        async with client.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as events:
            final = await events.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [
        (call.id, call.name, call.arguments) for call in CALLS
    ]
