"""`chat()` accepts OpenAI-style dictionaries as well as structs, and its errors name the invalid field."""

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery import Context, Engine, Environment
from rookery.core import Failed, Message, Sampling, ToolCall, ToolSchema, label
from rookery.gateway import ChatArgumentError
from rookery.gateway.chat_arguments import read_messages, read_sampling, read_tool_choice, read_tools
from tests.servers import Answer, ModelServer

PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "python", "description": "Runs it.", "parameters": PARAMETERS}}
SCHEMA = ToolSchema("python", "Runs it.", PARAMETERS)
CALL = {"id": "c1", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}


def test_dictionaries_are_equivalent_to_messages() -> None:
    given: list[Message | dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        Message("user", "6 * 7?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "42", "reasoning_content": "easy"},
    ]
    assert read_messages(given) == (
        Message("system", "be brief"),
        Message("user", "6 * 7?"),
        Message("assistant", None, (ToolCall("c1", "python", '{"code": "1"}'),)),
        Message("tool", ({"type": "text", "text": "42"},), tool_call_id="c1"),
        Message("assistant", "42", reasoning="easy"),
    )


def test_dictionary_message_accepts_the_tool_calls_of_a_reply() -> None:
    call = ToolCall("c1", "python", "{}")
    (parsed,) = read_messages([{"role": "assistant", "content": "", "tool_calls": (call,)}])
    assert parsed.tool_calls == (call,)


def test_tool_arguments_given_as_a_dictionary_become_json() -> None:
    call = {"function": {"name": "python", "arguments": {"code": "1"}}}
    (parsed,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert parsed.tool_calls == (ToolCall("call_0", "python", '{"code":"1"}'),)


@pytest.mark.parametrize("tools", [[TOOL], [TOOL["function"]], [{"type": "function", **TOOL["function"]}]])  # type: ignore[dict-item]
def test_tools_are_accepted_with_and_without_the_function_wrapper(tools: list[Any]) -> None:
    parsed = read_tools(tools)
    assert parsed.schemas == (SCHEMA,)
    assert parsed.scope == read_tools([SCHEMA]).scope
    assert [msgspec.json.decode(raw) for raw in parsed.raw] == [TOOL]


def test_tools_of_both_kinds_can_be_mixed() -> None:
    other = ToolSchema("other", "", {})
    assert read_tools([TOOL, other]).schemas == (SCHEMA, other)


def test_tool_choice_is_a_name_or_a_dictionary() -> None:
    tools = read_tools([TOOL])
    assert read_tool_choice({"type": "function", "function": {"name": "python"}}, tools) == "python"
    assert read_tool_choice("required", tools) == "required"
    with pytest.raises(ChatArgumentError) as error:
        read_tool_choice("ptyhon", tools)
    assert error.value.field == "tool_choice"


def test_sampling_accepts_openai_and_engine_option_names() -> None:
    parsed = read_sampling(
        {
            "temperature": 0,
            "top_p": 0.5,
            "max_completion_tokens": 7,
            "stop": "END",
            "seed": 3,
            "min_p": 0.1,
            "extra_body": {"top_a": 1},
            "presence_penalty": None,
        }
    )
    assert parsed == Sampling(
        temperature=0.0, top_p=0.5, max_tokens=7, stop=("END",), seed=3, extra={"min_p": 0.1, "top_a": 1}
    )


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (None, "messages"),
        ([Message("user", "x"), "y"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "contents": "x"}], "messages[0].contents"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image", "data": object()}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{1: 2}], "messages[0]"),
    ],
)
def test_invalid_message_error_names_the_field(messages: Any, field: str) -> None:
    with pytest.raises(ChatArgumentError) as error:
        read_messages(messages)
    assert error.value.field == field
    assert (error.value.code, error.value.fault) == ("bug.environment", "bug")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ({"name": "x"}, "tools"),
        (["python"], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "x", "description": 3}}], "tools[0].function.description"),
        ([SCHEMA, {"name": "x", "parameters": []}], "tools[1].parameters"),
        ([{"name": "x", "paramters": {}}], "tools[0].paramters"),
        ([{"name": "x", "parameters": {"default": object()}}], "tools[0]"),
    ],
)
def test_invalid_tool_error_names_the_field(tools: Any, field: str) -> None:
    with pytest.raises(ChatArgumentError) as error:
        read_tools(tools)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ("hot", "sampling"),
        ({"temprature": 1}, "sampling.temprature"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"temperature": -1}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"max_tokens": 1.5}, "sampling.max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "sampling.max_completion_tokens"),
        ({"stop": ["x", 3]}, "sampling.stop[1]"),
        ({"seed": True}, "sampling.seed"),
        ({"n": 2}, "sampling.n"),
        ({"extra": 3}, "sampling.extra"),
        ({"logit_bias": object()}, "sampling.logit_bias"),
    ],
)
def test_invalid_sampling_error_names_the_field(sampling: Any, field: str) -> None:
    with pytest.raises(ChatArgumentError) as error:
        read_sampling(sampling)
    assert error.value.field == field


class DictionaryEnvironment(Environment):
    """Environment of two turns that calls the policy with dictionaries or with structs."""

    def __init__(self, plain: bool = True) -> None:
        self.plain = plain

    async def run(self, ctx: Context) -> None:
        messages: list[Any] = [{"role": "user", "content": ctx.task.text}]
        tools: list[Any] = [TOOL]
        sampling: Any = {"temperature": 0, "max_tokens": 8}
        if not self.plain:
            messages, tools, sampling = list(ctx.task.prompt), [SCHEMA], Sampling(temperature=0, max_tokens=8)
        reply = await ctx.policy.chat(messages, tools=tools, sampling=sampling)
        message, follow_up = reply.message, Message("user", "go on")
        if self.plain:
            calls = [
                {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
            ]
            messages += [{"role": "assistant", "content": message.content, "tool_calls": calls}]
            messages += [{"role": "user", "content": "go on"}]
        else:
            messages += [message, follow_up]
        await ctx.policy.chat(messages, tools=tools, sampling=sampling)

    async def score(self, ctx: Context) -> float:
        return 1.0


@pytest.mark.parametrize("record", ["tokens", "messages"])
async def test_embedded_policy_samples_the_same_for_dictionaries_and_structs(record: Any, tmp_path: Path) -> None:
    """Compare tokens: the prompt contains the tools, so missing tools would change it."""
    parsed = []
    for plain in (True, False):
        env = DictionaryEnvironment(plain=plain)
        async with Engine(env, policy="embedded", runners=0, record=record, out=tmp_path / "runs") as engine:
            (group,) = [group async for group in engine.groups([{"prompt": "6 * 7?"}], k=1)]
        (rollout,) = group.rollouts
        assert label(rollout.outcome) == "completed", rollout.outcome
        parsed.append([(segment.tokens, segment.mask) for segment in rollout.segments])
    assert parsed[0] == parsed[1]
    assert len(parsed[0]) == 1, "the second turn extends the first"


async def test_dictionaries_reach_an_http_server_in_openai_format(tmp_path: Path) -> None:
    async with ModelServer(Answer("ok", prompt_ids=[1, 2], ids=[3], logprobs=[-1.0])) as server:
        async with Engine(DictionaryEnvironment(), policy=server.url, runners=0, out=tmp_path / "runs") as engine:
            (group,) = [group async for group in engine.groups([{"prompt": "6 * 7?"}], k=1)]
        assert label(group.rollouts[0].outcome) == "completed", group.rollouts[0].outcome
        body = [request.body for request in server.requests if "messages" in (request.body or {})][-1]
    assert body["tools"] == [TOOL]
    assert (body["temperature"], body["max_tokens"]) == (0, 8)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]


class InvalidDictionaryEnvironment(DictionaryEnvironment):
    async def run(self, ctx: Context) -> None:
        await ctx.policy.chat([{"role": "user", "text": "x"}])


async def test_invalid_dictionary_fails_the_rollout_as_an_environment_bug(tmp_path: Path) -> None:
    async with Engine(
        InvalidDictionaryEnvironment(), policy="embedded", runners=0, out=tmp_path / "runs"
    ) as engine:
        (group,) = [group async for group in engine.groups([{"prompt": "x"}], k=1)]
    outcome = group.rollouts[0].outcome
    assert isinstance(outcome, Failed)
    assert (outcome.cause, outcome.fault) == ("bug.environment", "bug")
    assert "messages[0].text" in outcome.detail
