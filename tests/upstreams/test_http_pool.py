"""The connection pool: reuse, idle and stale connections, and many requests at once."""

import asyncio
import errno
import resource
import socket

import pytest

from rookery.upstreams.http_client import (
    Client,
    ConnectError,
    ConnectionDropped,
    HttpClientError,
    IncompleteResponse,
)
from tests.upstreams.http_kit import Script, Wire, answering, both_loops, fetch, run, spin, until, whole

OK = whole(b"ok")


@both_loops
def test_one_connection_serves_one_request_after_another(loop: str) -> None:
    async def main() -> None:
        async with Script(answering(OK), tcp=True) as server, server.client() as client:
            for _ in range(50):
                assert await fetch(client) == b"ok"
                assert (client.live, client.idle) == (1, 1)
            assert server.connections == 1

    run(main(), loop)


@pytest.mark.long
@both_loops
@pytest.mark.parametrize(
    "raw",
    [
        whole(b"ok", b"Connection: close"),
        OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
        whole(b"ok", b"Connection: keep-alive, Close"),
    ],
)
def test_response_that_does_not_keep_the_connection_ends_it(raw: bytes, loop: str) -> None:
    async def main() -> None:
        async with Script(answering(raw)) as server, server.client() as client:
            for _ in range(3):
                assert await fetch(client) == b"ok"
                assert client.idle == 0
            assert server.connections == 3

    run(main(), loop)


@both_loops
def test_most_recently_used_connection_is_taken_first(loop: str) -> None:
    async def main() -> None:
        wire_numbers: list[int] = []
        barrier = asyncio.Barrier(3)

        async def handle(wire: Wire) -> None:
            while request := await wire.request():
                wire_numbers.append(wire.number)
                if b"/together" in request:
                    await barrier.wait()
                await wire.send(OK)

        async with Script(handle) as server, server.client() as client:
            first = await asyncio.gather(*(client.send("GET", "/together") for _ in range(3)))
            assert [await r.read(10) for r in first] == [b"ok"] * 3
            assert (client.idle, sorted(wire_numbers)) == (3, [1, 2, 3])
            for _ in range(5):
                await fetch(client)
            assert len(set(wire_numbers[3:])) == 1

    run(main(), loop)


@both_loops
def test_idle_connections_are_bounded_and_the_oldest_goes_first(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            while await wire.request():
                await barrier.wait()
                await wire.send(OK)

        barrier = asyncio.Barrier(6)
        async with Script(handle) as server, server.client(idle=2) as client:
            await asyncio.gather(*(fetch(client) for _ in range(6)))
            assert client.idle == 2
            await until(lambda: client.live == 2 and server.open == 2)
        async with Script(answering(OK)) as server, server.client(idle=0) as client:
            for _ in range(3):
                await fetch(client)
                assert client.idle == 0
            assert server.connections == 3

    run(main(), loop)


@both_loops
def test_idle_connection_ends_after_its_time(loop: str) -> None:
    async def main() -> None:
        async with Script(answering(OK)) as server, server.client(keepalive=0.05) as client:
            await asyncio.gather(*(fetch(client) for _ in range(3)))
            await until(lambda: client.live == 0 and server.open == 0)
            await fetch(client)
            await until(lambda: client.live == 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_connection_that_the_server_ends_while_idle_is_noticed_at_once(how: str, loop: str) -> None:
    async def main() -> None:
        proceed = asyncio.Event()

        async def handle(wire: Wire) -> None:
            await wire.request()
            await wire.send(OK)
            await proceed.wait()
            if how == "reset":
                wire.reset()

        async with Script(handle, tcp=True) as server, server.client() as client:
            await asyncio.gather(*(fetch(client) for _ in range(5)))
            assert client.idle == 5
            proceed.set()
            await until(lambda: client.idle == 0 and client.live == 0)
            assert await fetch(client) == b"ok"

    run(main(), loop)


@both_loops
def test_unrequested_bytes_close_an_idle_connection(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            await wire.request()
            await wire.send(OK, OK)
            await wire.wait_until_closed()

        async with Script(handle) as server, server.client() as client:
            assert await fetch(client) == b"ok"
            await until(lambda: client.live == 0)
            assert await fetch(client) == b"ok"
            assert server.connections == 2

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("how", ["closed", "reset"])
def test_stale_connection_is_replaced_once_and_the_request_sent_again(how: str, loop: str) -> None:
    """A server that reads the second request of its first connection and closes it without a response."""

    async def main() -> None:
        requests: list[bytes] = []

        async def handle(wire: Wire) -> None:
            requests.append(await wire.request())
            await wire.send(OK)
            if wire.number > 1:
                await wire.wait_until_closed()
                return
            requests.append(await wire.request())
            if how == "reset":
                wire.reset()

        async with Script(handle, tcp=True) as server, server.client() as client:
            for body in (b"first", b"second"):
                response = await client.send("POST", "/", body=[body, b"!"])
                assert await response.read(10) == b"ok"
            assert server.connections == 2
            assert [r.rpartition(b"\r\n\r\n")[2] for r in requests] == [b"first!", b"second!", b"second!"]

    run(main(), loop)


@both_loops
def test_request_is_sent_a_second_time_at_most(loop: str) -> None:
    async def main() -> None:
        requests = 0

        async def handle(wire: Wire) -> None:
            nonlocal requests
            while await wire.request():
                requests += 1
                if requests > 1:
                    return
                await wire.send(OK)

        async with Script(handle) as server, server.client() as client:
            await fetch(client)
            with pytest.raises(ConnectionDropped) as caught:
                await fetch(client)
            assert not caught.value.reused
            assert (requests, server.connections) == (3, 2)

    run(main(), loop)


@both_loops
def test_sent_request_is_never_reported_as_unsent(loop: str) -> None:
    """A request on a stale connection to a dead server counts as dropped, not as refused."""

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await reader.readuntil(b"\r\n\r\n")
            server.close()
            writer.close()

        server = await asyncio.start_server(handle, sock=listener)
        async with Client("127.0.0.1", port) as client:
            await fetch(client)
            with pytest.raises(ConnectionDropped) as caught:
                await fetch(client)
            assert caught.value.reused
            assert isinstance(caught.value.__cause__, ConnectError)
            with pytest.raises(ConnectError) as refused:
                await fetch(client)
            assert refused.value.reason == "refused"

    run(main(), loop)


@both_loops
def test_connection_lost_by_the_network_is_not_stale(loop: str) -> None:
    """The server may be processing the request, so only the caller may send it again."""

    async def main() -> None:
        async with Script(answering(b"", first=OK)) as server, server.client() as client:
            await fetch(client)
            [connection] = client.connections
            task = asyncio.create_task(fetch(client))
            await until(lambda: client.idle == 0)
            transport = connection.transport
            assert transport is not None
            connection.connection_lost(
                TimeoutError(errno.ETIMEDOUT, "Connection timed out")
            )  # the error that the event loop reports
            with pytest.raises(ConnectionDropped, match="Connection timed out") as caught:
                await task
            assert caught.value.reused
            assert server.connections == 1
            transport.abort()

    run(main(), loop)


@pytest.mark.long
@both_loops
@pytest.mark.parametrize("sent", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", OK[:-1]])
def test_nothing_is_sent_again_once_a_byte_came_back(sent: bytes, loop: str) -> None:
    async def main() -> None:
        async with (
            Script(answering(sent, first=OK, close=False)) as server,
            server.client() as client,
        ):
            await fetch(client)
            task = asyncio.create_task(fetch(client))
            await until(lambda: client.idle == 0)
            await spin(50)
            server.cut()
            with pytest.raises(IncompleteResponse):
                await task
            assert server.connections == 1

    run(main(), loop)


@both_loops
def test_response_that_comes_before_the_request_was_sent_whole_ends_the_connection(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            await wire.reader.readuntil(b"\r\n\r\n")
            await wire.send(whole(b"too large", status=b"413 Content Too Large"))
            await ended.wait()

        ended = asyncio.Event()
        async with Script(handle, tcp=True) as server, server.client() as client:
            response = await client.send("POST", "/", body=bytes(64 << 20))
            assert response.status == 413
            assert await response.read(100) == b"too large"
            assert client.idle == 0
            await until(lambda: client.live == 0)
            ended.set()

    run(main(), loop)


@pytest.mark.long
@both_loops
def test_thousands_of_requests_at_once_all_get_their_own_response(loop: str) -> None:
    count = 2000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * count + 200:
        pytest.skip(f"[probed] no more than {hard} files can be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count + 200), hard))

    async def main() -> None:
        together = asyncio.Event()
        waiting = 0

        async def handle(wire: Wire) -> None:
            nonlocal waiting
            while request := await wire.request():
                waiting += 1
                if waiting == count:
                    together.set()
                await together.wait()
                await wire.send(whole(request.rpartition(b"\r\n\r\n")[2] * 100))

        async def one(number: int) -> None:
            body = b"%d," % number
            response = await client.send("POST", "/", body=body)
            assert await response.read(10_000) == body * 100

        async with Script(handle) as server, server.client(idle=100) as client:
            async with asyncio.TaskGroup() as group:
                for number in range(count):
                    group.create_task(one(number))
            assert server.connections == count
            assert client.idle == 100
            await asyncio.gather(*(one(number) for number in range(100)))
            assert server.connections == count

    try:
        run(main(), loop)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@both_loops
def test_closing_the_client_ends_all_requests_with_an_error(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            request = await wire.request()
            if b"/body" in request:
                await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
            elif b"/ok" in request:
                await wire.send(OK)
            await wire.wait_until_closed()

        async with Script(handle) as server:
            client = server.client()
            body = await client.send("GET", "/body")
            waits = [asyncio.create_task(client.send("GET", "/head")), asyncio.create_task(body.read(10))]
            assert await (await client.send("GET", "/ok")).read(10) == b"ok"
            await until(lambda: server.open == 3)
            await client.close()
            assert (client.live, client.idle) == (0, 0)
            for wait, kind in zip(waits, (ConnectionDropped, IncompleteResponse), strict=True):
                with pytest.raises(kind):
                    await wait
            with pytest.raises(ConnectError) as caught:
                await client.send("GET", "/")
            assert caught.value.reason == "closed"
            await client.close()

    run(main(), loop)


def test_client_belongs_to_one_event_loop() -> None:
    client = Client("127.0.0.1", 9)

    async def main() -> None:
        with pytest.raises((RuntimeError, HttpClientError)) as caught:
            await client.send("GET", "/")
        kinds.append(caught.type)

    kinds: list[type[BaseException]] = []
    asyncio.run(main())
    asyncio.run(main())
    assert kinds == [ConnectError, RuntimeError]
