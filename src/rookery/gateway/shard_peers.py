"""The other shards of a gateway, reached over Unix sockets in a folder of their own.

Promises:
- a request is passed on as it came and its answer as it comes, byte for byte, no more than one piece in memory;
- a client that goes away takes the passed-on request with it;
- a shard that is being restarted is a retryable error, at once;
- what all shards are told is done by all that live, or it is an error.
"""

import asyncio
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rookery.core import RookeryError
from rookery.gateway.dialects.chat import ChatDialect
from rookery.gateway.http import FORWARDED_HEADER, Request, ResponseWriter, read_error_message
from rookery.gateway.registry import owning_shard
from rookery.upstreams.http import Client, HttpClientError, Response, encode_headers

COLLECT_SECONDS: Final = 10.0
"""For what all shards are asked for one page."""
MAX_PAGE: Final = 64 << 20
MAX_BUFFERED: Final = 256 << 10
"""Answers up to this are passed on in one piece."""
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
    return folder / f"shard-{shard}.sock"


class ShardPeers:
    """Who owns what, and the way there."""

    def __init__(self, folder: Path, index: int, shards: int) -> None:
        self._index = index
        self._shards = shards
        self._clients = {
            shard: Client(path=str(shard_socket_path(folder, shard)), keepalive=60.0)
            for shard in range(shards)
            if shard != index
        }

    def is_local(self, session: str) -> bool:
        return owning_shard(session, self._shards) == self._index

    def remote_shard(self, session: str) -> int | None:
        """The shard that a session belongs to; None where it is ours."""
        shard = owning_shard(session, self._shards)
        return None if shard == self._index else shard

    async def forward(self, shard: int, request: Request, out: ResponseWriter) -> None:
        try:
            response = await self._send(shard, request)
        except HttpClientError as failure:
            said = f"this rollout's shard is not there ({failure}); it is being restarted: try again"
            status, body = _dialect.format_error("unavailable", said)
            out.send(status, body, headers=((b"retry-after", b"1"),))
            return
        try:
            await self._copy_response(response, out)
        except HttpClientError:
            out.abort()  # cut off here as it was there: the reader sees that something is missing
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
        """What all other shards answer; one that does not is left out. Nothing where another shard asks."""
        if FORWARDED_HEADER in request.headers:
            return []
        answers = await asyncio.gather(*(self._fetch(shard, request, within) for shard in self._clients))
        return [answer for answer in answers if answer is not None]

    async def _exchange(self, shard: int, request: Request, seconds: float) -> tuple[int, bytes]:
        """The status and the whole answer."""
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
        """Has every other shard do the same; raises where one that lives does not.

        One that is not there reads what it must do when it starts. Nothing where another shard asks."""
        if FORWARDED_HEADER in request.headers:
            return
        async with asyncio.TaskGroup() as group:
            for shard in self._clients:
                group.create_task(self._send_checked(shard, request, seconds))

    async def _send_checked(self, shard: int, request: Request, seconds: float) -> None:
        try:
            status, body = await self._exchange(shard, request, seconds)
        except HttpClientError:
            return  # it ended: the next reads what was written down
        except TimeoutError:
            raise RookeryError(f"shard {shard} did not respond within {seconds:g} seconds") from None
        if status != 200:
            raise RookeryError(f"shard {shard}: {read_error_message(body)}")

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
