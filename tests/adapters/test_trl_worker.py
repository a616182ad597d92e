"""The rollout worker for TRL's asynchronous trainer, with real rollouts on a CPU."""

import asyncio
import math
import queue
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rookery import Group, Limits, Rollout, Sampling, Segment, SyncEngine, Task
from rookery.adapters.trl import (
    RolloutWorker,
    embedded_tokenizer,
)
from rookery.adapters.trl.samples import make_samples
from rookery.core import Completed, Failed, RookeryError, Span, UsageError, floats, ints
from rookery.engine import Engine
from rookery.training.advantages import compute_advantages
from rookery.upstreams.embedded import Weights, chat
from tests.adapters.kit import ByteTokenizer, ScriptedEnvironment, make_task
from tests.adapters.trl_envs import (
    ByteEnvironment,
    FaultyEnvironment,
    LongSubCallEnvironment,
    MultiSegmentEnvironment,
)
from tests.adapters.trl_kit import (
    CPU,
    ONCE,
    CpuAttention,
    Workers,
    one_thread,
    policy,
    tiny,
    workers,
)

__all__ = ["one_thread", "policy", "workers"]


TRAINER_ARGS = SimpleNamespace(
    temperature=0.7, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, max_completion_length=10
)
"""The sampling parameters of an `AsyncGRPOConfig`."""


def working(env: Any, policy: Path, **options: Any) -> RolloutWorker:
    settings = {
        "runners": 0,
        "retry": ONCE,
        "sandbox": "subprocess",
        "out": policy.parent / "runs",
        "k": 4,
        **options,
    }
    settings.setdefault("sampling", Sampling(temperature=1.0, max_tokens=10))
    return RolloutWorker(env, policy=f"embedded:{policy}", **settings)


def test_async_trainer_trains_on_samples_of_the_worker(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    """TRL needs a GPU only for its attention kernel and for the GPU's name; everything else is real."""
    import torch
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", lambda: CpuAttention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    folder = tmp_path / "policy"
    before = tiny(folder)
    tasks = [{"id": f"t{n}", "prompt": f"say {n}", "fail": [n % 4]} for n in range(8)]
    worker = working(ByteEnvironment(), folder, tasks=tasks, queue_size=6, concurrency=8)
    made = AsyncGRPOTrainer(
        model=str(folder),
        processing_class=embedded_tokenizer(),
        train_dataset=worker.dataset(),
        rollout_worker=worker,
        weight_transfer=worker.weight_transfer,
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path / "out"),
            **CPU,
            max_steps=4,
            per_device_train_batch_size=6,
            num_generations=4,
            learning_rate=0.01,
            token_budget=-1,
            max_staleness=4,
        ),
    )
    made.train()
    assert workers() == []
    history = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(history) == 4
    # Nothing was updated before the first step: the sampler's probabilities are the trainer's, token by token.
    assert history[0]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(entry["loss"]) and 0 < entry["grad_norm"] < 100 for entry in history)
    assert all(entry["rookery/missing"] == 0.25 for entry in history if "rookery/missing" in entry)
    assert max(entry["sample/staleness_max"] for entry in history) >= 1.0
    assert (made.model_version, worker.version) == (5, 5)
    served = Weights.load(folder)
    assert served.version == 5
    for name, value in made.model.state_dict().items():
        assert torch.equal(value, torch.from_numpy(served.tensors[name])), name
    assert not np.array_equal(served.tensors["lm_head.weight"], before.tensors["lm_head.weight"])


def test_every_trained_token_is_in_one_sample_with_its_rollouts_advantage(policy: Path) -> None:
    from accelerate import PartialState
    from trl.experimental.async_grpo.async_grpo_trainer import (
        DataCollatorForRollout,
        FixedCountBatcher,
        RolloutQueueDataset,
    )

    tasks = [{"id": "five", "prompt": "x", "conversations": 5}]
    options = {"runners": 0, "out": policy.parent / "runs", "sampling": Sampling(max_tokens=6)}
    with SyncEngine(MultiSegmentEnvironment(), policy=f"embedded:{policy}", **options) as engine:
        (group,) = engine.groups(tasks, k=4)
    # One member failed, and two versions sampled another.
    lost = msgspec.structs.replace(
        group.rollouts[0], outcome=Failed("infra", "sandbox.lost", ""), reward=None, segments=[]
    )
    old = group.rollouts[1].segments[0]
    spans = tuple(Span(span.start, span.end, 2) for span in old.versions)
    newer = [
        msgspec.structs.replace(one, versions=(Span(*_ends(one), 7),)) for one in group.rollouts[1].segments[1:]
    ]
    mixed = msgspec.structs.replace(
        group.rollouts[1], segments=[msgspec.structs.replace(old, versions=spans), *newer]
    )
    rest = [
        msgspec.structs.replace(
            one,
            segments=[msgspec.structs.replace(part, versions=(Span(*_ends(part), 7),)) for part in one.segments],
        )
        for one in group.rollouts[2:]
    ]
    group = msgspec.structs.replace(group, rollouts=(lost, mixed, *rest))
    samples, figures = make_samples(group)
    assert len(samples) == 15  # a sample for each segment of the three that are valid
    assert figures == {"rookery/missing": (1.0, 4.0), "rookery/missing/sandbox.lost_total": 1.0}
    assert {sample.model_version for sample in samples} == {2}  # the oldest of the group
    gains = compute_advantages([None, 1.0, 0.0, 1.0]).tolist()
    assert [sample.advantage for sample in samples] == [gain for gain in gains[1:] for _ in range(5)]
    wanted = [segment for rollout in group.rollouts for segment in rollout.segments]
    for sample, segment in zip(samples, wanted, strict=True):
        assert ints(sample.input_ids.tolist()) == segment.tokens
        assert bytes(sample.completion_mask.tolist()) == segment.mask
        assert floats(sample.old_log_probs.tolist()) == segment.logprobs
    # TRL's own way from the queue to the loss: a term for each trained token, with that logprob and advantage.
    waiting: queue.Queue[Any] = queue.Queue()
    for sample in samples:
        waiting.put(sample)
    source = RolloutQueueDataset(waiting, lambda: 4, lambda _: None, 1.0, defaultdict(list), max_staleness=2)
    batch = DataCollatorForRollout(pad_token_id=chat.PAD)([next(iter(FixedCountBatcher(source, 1, 15)))])
    terms = sorted(zip(batch["old_log_probs"][0].tolist(), batch["advantages"][0].tolist(), strict=True))
    by_hand = sorted(
        (float(chance), sample.advantage)
        for sample in samples
        for chance, own in zip(sample.old_log_probs, sample.completion_mask, strict=True)
        if own
    )
    assert np.allclose(terms, by_hand)
    # A group is too old as a whole.
    for sample in samples:
        waiting.put(sample)
    stale: dict[str, list[float]] = defaultdict(list)
    PartialState()  # TRL's logger needs it, and no trainer has been created here
    late = RolloutQueueDataset(waiting, lambda: 5, _ended, 1.0, stale, max_staleness=2, poll_interval_s=0.01)
    with pytest.raises(QueueEmpty):
        next(iter(late))
    assert len(stale["sample/dropped_stale_total"]) == 15


def _ends(segment: Segment) -> tuple[int, int]:
    return segment.versions[0].start, segment.versions[-1].end


class QueueEmpty(Exception):
    """The queue delivers no further sample."""


def _ended(_: float) -> None:
    raise QueueEmpty


def test_token_without_a_logprob_does_not_train_and_is_counted(policy: Path) -> None:
    some = Segment(
        tokens=ints([1, 2, 3]), mask=b"\0\1\1", logprobs=floats([0.0, math.nan, -1.0]), versions=(Span(1, 3, 0),)
    )
    rollouts = tuple(
        Rollout(id=f"0.{n}", group=0, member=n, task="t", outcome=Completed(), reward=float(n), segments=[some])
        for n in range(2)
    )
    samples, figures = make_samples(Group(index=0, task=Task(id="t"), rollouts=rollouts))
    assert [sample.completion_mask.tolist() for sample in samples] == [[0, 0, 1]] * 2
    assert np.isfinite([sample.old_log_probs for sample in samples]).all()
    assert figures["rookery/tokens_without_logprob_total"] == 2.0


def test_clipped_tokens_are_not_counted_as_lacking_logprobs() -> None:
    some = Segment(
        tokens=ints([1, 2, 3]), mask=b"\0\1\1", logprobs=floats([0.0, -1.0, -1.0]), versions=(Span(1, 3, 0),)
    )
    rollouts = tuple(
        Rollout(id=f"0.{n}", group=0, member=n, task="t", outcome=Completed(), reward=float(n), segments=[some])
        for n in range(2)
    )
    samples, figures = make_samples(Group(index=0, task=Task(id="t"), rollouts=rollouts), context=2)
    assert [sample.completion_mask.tolist() for sample in samples] == [[0, 1]] * 2
    assert "rookery/tokens_without_logprob_total" not in figures
    assert figures["rookery/tokens_left_out_total"] == 2.0


def test_untrainable_rollout_is_missing_and_affects_no_other() -> None:
    good = Segment(tokens=ints([1, 2]), mask=b"\0\1", logprobs=floats([0.0, -1.0]), versions=(Span(1, 2, 0),))
    shifted = msgspec.structs.replace(good, logprobs=floats([-1.0, -1.0]))
    rollouts = tuple(
        Rollout(id=f"0.{n}", group=0, member=n, task="t", outcome=Completed(), reward=reward, segments=[part])
        for n, (reward, part) in enumerate([(1.0, good), (math.inf, good), (0.0, shifted), (0.0, good)])
    )
    samples, figures = make_samples(Group(index=0, task=Task(id="t"), rollouts=rollouts))
    assert [sample.advantage for sample in samples] == [1.0, -1.0]
    assert figures["rookery/missing"] == (2.0, 4.0)
    assert figures["rookery/missing/bug.batch_total"] == 2.0


def test_queue_is_bounded_and_stop_ends_everything(policy: Path, workers: Workers) -> None:
    worker = working(
        FaultyEnvironment(), policy, tasks=[{"id": "t", "prompt": "x"}], queue_size=3, buffer=1, concurrency=4
    )
    worker.start()
    try:
        first = worker.rollout_buffer.get(timeout=60)
        while not worker.rollout_buffer.full():
            worker.check_health(60.0)
        worker.check_health(1e-9)  # the worker waits for the trainer, not the other way round
        assert worker.rollout_buffer.qsize() == 3
        worker.update_model_version(9)
        while worker.rollout_buffer.get(timeout=60).model_version != 9:
            worker.check_health(60.0)
        assert first.model_version == 0
        assert first.group_id == 0
    finally:
        worker.stop()
    assert workers() == []
    worker.stop()


def unhealthy(worker: RolloutWorker, stale_after_s: float) -> None:
    """Call `check_health` until it raises; the timeout of the test is the limit."""
    while True:
        worker.check_health(stale_after_s)


def test_check_health_raises_without_progress(policy: Path, tmp_path: Path, workers: Workers) -> None:
    tasks = [{"id": "t", "prompt": "x", "action": "hang"}]
    worker = working(FaultyEnvironment(), policy, tasks=tasks, limits=Limits(run=3600))
    with pytest.raises(RookeryError):
        worker.check_health(1.0)
    worker.start()
    try:
        worker.check_health(60.0)
        with pytest.raises(RookeryError, match=r"\b0\.05\b"):
            unhealthy(worker, 0.05)  # the thread of the worker is alive all the time
        worker.pause()
        worker.resume(3)
        worker.check_health(60.0)
    finally:
        worker.stop()
    with pytest.raises(UsageError, match=r"nowhere\.safetensors"):
        working(FaultyEnvironment(), tmp_path / "nowhere.safetensors", tasks=tasks).start()
    failing = working(FaultyEnvironment(), policy, tasks=[{"id": "t", "prompt": "x", "action": "lose"}])
    failing.start()
    try:
        with pytest.raises(RookeryError, match=r"\bStopped\b.*sandbox\.lost"):
            unhealthy(failing, 60.0)
        with pytest.raises(RookeryError, match=r"sandbox\.lost"):
            failing.pause()
    finally:
        failing.stop()
    assert workers() == []


@pytest.mark.parametrize("change", ["temperature", "tokenizer"])
def test_changed_temperature_or_another_tokenizer_ends_the_worker(
    policy: Path, workers: Workers, change: str
) -> None:
    args = SimpleNamespace(**{**vars(TRAINER_ARGS), "temperature": 1.0})
    tokenizer = ByteTokenizer(shift=int(change == "tokenizer"))
    tasks = [make_task("t", [1.0, 0.0])]
    worker = working(
        ScriptedEnvironment(), policy, tasks=tasks, k=2, queue_size=1, buffer=1, args=args, tokenizer=tokenizer
    )
    worker.start()
    try:
        if change == "temperature":
            worker.rollout_buffer.get(timeout=60)
            args.temperature = 0.7
            while not worker._producer.done():  # type: ignore[union-attr]  (the timeout of the test is the limit)
                try:
                    worker.rollout_buffer.get(timeout=0.1)
                except queue.Empty:
                    continue
        with pytest.raises(RookeryError, match="UsageError"):
            unhealthy(worker, 60.0)
    finally:
        worker.stop()
    assert workers() == []


def test_delivery_while_the_engine_closes_does_not_block_it(policy: Path, workers: Workers) -> None:
    args = SimpleNamespace(**{**vars(TRAINER_ARGS), "temperature": 1.0})
    tasks = [{"id": "t", "prompt": "x", "action": "hang"}]
    worker = working(FaultyEnvironment(), policy, tasks=tasks, args=args)
    begun, delivered = threading.Event(), threading.Event()

    async def deliver_when_cancelled(_: Engine) -> None:
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            await worker.deliver(Group(index=0, task=Task(id="t"), rollouts=()))
            delivered.set()

    worker.start()
    engine = worker._rollouts.engine
    assert engine is not None
    engine.submit(deliver_when_cancelled)
    assert begun.wait(60)
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()
    assert delivered.is_set()
    assert workers() == []


def test_sub_call_longer_than_the_token_budget_is_clipped_and_counted(policy: Path) -> None:
    args = SimpleNamespace(**{**vars(TRAINER_ARGS), "temperature": 1.0, "token_budget": 60})
    tasks = [{"id": "t", "prompt": "x"}]
    worker = working(LongSubCallEnvironment(), policy, tasks=tasks, k=2, args=args, sampling=None)
    worker.start()
    try:
        figures = worker.metrics_queue.get(timeout=60)
        samples = [worker.rollout_buffer.get(timeout=60) for _ in range(4)]
        worker.check_health(60.0)
    finally:
        worker.stop()
    assert max(len(sample.input_ids) for sample in samples) == 60
    assert figures["rookery/missing"] == (0.0, 2.0)
    assert figures["rookery/tokens_left_out_total"] > 0


@pytest.mark.long
def test_failed_push_leaves_the_worker_running(policy: Path) -> None:
    worker = working(
        FaultyEnvironment(), policy, tasks=[{"id": "t", "prompt": "x"}], queue_size=1, buffer=1, concurrency=1
    )
    transfer = worker.weight_transfer
    assert transfer is not None
    worker.start()
    try:
        transfer.pause()
        with pytest.raises(UsageError):
            transfer.send_weights(iter([]))
        assert worker.version == 0
        assert worker.rollout_buffer.get(timeout=60).model_version == 0
        for _ in range(4):  # the worker was resumed
            worker.rollout_buffer.get(timeout=60)
    finally:
        worker.stop()
        transfer.destroy()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"k": 1}, r"\bk\b.*\b1$"),
        ({"queue_size": 0}, "queue_size.*\\b0\\b"),
        ({"baseline": "none"}, "'none'"),
        ({"args": TRAINER_ARGS}, r"\b1\b.*\b0\.7\b"),
    ],
)
def test_invalid_worker_settings_are_rejected(policy: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        working(FaultyEnvironment(), policy, tasks=[{"id": "t", "prompt": "x"}], **options)
