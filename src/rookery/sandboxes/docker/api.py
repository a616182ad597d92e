"""Calls to a Docker engine, or to podman's service, over its socket on this machine.

Promises:
- connections are reused, and there are never more than a fixed number of them, however many calls are made; who
  waits for one waits for others of ours, which no timeout counts;
- what goes wrong is told as `asking` tells it;
- no call is made again by itself: who calls knows what may be done twice.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rookery.sandboxes.docker.asking import (
    QUICK_SECONDS,
    EngineGone,
    Refused,
    path,
    refusal,
    socket_path,
    status_of,
)

__all__ = [
    "CALL_SECONDS",
    "CONNECTIONS",
    "QUICK_SECONDS",
    "Engine",
    "EngineGone",
    "Refused",
    "path",
    "socket_path",
]

CONNECTIONS = 32
CALL_SECONDS = 60.0
_BASE = "http://engine"


class Engine:
    """Bound to the loop of its first call."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(CONNECTIONS)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.UnixConnector(path=self.place, limit=CONNECTIONS, keepalive_timeout=30.0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=QUICK_SECONDS)
            plain = {"Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=plain)
        return self._session

    async def call(
        self,
        method: str,
        where: str,
        body: Any = None,
        *,
        data: Any = None,
        ok: tuple[int, ...] = (),
        timeout: float = CALL_SECONDS,
    ) -> Any:
        """What the engine answers: plain data, bytes, or None for those of `ok` (errors that are fine)."""
        what = f"{method} {where.partition('?')[0]}"
        with _told(what, self.place, timeout):
            async with self._places, asyncio.timeout(timeout):
                session = self._opened()
                async with session.request(method, f"{_BASE}{where}", json=body, data=data) as reply:
                    text = await reply.read()
                    status = status_of(reply.status, text)
                    if status in ok:
                        return None
                    if status >= 400:
                        raise refusal(what, status, text)
                    return json.loads(text) if "json" in reply.content_type and text.strip() else text

    async def header(self, method: str, where: str, name: str, *, ok: tuple[int, ...] = ()) -> str | None:
        """Of the answer, one line of its head, empty where it has none; None for those of `ok` that have it not:
        where a link leads to nothing podman says that nothing is there, and tells of the link all the same."""
        what = f"{method} {where.partition('?')[0]}"
        with _told(what, self.place, CALL_SECONDS):
            async with (
                self._places,
                asyncio.timeout(CALL_SECONDS),
                self._opened().request(method, f"{_BASE}{where}") as reply,
            ):
                text = await reply.read()
                status = status_of(reply.status, text)
                if status in ok:
                    return reply.headers.get(name)
                if status >= 400:
                    raise refusal(what, status, text)
                return reply.headers.get(name, "")

    @asynccontextmanager
    async def stream(self, method: str, where: str) -> AsyncIterator[aiohttp.StreamReader]:
        """An answer that goes on; its connection is closed at the end, since nobody knows what is still in it."""
        what = f"{method} {where.partition('?')[0]}"
        with _told(what, self.place, QUICK_SECONDS):
            async with self._places, self._opened().request(method, f"{_BASE}{where}") as reply:
                try:
                    if reply.status >= 400:
                        raise refusal(what, reply.status, await reply.read())
                    yield reply.content
                finally:
                    reply.close()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class _told:  # noqa: N801  (used as a function)
    """Whatever goes wrong with the connection, in words."""

    def __init__(self, what: str, place: str, timeout: float) -> None:
        self._about = (what, place, timeout)

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        what, place, timeout = self._about
        if isinstance(error, TimeoutError):
            raise EngineGone(f"the engine at {place} did not answer {what} within {timeout:g} s") from error
        if isinstance(error, aiohttp.ClientError | OSError | ValueError):
            raise EngineGone(f"the engine at {place} cannot be reached ({what}): {error}") from error
