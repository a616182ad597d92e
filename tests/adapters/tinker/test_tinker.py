"""The adapter for Tinker, with the real types of the package and a fake service."""

import runpy
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rookery.adapters.embedded import embedded_tokenizer
from rookery.adapters.tinker import TinkerPolicy, make_data, train_step
from rookery.core import Group, Sampling, UsageError
from rookery.engine import Engine, RetryPolicy
from rookery.training.rows import make_rows
from tests.adapters.kit import ScriptedEnvironment, make_task
from tests.training.kit import group, group_of_rewards, rollout, segment

pytestmark = pytest.mark.needs("tinker")

VOCAB = 272
END = 257
ROOT = Path(__file__).parents[3]


class FakeSampling:
    """A sampling client: checks its arguments, and returns real types."""

    length = 2

    def __init__(self, letter: int) -> None:
        self.letter = letter
        self.prompts: list[list[int]] = []

    async def sample_async(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        import tinker
        from tinker import types

        assert isinstance(prompt, tinker.ModelInput)
        assert isinstance(sampling_params, tinker.SamplingParams)
        assert num_samples == 1
        self.prompts.append(prompt.to_ints())
        tokens = [*(self.letter + at for at in range(self.length)), END][: sampling_params.max_tokens]
        return types.SampleResponse(
            sequences=[
                types.SampledSequence(
                    stop_reason="stop" if tokens[-1] == END else "length",
                    sequence_id="1",
                    tokens_np=np.array(tokens, dtype=np.int32),
                    logprobs_np=np.linspace(-1, -2, len(tokens), dtype=np.float32),
                )
            ]
        )


class Result:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    async def result_async(self) -> Any:
        return self


class ByteTokenizer:
    """A tokenizer whose token IDs up to 255 are bytes, as those of the embedded chat format."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return VOCAB

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + self.shift) for token in token_ids if token < 256)


class FakeTraining:
    """A training client: computes the policy gradient of a uniform unigram model."""

    def __init__(self) -> None:
        self.gradient = np.zeros(VOCAB)
        self.steps = 0

    async def forward_backward_async(self, data: list[Any], loss_fn: str) -> Any:
        import tinker

        assert loss_fn == "importance_sampling"
        for datum in data:
            assert isinstance(datum, tinker.Datum)
            tensors = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
            assert set(tensors) == {"target_tokens", "logprobs", "advantages"}
            assert {one.shape for one in tensors.values()} == {(datum.model_input.length,)}
            for token, advantage in zip(tensors["target_tokens"], tensors["advantages"], strict=True):
                self.gradient -= advantage / VOCAB
                self.gradient[token % VOCAB] += advantage
        return Result(metrics={"loss:sum": 0.5})

    async def optim_step_async(self, optimizer: Any) -> Any:
        import tinker

        assert isinstance(optimizer, tinker.AdamParams)
        self.steps += 1
        return Result()

    async def save_weights_and_get_sampling_client_async(self) -> FakeSampling:
        return FakeSampling(ord("x"))

    def get_tokenizer(self) -> Any:
        return ByteTokenizer()


def test_a_datum_predicts_each_next_token_and_weighs_only_trained_ones() -> None:
    rows = make_rows(
        [group(0, rollout(0, 0, 1.0, [segment([0, 1, 1, 0, 1]), segment([0, 1], turns=(1,))]), rollout(0, 1, 0.0))]
    )
    first, second, third = make_data(rows)
    assert first.model_input.to_ints() == [100, 101, 102, 103]
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in first.loss_fn_inputs.items()}
    assert inputs["target_tokens"] == [101, 102, 103, 104]
    assert inputs["logprobs"] == rows[0].logprobs[1:].tolist()
    weight = rows[0].advantage * rows[0].weight
    np.testing.assert_allclose(inputs["advantages"], [weight, weight, 0.0, weight], rtol=1e-6)
    assert (second.model_input.length, third.model_input.length) == (1, 3)


async def compute_gradient(*groups: Group) -> np.ndarray[Any, Any]:
    training = FakeTraining()
    metrics = await train_step(training, make_rows(groups))
    assert metrics["tinker/loss:sum"] == 0.5
    return training.gradient


async def test_a_group_with_a_failed_member_has_the_gradient_of_the_group_without_it() -> None:
    whole = group_of_rewards(0, 1.0, 0.0, None, 0.25)
    without = msgspec.structs.replace(whole, rollouts=tuple(one for one in whole.rollouts if one.valid))
    found, expected = await compute_gradient(whole), await compute_gradient(without)
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, atol=1e-9)


async def test_no_step_is_made_without_a_gradient_and_other_losses_are_refused() -> None:
    training = FakeTraining()
    metrics = await train_step(training, make_rows([group_of_rewards(0, 1.0, 1.0, None)]))
    assert (training.steps, metrics["rookery/data"]) == (0, 0.0)
    assert metrics["rookery/missing/sandbox.lost"] == pytest.approx(1 / 3)
    with pytest.raises(UsageError):
        await train_step(training, [], loss_fn="cross_entropy")


def test_sampling_that_the_losses_do_not_model_is_refused() -> None:
    policy = TinkerPolicy(None)
    assert policy.settle_sampling(Sampling(max_tokens=7)) == Sampling(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=7
    )
    for wanted in (Sampling(temperature=0.7), Sampling(top_p=0.9), Sampling(top_k=5)):
        with pytest.raises(UsageError):
            policy.settle_sampling(wanted)


async def test_rollouts_are_sampled_from_the_client_and_from_its_successor_after_an_update(tmp_path: Path) -> None:
    policy = TinkerPolicy(FakeSampling(ord("a")), context=512)
    training = FakeTraining()
    with policy.serve() as upstream:
        async with Engine(
            ScriptedEnvironment(),
            policy=upstream,
            runners=0,
            record="tokens",
            rendering={"name": "embedded"},
            sampling=policy.settle_sampling(Sampling(max_tokens=8)),
            retry=RetryPolicy(attempts=1),
            breaker=None,
            out=tmp_path,
        ) as engine:
            seen = []
            for version in (0, 1):
                task = make_task(f"t{version}", [1.0, 0.0, None])
                async for found in engine.groups([task], k=3, name=f"s{version}", need_tokens=True):
                    rows = make_rows([found])
                    seen.append((rows[0].tokens[rows[0].mask].tolist(), rows[0].version_range))
                    metrics = await train_step(training, rows)
                    assert metrics["rookery/data"] == 2.0
                await policy.update(engine, training, version + 1)
    assert seen == [([97, 98, END], (0, 0)), ([120, 121, END], (1, 1))]


@pytest.mark.parametrize("shift", [0, 1])
def test_example_trains_with_a_service_and_notices_another_tokenizer(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tinker

    training = FakeTraining()
    monkeypatch.setattr(training, "get_tokenizer", lambda: ByteTokenizer(shift))

    class Service:
        async def create_lora_training_client_async(self, *, base_model: str, rank: int) -> FakeTraining:
            assert (base_model, rank) == (str(tmp_path / "model"), 32)
            return training

    embedded_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["tests.adapters.kit:ScriptedEnvironment", "--model", str(tmp_path / "model")]
    arguments += ["--rendering", '{"name": "embedded"}', "-k", "2", "--steps", "2", "--groups", "1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tinker, "ServiceClient", Service)
    monkeypatch.setattr(sys, "argv", ["tinker_loop.py", *arguments])
    monkeypatch.setattr(FakeSampling, "length", 4)
    path = str(ROOT / "examples" / "tinker_loop.py")
    if shift:
        with pytest.raises(UsageError):
            runpy.run_path(path, run_name="__main__")
        assert training.steps == 0
        return
    runpy.run_path(path, run_name="__main__")
    assert training.steps == 2
    assert capsys.readouterr().out.count("tinker/loss:sum") == 2
