"""Behaviour that only vLLM has: IDs on empty deltas, stops, names of requests, refusals, what is ignored."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine_standins import standin

CHAT = "/v1/chat/completions"
HI: Any = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "ignore_eos": True, "max_tokens": 24}
TOOL = {"type": "function", "function": {"name": "python", "parameters": {"properties": {"code": {}}}}}


def joined(events: list[Any]) -> dict[str, Any]:
    """Join the chunks of one choice of a chat stream."""
    found: dict[str, Any] = {"text": "", "ids": [], "logprobs": [], "arguments": "", "finish": None, "empty": 0}
    for event in events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            found["text"] += delta.get("content") or ""
            found["ids"] += choice.get("token_ids") or []
            found["empty"] += not delta and bool(choice.get("token_ids"))
            found["logprobs"] += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
            for call in delta.get("tool_calls", []):
                found["arguments"] += call["function"]["arguments"]
            found["finish"] = choice["finish_reason"] or found["finish"]
    return found


async def test_stream_joined_is_the_whole_reply_and_some_ids_come_on_empty_deltas() -> None:
    async with standin("vllm") as server:
        empty = 0
        for seed in range(6):
            body = HI | {"seed": seed, "return_token_ids": True, "logprobs": True, "stop": ["\x01\x02", "zz"]}
            _, whole = await server.post(CHAT, body)
            events = await server.events(CHAT, body | {"stream": True})
            assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
            got, choice = joined(events), whole["choices"][0]
            assert got["ids"] == choice["token_ids"]
            assert got["text"] == choice["message"]["content"]
            assert got["logprobs"] == [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert got["finish"] == choice["finish_reason"]
            empty += got["empty"]
        assert empty > 0


async def test_same_request_gives_the_same_events_again() -> None:
    async with standin("vllm") as server:
        body = HI | {"stream": True, "return_token_ids": True, "n": 3}
        first, second = [
            sorted(
                (event | {"id": "", "created": 0} for event in (await server.events(CHAT, body))[:-1]),
                key=lambda event: event["choices"][0]["index"],
            )
            for _ in range(2)
        ]
        assert first == second


async def test_every_endpoint_samples_the_same_tokens() -> None:
    async with standin("vllm") as server:
        _, chat = await server.post(CHAT, HI | {"return_token_ids": True})
        prompt = chat["prompt_token_ids"]
        ids = chat["choices"][0]["token_ids"]
        params = {"max_tokens": 24, "seed": 1, "ignore_eos": True, "logit_bias": {"262": -100}}
        _, completion = await server.post(
            "/v1/completions", {"prompt": prompt, "return_token_ids": True, **params}
        )
        assert completion["choices"][0]["token_ids"] == ids
        _, generate = await server.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
        assert generate["choices"][0]["token_ids"] == ids
        _, choices = await server.post(CHAT, HI | {"return_token_ids": True, "n": 2})
        _, second = await server.post(CHAT, HI | {"return_token_ids": True, "seed": 2})
        assert choices["choices"][0]["token_ids"] == ids
        assert choices["choices"][1]["token_ids"] == second["choices"][0]["token_ids"]


async def test_logprobs_are_the_models_own_and_the_sampled_token_comes_first_among_the_alternatives() -> None:
    async with standin("vllm") as server:
        params = {"logprobs": 5, "seed": 1, "max_tokens": 24, "temperature": 0.5}
        chat = {"logprobs": True, "top_logprobs": 5, "temperature": 0.5, "return_tokens_as_token_ids": True}
        requests = {CHAT: HI | chat, "/inference/v1/generate": {"token_ids": [256, 72], "sampling_params": params}}
        for path, body in requests.items():
            _, reply = await server.post(path, body)
            choice = reply["choices"][0]
            for entry in choice["logprobs"]["content"]:
                tops = entry["top_logprobs"]
                assert len(tops) == 5
                assert tops[0]["token"] == entry["token"]
                assert tops[0]["logprob"] == entry["logprob"]
                ranked = [top["logprob"] for top in tops[1:]]
                assert ranked == sorted(ranked, reverse=True)
        sampled = {"max_tokens": 8, "seed": 3, "temperature": 0.3, "ignore_eos": True, "logprobs": 0}
        _, warm = await server.post("/v1/completions", {"prompt": [256, 72], **sampled})
        _, cold = await server.post("/v1/completions", {"prompt": [256, 72], **sampled, "temperature": 1.0})
        # The first token has the same logprob at every temperature, if the same token was sampled.
        if warm["choices"][0]["text"][:1] == cold["choices"][0]["text"][:1]:
            first = [reply["choices"][0]["logprobs"]["token_logprobs"][0] for reply in (warm, cold)]
            assert first[0] == first[1]


async def test_stops_are_named_and_excluded() -> None:
    async with standin("vllm") as server:
        free = HI | {"return_token_ids": True, "logit_bias": {"97": 100}}
        _, reply = await server.post(CHAT, free | {"stop": "aaa"})
        choice = reply["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "aaa")
        assert (choice["message"]["content"], choice["token_ids"]) == ("", [97] * 3)
        _, reply = await server.post(CHAT, free | {"stop": "aaa", "include_stop_str_in_output": True})
        assert reply["choices"][0]["message"]["content"] == "aaa"
        _, reply = await server.post(CHAT, free | {"stop": "aaa", "min_tokens": 5})
        assert reply["choices"][0]["token_ids"] == [97] * 6
        _, reply = await server.post(CHAT, free | {"stop_token_ids": [97]})
        choice = reply["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", 97, [97])
        _, reply = await server.post(CHAT, HI | {"logit_bias": {"257": 100}, "ignore_eos": False})
        assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == ("stop", None)
        _, reply = await server.post(CHAT, HI | {"logit_bias": {"257": 100}, "ignore_eos": False, "min_tokens": 4})
        assert reply["usage"]["completion_tokens"] == 5


async def test_tool_call_has_the_format_of_vllm() -> None:
    async with standin("vllm") as server:
        body = HI | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "python"}}}
        body |= {"logit_bias": {"123": 100}, "max_tokens": 4}
        _, reply = await server.post(CHAT, body)
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "python", "arguments": "{{{{"}
        assert reply["choices"][0]["finish_reason"] == "length"
        got = joined(await server.events(CHAT, body | {"stream": True, "return_token_ids": True}))
        assert (got["arguments"], got["ids"]) == ("{{{{", [123] * 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_has_the_format_of_vllm(stream: bool) -> None:
    """A stream of `/inference/v1/generate` that is aborted has no finish reason, only the end."""
    async with standin("vllm") as server:
        chat = HI | {"max_tokens": 900, "stream": stream, "request_id": "x", "return_token_ids": True}
        params = {"max_tokens": 900, "ignore_eos": True}
        tokens = {"token_ids": [256], "sampling_params": params, "stream": stream, "request_id": "x"}
        await server.post("/pause?mode=keep")
        ask = server.events if stream else server.post
        waiting = [
            asyncio.create_task(ask(CHAT, chat)),
            asyncio.create_task(ask("/inference/v1/generate", tokens)),
        ]
        await server.until(0, 2)
        _, reply = await server.post("/abort_requests", {})
        assert reply == {"status": "aborted", "aborted": 2}
        chat_result, generated = [await task for task in waiting]
        if stream:
            assert [event["choices"][0]["delta"] for event in chat_result[:-1]] == [
                {"role": "assistant", "content": ""}
            ]
            assert generated == ["[DONE]"]
        else:
            assert chat_result[1]["choices"][0]["finish_reason"] == "abort"
            assert generated[1]["choices"][0] | {"logprobs": None} == {
                "index": 0,
                "logprobs": None,
                "finish_reason": "abort",
                "token_ids": [],
                "routed_experts": None,
                "sampling_mask": None,
            }
        await server.post("/resume")


async def test_request_keeps_its_id() -> None:
    async with standin("vllm") as server:
        for path, body, name in (
            (CHAT, HI, "chatcmpl-abc"),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "cmpl-abc"),
            (
                "/inference/v1/generate",
                {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
                "generate-tokens-abc",
            ),
        ):
            for how in (body | {"request_id": "abc"}, None):
                headers = {} if how else {"X-Request-Id": "abc"}
                _, reply = await server.post(path, how or body, **headers)
                assert reply.get("id", reply.get("request_id")) == name


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 0}, None),
    ({"n": 2, "temperature": 0}, None),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, None),
    ({"min_p": 1.5}, None),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"min_tokens": 30}, None),
    ({"presence_penalty": 3}, None),
    ({"repetition_penalty": 0}, None),
    ({"stop": [""]}, None),
    ({"stop": ["a"] * 5}, "body.stop"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"top_logprobs": "many"}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"seed": 2**63}, "body.seed"),
    ({"cache_salt": ""}, "body.cache_salt"),
    ({"messages": "hi"}, "body.messages"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "body.messages.0.role"),
    ({"chat_template": "{{ x }}"}, None),
    ({"continue_final_message": True, "add_generation_prompt": True}, None),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
]


async def test_requests_that_vllm_refuses_are_refused_with_the_parameter() -> None:
    async with standin("vllm") as server:
        for fields, param in REFUSED:
            status, reply = await server.post(CHAT, HI | fields)
            assert status == 400, (fields, reply)
            error = reply["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["param"], error["code"]) == (param, 400), (fields, error)
        for path, body in (
            ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}),
            ("/inference/v1/generate", {"token_ids": [1]}),
            ("/inference/v1/generate", {"token_ids": [-1], "sampling_params": {}}),
            ("/inference/v1/generate", {"token_ids": [300], "sampling_params": {}}),
            ("/inference/v1/generate", {"token_ids": [1] * 1024, "sampling_params": {}}),
            ("/v1/completions", {}),
            ("/v1/completions", {"prompt": [1, -1]}),
            ("/v1/completions", {"prompt": [1, "a"]}),
            ("/v1/completions", b"{"),
            ("/v1/completions", b"[]"),
        ):
            status, reply = await server.post(path, body)
            assert (status, reply["error"]["code"]) == (400, 400), (path, body, reply)
        assert (await server.post("/pause?mode=never"))[0] == 400
        assert (await server.post("/update_weights", {}))[0] == 400
        async with server.http.post(
            server.root + CHAT, data=b"{}", headers={"Content-Type": "text/plain"}
        ) as answer:
            assert answer.status == 400


async def test_unsupported_vllm_features_are_refused() -> None:
    async with standin("vllm") as server:
        for fields in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": "a"}},
            {"prompt_logprobs": 1},
            {"bad_words": ["a"]},
            {"echo": True},
            {"use_beam_search": True},
        ):
            status, reply = await server.post(CHAT, HI | fields)
            assert (status, reply["error"]["type"]) == (501, "NotImplementedError"), fields


async def test_fields_that_vllm_ignores_are_ignored_and_listed() -> None:
    async with standin("vllm") as server:
        plain, strange = [
            (await server.post(CHAT, HI | more))[1]["choices"]
            for more in ({}, {"user": "me", "made_up": 1, "cache_salt": "x", "session_id": "s"})
        ]
        assert plain == strange
        params = {"max_tokens": 1, "seed": 1, "made_up": 2}
        await server.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": params, "other": 1})
        _, ignored = await server.get("/standin/ignored")
        assert ignored == {
            f"{CHAT} made_up": 1,
            f"{CHAT} user": 1,
            f"{CHAT} cache_salt": 1,
            f"{CHAT} session_id": 1,
            "/inference/v1/generate made_up": 1,
            "/inference/v1/generate other": 1,
        }


async def test_penalties_and_bans_change_the_distribution() -> None:
    async with standin("vllm") as server:
        ask = HI | {"return_token_ids": True, "max_tokens": 64}

        async def ids(**fields: Any) -> list[int]:
            status, reply = await server.post(CHAT, ask | fields)
            assert status == 200, reply
            return list(reply["choices"][0]["token_ids"])

        assert set(await ids(allowed_token_ids=[97, 98])) == {97, 98}
        assert len(set(await ids(allowed_token_ids=[97, 98, 99], frequency_penalty=2.0))) == 3
        greedy = await ids(temperature=0)
        assert await ids(min_p=1.0) == greedy
        assert await ids(top_k=1) == greedy
        assert len(set(await ids(repetition_penalty=2.0))) >= len(set(greedy))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(0, 271), min_size=1, max_size=40), seed=st.integers(0, 99), most=st.integers(1, 20)
)
def test_every_token_has_one_logprob(prompt: list[int], seed: int, most: int) -> None:
    async def main() -> None:
        async with standin("vllm") as server:
            params = {"max_tokens": most, "seed": seed, "logprobs": 0}
            body = {"token_ids": prompt, "sampling_params": params}
            status, reply = await server.post("/inference/v1/generate", body)
            assert status == 200
            choice = reply["choices"][0]
            assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= most
            assert all(np.isfinite(entry["logprob"]) for entry in choice["logprobs"]["content"])
            events = await server.events("/inference/v1/generate", body | {"stream": True})
            assert [i for event in events[:-1] for i in event["choices"][0]["token_ids"]] == choice["token_ids"]
            ended = choice["token_ids"][-1] in range(256, 265) and choice["token_ids"][-1] != 262
            assert choice["finish_reason"] == ("stop" if ended else "length")

    asyncio.run(main())


async def test_tokenize_and_detokenize_are_each_others_inverse() -> None:
    text = "Grüße, 世界"
    async with standin("vllm") as server:
        _, reply = await server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert (await server.post("/detokenize", {"tokens": reply["tokens"]}))[1] == {"prompt": text}
        _, chat = await server.post("/tokenize", {"messages": HI["messages"]})
        _, answer = await server.post(CHAT, HI | {"return_token_ids": True, "max_tokens": 1})
        assert chat["tokens"] == answer["prompt_token_ids"]
        _, models = await server.get("/v1/models")
        assert models["data"][0]["max_model_len"] == chat["max_model_len"] == 1024
