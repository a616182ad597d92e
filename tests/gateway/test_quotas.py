"""Limits on what one client, sandbox or session may use of a gateway, so that others are still served."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rookery.gateway import server as servers
from rookery.gateway.http_messages import Request
from rookery.gateway.quotas import FAIR_BYTES, Quota
from rookery.gateway.server import Server
from tests.gateway.http_kit import BlockingHandler, echo, wait_for
from tests.gateway.kit import RawConnection, request
from tests.gateway.scripted_upstream import WAIT
from tests.gateway.shard_kit import HI, run_gateway
from tests.gateway.test_session_listeners import bound_socket, echo_model, http_client, post_chat
from tests.waiting import wait_until

MB = 1 << 20
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def admit(request: Request) -> int:
    """Set the owner as the gateway does: from the listener's session or from the path."""
    request.owner = request.session or request.path.strip("/")
    return 64 * MB


@contextlib.asynccontextmanager
async def listeners(*bound: str, handler: Any = echo, **quota: int) -> AsyncIterator[tuple[Server, list[int]]]:
    """Run a server with one listener per session name; the empty name is a shared listener."""
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
    assert server.quotas.owners == frozenset()


async def wait_for_connections(server: Server, number: int) -> None:
    await wait_until(lambda: len(server.connections) == number)


async def is_served(port: int, path: str = "/c") -> bool:
    client = await RawConnection.open(port)
    try:
        client.send(request("GET", path))
        return (await client.read_response()).status == 200
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    finally:
        client.writer.close()


async def test_idle_connections_of_two_owners_do_not_block_others() -> None:
    async with listeners("a", "b", "c", "", connections=20, connections_per_owner=15) as (
        server,
        (a, b, c, open_port),
    ):
        idle = [await RawConnection.open(a) for _ in range(30)]
        idle += [await RawConnection.open(b) for _ in range(30)]
        await wait_for_connections(server, 20)
        for _ in range(3):
            assert await is_served(c)
            assert await is_served(open_port)
        assert server.quotas.count_connections("a") <= 15
        for client in idle:
            client.writer.close()
        await wait_for_connections(server, 0)


async def test_active_connection_is_not_closed_for_other_owners() -> None:
    gate = BlockingHandler()
    async with listeners("a", "b", handler=gate, connections=3, connections_per_owner=2) as (server, (a, b)):
        active = [await RawConnection.open(a) for _ in range(2)]
        for client in active:
            client.send(request("GET", "/"))
        await wait_for(gate.started)
        await wait_until(lambda: sum(one.task is not None for one in server.connections) == 2)
        refused = await RawConnection.open(a)
        assert await refused.read_to_end() == b""
        other = await RawConnection.open(b)
        other.send(request("GET", "/"))
        await wait_until(lambda: sum(one.task is not None for one in server.connections) == 3)
        gate.proceed.set()
        for client in (*active, other):
            assert (await client.read_response()).status == 200
            client.writer.close()


async def test_quota_of_a_session_covers_all_listeners() -> None:
    async with listeners("a", "", connections_per_owner=4, bytes_per_owner=3 * MB) as (server, (own, open_port)):
        clients = [await RawConnection.open(own) for _ in range(2)] + [
            await RawConnection.open(open_port) for _ in range(4)
        ]
        await wait_for_connections(server, 6)
        for client in clients[2:]:
            client.send(request("GET", "/a"))
            assert (await client.read_response()).status == 200
        assert server.quotas.count_connections("a") == 4
        one, two = await RawConnection.open(own), await RawConnection.open(open_port)
        one.send(HEAD % (2 * MB), b"x" * (2 * MB - 1))
        await wait_until(lambda: server.quotas.bytes == 2 * MB - 1)
        two.send((HEAD % (2 * MB)).replace(b"/v1/chat/completions", b"/a"), b"x" * (2 * MB - 1))
        refused = await two.read_response()
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        one.send(b"x")
        assert (await one.read_response()).status == 200
        await wait_until(lambda: server.quotas.bytes == 0)
        for client in (*clients, one, two):
            client.writer.close()


async def test_full_server_rejects_unfinished_bodies_of_the_largest_owner() -> None:
    size = 2 * FAIR_BYTES
    async with listeners("a", "b", "c", bytes=3 * size, bytes_per_owner=10 * size) as (server, (a, b, c)):
        greedy = [await RawConnection.open(a) for _ in range(3)]
        for client in greedy:
            client.send(HEAD % size, b"x" * (size - 1))
        await wait_until(lambda: server.quotas.bytes == 3 * (size - 1))
        modest = await RawConnection.open(b)
        modest.send(HEAD % size, b"x" * size)
        assert (await modest.read_response()).status == 200
        small = await RawConnection.open(c)
        small.send(HEAD % MB, b"x" * MB)
        assert (await small.read_response()).status == 200
        answers = [asyncio.create_task(client.read_response()) for client in greedy]
        done, waiting = await asyncio.wait(answers, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().status for task in done} == {503}
        for task in waiting:
            task.cancel()
        for client in (*greedy, modest, small):
            client.writer.close()


async def test_full_server_ends_active_requests_of_the_largest_owner() -> None:
    gate = BlockingHandler()
    async with listeners("a", "b", handler=gate, connections=70, connections_per_owner=70) as (server, (a, b)):
        greedy = [await RawConnection.open(a) for _ in range(70)]
        for client in greedy:
            client.send(request("GET", "/"))
        await wait_until(lambda: sum(one.task is not None for one in server.connections) == 70)
        other = await RawConnection.open(b)
        other.send(request("GET", "/"))
        await wait_until(lambda: any(one.owner == "b" and one.task is not None for one in server.connections))
        gate.proceed.set()
        assert (await other.read_response()).status == 200
        for client in (*greedy, other):
            client.writer.close()


async def test_full_server_ends_a_request_of_the_owner_with_the_most_bytes() -> None:
    gate, size = BlockingHandler(), 2 * FAIR_BYTES
    async with listeners("a", "b", handler=gate, bytes=3 * size, bytes_per_owner=10 * size) as (server, (a, b)):
        greedy = [await RawConnection.open(a) for _ in range(3)]
        for client in greedy:
            client.send(HEAD % size, b"x" * size)
        await wait_until(lambda: sum(one.task is not None for one in server.connections) == 3)
        modest = await RawConnection.open(b)
        modest.send(HEAD % size, b"x" * size)
        await wait_until(lambda: any(one.owner == "b" and one.task is not None for one in server.connections))
        assert server.quotas.rejected >= 1
        gate.proceed.set()
        assert (await modest.read_response()).status == 200
        for client in (*greedy, modest):
            client.writer.close()


async def test_request_head_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEAD_SECONDS", 0.05)
    async with listeners("") as (server, (port,)):
        silent, slow, body = [await RawConnection.open(port) for _ in range(3)]
        slow.send(b"GET / HTTP/1.1\r\nX: ")
        body.send(HEAD % 4, b"x")
        await wait_until(lambda: server.quotas.bytes == 1)

        def closed() -> bool:
            server.close_overdue()
            return len(server.connections) == 1

        await wait_until(closed)
        assert await silent.read_to_end() == b""
        assert await slow.read_to_end() == b""
        body.send(b"xxx")
        assert (await body.read_response()).status == 200
        body.writer.close()


async def test_disconnect_releases_the_buffered_bytes() -> None:
    gate = BlockingHandler()
    async with listeners("a", handler=gate) as (server, (a,)):
        client = await RawConnection.open(a)
        client.send(HEAD % 1000, b"x" * 1000, HEAD % 500, b"y" * 500, HEAD % 100, b"z" * 10)
        await wait_for(gate.started)
        await wait_until(lambda: server.quotas.bytes == 1510)
        client.writer.transport.abort()
        await wait_until(lambda: server.quotas.bytes == 0)


# ---- real processes


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.long
async def test_sandbox_cannot_exhaust_memory_or_connections_of_a_shard() -> None:
    async with echo_model() as model, run_gateway(model.url) as gateway, http_client() as http:
        ports = {}
        for name in ("hostile-1", "hostile-2", "good"):
            await gateway.register({"id": name})
            listener = bound_socket()
            ports[name] = listener.getsockname()[1]
            await gateway.attach_listener(name, listener)
        (pid,) = gateway.pids()
        assert (await post_chat(http, ports["good"]))[0] == 200
        before = resident(pid)

        # Ten unfinished requests of 60 MB each.
        piece, clients = b" " * MB, [await RawConnection.open(ports["hostile-1"]) for _ in range(10)]
        for client in clients:
            client.send(HEAD % (60 * MB + 1))
        for _ in range(60):
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    client.send(piece)
                    await client.writer.drain()
        assert (await post_chat(http, ports["good"]))[0] == 200
        assert resident(pid) - before < 300 * MB
        for client in clients:
            client.writer.close()

        # Many more idle connections than one session may have.
        idle = [await RawConnection.open(ports[name]) for _ in range(700) for name in ("hostile-1", "hostile-2")]
        status = await gateway.request("GET", "/rollouts/good")
        assert status["status"] == "open"
        for _ in range(3):
            assert (await post_chat(http, ports["good"], messages=HI))[0] == 200
        async with http.get(f"{gateway.url}/metrics") as response:
            lines = [
                line for line in (await response.text()).splitlines() if "connections" in line and line[0] != "#"
            ]
        assert sum(float(line.split()[-1]) for line in lines) < 1100
        for client in idle:
            client.writer.close()
