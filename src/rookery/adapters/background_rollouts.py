"""Rollouts in the background of a training, for trainers that take samples from a queue.

Guarantees:
- Groups are delivered one after the other, in the engine's thread. While `deliver` waits, at most `buffer`
  finished groups wait with it, and then no new rollouts start.
- `check_health` raises if producing groups has failed, or if nothing is queued and nothing was sampled, scored or
  queued for the given time. A running thread alone is not considered healthy.
- `stop` ends everything that `start` began, even while model calls are paused. `start` raises errors that occur
  while the engine opens.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from rookery.adapters.compatibility import TrainerSettings
from rookery.adapters.trainer_engine import ThreadedTrainerEngine
from rookery.core import Group, Rollout, RookeryError, UsageError
from rookery.core.errors import describe
from rookery.engine import Engine
from rookery.engine.group_channel import GroupFilter

POLL_SECONDS: Final = 0.2
"""Interval in seconds at which a thread that waits for a queue checks whether to give up."""
CALL_SECONDS: Final = 120.0
"""Maximum time in seconds for the engine to pause or resume its model calls."""


class BackgroundRollouts:
    """Produces groups of k rollouts without end. A subclass defines `deliver`, which gives them to the trainer."""

    def __init__(
        self,
        rollouts: ThreadedTrainerEngine,
        settings: TrainerSettings,
        *,
        k: int,
        keep: GroupFilter | str | None,
        buffer: int,
        queue_size: int,
    ) -> None:
        """`keep` selects the groups to deliver, and `queue_size` is the maximum number of samples in the queue."""
        if k < 2:
            raise UsageError(f"k must be at least 2 for a baseline, not {k}")
        if queue_size < 1 or buffer < 1:
            raise UsageError(f"queue_size and buffer must be at least 1, not {queue_size} and {buffer}")
        rollouts.check_settings(settings)
        self.tasks = rollouts.tasks
        self.k = k
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=queue_size)
        self.version = 0
        self._rollouts = rollouts
        self._settings = settings
        self._keep = keep
        self._buffer = buffer
        self._producer: Future[None] | None = None
        self._stopping = threading.Event()
        self._last_progress = time.time()

    async def deliver(self, group: Group) -> None:
        """Pass a finished group to the trainer, waiting while its queue is full."""
        raise NotImplementedError

    def start(self) -> None:
        """Open the engine and start to produce groups. Raise errors that occur while it opens."""
        if self._producer is None:
            self._stopping.clear()
            self._note_progress()
            self._producer = self._rollouts.open(self._settings).submit(self._produce)

    def stop(self) -> None:
        """Cancel running rollouts, and close the engine and its thread. A second call does nothing."""
        producer, self._producer = self._producer, None
        if producer is not None:
            self._stopping.set()
            producer.cancel()
            self._rollouts.close()

    def check_health(self, stale_after_s: float) -> None:
        """Raise `RookeryError` if the worker has failed or is not running.

        Also raise it if no sample is queued and nothing was sampled, scored or queued for `stale_after_s` seconds.
        """
        self._raise()
        if self._producer is None:
            raise RookeryError("the rollouts are not running: they were not started, or were stopped")
        if not self.rollout_buffer.empty():
            return
        engine = self._rollouts.engine
        folder = engine.folder if engine is not None else None
        age = time.time() - max(self._last_progress, _get_last_sample_time(folder))
        if age > stale_after_s:
            raise RookeryError(
                f"nothing was sampled, scored or queued for {age:.0f} seconds (more than {stale_after_s:g}): "
                f"look at the run in {folder}, and at the policy's server"
            )

    def pause(self) -> None:
        """Pause model calls; return when none is in progress. Before `start`, do nothing."""
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
            raise RookeryError(f"the rollouts in the background failed: {describe(failure)}") from failure

    def _call(self, make: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        if self._rollouts.engine is None:
            return
        future = self._rollouts.engine.submit(make)
        try:
            future.result(CALL_SECONDS)
        except TimeoutError as error:
            raise RookeryError(f"the Rookery engine did not respond within {CALL_SECONDS:g} seconds") from error
        finally:
            future.cancel()  # after a timeout or Ctrl-C; no effect if it is done

    async def _produce(self, engine: Engine) -> None:
        engine.on_record = self._on_record
        if self.version:
            await engine.upstream.resume(self.version)
        name = self._rollouts.trainer.lower()
        stream = engine.groups(
            self.tasks, k=self.k, epochs=None, keep=self._keep, buffer=self._buffer, name=name, need_tokens=True
        )
        async with stream:
            async for group in stream:
                await asyncio.to_thread(self._rollouts.check, [group])
                await self.deliver(group)
                self._note_progress()

    async def put(self, sample: Any) -> None:
        """Put a sample into the trainer's queue, waiting while it is full."""
        await asyncio.to_thread(self._wait_and_put, sample)

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
