"""The upstream over a token function: replies, errors and deadlines."""

import asyncio
import math
from pathlib import Path

import pytest

from rookery import Sampling, SyncEngine
from rookery.core import UpstreamError, UsageError, ints
from rookery.upstreams import ModelRequest, UpstreamConfig, open_upstream
from rookery.upstreams.embedded import EmbeddedUpstream
from rookery.upstreams.token_function import TokenCall, TokenResult, serve_function
from tests.adapters.kit import ScriptedEnvironment, make_task
from tests.adapters.trl_kit import tiny


def test_engine_samples_through_a_token_function(tmp_path: Path) -> None:
    tiny(tmp_path / "policy.safetensors")
    model = EmbeddedUpstream(
        UpstreamConfig(kind="embedded", urls=(f"embedded:{tmp_path / 'policy.safetensors'}",))
    )
    calls: list[TokenCall] = []

    async def generate(call: TokenCall) -> TokenResult:
        calls.append(call)
        request = ModelRequest(tokens=ints(call.prompt), sampling=call.sampling, stop_ids=call.stop_ids)
        reply = await model.complete(request, timeout=60)
        tokens, logprobs = memoryview(reply.sampled).cast("i"), memoryview(reply.logprobs).cast("f")
        return TokenResult(tokens=tokens.tolist(), logprobs=logprobs.tolist(), finish=reply.finish, version=5)

    with serve_function(generate, model="m", context=64) as policy:
        options = {"runners": 0, "record": "tokens", "rendering": {"name": "embedded"}, "out": tmp_path / "runs"}
        sampling = Sampling(temperature=1.0, max_tokens=6)
        with SyncEngine(ScriptedEnvironment(), policy=policy, sampling=sampling, **options) as engine:
            (group,) = engine.groups([make_task("t", [1.0, 0.0])], k=2)
    assert group.rewards == [1.0, 0.0]
    for rollout in group.rollouts:
        (segment,) = rollout.segments
        assert {span.version for span in segment.versions} == {5}
        assert 0 < segment.trained <= 6
    assert len({call.session for call in calls}) == 2
    with pytest.raises(UsageError):
        open_upstream(policy)


@pytest.mark.parametrize(
    ("result", "cause"),
    [
        (TokenResult(tokens=[1, 2], logprobs=[-1.0]), "upstream.protocol"),
        (TokenResult(tokens=[1], logprobs=[math.nan]), "upstream.protocol"),
        (RuntimeError("no server"), "upstream.error"),
        (None, "upstream.timeout"),
    ],
)
async def test_failed_call_is_one_typed_error(result: TokenResult | Exception | None, cause: str) -> None:
    async def generate(_: TokenCall) -> TokenResult:
        if result is None:
            await asyncio.sleep(3600)
        if isinstance(result, Exception):
            raise result
        assert result is not None
        return result

    with serve_function(generate) as config:
        upstream = open_upstream(config)
        with pytest.raises(UpstreamError) as caught:
            await upstream.complete(ModelRequest(tokens=ints([1])), timeout=0.05 if result is None else 60)
        assert caught.value.code == cause
        with pytest.raises(UpstreamError):
            await upstream.complete(ModelRequest(), timeout=1)
