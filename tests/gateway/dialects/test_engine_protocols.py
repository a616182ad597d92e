"""Every dialect works over the HTTP protocols of vLLM and SGLang."""

from pathlib import Path
from typing import Any

import pytest

from rookery.upstreams import UpstreamConfig, open_upstream
from rookery.upstreams.embedded import chat
from tests.engine_standins import EngineName, standin
from tests.gateway.dialects.kit import check_exact_turns, run_token_shard
from tests.gateway.dialects.test_anthropic_client import TOOLS as CLAUDE_TOOLS
from tests.gateway.dialects.test_anthropic_client import anthropic_client
from tests.gateway.dialects.test_openai_responses_client import TOOLS
from tests.gateway.kit import run_shard
from tests.gateway.session_kit import RecordingUpstream
from tests.gateway.test_openai_client import openai_client
from tests.servers import Answer, ModelServer


def can_be_extended(turn: Any) -> bool:
    """Check whether the chat format can be extended after a sampled reply.

    The weights are untrained: the reply may contain, or end with, a special token of another message.
    """
    ids = memoryview(turn["sampled"]).cast("i").tolist()
    return not chat.ENDS.intersection(ids[:-1]) and ids[-1] not in chat.ENDS - {chat.END}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_sampled_tokens_train_once_in_every_dialect(tmp_path: Path, kind: EngineName) -> None:
    async with standin(kind, weights=None) as engine:
        upstream = open_upstream(UpstreamConfig(kind=kind, urls=(engine.url,)))
        async with run_token_shard(tmp_path, upstream) as (gateway, recording):
            model = (await upstream.check()).models[0]
            session = await gateway.register(id="one", model=model, sampling={"seed": 5})
            async with anthropic_client(gateway, session) as claude, openai_client(gateway, session) as openai:
                history: list[Any] = [{"role": "user", "content": "hello"}]
                params: Any = {"model": "", "max_tokens": 8, "system": "Help."}
                first = await claude.messages.create(messages=history, **params)
                history += [first.to_param(), {"role": "user", "content": "more"}]
                async with claude.messages.stream(messages=history, **params) as stream:
                    final = await stream.get_final_message()
                assert final.usage.output_tokens <= 8
                items: list[Any] = [{"role": "user", "content": "hello"}]
                for _ in range(2):
                    answer = await openai.responses.create(
                        model="", input=items, max_output_tokens=8, instructions="Do.", tools=TOOLS
                    )
                    items += [item.to_dict(mode="json") for item in answer.output]
                    items.append({"role": "user", "content": "more"})
                prompt = list(b"once upon a time")
                text = await openai.completions.create(model="", prompt=prompt, max_tokens=6, n=2)
                assert len(text.choices) == 2
            turns = await check_exact_turns(gateway, session, recording)
            assert [turn.get("parent") for turn in turns[:4]] == [None, 0, None, 2]
            for before, after in (turns[0:2], turns[2:4]):
                assert bool(after.get("prefix")) == can_be_extended(before), (before, after)


async def test_messages_mode_sends_chat_to_the_engine_and_records_its_tokens(tmp_path: Path) -> None:
    async with ModelServer() as server:
        upstream = RecordingUpstream(
            open_upstream(UpstreamConfig(kind="vllm", urls=(server.url,), model="test-model"))
        )
        server.then(
            Answer(
                None,
                [("look", '{"at": [1]}')],
                ids=[7, 8],
                logprobs=[-1, -2],
                prompt_ids=[1, 2, 3],
                finish="tool_calls",
            ),
            Answer("done", ids=[9], logprobs=[-3], prompt_ids=[1, 2, 3, 7, 8, 4, 5]),
        )
        async with run_shard(tmp_path, upstream) as gateway:
            session = await gateway.register(id="one")
            async with anthropic_client(gateway, session) as client:
                history: list[Any] = [{"role": "user", "content": "hello"}]
                params: Any = {"model": "", "max_tokens": 8, "system": [{"type": "text", "text": "Help."}]}
                first = await client.messages.create(messages=history, tools=CLAUDE_TOOLS, **params)
                result = {"type": "tool_result", "tool_use_id": "call_0", "content": "seen"}
                history += [first.to_param(), {"role": "user", "content": [result]}]
                second = await client.messages.create(messages=history, tools=CLAUDE_TOOLS, **params)
            assert second.content[0].text == "done"  # type: ignore[union-attr]
            turns = await gateway.turns(session)
        sent = server.requests[-1].body
        assert sent["messages"] == [
            {"role": "system", "content": "Help."},
            {"role": "user", "content": "hello"},
            {
                "role": "assistant", "content": None,
                "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at":[1]}'}}
                ],
            },
            {"role": "tool", "content": "seen", "tool_call_id": "call_0"},
        ]  # fmt: skip
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["look", "stop"]
        assert sent["max_tokens"] == 8
    assert [(turn.get("parent"), turn.get("prefix", 0)) for turn in turns] == [(None, 0), (0, 5)]
