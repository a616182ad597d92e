"""One model call that a pause can interrupt, and whose reply may then consist of several parts.

Runs in runner processes and gateway shards.

Guarantees:
- a delta (piece of a streamed reply) is counted before the caller receives it, so that none is delivered twice or
  lost;
- a pause never interrupts the caller's `on_delta` callback: the part of the reply ends after the callback returns;
- an interruption by the pause is distinguished from a cancellation by the caller, which always propagates;
- `on_wait` receives True and False alternately and ends with False, however many reasons to wait there were.
"""

import asyncio
from typing import Any

import msgspec

from rookery.upstreams.pause.parts import add_spans, can_continue, max_stop_prefix, reply_from_deltas
from rookery.upstreams.protocol import Delta, ModelReply, ModelRequest, OnDelta, OnWait


class CallInterrupted(Exception):  # noqa: N818  (control flow: caught by `PausableUpstream`)
    """Raised from `on_delta` to end a call that a pause interrupts."""


class ReplyPart(msgspec.Struct):
    """State of the part of a reply that is being sampled, since the start of the call or the last pause."""

    version: int
    """The policy version that samples the beginning of the part."""
    stop_expected: bool = False
    """True if a pause ends the part early, so that an abort or an error of the part is expected."""
    stopping: bool = False
    """True if the part ends when the caller's `on_delta` returns."""
    crossed_update: bool = False
    """True if the weights changed while the part was sampled."""
    token_count: int = 0
    """Number of tokens of the part that arrived, whether they were delivered to the caller or are withheld."""
    version_marks: list[tuple[int, int]] = []
    """One entry per weight update: the index of the first token sampled after it, and the new version."""
    was_delivering: bool | None = None
    """Set from a weight update to the next delta: True if `on_delta` was running at the time of the update."""
    deltas: list[Delta] = []
    """The deltas that were delivered to the caller."""
    withheld: list[Delta] = []
    """Deltas that are not delivered yet, because their tokens may be the beginning of a stop string."""
    withheld_tokens: int = 0


class PausableCall(msgspec.Struct, eq=False):
    """State of one model call in flight. Each interruption by a pause ends a part of its reply and begins
    another."""

    _request: ModelRequest
    _task: "asyncio.Task[Any]"
    """The task that makes the call."""
    _on_delta: OnDelta | None
    _on_wait: OnWait | None
    part: ReplyPart
    """The part that is being sampled. The parts before it are in `parts`."""
    parts: list[ModelReply] = []
    mixed_versions: bool = False
    """True if it is unknown which of two policy versions sampled some of the tokens."""
    delivered: bool = False
    """True if the caller has received a part of the reply."""
    delivering: bool = False
    """True while the caller's `on_delta` runs."""
    queued: float = 0.0
    """Seconds spent waiting for the concurrency gate (limit on calls in flight) or in a paused inference
    engine."""
    queueing: bool = False
    """True while the call waits for the concurrency gate, so that the inference engine has not received it
    yet."""
    _wait_count: int = 0
    _gate_wait_since: float = 0.0
    _cancelled: bool = False
    _frozen_since: float | None = None
    _prompt_delivered: bool = False
    _stop_margin: int | None = None
    """Number of tokens at the end of a part that may begin a stop string; None before the first delta."""

    @property
    def continuable(self) -> bool:
        """True if, after an interruption, the rest of the reply can be requested by a prompt that ends with its
        tokens."""
        return can_continue(self._request)

    # ---- deltas

    async def on_delta(self, delta: Delta) -> None:
        """Receive a delta from the upstream and deliver it to the caller."""
        part = self.part
        before = part.token_count
        part.token_count += len(delta.sampled) // 4
        if part.was_delivering is not None:
            # A single token that arrives after the update was sampled after it. The first of several tokens that
            # the inference engine sends together may have been sampled before it, and so were the tokens that were
            # buffered while the caller was busy: these count as the old version.
            received = part.token_count - before
            old_tokens = received if part.was_delivering else delta.first or received
            if part.was_delivering or old_tokens > 1:
                part.version_marks[-1] = (before + old_tokens, part.version_marks[-1][1])
                self.mixed_versions = True
            part.was_delivering = None
        if delta.prompt:
            if self._prompt_delivered:
                delta = msgspec.structs.replace(delta, prompt=b"", version=None)
            self._prompt_delivered = True
        if self._stop_margin is None:
            self._stop_margin = max_stop_prefix(self._request.sampling) if self.continuable else 0
        if self._stop_margin:
            withheld = part.withheld
            withheld.append(delta)
            part.withheld_tokens += part.token_count - before
            while withheld and part.withheld_tokens - len(withheld[0].sampled) // 4 >= self._stop_margin:
                delta = withheld.pop(0)
                part.withheld_tokens -= len(delta.sampled) // 4
                await self._deliver(delta)
        else:
            await self._deliver(delta)
        if part.stopping:
            raise CallInterrupted

    async def _deliver(self, delta: Delta) -> None:
        assert self._on_delta is not None
        self.part.deltas.append(delta)
        if delta.sampled or delta.content or delta.reasoning or delta.tool_calls:
            self.delivered = True
        self.delivering = True
        try:
            await self._on_delta(delta)
        finally:
            self.delivering = False

    async def deliver_withheld(self) -> None:
        """Deliver the withheld deltas. Called when the reply is complete, so that they cannot begin a stop
        string."""
        while self.part.withheld:
            await self._deliver(self.part.withheld.pop(0))

    def partial_reply(self, reply: ModelReply | None, has_stops: bool) -> ModelReply | None:
        """Return the tokens of an aborted part that are kept, as a reply; None if none are kept.

        `reply` is what the upstream returned for the part, if anything; `has_stops` says whether the request has
        stop strings.
        """
        if self._on_delta is not None:
            part = self.part
            kept = reply_from_deltas(part.deltas, prompt=self._request.tokens, version=part.version)
            if part.version_marks:
                kept = add_spans(kept, part.version_marks)
            return kept if kept.sampled else None
        # Without streaming, the tokens that may begin a stop string cannot be separated from the others.
        return self.with_versions(reply) if reply is not None and reply.sampled and not has_stops else None

    def with_versions(self, reply: ModelReply) -> ModelReply:
        """Return the reply of a part with the policy versions that sampled its tokens."""
        if reply.spans:
            self.mixed_versions = False  # the inference engine reports the version of every token
        part = self.part
        if not part.crossed_update or reply.spans:
            return reply
        if reply.version != part.version:
            reply = msgspec.structs.replace(reply, version=part.version)
        return reply if self._on_delta is None else add_spans(reply, part.version_marks)

    # ---- interruption

    def interrupt(self) -> None:
        """End the current part: cancel it at once or, while `on_delta` runs, after that. Calling it again has no
        effect."""
        self.part.stop_expected = self.part.stopping = True
        if not self.delivering and not self._cancelled and not self._task.done():
            self._cancelled = True
            self._task.cancel()

    def absorb_cancellation(self) -> bool:
        """Undo the cancellation that `interrupt` caused.

        Return False if `interrupt` did not cancel the call, or its caller cancelled it as well: then it must end.
        """
        if not self._cancelled:
            return False
        self._cancelled = False
        return self._task.uncancel() == 0

    def mark_update(self, version: int) -> None:
        """Record that the weights changed to `version` while the part is being sampled."""
        part = self.part
        if part.stop_expected or self.queueing:
            return
        part.crossed_update = True
        part.version_marks.append((part.token_count, version))
        if self._on_delta is None:
            self.mixed_versions = True
        else:
            part.was_delivering = self.delivering

    # ---- waits

    def add_wait(self, begins: bool) -> None:
        """Add a reason to wait, or remove one. Call `on_wait` when the first begins and when the last ends."""
        before = self._wait_count
        self._wait_count += 1 if begins else -1
        if self._on_wait is not None and (before == 0 or self._wait_count == 0):
            self._on_wait(begins)

    def on_gate_wait(self, begins: bool) -> None:
        """Receive the wrapped upstream's `on_wait` callback, which reports waits for the concurrency gate."""
        now = asyncio.get_running_loop().time()
        if begins:
            self._gate_wait_since = now
        else:
            self.queued += now - self._gate_wait_since
        self.queueing = begins
        self.add_wait(begins)

    def freeze(self) -> None:
        """Record that the inference engine stopped sampling; the call waits until `thaw`."""
        if self._frozen_since is None:
            self._frozen_since = asyncio.get_running_loop().time()
            self.add_wait(True)

    def thaw(self) -> None:
        """Record that the inference engine samples again. Has no effect unless `freeze` was called."""
        if self._frozen_since is not None:
            self.queued += asyncio.get_running_loop().time() - self._frozen_since
            self._frozen_since = None
            self.add_wait(False)

    def end(self) -> None:
        """End all waits, because the call is over."""
        while self._wait_count:
            self.add_wait(False)
