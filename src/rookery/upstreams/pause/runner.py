"""Pause the model calls of all model roles in one runner process.

Runs in runners, and in the supervisor's process if it executes rollouts itself. The supervisor's
`PauseCoordinator` requests the pauses and enforces their deadlines.

Guarantees:
- the clocks of attempts stop with the request of a pause, not with its confirmation;
- a pause is confirmed when the upstreams of all roles have paused or failed to, unless another pause or a resume
  was requested meanwhile;
- a policy version that arrives while no pause is active holds at once, for the attempt that starts next.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from rookery.core import RookeryError
from rookery.core.errors import describe
from rookery.upstreams.pause.upstream import DeadlineClocks, PausableUpstream
from rookery.upstreams.protocol import PauseMode

NO_DEADLINE: Final = 10 * 365 * 86_400.0
"""A time in seconds that never passes. The supervisor enforces the deadline of a pause, so model calls that wait
in this process for the end of the pause must not fail before it."""


class RunnerPause:
    """Pause and resume the upstreams of one runner process, and the clocks of its attempts."""

    def __init__(
        self,
        upstreams: Mapping[str, PausableUpstream],
        clocks: DeadlineClocks,
        *,
        paused: bool,
        run_in_background: Callable[[Coroutine[Any, Any, None]], None],
        confirm: Callable[[int, str], None],
    ) -> None:
        """`upstreams` are those of the model roles, by name. `paused` is True if the process starts paused.

        `confirm` is called with the number of a pause when the upstreams have paused, and with the reason if one
        could not pause, else an empty string.
        """
        self.paused = paused
        self._upstreams = upstreams
        self._clocks = clocks
        self._run_in_background = run_in_background
        self._confirm = confirm
        self._number = 0

    def pause(self, number: int, mode: PauseMode, timeout: float) -> None:
        """Stop the clocks now, and model calls in the background."""
        self._number = number
        if not self.paused:
            self.paused = True
            self._clocks.stop_clocks()
        self._run_in_background(self._pause_upstreams(number, mode, timeout))

    async def _pause_upstreams(self, number: int, mode: PauseMode, timeout: float) -> None:
        problem = ""
        try:
            async with asyncio.TaskGroup() as group:
                for upstream in self._upstreams.values():
                    group.create_task(upstream.pause(mode, timeout=timeout, deadline=NO_DEADLINE))
        except* RookeryError as errors:
            problem = describe(errors.exceptions[0])
        if self._number == number:
            self._confirm(number, problem)

    def resume(self, version: int | None) -> None:
        """Resume model calls and clocks. `version` is the new policy version, or None if it did not change."""
        self._number = 0
        policy = self._upstreams["policy"]
        if version is not None and not policy.paused:  # now: the next message may already start an attempt
            policy.version = version
        self._run_in_background(self._resume_upstreams(version))
        if self.paused:
            self.paused = False
            self._clocks.restart_clocks()

    async def _resume_upstreams(self, version: int | None) -> None:
        async with asyncio.TaskGroup() as group:
            for name, upstream in self._upstreams.items():
                group.create_task(upstream.resume(version if name == "policy" else None))
