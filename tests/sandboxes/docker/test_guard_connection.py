"""The connection to the guard of a container, without a container engine."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from rookery.core import SandboxError
from rookery.sandboxes.docker.guard_connection import SOCKET_NAME, GuardListener


class Output:
    """Output of a container that ends when `ended` is set."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def readany(self) -> bytes:
        await self.ended.wait()
        return b""


async def connect(path: Path, message: bytes) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(60)
    await asyncio.to_thread(peer.connect, str(path))
    peer.send(message)
    return peer


@pytest.fixture
def short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a relative directory, because the path of a Unix socket is limited."""
    monkeypatch.chdir(tmp_path)
    return Path()


async def test_listener_accepts_only_the_peer_with_the_token_and_closes(short_path: Path) -> None:
    listener = GuardListener(short_path)
    output: Any = Output()
    accepting = asyncio.ensure_future(listener.accept({"a": 1}, output))
    stranger = await connect(short_path / SOCKET_NAME, b"wrong")
    guard = await connect(short_path / SOCKET_NAME, listener.token.encode())
    assert await asyncio.to_thread(stranger.recv, 100) == b""
    assert await asyncio.to_thread(guard.recv, 100) == b'{"a":1}'
    assert not (short_path / SOCKET_NAME).exists()
    read, write = os.pipe()
    socket.send_fds(guard, [b"ready 1000 exit_pipe"], [read])
    connection = await asyncio.wait_for(accepting, 60)
    assert (connection.uid, list(connection.fds)) == (1000, ["exit_pipe"])
    for fd in (read, write, *connection.fds.values()):
        os.close(fd)
    for sock in (stranger, guard, connection.sock):
        sock.close()


async def test_descriptors_of_a_guard_that_fails_are_closed(short_path: Path) -> None:
    listener = GuardListener(short_path)
    output: Any = Output()
    accepting = asyncio.ensure_future(listener.accept({}, output))
    guard = await connect(short_path / SOCKET_NAME, listener.token.encode())
    await asyncio.to_thread(guard.recv, 100)
    read, write = os.pipe()
    socket.send_fds(guard, [b"! no memory"], [write])
    os.close(write)
    with pytest.raises(SandboxError) as caught:
        await asyncio.wait_for(accepting, 60)
    assert caught.value.code == "sandbox.create"
    assert await asyncio.to_thread(os.read, read, 1) == b""  # no copy of the other end is open
    os.close(read)
    guard.close()


async def test_end_of_the_container_is_noticed_before_its_guard_is_ready(short_path: Path) -> None:
    listener = GuardListener(short_path)
    output: Any = Output()
    accepting = asyncio.ensure_future(listener.accept({}, output))
    output.ended.set()
    with pytest.raises(SandboxError) as caught:
        await asyncio.wait_for(accepting, 60)
    assert caught.value.code == "sandbox.create"
    listener.close()
