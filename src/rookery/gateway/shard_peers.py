"""Forward requests to the other shards of a gateway, over Unix sockets. Runs in gateway shards.

Guarantees:
- the body of a request and the status and body of its response are forwarded unchanged; a large response is
  forwarded chunk by chunk;
- if the client disconnects, the forwarded request is cancelled;
- a request for a shard that cannot be reached, because it is being restarted, gets a retryable error at once;
- a broadcast (a request to all other shards) succeeds on every shard that is running, or it raises.
"""

import asyncio
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rookery.core import RookeryError
from rookery.gateway.dialects.chat import ChatDialect
from rookery.gateway.http_messages import FORWARDED_HEADER, Request, ResponseWriter, read_error_message
from rookery.gateway.registry import owning_shard
from rookery.upstreams.http_client import Client, HttpClientError, Response, encode_headers

COLLECT_SECONDS: Final = 10.0
"""Default time limit for the responses of the other shards in `ShardPeers.collect`."""
MAX_PAGE: Final = 64 << 20
MAX_BUFFERED: Final = 256 << 10
"""Responses with more bytes, or of unknown length, are forwarded chunk by chunk."""
_KEPT_HEADERS: Final = ("cache-control", "www-authenticate", "retry-after")
_HOP_HEADERS: Final = frozenset(
    {
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "expect",
        "keep-alive",
        "te",
        "trailer",
        "upgrade",
    }
)
_dialect: Final = ChatDialect()


def shard_socket_path(folder: Path, shard: int) -> Path:
    """Return the path of the Unix socket on which a shard serves HTTP to the other shards."""
    return folder / f"shard-{shard}.sock"


class ShardPeers:
    """HTTP clients for the other shards of the gateway. Each session is owned by one shard, which serves it."""

    def __init__(self, folder: Path, index: int, shards: int) -> None:
        self._index = index
        self._shards = shards
        self._clients = {
            shard: Client(path=str(shard_socket_path(folder, shard)), keepalive=60.0)
            for shard in range(shards)
            if shard != index
        }

    def is_local(self, session: str) -> bool:
        """Return whether this shard owns a session."""
        return owning_shard(session, self._shards) == self._index

    def remote_shard(self, session: str) -> int | None:
        """Return the index of the shard that owns a session; None if this shard owns it."""
        shard = owning_shard(session, self._shards)
        return None if shard == self._index else shard

    async def forward(self, shard: int, request: Request, out: ResponseWriter) -> None:
        """Forward a request to another shard, and forward the shard's response to the client.

        If the shard cannot be reached, the client gets a retryable error.
        """
        try:
            response = await self._send(shard, request)
        except HttpClientError as failure:
            message = f"the gateway shard of this rollout is being restarted ({failure}); send the request again"
            status, body = _dialect.format_error("unavailable", message)
            out.send(status, body, headers=((b"retry-after", b"1"),))
            return
        try:
            await self._copy_response(response, out)
        except HttpClientError:
            out.abort()  # the client sees that the response is incomplete
        finally:
            response.close()

    async def _send(self, shard: int, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP_HEADERS}
        headers[FORWARDED_HEADER] = str(self._index)
        headers.setdefault("x-forwarded-host", request.headers.get("host", ""))
        target = quote(request.path, safe="/:@!$&'()*+,;=~-._%") + (f"?{request.query}" if request.query else "")
        return await self._clients[shard].send(request.method, target, encode_headers(headers), request.body)

    async def _copy_response(self, response: Response, out: ResponseWriter) -> None:
        kind = (response.headers.get("content-type") or "application/json").encode("latin-1")
        more = tuple(
            (name.encode(), value.encode("latin-1"))
            for name in _KEPT_HEADERS
            if (value := response.headers.get(name)) is not None
        )
        length = response.headers.get("content-length")
        if length is not None and int(length) <= MAX_BUFFERED:
            out.send(response.status, await response.read(MAX_BUFFERED), kind, more)
            return
        out.begin(response.status, kind, more)
        while chunk := await response.chunk():
            await out.write(chunk)
        out.end()

    async def collect(self, request: Request, within: float = COLLECT_SECONDS) -> list[bytes]:
        """Send a request to all other shards, and return the bodies of their responses.

        Shards that fail or do not answer within `within` seconds are left out. If the request was itself forwarded
        by another shard, nothing is sent and the list is empty.
        """
        if FORWARDED_HEADER in request.headers:
            return []
        bodies = await asyncio.gather(*(self._fetch(shard, request, within) for shard in self._clients))
        return [body for body in bodies if body is not None]

    async def _exchange(self, shard: int, request: Request, seconds: float) -> tuple[int, bytes]:
        """Send a request to a shard, and return the status and the complete body of the response."""
        async with asyncio.timeout(seconds):
            response = await self._send(shard, request)
            try:
                return response.status, await response.read(MAX_PAGE)
            finally:
                response.close()

    async def _fetch(self, shard: int, request: Request, within: float) -> bytes | None:
        try:
            status, body = await self._exchange(shard, request, within)
        except (TimeoutError, HttpClientError):
            return None
        return body if status == 200 else None

    async def broadcast(self, request: Request, seconds: float) -> None:
        """Send a pause or resume request to every other shard. Does nothing if another shard has forwarded it.

        Raises an exception group if a running shard returns an error or does not answer within `seconds`. A shard
        that cannot be reached is skipped: it reads the state from the pause file, shared by all shards, when it
        starts.
        """
        if FORWARDED_HEADER in request.headers:
            return
        async with asyncio.TaskGroup() as group:
            for shard in self._clients:
                group.create_task(self._send_checked(shard, request, seconds))

    async def _send_checked(self, shard: int, request: Request, seconds: float) -> None:
        try:
            status, body = await self._exchange(shard, request, seconds)
        except HttpClientError:
            return  # the shard died; its successor reads the pause file
        except TimeoutError:
            raise RookeryError(f"gateway shard {shard} did not respond within {seconds:g} seconds") from None
        if status != 200:
            raise RookeryError(f"gateway shard {shard} returned status {status}: {read_error_message(body)}")

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
