"""Pause the model calls of all processes of a run.

Runs in the supervisor. Several holders (requesters, identified by a name) can each request pauses.

Guarantees:
- `pause` returns when every ready process has confirmed that its calls stopped, and raises if one cannot stop;
- a process that starts during a pause starts paused; a process that dies during it is not waited for;
- pauses are counted per holder: calls continue when the last pause ends, the strongest requested mode applies, and
  no holder can end another holder's pause;
- a pause that nobody ends by its deadline ends then, with a `pause.overdue` event; consumers of groups see no
  error;
- a policy version that was set reaches every process, also those that start later. Until one is set, each upstream
  keeps its own version.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from rookery.core import RookeryError
from rookery.upstreams.pause.upstream import STRENGTH
from rookery.upstreams.protocol import PauseMode

SLACK_SECONDS = 30.0
"""Seconds after the timeout of a pause before a process that has not confirmed the pause causes an error."""


class PauseTargets(Protocol):
    """Interface to the processes of a run that make model calls."""

    @property
    def stopping(self) -> bool:
        """True if the run is ending. Its processes then no longer confirm that they have paused, and the
        coordinator must not wait for them."""
        ...

    def names(self) -> Iterable[str]:
        """Return the names of the processes that have to confirm a pause."""
        ...

    def send_pause(self, number: int, mode: PauseMode, timeout: float) -> None:
        """Ask every process to pause. `PauseCoordinator.confirm` must be called for each process when it has
        paused.

        `number` identifies the pause in the confirmation.
        """
        ...

    def send_resume(self, version: int | None) -> None:
        """Ask every process to resume, and to record `version` for tokens sampled from then on unless it is
        None."""
        ...

    def resumed(self) -> None:
        """Called when the last pause has ended and rollouts may be admitted again."""
        ...

    def overdue(self, detail: str) -> None:
        """Called if a pause ended at its deadline without a resume. `detail` is a message for the user."""
        ...


class PauseCoordinator:
    """Count the pauses that holders request for one run, and apply them to the processes of the run."""

    def __init__(self, targets: PauseTargets) -> None:
        self.mode: PauseMode | None = None
        self.policy_version: int | None = None
        """The policy version that was set last; None if none was set."""
        self.number = 0
        """A number that increases when a pause begins or ends. It tells which pause a confirmation belongs to."""
        self._targets = targets
        self._loop = asyncio.get_running_loop()
        self._holders: Counter[str] = Counter()
        self._confirmed: dict[str, str] = {}
        """The processes that replied, by name, each with the reason why it could not pause; empty if it paused."""
        self._changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def version(self) -> int:
        """The policy version that was set last, or 0 if none was set."""
        return self.policy_version or 0

    @property
    def has_deadline(self) -> bool:
        """True if the current pause has a deadline at which it ends without a resume."""
        return self._deadline is not None

    async def pause(self, mode: PauseMode, *, timeout: float, deadline: float | None, holder: str = "") -> None:
        """Add a pause for `holder`, and wait until every process has confirmed that its calls have stopped.

        `timeout` bounds the time to stop the calls. `deadline` is the number of seconds after which the pause ends
        without a resume; None for never. Raises `RookeryError`, and removes the pause, if a process cannot stop.
        """
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
                f"the pause failed: model calls of {missing} were still in flight after {seconds:g} seconds"
            ) from error

    def confirm(self, name: str, number: int, problem: str = "") -> None:
        """Record that process `name` has stopped its calls for pause `number`; if it could not, `problem` says
        why."""
        if number == self.number:
            self._confirmed[name] = problem
            self._changed.set()

    def unconfirmed(self, number: int) -> set[str]:
        """Return the processes that have not confirmed pause `number`; none if that pause has ended."""
        if number != self.number or self.mode is None:
            return set()
        return {name for name in self._targets.names() if name not in self._confirmed}

    def recheck(self) -> None:
        """Make waiting `pause` calls check again, because a process died or the run is ending."""
        self._changed.set()

    async def resume(self, version: int | None = None, holder: str = "") -> bool:
        """Remove one pause of `holder`. Return False if it had none. Calls continue when no holder has a pause.

        `version` becomes the policy version, unless it is None, also if the holder had no pause.
        """
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
