"""The collector: the process that receives the token files and logs of all nodes and writes them to the run.

It is a child process of the supervisor, so that token bytes do not pass through the supervisor. It reports how
much of each file it has written; the supervisor accepts the result of an attempt only when all its tokens are
collected.

- A collected file is a prefix of the node's file at any time: a chunk that does not begin at the end of the
  collected file is not written.
- After a lost connection or a restart of the collector, collection continues at the end of what is on disk.
- Only token files and logs directly in the run's directories `tokens` and `logs` are written.
- Memory is bounded: a node has at most `WINDOW` bytes in flight (see `token_sender`).
"""

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rookery.cluster.authentication import AuthenticationError, accept_clients
from rookery.cluster.messages import (
    BEAT_SECONDS,
    Collected,
    CollectorBeat,
    CollectorFailed,
    CollectorStart,
    FileChunk,
    Join,
    OpenFile,
    collector_start_decoder,
    to_collector_decoder,
)
from rookery.engine.framing import FramedConnection
from rookery.engine.processes import die_with_parent, new_event_loop

MAX_FRAME = 4 << 20
MAX_OPEN = 256
"""Maximum number of open files. The one that was not used for longest is closed for another."""
FILE = re.compile(r"(tokens/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.rtk|logs/[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.log)")


class CollectedFiles:
    """The files in a run's directory that are being collected."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, tuple[int, int]] = {}
        """File descriptor and size of each open file, by name. The one that was used last is the last."""

    def open(self, file: str) -> int:
        """Open a file if it is not open, and return its size. Raise `OSError` if that is not possible."""
        if (found := self._open.pop(file, None)) is not None:
            self._open[file] = found
            return found[1]
        if not FILE.fullmatch(file):
            raise PermissionError(f"{file!r} is not the name of a token file or a log")
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        if len(self._open) >= MAX_OPEN:
            self.close(next(iter(self._open)))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        size = os.fstat(fd).st_size
        self._open[file] = fd, size
        return size

    def write(self, chunk: FileChunk) -> int:
        """Append a chunk if it begins at the end of its file, and return the file's size."""
        size = self.open(chunk.file)
        fd = self._open[chunk.file][0]
        if chunk.offset != size:
            return size  # a repetition after a reconnect
        data = memoryview(chunk.data)
        while data:
            written = os.pwrite(fd, data, size)
            size += written
            data = data[written:]
            self._open[chunk.file] = fd, size
        return size

    def close(self, file: str) -> None:
        found = self._open.pop(file, None)
        if found is not None:
            os.close(found[0])


class Collector:
    """Accepts the nodes' connections and reports to the supervisor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, listening: socket.socket) -> None:
        self._loop = loop
        self._listening = listening
        self._key = b""
        self._files: CollectedFiles | None = None
        self.control = FramedConnection(collector_start_decoder, self._start, lambda _: os._exit(0))
        self._tasks: set[asyncio.Task[None]] = set()

    def _start(self, start: CollectorStart) -> None:
        self._key = start.key
        self._files = CollectedFiles(Path(start.folder))
        self._run(accept_clients(self._listening, self._key, self._serve, self._run))
        self._run(self._beat())

    async def _beat(self) -> None:
        while True:
            self.control.send(CollectorBeat())
            await asyncio.sleep(BEAT_SECONDS)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket, join: Join) -> None:
        if join.role != "files":
            raise AuthenticationError(f"a connection for {join.role} reached the collector")
        opened: set[str] = set()

        def on_message(message: OpenFile | FileChunk) -> None:
            assert self._files is not None
            opened.add(message.file)
            try:
                if isinstance(message, FileChunk):
                    size = self._files.write(message)
                else:
                    size = self._files.open(message.file)
            except OSError as error:
                self.control.send(
                    CollectorFailed(f"{message.file} of node {join.node} cannot be written: {error}")
                )
                connection.close()
                return
            collected = Collected(message.file, size)
            connection.send(collected)
            if message.file.startswith("tokens/"):
                self.control.send(collected)

        def on_lost(_: BaseException | None) -> None:
            assert self._files is not None
            for file in opened:
                self._files.close(file)

        connection = FramedConnection(to_collector_decoder, on_message, on_lost)
        connection.limit = MAX_FRAME
        await self._loop.create_connection(lambda: connection, sock=sock)


def main() -> None:
    """Run as `python -m rookery.cluster.collector LISTENING_FD CONTROL_FD PARENT_PID`."""
    listening, control, parent = (int(argument) for argument in sys.argv[1:4])
    die_with_parent(parent)
    logging.getLogger("rookery.cluster").setLevel(logging.ERROR)  # it writes to the terminal of the supervisor
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    listening_socket = socket.socket(fileno=listening)
    listening_socket.setblocking(False)
    collector = Collector(loop, listening_socket)
    control_socket = socket.socket(fileno=control)
    connecting = loop.create_task(loop.create_connection(lambda: collector.control, sock=control_socket))
    connecting.add_done_callback(lambda task: task.result())
    loop.run_forever()


if __name__ == "__main__":
    main()
