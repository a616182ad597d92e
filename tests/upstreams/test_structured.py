"""Options of the chat API at endpoints that take token IDs: translated or refused, never ignored."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rookery.core import Message, Sampling, ToolSchema, UpstreamError, ints
from rookery.upstreams import UpstreamConfig, llamacpp, openai, sglang, vllm
from rookery.upstreams.embedded import EmbeddedUpstream, chat
from rookery.upstreams.format import WireOptions
from rookery.upstreams.protocol import ModelRequest, ToolSet
from tests.upstreams.embedded_kit import random_weights

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
FORMATS: dict[str, Any] = {
    "vllm": vllm._GENERATE,
    "vllm-completions": vllm._COMPLETIONS,
    "sglang": sglang._GENERATE,
    "llamacpp": llamacpp.NativeCompletion(),
    "openai": openai.COMPLETIONS,
}


def body(engine: str, **extra: Any) -> dict[str, Any]:
    request = ModelRequest(model="m", tokens=ints([1, 2]), sampling=Sampling(extra=extra))
    request = msgspec.structs.replace(request, model="m", id="one")
    found: dict[str, Any] = msgspec.json.decode(FORMATS[engine].encode(request, WireOptions()))
    return found.get("sampling_params", found)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm", {"structured_outputs": {"json": SCHEMA}}),
        ("vllm-completions", {"structured_outputs": {"json": SCHEMA}}),
        ("sglang", {"json_schema": msgspec.json.encode(SCHEMA).decode()}),
        ("llamacpp", {"json_schema": SCHEMA}),
    ],
)
def test_response_format_becomes_the_engines_own_parameter(
    engine: str, expected: dict[str, Any], raw: bool
) -> None:
    wish = msgspec.Raw(msgspec.json.encode(FORMAT)) if raw else FORMAT
    found = body(engine, response_format=wish)
    assert "response_format" not in found
    for name, value in expected.items():
        if engine == "sglang":
            assert msgspec.json.decode(found[name]) == msgspec.json.decode(value)
        else:
            assert found[name] == value


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"response_format": {"type": "text"}, "min_p": 0.5}, None),
    ],
)
def test_every_form_of_a_constraint_reaches_vllm_as_structured_outputs(
    extra: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    found = body("vllm", **extra)
    assert found.get("structured_outputs") == expected
    assert found.get("min_p") == extra.get("min_p")
    assert not {"response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar"} & found.keys()


def test_choices_and_grammars_reach_sglang_as_regular_expressions_and_ebnf() -> None:
    assert body("sglang", guided_choice=["a", "b.c"])["regex"] == r"(a|b\.c)"
    assert body("sglang", guided_grammar="g")["ebnf"] == "g"
    assert body("sglang", response_format={"type": "json_object"})["json_schema"] == '{"type": "object"}'


@pytest.mark.parametrize(
    ("engine", "extra"),
    [
        *((engine, {"reasoning_effort": "high"}) for engine in FORMATS),
        *((engine, {"parallel_tool_calls": False}) for engine in FORMATS),
        *((engine, {"chat_template_kwargs": {"enable_thinking": False}}) for engine in FORMATS),
        *((engine, {"response_format": {"type": "of_tomorrow"}}) for engine in FORMATS),
        *((engine, {"response_format": FORMAT, "guided_regex": "a"}) for engine in FORMATS),
        ("openai", {"response_format": FORMAT}),
        ("llamacpp", {"guided_regex": "a"}),
        ("vllm", {"structured_outputs": {"of_tomorrow": 1}}),
    ],
)
def test_option_without_effect_is_refused(engine: str, extra: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError) as raised:
        body(engine, **extra)
    assert raised.value.code == "upstream.rejected"


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("choice", [None, "look"])
async def test_embedded_policy_calls_at_most_one_tool_if_requested(
    tokens: bool, choice: str | None, tmp_path: Path
) -> None:
    path = random_weights(tmp_path / "random.safetensors")
    upstream = EmbeddedUpstream(UpstreamConfig(kind="embedded", urls=(f"embedded:{path}",)))
    tools = (ToolSchema("look", "", {}),)
    messages = (Message("user", "hi"),)
    prompt_fields: dict[str, Any] = {"messages": messages, "tools": ToolSet(tools), "tool_choice": choice}
    if tokens:
        prompt_fields = {"tokens": ints(chat.prompt(messages, tools, choice).ids)}
    try:
        for parallel in (None, True, False):
            extra = {} if parallel is None else {"parallel_tool_calls": parallel}
            request = ModelRequest(model="", sampling=Sampling(max_tokens=9, extra=extra), **prompt_fields)
            job = upstream.prepare(request).job
            if choice is None:
                job.take(chat.CALL, -1.0)
            assert (job.choice.banned_id == chat.CALL) == (parallel is False)
            assert (await upstream.complete(request, timeout=60)).sampled
    finally:
        await upstream.close()
