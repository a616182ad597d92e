"""A run whose policy is a transformers model in this process, and whose weights a trainer replaces."""

import asyncio
from array import array
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("renderers")

from rookery import Context, Engine, Environment, Sampling
from rookery.core import Group, Segment
from rookery.gateway.config import choose_rendering, resolve_rendering
from rookery.upstreams import UpstreamConfig
from rookery.upstreams.torch import SharedSampler
from tests.upstreams.torch_kit import SMOLLM2, build_model, rescore, save_model

ROWS = [{"prompt": str(number)} for number in range(3)]


class TwoTurns(Environment):
    sampling = Sampling(max_tokens=12)

    async def run(self, ctx: Context) -> None:
        reply = await ctx.policy.chat(ctx.task.prompt)
        await ctx.policy.chat([*ctx.task.prompt, reply.message, {"role": "user", "content": "go on"}])

    async def score(self, ctx: Context) -> float:
        return float(int(ctx.task.text) % 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("torch") / "small")


def segments(groups: list[Group]) -> list[Segment]:
    return [segment for group in groups for rollout in group.rollouts for segment in rollout.segments]


def check_logprobs(segment: Segment, model: object) -> None:
    """Compare the log probabilities of trained tokens with those of a forward pass over the segment."""
    tokens, logprobs = list(array("i", segment.tokens)), list(array("f", segment.logprobs))
    expected = rescore(model, tokens[:1], tokens[1:])
    trained = [at for at in range(1, len(tokens)) if segment.mask[at]]
    assert trained
    assert max(abs(logprobs[at] - expected[at - 1]) for at in trained) < 1e-4


async def test_run_records_tokens_and_follows_new_weights(folder: Path, tmp_path: Path) -> None:
    policy = f"hf:{folder}?slots=4"
    other = build_model(seed=1)
    handle = SharedSampler(policy)
    sampler = await asyncio.to_thread(handle.open)
    try:
        async with Engine(TwoTurns(), policy=policy, runners=0, out=tmp_path / "runs") as engine:
            assert engine.config.recording == "tokens"
            first = segments([group async for group in engine.groups(ROWS, k=2)])
            async with engine.upstream.sync(1, lambda: sampler.load_weights(other.state_dict(), 1)):
                pass
            second = segments([group async for group in engine.groups(ROWS, k=2, restart=True)])
    finally:
        await handle.close()
    for version, model, found in ((0, build_model(), first), (1, other, second)):
        assert len(found) >= 6
        assert {span.version for segment in found for span in segment.versions} == {version}
        for segment in found:
            check_logprobs(segment, model)
    assert sampler.stats().reused_tokens > 0


def test_tokenizer_of_the_model_is_the_default(folder: Path) -> None:
    policy = UpstreamConfig(urls=(f"hf:{folder}?slots=4",))
    assert choose_rendering("tokens", None, policy) == {"tokenizer": str(folder)}
    assert choose_rendering("tokens", {"tool_parser": "hermes"}, policy) == {
        "tokenizer": str(folder),
        "tool_parser": "hermes",
    }
    assert choose_rendering("tokens", {"tokenizer": "other"}, policy) == {"tokenizer": "other"}
    assert choose_rendering("messages", None, policy) == {}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tokenizer_of_a_gguf_file_is_written_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    file = SMOLLM2 / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not file.exists():
        pytest.skip("[probed] this machine has no SmolLM2 (make engines)")
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path))
    policy = UpstreamConfig(urls=(f"hf:{file}",))
    resolved, _ = resolve_rendering("tokens", None, policy)
    written = Path(resolved["tokenizer"])
    assert written.is_relative_to(tmp_path)
    assert (written / "tokenizer.json").is_file()
    assert (written / "chat_template.jinja").is_file()
    assert resolve_rendering("tokens", None, policy)[0] == resolved
