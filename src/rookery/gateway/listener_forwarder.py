"""Forward the connections of programs in a sandbox to one HTTP server: a gateway or an inference engine elsewhere.

Runs in the runner that owns the sandbox. It is used if the server cannot get the descriptor of the sandbox's
listening socket.

Guarantees:
- programs reach only that server, through at most `MAX_FORWARDED` connections of a session at the same time;
- with TLS, a path prefix, an API key or counts, each connection carries one request, whose head is rewritten: the
  API key of the server is added here and never enters the sandbox. Nothing after the body of that request is
  forwarded, and its path cannot leave the prefix.
"""

import asyncio
import logging
import re
import socket
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec

from rookery.core.lifetimes import detached_context
from rookery.upstreams.http_client.dial import default_context

log = logging.getLogger("rookery.gateway")
MAX_FORWARDED: Final = 512
"""Maximum number of connections of one session that are forwarded at the same time."""
HEAD_SECONDS: Final = 60.0
"""Time limit for the head of a request."""
_REPLACED: Final = (b"host", b"connection", b"keep-alive", b"proxy-connection")
_DROPPED: Final = (b"upgrade", b"expect", b"te", b"trailer")
"""Headers for which a connection would carry more than a request with one body and its answer."""
_SECRETS: Final = (b"authorization", b"x-api-key", b"api-key")
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_UNREACHABLE: Final = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PATH: Final = re.compile(rb"/[^\x00-\x20\x7f]*")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r\n", re.DOTALL)
_STATUS_BYTES: Final = len(b"HTTP/1.1 200")
_CAUSES: Final = {401: "upstream.auth", 403: "upstream.auth", 429: "upstream.overloaded"}


class ForwardTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server to which connections are forwarded."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    """Path that is put before the path of each request."""
    key: str = ""
    """API key that replaces the one in each request; empty to leave it as it is."""
    counts: bool = False
    """True to count the answers to requests by their status."""

    @classmethod
    def parse(cls, url: str, *, key: str = "", counts: bool = False) -> "ForwardTarget":
        """Return the target for a valid HTTP or HTTPS URL."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(
            host=parts.hostname or "",
            port=parts.port or (443 if tls else 80),
            tls=tls,
            prefix=parts.path.rstrip("/"),
            key=key,
            counts=counts,
        )

    @property
    def rewrites(self) -> bool:
        """True if the heads of requests are rewritten; otherwise bytes are copied as they are."""
        return self.tls or self.counts or bool(self.prefix or self.key)

    @property
    def authority(self) -> str:
        """Host and port as in the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class RewrittenHead(msgspec.Struct, frozen=True):
    """The head of a request for the target, and the framing of the body that follows it."""

    data: bytes
    length: int | None
    """Number of bytes of the body; None if the body is chunked."""
    expects: bool
    """True if the client waits for `100 Continue` before it sends the body."""


class ForwardedCalls:
    """Counts of the requests of one session that were forwarded with a rewritten head."""

    def __init__(self) -> None:
        self.calls = 0
        self.succeeded = 0
        self.failure: str | None = None
        """Cause code of the failure of the last answered request; None if it succeeded."""

    def note_status(self, status: int) -> None:
        """Count the answer to a request."""
        self.succeeded += status < 400
        error = "upstream.error" if status >= 500 else "upstream.rejected"
        self.failure = None if status < 400 else _CAUSES.get(status, error)


class ListenerForwarder:
    """Forwards connections to listening sockets of sandboxes to an HTTP server."""

    def __init__(self, target: ForwardTarget) -> None:
        self._target = target
        self._servers: dict[str, asyncio.Server] = {}
        self._connections: dict[str, set[asyncio.Task[None]]] = {}

    async def attach(self, session: str, listener: socket.socket) -> ForwardedCalls:
        """Forward the connections of a session's listener and return counts of its requests.

        The forwarder takes ownership of the listener.
        """
        connections = self._connections[session] = set()
        counts = ForwardedCalls()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(connections) >= MAX_FORWARDED:  # programs in a sandbox must not exhaust this process
                writer.close()
                return
            task = asyncio.get_running_loop().create_task(
                self._forward(reader, writer, counts), context=detached_context()
            )
            connections.add(task)
            task.add_done_callback(connections.discard)

        listener.setblocking(False)
        self._servers[session] = await asyncio.start_server(accept, sock=listener, backlog=1024)
        return counts

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: ForwardedCalls
    ) -> None:
        target, upstream = self._target, None
        try:
            head = await self._read_head(reader, writer) if target.rewrites else None
            if target.rewrites and head is None:
                return
            counts.calls += 1
            try:
                context = default_context() if target.tls else None
                answers, upstream = await asyncio.open_connection(target.host, target.port, ssl=context)
            except OSError:
                counts.failure = "upstream.unreachable"
                if target.rewrites:
                    writer.write(_UNREACHABLE)
                raise
            async with asyncio.TaskGroup() as tasks:
                if head is None:
                    tasks.create_task(_copy(reader, upstream))
                else:
                    upstream.write(head.data)
                    if head.expects:
                        writer.write(_CONTINUE)
                    sending = tasks.create_task(_copy_body(reader, upstream, head.length))
                    writer.write(await _read_status(answers, counts))
                await _copy(answers, writer)
                if head is not None:
                    sending.cancel()
        except* (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a connection of a sandbox to %s ended: %r", target.authority, error)
        finally:
            writer.close()
            if upstream is not None:
                upstream.close()

    async def _read_head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RewrittenHead | None:
        """Return the rewritten head of a request. None if there is none, or if it is invalid and was refused."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                return rewrite_head(await reader.readuntil(b"\r\n\r\n"), self._target)
        except (asyncio.IncompleteReadError, TimeoutError):
            return None
        except (asyncio.LimitOverrunError, ValueError):
            writer.write(_BAD_REQUEST)
            return None

    def detach(self, session: str) -> None:
        """Stop forwarding for a session and end its connections."""
        server = self._servers.pop(session, None)
        if server is not None:
            server.close()
        for task in self._connections.pop(session, set()):
            task.cancel()

    async def close(self) -> None:
        """Stop forwarding for all sessions."""
        tasks = [task for tasks in self._connections.values() for task in tasks]
        for session in list(self._servers):
            self.detach(session)
        await asyncio.gather(*tasks, return_exceptions=True)


def rewrite_head(head: bytes, target: ForwardTarget) -> RewrittenHead:
    """Return the head of an HTTP request, with the empty line at its end, for `target`.

    The answer ends the connection, because the head of a second request would not be rewritten. Raise `ValueError`
    if the head is not valid.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, path, version = first.split(b" ")
    valid = _TOKEN.fullmatch(method) and _PATH.fullmatch(path) and version in (b"HTTP/1.1", b"HTTP/1.0")
    if not valid or _leaves_prefix(path):
        raise ValueError("the request line is not valid")
    kept: list[bytes] = []
    values: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or any(byte in value for byte in b"\0\r\n"):
            raise ValueError("a header is not valid")
        name = name.lower()
        values.setdefault(name, []).append(value.strip(b" \t"))
        if name not in _REPLACED + _DROPPED and not (target.key and name in _SECRETS):
            kept.append(line)
    own = [b"Host: " + target.authority.encode(), b"Connection: close"]
    if target.key:
        own.append(b"Authorization: Bearer " + target.key.encode())
        if b"x-api-key" in values:
            own.append(b"x-api-key: " + target.key.encode())
    request_line = b" ".join((method, target.prefix.encode() + path, version))
    data = b"\r\n".join((request_line, *own, *kept)) + b"\r\n\r\n"
    expected = [value.lower() for value in values.get(b"expect", ())]
    expects = version == b"HTTP/1.1" and b"100-continue" in expected
    return RewrittenHead(data, _get_body_length(values, version), expects)


def _leaves_prefix(path: bytes) -> bool:
    """Return whether a server could resolve the path to one above the prefix."""
    decoded = unquote_to_bytes(unquote_to_bytes(path.partition(b"?")[0]))  # a proxy and the server may decode it
    return any(part.partition(b";")[0] == b".." for part in re.split(rb"[/\\]", decoded))


def _get_body_length(headers: dict[bytes, list[bytes]], version: bytes) -> int | None:
    """Return the length of a request's body, or None if it is chunked. Raise `ValueError` if it is ambiguous."""
    lengths, codings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
    if codings:
        if lengths or version == b"HTTP/1.0" or [coding.lower() for coding in codings] != [b"chunked"]:
            raise ValueError("the transfer coding is not valid")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise ValueError("the content length is not valid")
    return int(lengths[0])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy all bytes, and then the end of the stream."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _copy_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None) -> None:
    """Copy the body of one request and nothing after it. Chunk extensions and trailers are dropped."""
    if length is not None:
        await _copy_bytes(reader, writer, length)
        return
    while size := await _read_chunk_size(reader):
        writer.write(b"%x\r\n" % size)
        await _copy_bytes(reader, writer, size)
        if await reader.readexactly(2) != b"\r\n":
            raise ConnectionAbortedError("a chunk of the request is longer than its size")
        writer.write(b"\r\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _read_chunk_size(reader: asyncio.StreamReader) -> int:
    found = _CHUNK_SIZE.fullmatch(await reader.readuntil(b"\r\n"))
    if found is None:
        raise ConnectionAbortedError("the size of a chunk of the request is not valid")
    return int(found[1], 16)


async def _copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int) -> None:
    while count:
        data = await reader.read(min(count, 1 << 16))
        if not data:
            raise ConnectionAbortedError("the request ended in its body")
        count -= len(data)
        writer.write(data)
        await writer.drain()


async def _read_status(reader: asyncio.StreamReader, counts: ForwardedCalls) -> bytes:
    """Count the status of the server's answer, and return the first bytes of it. Interim answers are dropped."""
    try:
        start = await reader.readexactly(_STATUS_BYTES)
        while start.startswith(b"HTTP/1.") and start[9:10] == b"1":
            await reader.readuntil(b"\r\n\r\n")
            start = await reader.readexactly(_STATUS_BYTES)
    except (OSError, asyncio.IncompleteReadError):
        counts.failure = "upstream.cut"
        raise
    if start.startswith(b"HTTP/1.") and start[9:].isdigit():
        counts.note_status(int(start[9:]))
    return start
