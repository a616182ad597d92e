"""Mutual authentication of TCP connections between the processes of a cluster, by a shared key.

Each side proves that it knows the key by an HMAC over two fresh nonces, one from each side, and its role. The
key itself is not sent, a recorded handshake cannot be replayed, and a proof of one side cannot be reflected as
the proof of the other. Messages after the handshake are neither encrypted nor signed: the network of the cluster
must be trusted, as Ray requires too.

- Before a client has proved that it knows the key, at most `MAX_JOIN` bytes are read, and none are decoded.
- At most `MAX_HANDSHAKES` clients are being authenticated at a time. Others wait in the queue of the listener.
- The handshake reads no byte that follows it, so that the socket can be passed to another process afterwards.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from rookery.cluster.messages import Join, join_decoder
from rookery.core import RookeryError
from rookery.core.errors import describe

HANDSHAKE_SECONDS = 20.0
MAX_JOIN = 4096
MAX_HANDSHAKES = 256
ACCEPT_RETRY_SECONDS = 1.0
_NONCE, _PROOF = 32, 32
_LENGTH = struct.Struct("<I")
log = logging.getLogger("rookery.cluster")


class AuthenticationError(RookeryError):
    """The peer of a connection does not have the key of this run."""


def _prove(key: bytes, role: bytes, client: bytes, server: bytes, join: bytes = b"") -> bytes:
    return hmac.digest(key, b"rookery-cluster-1 " + role + client + server + join, "sha256")


@contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    """Close the socket if the block raises."""
    try:
        yield
    except BaseException:  # a cancelled handshake must not leave a socket open either
        sock.close()
        raise


async def _receive(sock: socket.socket, length: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < length:
        more = await loop.sock_recv(sock, length - len(data))
        if not more:
            raise AuthenticationError("the peer closed the connection during the handshake: is its key right?")
        data += more
    return data


async def connect(host: str, port: int, key: bytes, join: Join) -> socket.socket:
    """Connect to the supervisor or the collector, and return the socket when both sides have proved the key.

    Raises `AuthenticationError` if the other side does not have the key, and `OSError` if it cannot be reached.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        sock.setblocking(False)
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await loop.sock_connect(sock, (host, port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours = secrets.token_bytes(_NONCE)
            await loop.sock_sendall(sock, ours)
            answer = await _receive(sock, _NONCE + _PROOF)
            theirs, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, _prove(key, b"server", ours, theirs)):
                raise AuthenticationError(f"{host}:{port} does not have the key of this run")
            data = msgspec.msgpack.encode(join)
            own_proof = _prove(key, b"client", ours, theirs, data)
            await loop.sock_sendall(sock, own_proof + _LENGTH.pack(len(data)) + data)
    return sock


async def accept(sock: socket.socket, key: bytes) -> Join:
    """Authenticate a client that has connected, and return its first message.

    Raises `AuthenticationError` if the client does not have the key. The caller closes the socket then.
    """
    loop = asyncio.get_running_loop()
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        theirs = await _receive(sock, _NONCE)
        ours = secrets.token_bytes(_NONCE)
        await loop.sock_sendall(sock, ours + _prove(key, b"server", theirs, ours))
        answer = await _receive(sock, _PROOF + _LENGTH.size)
        (length,) = _LENGTH.unpack(answer[_PROOF:])
        if length > MAX_JOIN:
            raise AuthenticationError("the first message of a client is too long")
        data = await _receive(sock, length)
        if not hmac.compare_digest(answer[:_PROOF], _prove(key, b"client", theirs, ours, data)):
            raise AuthenticationError("a client does not have the key of this run")
    try:
        return join_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise AuthenticationError(f"the first message of a client is not valid: {error}") from error


async def accept_clients(
    listening: socket.socket,
    key: bytes,
    serve: Callable[[socket.socket, Join], Awaitable[None]],
    start: Callable[[Coroutine[Any, Any, None]], object],
) -> None:
    """Accept and authenticate clients until the task is cancelled.

    `start` runs a coroutine in the background, and `serve` gets each authenticated client. The socket of a client
    that is refused is closed, also if `serve` raises `AuthenticationError`, `OSError` or `TimeoutError`.
    """
    handshakes = asyncio.Semaphore(MAX_HANDSHAKES)

    async def admit(sock: socket.socket) -> None:
        try:
            with _closed_on_error(sock):
                try:
                    join = await accept(sock, key)
                finally:
                    handshakes.release()
                await serve(sock, join)
        except (AuthenticationError, OSError, TimeoutError) as error:
            log.warning("a connection was refused: %s", describe(error))

    while True:
        await handshakes.acquire()
        try:
            sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        except OSError as error:  # for example, no file descriptor is free
            handshakes.release()
            log.error("connections cannot be accepted: %s", describe(error))
            await asyncio.sleep(ACCEPT_RETRY_SECONDS)
            continue
        start(admit(sock))


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of the address `host`."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    with _closed_on_error(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        sock.listen(1024)
        sock.setblocking(False)
    return sock
