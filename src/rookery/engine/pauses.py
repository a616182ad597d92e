"""The pause of a run: every runner held back, whoever asks and however often.

Promises:
- `pause` returns when every runner that is ready has said that its calls are held back;
- a runner born during a pause starts paused; one that dies during it is not waited for;
- holders are counted: work goes on with the end of the last pause; the strongest mode that was asked for holds;
- a pause that nobody ends is ended at its deadline, with an event that says so: it never ends a consumer.
"""

import asyncio
from typing import TYPE_CHECKING

from rookery.core import RookeryError
from rookery.engine import wire
from rookery.engine.links import Link
from rookery.upstreams.protocol import PauseMode

if TYPE_CHECKING:
    from rookery.engine.fleet import Fleet

STRENGTH: dict[PauseMode, int] = {"keep": 0, "drain": 1, "abort": 2}
SLACK = 30.0
"""Seconds that a runner may take longer than it was given, before it is an error."""


class Pauses:
    """Of one fleet."""

    def __init__(self, fleet: "Fleet") -> None:
        self.mode: PauseMode | None = None
        self.version = 0
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._holders = 0
        self._heard: set[str] = set()
        self._changed = asyncio.Event()
        self._overdue: asyncio.TimerHandle | None = None

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None) -> None:
        """One more holder."""
        self._holders += 1
        try:
            if self.mode is None or STRENGTH[mode] > STRENGTH[self.mode]:
                self._begin(mode, timeout, deadline)
            await self._everywhere(self._number, timeout + SLACK)
        except BaseException:
            self._release()
            raise

    def _begin(self, mode: PauseMode, timeout: float, deadline: float | None) -> None:
        self.mode = mode
        self._number += 1
        self._heard.clear()
        if deadline is not None:
            if self._overdue is not None:
                self._overdue.cancel()
            self._overdue = self._loop.call_later(deadline, self._late, deadline)
        for link in self._fleet.links:
            link.send(wire.Pause(self._number, mode, timeout, deadline))

    async def _everywhere(self, number: int, seconds: float) -> None:
        fleet = self._fleet
        try:
            async with asyncio.timeout(seconds):
                while self._number == number and self.mode is not None and not fleet.stopping:
                    if all(link.name in self._heard or not link.ready for link in fleet.links):
                        return
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            busy = ", ".join(link.name for link in fleet.links if link.name not in self._heard)
            raise RookeryError(f"model calls were still under way after {seconds:g} seconds in {busy}") from error

    def heard(self, link: Link, number: int) -> None:
        """A runner has held its calls back."""
        if number == self._number:
            self._heard.add(link.name)
            self._changed.set()

    def changed(self) -> None:
        """A runner died, or the run ends: who waits looks again."""
        self._changed.set()

    async def resume(self, version: int | None = None) -> None:
        """One holder less. A version is the policy's from now on. Without a holder, nothing else happens."""
        if version is not None:
            self.version = version
        self._release()

    def _release(self) -> None:
        self._holders = max(0, self._holders - 1)
        if self._holders == 0:
            self._end()

    def _end(self) -> None:
        if self.mode is None:
            return
        self.mode = None
        self._number += 1
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None
        self._changed.set()
        for link in self._fleet.links:
            link.send(wire.Resume(self.version))
        self._fleet.owner.pump()

    def _late(self, deadline: float) -> None:
        self._overdue = None
        detail = f"nobody resumed within {deadline:g} seconds: work goes on with version {self.version}"
        self._fleet.owner.event("pause.overdue", {"detail": detail})
        self._holders = 0
        self._end()
