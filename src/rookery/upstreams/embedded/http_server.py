"""How the embedded policy's servers read, write and listen.

Promises:
- a body that does not come, and a reader that does not read, are given up after a while;
- what cannot be served (a port in use) and what cannot be loaded is said in words.
"""

import asyncio
import logging
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, Protocol

from aiohttp import web

from rookery.core import UsageError
from rookery.upstreams.embedded.openai_requests import RequestError
from rookery.upstreams.embedded.openai_responses import encode, error_body
from rookery.upstreams.embedded.weights import CONFIG, TENSORS, Weights
from rookery.upstreams.listeners import bound, foreign_page

MAX_BODY: Final = 8 << 20
MAX_WEIGHTS: Final = 1 << 30
READ_SECONDS: Final = 60.0
"""For a body to come in."""
WRITE_SECONDS: Final = 60.0
"""For a reader to take what is written, before it is given up."""
GRACE_SECONDS: Final = 1.0
"""For answers under way when the server stops."""


async def read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"the request body did not arrive within {READ_SECONDS:g} s", status=408) from None
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from None


def json_answer(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode(body), status=status, headers=headers, content_type="application/json")


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client stopped reading") from None


async def unversioned(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "rookery"


def is_here(remote: str | None) -> bool:
    try:
        address = ip_address(remote or "")
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def foreign(request: web.Request) -> str:
    """Return why a request may come from a web page of somebody else; empty if it does not."""
    return foreign_page(request.headers.get("Host"), request.headers.get("Origin"))


@web.middleware
async def _no_foreign_page(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if why := foreign(request):
        words = f"this server answers programs of its own machine alone, and {why}"
        return json_answer(error_body(403, words), status=403)
    return await handler(request)


def load_weights(where: str) -> Weights:
    """Looked at before it is read: a device or a pipe would be read for ever."""
    path = Path(where)
    try:
        files = (path / TENSORS, path / CONFIG) if path.is_dir() else (path,)
        for file in files:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_WEIGHTS:
                raise UsageError(f"the weights {where:.200} cannot be used: not a file of at most 1 GiB")
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the weights {where:.200} cannot be read: {said}") from None
    return Weights.load(path)


class HasApplication(Protocol):
    """What has handlers to listen for."""

    def app(self) -> web.Application: ...


@asynccontextmanager
async def listening(
    server: HasApplication,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    access_log: logging.Logger | None = None,
    grace: float = GRACE_SECONDS,
    refuse_foreign_pages: bool = False,
) -> AsyncIterator[str]:
    """Serve for as long as the block lasts, and yield the URL with its `/v1`. Port 0: one that is free.

    `refuse_foreign_pages`: answer only requests whose `Host` and `Origin` are this machine.
    """
    sock = bound(host, port)
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
