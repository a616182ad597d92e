"""The embedded policy over HTTP: the same replies as through the library, and error responses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from rookery.core import Message, Sampling, ToolSchema, Truncation, ints
from rookery.core.seeds import derive_seed
from rookery.upstreams import ModelReply, ModelRequest, UpstreamConfig
from rookery.upstreams.embedded import chat
from rookery.upstreams.openai import OpenAIUpstream
from rookery.upstreams.protocol import ToolSet
from tests.upstreams.embedded_kit import CONTEXT, HI, LiveServer, random_weights, serving

MESSAGES = (Message("user", "What is 7 + 5?"),)
TOOLS = (
    ToolSchema("python", "Runs a program.", {"type": "object", "properties": {"code": {"type": "string"}}}),
    ToolSchema("search", "", {}),
)
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS
]
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {"messages": MESSAGES},
    "tools": {"messages": MESSAGES, "tools": ToolSet(TOOLS)},
    "required": {"messages": MESSAGES, "tools": ToolSet(TOOLS), "tool_choice": "required"},
    "named": {"messages": MESSAGES, "tools": ToolSet(TOOLS), "tool_choice": "python"},
    "none": {"messages": MESSAGES, "tools": ToolSet(TOOLS), "tool_choice": "none"},
    "ids": {"tokens": ints(chat.prompt(MESSAGES).ids)},
    "shaped": {"messages": MESSAGES, "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40}},
    "greedy": {"messages": MESSAGES, "sampling": {"temperature": 0.0}},
    "conversation": {
        "messages": (
            Message("system", "Be brief."),
            *MESSAGES,
            Message("assistant", None, (chat.parse_call('python{"code":"7+5"}', "call_9_0"),)),
            Message("tool", "12", tool_call_id="call_9_0"),
        ),
        "tools": ToolSet(TOOLS),
    },
}


def make_request(name: str, seed: int, **sampling: Any) -> ModelRequest:
    fields: dict[str, Any] = dict(REQUESTS[name])
    drawn = {"seed": seed, "max_tokens": 60, **fields.pop("sampling", {}), **sampling}
    return ModelRequest(model="", sampling=Sampling(**drawn), **fields)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LiveServer]:
    async with serving(random_weights(tmp_path / "small")) as running:
        yield running


@pytest.fixture
async def client(server: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def comparable_fields(reply: ModelReply) -> tuple[object, ...]:
    return (
        reply.message,
        reply.finish,
        reply.prompt,
        reply.sampled,
        reply.logprobs,
        reply.version,
        reply.prompt_tokens,
        reply.sampled_tokens,
    )


@pytest.mark.parametrize("name", REQUESTS)
async def test_same_prompt_and_seed_same_reply_through_server_and_library(name: str, server: LiveServer) -> None:
    remote = OpenAIUpstream(UpstreamConfig(urls=(server.url,)))
    try:
        assert (await remote.check()).context == CONTEXT
        for seed in range(4):
            request = make_request(name, seed)
            here = await server.upstream.complete(request, timeout=60)
            there = await remote.complete(request, timeout=60)
            assert there.version == 1
            if name == "ids":  # only the text; the library also parses calls
                there = _with(there, message=here.message, finish=here.finish)
            assert comparable_fields(there) == comparable_fields(here)
    finally:
        await remote.close()


def _with(reply: ModelReply, **fields: Any) -> ModelReply:
    import msgspec

    return msgspec.structs.replace(reply, **fields)


async def test_stop_string_cuts_the_reply_the_same_way(server: LiveServer) -> None:
    remote = OpenAIUpstream(UpstreamConfig(urls=(server.url,)))
    try:
        whole = await server.upstream.complete(make_request("greedy", 1), timeout=60)
        assert isinstance(whole.message.content, str)
        stop = next(c for c in whole.message.content[3:] if c.isascii())
        request = make_request("greedy", 1, stop=("never", stop))
        here = await server.upstream.complete(request, timeout=60)
        assert here.sampled_tokens < whole.sampled_tokens
        assert comparable_fields(await remote.complete(request, timeout=60)) == comparable_fields(here)
    finally:
        await remote.close()


async def test_full_context_is_reported_in_a_form_that_the_client_recognises(server: LiveServer) -> None:
    remote = OpenAIUpstream(UpstreamConfig(urls=(server.url,)))
    long = ModelRequest(model="", messages=(Message("user", "x" * CONTEXT),))
    try:
        for most in (10, 10 * CONTEXT):
            with pytest.raises(Truncation) as caught:
                await remote.complete(
                    ModelRequest(model="", messages=long.messages, sampling=Sampling(max_tokens=most)), timeout=60
                )
            assert caught.value.reason == "context"
    finally:
        await remote.close()
    status, body, _ = await server.post(
        "/chat/completions", {"messages": [{"role": "user", "content": "x" * 999}]}
    )
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


# ------------------------------------------------------------------------------------------- OpenAI's SDK


async def test_openai_sdk_reads_answers_tools_logprobs_and_usage(
    client: openai.AsyncOpenAI, server: LiveServer
) -> None:
    models = await client.models.list()
    assert [(model.id, (model.model_extra or {})["max_model_len"]) for model in models.data] == [
        ("small", CONTEXT)
    ]
    assert (await client.models.retrieve("small")).owned_by == "rookery"
    raw = await client.chat.completions.with_raw_response.create(
        model="small",
        messages=HI,
        tools=OPENAI_TOOLS,
        tool_choice={"type": "function", "function": {"name": "python"}},
        seed=5,
        max_completion_tokens=40,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    answer = raw.parse()
    assert raw.headers["X-Weight-Version"] == "1"
    assert raw.headers["Server"] == "rookery"
    here = await server.upstream.complete(make_request("named", 5, max_tokens=40), timeout=60)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.id, call.function.name, call.function.arguments) == (
        here.message.tool_calls[0].id,
        here.message.tool_calls[0].name,
        here.message.tool_calls[0].arguments,
    )
    assert choice.finish_reason == here.finish
    assert choice.message.content is None
    extra = answer.model_extra or {}
    assert extra["weight_version"] == 1
    assert ints(extra["prompt_token_ids"]) == here.prompt
    assert ints((choice.model_extra or {})["token_ids"]) == here.sampled
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) == here.sampled_tokens
    assert all((entry.bytes is None) == (entry.token in chat.NAMES.values()) for entry in entries[-1:])
    assert answer.usage is not None
    assert answer.usage.total_tokens == here.prompt_tokens + here.sampled_tokens
    assert answer.usage.prompt_tokens_details is not None
    again = await server.ask(tools=OPENAI_TOOLS, tool_choice="required", max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def test_stream_helper_of_the_sdk_gives_the_unstreamed_reply(
    client: openai.AsyncOpenAI,
) -> None:
    for seed, choice in ((1, "auto"), (2, "required"), (3, "required")):
        options: dict[str, Any] = {"model": "small", "messages": HI, "tools": OPENAI_TOOLS, "tool_choice": choice}
        options |= {"seed": seed, "max_tokens": 80}
        plain = await client.chat.completions.create(**options)
        async with client.chat.completions.stream(**options) as stream:
            final = await stream.get_final_completion()
        left, right = plain.choices[0], final.choices[0]
        assert right.finish_reason == left.finish_reason
        assert (right.message.content or None) == (left.message.content or None)
        calls = [
            [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
            for message in (left.message, right.message)
        ]
        assert calls[0] == calls[1]


async def test_completions_take_text_and_ids_one_or_several(
    client: openai.AsyncOpenAI, server: LiveServer
) -> None:
    text = await client.completions.create(model="small", prompt="7 + 5 =", seed=1, max_tokens=8, logprobs=0)
    ids = [chat.BEGIN, *b"7 + 5 ="]
    same = await client.completions.create(model="", prompt=ids, seed=1, max_tokens=8)
    assert text.choices[0].text == same.choices[0].text
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert text.usage is not None
    assert len(logprobs.token_logprobs or []) == len(logprobs.tokens or []) == text.usage.completion_tokens
    several = await client.completions.create(
        model="",
        prompt=[ids, [*ids, 49]],
        seed=1,
        n=2,
        max_tokens=8,
        extra_body={"return_token_ids": True},
    )
    extras = [choice.model_extra or {} for choice in several.choices]
    assert [len(extra["prompt_token_ids"]) for extra in extras] == [8, 8, 9, 9]
    assert several.choices[0].text == text.choices[0].text
    assert several.usage is not None
    assert several.usage.prompt_tokens == 17
    status, body, _ = await server.post(f"{server.root}/completions", {"prompt": ["a", "b"], "max_tokens": 1})
    assert (status, len(body["choices"])) == (200, 2)


async def test_choices_have_seeds_derived_from_the_request(server: LiveServer) -> None:
    several = await server.ask(n=5, seed=11, max_tokens=30, return_token_ids=True)
    seeds = [11, *(derive_seed(11, "choice", number) for number in range(1, 5))]
    assert [choice["index"] for choice in several["choices"]] == list(range(5))
    for choice, seed in zip(several["choices"], seeds, strict=True):
        alone = await server.ask(seed=seed, max_tokens=30, return_token_ids=True)
        assert alone["choices"][0]["token_ids"] == choice["token_ids"]
        assert alone["choices"][0]["message"] == choice["message"]
    assert several["usage"]["prompt_tokens"] == len(several["prompt_token_ids"])
    unseeded = [await server.ask(max_tokens=30, return_token_ids=True) for _ in range(2)]
    assert unseeded[0]["choices"][0]["token_ids"] != unseeded[1]["choices"][0]["token_ids"]


# ------------------------------------------------------------------------------------------------- refusals

USER = {"role": "user", "content": "hi"}
BAD: list[tuple[Any, str, str | None]] = [
    (b"nonsense", "JSON", None),
    (b"", "JSON", None),
    (b'{"x": ' + b"[" * 100_000, "JSON", None),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "JSON", None),
    ([], "object", None),
    ({}, "messages", None),
    ({"messages": []}, "messages", "messages"),
    ({"messages": "hi"}, "array", "messages"),
    ({"messages": [{"role": "oracle", "content": "hi"}]}, "oracle", "messages[0].role"),
    ({"messages": [{"content": "hi"}]}, "role", "messages[0]"),
    ({"messages": [{"role": "user", "content": 3}]}, "", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "'image_url'",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "", "messages[0].content[0]"),
    ({"messages": [USER], "temperature": "hot"}, "float", "temperature"),
    ({"messages": [USER], "temperature": -1}, ">= 0", "temperature"),
    ({"messages": [USER], "top_p": 0}, "> 0", "top_p"),
    ({"messages": [USER], "top_k": -7}, ">= -1", "top_k"),
    ({"messages": [USER], "n": 0}, ">= 1", "n"),
    ({"messages": [USER], "n": 65}, "<= 64", "n"),
    ({"messages": [USER], "n": True}, "int", "n"),
    ({"messages": [USER], "seed": "x"}, "int", "seed"),
    ({"messages": [USER], "max_tokens": 0}, ">= 1", "max_tokens"),
    ({"messages": [USER], "max_completion_tokens": -1}, ">= 1", "max_completion_tokens"),
    ({"messages": [USER], "stop": 3}, "", "stop"),
    ({"messages": [USER], "stop": [""]}, "512", "stop"),
    ({"messages": [USER], "stop": ["x"] * 17}, "16", "stop"),
    ({"messages": [USER], "stream": "yes"}, "bool", "stream"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 5}, "top_logprobs", "top_logprobs"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice", "tool_choice"),
    ({"messages": [USER], "tools": OPENAI_TOOLS, "tool_choice": "some"}, "'some'", "tool_choice"),
    (
        {
            "messages": [USER],
            "tools": OPENAI_TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "delete"}},
        },
        "'delete'",
        "tool_choice",
    ),
    ({"messages": [USER], "tools": [{"type": "function", "function": {}}]}, "name", "tools[0].function"),
    (
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": 3}}]},
        "str",
        "tools[0].function.name",
    ),
    ({"messages": [USER], "tools": "python"}, "array", "tools"),
]
BAD_COMPLETIONS: list[tuple[Any, str, str | None]] = [
    ({}, "prompt", None),
    ({"prompt": []}, "prompt", "prompt"),
    ({"prompt": [[]]}, "prompt[0]", "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt", "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1]"),
    ({"prompt": [-1]}, str(2**31 - 1), "prompt"),
    ({"prompt": [1 << 40]}, str(2**31 - 1), "prompt"),
    ({"prompt": [271, 272]}, " 271", None),
    ({"prompt": ["a"] * 13, "n": 5}, "64", "prompt"),
    ({"prompt": "a", "logprobs": 3}, "logprobs", "logprobs"),
    ({"prompt": "a", "echo": True}, "echo", "echo"),
    ({"prompt": "a", "best_of": 4}, "best_of", "best_of"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, Any]]:
    """Every bad request gets an error, streamed or not, and the server continues afterwards."""

    async def gather() -> list[tuple[int, Any]]:
        found = []
        async with serving(random_weights(tmp_path_factory.mktemp("bad") / "small")) as server:
            for path, table in (("/chat/completions", BAD), ("/completions", BAD_COMPLETIONS)):
                for body, *_ in table:
                    found.append((await server.post(path, body))[:2])
                    if isinstance(body, dict) and "stream" not in body:
                        streamed = await server.post(path, {**body, "stream": True})
                        assert streamed[:2] == found[-1], "the request is refused before the stream begins"
            await server.ask(max_tokens=1)
            assert await server.health() == (0, 0)
        return found

    return asyncio.run(gather())


@pytest.mark.parametrize("number", range(len(BAD) + len(BAD_COMPLETIONS)))
def test_invalid_fields_are_400_and_name_the_field(number: int, answers: list[tuple[int, Any]]) -> None:
    _, named, param = (BAD + BAD_COMPLETIONS)[number]
    status, body = answers[number]
    assert status == 400
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert body["error"]["param"] == param
    assert "`" not in body["error"]["message"]


async def test_unknown_paths_methods_and_large_bodies_are_errors_in_the_same_format(
    server: LiveServer, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")
    status, body, _ = await server.post("/nothing", {})
    assert (status, "POST /v1/nothing" in body["error"]["message"]) == (404, True)
    async with server.http.get(f"{server.url}/chat/completions") as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "POST"
        assert "error" in orjson.loads(await answer.read())
    status, body, _ = await server.post("/chat/completions", b" " * (9 << 20))
    assert (status, "8 MiB" in body["error"]["message"]) == (413, True)
    status, body, _ = await server.post("/chat/completions", b"no gzip", **{"Content-Encoding": "gzip"})
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    async with server.http.head(f"{server.root}/") as answer:
        assert answer.status == 200
        assert answer.headers["Server"] == "rookery"


async def test_unknown_fields_and_tools_are_ignored(server: LiveServer) -> None:
    body = {
        "model": None,
        "metadata": {"a": [1]},
        "store": False,
        "stream_options": None,
        "tools": [{"type": "web_search"}, *OPENAI_TOOLS],
        "stop": None,
        "temperature": None,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c", "cache_control": {}},
        ],
        "return_token_ids": True,
        "max_tokens": 1,
    }
    answer = await server.ask(**body)
    assert bytes(token for token in answer["prompt_token_ids"] if token < 256) == b"python(code)\nsearch()abc"


async def test_internal_error_is_500_without_details(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(server.upstream, "prepare", broken)
    status, body, _ = await server.post("/chat/completions", {"messages": HI})
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "secret" not in body["error"]["message"]
    assert "a secret" in caplog.text
