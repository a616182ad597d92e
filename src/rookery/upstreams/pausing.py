"""The pause of an upstream: who may sample, until when, and with which version on what is sampled.

Promises: those of `valve.py`; here are the ones about pauses themselves.
- opening takes no time, so that no cancellation comes between a pause and its end; the engine is told afterwards;
- the engine is told one thing at a time, and at the end what the valve's last state needs;
- every wait has an end: a settling pause after its timeout and a few seconds, a settled one at its deadline.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from rookery.core import UpstreamError
from rookery.core.apart import apart
from rookery.upstreams.interruptible import Call
from rookery.upstreams.protocol import PauseMode, Upstream

log = logging.getLogger("rookery.upstreams")

STRENGTH: Final[dict[PauseMode, int]] = {"keep": 0, "drain": 1, "abort": 2}
ABORT_SECONDS: Final = 10.0
"""For the engine to abort, and for its answers to come back."""
QUIET_SECONDS: Final = 1.0
"""After an abort: when so long no call has ended, those that are left were not in the engine when it aborted."""
THAW_SECONDS: Final = 30.0


class ValveState(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has to know that is born while others are paused."""

    mode: PauseMode | None = None
    """None: open."""
    version: int | None = None
    """None: as the upstream says."""
    left: float = 0.0
    """Seconds until the pause's deadline."""


class _Pause:
    def __init__(self, mode: PauseMode, left: float) -> None:
        self.mode = mode
        self.left = left
        self.until: float | None = None
        self.reached = -1
        """The strength that was reached."""
        self.over = asyncio.Event()
        self.expired = False
        self.timer: asyncio.TimerHandle | None = None


class Pausing:
    """What a valve knows and does about its pauses. Used in one event loop."""

    def __init__(self, inner: Upstream, *, state: ValveState | None = None) -> None:
        self.inner = inner
        self.name = inner.name
        self.mixed = 0
        """Answers with tokens of which it is not known which of two versions sampled them."""
        self._calls: set[Call] = set()
        self._waiting = 0
        self._pause: _Pause | None = None
        self._frozen: PauseMode | None = None
        """What the engine itself was told."""
        self._changing = asyncio.Lock()
        self._moved = asyncio.Event()
        """Set whenever a call ends."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.opened: Callable[[], None] | None = None
        """Called when a pause is over, in whatever way."""
        if state is not None:
            if state.version is not None:
                inner.version = state.version
            if state.mode is not None:
                self._pause = _Pause(state.mode, state.left)
                self._pause.reached = STRENGTH[state.mode]
                self._frozen = state.mode if state.mode != "drain" else None

    # -------------------------------------------------------------------------------------------- state

    @property
    def version(self) -> int:
        """Of the weights that serve the next call."""
        return self.inner.version

    @version.setter
    def version(self, version: int) -> None:
        self.inner.version = version

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def mode(self) -> PauseMode | None:
        return self._pause.mode if self._pause is not None else None

    @property
    def under_way(self) -> int:
        """Calls that the upstream has."""
        return len(self._calls)

    @property
    def waiting(self) -> int:
        """Calls that wait for the end of a pause."""
        return self._waiting

    def state(self) -> ValveState:
        pause = self._pause
        if pause is None:
            return ValveState(version=self.version)
        left = pause.left
        if pause.until is not None:
            left = max(0.0, pause.until - asyncio.get_running_loop().time())
        return ValveState(mode=pause.mode, version=self.version, left=left)

    # -------------------------------------------------------------------------------------------- pause

    async def pause(self, mode: PauseMode = "drain", *, timeout: float = 60.0, deadline: float = 600.0) -> None:
        """Returns when nothing is sampled any more, `timeout` and a few seconds for an abort later at most.

        `deadline` is how long the pause may last before it ends by itself."""
        pause = self._pause
        if pause is None:
            pause = self._pause = _Pause(mode, deadline)
        elif STRENGTH[mode] > STRENGTH[pause.mode]:
            pause.mode = mode
        self._arm(pause, deadline)
        try:
            async with self._changing:
                if self._pause is pause and pause.reached < STRENGTH[mode]:
                    await self._settle(pause, mode, timeout)
                    pause.reached = STRENGTH[pause.mode]
        except BaseException:
            if self._pause is pause:
                self._open()
                self._later(self._thawed(THAW_SECONDS))
            raise
        if self._pause is not pause:
            what = f"{self.name}: the pause was ended before it was complete"
            raise UpstreamError(what, cause="upstream.paused")

    async def _settle(self, pause: _Pause, mode: PauseMode, timeout: float) -> None:
        end = asyncio.get_running_loop().time() + timeout
        if mode == "keep":
            self._frozen = mode
            if await self.inner.freeze("keep", timeout=timeout) and self._pause is pause:
                for call in self._calls:
                    call.freeze()
            return
        if self._frozen is not None and mode == "drain":  # what stands still cannot finish
            await self.inner.thaw(timeout=THAW_SECONDS)
            self._frozen = None
        self._go_on()
        for call in list(self._calls):  # the engine does not know these, or nobody has anything of them
            if call.queueing or (mode == "abort" and not call.told and not call.continuable):
                call.interrupt()
        if mode == "drain":
            if await self._until(pause, end, _any):
                return
            log.warning("%s: %d calls did not end within %g s; aborting them", self.name, self.under_way, timeout)
            pause.mode = "abort"
        elif not await self._until(pause, end, lambda call: not call.continuable):
            log.warning("%s: calls that cannot be continued did not end within %g s", self.name, timeout)
        if self._pause is pause:
            await self._abort(pause)

    async def _abort(self, pause: _Pause) -> None:
        loop = asyncio.get_running_loop()
        self._frozen = "abort"
        for call in self._calls:
            call.wanted = True
        if await self.inner.freeze("abort", timeout=ABORT_SECONDS):
            end = loop.time() + ABORT_SECONDS
            left = len(self._calls) + 1
            while len(self._calls) < left and loop.time() < end:
                left = len(self._calls)
                if await self._until(pause, min(end, loop.time() + QUIET_SECONDS), _sent):
                    break
        if self._pause is not pause:
            return
        for call in list(self._calls):
            call.interrupt()
        await self._until(pause, loop.time() + ABORT_SECONDS, _any)

    async def _until(self, pause: _Pause, end: float, which: Callable[[Call], bool]) -> bool:
        """Whether the calls ended that it is about. Who is being told something will end after it."""
        loop = asyncio.get_running_loop()
        while self._pause is pause:
            self._moved.clear()
            if not any(which(call) and not (call.telling and call.wanted) for call in self._calls):
                return True
            if loop.time() >= end:
                return False
            try:
                async with asyncio.timeout_at(end):
                    await self._moved.wait()
            except TimeoutError:
                continue  # a last look
        return True

    # ------------------------------------------------------------------------------------------- resume

    async def resume(self, version: int | None = None, *, timeout: float = THAW_SECONDS) -> None:
        """Lets calls go on, with `version` on what is sampled from now on."""
        if self._pause is None:
            if version is not None:
                self.version = version
            return
        self._open(version)
        await asyncio.shield(self._later(self._thawed(timeout)))

    def _open(self, version: int | None = None, *, expired: bool = False) -> None:
        """At once and without waiting, so that no cancellation can come between."""
        pause, self._pause = self._pause, None
        assert pause is not None
        if pause.timer is not None:
            pause.timer.cancel()
        if version is not None:
            crossed = version != self.version
            self.version = version  # also the same again: it may be said of weights that wait to be taken up
            for call in self._calls if crossed else ():
                call.cross(version)
        self._go_on()
        pause.expired = expired
        pause.over.set()
        self._moved.set()
        if self.opened is not None:
            self.opened()

    def _go_on(self) -> None:
        for call in self._calls:
            call.thaw()

    async def _thawed(self, timeout: float) -> None:
        """Tells the engine to go on, unless another pause has begun, which will tell it what it needs."""
        async with self._changing:
            if self._pause is not None or self._frozen is None:
                return
            end = asyncio.get_running_loop().time() + timeout
            for pause in (0.1, 1.0, 0.0):
                left = end - asyncio.get_running_loop().time()
                try:
                    await self.inner.thaw(timeout=max(1.0, left))
                except UpstreamError as error:
                    if not pause or left <= pause:
                        log.error("%s: the engine may still be paused: %s", self.name, error)
                        raise
                    await asyncio.sleep(pause)
                else:
                    self._frozen = None
                    return

    def _later(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work, context=apart())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it was logged, and raised to who waited for it

    def arm(self) -> None:
        """Sets the deadline of a pause that it was born with; without this the first call that waits does."""
        if self._pause is not None:
            self._arm(self._pause)

    def _arm(self, pause: _Pause, deadline: float | None = None) -> None:
        """Sets the pause's deadline; a later one replaces it."""
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
            "%s: nobody resumed the upstream before the pause's deadline; it goes on with version %d, and the %d "
            "calls that waited fail",
            self.name,
            self.version,
            self._waiting,
        )
        self._open(expired=True)
        self._later(self._thawed(THAW_SECONDS))

    # --------------------------------------------------------------------------------------------- sync

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
        """Paused inside of the block, with `load` done; resumed after it with `version`, or with the old one where
        the load or the block raised.

        A `load` that is no coroutine runs in a thread. One that is not done at the pause's deadline is given up; a
        thread cannot be ended, and is left to itself."""
        await self.pause(mode, timeout=timeout, deadline=deadline)
        pause = self._pause
        now = None
        try:
            if load is not None and pause is not None and pause.until is not None:
                await loaded(load, pause.until, self.name)
            yield
            now = version
        finally:
            await self.resume(now)


async def loaded(load: Callable[[], Awaitable[object] | object], until: float | None, name: str) -> None:
    """Calls it, in a thread where it is no coroutine; given up at the loop's time `until`."""
    try:
        async with asyncio.timeout_at(until) as limit:
            result = load() if inspect.iscoroutinefunction(load) else await asyncio.to_thread(load)
            if inspect.isawaitable(result):
                await result
    except TimeoutError as error:
        if not limit.expired():
            raise
        what = f"{name}: the weights were not loaded before the pause's deadline"
        raise UpstreamError(what, cause="upstream.paused") from error


def _any(_: Call) -> bool:
    return True


def _sent(call: Call) -> bool:
    return not call.queueing
