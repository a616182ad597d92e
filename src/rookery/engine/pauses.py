"""The pause of a run: every runner held back, whoever asks and however often.

Promises:
- `pause` returns when every runner that is ready has said that its calls are held back, and raises what keeps one
  of them from it;
- a runner born during a pause starts paused; one that dies during it is not waited for;
- holders are counted: work goes on with the end of the last pause; the strongest mode that was asked for holds;
  nobody ends the pause of another;
- a pause that nobody ends is ended at its deadline, with an event that says so: it never ends a consumer;
- a version reaches every runner, also those born later; until one was named, it is the upstream's own.
"""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.engine import wire
from rookery.engine.doors import RunGateway
from rookery.engine.links import Link
from rookery.gateway.client import GatewayAddress
from rookery.upstreams.protocol import PauseMode

if TYPE_CHECKING:
    from rookery.engine.fleet import Fleet

STRENGTH: dict[PauseMode, int] = {"keep": 0, "drain": 1, "abort": 2}
GATEWAY = "the gateway"
SLACK = 30.0
"""Seconds that a runner may take longer than it was given, before it is an error."""


class Pauses:
    """Of one fleet."""

    def __init__(self, fleet: "Fleet") -> None:
        self.mode: PauseMode | None = None
        self.named: int | None = None
        """The policy's version, once one was said."""
        self.number = 0
        """Of the pause, or of the time between two."""
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._holders: Counter[str] = Counter()
        self._heard: dict[str, str] = {}
        """By runner: what kept it from holding its calls back; empty where nothing did."""
        self._changed = asyncio.Event()
        self._overdue: asyncio.TimerHandle | None = None

    @property
    def version(self) -> int:
        return self.named or 0

    @property
    def gateway(self) -> GatewayAddress | None:
        """For runners that are born."""
        return self._fleet.gateway.address if self._fleet.gateway is not None else None

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = "") -> None:
        """One more pause of this holder's."""
        self._holders[holder] += 1
        try:
            if self.mode is None or STRENGTH[mode] > STRENGTH[self.mode]:
                self._begin(mode, timeout, deadline)
            await self._everywhere(self.number, timeout + SLACK)
        except BaseException:
            self._release(holder)
            raise

    def _begin(self, mode: PauseMode, timeout: float, deadline: float | None) -> None:
        self.mode = mode
        self.number += 1
        self._heard.clear()
        if deadline is not None:
            if self._overdue is not None:
                self._overdue.cancel()
            self._overdue = self._loop.call_later(deadline, self._late, deadline)
        for link in self._fleet.links:
            link.send(wire.Pause(self.number, mode, timeout))
        if self._fleet.gateway is not None:
            self._fleet.adopt(self._at_the_doors(self._fleet.gateway, mode, timeout, self.number))

    async def _at_the_doors(self, gateway: RunGateway, mode: PauseMode, timeout: float, number: int) -> None:
        trouble = ""
        try:
            await gateway.pause(mode, timeout)
        except RookeryError as error:
            trouble = describe(error)
        self._hear(GATEWAY, number, trouble)

    async def _everywhere(self, number: int, seconds: float) -> None:
        fleet = self._fleet
        try:
            async with asyncio.timeout(seconds):
                while self.number == number and self.mode is not None and not fleet.stopping:
                    for name, trouble in self._heard.items():
                        if trouble:
                            raise RookeryError(f"model calls cannot be held back in {name}: {trouble}")
                    doors = fleet.gateway is None or GATEWAY in self._heard
                    if doors and all(link.name in self._heard or not link.ready for link in fleet.links):
                        return
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            busy = ", ".join(link.name for link in fleet.links if link.name not in self._heard)
            raise RookeryError(f"model calls were still under way after {seconds:g} seconds in {busy}") from error

    def heard(self, link: Link, number: int, trouble: str = "") -> None:
        """A runner has held its calls back, or could not."""
        self._hear(link.name, number, trouble)

    def _hear(self, who: str, number: int, trouble: str) -> None:
        if number == self.number:
            self._heard[who] = trouble
            self._changed.set()

    def changed(self) -> None:
        """A runner died, or the run ends: who waits looks again."""
        self._changed.set()

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """One pause less; whether the holder had one. A version is the policy's from now on, in any case."""
        if version is not None:
            self.named = version
            if self.mode is None:
                self._tell()
        had = self._holders[holder] > 0
        if had:
            self._release(holder)
        return had

    def _release(self, holder: str) -> None:
        self._holders[holder] -= self._holders[holder] > 0
        if self._holders.total() == 0:
            self._holders.clear()
            self._end()

    def _end(self) -> None:
        if self.mode is None:
            return
        self.mode = None
        self.number += 1
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        self._changed.set()
        self._tell()
        self._fleet.owner.pump()

    def _tell(self) -> None:
        for link in self._fleet.links:
            link.send(wire.Resume(self.named))
        if self._fleet.gateway is not None:
            self._fleet.adopt(self._fleet.gateway.resume(self.named, self._fleet.owner.event))

    def _late(self, deadline: float) -> None:
        self._overdue = None
        said = f"version {self.named}" if self.named is not None else "the version before"
        detail = f"nobody resumed within {deadline:g} seconds: work goes on with {said}"
        self._fleet.owner.event("pause.overdue", {"detail": detail})
        self._holders.clear()
        self._end()
