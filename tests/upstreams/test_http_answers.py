"""Complete responses: their framing, however the bytes arrive, and their other content."""

import asyncio
import os
import random
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.upstreams.http_client import Client, IncompleteResponse, ResponseTooLong, encode_headers
from tests.upstreams.http_kit import Script, Wire, answering, both_loops, chunked, fetch, run, spin, until, whole

BODY = b'{"text": "a body"}'
COMPLETE = {
    "length": whole(BODY),
    "chunks": chunked([BODY[:5], BODY[5:6], BODY[6:]], extension=b";a=b", trailers=b"X-T: 1\r\n"),
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + whole(BODY),
    "http/1.0": whole(BODY, b"Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"),
}


@pytest.mark.long
@both_loops
@pytest.mark.parametrize("kind", COMPLETE)
def test_response_split_at_every_byte_is_the_same_response(kind: str, loop: str) -> None:
    raw = COMPLETE[kind]

    async def main() -> None:
        splits = iter(range(1, len(raw)))

        async def handle(wire: Wire) -> None:
            while await wire.request():
                at = next(splits)
                await wire.send(raw[:at], raw[at:])

        async with Script(handle) as server, server.client() as client:
            for at in range(1, len(raw)):
                assert await fetch(client, streamed=bool(at % 2)) == BODY
            assert server.connections == 1

    run(main(), loop)


@both_loops
def test_response_in_single_bytes_is_the_same_response(loop: str) -> None:
    async def main() -> None:
        for raw in COMPLETE.values():
            async with Script(answering(*(bytes([b]) for b in raw))) as server, server.client() as client:
                assert await fetch(client) == BODY
                assert await fetch(client, streamed=True) == BODY
                assert server.connections == 1

    run(main(), loop)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_chunking_and_any_split_give_the_body(data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.binary(max_size=300), max_size=12))
    raw = chunked(
        chunks,
        extension=data.draw(st.sampled_from([b"", b";x", b';q="a b"'])),
        trailers=data.draw(st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"])),
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    streamed = data.draw(st.booleans())

    async def main() -> None:
        async with Script(answering(*pieces)) as server, server.client(buffer=64) as client:
            for _ in range(2):
                assert await fetch(client, streamed=streamed) == b"".join(chunks)
            assert server.connections == 1

    run(main())


@both_loops
def test_body_without_a_length_ends_with_the_connection_and_says_so(loop: str) -> None:
    async def main() -> None:
        raw = b"HTTP/1.1 200 OK\r\n\r\n" + BODY
        for at in range(1, len(raw)):
            async with Script(answering(raw[:at], raw[at:], close=True)) as server, server.client() as client:
                response = await client.send("GET", "/")
                assert response.until_close
                assert response.length is None
                assert await response.read(1000) == BODY
                await until(lambda client=client: client.live == 0)

    run(main(), loop)


@both_loops
@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_response_without_a_body_is_complete_at_its_head_and_keeps_the_connection(
    status: bytes, loop: str
) -> None:
    async def main() -> None:
        raw = b"HTTP/1.1 %b\r\nX: y\r\n\r\n" % status
        async with Script(answering(raw, first=raw[:5] + raw[5:])) as server, server.client() as client:
            for _ in range(3):
                response = await client.send("POST", "/", body=b"x")
                assert response.status == int(status[:3])
                assert await response.chunk() == b""
                assert await response.read(0) == b""
            assert server.connections == 1

    run(main(), loop)


@both_loops
def test_bodyless_response_with_a_length_ends_the_connection(loop: str) -> None:
    async def main() -> None:
        coded = b"Transfer-Encoding: chunked\r\n"
        for raw in (
            b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\n" + coded + b"\r\n",
            b"HTTP/1.1 304 Not Modified\r\n" + coded + b"\r\n",
        ):
            async with Script(answering(raw)) as server, server.client() as client:
                for _ in range(2):
                    assert await fetch(client) == b""
                assert server.connections == 2

    run(main(), loop)


@both_loops
def test_response_to_head_has_no_body_and_ends_the_connection(loop: str) -> None:
    async def main() -> None:
        heads = (b"Content-Length: 500\r\n", b"Transfer-Encoding: chunked\r\n", b"")
        for head in heads:
            async with (
                Script(answering(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")) as server,
                server.client() as client,
            ):
                response = await client.send("HEAD", "/")
                assert response.status == 200
                assert await response.read(0) == b""
                assert client.idle == 0

    run(main(), loop)


@both_loops
def test_bytes_after_a_response_belong_to_no_request(loop: str) -> None:
    async def main() -> None:
        for surplus in (whole(b"second"), b"HTTP/1.1 2", b"garbage", b"x"):
            async with (
                Script(answering(whole(BODY), first=whole(BODY) + surplus)) as server,
                server.client() as client,
            ):
                assert await fetch(client) == BODY
                assert client.idle == 0
                assert await fetch(client) == BODY
                assert server.connections == 2

    run(main(), loop)


@both_loops
def test_response_longer_than_the_limit_is_refused_while_it_arrives(loop: str) -> None:
    endless = b"%x\r\n%b\r\n" % (1000, b"x" * 1000)

    async def handle(wire: Wire) -> None:
        if b"/length" in await wire.request():  # it never sends the announced body
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n")
            await wire.wait_until_closed()
            return
        await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await wire.send(endless)

    async def main() -> None:
        async with Script(handle) as server, server.client() as client:
            for target in ("/length", "/chunks"):
                response = await client.send("GET", target)
                with pytest.raises(ResponseTooLong, match=r"\b4096\b"):
                    await response.read(4096)
                await until(lambda: client.live == 0)
            response = await client.send("GET", "/chunks")
            assert await response.read(4096, cut=True) == b"x" * 4096
            await until(lambda: client.live == 0)

    run(main(), loop)


@both_loops
def test_body_of_exactly_the_limit_is_read(loop: str) -> None:
    async def main() -> None:
        for raw in (whole(BODY), chunked([BODY])):
            async with Script(answering(raw)) as server, server.client() as client:
                assert await fetch(client, limit=len(BODY)) == BODY
                with pytest.raises(ResponseTooLong):
                    await fetch(client, limit=len(BODY) - 1)

    run(main(), loop)


@pytest.mark.long
@both_loops
@pytest.mark.parametrize("framed", ["length", "chunks"])
def test_unread_bytes_are_bounded_and_none_is_lost(framed: str, loop: str) -> None:
    size, piece, bound = 24 << 20, 40_000, 64 << 10
    body = random.Random(1).randbytes(piece)

    async def handle(wire: Wire) -> None:
        await wire.request()
        left = size
        if framed == "length":
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        else:
            await wire.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while left:
            part = body[:left]
            left -= len(part)
            await wire.send(part if framed == "length" else b"%x\r\n%b\r\n" % (len(part), part))
        if framed == "chunks":
            await wire.send(b"0\r\n\r\n")
        await wire.wait_until_closed()

    async def main() -> None:
        async with Script(handle) as server, server.client(buffer=bound) as client:
            response = await client.send("GET", "/")
            got = peak = 0
            while True:
                await spin(5)
                peak = max(peak, response.unread)
                data = await response.chunk()
                if not data:
                    break
                at = got % piece
                assert data == (body * (len(data) // piece + 2))[at : at + len(data)]
                got += len(data)
            assert got == size
            assert bound < peak <= bound + (128 << 10)
            assert client.idle == 1  # reading of a paused connection is resumed before it returns to the pool

    run(main(), loop)


@both_loops
def test_response_that_was_paused_is_read_whole(loop: str) -> None:
    async def main() -> None:
        body = b"abc" * 500_000
        async with Script(answering(whole(body))) as server, server.client(buffer=1000) as client:
            for _ in range(2):
                response = await client.send("GET", "/")
                await until(lambda response=response: response.unread > 1000)
                await spin()
                assert client.idle == 0
                assert await response.read(len(body)) == body
                assert client.idle == 1

    run(main(), loop)


@both_loops
def test_rest_of_a_response_can_be_read_after_some_chunks(loop: str) -> None:
    async def main() -> None:
        async with Script(answering(whole(b"abc" * 50_000))) as server, server.client(buffer=1000) as client:
            response = await client.send("GET", "/")
            start = await response.chunk()
            assert start + await response.read(150_000) == b"abc" * 50_000

    run(main(), loop)


@both_loops
def test_headers_are_found_in_any_case_and_repeated_ones_are_joined(loop: str) -> None:
    async def main() -> None:
        raw = whole(b"", b"Retry-After:  7 ", b"X-A: 1", b"x-a: 2", b"Empty:", b"Odd: \xe9")
        async with Script(answering(raw)) as server, server.client() as client:
            headers = (await client.send("GET", "/")).headers
            assert headers.get("retry-AFTER") == "7"
            assert headers["X-a"] == "1, 2"
            assert headers["empty"] == ""
            assert headers["odd"] == "é"
            assert headers.get("Content-Encoding", "identity") == "identity"
            assert "nothing" not in headers
            assert set(headers) == {"content-length", "retry-after", "x-a", "empty", "odd"}
            assert len(headers) == 5

    run(main(), loop)


@both_loops
def test_closed_response_is_not_complete(loop: str) -> None:
    async def main() -> None:
        async with Script(answering(whole(BODY))) as server, server.client() as client:
            response = await client.send("GET", "/")
            response.close()
            assert client.idle == 1  # the response was complete, so another request may use its connection
            with pytest.raises(IncompleteResponse):
                await response.read(1000)
            async with await client.send("GET", "/") as response:
                assert await response.read(1000) == BODY
            assert server.connections == 1

    run(main(), loop)


@both_loops
def test_exchanges_work_with_a_real_server(loop: str) -> None:
    """Compare requests and responses with what aiohttp's server received and sent."""
    chance = random.Random(7)
    received: list[Any] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        received.append((request.method, request.raw_path, request.headers.get("X-Mine"), body))
        size = int(request.query["size"])
        if request.query["kind"] == "chunks":
            response = web.StreamResponse(headers={"X-Size": str(size)})
            response.enable_chunked_encoding()
            await response.prepare(request)
            for at in range(0, size, 7919):
                await response.write((body * (size // max(1, len(body)) + 1))[at : min(at + 7919, size)])
            await response.write_eof()
            return response
        answer = (body * (size // max(1, len(body)) + 1))[:size]
        return web.Response(body=answer, status=int(request.query["status"]), headers={"X-Size": str(size)})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        try:
            async with Client("127.0.0.1", port, headers={"X-Mine": "yes"}) as client:
                await asyncio.gather(*(_exchange(client, chance, received) for _ in range(60)))
        finally:
            await runner.cleanup()
        assert len(received) == 60

    run(main(), loop)


async def _exchange(client: Client, chance: random.Random, received: list[Any]) -> None:
    kind = chance.choice(["length", "chunks"])
    size = chance.choice([0, 1, 5000, 70_000, 1_500_000])
    status = chance.choice([200, 404, 503])
    parts = [chance.randbytes(chance.choice([1, 100, 200_000])) for _ in range(chance.randrange(1, 4))]
    target = f"/a%20b/c?kind={kind}&size={size}&status={status}&n={chance.random()}"
    response = await client.send("POST", target, encode_headers({"X-Other": "v"}), parts)
    found = b""
    if chance.random() < 0.5:
        found = await response.read(size)
    else:
        while data := await response.chunk():
            found += data
    body = b"".join(parts)
    assert found == (body * (size // len(body) + 1))[:size]
    assert response.status == (200 if kind == "chunks" else status)
    assert response.headers["x-size"] == str(size)
    assert ("POST", target, "yes", body) in received


@both_loops
def test_large_request_is_sent_completely(loop: str) -> None:
    async def main() -> None:
        got: list[bytes] = []

        async def handle(wire: Wire) -> None:
            while request := await wire.request():
                got.append(request)
                await wire.send(whole(b"ok"))

        parts = [os.urandom(3_000_000), b"", os.urandom(10), os.urandom(500_000)]
        async with Script(handle, tcp=True) as server, server.client() as client:
            for body in (parts, b"".join(parts), tuple(parts)):
                response = await client.send("POST", "/p", encode_headers({"A": "b"}), body)
                assert await response.read(10) == b"ok"
            assert server.connections == 1
            host = b"Host: 127.0.0.1:%d\r\n" % server.port
        for request in got:
            head = b"POST /p HTTP/1.1\r\n" + host + b"A: b\r\nContent-Length: 3500010\r\n\r\n"
            assert request == head + b"".join(parts)

    run(main(), loop)
