"""The trainer pushes weights to a real vLLM, whose log probabilities then follow those of the trainer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rookery import Sampling
from rookery.trainer import TrainConfig, read_metrics
from tests.engines.conftest import SEQUENCES, WEIGHTS, RunningEngine
from tests.engines.helpers import load_weights
from tests.trainer.environments import Parity

torch = pytest.importorskip("torch", reason="[probed] this machine has no torch")

pytestmark = pytest.mark.engines


class ShortParity(Parity):
    sampling = Sampling(max_tokens=12)


def largest_difference(model: Any, batch: Any) -> float:
    """Return the largest difference between sampled log probabilities and those of a model."""
    from rookery.trainer import token_logprobs
    from rookery.training import pack

    with torch.no_grad():
        rows = [token_logprobs(model, row) for row in pack(batch, 512)]
    return max(float((new - values.sampled).abs().max()) for new, _, values in rows)


def test_log_probabilities_of_vllm_follow_the_trainer(vllm: RunningEngine, tmp_path: Path) -> None:
    """Adapters are trained, because vLLM on a CPU does not update an output layer that is the embedding."""
    from rookery.trainer import Trainer
    from rookery.upstreams.torch import load_model

    config = TrainConfig(
        steps=3, groups=1, group_size=4, lag=0, minibatches=1, learning_rate=1e-3, warmup=0, eval_tasks=0,
        checkpoint_every=100, lora_rank=4, push="vllm", server=(vllm.url,),
    )  # fmt: skip
    trainer = Trainer(
        ShortParity(), policy=f"hf:{WEIGHTS}", config=config, out=tmp_path, runners=0, concurrency=SEQUENCES
    )
    batches: list[Any] = []
    step = trainer.optimizer.step

    def record(batch: Any, *arguments: Any) -> Any:
        batches.append(batch)
        return step(batch, *arguments)

    trainer.optimizer.step = record  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        asyncio.run(load_weights(vllm, WEIGHTS))
    rows = read_metrics(trainer.folder.path)
    assert [row["staleness_max"] for row in rows] == [0, 0, 0]
    assert max(row["sampler_ratio"] for row in rows) < 1.01
    assert largest_difference(load_model(WEIGHTS).model, batches[-1]) > 0.1, "the weights have changed"
    assert load_model(trainer.folder.path / "policy").tokenizer.eos_token == "<|im_end|>"
