"""A pool of prewarmed sandboxes: a provider that wraps another one. Runs in the processes that execute rollouts.

A warm sandbox is one that was created before it was requested.

Guarantees:
- a sandbox is used by one attempt and never returned to the pool: no attempt sees another attempt's state;
- no sandbox is prewarmed beyond the number expected to be requested, beyond `max_warm`, or beyond the memory and
  disk budget; none is prewarmed while the pool is paused;
- a warm sandbox that no longer responds is closed, and another one is used or created;
- sandboxes that are no longer expected are closed; `close` closes all, including those that are starting;
- if no warm sandbox is ready, a request waits up to `WAIT_SECONDS` for one that is starting; otherwise a sandbox
  is created for the request. Such creations are limited in number and take precedence over prewarming;
- if creating a warm sandbox for a spec failed, none is prewarmed for that spec until a request for it succeeds.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from rookery.core import RookeryError, SandboxError, SandboxSpec, UsageError
from rookery.core.lifetimes import detached_context
from rookery.sandboxes.protocol import Command, Provider, Sandbox
from rookery.telemetry import catalogue

GB: Final = 1 << 30
RESPONSE_SECONDS: Final = 5.0
START_SECONDS: Final = 300.0
WAIT_SECONDS: Final = 10.0
"""Longest time that a request waits for a warm sandbox that is starting, before another one is created for it.

Creating another one takes as long and slows both down: with 1 second, a loaded machine created many sandboxes that
nobody used.
"""
POOL_ATTEMPT: Final = "pool"
"""Stands in a lease instead of the attempt's name while no attempt uses the sandbox."""

log = logging.getLogger("rookery.sandboxes")


@runtime_checkable
class SupportsAdoption(Protocol):
    """A sandbox that can be assigned to an attempt after its creation."""

    def adopt(self, attempt: str) -> None: ...


class PoolBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for all warm sandboxes of a pool together. `memory` and `disk` are in bytes; None means unlimited."""

    max_warm: int = 64
    memory: int | None = 16 * GB
    disk: int | None = None
    max_starting: int = 4
    """Number of sandboxes that are prewarmed in parallel."""
    max_creating: int = 16
    """Number of sandboxes that are created in parallel for requests."""

    def __post_init__(self) -> None:
        if self.max_warm < 0 or self.max_starting < 1 or self.max_creating < 1:
            raise UsageError(
                "invalid pool budget: max_warm must be at least 0, max_starting and max_creating at least 1"
            )
        for name in ("memory", "disk"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"invalid pool budget: {name} must not be negative, but is {value}")


class WarmSandboxes:
    """Counts the sandboxes of one spec that are expected, starting and ready."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.expected = 0
        self.ready = 0
        self.starting = 0
        self.claimed = 0
        """Number of starting sandboxes that are each awaited by a request."""
        self.creation_failed = False
        """True if the last creation of a warm sandbox of this spec failed."""

    @property
    def total(self) -> int:
        return self.ready + self.starting

    @property
    def needs_more(self) -> bool:
        """True if more sandboxes are expected to be requested than are ready or starting."""
        return not self.creation_failed and self.total - self.claimed < self.expected


class PoolPlan:
    """Decides which warm sandboxes to start and to close. Performs no I/O.

    `entries` is in the order in which the specs are expected to be requested.
    """

    def __init__(self, budget: PoolBudget) -> None:
        self.budget = budget
        self.entries: dict[bytes, WarmSandboxes] = {}
        self.paused = False
        """True if prewarming is paused."""
        self.creating = 0
        """Number of requests for which a sandbox is being created or waits to be created."""

    def get_entry(self, spec: SandboxSpec) -> WarmSandboxes:
        key = spec_key(spec)
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = WarmSandboxes(spec)
        return found

    def expect(self, wanted: Sequence[tuple[SandboxSpec, int]]) -> None:
        """Set how many sandboxes of each spec will be requested soon, in this order. Other specs are set to 0."""
        for entry in self.entries.values():
            entry.expected = 0
        order = {}
        for spec, count in wanted:
            entry = self.get_entry(spec)
            entry.expected += count
            order[spec_key(spec)] = entry
        self.entries = order | {
            key: entry for key, entry in self.entries.items() if key not in order and entry.total
        }

    def next_to_start(self) -> WarmSandboxes | None:
        """Return the entry of the sandbox spec of which one more sandbox should start; None to start none now.

        While sandboxes are created for requests, fewer sandboxes are prewarmed in parallel.
        """
        starting = sum(entry.starting for entry in self.entries.values())
        claimed = sum(entry.claimed for entry in self.entries.values())
        later = max(1, self.budget.max_starting - self.creating - claimed)
        if self.paused or starting >= self.budget.max_starting or starting - claimed >= later:
            return None
        for entry in self.entries.values():
            if entry.needs_more and self._fits_budget(entry.spec):
                return entry
        return None

    def surplus(self) -> list[tuple[WarmSandboxes, int]]:
        """Return the specs with more ready sandboxes than are expected to be requested, and how many more."""
        return [
            (entry, entry.ready - entry.expected)
            for entry in self.entries.values()
            if entry.ready > entry.expected
        ]

    def _fits_budget(self, spec: SandboxSpec) -> bool:
        held = [(entry.spec, entry.total) for entry in self.entries.values()]
        if sum(count for _, count in held) >= self.budget.max_warm:
            return False
        for limit, name in ((self.budget.memory, "memory"), (self.budget.disk, "disk")):
            used = sum((getattr(each, name) or 0) * count for each, count in held)
            if limit is not None and used + (getattr(spec, name) or 0) > limit:
                return False
        return True


def spec_key(spec: SandboxSpec) -> bytes:
    return msgspec.msgpack.encode(spec)


class Pool:
    """A provider that takes sandboxes of `provider` from a stock of warm ones. Bound to one event loop."""

    def __init__(self, provider: Provider, budget: PoolBudget | None = None) -> None:
        self.provider = provider
        self.name = provider.name
        self.isolated = provider.isolated
        self.plan = PoolPlan(budget or PoolBudget())
        self.hits = self.misses = self.unresponsive = 0
        self._ready: dict[bytes, deque[Sandbox]] = {}
        self._waiting: dict[bytes, deque[asyncio.Future[Sandbox | None]]] = {}
        self._creation_slots = asyncio.Semaphore(self.plan.budget.max_creating)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def warm_sandboxes(self) -> tuple[Sandbox, ...]:
        """The sandboxes that are ready and not requested yet."""
        return tuple(sandbox for ready in self._ready.values() for sandbox in ready)

    @property
    def background_tasks(self) -> frozenset[asyncio.Task[None]]:
        """The tasks that create or close a sandbox."""
        return frozenset(self._tasks)

    def check(self, spec: SandboxSpec) -> Sequence[str]:
        return self.provider.check(spec)

    def expect(self, wanted: Sequence[tuple[SandboxSpec, int]]) -> None:
        """Set how many sandboxes of each spec will be requested soon, in order. Close surplus warm sandboxes."""
        if not self._closed:
            self.plan.expect(wanted)
            self._fill()

    def set_paused(self, *, paused: bool) -> None:
        """Pause or resume prewarming. While it is paused, requests are still served."""
        self.plan.paused = paused
        self._fill()

    async def create(self, spec: SandboxSpec, *, attempt: str, timeout: float = 60.0) -> Sandbox:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        entry = self.plan.entries.get(spec_key(spec))
        if entry is not None:
            entry.expected = max(0, entry.expected - 1)
            sandbox = await self._take_warm(spec_key(spec), timeout)
            if sandbox is not None:
                self.hits += 1
                catalogue.POOL_REQUESTS.add(self.name, "warm")
                self._fill()
                return self._assign(sandbox, attempt)
        self.misses += 1
        catalogue.POOL_REQUESTS.add(self.name, "cold")
        return await self._create(spec, attempt, until)

    async def _take_warm(self, key: bytes, timeout: float) -> Sandbox | None:
        """Return a warm sandbox that responds; if none is ready, wait for one that is starting.

        Return None if none is starting either, or if the wait exceeds `timeout` or `WAIT_SECONDS`.
        """
        while ready := self._ready.get(key):
            self.plan.entries[key].ready -= 1
            first = ready.popleft()
            if await self._responds(first):
                return first
            self.unresponsive += 1
            catalogue.POOL_UNRESPONSIVE.add(self.name)
        entry = self.plan.entries.get(key)
        if entry is None or entry.claimed >= entry.starting:
            return None
        started: asyncio.Future[Sandbox | None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(key, deque())
        queue.append(started)
        entry.claimed += 1
        self._fill()
        try:
            await asyncio.wait({started}, timeout=min(WAIT_SECONDS, timeout))
        except BaseException:
            if started.done() and (sandbox := started.result()) is not None:
                self._spawn(_close_sandbox(sandbox))
            raise
        finally:
            if not started.done():
                queue.remove(started)
                entry.claimed -= 1
        return started.result() if started.done() else None

    async def _create(self, spec: SandboxSpec, attempt: str, until: float) -> Sandbox:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise SandboxError("the pool is closed and creates no more sandboxes", cause="sandbox.create")
        self.plan.creating += 1
        try:
            try:
                async with asyncio.timeout_at(until):
                    await self._creation_slots.acquire()
            except TimeoutError as error:
                detail = (
                    "the sandbox was not created: too many sandboxes were requested at once, and the deadline of "
                    "this request passed before its turn"
                )
                raise SandboxError(detail, cause="sandbox.create") from error
            try:
                sandbox = await self.provider.create(
                    spec, attempt=attempt, timeout=max(0.001, until - loop.time())
                )
            finally:
                self._creation_slots.release()
        finally:
            self.plan.creating -= 1
            self._fill()
        entry = self.plan.entries.get(spec_key(spec))
        if entry is not None and entry.creation_failed:
            entry.creation_failed = False
            self._fill()
        return sandbox

    @staticmethod
    def _assign(sandbox: Sandbox, attempt: str) -> Sandbox:
        if isinstance(sandbox, SupportsAdoption):
            sandbox.adopt(attempt)
        return sandbox

    async def close(self) -> None:
        self._closed = True
        self.plan.expect([])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._ready.clear()
        await self.provider.close()  # closes every sandbox that is still open

    # ---- prewarming

    def _fill(self) -> None:
        if self._closed:
            return
        for entry, count in self.plan.surplus():
            for _ in range(count):
                entry.ready -= 1
                self._spawn(_close_sandbox(self._ready[spec_key(entry.spec)].pop()))
        while (missing := self.plan.next_to_start()) is not None:
            missing.starting += 1
            self._spawn(self._start(missing))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, context=detached_context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, entry: WarmSandboxes) -> None:
        sandbox: Sandbox | None = None
        try:
            sandbox = await self.provider.create(entry.spec, attempt=POOL_ATTEMPT, timeout=START_SECONDS)
        except (RookeryError, OSError) as error:
            # A request for this spec gets the error in its own attempt.
            log.debug("a warm sandbox could not be created: %s", error)
            entry.creation_failed = True
        finally:
            entry.starting -= 1
            self._on_started(entry, sandbox)

    def _on_started(self, entry: WarmSandboxes, sandbox: Sandbox | None) -> None:
        """Pass a started sandbox to a request that waits for it, or keep it as a warm one.

        `sandbox` is None if the start failed.
        """
        waiting = self._waiting.get(spec_key(entry.spec))
        if waiting and (sandbox is not None or entry.claimed > entry.starting):
            entry.claimed -= 1
            waiting.popleft().set_result(sandbox)
        elif sandbox is not None and not self._closed:  # otherwise the provider closes it
            entry.ready += 1
            self._ready.setdefault(spec_key(entry.spec), deque()).append(sandbox)
        self._fill()

    async def _responds(self, sandbox: Sandbox) -> bool:
        """Return whether a sandbox can run a command within `RESPONSE_SECONDS`; close the sandbox if it cannot."""
        try:
            async with asyncio.timeout(2 * RESPONSE_SECONDS):
                if (await sandbox.exec(Command(argv=("true",), wall=RESPONSE_SECONDS))).ok:
                    return True
        except (SandboxError, TimeoutError) as error:
            log.debug("a warm sandbox does not respond: %s", error)
        except BaseException:
            self._spawn(_close_sandbox(sandbox))
            raise
        self._spawn(_close_sandbox(sandbox))
        return False


async def _close_sandbox(sandbox: Sandbox) -> None:
    try:
        await sandbox.close()
    except (RookeryError, OSError) as error:
        log.warning("a warm sandbox could not be closed: %s", error)
