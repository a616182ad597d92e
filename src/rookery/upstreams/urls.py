"""Normalise the base URLs of inference engines.

Guarantees:
- `http://h:p`, `http://h:p/`, `http://h:p/v1` and `http://h:p/v1/` are the same server;
- any other path is kept, and endpoints are appended to it;
- an invalid URL raises `UsageError` when it is parsed, not at the first call;
- the URL in messages and logs never contains a user name, a password or a query.
"""

from urllib.parse import SplitResult, unquote, urlsplit

from yarl import URL

from rookery.core import UsageError
from rookery.core.errors import suggestion

_ENDPOINTS = ("/chat/completions", "/completions", "/models", "/inference/v1/generate", "/generate")


class Address:
    """The base URL of a replica.

    `login` holds user name and password, `shown` the URL without secrets, and `root` that URL without `/v1`.
    """

    def __init__(self, text: str) -> None:
        parts = _split(text)
        path = parts.path.rstrip("/")
        for endpoint in _ENDPOINTS:  # people paste the endpoint that their curl line used
            if path.endswith(endpoint):
                path = path[: -len(endpoint)].rstrip("/")
                break
        path = path or "/v1"
        host = parts.netloc.rpartition("@")[2]
        self._base = f"{parts.scheme}://{host}{path}"
        self.root = f"{parts.scheme}://{host}{path.removesuffix('/v1')}"
        self._query = f"?{parts.query}" if parts.query else ""
        self.shown = self._base
        self.login: tuple[str, str] | None = None
        if parts.username is not None:
            self.login = (unquote(parts.username), unquote(parts.password or ""))

    def endpoint(self, name: str) -> URL:
        """Return the URL of an endpoint: relative to `/v1`, or to the root above `/v1` if the name has a leading
        slash."""
        name, mark, endpoint_query = name.partition("?")
        base = self.root if name.startswith("/") else f"{self._base}/"
        query = f"{self._query}{'&' if self._query else mark}{endpoint_query}" if mark else self._query
        return URL(f"{base}{name}{query}")


def _split(text: str) -> SplitResult:
    shown = redact(text)
    hint = "write it like http://127.0.0.1:8000/v1"
    if not text or any(c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"the inference engine's URL {shown!r} is empty or contains white space; {hint}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # the error is not shown: it may quote a password
        raise UsageError(f"the inference engine's URL {shown!r} is invalid; {hint}") from None
    if parts.scheme not in ("http", "https") or "://" not in text:
        from rookery.upstreams.registry import kinds

        near = suggestion(text.partition(":")[0], kinds())
        raise UsageError(
            f"the inference engine's URL {shown!r} does not begin with http:// or https://{near or f'; {hint}'}"
        )
    if not parts.hostname or port == 0:
        raise UsageError(f"the inference engine's URL {shown!r} has no host or port; {hint}")
    try:
        URL(text)
    except ValueError:  # the error is not shown: it may quote a password
        raise UsageError(f"the inference engine's URL {shown!r} is invalid; {hint}") from None
    return parts


def redact(url: str) -> str:
    """Remove user, password, query and fragment from a URL. Never raises."""
    head = url.partition("#")[0].partition("?")[0]
    scheme, mark, rest = head.partition("://")
    if not mark:
        scheme, rest = "", head
    authority, slash, path = rest.partition("/")
    port = authority.rpartition("@")[2].rpartition(":")[2]
    if "@" in path and ":" in authority and not port.isdecimal():  # a password with an unescaped slash
        authority, slash, path = rest.rpartition("@")[2].partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"
