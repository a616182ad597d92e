"""HTTP server of `rookery view`: the web page, a JSON API that reads runs, and server-sent events.

- It listens on the loopback interface only. The `Host` header must name this machine, so that a website that
  resolves its own name to 127.0.0.1 (DNS rebinding) gets nothing.
- The API requires the key as a bearer token, and the page requires it in its URL. Requests of other sites are
  refused.
- A strict Content-Security-Policy lets only the page's own script run.
- It answers GET requests only, and writes nothing to runs.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from aiohttp import web

from rookery.core import RookeryError, UsageError
from rookery.engine.remote_engine import RemoteEngine
from rookery.view.catalogue import Catalogue
from rookery.view.data import NotFoundError, RunData, encode

STATIC: Final = Path(__file__).with_name("static")
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
FILES: Final = {"app.js": "text/javascript", "app.css": "text/css"}
POLL_SECONDS: Final = 0.5
HEARTBEAT_POLLS: Final = 20
MAX_STREAMS: Final = 64
"""Maximum number of open streams of server-sent events."""
LIVE_SECONDS: Final = 2.0
TABLE_SECONDS: Final = 0.25
"""Seconds for which new records are read before the table gets the rows that are known; it requests the rest."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """Serves the viewer while its context is entered."""

    def __init__(self, catalogue: Catalogue, *, port: int = 0, key: str = "") -> None:
        self._catalogue = catalogue
        self._port = port
        self._key = key or secrets.token_urlsafe(16)
        self._streams = 0
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/{name:app\\.(?:js|css)}", self._file)
        for name, handler in (
            ("runs", self._runs),
            ("summary", self._summary),
            ("series", self._series),
            ("rollouts", self._rollouts),
            ("rollout", self._rollout),
            ("tokens", self._tokens),
            ("group", self._group),
            ("search", self._search),
            ("compare", self._compare),
            ("live", self._live),
            ("events", self._events),
        ):
            app.router.add_get(f"/api/{name}", handler)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise UsageError(
                f"cannot listen on port {self._port}: {error.strerror}; choose another --port"
            ) from error
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/?key={self._key}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._catalogue.close()

    # ---- security

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refusal = self._refuse(request)
            response = refusal or await handler(request)
        except NotFoundError as error:
            response = _error(404, str(error))
        except RookeryError as error:
            response = _error(422, str(error))
        except web.HTTPException as error:
            response = _error(error.status, error.reason)
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Return an error for a request that does not come from the page or lacks the key."""
        if not _is_loopback(request.host):
            return _error(421, "the Host header does not name this machine")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
            return _error(403, "requests from other websites are refused")
        if request.path.startswith("/api/"):
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        elif request.path == "/":
            given = request.query.get("key", "")
        else:
            return None
        if hmac.compare_digest(given.encode("utf-8", "replace"), self._key.encode()):
            return None
        return _error(401, "the key is missing or wrong: open the URL that `rookery view` printed")

    # ---- the page

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(
            body=await asyncio.to_thread((STATIC / "index.html").read_bytes), content_type="text/html"
        )

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        body = await asyncio.to_thread((STATIC / name).read_bytes)
        return web.Response(body=body, content_type=FILES[name], charset="utf-8")

    # ---- the API

    async def _runs(self, _: web.Request) -> web.Response:
        return _json({"runs": await self._catalogue.describe_runs()})

    async def _read(self, request: web.Request, read: Callable[[RunData], Any]) -> web.Response:
        body = await self._catalogue.read(_text(request, "run"), lambda data: encode(read(data)))
        return web.Response(body=body, content_type="application/json")

    async def _read_all(self, request: web.Request, read: Callable[[RunData], Any]) -> web.Response:
        """Read all records of the run before `read`, in steps, so that other requests for it need not wait."""
        run = _text(request, "run")
        while not await self._catalogue.read(run, lambda data: data.update_index(TABLE_SECONDS)):
            pass
        return await self._read(request, read)

    async def _summary(self, request: web.Request) -> web.Response:
        return await self._read_all(request, RunData.summary)

    async def _series(self, request: web.Request) -> web.Response:
        return await self._read_all(request, RunData.series)

    async def _rollouts(self, request: web.Request) -> web.Response:
        start, generation = _number(request, "start"), _number(request, "generation")
        body = await self._catalogue.read(
            _text(request, "run"), lambda data: data.rollouts(start, generation, seconds=TABLE_SECONDS)
        )
        return web.Response(body=body, content_type="application/octet-stream")

    async def _rollout(self, request: web.Request) -> web.Response:
        rollout = _text(request, "id")
        return await self._read(request, lambda data: data.rollout(rollout))

    async def _tokens(self, request: web.Request) -> web.Response:
        rollout, segment, start = _text(request, "id"), _number(request, "segment"), _number(request, "start")
        return await self._read(request, lambda data: data.tokens(rollout, segment, start))

    async def _group(self, request: web.Request) -> web.Response:
        group = _number(request, "group")
        return await self._read(request, lambda data: data.group(group))

    async def _search(self, request: web.Request) -> web.Response:
        query, after = _text(request, "q"), _number(request, "after")
        return await self._read(request, lambda data: data.search(query, after))

    async def _compare(self, request: web.Request) -> web.Response:
        a, b = _text(request, "a"), _text(request, "b")
        return _json(await self._catalogue.read_two(a, b, lambda one, two: one.compare(two).plain()))

    async def _live(self, request: web.Request) -> web.Response:
        """Return the state of the engine, if the run is running on this machine; otherwise null."""
        folder = await self._catalogue.read(_text(request, "run"), _running_folder)
        return _json(await _read_engine(folder) if folder is not None else None)

    # ---- server-sent events

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send an event when the run changes, or without `run` when the list of runs does."""
        if self._streams >= MAX_STREAMS:
            return _error(503, "too many open pages")
        run = request.query.get("run", "")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._streams += 1
        try:
            await response.prepare(request)
            await self._send_changes(response, run)
        except (ConnectionError, RookeryError):
            pass  # the page was closed, or the run was removed or cannot be read
        finally:
            self._streams -= 1
        return response

    async def _send_changes(self, response: web.StreamResponse, run: str) -> None:
        last: Any = None
        quiet = 0
        while not self._closing.is_set():
            now = await self._fingerprint(run)
            quiet += 1
            if now != last:
                await response.write(b"event: change\ndata: {}\n\n")
                last, quiet = now, 0
            elif quiet >= HEARTBEAT_POLLS:
                await response.write(b": still here\n\n")
                quiet = 0
            try:
                await asyncio.wait_for(self._closing.wait(), POLL_SECONDS if run else 4 * POLL_SECONDS)
            except TimeoutError:
                continue

    async def _fingerprint(self, run: str) -> Any:
        if run:
            return await self._catalogue.read(run, RunData.fingerprint)
        runs = await self._catalogue.describe_runs()
        return [(one["id"], one["status"], one["rollouts"]) for one in runs]


def _is_loopback(host: str) -> bool:
    """Return whether a `Host` header names this machine, with any port, as a forwarded port may differ."""
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:  # malformed, such as `[::1`
        return False


def _running_folder(data: RunData) -> Path | None:
    return data.journal if data.journal is not None and data.reader.status == "running" else None


async def _read_engine(folder: Path) -> dict[str, Any] | None:
    """Return the status that a running engine reports on its control socket; None if it does not answer."""
    try:
        async with asyncio.timeout(LIVE_SECONDS):
            engine = await RemoteEngine.connect(str(folder))
            try:
                return await engine.status()
            finally:
                await engine.close()
    except (RookeryError, OSError, TimeoutError):
        return None


def _json(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")


def _error(status: int, text: str) -> web.Response:
    return web.Response(status=status, body=encode({"error": text}), content_type="application/json")


def _text(request: web.Request, name: str) -> str:
    value = request.query.get(name, "")
    if not value:
        raise UsageError(f"the parameter {name!r} is missing")
    return value


def _number(request: web.Request, name: str) -> int:
    value = request.query.get(name, "0")
    if not value.isdecimal() or len(value) > 15:
        raise UsageError(f"the parameter {name!r} must be a number, not {value!r:.40}")
    return int(value)
