"""Sampling jobs, the batch with its caches, and the sampler."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.upstreams.embedded.batch import PROMPTS, Batch, SamplingJob
from rookery.upstreams.embedded.kv_cache import BLOCK, CacheBucket, PrefixCache, hash_blocks
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.sampler import RandomStream, TokenChoice, draw
from rookery.upstreams.embedded.weights import Weights
from tests.upstreams.embedded_reference import SMALL


@pytest.fixture(scope="module")
def llama() -> Llama:
    return Llama(Weights.random(SMALL, seed=1, scale=0.2))


def finished(batch: Batch) -> None:
    while batch.busy:
        batch.step()


# ----------------------------------------------------------------------------------------------- sampler

rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=40)


@given(rows, st.floats(0.1, 3), st.floats(0.05, 1), st.integers(0, 45), st.floats(0, 1, exclude_max=True))
def test_token_is_sampled_only_within_top_k_and_top_p(
    logits: list[float], temperature: float, top_p: float, top_k: int, number: float
) -> None:
    [token], [logprob] = draw(np.float32([logits]), [TokenChoice(temperature, top_p, top_k)], [number])
    wide = np.float64(np.float32(logits))
    chances = np.exp((wide - wide.max()) / temperature)
    chances /= chances.sum()
    better = chances > chances[token] * (1 + 1e-5)
    assert better.sum() < (top_k or math.inf)
    if not 0 < top_k < len(logits):
        assert chances[better].sum() < top_p + 1e-5
    own = np.exp(wide - wide.max())
    assert logprob == pytest.approx(math.log(own[token] / own.sum()), abs=1e-5)


@given(rows)
def test_temperature_zero_takes_the_likeliest(logits: list[float]) -> None:
    [token], _ = draw(np.float32([logits]), [TokenChoice(0.0)], [0.99])
    assert np.float32(logits)[token] == np.float32(logits).max()


def test_token_frequencies_match_the_model() -> None:
    chances = np.array([0.5, 0.25, 0.15, 0.1, 0.0])
    with np.errstate(divide="ignore"):
        logits = np.tile(np.log(chances).astype(np.float32), (20_000, 1))
    draws = RandomStream(11)
    tokens, _ = draw(logits, [TokenChoice(1.0)] * len(logits), [draws.next() for _ in logits])
    counts = Counter(tokens)
    assert counts[4] == 0
    for token, chance in enumerate(chances[:4]):
        assert counts[token] / len(logits) == pytest.approx(chance, abs=0.015)


def test_random_number_close_to_one_samples_a_possible_token() -> None:
    logits = np.float32([[0.0, -1.0, -200.0]])
    [token], _ = draw(logits, [TokenChoice(1.0)], [1 - 2**-53])
    assert token in (0, 1)


def test_banned_token_is_never_sampled() -> None:
    logits = np.float32([[0.0, 30.0, -5.0]] * 200)
    draws = RandomStream(0)
    for temperature in (0.0, 1.0):
        choice = TokenChoice(temperature, banned_id=1)
        tokens, logprobs = draw(logits, [choice] * 200, [draws.next() for _ in logits])
        assert set(tokens) <= {0, 2}
        assert logprobs[0] < -29, "the model's own logprob, before the ban"


def test_random_numbers_depend_on_the_seed_only() -> None:
    """A recorded seed gives the same numbers on every machine and in every version of Rookery."""
    draws = RandomStream(42)
    assert [draws.next() for _ in range(3)] == [0.7840573770891061, 0.02137538836057018, 0.6942791143578687]
    again, other = RandomStream(42), RandomStream(43)
    first = [again.next() for _ in range(100)]
    assert len(set(first)) == 100
    assert first != [other.next() for _ in range(100)]
    assert all(0 <= number < 1 for number in first)


# ------------------------------------------------------------------------------------------------- batch


def test_same_seed_same_tokens_other_seed_others(llama: Llama) -> None:
    jobs = [SamplingJob(b"hello", max_tokens=60, seed=seed) for seed in (5, 5, 6)]
    batch = Batch(llama)
    for job in jobs:
        batch.add(job)
    finished(batch)
    assert jobs[0].tokens == jobs[1].tokens != jobs[2].tokens
    assert len(jobs[0].tokens) == len(jobs[0].logprobs) == 60


def test_sequence_ends_at_an_end_id_a_stop_string_its_limit_or_the_context(llama: Llama) -> None:
    def ended(prompt: int = 5, **options: object) -> SamplingJob:
        job = SamplingJob(b"a" * prompt, **{"max_tokens": 999, "seed": 3, **options})  # type: ignore[arg-type]
        batch = Batch(llama)
        batch.add(job)
        finished(batch)
        return job

    free = ended(max_tokens=80)
    assert (free.finish, len(free.tokens), free.text_tokens) == ("length", 80, 80)
    token = free.tokens[20]
    first = free.tokens.index(token)
    at_end = ended(ends=frozenset({token}))
    assert (at_end.finish, at_end.tokens, at_end.text_tokens) == ("stop", free.tokens[: first + 1], first)
    stop = next(
        bytes(free.tokens[at : at + 2]) for at in range(5, 70) if all(t < 256 for t in free.tokens[at : at + 2])
    )
    stop_index = next(at for at in range(79) if free.tokens[at : at + 2] == list(stop))
    at_stop = ended(stop=(b"", b"never there", stop))
    assert (at_stop.finish, at_stop.tokens, at_stop.text_tokens) == (
        "stop",
        free.tokens[: stop_index + 2],
        stop_index,
    )
    full = ended(prompt=390)
    assert (full.finish, len(full.prompt) + len(full.tokens)) == ("length", llama.context)


def test_running_sequences_are_limited_and_start_in_order(llama: Llama) -> None:
    batch = Batch(llama, slots=3)
    jobs = [SamplingJob(b"x" * (n + 1), max_tokens=4, seed=n) for n in range(9)]
    for job in jobs:
        batch.add(job)
    ends: list[int] = []
    while batch.busy:
        ends += [jobs.index(job) for job in batch.step() if job.finish]
        assert batch.running <= 3
    assert ends == sorted(ends)


def test_long_queue_of_prompts_does_not_delay_running_sequences(llama: Llama) -> None:
    batch = Batch(llama)
    early = SamplingJob(b"early", max_tokens=50, seed=0)
    batch.add(early)
    batch.step()
    for n in range(20):
        batch.add(SamplingJob([n] * 300, max_tokens=50, seed=n))
    before = len(batch.waiting)
    batch.step()
    assert len(early.tokens) == 2
    assert (before - len(batch.waiting)) * 300 <= PROMPTS


def test_discarded_sequence_frees_its_slot(llama: Llama) -> None:
    batch = Batch(llama, slots=2)
    jobs = [SamplingJob(b"x" * (n + 1), max_tokens=40, seed=n) for n in range(4)]
    for job in jobs:
        batch.add(job)
    batch.step()
    assert batch.discard(jobs[0])
    assert batch.discard(jobs[3])
    assert not batch.discard(jobs[0])
    batch.step()
    assert batch.running == 2
    finished(batch)
    assert [len(job.tokens) for job in jobs] == [1, 40, 40, 0]


def test_invalid_prompts_are_refused(llama: Llama) -> None:
    batch = Batch(llama)
    for prompt, named in (([], r"\b0\b.*399"), ([1] * 400, r"\b400\b.*399"), ([272], "271"), ([-1], "271")):
        with pytest.raises(ValueError, match=named):
            batch.add(SamplingJob(prompt, max_tokens=1, seed=0))
    assert not batch.busy


# ------------------------------------------------------------------------------------------------ caches


def test_prefix_cache_is_used_and_does_not_change_results(llama: Llama) -> None:
    batch = Batch(llama)
    first = SamplingJob([*range(100)], max_tokens=60, seed=1)
    batch.add(first)
    finished(batch)
    further = [*first.prompt, *first.tokens, *range(30)]
    second, alone = (SamplingJob(further, max_tokens=20, seed=2) for _ in range(2))
    batch.add(second)
    finished(batch)
    fresh = Batch(llama, blocks=0)
    fresh.add(alone)
    finished(fresh)
    assert second.reused == (len(first.prompt) + len(first.tokens) - 1) // BLOCK * BLOCK
    assert alone.reused == 0
    assert (second.tokens, second.logprobs) == (alone.tokens, alone.logprobs)


def test_prefix_cache_is_bounded(llama: Llama) -> None:
    batch = Batch(llama, blocks=10)
    for n in range(12):
        batch.add(SamplingJob([n] * 100, max_tokens=30, seed=n))
    finished(batch)
    assert len(batch.prefix_cache) <= 10


@given(st.lists(st.integers(0, 271), max_size=80), st.lists(st.integers(0, 271), max_size=80))
def test_block_hash_covers_all_earlier_tokens(one: list[int], other: list[int]) -> None:
    theirs = hash_blocks(other, len(other) // BLOCK)
    for number, name in enumerate(hash_blocks(one, len(one) // BLOCK)):
        same = len(theirs) > number and theirs[number] == name
        end = (number + 1) * BLOCK
        assert same == (len(other) >= end and one[:end] == other[:end])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_bucket_rows_have_no_gaps(llama: Llama, data: st.DataObject) -> None:
    """Every row keeps its own keys while rows are added, moved and removed."""
    buckets = [CacheBucket[int](llama, 128), CacheBucket[int](llama, 256)]
    for number in range(data.draw(st.integers(1, 60))):
        bucket = buckets[data.draw(st.integers(0, 1))]
        doing = data.draw(st.sampled_from(["add", "add", "remove", "move"]))
        if doing == "add" or not bucket.sequences:
            row = bucket.add(number)
            bucket.keys[:, row, ..., :5], bucket.values[:, row, :, :5] = number, -number
            bucket.extend(row, 5)
        elif doing == "remove":
            bucket.remove(data.draw(st.integers(0, len(bucket.sequences) - 1)))
        elif bucket is buckets[0]:
            bucket.move(data.draw(st.integers(0, len(bucket.sequences) - 1)), buckets[1])
    for bucket in buckets:
        for row, number in enumerate(bucket.sequences):
            assert (bucket.keys[:, row, ..., :5] == number).all()
            assert (bucket.values[:, row, :, :5] == -number).all()
            assert bucket.positions[row] == 5
            assert (bucket.mask[row, 0, 0] == 0).sum() == 5


def test_prefix_cache_without_blocks_stores_nothing(llama: Llama) -> None:
    past = PrefixCache(0)
    bucket = CacheBucket[int](llama, 128)
    bucket.extend(bucket.add(1), 64)
    past.store([1] * 64, bucket, 0)
    assert len(past) == 0
    assert past.find([1] * 64) == []
