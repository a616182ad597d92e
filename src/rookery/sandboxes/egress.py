"""The way out of a sandbox whose network is `allow`: a proxy that serves its listener from the owner's process.

It takes HTTP requests for whole addresses, HTTP CONNECT and SOCKS5 on one port, told apart by the first byte.

Promises:
- nothing is connected to but what a rule allows; names are looked up here, once, and what was looked at is what is
  connected to; the rest is refused, in words that say what was asked for and what may be;
- every decision is logged, and counted for the record, which is bounded;
- one box has a bounded number of connections, and boxes share what the process may hold evenly; who comes above it
  waits in the kernel; a request, a lookup, a connection that does nothing, all have their time;
- when it is closed, or its owner dies, no connection, task or socket of it is left.

CONNECT and SOCKS5 are tunnels: what goes through them to an allowed host and port is not looked into.
"""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import threading
from typing import Literal, NamedTuple

from rookery.sandboxes import egress_wire as wire
from rookery.sandboxes.egress_flow import HEAD, Count, Flow, Gone, body, pump
from rookery.sandboxes.egress_rules import Address, Host, Rules, plain
from rookery.sandboxes.protocol import Egress

CONNECTIONS = 128
"""Of one box."""
LEAST = 4
"""That every box may have, however many there are."""
BACKLOG = 1024
REQUEST_SECONDS = 15.0
LOOKUP_SECONDS = 10.0
DIAL_SECONDS = 15.0
IDLE_SECONDS = 300.0
LOOKUPS = 2
"""At once, of one box: each may hold a thread for as long as the system's resolver likes."""
ALL_LOOKUPS = 32
ADDRESSES = 4
"""Of a name, that are tried."""
MOST_INTERIM = 16
RECORD = 256
log = logging.getLogger("rookery.sandboxes")

Verdict = Literal["allowed", "refused", "failed"]


class Outside:
    """What is beyond the proxy: names and addresses. One for all boxes of a provider."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(ALL_LOOKUPS)
        self.proxies: set[Proxy] = set()

    async def resolve(self, name: str, port: int, slots: asyncio.Semaphore) -> list[Address]:
        """Off the loop. Its place is free only when its thread is: a given-up lookup goes on to its end."""
        loop = asyncio.get_running_loop()
        promise: asyncio.Future[list[Address]] = loop.create_future()

        def settle(found: list[Address], error: OSError | None) -> None:
            slots.release()
            self.slots.release()
            if promise.cancelled():
                return
            if error is None:
                promise.set_result(found)
            else:
                promise.set_exception(error)

        def look() -> None:
            found: list[Address] = []
            error: OSError | None = None
            try:
                found = self.look_up(name, port)
            except (OSError, UnicodeError) as raised:
                error = raised if isinstance(raised, OSError) else OSError(str(raised))
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, found, error)

        await slots.acquire()
        try:
            await self.slots.acquire()
        except BaseException:
            slots.release()
            raise
        threading.Thread(target=look, name="rookery-lookup", daemon=True).start()
        return await promise

    def look_up(self, name: str, port: int) -> list[Address]:
        """Blocks."""
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return [ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found]

    async def dial(self, address: Address, port: int) -> socket.socket:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock


class _Key(NamedTuple):
    host: str
    port: int
    verdict: Verdict
    why: str


class Record:
    """Who was asked for, and what came of it."""

    def __init__(self, box: str) -> None:
        self._box = box
        self._seen: dict[_Key, list[int]] = {}

    def note(self, host: Host, port: int, verdict: Verdict, why: str = "") -> list[int]:
        """Its count, and the bytes out and in, to be added to."""
        key = _Key(str(host), port, verdict, why)
        known = self._seen.get(key)
        if known is None and sum(one.verdict == verdict for one in self._seen) >= RECORD:
            key = _Key("…", 0, verdict, "more hosts than are kept one by one")
            known = self._seen.get(key)
        level = logging.DEBUG if known else logging.INFO  # a box that asks again and again fills no log
        log.log(level, "sandbox %s: %s %s:%d%s", self._box, verdict, host, port, f" ({why})" if why else "")
        known = self._seen.setdefault(key, [0, 0, 0])
        known[0] += 1
        return known

    def all(self) -> tuple[Egress, ...]:
        return tuple(
            Egress(host=k.host, port=k.port, verdict=k.verdict, why=k.why, count=n, sent=out, received=back)
            for k, (n, out, back) in self._seen.items()
        )


class Proxy:
    """Serves one box's listener, from `start` to `close`."""

    def __init__(self, listener: socket.socket, rules: Rules, box: str, outside: Outside) -> None:
        self._listener = listener
        self._rules = rules
        self._outside = outside
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._free = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.record = Record(box)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._outside.proxies.add(self)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """The listener too."""
        self._outside.proxies.discard(self)
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._listener.close()
        for other in self._outside.proxies:
            other._free.set()  # there is more for everyone

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        level = logging.WARNING
        while True:
            while len(self._tasks) >= _share(len(self._outside.proxies)):
                self._free.clear()
                await self._free.wait()
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # No descriptors left, most likely: what waits in the kernel is as well there.
                log.log(level, "a connection of a sandbox cannot be taken: %s", error)
                level = logging.DEBUG
                await asyncio.sleep(0.2)
                continue
            level = logging.WARNING
            sock.setblocking(False)
            task = loop.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._free.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection of a sandbox ended in an error", exc_info=error)

    async def _serve(self, sock: socket.socket) -> None:
        client = Flow(sock)
        try:
            with contextlib.suppress(Gone, OSError):  # it left, or reset us: its own affair
                await self._heard(client)
        finally:
            sock.close()

    async def _heard(self, client: Flow) -> None:
        socks = False
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                first = await client.first()
                socks = first == wire.SOCKS
                if socks:
                    host, port = await self._socks(client)
                    asked = None
                elif bytes((first,)).isalpha():
                    asked = wire.request(await client.until(b"\r\n\r\n", HEAD))
                    host, port = asked.host, asked.port
                else:
                    raise wire.Bad(400, "this is a proxy for HTTP and SOCKS5")
        except (wire.Bad, TimeoutError) as error:
            status, why = (error.status, str(error)) if isinstance(error, wire.Bad) else (408, "no request came")
            self.record.note("?", 0, "refused", "it was no request that can be read")
            await self._part(client, status, why, socks=socks)
            return
        try:
            sock, tally = await self._reached(host, port)
        except wire.Bad as bad:
            await self._part(client, bad.status, str(bad), socks=socks)
            return
        try:
            if asked is None or asked.method == b"CONNECT":
                await client.say(wire.socks_answer(200) if socks else wire.CONNECTED)
                await _tunnel(client, Flow(sock), tally)
            else:
                await _forward(client, Flow(sock), asked, tally)
        finally:
            sock.close()

    async def _part(self, client: Flow, status: int, why: str, *, socks: bool) -> None:
        await client.parting(wire.socks_answer(status) if socks else wire.answer(status, why))

    async def _socks(self, client: Flow) -> tuple[Host, int]:
        _, count = await client.exactly(2)
        if 0 not in await client.exactly(count):
            await client.say(wire.NO_WAY)
            raise Gone
        await client.say(wire.NO_SECRET)
        version, what, _, kind = await client.exactly(4)
        if version != wire.SOCKS or what != 1 or kind not in (1, 3, 4):
            raise wire.Bad(400, "only CONNECT is spoken")
        size = (await client.exactly(1))[0] if kind == 3 else 4 if kind == 1 else 16
        data = await client.exactly(size)
        port = int.from_bytes(await client.exactly(2), "big")
        return wire.socks_host(kind, data), port

    # ------------------------------------------------------------------------------------------- deciding

    async def _reached(self, host: Host, port: int) -> tuple[socket.socket, list[int]]:
        """A connection and its place in the record; `Bad` where there is none."""
        if not self._rules.allow(host, port):
            raise self._refused(host, port, "no rule allows it")
        try:
            addresses = [host] if not isinstance(host, str) else await self._looked_up(host, port)
        except (TimeoutError, OSError) as error:
            raise self._failed(host, port, "its name is not known", error) from None
        usable = [address for address in addresses if self._rules.reach(host, address, port)]
        if not usable:
            where = ", ".join(map(str, addresses[:ADDRESSES]))
            raise self._refused(host, port, f"its address is not public ({where})")
        try:
            sock = await self._dialled(usable, port)
        except (TimeoutError, OSError) as error:
            raise self._failed(host, port, "it cannot be reached", error) from None
        return sock, self.record.note(host, port, "allowed")

    def _refused(self, host: Host, port: int, why: str) -> wire.Bad:
        self.record.note(host, port, "refused", why)
        return wire.Bad(403, f"{host} port {port} is refused: {why}. Allowed here: {self._rules.told()}")

    def _failed(self, host: Host, port: int, why: str, error: Exception) -> wire.Bad:
        self.record.note(host, port, "failed", why)
        detail = "it took too long" if isinstance(error, TimeoutError) else str(error)
        return wire.Bad(504 if isinstance(error, TimeoutError) else 502, f"{host} port {port}: {why} ({detail})")

    async def _looked_up(self, name: str, port: int) -> list[Address]:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await self._outside.resolve(name, port, self._lookups)
        if not found:
            raise OSError("it has no address")
        return [plain(address) for address in dict.fromkeys(found)]

    async def _dialled(self, addresses: list[Address], port: int) -> socket.socket:
        last: OSError = OSError("it has no address")
        async with asyncio.timeout(DIAL_SECONDS):
            for address in addresses[:ADDRESSES]:
                try:
                    return await self._outside.dial(address, port)
                except OSError as error:
                    last = error
        raise last


def _share(boxes: int) -> int:
    """The connections that one of so many boxes may have: two descriptors each, of a part of what we may open."""
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 1 << 14)
    return max(LEAST, min(CONNECTIONS, most // max(1, boxes)))


def _counted(tally: list[int], at: int, clock: asyncio.Timeout) -> Count:
    """Counts bytes, and that something moves."""
    loop = asyncio.get_running_loop()

    def count(size: int) -> None:
        tally[at] += size
        if not clock.expired():
            clock.reschedule(loop.time() + IDLE_SECONDS)

    return count


async def _over(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _tunnel(client: Flow, host: Flow, tally: list[int]) -> None:
    """Until both have ended, or one is reset, or nothing moves for too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(IDLE_SECONDS) as clock:
            out = asyncio.create_task(pump(client, host, _counted(tally, 1, clock)))
            back = asyncio.create_task(pump(host, client, _counted(tally, 2, clock)))
            try:
                await asyncio.wait((out, back), return_when=asyncio.FIRST_EXCEPTION)
            finally:
                await _over(out, back)


async def _forward(client: Flow, host: Flow, asked: wire.Request, tally: list[int]) -> None:
    """One request and its answer, which may come before all of the request has."""
    said = asyncio.Event()
    try:
        async with asyncio.timeout(IDLE_SECONDS) as clock:
            head = wire.forwarded(asked)
            await host.say(head)
            tally[1] += len(head)
            out = asyncio.create_task(body(client, host, asked.length, _counted(tally, 1, clock)))
            back = asyncio.create_task(_answered(client, host, asked, said, _counted(tally, 2, clock)))
            try:
                await asyncio.wait((out, back), return_when=asyncio.FIRST_COMPLETED)
                if not back.done() and (out.exception() is None or isinstance(out.exception(), OSError)):
                    await asyncio.wait((back,))  # a host that wants no more of a request may still answer it
                (back if back.done() else out).result()
            finally:
                await _over(out, back)
    except (wire.Bad, Gone, OSError) as error:  # TimeoutError is one of the last
        if not said.is_set():
            status = 504 if isinstance(error, TimeoutError) else 502
            bad = error if isinstance(error, wire.Bad) else wire.Bad(status, "no answer came")
            await client.parting(wire.answer(bad.status, f"{asked.host} port {asked.port}: {bad}"))
    else:
        await client.parting()


async def _answered(client: Flow, host: Flow, asked: wire.Request, said: asyncio.Event, count: Count) -> None:
    """The host's answer. `said` from its first byte on."""
    for _ in range(MOST_INTERIM):
        answer = wire.reply(await host.until(b"\r\n\r\n", HEAD), asked)
        if answer.status >= 200:
            break
        if asked.minor:
            await client.say(answer.head)
    else:
        raise wire.Bad(502, "the host does not come to an answer")
    said.set()
    await client.say(answer.head)
    count(len(answer.head))
    await body(host, client, answer.length, count)
