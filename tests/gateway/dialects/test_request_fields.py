"""Every request field is supported, rejected or known to be harmless, in every dialect."""

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
from tests.gateway.kit import InProcessGateway, RegisteredSession, run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream

HELLO: Any = [{"role": "user", "content": "hello"}]
MINIMAL_BODIES: dict[str, dict[str, Any]] = {
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


def parse(dialect: str, **fields: Any) -> Any:
    return load_dialects()[dialect].parse_request(msgspec.json.encode(MINIMAL_BODIES[dialect] | fields))


@pytest.mark.parametrize(("dialect", "fields"), REFUSED)
def test_unsupported_field_that_changes_the_meaning_is_rejected(dialect: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as raised:
        parse(dialect, **fields)
    assert (raised.value.where or "").split(".")[0] in fields


@pytest.mark.parametrize(("dialect", "fields"), HARMLESS)
def test_harmless_field_changes_nothing(dialect: str, fields: dict[str, Any]) -> None:
    parsed, plain = parse(dialect, **fields), parse(dialect)
    assert (parsed.messages, parsed.tools, parsed.sampling) == (plain.messages, plain.tools, plain.sampling)


def names(*params: Any) -> set[str]:
    names_found: set[str] = set()
    for one in params:
        names_found |= set(typing.get_type_hints(one, include_extras=True))
    return names_found


def test_every_field_of_the_provider_libraries_is_known() -> None:
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
        known_fields = {field.encode_name for field in msgspec.structs.fields(request)}
        assert fields - known_fields == set(), request


def test_unknown_field_is_ignored_with_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_warned", set())
    with caplog.at_level(logging.WARNING, "rookery.gateway"):
        for dialect in MINIMAL_BODIES:
            for _ in range(2):
                assert parse(dialect, of_tomorrow=[1], nothing=None).messages == parse(dialect).messages
    assert len(caplog.records) == 1
    assert caplog.records[0].args == ("of_tomorrow",)


@pytest.mark.parametrize("dialect", ["messages", "responses", "chat"])
def test_disabled_parallel_calls_become_a_sampling_option(dialect: str) -> None:
    tools: dict[str, Any] = {
        "messages": [{"name": "look", "input_schema": {}}],
        "responses": [{"type": "function", "name": "look"}],
        "chat": [FUNCTION],
    }
    for one in (True, False, None):
        choice_fields: dict[str, Any] = {"parallel_tool_calls": None if one is None else not one}
        if dialect == "messages":
            choice_fields = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": one}}
        extra = parse(dialect, tools=tools[dialect], **choice_fields).sampling.extra
        assert extra == ({"parallel_tool_calls": False} if one else {})


@pytest.mark.parametrize(
    "thread",
    [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}],
    ids=["create", "continue"],
)
async def test_thread_is_rejected_with_the_code_that_the_library_knows(
    gateway: InProcessGateway, session: RegisteredSession, upstream: ScriptedUpstream, thread: Any
) -> None:
    async with AsyncAnthropic(base_url=f"{gateway.url}{session.path}", api_key=session.secret) as client:
        with pytest.raises(anthropic.BadRequestError) as raised:
            await client.beta.messages.create(model="m", max_tokens=9, messages=HELLO, thread=thread)
    assert raised.value.error_code == "thread_unsupported_request"
    assert upstream.calls == []


async def test_anthropic_tool_runner_falls_back_to_whole_conversations(tmp_path: Path) -> None:
    @beta_async_tool
    async def look(at: str) -> str:
        """Looks."""
        return f"seen {at}"

    upstream = ScriptedUpstream("done")
    upstream.then(ScriptedReply("", calls=(ToolCall("call_1", "look", '{"at":"a"}'),)))
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register()
        async with AsyncAnthropic(base_url=f"{gateway.url}{session.path}", api_key=session.secret) as client:
            runner = client.beta.messages.tool_runner(model="m", max_tokens=99, messages=HELLO, tools=[look])
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
