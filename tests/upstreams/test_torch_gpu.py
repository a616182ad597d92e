"""The torch sampler on a GPU: CUDA graphs, weight updates after a capture, and work of other threads meanwhile."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from rookery.upstreams.torch import LoadedModel
from rookery.upstreams.torch.batch import SampledSequence
from rookery.upstreams.torch.sampler import Sampler
from rookery.upstreams.torch.token_sampling import TokenChoice
from tests.upstreams.torch_kit import build_batch, build_model, build_tokenizer, run_batch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="[probed] this machine has no GPU that torch can use"
)

GREEDY = TokenChoice(temperature=0.0)
TOLERANCE = 1e-3


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Any:
    """Let float32 products on the GPU have full precision, to compare them with those of the CPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def build_sequences() -> list[SampledSequence]:
    prompts = [[(7 * seed + at) % 250 for at in range(5 + 11 * seed)] for seed in range(9)]
    return [SampledSequence(prompt, max_tokens=40, seed=1, choice=GREEDY) for prompt in prompts]


def test_graphs_give_the_tokens_of_steps_without_graphs_and_of_the_cpu() -> None:
    model = build_model()
    on_cpu, with_graphs, without_graphs = build_sequences(), build_sequences(), build_sequences()
    run_batch(build_batch(model), *on_cpu)
    model = model.to("cuda")
    run_batch(build_batch(model), *with_graphs)
    run_batch(build_batch(model, bucketed=False), *without_graphs)
    for expected, captured, plain in zip(on_cpu, with_graphs, without_graphs, strict=True):
        assert captured.tokens == plain.tokens == expected.tokens
        assert captured.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


async def test_captured_steps_use_new_weights_while_another_thread_uses_the_gpu() -> None:
    other = build_model(seed=1)
    expected = build_sequences()
    run_batch(build_batch(other), *expected)
    sampler = Sampler(LoadedModel(build_model().to("cuda"), build_tokenizer()), slots=4, context=256)
    stop = asyncio.Event()

    def allocate() -> None:
        while not stop.is_set():
            (torch.ones((256, 256), device="cuda") @ torch.ones((256, 256), device="cuda")).sum().item()

    try:
        busy = asyncio.create_task(asyncio.to_thread(allocate))
        await asyncio.gather(*(sampler.run(sequence) for sequence in build_sequences()))
        state = {name: tensor.to("cuda") for name, tensor in other.state_dict().items()}
        await asyncio.to_thread(sampler.load_weights, state, 1)
        sequences = build_sequences()
        await asyncio.gather(*(sampler.run(sequence) for sequence in sequences))
        stop.set()
        await busy
    finally:
        stop.set()
        await sampler.close()
    for sequence, reference in zip(sequences, expected, strict=True):
        assert sequence.tokens == reference.tokens
        assert sequence.versions == [(0, 1)]
