"""The loss equals TRL's on the same batch, and the sampler's log probabilities equal the trainer's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rookery import SyncEngine
from rookery.core import Group, Segment, Span, floats, ints
from rookery.trainer import TrainConfig
from rookery.training import Batch, BatchConfig, PackedRow, make_batch, pack
from rookery.upstreams.embedded import load_builtin_weights
from tests.trainer.environments import Parity, options
from tests.training.kit import group, rollout

torch = pytest.importorskip("torch", reason="[probed] this machine has no torch")
trl = pytest.importorskip("trl", reason="[probed] this machine has no trl")
LENGTH = 40
NORMALISATIONS = {
    "dapo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def make_groups() -> list[Group]:
    """Two groups of three rollouts: prompts, sampled tokens and tool results of different lengths."""
    rng = np.random.default_rng(5)
    rewards = [[1.0, 0.0, 0.25], [0.0, 1.0, 1.0]]
    return [
        group(
            number,
            *(
                rollout(number, member, reward, [_make_segment(rng)])
                for member, reward in enumerate(rewards[number])
            ),
        )
        for number in range(2)
    ]


def _make_segment(rng: np.random.Generator) -> Segment:
    mask = [0] * int(rng.integers(3, 9)) + [1] * int(rng.integers(2, 9))
    mask += [0] * int(rng.integers(0, 4)) + [1] * int(rng.integers(1, 9))
    spans, start = [], None
    for at, on in enumerate([*mask, 0]):
        if on and start is None:
            start = at
        elif not on and start is not None:
            spans.append(Span(start, at, 0))
            start = None
    return Segment(
        tokens=ints(rng.integers(0, 255, len(mask)).tolist()),
        mask=bytes(mask),
        logprobs=floats(float(-rng.uniform(1, 8)) if on else 0.0 for on in mask),
        versions=tuple(spans),
        turns=(0,),
    )


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    from datasets import Dataset

    from rookery.adapters.trl import embedded_tokenizer

    def make(**settings: Any) -> Any:
        return trl.GRPOTrainer(
            model=load_builtin_weights().to_model(),
            processing_class=embedded_tokenizer(),
            train_dataset=Dataset.from_list([{"prompt": "x"}]),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                num_generations=6,
                per_device_train_batch_size=6,
                gradient_accumulation_steps=1,
                max_completion_length=LENGTH,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                epsilon=0.2,
                epsilon_high=0.28,
                **settings,
            ),
        )

    return make


def make_inputs(batch: Batch, row: PackedRow, old: Any) -> dict[str, Any]:
    """Return TRL's inputs for the segments of a packed row. `old` are log probabilities of its trained tokens."""
    rows = [slice(batch.offsets[one], batch.offsets[one + 1]) for one in row.segments]
    firsts = [int(batch.mask[one].argmax()) for one in rows]
    wide = max(firsts)
    count = len(rows)
    prompt, prompt_mask = torch.zeros(count, wide, dtype=torch.long), torch.zeros(count, wide, dtype=torch.long)
    completion, mask, tools = (torch.zeros(count, LENGTH, dtype=torch.long) for _ in range(3))
    advantages = torch.zeros(count)
    for at, (part, first) in enumerate(zip(rows, firsts, strict=True)):
        tokens = torch.from_numpy(batch.tokens[part]).long()
        prompt[at, wide - first :], prompt_mask[at, wide - first :] = tokens[:first], 1
        length = len(tokens) - first
        completion[at, :length], mask[at, :length] = tokens[first:], 1
        tools[at, :length] = torch.from_numpy(batch.mask[part][first:]).long()
        advantages[at] = float(batch.advantages[part][first])
    trained = (mask * tools).bool()
    spread = torch.zeros(count, LENGTH)
    spread[trained] = old
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt_mask,
        "completion_ids": completion,
        "completion_mask": mask,
        "tool_mask": tools,
        "advantages": advantages,
        "old_per_token_logps": spread,
        "num_items_in_batch": trained.sum(),
        "trained": trained,
    }


def spread_over(inputs: dict[str, Any], values: Any, empty: float = 0.0) -> Any:
    found = torch.full(inputs["trained"].shape, empty)
    found[inputs["trained"]] = values
    return found


@pytest.mark.long
@pytest.mark.parametrize("correction", ["none", "tis", "icepop"])
@pytest.mark.parametrize("kind", list(NORMALISATIONS))
@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_loss_and_gradients_equal_those_of_trl(
    make_trainer: Callable[..., Any], kind: str, correction: Any, kl: float
) -> None:
    from rookery.trainer import policy_loss, token_logprobs

    length = LENGTH if kind == "dr_grpo" else None
    config = TrainConfig(steps=1, normalise=NORMALISATIONS[kind], length=length, correction=correction, kl=kl)
    batch = make_batch(make_groups(), BatchConfig(normalise=config.normalise, length=length))
    (row,) = pack(batch, 4096)
    trainer = make_trainer(loss_type=kind, beta=0.0)
    model = trainer.model
    new, _, values = token_logprobs(model, row)
    generator = torch.Generator().manual_seed(1)
    old = new.detach() + 0.3 * torch.randn(new.shape, generator=generator)
    reference = new.detach() + 0.3 * torch.randn(new.shape, generator=generator)
    # The sampled log probabilities are arbitrary in `make_groups`; here they are near those of the policy.
    sampled = old + 0.8 * torch.randn(new.shape, generator=generator)
    values = msgspec.structs.replace(values, sampled=sampled)
    loss, _ = policy_loss(new, old, values, config, reference if kl else None)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    inputs = make_inputs(batch, row, old)
    ratio = (old - sampled).exp()
    if correction == "tis":
        ratio = ratio.clamp(max=config.tis_cap)
    elif correction == "icepop":
        ratio = ratio.masked_fill((ratio < config.icepop_low) | (ratio > config.icepop_high), 0.0)
    if correction != "none":
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        inputs["importance_sampling_ratio"] = spread_over(inputs, ratio, 1.0)
    trainer.beta = kl
    inputs["ref_per_token_logps"] = spread_over(inputs, reference)
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    theirs = trainer._compute_loss(model, inputs)
    theirs.backward()

    torch.testing.assert_close(loss, theirs, rtol=0, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in ours.values()) > 1e-3


def test_dppo_drops_tokens_that_moved_in_the_direction_of_their_advantage() -> None:
    from rookery.trainer import policy_loss
    from rookery.trainer.loop import TokenValues

    new = torch.tensor([0.9, 0.9, 0.1, 0.1, 0.5]).log().requires_grad_()
    sampled = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5]).log()
    values = TokenValues(
        sampled=sampled, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), weights=torch.full((5,), 0.2)
    )
    loss, dropped = policy_loss(new, new.detach(), values, TrainConfig(steps=1, correction="dppo"))
    loss.backward()
    assert dropped.tolist() == [True, False, False, True, False]
    assert (new.grad == 0).tolist() == [True, False, False, True, False]
    assert float(loss) == pytest.approx(-0.2 * (-1.8 + 0.2 + 1.0))


@pytest.fixture(scope="module")
def sampled_batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    with SyncEngine(
        Parity(), policy="embedded", seed=3, out=tmp_path_factory.mktemp("runs"), **options()
    ) as engine:
        groups = list(engine.groups(k=4, want=6))
    return make_batch(groups, BatchConfig(segments="all"))


def largest_difference(batch: Batch) -> float:
    from rookery.trainer import token_logprobs

    model = load_builtin_weights().to_model()
    with torch.no_grad():
        rows = [token_logprobs(model, row) for row in pack(batch, 512)]
    return max(float((new - values.sampled).abs().max()) for new, _, values in rows)


def test_log_probabilities_of_the_sampler_equal_those_of_the_trainer(sampled_batch: Batch) -> None:
    assert largest_difference(sampled_batch) < 1e-4


@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_that_is_shifted_by_one_token_is_noticed(sampled_batch: Batch, by: int) -> None:
    columns = {name: np.roll(getattr(sampled_batch, name), by) for name in ("mask", "logprobs", "weights")}
    shifted = msgspec.structs.replace(sampled_batch, **columns)
    assert largest_difference(shifted) > 0.1


def test_the_first_ratios_of_a_training_run_are_one(tmp_path: Path) -> None:
    from rookery.trainer import Trainer

    rows: list[dict[str, Any]] = []
    config = TrainConfig(steps=1, groups=3, group_size=4, lag=0, eval_tasks=0)
    trainer = Trainer(Parity(), config=config, out=tmp_path, **options())
    trainer.on_row = rows.append
    trainer.train()
    assert rows[0]["sampler_kl"] < 1e-6
    assert 1 <= rows[0]["sampler_ratio"] < 1.001
