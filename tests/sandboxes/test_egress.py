"""The proxy of the network `allow`: only what a rule allows is connected to, whatever is sent to it."""

import asyncio
import socket

import pytest
import uvloop

from tests.sandboxes.fake_hosts import (
    GOOD,
    NAMES,
    Mapped,
    Site,
    asked,
    connect,
    get,
    ok,
    outside,
    proxy,
    served,
    site,
    socks,
)

__all__ = ["outside", "site"]

# ------------------------------------------------------------------------------------------------------ through


async def test_allowed_requests_pass_by_http_connect_and_socks(site: Site, outside: Mapped) -> None:
    async with proxy(outside, "good.test", GOOD) as (made, port):
        said = await asked(port, get("http://good.test/a?b#c", "good.test", "X-A: 1\r\n"))
        assert said.startswith(b"HTTP/1.1 200 OK\r\n")
        assert said.endswith(b"Connection: close\r\n\r\nhello")
        heard, site.heard = site.heard, b""
        assert heard == b"GET /a?b HTTP/1.1\r\nHost: good.test\r\nX-A: 1\r\nConnection: close\r\n\r\n"
        inner = b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n"
        said = await asked(port, connect("GOOD.test.", 443) + inner, eof=True)
        assert said == b"HTTP/1.1 200 Connection established\r\n\r\n" + ok("hello")
        said = await asked(port, socks("good.test", 443) + inner, eof=True)
        assert said == b"\x05\x00\x05\x00\x00\x01" + bytes(6) + ok("hello")
        four = b"\x05\x01\x00\x05\x01\x00\x01" + socket.inet_aton(GOOD) + (80).to_bytes(2, "big")
        assert (await asked(port, four + inner, eof=True)).endswith(b"hello")
        assert (await asked(port, connect(GOOD, 80) + inner, eof=True)).endswith(b"hello")
        assert outside.dialled == [(GOOD, 80), (GOOD, 443), (GOOD, 443), (GOOD, 80), (GOOD, 80)]
        record = {(one.host, one.port): one for one in made.log.list_records()}
        assert {one.verdict for one in record.values()} == {"allowed"}
        assert record["good.test", 443].count == 2
        assert record["good.test", 443].sent == 2 * len(inner)
        assert record["good.test", 443].received == 2 * len(ok("hello"))


def test_proxy_works_on_uvloop() -> None:
    async def main() -> None:
        made = Site(ok("hello"))
        async with served(made.talk) as there:
            await test_allowed_requests_pass_by_http_connect_and_socks(made, Mapped(NAMES, {GOOD: there}))

    uvloop.run(main())


async def test_bodies_pass_in_both_directions(site: Site, outside: Mapped) -> None:
    async with proxy(outside, "good.test") as (_, port):
        body = b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
        more = "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
        site.answer = (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-B: 2\r\n\r\n"
            b"3\r\nabc\r\n0\r\n\r\n"
        )
        said = await asked(port, get("http://good.test/", "good.test", more) + body)
        assert said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-B: 2\r\n")
        assert said.endswith(b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" in site.heard
        assert site.heard.endswith(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n")
        site.answer = b"HTTP/1.1 204 No Content\r\nConnection: keep-alive, X-C\r\nX-C: 1\r\n\r\nhold"
        said = await asked(port, b"HEAD http://good.test:80 HTTP/1.0\r\n\r\n")
        assert said == b"HTTP/1.0 204 No Content\r\nConnection: close\r\n\r\n"
        site.answer = b"HTTP/1.1 200 OK\r\n\r\nto the end"
        assert (await asked(port, get("http://good.test", "good.test"))).endswith(b"\r\n\r\nto the end")
        site.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabchold"
        assert (await asked(port, get("http://good.test", "good.test"))).endswith(b"\r\n\r\nabc")


async def test_private_addresses_of_a_public_name_are_skipped(outside: Mapped) -> None:
    async with proxy(outside, "both.test") as (_, port):
        assert (await asked(port, get("http://both.test/", "both.test"))).endswith(b"hello")
        assert outside.dialled == [(GOOD, 80)]


# ------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("other.test", 443),
        ("good.test", 8443),
        ("good.test.evil.test", 443),
        ("www.good.test", 443),
        (GOOD, 443),
        ("127.0.0.1", 443),
        ("[::1]", 443),
        ("[::ffff:127.0.0.1]", 443),
        ("localhost", 443),
        ("inside.test", 443),
        ("private.test", 443),
        ("metadata.test", 443),
    ],
)
async def test_other_hosts_are_refused_with_a_reason(host: str, port: int, outside: Mapped) -> None:
    rules = ("good.test", "inside.test", "private.test", "metadata.test")
    async with proxy(outside, *rules) as (made, at):
        said = await asked(at, connect(host, port))
        assert said.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert f"port {port} is refused: ".encode() in said
        assert said.endswith(b"Allowed: good.test, inside.test, private.test, metadata.test\n")
        assert (await asked(at, get(f"http://{host}:{port}/", f"{host}:{port}"))).startswith(b"HTTP/1.1 403 ")
        assert (await asked(at, socks(host.strip("[]"), port))).startswith(b"\x05\x00\x05\x02\x00\x01")
        assert outside.dialled == []
        (one,) = made.log.list_records()
        assert (one.host, one.port, one.verdict, one.count) == (
            host.strip("[]").replace("::ffff:", ""),
            port,
            "refused",
            3,
        )


async def test_redirect_to_another_host_is_refused(site: Site, outside: Mapped) -> None:
    site.answer = b"HTTP/1.1 302 Found\r\nLocation: http://other.test/\r\nContent-Length: 0\r\n\r\n"
    async with proxy(outside, "good.test") as (_, port):
        said = await asked(port, get("http://good.test/", "good.test"))
        assert b"Location: http://other.test/" in said  # the client's to follow, through us
        assert (await asked(port, get("http://other.test/", "other.test"))).startswith(b"HTTP/1.1 403 ")
        assert outside.dialled == [(GOOD, 80)]


FRONT = "http://good.test/"


@pytest.mark.parametrize(
    "data",
    [
        get(FRONT, "other.test"),
        get(FRONT, "good.test:81"),
        get(FRONT, "good.test", "Host: other.test\r\n"),
        get(FRONT, "good.test", "host : other.test\r\n"),
        get(FRONT, "good.test", "X: 1\r\n folded: 2\r\n"),
        get(FRONT, "good.test", "X: 1\nHost: other.test\r\n"),
        get(FRONT, "good.test", "X: 1\rHost: other.test\r\n"),
        get(FRONT, "good.test", "X: \x00\r\n"),
        get(FRONT, "good.test", "Content-Length: 5\r\nContent-Length: 6\r\n"),
        get(FRONT, "good.test", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
        get(FRONT, "good.test", "Transfer-Encoding: chunked, identity\r\n"),
        get(FRONT, "good.test", "Transfer-Encoding: \x0bchunked\r\n"),
        get(FRONT, "good.test", "Content-Length: +5\r\n"),
        get(FRONT, "good.test", "Content-Length: 0x5\r\n"),
        get("http://good.test@other.test/", "other.test"),
        get("http://other.test\\@good.test/", "good.test"),
        get("http://good.test:80:81/", "good.test"),
        get("http:///a", "good.test"),
        get("https://good.test/", "good.test"),
        get("ftp://good.test/", "good.test"),
        get("/", "good.test"),
        get("*", "good.test"),
        b"GET http://good.test/ HTTP/1.1\r\n\r\n",
        b"GET  http://good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://good.test/ HTTP/2.0\r\nHost: good.test\r\n\r\n",
        b"GET http://good.test/ a HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://good.t\xc3\xa9st/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"CONNECT good.test HTTP/1.1\r\n\r\n",
        b"CONNECT good.test:0 HTTP/1.1\r\n\r\n",
        b"CONNECT good.test:443 HTTP/1.1\r\nHost: other.test:443\r\n\r\n",
        b"CONNECT 2130706433:443 HTTP/1.1\r\n\r\n",
        b"CONNECT 0x7f.1:443 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00",
    ],
)
async def test_ambiguous_requests_are_refused(data: bytes, outside: Mapped) -> None:
    async with proxy(outside, "good.test") as (_, port):
        assert (await asked(port, data)).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert outside.dialled == []


@pytest.mark.parametrize(
    ("more", "body"),
    [
        ("", b""),
        ("Content-Length: 3\r\n", b"abc"),
        ("Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
        ("Connection: keep-alive\r\nProxy-Connection: keep-alive\r\n", b""),
    ],
)
async def test_data_after_a_request_is_not_a_second_request(
    more: str, body: bytes, site: Site, outside: Mapped
) -> None:
    async with proxy(outside, "good.test") as (made, port):
        second = get("http://other.test/", "other.test") + get("http://good.test/2", "good.test")
        said = await asked(port, get("http://good.test/1", "good.test", more) + body + second)
        assert said.count(b"HTTP/1.1 ") == 1
        assert outside.dialled == [(GOOD, 80)]
        assert b"other.test" not in site.heard
        assert b"/2" not in site.heard
        assert [one.host for one in made.log.list_records()] == ["good.test"]


@pytest.mark.parametrize("body", [b"zz\r\n", b"-1\r\n", b"3\r\nabcde\r\n", b"1" * 20 + b"\r\n", b"\r\n"])
async def test_malformed_chunk_is_refused(body: bytes, site: Site, outside: Mapped) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with served(silent) as there, proxy(outside, "good.test") as (_, port):
        outside.ports[GOOD] = there
        said = await asked(port, get(FRONT, "good.test", "Transfer-Encoding: chunked\r\n") + body)
        assert said.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-hello\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: a\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 40,
        b"",
    ],
)
async def test_malformed_response_is_a_bad_gateway(answer: bytes, site: Site, outside: Mapped) -> None:
    site.answer = answer
    async with proxy(outside, "good.test") as (_, port):
        said = await asked(port, get(FRONT, "good.test"))
        assert b"HTTP/1.1 502 Bad Gateway\r\n" in said


@pytest.mark.parametrize(
    ("host", "status", "code"), [("dead.test", 502, 5), ("gone.test", 502, 5), ("empty.test", 502, 5)]
)
async def test_unreachable_host_is_a_bad_gateway(host: str, status: int, code: int, outside: Mapped) -> None:
    async with proxy(outside, "*.test") as (made, port):
        assert (await asked(port, connect(host, 443))).startswith(f"HTTP/1.1 {status} ".encode())
        assert (await asked(port, socks(host, 443)))[2:4] == bytes((5, code))
        assert [one.verdict for one in made.log.list_records()] == ["failed"]


async def test_socks_supports_connect_only(outside: Mapped) -> None:
    async with proxy(outside, "good.test") as (_, port):
        assert await asked(port, b"\x05\x01\x02") == b"\x05\xff"
        assert (await asked(port, b"\x05\x01\x00\x05\x02\x00\x01" + bytes(6)))[2:4] == b"\x05\x07"
        assert (await asked(port, b"\x05\x01\x00\x05\x01\x00\x03\x03\xff\xff\xff\x00\x50"))[2:4] == b"\x05\x07"
        assert outside.dialled == []
