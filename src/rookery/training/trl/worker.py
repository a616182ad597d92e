"""`RolloutWorker`: what `AsyncGRPOTrainer` takes as its `rollout_worker`, for any Rookery environment.

Promises:
- it keeps making groups while the trainer trains, in a thread of its own, and waits when its queue is full;
- a group is queued whole, with the oldest version of its tokens; a group that failed whole is passed over;
- `check_health` raises when the worker has failed, and when nothing was sampled, scored or queued for the time
  given while the trainer waits: a live thread alone is no health;
- `stop` ends everything that `start` began, also in the middle of a pause; what failed in `start` is raised there.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rookery.core import Group, Rollout, RookeryError, Sampling, Task, UsageError
from rookery.core.errors import describe
from rookery.engine import Engine
from rookery.engine.channel import GroupFilter
from rookery.engine.processes import new_event_loop
from rookery.environments import Environment, load_environment
from rookery.training.trl.prompts import dataset, tasks_of
from rookery.training.trl.rows import Baseline
from rookery.training.trl.samples import MetricValue, samples_of
from rookery.training.trl.weights import Push, WeightTransfer, settled_push
from rookery.upstreams.protocol import UpstreamConfig

T = TypeVar("T")
STREAM = "trl"
METRICS = 4096
GLANCE = 0.2
"""Seconds between two looks at whether we are to stop, while the queue is full."""
CALL = 120.0
"""Seconds that the engine may take to hold its calls back, or to end."""

log = logging.getLogger("rookery.training.trl")


class RolloutWorker:
    """`AsyncGRPOTrainer(…, rollout_worker=worker, weight_transfer=worker.weight_transfer)`."""

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
        ahead: int = 2,
        sampling: Sampling | None = None,
        **options: Any,
    ) -> None:
        """`k` is the trainer's `num_generations`. `queue_size` bounds the samples that wait for it (those of eight
        groups), `ahead` the finished groups that wait for the queue; `options` are those of `Engine`."""
        if baseline not in ("leave_one_out", "mean"):
            raise UsageError(f"there is no baseline {baseline!r}; there is leave_one_out and mean")
        if k < 2:
            raise UsageError(f"a group needs at least 2 members to have a baseline, not {k}")
        size = 8 * k if queue_size is None else queue_size
        if size < 1 or ahead < 1:
            raise UsageError("queue_size and ahead must be at least 1: what waits without a bound grows stale")
        self.environment = (
            env if isinstance(env, Environment) else load_environment(env, **options.get("arguments", {}))
        )
        self.tasks = tasks_of(self.environment, tasks)
        self.k = k
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=size)
        self.metrics_queue: queue.Queue[dict[str, MetricValue]] = queue.Queue(maxsize=METRICS)
        self.version = 0
        found = settled_push(policy, push)
        self.weight_transfer = None if found is None else WeightTransfer(self, found)
        """For the trainer's argument of the same name; None leaves it to TRL, which pushes to its vLLM."""
        self._baseline: Baseline = baseline
        self._keep = keep
        self._ahead = ahead
        self._options = {
            "env": env,
            "policy": policy,
            "sampling": sampling or Sampling(temperature=1.0),
            **options,
        }
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._moved = time.time()

    def dataset(self) -> Any:
        """A `datasets.Dataset` of the tasks: the trainer wants one to know what an epoch is."""
        return dataset(self.tasks)

    # ---- TRL's protocol

    def start(self) -> None:
        """Returns when the engine is open; raises what keeps it from that."""
        if self._thread is not None:
            return
        self._ready.clear()
        self._stopping.clear()
        self._failure = None
        self._moved = time.time()
        self._thread = threading.Thread(target=self._work, name="rookery-trl-worker", daemon=True)
        self._thread.start()
        try:
            while not self._ready.wait(GLANCE):
                if not self._thread.is_alive():
                    break
        except BaseException:
            self.stop()
            raise
        failure = self._failed()
        if failure is not None:
            self.stop()
            raise failure

    def stop(self) -> None:
        """Ends the engine and everything under way. Stopping twice is fine."""
        thread = self._thread
        if thread is None:
            return
        self._stopping.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None and thread.is_alive():
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:  # it has just closed by itself
                log.debug("the worker had ended when it was stopped")
        thread.join(CALL)
        if thread.is_alive():
            raise RookeryError(f"the rollout worker did not end within {CALL:g} seconds")
        self._thread = self._loop = self._task = None

    def update_model_version(self, model_version: int) -> None:
        """The version that what is sampled from now on carries."""
        if model_version != self.version:
            self.resume(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raises if the worker has failed or stands still."""
        self._raise()
        if self._thread is None or not self._thread.is_alive():
            raise RookeryError("the rollout worker does not run: it was not started, or was stopped")
        if not self.rollout_buffer.empty():
            return
        engine = self._engine
        folder = engine.folder if engine is not None else None
        age = time.time() - max(self._moved, _sampled(folder))
        if age > stale_after_s:
            raise RookeryError(
                f"nothing was sampled, scored or queued for {age:.0f} seconds (more than {stale_after_s:g}): "
                f"look at the run in {folder}, and at the policy's server"
            )

    # ---- for the weight transfer

    def pause(self) -> None:
        """Returns when no model call is under way; nothing to do before `start`."""
        self._raise()
        engine = self._engine
        if engine is not None:
            self._call(engine.upstream.pause("abort"))

    def resume(self, version: int | None) -> None:
        """Ends a pause; from then on turns carry the version, where one is given."""
        if version is not None:
            self.version = version
        self._move()
        engine = self._engine
        if engine is not None:
            self._call(engine.upstream.resume(version))

    def _failed(self) -> BaseException | None:
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
            return future.result(CALL)
        except TimeoutError as error:
            raise RookeryError(f"the engine did not answer within {CALL:g} seconds") from error
        finally:
            future.cancel()  # where we gave up, or Ctrl-C came to us; one that is done stays so

    # ---- the thread

    def _work(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001  (the trainer hears of it from check_health, or from start)
            if not self._stopping.is_set():
                self._failure = error
            elif not isinstance(error, asyncio.CancelledError):
                log.warning("the rollout worker was stopped and did not end well: %s", describe(error))
        finally:
            self._engine = None
            self._ready.set()

    async def _main(self) -> None:
        self._task = asyncio.current_task()
        if self._stopping.is_set():
            return
        async with Engine(**self._options) as engine:
            engine.on_record = self._ended
            if self.version:
                await engine.upstream.resume(self.version)
            stream = engine.groups(
                self.tasks,
                k=self.k,
                epochs=None,
                keep=self._keep,
                buffer=self._ahead,
                name=STREAM,
                need_tokens=True,
            )
            async with stream:
                self._engine = engine
                self._ready.set()
                async for group in stream:
                    await self._queue(group)

    async def _queue(self, group: Group) -> None:
        """Puts a group's samples into the queue, as fast as the trainer takes them."""
        sampled = samples_of(group, baseline=self._baseline, version=self.version)
        _put(self.metrics_queue, sampled.figures)
        for sample in sampled.samples:
            await asyncio.to_thread(self._wait_and_put, sample)
        self._move()

    def _wait_and_put(self, sample: Any) -> None:
        sample.enqueued_at = time.time()
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=GLANCE)
            except queue.Full:
                continue
            self._move()
            return

    def _ended(self, record: Rollout) -> None:
        if record.valid:  # an engine in which everything fails is busy, and no good
            self._move()

    def _move(self) -> None:
        self._moved = time.time()


def _sampled(folder: Path | None) -> float:
    """When turns were last written."""
    if folder is None:
        return 0.0
    return max((path.stat().st_mtime for path in (folder / "tokens").glob("*")), default=0.0)


def _put(metrics: "queue.Queue[dict[str, MetricValue]]", figures: dict[str, MetricValue]) -> None:
    try:
        metrics.put_nowait(figures)
    except queue.Full:
        log.debug("the trainer takes no metrics; these are dropped: %s", sorted(figures))
