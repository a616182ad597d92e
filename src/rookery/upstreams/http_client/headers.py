"""Encode request lines and headers, and read response headers.

Headers are validated once, when they are encoded, not at every request.

Guarantees:
- a method, target or header cannot contain a line break, so that no second request can be smuggled into a request;
- callers cannot set the headers that the client sets itself (`Host`, `Content-Length`, `Connection`, …);
- an error names the header but does not show its value.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final, NewType

from rookery.core import UsageError

EncodedHeaders = NewType("EncodedHeaders", bytes)
"""Validated header lines as bytes, ready to be sent. `encode_headers` creates them."""

NO_HEADERS: Final = EncodedHeaders(b"")

_METHOD: Final = re.compile(r"[A-Z]{1,20}")
_TARGET: Final = re.compile(r"/[!-~]*")
_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_RESERVED: Final = frozenset({"connection", "content-length", "expect", "host", "keep-alive", "te", "trailer"}) | {
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
}


def encode_headers(headers: Mapping[str, str]) -> EncodedHeaders:
    """Validate and encode request headers for `Client.send`. Raises `UsageError` for an invalid or reserved
    header.

    Encode headers that do not change once, and pass the result to every `send`.
    """
    lines = []
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name[:60]!r} is not a valid name of an HTTP header")
        if name.lower() in _RESERVED:
            raise UsageError(
                f"the HTTP client sets the header {name} itself; remove it from the headers that you pass"
            )
        if not _VALUE.fullmatch(value):
            raise UsageError(
                f"the value of the header {name} contains a line break or another character that HTTP forbids"
            )
        lines.append(f"{name}: {value.strip()}\r\n".encode("latin-1"))
    return EncodedHeaders(b"".join(lines))


@lru_cache(maxsize=512)
def request_line(method: str, target: str) -> bytes:
    """Return the first line of a request, which names method and target. Raises `UsageError` if one is invalid.

    The result is cached, because a program uses few different request lines.
    """
    if not _METHOD.fullmatch(method) or method == "CONNECT":
        raise UsageError(f"{method[:20]!r} is not a supported HTTP method")
    if not _TARGET.fullmatch(target):  # not shown: its query may hold a key
        raise UsageError("the target of a request must start with / and contain no spaces: percent-encode it")
    return f"{method} {target} HTTP/1.1\r\n".encode("ascii")


class Headers(Mapping[str, str]):
    """The headers of a response, by case-insensitive name. Repeated headers are joined with commas."""

    __slots__ = ("_raw",)

    def __init__(self, raw: dict[bytes, bytes]) -> None:
        self._raw = raw

    def __getitem__(self, name: str) -> str:
        return self._raw[name.lower().encode("latin-1", "replace")].decode("latin-1").strip()

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)
