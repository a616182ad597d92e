"""`RolloutWorker`: a `rollout_worker` for `AsyncGRPOTrainer` that runs any Rookery environment.

Guarantees:
- The worker produces groups of rollouts in the engine's thread while the trainer trains, and waits while its queue
  of samples is full.
- All samples of a group are queued one after the other, with the oldest policy version of the group's tokens. A
  group in which all rollouts failed gives no samples.
- `check_health` raises if the worker has failed, or if its queue is empty and nothing was sampled, scored or
  queued for the given time. A running thread alone is not considered healthy.
- `stop` ends everything that `start` began, even while model calls are paused. `start` raises errors that occur
  while the worker starts.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from rookery.adapters.compatibility import RolloutChecks, TrainerSettings, check_version
from rookery.adapters.embedded import Push
from rookery.adapters.task_rows import get_tasks
from rookery.adapters.trl.rollout_function import TESTED, dataset
from rookery.adapters.trl.weight_transfer import WeightTransfer, resolve_push
from rookery.core import Group, Rollout, RookeryError, Sampling, Task, UsageError
from rookery.core.errors import describe
from rookery.engine import Engine, SyncEngine
from rookery.engine.group_channel import GroupFilter
from rookery.environments import Environment, load_environment
from rookery.training.advantages import Baseline
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, make_rows, split_by_rollout
from rookery.upstreams.protocol import UpstreamConfig

MetricValue: TypeAlias = float | tuple[float, float]
"""Value of a metric: a number, or a pair of numerator and denominator whose sums over groups form a ratio."""
STREAM = "trl"
MAX_METRICS = 4096
POLL_SECONDS = 0.2
"""Interval in seconds at which a thread that waits for the queue checks whether to give up."""
CALL_SECONDS = 120.0
"""Maximum time in seconds for the Rookery engine to pause or resume its model calls, or to close."""

log = logging.getLogger("rookery.adapters.trl")


class RolloutWorker:
    """Runs rollouts for TRL's `AsyncGRPOTrainer` in a thread of the trainer's process.

    Use it as `AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=worker.weight_transfer)`.
    """

    def __init__(
        self,
        env: Environment | str,
        *,
        policy: str | Sequence[str] | UpstreamConfig,
        k: int,
        tasks: Iterable[Task | dict[str, Any] | str] | None = None,
        push: Push | bool | None = None,
        baseline: Baseline = "leave_one_out",
        keep: GroupFilter | str | None = None,
        queue_size: int | None = None,
        buffer: int = 2,
        sampling: Sampling | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        """Create a worker; `start` starts it.

        `k` is the trainer's `num_generations`. `push` transfers weights to the policy; see `rollout_func`. `keep`
        selects the groups to train on. `queue_size` is the maximum number of samples in the queue (default: 8 *
        k), and `buffer` that of finished groups waiting for the queue. `tokenizer` is the trainer's, to check that
        the policy has the same. `options` are arguments of `Engine`.
        """
        if baseline not in ("leave_one_out", "mean"):
            raise UsageError(f"unknown baseline {baseline!r}: choose leave_one_out or mean")
        if k < 2:
            raise UsageError(f"k must be at least 2 for a baseline, not {k}")
        size = 8 * k if queue_size is None else queue_size
        if size < 1 or buffer < 1:
            raise UsageError(f"queue_size and buffer must be at least 1, not {size} and {buffer}")
        self.environment = (
            env if isinstance(env, Environment) else load_environment(env, **options.get("arguments", {}))
        )
        self.tasks = get_tasks(self.environment, tasks)
        self.k = k
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=size)
        self.metrics_queue: queue.Queue[dict[str, MetricValue]] = queue.Queue(maxsize=MAX_METRICS)
        self.version = 0
        chosen = resolve_push(policy, push)
        self.weight_transfer = None if chosen is None else WeightTransfer(self, chosen)
        """Value for the trainer's argument `weight_transfer`; None if Rookery transfers no weights, for example
        because TRL transfers them to its vLLM server."""
        self._baseline: Baseline = baseline
        self._keep = keep
        self._buffer = buffer
        check_version("trl", *TESTED)
        # The trainer's own settings are not known here: they must be those of `sampling`.
        given = sampling or Sampling()
        named = {name: getattr(given, name) for name in ("temperature", "top_p", "top_k")}
        settings = TrainerSettings(**{name: value for name, value in named.items() if value is not None})
        self._checks = RolloutChecks("TRL", settings, tokenizer)
        self._options = {"env": env, "policy": policy, "sampling": settings.settle_sampling(sampling), **options}
        self._engine: SyncEngine | None = None
        self._producer: Future[None] | None = None
        self._stopping = threading.Event()
        self._last_progress = time.time()

    def dataset(self) -> Any:
        """Return a `datasets.Dataset` of the tasks, from which the trainer derives the length of an epoch."""
        return dataset(self.tasks)

    # ---- TRL's protocol

    def start(self) -> None:
        """Open the Rookery engine and start to produce samples. Raise errors that occur while it opens."""
        if self._producer is not None:
            return
        self._stopping.clear()
        self._note_progress()
        engine = SyncEngine(**self._options)
        engine.__enter__()
        self._engine = engine
        self._producer = engine.submit(self._produce)

    def stop(self) -> None:
        """Cancel running rollouts, and close the Rookery engine and its thread. A second call does nothing."""
        producer, engine = self._producer, self._engine
        if producer is None or engine is None:
            return
        self._stopping.set()
        producer.cancel()
        self._producer = self._engine = None
        engine.__exit__(None, None, None)

    def update_model_version(self, model_version: int) -> None:
        """Set the policy version that tokens sampled from now on carry."""
        if model_version != self.version:
            self.resume(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RookeryError` if the worker has failed or is not running.

        Also raise it if no sample is queued and nothing was sampled, scored or queued for `stale_after_s` seconds.
        """
        self._raise()
        if self._producer is None:
            raise RookeryError("the rollout worker is not running: it was not started, or was stopped")
        if not self.rollout_buffer.empty():
            return
        engine = self._engine
        folder = engine.folder if engine is not None else None
        age = time.time() - max(self._last_progress, _get_last_sample_time(folder))
        if age > stale_after_s:
            raise RookeryError(
                f"nothing was sampled, scored or queued for {age:.0f} seconds (more than {stale_after_s:g}): "
                f"look at the run in {folder}, and at the policy's server"
            )

    # ---- for the weight transfer

    def pause(self) -> None:
        """Pause the worker's model calls; return when none is in progress. Before `start`, do nothing."""
        self._raise()
        self._call(lambda engine: engine.upstream.pause("abort"))

    def resume(self, version: int | None) -> None:
        """Resume model calls. If `version` is not None, tokens sampled from then on carry that policy version."""
        if version is not None:
            self.version = version
        self._note_progress()
        self._call(lambda engine: engine.upstream.resume(version))

    def _raise(self) -> None:
        producer = self._producer
        if producer is not None and producer.done() and (failure := producer.exception()) is not None:
            raise RookeryError(f"the rollout worker failed: {describe(failure)}") from failure

    def _call(self, make: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        if self._engine is None:
            return
        future = self._engine.submit(make)
        try:
            future.result(CALL_SECONDS)
        except TimeoutError as error:
            raise RookeryError(f"the Rookery engine did not respond within {CALL_SECONDS:g} seconds") from error
        finally:
            future.cancel()  # after a timeout or Ctrl-C; no effect if it is done

    # ---- in the engine's thread

    async def _produce(self, engine: Engine) -> None:
        engine.on_record = self._on_record
        if self.version:
            await engine.upstream.resume(self.version)
        stream = engine.groups(
            self.tasks,
            k=self.k,
            epochs=None,
            keep=self._keep,
            buffer=self._buffer,
            name=STREAM,
            need_tokens=True,
        )
        async with stream:
            async for group in stream:
                await asyncio.to_thread(self._checks.check_groups, [group], engine.folder)
                await self._queue(group)

    async def _queue(self, group: Group) -> None:
        """Put the samples of a group into the queue, waiting while the queue is full."""
        samples, figures = make_samples(group, baseline=self._baseline, version=self.version)
        _put_metrics(self.metrics_queue, figures)
        for sample in samples:
            await asyncio.to_thread(self._wait_and_put, sample)
        self._note_progress()

    def _wait_and_put(self, sample: Any) -> None:
        sample.enqueued_at = time.time()
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=POLL_SECONDS)
            except queue.Full:
                continue
            self._note_progress()
            return

    def _on_record(self, record: Rollout) -> None:
        if record.valid:  # an engine in which every rollout fails makes no progress
            self._note_progress()

    def _note_progress(self) -> None:
        self._last_progress = time.time()


def _get_last_sample_time(folder: Path | None) -> float:
    """Return the Unix time at which model calls were last recorded in the run directory; 0 if none was."""
    if folder is None:
        return 0.0
    return max((path.stat().st_mtime for path in (folder / "tokens").glob("*")), default=0.0)


def _put_metrics(metrics: "queue.Queue[dict[str, MetricValue]]", figures: dict[str, MetricValue]) -> None:
    try:
        metrics.put_nowait(figures)
    except queue.Full:
        log.debug("the trainer does not read metrics; dropping %s", sorted(figures))


def make_samples(
    group: Group, *, baseline: Baseline = "leave_one_out", version: int = 0
) -> tuple[list[Any], dict[str, MetricValue]]:
    """Return TRL's `RolloutSample` objects of a group, one per segment, and metrics about the group.

    All samples carry the oldest policy version of the group's trained tokens, so that the trainer drops a stale
    group as a whole; `version` is used if no token has one. A token without a log probability does not train.
    """
    rows = make_rows([group], BatchConfig(baseline=baseline, without_logprob="mask", extras=()))
    rollouts = [part[0] for part in split_by_rollout(rows)]
    rewards = [row.reward for row in rollouts if row.reward is not None]
    trained = [row for row in rows if row.trained]
    oldest = min((row.version_range[0] for row in trained if row.version_range), default=version)
    prompt = [{"role": message.role, "content": message.text} for message in group.task.prompt]
    spread = float(np.std(rewards)) if rewards else 0.0
    samples = [_make_sample(row, prompt, oldest, spread) for row in trained]
    figures: dict[str, MetricValue] = {
        "rookery/missing": (float(len(rollouts) - len(rewards)), float(len(rollouts)))
    }
    valid = {row.rollout for row in rollouts if row.valid}
    sampled = sum(one.trained for rollout in group.rollouts if rollout.id in valid for one in rollout.segments)
    if without := sampled - sum(row.trained for row in trained):
        figures["rookery/tokens_without_logprob_total"] = float(without)
    for cause, count in Counter(row.outcome for row in rollouts if not row.valid).items():
        figures[f"rookery/missing/{cause}_total"] = float(count)
    return samples, figures


def _make_sample(row: Row, prompt: list[dict[str, str]], version: int, spread: float) -> Any:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample(
        prompt=prompt,
        completion=[],  # the trainer needs token IDs only; `rookery show` displays the text
        input_ids=row.tokens.astype(np.int64),
        completion_mask=row.mask.astype(np.int64),
        old_log_probs=row.logprobs,
        advantage=row.advantage,
        model_version=version,
        group_id=row.group,
        metrics={
            "reward": float(row.reward or 0.0),
            "reward_std": spread,
            **{f"rewards/{name}": float(value) for name, value in row.record.rewards.items()},
            **{f"rookery/metrics/{name}": float(value) for name, value in row.record.metrics.items()},
        },
    )
