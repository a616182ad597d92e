"""The thread that steps the batches, and the way to it from an event loop.

Promises:
- inference never runs on the event loop;
- cancelling who waits for a sequence takes it out before the next step;
- a sequence is drawn by one version of the weights from its first token to its last: new weights serve those that
  are asked for afterwards, and the old ones go when their last sequence has ended;
- an error in a step fails the sequences of that batch, each with the original error, and no other;
- what is done between two steps (`between`) is done on the thread, whole, before anybody gets another token;
- closing ends the thread; who still waits gets an error, nobody waits for ever.
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
    """What the thread has to tell who waits."""

    ticket: "PendingSequence"
    ended: bool = False
    """As the thread saw it: on the loop, the job may already be a step further than what is told."""
    error: UpstreamError | None = None


class PendingSequence:
    """One sequence and who waits for it."""

    __slots__ = ("batch", "future", "job", "loop", "news", "version")

    def __init__(
        self,
        job: SamplingJob,
        batch: Batch,
        loop: asyncio.AbstractEventLoop,
        news: Callable[[SamplingJob], None] | None,
    ) -> None:
        self.job = job
        self.batch = batch
        self.version = batch.llama.version
        self.loop = loop
        self.future: asyncio.Future[None] = loop.create_future()
        self.news = news


class InferenceThread:
    """Sequences in, tokens out. Made anywhere; its thread starts with the first sequence."""

    def __init__(self, weights: Weights, *, places: int = SLOTS) -> None:
        self._places = places
        self._batch = Batch(Llama(weights), places=places)
        self._older: WeakValueDictionary[Llama, Batch] = WeakValueDictionary()
        """Batches of weights that were swapped, for as long as they have sequences."""
        self._inbox: SimpleQueue[tuple[PendingSequence | None, UpstreamError | None] | Callable[[bool], None]] = (
            SimpleQueue()
        )
        """A ticket to begin; with an error, a ticket to give up; without a ticket, the end. Or what is to be done
        between two steps; it is told whether it still can be."""
        self._tickets: dict[SamplingJob, PendingSequence] = {}
        """The thread's own."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def llama(self) -> Llama:
        """The model that serves what is asked for now."""
        return self._batch.llama

    def swap(self, weights: Weights) -> None:
        """From now on these. Takes as long as it takes to prepare them: not for an event loop."""
        fresh = Batch(Llama(weights), places=self._places)
        with self._lock:
            self._older[self._batch.llama] = self._batch
            self._batch = fresh

    async def run(
        self,
        job: SamplingJob,
        news: Callable[[SamplingJob], None] | None = None,
        *,
        llama: Llama | None = None,
    ) -> int:
        """Until the sequence has ended; the version of the weights that drew it.

        `news`, where given, is called on this loop whenever there are tokens it has not seen. `llama` is the model
        that draws it, where that is not to be the newest.
        """
        with self._lock:
            self._start()
            ticket = PendingSequence(job, self._of(llama), asyncio.get_running_loop(), news)
            self._inbox.put((ticket, None))
        try:
            await ticket.future
        finally:
            if not job.finish:
                self._inbox.put((ticket, UpstreamError("cancelled by its caller")))
        return ticket.version

    async def between(self, action: Callable[[Batch], T]) -> T:
        """What `action` gives: called on the thread, between two steps, with the batch that serves now."""
        done: Future[T] = Future()

        def act(alive: bool) -> None:
            if not alive:
                done.set_exception(UpstreamError("the embedded policy was closed", cause="upstream.unreachable"))
            elif done.set_running_or_notify_cancel():
                try:
                    done.set_result(action(self._batch))
                except Exception as error:  # noqa: BLE001  (it is the caller's)
                    done.set_exception(error)

        with self._lock:
            self._start()
            self._inbox.put(act)
        return await asyncio.wrap_future(done)

    async def abort(self, jobs: Iterable[SamplingJob]) -> int:
        """Ends those that are under way or wait, with what they have; how many there were."""
        asked = list(jobs)
        return await self.between(lambda _: self.end(asked))

    def end(self, jobs: Iterable[SamplingJob]) -> int:
        """As `abort`, for what runs between two steps already."""
        found = [ticket for job in jobs if (ticket := self._tickets.pop(job, None)) is not None]
        for ticket in found:
            ticket.batch.discard(ticket.job)
            ticket.job.finish = "abort"
            self._tell(ticket.loop, [SequenceEvent(ticket, ended=True)])
        return len(found)

    def _start(self) -> None:
        if self._closed:
            raise UpstreamError("the embedded policy is closed", cause="upstream.unreachable")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="embedded policy", daemon=True)
            self._thread.start()

    def _of(self, llama: Llama | None) -> Batch:
        if llama is None or llama is self._batch.llama:
            return self._batch
        batch = self._older.get(llama)
        if batch is None:
            batch = self._older[llama] = Batch(llama, places=self._places)
        return batch

    async def close(self) -> None:
        """Ends the thread. Closing twice is fine."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._inbox.put((None, None))
        if thread is not None:
            await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    # -------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        while self._receive():
            # By number, not all of one first: a batch whose weights are old goes on beside the new one.
            for batch in self._batches():
                try:
                    self._deliver(batch.step())
                except Exception as error:
                    log.exception("a step of the embedded policy failed")
                    self._fail(batch, error)
        gone = UpstreamError("the embedded policy was closed", cause="upstream.unreachable")
        for ticket in list(self._tickets.values()):
            self._tell(ticket.loop, [SequenceEvent(ticket, error=gone)])
        self._tickets.clear()
        while True:
            try:
                left = self._inbox.get(block=False)
            except Empty:
                return
            if callable(left):
                left(False)

    def _batches(self) -> set[Batch]:
        return {ticket.batch for ticket in self._tickets.values()}

    def _receive(self) -> bool:
        """Takes in what was asked for; waits for it where there is nothing to do. False: the end."""
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
            ticket, error = order
            if ticket is None:
                return False
            if error is None:
                self._add(ticket)
            elif self._tickets.pop(ticket.job, None) is not None:
                ticket.batch.discard(ticket.job)

    def _add(self, ticket: PendingSequence) -> None:
        try:
            ticket.batch.add(ticket.job)
        except ValueError as error:  # its own fault: the thread goes on for the others
            refused = UpstreamError(f"the embedded policy refuses {error}", cause="upstream.rejected")
            self._tell(ticket.loop, [SequenceEvent(ticket, error=refused)])
        else:
            self._tickets[ticket.job] = ticket

    def _deliver(self, jobs: list[SamplingJob]) -> None:
        told: dict[asyncio.AbstractEventLoop, list[SequenceEvent]] = {}
        for job in jobs:
            ticket = self._tickets[job]
            job.told = len(job.tokens)
            if job.finish:
                del self._tickets[job]
            elif ticket.news is None:
                continue
            told.setdefault(ticket.loop, []).append(SequenceEvent(ticket, ended=bool(job.finish)))
        for loop, news in told.items():
            self._tell(loop, news)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """What is left of the batch may be broken: its sequences fail, and a fresh one takes its place."""
        with self._lock:
            self._older.pop(batch.llama, None)
            if self._batch is batch:
                self._batch = Batch(batch.llama, places=self._places)
        for job, ticket in list(self._tickets.items()):
            if ticket.batch is batch:
                del self._tickets[job]
                failure = UpstreamError(f"the embedded policy failed: {describe(error)}", cause="upstream.error")
                failure.__cause__ = error
                self._tell(ticket.loop, [SequenceEvent(ticket, error=failure)])

    def _tell(self, loop: asyncio.AbstractEventLoop, news: list[SequenceEvent]) -> None:
        try:
            loop.call_soon_threadsafe(_told, news)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            for ticket, _, _ in news:
                if self._tickets.pop(ticket.job, None) is not None:
                    ticket.batch.discard(ticket.job)


def _told(news: list[SequenceEvent]) -> None:
    """On the loop of those who wait."""
    for ticket, ended, error in news:
        if ticket.future.done():
            continue
        if error is not None:
            ticket.future.set_exception(error)
            continue
        if ticket.news is not None:
            ticket.news(ticket.job)
        if ended:
            ticket.future.set_result(None)
