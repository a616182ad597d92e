"""Conformance of the upstream kinds with the real engines: token IDs and log probabilities in and out.

The engines are vLLM, llama.cpp, and the upstream `torch`, which runs in this process.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import test_utils, web
from tokenizers import Tokenizer

from rookery.core import Truncation
from rookery.upstreams import UpstreamConfig, open_upstream
from rookery.upstreams.registry import detect_kind
from rookery.upstreams.torch import load_model
from tests.engines.conftest import WEIGHTS, RunningEngine
from tests.engines.helpers import PROMPT, SECONDS, make_request, read_floats, read_ints, rescore, vllm_config
from tests.upstreams import torch_kit
from tests.upstreams.helpers import DeltaLog

pytestmark = pytest.mark.engines

JSON = {"Content-Type": "application/json"}


SERVERS = ("vllm", "llamacpp")


@pytest.fixture(params=[*SERVERS, "torch"])
def engine(request: pytest.FixtureRequest) -> tuple[str, RunningEngine | None]:
    if request.param in SERVERS:
        return request.param, request.getfixturevalue(request.param)
    if not (WEIGHTS / "model.safetensors").exists():
        pytest.skip("[probed] this machine has no SmolLM2 (make engines)")
    return request.param, None


@pytest.fixture
async def upstream(engine: tuple[str, RunningEngine | None]) -> AsyncIterator[Any]:
    kind, server = engine
    url = f"hf:{WEIGHTS}?slots=4&context=2048" if server is None else f"{server.url}/v1"
    opened = open_upstream(UpstreamConfig(kind=kind, urls=(url,)))
    yield opened
    await opened.close()


async def rescored(engine: tuple[str, RunningEngine | None], prompt: list[int], sampled: list[int]) -> list[float]:
    """Ask the engine for the log probability of each sampled token, given the tokens before it."""
    kind, server = engine
    if server is None:
        return torch_kit.rescore(load_model(WEIGHTS).model, prompt, sampled)
    if kind == "vllm":
        return (await rescore(server, prompt + sampled))[len(prompt) - 1 :]
    values = []
    async with aiohttp.ClientSession(server.url) as session:
        for at, token in enumerate(sampled):
            body = {"prompt": prompt + sampled[:at], "n_predict": 1, "n_probs": 60_000, "cache_prompt": False}
            async with session.post("/completion", json=body) as reply:
                tops = (await reply.json())["completion_probabilities"][0]["top_logprobs"]
            values.append(next(float(top["logprob"]) for top in tops if top["id"] == token))
    return values


@asynccontextmanager
async def forbidding_proxy(url: str, path: str) -> AsyncIterator[str]:
    """Forward everything to the server at `url`, except that requests to `path` are answered with 403."""

    async def forward(request: web.Request) -> web.Response:
        if request.path == path:
            return web.json_response({"error": "disabled"}, status=403)
        body = await request.read()
        async with session.request(request.method, request.path_qs, data=body, headers=JSON) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", forward)
    async with aiohttp.ClientSession(url) as session, test_utils.TestServer(application) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize("kind", SERVERS)
async def test_kind_of_the_server_is_detected(kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningEngine = request.getfixturevalue(kind)
    assert (await detect_kind(UpstreamConfig(urls=(f"{server.url}/v1",)))).kind == kind


async def test_logprobs_of_sampled_tokens_equal_the_engines_own_rescoring(upstream: Any, engine: Any) -> None:
    reply = await upstream.complete(make_request(temperature=1.0, seed=7, max_tokens=12), timeout=SECONDS)
    sampled, recorded = read_ints(reply.sampled), read_floats(reply.logprobs)
    values = await rescored(engine, PROMPT, list(sampled))
    assert len(recorded) == len(sampled) == len(values) > 2
    worst = max(abs(ours - theirs) for ours, theirs in zip(recorded, values, strict=True))
    shifted = max(abs(ours - theirs) for ours, theirs in zip(recorded[1:], values[:-1], strict=True))
    assert worst < 1e-4
    assert shifted > 1e-2, "the check must notice log probabilities that are off by one"


async def test_streamed_and_whole_replies_are_the_same_tokens(upstream: Any) -> None:
    whole = await upstream.complete(make_request(temperature=0.0), timeout=SECONDS)
    on_delta = DeltaLog()
    streamed = await upstream.complete(make_request(temperature=0.0), timeout=SECONDS, on_delta=on_delta)
    assert read_ints(streamed.sampled) == read_ints(whole.sampled)
    assert b"".join(delta.sampled for delta in on_delta.deltas) == whole.sampled
    assert len(on_delta.deltas) > 1


async def test_the_end_token_is_part_of_a_reply_that_stopped(upstream: Any) -> None:
    reply = await upstream.complete(make_request(temperature=0.0, max_tokens=64), timeout=SECONDS)
    assert reply.finish == "stop"
    assert read_ints(reply.sampled)[-1] == 2


async def test_max_tokens_ends_a_reply_with_length(upstream: Any) -> None:
    reply = await upstream.complete(make_request(temperature=0.0, max_tokens=3), timeout=SECONDS)
    assert (reply.finish, len(read_ints(reply.sampled))) == ("length", 3)


async def test_a_seed_repeats_a_reply_and_another_seed_changes_it(upstream: Any) -> None:
    replies = [
        read_ints((await upstream.complete(make_request(temperature=1.0, seed=seed), timeout=SECONDS)).sampled)
        for seed in (1, 1, 2)
    ]
    assert replies[0] == replies[1] != replies[2]


async def test_stop_string_ends_a_reply_after_the_token_that_completes_it(upstream: Any) -> None:
    whole = await upstream.complete(make_request(temperature=0.0, max_tokens=6), timeout=SECONDS)
    tokens = read_ints(whole.sampled)
    stop = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json")).decode(tokens[:3])[-2:]
    stopped = await upstream.complete(make_request(temperature=0.0, stop=(stop,)), timeout=SECONDS)
    assert stopped.finish == "stop"
    assert 0 < len(read_ints(stopped.sampled)) <= 3
    assert read_ints(stopped.sampled) == tokens[: len(read_ints(stopped.sampled))]


async def test_long_prompts_are_not_changed(upstream: Any, engine: Any) -> None:
    prompt = [*PROMPT * 140, *PROMPT]
    reply = await upstream.complete(make_request(prompt, temperature=0.0, max_tokens=4), timeout=SECONDS)
    assert read_ints(reply.prompt) == prompt
    assert reply.prompt_tokens == len(prompt)
    if engine[0] != "llamacpp":  # llama.cpp's numbers depend on how it splits a long prompt into batches
        values = await rescored(engine, prompt, read_ints(reply.sampled))
        assert read_floats(reply.logprobs) == pytest.approx(values, abs=1e-3)


async def test_a_prompt_beyond_the_context_is_a_truncation(upstream: Any) -> None:
    with pytest.raises(Truncation) as caught:
        await upstream.complete(make_request(PROMPT * 400), timeout=SECONDS)
    assert caught.value.reason == "context"


@pytest.mark.parametrize("streamed", [False, True])
async def test_alternatives_of_vllm_are_read_with_their_token_ids(vllm: RunningEngine, streamed: bool) -> None:
    request = msgspec.structs.replace(make_request(temperature=0.0, max_tokens=4), top_logprobs=3)
    opened = open_upstream(vllm_config(vllm))
    try:
        reply = await opened.complete(request, timeout=SECONDS, on_delta=DeltaLog() if streamed else None)
    finally:
        await opened.close()
    assert [len(tops) for tops in reply.tops] == [3] * 4
    best = [max(tops, key=lambda top: top[1]) for tops in reply.tops]
    assert [token for token, _ in best] == read_ints(reply.sampled)
    assert [logprob for _, logprob in best] == pytest.approx(read_floats(reply.logprobs), abs=1e-4)


async def test_vllm_without_its_token_endpoint_is_asked_through_completions(vllm: RunningEngine) -> None:
    """vLLM answers 403 at `/inference/v1/generate` unless it runs with `--enable-scale-out`."""
    async with forbidding_proxy(vllm.url, "/inference/v1/generate") as url:
        opened = open_upstream(UpstreamConfig(kind="vllm", urls=(f"{url}/v1",)))
        try:
            reply = await opened.complete(make_request(temperature=0.0), timeout=SECONDS)
        finally:
            await opened.close()
    direct = open_upstream(vllm_config(vllm))
    try:
        expected = await direct.complete(make_request(temperature=0.0), timeout=SECONDS)
    finally:
        await direct.close()
    assert (reply.prompt, reply.sampled, reply.finish) == (expected.prompt, expected.sampled, expected.finish)
    assert read_floats(reply.logprobs) == pytest.approx(read_floats(expected.logprobs), abs=1e-4)
