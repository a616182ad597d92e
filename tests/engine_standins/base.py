"""Shared parts of both stand-ins: the log of requests, ignored fields, faults, streams.

Behaviour:
- with a log file, every request is logged with its body before it is handled;
- when a client disconnects, the sampling of its request ends at once;
- a stream has one event per token, so that the same request gives the same events again. The events of several
  choices are interleaved in any order;
- a fault happens only where it was configured.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
from aiohttp import web

from rookery.core import RookeryError
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import (
    MAX_BODY,
    json_response,
    read_body,
    scoped_tasks,
    set_server_header,
    write,
)
from rookery.upstreams.embedded.upstream import EmbeddedUpstream
from tests.engine_standins.faults import GARBAGE, Fault, FaultPlan, FaultyTransport, reset, strike
from tests.engine_standins.scheduler import Engine

log = logging.getLogger("rookery.upstreams")
KEPT: Final = 1000
KEPT_BYTES: Final = 64 << 20
"""Requests that can be looked up, and the size of their bodies together."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAULT: Final[ContextVar[Fault | None]] = ContextVar("fault", default=None)
"""The fault of the current request that is counted in events."""


class Refusal(Exception):
    """An error response, ready to be sent."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status = status
        self.body = body


class Cut(Exception):
    """A response was cut on purpose by a fault."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__("the stream was cut, by order")
        self.response = response


class Standin:
    """Request handlers around one upstream. The caller closes the upstream."""

    def __init__(
        self, upstream: EmbeddedUpstream, *, log_requests: Path | None = None, mortal: bool = False
    ) -> None:
        self.upstream = upstream
        self.engine = Engine(upstream)
        self.faults = FaultPlan(mortal=mortal)
        self.requests: list[dict[str, Any]] = []
        """The last requests, newest last, as `--log-requests` writes them."""
        self._sizes: list[int] = []
        """Of their bodies."""
        self.ignored: Counter[str] = Counter()
        """`PATH field`, and how often it was sent and passed over."""
        self.created = int(time.time())
        self._log = log_requests

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._record_requests, self._handle_errors], client_max_size=MAX_BODY)
        app.on_response_prepare.append(set_server_header)
        app.router.add_get("/standin/ignored", self._list_ignored)
        app.router.add_get("/standin/requests", self._list_requests)
        app.router.add_get("/standin/faults", self._list_faults)
        app.router.add_post("/standin/faults", self._add_fault)
        app.router.add_delete("/standin/faults", self._clear_faults)
        self.routes(app.router)
        return app

    def routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    def error_response(self, error: Exception, path: str) -> tuple[int, Any]:
        """Return status and body for an exception of a handler, in the real server's format."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ middlewares

    @web.middleware
    async def _record_requests(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/standin/"):
            return await handler(request)
        body = await read_body(request)
        self._note(request, body)
        fault = self.faults.take(request.path)
        transport = request.transport
        if fault is None or transport is None:
            return await handler(request)
        if fault.refuse:
            reset(transport)
            return web.Response()
        if fault.status is not None:
            body = fault.body.encode() or orjson.dumps({"error": {"message": f"status {fault.status}, by order"}})
            headers = {"Content-Type": "application/json"} | fault.headers
            return web.Response(status=fault.status, body=body, headers=headers)
        if fault.after_events is not None:
            token = FAULT.set(fault)
            try:
                return await handler(request)
            finally:
                FAULT.reset(token)
        protocol = request.protocol
        faulty: Any = FaultyTransport(transport, fault)
        protocol.transport = faulty
        try:
            response = await handler(request)
            await response.prepare(request)
            await response.write_eof()
            if faulty.triggered and fault.then == "stall":
                await asyncio.sleep(fault.seconds)
                transport.close()
            return response
        finally:
            if protocol.transport is faulty:
                protocol.transport = transport

    def _note(self, request: web.Request, body: bytes) -> None:
        content: Any
        try:
            content = orjson.loads(body) if body else None
        except orjson.JSONDecodeError:
            content = body.decode("utf-8", "replace")
        headers = {name: request.headers[name] for name in ("X-Request-Id",) if name in request.headers}
        entry = {
            "method": request.method,
            "path": request.path,
            "query": dict(request.query),
            "headers": headers,
            "body": content,
        }
        self.requests.append(entry)
        self._sizes.append(len(body))
        while len(self._sizes) > KEPT or sum(self._sizes) > KEPT_BYTES:
            del self.requests[0], self._sizes[0]
        if self._log is not None:
            with self._log.open("ab") as file:
                file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:
            raise
        except Cut as cut:
            return cut.response
        except Refusal as error:
            return json_response(error.body, status=error.status)
        except Exception as error:
            status, body = self.error_response(error, request.path)
            if status == 500 and not isinstance(error, RookeryError):
                log.error("a request to the stand-in failed", exc_info=error)
            if isinstance(body, str):
                return web.Response(text=body, status=status)
            return json_response(body, status=status)

    # ---------------------------------------------------------------------------------------------- standin

    async def _list_ignored(self, _: web.Request) -> web.StreamResponse:
        return json_response(dict(self.ignored))

    async def _list_requests(self, _: web.Request) -> web.StreamResponse:
        return json_response({"requests": self.requests})

    async def _list_faults(self, _: web.Request) -> web.StreamResponse:
        return json_response({"faults": self.faults.listed(), "happened": self.faults.happened})

    async def _add_fault(self, request: web.Request) -> web.StreamResponse:
        try:
            self.faults.add(msgspec.json.decode(await read_body(request), type=Fault))
        except (msgspec.DecodeError, ValueError) as error:
            raise Refusal(400, {"error": {"message": str(error)}}) from None
        return json_response({"faults": self.faults.listed()})

    async def _clear_faults(self, _: web.Request) -> web.StreamResponse:
        self.faults.clear()
        return json_response({"faults": []})

    def note_ignored_fields(self, path: str, fields: Iterable[str]) -> None:
        for field in fields:
            self.ignored[f"{path} {field}"] += 1

    # --------------------------------------------------------------------------------------------- sampling

    @asynccontextmanager
    async def drawing(
        self, names: list[str], jobs: list[SamplingJob], on_progress: Callable[[object], None] | None = None
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Sample each job in a task until the block ends. `on_progress` is called when there are new tokens."""
        with self.engine.named(names, jobs):
            async with scoped_tasks((self.engine.run(job, on_progress) for job in jobs), on_progress) as tasks:
                yield tasks

    async def drawn(self, names: list[str], jobs: list[SamplingJob]) -> None:
        """Sample all jobs to their end. Each can be aborted by its name."""
        async with self.drawing(names, jobs) as tasks:
            for task in tasks:
                await task

    async def new_tokens(
        self, names: list[str], jobs: list[SamplingJob], every: int = 1
    ) -> AsyncGenerator[tuple[int, int, bool], None]:
        """Yield (job number, number of available tokens, whether these are all) for each token of each job."""
        wake = asyncio.Event()
        sent = [0] * len(jobs)
        finished = [False] * len(jobs)
        async with self.drawing(names, jobs, lambda _: wake.set()) as tasks:
            while not all(finished):
                await wake.wait()
                wake.clear()
                for number, job in enumerate(jobs):
                    if finished[number]:
                        continue
                    if tasks[number].done():
                        tasks[number].result()
                    ready = job.reported
                    ended = bool(job.finish) and ready == len(job.tokens)
                    while sent[number] < ready:
                        sent[number] += 1
                        last = ended and sent[number] == ready and job.finish != "abort"
                        finished[number] = last
                        if last or sent[number] == 1 or sent[number] % every == 0:
                            yield number, sent[number], last
                    if ended and not finished[number]:
                        finished[number] = True
                        yield number, sent[number], True


class Stream:
    """A streamed response, written as fast as the client reads it."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._fault = FAULT.get()
        self._events = 0
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        self.begun = False

    async def begin(self) -> None:
        """Send the head. From now on an error can only be an event of the stream."""
        if not self.begun:
            self.begun = True
            await self.response.prepare(self._request)

    async def send(self, event: bytes) -> None:
        """Send one event. Raises `Cut` if a fault cuts the stream."""
        await self.begin()
        if self._fault is not None and self._events == self._fault.after_events:
            await self._strike(self._fault, event)
            return
        self._events += 1
        await write(self._request, self.response, event)

    async def _strike(self, fault: Fault, event: bytes) -> None:
        transport = self._request.transport
        if fault.then in ("half_event", "garbage", "end"):
            piece = {"half_event": event[: len(event) // 2], "garbage": GARBAGE, "end": b""}[fault.then]
            if piece:
                await write(self._request, self.response, piece)
            await self.response.write_eof()
        elif fault.then == "stall":
            await asyncio.sleep(fault.seconds)
            if transport is not None:
                transport.close()
        elif transport is not None:
            strike(transport, fault)
        raise Cut(self.response)
