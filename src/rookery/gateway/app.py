"""Routes of the gateway: authenticate a request and choose its handler. Runs in gateway shards.

Guarantees:
- an unauthorised request is rejected before its body is read;
- a client of an API that the gateway does not serve gets an error that says so, instead of status 401;
- the admin key gives access only to the admin API, a session's secret only to that session;
- below a session's base URL, every path works with and without `/v1`, because client libraries differ;
- a listening socket that belongs to one session (inside a sandbox) serves only that session, whatever the path is;
- a request for a session that another shard owns is forwarded to that shard.
"""

import hmac
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec

from rookery import __version__
from rookery.gateway.admin import Admin
from rookery.gateway.dialects import load_dialects
from rookery.gateway.dialects.protocol import Dialect, ErrorKind, HeaderDialect, StatefulDialect, TokenCountDialect
from rookery.gateway.http_messages import FORWARDED_HEADER, JSON, Handler, HttpError, Request, ResponseWriter
from rookery.gateway.metrics import ShardMetrics
from rookery.gateway.model_calls import ModelCallHandler
from rookery.gateway.registry import SessionRegistry
from rookery.gateway.session_entry import SessionEntry
from rookery.gateway.shard_peers import ShardPeers

MAX_BODY: Final = 64 << 20
MAX_ADMIN_BODY: Final = 1 << 20
_SESSION: Final = re.compile(r"/v1/rollouts/([^/]+)(/.*)?")
_ADMIN: Final = re.compile(r"/rollouts(?:/([^/]+)(?:/(trajectory|cancel))?)?/?")
_FOREIGN: Final = re.compile(r"^/v1beta/|^/api/|^/v2/|:[a-zA-Z]+$|/(?:invoke|converse)")
"""Paths of other providers' APIs: Google, Ollama, Cohere, Bedrock."""


class Route(NamedTuple):
    """The handler of a request, and the maximum size of the request's body in bytes (`limit`)."""

    handler: Handler
    limit: int
    format_error: Callable[[int, str], bytes] | None = None
    """Formats the body of an error response, given status and message, in the client's API; None for OpenAI's chat
    API."""


class App:
    """Routes the HTTP requests of one shard: checks keys and chooses the handler."""

    def __init__(
        self,
        registry: SessionRegistry,
        admin: Admin,
        metrics: ShardMetrics,
        key: str,
        peers: ShardPeers,
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
        """Formats errors if it is not known which API (dialect) the client uses."""
        self._dialects = {path: dialect for dialect in known.values() for path in dialect.paths}
        self._count_dialects = {
            path: dialect
            for dialect in known.values()
            if isinstance(dialect, TokenCountDialect)
            for path in dialect.count_paths
        }
        self._stateful = [dialect for dialect in known.values() if isinstance(dialect, StatefulDialect)]
        self._by_header = [dialect for dialect in known.values() if isinstance(dialect, HeaderDialect)]

    # ---- called by the server

    def admit(self, request: Request) -> int:
        """Choose the route of a request before its body is read, and return the maximum size of the body in bytes.

        Raises `HttpError` if the request is not authorised or its path or method is not served.
        """
        route = request.route = self._route(request)
        return route.limit

    async def handle(self, request: Request, out: ResponseWriter) -> None:
        """Handle a complete request with the handler that `admit` has chosen."""
        await request.route.handler(request, out)

    def format_error(self, status: int, text: str) -> bytes:
        """Return the body of an error response with this status in the default dialect (OpenAI's chat API)."""
        return _format_error(self._default_dialect, status, text)

    def error(self, problem: ErrorKind, message: str, request: Request | None = None) -> tuple[int, bytes]:
        """Return the status and the body of an error response in the dialect (API) of the request's client.

        Without a request, the default dialect is used.
        """
        dialect = self._default_dialect if request is None else self._guess_dialect(request)
        return dialect.format_error(problem, message)

    def _guess_dialect(self, request: Request) -> Dialect:
        """Return the dialect (API) that the client probably uses, judged by the path and the headers."""
        path = request.path.rstrip("/")
        ends = {**self._dialects, **self._count_dialects}
        if match := max((end for end in ends if path.endswith(end)), key=len, default=""):
            return ends[match]
        return next(
            (dialect for dialect in self._by_header if dialect.header in request.headers), self._default_dialect
        )

    def _reject(
        self, request: Request, problem: ErrorKind, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> HttpError:
        status, body = self.error(problem, message, request)
        self._metrics.count_response(status)
        if problem == "unauthorized":
            headers = ((b"www-authenticate", b"Bearer"),)
        return HttpError(status, body, headers)

    # ---- routing

    def _route(self, request: Request) -> Route:
        """Return the route of a request. Raises `HttpError` if it is not allowed."""
        path = request.path
        if request.session:
            return self._route_session(
                request, request.session, _strip_session_path(path, request.session), trusted=True
            )
        if match := _SESSION.fullmatch(path):
            return self._route_session(request, unquote(match[1]), match[2] or "", trusted=False)
        if match := _ADMIN.fullmatch(path):
            return self._route_admin(request, unquote(match[1]) if match[1] else "", match[2] or "")
        return self._route_root(request)

    def _route_root(self, request: Request) -> Route:
        path = request.path
        if path in ("/pause", "/resume", "/state"):
            self._check_key(request)
            self._check_method(request, "GET" if path == "/state" else "POST")
            return Route(getattr(self._admin, path[1:]), MAX_ADMIN_BODY)
        handlers = {"/": self._about, "/healthz": self._admin.health, "/metrics": self._admin.metrics}
        handlers["/openapi.json"] = self._admin.openapi
        if path in handlers:
            self._check_method(request, "GET", "HEAD")
            return Route(handlers[path], 0)
        if path in ("/v1/models", "/models"):
            self._check_key(request)
            self._check_method(request, "GET", "HEAD")
            return Route(self._list_models, 0)
        raise self._reject(
            request,
            "not_found",
            f"the gateway has no path {path[:200]}; the base URL of a rollout is /v1/rollouts/ID",
        )

    def _route_admin(self, request: Request, session: str, part: str) -> Route:
        self._check_key(request)
        admin = self._admin
        if not session:
            self._check_method(request, "POST", "GET")
            return Route(admin.register if request.method == "POST" else admin.list_sessions, MAX_ADMIN_BODY)
        if part:
            self._check_method(request, "GET" if part == "trajectory" else "POST")
            handler = admin.trajectory if part == "trajectory" else admin.cancel
        else:
            self._check_method(request, "GET", "DELETE")
            handler = admin.delete if request.method == "DELETE" else admin.status
        if (shard := self._find_remote_shard(request, session)) is not None:
            return Route(partial(self._peers.forward, shard), MAX_ADMIN_BODY)

        return Route(partial(handler, session), MAX_ADMIN_BODY)

    def _route_session(self, request: Request, session: str, rest: str, *, trusted: bool) -> Route:
        """Return the route of a request whose path is `rest` below a session's base URL.

        `trusted` means that it came through the session's own listening socket, so that no secret is needed.
        """
        path = rest[3:] if rest.startswith("/v1/") else rest
        path = path.rstrip("/") or "/"
        served = self._is_served(path)
        if not served and ("x-goog-api-key" in request.headers or _FOREIGN.search(path)):
            # The client of another provider sends its key in another header; a 401 would mislead it.
            raise self._reject_path(request, rest)
        if (shard := self._find_remote_shard(request, session)) is not None:
            # The other shard checks the secret, so the request must not count against the session's quota here.
            request.owner = session if trusted else f"unchecked:{session}"
            return Route(partial(self._peers.forward, shard), MAX_BODY)
        entry = self._find_entry(request, session, trusted=trusted)
        request.owner = session
        if not served:
            raise self._reject_path(request, rest)
        if path in ("/", "/models"):
            self._check_method(request, "GET", "HEAD")
            return Route(self._about if path == "/" else self._list_models, 0)
        if path in self._count_dialects:
            self._check_method(request, "POST")
            counting = self._count_dialects[path]
            handler = partial(self.calls.count_tokens, entry, counting)
            return Route(handler, MAX_BODY, partial(_format_error, counting))
        for stateful in self._stateful:
            if path.startswith(stateful.stored_path):
                self._check_method(request, "GET", "DELETE")
                name = unquote(path[len(stateful.stored_path) :])
                return Route(partial(self.calls.handle_stored, entry, stateful, name), 0)
        self._check_method(request, "POST")
        dialect = self._dialects[path]
        return Route(partial(self.calls.handle_call, entry, dialect), MAX_BODY, partial(_format_error, dialect))

    def _reject_path(self, request: Request, path: str) -> HttpError:
        known = ", ".join(self._dialects)
        message = f"the gateway serves no API at the path {path[:200]} of a rollout; available: {known}"
        return self._reject(request, "not_found", message)

    def _is_served(self, path: str) -> bool:
        """Return whether the gateway serves this path, relative to a session's base URL and without `/v1`."""
        if path in ("/", "/models") or path in self._count_dialects or path in self._dialects:
            return True
        return any(path.startswith(dialect.stored_path) for dialect in self._stateful)

    def _find_entry(self, request: Request, session: str, *, trusted: bool) -> SessionEntry:
        """Return the entry of an open session, after checking the request's secret unless `trusted`.

        Raises `HttpError` if the session is unknown or has ended, or if the secret is wrong.
        """
        registry = self._registry
        entry = registry.entries.get(session)
        digest = entry.digest if entry is not None else registry.deleted.get(session)
        if digest is None:
            raise self._reject(request, "not_found", f"there is no rollout {session[:200]!r}")
        if not trusted and not registry.verify_secret(digest, _read_key(request)):
            raise self._reject(
                request,
                "unauthorized",
                "the API key is not the secret of this rollout: send the secret as a Bearer token or x-api-key",
            )
        if entry is None or entry.ended is not None:
            raise self._reject(request, "gone", f"rollout {session!r} has ended and accepts no more calls")
        return entry

    def _find_remote_shard(self, request: Request, session: str) -> int | None:
        """Return the index of the shard to which a request must be forwarded.

        Returns None if this shard owns the session, or if another shard has already forwarded the request.
        """
        shard = self._peers.remote_shard(session)
        return None if shard is None or FORWARDED_HEADER in request.headers else shard

    def _check_key(self, request: Request) -> None:
        if not hmac.compare_digest(_read_key(request).encode(), self._key.encode()):
            raise self._reject(
                request, "unauthorized", "this path needs the gateway's admin key as a Bearer token"
            )

    def _check_method(self, request: Request, *methods: str) -> None:
        if request.method not in methods:
            allow = (b"allow", ", ".join(methods).encode())
            raise self._reject(
                request, "method", f"{request.path[:200]} accepts only {' and '.join(methods)} requests", (allow,)
            )

    # ---- small handlers

    async def _about(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        out.send(200, b'{"name":"rookery gateway","version":"%b"}' % __version__.encode())

    async def _list_models(self, request: Request, out: ResponseWriter) -> None:
        for dialect in self._by_header:
            if dialect.header in request.headers:
                out.send(200, dialect.format_models(self._models()), JSON)
                return
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "rookery"} for name in self._models()]
        out.send(200, msgspec.json.encode({"object": "list", "data": models}), JSON)


def _format_error(dialect: Dialect, status: int, text: str) -> bytes:
    problem: ErrorKind = "too_large" if status == 413 else "unavailable" if status in (429, 503) else "bad_request"
    return dialect.format_error(problem, text)[1]


def _read_key(request: Request) -> str:
    """Return the key of a request, from the header `Authorization: Bearer` or `x-api-key`.

    Returns an empty string if the request has neither.
    """
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    return request.headers.get("x-api-key", "")


def _strip_session_path(path: str, session: str) -> str:
    """Return the path of a request to the session's own listening socket, relative to the session's base URL.

    On that socket the prefix `/v1/rollouts/ID` is optional.
    """
    match = _SESSION.fullmatch(path)
    if match and unquote(match[1]) == session:
        return match[2] or ""
    return path
