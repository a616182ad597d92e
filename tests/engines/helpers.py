"""Requests to real engines, and checks of what they return."""

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from rookery.core import Rollout, Sampling, ints
from rookery.upstreams import Delta, ModelRequest, UpstreamConfig
from tests import waiting
from tests.engines.conftest import TEMPLATE, WEIGHTS, RunningEngine

PROMPT = [1, 4093, 198, 36218, 15310, 30, 2, 198, 1, 520, 9531, 198]
"""`Say OK.` in SmolLM2's chat template."""
SECONDS = 300.0
RENDERING = {
    "name": "default",
    "tokenizer": str(WEIGHTS),
    "template": TEMPLATE.read_text(encoding="utf-8"),
    "tool_parser": "hermes",
}
"""The chat format that vLLM serves in these tests, for runs that render prompts themselves."""


def read_ints(data: bytes) -> list[int]:
    return list(array("i", data))


def read_floats(data: bytes) -> list[float]:
    return list(array("f", data))


def make_request(tokens: list[int] = PROMPT, **sampling: Any) -> ModelRequest:
    return ModelRequest(model="", tokens=ints(tokens), sampling=Sampling(**{"max_tokens": 24, **sampling}))


def request_exactly(count: int, tokens: list[int] = PROMPT) -> ModelRequest:
    """Return a request for `count` tokens, with the same ones in every reply."""
    return make_request(tokens, temperature=0.0, max_tokens=count, extra={"ignore_eos": True})


def vllm_config(server: RunningEngine, **options: Any) -> UpstreamConfig:
    return UpstreamConfig(kind="vllm", urls=(f"{server.url}/v1",), **options)


async def wait_until(condition: Callable[[], bool]) -> None:
    await waiting.wait_until(lambda: asyncio.to_thread(condition), SECONDS)


class TokenCounter:
    """Receives the deltas of a streamed reply, and sets `reached` when `count` tokens have arrived."""

    def __init__(self, count: int = 4) -> None:
        self._missing = count
        self.reached = asyncio.Event()

    async def __call__(self, delta: Delta) -> None:
        self._missing -= len(delta.sampled) // 4
        if self._missing <= 0:
            self.reached.set()


async def post(server: RunningEngine, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request with JSON to a server. Return the decoded reply, or None if it has no body."""
    timeout = aiohttp.ClientTimeout(SECONDS)
    async with (
        aiohttp.ClientSession(server.url, timeout=timeout) as session,
        session.post(path, json=body or {}) as reply,
    ):
        text = await reply.text()
        assert reply.status == 200, f"{path} answered {reply.status}: {text}"
        return await reply.json(content_type=None) if text else None


async def load_weights(vllm: RunningEngine, directory: Path) -> None:
    """Replace the weights of a running vLLM. `reload_weights` is the way that works without a GPU."""
    await post(vllm, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})


async def rescore(vllm: RunningEngine, tokens: list[int]) -> list[float]:
    """Return vLLM's own log probability of each token after the first, given the tokens before it."""
    body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "model": "smollm2"}
    positions = (await post(vllm, "/v1/completions", body))["choices"][0]["prompt_logprobs"]
    return [float(positions[at][str(token)]["logprob"]) for at, token in enumerate(tokens) if at]


async def check_tokens(vllm: RunningEngine, rollout: Rollout, earlier: set[str], *, constrained: bool) -> None:
    """Check a rollout's tokens against vLLM's log, and its log probabilities against vLLM's own scoring.

    `earlier` are the IDs of requests that were logged before the rollout. If the output was constrained, vLLM
    reports log probabilities among the allowed tokens, which its scoring of a prompt does not.
    """
    logged = {name: one for name, one in vllm.logged_requests().items() if name not in earlier}
    assert len(logged) == rollout.usage.turns >= 1
    segments = [read_ints(segment.tokens) for segment in rollout.segments]
    for request in logged.values():
        expected_start = request.prompt + (request.sampled or [])
        assert any(tokens[: len(expected_start)] == expected_start for tokens in segments)
    assert sum(segment.mask.count(1) for segment in rollout.segments) == rollout.usage.sampled_tokens
    if constrained:
        return
    for segment, tokens in zip(rollout.segments, segments, strict=True):
        expected, recorded = await rescore(vllm, tokens), read_floats(segment.logprobs)
        trained = [at for at, trains in enumerate(segment.mask) if trains]
        assert trained
        assert max(abs(recorded[at] - expected[at - 1]) for at in trained) < 1e-3
        assert max(abs(recorded[at] - expected[at - 2]) for at in trained) > 1e-2, "a shift must be noticed"
