"""TRL's own worker for OpenEnv sessions, which runs in a process of its own, with sessions of Rookery."""

import functools
import queue
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rookery import Context, RetryPolicy
from rookery.adapters.openenv import RookerySessionFactory
from rookery.core import SandboxError
from rookery.journal import RunReader, find_run, load_segments
from tests.adapters.kit import ScriptedEnvironment, bigram_gradient, make_task
from tests.adapters.trl_kit import tiny

pytestmark = [pytest.mark.needs("openenv"), pytest.mark.timeout(300)]
REWARDS = [1.0, 0.0, None, 0.5]


class OneByOneEnvironment(ScriptedEnvironment):
    """Rollout number n of a task in this process gets the reward `data.rewards[n]`; None is a lost sandbox."""

    started: ClassVar[Counter[str]] = Counter()

    async def run(self, ctx: Context) -> None:
        ctx.state["number"] = self.started[ctx.task.id] % len(REWARDS)
        self.started[ctx.task.id] += 1
        await ctx.policy.chat(ctx.task.text)
        if ctx.task.data["rewards"][ctx.state["number"]] is None:
            raise SandboxError("the sandbox is gone")

    async def score(self, ctx: Context) -> float:
        return float(ctx.task.data["rewards"][ctx.state["number"]])


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from accelerate import PartialState
    from trl.experimental.async_grpo import async_rollout_worker
    from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker

    from rookery.adapters.embedded import embedded_tokenizer
    from rookery.adapters.trl import dataset

    PartialState()
    # With sessions, TRL uses vLLM only to transfer weights, which is not part of this test.
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    tiny(tmp_path / "policy.safetensors")
    tasks = [make_task("group", REWARDS)]
    factory = functools.partial(
        RookerySessionFactory,
        "tests.adapters.openenv.test_trl_harness:OneByOneEnvironment",
        policy=f"embedded:{tmp_path / 'policy.safetensors'}",
        tasks=tasks,
        runners=0,
        retry=RetryPolicy(attempts=1),
        breaker=None,
        max_tokens=8,
        out=tmp_path / "runs",
    )
    tokenizer = embedded_tokenizer()
    tokenizer.response_template = {"type": "object"}  # not used: sessions parse replies themselves
    made = HarnessRolloutWorker(
        harness_session_factory=factory,
        model_name="policy",
        dataset=dataset(tasks),
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=len(REWARDS),
        max_inflight_tasks=len(REWARDS),
    )
    yield made
    made.stop()


def read_group(worker: Any) -> list[Any]:
    """Return the samples of the first group."""
    samples: list[Any] = []
    while not samples or samples[-1].group_id == samples[0].group_id:
        worker.check_health(stale_after_s=3600)  # the timeout of the test is the limit
        try:
            samples.append(worker.rollout_buffer.get(timeout=1))
        except queue.Empty:
            continue
    return samples[:-1]


def test_missing_session_has_no_sample_and_no_place_in_trls_baseline(worker: Any, tmp_path: Path) -> None:
    worker.start()
    samples = read_group(worker)
    rewards = [sample.metrics["reward"] for sample in samples]
    assert sorted(rewards) == [0.0, 0.5, 1.0]
    wanted = (np.array(rewards) - np.mean(rewards)) / np.std(rewards)
    np.testing.assert_allclose([sample.advantage for sample in samples], wanted, atol=1e-6)

    def gradient(advantages: Any) -> np.ndarray[Any, Any]:
        return bigram_gradient(
            (sample.input_ids.tolist(), sample.completion_mask.tolist(), float(advantage))
            for sample, advantage in zip(samples, advantages, strict=True)
        )

    # The gradient is that of the group without the lost member.
    np.testing.assert_allclose(gradient([sample.advantage for sample in samples]), gradient(wanted), atol=1e-7)
    assert np.abs(gradient(wanted)).max() > 0
    with RunReader(find_run("latest", tmp_path / "runs")) as reader:
        recorded = {
            (bytes(one.tokens), bytes(one.mask), bytes(one.logprobs))
            for rollout in reader.iter_rollouts()
            if rollout.reward is not None
            for one in load_segments(rollout, reader.tokens).segments
        }
    for sample in samples:
        tokens = sample.input_ids.astype("<i4").tobytes()
        assert (tokens, bytes(sample.completion_mask.tolist()), sample.old_log_probs.tobytes()) in recorded
