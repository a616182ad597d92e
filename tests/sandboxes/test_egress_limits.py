"""Limits of the proxy of the network `allow`: all its resources are bounded and released on close."""

import asyncio
import logging
import re
import socket
import threading

import pytest

from rookery.sandboxes.egress import byte_stream
from rookery.sandboxes.egress import proxy as egress
from rookery.sandboxes.egress.rules import Address, EgressRules
from tests.sandboxes.fake_hosts import (
    GOOD,
    NAMES,
    FakeResolver,
    FakeSite,
    exchange,
    http_connect,
    http_get,
    open_proxy,
    resolver,
    serve,
    site,
)
from tests.sandboxes.owner_process import wait_while

__all__ = ["resolver", "site"]

URL = "http://good.test/"


async def test_request_head_is_limited_in_size_and_time(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_proxy(resolver, "good.test") as (_, port):
        assert (await exchange(port, b"GET /" + b"a" * 200_000)).startswith(b"HTTP/1.1 431 ")
        many = "".join(f"X-{n}: 1\r\n" for n in range(300))
        assert (await exchange(port, http_get(URL, "good.test", many))).startswith(b"HTTP/1.1 431 ")
        monkeypatch.setattr(egress, "REQUEST_SECONDS", 0.1)
        assert (await exchange(port, b"")).startswith(b"HTTP/1.1 408 ")
        assert (await exchange(port, b"GET http://good.test/ HTTP/1.1\r\nX: ")).startswith(b"HTTP/1.1 408 ")
        assert await exchange(port, b"\x05\x03\x00") == b"\x05\x01\x00\x01" + bytes(6)


async def test_idle_tunnel_is_closed(resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "IDLE_SECONDS", 0.1)
    async with open_proxy(resolver, "good.test") as (proxy, port):
        assert (
            await exchange(port, http_connect("good.test", 443)) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        )
        await wait_while(lambda: proxy.connections)


async def test_slow_reader_stops_the_sender(resolver: FakeResolver) -> None:
    release = asyncio.Event()

    async def never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await release.wait()

    async with serve(never_read) as there, open_proxy(resolver, "good.test") as (proxy, port):
        resolver.ports[GOOD] = there
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, http_connect("good.test", 443))
            sending = asyncio.create_task(loop.sock_sendall(sock, bytes(256 << 20)))
            taken = -1
            while taken != (taken := sum(one.sent for one in proxy.log.list_records())):
                await asyncio.wait({sending}, timeout=0.3)
            assert not sending.done()
            assert taken < 64 << 20  # at most what fits into socket buffers
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        release.set()


async def test_event_loop_runs_after_every_block(resolver: FakeResolver) -> None:
    size = 32 << 20

    def flood(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(bytes(size))

    def drain() -> int:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(http_connect("good.test", 443))
            total = 0
            while data := sock.recv(1 << 20):
                total += len(data)
        return total

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        resolver.ports[GOOD] = listener.getsockname()[1]
        thread = threading.Thread(target=flood, args=(listener,))
        thread.start()
        async with open_proxy(resolver, "good.test") as (_, port):
            ticking = asyncio.create_task(tick())
            total = await asyncio.to_thread(drain)
            ticking.cancel()
        thread.join()
    assert total >= size
    assert ticks >= size // byte_stream.BLOCK_BYTES


async def test_connections_are_limited_and_others_wait_in_the_backlog(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "MAX_CONNECTIONS", 8)
    async with open_proxy(resolver, "good.test") as (proxy, port), open_proxy(resolver, "good.test") as (_, other):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        try:
            await wait_while(lambda: proxy.connections < 8)
            for _ in range(20):
                await asyncio.sleep(0)
            assert proxy.connections == 8
            # Another sandbox does not wait.
            assert (await exchange(other, http_get(URL, "good.test"))).endswith(b"hello")
            for sock in held[:-1]:
                sock.close()
            held[-1].sendall(http_get(URL, "good.test"))
            held[-1].setblocking(False)
            response = await asyncio.get_running_loop().sock_recv(held[-1], 1000)
            assert response.startswith(b"HTTP/1.1 200 OK")
        finally:
            for sock in held:
                sock.close()


def test_sandboxes_share_the_descriptor_limit() -> None:
    alone, few, many = (egress.connection_limit(count) for count in (1, 20, 100_000))
    assert egress.MIN_CONNECTIONS == many <= few <= alone <= egress.MAX_CONNECTIONS


async def test_hanging_lookup_times_out_and_keeps_its_slot(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "LOOKUP_SECONDS", 0.1)
    go = threading.Event()
    threads: set[int] = set()

    class SlowResolver(FakeResolver):
        def look_up(self, name: str, port: int) -> list[Address]:
            threads.add(threading.get_ident())
            go.wait(60)
            return super().look_up(name, port)

    slow = SlowResolver(NAMES, resolver.ports)
    try:
        async with open_proxy(slow, "*.slow.test") as (proxy, port):
            responses = await asyncio.gather(
                *(exchange(port, http_connect(f"h{n}.slow.test", 443)) for n in range(10))
            )
            assert all(one.startswith(b"HTTP/1.1 504 ") for one in responses)
            # A lookup may time out before its thread starts.
            await wait_while(lambda: len(threads) < egress.MAX_LOOKUPS)
            assert len(threads) == egress.MAX_LOOKUPS
            assert {one.verdict for one in proxy.log.list_records()} == {"failed"}
            go.set()
            await wait_while(proxy._lookups.locked)
    finally:
        go.set()


async def test_records_and_log_are_limited(
    resolver: FakeResolver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(egress, "MAX_RECORDS", 3)
    caplog.set_level(logging.INFO, "rookery.sandboxes")
    async with open_proxy(resolver, "good.test") as (proxy, port):
        for n in range(8):
            await exchange(port, http_connect(f"h{n}.test", 443))
        await exchange(port, http_get(URL, "good.test"))
        await exchange(port, b"GET / HTTP/1.1\r\n\r\n")
        record = proxy.log.list_records()
        assert [(one.host, one.verdict, one.count) for one in record] == [
            ("h0.test", "refused", 1),
            ("h1.test", "refused", 1),
            ("h2.test", "refused", 1),
            ("…", "refused", 6),
            ("good.test", "allowed", 1),
        ]
        assert [re.search(r"\w+\.test:\d+", line.message)[0] for line in caplog.records] == [  # type: ignore[index]
            *(f"h{n}.test:443" for n in range(4)),
            "good.test:80",
        ]


async def test_close_leaves_nothing_open(resolver: FakeResolver, site: FakeSite) -> None:
    site.response = b"hold"
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    proxy = egress.EgressProxy(listener, EgressRules.parse(["good.test"]), "sandbox", resolver)
    proxy.start()
    own_coroutines = ("EgressProxy.", "copy_all", "copy_body", "_forward")
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    for sock, data in zip(
        held, [http_connect("good.test", 443)] * 3 + [http_get(URL, "good.test")] * 2 + [b""], strict=True
    ):
        sock.sendall(data)
    await wait_while(lambda: len(resolver.dialled) != 5)
    assert [task for task in asyncio.all_tasks() if any(name in repr(task) for name in own_coroutines)] != []
    await proxy.close()
    assert [task for task in asyncio.all_tasks() if any(name in repr(task) for name in own_coroutines)] == []
    assert proxy.connections == 0
    assert listener.fileno() == -1
    assert resolver.proxies == set()
    for sock in held:
        with sock:
            sock.settimeout(60)
            while True:
                try:
                    if not sock.recv(4096):
                        break
                except ConnectionResetError:
                    break
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
