"""Behaviour that only SGLang has: cumulative streams, logprobs at the temperature, request IDs, refusals."""

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.sampler import TokenChoice
from rookery.upstreams.embedded.weights import Weights
from tests.engine_standins import small_weights, standin
from tests.engine_standins.batch import StandinBatch, StandinJob

CHAT = "/v1/chat/completions"
PROMPT = [256, 72, 105]
HI: Any = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "ignore_eos": True, "max_tokens": 12}


def new_body(most: int = 12, **fields: Any) -> dict[str, Any]:
    params = {"max_new_tokens": most, "sampling_seed": 1, "ignore_eos": True} | fields.pop("params", {})
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True} | fields


async def test_stream_is_cumulative() -> None:
    async with standin("sglang") as server:
        _, whole = await server.post("/generate", new_body())
        events = await server.events("/generate", new_body(stream=True))
        assert len(events) == 13
        for number, event in enumerate(events[:-1], 1):
            assert event["output_ids"] == whole["output_ids"][:number]
            meta = event["meta_info"]
            assert meta["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:number]
            assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == number
            assert (meta["finish_reason"] is None) == (number < 12)
        texts = [event["text"] for event in events[:-1]]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert texts[-1] == whole["text"]


async def test_incremental_stream_joined_is_the_whole_reply() -> None:
    async with standin("sglang") as server:
        assert server.standin is not None
        server.standin.incremental = True  # type: ignore[attr-defined]
        _, whole = await server.post("/generate", new_body())
        events = await server.events("/generate", new_body(stream=True))
        assert [i for event in events[:-1] for i in event["output_ids"]] == whole["output_ids"]
        streamed = [entry for event in events[:-1] for entry in event["meta_info"]["output_token_logprobs"]]
        assert streamed == whole["meta_info"]["output_token_logprobs"]
        assert "".join(event["text"] for event in events[:-1]) == whole["text"]
        assert (await server.get("/server_info"))[1]["incremental_streaming_output"] is True


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
async def test_logprobs_are_those_after_temperature_scaling(temperature: float) -> None:
    async with standin("sglang") as server:
        body = new_body(6, top_logprobs_num=272, params={"temperature": temperature})
        _, reply = await server.post("/generate", body)
    job = StandinJob(PROMPT, max_tokens=6, seed=1, choice=TokenChoice(temperature=temperature))
    job.top_count = 272
    batch = StandinBatch(Llama(Weights.load(small_weights())))
    batch.add(job)
    while not job.finish:
        batch.step()
    assert reply["output_ids"] == job.tokens
    for at, token in enumerate(job.tokens):
        own = np.zeros(272)
        for other, value in job.tops[at]:
            own[other] = value
        warm = own / (temperature or 1.0)
        warm -= np.log(np.exp(warm).sum())
        entry = reply["meta_info"]["output_token_logprobs"][at]
        assert entry[1:] == [token, None]
        assert entry[0] == pytest.approx(warm[token], abs=1e-4)


async def test_logprobs_of_the_input_are_those_of_the_same_tokens_sampled() -> None:
    async with standin("sglang") as server:
        _, reply = await server.post("/generate", new_body(8))
        tokens = [*PROMPT, *reply["output_ids"]]
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        for start in (0, 1, len(PROMPT), len(tokens) - 1, len(tokens)):
            _, echo = await server.post("/generate", body | {"logprob_start_len": start})
            prompt_logprobs = echo["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in prompt_logprobs] == tokens[start:]
            assert not prompt_logprobs or (prompt_logprobs[0][0] is None) == (start == 0)
            own = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
            got = [entry[0] for entry in prompt_logprobs][max(0, len(PROMPT) - start) :]
            assert got == pytest.approx(own[max(0, start - len(PROMPT)) :], abs=1e-4)
        status, _ = await server.post("/generate", body | {"logprob_start_len": len(tokens) + 1})
        assert status == 400


async def test_stops_are_named_and_trimmed_unless_they_are_to_stay() -> None:
    async with standin("sglang") as server:
        a = {"logit_bias": {"97": 100}}
        _, reply = await server.post("/generate", new_body(params=a | {"stop": "aaa"}))
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "aaa"}
        assert (reply["text"], reply["output_ids"]) == ("", [97] * 3)
        _, reply = await server.post("/generate", new_body(params=a | {"stop": "aaa", "no_stop_trim": True}))
        assert reply["text"] == "aaa"
        events = await server.events("/generate", new_body(params=a | {"stop": "aaa"}, stream=True))
        assert [event["text"] for event in events[:-1]] == ["a", "aa", "aa"]  # text that was sent stays
        _, reply = await server.post(
            "/generate", new_body(params=a | {"stop_token_ids": [97], "ignore_eos": False})
        )
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 97}
        _, reply = await server.post("/generate", new_body(params=a | {"stop_token_ids": [97]}))
        assert reply["meta_info"]["finish_reason"] == {
            "type": "length",
            "length": 12,
        }  # ignore_eos ignores these too


async def test_several_prompts_and_several_samples_are_answered_as_a_list() -> None:
    async with standin("sglang") as server:
        _, one = await server.post("/generate", new_body(rid="x"))
        _, several = await server.post("/generate", new_body(rid="x", params={"n": 2}))
        assert [out["meta_info"]["id"] for out in several] == ["x_0", "x_1"]
        assert several[0]["output_ids"] == one["output_ids"] != several[1]["output_ids"]
        _, both = await server.post("/generate", new_body() | {"input_ids": [PROMPT, [256]], "rid": ["p", "q"]})
        assert [out["meta_info"]["prompt_tokens"] for out in both] == [3, 1]
        events = await server.events("/generate", new_body(stream=True, params={"n": 2}))
        ends = {event["index"]: event["output_ids"] for event in events[:-1]}
        assert ends == {number: out["output_ids"] for number, out in enumerate(several)}


async def test_chat_returns_ids_only_without_streaming() -> None:
    async with standin("sglang") as server:
        for flag in ("return_token_ids", "return_prompt_token_ids", "return_meta_info"):
            status, reply = await server.post(CHAT, HI | {flag: True, "stream": True})
            assert (status, reply["type"]) == (400, "BadRequest")
        _, reply = await server.post(CHAT, HI | {"return_token_ids": True})
        choice = reply["choices"][0]
        no_calls = {"logit_bias": {"262": -100}}
        body = new_body(12, params=no_calls) | {"input_ids": choice["prompt_token_ids"]}
        _, raw = await server.post("/generate", body)
        assert choice["response_token_ids"] == raw["output_ids"]
        _, with_ids = await server.post(CHAT, HI | {"return_token_ids": True, "input_ids": PROMPT})
        assert with_ids["choices"][0]["prompt_token_ids"] == PROMPT


async def test_aborting_a_queued_request_returns_sglangs_message() -> None:
    async with standin("sglang") as server:
        await server.post("/pause_generation", {"mode": "in_place"})
        waiting = asyncio.create_task(server.post("/generate", new_body(rid="req-1")))
        other = asyncio.create_task(server.post("/generate", new_body(rid="req-10")))
        third = asyncio.create_task(server.post("/generate", new_body(rid="other")))
        await server.until(0, 3)
        status, reply = await server.post("/generate", new_body(rid="req-1"))
        assert (status, reply["error"]["message"]) == (400, "Duplicate request ID detected: req-1")
        assert await server.post("/abort_request", {"rid": "nobody"}) == (200, None)
        assert await server.post("/abort_request", {}) == (200, None)
        assert (await server.running())[1] == 3
        await server.post("/abort_request", {"rid": "req-1"})
        for task in (waiting, other):  # IDs with a common prefix
            _, reply = await task
            meta = reply["meta_info"]
            assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
            assert (reply["text"], reply["output_ids"], meta["completion_tokens"]) == ("", [], 0)
            assert "prompt_tokens" not in meta
        await server.post("/abort_request", {"abort_all": True})
        assert (await third)[1]["meta_info"]["finish_reason"]["type"] == "abort"
        await server.post("/continue_generation", {})


async def test_abort_of_a_disconnected_request_applies_to_ids_that_begin_with_its_id() -> None:
    async with standin("sglang") as server:
        await server.post("/pause_generation", {"mode": "in_place"})
        first = asyncio.create_task(server.post("/generate", new_body(rid="req")))
        await server.until(0, 1)
        first.cancel()
        await server.until(0, 0)
        retries = [asyncio.create_task(server.post("/generate", new_body(rid=rid))) for rid in ("req.1", "1.req")]
        await server.until(0, 2)
        await server.post("/abort_request", {"rid": "req"})
        _, aborted = await retries[0]
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        await server.post("/continue_generation", {})
        _, complete = await retries[1]
        assert complete["meta_info"]["finish_reason"]["type"] == "length"


async def test_refused_request_is_answered_in_the_format_of_its_endpoint() -> None:
    async with standin("sglang") as server:
        for params in (
            {"temperature": -1},
            {"top_p": 0},
            {"top_k": 0},
            {"min_p": 2},
            {"frequency_penalty": 3},
            {"repetition_penalty": 2.5},
            {"max_new_tokens": -1},
            {"min_new_tokens": 20},
            {"logit_bias": {"999": 1}},
            {"regex": "a", "ebnf": "b"},
            {"max_new_tokens": 1022},
        ):
            status, reply = await server.post("/generate", new_body(params=params))
            assert status == 400, params
            assert set(reply) == {"error"}
            assert set(reply["error"]) == {"message"}
            events = await server.events("/generate", new_body(params=params, stream=True))
            assert events[0]["error"]["code"] == 400
        empty: list[Any] = [{"input_ids": []}, {"input_ids": [272]}, {}, {"input_ids": PROMPT, "rid": ["a", "b"]}]
        for body in empty:
            assert (await server.post("/generate", body))[0] == 400
        for broken in ({"temperatur": 1}, {"temperature": "hot"}, {"n": "two"}):
            assert await server.post("/generate", new_body(params=broken)) == (500, "Internal Server Error")
        wrong: list[Any] = [{"input_ids": "a"}, {"text": 5}, {"text": "a", "stream": "maybe"}, b"{"]
        for what in wrong:
            status, reply = await server.post("/generate", what)
            assert (status, reply["object"], reply["type"]) == (400, "error", "Bad Request"), what
        refused: list[dict[str, Any]] = [
            {"messages": []},
            {"tool_choice": "required"},
            {"temperature": -1},
            {"max_tokens": 2000},
            {"return_sampling_mask": True},
        ]
        for fields in refused:
            status, reply = await server.post(CHAT, HI | fields)
            assert (status, reply["object"], reply["code"]) == (400, "error", 400), fields
        assert (await server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}))[0] == 400
        assert (await server.post("/pause_generation", {"mode": "keep"}))[0] == 400
        assert await server.get("/nothing") == (404, {"detail": "Not Found"})


async def test_unsupported_sglang_features_are_refused() -> None:
    async with standin("sglang") as server:
        for params in ({"regex": "a"}, {"json_schema": "{}"}, {"stop_regex": "a"}, {"custom_params": {"a": 1}}):
            assert (await server.post("/generate", new_body(params=params)))[0] == 501
        for fields in ({"lora_path": "x"}, {"image_data": "x"}, {"return_hidden_states": True}):
            assert (await server.post("/generate", new_body() | fields))[0] == 501
        assert (await server.post(CHAT, HI | {"response_format": {"type": "json_object"}}))[0] == 501


async def test_names_of_models_and_unknown_fields_do_not_matter() -> None:
    async with standin("sglang") as server:
        _, plain = await server.post(CHAT, HI)
        _, reply = await server.post(CHAT, HI | {"model": "whatever", "made_up": 1, "user": "me"})
        assert (plain["model"], reply["model"]) == ("default", "whatever")
        assert reply["choices"] == plain["choices"]
        assert (await server.post("/generate", new_body() | {"return_tokens": True}))[0] == 200


async def test_version_is_the_one_that_was_set() -> None:
    async with standin("sglang", weights=small_weights(1, 1)) as server:
        _, reply = await server.post("/generate", new_body())
        assert reply["meta_info"]["weight_version"] == "default"
        body = {"model_path": str(small_weights(2, 2)), "weight_version": "step-7"}
        status, done = await server.post("/update_weights_from_disk", body)
        assert (status, done["success"], done["num_paused_requests"]) == (200, True, 0)
        _, after = await server.post("/generate", new_body())
        assert after["meta_info"]["weight_version"] == "step-7"
        assert after["output_ids"] != reply["output_ids"]
        assert (await server.get("/get_model_info"))[1]["weight_version"] == "step-7"
        status, done = await server.post("/update_weights_from_disk", {"model_path": "/nowhere"})
        assert (status, done["success"]) == (400, False)
        _, still = await server.post("/generate", new_body())
        assert still["output_ids"] == after["output_ids"]


async def test_retracted_sequence_is_counted() -> None:
    async with standin("sglang") as server:
        body = new_body(90)
        with server.freezing(5):
            task = asyncio.create_task(server.post("/generate", body))
            await server.frozen(5)
        await server.post("/pause_generation", {"mode": "retract"})
        assert await server.running() == (0, 1)
        await server.post("/continue_generation", {})
        _, reply = await task
        assert reply["meta_info"]["num_retractions"] == 1
        assert len(reply["output_ids"]) == 90
