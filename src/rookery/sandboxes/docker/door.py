"""How the owner and pid 1 of a container find each other: a socket in a folder that is mounted into it.

Promises:
- only who knows the word that pid 1 was started with is let in, before any program of the container can run; then
  there is nothing left to connect to;
- whoever ends early is noticed at once: there is no waiting for a container that has died;
- every descriptor that arrives is owned or closed.
"""

import asyncio
import json
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from rookery.core import SandboxError

NAME = "door"
_MOST_FDS = 4
_SAID = 4096
_WORD_SECONDS = 5.0
_CREDENTIALS = struct.Struct("<iII")


class Met(NamedTuple):
    """Pid 1 of a container, ready for commands."""

    sock: socket.socket
    pid: int
    """As we see it; 0 where we cannot."""
    uid: int
    """Whom commands run as."""
    fds: dict[str, int]


class Door:
    """Open until somebody came."""

    def __init__(self, folder: Path) -> None:
        self.word = secrets.token_hex(16)
        self._folder = folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A path of a socket has room for 107 bytes; folders of runs are longer.
            self._socket.bind(f"/proc/self/fd/{handle}/{NAME}")
            (folder / NAME).chmod(0o666)  # root in the container may be nobody here
            self._socket.listen(1)
        except BaseException:
            self._socket.close()
            raise
        finally:
            os.close(handle)

    def close(self) -> None:
        self._socket.close()
        (self._folder / NAME).unlink(missing_ok=True)

    async def _next(self) -> socket.socket | None:
        """Who comes, if it is who was sent for."""
        sock, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_WORD_SECONDS):
                said, fds = await _message(sock)
            for fd in fds:
                os.close(fd)
        except TimeoutError:
            said = b""
        except BaseException:
            sock.close()
            raise
        if secrets.compare_digest(said, self.word.encode()):
            return sock
        sock.close()
        return None

    async def meet(self, asked: dict[str, Any], words: aiohttp.StreamReader) -> Met:
        """Waits for pid 1 and tells it what is asked. `words`: what the container writes, until it ends."""
        ended = asyncio.ensure_future(_last_words(words))
        sock: socket.socket | None = None
        try:
            while sock is None:
                sock = await _first(asyncio.ensure_future(self._next()), ended)
            self.close()
            pid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
            sock.send(json.dumps(asked, separators=(",", ":")).encode())
            said, fds = await _first(asyncio.ensure_future(_message(sock)), ended)
            text = said.decode("utf-8", "replace")
            if not text.startswith("ready"):
                for fd in fds:
                    os.close(fd)
                raise SandboxError(
                    f"pid 1 of the container gave up: {text[2:] or 'no word'}", cause="sandbox.create"
                )
            _, uid, *names = text.split()
            return Met(sock, pid, int(uid), dict(zip(names, fds, strict=True)))
        except BaseException:
            if sock is not None:
                sock.close()
            raise
        finally:
            ended.cancel()


async def _first(wanted: "asyncio.Task[Any]", ended: "asyncio.Task[str]") -> Any:
    try:
        await asyncio.wait({wanted, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            said = ended.result()
            raise SandboxError(
                f"the container ended before it was ready: {said or 'no word'}", cause="sandbox.create"
            )
        return wanted.result()
    finally:
        wanted.cancel()


async def _message(sock: socket.socket) -> tuple[bytes, list[int]]:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
        said, fds, _, _ = socket.recv_fds(sock, _SAID, _MOST_FDS)
    finally:
        loop.remove_reader(sock.fileno())
    for fd in fds:
        os.set_inheritable(fd, False)
    return said, list(fds)


async def _last_words(words: aiohttp.StreamReader) -> str:
    """What a container wrote until it ended, without the engine's frames."""
    kept = b""
    try:
        while data := await words.readany():
            kept = (kept + data)[-_SAID:]
    except (aiohttp.ClientError, OSError) as error:
        return f"the engine broke off: {error}"
    return bytes(byte for byte in kept if byte >= 32 or byte == 10).decode("utf-8", "replace").strip()[-1000:]
