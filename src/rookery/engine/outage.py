"""Wait for upstreams that have become unavailable. Runs in the supervisor's process.

- An attempt that failed because of an inference engine does not count against the retry budget if a check finds
  that the server is unavailable.
- During an outage no rollout is started. The wait ends when every model role has a working server again.
- After `limit` seconds of waiting the run stops.
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
"""Causes of failures after which the inference engine may be unavailable."""
CHECK_SECONDS: Final = 10.0
FIRST_DELAY: Final = 0.25
MAX_DELAY: Final = 5.0
"""The back-off between two checks doubles from `FIRST_DELAY` to `MAX_DELAY` seconds."""


async def find_outage(upstreams: Mapping[str, UpstreamConfig], *, sample: bool = False) -> str:
    """Return why an inference engine cannot be used now, or an empty string if every role has a working server.

    With `sample`, one of the role's servers must also sample a token, because a hung server may still pass the
    check.
    """
    for role, config in upstreams.items():
        upstream = open_upstream(config)
        try:
            await upstream.check(timeout=CHECK_SECONDS)
            if sample and isinstance(upstream, HttpUpstream):
                working = [await upstream.hangs.has_recovered(replica) for replica in upstream.replicas]
                if not any(working):
                    return f"every replica of the role {role} hangs"
        except UpstreamError as error:
            if error.code in GONE:
                return str(error)
        finally:
            await upstream.close()
    return ""


class OutageMonitor:
    """Finds out whether attempts failed because an inference engine is unavailable, and waits until it is back."""

    def __init__(
        self,
        upstreams: Mapping[str, UpstreamConfig],
        limit: float,
        *,
        on_wait: Callable[[str], None],
        on_recovery: Callable[[float], None],
        on_expiry: Callable[[str], None],
    ) -> None:
        """Wait for at most `limit` seconds. If `limit` is 0, no failure is explained by an outage.

        `on_wait` is called with the problem when a wait starts, `on_recovery` with the seconds waited when the
        servers are back, and `on_expiry` with the problem when the limit is reached.
        """
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
        """Seconds since the current outage was found, or None if there is no outage."""
        return None if self._since is None else asyncio.get_running_loop().time() - self._since

    def may_explain(self, outcome: Outcome) -> bool:
        """Return True if an attempt with this outcome may have failed because a server became unavailable."""
        return self._limit > 0 and isinstance(outcome, Failed) and outcome.cause in GONE

    def decide_later(self, outcome: Outcome, decide: Callable[[bool], None]) -> None:
        """Check the servers in the background, then call `decide` with True if there is an outage, else False.

        If an outage is already known, `decide(True)` is called at once.
        """
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
        """Stop checking, and drop pending decisions. Their attempts run again after a resume of the run."""
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
