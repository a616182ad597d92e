"""Pause the model calls of all processes of a run, on behalf of several holders.

Runs in the supervisor.

Guarantees:
- `pause` returns when every ready process has confirmed that its calls stopped, and raises if one cannot stop;
- a process that starts during a pause starts paused; a process that dies during it is not waited for;
- pauses are counted per holder: calls continue when the last pause ends, the strongest requested mode applies, and
  no holder can end another holder's pause;
- a pause that nobody ends is over at its deadline, with a `pause.overdue` event; consumers of groups see no error;
- a version reaches every process, also those that start later; until one is set, the upstream's own applies.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from rookery.core import RookeryError
from rookery.upstreams.pause.upstream import STRENGTH
from rookery.upstreams.protocol import PauseMode

SLACK_SECONDS = 30.0
"""Time on top of a pause's timeout before a process that has not confirmed is an error."""


class PauseTargets(Protocol):
    """The processes of a run that make model calls."""

    @property
    def stopping(self) -> bool:
        """True if the run ends; nobody confirms a pause any more."""
        ...

    def names(self) -> Iterable[str]:
        """Return the names of the processes that have to confirm a pause."""
        ...

    def send_pause(self, number: int, mode: PauseMode, timeout: float) -> None:
        """Ask every process to pause. Each confirms by a call of `PauseCoordinator.confirm`."""
        ...

    def send_resume(self, version: int | None) -> None:
        """Ask every process to resume with `version`."""
        ...

    def resumed(self) -> None:
        """Called after the end of a pause: rollouts may be admitted again."""
        ...

    def overdue(self, detail: str) -> None:
        """Called if a pause ended at its deadline."""
        ...


class PauseCoordinator:
    """Count the pauses of one run and apply them to its processes."""

    def __init__(self, targets: PauseTargets) -> None:
        self.mode: PauseMode | None = None
        self.policy_version: int | None = None
        """The policy's version; None until one was set."""
        self.number = 0
        """Number of the current pause, or of the interval between two pauses."""
        self._targets = targets
        self._loop = asyncio.get_running_loop()
        self._holders: Counter[str] = Counter()
        self._confirmed: dict[str, str] = {}
        """For each process that replied: why it could not pause; empty if it could."""
        self._changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def version(self) -> int:
        """The policy's version, or 0."""
        return self.policy_version or 0

    @property
    def has_deadline(self) -> bool:
        """True if the current pause ends without a resume."""
        return self._deadline is not None

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = "") -> None:
        """Add a pause for `holder`, and wait until every process has confirmed it."""
        self._holders[holder] += 1
        try:
            if self.mode is None or STRENGTH[mode] > STRENGTH[self.mode]:
                self._start(mode, timeout, deadline)
            await self._wait_for_confirmations(self.number, timeout + SLACK_SECONDS)
        except BaseException:
            self._release(holder)
            raise

    def _start(self, mode: PauseMode, timeout: float, deadline: float | None) -> None:
        self.mode = mode
        self.number += 1
        self._confirmed.clear()
        if deadline is not None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._loop.call_later(deadline, self._expire, deadline)
        self._targets.send_pause(self.number, mode, timeout)

    async def _wait_for_confirmations(self, number: int, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                while self.number == number and self.mode is not None and not self._targets.stopping:
                    for name, problem in self._confirmed.items():
                        if problem:
                            raise RookeryError(f"cannot pause the model calls of {name}: {problem}")
                    if self._confirmed.keys() >= set(self._targets.names()):
                        return
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            missing = ", ".join(name for name in self._targets.names() if name not in self._confirmed)
            raise RookeryError(
                f"model calls were still in flight after {seconds:g} seconds in {missing}"
            ) from error

    def confirm(self, name: str, number: int, problem: str = "") -> None:
        """Note that a process has stopped its calls for pause `number`, or why it could not."""
        if number == self.number:
            self._confirmed[name] = problem
            self._changed.set()

    def recheck(self) -> None:
        """Let waiting pauses look again: a process died, or the run ends."""
        self._changed.set()

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """Remove a pause of `holder`, and return whether it had one. Sets the policy's version in any case."""
        if version is not None:
            self.policy_version = version
            if self.mode is None:
                self._targets.send_resume(version)
        had_pause = self._holders[holder] > 0
        if had_pause:
            self._release(holder)
        return had_pause

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
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._changed.set()
        self._targets.send_resume(self.policy_version)
        self._targets.resumed()

    def _expire(self, deadline: float) -> None:
        self._deadline = None
        version = "the old version" if self.policy_version is None else f"version {self.policy_version}"
        self._targets.overdue(f"nobody resumed within {deadline:g} seconds: model calls continue with {version}")
        self._holders.clear()
        self._end()
