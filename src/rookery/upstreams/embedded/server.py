"""OpenAI-compatible HTTP server for the embedded policy: `rookery serve-embedded`.

Guarantees:
- the same prompt, seed and weights give the same tokens as `EmbeddedUpstream` in the same process, streamed or
  not;
- every request gets one response or one error in OpenAI's format;
- when a client disconnects, its sampling ends at once and its slots are freed;
- the number of sequences that are sampled at a time is limited by the slots of the upstream. Others wait in order,
  and above a limit requests are refused with status 429;
- a client that reads slowly costs no more memory than its reply; one that stops reading is disconnected;
- all choices of a request are sampled by one version of the weights;
- unless `--allow-updates` is set, weights can be replaced only by programs on this machine, not by web pages.
  Invalid weights are refused and change nothing;
- `/health` returns status 503 while running sequences get no tokens.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from aiohttp import web

import rookery
from rookery.core import RookeryError, Truncation
from rookery.telemetry import catalogue
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import (
    MAX_BODY,
    foreign,
    is_loopback_client,
    json_response,
    load_weights,
    read_body,
    run_server,
    scoped_tasks,
    set_server_header,
    write,
)
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.openai_requests import (
    ParsedRequest,
    RequestError,
    Update,
    decode_body,
    parse_chat_request,
    parse_completion_request,
)
from rookery.upstreams.embedded.openai_responses import (
    DONE,
    ChoiceStream,
    ResponseBuilder,
    encode_event,
    error_body,
    error_response,
)
from rookery.upstreams.embedded.upstream import EmbeddedUpstream, PreparedRequest

__all__ = ["EmbeddedServer", "run_server"]

log = logging.getLogger("rookery.upstreams")

MAX_WAITING: Final = 4096
"""Maximum number of sequences that wait for a slot. Above it, requests are refused."""
ANSWER_SECONDS: Final = 600.0
STUCK_SECONDS: Final = 30.0
"""If no running sequence gets a token for this many seconds, `/health` reports an error."""
_LARGE: Final = 64 << 10
"""Request bodies of more bytes are parsed in a thread, so that they do not block the event loop."""

_Read = Callable[[bytes, int], ParsedRequest]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """HTTP application that serves one embedded upstream, which the caller closes.

    `waiting` is the maximum number of sequences that wait for a slot.
    """

    def __init__(
        self, upstream: EmbeddedUpstream, *, allow_updates: bool = False, waiting: int = MAX_WAITING
    ) -> None:
        self.upstream = upstream
        self._allow_updates = allow_updates
        self._max_sequences = upstream.slots + waiting
        self._admitted_count = 0
        """Sequences that have a slot or wait for one."""
        self._running: set[SamplingJob] = set()
        """Sequences that have a slot."""
        self._finished_tokens = 0
        """Total number of tokens of finished sequences."""
        self._progress = (0, 0.0)
        """The total number of tokens at the last health check, and the time of the check at which it last
        changed."""
        self._updating = asyncio.Lock()
        self._created = int(time.time())

    def collect_metrics(self) -> None:
        """Set the gauges of the server. The program that serves it adds this method to the registry."""
        running = len(self._running)
        catalogue.EMBEDDED_SEQUENCES.set(running, "running")
        catalogue.EMBEDDED_SEQUENCES.set(self._admitted_count - running, "waiting")

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._handle_errors], client_max_size=MAX_BODY)
        app.on_response_prepare.append(set_server_header)
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/completions", self._completions)
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_get(f"{prefix}/models/{{name:.+}}", self._model)
        app.router.add_post("/update_weights", self._update)
        app.router.add_get("/", self._about)
        app.router.add_get("/version", self._about)
        app.router.add_get("/health", self._health)
        return app

    # ----------------------------------------------------------------------------------------- completions

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_chat_request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_completion_request)

    async def _complete(self, request: web.Request, read: _Read) -> web.StreamResponse:
        body = await read_body(request)
        await self.upstream.refresh()
        if len(body) > _LARGE:
            parsed, prepared = await asyncio.to_thread(self._parse, body, read)
        else:
            parsed, prepared = self._parse(body, read)
        name = f"{'chatcmpl' if parsed.chat else 'cmpl'}-{secrets.token_hex(12)}"
        builder = ResponseBuilder(parsed, prepared, name=name, created=int(time.time()), model=self.upstream.model)
        with self._admit(len(prepared)):
            if parsed.stream:
                return await self._stream(request, builder)
            async with self._sample_all(builder) as tasks:
                for task in tasks:
                    await task
            return json_response(builder.answer(), headers={"X-Weight-Version": str(builder.version)})

    def _parse(self, body: bytes, read: _Read) -> tuple[ParsedRequest, list[PreparedRequest]]:
        parsed = read(body, self.upstream.context)
        self._check_model(parsed.model)
        return parsed, [self.upstream.prepare(request) for request in parsed.requests]

    def _check_model(self, name: str) -> None:
        if name not in ("", self.upstream.model):
            words = f"the model {name!r:.80} does not exist; this server has the model {self.upstream.model!r}"
            raise RequestError(words, param="model", code="model_not_found", status=404)

    @contextmanager
    def _admit(self, count: int) -> Iterator[None]:
        if self._admitted_count + count > self._max_sequences:
            raise RequestError(
                "too many requests wait for a slot already; try again later", code="queue_full", status=429
            )
        self._admitted_count += count
        try:
            yield
        finally:
            self._admitted_count -= count

    @asynccontextmanager
    async def _sample_all(
        self, builder: ResponseBuilder, on_progress: Callable[[object], None] | None = None
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """Sample all sequences of a request, in one task each. Yield the tasks; cancel them when the block ends.

        `on_progress` is called for new tokens and when a sequence ends.
        """
        chosen: list[Llama] = []

        async def draw(prepared: PreparedRequest) -> None:
            async with self.upstream.slot():
                if not chosen:  # the first slot decides, so that all choices have one version
                    chosen.append(self.upstream.choose_llama(prepared))
                    builder.version = chosen[0].version
                self._running.add(prepared.job)
                try:
                    await self.upstream.sample(
                        prepared, timeout=ANSWER_SECONDS, llama=chosen[0], on_tokens=on_progress
                    )
                finally:
                    self._running.discard(prepared.job)
                    self._finished_tokens += len(prepared.job.tokens)
                    catalogue.EMBEDDED_TOKENS.add(by=len(prepared.job.tokens))

        async with scoped_tasks((draw(prepared) for prepared in builder.prepared), on_progress) as tasks:
            yield tasks

    async def _stream(self, request: web.Request, builder: ResponseBuilder) -> web.StreamResponse:
        """Send the reply as a stream. New tokens wait in the sampling jobs until the client has read the previous
        ones."""
        wake = asyncio.Event()
        response: web.StreamResponse | None = None
        try:
            async with self._sample_all(builder, lambda _: wake.set()) as tasks:
                streams = [ChoiceStream(builder, number) for number in range(len(tasks))]
                while not all(stream.finished for stream in streams):
                    await wake.wait()
                    wake.clear()
                    data = b"".join(
                        [stream.new_chunks(_has_ended(task)) for stream, task in zip(streams, tasks, strict=True)]
                    )
                    if not data:
                        continue
                    if response is None:  # not earlier, because the version is known with the first token
                        response = await _start_stream(request, builder)
                    await write(request, response, data)
        except Exception as error:  # sent as an event of the stream, which then has no [DONE]
            if response is None or isinstance(error, ConnectionError):
                raise
            _, body = _error_of(error)
            await write(request, response, encode_event(body))
            return response
        assert response is not None
        last = builder.chunk([], usage=builder.usage()) if builder.parsed.usage else b""
        await write(request, response, last + DONE)
        return response

    # --------------------------------------------------------------------------------------------- weights

    async def _update(self, request: web.Request) -> web.StreamResponse:
        if not (self._allow_updates or (is_loopback_client(request.remote) and not foreign(request))):
            words = (
                "weights can be replaced only from the server's own machine, unless it runs with --allow-updates"
            )
            raise RequestError(words, code="forbidden", status=403)
        # Browsers send this type to another site only after a preflight request, which this server refuses.
        if request.content_type != "application/json":
            raise RequestError("the body's Content-Type must be application/json", status=415)
        update = decode_body(await read_body(request), Update)
        async with self._updating:
            weights = await asyncio.to_thread(load_weights, update.path)
            if update.version is not None:
                weights.version = update.version
            elif weights.version <= self.upstream.version:
                weights.version = self.upstream.version + 1
            await self.upstream.swap(weights)
        return json_response({"success": True, "message": "loaded new weights", "weight_version": weights.version})

    # ----------------------------------------------------------------------------------------------- about

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self.upstream.model,
            "object": "model",
            "created": self._created,
            "owned_by": "rookery",
            "max_model_len": self.upstream.context,
            "weight_version": self.upstream.version,
        }

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["name"])
        return json_response(self._model_entry())

    async def _about(self, _: web.Request) -> web.StreamResponse:
        return json_response({"name": "rookery serve-embedded", "version": rookery.__version__, "api": "/v1"})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        tokens = self._finished_tokens + sum(len(job.tokens) for job in self._running)
        if not self._running or tokens != self._progress[0]:
            self._progress = (tokens, now)
        stuck = now - self._progress[1]
        fine = stuck < STUCK_SECONDS
        status = "ok" if fine else f"no token in {stuck:.0f} s"
        about = {
            "status": status,
            "running": len(self._running),
            "waiting": self._admitted_count - len(self._running),
        }
        return json_response(about, status=200 if fine else 503)

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:  # the client is gone
            raise
        except web.HTTPException as error:
            words = f"{request.method} {request.path} does not exist here"
            if error.status == 413:
                words = f"the body is larger than {MAX_BODY >> 20} MiB"
            elif error.status not in (404, 405):
                words = error.reason
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return json_response(error_body(error.status, words), status=error.status, headers=allow)
        except Exception as error:  # noqa: BLE001  (every failure gets the same format)
            status, body = _error_of(error)
            later = {"Retry-After": "1"} if status in (429, 503) else {}
            return json_response(body, status=status, headers=later)


def _error_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of the response for an exception that a handler raised."""
    if isinstance(error, RequestError | RookeryError | Truncation):
        return error_response(error)
    log.error("a request to the embedded policy's server failed", exc_info=error)
    return 500, error_body(500, f"internal error: {type(error).__name__}; see the log of the server")


def _has_ended(task: asyncio.Task[None]) -> bool:
    """Return True if the task of a sequence has ended. Raises the exception of the task if it failed."""
    if not task.done():
        return False
    task.result()
    return True


async def _start_stream(request: web.Request, builder: ResponseBuilder) -> web.StreamResponse:
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        "X-Weight-Version": str(builder.version),
    }
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response
