"""What a proxy hears and says, byte by byte: HTTP/1 heads, and SOCKS5. Pure.

Promises:
- a head that two readers could read in two ways (two lengths, a folded line, a lone line feed, a Host that is not
  the URI's) is refused: `Bad`;
- what is handed on was written anew from what was understood, without the headers that are for us alone;
- a connection carries one request: both sides are told so, and what follows it is never read as another.
"""

import ipaddress
import re
from typing import NamedTuple

from rookery.sandboxes.egress_rules import Host, host_of, split

CHUNKED = -1
TO_THE_END = -2
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})( [\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_OURS = frozenset(
    b"connection proxy-connection keep-alive proxy-authorization proxy-authenticate te trailer upgrade"
    b" transfer-encoding content-length".split()
)
_REASONS = {
    400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip

Headers = list[tuple[bytes, bytes]]


class Bad(Exception):  # noqa: N818  (an answer, not a failure)
    """What cannot be taken as it is; `status` is what to answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Request(NamedTuple):
    method: bytes
    host: Host
    port: int
    path: bytes
    """Empty for CONNECT."""
    minor: int
    headers: Headers
    length: int
    """Of the body; `CHUNKED` where its chunks say it."""


class Reply(NamedTuple):
    status: int
    head: bytes
    """As it is said to the client."""
    length: int
    """`CHUNKED`, `TO_THE_END`, or bytes."""


def request(head: bytes) -> Request:
    """A head without its empty line."""
    first, headers = _lines(head)
    asked = _REQUEST.fullmatch(first)
    if asked is None:
        raise Bad(400, "that is no HTTP/1 request")
    method, target, minor = asked[1], asked[2].decode("ascii"), int(asked[3])
    path = b""
    if method == b"CONNECT":
        authority = target
    else:
        scheme, _, rest = target.partition("://")
        if scheme.lower() == "https":
            raise Bad(400, "https goes through CONNECT")
        if scheme.lower() != "http" or not rest:
            raise Bad(400, "this is a proxy: ask it for a whole address, http://host/path")
        end = min((at for at in (rest.find(mark) for mark in "/?#") if at >= 0), default=len(rest))
        authority, path = rest[:end], rest[end:].partition("#")[0].encode("ascii")
        path = path if path.startswith(b"/") else b"/" + path
    host, port = _authority(authority)
    if port is None and method == b"CONNECT":
        raise Bad(400, "CONNECT needs a port")
    port = port or 80
    _same_host(headers, host, port, method, minor)
    length = _length(headers)
    if length == TO_THE_END or method == b"CONNECT":
        length = 0
    return Request(method, host, port, path, minor, headers, length)


def forwarded(asked: Request) -> bytes:
    """The head for the host."""
    name = f"[{asked.host}]" if isinstance(asked.host, ipaddress.IPv6Address) else str(asked.host)
    name += "" if asked.port == 80 else f":{asked.port}"
    lines = [b"%b %b HTTP/1.%d" % (asked.method, asked.path, asked.minor), b"Host: " + name.encode()]
    lines += _handed_on(asked.headers, besides=b"host")
    if asked.length == CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    elif asked.length or any(name.lower() == b"content-length" for name, _ in asked.headers):
        lines.append(b"Content-Length: %d" % asked.length)
    lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def reply(head: bytes, asked: Request) -> Reply:
    """What the host answered, without its empty line."""
    try:
        first, headers = _lines(head)
        said = _STATUS.fullmatch(first)
        if said is None:
            raise Bad(502, "the host did not answer in HTTP/1")
        length = _length(headers)
    except Bad as bad:
        raise Bad(502, f"the host's answer: {bad}") from None
    status = int(said[1])
    if status == 101:
        raise Bad(502, "the host changed the protocol unasked")
    lines = [b"HTTP/1.%d %b%b" % (asked.minor, said[1], said[2] or b" "), *_handed_on(headers)]
    if status < 200:
        return Reply(status, b"\r\n".join(lines) + b"\r\n\r\n", 0)
    told = length
    if asked.method == b"HEAD" or status in (204, 304):
        length = 0
    if told == CHUNKED and asked.minor == 0:
        raise Bad(502, "the host answered an old client in chunks")
    if told == CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    elif told >= 0:
        lines.append(b"Content-Length: %d" % told)
    lines.append(b"Connection: close")
    return Reply(status, b"\r\n".join(lines) + b"\r\n\r\n", length)


def chunk(line: bytes) -> int:
    """The size that a chunk's first line tells."""
    found = _CHUNK.fullmatch(line)
    if found is None:
        raise Bad(400, "a chunk has no size")
    return int(found[1], 16)


def answer(status: int, text: str) -> bytes:
    """An answer of our own."""
    body = f"{text}\n".encode("utf-8", "replace")
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nX-Refused-By: sandbox\r\nConnection: close\r\n\r\n"
    ).encode() + body


def _lines(head: bytes) -> tuple[bytes, Headers]:
    first, *lines = head.split(b"\r\n")
    if len(lines) > 200:
        raise Bad(431, "there are too many headers")
    headers: Headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or _TOKEN.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise Bad(400, "a header cannot be read")
        headers.append((name, value))
    return first, headers


def _values(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name.lower() == wanted]


def _authority(text: str) -> tuple[Host, int | None]:
    try:
        name, port = split(text)
        return host_of(name), port
    except ValueError as error:
        raise Bad(400, f"{text!r:.80} names no host: {error}") from None


def _same_host(headers: Headers, host: Host, port: int, method: bytes, minor: int) -> None:
    said = _values(headers, b"host")
    if len(said) > 1:
        raise Bad(400, "there are two Host headers")
    if not said:
        if minor and method != b"CONNECT":
            raise Bad(400, "there is no Host header")
        return
    try:
        told, at = _authority(said[0].decode("ascii"))
    except UnicodeDecodeError:
        raise Bad(400, "the Host header is no host") from None
    if told != host or (at or (port if method == b"CONNECT" else 80)) != port:
        raise Bad(400, "the Host header is not the host that is asked for")


def _length(headers: Headers) -> int:
    coded, lengths = _values(headers, b"transfer-encoding"), _values(headers, b"content-length")
    if coded:
        if lengths or [value.lower() for value in coded] != [b"chunked"]:
            raise Bad(400, "the length of the body is told in two ways, or in one that is not known here")
        return CHUNKED
    if not lengths:
        return TO_THE_END
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise Bad(400, "the length of the body is no number")
    return int(lengths[0])


def _handed_on(headers: Headers, besides: bytes = b"") -> list[bytes]:
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() in (b"connection", b"proxy-connection")
        for word in value.split(b",")
    }
    drop = {besides} | _OURS | (named - {b"host"})
    return [b"%b: %b" % (name, value) for name, value in headers if name.lower() not in drop]


# ------------------------------------------------------------------------------------------------------- SOCKS5

SOCKS = 5
NO_SECRET = b"\x05\x00"
NO_WAY = b"\x05\xff"
_CODES = {403: 2, 502: 5, 504: 4, 400: 7}


def socks_answer(status: int) -> bytes:
    """What a SOCKS client is told where an HTTP client would get this status; 200: it is connected."""
    code = 0 if status == 200 else _CODES.get(status, 1)
    return bytes((SOCKS, code, 0, 1, 0, 0, 0, 0, 0, 0))


def socks_host(kind: int, data: bytes) -> Host:
    """The host of a request: 1 an address of four, 3 a name, 4 an address of six."""
    if kind == 1:
        return ipaddress.IPv4Address(data)
    try:
        if kind == 4:
            return host_of(str(ipaddress.IPv6Address(data)))
        return host_of(data.decode("ascii"))
    except ValueError as error:
        raise Bad(400, f"{data!r:.80} names no host: {error}") from None
