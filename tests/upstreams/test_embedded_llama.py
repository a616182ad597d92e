"""The NumPy Llama compared with a float64 reference, with PyTorch, and with itself in a batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.upstreams.embedded.batch import Batch, SamplingJob
from rookery.upstreams.embedded.llama import TILE, Llama
from rookery.upstreams.embedded.sampler import TokenChoice
from rookery.upstreams.embedded.upstream import load_builtin_weights
from rookery.upstreams.embedded.weights import Weights
from tests.upstreams import embedded_reference as reference

CLOSE = 1e-4


def run_jobs(
    batch: Batch, jobs: list[SamplingJob], arrivals: list[int] | None = None
) -> list[tuple[list[int], list[float]]]:
    """Run all jobs to their end. `arrivals` has the number of steps between the starts of two jobs."""
    waits = list(arrivals or [0] * len(jobs))
    coming = list(jobs)
    while coming or batch.busy:
        while coming and waits[len(jobs) - len(coming)] <= 0:
            batch.add(coming.pop(0))
        if coming:
            waits[len(jobs) - len(coming)] -= 1
        batch.step()
    return [(job.tokens, job.logprobs) for job in jobs]


@given(weights=reference.models(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_numpy_inference_agrees_with_a_float64_reference(weights: Weights, data: st.DataObject) -> None:
    context = weights.shape.max_position_embeddings
    count = data.draw(st.integers(1, min(context - 1, 320)))
    tokens = data.draw(st.lists(st.integers(0, 271), min_size=count, max_size=count))
    expected = reference.logprobs(weights, tokens)
    llama = Llama(weights)
    given_in_one = tokens[: data.draw(st.integers(1, count))]
    batch = Batch(llama)
    # A logprob is recorded only for the sampled token, so each position is computed separately.
    for at in sorted({len(given_in_one), count}):
        job = SamplingJob(tokens[:at], max_tokens=1, seed=0, choice=TokenChoice(temperature=0.0))
        batch.add(job)
        batch.step()
        assert job.logprobs[0] == pytest.approx(expected[at - 1][job.tokens[0]], abs=CLOSE)
    logits = np.asarray(all_logits(llama, tokens), dtype=np.float64)
    logits -= logits.max(-1, keepdims=True)
    found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    likely = expected > -30  # smaller values are below the precision of float32
    assert np.abs(found - expected)[likely].max() < CLOSE


def all_logits(llama: Llama, tokens: list[int]) -> np.ndarray:
    """Return the logits after every token, computed by the code for prompts."""
    batch = Batch(llama, blocks=0)
    rows: list[np.ndarray] = []
    whole = llama.rows

    def spy(tokens: object, positions: object, attend: object, wanted: slice = slice(None)) -> np.ndarray:
        found = whole(tokens, positions, attend)  # type: ignore[arg-type]
        rows.append(found)
        return found[wanted]

    llama.rows = spy  # type: ignore[method-assign]
    try:
        batch.add(SamplingJob(tokens, max_tokens=1, seed=0))
        batch.step()
    finally:
        llama.rows = whole  # type: ignore[method-assign]
    return np.concatenate(rows)


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_batching_does_not_change_results(data: st.DataObject) -> None:
    """Tokens and logprobs are bitwise the same alone, in a changing batch, and with or without the prefix
    cache."""
    weights = Weights.random(reference.SMALL, seed=data.draw(st.integers(0, 99)), scale=0.2)
    llama = Llama(weights)
    starts = [data.draw(st.binary(min_size=1, max_size=40)) * data.draw(st.integers(1, 6)) for _ in range(3)]
    requests = [
        {
            "prompt": [*data.draw(st.sampled_from(starts)), *data.draw(st.binary(max_size=30))],
            "max_tokens": data.draw(st.integers(1, 90)),
            "seed": data.draw(st.integers(0, 2**63 - 1)),
            "choice": data.draw(
                st.sampled_from([TokenChoice(), TokenChoice(0.0), TokenChoice(0.7, 0.9), TokenChoice(1.3, 1.0, 5)])
            ),
            "ends": frozenset({7, 257}),
        }
        for _ in range(data.draw(st.integers(1, 20)))
    ]
    alone = [run_jobs(Batch(llama, blocks=0), [SamplingJob(**one)])[0] for one in requests]  # type: ignore[arg-type]
    batch = Batch(llama, slots=data.draw(st.integers(1, 24)), blocks=data.draw(st.sampled_from([0, 5, 500])))
    arrivals = data.draw(st.lists(st.integers(0, 9), min_size=len(requests), max_size=len(requests)))
    assert run_jobs(batch, [SamplingJob(**one) for one in requests], arrivals) == alone  # type: ignore[arg-type]
    again = [SamplingJob(**one) for one in requests]  # type: ignore[arg-type]
    assert run_jobs(batch, again) == alone


@pytest.mark.long
def test_batching_does_not_change_results_of_the_bundled_policy() -> None:
    llama = Llama(load_builtin_weights())
    rng = np.random.default_rng(5)
    specs = [(rng.integers(32, 127, 40 + 9 * n).tolist(), 100 + n) for n in range(70)]
    alone = [
        run_jobs(Batch(llama, blocks=0), [SamplingJob(prompt, max_tokens=150, seed=seed)])[0]
        for prompt, seed in specs[:6]
    ]
    batch = Batch(llama)
    assert run_jobs(batch, [SamplingJob(prompt, max_tokens=150, seed=seed) for prompt, seed in specs])[:6] == alone


def test_logprob_is_the_same_computed_as_a_prompt_or_one_by_one() -> None:
    llama = Llama(Weights.random(reference.SMALL, seed=3, scale=0.3))
    job = SamplingJob(list(b"What is 7 + 5?"), max_tokens=300, seed=1)
    run_jobs(Batch(llama), [job])
    whole = [*job.prompt, *job.tokens]
    logits = all_logits(llama, whole[:-1])[len(job.prompt) - 1 :]
    low = logits - logits.max(-1, keepdims=True)
    sampled = low[np.arange(len(job.tokens)), job.tokens] - np.log(np.exp(low).sum(-1))
    assert sampled.tolist() == job.logprobs


def test_rows_are_computed_one_by_one_if_blas_is_not_uniform_in_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batching does not change results even if the BLAS result depends on a row's position in its tile."""
    real = np.matmul

    def uneven(a: np.ndarray, b: np.ndarray, **options: object) -> np.ndarray:
        found = real(a, b, **options)
        if a.ndim <= 3 and a.shape[-2] == TILE:
            found[..., 3, :] *= np.float32(1 + 1e-6)
        return found

    even = Llama(Weights.random(reference.SMALL, seed=3))
    assert even.tile == TILE
    monkeypatch.setattr(np, "matmul", uneven)
    llama = Llama(Weights.random(reference.SMALL, seed=3))
    assert llama.tile == 1
    jobs = [SamplingJob(list(range(1, 20 + n)), max_tokens=30, seed=n) for n in range(9)]
    together = run_jobs(Batch(llama), jobs)
    alone = [
        run_jobs(Batch(llama, blocks=0), [SamplingJob(job.prompt, max_tokens=30, seed=n)])[0]
        for n, job in enumerate(jobs)
    ]
    assert together == alone


def test_numpy_and_pytorch_logprobs_agree() -> None:
    """The built-in policy and random models, compared with `LlamaForCausalLM`."""
    import torch

    shape = reference.SMALL
    for weights in (load_builtin_weights(), Weights.random(shape, seed=9, scale=0.3)):
        tokens = np.random.default_rng(4).integers(0, 272, 390).tolist()
        tokens[:40] = b"What is 17 + 25? Please use the tool, ok"
        with torch.no_grad():
            theirs = torch.log_softmax(weights.to_model()(torch.tensor([tokens])).logits[0].double(), -1).numpy()
        ours = np.asarray(all_logits(Llama(weights), tokens), dtype=np.float64)
        ours -= ours.max(-1, keepdims=True)
        ours -= np.log(np.exp(ours).sum(-1, keepdims=True))
        sampled = np.arange(len(tokens) - 1), tokens[1:]
        assert np.abs(ours - theirs).max() < CLOSE, "some next token"
        assert np.abs(ours[sampled] - theirs[sampled]).max() < CLOSE
