"""The unmodified openai-agents library: an agent with a tool, a sub-agent, and a conversation of two turns."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool

from rookery.core import ToolCall
from rookery.gateway.chat_renderers.embedded_renderer import EmbeddedRenderer
from rookery.upstreams.embedded import chat
from tests.gateway.dialects.kit import check_exact_turns, run_token_shard
from tests.gateway.kit import run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream
from tests.gateway.session_kit import TokenScriptUpstream
from tests.gateway.test_openai_client import openai_client

QUIET = RunConfig(tracing_disabled=True)


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize("streamed", [False, True])
async def test_agent_calls_its_tool_and_continues(tmp_path: Path, streamed: bool) -> None:
    upstream = ScriptedUpstream()
    upstream.then(
        ScriptedReply("", reasoning="I must add.", calls=(ToolCall("c1", "add", '{"a": 2,  "b": 3}'),)),
        ScriptedReply("It is 5."),
        ScriptedReply("You are welcome."),
    )
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        async with openai_client(gateway, session) as client:
            model = OpenAIResponsesModel(model="m", openai_client=client)
            agent = Agent(name="a", instructions="Add.", model=model, tools=[add])
            agent_input: Any = "What is 2 + 3?"
            for expected in ("It is 5.", "You are welcome."):
                if streamed:
                    result: Any = Runner.run_streamed(agent, agent_input, run_config=QUIET)
                    _ = [event async for event in result.stream_events()]
                else:
                    result = await Runner.run(agent, agent_input, run_config=QUIET)
                assert result.final_output == expected
                agent_input = [*result.to_input_list(), {"role": "user", "content": "Thanks."}]
        turns = await gateway.turns(session)
        assert [turn.get("parent") for turn in turns] == [None, 0, 1], "each turn extends the one before"
        assert [message["role"] for message in turns[1]["messages"]] == ["tool"]
        assert turns[1]["messages"][0]["content"] == "5"


async def test_agent_can_continue_by_previous_response_id(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    upstream.then(
        ScriptedReply("", calls=(ToolCall("c1", "add", '{"a": 2, "b": 3}'),)),
        ScriptedReply("5"),
        ScriptedReply("ok"),
    )
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        async with openai_client(gateway, session) as client:
            model = OpenAIResponsesModel(model="m", openai_client=client)
            agent = Agent(name="a", instructions="Add.", model=model, tools=[add])
            first = await Runner.run(agent, "2 + 3?", run_config=QUIET, auto_previous_response_id=True)
            await Runner.run(agent, "Thanks.", run_config=QUIET, previous_response_id=first.last_response_id)
        assert [turn.get("parent") for turn in await gateway.turns(session)] == [None, 0, 1]
        roles = [message.role for message in upstream.calls[-1].request.messages]  # type: ignore[union-attr]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]


async def test_sub_agent_is_a_separate_segment(tmp_path: Path) -> None:
    upstream = TokenScriptUpstream(lambda _: [*b"fine", chat.END], EmbeddedRenderer())
    async with run_token_shard(tmp_path, upstream) as (gateway, recording):
        session = await gateway.register(id="real")
        async with openai_client(gateway, session) as client:
            model = OpenAIResponsesModel(model="m", openai_client=client)
            settings = ModelSettings(max_tokens=12)
            helper = Agent(name="helper", instructions="Help.", model=model, model_settings=settings)
            agent = Agent(name="main", instructions="Do it.", model=model, model_settings=settings)
            agent_input: Any = "Begin."
            for one in (agent, helper, agent):
                result = await Runner.run(one, agent_input if one is agent else "A part of it.", run_config=QUIET)
                if one is agent:
                    agent_input = [*result.to_input_list(), {"role": "user", "content": "Go on."}]
        turns = await check_exact_turns(gateway, session, recording, segments=2)
        assert [turn.get("parent") for turn in turns] == [None, None, 0]
        assert turns[2].get("prefix")
        assert msgspec.json.encode(turns[1]["messages"][0]["content"]) == b'"Help."'
