"""A server that sends scripted bytes, for misbehaviour: streams that are cut, stall or lie.

    async with Engine() as engine:
        engine.on("/v1/chat/completions", Play(events=[...]))
        ... engine.url, engine.requests

Every answer is written by hand, so that it can end at any byte. A request to a path without a play gets 404.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import orjson


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else orjson.dumps(body)) + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass
class Play:
    """One scripted response: `events` as a stream, or a complete `body`."""

    body: Any = None
    events: Sequence[bytes] | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Close the connection after this number of bytes of the response."""
    hold: asyncio.Event | None = None
    """Event to wait for before the response is sent."""
    stall: asyncio.Event | None = None
    """Event to wait for before the last event is sent."""
    between: asyncio.Semaphore | None = None
    """Semaphore with one permit for each event."""

    def raw(self) -> list[bytes]:
        """Return the bytes of the response, in the pieces in which they are written."""
        head = f"HTTP/1.1 {self.status} Played\r\n"
        if self.events is None:
            data = self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)
            fields = {"Content-Type": "application/json", "Content-Length": str(len(data)), **self.headers}
            return [head.encode() + _fields(fields) + data]
        fields = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked", **self.headers}
        chunks = [b"%x\r\n%s\r\n" % (len(data), data) for data in self.events]
        return [head.encode() + _fields(fields), *chunks, b"0\r\n\r\n"]


def _fields(fields: dict[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in fields.items()).encode() + b"\r\n"


@dataclass
class ReceivedRequest:
    method: str
    path: str
    body: Any


class Engine:
    """A server with scripted responses by path; the last script of a path is repeated."""

    def __init__(self) -> None:
        self.requests: deque[ReceivedRequest] = deque(maxlen=100_000)
        self.connections = 0
        self.disconnects = 0
        """Number of connections that the client closed before the response was complete."""
        self._plays: dict[str, deque[Play]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Condition()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def on(self, path: str, *plays: Play) -> None:
        self._plays[path] = deque(plays)

    def requests_to(self, path: str) -> list[ReceivedRequest]:
        return [request for request in self.requests if request.path == path]

    async def until(self, true: Any) -> None:
        """Wait until a condition about the server holds."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(true)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._server = None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        length = next((int(line.split(":")[1]) for line in head if line.lower().startswith("content-length")), 0)
        data = await reader.readexactly(length)
        self.requests.append(ReceivedRequest(method, path, orjson.loads(data) if data else None))
        await self._notify()
        plays = self._plays.get(path.partition("?")[0])
        if plays is None:
            play = Play(status=404, body={"error": {"message": "Not Found"}})
        else:
            play = plays.popleft() if len(plays) > 1 else plays[0]
        watch = asyncio.create_task(reader.read(1))
        answer = asyncio.create_task(self._answer(writer, play))
        try:
            await asyncio.wait((watch, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and watch.done():
                self.disconnects += 1
                await self._notify()
                return False
            return await answer
        finally:
            answer.cancel()
            if not watch.done():
                watch.cancel()
            await asyncio.gather(watch, answer, return_exceptions=True)

    async def _answer(self, writer: asyncio.StreamWriter, play: Play) -> bool:
        if play.hold is not None:
            await play.hold.wait()
        pieces = play.raw()
        left = sum(map(len, pieces)) if play.cut is None else play.cut
        for number, piece in enumerate(pieces):
            if play.events is not None and 0 < number < len(pieces) - 1:
                if play.between is not None:
                    await play.between.acquire()
                if play.stall is not None and number == len(pieces) - 2:
                    await play.stall.wait()
            writer.write(piece[:left])
            left -= min(left, len(piece))
            await writer.drain()
            if play.cut is not None and not left:
                return False
        return True
