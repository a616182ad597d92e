"""Where a server is: every way people write a base URL, brought to one form.

Promises:
- `http://h:p`, `http://h:p/`, `http://h:p/v1` and `http://h:p/v1/` are the same server;
- any other path is kept, and endpoints are appended to it;
- a URL that cannot work raises `UsageError` in words when it is read, not when it is first called;
- what is shown of a URL never holds a name, a password or a query.
"""

from urllib.parse import SplitResult, unquote, urlsplit

from yarl import URL

from rookery.core import UsageError
from rookery.core.suggestions import suggestion

_ENDPOINTS = ("/chat/completions", "/completions", "/models", "/inference/v1/generate", "/generate")


class Address:
    """One server's base URL: its endpoints, the credentials that were written in it, and how to show it."""

    __slots__ = ("_base", "_query", "_root", "login", "shown")

    def __init__(self, text: str) -> None:
        parts = _split(text)
        path = parts.path.rstrip("/")
        for endpoint in _ENDPOINTS:  # people paste the endpoint that their curl line used
            if path.endswith(endpoint):
                path = path[: -len(endpoint)].rstrip("/")
                break
        path = path or "/v1"
        self._root = path.removesuffix("/v1")
        host = parts.netloc.rpartition("@")[2]
        self._base = f"{parts.scheme}://{host}{path}"
        self._root = f"{parts.scheme}://{host}{self._root}"
        self._query = f"?{parts.query}" if parts.query else ""
        self.shown = self._base
        self.login: tuple[str, str] | None = None
        if parts.username is not None:
            self.login = (unquote(parts.username), unquote(parts.password or ""))

    def endpoint(self, name: str) -> URL:
        """Of the OpenAI protocol; with a slash before its name, one of the engine's own, beside `/v1`."""
        name, mark, asked = name.partition("?")
        base = self._root if name.startswith("/") else f"{self._base}/"
        query = f"{self._query}{'&' if self._query else mark}{asked}" if mark else self._query
        return URL(f"{base}{name}{query}")


def _split(text: str) -> SplitResult:
    shown = redact(text)
    hint = "write it like http://127.0.0.1:8000/v1"
    if not text or any(c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"the model server's URL {shown!r} is empty or holds a blank; {hint}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # its text is left out: it quotes parts that may be a password
        raise UsageError(f"the model server's URL {shown!r} cannot be read; {hint}") from None
    if parts.scheme not in ("http", "https") or "://" not in text:
        near = suggestion(text.partition(":")[0], ("embedded",))
        raise UsageError(
            f"the model server's URL {shown!r} does not begin with http:// or https://{near or f'; {hint}'}"
        )
    if not parts.hostname or port == 0:
        raise UsageError(f"the model server's URL {shown!r} names no host or port; {hint}")
    try:
        URL(text)
    except ValueError:  # its text is left out: it quotes parts that may be a password
        raise UsageError(f"the model server's URL {shown!r} cannot be read; {hint}") from None
    return parts


def redact(url: str) -> str:
    """The URL without what may be secret in it: user, password, query and fragment. Never raises."""
    head = url.partition("#")[0].partition("?")[0]
    scheme, mark, rest = head.partition("://")
    if not mark:
        scheme, rest = "", head
    authority, slash, path = rest.partition("/")
    port = authority.rpartition("@")[2].rpartition(":")[2]
    if "@" in path and ":" in authority and not port.isdecimal():  # a password with an unescaped slash
        authority, slash, path = rest.rpartition("@")[2].partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"
