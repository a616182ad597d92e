"""Background requests of an HTTP upstream to its replicas: health checks, concurrency limits and abort requests.

Runs in runner processes and gateway shards. Every request has a timeout, and model calls do not depend on its
success. The number of concurrent requests (asyncio tasks) is limited.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from rookery.core.lifetimes import detached_context
from rookery.upstreams.hang_detector import HangDetector
from rookery.upstreams.replica import ExchangeError, Replica

log = logging.getLogger("rookery.upstreams")

PROBE_SECONDS: Final = 5.0
ABORT_SECONDS: Final = 5.0
REFRESH_SECONDS: Final = 600.0
_MAX_ABORTS: Final = 32
_MAX_TASKS: Final = 1024
"""Maximum number of asyncio tasks for background requests. Above it, no abort request is sent, and only
the connection is closed."""


class ReplicaMaintenance:
    """Sends the background requests of one upstream.

    `query_concurrency_limit` returns how many calls a replica processes at once, or None if it does not report
    that. `share` is the number of processes that share the replicas.
    """

    def __init__(
        self,
        health_path: str,
        hangs: HangDetector,
        query_concurrency_limit: Callable[[Replica], Awaitable[int | None]],
        share: int,
    ) -> None:
        self._health_path = health_path
        self._hangs = hangs
        self._query_concurrency_limit = query_concurrency_limit
        self._share = share
        self.tasks: set[asyncio.Task[None]] = set()
        """The asyncio tasks that have not ended."""
        self._abort_slots = asyncio.Semaphore(_MAX_ABORTS)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, context=detached_context())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all tasks have ended, for at most five seconds."""
        if self.tasks:
            await asyncio.wait(list(self.tasks), timeout=5.0)

    # ---- health checks

    def probe(self, replica: Replica, now: float) -> None:
        """Send a health check to an excluded replica whose exclusion has expired."""
        if replica.health.probe(now=now):
            self._start(self._probe(replica))

    async def _probe(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        health = replica.health
        try:
            if replica.hung:
                recovered = await self._hangs.has_recovered(replica)
                problem = f"{replica.name} still hangs"
            else:
                response = await replica.exchange(self._health_path, None, seconds=PROBE_SECONDS)
                recovered = response.status < 500
                problem = "" if recovered else str(replica.refusal(response)[0].error)
            if recovered:
                replica.hung = False
                health.answered()
                log.warning("%s answers again", replica.name)
            else:
                health.failed("gone", problem, now=loop.time())
        except ExchangeError as failure:
            health.failed("gone", str(failure.error), now=loop.time())
        finally:
            health.unprobed(now=loop.time())

    # ---- concurrency limits

    def refresh(self, replica: Replica) -> None:
        """Query how many calls a replica processes at once, and adjust its concurrency limit."""
        replica.refresh_at = asyncio.get_running_loop().time() + REFRESH_SECONDS
        self._start(self._update_concurrency_limit(replica))

    async def _update_concurrency_limit(self, replica: Replica) -> None:
        try:
            limit = await self._query_concurrency_limit(replica)
        except ExchangeError as failure:
            log.debug("the replica %s does not report its concurrency limit: %s", replica.name, failure.error)
            return
        if limit is None or limit < 1:
            return
        slots = -(-limit // self._share)
        if slots != replica.limit:
            log.info("the replica %s processes %d calls at once", replica.name, limit)
            replica.gate.resize(slots)

    # ---- abort requests

    def abort(self, replica: Replica, path: str, body: bytes) -> None:
        """Send a request that aborts a call."""
        if len(self.tasks) < _MAX_TASKS:
            self._start(self._abort(replica, path, body))

    async def _abort(self, replica: Replica, path: str, body: bytes) -> None:
        async with self._abort_slots:
            try:
                await replica.exchange(path, body, seconds=ABORT_SECONDS)
            except ExchangeError as failure:
                log.debug("the request to abort a model call failed: %s", failure.error)
