"""HTTP connections to the gateway: slow, idle and disconnecting clients, and closing the server."""

import asyncio
import logging
import socket

import pytest

from rookery.gateway import server
from rookery.gateway.http_messages import EVENT_STREAM, HttpError, Request, ResponseWriter
from tests.gateway.http_kit import PLAIN, BlockingHandler, RunningServer, echo, run_server, start_server, wait_for
from tests.gateway.kit import RawConnection, on_both_loops, request
from tests.gateway.scripted_upstream import WAIT

# ---- clients on real sockets


@on_both_loops
async def test_keep_alive_serves_several_requests_until_connection_close() -> None:
    async with run_server() as running, await running.connect() as client:
        for at in range(3):
            client.send(request("POST", f"/{at}", b"x"))
            response = await client.read_response()
            assert (response.status, response.json[1], "connection" in response.headers) == (200, f"/{at}", False)
        client.send(request("GET", "/last", Connection="close"))
        response = await client.read_response()
        assert (response.json[1], response.headers["connection"]) == ("/last", "close")
        assert await client.read_to_end() == b""


@on_both_loops
async def test_http_1_0_response_ends_with_the_connection() -> None:
    async def write_stream(request: Request, out: ResponseWriter) -> None:
        out.begin(200, EVENT_STREAM)
        await out.write(b"one")
        out.end(b"two")

    async with run_server(write_stream) as running:
        for version, ends in ((b"1.0", b"onetwo"), (b"1.1", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")):
            async with await running.connect() as client:
                client.send(b"GET / HTTP/" + version + b"\r\nConnection: close\r\n\r\n")
                data = await client.read_to_end()
                assert data.partition(b"\r\n\r\n")[2] == ends
                assert (b"chunked" in data) == (version == b"1.1")


@on_both_loops
async def test_head_request_gets_only_the_head_and_keeps_the_connection() -> None:
    async def respond(request: Request, out: ResponseWriter) -> None:
        if request.path == "/stream":
            out.begin(200, EVENT_STREAM)
            await out.write(b"one")
            out.end(b"two")
        else:
            out.send(200, b'{"a":1}')

    async with run_server(respond) as running, await running.connect() as client:
        for path in ("/", "/stream", "/"):
            client.send(request("HEAD", path))
            assert (await client.read_response(head_only=True)).status == 200
        client.send(request("GET", "/"))
        assert (await client.read_response()).body == b'{"a":1}'


@on_both_loops
async def test_expect_100_continue_gets_100_or_the_rejection() -> None:
    async with run_server() as running:
        async with await running.connect() as client:
            head = request("POST", "/x", b"ten bytes!", Expect="100-Continue").removesuffix(b"ten bytes!")
            client.send(head)
            assert (await client.read_response()).status == 100
            client.send(b"ten bytes!")
            assert (await client.read_response()).json[4] == "ten bytes!"
        async with await running.connect() as client:
            client.send(head.replace(b"/x", b"/no"))
            assert (await client.read_response()).status == 401


@on_both_loops
@pytest.mark.parametrize("chunked", [False, True])
async def test_rejection_reaches_a_client_that_is_still_sending(chunked: bool) -> None:
    size = 8 << 20
    async with run_server() as running, await running.connect() as client:
        if chunked:
            client.send(b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size)
        else:
            client.send(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            client.send(b"x" * (1 << 16))
            await client.writer.drain()
        response = await client.read_response()
        assert (response.status, response.headers["connection"]) == (413, "close")
        assert await client.read_to_end() == b""


@on_both_loops
async def test_client_disconnect_cancels_its_handler() -> None:
    for go in (RawConnection.abort, lambda client: client.writer.close()):
        gate = BlockingHandler()
        async with run_server(gate) as running:
            client = await running.connect()
            client.send(PLAIN + PLAIN)
            await wait_for(gate.started)
            go(client)
            await wait_for(gate.cancelled)
            await running.wait_for_no_connections()
            await client.close()


@on_both_loops
async def test_disconnect_of_a_slow_reader_cancels_its_handler() -> None:
    ended = asyncio.Event()

    async def write_forever(request: Request, out: ResponseWriter) -> None:
        out.begin(200, EVENT_STREAM)
        try:
            while True:
                await out.write(b"x" * 10_000)
        except asyncio.CancelledError:
            ended.set()
            raise

    async with run_server(write_forever) as running:
        client = await running.connect()
        client.send(PLAIN)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection = await running.wait_for_only_connection()
        async with asyncio.timeout(WAIT):
            while connection.write_blocked is None:
                await asyncio.sleep(0)
        client.abort()
        await wait_for(ended)
        await running.wait_for_no_connections()


async def slow_reader(running: RunningServer) -> socket.socket:
    """Connect a client that has a small buffer and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", running.port))
    return sock


@on_both_loops
async def test_slow_reader_buffers_at_most_one_chunk_and_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.05)
    piece, sent, most = b"x" * 50_000, 0, 0
    over = asyncio.Event()

    async def write_forever(request: Request, out: ResponseWriter) -> None:
        nonlocal sent, most
        out.begin(200, EVENT_STREAM)
        try:
            while True:
                await out.write(piece)
                sent += 1
        finally:
            transport = out._connection.transport
            most = transport.get_write_buffer_size() if transport is not None else most
            over.set()

    async with run_server(write_forever) as running:
        sock = await slow_reader(running)
        with sock:
            sock.send(PLAIN)
            connection = await running.wait_for_only_connection()
            async with asyncio.timeout(WAIT):
                while connection.write_blocked is None:
                    await asyncio.sleep(0)
            assert connection.transport is not None
            waiting = connection.transport.get_write_buffer_size()
            assert waiting <= (64 << 10) + len(piece) + 100
            await wait_for(over)
            assert most <= waiting
            await running.wait_for_no_connections()


@on_both_loops
@pytest.mark.parametrize("close", ["close", "keep-alive"])
async def test_client_that_stops_reading_a_response_is_disconnected(
    close: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WRITE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(server, name, -1.0)

    async def send_large(request: Request, out: ResponseWriter) -> None:
        out.send(200, b"x" * (16 << 20))

    async with run_server(send_large) as running:
        sock = await slow_reader(running)
        with sock:
            sock.send(request("GET", "/", Connection=close))
            await running.wait_for_only_connection()
            async with asyncio.timeout(WAIT):
                while running.server.connections:
                    running.server.close_overdue()
                    await asyncio.sleep(0)


@on_both_loops
async def test_client_that_keeps_reading_a_large_response_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WRITE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(server, name, -1.0)
    size = 16 << 20

    async def send_large(request: Request, out: ResponseWriter) -> None:
        out.send(200, b"x" * size)

    async with run_server(send_large) as running, await running.connect() as client:
        client.send(PLAIN)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        connection = await running.wait_for_only_connection()
        transport, last, sweeps, got = connection.transport, 0, 0, 0
        assert transport is not None
        while got < size:
            chunk = await client.reader.read(1 << 20)
            assert chunk, "disconnected while reading the response"
            got += len(chunk)
            if 0 < (left := transport.get_write_buffer_size()) != last:
                running.server.close_overdue()
                last, sweeps = left, sweeps + 1
        assert sweeps > 1
        assert got == size


@on_both_loops
async def test_unfinished_request_and_idle_connection_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", -1.0)
    monkeypatch.setattr(server, "READ_SECONDS", -1.0)
    gate = BlockingHandler()
    async with run_server(gate) as running:
        for begun in (b"", b"GET / HT", request("POST", "/", b"x" * 10)[:-3]):
            client = await running.connect()
            client.send(begun)
            await running.wait_for_only_connection()
            async with asyncio.timeout(WAIT):
                while running.server.connections:
                    running.server.close_overdue()
                    await asyncio.sleep(0)
            assert await client.read_to_end() == b""
            await client.close()
        gate.started.clear()
        client = await running.connect()
        client.send(PLAIN + b"GET / HT")  # the timeout of the second request starts when the first is answered
        await wait_for(gate.started)
        running.server.close_overdue()
        assert len(running.server.connections) == 1
        monkeypatch.setattr(server, "IDLE_SECONDS", -1.0)
        gate.proceed.set()
        assert (await client.read_response()).status == 200
        running.server.close_overdue()
        await running.wait_for_no_connections()
        await client.close()


@on_both_loops
async def test_connections_above_the_limit_are_rejected_and_counted() -> None:
    async with run_server(max_connections=1) as running, await running.connect() as first:
        first.send(PLAIN)
        await first.read_response()
        async with await running.connect() as second:
            assert await second.read_to_end() == b""
        assert running.server.quotas.rejected == 1
        first.send(PLAIN)
        assert (await first.read_response()).status == 200


@on_both_loops
async def test_handler_exception_fails_only_its_request_and_is_not_disclosed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(request: Request, out: ResponseWriter) -> None:
        if request.path == "/late":
            out.begin(200, EVENT_STREAM)
            await out.write(b"half")
        if request.path == "/refused":
            raise HttpError(404, b'{"not":"here"}')
        if request.path == "/silent":
            return
        if request.path != "/fine":
            raise ValueError("the secret text")
        await echo(request, out)

    async with run_server(fail) as running:
        async with await running.connect() as other, await running.connect() as client:
            client.send(request("GET", "/early") + request("GET", "/refused") + request("GET", "/fine"))
            response = await client.read_response()
            assert (response.status, response.body) == (500, b"{}")
            assert (await client.read_response()).status == 404
            assert (await client.read_response()).status == 200
            other.send(request("GET", "/fine"))
            assert (await other.read_response()).status == 200
        for path in ("/late", "/silent"):
            async with await running.connect() as client:
                client.send(request("GET", path))
                data = await client.read_to_end()
                assert b"the secret text" not in data
                assert not data.endswith(b"0\r\n\r\n"), "the truncated response looks complete"
    assert "the secret text" in caplog.text


# ---- closing the server


@on_both_loops
async def test_close_waits_for_responses_in_flight_and_leaves_no_task_or_socket() -> None:
    gate = BlockingHandler()
    before = asyncio.all_tasks()
    running = await start_server(gate)
    busy, idle = await running.connect(), await running.connect()
    busy.send(PLAIN)
    await wait_for(gate.started)
    closing = asyncio.create_task(running.server.close(grace=WAIT))
    assert await idle.read_to_end() == b""
    gate.proceed.set()
    response = await busy.read_response()
    assert (response.status, response.headers["connection"]) == (200, "close")
    await closing
    assert await busy.read_to_end() == b""
    assert not running.server.connections
    await busy.close()
    await idle.close()
    with pytest.raises(ConnectionError):
        await running.connect()
    assert asyncio.all_tasks() == before


@on_both_loops
async def test_close_flushes_a_large_response_that_is_being_read() -> None:
    size = 8 << 20
    begun = asyncio.Event()

    async def send_large(request: Request, out: ResponseWriter) -> None:
        out.send(200, b"x" * size)
        begun.set()

    running = await start_server(send_large)
    client = await running.connect()
    client.send(PLAIN)
    await wait_for(begun)
    closing = asyncio.create_task(running.server.close(grace=WAIT))
    assert len((await client.read_response()).body) == size
    await closing
    await client.close()


@on_both_loops
async def test_close_cancels_handlers_after_the_grace_period() -> None:
    gate = BlockingHandler()
    before = asyncio.all_tasks()
    running = await start_server(gate)
    client = await running.connect()
    client.send(PLAIN + PLAIN)
    await wait_for(gate.started)
    await running.server.close(grace=0)
    assert gate.cancelled.is_set()
    assert not running.server.connections
    await client.close()
    assert asyncio.all_tasks() == before


@on_both_loops
async def test_stop_listening_disconnects_the_clients_of_the_listener() -> None:
    gate = BlockingHandler()
    async with run_server(gate) as running:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        listener = await running.server.listen(sock, session="one")
        async with await RawConnection.open(port) as bound_client, await running.connect() as other:
            bound_client.send(PLAIN)
            await wait_for(gate.started)
            other.send(PLAIN)
            await running.server.stop_listening(listener, "one")
            await wait_for(gate.cancelled)
            assert await bound_client.read_to_end() == b""
            gate.proceed.set()
            assert (await other.read_response()).status == 200
        with pytest.raises(ConnectionError):
            await RawConnection.open(port)


@on_both_loops
async def test_log_of_a_rejected_request_contains_no_credentials(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with run_server() as running, await running.connect() as client:
        client.send(request("GET", "/no", Authorization="Bearer hidden"))
        assert (await client.read_response()).status == 401
    assert "hidden" not in caplog.text
