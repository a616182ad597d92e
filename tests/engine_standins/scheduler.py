"""Scheduler of the stand-ins: names, aborts, pauses and weight updates around the embedded policy's batch.

Behaviour:
- a pause in mode `keep` freezes sequences between two tokens. After `resume` they continue with the new weights;
- if the cache was cleared during the pause, the keys and values of a frozen sequence are computed again from its
  tokens with those weights. Otherwise the old ones stay (vLLM: `clear_cache`, the default; SGLang: `retract` and
  `in_place`);
- mode `abort` ends every request, running or queued, with the tokens sampled so far;
- a request that arrives during a pause waits until the pause ends.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias, TypeVar

from rookery.core import UpstreamError
from rookery.upstreams.embedded.http_server import load_weights
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.upstream import EmbeddedUpstream
from rookery.upstreams.embedded.weights import Weights
from tests.engine_standins.batch import StandinBatch, StandinJob, StandinThread

T = TypeVar("T")
Mode: TypeAlias = Literal["abort", "wait", "keep"]
ANSWER_SECONDS: Final = 600.0
CONTROL_SECONDS: Final = 120.0
"""Timeout in seconds for control operations: resume, abort, weight update, queue lengths."""


class Engine:
    """The running requests by name, and the gate that pauses them."""

    def __init__(self, upstream: EmbeddedUpstream) -> None:
        assert isinstance(upstream.service, StandinThread)
        self.upstream = upstream
        self.service = upstream.service
        self.paused = False
        self.version = "default"
        """The weight version that the server reports. Both engines report this default until it is changed."""
        self.live: dict[str, list[StandinJob]] = {}
        self.disconnected: set[str] = set()
        """Names of requests whose client closed the connection. SGLang notices that only after seconds, and
        accepts aborts of these names until then."""
        self.drawn = 0
        self._condemned: list[StandinJob] = []
        """Sequences that were aborted during a pause and end after it."""
        self._ended = asyncio.Event()
        """Set whenever a sequence has ended."""

    @property
    def llama(self) -> Llama:
        return self.service.llama

    @contextmanager
    def named(self, names: list[str], jobs: list[StandinJob]) -> Iterator[None]:
        """Register the names by which jobs can be aborted while they run. Jobs may share a name."""
        for name, job in zip(names, jobs, strict=True):
            self.live.setdefault(name, []).append(job)
        try:
            yield
        except asyncio.CancelledError:
            self.disconnected.update(names)
            raise
        finally:
            for name, job in zip(names, jobs, strict=True):
                self.live[name].remove(job)
                if not self.live[name]:
                    del self.live[name]

    async def run(self, job: StandinJob, on_tokens: Callable[[object], None] | None = None) -> None:
        """Run a sequence to its end, including waits for a slot or the end of a pause."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self.service.run(job, on_tokens)
        except TimeoutError as error:
            problem = f"the embedded policy did not end its answer within {ANSWER_SECONDS:g} s"
            raise UpstreamError(problem, cause="upstream.timeout") from error
        finally:
            self.drawn += len(job.tokens)
            self._ended.set()

    async def counts(self) -> tuple[int, int]:
        """Return the numbers of running and of waiting sequences."""
        async with asyncio.timeout(CONTROL_SECONDS):
            return await self._between_steps(lambda batch: (batch.running, len(batch.waiting)))

    async def abort(self, prefix: str = "", *, gently: bool = False) -> None:
        """Abort the requests whose names begin with `prefix`.

        With `gently`, a running sequence ends at its next token, so not before the end of a pause.
        """
        jobs = [job for name, jobs in self.live.items() if name.startswith(prefix) for job in jobs]
        if gently and self.paused:
            self._condemned += [job for job in jobs if job.tokens]
            jobs = [job for job in jobs if not job.tokens]
        async with asyncio.timeout(CONTROL_SECONDS):
            await self._between_steps(lambda _: self.service.abort(jobs))

    async def pause(self, mode: Mode, *, clear: bool) -> None:
        """Pause, and return once requests are aborted, drained or frozen. `clear` clears the cache."""
        self.paused = True
        under_way = [job for jobs in self.live.values() for job in jobs]

        def close_gate(batch: StandinBatch) -> None:
            batch.gate = "frozen" if mode == "keep" else "shut"
            if mode == "abort":
                self.service.abort(under_way)
            if mode == "keep" and clear:
                batch.retract()
                batch.forget()

        async with asyncio.timeout(ANSWER_SECONDS):
            await self._between_steps(close_gate)
            while mode != "keep" and await self._running():
                self._ended.clear()
                if await self._running():
                    await self._ended.wait()
            if mode != "keep" and clear:
                await self._between_steps(StandinBatch.forget)

    async def _between_steps(self, action: Callable[[StandinBatch], T]) -> T:
        """Call `action` on the inference thread between two steps, and return its result."""
        return await asyncio.wrap_future(self.service.call(lambda: action(self.service.standin_batch)))

    async def _running(self) -> int:
        return await self._between_steps(lambda batch: batch.running)

    async def resume(self) -> None:
        def open_gate(batch: StandinBatch) -> None:
            batch.gate = "open"

        async with asyncio.timeout(CONTROL_SECONDS):
            if self._condemned:
                condemned, self._condemned = self._condemned, []
                await self._between_steps(lambda _: self.service.abort(condemned))
            await self._between_steps(open_gate)
        self.paused = False

    async def forget(self) -> bool:
        """Clear the cache. Return False, and do nothing, if there are running sequences."""

        def act(batch: StandinBatch) -> bool:
            if batch.running:
                return False
            batch.forget()
            return True

        async with asyncio.timeout(CONTROL_SECONDS):
            return await self._between_steps(act)

    async def load(self, path: str, *, version: str | None = None) -> None:
        """Load weights from disk for all tokens sampled from now on, also in running sequences."""
        weights: Weights = await asyncio.to_thread(load_weights, path)
        if weights.version <= self.llama.version:
            weights.version = self.llama.version + 1
        llama = await asyncio.to_thread(Llama, weights)
        async with asyncio.timeout(CONTROL_SECONDS):
            await self._between_steps(lambda batch: batch.replace(llama))
        if version is not None:
            self.version = version
