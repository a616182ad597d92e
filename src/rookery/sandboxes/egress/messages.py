"""Parse and build the messages of the egress proxy: HTTP/1 request and response heads, and SOCKS5. No I/O.

Guarantees:
- an ambiguous head (two lengths, a folded line, a bare line feed, a Host header that differs from the URI) is
  refused with `BadRequest`;
- the head of a forwarded message is rebuilt from the parsed head, without hop-by-hop headers;
- a connection carries one HTTP request: client and host are told to close it, and later data is not parsed.
"""

import ipaddress
import re
from typing import NamedTuple

from rookery.sandboxes.egress.rules import Host, parse_host, split

CHUNKED = -1
UNTIL_CLOSE = -2
CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})( [\t\x20-\x7e\x80-\xff]*)?")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;[\t\x20-\x7e\x80-\xff]*)?")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_HOP_BY_HOP = frozenset(
    b"connection proxy-connection keep-alive proxy-authorization proxy-authenticate te trailer upgrade"
    b" transfer-encoding content-length".split()
)
_REASONS = {
    400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 431: "Request Header Fields Too Large",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip

Headers = list[tuple[bytes, bytes]]


class BadRequest(Exception):  # noqa: N818  (an answer of the proxy, not a failure)
    """A request that the proxy cannot or must not forward. `status` is the HTTP status of the proxy's response."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ProxyRequest(NamedTuple):
    method: bytes
    host: Host
    port: int
    path: bytes
    """Path and query of the URL; empty for CONNECT."""
    http_minor: int
    """Minor HTTP version of the client: 1 for HTTP/1.1, 0 for HTTP/1.0."""
    headers: Headers
    length: int
    """Length of the body in bytes, or `CHUNKED`."""


class ProxyResponse(NamedTuple):
    status: int
    head: bytes
    """The response head that the proxy sends to the client."""
    length: int
    """Length of the body in bytes, `CHUNKED` or `UNTIL_CLOSE`."""


def parse_request(head: bytes) -> ProxyRequest:
    """Parse the head of a request to the proxy. `head` does not include the final empty line.

    Raise `BadRequest` if the head is malformed or ambiguous.
    """
    first, headers = _parse_head(head)
    request = _REQUEST.fullmatch(first)
    if request is None:
        raise BadRequest(400, "this is not an HTTP/1 request")
    method, target, minor = request[1], request[2].decode("ascii"), int(request[3])
    path = b""
    if method == b"CONNECT":
        authority = target
    else:
        scheme, _, rest = target.partition("://")
        if scheme.lower() == "https":
            raise BadRequest(400, "the URL starts with https://: use CONNECT host:port instead")
        if scheme.lower() != "http" or not rest:
            raise BadRequest(400, "this is a proxy: request an absolute URL, http://host/path")
        end = min((at for at in (rest.find(mark) for mark in "/?#") if at >= 0), default=len(rest))
        authority, path = rest[:end], rest[end:].partition("#")[0].encode("ascii")
        path = path if path.startswith(b"/") else b"/" + path
    host, port = _parse_authority(authority)
    if port is None and method == b"CONNECT":
        raise BadRequest(400, "CONNECT needs a port, for example CONNECT example.org:443")
    port = port or 80
    _check_host_header(headers, host, port, method, minor)
    length = _parse_length(headers)
    if length == UNTIL_CLOSE or method == b"CONNECT":
        length = 0
    return ProxyRequest(method, host, port, path, minor, headers, length)


def build_request(request: ProxyRequest) -> bytes:
    """Return the request head that the proxy sends to the host."""
    name = f"[{request.host}]" if isinstance(request.host, ipaddress.IPv6Address) else str(request.host)
    name += "" if request.port == 80 else f":{request.port}"
    lines = [b"%b %b HTTP/1.%d" % (request.method, request.path, request.http_minor), b"Host: " + name.encode()]
    lines += _forwardable_headers(request.headers, besides=b"host")
    if request.length == CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    elif request.length or any(name.lower() == b"content-length" for name, _ in request.headers):
        lines.append(b"Content-Length: %d" % request.length)
    lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_response(head: bytes, request: ProxyRequest) -> ProxyResponse:
    """Parse the head of a host's response to `request`. `head` does not include the final empty line.

    Raise `BadRequest` with the status 502 if the head is malformed or ambiguous.
    """
    try:
        first, headers = _parse_head(head)
        match = _STATUS.fullmatch(first)
        if match is None:
            raise BadRequest(502, "the host did not respond with HTTP/1")
        length = _parse_length(headers)
    except BadRequest as bad:
        raise BadRequest(502, f"the host sent an invalid response: {bad}") from None
    status = int(match[1])
    if status == 101:
        raise BadRequest(502, "the host switched the protocol (101), which the proxy does not support")
    lines = [b"HTTP/1.%d %b%b" % (request.http_minor, match[1], match[2] or b" "), *_forwardable_headers(headers)]
    if status < 200:
        return ProxyResponse(status, b"\r\n".join(lines) + b"\r\n\r\n", 0)
    header_host = length
    if request.method == b"HEAD" or status in (204, 304):
        length = 0
    if header_host == CHUNKED and request.http_minor == 0:
        raise BadRequest(502, "the host sent a chunked response to an HTTP/1.0 client")
    if header_host == CHUNKED:
        lines.append(b"Transfer-Encoding: chunked")
    elif header_host >= 0:
        lines.append(b"Content-Length: %d" % header_host)
    lines.append(b"Connection: close")
    return ProxyResponse(status, b"\r\n".join(lines) + b"\r\n\r\n", length)


def parse_chunk_size(line: bytes) -> int:
    """Return the size of a chunk of a chunked body. `line` is the line before the chunk's data."""
    found = _CHUNK.fullmatch(line)
    if found is None:
        raise BadRequest(400, "a chunk has no valid size")
    return int(found[1], 16)


def build_error(status: int, text: str) -> bytes:
    """Return a complete HTTP response of the proxy itself, with `text` as its body."""
    body = f"{text}\n".encode("utf-8", "replace")
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nX-Refused-By: sandbox\r\nConnection: close\r\n\r\n"
    ).encode() + body


def _parse_head(head: bytes) -> tuple[bytes, Headers]:
    first, *lines = head.split(b"\r\n")
    if len(lines) > 200:
        raise BadRequest(431, "the message has too many headers")
    headers: Headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.strip(b" \t")
        if not colon or _TOKEN.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise BadRequest(400, "a header is malformed")
        headers.append((name, value))
    return first, headers


def _get_values(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name.lower() == wanted]


def _parse_authority(text: str) -> tuple[Host, int | None]:
    try:
        name, port = split(text)
        return parse_host(name), port
    except ValueError as error:
        raise BadRequest(400, f"{text!r:.80} is not a valid host: {error}") from None


def _check_host_header(headers: Headers, host: Host, port: int, method: bytes, minor: int) -> None:
    values = _get_values(headers, b"host")
    if len(values) > 1:
        raise BadRequest(400, "the request has more than one Host header")
    if not values:
        if minor and method != b"CONNECT":
            raise BadRequest(400, "the request has no Host header")
        return
    try:
        header_host, at = _parse_authority(values[0].decode("ascii"))
    except UnicodeDecodeError:
        raise BadRequest(400, "the Host header is not a valid host") from None
    if header_host != host or (at or (port if method == b"CONNECT" else 80)) != port:
        raise BadRequest(400, "the Host header differs from the requested host")


def _parse_length(headers: Headers) -> int:
    coded, lengths = _get_values(headers, b"transfer-encoding"), _get_values(headers, b"content-length")
    if coded:
        if lengths or [value.lower() for value in coded] != [b"chunked"]:
            raise BadRequest(400, "the length of the body is ambiguous or has an unsupported encoding")
        return CHUNKED
    if not lengths:
        return UNTIL_CLOSE
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise BadRequest(400, "the length of the body is not a number")
    return int(lengths[0])


def _forwardable_headers(headers: Headers, besides: bytes = b"") -> list[bytes]:
    named = {
        word.strip().lower()
        for name, value in headers
        if name.lower() in (b"connection", b"proxy-connection")
        for word in value.split(b",")
    }
    drop = {besides} | _HOP_BY_HOP | (named - {b"host"})
    return [b"%b: %b" % (name, value) for name, value in headers if name.lower() not in drop]


# ------------------------------------------------------------------------------------------------------- SOCKS5

SOCKS = 5
SOCKS_NO_AUTHENTICATION = b"\x05\x00"
SOCKS_NO_ACCEPTABLE_METHOD = b"\x05\xff"
_CODES = {403: 2, 502: 5, 504: 4, 400: 7}


def build_socks_reply(status: int) -> bytes:
    """Return the SOCKS5 reply that corresponds to an HTTP status; 200 means that the connection is open."""
    code = 0 if status == 200 else _CODES.get(status, 1)
    return bytes((SOCKS, code, 0, 1, 0, 0, 0, 0, 0, 0))


def parse_socks_host(kind: int, data: bytes) -> Host:
    """Parse the address of a SOCKS5 request. `kind` is 1 for IPv4, 3 for a host name, and 4 for IPv6."""
    if kind == 1:
        return ipaddress.IPv4Address(data)
    try:
        if kind == 4:
            return parse_host(str(ipaddress.IPv6Address(data)))
        return parse_host(data.decode("ascii"))
    except ValueError as error:
        raise BadRequest(400, f"{data!r:.80} is not a valid host: {error}") from None
