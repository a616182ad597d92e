"""Warm sandboxes, started ahead of need: a provider in front of another one.

Promises:
- a sandbox is handed out once, to one attempt, and never comes back: none has another attempt's state;
- no more are started ahead than are expected, than `most`, and than the budget of memory and disk allows; while
  held back, none;
- one that does not answer any more is never handed out: it is closed, and the next is taken, or a new one made;
- what is expected no longer is closed; at the end all are, those that are being started too;
- a request for which none is warm takes one that is being started, unless that takes longer than a moment;
  else one is made for it, a few at a time however many ask, and those go before what is started ahead;
- a spec of which none could be made is not tried ahead again before somebody got one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from rookery.core import RookeryError, SandboxError, SandboxSpec, UsageError
from rookery.core.apart import apart
from rookery.sandboxes.protocol import Command, Provider, Sandbox

GB: Final = 1 << 30
ALIVE_SECONDS: Final = 5.0
START_SECONDS: Final = 300.0
MOMENT: Final = 10.0
"""Seconds that a request waits for one that is being started. Another would take as long, and slow it down:
with 1 second, engines that were just busy made many for nobody."""
POOLED: Final = "pool"
"""The attempt of a sandbox that nobody has yet."""

log = logging.getLogger("rookery.sandboxes")


@runtime_checkable
class Adopted(Protocol):
    """A sandbox that can be told whose it is, after it was made."""

    def adopt(self, attempt: str) -> None: ...


class PoolBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What warm sandboxes may hold together; None is as much as there is."""

    most: int = 64
    memory: int | None = 16 * GB
    disk: int | None = None
    at_once: int = 4
    """Starting at a time, ahead of need."""
    asked: int = 16
    """Being made at a time, for those who ask."""

    def __post_init__(self) -> None:
        if self.most < 0 or self.at_once < 1 or self.asked < 1:
            raise UsageError("a pool has a place for at least 0 sandboxes, and starts at least 1 at a time")
        for name in ("memory", "disk"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"a pool's {name} is a number of bytes, not {value}")


class Shelf:
    """The warm sandboxes of one spec, as numbers."""

    __slots__ = ("claimed", "expected", "ready", "spec", "starting", "unfit")

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.expected = 0
        self.ready = 0
        self.starting = 0
        self.claimed = 0
        """Of those that are being started: somebody waits for them."""
        self.unfit = False
        """The last one could not be made."""

    @property
    def held(self) -> int:
        return self.ready + self.starting

    @property
    def short(self) -> bool:
        """Whether more are expected than are there, or will be."""
        return not self.unfit and self.held - self.claimed < self.expected


class Plan:
    """What to start next and what to close: pure. Shelves are in the order that they are needed."""

    def __init__(self, budget: PoolBudget) -> None:
        self.budget = budget
        self.shelves: dict[bytes, Shelf] = {}
        self.held_back = False
        """Nothing is started ahead."""
        self.asked = 0
        """Requests that one is being made for."""

    def shelf(self, spec: SandboxSpec) -> Shelf:
        key = key_of(spec)
        found = self.shelves.get(key)
        if found is None:
            found = self.shelves[key] = Shelf(spec)
        return found

    def expect(self, wanted: Sequence[tuple[SandboxSpec, int]]) -> None:
        """So many of each will be asked for soon, the first ones first; of all others none."""
        for shelf in self.shelves.values():
            shelf.expected = 0
        order = {}
        for spec, count in wanted:
            shelf = self.shelf(spec)
            shelf.expected += count
            order[key_of(spec)] = shelf
        self.shelves = order | {
            key: shelf for key, shelf in self.shelves.items() if key not in order and shelf.held
        }

    def next(self) -> Shelf | None:
        """What to start one more of now. The more somebody waits for, the fewer are started for later."""
        starting = sum(shelf.starting for shelf in self.shelves.values())
        claimed = sum(shelf.claimed for shelf in self.shelves.values())
        later = max(1, self.budget.at_once - self.asked - claimed)
        if self.held_back or starting >= self.budget.at_once or starting - claimed >= later:
            return None
        for shelf in self.shelves.values():
            if shelf.short and self._room(shelf.spec):
                return shelf
        return None

    def surplus(self) -> list[tuple[Shelf, int]]:
        """How many warm ones of each shelf are expected no longer."""
        return [
            (shelf, shelf.ready - shelf.expected)
            for shelf in self.shelves.values()
            if shelf.ready > shelf.expected
        ]

    def _room(self, spec: SandboxSpec) -> bool:
        held = [(shelf.spec, shelf.held) for shelf in self.shelves.values()]
        if sum(count for _, count in held) >= self.budget.most:
            return False
        for limit, name in ((self.budget.memory, "memory"), (self.budget.disk, "disk")):
            used = sum((getattr(each, name) or 0) * count for each, count in held)
            if limit is not None and used + (getattr(spec, name) or 0) > limit:
                return False
        return True


def key_of(spec: SandboxSpec) -> bytes:
    return msgspec.msgpack.encode(spec)


class Pool:
    """A provider with warm sandboxes. Built and used in one event loop."""

    def __init__(self, inner: Provider, budget: PoolBudget | None = None) -> None:
        self.inner = inner
        self.name = inner.name
        self.isolated = inner.isolated
        self.plan = Plan(budget or PoolBudget())
        self.hits = self.misses = self.unwell = 0
        self._ready: dict[bytes, deque[Sandbox]] = {}
        self._waiting: dict[bytes, deque[asyncio.Future[Sandbox | None]]] = {}
        self._places = asyncio.Semaphore(self.plan.budget.asked)
        self._working: set[asyncio.Task[None]] = set()
        self._closed = False

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        return self.inner.check(spec)

    def expect(self, wanted: Sequence[tuple[SandboxSpec, int]]) -> None:
        """What will be asked for soon, the first first. What this does not name is not kept."""
        if not self._closed:
            self.plan.expect(wanted)
            self._fill()

    def hold(self, *, back: bool) -> None:
        """Whether what is expected is to wait, as during a pause; who asks is still served."""
        self.plan.held_back = back
        self._fill()

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        shelf = self.plan.shelves.get(key_of(spec))
        if shelf is not None:
            shelf.expected = max(0, shelf.expected - 1)
            box = await self._warm(key_of(spec), timeout)
            if box is not None:
                self.hits += 1
                self._fill()
                return self._given(box, attempt)
        self.misses += 1
        return await self._made(spec, attempt, until)

    async def _warm(self, key: bytes, timeout: float) -> Sandbox | None:
        """One that is there and well, or that will be in a moment."""
        while ready := self._ready.get(key):
            self.plan.shelves[key].ready -= 1
            first = ready.popleft()
            if await self._well(first):
                return first
            self.unwell += 1
        shelf = self.plan.shelves.get(key)
        if shelf is None or shelf.claimed >= shelf.starting:
            return None
        coming: asyncio.Future[Sandbox | None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(key, deque())
        queue.append(coming)
        shelf.claimed += 1
        self._fill()
        try:
            await asyncio.wait({coming}, timeout=min(MOMENT, timeout))
        except BaseException:
            if coming.done() and (box := coming.result()) is not None:
                self._begin(_closed(box))
            raise
        finally:
            if not coming.done():
                queue.remove(coming)
                shelf.claimed -= 1
        return coming.result() if coming.done() else None

    async def _made(self, spec: SandboxSpec, attempt: str, until: float) -> Sandbox:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise SandboxError("the pool is closed: it makes no more sandboxes", cause="sandbox.create")
        self.plan.asked += 1
        try:
            try:
                async with asyncio.timeout_at(until):
                    await self._places.acquire()
            except TimeoutError as error:
                detail = "too many sandboxes were asked for at once: the time for this one passed before its turn"
                raise SandboxError(detail, cause="sandbox.create") from error
            try:
                box = await self.inner.create(spec, attempt=attempt, timeout=max(0.001, until - loop.time()))
            finally:
                self._places.release()
        finally:
            self.plan.asked -= 1
            self._fill()
        shelf = self.plan.shelves.get(key_of(spec))
        if shelf is not None and shelf.unfit:
            shelf.unfit = False
            self._fill()
        return box

    @staticmethod
    def _given(box: Sandbox, attempt: str) -> Sandbox:
        if isinstance(box, Adopted):
            box.adopt(attempt)
        return box

    async def close(self) -> None:
        self._closed = True
        self.plan.expect([])
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        self._ready.clear()
        await self.inner.close()  # with every sandbox that is still open

    # ---- ahead of need

    def _fill(self) -> None:
        if self._closed:
            return
        for shelf, count in self.plan.surplus():
            for _ in range(count):
                shelf.ready -= 1
                self._begin(_closed(self._ready[key_of(shelf.spec)].pop()))
        while (short := self.plan.next()) is not None:
            short.starting += 1
            self._begin(self._start(short))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, context=apart())
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _start(self, shelf: Shelf) -> None:
        box: Sandbox | None = None
        try:
            box = await self.inner.create(shelf.spec, attempt=POOLED, timeout=START_SECONDS)
        except (RookeryError, OSError) as error:
            # Whoever asks for one will hear of it, in its own attempt; here nobody would.
            log.debug("a warm sandbox could not be made: %s", error)
            shelf.unfit = True
        finally:
            shelf.starting -= 1
            self._arrived(shelf, box)

    def _arrived(self, shelf: Shelf, box: Sandbox | None) -> None:
        """One that was being started is there, or will not be."""
        waiting = self._waiting.get(key_of(shelf.spec))
        if waiting and (box is not None or shelf.claimed > shelf.starting):
            shelf.claimed -= 1
            waiting.popleft().set_result(box)
        elif box is not None and not self._closed:  # else it ends with the provider
            shelf.ready += 1
            self._ready.setdefault(key_of(shelf.spec), deque()).append(box)
        self._fill()

    async def _well(self, box: Sandbox) -> bool:
        """Whether it still answers; one that does not is closed."""
        try:
            async with asyncio.timeout(2 * ALIVE_SECONDS):
                if (await box.exec(Command(argv=("true",), wall=ALIVE_SECONDS))).ok:
                    return True
        except (SandboxError, TimeoutError) as error:
            log.debug("a warm sandbox does not answer: %s", error)
        except BaseException:
            self._begin(_closed(box))
            raise
        self._begin(_closed(box))
        return False


async def _closed(box: Sandbox) -> None:
    try:
        await box.close()
    except (RookeryError, OSError) as error:
        log.warning("a warm sandbox could not be closed: %s", error)
