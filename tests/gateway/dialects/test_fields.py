"""Every field of a request is supported, refused or known to be harmless, in every dialect."""

import logging
import typing
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

from rookery.core import ToolCall
from rookery.gateway.dialects import BadRequestError, chat, completions, load_dialects, messages, responses, shared
from tests.gateway.kit import Gateway, Registered, served
from tests.gateway.scripted import Play, Scripted

HELLO: Any = [{"role": "user", "content": "hello"}]
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO},
    "completions": {"prompt": [1]},
    "messages": {"messages": HELLO, "max_tokens": 9},
    "responses": {"input": "hello"},
}
PATHS = {"chat": "/chat/completions", "completions": "/completions", "messages": "/messages"} | {
    "responses": "/responses"
}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {}}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"audio": {"voice": "alloy", "format": "wav"}}),
    ("chat", {"modalities": ["text", "audio"]}),
    ("chat", {"functions": [{"name": "look"}]}),
    ("chat", {"function_call": {"name": "look"}}),
    ("chat", {"web_search_options": {"search_context_size": "low"}}),
    ("chat", {"moderation": {"model": "m"}}),
    ("chat", {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}),
    ("completions", {"suffix": "x"}),
    ("completions", {"best_of": 3}),
    ("messages", {"container": "c_1"}),
    ("messages", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    ("messages", {"compaction": {"type": "x"}}),
    ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("messages", {"output_format": {"type": "regex"}}),
    ("messages", {"thinking": {"type": "of_tomorrow"}}),
    ("responses", {"prompt": {"id": "pmpt_1"}}),
    ("responses", {"context_management": [{"type": "compaction"}]}),
    ("responses", {"background": True}),
    ("responses", {"conversation": "conv_1"}),
    ("responses", {"text": {"format": {"type": "grammar"}}}),
    ("responses", {"tool_choice": {"type": "web_search"}}),
    (
        "responses",
        {
            "tools": [{"type": "function", "name": name} for name in ("look", "stop")],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            },
        },
    ),
]
HARMLESS: list[tuple[str, dict[str, Any]]] = [
    (
        "chat",
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"},
    ),
    ("chat", {"modalities": ["text"], "functions": [], "audio": None, "parallel_tool_calls": True}),
    ("chat", {"prediction": {"type": "content", "content": "x"}, "prompt_cache_key": "k", "verbosity": "low"}),
    ("completions", {"user": "u"}),
    ("messages", {"metadata": {"user_id": "u"}, "service_tier": "auto", "thread": None, "mcp_servers": []}),
    ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    ("responses", {"user": "u", "reasoning": {"effort": "high"}, "truncation": "auto", "max_tool_calls": 3}),
    ("responses", {"client_metadata": {"a": "b"}, "stream_options": {"include_obfuscation": False}}),
]


def ask(dialect: str, **fields: Any) -> Any:
    return load_dialects()[dialect].parse_request(msgspec.json.encode(LEAST[dialect] | fields))


@pytest.mark.parametrize(("dialect", "fields"), REFUSED)
def test_a_field_that_changes_the_meaning_and_is_not_supported_is_refused(
    dialect: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError) as raised:
        ask(dialect, **fields)
    assert (raised.value.where or "").split(".")[0] in fields


@pytest.mark.parametrize(("dialect", "fields"), HARMLESS)
def test_a_harmless_field_changes_nothing(dialect: str, fields: dict[str, Any]) -> None:
    given, plain = ask(dialect, **fields), ask(dialect)
    assert (given.messages, given.tools, given.sampling) == (plain.messages, plain.tools, plain.sampling)


def names(*params: Any) -> set[str]:
    found: set[str] = set()
    for one in params:
        found |= set(typing.get_type_hints(one, include_extras=True))
    return found


def test_every_field_of_the_providers_libraries_is_classified() -> None:
    known = [
        (chat._Request, names(chat_params.CompletionCreateParamsNonStreaming)),
        (completions._Request, names(completion_create_params.CompletionCreateParamsNonStreaming)),
        (responses._Request, names(response_create_params.ResponseCreateParamsNonStreaming)),
        (
            messages._Request,
            names(messages_params.MessageCreateParamsNonStreaming, beta_params.MessageCreateParamsNonStreaming),
        ),
    ]
    for request, fields in known:
        own = {field.encode_name for field in msgspec.structs.fields(request)}
        assert fields - own == set(), request


def test_a_field_that_no_provider_has_is_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_warned", set())
    with caplog.at_level(logging.WARNING, "rookery.gateway"):
        for dialect in LEAST:
            for _ in range(2):
                assert ask(dialect, of_tomorrow=[1], nothing=None).messages == ask(dialect).messages
    assert len(caplog.records) == 1
    assert caplog.records[0].args == ("of_tomorrow",)


@pytest.mark.parametrize("dialect", ["messages", "responses", "chat"])
def test_one_call_at_most_is_a_sampling_option_and_more_are_the_default(dialect: str) -> None:
    tools: dict[str, Any] = {
        "messages": [{"name": "look", "input_schema": {}}],
        "responses": [{"type": "function", "name": "look"}],
        "chat": [FUNCTION],
    }
    for one in (True, False, None):
        wish: dict[str, Any] = {"parallel_tool_calls": None if one is None else not one}
        if dialect == "messages":
            wish = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": one}}
        extra = ask(dialect, tools=tools[dialect], **wish).sampling.extra
        assert extra == ({"parallel_tool_calls": False} if one else {})


@pytest.mark.parametrize(
    "thread",
    [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}],
    ids=["create", "continue"],
)
async def test_a_thread_is_refused_with_the_code_that_the_libraries_know(
    gateway: Gateway, session: Registered, upstream: Scripted, thread: Any
) -> None:
    async with AsyncAnthropic(base_url=f"{gateway.url}{session.path}", api_key=session.secret) as own:
        with pytest.raises(anthropic.BadRequestError) as raised:
            await own.beta.messages.create(model="m", max_tokens=9, messages=HELLO, thread=thread)
    assert raised.value.error_code == "thread_unsupported_request"
    assert upstream.calls == []


async def test_anthropics_tool_runner_falls_back_to_whole_conversations(tmp_path: Path) -> None:
    @beta_async_tool
    async def look(at: str) -> str:
        """Looks."""
        return f"seen {at}"

    upstream = Scripted("done")
    upstream.then(Play("", calls=(ToolCall("call_1", "look", '{"at":"a"}'),)))
    async with served(tmp_path, upstream) as gateway:
        session = await gateway.register()
        async with AsyncAnthropic(base_url=f"{gateway.url}{session.path}", api_key=session.secret) as own:
            runner = own.beta.messages.tool_runner(model="m", max_tokens=99, messages=HELLO, tools=[look])
            final = await runner.until_done()
        assert [block.text for block in final.content if block.type == "text"] == ["done"]
        roles = [
            message["role"] if isinstance(message, dict) else message.role
            for message in (
                msgspec.json.decode(one) if isinstance(one, msgspec.Raw) else one
                for one in upstream.calls[-1].request.messages
            )
        ]
        assert roles == ["user", "assistant", "tool"]
        assert [turn.get("parent") for turn in await gateway.turns(session)] == [None, 0]
