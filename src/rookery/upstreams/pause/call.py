"""One model call that a pause can interrupt between two deltas, never inside one.

Runs in runner processes and gateway shards.

Guarantees:
- a delta is counted before the caller receives it, so that none is delivered twice or lost;
- the caller's `on_delta` is never interrupted: a slow caller finishes the delta, and the call ends after it;
- an interruption by the pause is distinguished from a cancellation by the caller, which always propagates;
- `on_wait` receives True and False alternately and ends with False, however many reasons to wait there were.
"""

import asyncio

import msgspec

from rookery.upstreams.pause.parts import add_spans, can_continue, max_stop_prefix, reply_from_deltas
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest, OnDelta, OnWait


class CallInterrupted(Exception):  # noqa: N818  (control flow: caught by `PausableUpstream`)
    """Raised from `on_delta` to end a call that a pause interrupts."""


class PausableCall:
    """A call in flight, over all of its parts."""

    __slots__ = (
        "_cancelled",
        "_deltas",
        "_frozen_since",
        "_gate_wait_since",
        "_on_delta",
        "_on_wait",
        "_prompt_delivered",
        "_request",
        "_stop_margin",
        "_stopping",
        "_task",
        "_version_marks",
        "_wait_count",
        "_was_delivering",
        "_withheld",
        "_withheld_tokens",
        "crossed_update",
        "delivered",
        "delivering",
        "mixed_versions",
        "parts",
        "queued",
        "queueing",
        "stop_expected",
        "token_count",
        "version",
    )

    def __init__(self, request: ModelRequest, *, on_delta: OnDelta | None, on_wait: OnWait | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._on_delta = on_delta
        self._on_wait = on_wait
        self._wait_count = 0
        self._gate_wait_since = 0.0
        self._cancelled = False
        self._frozen_since: float | None = None
        self._request = request
        self._prompt_delivered = False
        self.parts: list[ModelReply] = []
        self.mixed_versions = False
        """True if it is unknown which of two versions sampled some of the tokens."""
        self.delivered = False
        """True if the caller has received a part of the reply."""
        self.delivering = False
        """True while the caller's `on_delta` runs."""
        self.queued = 0.0
        """Seconds spent waiting for the concurrency gate or in a frozen inference engine."""
        self.queueing = False
        """True while the call waits for the concurrency gate; the inference engine does not know it yet."""
        self._stop_margin = 0
        if on_delta is not None and request.sampling.stop and self.continuable:
            self._stop_margin = max_stop_prefix(request.sampling)

    @property
    def continuable(self) -> bool:
        """True if the rest of the reply can be requested from the tokens of its beginning."""
        return can_continue(self._request)

    def start_part(self, version: int) -> None:
        """Reset the state that belongs to one part of the reply."""
        self.version = version
        self.stop_expected = False
        """True if the engine was asked to end the part early."""
        self._stopping = False
        self.crossed_update = False
        """True if the weights changed while the part was sampled."""
        self.token_count = 0
        """Tokens of the part that were read, delivered or not."""
        self._version_marks: list[tuple[int, int]] = []
        self._was_delivering: bool | None = None
        """Set between a weight update and the next delta: True if a delta was being delivered at the update."""
        self._deltas: list[Delta] = []
        self._withheld: list[Delta] = []
        """Deltas whose tokens may be the beginning of a stop string."""
        self._withheld_tokens = 0

    # ---- deltas

    async def on_delta(self, delta: Delta) -> None:
        """Receive a delta from the upstream and deliver it to the caller."""
        before = self.token_count
        self.token_count += len(delta.sampled) // 4
        if self._was_delivering is not None:
            # A single token that arrives after the update was sampled after it. The first of several tokens that
            # the engine sends together may have been sampled before it, and so were the tokens that were buffered
            # while the caller was busy: these count as the old version.
            received = self.token_count - before
            old_tokens = received if self._was_delivering else delta.first or received
            if self._was_delivering or old_tokens > 1:
                self._version_marks[-1] = (before + old_tokens, self._version_marks[-1][1])
                self.mixed_versions = True
            self._was_delivering = None
        if delta.prompt:
            if self._prompt_delivered:
                delta = msgspec.structs.replace(delta, prompt=b"", version=None)
            self._prompt_delivered = True
        if self._stop_margin:
            self._withheld.append(delta)
            self._withheld_tokens += self.token_count - before
            while (
                self._withheld and self._withheld_tokens - len(self._withheld[0].sampled) // 4 >= self._stop_margin
            ):
                delta = self._withheld.pop(0)
                self._withheld_tokens -= len(delta.sampled) // 4
                await self._deliver(delta)
        else:
            await self._deliver(delta)
        if self._stopping:
            raise CallInterrupted

    async def _deliver(self, delta: Delta) -> None:
        assert self._on_delta is not None
        self._deltas.append(delta)
        if delta.sampled or delta.content or delta.reasoning or delta.tool_calls:
            self.delivered = True
        self.delivering = True
        try:
            await self._on_delta(delta)
        finally:
            self.delivering = False

    async def deliver_withheld(self) -> None:
        """Deliver what was withheld: the reply is complete, so it is not the beginning of a stop string."""
        while self._withheld:
            await self._deliver(self._withheld.pop(0))

    def partial_reply(self, reply: ModelReply | None, has_stops: bool) -> ModelReply | None:
        """Return what counts as sampled of an aborted part, or None if nothing does."""
        if self._on_delta is not None:
            part = reply_from_deltas(self._deltas, prompt=self._request.tokens, version=self.version)
            if self._version_marks:
                part = add_spans(part, self._version_marks)
            return part if part.sampled else None
        # Without streaming, the tokens that may begin a stop string cannot be separated from the others.
        return self.with_versions(reply) if reply is not None and reply.sampled and not has_stops else None

    def with_versions(self, reply: ModelReply) -> ModelReply:
        """Return the part's reply with the versions that sampled it."""
        if not self.crossed_update or reply.spans:
            return reply
        if reply.version != self.version:
            reply = msgspec.structs.replace(reply, version=self.version)
        return reply if self._on_delta is None else add_spans(reply, self._version_marks)

    # ---- interruption

    def interrupt(self) -> None:
        """End the part as soon as possible. Calling it again has no effect."""
        self.stop_expected = self._stopping = True
        if not self.delivering and not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel()

    def absorb_cancellation(self) -> bool:
        """Return True, and undo the cancellation, if `interrupt` was the only source of it."""
        if not self._cancelled:
            return False
        self._cancelled = False
        return self._task.uncancel() == 0

    def mark_update(self, version: int) -> None:
        """Note that the weights changed to `version` while the part is sampled."""
        if self.stop_expected or self.queueing:
            return
        self.crossed_update = True
        self._version_marks.append((self.token_count, version))
        if self._on_delta is None:
            self.mixed_versions = True
        else:
            self._was_delivering = self.delivering

    # ---- waits

    def add_wait(self, begins: bool) -> None:
        """Count one more reason to wait, or one less; report the first and the last."""
        before = self._wait_count
        self._wait_count += 1 if begins else -1
        if self._on_wait is not None and (before == 0 or self._wait_count == 0):
            self._on_wait(begins)

    def on_gate_wait(self, begins: bool) -> None:
        """Receive `on_wait` of the upstream's concurrency gate."""
        now = asyncio.get_running_loop().time()
        if begins:
            self._gate_wait_since = now
        else:
            self.queued += now - self._gate_wait_since
        self.queueing = begins
        self.add_wait(begins)

    def freeze(self) -> None:
        """Note that the inference engine stopped sampling."""
        if self._frozen_since is None:
            self._frozen_since = asyncio.get_running_loop().time()
            self.add_wait(True)

    def thaw(self) -> None:
        """Note that the inference engine samples again."""
        if self._frozen_since is not None:
            self.queued += asyncio.get_running_loop().time() - self._frozen_since
            self._frozen_since = None
            self.add_wait(False)

    def end(self) -> None:
        """End all waits: the call is over."""
        self.thaw()
        while self._wait_count:
            self.add_wait(False)
