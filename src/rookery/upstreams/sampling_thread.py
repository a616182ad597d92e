"""A thread that samples sequences for event loops. Base of the upstreams that run a model in this process.

Guarantees:
- sampling never runs on an event loop;
- cancelling a call removes its sequence before the next step (one step samples one token of every sequence);
- an exception in a step fails all sequences of that batch, each with the original exception, and no other
  sequence;
- an action passed to `call` runs on the thread between two steps, without interruption;
- `close` ends the thread; calls that still wait get an error. The same happens if the thread cannot continue.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from rookery.core import UpstreamError
from rookery.core.errors import describe

log = logging.getLogger("rookery.upstreams")
_CLOSE_SECONDS: Final = 10.0
T = TypeVar("T")


class Sequence(Protocol):
    """A sequence that is sampled token by token. `finish` is empty until it has ended."""

    finish: Literal["", "stop", "length", "abort"]


S = TypeVar("S", bound=Sequence)


class SequenceBatch(Protocol[S]):
    """The running and waiting sequences of one model."""

    @property
    def busy(self) -> bool:
        """True if a step would compute something."""

    def add(self, sequence: S, /) -> None:
        """Queue a sequence. Raises `ValueError` if it is invalid."""

    def discard(self, sequence: S, /) -> bool:
        """Remove a running or waiting sequence. Return False if it is neither."""

    def step(self) -> list[S]:
        """Sample, and return the sequences that got a token. Those whose `finish` is set have left the batch."""


B = TypeVar("B", bound=SequenceBatch[Any])


class PendingSequence(Generic[S, B]):
    """A sequence that is sampled or queued, and the future of the call that waits for it."""

    __slots__ = ("batch", "future", "loop", "on_tokens", "sequence")

    def __init__(self, sequence: S, batch: B, on_tokens: Callable[[S], None] | None) -> None:
        self.sequence = sequence
        self.batch = batch
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.on_tokens = on_tokens


class SamplingThread(ABC, Generic[S, B]):
    """Sample sequences in a thread, which starts with the first sequence or action."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the thread and of the model in messages, such as `embedded policy`."""
        self._name = name
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """Actions for the thread to call between two steps; None ends the thread."""
        self._pending: dict[S, PendingSequence[S, B]] = {}
        """Running and queued sequences. Only the thread changes this attribute."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def sequences(self) -> tuple[S, ...]:
        """The running and queued sequences at this moment."""
        return tuple(self._pending)

    async def sample(self, sequence: S, batch: B, on_tokens: Callable[[S], None] | None = None) -> None:
        """Sample a sequence to its end in `batch`. Its tokens are in `sequence`.

        `on_tokens` is called with it on this event loop when there are new tokens. Raises `UpstreamError` if the
        sequence is invalid or sampling fails. Cancelling ends the sequence.
        """
        pending = PendingSequence(sequence, batch, on_tokens)
        self._send(lambda: self._add(pending))
        try:
            await pending.future
        finally:
            if not sequence.finish:
                self._inbox.put(lambda: self._discard(sequence))

    def call(self, action: Callable[[], T]) -> "Future[T]":
        """Call `action` on the thread between two steps. The future has its result or exception."""
        done: Future[T] = Future()

        def act() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except Exception as error:  # noqa: BLE001  (raised in the caller)
                    done.set_exception(error)

        self._send(act)
        return done

    def abort(self, sequences: Iterable[S]) -> int:
        """End these sequences with the tokens sampled so far. Return how many of them were running or queued.

        Must be called on the thread, between two steps.
        """
        found = [pending for sequence in sequences if (pending := self._pending.get(sequence)) is not None]
        for pending in found:
            pending.sequence.finish = "abort"
            self._discard(pending.sequence)
        self._notify([(pending, None) for pending in found])
        return len(found)

    async def close(self) -> None:
        """End the thread. Calls in flight fail. Closing twice is fine."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._inbox.put(None)
        if thread is not None:
            await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    def _send(self, action: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                raise UpstreamError(
                    f"the {self._name} was closed before this call: make calls only while the Engine or server "
                    "that uses it is open",
                    cause="upstream.unreachable",
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_thread, name=self._name, daemon=True)
                self._thread.start()
            self._inbox.put(action)

    # ---- on the thread

    @abstractmethod
    def _batches(self) -> Iterable[B]:
        """Return the batches to sample from."""

    @abstractmethod
    def _recover(self, batch: B, failed: list[S]) -> None:
        """Make later sequences possible after a step of `batch` has failed with these sequences."""

    @property
    def _busy(self) -> bool:
        """True if there is something to sample."""
        return any(batch.busy for batch in self._batches())

    def _context(self) -> AbstractContextManager[object]:
        """Return a context in which the thread runs."""
        return nullcontext()

    def _run_thread(self) -> None:
        try:
            self._sample_until_closed()
        except Exception as error:
            log.exception("the thread of the %s cannot continue", self._name)
            with self._lock:
                self._closed = True  # later calls are refused
            while not self._inbox.empty():
                action = self._inbox.get()
                with suppress(Exception):
                    if action is not None:
                        action()
            why = f"the {self._name} cannot continue: {describe(error)}"
            self._fail(list(self._pending.values()), why, "upstream.error", error)
        self._fail(list(self._pending.values()), f"the {self._name} was closed", "upstream.unreachable")

    def _sample_until_closed(self) -> None:
        with self._context():
            while self._receive():
                for batch in self._batches():
                    try:
                        self._deliver(batch.step())
                    except Exception as error:
                        log.exception("the %s failed to sample the next tokens", self._name)
                        failed = [pending for pending in self._pending.values() if pending.batch is batch]
                        self._recover(batch, [pending.sequence for pending in failed])
                        self._fail(failed, f"the {self._name} failed: {describe(error)}", "upstream.error", error)

    def _receive(self) -> bool:
        """Run the actions in the inbox, waiting for one if there is nothing to sample. Return False to end the
        thread."""
        while True:
            try:
                action = self._inbox.get(block=not self._busy)
            except Empty:
                return True
            if action is None:
                return False
            action()

    def _add(self, pending: PendingSequence[S, B]) -> None:
        if pending.future.cancelled():
            return
        try:
            pending.batch.add(pending.sequence)
        except ValueError as error:  # only this request is invalid
            refused = UpstreamError(f"the {self._name} rejects the request: {error}", cause="upstream.rejected")
            self._notify([(pending, refused)])
        except Exception as error:
            log.exception("the %s failed to add a sequence", self._name)
            self._fail([pending], f"the {self._name} failed: {describe(error)}", "upstream.error", error)
        else:
            self._pending[pending.sequence] = pending

    def _discard(self, sequence: S) -> None:
        if (pending := self._pending.pop(sequence, None)) is not None:
            pending.batch.discard(sequence)

    def _deliver(self, sequences: list[S]) -> None:
        events: list[tuple[PendingSequence[S, B], UpstreamError | None]] = []
        for sequence in sequences:
            pending = self._pending[sequence]
            if sequence.finish:
                del self._pending[sequence]
            elif pending.on_tokens is None:
                continue
            events.append((pending, None))
        self._notify(events)

    def _fail(
        self, failed: list[PendingSequence[S, B]], message: str, code: str, error: Exception | None = None
    ) -> None:
        """Fail these sequences with an `UpstreamError` of the cause `code`, raised from `error`."""
        events: list[tuple[PendingSequence[S, B], UpstreamError | None]] = []
        for pending in failed:
            self._pending.pop(pending.sequence, None)
            failure = UpstreamError(message, cause=code)
            failure.__cause__ = error
            events.append((pending, failure))
        self._notify(events)

    def _notify(self, events: list[tuple[PendingSequence[S, B], UpstreamError | None]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[SequenceEvent]] = {}
        for pending, error in events:
            by_loop.setdefault(pending.loop, []).append((pending, bool(pending.sequence.finish), error))
        for loop, ready in by_loop.items():
            try:
                loop.call_soon_threadsafe(handle_events, ready)
            except RuntimeError:  # the loop is closed: its calls are gone
                for pending, _, _ in ready:
                    self._discard(pending.sequence)


SequenceEvent = tuple[PendingSequence[Any, Any], bool, UpstreamError | None]
"""A sequence, whether it had ended when the event was sent (it may have ended since), and an error."""


def handle_events(events: list[SequenceEvent]) -> None:
    """Call the `on_tokens` callbacks and complete the futures of waiting calls. Runs on their event loop."""
    for pending, ended, error in events:
        if pending.future.done():
            continue
        if error is not None:
            pending.future.set_exception(error)
            continue
        if pending.on_tokens is not None:
            pending.on_tokens(pending.sequence)
        if ended:
            pending.future.set_result(None)
