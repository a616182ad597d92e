"""Shared parts of both stand-ins: the log of requests, faults, sampling, streams, health and metrics.

Behaviour:
- with a log file, every request is logged with its body before it is handled;
- when a client disconnects, the sampling of its request ends at once;
- a stream has one event per token, so that the same request gives the same events again. The events of several
  choices are interleaved in any order;
- a fault happens only where it was configured.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
from aiohttp import web

from rookery.core import RookeryError
from rookery.upstreams.embedded import chat
from rookery.upstreams.embedded.http_server import (
    MAX_BODY,
    json_response,
    read_body,
    scoped_tasks,
    set_server_header,
    write,
)
from rookery.upstreams.embedded.sampler import TokenChoice
from rookery.upstreams.embedded.upstream import EmbeddedUpstream
from tests.engine_standins.batch import StandinJob
from tests.engine_standins.faults import GARBAGE, Fault, FaultPlan, FaultyTransport, reset, strike
from tests.engine_standins.replies import Run, StreamWriter
from tests.engine_standins.sampling import LogitsProcessor, SamplingParams
from tests.engine_standins.scheduler import Engine

log = logging.getLogger("rookery.upstreams")
KEPT: Final = 1000
"""Number of requests that can be looked up."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
FAULT: Final[ContextVar[Fault | None]] = ContextVar("fault", default=None)
"""The fault of the current request that is counted in events."""


class Cut(Exception):
    """A response was cut on purpose by a fault."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__("a fault cut the stream")
        self.response = response


class Standin:
    """Request handlers around one upstream. The caller closes the upstream."""

    metrics: tuple[str, str, str, str]
    """Names of the metrics: running and waiting requests, share of the slots in use, sampled tokens."""
    owner: str

    def __init__(
        self, upstream: EmbeddedUpstream, *, log_requests: Path | None = None, mortal: bool = False
    ) -> None:
        self.upstream = upstream
        self.engine = Engine(upstream)
        self.faults = FaultPlan(mortal=mortal)
        self.requests: deque[dict[str, Any]] = deque(maxlen=KEPT)
        """Path and body of the last requests, newest last, as `--log-requests` writes them."""
        self.created = int(time.time())
        self._log = log_requests

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._record_requests, self._handle_errors], client_max_size=MAX_BODY)
        app.on_response_prepare.append(set_server_header)
        app.router.add_get("/standin/requests", self._list_requests)
        app.router.add_get("/standin/faults", self._list_faults)
        app.router.add_post("/standin/faults", self._add_fault)
        app.router.add_delete("/standin/faults", self._clear_faults)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
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
            body = fault.body.encode() or orjson.dumps({"error": {"message": f"injected status {fault.status}"}})
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
        entry = {"path": request.path, "body": content}
        self.requests.append(entry)
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
        except Exception as error:
            status, body = self.error_response(error, request.path)
            if status == 500 and not isinstance(error, RookeryError):
                log.error("a request to the stand-in failed", exc_info=error)
            if isinstance(body, str):
                return web.Response(text=body, status=status)
            return json_response(body, status=status)

    # ---------------------------------------------------------------------------------------------- standin

    async def _list_requests(self, _: web.Request) -> web.StreamResponse:
        return json_response({"requests": list(self.requests)})

    async def _list_faults(self, _: web.Request) -> web.StreamResponse:
        return json_response({"faults": self.faults.listed(), "happened": self.faults.happened})

    async def _add_fault(self, request: web.Request) -> web.StreamResponse:
        try:
            self.faults.add(msgspec.json.decode(await read_body(request), type=Fault))
        except (msgspec.DecodeError, ValueError) as error:
            return json_response({"error": {"message": str(error)}}, status=400)
        return json_response({"faults": self.faults.listed()})

    async def _clear_faults(self, _: web.Request) -> web.StreamResponse:
        self.faults.clear()
        return json_response({"faults": []})

    # ------------------------------------------------------------------------------------------------ status

    async def health(self, _: web.Request) -> web.StreamResponse:
        try:
            await self.engine.counts()
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200)

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        running, waiting = await self.engine.counts()
        used = running / max(1, self.upstream.slots)
        kinds = ("gauge", "gauge", "gauge", "counter")
        lines = []
        for name, kind, value in zip(
            self.metrics, kinds, (running, waiting, used, self.engine.drawn), strict=True
        ):
            lines += [f"# TYPE {name} {kind}", f'{name}{{model_name="{self.upstream.model}"}} {float(value)}']
        text = "\n".join(lines) + "\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def model_card(self) -> dict[str, Any]:
        model = self.upstream.model
        card = {"id": model, "object": "model", "created": self.created, "owned_by": self.owner, "root": model}
        return card | {"parent": None, "max_model_len": self.upstream.context}

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": [self.model_card()]})

    # --------------------------------------------------------------------------------------------- sampling

    def job(
        self, prompt: list[int], params: SamplingParams, number: int, *, ends: frozenset[int], calls: bool = True
    ) -> StandinJob:
        """Return the job for choice `number`. `ends` are its end tokens; without `calls` it calls no tool."""
        free_tokens = self.upstream.context - len(prompt)
        temperature = 0.0 if params.greedy else params.of("temperature")
        top_k = max(0, params.of("top_k"))
        root = params.sampling_seed if params.sampling_seed is not None else secrets.randbits(63)
        job = StandinJob(
            prompt,
            max_tokens=free_tokens if params.max_new_tokens is None else min(params.max_new_tokens, free_tokens),
            seed=root + number,
            choice=TokenChoice(temperature, params.of("top_p"), top_k, banned_id=-1 if calls else chat.CALL),
            ends=ends,
            stop=tuple(text.encode() for text in params.stops),
        )
        job.min_tokens = params.of("min_new_tokens")
        job.include_stop = bool(params.no_stop_trim)
        processor = LogitsProcessor(
            params.of("presence_penalty"),
            params.of("frequency_penalty"),
            params.of("repetition_penalty"),
            params.of("min_p"),
            temperature or 1.0,
            {int(token): bias for token, bias in (params.logit_bias or {}).items()},
            ends | chat.ENDS,
        )
        if processor.changes_something or job.min_tokens:
            job.logits_processor = processor.apply
        return job

    async def sample(self, runs: Sequence[Run]) -> None:
        """Sample all sequences to their end. Each can be aborted by its name."""
        jobs = [run.job for run in runs]
        with self.engine.named([run.name for run in runs], jobs):
            async with scoped_tasks(self.engine.run(job) for job in jobs) as tasks:
                await asyncio.gather(*tasks)

    async def _new_tokens(self, runs: Sequence[Run]) -> AsyncGenerator[tuple[int, int, bool], None]:
        """Yield (choice, number of available tokens, whether these are all) for each token of each choice."""
        wake = asyncio.Event()
        jobs = [run.job for run in runs]
        sent = [0] * len(jobs)
        finished = [False] * len(jobs)

        def on_progress(_: object) -> None:
            wake.set()

        with self.engine.named([run.name for run in runs], jobs):
            async with scoped_tasks((self.engine.run(job, on_progress) for job in jobs), on_progress) as tasks:
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
                            yield number, sent[number], last
                        if ended and not finished[number]:
                            finished[number] = True
                            yield number, ready, True

    async def stream(
        self, request: web.Request, runs: Sequence[Run], writer: StreamWriter[Any]
    ) -> web.StreamResponse:
        """Sample all sequences, and send the events that `writer` makes of them."""
        out = Stream(request)
        if writer.begins_at_once:
            await out.begin()
        async for number, ready, ended in self._new_tokens(runs):
            for piece in writer.events(number, ready, ended):
                await out.send(piece)
        for piece in writer.end():
            await out.send(piece)
        return out.response


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
