"""An upstream that can be paused, so that its weights can be replaced while calls are under way.

`pause(mode)` stops sampling, `resume(version)` lets it go on; `sync(version, load)` does both around a load.

| mode | calls under way |
|---|---|
| keep | stay where they are in the engine; what they sample afterwards carries the new version |
| drain | finish first; past the timeout, as `abort` |
| abort | end in the engine; what they sampled is kept, and the rest is asked for after the resume |

Promises:
- callers see latency: no call fails because of a pause, unless its caller has a part of the answer and the rest
  cannot be asked for from tokens; such a call is let finish for as long as the pause's timeout;
- every sampled token carries the version that sampled it, as a span where the answer was streamed or asked for in
  parts; where that cannot be known (kept and not streamed, or several tokens that the engine told at once right
  after the change) it carries the older one, never a newer, and the answer is counted in `mixed`;
- new calls wait while it is paused, which is reported as `queued` and told to `held`;
- pausing twice is pausing once, a stronger mode replaces a weaker one, and resuming without a pause does nothing
  but name the version;
- a pause that nobody resumes ends at its deadline: who waits gets `upstream.paused`, the engine goes on with the
  old version, and the log says so. It opens, because a run that stands still for ever is worse than an old policy;
- a pause that fails, or whose caller is cancelled, is undone; `sync` resumes on every path.
"""

import asyncio
from typing import Final

import msgspec

from rookery.core import Sampling, Truncation, UpstreamError
from rookery.upstreams.hangs import Examinable, UpstreamEvidence
from rookery.upstreams.interruptible import Call, Interrupted
from rookery.upstreams.parts import joined, onward
from rookery.upstreams.pausing import Pausing, ValveState
from rookery.upstreams.protocol import (
    Held,
    ModelReply,
    ModelRequest,
    News,
    PauseMode,
    Upstream,
    UpstreamConfig,
    UpstreamInfo,
)
from rookery.upstreams.servers import ReplicaState, Servers

__all__ = ["Valve", "ValveState"]

UNASKED: Final = 3
"""How often a call goes on after an abort that nobody here asked for."""


class Valve(Pausing):
    """An upstream around an upstream. Used in one event loop."""

    def __init__(self, inner: Upstream, *, state: ValveState | None = None) -> None:
        super().__init__(inner, state=state)
        self.tokens_in = inner.tokens_in
        self.raw_in = inner.raw_in
        config = getattr(inner, "config", None)
        self._sampling = config.sampling if isinstance(config, UpstreamConfig) else Sampling()
        self._plain = self._sampling == Sampling()

    # -------------------------------------------------------------------------------------------- calls

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        return await self.inner.check(timeout=timeout)

    def states(self) -> tuple[ReplicaState, ...]:
        """How its replicas do; nothing where it has none."""
        return self.inner.states() if isinstance(self.inner, Servers) else ()

    async def examine(self, affinity: str) -> tuple[UpstreamEvidence, ...]:
        """Evidence about silent calls, as `HttpUpstream.examine`; none where the upstream is in this process."""
        inner = self.inner
        return await inner.examine(affinity) if isinstance(inner, Examinable) else ()

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        return await self.inner.freeze(mode, timeout=timeout)

    async def thaw(self, *, timeout: float) -> None:
        await self.inner.thaw(timeout=timeout)

    async def close(self) -> None:
        """Lets go of who waits, and closes the upstream."""
        if self._pause is not None:
            self._open(expired=True)
        for task in list(self._tasks):
            task.cancel()
        await self.inner.close()

    async def complete(
        self, request: ModelRequest, *, timeout: float, news: News | None = None, held: Held | None = None
    ) -> ModelReply:
        """One answer. Waiting for the end of a pause is no part of `timeout`."""
        loop = asyncio.get_running_loop()
        sampling = request.sampling if self._plain else request.sampling.over(self._sampling)
        call = Call(request, sampling, news=news, held=held)
        asked = request
        spent = waited = 0.0
        unasked = 0
        try:
            while True:
                if self._pause is not None:
                    waited += await self._opened(call)
                began, queued = loop.time(), call.queued
                reply = await self._part(call, asked, timeout - spent)
                spent += loop.time() - began - (call.queued - queued)
                if reply is not None and reply.finish != "abort":
                    await call.flush()
                    call.parts.append(call.settled(reply))
                    return joined(call.parts, queued=waited + call.queued)
                if not call.wanted:
                    unasked += 1
                part = call.partial(reply, bool(sampling.stop)) if call.continuable else None
                if call.told and part is None and not call.parts:
                    what = "the call was aborted when part of its answer was told, and cannot go on from tokens"
                    raise UpstreamError(f"{self.name}: {what}", cause="upstream.aborted")
                if part is not None:
                    call.parts.append(part)
                if (ended := self._ended(call, request, sampling)) is not None:
                    return joined([*call.parts[:-1], ended], queued=waited + call.queued)
                if unasked > UNASKED:
                    what = f"the engine aborted the call {unasked} times, and nobody here asked it to"
                    raise UpstreamError(f"{self.name}: {what}", cause="upstream.aborted")
                sampled = b"".join(part.sampled for part in call.parts)
                asked = onward(request, sampling, sampled, len(call.parts))
                if not call.wanted:
                    await asyncio.sleep(0.05 * 2**unasked)
        except Truncation:
            if not call.parts:
                raise
            # With its beginning as a part of the prompt it is too long: it has come to the end of the context.
            ended = msgspec.structs.replace(call.parts[-1], finish="length")
            return joined([*call.parts[:-1], ended], queued=waited + call.queued)
        finally:
            self.mixed += call.mixed
            call.end()

    async def _part(self, call: Call, asked: ModelRequest, seconds: float) -> ModelReply | None:
        """One part; None where it was interrupted and gave no answer of its own."""
        call.begin(self.version)
        self._calls.add(call)
        news = call.news if call.streamed else None
        try:
            return await self.inner.complete(asked, timeout=seconds, news=news, held=call.placing)
        except Interrupted:
            return None
        except asyncio.CancelledError:
            if not call.ours():
                raise
            return None
        except UpstreamError:
            if not call.wanted:
                raise
            return None
        finally:
            self._calls.discard(call)
            self._moved.set()
            call.thaw()

    def _ended(self, call: Call, request: ModelRequest, sampling: Sampling) -> ModelReply | None:
        """The last part with its true finish, where it was aborted in the moment in which it ended."""
        if not call.parts:
            return None
        last = call.parts[-1]
        count = sum(len(part.sampled) for part in call.parts) // 4
        if sampling.max_tokens is not None and count >= sampling.max_tokens:
            return msgspec.structs.replace(last, finish="length")
        if request.stop_ids and int.from_bytes(last.sampled[-4:], "little") in request.stop_ids:
            return msgspec.structs.replace(last, finish="stop")
        return None

    async def _opened(self, call: Call) -> float:
        """Waits for the end of the pause, and of the next one should there be another; the seconds."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        self._waiting += 1
        call.waits(True)
        try:
            while (pause := self._pause) is not None:
                self._arm(pause)
                await pause.over.wait()
                if pause.expired:
                    what = f"{self.name}: the upstream was paused for {loop.time() - since:.3g} s and not resumed"
                    raise UpstreamError(what, cause="upstream.paused")
        finally:
            self._waiting -= 1
            call.waits(False)
        return loop.time() - since
