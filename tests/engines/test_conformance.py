"""Conformance of the upstream kinds with the real engines: token IDs and log probabilities in and out.

The engines are vLLM, llama.cpp, and the upstream `torch`, which runs in this process.
"""

from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import test_utils, web

from rookery.core import Sampling, Truncation, ints
from rookery.upstreams import ModelRequest, UpstreamConfig, open_upstream
from rookery.upstreams.detection import detect_kind
from tests.engines.conftest import MODEL, RunningEngine
from tests.upstreams.helpers import DeltaLog

pytestmark = pytest.mark.engines

PROMPT = [1, 4093, 198, 36218, 15310, 30, 2, 198, 1, 520, 9531, 198]
"""`Say OK.` in SmolLM2's chat template."""
SECONDS = 300.0
JSON = {"Content-Type": "application/json"}


def read_ints(data: bytes) -> list[int]:
    return list(array("i", data))


def read_floats(data: bytes) -> list[float]:
    return list(array("f", data))


SERVERS = ("vllm", "llamacpp")


@pytest.fixture(params=[*SERVERS, "torch"])
def engine(request: pytest.FixtureRequest) -> tuple[str, RunningEngine | None]:
    if request.param in SERVERS:
        return request.param, request.getfixturevalue(request.param)
    if not (MODEL / "complete").exists():
        pytest.skip("[probed] this machine has no SmolLM2 (make engines)")
    pytest.importorskip("torch")
    return request.param, None


@pytest.fixture
async def upstream(engine: tuple[str, RunningEngine | None]) -> AsyncIterator[Any]:
    kind, server = engine
    url = f"hf:{MODEL / 'hf'}?slots=4&context=2048" if server is None else f"{server.url}/v1"
    opened = open_upstream(UpstreamConfig(kind=kind, urls=(url,)))
    yield opened
    await opened.close()


def request(tokens: list[int] = PROMPT, **sampling: Any) -> ModelRequest:
    return ModelRequest(model="", tokens=ints(tokens), sampling=Sampling(**{"max_tokens": 24, **sampling}))


async def rescored(engine: tuple[str, RunningEngine | None], prompt: list[int], sampled: list[int]) -> list[float]:
    """Ask the engine for the log probability of each sampled token, given the tokens before it."""
    kind, server = engine
    if server is None:
        from rookery.upstreams.torch import load_model
        from tests.upstreams.torch_kit import rescore

        return rescore(load_model(MODEL / "hf").model, prompt, sampled)
    async with aiohttp.ClientSession(server.url) as session:
        if kind == "vllm":
            body = {"prompt": prompt + sampled, "max_tokens": 1, "prompt_logprobs": 0, "model": "smollm2"}
            async with session.post("/v1/completions", json=body) as reply:
                prompt_logprobs = (await reply.json())["choices"][0]["prompt_logprobs"]
            return [
                float(prompt_logprobs[len(prompt) + at][str(token)]["logprob"]) for at, token in enumerate(sampled)
            ]
        values = []
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
async def test_the_kind_of_the_server_is_detected(kind: str, request: pytest.FixtureRequest) -> None:
    server: RunningEngine = request.getfixturevalue(kind)
    assert (await detect_kind(UpstreamConfig(urls=(f"{server.url}/v1",)))).kind == kind


async def test_logprobs_of_sampled_tokens_equal_the_engines_own_rescoring(upstream: Any, engine: Any) -> None:
    reply = await upstream.complete(request(temperature=1.0, seed=7, max_tokens=12), timeout=SECONDS)
    sampled, logprobs = read_ints(reply.sampled), read_floats(reply.logprobs)
    values = await rescored(engine, PROMPT, list(sampled))
    assert len(logprobs) == len(sampled) == len(values) > 2
    worst = max(abs(ours - theirs) for ours, theirs in zip(logprobs, values, strict=True))
    shifted = max(abs(ours - theirs) for ours, theirs in zip(logprobs[1:], values[:-1], strict=True))
    assert worst < 1e-4
    assert shifted > 1e-2, "the check must notice log probabilities that are off by one"


async def test_streamed_and_whole_replies_are_the_same_tokens(upstream: Any) -> None:
    whole = await upstream.complete(request(temperature=0.0), timeout=SECONDS)
    on_delta = DeltaLog()
    streamed = await upstream.complete(request(temperature=0.0), timeout=SECONDS, on_delta=on_delta)
    assert read_ints(streamed.sampled) == read_ints(whole.sampled)
    assert b"".join(delta.sampled for delta in on_delta.deltas) == whole.sampled
    assert len(on_delta.deltas) > 1


async def test_the_end_token_is_part_of_a_reply_that_stopped(upstream: Any) -> None:
    reply = await upstream.complete(request(temperature=0.0, max_tokens=64), timeout=SECONDS)
    assert reply.finish == "stop"
    assert read_ints(reply.sampled)[-1] == 2


async def test_max_tokens_ends_a_reply_with_length(upstream: Any) -> None:
    reply = await upstream.complete(request(temperature=0.0, max_tokens=3), timeout=SECONDS)
    assert (reply.finish, len(read_ints(reply.sampled))) == ("length", 3)


async def test_a_seed_repeats_a_reply_and_another_seed_changes_it(upstream: Any) -> None:
    replies = [
        read_ints((await upstream.complete(request(temperature=1.0, seed=seed), timeout=SECONDS)).sampled)
        for seed in (1, 1, 2)
    ]
    assert replies[0] == replies[1] != replies[2]


async def test_a_prompt_beyond_the_context_is_a_truncation(upstream: Any) -> None:
    with pytest.raises(Truncation) as caught:
        await upstream.complete(request(PROMPT * 200), timeout=SECONDS)
    assert caught.value.reason == "context"


async def test_vllm_without_its_token_endpoint_is_asked_through_completions(vllm: RunningEngine) -> None:
    """vLLM answers 403 at `/inference/v1/generate` unless it runs with `--enable-scale-out`."""
    async with forbidding_proxy(vllm.url, "/inference/v1/generate") as url:
        opened = open_upstream(UpstreamConfig(kind="vllm", urls=(f"{url}/v1",)))
        try:
            reply = await opened.complete(request(temperature=0.0), timeout=SECONDS)
        finally:
            await opened.close()
    direct = open_upstream(UpstreamConfig(kind="vllm", urls=(f"{vllm.url}/v1",)))
    try:
        expected = await direct.complete(request(temperature=0.0), timeout=SECONDS)
    finally:
        await direct.close()
    assert (reply.prompt, reply.sampled, reply.finish) == (expected.prompt, expected.sampled, expected.finish)
    assert read_floats(reply.logprobs) == pytest.approx(read_floats(expected.logprobs), abs=1e-4)
