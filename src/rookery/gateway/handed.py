"""Listeners that are handed to a shard from outside: a sandbox's own address, for one session each.

The socket lives in the sandbox's network namespace wherever it goes; whoever serves it needs no way in there.

Promises:
- a listener serves its one session, from when it is handed over until it is taken back or its giver goes;
- who handed it over keeps a duplicate: a restarted shard is handed it again, and clients just connect again;
- only who may enter the gateway's folder can hand anything over.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from rookery.core import RookeryError
from rookery.core.lifetimes import detached_context
from rookery.gateway.server import Server

log = logging.getLogger("rookery.gateway")
_MAX: Final = 4096
AGAIN_SECONDS: Final = 0.05
"""Before a shard that is not there is asked again; doubled up to a second."""


class Hand(msgspec.Struct, frozen=True, tag="hand"):
    """Serve the descriptor that comes along for this session."""

    session: str


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Serve that session's listener no more."""

    session: str


class Said(msgspec.Struct, frozen=True):
    """The shard's answer to each of them: what is wrong, or nothing."""

    session: str
    wrong: str = ""


Word: TypeAlias = Hand | Take
_word = msgspec.msgpack.Decoder(Word).decode
_said = msgspec.msgpack.Decoder(Said).decode
_encode = msgspec.msgpack.Encoder().encode


def hand_socket_of(folder: Path, shard: int) -> Path:
    return folder / f"hand-{shard}.sock"


class Handed:
    """The shard's end: accepts givers and serves what they give."""

    def __init__(self, folder: Path, index: int, server: Server) -> None:
        self._path = hand_socket_of(folder, index)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._door: socket.socket | None = None
        self._givers: dict[socket.socket, dict[str, asyncio.Server]] = {}
        self._turns: dict[socket.socket, asyncio.Lock] = {}
        """One word of a giver after the other: a listener that is taken back was served before."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._path.unlink(missing_ok=True)
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        door.bind(str(self._path))
        door.listen(128)
        self._door = door
        self._loop.add_reader(door, self._accept)

    def _accept(self) -> None:
        assert self._door is not None
        try:
            giver, _ = self._door.accept()
        except OSError:
            return
        giver.setblocking(False)
        self._givers[giver] = {}
        self._turns[giver] = asyncio.Lock()
        self._loop.add_reader(giver, self._heard, giver)

    def _heard(self, giver: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(giver, _MAX, 1)
            word = _word(data)  # nothing is what a giver says when it goes
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            for fd in fds:
                os.close(fd)
            self._left(giver)
            return
        self._adopt(self._do(giver, self._turns[giver], word, fds))

    async def _do(self, giver: socket.socket, turn: asyncio.Lock, word: Word, fds: list[int]) -> None:
        listeners = [socket.socket(fileno=fd) for fd in fds]
        async with turn:
            await self._take(giver, word.session)
            if isinstance(word, Hand) and listeners and giver in self._givers:
                await self._serve(giver, word.session, listeners.pop())
        for listener in listeners:
            listener.close()

    async def _serve(self, giver: socket.socket, session: str, listener: socket.socket) -> None:
        wrong = ""
        try:
            server = await self._server.listen(listener, bound=session)
        except (OSError, ValueError) as error:
            listener.close()
            wrong = str((error.strerror if isinstance(error, OSError) else None) or error)
        else:
            if giver not in self._givers:
                await self._server.unlisten(server, session)
                return
            self._givers[giver][session] = server
        self._answer(giver, Said(session, wrong))

    async def _take(self, giver: socket.socket, session: str) -> None:
        server = self._givers.get(giver, {}).pop(session, None)
        if server is not None:
            await self._server.unlisten(server, session)

    def _answer(self, giver: socket.socket, said: Said) -> None:
        try:
            giver.send(_encode(said))
        except OSError as error:
            log.debug("nobody hears that the listener of %s is served: %s", said.session, error)

    def _left(self, giver: socket.socket) -> None:
        self._loop.remove_reader(giver)
        self._turns.pop(giver, None)
        for session, server in self._givers.pop(giver, {}).items():
            self._adopt(self._server.unlisten(server, session))
        giver.close()

    def _adopt(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        if self._door is not None:
            self._loop.remove_reader(self._door)
            self._door.close()
            self._path.unlink(missing_ok=True)
            self._door = None
        for giver in list(self._givers):
            self._left(giver)


class Giver:
    """The owner's end, to one shard: hands listeners over, and all of them again when the shard was restarted."""

    def __init__(self, folder: Path, shard: int) -> None:
        self._path = hand_socket_of(folder, shard)
        self._listeners: dict[str, socket.socket] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._line: socket.socket | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep(), context=detached_context())
        self._closed = False

    async def give(self, session: str, listener: socket.socket, *, timeout: float = 30.0) -> None:
        """Returns when the shard serves it. The listener is ours from now on, and stays open until `take`."""
        if (before := self._listeners.pop(session, None)) is not None:
            before.close()
        self._listeners[session] = listener
        waiting = self._waiting[session] = asyncio.get_running_loop().create_future()
        try:
            self._hand(session)
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            self.take(session)
            raise RookeryError(f"no shard took the listener of {session} within {timeout:g} seconds") from None
        except BaseException:
            self.take(session)
            raise
        finally:
            self._waiting.pop(session, None)

    def take(self, session: str) -> None:
        """It is served no more. Without one, nothing happens."""
        listener = self._listeners.pop(session, None)
        if listener is None:
            return
        listener.close()
        self._send(Take(session), ())

    def _hand(self, session: str) -> None:
        self._send(Hand(session), (self._listeners[session].fileno(),))

    def _send(self, word: Word, fds: tuple[int, ...]) -> None:
        if self._line is None:
            return  # all are handed over when it is there
        try:
            socket.send_fds(self._line, [_encode(word)], fds)
        except OSError as error:  # a full or broken line is given up; the next one gets all of them
            log.debug("the line to a shard is given up: %s", error)
            self._line.shutdown(socket.SHUT_RDWR)

    async def _keep(self) -> None:
        delay = AGAIN_SECONDS
        while True:
            try:
                await self._serve_line()
                delay = AGAIN_SECONDS
            except OSError as error:
                log.debug("a shard is not there: %s", error)
                delay = min(1.0, 2 * delay)
            await asyncio.sleep(delay)

    async def _serve_line(self) -> None:
        """One life of the shard."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as line:
            await loop.sock_connect(line, str(self._path))
            self._line = line
            try:
                for session in list(self._listeners):
                    self._hand(session)
                while data := await loop.sock_recv(line, _MAX):
                    said = _said(data)
                    waiting = self._waiting.get(said.session)
                    if waiting is not None and not waiting.done():
                        if said.wrong:
                            waiting.set_exception(RookeryError(f"the listener cannot be served: {said.wrong}"))
                        else:
                            waiting.set_result(None)
            finally:
                self._line = None

    async def close(self) -> None:
        """Takes everything back."""
        self._task.cancel()
        await asyncio.wait({self._task})
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
