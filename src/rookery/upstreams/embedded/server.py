"""The embedded policy as an OpenAI-compatible server, so that any client can be tried against it.

Promises:
- same prompt, seed and weights, same tokens as through the library, streamed or not;
- one answer or one error in OpenAI's shape, in words;
- a client that goes away ends its sampling at once and frees its places;
- at most so many sequences at once as there are places; the others wait in order, a bounded number of them;
- a slow reader costs no more memory than its answer, and one that does not read at all is left behind;
- all choices of a request are drawn by one version of the weights, from the first token to the last;
- weights are swapped from this machine only, and by no web page, unless it is allowed; broken ones are refused
  and change nothing;
- health never says fine while sequences hang.
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
from rookery.upstreams.embedded.batch import SamplingJob
from rookery.upstreams.embedded.http_server import (
    MAX_BODY,
    foreign,
    is_here,
    json_answer,
    listening,
    load_weights,
    read_body,
    unversioned,
    write,
)
from rookery.upstreams.embedded.llama import Llama
from rookery.upstreams.embedded.openai_requests import (
    ParsedRequest,
    RequestError,
    Update,
    chat_order,
    completion_order,
    decoded,
)
from rookery.upstreams.embedded.openai_responses import (
    DONE,
    ChoiceStream,
    ResponseBuilder,
    error_body,
    event,
    refusal,
)
from rookery.upstreams.embedded.together import together
from rookery.upstreams.embedded.upstream import EmbeddedUpstream, PreparedRequest

__all__ = ["EmbeddedServer", "listening"]

log = logging.getLogger("rookery.upstreams")

WAITING: Final = 4096
"""Sequences that may wait for a place."""
ANSWER_SECONDS: Final = 600.0
STUCK_SECONDS: Final = 30.0
"""Without any token although sequences have places: no longer healthy."""
_LARGE: Final = 64 << 10
"""Bodies above this are read off the loop."""

_Read = Callable[[bytes, int], ParsedRequest]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """The handlers around one upstream, which is closed by who made it."""

    def __init__(self, upstream: EmbeddedUpstream, *, allow_updates: bool = False, waiting: int = WAITING) -> None:
        self.upstream = upstream
        self._allow_updates = allow_updates
        self._most = upstream.places + waiting
        self._asked = 0
        """Sequences that have a place or wait for one."""
        self._busy: set[SamplingJob] = set()
        """Those that have one."""
        self._drawn = 0
        """Tokens of sequences that are over."""
        self._progress = (0, 0.0)
        """Tokens at the last look, and when they were first so many."""
        self._updating = asyncio.Lock()
        self._created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._in_words], client_max_size=MAX_BODY)
        app.on_response_prepare.append(unversioned)
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
        return await self._answer(request, chat_order)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, completion_order)

    async def _answer(self, request: web.Request, read: _Read) -> web.StreamResponse:
        body = await read_body(request)
        await self.upstream.refresh()
        if len(body) > _LARGE:
            order, asked = await asyncio.to_thread(self._understood, body, read)
        else:
            order, asked = self._understood(body, read)
        name = f"{'chatcmpl' if order.chat else 'cmpl'}-{secrets.token_hex(12)}"
        sheet = ResponseBuilder(order, asked, name=name, created=int(time.time()), model=self.upstream.model)
        with self._admitted(len(asked)):
            if order.stream:
                return await self._stream(request, sheet)
            async with self._drawing(sheet) as tasks:
                for task in tasks:
                    await task
            return json_answer(sheet.answer(), headers={"X-Weight-Version": str(sheet.version)})

    def _understood(self, body: bytes, read: _Read) -> tuple[ParsedRequest, list[PreparedRequest]]:
        order = read(body, self.upstream.context)
        self._check_model(order.model)
        return order, [self.upstream.ask(ask) for ask in order.asks]

    def _check_model(self, name: str) -> None:
        if name not in ("", self.upstream.model):
            words = f"the model {name!r:.80} does not exist; here is {self.upstream.model!r}"
            raise RequestError(words, param="model", code="model_not_found", status=404)

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        if self._asked + count > self._most:
            raise RequestError("too many requests wait already; try again later", code="queue_full", status=429)
        self._asked += count
        try:
            yield
        finally:
            self._asked -= count

    @asynccontextmanager
    async def _drawing(
        self, sheet: ResponseBuilder, moved: Callable[[object], None] | None = None
    ) -> AsyncIterator[list[asyncio.Task[None]]]:
        """One task for each sequence, ended with the block. `moved` hears of tokens and of endings."""
        serving: list[Llama] = []

        async def draw(asked: PreparedRequest) -> None:
            async with self.upstream.place():
                if not serving:  # the first place decides, so that no choice is of another version
                    serving.append(self.upstream.serving(asked))
                    sheet.version = serving[0].version
                self._busy.add(asked.job)
                try:
                    await self.upstream.sample(asked, timeout=ANSWER_SECONDS, llama=serving[0], news=moved)
                finally:
                    self._busy.discard(asked.job)
                    self._drawn += len(asked.job.tokens)

        async with together((draw(asked) for asked in sheet.asked), moved) as tasks:
            yield tasks

    async def _stream(self, request: web.Request, sheet: ResponseBuilder) -> web.StreamResponse:
        """What is there is written when the reader has taken what was written before: the jobs are the buffer."""
        wake = asyncio.Event()
        response: web.StreamResponse | None = None
        try:
            async with self._drawing(sheet, lambda _: wake.set()) as tasks:
                tellers = [ChoiceStream(sheet, number) for number in range(len(tasks))]
                while not all(teller.over for teller in tellers):
                    await wake.wait()
                    wake.clear()
                    data = b"".join(
                        [teller.news(_ended(task)) for teller, task in zip(tellers, tasks, strict=True)]
                    )
                    if not data:
                        continue
                    if response is None:  # not before: the version is known with the first token
                        response = await _begin(request, sheet)
                    await write(request, response, data)
        except Exception as error:  # said inside of the stream, which has no [DONE] then
            if response is None or isinstance(error, ConnectionError):
                raise
            _, said = _said(error)
            await write(request, response, event(said))
            return response
        assert response is not None
        last = sheet.chunk([], usage=sheet.usage()) if sheet.order.usage else b""
        await write(request, response, last + DONE)
        return response

    # --------------------------------------------------------------------------------------------- weights

    async def _update(self, request: web.Request) -> web.StreamResponse:
        if not (self._allow_updates or (is_here(request.remote) and not foreign(request))):
            words = "weights are swapped from the server's own machine, unless it was started with --allow-updates"
            raise RequestError(words, code="forbidden", status=403)
        # No web page can send this type to another site without being asked first whether it may, and it may not.
        if request.content_type != "application/json":
            raise RequestError("the body's Content-Type must be application/json", status=415)
        said = decoded(await read_body(request), Update)
        async with self._updating:
            weights = await asyncio.to_thread(load_weights, said.path)
            if said.version is not None:
                weights.version = said.version
            elif weights.version <= self.upstream.version:
                weights.version = self.upstream.version + 1
            await self.upstream.swap(weights)
        return json_answer({"success": True, "message": "loaded new weights", "weight_version": weights.version})

    # ----------------------------------------------------------------------------------------------- about

    def _listed(self) -> dict[str, Any]:
        return {
            "id": self.upstream.model,
            "object": "model",
            "created": self._created,
            "owned_by": "rookery",
            "max_model_len": self.upstream.context,
            "weight_version": self.upstream.version,
        }

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return json_answer({"object": "list", "data": [self._listed()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["name"])
        return json_answer(self._listed())

    async def _about(self, _: web.Request) -> web.StreamResponse:
        return json_answer({"name": "rookery serve-embedded", "version": rookery.__version__, "api": "/v1"})

    async def _health(self, _: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        tokens = self._drawn + sum(len(job.tokens) for job in self._busy)
        if not self._busy or tokens != self._progress[0]:
            self._progress = (tokens, now)
        stuck = now - self._progress[1]
        fine = stuck < STUCK_SECONDS
        status = "ok" if fine else f"no token in {stuck:.0f} s"
        about = {"status": status, "running": len(self._busy), "waiting": self._asked - len(self._busy)}
        return json_answer(about, status=200 if fine else 503)

    @web.middleware
    async def _in_words(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ConnectionError:  # nobody is there to be told
            raise
        except web.HTTPException as error:
            words = f"{request.method} {request.path} does not exist here"
            if error.status == 413:
                words = f"the body is larger than {MAX_BODY >> 20} MiB"
            elif error.status not in (404, 405):
                words = error.reason
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return json_answer(error_body(error.status, words), status=error.status, headers=allow)
        except Exception as error:  # noqa: BLE001  (the seam: every failure is answered in the same shape)
            status, body = _said(error)
            later = {"Retry-After": "1"} if status in (429, 503) else {}
            return json_answer(body, status=status, headers=later)


def _said(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for what a handler raised."""
    if isinstance(error, RequestError | RookeryError | Truncation):
        return refusal(error)
    log.error("a request failed", exc_info=error)
    return 500, error_body(500, f"an error of the server's own: {type(error).__name__}; its log says more")


def _ended(task: asyncio.Task[None]) -> bool:
    """Whether a sequence has ended; raises why, where it failed."""
    if not task.done():
        return False
    task.result()
    return True


async def _begin(request: web.Request, sheet: ResponseBuilder) -> web.StreamResponse:
    headers = {
        "Content-Type": "text/event-stream; charset=utf-8",
        "Cache-Control": "no-cache",
        "X-Weight-Version": str(sheet.version),
    }
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response
