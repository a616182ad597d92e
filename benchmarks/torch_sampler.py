"""Benchmark `torch-sampler`: sampling speed of the upstream `torch` beside transformers' `generate` and the floor.

On a GPU, 256 sequences of 128 tokens are sampled from SmolLM2-135M-Instruct in bfloat16; on a CPU, 8 sequences of
32 tokens in float32. The floor is the time in which a step reads the weights once: their bytes divided by the
memory bandwidth, which is measured by copying a large tensor.

Guarantees:
- only sampled tokens count, although the prompts are computed in the same time;
- every sequence samples all of its tokens, because no token ends it; one that lacks tokens fails the benchmark;
- `generate` samples the same prompts with the same number of tokens, in one batch, with its KV cache;
- every round has other prompts, so that the prefix cache has none of them;
- figures are medians of alternating runs, after one run that is not counted.
"""

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import CHECKOUT, Progress, Result
from rookery.core import UsageError

NAME = "torch-sampler"
MODEL = CHECKOUT / ".peers" / "smollm2"
PROMPT = "<|im_start|>user\nWrite a story about number {}.<|im_end|>\n<|im_start|>assistant\n"


class Size(NamedTuple):
    """Size of one measurement: number of sequences, tokens per sequence, and repetitions."""

    sequences: int
    tokens: int
    rounds: int


GPU = Size(sequences=256, tokens=128, rounds=5)
CPU = Size(sequences=8, tokens=32, rounds=3)


def run(quick: bool, progress: Progress) -> list[Result]:
    return asyncio.run(measure(quick, progress, find_model()))


def find_model() -> Path:
    """Return the path of SmolLM2: a folder, or the GGUF file if it was not converted."""
    for path in (MODEL / "hf", *MODEL.glob("*.gguf")):
        if path.exists():
            return path
    raise UsageError(f"the benchmark needs SmolLM2 in {MODEL}: run make engines")


async def measure(quick: bool, progress: Progress, path: Path) -> list[Result]:
    """Measure the model at `path` on the GPU, or on the CPU if there is none."""
    import torch

    from rookery.upstreams.torch import load_model
    from rookery.upstreams.torch.sampler import Sampler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = GPU if device == "cuda" else CPU
    rounds = 1 if quick else size.rounds
    loaded = load_model(path, device=device)
    sampler = Sampler(loaded, slots=size.sequences, context=512)
    ours: list[float] = []
    theirs: list[float] = []
    try:
        for number in range(rounds + 1):
            progress(f"round {number} of {rounds}: the sampler, then generate")
            prompts = _prompts(loaded.tokenizer, 1000 + number * size.sequences, size.sequences)
            rates = await _sample(sampler, prompts, size.tokens), _generate(loaded.model, prompts, size.tokens)
            if number:
                ours.append(rates[0])
                theirs.append(rates[1])
        progress("one sequence alone, and new weights")
        alone = await _sample(sampler, _prompts(loaded.tokenizer, 100, 1), size.tokens)
        state = loaded.model.state_dict()
        began = time.perf_counter()
        await asyncio.to_thread(sampler.load_weights, state, 1)
        loading = 1e3 * (time.perf_counter() - began)
    finally:
        await sampler.close()
    bandwidth = _bandwidth(device)
    step = sampler.weight_bytes / bandwidth
    shape = f"{size.sequences} sequences x {size.tokens} tokens, {device} {loaded.model.dtype}".replace(
        "torch.", ""
    )
    return [
        Result(
            name="tokens_per_s",
            unit="tokens/s",
            ours=median(ours),
            peer="transformers generate",
            theirs=median(theirs),
            target=">= 10x" if device == "cuda" else None,
            lower_is_better=False,
            note=f"{shape}, prompts of {len(prompts[0])} tokens, {_spread(ours)}",
        ),
        Result(
            name="step_ms",
            unit="ms",
            ours=1e3 * size.sequences / median(ours),
            peer="floor: read the weights",
            theirs=1e3 * step,
            note=f"{sampler.weight_bytes / 1e6:,.0f} MB of weights at {bandwidth / 1e9:,.0f} GB/s",
        ),
        Result(
            name="floor_tokens_per_s",
            unit="tokens/s",
            ours=size.sequences / step,
            lower_is_better=False,
            note="the rate if a step only read the weights: no KV cache, no attention, no sampling",
        ),
        Result(
            name="tokens_per_s_1",
            unit="tokens/s",
            ours=alone,
            lower_is_better=False,
            note="one sequence alone",
        ),
        Result(name="load_weights_ms", unit="ms", ours=loading, note="from a state_dict on the same device"),
    ]


def _prompts(tokenizer: Any, first: int, count: int) -> list[list[int]]:
    """Return prompts of one length, so that `generate` needs no padding."""
    texts = [PROMPT.format(number) for number in range(first, first + count)]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [prompt[: min(map(len, prompts))] for prompt in prompts]


def _spread(rates: list[float]) -> str:
    return f"from {min(rates):,.0f} to {max(rates):,.0f}"


async def _sample(sampler: Any, prompts: list[list[int]], tokens: int) -> float:
    """Return tokens per second of one sequence for each prompt, all at once."""
    from rookery.upstreams.torch.batch import SampledSequence

    sequences = [SampledSequence(prompt, max_tokens=tokens, seed=number) for number, prompt in enumerate(prompts)]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for sequence in sequences:
            group.create_task(sampler.run(sequence))
    seconds = time.perf_counter() - began
    if any(len(sequence.tokens) != tokens for sequence in sequences):
        raise RuntimeError("a sequence has fewer tokens than asked for")
    return len(prompts) * tokens / seconds


def _generate(model: Any, prompts: list[list[int]], tokens: int) -> float:
    """Return tokens per second of transformers' `generate` for a batch of prompts."""
    import torch

    ids = torch.tensor(prompts).to(model.device)
    began = time.perf_counter()
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
        )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if whole.shape[1] != ids.shape[1] + tokens:
        raise RuntimeError("generate returned fewer tokens than asked for")
    return len(prompts) * tokens / seconds


def _bandwidth(device: str) -> float:
    """Return the memory bandwidth in bytes per second: a copy reads and writes each byte once."""
    import torch

    count = (1 << 30) if device == "cuda" else (1 << 28)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        _synchronise(device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronise(device)
        best = min(best, time.perf_counter() - began)
    return 2 * count / best


def _synchronise(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
