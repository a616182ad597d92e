"""What one client, one sandbox or one session may hold of a gateway, and that the others are served meanwhile."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.gateway import server as servers
from rookery.gateway.http import Request
from rookery.gateway.quotas import FAIR_BYTES, Quota
from rookery.gateway.server import Server
from tests.gateway.http_kit import Gate, echo, within
from tests.gateway.kit import Wire, request
from tests.gateway.scripted import WAIT
from tests.gateway.shard_kit import HI, eventually, gateway
from tests.gateway.test_handed import ask, echoing, free, session_of

MB = 1 << 20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def admit(request: Request) -> int:
    """As the gateway does: a session's own listener, or its name in the path."""
    request.owner = request.session or request.path.strip("/")
    return 64 * MB


@contextlib.asynccontextmanager
async def listeners(*bound: str, handler: Any = echo, **quota: int) -> AsyncIterator[tuple[Server, list[int]]]:
    """A server with a listener for each name; the empty one is open to all."""
    server = Server(
        handler, admit, format_error=lambda _, text: text.encode(), internal_error=b"{}", quota=Quota(**quota)
    )
    ports = []
    for name in bound:
        sock = socket.create_server(("127.0.0.1", 0))
        ports.append(sock.getsockname()[1])
        await server.listen(sock, session=name)
    try:
        yield server, ports
    finally:
        await server.close(grace=0)
    assert server.quotas.bytes == 0
    assert not server.quotas._connections
    assert not server.quotas._bytes


async def count(server: Server, number: int) -> None:
    await eventually(lambda: len(server.connections) == number, f"{number} connections")


async def works(port: int, path: str = "/c") -> bool:
    wire = await Wire.to(port)
    try:
        wire.send(request("GET", path))
        return (await wire.answer()).status == 200
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    finally:
        wire.writer.close()


async def test_idle_connections_of_two_listeners_do_not_keep_others_out() -> None:
    async with listeners("a", "b", "c", "", connections=20, connections_per_owner=15) as (server, (a, b, c, door)):
        idle = [await Wire.to(a) for _ in range(30)]
        idle += [await Wire.to(b) for _ in range(30)]
        await count(server, 20)
        for _ in range(3):
            assert await works(c)
            assert await works(door)
        assert len(server.quotas._connections["a"]) <= 15
        for wire in idle:
            wire.writer.close()
        await count(server, 0)


async def test_a_connection_that_is_being_answered_is_not_closed_for_others() -> None:
    gate = Gate()
    async with listeners("a", "b", handler=gate, connections=3, connections_per_owner=2) as (server, (a, b)):
        held = [await Wire.to(a) for _ in range(2)]
        for wire in held:
            wire.send(request("GET", "/"))
        await within(gate.begun)
        await eventually(lambda: sum(one.task is not None for one in server.connections) == 2)
        refused = await Wire.to(a)
        assert await refused.rest() == b""
        other = await Wire.to(b)
        other.send(request("GET", "/"))
        await eventually(lambda: sum(one.task is not None for one in server.connections) == 3)
        gate.go.set()
        for wire in (*held, other):
            assert (await wire.answer()).status == 200
            wire.writer.close()


async def test_a_session_is_counted_over_all_listeners_together() -> None:
    async with listeners("a", "", connections_per_owner=4, bytes_per_owner=3 * MB) as (server, (own, door)):
        wires = [await Wire.to(own) for _ in range(2)] + [await Wire.to(door) for _ in range(4)]
        await count(server, 6)
        for wire in wires[2:]:
            wire.send(request("GET", "/a"))
            assert (await wire.answer()).status == 200
        assert len(server.quotas._connections["a"]) == 4
        one, two = await Wire.to(own), await Wire.to(door)
        one.send(HEAD % (2 * MB), b"x" * (2 * MB - 1))
        await eventually(lambda: server.quotas.bytes == 2 * MB - 1)
        two.send((HEAD % (2 * MB)).replace(b"/v1/chat/completions", b"/a"), b"x" * (2 * MB - 1))
        refused = await two.answer()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        one.send(b"x")
        assert (await one.answer()).status == 200
        await eventually(lambda: server.quotas.bytes == 0)
        for wire in (*wires, one, two):
            wire.writer.close()


async def test_a_server_full_of_unfinished_bodies_refuses_who_holds_most() -> None:
    size = 2 * FAIR_BYTES
    async with listeners("a", "b", "c", bytes=3 * size, bytes_per_owner=10 * size) as (server, (a, b, c)):
        greedy = [await Wire.to(a) for _ in range(3)]
        for wire in greedy:
            wire.send(HEAD % size, b"x" * (size - 1))
        await eventually(lambda: server.quotas.bytes == 3 * (size - 1))
        modest = await Wire.to(b)
        modest.send(HEAD % size, b"x" * size)
        assert (await modest.answer()).status == 200
        small = await Wire.to(c)
        small.send(HEAD % MB, b"x" * MB)
        assert (await small.answer()).status == 200
        answers = [asyncio.create_task(wire.answer()) for wire in greedy]
        done, waiting = await asyncio.wait(answers, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().status for task in done} == {503}
        for task in waiting:
            task.cancel()
        for wire in (*greedy, modest, small):
            wire.writer.close()


async def test_a_server_full_of_answers_under_way_ends_some_of_who_has_most() -> None:
    gate = Gate()
    async with listeners("a", "b", handler=gate, connections=70, connections_per_owner=70) as (server, (a, b)):
        greedy = [await Wire.to(a) for _ in range(70)]
        for wire in greedy:
            wire.send(request("GET", "/"))
        await eventually(lambda: sum(one.task is not None for one in server.connections) == 70)
        other = await Wire.to(b)
        other.send(request("GET", "/"))
        await eventually(lambda: any(one.owner == "b" and one.task is not None for one in server.connections))
        gate.go.set()
        assert (await other.answer()).status == 200
        for wire in (*greedy, other):
            wire.writer.close()


async def test_a_server_full_of_bodies_under_way_ends_one_of_who_holds_most() -> None:
    gate, size = Gate(), 2 * FAIR_BYTES
    async with listeners("a", "b", handler=gate, bytes=3 * size, bytes_per_owner=10 * size) as (server, (a, b)):
        greedy = [await Wire.to(a) for _ in range(3)]
        for wire in greedy:
            wire.send(HEAD % size, b"x" * size)
        await eventually(lambda: sum(one.task is not None for one in server.connections) == 3)
        modest = await Wire.to(b)
        modest.send(HEAD % size, b"x" * size)
        await eventually(lambda: any(one.owner == "b" and one.task is not None for one in server.connections))
        assert server.quotas.rejected >= 1
        gate.go.set()
        assert (await modest.answer()).status == 200
        for wire in (*greedy, modest):
            wire.writer.close()


async def test_the_head_of_a_request_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEAD_SECONDS", 0.05)
    async with listeners("") as (server, (port,)):
        silent, slow, body = [await Wire.to(port) for _ in range(3)]
        slow.send(b"GET / HTTP/1.1\r\nX: ")
        body.send(HEAD % 4, b"x")
        await eventually(lambda: server.quotas.bytes == 1)
        async with asyncio.timeout(WAIT):
            while len(server.connections) > 1:
                server.close_overdue()
                await asyncio.sleep(0.01)
        assert await silent.rest() == b""
        assert await slow.rest() == b""
        body.send(b"xxx")
        assert (await body.answer()).status == 200
        body.writer.close()


async def test_a_client_that_goes_away_releases_what_it_held() -> None:
    gate = Gate()
    async with listeners("a", handler=gate) as (server, (a,)):
        wire = await Wire.to(a)
        wire.send(HEAD % 1000, b"x" * 1000, HEAD % 500, b"y" * 500, HEAD % 100, b"z" * 10)
        await within(gate.begun)
        await eventually(lambda: server.quotas.bytes == 1510)
        wire.writer.transport.abort()
        await eventually(lambda: server.quotas.bytes == 0)


# ------------------------------------------------------------------------------------------------- real processes


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_a_sandbox_can_starve_neither_the_memory_nor_the_connections_of_a_shard() -> None:
    async with echoing() as model, gateway(model.url) as served, session_of() as http:
        ports = {}
        for name in ("hostile-1", "hostile-2", "good"):
            await served.register({"id": name})
            listener = free()
            ports[name] = listener.getsockname()[1]
            await served.attach_listener(name, listener)
        (pid,) = served.pids()
        assert (await ask(http, ports["good"]))[0] == 200
        before = resident(pid)

        # Ten unfinished requests of 60 MB each.
        piece, wires = b" " * MB, [await Wire.to(ports["hostile-1"]) for _ in range(10)]
        for wire in wires:
            wire.send(HEAD % (60 * MB + 1))
        for _ in range(60):
            for wire in wires:
                with contextlib.suppress(ConnectionError):
                    wire.send(piece)
                    await wire.writer.drain()
        assert (await ask(http, ports["good"]))[0] == 200
        assert resident(pid) - before < 300 * MB
        for wire in wires:
            wire.writer.close()

        # Idle connections, far more than one session may have.
        idle = [await Wire.to(ports[name]) for _ in range(700) for name in ("hostile-1", "hostile-2")]
        status = await served.request("GET", "/rollouts/good")
        assert status["status"] == "open"
        for _ in range(3):
            assert (await ask(http, ports["good"], messages=HI))[0] == 200
        async with http.get(f"{served.url}/metrics") as answer:
            lines = [
                line for line in (await answer.text()).splitlines() if "connections" in line and line[0] != "#"
            ]
        assert sum(float(line.split()[-1]) for line in lines) < 1100
        for wire in idle:
            wire.writer.close()
