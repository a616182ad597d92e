"""Pass listening sockets inside sandboxes to a gateway shard as file descriptors. Each serves one session.

A socket stays in the network namespace in which it was created, so the shard can serve a sandbox without entering
its namespace. `ListenerSender` runs in the runner that owns the sandbox, `ListenerReceiver` in the shard.

Guarantees:
- a listener serves its session from `attach` until `detach`, or until the sender's process ends;
- the sender keeps its own copy of a listener and sends it again to a restarted shard, so that clients only have to
  reconnect;
- only processes that may access the directory of the gateway's Unix sockets can send listeners.
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
MAX_MESSAGE: Final = 4096
MIN_RETRY_SECONDS: Final = 0.05
"""Delay before the sender connects to a shard again. It doubles after each failure, up to one second."""


class AttachListener(msgspec.Struct, frozen=True, tag="attach"):
    """Message to the shard: serve this session on a listening socket.

    The file descriptor of the socket is sent with the message.
    """

    session: str


class DetachListener(msgspec.Struct, frozen=True, tag="detach"):
    """Message to the shard: stop serving this session on its listening socket."""

    session: str


class ListenerReply(msgspec.Struct, frozen=True):
    """The shard's reply to `AttachListener`. `error` says why the listener cannot be served; empty on success."""

    session: str
    error: str = ""


ListenerMessage: TypeAlias = AttachListener | DetachListener
_decode_message = msgspec.msgpack.Decoder(ListenerMessage).decode
_decode_reply = msgspec.msgpack.Decoder(ListenerReply).decode
_encode = msgspec.msgpack.Encoder().encode


def listener_socket_path(folder: Path, shard: int) -> Path:
    """Return the path of the Unix socket on which a shard receives listening sockets from runners."""
    return folder / f"fds-{shard}.sock"


class ListenerReceiver:
    """The shard's end: receives listeners from `ListenerSender`s and serves HTTP on them."""

    def __init__(self, folder: Path, index: int, server: Server) -> None:
        self._path = listener_socket_path(folder, index)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._peers: dict[socket.socket, dict[str, asyncio.Server]] = {}
        self._locks: dict[socket.socket, asyncio.Lock] = {}
        """One lock per sender: its messages are processed in order, so that a detach follows its attach."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to accept connections of senders on the shard's Unix socket."""
        self._path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        sock.bind(str(self._path))
        sock.listen(128)
        self._socket = sock
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            peer, _ = self._socket.accept()
        except OSError:
            return
        peer.setblocking(False)
        self._peers[peer] = {}
        self._locks[peer] = asyncio.Lock()
        self._loop.add_reader(peer, self._receive, peer)

    def _receive(self, peer: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(peer, MAX_MESSAGE, 1)
            message = _decode_message(data)  # an empty message, at the end of the connection, cannot be decoded
        except BlockingIOError:
            return
        except (OSError, msgspec.DecodeError):
            for fd in fds:
                os.close(fd)
            self._drop_peer(peer)
            return
        self._spawn(self._process(peer, self._locks[peer], message, fds))

    async def _process(
        self, peer: socket.socket, lock: asyncio.Lock, message: ListenerMessage, fds: list[int]
    ) -> None:
        listeners = [socket.socket(fileno=fd) for fd in fds]
        async with lock:
            await self._detach(peer, message.session)
            if isinstance(message, AttachListener) and listeners and peer in self._peers:
                await self._serve(peer, message.session, listeners.pop())
        for listener in listeners:
            listener.close()

    async def _serve(self, peer: socket.socket, session: str, listener: socket.socket) -> None:
        problem = ""
        try:
            server = await self._server.listen(listener, session=session)
        except (OSError, ValueError) as error:
            listener.close()
            problem = str((error.strerror if isinstance(error, OSError) else None) or error)
        else:
            if peer not in self._peers:
                await self._server.stop_listening(server, session)
                return
            self._peers[peer][session] = server
        self._reply(peer, ListenerReply(session, problem))

    async def _detach(self, peer: socket.socket, session: str) -> None:
        server = self._peers.get(peer, {}).pop(session, None)
        if server is not None:
            await self._server.stop_listening(server, session)

    def _reply(self, peer: socket.socket, reply: ListenerReply) -> None:
        try:
            peer.send(_encode(reply))
        except OSError as error:
            log.debug("cannot confirm that the listener of session %s is served: %s", reply.session, error)

    def _drop_peer(self, peer: socket.socket) -> None:
        self._loop.remove_reader(peer)
        self._locks.pop(peer, None)
        for session, server in self._peers.pop(peer, {}).items():
            self._spawn(self._server.stop_listening(server, session))
        peer.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop accepting senders and serving their listeners, and remove the Unix socket."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._path.unlink(missing_ok=True)
            self._socket = None
        for peer in list(self._peers):
            self._drop_peer(peer)


class ListenerSender:
    """The runner's end of the connection to one shard.

    It reconnects when the connection is lost, for example because the shard is restarted, and then sends all
    attached listeners again.
    """

    def __init__(self, folder: Path, shard: int) -> None:
        self._path = listener_socket_path(folder, shard)
        self._listeners: dict[str, socket.socket] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._connection: socket.socket | None = None
        self._task = asyncio.get_running_loop().create_task(self._reconnect_forever(), context=detached_context())
        self._closed = False

    async def attach(self, session: str, listener: socket.socket, *, timeout: float = 30.0) -> None:
        """Send a listener for a session to the shard, and wait until the shard serves it.

        The sender takes ownership of the listener: `detach`, `close` and a failure of this method close it. Raises
        `RookeryError` if the shard cannot serve it, or does not confirm it within `timeout` seconds.
        """
        if (before := self._listeners.pop(session, None)) is not None:
            before.close()
        self._listeners[session] = listener
        waiting = self._waiting[session] = asyncio.get_running_loop().create_future()
        try:
            self._send_listener(session)
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            self.detach(session)
            raise RookeryError(
                f"the gateway shard did not confirm the listener of session {session} within {timeout:g} seconds"
            ) from None
        except BaseException:
            self.detach(session)
            raise
        finally:
            self._waiting.pop(session, None)

    def detach(self, session: str) -> None:
        """Stop serving the session's listener and close it. Does nothing if the session has none."""
        listener = self._listeners.pop(session, None)
        if listener is None:
            return
        listener.close()
        self._send(DetachListener(session), ())

    def _send_listener(self, session: str) -> None:
        self._send(AttachListener(session), (self._listeners[session].fileno(),))

    def _send(self, message: ListenerMessage, fds: tuple[int, ...]) -> None:
        if self._connection is None:
            return  # every listener is sent when the connection is established
        try:
            socket.send_fds(self._connection, [_encode(message)], fds)
        except OSError as error:  # the socket buffer is full or the shard is gone; reconnect and send all again
            log.debug("reconnecting to a gateway shard, because sending a listener failed: %s", error)
            self._connection.shutdown(socket.SHUT_RDWR)

    async def _reconnect_forever(self) -> None:
        delay = MIN_RETRY_SECONDS
        while True:
            try:
                await self._run_connection()
                delay = MIN_RETRY_SECONDS
            except OSError as error:
                log.debug("cannot connect to a gateway shard to send listeners; retrying: %s", error)
                delay = min(1.0, 2 * delay)
            await asyncio.sleep(delay)

    async def _run_connection(self) -> None:
        """Connect to the shard, send all listeners and read its replies until the connection ends."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as connection:
            await loop.sock_connect(connection, str(self._path))
            self._connection = connection
            try:
                for session in list(self._listeners):
                    self._send_listener(session)
                while data := await loop.sock_recv(connection, MAX_MESSAGE):
                    reply = _decode_reply(data)
                    waiting = self._waiting.get(reply.session)
                    if waiting is not None and not waiting.done():
                        if reply.error:
                            waiting.set_exception(
                                RookeryError(f"the listener of {reply.session} cannot be served: {reply.error}")
                            )
                        else:
                            waiting.set_result(None)
            finally:
                self._connection = None

    async def close(self) -> None:
        """Close the connection and all listeners; the shard then stops serving them."""
        self._task.cancel()
        await asyncio.wait({self._task})
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
