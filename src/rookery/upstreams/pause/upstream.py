"""Wrapper of an upstream whose calls can be paused, so that the weights of the policy can be replaced during
calls.

Runs in runner processes and gateway shards. `pause(mode)` stops sampling, `resume(version)` continues it;
`sync(version, load)` does both around a weight update.

| mode | calls in flight |
|---|---|
| keep | stay frozen in the inference engine; tokens sampled after the resume carry the new version |
| drain | finish first; after the timeout, they are aborted |
| abort | end in the inference engine; their tokens are kept, and the rest is requested after the resume |

Guarantees:
- callers only see latency: no call fails because of a pause, unless its caller has received a part of the reply
  and the rest cannot be requested from tokens; such a call may finish within the pause's timeout;
- every sampled token carries the version that sampled it, as a span if the reply was streamed or requested in
  parts. If the version of a token is unknown (the call was kept and not streamed, or the inference engine sent
  several tokens together right after the update), the token carries the older version, and the reply is counted in
  `mixed_replies`;
- new calls wait during a pause; the wait is reported as `queued` and to `on_wait`;
- pausing twice equals pausing once, a stronger mode replaces a weaker one, and a resume without a pause only sets
  the version;
- a pause that nobody resumes ends at its deadline: waiting calls fail with `upstream.paused`, the inference engine
  continues with the old version, and an error is logged. A run that continues with an old policy is better than
  one that never continues;
- a pause that fails, or whose caller is cancelled, is undone; `sync` resumes on every path;
- ending a pause is synchronous, so that a cancellation cannot leave it half ended; the inference engine is
  notified afterwards;
- the inference engine receives one pause or resume request at a time, and the last one matches the final state;
- every wait is bounded: by the timeout of `pause` plus a few seconds, or by the pause's deadline.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import msgspec

from rookery.core import Truncation, UpstreamError
from rookery.core.lifetimes import detached_context
from rookery.telemetry import catalogue
from rookery.upstreams.hang_detector import Examinable, UpstreamEvidence
from rookery.upstreams.http_upstream import HttpUpstream, ReplicaState
from rookery.upstreams.pause.call import CallInterrupted, PausableCall, ReplyPart
from rookery.upstreams.pause.parts import join_parts, next_part_request
from rookery.upstreams.protocol import (
    ModelReply,
    ModelRequest,
    OnDelta,
    OnWait,
    PauseMode,
    Upstream,
    UpstreamInfo,
)

log = logging.getLogger("rookery.upstreams")

STRENGTH: Final[dict[PauseMode, int]] = {"keep": 0, "drain": 1, "abort": 2}
ABORT_SECONDS: Final = 10.0
"""Seconds for the inference engine to abort its calls, and for their replies to arrive."""
QUIET_SECONDS: Final = 1.0
"""If no call ends for this many seconds after an abort request, the remaining calls had not reached the inference
engine when it aborted, and are cancelled."""
THAW_SECONDS: Final = 30.0
MAX_ENGINE_ABORTS: Final = 3
"""Number of times that one call is continued after the inference engine aborted it without a request from this
process."""


class PauseState(msgspec.Struct, frozen=True, kw_only=True):
    """The pause and policy version with which a new process must start."""

    mode: PauseMode | None = None
    """The mode of the pause; None if the upstream is not paused."""
    version: int | None = None
    """The policy version to record; None keeps the upstream's own version."""
    left: float = 0.0
    """Seconds until the pause's deadline."""


class DeadlineClocks(Protocol):
    """Interface to the clocks that measure deadlines in one process: those of attempts or of gateway sessions."""

    def stop_clocks(self) -> None:
        """Stop the clocks for a pause."""
        ...

    def restart_clocks(self) -> None:
        """Let the clocks continue after a pause."""
        ...


class _Pause:
    """State of one pause, from its request to its end. `left` is the seconds from its start to its deadline."""

    def __init__(self, mode: PauseMode, left: float) -> None:
        self.mode = mode
        self.left = left
        self.until: float | None = None
        self.reached_strength = -1
        """The `STRENGTH` of the mode in which all calls have stopped; -1 until then."""
        self.ended = asyncio.Event()
        self.expired = False
        self.timer: asyncio.TimerHandle | None = None


class PausableUpstream:
    """Wrap an upstream so that its calls can be paused. Use one instance from one event loop only."""

    def __init__(self, inner: Upstream, *, state: PauseState | None = None) -> None:
        self.inner = inner
        self.name = inner.name
        self.accepts_tokens = inner.accepts_tokens
        self.accepts_raw_json = inner.accepts_raw_json
        self.mixed_replies = 0
        """Number of replies with tokens for which it is unknown which of two policy versions sampled them."""
        self.on_resume: Callable[[], None] | None = None
        """Callback for the end of a pause, by a resume, at its deadline or after a failure."""
        self._calls: set[PausableCall] = set()
        self._waiting = 0
        self._pause: _Pause | None = None
        self._engine_mode: PauseMode | None = None
        """The pause mode last requested from the inference engine; None if it is not asked to stop."""
        self._engine_lock = asyncio.Lock()
        self._call_ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        if state is not None:
            if state.version is not None:
                inner.version = state.version
            if state.mode is not None:
                self._pause = _Pause(state.mode, state.left)
                self._pause.reached_strength = STRENGTH[state.mode]
                self._engine_mode = state.mode if state.mode != "drain" else None

    # ---- state

    @property
    def background_tasks(self) -> frozenset[asyncio.Task[None]]:
        """The tasks that run apart from any call, such as the watch over the deadline of a pause."""
        return frozenset(self._tasks)

    @property
    def version(self) -> int:
        """The policy version that is recorded for the next call, unless the server reports another."""
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.inner.version = version

    @property
    def paused(self) -> bool:
        """True during a pause."""
        return self._pause is not None

    @property
    def mode(self) -> PauseMode | None:
        """The mode of the current pause; None if there is no pause."""
        return self._pause.mode if self._pause is not None else None

    @property
    def in_flight(self) -> int:
        """The number of calls that the wrapped upstream is processing."""
        return len(self._calls)

    @property
    def waiting(self) -> int:
        """The number of calls that wait for the end of a pause."""
        return self._waiting

    def state(self) -> PauseState:
        """Return the current pause and version, with which another process can start."""
        pause = self._pause
        if pause is None:
            return PauseState(version=self.version)
        left = pause.left
        if pause.until is not None:
            left = max(0.0, pause.until - asyncio.get_running_loop().time())
        return PauseState(mode=pause.mode, version=self.version, left=left)

    def states(self) -> tuple[ReplicaState, ...]:
        """Return the state of each replica; empty for an upstream without replicas."""
        return self.inner.states() if isinstance(self.inner, HttpUpstream) else ()

    def collect_metrics(self, role: str) -> None:
        """Set the gauges of the upstream, which serves the model role `role`."""
        states = self.states()
        for state in states:
            catalogue.UPSTREAM_UP.set(state.healthy, role, state.name)
            catalogue.UPSTREAM_CALLS.set(state.load, role, state.name)
            catalogue.UPSTREAM_LIMIT.set(state.limit, role, state.name)
        if not states:
            catalogue.UPSTREAM_CALLS.set(self.in_flight, role, self.name)

    # ---- calls

    async def check(self, *, timeout: float = 10.0) -> UpstreamInfo:
        """Forward to the wrapped upstream."""
        return await self.inner.check(timeout=timeout)

    async def examine(self, affinity: str) -> tuple[UpstreamEvidence, ...]:
        """Forward to the wrapped upstream; return nothing if it cannot examine its servers (see
        `HttpUpstream.examine`)."""
        inner = self.inner
        return await inner.examine(affinity) if isinstance(inner, Examinable) else ()

    async def freeze(self, mode: PauseMode, *, timeout: float) -> bool:
        """Forward to the wrapped upstream."""
        return await self.inner.freeze(mode, timeout=timeout)

    async def thaw(self, *, timeout: float) -> None:
        """Forward to the wrapped upstream."""
        await self.inner.thaw(timeout=timeout)

    async def close(self) -> None:
        """Fail the calls that wait for the end of a pause, and close the wrapped upstream."""
        if self._pause is not None:
            self._end_pause(expired=True)
        for task in list(self._tasks):
            task.cancel()
        await self.inner.close()

    async def complete(
        self,
        request: ModelRequest,
        *,
        timeout: float,
        on_delta: OnDelta | None = None,
        on_wait: OnWait | None = None,
    ) -> ModelReply:
        """Return the reply to one call; if a pause aborts it, request the rest afterwards and join the parts.

        Waiting for the end of a pause or for the concurrency gate does not count towards `timeout`.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        call = PausableCall(request, task, on_delta, on_wait, ReplyPart(self.inner.version))
        part_request = request
        spent = waited = 0.0
        engine_aborts = 0
        try:
            while True:
                if self._pause is not None:
                    waited += await self._wait_for_resume(call)
                began, queued_before = loop.time(), call.queued
                call.part = ReplyPart(self.inner.version)
                self._calls.add(call)
                reply: ModelReply | None = None
                try:
                    reply = await self.inner.complete(
                        part_request,
                        timeout=timeout - spent,
                        on_delta=call.on_delta if on_delta is not None else None,
                        on_wait=call.on_gate_wait,
                    )
                except CallInterrupted:
                    pass
                except asyncio.CancelledError:
                    if not call.absorb_cancellation():
                        raise
                except UpstreamError:
                    if not call.part.stop_expected:
                        raise
                finally:
                    self._calls.discard(call)
                    self._call_ended.set()
                    call.thaw()
                spent += loop.time() - began - (call.queued - queued_before)
                if reply is not None and reply.finish != "abort":
                    if call.part.withheld:
                        await call.deliver_withheld()
                    call.parts.append(call.with_versions(reply))
                    return join_parts(call.parts, queued=waited + call.queued)
                engine_aborts += not call.part.stop_expected
                if (reply := self._add_aborted_part(call, reply, request, engine_aborts)) is not None:
                    return join_parts([*call.parts[:-1], reply], queued=waited + call.queued)
                sampled = b"".join(part.sampled for part in call.parts)
                part_request = next_part_request(request, sampled, len(call.parts))
                if not call.part.stop_expected:
                    await asyncio.sleep(0.05 * 2**engine_aborts)
        except Truncation:
            if not call.parts:
                raise
            # Prompt and earlier parts together are too long: the reply has reached the end of the context.
            last = msgspec.structs.replace(call.parts[-1], finish="length")
            return join_parts([*call.parts[:-1], last], queued=waited + call.queued)
        finally:
            self.mixed_replies += call.mixed_versions
            call.end()

    def _add_aborted_part(
        self, call: PausableCall, reply: ModelReply | None, request: ModelRequest, engine_aborts: int
    ) -> ModelReply | None:
        """Add the tokens of an aborted part to the call.

        Return the part, with the finish reason `length` or `stop`, if the reply was already complete; otherwise
        None.
        """
        sampling = request.sampling
        part = call.partial_reply(reply, bool(sampling.stop)) if call.continuable else None
        if call.delivered and part is None and not call.parts:
            raise UpstreamError(
                f"{self.name}: the call was aborted after its caller had received a part of the reply, and the "
                "rest cannot be requested from token IDs",
                cause="upstream.aborted",
            )
        if part is not None:
            call.parts.append(part)
        if call.parts:
            last = call.parts[-1]
            count = sum(len(part.sampled) for part in call.parts) // 4
            if sampling.max_tokens is not None and count >= sampling.max_tokens:
                return msgspec.structs.replace(last, finish="length")
            if request.stop_ids and int.from_bytes(last.sampled[-4:], "little") in request.stop_ids:
                return msgspec.structs.replace(last, finish="stop")
        if engine_aborts > MAX_ENGINE_ABORTS:
            raise UpstreamError(
                f"{self.name}: the inference engine aborted the call {engine_aborts} times without "
                "a request from Rookery",
                cause="upstream.aborted",
            )
        return None

    async def _wait_for_resume(self, call: PausableCall) -> float:
        """Wait until the upstream is not paused. Return the seconds waited.

        Raises `UpstreamError` (`upstream.paused`) if a pause ends at its deadline.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()
        self._waiting += 1
        call.add_wait(True)
        try:
            while (pause := self._pause) is not None:
                self._arm(pause)
                await pause.ended.wait()
                if pause.expired:
                    raise UpstreamError(
                        f"{self.name}: the upstream was paused for {loop.time() - since:.3g} s and not resumed",
                        cause="upstream.paused",
                    )
        finally:
            self._waiting -= 1
            call.add_wait(False)
        return loop.time() - since

    # ---- pause

    async def pause(self, mode: PauseMode = "drain", *, timeout: float = 60.0, deadline: float = 600.0) -> None:
        """Stop sampling, and return when all calls have stopped.

        Calls that have not stopped after `timeout` seconds are aborted, which takes some seconds more. `deadline`
        is the number of seconds after which the pause ends without a resume. Raises `UpstreamError` if the
        inference engine fails to stop or the pause ends before all calls have stopped; the pause is then over.
        """
        pause = self._pause
        if pause is None:
            pause = self._pause = _Pause(mode, deadline)
        elif STRENGTH[mode] > STRENGTH[pause.mode]:
            pause.mode = mode
        self._arm(pause, deadline)
        try:
            async with self._engine_lock:
                if self._pause is pause and pause.reached_strength < STRENGTH[mode]:
                    await self._stop_calls(pause, mode, timeout)
                    pause.reached_strength = STRENGTH[pause.mode]
        except BaseException:
            if self._pause is pause:
                self._end_pause()
                self._start_task(self._thaw_engine(THAW_SECONDS))
            raise
        if self._pause is not pause:
            raise UpstreamError(f"{self.name}: the pause ended before all calls stopped", cause="upstream.paused")

    async def _stop_calls(self, pause: _Pause, mode: PauseMode, timeout: float) -> None:
        end = asyncio.get_running_loop().time() + timeout
        if mode == "keep":
            self._engine_mode = mode
            if await self.inner.freeze("keep", timeout=timeout) and self._pause is pause:
                for call in self._calls:
                    call.freeze()
            return
        if self._engine_mode is not None and mode == "drain":  # frozen calls cannot finish
            await self.inner.thaw(timeout=THAW_SECONDS)
            self._engine_mode = None
        self._thaw_calls()
        # Interrupt the calls that the inference engine does not know, or that can start from the beginning.
        for call in list(self._calls):
            if call.queueing or (mode == "abort" and not call.delivered and not call.continuable):
                call.interrupt()
        if mode == "drain":
            if await self._wait_for_calls(pause, end, lambda _: True):
                return
            log.warning(
                "%s: aborting %d model calls that did not end within %g s of the pause",
                self.name,
                self.in_flight,
                timeout,
            )
            pause.mode = "abort"
        elif not await self._wait_for_calls(pause, end, lambda call: not call.continuable):
            log.warning(
                "%s: model calls that cannot be continued did not end within %g s of the pause, and are aborted",
                self.name,
                timeout,
            )
        if self._pause is pause:
            await self._abort_calls(pause)

    async def _abort_calls(self, pause: _Pause) -> None:
        loop = asyncio.get_running_loop()
        self._engine_mode = "abort"
        for call in self._calls:
            call.part.stop_expected = True
        if await self.inner.freeze("abort", timeout=ABORT_SECONDS):
            end = loop.time() + ABORT_SECONDS
            left = len(self._calls) + 1
            while len(self._calls) < left and loop.time() < end:
                left = len(self._calls)
                quiet_until = min(end, loop.time() + QUIET_SECONDS)
                if await self._wait_for_calls(pause, quiet_until, lambda call: not call.queueing):
                    break
        if self._pause is not pause:
            return
        for call in list(self._calls):
            call.interrupt()
        await self._wait_for_calls(pause, loop.time() + ABORT_SECONDS, lambda _: True)

    async def _wait_for_calls(self, pause: _Pause, end: float, which: Callable[[PausableCall], bool]) -> bool:
        """Wait until the calls for which `which` is True have ended. Return False if some are left at time `end`.

        A stopping call whose `on_delta` callback is still running ends after the callback, and is not waited for.
        """
        loop = asyncio.get_running_loop()
        while self._pause is pause:
            self._call_ended.clear()
            if not any(which(call) and not (call.delivering and call.part.stop_expected) for call in self._calls):
                return True
            if loop.time() >= end:
                return False
            try:
                async with asyncio.timeout_at(end):
                    await self._call_ended.wait()
            except TimeoutError:
                continue  # check once more
        return True

    # ---- resume

    async def resume(self, version: int | None = None, *, timeout: float = THAW_SECONDS) -> None:
        """End the pause and continue sampling. Tokens sampled from now on are recorded with `version`, unless it
        is None.

        Without a pause, only the version is set. `timeout` bounds the request to the inference engine.
        """
        if self._pause is None:
            if version is not None:
                self.version = version
            return
        self._end_pause(version)
        await asyncio.shield(self._start_task(self._thaw_engine(timeout)))

    def _end_pause(self, version: int | None = None, *, expired: bool = False) -> None:
        """End the pause in this process. It is synchronous, so that a cancellation cannot leave the pause half
        ended.

        With `expired`, waiting calls fail; otherwise they continue.
        """
        pause, self._pause = self._pause, None
        assert pause is not None
        if pause.timer is not None:
            pause.timer.cancel()
        if version is not None:
            changed = version != self.version
            self.version = version  # also if unchanged: setting it may activate weights that are already loaded
            for call in self._calls if changed else ():
                call.mark_update(version)
        self._thaw_calls()
        pause.expired = expired
        pause.ended.set()
        self._call_ended.set()
        if self.on_resume is not None:
            self.on_resume()

    def _thaw_calls(self) -> None:
        for call in self._calls:
            call.thaw()

    async def _thaw_engine(self, timeout: float) -> None:
        """Ask the inference engine to continue, with retries, unless another pause has begun in the meantime."""
        async with self._engine_lock:
            if self._pause is not None or self._engine_mode is None:
                return
            end = asyncio.get_running_loop().time() + timeout
            for delay in (0.1, 1.0, 0.0):
                left = end - asyncio.get_running_loop().time()
                try:
                    await self.inner.thaw(timeout=max(1.0, left))
                except UpstreamError as error:
                    if not delay or left <= delay:
                        log.error(
                            "%s: the inference engine may still be paused; the request to resume failed: %s",
                            self.name,
                            error,
                        )
                        raise
                    await asyncio.sleep(delay)
                else:
                    self._engine_mode = None
                    return

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(coroutine, context=detached_context())
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: it was logged, and raised in `resume`

    def arm(self) -> None:
        """Start the deadline timer of a pause that was passed to the constructor.

        The constructor cannot do so, because it may run without an event loop. Without this call, the timer starts
        when the first call waits.
        """
        if self._pause is not None:
            self._arm(self._pause)

    def _arm(self, pause: _Pause, deadline: float | None = None) -> None:
        """Start the deadline timer of a pause, or move the deadline to a later time; it is never moved to an
        earlier one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (pause.left if deadline is None else deadline)
        if pause.until is not None and (deadline is None or until <= pause.until):
            return
        if pause.timer is not None:
            pause.timer.cancel()
        pause.until = until
        pause.timer = loop.call_at(until, self._expire, pause)

    def _expire(self, pause: _Pause) -> None:
        if self._pause is not pause:
            return
        log.error(
            "%s: nobody resumed the upstream before the pause's deadline; it continues with version %d, and %d "
            "waiting calls fail",
            self.name,
            self.version,
            self._waiting,
        )
        self._end_pause(expired=True)
        self._start_task(self._thaw_engine(THAW_SECONDS))

    # ---- weight updates

    @asynccontextmanager
    async def sync(
        self,
        version: int,
        load: Callable[[], Awaitable[object] | object] | None = None,
        *,
        mode: PauseMode = "abort",
        timeout: float = 60.0,
        deadline: float = 600.0,
    ) -> AsyncIterator[None]:
        """Pause, call `load`, run the block, and resume with `version`; after an exception, resume with the old
        version.

        `load` loads the new weights: a coroutine function, or any other function, which runs in a thread. `mode`,
        `timeout` and `deadline` are those of `pause`.
        """
        await self.pause(mode, timeout=timeout, deadline=deadline)
        pause = self._pause
        new_version = None
        try:
            if load is not None and pause is not None and pause.until is not None:
                await run_load(load, pause.until, self.name)
            yield
            new_version = version
        finally:
            await self.resume(new_version)


async def run_load(load: Callable[[], Awaitable[object] | object], until: float | None, name: str) -> None:
    """Call `load` to load new weights: await a coroutine function, or run any other function in a thread.

    If it has not ended at the event loop's time `until`, raise `UpstreamError`; a thread keeps running then.
    `name` is the name of the upstream, for the error message.
    """
    try:
        async with asyncio.timeout_at(until) as limit:
            result = load() if inspect.iscoroutinefunction(load) else await asyncio.to_thread(load)
            if inspect.isawaitable(result):
                await result
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise UpstreamError(
            f"{name}: the weights were not loaded before the pause's deadline", cause="upstream.paused"
        ) from error
