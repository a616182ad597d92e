"""Fuzz tests of the proxy: any input gets a response or a close, and is parsed in one way only."""

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rookery.sandboxes.egress import messages
from rookery.sandboxes.egress import proxy as egress
from rookery.sandboxes.egress.rules import EgressRules
from tests.sandboxes.fake_hosts import FakeResolver

tokens = st.sampled_from(
    [b"GET", b"CONNECT", b"POST", b" ", b"  ", b"http://", b"https://", b"a.test", b"b.test", b":80", b":443",
     b":", b"/", b"?", b"#", b"[::1]", b"127.0.0.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9", b"\r\n", b"\n", b"\r",
     b"@", b"\r\n\r\n", b"Host: ", b"Host: a.test", b"Host: b.test", b"Content-Length: ", b"5",
     b"Transfer-Encoding: chunked", b"Connection: Host", b"5\r\nhello\r\n", b"0\r\n\r\n", b"\x05", b"\x01\x00",
     b"\x05\x01\x00\x03\x06a.test\x00\x50",
     b"\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50", b"\x05\x01\x00\x04", b"\x00", b"\xff"]
)  # fmt: skip
fragments = st.lists(tokens | st.binary(max_size=12), max_size=25).map(b"".join)
lines = st.lists(
    st.sampled_from(
        [b"Host: a.test", b"Host: b.test", b"host:a.test:80", b"Content-Length: 5", b"Content-Length: 6",
         b"TE: trailers",
         b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Connection: close, X-A",
         b"X-A: 1", b" folded"]
    ),
    max_size=5,
)  # fmt: skip
requests = st.builds(
    lambda method, target, version, headers, rest: (
        b"\r\n".join([b" ".join((method, target, version)), *headers]) + b"\r\n\r\n" + rest
    ),
    st.sampled_from([b"GET", b"POST", b"CONNECT", b"HEAD"]),
    st.sampled_from(
        [b"http://a.test/", b"http://b.test/", b"a.test:443", b"a.test:80", b"b.test:443", b"/", b"http://a.test"]
    ),
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.0"]),
    lines,
    fragments,
)


@pytest.mark.long
@given(fragments | requests, st.lists(st.integers(1, 40), max_size=6))
@settings(max_examples=400, deadline=None)
def test_any_input_gets_a_response_or_a_close(data: bytes, cuts: list[int]) -> None:
    async def main() -> tuple[bytes, FakeResolver]:
        resolver = FakeResolver({"a.test": ["93.184.216.34"], "b.test": ["127.0.0.1"]}, {})
        listener = socket.socket()
        proxy = egress.EgressProxy(listener, EgressRules.parse(["a.test", "b.test"]), "sandbox", resolver)
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            serving = asyncio.create_task(proxy.serve(theirs))
            at = 0
            for cut in [*cuts, len(data) + 1]:
                try:
                    await loop.sock_sendall(ours, data[at : at + cut])
                except OSError:
                    break  # it has closed by now
                await asyncio.sleep(0)
                at += cut
            ours.shutdown(socket.SHUT_WR)
            response = b""
            try:
                while chunk := await loop.sock_recv(ours, 65536):
                    response += chunk
            except ConnectionResetError:
                pass
            await serving  # raises the proxy's exception, if any
            assert theirs.fileno() == -1
        await proxy.close()
        return response, resolver

    response, resolver = asyncio.run(main())
    assert response == b"" or response.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"\x05"))
    assert set(resolver.dialled) <= {("93.184.216.34", 80), ("93.184.216.34", 443)}


@given(fragments | requests)
@settings(max_examples=400)
def test_parsed_request_round_trips_or_is_refused(data: bytes) -> None:
    head = data.partition(b"\r\n\r\n")[0]
    try:
        request = messages.parse_request(head)
    except messages.BadRequest as bad:
        assert bad.status in (400, 431)  # noqa: PT017
        return
    rebuilt = messages.build_request(request)
    assert rebuilt.count(b"\r\n\r\n") == 1
    assert rebuilt.endswith(b"\r\n\r\n")
    headers = [line.split(b":")[0].lower() for line in rebuilt.split(b"\r\n")[1:-2]]
    assert headers.count(b"host") == headers.count(b"connection") == 1
    assert headers.count(b"content-length") + headers.count(b"transfer-encoding") <= 1
    if request.method != b"CONNECT":
        again = messages.parse_request(rebuilt[:-4].replace(b" /", b" http://%b/" % str(request.host).encode(), 1))
        assert (again.host, again.port, again.path, again.length) == (
            (request.host, request.port, request.path, request.length)
        )


@given(st.binary(max_size=60) | fragments)
def test_responses_and_chunk_sizes_parse_or_are_refused(data: bytes) -> None:
    request = messages.parse_request(b"GET http://a.test/ HTTP/1.1\r\nHost: a.test")
    for read in (
        lambda: messages.parse_response(b"HTTP/1.1 " + data, request),
        lambda: messages.parse_chunk_size(data),
    ):
        try:
            read()
        except messages.BadRequest as bad:
            assert bad.status in (400, 502)  # noqa: PT017
