"""Connections between the processes of a cluster: mutual authentication, and collection of token files."""

import asyncio
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from rookery.cluster import agent, authentication
from rookery.cluster import collector as collector_module
from rookery.cluster.agent import FOLDER_VARIABLE, AgentConfig, Membership, NodeFolder
from rookery.cluster.authentication import AuthenticationError, accept, accept_clients, connect, listen
from rookery.cluster.collector import CollectedFiles
from rookery.cluster.messages import (
    Collected,
    CollectorFailed,
    CollectorStart,
    FileChunk,
    FromCollector,
    Join,
    Leave,
    StartRunner,
    Welcome,
    from_collector_decoder,
)
from rookery.cluster.node_pool import NodePool
from rookery.cluster.token_sender import TokenSender
from rookery.core import Limits, SandboxSpec
from rookery.engine.framing import FramedConnection
from rookery.engine.runner_protocol import RunSettings
from rookery.environments.loader import EnvironmentRef
from tests.processes import list_open_files
from tests.waiting import wait_until

KEY, OTHER = b"k" * 32, b"o" * 32
JOIN = Join("runner", "node-1", "runner-7")


@asynccontextmanager
async def server(handle: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[int]:
    listening = listen("127.0.0.1")

    async def serve() -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(listening)
        with sock:
            await handle(sock)

    serving = asyncio.create_task(serve())
    try:
        yield listening.getsockname()[1]
        await asyncio.wait_for(serving, 60)
    finally:
        serving.cancel()
        listening.close()


async def test_both_sides_prove_the_key_and_nothing_more_is_read() -> None:
    received = []

    async def handle(sock: socket.socket) -> None:
        received.append(await accept(sock, KEY))
        received.append(await asyncio.get_running_loop().sock_recv(sock, 5))

    async with server(handle) as port:
        sock = await connect("127.0.0.1", port, KEY, JOIN)
        with sock:
            await asyncio.get_running_loop().sock_sendall(sock, b"after")
    assert received == [JOIN, b"after"]


async def test_server_without_the_key_is_refused_by_the_client() -> None:
    async def handle(sock: socket.socket) -> None:
        with pytest.raises(AuthenticationError):
            await accept(sock, OTHER)

    async with server(handle) as port:
        with pytest.raises(AuthenticationError):
            await connect("127.0.0.1", port, KEY, JOIN)


async def test_client_without_the_key_is_refused_by_the_server() -> None:
    """A client that skips its own check of the server, and reflects what the server sent."""

    async def handle(sock: socket.socket) -> None:
        with pytest.raises(AuthenticationError):
            await accept(sock, KEY)

    async with server(handle) as port:
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, b"n" * 32)
            answer = b""
            while len(answer) < 64:
                answer += await loop.sock_recv(sock, 64)
            await loop.sock_sendall(sock, answer[32:] + (1).to_bytes(4, "little") + b"x")
            assert await loop.sock_recv(sock, 1) == b""


async def test_long_first_message_is_refused_before_it_is_read() -> None:
    async def handle(sock: socket.socket) -> None:
        with pytest.raises(AuthenticationError):
            await accept(sock, KEY)

    async with server(handle) as port:
        sock = await connect("127.0.0.1", port, KEY, Join("agent", "n" * 10_000))
        with sock, suppress(ConnectionError):
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""


class FullListener(socket.socket):
    """A listener that has no free file descriptor for its first client."""

    failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not FullListener.failed:
            FullListener.failed = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


async def test_clients_are_accepted_after_an_error_and_after_silent_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(authentication, "ACCEPT_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(authentication, "MAX_HANDSHAKES", 1)
    served: asyncio.Queue[Join] = asyncio.Queue()
    tasks = []

    async def serve(sock: socket.socket, join: Join) -> None:
        sock.close()
        await served.put(join)

    with FullListener(fileno=listen("127.0.0.1").detach()) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        tasks.append(
            asyncio.create_task(
                accept_clients(listening, KEY, serve, lambda one: tasks.append(asyncio.create_task(one)))
            )
        )
        with socket.create_connection(("127.0.0.1", port)):
            await wait_until(lambda: len(tasks) >= 2)  # the silent client is being authenticated
            connecting = asyncio.create_task(connect("127.0.0.1", port, KEY, JOIN))
        with await asyncio.wait_for(connecting, 60):  # the silent client has left
            assert await asyncio.wait_for(served.get(), 60) == JOIN
        assert FullListener.failed
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_agent_starts_nothing_after_its_membership_has_ended() -> None:
    membership = Membership(AgentConfig("127.0.0.1", 1, KEY, "node-1"))
    membership.on_lost(None)
    membership.on_message(StartRunner("runner-1", "runner-1.abc"))
    assert not membership._tasks
    membership.on_message(Leave())
    assert membership.leaving


async def test_directory_that_is_being_created_when_the_membership_ends_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    creating, ended = threading.Event(), threading.Event()

    class SlowFolder(NodeFolder):
        def __init__(self, base: Path, name: str) -> None:
            creating.set()
            assert ended.wait(60)
            super().__init__(base, name)

    nodes = tmp_path / "nodes"
    monkeypatch.setenv(FOLDER_VARIABLE, str(nodes))
    monkeypatch.setattr(agent, "NodeFolder", SlowFolder)
    settings = RunSettings(
        run="run",
        folder=str(tmp_path),
        environment=EnvironmentRef(source=""),
        upstreams={},
        sandbox=SandboxSpec(),
        limits=Limits(),
    )
    membership = Membership(AgentConfig("127.0.0.1", 1, KEY, "node-1"))
    membership.on_message(Welcome(settings, 1, needs_gateway=False))
    assert await asyncio.to_thread(creating.wait, 60)
    membership.on_lost(None)
    cleaning = asyncio.create_task(membership.clean_up())
    while membership._tasks:
        await asyncio.sleep(0)
    ended.set()
    await asyncio.wait_for(cleaning, 60)
    assert list(nodes.iterdir()) == []


class BrokenLauncher:
    """A launcher whose cluster is gone when it is closed."""

    cpus = 1

    async def connect(self) -> str:
        raise NotImplementedError

    def start_agents(self, supervisor: AgentConfig, on_lost: Callable[[str, str], None]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise ConnectionError


async def test_sockets_are_closed_if_the_launcher_cannot_be_closed() -> None:
    pool = NodePool(BrokenLauncher())
    sockets = pool._listening, pool._collecting = listen("127.0.0.1"), listen("127.0.0.1")
    with pytest.raises(ConnectionError):
        await pool.close()
    assert [sock.fileno() for sock in sockets] == [-1, -1]


def test_collector_closes_files_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "MAX_OPEN", 2)
    files = CollectedFiles(tmp_path)
    names = [f"tokens/runner-{number}.rtk" for number in range(4)]
    for offset in range(3):
        for name in names:
            assert files.write(FileChunk(name, offset, b"x")) == offset + 1
            assert len(list_open_files(tmp_path)) <= 2
    for name in names:
        files.close(name)
        assert (tmp_path / name).read_bytes() == b"xxx"


@pytest.mark.parametrize(
    "file", ["../x.rtk", "tokens/../x.rtk", "/etc/x.rtk", "tokens/a/b.rtk", "journal.db", "logs/.x.log"]
)
def test_collector_writes_only_token_files_and_logs(tmp_path: Path, file: str) -> None:
    with pytest.raises(OSError):
        CollectedFiles(tmp_path).open(file)
    assert list(tmp_path.rglob("*.*")) == []


def test_collector_follows_no_link_and_writes_each_byte_once(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "link.rtk").symlink_to(tmp_path / "elsewhere")
    files = CollectedFiles(tmp_path)
    with pytest.raises(OSError):
        files.open("tokens/link.rtk")
    name = "tokens/a-0.rtk"
    assert files.write(FileChunk(name, 0, b"abc")) == 3
    assert files.write(FileChunk(name, 0, b"abc")) == 3
    assert files.write(FileChunk(name, 5, b"xyz")) == 3
    files.close(name)
    assert files.write(FileChunk(name, 3, b"def")) == 6
    files.close(name)
    assert (tmp_path / name).read_bytes() == b"abcdef"


class RunningCollector:
    """A collector process, and what it reports."""

    def __init__(self, run: Path, listening: socket.socket) -> None:
        self.run = run
        self.listening = listening
        self.sizes: dict[str, int] = {}
        self.changed = asyncio.Event()

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        fds = self.listening.fileno(), theirs.fileno()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rookery.cluster.collector", *map(str, fds), str(os.getpid())], pass_fds=fds
            )
        ours.setblocking(False)
        self.connection = FramedConnection(from_collector_decoder, self._on_message, lambda _: None)
        await asyncio.get_running_loop().create_connection(lambda: self.connection, sock=ours)
        self.connection.send(CollectorStart(str(self.run), KEY))

    def _on_message(self, message: FromCollector) -> None:
        assert not isinstance(message, CollectorFailed)
        if isinstance(message, Collected):
            self.sizes[message.file] = message.size
            self.changed.set()

    async def wait_for(self, file: str, size: int) -> None:
        async with asyncio.timeout(60):
            while self.sizes.get(file, 0) < size:
                self.changed.clear()
                await self.changed.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


@pytest.mark.long
async def test_collection_continues_after_the_collector_was_killed(tmp_path: Path) -> None:
    node, run, alive = tmp_path / "node", tmp_path / "run", {"runner-1.abc"}
    for folder in (node / "tokens", node / "logs", run):
        folder.mkdir(parents=True)
    listening = listen("127.0.0.1")
    collector = RunningCollector(run, listening)
    await collector.start()
    sender = TokenSender(
        node, "127.0.0.1", listening.getsockname()[1], KEY, "node-1", lambda name: name.rpartition("-")[0] in alive
    )
    sending = asyncio.create_task(sender.run())
    name = "tokens/runner-1.abc-0.rtk"
    try:
        first, second = os.urandom(20 << 20), os.urandom(3 << 20)
        (node / name).write_bytes(first)
        await collector.wait_for(name, 1)
        collector.kill()  # somewhere in the middle
        await collector.start()
        await collector.wait_for(name, len(first))
        with (node / name).open("ab") as file:
            file.write(second)
        await collector.wait_for(name, len(first) + len(second))
        assert (run / name).read_bytes() == first + second
        alive.clear()
        await wait_until(lambda: not (node / name).exists())  # the runner has ended, and everything is collected
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        collector.kill()
        listening.close()
