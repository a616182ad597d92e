"""Wait for model servers that went away. Runs in the supervisor.

- An attempt that failed at a model server is not charged if a check finds that the server is gone.
- During an outage nothing is admitted. The wait ends when the server is back.
- After `limit` seconds the run stops.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from rookery.core import Failed, Outcome, UpstreamError
from rookery.upstreams import open_upstream
from rookery.upstreams.http_upstream import HttpUpstream
from rookery.upstreams.protocol import UpstreamConfig

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
"""Causes of failures that may mean that the server is gone."""
CHECK_SECONDS: Final = 10.0
FIRST_DELAY: Final = 0.25
MAX_DELAY: Final = 5.0
"""Back-off between two checks: doubles from `FIRST_DELAY` to `MAX_DELAY` seconds."""


async def find_outage(upstreams: Mapping[str, UpstreamConfig], *, sample: bool = False) -> str:
    """Return why a model server cannot be used now, or an empty string if every role has a working server.

    `sample`: a server must also sample a token, because a hung server may still pass checks.
    """
    for role, config in upstreams.items():
        upstream = open_upstream(config)
        try:
            await upstream.check(timeout=CHECK_SECONDS)
            if sample and isinstance(upstream, HttpUpstream):
                working = [await upstream.hangs.works_again(replica) for replica in upstream.replicas]
                if not any(working):
                    return f"the {role}'s model server hangs"
        except UpstreamError as error:
            if error.code in GONE:
                return str(error)
        finally:
            await upstream.close()
    return ""


class OutageMonitor:
    """Finds out whether attempts failed because of an outage, and waits for its end."""

    def __init__(
        self,
        upstreams: Mapping[str, UpstreamConfig],
        limit: float,
        *,
        on_wait: Callable[[str], None],
        on_recovery: Callable[[float], None],
        on_expiry: Callable[[str], None],
    ) -> None:
        """Call `on_wait` when a wait starts, `on_recovery` when the server is back, `on_expiry` at the limit."""
        self._upstreams = upstreams
        self._limit = limit
        self._on_wait = on_wait
        self._on_recovery = on_recovery
        self._on_expiry = on_expiry
        self._pending: list[Callable[[bool], None]] = []
        self._sample = False
        self._task: asyncio.Task[None] | None = None
        self._since: float | None = None

    @property
    def waited(self) -> float | None:
        """Seconds since the wait started; None without an outage."""
        return None if self._since is None else asyncio.get_running_loop().time() - self._since

    def may_explain(self, outcome: Outcome) -> bool:
        """Return True if an attempt with this outcome may have failed because a server went away."""
        return self._limit > 0 and isinstance(outcome, Failed) and outcome.cause in GONE

    def decide_later(self, outcome: Outcome, decide: Callable[[bool], None]) -> None:
        """Call `decide(True)` if there is an outage, else `decide(False)`, as soon as that is known."""
        self._sample = self._sample or (isinstance(outcome, Failed) and outcome.cause == "upstream.hung")
        if self._since is not None:
            decide(True)
            return
        self._pending.append(decide)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while self._pending:
            problem = await find_outage(self._upstreams, sample=self._sample)
            pending, self._pending = self._pending, []
            if problem:
                self._since = asyncio.get_running_loop().time()
                self._on_wait(problem)
            for decide in pending:
                decide(bool(problem))
            if problem:
                await self._wait(problem)
        self._sample = False

    async def _wait(self, problem: str) -> None:
        delay = FIRST_DELAY
        while problem:
            left = self._limit - (self.waited or 0.0)
            if left <= 0:
                self._on_expiry(problem)
                return  # `waited` stays set: the run stops
            await asyncio.sleep(min(delay, left))
            delay = min(MAX_DELAY, 2 * delay)
            problem = await find_outage(self._upstreams, sample=self._sample)
        waited, self._since = self.waited or 0.0, None
        self._on_recovery(waited)

    def close(self) -> None:
        """Drop pending decisions: their attempts run again after a resume."""
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
