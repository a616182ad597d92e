"""The runners of a run, together: started, watched, paused, replaced, stopped.

Promises:
- a blocked loop is seen, shown with its stack and, past its limit, ended; so is a runner that stopped talking;
- a dead runner is replaced, unless runners cannot start at all: then the run stops and says why;
- `paused` returns only when no runner has a model call under way; a runner born during a pause starts paused.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from rookery.core import JournalError, RookeryError, UsageError
from rookery.core.errors import describe
from rookery.engine import wire
from rookery.engine.conviction import Death
from rookery.engine.doors import RunGateway
from rookery.engine.links import Link, LocalLink, ProcessLink
from rookery.engine.pauses import Pauses
from rookery.environments import Environment

READY_SECONDS = 120.0
IDLE_DEATHS = 3
"""Runners that die one after the other with nothing under way: another one would not live longer."""
TICK = 1.0


class Stopped(RookeryError):  # noqa: N818  (an end, in words)
    """The run was stopped under way: the breaker, the disk, runners that cannot start."""


class OwnBug(Stopped):
    """Rookery's own code failed, in the supervisor: the run stopped rather than leave anyone waiting."""


class Owner(Protocol):
    """Who the fleet works for: the supervisor."""

    def pump(self) -> None: ...

    def stop(self, error: RookeryError) -> None: ...

    def event(self, kind: str, payload: dict[str, Any]) -> None: ...

    def on_done(self, link: Link, done: wire.Done) -> None: ...

    def on_runner_death(self, link: Link, death: Death, detail: str) -> None: ...

    def on_tick(self, late: float) -> None: ...


class Fleet:
    """Makes and keeps `runners` links; 0 is one link in this process."""

    def __init__(
        self,
        owner: Owner,
        settings: wire.RunSettings,
        environment: Environment,
        *,
        runners: int,
        capacity: int,
        block_limit: float,
        gateway: RunGateway | None = None,
    ) -> None:
        self.owner = owner
        self.settings = settings
        self.environment = environment
        self.runners = runners
        self.capacity = capacity
        self.block_limit = block_limit
        self.links: list[Link] = []
        self.deaths = 0
        self._named = 0
        self._idle_deaths = 0
        self._stopping = False
        self._noted: set[str] = set()
        """Kinds of events that are recorded once per run and were received."""
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick = self._loop.time()
        self.gateway = gateway
        self.pauses = Pauses(self)
        self._work: set[asyncio.Task[None]] = set()

    # ---- life

    async def start(self) -> None:
        """Returns when a runner is ready, or when the owner was stopped."""
        for _ in range(max(1, self.runners)):
            await self._spawn()
        self._tick()
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._ready.wait()
        except TimeoutError as error:
            raise Stopped(f"no runner was ready after {READY_SECONDS:g} seconds; see logs/ in the run") from error

    async def _spawn(self, *, spare: bool = False) -> None:
        self._named += 1
        if self.runners == 0:
            local = LocalLink(f"local-{self._named}", self, self.settings, self.environment, self.pauses.gateway)
            self.links.append(local)
            local.open()
            return
        link = ProcessLink(f"runner-{self._named}", self, self.settings)
        link.spare = spare
        self.links.append(link)
        try:
            await link.open(self.pauses)
        except OSError as error:
            self.links.remove(link)
            self.owner.stop(Stopped(f"a runner process cannot be started: {describe(error)}"))

    async def close(self) -> None:
        """Stops every runner; each ends its attempts first."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(link.stop() for link in list(self.links)))

    def wake(self) -> None:
        """The owner stopped: nobody need wait any more."""
        self._ready.set()
        self.pauses.changed()

    def adopt(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[None]") -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.owner.stop(Stopped(f"a runner cannot be started or stopped: {describe(error)}"))

    # ---- choosing

    @property
    def under_way(self) -> int:
        """Attempts in all runners together."""
        return sum(len(link.running) for link in self.links)

    def free(self) -> Link | None:
        """The shared runner with the most room."""
        best: Link | None = None
        for link in self.links:
            if not link.shared or len(link.running) >= self.capacity:
                continue
            if best is None or len(link.running) < len(best.running):
                best = link
        return best

    def empty(self) -> list[Link]:
        """Runners that can take a suspect alone."""
        return [link for link in self.links if link.ready and not link.running and not link.retiring]

    def need_spares(self, waiting: int) -> None:
        """Makes runners for suspects, at most as many again as there are runners; none waiting: lets them go."""
        if waiting == 0:
            for link in self.links:
                if link.spare and link.ready and not link.running and not link.retiring:
                    self.retire(link)
            return
        spares = sum(link.spare and not link.retiring for link in self.links)
        for _ in range(min(waiting, max(1, self.runners)) - spares):
            self.adopt(self._spawn(spare=True))

    def retire(self, link: Link) -> None:
        """It gets nothing more; once empty it is stopped."""
        link.retiring = True
        if not link.running and not link.stopping and isinstance(link, ProcessLink):
            link.stopping = True
            self.adopt(link.stop())

    def replace(self, link: Link) -> None:
        """Something in it cannot be stopped: another takes its place, and it goes when its others are done."""
        if link.retiring or not isinstance(link, ProcessLink):
            return
        self.owner.event("runner.tainted", {"runner": link.name})
        spare = link.spare
        self.retire(link)
        if not spare:
            self.adopt(self._spawn())

    # ---- what runners say

    def on_message(self, link: Link, message: wire.FromRunner) -> None:
        match message:
            case wire.Done():
                self._idle_deaths = 0
                self.owner.on_done(link, message)
                if link.retiring:
                    self.retire(link)
            case wire.Note(wire.NOT_ISOLATED | wire.NO_TOKENS as kind, _) if kind in self._noted:
                pass
            case wire.Note(kind, payload):
                if kind in (wire.NOT_ISOLATED, wire.NO_TOKENS):
                    self._noted.add(kind)
                self.owner.event(kind, {"runner": link.name, **payload})
            case wire.Image():
                self._on_image(link, message)
            case wire.Ready():
                link.ready = True
                if link.born:
                    self.pauses.heard(link, link.born)
                self._ready.set()
                self.owner.pump()
            case wire.Unfit(detail, _, disk):
                self.owner.stop(JournalError(detail) if disk else UsageError(detail))
            case wire.Paused(number, trouble):
                self.pauses.heard(link, number, trouble)
            case wire.Blocked(seconds, attempt, stack):
                self._on_blocked(link, seconds, attempt, stack)

    def on_death(self, link: Link, death: Death, detail: str) -> None:
        if link in self.links:
            self.links.remove(link)
        self.pauses.changed()
        if self._stopping or (link.retiring and not link.running):
            return
        self.deaths += 1
        if link.block_stack:
            detail = f"{detail}\nthe loop stood still here:\n{link.block_stack}"
        self.owner.event("runner.died", {"runner": link.name, "death": death, "detail": detail})
        if not link.running:
            self._idle_deaths += 1
            if self._idle_deaths >= IDLE_DEATHS:
                self.owner.stop(Stopped(f"runners keep dying without a rollout in them: {detail}"))
                return
        self.owner.on_runner_death(link, death, detail)
        if not link.spare and not link.retiring:
            self.adopt(self._spawn())

    def _on_image(self, link: Link, image: wire.Image) -> None:
        """Kept for who looks. Beginning and end are events; what is between is not worth a line of a journal."""
        known = link.images.pop(image.image, None)
        if image.step not in ("ready", "failed"):
            link.images[image.image] = image
            begun = image.step == "fetching" and (known is None or known.step != "fetching")
            if begun:
                self.owner.event(
                    "image.fetching", {"runner": link.name, "image": image.image, "bytes": image.total}
                )
        elif known is not None:
            self.owner.event(f"image.{image.step}", {"runner": link.name, "image": image.image})

    def _on_blocked(self, link: Link, seconds: float, attempt: str | None, stack: str) -> None:
        first = not link.block_stack
        link.blamed, link.block_stack = attempt, stack
        if first:
            payload = {"runner": link.name, "attempt": attempt, "seconds": round(seconds, 1), "stack": stack}
            self.owner.event("loop.blocked", payload)
        if seconds >= self.block_limit:
            link.kill("blocked")

    def _tick(self) -> None:
        now = self._loop.time()
        late = max(0.0, now - self._last_tick - TICK)
        self._last_tick = now
        for link in list(self.links):
            if not isinstance(link, ProcessLink) or not link.ready:
                continue
            link.last_heard += late  # we slept ourselves: their silence proves nothing
            if link.block_stack and now - link.last_heard < 2 * TICK:
                link.blamed, link.block_stack = None, ""
            if now - link.last_heard > self.block_limit + 5 * TICK:
                link.kill("blocked")
        self.owner.on_tick(late)
        if not self._stopping:
            self._timer = self._loop.call_later(TICK, self._tick)

    @property
    def paused(self) -> bool:
        return self.pauses.mode is not None

    @property
    def stopping(self) -> bool:
        return self._stopping
