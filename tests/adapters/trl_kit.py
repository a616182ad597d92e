"""A tiny Llama with random weights, served by the embedded upstream and trained by TRL on a CPU."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest

from rookery.engine.retry import RetryPolicy
from rookery.upstreams.embedded import LlamaShape, Weights
from rookery.upstreams.embedded.chat import END, VOCAB

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

ONCE = RetryPolicy(attempts=1)
Workers: TypeAlias = Callable[[], list[threading.Thread]]

SHAPE = LlamaShape(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


CPU: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
}


def tiny(path: Path, seed: int = 3) -> Weights:
    """Make random weights that sample ASCII only: invalid UTF-8 does not survive a round trip through text."""
    weights = Weights.random(SHAPE, seed=seed, scale=0.1)
    weights.tensors["model.embed_tokens.weight"][:, 0] = 1.0  # the same at every position, like a bias
    head = weights.tensors["lm_head.weight"]
    head[:, 0] = 0.0
    head[128:, 0] = -10.0
    head[END, 0] = 0.0
    weights.save(path)
    return weights


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    tiny(tmp_path / "policy.safetensors")
    return tmp_path / "policy.safetensors"


@pytest.fixture
def workers() -> Workers:
    """Return the engine threads that were started in this test."""
    before = set(threading.enumerate())
    return lambda: [one for one in threading.enumerate() if one.name.startswith("rookery") and one not in before]


def config(folder: Path, **settings: Any) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        **{
            "output_dir": str(folder / "out"),
            "scale_rewards": "none",
            "max_completion_length": 10,
            "shuffle_dataset": False,
            **CPU,
            **settings,
        }
    )


def logprobs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return the log probability of each token after the first, computed with the model's forward pass."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    found: np.ndarray[Any, Any] = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
    return found


def trainer(rollouts: Any, model: Any, folder: Path, **settings: Any) -> Any:
    """Return a `GRPOTrainer` with a rollout function or a wrapper of one."""
    from trl import GRPOTrainer

    from rookery.adapters.trl import embedded_tokenizer, reward

    given = {name: settings.pop(name) for name in ("optimizers", "train_dataset", "tools") if name in settings}
    return GRPOTrainer(
        model=model,
        processing_class=embedded_tokenizer(),
        reward_funcs=reward,
        rollout_func=rollouts,
        args=config(folder, **settings),
        **{"train_dataset": rollouts.dataset(), **given},
    )


def bare(k: int = 2) -> Any:
    """Return the part of a trainer that a rollout function uses, for tests without TRL."""
    return SimpleNamespace(
        args=SimpleNamespace(seed=0),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=5,
        tools=[],
        environment_factories=None,
        use_vllm=False,
        num_generations=k,
        eos_token_ids=[END],
        loss_type="dapo",
    )


class Watched:
    """A rollout function that records its results and the error of their log probabilities."""

    def __init__(self, rollouts: Any) -> None:
        self.rollouts = rollouts
        self.dataset = rollouts.dataset
        self.prompts: list[list[Any]] = []
        self.answers: list[dict[str, Any]] = []
        self.errors: list[float] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.rollouts(prompts, trainer)
        self.prompts.append(prompts)
        self.answers.append(answer)
        self.errors.append(distance(trainer.model, answer))
        return answer


def distance(model: Any, answer: dict[str, Any]) -> float:
    """Return the largest difference between recorded and recomputed log probabilities of trained tokens."""
    rows = zip(*(answer[name] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")), strict=True)
    found = [0.0]
    for prompt, completion, given, mask in rows:
        own = logprobs(model, prompt + completion)[len(prompt) - 1 :]
        found += np.abs(own - np.array(given))[np.array(mask) == 1].tolist()
    return float(max(found))


class CpuAttention:
    """FlashAttention's function for sequences of different lengths, implemented with plain attention on a CPU."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, _q: int, _k: int, *, softmax_scale: float, **_: Any
    ) -> Any:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        found = []
        for n in range(len(q_ends) - 1):
            mine, theirs = slice(q_ends[n], q_ends[n + 1]), slice(k_ends[n], k_ends[n + 1])
            some = [part.transpose(0, 1)[None] for part in (q[mine], k[theirs], v[theirs])]
            queries, keys = some[0].shape[2], some[1].shape[2]
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            out = scaled_dot_product_attention(*some, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)
