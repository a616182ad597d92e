"""The proxy of the network `allow` under load and to its end: everything it holds is bounded, and goes with it."""

import asyncio
import logging
import socket
import threading

import pytest

from rookery.sandboxes.egress import byte_stream
from rookery.sandboxes.egress import proxy as egress
from rookery.sandboxes.egress.rules import Address, EgressRules
from tests.sandboxes.fake_hosts import GOOD, NAMES, Mapped, Site, asked, connect, get, outside, proxy, served, site
from tests.sandboxes.owner_process import wait_while

__all__ = ["outside", "site"]

FRONT = "http://good.test/"


async def test_request_head_is_limited_in_size_and_time(outside: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy(outside, "good.test") as (_, port):
        assert (await asked(port, b"GET /" + b"a" * 200_000)).startswith(b"HTTP/1.1 431 ")
        many = "".join(f"X-{n}: 1\r\n" for n in range(300))
        assert (await asked(port, get(FRONT, "good.test", many))).startswith(b"HTTP/1.1 431 ")
        monkeypatch.setattr(egress, "REQUEST_SECONDS", 0.1)
        assert (await asked(port, b"")).startswith(b"HTTP/1.1 408 ")
        assert (await asked(port, b"GET http://good.test/ HTTP/1.1\r\nX: ")).startswith(b"HTTP/1.1 408 ")
        assert await asked(port, b"\x05\x03\x00") == b"\x05\x01\x00\x01" + bytes(6)


async def test_idle_tunnel_is_closed(outside: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "IDLE_SECONDS", 0.1)
    async with proxy(outside, "good.test") as (made, port):
        assert await asked(port, connect("good.test", 443)) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        await wait_while(lambda: made._tasks)


async def test_slow_reader_stops_the_sender(outside: Mapped) -> None:
    release = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await release.wait()

    async with served(deaf) as there, proxy(outside, "good.test") as (made, port):
        outside.ports[GOOD] = there
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, connect("good.test", 443))
            sending = asyncio.create_task(loop.sock_sendall(sock, bytes(256 << 20)))
            taken = -1
            while taken != (taken := sum(one.sent for one in made.log.list_records())):
                await asyncio.wait({sending}, timeout=0.3)
            assert not sending.done()
            assert taken < 64 << 20  # what the kernel holds for the host
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        release.set()


async def test_event_loop_runs_after_every_block(outside: Mapped) -> None:
    size = 32 << 20

    def flood(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(bytes(size))

    def drain() -> int:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(connect("good.test", 443))
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
        outside.ports[GOOD] = listener.getsockname()[1]
        thread = threading.Thread(target=flood, args=(listener,))
        thread.start()
        async with proxy(outside, "good.test") as (_, port):
            ticking = asyncio.create_task(tick())
            total = await asyncio.to_thread(drain)
            ticking.cancel()
        thread.join()
    assert total >= size
    assert ticks >= size // byte_stream.BLOCK_BYTES


async def test_connections_are_limited_and_others_wait_in_the_backlog(
    outside: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "MAX_CONNECTIONS", 8)
    async with proxy(outside, "good.test") as (made, port), proxy(outside, "good.test") as (_, other):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        try:
            await wait_while(lambda: len(made._tasks) < 8)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(made._tasks) == 8
            assert (await asked(other, get(FRONT, "good.test"))).endswith(b"hello")  # another box does not wait
            for sock in held[:-1]:
                sock.close()
            held[-1].sendall(get(FRONT, "good.test"))
            held[-1].setblocking(False)
            said = await asyncio.get_running_loop().sock_recv(held[-1], 1000)
            assert said.startswith(b"HTTP/1.1 200 OK")
        finally:
            for sock in held:
                sock.close()


def test_sandboxes_share_the_descriptor_limit() -> None:
    alone, few, many = (egress._connection_limit(count) for count in (1, 20, 100_000))
    assert egress.MIN_CONNECTIONS == many <= few <= alone <= egress.MAX_CONNECTIONS


async def test_hanging_lookup_times_out_and_keeps_its_slot(
    outside: Mapped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "LOOKUP_SECONDS", 0.1)
    go = threading.Event()
    threads: set[int] = set()

    class Slow(Mapped):
        def look_up(self, name: str, port: int) -> list[Address]:
            threads.add(threading.get_ident())
            go.wait(60)
            return super().look_up(name, port)

    slow = Slow(NAMES, outside.ports)
    try:
        async with proxy(slow, "*.slow.test") as (made, port):
            said = await asyncio.gather(*(asked(port, connect(f"h{n}.slow.test", 443)) for n in range(10)))
            assert all(one.startswith(b"HTTP/1.1 504 ") for one in said)
            await wait_while(lambda: len(threads) < egress.MAX_LOOKUPS)  # one may be given up before it begins
            assert len(threads) == egress.MAX_LOOKUPS
            assert {one.verdict for one in made.log.list_records()} == {"failed"}
            go.set()
            await wait_while(made._lookups.locked)
    finally:
        go.set()


async def test_records_and_log_are_limited(
    outside: Mapped, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(egress, "MAX_RECORDS", 3)
    caplog.set_level(logging.INFO, "rookery.sandboxes")
    async with proxy(outside, "good.test") as (made, port):
        for n in range(8):
            await asked(port, connect(f"h{n}.test", 443))
        await asked(port, get(FRONT, "good.test"))
        await asked(port, b"GET / HTTP/1.1\r\n\r\n")
        record = made.log.list_records()
        assert [(one.host, one.verdict, one.count) for one in record] == [
            ("h0.test", "refused", 1),
            ("h1.test", "refused", 1),
            ("h2.test", "refused", 1),
            ("…", "refused", 6),
            ("good.test", "allowed", 1),
        ]
        assert [line.message for line in caplog.records] == [
            "sandbox box: refused h0.test:443 (no rule allows it)",
            "sandbox box: refused h1.test:443 (no rule allows it)",
            "sandbox box: refused h2.test:443 (no rule allows it)",
            "sandbox box: refused h3.test:443 (no rule allows it)",
            "sandbox box: allowed good.test:80",
        ]


async def test_close_leaves_nothing_open(outside: Mapped, site: Site) -> None:
    site.answer = b"hold"
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    made = egress.EgressProxy(listener, EgressRules.parse(["good.test"]), "box", outside)
    made.start()
    ours = ("EgressProxy.", "pump", "body", "_answered")
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    for sock, data in zip(
        held, [connect("good.test", 443)] * 3 + [get(FRONT, "good.test")] * 2 + [b""], strict=True
    ):
        sock.sendall(data)
    await wait_while(lambda: len(outside.dialled) != 5)
    assert [task for task in asyncio.all_tasks() if any(name in repr(task) for name in ours)] != []
    await made.close()
    assert [task for task in asyncio.all_tasks() if any(name in repr(task) for name in ours)] == []
    assert made._tasks == set()
    assert listener.fileno() == -1
    assert outside.proxies == set()
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
