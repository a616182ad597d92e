"""The thread that runs the embedded model, and the interface through which event loops use it.

Guarantees:
- inference never runs on the event loop;
- cancelling a call removes its sequence before the next step (one step samples one token of every sequence);
- `swap` affects only sequences that start later: one version of the weights samples a sequence from its first
  token to its last; old weights are freed when their last sequence has ended;
- an exception in a step fails all sequences of that batch, each with the original exception, and no other
  sequence;
- an action passed to `run_between_steps` runs on the thread between two steps, without interruption;
- `close` ends the thread; calls that still wait get an error.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from rookery.core import UpstreamError
from rookery.core.errors import describe
from rookery.upstreams.embedded.batch import SLOTS, Batch, SamplingJob
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.weights import Weights

log = logging.getLogger("rookery.upstreams")
_CLOSE_SECONDS: Final = 10.0
T = TypeVar("T")


class SequenceEvent(NamedTuple):
    """A notification from the inference thread to the event loop whose call waits for a sequence."""

    pending: "PendingSequence"
    ended: bool = False
    """True if the sequence had ended when the event was sent. More tokens may have been sampled since."""
    error: UpstreamError | None = None


class PendingSequence:
    """A sequence that is sampled or queued, and the future of the call that waits for it."""

    def __init__(
        self,
        job: SamplingJob,
        batch: Batch,
        loop: asyncio.AbstractEventLoop,
        on_tokens: Callable[[SamplingJob], None] | None,
    ) -> None:
        self.job = job
        self.batch = batch
        self.version = batch.llama.version
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.on_tokens = on_tokens


class InferenceThread:
    """Sample sequences in a thread, which starts with the first sequence. At most `slots` are sampled at a
    time."""

    def __init__(self, weights: Weights, *, slots: int = SLOTS) -> None:
        self._slots = slots
        self._batch = Batch(Llama(weights), slots=slots)
        self._old_batches: WeakValueDictionary[Llama, Batch] = WeakValueDictionary()
        """Batches that use replaced weights, by model. They exist for as long as they have sequences."""
        self._inbox: SimpleQueue[tuple[PendingSequence | None, UpstreamError | None] | Callable[[bool], None]] = (
            SimpleQueue()
        )
        """Commands to the thread. A pair of a sequence and None starts the sequence; with an error, it cancels the
        sequence; a pair of None and None ends the thread. A function is called between two steps; its argument is
        False if the thread has ended."""
        self._pending: dict[SamplingJob, PendingSequence] = {}
        """Running and queued sequences. Only the inference thread uses this attribute."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def llama(self) -> Llama:
        """The model that serves new sequences."""
        return self._batch.llama

    @property
    def jobs(self) -> tuple[SamplingJob, ...]:
        """The running and queued jobs at this moment."""
        return tuple(self._pending)

    def swap(self, weights: Weights) -> None:
        """Use these weights for sequences that start from now on.

        Preparing the weights is slow: do not call this on an event loop.
        """
        fresh = Batch(Llama(weights), slots=self._slots)
        with self._lock:
            self._old_batches[self._batch.llama] = self._batch
            self._batch = fresh

    async def run(
        self,
        job: SamplingJob,
        on_tokens: Callable[[SamplingJob], None] | None = None,
        *,
        llama: Llama | None = None,
    ) -> int:
        """Sample a sequence to its end, and return the version of the weights that sampled it.

        The tokens are in `job`. `on_tokens` is called with `job` on this event loop when there are new tokens.
        `llama` is the model to use; None for the newest. Raises `UpstreamError` if the sequence is invalid or
        sampling fails.
        """
        with self._lock:
            self._start()
            pending = PendingSequence(job, self._batch_of(llama), asyncio.get_running_loop(), on_tokens)
            self._inbox.put((pending, None))
        try:
            await pending.future
        finally:
            if not job.finish:
                self._inbox.put((pending, UpstreamError("the call was cancelled by its caller")))
        return pending.version

    async def run_between_steps(self, action: Callable[[Batch], T]) -> T:
        """Call `action` on the thread between two steps, with the current batch, and return its result."""
        done: Future[T] = Future()

        def act(alive: bool) -> None:
            if not alive:
                done.set_exception(UpstreamError("the embedded policy was closed", cause="upstream.unreachable"))
            elif done.set_running_or_notify_cancel():
                try:
                    done.set_result(action(self._batch))
                except Exception as error:  # noqa: BLE001  (raised in the caller)
                    done.set_exception(error)

        with self._lock:
            self._start()
            self._inbox.put(act)
        return await asyncio.wrap_future(done)

    async def abort(self, jobs: Iterable[SamplingJob]) -> int:
        """End these sequences with the tokens sampled so far. Return how many of them were running or queued."""
        selected = list(jobs)
        return await self.run_between_steps(lambda _: self.abort_now(selected))

    def abort_now(self, jobs: Iterable[SamplingJob]) -> int:
        """Do the same as `abort`. Must be called on the inference thread, between two steps."""
        found = [pending for job in jobs if (pending := self._pending.pop(job, None)) is not None]
        for pending in found:
            pending.batch.discard(pending.job)
            pending.job.finish = "abort"
            self._notify(pending.loop, [SequenceEvent(pending, ended=True)])
        return len(found)

    def _start(self) -> None:
        if self._closed:
            raise UpstreamError(
                "the embedded policy was closed before this call: make calls only while the Engine or server that "
                "uses it is open",
                cause="upstream.unreachable",
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="embedded policy", daemon=True)
            self._thread.start()

    def _batch_of(self, llama: Llama | None) -> Batch:
        if llama is None or llama is self._batch.llama:
            return self._batch
        batch = self._old_batches.get(llama)
        if batch is None:
            batch = self._old_batches[llama] = Batch(llama, slots=self._slots)
        return batch

    async def close(self) -> None:
        """End the thread. Closing twice is fine."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._inbox.put((None, None))
        if thread is not None:
            await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    # ---- on the thread

    def _run_thread(self) -> None:
        while self._receive():
            # One step of each: a batch with old weights continues beside the new one.
            for batch in self._batches():
                try:
                    self._deliver(batch.step())
                except Exception as error:
                    log.exception("the embedded policy failed to sample the next tokens of a batch")
                    self._fail(batch, error)
        closed = UpstreamError("the embedded policy was closed", cause="upstream.unreachable")
        for pending in list(self._pending.values()):
            self._notify(pending.loop, [SequenceEvent(pending, error=closed)])
        self._pending.clear()
        while True:
            try:
                left = self._inbox.get(block=False)
            except Empty:
                return
            if callable(left):
                left(False)

    def _batches(self) -> set[Batch]:
        return {pending.batch for pending in self._pending.values()}

    def _receive(self) -> bool:
        """Process the commands in the inbox, waiting for one if there is nothing to sample. Return False to end
        the thread."""
        wait = not self._batch.busy and not any(batch.busy for batch in self._batches())
        while True:
            try:
                order = self._inbox.get(block=wait)
            except Empty:
                return True
            wait = False
            if callable(order):
                order(True)
                continue
            pending, error = order
            if pending is None:
                return False
            if error is None:
                self._add(pending)
            elif self._pending.pop(pending.job, None) is not None:
                pending.batch.discard(pending.job)

    def _add(self, pending: PendingSequence) -> None:
        try:
            pending.batch.add(pending.job)
        except ValueError as error:  # only this request is invalid
            refused = UpstreamError(f"the embedded policy rejects the request: {error}", cause="upstream.rejected")
            self._notify(pending.loop, [SequenceEvent(pending, error=refused)])
        else:
            self._pending[pending.job] = pending

    def _deliver(self, jobs: list[SamplingJob]) -> None:
        events: dict[asyncio.AbstractEventLoop, list[SequenceEvent]] = {}
        for job in jobs:
            pending = self._pending[job]
            job.reported = len(job.tokens)
            if job.finish:
                del self._pending[job]
            elif pending.on_tokens is None:
                continue
            events.setdefault(pending.loop, []).append(SequenceEvent(pending, ended=bool(job.finish)))
        for loop, ready in events.items():
            self._notify(loop, ready)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Fail all sequences of a batch whose step raised `error`, and replace the batch.

        Its state may be inconsistent.
        """
        with self._lock:
            self._old_batches.pop(batch.llama, None)
            if self._batch is batch:
                self._batch = Batch(batch.llama, slots=self._slots)
        for job, pending in list(self._pending.items()):
            if pending.batch is batch:
                del self._pending[job]
                failure = UpstreamError(f"the embedded policy failed: {describe(error)}", cause="upstream.error")
                failure.__cause__ = error
                self._notify(pending.loop, [SequenceEvent(pending, error=failure)])

    def _notify(self, loop: asyncio.AbstractEventLoop, events: list[SequenceEvent]) -> None:
        try:
            loop.call_soon_threadsafe(_handle_events, events)
        except RuntimeError:  # the loop is closed: its calls are gone
            for pending, _, _ in events:
                if self._pending.pop(pending.job, None) is not None:
                    pending.batch.discard(pending.job)


def _handle_events(events: list[SequenceEvent]) -> None:
    """Call the `on_tokens` callbacks and complete the futures of waiting calls. Runs on their event loop."""
    for pending, ended, error in events:
        if pending.future.done():
            continue
        if error is not None:
            pending.future.set_exception(error)
            continue
        if pending.on_tokens is not None:
            pending.on_tokens(pending.job)
        if ended:
            pending.future.set_result(None)
