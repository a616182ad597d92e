"""The gateway's addresses: what is asked for where, by whom, and who answers it.

Promises:
- who may not ask is answered before the body of the request is read;
- a client of an API that is not served here is told so, and not asked for a secret;
- the admin key opens the admin's addresses only, a session's secret that session's only;
- below a session's base URL every path is served with and without a `/v1`: libraries differ in what they append;
- a listener that belongs to a session serves that session and nothing else, whatever the path says;
- a request for another shard's session is answered by that shard.
"""

import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

from rookery import __version__
from rookery.gateway.admin import Admin
from rookery.gateway.dialects import load_dialects
from rookery.gateway.dialects.protocol import Dialect, ErrorKind, HeaderDialect, StatefulDialect, TokenCountDialect
from rookery.gateway.http import FORWARDED_HEADER, JSON, HttpError, Request, ResponseWriter
from rookery.gateway.metrics import Metrics
from rookery.gateway.model_calls import ModelCallHandler
from rookery.gateway.registry import Registry
from rookery.gateway.session_entry import SessionEntry

MAX_BODY: Final = 64 << 20
MAX_ADMIN_BODY: Final = 1 << 20
_SESSION: Final = re.compile(r"/v1/rollouts/([^/]+)(/.*)?")
_ADMIN: Final = re.compile(r"/rollouts(?:/([^/]+)(?:/(trajectory|cancel))?)?/?")
_FOREIGN: Final = re.compile(r"^/v1beta/|^/api/|^/v2/|:[a-zA-Z]+$|/(?:invoke|converse)")
"""Paths of other providers' APIs: Google, Ollama, Cohere, Bedrock."""


class Peers(Protocol):
    """The other shards."""

    def remote_shard(self, session: str) -> int | None:
        """The shard that a session belongs to; None where it is ours."""
        ...

    async def forward(self, shard: int, request: Request, out: ResponseWriter) -> None: ...

    async def collect(self, request: Request) -> list[bytes]:
        """What all other shards answer; one that cannot answer is left out."""
        ...


class Route(NamedTuple):
    """Who answers, and at most how much is read for it."""

    answer: Callable[[Request, ResponseWriter], Awaitable[None]]
    limit: int
    format_error: Callable[[int, str], bytes] | None = None
    """What is said of a body that cannot be taken; as collect, where it is not said here."""


class App:
    """What a shard serves."""

    def __init__(
        self,
        registry: Registry,
        admin: Admin,
        metrics: Metrics,
        key: str,
        peers: Peers,
        *,
        models: Callable[[], Sequence[str]],
    ) -> None:
        self.calls = ModelCallHandler(registry, metrics)
        self._registry = registry
        self._admin = admin
        self._metrics = metrics
        self._key = key
        self._peers = peers
        self._models = models
        known = load_dialects()
        self._default_dialect = known["chat"]
        """Speaks where nobody says what a client understands."""
        self._dialects = {path: dialect for dialect in known.values() for path in dialect.paths}
        self._count_dialects = {
            path: dialect
            for dialect in known.values()
            if isinstance(dialect, TokenCountDialect)
            for path in dialect.count_paths
        }
        self._stateful = [dialect for dialect in known.values() if isinstance(dialect, StatefulDialect)]
        self._by_header = [dialect for dialect in known.values() if isinstance(dialect, HeaderDialect)]

    # ---- what the server asks

    def admit(self, request: Request) -> int:
        """The most bytes of body that will be read."""
        route = request.route = self._route(request)
        return route.limit

    async def handle(self, request: Request, out: ResponseWriter) -> None:
        await request.route.answer(request, out)

    def format_error(self, status: int, text: str) -> bytes:
        return _format_error(self._default_dialect, status, text)

    def error(self, problem: ErrorKind, message: str, request: Request | None = None) -> tuple[int, bytes]:
        dialect = self._default_dialect if request is None else self._guess_dialect(request)
        return dialect.format_error(problem, message)

    def _guess_dialect(self, request: Request) -> Dialect:
        """What the client understands, by the path that it asks for or by its headers."""
        path = request.path.rstrip("/")
        ends = {**self._dialects, **self._count_dialects}
        if found := max((end for end in ends if path.endswith(end)), key=len, default=""):
            return ends[found]
        return next(
            (dialect for dialect in self._by_header if dialect.header in request.headers), self._default_dialect
        )

    def _reject(
        self, request: Request, problem: ErrorKind, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> HttpError:
        status, body = self.error(problem, message, request)
        self._metrics.count("requests", label="status", value=str(status))
        if problem == "unauthorized":
            headers = ((b"www-authenticate", b"Bearer"),)
        return HttpError(status, body, headers)

    # ---- finding the way

    def _route(self, request: Request) -> Route:
        path = request.path
        if request.session:
            return self._route_session(
                request, request.session, _strip_session_path(path, request.session), trusted=True
            )
        if found := _SESSION.fullmatch(path):
            return self._route_session(request, unquote(found[1]), found[2] or "", trusted=False)
        if found := _ADMIN.fullmatch(path):
            return self._route_admin(request, unquote(found[1]) if found[1] else "", found[2] or "")
        return self._route_root(request)

    def _route_root(self, request: Request) -> Route:
        path = request.path
        if path in ("/pause", "/resume", "/state"):
            self._check_key(request)
            _check_method(self, request, "GET" if path == "/state" else "POST")
            return Route(getattr(self._admin, path[1:]), MAX_ADMIN_BODY)
        answers = {"/": self._about, "/healthz": self._admin.health, "/metrics": self._admin.metrics}
        answers["/openapi.json"] = self._admin.openapi
        if path in answers:
            _check_method(self, request, "GET", "HEAD")
            return Route(answers[path], 0)
        if path in ("/v1/models", "/models"):
            self._check_key(request)
            _check_method(self, request, "GET", "HEAD")
            return Route(self._list_models, 0)
        raise self._reject(
            request, "not_found", f"nothing is served at {path[:200]}; a rollout's base URL is /v1/rollouts/ID"
        )

    def _route_admin(self, request: Request, session: str, part: str) -> Route:
        self._check_key(request)
        admin = self._admin
        if not session:
            _check_method(self, request, "POST", "GET")
            return Route(admin.register if request.method == "POST" else admin.list_sessions, MAX_ADMIN_BODY)
        if part:
            _check_method(self, request, "GET" if part == "trajectory" else "POST")
            answer = admin.trajectory if part == "trajectory" else admin.cancel
        else:
            _check_method(self, request, "GET", "DELETE")
            answer = admin.delete if request.method == "DELETE" else admin.status
        if (shard := self._find_remote_shard(request, session)) is not None:
            return self._forward(shard, MAX_ADMIN_BODY)

        async def answered(request: Request, out: ResponseWriter) -> None:
            await answer(session, request, out)

        return Route(answered, MAX_ADMIN_BODY)

    def _route_session(self, request: Request, session: str, rest: str, *, trusted: bool) -> Route:
        """What is under a session's base URL."""
        path = rest[3:] if rest.startswith("/v1/") else rest
        path = path.rstrip("/") or "/"
        served = self._is_served(path)
        if not served and ("x-goog-api-key" in request.headers or _FOREIGN.search(path)):
            # Another provider's client, which puts its key peers: to ask it for the secret would mislead.
            raise self._reject_path(request, rest)
        if (shard := self._find_remote_shard(request, session)) is not None:
            # The other shard checks the secret: who claims to be a session is not counted as that session here.
            request.owner = session if trusted else f"unchecked:{session}"
            return self._forward(shard, MAX_BODY)
        entry = self._find_entry(request, session, trusted=trusted)
        request.owner = session
        if not served:
            raise self._reject_path(request, rest)
        if path in ("/", "/models"):
            _check_method(self, request, "GET", "HEAD")
            return Route(self._about if path == "/" else self._list_models, 0)
        if path in self._count_dialects:
            _check_method(self, request, "POST")
            return self._make_call_route(self.calls.count_tokens, entry, self._count_dialects[path])
        for keeping in self._stateful:
            if path.startswith(keeping.stored_path):
                _check_method(self, request, "GET", "DELETE")
                return Route(self._make_stored_handler(entry, keeping, path[len(keeping.stored_path) :]), 0)
        _check_method(self, request, "POST")
        return self._make_call_route(self.calls.answer, entry, self._dialects[path])

    def _reject_path(self, request: Request, path: str) -> HttpError:
        known = ", ".join(self._dialects)
        said = f"there is no API at {path[:200]} of a rollout; there is: {known}"
        return self._reject(request, "not_found", said)

    def _is_served(self, path: str) -> bool:
        """Whether anything is served at this path below a session's base URL."""
        if path in ("/", "/models") or path in self._count_dialects or path in self._dialects:
            return True
        return any(path.startswith(keeping.stored_path) for keeping in self._stateful)

    @staticmethod
    def _make_call_route(
        call: Callable[[SessionEntry, Dialect, Request, ResponseWriter], Awaitable[None]],
        entry: SessionEntry,
        dialect: Dialect,
    ) -> Route:
        async def answered(request: Request, out: ResponseWriter) -> None:
            await call(entry, dialect, request, out)

        return Route(answered, MAX_BODY, partial(_format_error, dialect))

    def _make_stored_handler(
        self, entry: SessionEntry, dialect: Dialect, name: str
    ) -> Callable[[Request, ResponseWriter], Awaitable[None]]:
        async def answered(request: Request, out: ResponseWriter) -> None:
            await self.calls.handle_stored(entry, dialect, unquote(name), request, out)

        return answered

    def _find_entry(self, request: Request, session: str, *, trusted: bool) -> SessionEntry:
        registry = self._registry
        entry = registry.entries.get(session)
        digest = entry.digest if entry is not None else registry.deleted.get(session)
        if digest is None:
            raise self._reject(request, "not_found", f"there is no rollout {session[:200]!r} here")
        if not trusted and not registry.verify_secret(digest, _read_key(request)):
            raise self._reject(request, "unauthorized", "this is not the secret of this rollout")
        if entry is None or entry.ended is not None:
            raise self._reject(request, "gone", f"rollout {session!r} is over: it takes no more calls")
        return entry

    def _find_remote_shard(self, request: Request, session: str) -> int | None:
        shard = self._peers.remote_shard(session)
        return None if shard is None or FORWARDED_HEADER in request.headers else shard

    def _forward(self, shard: int, limit: int) -> Route:
        async def forwarded(request: Request, out: ResponseWriter) -> None:
            await self._peers.forward(shard, request, out)

        return Route(forwarded, limit)

    def _check_key(self, request: Request) -> None:
        if not hmac.compare_digest(_read_key(request).encode(), self._key.encode()):
            raise self._reject(
                request, "unauthorized", "this address needs the gateway's admin key, as a Bearer token"
            )

    # ---- small answers

    async def _about(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        out.send(200, b'{"name":"rookery gateway","version":"%b"}' % __version__.encode())

    async def _list_models(self, request: Request, out: ResponseWriter) -> None:
        import msgspec

        for dialect in self._by_header:
            if dialect.header in request.headers:
                out.send(200, dialect.format_models(self._models()), JSON)
                return
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "rookery"} for name in self._models()]
        out.send(200, msgspec.json.encode({"object": "list", "data": models}), JSON)


def _format_error(dialect: Dialect, status: int, text: str) -> bytes:
    problem: ErrorKind = "too_large" if status == 413 else "unavailable" if status in (429, 503) else "bad_request"
    return dialect.format_error(problem, text)[1]


def _check_method(app: App, request: Request, *methods: str) -> None:
    if request.method not in methods:
        allow = (b"allow", ", ".join(methods).encode())
        raise app._reject(request, "method", f"{request.path[:200]} takes {' and '.join(methods)}", (allow,))


def _read_key(request: Request) -> str:
    """The key of a request, wherever its library puts it."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    return request.headers.get("x-api-key", "")


def _strip_session_path(path: str, session: str) -> str:
    """What a path means at a session's own listener: below its base URL, or right at the root."""
    found = _SESSION.fullmatch(path)
    if found and unquote(found[1]) == session:
        return found[2] or ""
    return path
