"""Client for the Kubernetes API: requests, watches and programs in containers. Runs in the owner's process.

Guarantees:
- a request or watch that the server refuses because of its load (429, or 503 with Retry-After) is repeated when
  the server says, a bounded number of times;
- `follow` misses no final state of an object: after a gap (410, a broken stream) it reads the object again.

The official client is not used: it is not asynchronous, and imports thousands of generated modules, which takes
2.2 times as long (`python -m benchmarks libraries`, 2026-11-19). What is needed here is a few requests.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rookery.core import SandboxError
from rookery.core.errors import describe
from rookery.sandboxes.kubernetes.cluster_access import ClusterAccess

if TYPE_CHECKING:
    import aiohttp

_log = logging.getLogger("rookery.sandboxes")
CALL_SECONDS = 30.0
WATCH_SECONDS = 240
"""Time after which the server ends a watch, which is then opened again."""
WATCH_PAUSE_SECONDS = 1.0
"""Minimum time between the starts of two watches of an object, for servers that end watches at once."""
HEARTBEAT_SECONDS = 15.0
"""Interval of the pings that notice when the connection to a program in a container is silently dead."""
CLOSE_SECONDS = 5.0
MAX_RETRIES = 20
MAX_RETRY_SECONDS = 30.0
LIST_LIMIT = 500
CHUNK_BYTES = 32 << 10
"""Maximum size of a WebSocket message to a program. kubectl's messages are not larger, either."""
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR = range(3)


class APIUnreachable(SandboxError):  # noqa: N818  (a state of the API server)
    """The Kubernetes API server does not answer, or the connection to it broke."""

    cause = "sandbox.create"


class APIError(SandboxError):
    """The Kubernetes API server refused a request."""

    cause = "sandbox.create"

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        reason: str = "",
        retry_after: float | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.status = status
        self.retry_after = retry_after
        """Number of seconds after which the request should be repeated; None if it should not."""
        self.reason = reason
        """Machine-readable reason of the server, such as `AlreadyExists`; empty if it gave none."""


class KubernetesClient:
    """Sends requests to one API server. Bound to the running event loop from the first request until `close`."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._session: aiohttp.ClientSession | None = None

    async def _open_session(self) -> "tuple[aiohttp.ClientSession, dict[str, Any]]":
        """Return the HTTP session and the arguments that every request has."""
        import aiohttp  # slow to import; every start of a run loads this module

        headers = await self._access.make_headers()
        if self._session is None:
            secure = self._access.server.startswith("https:")
            tls = await asyncio.to_thread(self._access.make_ssl_context) if secure else True
            if self._session is None:
                self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls, limit=0))
        return self._session, {
            "headers": headers,
            "proxy": self._access.proxy,
            "server_hostname": self._access.server_name,
        }

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        ok: tuple[int, ...] = (),
        content_type: str = "application/json",
    ) -> Any:
        """Send a request and return the object in the response, or None for an error status in `ok`.

        Raise `APIError` for another error status and `APIUnreachable` if the server does not answer.
        """
        data = None if body is None else json.dumps(body)
        for attempt in range(MAX_RETRIES + 1):
            async with self._request(method, path, data, query, content_type, timeout=CALL_SECONDS) as response:
                content = await response.read()
                status, headers = response.status, response.headers
            if status in ok:
                return None
            if status < 400:
                return json.loads(content) if content else None
            if status == 401 and attempt == 0 and self._access.renew():
                continue
            error = _make_error(method, path, status, content, headers)
            if error.retry_after is None or attempt == MAX_RETRIES:
                raise error
            await asyncio.sleep(error.retry_after)
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        data: str | None,
        query: Mapping[str, str] | None,
        content_type: str,
        *,
        timeout: float | None,
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        import aiohttp

        session, options = await self._open_session()
        options["headers"] |= {"Content-Type": content_type, "Accept": "application/json"}
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CALL_SECONDS)
        url = f"{self._access.server}{path}"
        try:
            async with session.request(
                method, url, data=data, params=query, timeout=limits, **options
            ) as response:
                yield response
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise APIUnreachable(
                f"the API server {self._access.server} did not answer {method} {path}: {describe(error)}"
            ) from error

    async def list(self, path: str, *, label: str = "") -> "list[dict[str, Any]]":
        """Return all objects of a collection, or those that have a label."""
        found: list[dict[str, Any]] = []
        query = {"labelSelector": label, "limit": str(LIST_LIMIT)}
        while True:
            try:
                page = await self.call("GET", path, query=query)
            except APIError as error:
                if error.status != 410 or "continue" not in query:
                    raise
                found, page = [], {"metadata": {"continue": ""}}  # the pages are too old: begin again
                del query["continue"]
                continue
            found += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return found
            query["continue"] = token

    async def follow(self, path: str, name: str, *, version: str = "") -> "AsyncIterator[dict[str, Any] | None]":
        """Yield each new state of an object of the collection `path`; None when it is deleted.

        `version` is the resource version after which to begin; without it, the current state is the first.
        """
        selector = {"fieldSelector": f"metadata.name={name}"}
        loop, refused = asyncio.get_running_loop(), 0
        while True:
            if not version:
                page = await self.call("GET", path, query=selector)
                # The version of the list, because that of the object may be too old for a watch.
                version = page["metadata"]["resourceVersion"]
                yield page["items"][0] if page["items"] else None
            started = loop.time()
            try:
                async for kind, changed in self.watch(path, {**selector, "resourceVersion": version}):
                    version = changed["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield None if kind == "DELETED" else changed
            except APIUnreachable:
                version = ""
                await asyncio.sleep(1.0)
            except APIError as error:
                if error.status == 410:
                    version = ""
                elif error.retry_after is None or refused == MAX_RETRIES:
                    raise
                else:
                    refused += 1
                    await asyncio.sleep(error.retry_after)
            else:
                refused = 0
            await asyncio.sleep(started + WATCH_PAUSE_SECONDS - loop.time())

    async def watch(self, path: str, query: Mapping[str, str]) -> "AsyncIterator[tuple[str, dict[str, Any]]]":
        """Yield the type and the object of each change, until the server ends the watch."""
        query = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        async with self._request("GET", path, None, query, "application/json", timeout=None) as response:
            if response.status >= 400:
                raise _make_error("GET", path, response.status, await response.read(), response.headers)
            buffer = b""
            async for data in response.content.iter_any():
                *lines, buffer = (buffer + data).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _make_error("GET", path, int(event["object"].get("code", 500)), line, {})
                    yield event["type"], event["object"]

    async def exec(self, path: str, argv: Sequence[str], container: str) -> "ExecStream":
        """Start a program in a container of the pod `path` and return its standard input and output."""
        import aiohttp

        query = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in argv]
        session, options = await self._open_session()
        url = f"{self._access.server}{path}/exec"
        options.pop("server_hostname")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                socket = await session.ws_connect(
                    url,
                    params=query,
                    protocols=PROTOCOLS,
                    max_msg_size=0,
                    autoping=True,
                    heartbeat=HEARTBEAT_SECONDS,
                    **options,
                )
        except aiohttp.WSServerHandshakeError as error:
            raise APIError(
                f"the Kubernetes API server refused to run a program in {path}: {error.status} {error.message}",
                status=error.status,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise APIUnreachable(
                f"the API server {self._access.server} did not answer GET {path}/exec: {describe(error)}"
            ) from error
        if socket.protocol not in PROTOCOLS:
            await socket.close()
            raise APIError(f"the Kubernetes API server does not support {' or '.join(PROTOCOLS)} for exec")
        return ExecStream(socket)

    async def close(self) -> None:
        """Close all connections. The client can be used again, also on another event loop."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class ExecStream:
    """Standard input and output of a program in a container, as channels of one WebSocket. A `Connection`."""

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse") -> None:
        self._socket = socket

    async def read(self) -> bytes:
        """Return the next bytes of standard output, or `b""` when the program or the connection has ended."""
        import aiohttp

        while True:
            message = await self._socket.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                return b""
            channel, data = message.data[:1], message.data[1:]
            if channel == bytes((STDOUT,)) and data:
                return bytes(data)
            if channel == bytes((STDERR,)) and data:
                _log.info("a program in a pod wrote to standard error: %s", data[:500])

    async def write(self, data: bytes) -> None:
        """Send bytes to standard input. Raise `OSError` if the connection is closed."""
        for start in range(0, len(data), CHUNK_BYTES):
            await self._socket.send_bytes(bytes((STDIN,)) + data[start : start + CHUNK_BYTES])

    async def close(self) -> None:
        """Close the connection, which closes the program's standard input."""
        with contextlib.suppress(TimeoutError):  # a dead connection takes no bytes; it is then aborted
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()


def _read_retry_after(status: int, headers: Mapping[str, str]) -> float | None:
    """Return after how many seconds a refused request should be sent again; None if it should not."""
    text = headers.get("Retry-After", "")
    if status == 429 or (status == 503 and text):
        return min(float(text), MAX_RETRY_SECONDS) if text.isdecimal() else 1.0
    return None


def _make_error(method: str, path: str, status: int, content: bytes, headers: Mapping[str, str]) -> APIError:
    message, reason = content.decode("utf-8", "replace"), ""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(content)
        found = found.get("object", found)
        message, reason = str(found["message"]), str(found.get("reason", ""))
    return APIError(
        f"the Kubernetes API server answered {method} {path} with {status}: {message.strip()[:500]}",
        status=status,
        reason=reason,
        retry_after=_read_retry_after(status, headers),
    )
