"""HTTP at the gateway's doors: clients that are slow, go away, stay too long; and the end of a server."""

import asyncio
import logging
import socket

import pytest

from rookery.gateway import server
from rookery.gateway.http import EVENT_STREAM, HttpError, Request, ResponseWriter
from tests.gateway.http_kit import PLAIN, Door, Gate, door, echo, made, within
from tests.gateway.kit import Wire, on_both_loops, request
from tests.gateway.scripted import WAIT

# ---- clients on a real wire


@on_both_loops
async def test_keep_alive_serves_request_after_request_and_connection_close_ends_it() -> None:
    async with door() as house, await house.wire() as wire:
        for at in range(3):
            wire.send(request("POST", f"/{at}", b"x"))
            answer = await wire.answer()
            assert (answer.status, answer.json[1], "connection" in answer.headers) == (200, f"/{at}", False)
        wire.send(request("GET", "/last", Connection="close"))
        answer = await wire.answer()
        assert (answer.json[1], answer.headers["connection"]) == ("/last", "close")
        assert await wire.rest() == b""


@on_both_loops
async def test_http_1_0_gets_a_body_that_ends_with_the_connection() -> None:
    async def streams(request: Request, out: ResponseWriter) -> None:
        out.begin(200, EVENT_STREAM)
        await out.write(b"one")
        out.end(b"two")

    async with door(streams) as house:
        for version, ends in ((b"1.0", b"onetwo"), (b"1.1", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")):
            async with await house.wire() as wire:
                wire.send(b"GET / HTTP/" + version + b"\r\nConnection: close\r\n\r\n")
                said = await wire.rest()
                assert said.partition(b"\r\n\r\n")[2] == ends
                assert (b"chunked" in said) == (version == b"1.1")


@on_both_loops
async def test_head_gets_the_head_only_and_the_connection_goes_on() -> None:
    async def both(request: Request, out: ResponseWriter) -> None:
        if request.path == "/stream":
            out.begin(200, EVENT_STREAM)
            await out.write(b"one")
            out.end(b"two")
        else:
            out.send(200, b'{"a":1}')

    async with door(both) as house, await house.wire() as wire:
        for path in ("/", "/stream", "/"):
            wire.send(request("HEAD", path))
            assert (await wire.answer(head_only=True)).status == 200
        wire.send(request("GET", "/"))
        assert (await wire.answer()).body == b'{"a":1}'


@on_both_loops
async def test_who_waits_for_100_continue_gets_it_or_the_refusal_instead() -> None:
    async with door() as house:
        async with await house.wire() as wire:
            head = request("POST", "/x", b"ten bytes!", Expect="100-Continue").removesuffix(b"ten bytes!")
            wire.send(head)
            assert (await wire.answer()).status == 100
            wire.send(b"ten bytes!")
            assert (await wire.answer()).json[4] == "ten bytes!"
        async with await house.wire() as wire:
            wire.send(head.replace(b"/x", b"/no"))
            assert (await wire.answer()).status == 401


@on_both_loops
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_refusal_reaches_a_client_that_is_still_sending(chunked: bool) -> None:
    size = 8 << 20
    async with door() as house, await house.wire() as wire:
        if chunked:
            wire.send(b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size)
        else:
            wire.send(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            wire.send(b"x" * (1 << 16))
            await wire.writer.drain()
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        assert await wire.rest() == b""


@on_both_loops
async def test_a_client_that_goes_away_cancels_its_handler_at_once() -> None:
    for go in (Wire.cut, lambda wire: wire.writer.close()):
        gate = Gate()
        async with door(gate) as house:
            wire = await house.wire()
            wire.send(PLAIN + PLAIN)
            await within(gate.begun)
            go(wire)
            await within(gate.cancelled)
            await house.empty()
            await wire.close()


@on_both_loops
async def test_a_client_that_goes_away_while_it_is_behind_cancels_its_handler() -> None:
    ended = asyncio.Event()

    async def floods(request: Request, out: ResponseWriter) -> None:
        out.begin(200, EVENT_STREAM)
        try:
            while True:
                await out.write(b"x" * 10_000)
        except asyncio.CancelledError:
            ended.set()
            raise

    async with door(floods) as house:
        wire = await house.wire()
        wire.send(PLAIN)
        wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection = await house.alone()
        async with asyncio.timeout(WAIT):
            while connection.write_blocked is None:
                await asyncio.sleep(0)
        wire.cut()
        await within(ended)
        await house.empty()


async def slow_reader(house: Door) -> socket.socket:
    """A client with a small buffer, that reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", house.port))
    return sock


@on_both_loops
async def test_a_slow_reader_costs_no_more_than_one_piece_and_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.05)
    piece, sent, most = b"x" * 50_000, 0, 0
    over = asyncio.Event()

    async def floods(request: Request, out: ResponseWriter) -> None:
        nonlocal sent, most
        out.begin(200, EVENT_STREAM)
        try:
            while True:
                await out.write(piece)
                sent += 1
        finally:
            transport = out._connection._transport
            most = transport.get_write_buffer_size() if transport is not None else most
            over.set()

    async with door(floods) as house:
        sock = await slow_reader(house)
        with sock:
            sock.send(PLAIN)
            connection = await house.alone()
            async with asyncio.timeout(WAIT):
                while connection.write_blocked is None:
                    await asyncio.sleep(0)
            assert connection._transport is not None
            waiting = connection._transport.get_write_buffer_size()
            assert waiting <= (64 << 10) + len(piece) + 100
            await within(over)
            assert most <= waiting
            await house.empty()


@on_both_loops
@pytest.mark.parametrize("close", ["close", "keep-alive"])
async def test_one_that_does_not_take_a_whole_answer_is_left_behind(
    close: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WRITE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(server, name, -1.0)

    async def large(request: Request, out: ResponseWriter) -> None:
        out.send(200, b"x" * (16 << 20))

    async with door(large) as house:
        sock = await slow_reader(house)
        with sock:
            sock.send(request("GET", "/", Connection=close))
            await house.alone()
            async with asyncio.timeout(WAIT):
                while house.server.connections:
                    house.server.close_overdue()
                    await asyncio.sleep(0)


@on_both_loops
async def test_one_that_still_takes_a_large_answer_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WRITE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(server, name, -1.0)
    size = 16 << 20

    async def large(request: Request, out: ResponseWriter) -> None:
        out.send(200, b"x" * size)

    async with door(large) as house, await house.wire() as wire:
        wire.send(PLAIN)
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        connection = await house.alone()
        transport, last, sweeps, got = connection._transport, 0, 0, 0
        assert transport is not None
        while got < size:
            more = await wire.reader.read(1 << 20)
            assert more, "cut off while it was taking the answer"
            got += len(more)
            if 0 < (left := transport.get_write_buffer_size()) != last:
                house.server.close_overdue()
                last, sweeps = left, sweeps + 1
        assert sweeps > 1
        assert got == size


@on_both_loops
async def test_who_does_not_finish_its_request_or_stays_idle_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", -1.0)
    gate = Gate()
    async with door(gate) as house:
        for begun in (b"", b"GET / HT", request("POST", "/", b"x" * 10)[:-3]):
            wire = await house.wire()
            wire.send(begun)
            await house.alone()
            async with asyncio.timeout(WAIT):
                while house.server.connections:
                    house.server.close_overdue()
                    await asyncio.sleep(0)
            assert await wire.rest() == b""
            await wire.close()
        gate.begun.clear()
        wire = await house.wire()
        wire.send(PLAIN + b"GET / HT")  # the next one's time begins when this one is answered
        await within(gate.begun)
        house.server.close_overdue()
        assert len(house.server.connections) == 1
        monkeypatch.setattr(server, "IDLE_SECONDS", -1.0)
        gate.go.set()
        assert (await wire.answer()).status == 200
        house.server.close_overdue()
        await house.empty()
        await wire.close()


@on_both_loops
async def test_more_clients_than_there_is_room_for_are_turned_away_and_counted() -> None:
    async with door(max_connections=1) as house, await house.wire() as first:
        first.send(PLAIN)
        await first.answer()
        async with await house.wire() as second:
            assert await second.rest() == b""
        assert house.server.rejected == 1
        first.send(PLAIN)
        assert (await first.answer()).status == 200


@on_both_loops
async def test_an_exception_of_a_handler_ends_only_its_own_request_and_its_text_stays_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(request: Request, out: ResponseWriter) -> None:
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

    async with door(fails) as house:
        async with await house.wire() as other, await house.wire() as wire:
            wire.send(request("GET", "/early") + request("GET", "/refused") + request("GET", "/fine"))
            answer = await wire.answer()
            assert (answer.status, answer.body) == (500, b"{}")
            assert (await wire.answer()).status == 404
            assert (await wire.answer()).status == 200
            other.send(request("GET", "/fine"))
            assert (await other.answer()).status == 200
        for path in ("/late", "/silent"):
            async with await house.wire() as wire:
                wire.send(request("GET", path))
                said = await wire.rest()
                assert b"the secret text" not in said
                assert not said.endswith(b"0\r\n\r\n"), "its reader cannot see that something is missing"
    assert "the secret text" in caplog.text


# ---- the end of a server


@on_both_loops
async def test_closing_lets_answers_under_way_end_and_leaves_no_task_and_no_socket() -> None:
    gate = Gate()
    before = asyncio.all_tasks()
    server = made(gate)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await server.listen(sock)
    busy, idle = await Wire.to(port), await Wire.to(port)
    busy.send(PLAIN)
    await within(gate.begun)
    closing = asyncio.create_task(server.close(grace=WAIT))
    assert await idle.rest() == b""
    gate.go.set()
    answer = await busy.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    await closing
    assert await busy.rest() == b""
    assert not server.connections
    await busy.close()
    await idle.close()
    with pytest.raises(ConnectionError):
        await Wire.to(port)
    assert asyncio.all_tasks() == before


@on_both_loops
async def test_closing_flushes_a_large_answer_that_is_being_taken() -> None:
    size = 8 << 20
    begun = asyncio.Event()

    async def large(request: Request, out: ResponseWriter) -> None:
        out.send(200, b"x" * size)
        begun.set()

    server = made(large)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await server.listen(sock)
    wire = await Wire.to(port)
    wire.send(PLAIN)
    await within(begun)
    closing = asyncio.create_task(server.close(grace=WAIT))
    assert len((await wire.answer()).body) == size
    await closing
    await wire.close()


@on_both_loops
async def test_closing_cancels_what_does_not_end_in_time() -> None:
    gate = Gate()
    before = asyncio.all_tasks()
    server = made(gate)
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    await server.listen(sock)
    wire = await Wire.to(port)
    wire.send(PLAIN + PLAIN)
    await within(gate.begun)
    await server.close(grace=0)
    assert gate.cancelled.is_set()
    assert not server.connections
    await wire.close()
    assert asyncio.all_tasks() == before


@on_both_loops
async def test_a_listener_taken_back_takes_its_clients_with_it() -> None:
    gate = Gate()
    async with door(gate) as house:
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        own = await house.server.listen(sock, session="one")
        async with await Wire.to(port) as theirs, await house.wire() as other:
            theirs.send(PLAIN)
            await within(gate.begun)
            other.send(PLAIN)
            await house.server.stop_listening(own, "one")
            await within(gate.cancelled)
            assert await theirs.rest() == b""
            gate.go.set()
            assert (await other.answer()).status == 200
        with pytest.raises(ConnectionError):
            await Wire.to(port)


@on_both_loops
async def test_the_log_of_a_left_behind_client_names_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with door() as house, await house.wire() as wire:
        wire.send(request("GET", "/no", Authorization="Bearer hidden"))
        assert (await wire.answer()).status == 401
    assert "hidden" not in caplog.text
