"""Opening connections, and the errors when that fails."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rookery.core import UsageError
from rookery.upstreams.http_client import Client, ConnectError
from tests.servers import closed_port
from tests.upstreams.http_kit import Script, Wire, answering, both_loops, fetch, run, spin, whole

OK = whole(b"ok")


def _names(monkeypatch: pytest.MonkeyPatch, **known: list[Any]) -> list[str]:
    """Resolve `engine` to the configured addresses; return the list of lookups."""
    lookups: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **options: Any) -> Any:
        if host not in known:
            return real(host, port, **options)
        if options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        assert threading.current_thread() is not threading.main_thread()
        lookups.append(host)
        if not known[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", where) for where in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return lookups


@both_loops
def test_refused_connection_is_reported_and_nothing_was_sent(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        stale = str(tmp_path / "stale")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(stale)
        with closed_port() as port:
            for client in (Client("127.0.0.1", port), Client(path=stale)):
                with pytest.raises(ConnectError) as caught:
                    await client.send("GET", "/")
                assert caught.value.reason == "refused"
                await client.close()

    run(main(), loop)


@both_loops
def test_missing_socket_is_reported(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with Client(path=str(tmp_path / "none")) as client:
            with pytest.raises(ConnectError, match="No such file") as caught:
                await client.send("GET", "/")
            assert caught.value.reason == "network"

    run(main(), loop)


@both_loops
def test_unresolvable_name_is_reported(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = _names(monkeypatch, engine=[])

    async def main() -> None:
        async with Client("engine", 80) as client:
            for count in (1, 2):
                with pytest.raises(ConnectError, match="Name or service not known") as caught:
                    await client.send("GET", "/")
                assert caught.value.reason == "name"
                assert len(lookups) == count  # a failed lookup is not cached

    run(main(), loop)


@both_loops
def test_name_is_resolved_once_for_many_connections(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        hosts: list[bytes] = []

        async def handle(wire: Wire) -> None:
            while request := await wire.request():
                hosts.append(request)
                await wire.send(OK)

        async with Script(handle, tcp=True) as server:
            lookups = _names(monkeypatch, engine=[("127.0.0.1", server.port)])
            async with Client("engine", server.port, idle=0) as client:
                await asyncio.gather(*(fetch(client) for _ in range(30)))
                await fetch(client)
            assert lookups == ["engine"]
            assert all(b"Host: engine:%d\r\n" % server.port in request for request in hosts)

    run(main(), loop)


@both_loops
def test_addresses_are_tried_in_order_until_one_answers(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with closed_port() as port:
            async with Script(answering(OK), tcp=True) as server:
                dead = ("127.0.0.1", port)
                lookups = _names(monkeypatch, engine=[dead, dead, ("127.0.0.1", server.port)], dead=[dead, dead])
                async with Client("engine", server.port) as client:
                    assert await fetch(client) == b"ok"
                async with Client("dead", server.port) as client:
                    for _ in range(2):
                        with pytest.raises(ConnectError) as caught:
                            await fetch(client)
                        assert caught.value.reason == "refused"
                # If every address failed, the name is resolved again, because its addresses may have changed.
                assert lookups == ["engine", "dead", "dead"]

    run(main(), loop)


@pytest.mark.long
@both_loops
def test_address_that_drops_packets_leaves_time_for_the_next(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            filling = [socket.socket() for _ in range(4)]
            try:
                for sock in filling:
                    sock.setblocking(False)
                    sock.connect_ex(full.getsockname())
                async with Script(answering(OK), tcp=True) as server:
                    where = full.getsockname()
                    _names(monkeypatch, engine=[where, ("127.0.0.1", server.port)], dead=[where])
                    async with Client("engine", 80, connect=2.0) as client:
                        assert await fetch(client) == b"ok"
                    async with Client("dead", 80, connect=0.2) as client:
                        with pytest.raises(ConnectError, match=r"\b0\.2\b") as caught:
                            await fetch(client)
                        assert caught.value.reason == "timeout"
            finally:
                for sock in filling:
                    sock.close()

    run(main(), loop)


@both_loops
def test_resolving_is_part_of_the_time_to_connect(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proceed = threading.Event()

    def hang(_host: str, _port: int, **options: Any) -> Any:
        if options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        assert proceed.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "later")

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def main() -> None:
        async with Client("engine", 80, connect=0.05) as client:
            with pytest.raises(ConnectError) as caught:
                await client.send("GET", "/")
            assert caught.value.reason == "timeout"
        proceed.set()

    run(main(), loop)


@both_loops
def test_socket_whose_queue_is_full_is_waited_for(loop: str, tmp_path: Path) -> None:
    """Linux returns EAGAIN for a full Unix socket; the connection is then not in progress."""

    async def main() -> None:
        path = str(tmp_path / "full")
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
            listener.bind(path)
            listener.listen(0)
            first.connect(path)
            async with Client(path=path, connect=0.1) as client:
                with pytest.raises(ConnectError) as caught:
                    await client.send("GET", "/")
                assert caught.value.reason == "timeout"
            async with Client(path=path) as client:
                task = asyncio.create_task(client.send("GET", "/"))
                await spin()
                listener.accept()[0].close()  # the queue slot of `first`
                listener.setblocking(False)
                peer, _ = await asyncio.get_running_loop().sock_accept(listener)
                with peer:
                    assert (await asyncio.get_running_loop().sock_recv(peer, 100)).startswith(
                        b"GET / HTTP/1.1\r\n"
                    )
                    await asyncio.get_running_loop().sock_sendall(peer, OK)
                    assert await (await task).read(10) == b"ok"

    run(main(), loop)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@both_loops
@pytest.mark.skipif(not _has_ipv6(), reason="[probed] this machine has no IPv6 loopback")
def test_ipv6_address_is_reached_and_named_in_brackets(loop: str) -> None:
    async def main() -> None:
        heads: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "::1", 0)
        port = server.sockets[0].getsockname()[1]
        async with Client("::1", port) as client:
            assert await fetch(client) == b"ok"
        server.close()
        assert b"\r\nHost: [::1]:%d\r\n" % port in heads[0]

    run(main(), loop)


@pytest.mark.parametrize(
    ("host", "port", "tls", "shown"),
    [
        ("h", 80, False, b"h"),
        ("h", 443, True, b"h"),
        ("h", 443, False, b"h:443"),
        ("fe80::1%eth0", 81, False, b"[fe80::1]:81"),
        ("bücher.example", 80, False, b"xn--bcher-kva.example"),
    ],
)
def test_host_header_has_the_http_format(host: str, port: int, tls: bool, shown: bytes) -> None:
    assert Client(host, port, ssl=tls)._common == b"Host: " + shown + b"\r\n"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"host": "h"},
        {"host": "h", "port": 65536},
        {"host": "h", "port": -1},
        {"host": "", "port": 80},
        {"host": "a" * 70 + "é", "port": 80},
        {"host": "a b", "port": 80},
        {"host": "a\r\nX: y", "port": 80},
        {"host": "a/b", "port": 80},
        {"host": "user@h", "port": 80},
        {"path": ""},
        {"path": "/" + "a" * 108},
        {"path": "/a\0b"},
        {"host": "h", "port": 80, "connect": 0},
        {"host": "h", "port": 80, "keepalive": 0},
        {"host": "h", "port": 80, "idle": -1},
        {"host": "h", "port": 80, "buffer": 0},
    ],
)
def test_invalid_url_is_refused_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Client(**options)


@both_loops
def test_sockets_send_at_once_and_notice_hosts_that_vanish(loop: str) -> None:
    async def main() -> None:
        async with Script(answering(OK), tcp=True) as server, server.client() as client:
            await fetch(client)
            [connection] = client.connections
            assert connection.transport is not None
            sock = connection.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    run(main(), loop)
