"""The socket over which a sandbox host gets its next connection, with other programs that connect to it."""

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator

import pytest

from rookery.sandboxes.remote import host
from rookery.sandboxes.remote.host import PipeConnection, ResumeListener
from rookery.sandboxes.remote.link import Connection
from rookery.sandboxes.remote.resumable import ResumableConnection

TOKEN = "0123456789abcdef" * 4


@contextlib.contextmanager
def connect(listener: ResumeListener) -> Iterator[socket.socket]:
    """Connect to a host, as any program of the machine can, because it sees the name of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.connect(listener._socket.getsockname())
        yield made


async def test_only_a_program_with_the_token_is_used_although_others_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "ACCEPT_SECONDS", 600.0)
    monkeypatch.setattr(host, "MAX_OFFERS", 3)
    token = TOKEN.replace("0", str(os.getpid()))
    read_end, write_end = os.pipe()
    pipes = [os.fdopen(read_end, "rb", 0), os.fdopen(write_end, "wb", 0)]
    first = await PipeConnection.open(*pipes, eof_ends=False)  # type: ignore[arg-type]
    listener = ResumeListener(token, first, eof_ends=False)

    async def get() -> Connection | None:
        return await listener.get()

    stream = ResumableConnection(first, get, seconds=60.0)
    serving = asyncio.ensure_future(listener.serve(stream))
    one, other = socket.socketpair()
    opened = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        for _ in range(6):  # they send nothing
            stack.enter_context(connect(listener))
            await asyncio.sleep(0)
        for text in (b"wrong", hashlib.sha256(token.encode()).hexdigest().encode(), b"\xff" * 64, token.encode()):
            refused = stack.enter_context(connect(listener))
            refused.setblocking(False)
            # The last one has the token and one file too few.
            socket.send_fds(refused, [text], [other.fileno()] * (1 if text == token.encode() else 2))
            async with asyncio.timeout(60):
                assert await asyncio.get_running_loop().sock_recv(refused, 1) == b""
        # Descriptors of this test: 10 connections. Descriptors of the host: the silent programs that remain.
        assert len(os.listdir("/proc/self/fd")) <= opened + 10 + host.MAX_OFFERS
        user = stack.enter_context(connect(listener))
        socket.send_fds(user, [token.encode()], [other.fileno(), other.fileno()])
        async with asyncio.timeout(60):
            connection = await listener.get()
        assert connection is not None
        one.sendall(b"hello")
        async with asyncio.timeout(60):
            assert await connection.read() == b"hello"
        await connection.close()
    serving.cancel()
    await asyncio.wait({serving})
    listener.close()
    for end in (one, other):
        end.close()
    await first.close()
