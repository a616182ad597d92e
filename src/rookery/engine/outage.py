"""Wait for model servers that went away, in the supervisor.

Promises:
- an attempt that failed at a model server is not charged if a check finds that server gone, and is charged as
  usual if the server answers;
- while a server is waited for, nothing is admitted; a server that comes back ends the wait;
- a wait ends after `limit` seconds at the latest, and then stops the run.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from rookery.core import Failed, Outcome, UpstreamError
from rookery.upstreams import open_upstream
from rookery.upstreams.protocol import UpstreamConfig
from rookery.upstreams.served import HttpUpstream

GONE: Final = frozenset(
    {
        "upstream.cut",
        "upstream.error",
        "upstream.hung",
        "upstream.overloaded",
        "upstream.timeout",
        "upstream.unreachable",
    }
)
"""Causes of failures that a server which goes away brings about."""
CHECK_SECONDS: Final = 10.0
FIRST_PAUSE: Final = 0.25
LONGEST_PAUSE: Final = 5.0
"""Between two checks; the pauses double."""


async def find_outage(upstreams: Mapping[str, UpstreamConfig], *, sample: bool = False) -> str:
    """Why a model server cannot be used now; empty if all roles have one that can.

    `sample`: a server must also give a token, since one that hangs may still answer checks."""
    for role, config in upstreams.items():
        upstream = open_upstream(config)
        try:
            await upstream.check(timeout=CHECK_SECONDS)
            if sample and isinstance(upstream, HttpUpstream):
                works = [await upstream.gives_tokens(replica) for replica in upstream.replicas]
                if not any(works):
                    return f"the {role}'s model server hangs"
        except UpstreamError as error:
            if error.code in GONE:
                return str(error)
        finally:
            await upstream.close()
    return ""


class OutageWatch:
    """Decides whether failed attempts are due to an outage, and waits for its end. Used in one event loop."""

    def __init__(
        self,
        upstreams: Mapping[str, UpstreamConfig],
        limit: float,
        *,
        waiting: Callable[[str], None],
        back: Callable[[float], None],
        expired: Callable[[str], None],
    ) -> None:
        """`waiting`, `back` and `expired` are called when a wait begins, ends well, and ends at its limit."""
        self._upstreams = upstreams
        self._limit = limit
        self._on_waiting = waiting
        self._on_back = back
        self._on_expired = expired
        self._pending: list[Callable[[bool], None]] = []
        self._sample = False
        self._task: asyncio.Task[None] | None = None
        self._since: float | None = None

    @property
    def waited(self) -> float | None:
        """Seconds since the wait began; None where no server is waited for."""
        return None if self._since is None else asyncio.get_running_loop().time() - self._since

    def concerns(self, outcome: Outcome) -> bool:
        """Whether an attempt that ended like this may have failed because a server went away."""
        return self._limit > 0 and isinstance(outcome, Failed) and outcome.cause in GONE

    def decide_later(self, outcome: Outcome, decide: Callable[[bool], None]) -> None:
        """Call `decide` with whether there is an outage, as soon as that is known."""
        self._sample = self._sample or (isinstance(outcome, Failed) and outcome.cause == "upstream.hung")
        if self._since is not None:
            decide(True)
            return
        self._pending.append(decide)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while self._pending:
            trouble = await find_outage(self._upstreams, sample=self._sample)
            pending, self._pending = self._pending, []
            if trouble:
                self._since = asyncio.get_running_loop().time()
                self._on_waiting(trouble)
            for decide in pending:
                decide(bool(trouble))
            if trouble:
                await self._wait(trouble)
        self._sample = False

    async def _wait(self, trouble: str) -> None:
        pause = FIRST_PAUSE
        while trouble:
            left = self._limit - (self.waited or 0.0)
            if left <= 0:
                self._on_expired(trouble)
                return  # it still counts as waiting: the run stops
            await asyncio.sleep(min(pause, left))
            pause = min(LONGEST_PAUSE, 2 * pause)
            trouble = await find_outage(self._upstreams, sample=self._sample)
        waited, self._since = self.waited or 0.0, None
        self._on_back(waited)

    def close(self) -> None:
        """Decide nothing more: the attempts that were pending run again after a resume."""
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
