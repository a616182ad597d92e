"""Cancellation at any moment closes the connection, the server notices it, and nothing stays pending."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rookery.upstreams.http_client import Client
from tests.upstreams.http_kit import Script, Wire, answering, both_loops, chunked, fetch, run, spin, until, whole

BODY = b"0123456789" * 30


@pytest.mark.long
@both_loops
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("tcp", [False, True])
def test_cancelling_after_any_number_of_loop_iterations_leaves_nothing(
    tcp: bool, streamed: bool, loop: str
) -> None:
    raw = chunked([BODY[:100], BODY[100:200], BODY[200:]])

    async def handle(wire: Wire) -> None:
        while await wire.request():
            for at in range(0, len(raw), 40):
                await wire.send(raw[at : at + 40])
                await spin(2)

    async def main() -> None:
        async with Script(handle, tcp=tcp) as server, server.client() as client:
            finished = number = 0
            while finished < 3:
                task = asyncio.create_task(fetch(client, streamed=streamed))
                await spin(number)
                number += 1
                task.cancel()
                try:
                    assert await task == BODY
                    finished += 1
                except asyncio.CancelledError:
                    pass
                # Connections that are not idle are closed at once, and an idle one can be used.
                await until(lambda: client.live == client.idle == server.open)
                if number % 2:
                    assert await fetch(client) == BODY
            assert number > 15  # otherwise there was nothing to cancel

    run(main(), loop)


async def _head(client: Client) -> Any:
    return await client.send("GET", "/silent")


async def _read(client: Client) -> Any:
    return await (await client.send("GET", "/half")).read(1000)


async def _chunk(client: Client) -> Any:
    response = await client.send("GET", "/half")
    assert await response.chunk() == b"half"
    return await response.chunk()


@pytest.mark.long
@both_loops
@pytest.mark.parametrize("how", ["cancel", "timeout"])
@pytest.mark.parametrize("wait", [_head, _read, _chunk])
def test_cancelled_wait_closes_the_connection_and_the_server_notices(
    wait: Callable[[Client], Awaitable[Any]], how: str, loop: str
) -> None:
    async def main() -> None:
        arrived, closed = asyncio.Event(), asyncio.Event()

        async def handle(wire: Wire) -> None:
            if b"/half" in await wire.request():
                await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
                await wire.wait_until_read()
            arrived.set()
            await wire.wait_until_closed()
            closed.set()

        async with Script(handle) as server, server.client() as client:
            task = asyncio.ensure_future(wait(client))
            await arrived.wait()
            await spin()
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await task
            await closed.wait()
            assert client.idle == 0
            await until(lambda: client.live == 0)

    run(main(), loop)


@both_loops
def test_cancelling_at_the_moment_the_response_arrives_is_a_cancellation(loop: str) -> None:
    async def main() -> None:
        async with Script(answering(whole(BODY))) as server, server.client() as client:
            task = asyncio.create_task(client.send("GET", "/"))
            # The task is cancelled when the head has arrived and the task has not run yet.
            await until(lambda: client.live == 1)
            [connection] = client.connections
            while connection._response is not None and not connection._response.status:
                await asyncio.sleep(0)
            task.cancel()
            if not task.done():
                with pytest.raises(asyncio.CancelledError):
                    await task
            await until(lambda: client.live == client.idle)
            assert await fetch(client) == BODY

    run(main(), loop)


@both_loops
def test_cancelling_a_connect_that_hangs_leaves_no_socket(loop: str) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            filling = [socket.socket() for _ in range(4)]
            try:
                for sock in filling:  # a full accept queue drops packets, so that connecting hangs
                    sock.setblocking(False)
                    sock.connect_ex(full.getsockname())
                async with Client("127.0.0.1", full.getsockname()[1]) as client:
                    tasks = [asyncio.create_task(client.send("GET", "/")) for _ in range(5)]
                    await spin()
                    for task in tasks:
                        task.cancel()
                    results = await asyncio.gather(*tasks, return_exceptions=True)
                    assert all(isinstance(result, asyncio.CancelledError) for result in results)
                    assert client.live == 0
            finally:
                for sock in filling:
                    sock.close()

    run(main(), loop)


@both_loops
def test_cancelling_one_waiter_for_a_name_leaves_the_others_waiting(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookups: list[str] = []
    proceed = threading.Event()
    real = socket.getaddrinfo

    def slow(host: str, port: int, **options: Any) -> Any:
        if host != "engine.test":
            return real(host, port, **options)
        if options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        lookups.append(host)
        assert proceed.wait(60)
        return real("127.0.0.1", port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def main() -> None:
        async with Script(answering(whole(BODY)), tcp=True) as server:  # noqa: SIM117  (the port is in it)
            async with Client("engine.test", server.port) as client:
                tasks = [asyncio.create_task(fetch(client)) for _ in range(20)]
                await until(lambda: bool(lookups))
                await spin()
                for task in tasks[:10]:
                    task.cancel()
                await spin()
                proceed.set()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert [type(result) for result in results[:10]] == [asyncio.CancelledError] * 10
                assert results[10:] == [BODY] * 10
                assert len(lookups) == 1

    run(main(), loop)
