"""The only client for the HTTP API of Docker and Podman engines.

`EngineClient` runs on an event loop and serves the provider. `BlockingEngineClient` serves the reaper, `rookery
doctor` and the process that fetches images, none of which has a loop. Both interpret responses with the same code.
aiodocker is not used: it needs 190 times the memory to copy a file of 64 MiB (`python -m benchmarks libraries`),
has no blocking interface, and does not translate Podman's status codes. Nothing heavy is imported here, because
every start of a run calls the reaper.

Guarantees:
- a container engine that cannot be reached raises `EngineUnreachable`; one that answers with an error raises
  `EngineAPIError`;
- `EngineClient` reuses connections and never opens more than `MAX_CONNECTIONS`.

A timeout does not include the wait for a free connection. No request is repeated automatically: only the caller
knows which requests may be sent twice.
"""

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from rookery.core import SandboxError, UsageError
from rookery.sandboxes.docker.endpoint import CONNECT_SECONDS, EngineEndpoint, accepts_connections, find_endpoint

if TYPE_CHECKING:
    import aiohttp

MAX_CONNECTIONS = 32
CALL_SECONDS = 60.0
SLOW_CALL_SECONDS = 15.0
"""Timeout of calls that Podman answers slowly: for `info` it runs its helper programs to learn their versions, and
listing containers waits for those that are being created or removed."""
CHUNK_BYTES = 1 << 20
_BASE_URL = "http://engine"
_STATUS_BY_PODMAN_CAUSE = {
    "no such container": 404,
    "no such image": 404,
    "no such exec session": 404,
    "invalid reference format": 400,
}


class EngineUnreachable(SandboxError):  # noqa: N818  (a state of the container engine)
    """No container engine answers at the socket, or the connection broke."""

    cause = "sandbox.create"


class EngineAPIError(SandboxError):
    """The container engine answered with an error status."""

    cause = "sandbox.create"

    def __init__(self, message: str, *, status: int = 0, **details: Any) -> None:
        super().__init__(message, **details)
        self.status = status

    @property
    def refuses_quota(self) -> bool:
        """True if the container engine refuses a disk quota. Engines have no error code for it, only the option's
        name."""
        return "storage" in str(self)


def find_socket() -> str:
    """Return the path of the Unix socket of the container engine that the user has chosen (`find_endpoint`).

    Raise `UsageError` if that container engine is not on this machine, or the choice is invalid.
    """
    endpoint = find_endpoint()
    if endpoint.remote:
        raise UsageError(f"the container engine at {endpoint} is on another machine, and this needs one here")
    return endpoint.path


def find_running_engine() -> "BlockingEngineClient | None":
    """Return a client for the container engine of this machine, or None if no engine accepts connections."""
    try:
        path = find_socket()
    except UsageError:
        return None
    return BlockingEngineClient(path) if accepts_connections(path) else None


def api_path(*parts: str, **query: Any) -> str:
    """Build the path of an API call. Slashes in a part are kept: image names contain them."""
    path = "/" + "/".join(quote(part, safe="/:@") for part in parts)
    return f"{path}?{urlencode(query)}" if query else path


def label_filter(*labels: str) -> str:
    """Return a `filters` query parameter, so that the engine lists only containers or images with these labels."""
    return json.dumps({"label": list(labels)})


def normalize_status(status: int, body: bytes) -> int:
    """Return the status that Docker would have answered.

    Podman answers 500 to many client errors, for example a container that disappears during the call, and names
    the actual error in the field `cause` of the body.
    """
    if status != 500:
        return status
    try:
        cause = str(json.loads(body)["cause"])
    except (ValueError, KeyError, TypeError):
        return status
    return next((meant for text, meant in _STATUS_BY_PODMAN_CAUSE.items() if cause.endswith(text)), status)


def parse_response(call: str, status: int, content_type: str, body: bytes, ok: tuple[int, ...]) -> Any:
    """Return the body of a response, decoded if it is JSON, or None if its status is an error listed in `ok`.

    Raise `EngineAPIError` for any other error status.
    """
    status = normalize_status(status, body)
    if status in ok:
        return None
    if status >= 400:
        raise api_error(call, status, body)
    return json.loads(body) if "json" in content_type and body.strip() else body


def api_error(call: str, status: int, body: bytes) -> EngineAPIError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace")
    return EngineAPIError(
        f"the container engine answered {call} with {status}: {message.strip()[:500]}", status=status
    )


def _describe_call(method: str, path: str) -> str:
    return f"{method} {path.partition('?')[0]}"


def _timed_out(call: str, socket_path: str, timeout: float) -> EngineUnreachable:
    return EngineUnreachable(f"the container engine at {socket_path} did not answer {call} within {timeout:g} s")


def _connection_error(call: str, socket_path: str, error: BaseException) -> EngineUnreachable:
    return EngineUnreachable(f"the container engine at {socket_path} cannot be reached ({call}): {error}")


class EngineClient:
    """Asynchronous client for a container engine. Bound to the event loop of its first call."""

    def __init__(self, engine: str | EngineEndpoint) -> None:
        """Use the container engine at an endpoint without SSH, or at the path of a Unix socket."""
        self._endpoint = EngineEndpoint(path=engine) if isinstance(engine, str) else engine
        self.socket_path = str(self._endpoint)
        self._session: aiohttp.ClientSession | None = None
        self._base_url = _BASE_URL
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)

    def _open_session(self) -> "aiohttp.ClientSession":
        if self._session is None:
            import aiohttp

            connector: aiohttp.BaseConnector
            if self._endpoint.host:
                tls = self._endpoint.make_ssl_context()
                self._base_url = (
                    f"http{'s' if tls else ''}://{_bracket(self._endpoint.host)}:{self._endpoint.port}"
                )
                connector = aiohttp.TCPConnector(ssl=tls or True, limit=MAX_CONNECTIONS, keepalive_timeout=30.0)
            else:
                connector = aiohttp.UnixConnector(
                    path=self._endpoint.path, limit=MAX_CONNECTIONS, keepalive_timeout=30.0
                )
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            headers = {"Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        return self._session

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, timeout: float | None, body: Any = None, data: Any = None
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        import aiohttp

        call = _describe_call(method, path)
        try:
            async with (
                self._connections,
                asyncio.timeout(timeout),
                self._open_session().request(method, f"{self._base_url}{path}", json=body, data=data) as response,
            ):
                yield response
        except TimeoutError as error:
            raise _timed_out(call, self.socket_path, timeout or CONNECT_SECONDS) from error
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise _connection_error(call, self.socket_path, error) from error

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: Any = None,
        ok: tuple[int, ...] = (),
        timeout: float = CALL_SECONDS,
    ) -> Any:
        """Send a request. Return the response's body, decoded if it is JSON; None for an error status in `ok`.

        `body` is sent as JSON, `data` as raw bytes or the content of a file. Raise `EngineAPIError` for an error
        status that is not in `ok`, and `EngineUnreachable` if the container engine does not answer in time.
        """
        async with self._request(method, path, timeout=timeout, body=body, data=data) as response:
            content = await response.read()
            call = _describe_call(method, path)
            return parse_response(call, response.status, response.content_type, content, ok)

    async def get_header(self, method: str, path: str, name: str, *, ok: tuple[int, ...] = ()) -> str | None:
        """Send a request. Return a header of the response, or "" if the response does not have that header.

        If the status is an error listed in `ok`, a missing header is returned as None. The header can be present
        in spite of the error: for a dangling symbolic link Podman answers 404 and still describes the link.
        """
        async with self._request(method, path, timeout=CALL_SECONDS) as response:
            content = await response.read()
            status = normalize_status(response.status, content)
            if status >= 400 and status not in ok:
                raise api_error(_describe_call(method, path), status, content)
            return response.headers.get(name, None if status in ok else "")

    @asynccontextmanager
    async def stream(self, method: str, path: str) -> "AsyncIterator[aiohttp.StreamReader]":
        """Send a request and yield the response's body as a stream, without a time limit.

        The connection is closed at the end of the block instead of being reused.
        """
        async with self._request(method, path, timeout=None) as response:
            try:
                if response.status >= 400:
                    raise api_error(_describe_call(method, path), response.status, await response.read())
                yield response.content
            finally:
                response.close()

    async def hijack(self, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a POST request after which the connection is a raw stream, and return that stream.

        Raise `EngineAPIError` if the container engine refuses, and `EngineUnreachable` if it cannot be reached.
        """
        call, endpoint = _describe_call("POST", path), self._endpoint
        content = json.dumps(body).encode()
        headers = (
            f"POST {path} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if endpoint.host:
                    tls = endpoint.make_ssl_context()
                    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
                else:
                    reader, writer = await asyncio.open_unix_connection(endpoint.path)
                writer.write(headers.encode() + content)
                await writer.drain()
                status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                number = int(status.split()[1])
                if number not in (101, 200):
                    lengths = [
                        line.partition(":")[2] for line in lines if line.lower().startswith("content-length")
                    ]
                    raise api_error(call, number, await reader.readexactly(int(lengths[0])) if lengths else b"")
                return reader, writer
        except BaseException as error:
            if writer is not None:
                writer.close()
            if isinstance(error, TimeoutError):
                raise _timed_out(call, self.socket_path, CALL_SECONDS) from error
            if isinstance(error, OSError | EOFError | ValueError | IndexError | asyncio.LimitOverrunError):
                raise _connection_error(call, self.socket_path, error) from error
            raise

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("engine", timeout=timeout, blocksize=CHUNK_BYTES)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class BlockingEngineClient:
    """Blocking client for a container engine. Opens one connection per call, so threads can share an instance."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        data: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = CALL_SECONDS,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response, whatever its status. `timeout` limits each socket operation.

        `data` is bytes or an object with `read(size)`.
        """
        call = _describe_call(method, path)
        connection = _UnixConnection(self.socket_path, timeout)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise _connection_error(call, self.socket_path, error) from error
            connection.request(method, path, data, dict(headers or {}))
            yield connection.getresponse()
        except TimeoutError as error:
            raise _timed_out(call, self.socket_path, timeout) from error
        except (ConnectionError, http.client.HTTPException) as error:
            raise _connection_error(call, self.socket_path, error) from error
        finally:
            connection.close()

    def call(self, method: str, path: str, *, ok: tuple[int, ...] = (), timeout: float = CONNECT_SECONDS) -> Any:
        """Send a request. Return the response's body, decoded if it is JSON; None for an error status in `ok`."""
        with self.open(method, path, timeout=timeout) as response:
            content_type = response.getheader("Content-Type") or ""
            return parse_response(_describe_call(method, path), response.status, content_type, response.read(), ok)
