"""Bring the token files and logs of a node to the run's directory as they grow. Runs in the node's agent.

`TokenSender` sends them to the collector. If the node shares the run's directory, runners write their token files
there, and `SharedTokens` reports what is durable.

- At most `WINDOW` bytes are in flight, so that a slow collector cannot fill the memory of any process.
- After a lost connection, sending continues where the collector stopped.
- The token files of a runner that has ended are removed from the node once they are collected.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rookery.cluster.authentication import AuthenticationError, connect
from rookery.cluster.messages import Collected, FileChunk, Join, OpenFile, collected_decoder
from rookery.core import UsageError
from rookery.engine.framing import FramedConnection

WINDOW = 8 << 20
CHUNK = 256 << 10
POLL_SECONDS = 0.03
"""Seconds between two looks at the files if nothing is happening."""
RETRY_SECONDS = 1.0
SUFFIXES = {"tokens": ".rtk", "logs": ".log"}


class TokenSender:
    """Sends what is appended to the files `tokens/*.rtk` and `logs/*.log` of a node's directory.

    `is_written` is called with the name of a token file and returns whether its runner is still alive. `kinds` are
    the directories whose files are sent.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        port: int,
        key: bytes,
        node: str,
        is_written: Callable[[str], bool],
        kinds: Sequence[str] = ("tokens", "logs"),
    ) -> None:
        self._folder = folder
        self._kinds = kinds
        self._host = host
        self._port = port
        self._key = key
        self._node = node
        self._is_written = is_written
        self._changed = asyncio.Event()
        self._sent: dict[str, int] = {}
        """Number of bytes of each file that were sent in this connection."""
        self._collected: dict[str, int] = {}
        self._connected = False

    async def run(self) -> None:
        """Send files until the task is cancelled."""
        while True:
            try:
                sock = await connect(self._host, self._port, self._key, Join("files", self._node))
            except (OSError, TimeoutError, AuthenticationError):  # the collector is being restarted
                await asyncio.sleep(RETRY_SECONDS)
                continue
            connection = FramedConnection(collected_decoder, self._on_collected, self._on_lost)
            self._sent.clear()
            self._collected.clear()
            self._connected = True
            await asyncio.get_running_loop().create_connection(lambda: connection, sock=sock)  # noqa: B023
            try:
                await self._send_files(connection)
            finally:
                connection.close()

    def _on_collected(self, message: Collected) -> None:
        self._sent.setdefault(message.file, message.size)
        self._collected[message.file] = message.size
        self._changed.set()

    def _on_lost(self, _: BaseException | None) -> None:
        self._connected = False
        self._changed.set()

    async def _send_files(self, connection: FramedConnection) -> None:
        asked: set[str] = set()
        while self._connected:
            self._changed.clear()
            moved = False
            for file in self._list_files():
                if file not in asked:
                    asked.add(file)
                    connection.send(OpenFile(file))
                elif file in self._sent:
                    moved |= self._send_chunk(connection, file)
            if moved:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _list_files(self) -> Iterator[str]:
        for kind in self._kinds:
            with os.scandir(self._folder / kind) as entries:
                yield from (f"{kind}/{entry.name}" for entry in entries if entry.name.endswith(SUFFIXES[kind]))

    def _send_chunk(self, connection: FramedConnection, file: str) -> bool:
        """Send the next bytes of a file. Return False if there are none or the window is full."""
        in_flight = sum(self._sent.values()) - sum(self._collected.values())
        if in_flight >= WINDOW:
            return False
        path, offset = self._folder / file, self._sent[file]
        written = file.startswith("logs/") or self._is_written(path.name)  # before reading: it may end meanwhile
        try:
            with path.open("rb") as source:
                source.seek(offset)
                data = source.read(CHUNK)
        except FileNotFoundError:
            return False
        if data:
            connection.send(FileChunk(file, offset, data))
            self._sent[file] = offset + len(data)
            return True
        if not written and self._collected[file] == offset:
            path.unlink(missing_ok=True)
        return False


class SharedTokens:
    """Lets the runners of a node write token files to the run's directory, which the node shares.

    A file counts as collected up to a size only after fsync: a file server may not have what a client has written.
    `probe` is a file in the run's directory `tokens`. Raises `UsageError` if this machine does not see it.
    """

    def __init__(self, folder: Path, probe: Path) -> None:
        if not probe.exists():
            raise UsageError(
                f"this node does not share the run's directory {probe.parent.parent}: start the run without "
                "--shared-files, or mount the directory at the same path"
            )
        (folder / "tokens").rmdir()
        (folder / "tokens").symlink_to(probe.parent)
        self._folder = probe.parent
        self._files: dict[str, tuple[int, int]] = {}
        """Number of the current file of each writer, and the size of that file that was reported."""
        self._ended: set[str] = set()

    def begin(self, writer: str) -> None:
        """Report the files of a runner from now on."""
        self._files[writer] = 0, 0

    def end(self, writer: str) -> None:
        """Report the files of a runner that has ended once more."""
        self._ended.add(writer)

    async def run(self, report: Callable[[Collected], None]) -> None:
        """Report what the runners have written until the task is cancelled."""
        while True:
            ended = set(self._ended)
            for collected in await asyncio.to_thread(self._sync, list(self._files)):
                report(collected)
            for writer in ended:
                self._ended.discard(writer)
                self._files.pop(writer, None)
            await asyncio.sleep(POLL_SECONDS)

    def _sync(self, writers: list[str]) -> list[Collected]:
        found = []
        for writer in writers:
            number, known = self._files[writer]
            while True:
                path = self._folder / f"{writer}-{number}.rtk"
                has_next = path.with_name(f"{writer}-{number + 1}.rtk").exists()  # then this one is complete
                try:
                    fd = os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    break
                try:
                    size = os.fstat(fd).st_size
                    if size > known:
                        os.fsync(fd)
                        found.append(Collected(f"tokens/{path.name}", size))
                finally:
                    os.close(fd)
                number, known = (number + 1, 0) if has_next else (number, size)
                if not has_next:
                    break
            self._files[writer] = number, known
        return found
