"""The unmodified openai library with the completions API: text and token ID prompts."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway.dialects.kit import check_exact_turns, run_token_shard
from tests.gateway.kit import run_shard
from tests.gateway.scripted_upstream import ScriptedReply, ScriptedUpstream, char_ids
from tests.gateway.test_openai_client import openai_client


async def test_prompt_of_token_ids_is_used_unchanged_and_extended(tmp_path: Path) -> None:
    async with run_token_shard(tmp_path) as (gateway, noting):
        session = await gateway.register(id="real")
        async with openai_client(gateway, session) as client:
            prompt = list(b"What is 2 + 2?")
            first = await client.completions.create(
                model="m", prompt=prompt, max_tokens=8, extra_body={"return_token_ids": True}
            )
            sampled: list[int] = first.choices[0].token_ids  # type: ignore[attr-defined]
            assert first.choices[0].prompt_token_ids == prompt  # type: ignore[attr-defined]
            longer = [*prompt, *sampled, *b"And 3 + 3?"]
            stream = await client.completions.create(
                model="m", prompt=longer, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == len(longer)
        turns = await check_exact_turns(gateway, session, noting, segments=1)
        assert [(turn.get("parent"), turn.get("prefix", 0)) for turn in turns] == [
            (None, 0),
            (0, 14 + len(sampled)),
        ]
        streamed_text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert streamed_text == (turns[1]["response"].get("content") or "")


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_choices_echo_and_logprobs(tmp_path: Path, stream: bool) -> None:
    async with run_token_shard(tmp_path) as (gateway, noting):
        session = await gateway.register(id="real", sampling={"temperature": 1.0})
        async with openai_client(gateway, session) as client:
            params: Any = {"model": "m", "max_tokens": 5, "n": 2, "echo": True, "logprobs": 2, "seed": 3}
            answer: Any = await client.completions.create(prompt=["one é", "two"], stream=stream, **params)
            texts, tokens = [""] * 4, [0] * 4
            for chunk in [part async for part in answer] if stream else [answer]:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    if choice.logprobs is not None:
                        tokens[choice.index] += len(choice.logprobs.tokens)
                        assert len(choice.logprobs.text_offset) == len(choice.logprobs.token_logprobs)
        assert [text[:5] for text in texts[:2]] == ["one é"] * 2
        assert [text[:3] for text in texts[2:]] == ["two"] * 2
        turns = await check_exact_turns(gateway, session, noting)
        by_prompt = sorted((turn["prompt"], len(turn["sampled"]) // 4) for turn in turns)
        assert sorted(tokens) == sorted(count for _, count in by_prompt)
        assert len(turns) == 4


async def test_text_prompt_needs_a_tokenizer_and_token_ids_do_not(tmp_path: Path) -> None:
    upstream = ScriptedUpstream(ScriptedReply("abc"))
    async with run_shard(tmp_path, upstream) as gateway:
        session = await gateway.register(id="one")
        async with openai_client(gateway, session, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="m", prompt="hello")
            assert caught.value.param == "prompt"
            answer = await client.completions.create(model="m", prompt=[104, 105])
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
            several = await client.completions.create(model="m", prompt=[[104], [105, 106]])
            assert [choice.text for choice in several.choices] == ["abc", "abc"]
            assert several.usage is not None
            assert several.usage.prompt_tokens == 3
        assert upstream.calls[0].request.tokens == char_ids("hi")
        assert [call.request.sampling.max_tokens for call in upstream.calls] == [16, 16, 16]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, -5]}, "prompt"),
        ({"prompt": [1, 2**40]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 65}, "n"),
        ({"prompt": [1], "n": 65}, "n"),
        ({"prompt": [1], "best_of": 5}, "best_of"),
        ({"prompt": [1], "suffix": "x"}, "suffix"),
        ({"prompt": [1], "logprobs": 6}, "logprobs"),
    ],
)
async def test_invalid_field_is_named_in_the_error(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with run_shard(tmp_path, ScriptedUpstream()) as gateway:
        session = await gateway.register(id="one")
        async with openai_client(gateway, session, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(**({"model": "m"} | fields))
            assert caught.value.param == param
