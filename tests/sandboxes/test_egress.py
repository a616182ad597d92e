"""Proxy of the network `allow`: it connects only to what a rule allows, whatever it is sent."""

import asyncio
import re
import socket

import pytest
import uvloop

from tests.sandboxes.fake_hosts import (
    GOOD,
    NAMES,
    FakeResolver,
    FakeSite,
    exchange,
    http_connect,
    http_get,
    ok,
    open_proxy,
    resolver,
    serve,
    site,
    socks_connect,
)

__all__ = ["resolver", "site"]

# ------------------------------------------------------------------------------------------------------ through


async def test_allowed_requests_pass_by_http_connect_and_socks(site: FakeSite, resolver: FakeResolver) -> None:
    async with open_proxy(resolver, "good.test", GOOD) as (proxy, port):
        response = await exchange(port, http_get("http://good.test/a?b#c", "good.test", "X-A: 1\r\n"))
        assert response.startswith(b"HTTP/1.1 200 OK\r\n")
        assert response.endswith(b"Connection: close\r\n\r\nhello")
        received, site.received = site.received, b""
        assert received == b"GET /a?b HTTP/1.1\r\nHost: good.test\r\nX-A: 1\r\nConnection: close\r\n\r\n"
        inner = b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n"
        response = await exchange(port, http_connect("GOOD.test.", 443) + inner, eof=True)
        assert response == b"HTTP/1.1 200 Connection established\r\n\r\n" + ok("hello")
        response = await exchange(port, socks_connect("good.test", 443) + inner, eof=True)
        assert response == b"\x05\x00\x05\x00\x00\x01" + bytes(6) + ok("hello")
        four = b"\x05\x01\x00\x05\x01\x00\x01" + socket.inet_aton(GOOD) + (80).to_bytes(2, "big")
        assert (await exchange(port, four + inner, eof=True)).endswith(b"hello")
        assert (await exchange(port, http_connect(GOOD, 80) + inner, eof=True)).endswith(b"hello")
        assert resolver.dialled == [(GOOD, 80), (GOOD, 443), (GOOD, 443), (GOOD, 80), (GOOD, 80)]
        record = {(one.host, one.port): one for one in proxy.log.list_records()}
        assert {one.verdict for one in record.values()} == {"allowed"}
        assert record["good.test", 443].count == 2
        assert record["good.test", 443].sent == 2 * len(inner)
        assert record["good.test", 443].received == 2 * len(ok("hello"))


def test_proxy_works_on_uvloop() -> None:
    async def main() -> None:
        site = FakeSite(ok("hello"))
        async with serve(site.respond) as port:
            await test_allowed_requests_pass_by_http_connect_and_socks(site, FakeResolver(NAMES, {GOOD: port}))

    uvloop.run(main())


async def test_bodies_pass_in_both_directions(site: FakeSite, resolver: FakeResolver) -> None:
    async with open_proxy(resolver, "good.test") as (_, port):
        body = b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nTrailer: x\r\n\r\n"
        more = "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n"
        site.response = (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-B: 2\r\n\r\n"
            b"3\r\nabc\r\n0\r\n\r\n"
        )
        response = await exchange(port, http_get("http://good.test/", "good.test", more) + body)
        assert response.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-B: 2\r\n")
        assert response.endswith(b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" in site.received
        assert site.received.endswith(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n")
        site.response = b"HTTP/1.1 204 No Content\r\nConnection: keep-alive, X-C\r\nX-C: 1\r\n\r\nhold"
        response = await exchange(port, b"HEAD http://good.test:80 HTTP/1.0\r\n\r\n")
        assert response == b"HTTP/1.0 204 No Content\r\nConnection: close\r\n\r\n"
        site.response = b"HTTP/1.1 200 OK\r\n\r\nto the end"
        assert (await exchange(port, http_get("http://good.test", "good.test"))).endswith(b"\r\n\r\nto the end")
        site.response = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabchold"
        assert (await exchange(port, http_get("http://good.test", "good.test"))).endswith(b"\r\n\r\nabc")


async def test_private_addresses_of_a_public_name_are_skipped(resolver: FakeResolver) -> None:
    async with open_proxy(resolver, "both.test") as (_, port):
        assert (await exchange(port, http_get("http://both.test/", "both.test"))).endswith(b"hello")
        assert resolver.dialled == [(GOOD, 80)]


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
async def test_other_hosts_are_refused_with_a_reason(host: str, port: int, resolver: FakeResolver) -> None:
    rules = ("good.test", "inside.test", "private.test", "metadata.test")
    async with open_proxy(resolver, *rules) as (proxy, at):
        response = await exchange(at, http_connect(host, port))
        assert response.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        body = response.rpartition(b"\r\n\r\n")[2]
        assert re.search(rb"\b%d\b" % port, body)
        assert body.endswith(b" good.test, inside.test, private.test, metadata.test\n")
        assert (await exchange(at, http_get(f"http://{host}:{port}/", f"{host}:{port}"))).startswith(
            b"HTTP/1.1 403 "
        )
        assert (await exchange(at, socks_connect(host.strip("[]"), port))).startswith(b"\x05\x00\x05\x02\x00\x01")
        assert resolver.dialled == []
        (one,) = proxy.log.list_records()
        assert (one.host, one.port, one.verdict, one.count) == (
            host.strip("[]").replace("::ffff:", ""),
            port,
            "refused",
            3,
        )


async def test_redirect_to_another_host_is_refused(site: FakeSite, resolver: FakeResolver) -> None:
    site.response = b"HTTP/1.1 302 Found\r\nLocation: http://other.test/\r\nContent-Length: 0\r\n\r\n"
    async with open_proxy(resolver, "good.test") as (_, port):
        response = await exchange(port, http_get("http://good.test/", "good.test"))
        assert b"Location: http://other.test/" in response  # the client follows it through the proxy
        assert (await exchange(port, http_get("http://other.test/", "other.test"))).startswith(b"HTTP/1.1 403 ")
        assert resolver.dialled == [(GOOD, 80)]


URL = "http://good.test/"


@pytest.mark.parametrize(
    "data",
    [
        http_get(URL, "other.test"),
        http_get(URL, "good.test:81"),
        http_get(URL, "good.test", "Host: other.test\r\n"),
        http_get(URL, "good.test", "host : other.test\r\n"),
        http_get(URL, "good.test", "X: 1\r\n folded: 2\r\n"),
        http_get(URL, "good.test", "X: 1\nHost: other.test\r\n"),
        http_get(URL, "good.test", "X: 1\rHost: other.test\r\n"),
        http_get(URL, "good.test", "X: \x00\r\n"),
        http_get(URL, "good.test", "Content-Length: 5\r\nContent-Length: 6\r\n"),
        http_get(URL, "good.test", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"),
        http_get(URL, "good.test", "Transfer-Encoding: chunked, identity\r\n"),
        http_get(URL, "good.test", "Transfer-Encoding: \x0bchunked\r\n"),
        http_get(URL, "good.test", "Content-Length: +5\r\n"),
        http_get(URL, "good.test", "Content-Length: 0x5\r\n"),
        http_get("http://good.test@other.test/", "other.test"),
        http_get("http://other.test\\@good.test/", "good.test"),
        http_get("http://good.test:80:81/", "good.test"),
        http_get("http:///a", "good.test"),
        http_get("https://good.test/", "good.test"),
        http_get("ftp://good.test/", "good.test"),
        http_get("/", "good.test"),
        http_get("*", "good.test"),
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
async def test_ambiguous_requests_are_refused(data: bytes, resolver: FakeResolver) -> None:
    async with open_proxy(resolver, "good.test") as (_, port):
        assert (await exchange(port, data)).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert resolver.dialled == []


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
    more: str, body: bytes, site: FakeSite, resolver: FakeResolver
) -> None:
    async with open_proxy(resolver, "good.test") as (proxy, port):
        second = http_get("http://other.test/", "other.test") + http_get("http://good.test/2", "good.test")
        response = await exchange(port, http_get("http://good.test/1", "good.test", more) + body + second)
        assert response.count(b"HTTP/1.1 ") == 1
        assert resolver.dialled == [(GOOD, 80)]
        assert b"other.test" not in site.received
        assert b"/2" not in site.received
        assert [one.host for one in proxy.log.list_records()] == ["good.test"]


@pytest.mark.parametrize("body", [b"zz\r\n", b"-1\r\n", b"3\r\nabcde\r\n", b"1" * 20 + b"\r\n", b"\r\n"])
async def test_malformed_chunk_is_refused(body: bytes, site: FakeSite, resolver: FakeResolver) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serve(silent) as there, open_proxy(resolver, "good.test") as (_, port):
        resolver.ports[GOOD] = there
        response = await exchange(port, http_get(URL, "good.test", "Transfer-Encoding: chunked\r\n") + body)
        assert response.startswith(b"HTTP/1.1 400 ")


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
async def test_malformed_response_is_a_bad_gateway(answer: bytes, site: FakeSite, resolver: FakeResolver) -> None:
    site.response = answer
    async with open_proxy(resolver, "good.test") as (_, port):
        response = await exchange(port, http_get(URL, "good.test"))
        assert b"HTTP/1.1 502 Bad Gateway\r\n" in response


@pytest.mark.parametrize(
    ("host", "status", "code"), [("dead.test", 502, 5), ("gone.test", 502, 5), ("empty.test", 502, 5)]
)
async def test_unreachable_host_is_a_bad_gateway(
    host: str, status: int, code: int, resolver: FakeResolver
) -> None:
    async with open_proxy(resolver, "*.test") as (proxy, port):
        assert (await exchange(port, http_connect(host, 443))).startswith(f"HTTP/1.1 {status} ".encode())
        assert (await exchange(port, socks_connect(host, 443)))[2:4] == bytes((5, code))
        assert [one.verdict for one in proxy.log.list_records()] == ["failed"]


async def test_socks_supports_connect_only(resolver: FakeResolver) -> None:
    async with open_proxy(resolver, "good.test") as (_, port):
        assert await exchange(port, b"\x05\x01\x02") == b"\x05\xff"
        assert (await exchange(port, b"\x05\x01\x00\x05\x02\x00\x01" + bytes(6)))[2:4] == b"\x05\x07"
        assert (await exchange(port, b"\x05\x01\x00\x05\x01\x00\x03\x03\xff\xff\xff\x00\x50"))[2:4] == b"\x05\x07"
        assert resolver.dialled == []
