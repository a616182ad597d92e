"""The HTTP parser gives the same request for any split of its bytes, and rejects everything else."""

import asyncio
from typing import Any

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.gateway.http_messages import Request, ResponseWriter
from rookery.gateway.server import MAX_PIPELINED, MAX_PIPELINED_BYTES, HttpConnection, Server
from tests.gateway.http_kit import PLAIN, BlockingHandler, new_server
from tests.gateway.kit import request
from tests.gateway.scripted_upstream import ANY_SPEED

# ---- the parser


class BufferTransport(asyncio.Transport):
    """Transport that keeps everything written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.ended = False

    def write(self, data: Any) -> None:
        if not self.ended:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.ended

    def close(self) -> None:
        self.ended = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0


def feed(*pieces: bytes) -> tuple[list[Any], bytes]:
    """Feed pieces to a connection; return the parsed requests and the bytes of the responses."""

    async def play() -> tuple[list[Any], bytes]:
        seen: list[Any] = []

        async def handler(request: Request, out: ResponseWriter) -> None:
            seen.append((request.method, request.path, request.query, dict(request.headers), request.body))
            out.send(200, b"%d" % len(seen))

        server = new_server(handler)
        transport, connection = BufferTransport(), HttpConnection(server, "")
        connection.connection_made(transport)
        for piece in pieces:
            connection.data_received(piece)
        while connection.task is not None:
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await server.close()
        return seen, bytes(transport.written)

    return asyncio.run(play())


POST = request("POST", "/p", b"body of it", Content_Type="text/plain")
CHUNKED = (
    b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n6;x=y\r\n of it\r\n0\r\n\r\n"
)
SEEN = [
    ("GET", "/a", "b=c", {"host": "gateway.test", "x-one": "1"}, b""),
    (
        "POST",
        "/p",
        "",
        {"host": "gateway.test", "content-type": "text/plain", "content-length": "10"},
        b"body of it",
    ),
    ("POST", "/c", "", {"host": "x", "transfer-encoding": "chunked"}, b"body of it"),
]


def test_request_split_at_any_byte_parses_the_same() -> None:
    whole = PLAIN + POST + CHUNKED
    for at in range(len(whole) + 1):
        assert feed(whole[:at], whole[at:])[0] == SEEN
    assert feed(*(whole[at : at + 1] for at in range(len(whole))))[0] == SEEN


def test_pipelined_requests_are_answered_in_order() -> None:
    seen, written = feed(PLAIN + POST + CHUNKED + PLAIN)
    assert seen == [*SEEN, SEEN[0]]
    assert [part[-1:] for part in written.split(b"HTTP/1.1 200 OK\r\n")[1:]] == [b"1", b"2", b"3", b"4"]


names = st.sampled_from(["X-A", "x-b", "Accept", "User-Agent", "Cookie"])
values = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.strip)
bodies = st.binary(max_size=60)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, Any]:
    """Generate a valid request and its parsed form."""
    method = draw(st.sampled_from(["GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"]))
    path = "/" + draw(st.text("abc/%20._-", max_size=12))
    query = draw(st.text("abc=&%2F", max_size=8))
    headers = draw(st.lists(st.tuples(names, values), max_size=5))
    body = draw(st.none() | bodies)
    target = path + ("?" + query if query else "")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}:{draw(st.sampled_from(['', ' ', '  ']))}{value}"
                                              for name, value in headers)]  # fmt: skip
    seen = {name.lower(): value for name, value in headers}
    if body is None:
        data = b""
    elif draw(st.booleans()):
        lines.append(f"Content-Length: {len(body)}")
        seen["content-length"] = str(len(body))
        data = body
    else:
        lines.append("Transfer-Encoding: chunked")
        seen["transfer-encoding"] = "chunked"
        data, left = b"", body
        while left:
            size = draw(st.integers(1, len(left)))
            data += b"%x\r\n%b\r\n" % (size, left[:size])
            left = left[size:]
        data += b"0\r\n\r\n"
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data, (method, path, query, seen, body or b"")


@settings(ANY_SPEED, max_examples=150)
@given(st.lists(requests(), min_size=1, max_size=4), st.data())
def test_randomly_split_requests_parse_the_same(sent: list[Any], data: st.DataObject) -> None:
    whole = b"".join(raw for raw, _ in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    seen, written = feed(*pieces)
    assert seen == [what for _, what in sent]
    assert written.count(b"HTTP/1.1 200 OK\r\n") == len(sent)


noise = st.lists(
    st.one_of(
        st.tuples(names.map(str.encode), values.map(str.encode)),
        st.tuples(
            st.sampled_from(
                [b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"content-length "]
            ),
            st.sampled_from(
                [b"0", b"3", b"+3", b"3,3", b"chunked", b"chunked, chunked", b"close", b"gzip", b"\x0b3"]
            ),
        ),
        st.tuples(st.binary(min_size=1, max_size=6), st.binary(max_size=6)),
    ),
    max_size=4,
)


@settings(ANY_SPEED, max_examples=250)
@given(
    noise,
    st.sampled_from([b"\r\n", b"\n", b"\r\r\n"]),
    st.sampled_from([b"", b"abc", b"0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n"]),
)
@example([(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")], b"\r\n", b"0\r\n\r\n")
@example([(b"Content-Length", b"3"), (b"Content-Length", b"0")], b"\r\n", b"abc")
@example([(b"Name", b"\tvalue \t")], b"\r\n", b"")
def test_requests_that_h11_accepts_parse_the_same(
    headers: list[tuple[bytes, bytes]], end: bytes, body: bytes
) -> None:
    raw = b"POST /x HTTP/1.1\r\nHost: a\r\n" + b"".join(n + b": " + v + end for n, v in headers) + b"\r\n" + body
    seen, written = feed(raw)
    assert seen or not written or not written.startswith(b"HTTP/1.1 200")
    other = h11.Connection(h11.SERVER)
    other.receive_data(raw)
    try:
        head = other.next_event()
        if not isinstance(head, h11.Request):
            return
        data = b""
        while isinstance(event := other.next_event(), h11.Data):
            data += event.data
    except h11.RemoteProtocolError:
        return
    if not seen or not isinstance(event, h11.EndOfMessage):
        return
    assert seen[0][4] == data
    assert seen[0][3] == {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}


@settings(ANY_SPEED, max_examples=200)
@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_requests_or_one_rejection(data: bytes) -> None:
    seen, written = feed(PLAIN + data)
    assert seen[0] == SEEN[0]
    answers = written.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers[: len(seen)]] == [b"200"] * len(seen)
    assert len(answers) - len(seen) in (0, 1)


def test_trailers_do_not_change_the_request_headers() -> None:
    raw = CHUNKED.removesuffix(b"\r\n") + b"Authorization: Bearer other\r\nHost: y\r\n\r\n"
    assert feed(raw)[0] == [SEEN[2]]


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://gateway.test/v1/x?y=http://z/", "/v1/x", "y=http://z/"),
        ("http://gateway.test", "/", ""),
        ("https://a:1/b/c", "/b/c", ""),
        ("*", "/", ""),
        ("//double/slash", "//double/slash", ""),
    ],
)
def test_absolute_form_target_is_reduced_to_its_path(target: str, path: str, query: str) -> None:
    method = "OPTIONS" if target == "*" else "GET"
    assert [one[1:3] for one in feed(request(method, target))[0]] == [(path, query)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"hello there\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: ten\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(201)) + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (64 << 10) + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * (64 << 10) + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 40_000 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"x" * 1001, 413),
        (b"POST / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400),
        (b"CONNECT other:443 HTTP/1.1\r\nHost: other:443\r\n\r\n", 400),
        (b"POST /no HTTP/1.1\r\nContent-Length: 10\r\n\r\n", 401),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500),
    ],
)
def test_invalid_or_rejected_request_is_answered_and_the_connection_closed(
    raw: bytes, status: int, split: bool
) -> None:
    step = 1 if split and len(raw) < 1000 else len(raw)
    seen, written = feed(*(raw[at : at + step] for at in range(0, len(raw), step)), PLAIN)
    assert seen == []
    assert written.count(b"\r\ndate: ") == 1
    assert written.startswith(b"HTTP/1.1 %d " % status)
    head, _, body = written.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    assert body.startswith(b"{")
    assert b"secret in the exception" not in written


def test_rejected_head_request_gets_no_body() -> None:
    written = feed(request("HEAD", "/no"))[1]
    assert written.startswith(b"HTTP/1.1 401 ")
    assert b"{" not in written


@pytest.mark.parametrize("broken", [b"garbage\r\n\r\n", request("GET", "/no"), request("POST", "/p", b"x" * 1001)])
def test_requests_before_an_invalid_one_are_answered_and_later_ones_are_not(broken: bytes) -> None:
    seen, written = feed(PLAIN + POST + broken + PLAIN)
    assert seen == SEEN[:2]
    assert [part[:3] for part in written.split(b"HTTP/1.1 ")[1:3]] == [b"200", b"200"]
    assert written.count(b"HTTP/1.1 ") == 3
    assert b"connection: close" in written.rpartition(b"HTTP/1.1 ")[2]


def test_number_and_size_of_pipelined_requests_are_limited() -> None:
    seen, written = feed(PLAIN * 40)
    assert 1 < len(seen) <= MAX_PIPELINED + 1
    assert b"HTTP/1.1 400 " in written

    async def play() -> None:
        gate = BlockingHandler()
        server = Server(gate, lambda _: 1 << 30, format_error=lambda *_: b"{}", internal_error=b"{}")
        transport, connection = BufferTransport(), HttpConnection(server, "")
        connection.connection_made(transport)
        connection.data_received(PLAIN)
        for _ in range(3):
            connection.data_received(request("POST", "/", b"x" * (MAX_PIPELINED_BYTES // 2 + 1)))
        assert sum(len(one.body) for one, _ in connection._pipelined) <= MAX_PIPELINED_BYTES
        gate.proceed.set()
        while connection.task is not None:
            await asyncio.sleep(0)
        assert transport.written.count(b"HTTP/1.1 200") == 2
        assert transport.written.count(b"HTTP/1.1 400") == 1
        connection.connection_lost(None)
        await server.close()

    asyncio.run(play())
