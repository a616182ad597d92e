"""Continuous batching of torch models: agreement with transformers, prefix cache, weight updates, sampling."""

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch

from rookery.upstreams.torch.batch import SampledSequence
from rookery.upstreams.torch.decoder import WeightsError
from rookery.upstreams.torch.slots import MIN_COPY, SlotTable
from rookery.upstreams.torch.token_sampling import (
    BatchChoices,
    SampledTokens,
    TokenChoice,
    random_numbers,
    sample_tokens,
)
from tests.upstreams.torch_kit import WORDS, build_batch, build_model, generate, rescore, run_batch

GREEDY = TokenChoice(temperature=0.0)
TOLERANCE = 1e-4


def random_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(WORDS) for _ in range(length)]


def greedy(prompt: list[int], tokens: int = 20) -> SampledSequence:
    return SampledSequence(prompt, max_tokens=tokens, seed=0, choice=GREEDY)


def worst(one: list[float], other: list[float]) -> float:
    return max(abs(left - right) for left, right in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model()


# ---------------------------------------------------------------------------------- agreement with transformers


@pytest.mark.parametrize("bucketed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_those_of_transformers_generate(family: str, bucketed: bool) -> None:
    model = build_model(family, tie_word_embeddings=family == "qwen2")
    prompts = [random_prompt(seed, length) for seed, length in enumerate((1, 7, 64, 65, 130, 30))]
    sequences = [greedy(prompt) for prompt in prompts]
    run_batch(build_batch(model, bucketed=bucketed), *sequences)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.tokens == generate(model, prompt, 20)
        assert sequence.finish == "length"
    assert len({tuple(sequence.tokens) for sequence in sequences}) > 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logprobs_equal_a_full_forward_pass_and_not_one_that_is_off_by_one(family: str) -> None:
    model = build_model(family)
    prompt = random_prompt(1, 40)
    sequence = SampledSequence(prompt, max_tokens=30, seed=5)
    run_batch(build_batch(model), sequence)
    expected = rescore(model, prompt, sequence.tokens)
    assert worst(sequence.logprobs, expected) < TOLERANCE
    assert worst(sequence.logprobs[1:], expected[:-1]) > 100 * TOLERANCE, "a shift by one must be noticed"


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 6},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "rope_theta": 500000.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_variants_of_the_architecture_give_the_logprobs_of_transformers(changes: dict[str, Any]) -> None:
    model = build_model(**changes)
    sequence = SampledSequence(random_prompt(4, 100), max_tokens=30, seed=5)
    run_batch(build_batch(model), sequence)
    assert worst(sequence.logprobs, rescore(model, sequence.prompt, sequence.tokens)) < TOLERANCE


def test_bfloat16_differs_from_transformers_by_rounding_only() -> None:
    model = build_model().to(torch.bfloat16)
    sequence = SampledSequence(random_prompt(4, 100), max_tokens=30, seed=5)
    run_batch(build_batch(model), sequence)
    differences = [
        abs(one - two)
        for one, two in zip(sequence.logprobs, rescore(model, sequence.prompt, sequence.tokens), strict=True)
    ]
    assert sum(differences) / len(differences) < 0.05


def test_logprobs_are_those_of_the_model_before_temperature_and_filters(model: Any) -> None:
    prompt = random_prompt(2, 20)
    choice = TokenChoice(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01)
    sequence = SampledSequence(prompt, max_tokens=20, seed=5, choice=choice)
    run_batch(build_batch(model), sequence)
    assert worst(sequence.logprobs, rescore(model, prompt, sequence.tokens)) < TOLERANCE


def test_long_prompts_are_computed_in_chunks(model: Any) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate((200, 33, 90))]
    whole, chunked = build_batch(model), build_batch(model)
    chunked.chunk = 16
    expected, sequences = [greedy(prompt) for prompt in prompts], [greedy(prompt) for prompt in prompts]
    run_batch(whole, *expected)
    run_batch(chunked, *sequences)
    assert [sequence.tokens for sequence in sequences] == [sequence.tokens for sequence in expected]
    assert chunked.prompt_tokens == whole.prompt_tokens == sum(map(len, prompts))
    assert chunked.steps > whole.steps


@pytest.mark.parametrize("bucketed", [False, True])
def test_tokens_do_not_depend_on_other_sequences(model: Any, bucketed: bool) -> None:
    prompts = [random_prompt(seed, 5 + 9 * seed) for seed in range(12)]
    choices = [GREEDY, TokenChoice(), TokenChoice(0.8, top_k=5), TokenChoice(top_p=0.5)] * 3

    def build(at: int) -> SampledSequence:
        return SampledSequence(prompts[at], max_tokens=10 + at, seed=at, choice=choices[at])

    together = [build(at) for at in range(12)]
    run_batch(build_batch(model, slots=5, bucketed=bucketed), *together)
    for at, sequence in enumerate(together):
        alone = build(at)
        run_batch(build_batch(model, slots=1), alone)
        assert alone.tokens == sequence.tokens
        assert worst(alone.logprobs, sequence.logprobs) < TOLERANCE


def test_same_seed_repeats_a_sequence_and_another_seed_does_not(model: Any) -> None:
    sequences = [SampledSequence(random_prompt(3, 9), max_tokens=20, seed=seed) for seed in (4, 4, 5)]
    run_batch(build_batch(model), *sequences)
    assert sequences[0].tokens == sequences[1].tokens != sequences[2].tokens


# ---------------------------------------------------------------------------------------------- ends and slots


def test_end_tokens_and_stop_strings_end_a_sequence_with_their_token(model: Any) -> None:
    free = greedy(random_prompt(1, 10))
    run_batch(build_batch(model), free)
    end = free.tokens[7]
    first = free.tokens.index(end)
    by_id = SampledSequence(free.prompt, max_tokens=20, seed=0, choice=GREEDY, ends=frozenset({end}))
    by_text = SampledSequence(
        free.prompt, max_tokens=20, seed=0, choice=GREEDY, find_stop=lambda tokens: tokens[-1] == end
    )
    run_batch(build_batch(model), by_id, by_text)
    for sequence in (by_id, by_text):
        assert (sequence.finish, sequence.tokens) == ("stop", free.tokens[: first + 1])


def test_context_ends_a_sequence(model: Any) -> None:
    sequence = greedy(random_prompt(1, 60), tokens=100)
    run_batch(build_batch(model, context=64), sequence)
    assert (sequence.finish, len(sequence.tokens)) == ("length", 4)
    assert worst(sequence.logprobs, rescore(model, sequence.prompt, sequence.tokens)) < TOLERANCE


@pytest.mark.parametrize("prompt", [[], [1] * 64, [WORDS], [-1]])
def test_invalid_prompts_are_refused(model: Any, prompt: list[int]) -> None:
    batch = build_batch(model, context=64)
    with pytest.raises(ValueError, match="prompt"):
        batch.add(greedy(prompt))
    assert not batch.busy


def test_discarded_sequence_frees_its_slot(model: Any) -> None:
    batch = build_batch(model, slots=1)
    first, second = greedy(random_prompt(1, 10)), greedy(random_prompt(2, 10))
    batch.add(first)
    batch.add(second)
    with torch.inference_mode():
        batch.step()
        assert batch.running == [first]
        assert batch.discard(first)
        assert not batch.discard(first)
        batch.step()
    assert batch.running == [second]
    run_batch(batch)
    assert len(second.tokens) == 20


# ------------------------------------------------------------------------------------------------ prefix cache


def test_next_turn_reuses_the_slot_and_gets_the_same_logprobs(model: Any) -> None:
    batch = build_batch(model)
    first = greedy(random_prompt(1, 40))
    run_batch(batch, first)
    prompt = [*first.prompt, *first.tokens, *random_prompt(2, 10)]
    second = greedy(prompt)
    run_batch(batch, second)
    assert second.reused == len(first.prompt) + len(first.tokens) - 1, "the last token was sampled, not computed"
    assert second.slot == first.slot
    fresh = greedy(prompt)
    run_batch(build_batch(model), fresh)
    assert fresh.reused == 0
    assert second.tokens == fresh.tokens
    assert worst(second.logprobs, fresh.logprobs) < TOLERANCE


def test_common_prefix_is_copied_from_a_running_sequence(model: Any) -> None:
    batch = build_batch(model)
    shared = random_prompt(1, 50)
    first, second = greedy([*shared, 1]), greedy([*shared, 2])
    batch.add(first)
    with torch.inference_mode():
        batch.step()
    batch.add(second)
    run_batch(batch)
    assert second.reused == len(shared)
    assert second.slot != first.slot
    for sequence in (first, second):
        assert worst(sequence.logprobs, rescore(model, sequence.prompt, sequence.tokens)) < TOLERANCE


def test_slots_are_reused_least_recently_used_first() -> None:
    table = SlotTable(3, 100)
    prompts = [[number] * 10 for number in range(4)]
    for prompt in prompts[:3]:
        slot, reused, source = table.assign(prompt)
        assert (reused, source) == (0, None)
        table.set_lengths([slot], [10])
        table.release(slot)
    assert table.assign([*prompts[0], 9]) == (0, 10, None), "extends the tokens of slot 0"
    assert table.assign(prompts[3]).slot == 1
    assert table.free == 1
    table.invalidate()
    assert table.assign([*prompts[2], 9]).reused == 0


def test_divergent_prompt_keeps_the_tokens_of_its_source() -> None:
    table = SlotTable(2, 200)
    long = list(range(100))
    table.set_lengths([table.assign(long).slot], [100])
    table.release(0)
    assert table.assign([*long[:MIN_COPY], 500]) == (1, MIN_COPY, 0)
    assert table.assign([*long[:50], 500]) == (0, 50, None), "no other slot is free"


# --------------------------------------------------------------------------------------------- weight updates


def test_new_weights_in_mid_reply_change_logprobs_from_that_token_on(model: Any) -> None:
    other = build_model(seed=1)
    prompt = random_prompt(1, 40)
    plain = SampledSequence(prompt, max_tokens=20, seed=3)
    run_batch(build_batch(model, version=1), plain)
    batch = build_batch(model, version=1)
    sequence = SampledSequence(prompt, max_tokens=20, seed=3)
    batch.add(sequence)
    with torch.inference_mode():
        while len(sequence.tokens) < 8:
            batch.step()
        batch.load(other.state_dict(), version=2)
    run_batch(batch)
    assert sequence.versions == [(0, 1), (8, 2)]
    assert sequence.tokens[:8] == plain.tokens[:8]
    assert worst(sequence.logprobs[:8], plain.logprobs[:8]) < TOLERANCE
    kept = rescore(model, prompt, sequence.tokens)
    assert all(abs(one - two) > TOLERANCE for one, two in zip(sequence.logprobs[8:], kept[8:], strict=True))
    after = SampledSequence([*prompt, *sequence.tokens], max_tokens=5, seed=3)
    run_batch(batch, after)
    assert after.reused == 0, "the cached keys and values are partly those of the old weights"
    assert after.versions == [(0, 2)]
    assert worst(after.logprobs, rescore(other, after.prompt, after.tokens)) < TOLERANCE


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(model: Any, change: str) -> None:
    batch = build_batch(model, version=1)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    if change == "missing":
        del state["model.norm.weight"]
    elif change == "unknown":
        state["model.more.weight"] = torch.zeros(1)
    else:
        state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(WeightsError):
        batch.load(state, version=2)
    sequence = SampledSequence(random_prompt(1, 10), max_tokens=10, seed=3)
    run_batch(batch, sequence)
    assert sequence.versions == [(0, 1)]
    assert worst(sequence.logprobs, rescore(model, sequence.prompt, sequence.tokens)) < TOLERANCE


# --------------------------------------------------------------------------------------------------- sampling

LOGITS = torch.tensor([[0.0, 3.0, 2.0, 1.0, -1.0]])


def sample(choices: list[TokenChoice], numbers: list[float], **options: Any) -> SampledTokens:
    rows = LOGITS.expand(len(choices), 5)
    return sample_tokens(rows, BatchChoices(choices, "cpu"), np.array(numbers), **options)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (TokenChoice(), [0, 1, 2, 3, 4]),
        (TokenChoice(temperature=0.0), [1]),
        (TokenChoice(top_k=2), [1, 2]),
        (TokenChoice(top_p=0.6), [1]),
        (TokenChoice(top_p=0.85), [1, 2]),
        (TokenChoice(min_p=0.13), [1, 2, 3]),
        (TokenChoice(top_k=4, top_p=0.98, min_p=0.01), [0, 1, 2, 3]),
        (TokenChoice(temperature=0.01), [1]),
    ],
)
def test_filters_exclude_unlikely_tokens(choice: TokenChoice, expected: list[int]) -> None:
    numbers = [at / 2000 for at in range(2000)]
    assert sorted(set(sample([choice] * 2000, numbers).tokens)) == expected


def test_frequencies_follow_the_temperature() -> None:
    count = 20_000
    numbers = [(at + 0.5) / count for at in range(count)]
    for temperature in (0.5, 1.0, 3.0):
        sampled = sample([TokenChoice(temperature)] * count, numbers).tokens
        expected = (LOGITS[0] / temperature).softmax(-1).tolist()
        assert [sampled.count(token) / count for token in range(5)] == pytest.approx(expected, abs=1e-3)


def test_filters_of_one_row_do_not_change_another_row() -> None:
    numbers = [0.3, 0.999999]
    plain = sample([TokenChoice(), TokenChoice()], numbers)
    mixed = sample([TokenChoice(), TokenChoice(top_k=1)], numbers)
    assert plain.tokens[0] == mixed.tokens[0]
    assert (plain.tokens[1], mixed.tokens[1]) == (4, 1)


def test_alternatives_are_the_most_likely_tokens() -> None:
    result = sample([TokenChoice()], [0.5], alternatives=2)
    assert [token for token, _ in result.tops[0]] == [1, 2]
    assert result.tops[0][0][1] == pytest.approx(float(LOGITS.log_softmax(-1)[0, 1]))


def test_random_numbers_are_uniform_and_depend_on_seed_and_index_only() -> None:
    count = 50_000
    by_index = random_numbers([7] * count, list(range(count)))
    by_seed = random_numbers(list(range(count)), [3] * count)
    for numbers in (by_index, by_seed):
        assert 0.0 <= numbers.min() <= numbers.max() < 1.0
        shares = np.histogram(numbers, bins=10, range=(0, 1))[0] / count
        assert shares == pytest.approx([0.1] * 10, abs=0.01)
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    assert random_numbers([5, 7], [1, 3])[1] == by_index[3] == by_seed[7]
    assert random_numbers([0], [0])[0] == 0.6524484863740322, "SplitMix64, whatever the machine"
