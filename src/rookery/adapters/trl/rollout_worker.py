"""`RolloutWorker`: a `rollout_worker` for `AsyncGRPOTrainer` that runs any Rookery environment.

Guarantees:
- The worker produces groups of rollouts in its own thread while the trainer trains, and waits while its queue of
  samples is full.
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
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from rookery.adapters.compatibility import RolloutChecks, TrainerSettings, check_version
from rookery.adapters.embedded import Push
from rookery.adapters.task_rows import get_tasks
from rookery.adapters.trl.rollout_function import TESTED, dataset
from rookery.adapters.trl.weight_transfer import WeightTransfer, resolve_push
from rookery.core import Group, Rollout, RookeryError, Sampling, Task, UsageError
from rookery.core.errors import describe
from rookery.engine import Engine
from rookery.engine.group_channel import GroupFilter
from rookery.engine.processes import new_event_loop
from rookery.environments import Environment, load_environment
from rookery.training.advantages import Baseline
from rookery.training.config import BatchConfig
from rookery.training.rows import Row, make_rows, split_by_rollout
from rookery.upstreams.protocol import UpstreamConfig

T = TypeVar("T")
MetricValue: TypeAlias = float | tuple[float, float]
"""Value of a metric: a number, or a pair of numerator and denominator whose sums over groups form a ratio."""
STREAM = "trl"
MAX_METRICS = 4096
POLL_SECONDS = 0.2
"""Interval in seconds at which a thread that waits for the queue or for the start checks whether to give up."""
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
        settings = TrainerSettings()  # the asynchronous trainer computes at temperature 1
        self._checks = RolloutChecks("TRL", settings, tokenizer)
        self._options = {"env": env, "policy": policy, "sampling": settings.settle_sampling(sampling), **options}
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._last_progress = time.time()

    def dataset(self) -> Any:
        """Return a `datasets.Dataset` of the tasks, from which the trainer derives the length of an epoch."""
        return dataset(self.tasks)

    # ---- TRL's protocol

    def start(self) -> None:
        """Start the worker's thread and return when the Rookery engine is open.

        Raise errors that occur until then.
        """
        if self._thread is not None:
            return
        self._ready.clear()
        self._stopping.clear()
        self._failure = None
        self._last_progress = time.time()
        self._thread = threading.Thread(target=self._work, name="rookery-trl-worker", daemon=True)
        self._thread.start()
        try:
            while not self._ready.wait(POLL_SECONDS):
                if not self._thread.is_alive():
                    break
        except BaseException:
            self.stop()
            raise
        failure = self._get_failure()
        if failure is not None:
            self.stop()
            raise failure

    def stop(self) -> None:
        """Cancel running rollouts, close the Rookery engine and end the thread. A second call does nothing."""
        thread = self._thread
        if thread is None:
            return
        self._stopping.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None and thread.is_alive():
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # it has just ended
                log.debug("the worker had already ended when it was stopped")
        thread.join(CALL_SECONDS)
        if thread.is_alive():
            raise RookeryError(f"the rollout worker did not end within {CALL_SECONDS:g} seconds")
        self._thread = self._loop = self._task = None

    def update_model_version(self, model_version: int) -> None:
        """Set the policy version that tokens sampled from now on carry."""
        if model_version != self.version:
            self.resume(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RookeryError` if the worker has failed or is not running.

        Also raise it if no sample is queued and nothing was sampled, scored or queued for `stale_after_s` seconds.
        """
        self._raise()
        if self._thread is None or not self._thread.is_alive():
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
        engine = self._engine
        if engine is not None:
            self._call(engine.upstream.pause("abort"))

    def resume(self, version: int | None) -> None:
        """Resume model calls. If `version` is not None, tokens sampled from then on carry that policy version."""
        if version is not None:
            self.version = version
        self._note_progress()
        engine = self._engine
        if engine is not None:
            self._call(engine.upstream.resume(version))

    def _get_failure(self) -> BaseException | None:
        return self._failure

    def _raise(self) -> None:
        if self._failure is not None:
            raise RookeryError(f"the rollout worker failed: {describe(self._failure)}") from self._failure

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None or self._thread is None or not self._thread.is_alive():
            work.close()
            raise RookeryError("the rollout worker has ended") from self._failure
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result(CALL_SECONDS)
        except TimeoutError as error:
            raise RookeryError(f"the Rookery engine did not respond within {CALL_SECONDS:g} seconds") from error
        finally:
            future.cancel()  # after a timeout or Ctrl-C; no effect if it is done

    # ---- the thread

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001  (raised by check_health or start)
            if not self._stopping.is_set():
                self._failure = error
            elif not isinstance(error, asyncio.CancelledError):
                log.warning("the rollout worker was stopped and did not end cleanly: %s", describe(error))
        finally:
            self._engine = None
            self._ready.set()

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        if self._stopping.is_set():
            return
        async with Engine(**self._options) as engine:
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
                self._engine = engine
                self._ready.set()
                async for group in stream:
                    await self._queue(group)

    async def _queue(self, group: Group) -> None:
        """Put the samples of a group into the queue, waiting while the queue is full."""
        assert self._engine is not None
        await asyncio.to_thread(self._checks.check_groups, [group], self._engine.folder)
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
