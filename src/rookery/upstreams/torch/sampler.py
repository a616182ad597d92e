"""The thread that samples from a torch model, and the interface through which event loops and a trainer use it.

Guarantees:
- inference never runs on an event loop;
- cancelling a call removes its sequence before the next step (one step samples one token of every sequence);
- `load_weights` replaces the weights between two steps, from memory. Running sequences continue with the new
  weights, unless they were aborted first; each token carries the policy version that sampled it;
- while the sampler is frozen, no token is sampled. Sequences stay in the KV cache, and new ones wait;
- an exception in a step fails all sequences, each with the original exception; later sequences are not
  affected;
- `close` ends the thread; calls that still wait get an error.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import msgspec
import torch

from rookery.core import UpstreamError
from rookery.core.errors import describe
from rookery.upstreams.torch.batch import Batch, SampledSequence
from rookery.upstreams.torch.decoder import Decoder
from rookery.upstreams.torch.loading import LoadedModel, check_model, find_end_tokens

log = logging.getLogger("rookery.upstreams")

MAX_SLOTS: Final = 256
CPU_SLOTS: Final = 16
MAX_CONTEXT: Final = 4096
"""The default limit on the length of a sequence. The KV cache has this many positions for each slot."""
_MEMORY_SHARE: Final = 0.5
"""Share of the free GPU memory that the KV cache may use, unless the number of slots is given."""
_CLOSE_SECONDS: Final = 10.0
T = TypeVar("T")


class SamplerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a sampler since it started."""

    version: int
    slots: int
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    """Prompt tokens that were computed."""
    reused_tokens: int
    """Prompt tokens that the prefix cache had."""
    sampled_tokens: int
    weight_updates: int
    frozen: bool


class PendingSequence:
    """A sequence that is sampled or queued, and the future of the call that waits for it."""

    __slots__ = ("future", "loop", "on_tokens", "sequence")

    def __init__(self, sequence: SampledSequence, on_tokens: Callable[[], None] | None) -> None:
        self.sequence = sequence
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.on_tokens = on_tokens


class Sampler:
    """Samples sequences from a torch model in a thread, which starts with the first sequence or command."""

    def __init__(
        self, loaded: LoadedModel, *, slots: int | None = None, context: int | None = None, version: int = 0
    ) -> None:
        """Copy the weights of a loaded model. The model itself is not used afterwards.

        `slots` is how many sequences are sampled at a time, and `context` the maximum length of each. Their
        defaults depend on the model and the memory of the device.
        """
        model, self.tokenizer = loaded
        check_model(model)
        self.end_tokens = find_end_tokens(model, self.tokenizer)
        limit = int(model.config.max_position_embeddings)
        self.context = min(limit, context or MAX_CONTEXT)
        self.slots = slots or _default_slots(model, self.context)
        self._batch = Batch(Decoder(model, slots=self.slots, context=self.context), version=version)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """Functions for the thread to call between two steps; None ends the thread."""
        self._pending: dict[SampledSequence, PendingSequence] = {}
        """Running and queued sequences. Only the thread uses this attribute."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._weight_updates = 0
        self._frozen_since: float | None = None
        self._frozen_seconds = 0.0

    # ---- state, from any thread

    @property
    def version(self) -> int:
        """The policy version of the weights. Setting it renames the version of the current weights."""
        return self._batch.version

    @version.setter
    def version(self, version: int) -> None:
        self._batch.version = version

    @property
    def vocabulary(self) -> int:
        """Number of token IDs."""
        return self._batch.decoder.vocabulary

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights that one step reads."""
        return self._batch.decoder.weight_bytes

    def stats(self) -> SamplerStats:
        """Return the current counters."""
        batch = self._batch
        return SamplerStats(
            version=batch.version,
            slots=self.slots,
            running=len(batch.running),
            waiting=len(batch.waiting),
            steps=batch.steps,
            prompt_tokens=batch.prompt_tokens,
            reused_tokens=batch.reused_tokens,
            sampled_tokens=batch.sampled_tokens,
            weight_updates=self._weight_updates,
            frozen=self._frozen_since is not None,
        )

    def frozen_seconds(self) -> float:
        """Return for how many seconds the sampler has been frozen since it started."""
        since = self._frozen_since
        return self._frozen_seconds + (0.0 if since is None else time.monotonic() - since)

    # ---- calls

    async def run(self, sequence: SampledSequence, on_tokens: Callable[[], None] | None = None) -> None:
        """Sample a sequence to its end. Its tokens are in `sequence`.

        `on_tokens` is called on this event loop when there are new tokens. Raises `UpstreamError` if the sequence
        is invalid or sampling fails. Cancelling ends the sequence.
        """
        pending = PendingSequence(sequence, on_tokens)
        self._send(lambda: self._add(pending))
        try:
            await pending.future
        finally:
            if not sequence.finish:
                self._inbox.put(lambda: self._discard(sequence))

    async def freeze(self, *, abort: bool = False) -> None:
        """Stop sampling before the next step. With `abort`, end all sequences with the tokens sampled so far."""
        await asyncio.wrap_future(self._call(lambda: self._freeze(abort)))

    async def thaw(self) -> None:
        """Continue sampling after `freeze`. Has no effect if the sampler is not frozen."""
        await asyncio.wrap_future(self._call(self._thaw))

    def load_weights(self, state: Mapping[str, Any], version: int) -> None:
        """Replace the weights by those of a `state_dict` of the transformers model, between two steps.

        Tokens sampled from then on carry `version`. Returns when the weights are copied, so that the caller may
        change its own again. Raises `WeightsError` and changes nothing if they do not fit. Do not call this on an
        event loop.
        """
        event = None
        device = self._batch.decoder.device
        if device.type == "cuda":
            event = torch.cuda.current_stream(device).record_event()  # the caller may still be computing them
        self._call(lambda: self._load(state, version, event)).result()

    async def close(self) -> None:
        """End the thread. Calls in flight fail. Closing twice is fine."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self._inbox.put(None)
        if thread is not None:
            await asyncio.to_thread(thread.join, _CLOSE_SECONDS)

    def _send(self, action: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                raise UpstreamError(
                    "the torch sampler was closed before this call: make calls only while the Engine that uses it "
                    "is open",
                    cause="upstream.unreachable",
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_thread, name="torch sampler", daemon=True)
                self._thread.start()
            self._inbox.put(action)

    def _call(self, action: Callable[[], T]) -> "Future[T]":
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

    # ---- on the thread

    def _run_thread(self) -> None:
        device = self._batch.decoder.device
        # A stream of its own: the sampler does not wait for a trainer's work on the same GPU.
        stream = (
            torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
        )
        with torch.inference_mode(), stream:
            while self._receive():
                try:
                    self._deliver(self._batch.step())
                except Exception as error:
                    log.exception("the torch sampler failed to sample the next tokens")
                    self._fail(f"the torch sampler failed: {describe(error)}", "upstream.error", error)
                    self._batch.clear_prefix_cache()
        self._fail("the torch sampler was closed", "upstream.unreachable")

    def _receive(self) -> bool:
        """Run the commands in the inbox, waiting for one if there is nothing to sample. Return False to end the
        thread."""
        while True:
            idle = self._frozen_since is not None or not self._batch.busy
            try:
                action = self._inbox.get(block=idle)
            except Empty:
                return True
            if action is None:
                return False
            action()

    def _add(self, pending: PendingSequence) -> None:
        if pending.future.cancelled():
            return
        try:
            self._batch.add(pending.sequence)
        except ValueError as error:  # only this request is invalid
            refused = UpstreamError(f"the torch sampler rejects the request: {error}", cause="upstream.rejected")
            self._notify([(pending, refused)])
        else:
            self._pending[pending.sequence] = pending

    def _discard(self, sequence: SampledSequence) -> None:
        if self._pending.pop(sequence, None) is not None:
            self._batch.discard(sequence)

    def _freeze(self, abort: bool) -> None:
        if self._frozen_since is None:
            self._frozen_since = time.monotonic()
        if abort:
            ended = list(self._pending.values())
            for pending in ended:
                pending.sequence.finish = "abort"
                self._discard(pending.sequence)
            self._notify([(pending, None) for pending in ended])

    def _thaw(self) -> None:
        if self._frozen_since is not None:
            self._frozen_seconds += time.monotonic() - self._frozen_since
            self._frozen_since = None

    def _load(self, state: Mapping[str, Any], version: int, ready: Any) -> None:
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        self._batch.load(state, version)
        if ready is not None:
            torch.cuda.current_stream().synchronize()
        self._weight_updates += 1

    def _deliver(self, sequences: list[SampledSequence]) -> None:
        events: list[tuple[PendingSequence, UpstreamError | None]] = []
        for sequence in sequences:
            pending = self._pending[sequence]
            if sequence.finish:
                del self._pending[sequence]
            elif pending.on_tokens is None:
                continue
            events.append((pending, None))
        self._notify(events)

    def _fail(self, message: str, code: str, error: Exception | None = None) -> None:
        """Fail all sequences with an `UpstreamError` of the cause `code`, raised from `error`."""
        events: list[tuple[PendingSequence, UpstreamError | None]] = []
        for pending in list(self._pending.values()):
            failure = UpstreamError(message, cause=code)
            failure.__cause__ = error
            self._discard(pending.sequence)
            events.append((pending, failure))
        self._notify(events)

    def _notify(self, events: list[tuple[PendingSequence, UpstreamError | None]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[PendingSequence, bool, UpstreamError | None]]] = {}
        for pending, error in events:
            by_loop.setdefault(pending.loop, []).append((pending, bool(pending.sequence.finish), error))
        for loop, ready in by_loop.items():
            try:
                loop.call_soon_threadsafe(_handle_events, ready)
            except RuntimeError:  # the loop is closed: its calls are gone
                for pending, _, _ in ready:
                    self._discard(pending.sequence)


def _handle_events(events: list[tuple[PendingSequence, bool, UpstreamError | None]]) -> None:
    """Call the `on_tokens` callbacks and complete the futures of waiting calls. Runs on their event loop."""
    for pending, ended, error in events:
        if pending.future.done():
            continue
        if error is not None:
            pending.future.set_exception(error)
            continue
        if pending.on_tokens is not None:
            pending.on_tokens()
        if ended:
            pending.future.set_result(None)


def _default_slots(model: Any, context: int) -> int:
    """Return how many sequences to sample at a time: on a GPU, as many as fit into a share of its free memory."""
    config, weight = model.config, model.get_input_embeddings().weight
    if weight.device.type != "cuda":
        return CPU_SLOTS
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * weight.element_size()
    free, _ = torch.cuda.mem_get_info(weight.device)
    return max(1, min(MAX_SLOTS, int(_MEMORY_SHARE * free / (position * (context + 1)))))
