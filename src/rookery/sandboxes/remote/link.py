"""Calls and byte streams between a process that uses sandboxes and the program that runs them elsewhere.

Both ends of a connection run this code. Each call has a number, a method, arguments, one result or error, and a
stream of bytes in each direction. Either end can call the other.

Guarantees:
- a stream that is not read blocks only its own writer: each direction of a stream has a window;
- a cancelled call is cancelled at the other end, too, and the caller waits until the work there has stopped;
- when the connection ends, every pending call raises `HostLost` at once;
- a frame that is too large, malformed or not allowed ends the connection: the other end is not trusted.
"""

import asyncio
import contextlib
import errno
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from rookery.core import RookeryError, SandboxError, UsageError
from rookery.core.errors import describe
from rookery.core.lifetimes import detached_context

_log = logging.getLogger("rookery.sandboxes")

MAX_FRAME: Final = 128 << 20
CHUNK_BYTES: Final = 64 << 10
WINDOW_BYTES: Final = 512 << 10
"""Number of bytes of a stream that may be under way to a reader that has not read them."""
CANCEL_SECONDS: Final = 20.0
PING_SECONDS: Final = 10.0
MAX_SERVED: Final = 20_000
"""Maximum number of calls of the other end that are served at the same time."""
STALL_SECONDS: Final = 30.0
"""If nothing arrives for this long, the connection counts as broken. A resumable one is then resumed."""
SILENCE_SECONDS: Final = 60.0
"""If nothing arrives for this long, the other end counts as dead."""
_LENGTH = struct.Struct(">I")
CALL, RESULT, ERROR, CANCEL, DATA, CREDIT, EVENT, PING = range(8)


class HostLost(SandboxError):  # noqa: N818  (a state of the connection)
    """The machine or service that runs a sandbox cannot be reached any more, and its sandboxes are lost."""

    cause = "sandbox.host"


class MachineGone(SandboxError):  # noqa: N818  (a state of the machine)
    """The machine of a sandbox does not exist any more."""

    cause = "sandbox.lost"


class Connection(Protocol):
    """A reliable stream of bytes in both directions, for example the standard input and output of a program."""

    async def read(self) -> bytes:
        """Return the next bytes, or `b""` at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of `data`. Raise `OSError` if the connection is closed."""
        ...

    async def close(self) -> None:
        """Close the connection and free what belongs to it, such as a process."""
        ...


@runtime_checkable
class SupportsDisconnect(Protocol):
    """A `Connection` that can replace the connection below it by a new one, without loss."""

    def disconnect(self) -> None:
        """Give up the current connection and open another one."""
        ...


class Call:
    """One call over a link, at either end: its events and its streams of bytes."""

    def __init__(self, link: "Link", number: int) -> None:
        self._link = link
        self.number = number
        self.on_event: Callable[[Any], None] | None = None
        self._received: deque[bytes] = deque()
        self._unread = 0
        self._changed = asyncio.Event()
        self._window = WINDOW_BYTES
        self._end_sent = self.ended = False

    def send_event(self, value: Any) -> None:
        """Send a message that belongs to this call to the other end. Does nothing if the connection is closed."""
        self._link.send(EVENT, self.number, value)

    async def write(self, data: bytes) -> None:
        """Send bytes to the other end; wait while its window is full. Raise `BrokenPipeError` if the call ended.

        Up to `CHUNK_BYTES` are read by one `read` at the other end.
        """
        view = memoryview(data)
        while view:
            while self._window <= 0 and not self.ended:
                self._changed.clear()
                await self._changed.wait()
            if self.ended or self._end_sent:
                raise BrokenPipeError(errno.EPIPE, "the other end does not read any more")
            part, view = view[:CHUNK_BYTES], view[CHUNK_BYTES:]
            self._window -= len(part)
            self._link.send(DATA, self.number, bytes(part))
            await self._link.flush()

    def end_writing(self) -> None:
        """Tell the reader at the other end that nothing follows."""
        if not self._end_sent and not self.ended:
            self._end_sent = True
            self._link.send(DATA, self.number, b"")

    async def read(self) -> bytes:
        """Return the next bytes from the other end, or `b""` at the end of the stream or of the call."""
        while not self._received:
            if self.ended:
                return b""
            self._changed.clear()
            await self._changed.wait()
        data = self._received[0]
        if data:  # the end stays, for the next call of this method
            self._received.popleft()
            self._unread -= len(data)
            self._link.send(CREDIT, self.number, len(data))
        return data

    def receive(self, kind: int, value: Any) -> None:
        """Process a frame of this call. Called by the link."""
        if kind == DATA:
            self._unread += max(len(value), 1)
            if not isinstance(value, bytes) or self._unread > WINDOW_BYTES + CHUNK_BYTES:
                raise ValueError("a stream exceeded its window")
            self._received.append(value)
        elif kind == CREDIT:
            self._window += value
        elif self.on_event is not None:
            self.on_event(value)
        self._changed.set()

    def end(self) -> None:
        """Mark the call as ended: writers fail, and readers get what has arrived. Called by the link."""
        self.ended = True
        self._changed.set()


Handler = Callable[[Call, str, Any], Awaitable[Any]]


class Link:
    """One end of a connection over which both ends call each other. Bound to the running event loop."""

    def __init__(
        self,
        connection: Connection,
        handler: Handler,
        *,
        odd: bool,
        name: str,
        on_event: Callable[[Any], None] | None = None,
        cause: str = HostLost.cause,
    ) -> None:
        """Start to read from `connection`. `handler` serves the calls of the other end.

        One end has odd call numbers (`odd=True`), the other even ones. `name` is the other end's name in messages.
        `on_event` gets the events that belong to no call. `cause` is that of the error after the other end has
        closed the connection; if it only fell silent, the cause is `HostLost.cause`.
        """
        self._connection = connection
        self._handler = handler
        self._on_event = on_event
        self._cause = cause
        self.name = name
        self._last = 1 if odd else 0
        self._calls: dict[int, Call] = {}
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._served: dict[int, asyncio.Task[None]] = {}
        self._outgoing = bytearray()
        self._wakeup, self._flushed = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last_received = self._loop.time()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Completes when the connection has ended, with the reason."""
        self._tasks = [
            self._loop.create_task(work(), context=detached_context())
            for work in (self._receive_all, self._send_all, self._ping)
        ]

    # ---- calls to the other end

    async def call(
        self,
        method: str,
        arguments: Any = None,
        *,
        use: "Callable[[Call], Awaitable[None]] | None" = None,
        on_event: Callable[[Any], None] | None = None,
        on_unused: Callable[[Any], None] | None = None,
    ) -> Any:
        """Call a method of the other end and return its result. `use` reads and writes the streams meanwhile.

        `on_unused` is as for `wait`, for calls without `use`.
        """
        call = self.open_call(method, arguments, on_event)
        if use is None:
            return await self.wait(call, on_unused)
        waiting, using = asyncio.ensure_future(self.wait(call)), asyncio.ensure_future(use(call))
        try:
            await asyncio.wait({waiting, using}, return_when=asyncio.FIRST_EXCEPTION)
            if using.done() and not isinstance(using.exception(), BrokenPipeError):
                using.result()
            return await waiting  # says why, if the other end stopped reading
        finally:
            waiting.cancel()
            using.cancel()
            await asyncio.wait({waiting, using})

    def open_call(self, method: str, arguments: Any = None, on_event: Callable[[Any], None] | None = None) -> Call:
        """Start a call. `wait` must be awaited for its result."""
        if self.lost.done():
            raise self._error_of_loss()
        self._last += 2
        call = self._calls[self._last] = Call(self, self._last)
        call.on_event = on_event
        self._results[call.number] = self._loop.create_future()
        self.send(CALL, call.number, (method, arguments))
        return call

    async def wait(self, call: Call, on_unused: Callable[[Any], None] | None = None) -> Any:
        """Return the result of a call, or raise its error. If cancelled, cancel the call at the other end.

        `on_unused` is called with the result of a cancelled call that ended before it could be cancelled there.
        """
        future = self._results[call.number]

        def use_result(ended: "asyncio.Future[Any]") -> None:
            # `exception` also marks the error as retrieved, so that asyncio does not log it.
            if ended.exception() is None and on_unused is not None:
                on_unused(ended.result())

        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                self.send(CANCEL, call.number, None)
            future.add_done_callback(use_result)  # the result may arrive after this wait
            await asyncio.wait({future}, timeout=CANCEL_SECONDS)
            raise
        finally:
            self._calls.pop(call.number).end()
            future.add_done_callback(lambda _: self._results.pop(call.number))

    def _error_of_loss(self) -> HostLost:
        return HostLost(f"the connection to {self.name} ended: {self.lost.result()}", cause=self._cause)

    # ---- frames

    def send(self, kind: int, number: int, value: Any) -> None:
        """Queue a frame."""
        if self.lost.done():
            return
        try:
            body = _encode((kind, number, value))
        except (TypeError, ValueError, OverflowError) as error:
            raise SandboxError(
                f"the arguments cannot be sent to {self.name}: {error}", cause="sandbox.refused"
            ) from error
        if len(body) > MAX_FRAME:
            raise SandboxError(
                f"the arguments cannot be sent to {self.name}: they have more than {MAX_FRAME} bytes",
                cause="sandbox.refused",
            )
        self._outgoing += _LENGTH.pack(len(body)) + body
        self._flushed.clear()
        self._wakeup.set()

    async def flush(self) -> None:
        """Wait until all queued frames are sent or the connection has ended."""
        if self._outgoing and not self.lost.done():
            await self._flushed.wait()

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                data, self._outgoing = bytes(self._outgoing), bytearray()
                await self._connection.write(data)
                if not self._outgoing:
                    self._flushed.set()
        except (OSError, RookeryError) as error:
            self._end(describe(error))

    async def _receive_all(self) -> None:
        buffer = bytearray()
        try:
            while data := await self._connection.read():
                self._last_received = self._loop.time()
                buffer += data
                at = 0
                while len(buffer) - at >= 4:
                    (size,) = _LENGTH.unpack_from(buffer, at)
                    if size > MAX_FRAME:
                        raise ValueError("a frame is too large")
                    if len(buffer) - at - 4 < size:
                        break
                    kind, number, value = _decode(memoryview(buffer)[at + 4 : at + 4 + size])
                    at += 4 + size
                    self._dispatch(kind, number, value)
                del buffer[:at]
            self._end("it was closed")
        except Exception as error:  # noqa: BLE001  (the other end can send anything)
            if isinstance(error, SandboxError):  # the connection knows what happened to the machine
                self._cause = error.code
            self._end(describe(error))

    def _dispatch(self, kind: int, number: int, value: Any) -> None:
        if kind == CALL:
            if number in self._calls or number % 2 == self._last % 2 or len(self._served) >= MAX_SERVED:
                raise ValueError("a call is not allowed")
            call = self._calls[number] = Call(self, number)
            self._served[number] = self._loop.create_task(self._serve(call, *value), context=detached_context())
        elif kind in (RESULT, ERROR):
            future = self._results.get(number)
            if future is not None and not future.done():
                if kind == RESULT:
                    future.set_result(value)
                else:
                    future.set_exception(_load_error(value))
        elif kind == CANCEL:
            if number in self._served:
                self._served[number].cancel()
        elif kind in (DATA, CREDIT) or (kind == EVENT and number):
            if number in self._calls:
                self._calls[number].receive(kind, value)
        elif kind == EVENT and self._on_event is not None:
            self._on_event(value)

    async def _serve(self, call: Call, method: str, arguments: Any) -> None:
        try:
            result = await self._handler(call, method, arguments)
            self.send(RESULT, call.number, result)
        except asyncio.CancelledError:
            self.send(ERROR, call.number, ("cancelled", "", "", 0))
        except Exception as error:  # noqa: BLE001  (the caller raises it)
            self.send(ERROR, call.number, _dump_error(error))
        finally:
            call.end()
            del self._calls[call.number], self._served[call.number]

    async def _ping(self) -> None:
        stalled_since = -1.0
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.send(PING, 0, None)
            silence = self._loop.time() - self._last_received
            if silence > SILENCE_SECONDS:
                self._cause = HostLost.cause
                self._end(f"nothing arrived for {SILENCE_SECONDS:g} s")
                return
            if silence > STALL_SECONDS and stalled_since != self._last_received:
                stalled_since = self._last_received  # once: the next connection gets its time
                if isinstance(self._connection, SupportsDisconnect):
                    self._connection.disconnect()

    # ---- end

    def _end(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        self._flushed.set()
        for future in self._results.values():
            if not future.done():
                future.set_exception(self._error_of_loss())
        for call in self._calls.values():
            call.end()
        for task in self._served.values():
            task.cancel()

    async def close(self) -> None:
        """End all calls and close the connection."""
        served = list(self._served.values())
        self._end("it was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *served, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self._connection.close()


def _encode_number(value: Any) -> Any:
    """Return a number of a subclass of `float` or `int` as one of that class itself."""
    for kind in (float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"objects of the type {type(value).__name__} cannot be encoded")


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_number).encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, Any]).decode


def _dump_error(error: Exception) -> tuple[str, str, str, int]:
    if isinstance(error, RookeryError):
        kind = "usage" if isinstance(error, UsageError) else "sandbox"
        return kind, str(error), error.code, 0
    if isinstance(error, TimeoutError):
        return "timeout", str(error), "", 0
    if isinstance(error, OSError):
        return "os", error.strerror or str(error), str(error.filename or ""), error.errno or errno.EIO
    _log.error("a call failed", exc_info=error)
    return "bug", describe(error), "bug.rookery", 0


def _load_error(value: Any) -> Exception:
    kind, message, detail, number = msgspec.convert(value, tuple[str, str, str, int])
    if kind == "os":
        return OSError(number, message, detail) if detail else OSError(number, message)
    if kind == "timeout":
        return TimeoutError(message)
    if kind == "usage":
        return UsageError(message, cause=detail)
    if kind == "sandbox":
        return SandboxError(message, cause=detail)
    if kind == "cancelled":
        return HostLost("the call was cancelled by the other end")
    return RookeryError(f"the program that runs the sandbox failed: {message}", cause="bug.rookery")


async def copy_both_ways(call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes between the stream of a call and a socket until both directions have ended or one fails."""

    async def to_call() -> None:
        while data := await reader.read(CHUNK_BYTES):
            await call.write(data)
        call.end_writing()

    async def from_call() -> None:
        while data := await call.read():
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(to_call())
            tasks.create_task(from_call())
    except* OSError:
        pass
    finally:
        writer.close()
