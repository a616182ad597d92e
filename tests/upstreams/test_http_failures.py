"""Failed HTTP exchanges: cut connections, invalid responses, and the errors that report them."""

import asyncio
import itertools

import pytest

from rookery.core import UsageError
from rookery.upstreams.http_client import (
    Client,
    ConnectionDropped,
    HttpClientError,
    IncompleteResponse,
    InvalidResponse,
    encode_headers,
)
from tests.upstreams.http_kit import Script, Wire, answering, both_loops, chunked, fetch, run, until, whole

BODY = b'{"text": "a body"}'
CUT = {
    "length": whole(BODY),
    "chunks": chunked([BODY[:5], BODY[5:]], extension=b";a=b", trailers=b"X-T: 1\r\n"),
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + whole(BODY),
}
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@both_loops
@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("kind", CUT)
def test_response_cut_at_any_byte_is_never_complete(kind: str, how: str, loop: str) -> None:
    raw = CUT[kind]

    async def main() -> None:
        cuts = itertools.chain.from_iterable((at, at) for at in range(len(raw)))

        async def handle(wire: Wire) -> None:
            await wire.request()
            await wire.send(raw[: next(cuts)], b"")
            if how == "reset":
                wire.reset()

        async with Script(handle, tcp=how == "reset") as server, server.client() as client:
            for at in range(len(raw)):
                for streamed in (False, True):
                    # A reset may overtake data that was sent before it; then nothing arrives.
                    errors = (ConnectionDropped,) if at == 0 or how == "reset" else ()
                    if at > 0:
                        errors = (*errors, IncompleteResponse)
                    with pytest.raises(errors):
                        await fetch(client, streamed=streamed)
            await until(lambda: client.live == 0)
            assert server.connections == 2 * len(raw)  # a new connection that is closed is not tried again

    run(main(), loop)


@both_loops
def test_server_that_closes_while_the_request_is_sent_is_noticed_at_once(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            await wire.reader.readuntil(b"\r\n\r\n")
            wire.writer.write_eof()
            await ended.wait()  # and the server reads nothing more

        ended = asyncio.Event()
        async with Script(handle, tcp=True) as server, server.client() as client:
            with pytest.raises(ConnectionDropped):
                await client.send("POST", "/", body=bytes(64 << 20))
            await until(lambda: client.live == 0)
            ended.set()

    run(main(), loop)


@both_loops
def test_bytes_before_a_cut_can_be_read_and_then_the_response_is_incomplete(loop: str) -> None:
    async def main() -> None:
        raw = chunked([b"one", b"two"])
        cut = raw.index(b"two") + 3
        async with Script(answering(raw[:cut], close=True)) as server, server.client() as client:
            response = await client.send("GET", "/")
            await until(lambda: client.live == 0)  # the call failed before any chunk was read
            assert await response.chunk() == b"onetwo"
            for _ in range(2):
                with pytest.raises(IncompleteResponse):
                    await response.chunk()
            with pytest.raises(IncompleteResponse):
                await response.read(100)

    run(main(), loop)


@both_loops
def test_body_until_close_that_ends_in_a_reset_is_incomplete(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            await wire.request()
            await wire.send(OK + b"\r\nabc")
            await asyncio.wait_for(proceed.wait(), 60)
            wire.reset()

        proceed = asyncio.Event()
        async with Script(handle, tcp=True) as server, server.client() as client:
            response = await client.send("GET", "/")
            assert await response.chunk() == b"abc"
            proceed.set()
            with pytest.raises(IncompleteResponse):
                await response.chunk()

    run(main(), loop)


BAD = {
    "not http": b"SSH-2.0-OpenSSH_9.6\r\n",
    "html": b"<html>hello</html>",
    "tls alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "another protocol": b"RTSP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "a blank line first": b"\r\n" + whole(b""),
    "http/2": b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    "http/0.9": b"HTTP/0.9 200 OK\r\nContent-Length: 0\r\n\r\n",
    "status 99": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "status 600": b"HTTP/1.1 600 OK\r\nContent-Length: 0\r\n\r\n",
    "status of letters": b"HTTP/1.1 abc OK\r\n\r\n",
    "both lengths": OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "both lengths, the other way": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "two equal lengths": OK + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": OK + b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed length": OK + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": OK + b"Content-Length: -3\r\n\r\nabc",
    "no number as length": OK + b"Content-Length: 0x3\r\n\r\nabc",
    "an empty length": OK + b"Content-Length:\r\n\r\nabc",
    "a length beyond all": OK + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a length of 19 digits": OK + b"Content-Length: 1000000000000000000\r\n\r\n",
    "another coding": OK + b"Transfer-Encoding: gzip\r\n\r\nabc",
    "two codings": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked inside": OK + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "an obscured coding": OK + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in http/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "a blank before the colon": OK + b"Content-Length : 3\r\n\r\nabc",
    "a folded header": OK + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "a bare line feed": b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc",
    "a zero byte": OK + b"A: b\0c\r\nContent-Length: 0\r\n\r\n",
    "a bare carriage return": OK + b"A: b\rContent-Length: 9\r\nContent-Length: 0\r\n\r\n",
    "a header without a name": OK + b": b\r\nContent-Length: 0\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nabc",
    "an upgrade without a name": b"HTTP/1.1 101 Switching\r\n\r\n",
    "no chunk size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "a signed chunk size": CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    "a prefixed chunk size": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a blank after the chunk size": CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
    "a chunk size beyond all": CHUNKED + b"fffffffffffffffff\r\nabc",
    "a chunk longer than it says": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk shorter than it says": CHUNKED + b"4\r\nabc\r\n0\r\n\r\n",
    "a chunk after a bare line feed": CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    "a length in a trailer": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    "interim answers without end": b"HTTP/1.1 102 Processing\r\n\r\n" * 17 + whole(b""),
    "a head that is too long": OK + b"A: " + b"x" * 66_000 + b"\r\nContent-Length: 0\r\n\r\n",
    "a head of many lines": OK + b"A: xxxx\r\n" * 8_000 + b"Content-Length: 0\r\n\r\n",
    "a head that never ends": OK + b"A: " + b"x" * 500_000,
    "interim heads that are too long": (b"HTTP/1.1 103 Early\r\nA: " + b"x" * 9_000 + b"\r\n\r\n") * 9
    + whole(b""),
    "trailers without end": CHUNKED + b"0\r\n" + b"A: b\r\n" * 60_000,
    "a trailer that never ends": CHUNKED + b"0\r\nA: " + b"x" * 500_000,
    "a chunk extension without end": CHUNKED + b"1;" + b"x" * 500_000,
}


@both_loops
@pytest.mark.parametrize("what", BAD)
def test_invalid_response_is_refused_and_its_connection_closed(what: str, loop: str) -> None:
    async def main() -> None:
        raw = BAD[what]
        for pieces in ((raw,), (raw[:9], raw[9 : len(raw) // 2], raw[len(raw) // 2 :])):

            async def handle(wire: Wire, pieces: tuple[bytes, ...] = pieces) -> None:
                await wire.request()
                await wire.send(*pieces)
                await wire.wait_until_closed()

            async with Script(handle) as server, server.client() as client:
                with pytest.raises(InvalidResponse) as caught:
                    await fetch(client)
                assert len(str(caught.value)) < 200
                assert "xxx" not in str(caught.value)
                await until(lambda client=client: client.live == 0)
                assert server.connections == 1

    run(main(), loop)


@both_loops
def test_head_just_below_the_limit_is_accepted_in_one_read_and_in_many(loop: str) -> None:
    async def main() -> None:
        filled = OK + b"A: " + b"x" * (64 * 1024 - 60) + b"\r\nContent-Length: 200000\r\n\r\n"
        assert 64 * 1024 - 30 < len(filled) <= 64 * 1024
        raw = filled + b"y" * 200_000
        for pieces in ((raw,), (raw[:5], raw[5:60_000], raw[60_000:])):
            async with Script(answering(*pieces)) as server, server.client() as client:
                assert await fetch(client) == b"y" * 200_000
                assert client.idle == 1

    run(main(), loop)


@both_loops
def test_sixteen_interim_answers_are_skipped(loop: str) -> None:
    async def main() -> None:
        raw = b"HTTP/1.1 102 Processing\r\nContent-Length: 7\r\n\r\n" * 16 + whole(BODY)
        async with Script(answering(raw)) as server, server.client() as client:
            assert await fetch(client) == BODY
            assert await fetch(client) == BODY
            assert server.connections == 1

    run(main(), loop)


@both_loops
def test_one_byte_chunks_are_joined_in_memory(loop: str) -> None:
    async def main() -> None:
        raw = chunked([b"z"] * 100_000)
        async with Script(answering(raw)) as server, server.client(buffer=1 << 20) as client:
            response = await client.send("GET", "/")
            await until(lambda: client.idle == 1)
            assert len(response.chunks) < 100
            assert await response.read(100_000) == b"z" * 100_000

    run(main(), loop)


@both_loops
def test_two_tasks_cannot_read_one_response(loop: str) -> None:
    async def main() -> None:
        async def handle(wire: Wire) -> None:
            await wire.request()
            await wire.send(OK + b"Content-Length: 5\r\n\r\n")
            await wire.wait_until_closed()

        async with Script(handle) as server, server.client() as client:
            response = await client.send("GET", "/")
            first = asyncio.create_task(response.chunk())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError):
                await response.chunk()
            response.close()
            with pytest.raises(IncompleteResponse):
                await first
            await until(lambda: server.open == 0)

    run(main(), loop)


@pytest.mark.parametrize(
    "headers",
    [
        {"A\r\nB": "c"},
        {"A": "b\r\nsecret-x: d"},
        {"A": "secret-x\n"},
        {"A": "secret-x\0"},
        {"": "secret-x"},
        {"A B": "secret-x"},
        {"A": "secret-x ☃"},
        {"Content-Length": "secret-x"},
        {"transfer-encoding": "secret-x"},
        {"HOST": "secret-x"},
        {"Connection": "secret-x"},
    ],
)
def test_invalid_header_is_refused_without_showing_its_value(headers: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        encode_headers(headers)
    assert "secret-x" not in str(caught.value)
    with pytest.raises(UsageError):
        Client("127.0.0.1", 80, headers=headers)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", ""),
        ("GET", "a"),
        ("GET", "/a b"),
        ("GET", "/a\r\nX: y"),
        ("GET", "/é"),
        ("GET", "http://127.0.0.1/"),
        ("GET", "*"),
        ("get", "/"),
        ("GET ", "/"),
        ("CONNECT", "/"),
        ("", "/"),
        ("G\r\n", "/"),
    ],
)
async def test_invalid_request_is_refused_before_anything_is_sent(method: str, target: str) -> None:
    async with Client("127.0.0.1", 9) as client:
        with pytest.raises(UsageError):
            await client.send(method, target)


async def _post(client: Client, target: str, body: bytes) -> bytes:
    return await (await client.send("POST", target, body=body)).read(1000)


@both_loops
def test_no_failure_quotes_what_was_sent_or_received(loop: str) -> None:
    async def main() -> None:
        for raw in (*BAD.values(), b"", OK, whole(BODY)[:-1]):
            quoted = raw.replace(b"abc", b"secret-x").replace(b"A: ", b"A: secret-x")

            async def handle(wire: Wire, raw: bytes = quoted) -> None:
                await wire.request()
                await wire.send(raw)

            async with Script(handle) as server, server.client(headers={"Authorization": "secret-x"}) as client:
                with pytest.raises(HttpClientError) as caught:
                    await _post(client, "/?key=secret-x", b"secret-x")
                assert "secret-x" not in str(caught.value)

    run(main(), loop)
