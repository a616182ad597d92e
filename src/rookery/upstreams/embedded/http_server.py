"""HTTP helpers of the embedded policy's server: read bodies, write with a timeout, listen, check where requests
come from.

Guarantees:
- a request whose body does not arrive, and a client that does not read the response, are given up after a timeout;
- a port that cannot be bound and weights that cannot be loaded raise an error that says why.
"""

import asyncio
import logging
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, Protocol

from aiohttp import web

from rookery.core import UsageError
from rookery.upstreams.embedded.openai_requests import RequestError
from rookery.upstreams.embedded.openai_responses import encode, error_body
from rookery.upstreams.embedded.weights import CONFIG, TENSORS, Weights
from rookery.upstreams.listeners import bind_listener, find_foreign_header

MAX_BODY: Final = 8 << 20
MAX_WEIGHTS: Final = 1 << 30
READ_SECONDS: Final = 60.0
"""Timeout in seconds for the body of a request to arrive."""
WRITE_SECONDS: Final = 60.0
"""Timeout in seconds for a client to read what the server writes; then the connection is closed."""
GRACE_SECONDS: Final = 1.0
"""Seconds that responses in flight get to finish when the server stops."""


async def read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the request body did not arrive within {READ_SECONDS:g} s", status=408) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body of the request cannot be read: {error}") from None


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(
            f"the client {request.remote} did not read the response within {WRITE_SECONDS:g} s, so the server "
            "closed the connection: send the request again and read the response as it arrives"
        ) from None


async def set_server_header(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "rookery"


def is_loopback_client(remote: str | None) -> bool:
    try:
        address = ip_address(remote or "")
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def foreign(request: web.Request) -> str:
    """Return a message that says why a request may come from a web page of another site; empty if it cannot."""
    return find_foreign_header(request.headers.get("Host"), request.headers.get("Origin"))


@web.middleware
async def _no_foreign_page(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if why := foreign(request):
        words = f"this server accepts requests only from programs on its own machine: {why}"
        return json_response(error_body(403, words), status=403)
    return await handler(request)


def load_weights(where: str) -> Weights:
    """Load weights from a file or a directory. Raises `UsageError` if they cannot be loaded.

    Devices and pipes are refused, because reading them may never end; so are files above `MAX_WEIGHTS` bytes.
    """
    path = Path(where)
    try:
        files = (path / TENSORS, path / CONFIG) if path.is_dir() else (path,)
        for file in files:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_WEIGHTS:
                raise UsageError(f"the weights {where:.200} cannot be used: this is not a file of at most 1 GiB")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the weights {where:.200} cannot be read: {reason}") from None
    return Weights.load(path)


class HasApplication(Protocol):
    """An object that provides an aiohttp application."""

    def app(self) -> web.Application: ...


@asynccontextmanager
async def run_server(
    server: HasApplication,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    access_log: logging.Logger | None = None,
    grace: float = GRACE_SECONDS,
    refuse_foreign_pages: bool = False,
) -> AsyncIterator[str]:
    """Serve until the `async with` block ends. Yield the base URL, which ends in `/v1`. Port 0 selects a free
    port.

    `grace` is the number of seconds that responses in flight get at the end. With `refuse_foreign_pages`, requests
    whose `Host` or `Origin` header is not this machine are refused, because a web page may have sent them.
    """
    sock = bind_listener(host, port)
    try:
        app = server.app()
        if refuse_foreign_pages:
            app.middlewares.append(_no_foreign_page)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=grace,
            access_log=access_log,
            access_log_format='%a "%r" %s, %b bytes, %Tf s',
        )
        try:
            await runner.setup()
            await web.SockSite(runner, sock, backlog=1024).start()
            where, at = sock.getsockname()[:2]
            yield f"http://{f'[{where}]' if ':' in where else where}:{at}/v1"
        finally:
            await runner.cleanup()
    finally:
        sock.close()


@asynccontextmanager
async def scoped_tasks(
    work: Iterable[Coroutine[Any, Any, None]], on_end: Callable[[object], None] | None = None
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run each coroutine as a task, and cancel the tasks that have not ended when the block ends.

    `on_end` is called with each task that ends.
    """
    tasks = [asyncio.create_task(one) for one in work]
    if on_end is not None:
        for task in tasks:
            task.add_done_callback(on_end)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
