"""Proxy through which the programs of a sandbox with the network `allow` reach allowed hosts.

It runs in the process that owns the sandbox and accepts connections on a socket inside the sandbox.

It accepts HTTP requests with absolute URLs, HTTP CONNECT and SOCKS5 on one port, distinguished by the first byte.

Guarantees:
- the proxy connects only to hosts that a rule in `allow` of the sandbox's spec permits. Each name is resolved
  once, here, and the proxy connects to the address that it checked; other requests are refused with a message
  that names the host, the port and the rules;
- every decision is counted in a bounded log;
- the number of connections per sandbox is limited, and sandboxes share the file descriptors of the process evenly;
  further connections wait in the kernel's backlog; requests, lookups and idle connections have a time limit;
- after `close`, or the death of the owner, no connection, task or socket is left.

CONNECT and SOCKS5 are tunnels: data to an allowed host and port is not inspected.
"""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import threading
from typing import Literal, NamedTuple

from rookery.sandboxes.egress import messages
from rookery.sandboxes.egress.byte_stream import (
    MAX_HEAD_BYTES,
    ByteStream,
    Count,
    StreamEnded,
    copy_all,
    copy_body,
)
from rookery.sandboxes.egress.rules import Address, EgressRules, Host, unwrap_ipv4_mapped
from rookery.sandboxes.protocol import EgressRecord

MAX_CONNECTIONS = 128
"""Largest number of open connections of one sandbox."""
MIN_CONNECTIONS = 4
"""Number of open connections that every sandbox may have, however many sandboxes there are."""
BACKLOG = 1024
REQUEST_SECONDS = 15.0
LOOKUP_SECONDS = 10.0
CONNECT_SECONDS = 15.0
IDLE_SECONDS = 300.0
MAX_LOOKUPS = 2
"""Number of parallel DNS lookups of one sandbox. The system's resolver can block a thread for a long time."""
MAX_TOTAL_LOOKUPS = 32
MAX_ADDRESSES = 4
"""Number of addresses of a host name to which a connection is tried."""
MAX_INTERIM_RESPONSES = 16
MAX_RECORDS = 256
log = logging.getLogger("rookery.sandboxes")

Verdict = Literal["allowed", "refused", "failed"]


class Resolver:
    """Resolves host names and opens connections to hosts, for the proxies of all sandboxes of a provider."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_TOTAL_LOOKUPS)
        self.proxies: set[EgressProxy] = set()

    async def resolve(self, name: str, port: int, slots: asyncio.Semaphore) -> list[Address]:
        """Resolve a host name in a thread. Return its addresses.

        `slots` limits the parallel lookups of the sandbox. A slot is released only when the thread ends, also if
        this call is cancelled.
        """
        loop = asyncio.get_running_loop()
        promise: asyncio.Future[list[Address]] = loop.create_future()

        def finish(found: list[Address], error: OSError | None) -> None:
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
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(finish, found, error)

        await slots.acquire()
        try:
            await self.slots.acquire()
        except BaseException:
            slots.release()
            raise
        threading.Thread(target=look, name="rookery-lookup", daemon=True).start()
        return await promise

    def look_up(self, name: str, port: int) -> list[Address]:
        """Return the addresses of a host name. Blocking."""
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
    reason: str


class EgressLog:
    """Counts the connections that a sandbox requested, by host, port and outcome.

    For each verdict it holds at most `MAX_RECORDS` records; further hosts are counted together.
    """

    def __init__(self, sandbox_id: str) -> None:
        self._sandbox_id = sandbox_id
        self._seen: dict[_Key, list[int]] = {}

    def note(self, host: Host, port: int, verdict: Verdict, reason: str = "") -> list[int]:
        """Count a requested connection. Return its counters: requests, bytes sent, bytes received.

        The caller adds the bytes.
        """
        key = _Key(str(host), port, verdict, reason)
        known = self._seen.get(key)
        if known is None and sum(one.verdict == verdict for one in self._seen) >= MAX_RECORDS:
            key = _Key("…", 0, verdict, "hosts beyond the limit of the log")
            known = self._seen.get(key)
        level = logging.DEBUG if known else logging.INFO  # repeated requests must not fill the log file
        log.log(
            level,
            "sandbox %s: %s %s:%d%s",
            self._sandbox_id,
            verdict,
            host,
            port,
            f" ({reason})" if reason else "",
        )
        known = self._seen.setdefault(key, [0, 0, 0])
        known[0] += 1
        return known

    def list_records(self) -> tuple[EgressRecord, ...]:
        return tuple(
            EgressRecord(
                host=k.host, port=k.port, verdict=k.verdict, reason=k.reason, count=n, sent=out, received=back
            )
            for k, (n, out, back) in self._seen.items()
        )


class EgressProxy:
    """The proxy of one sandbox, from `start` to `close`."""

    def __init__(self, listener: socket.socket, rules: EgressRules, sandbox_id: str, resolver: Resolver) -> None:
        self._listener = listener
        self._rules = rules
        self._resolver = resolver
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)
        self._free = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.log = EgressLog(sandbox_id)

    @property
    def connections(self) -> int:
        """The number of connections that the proxy serves."""
        return len(self._tasks)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._resolver.proxies.add(self)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        """Close all connections and the listener."""
        self._resolver.proxies.discard(self)
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._listener.close()
        for other in self._resolver.proxies:
            other._free.set()  # the other sandboxes may have more connections now

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        level = logging.WARNING
        while True:
            while len(self._tasks) >= connection_limit(len(self._resolver.proxies)):
                self._free.clear()
                await self._free.wait()
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # Most likely no file descriptors are left; the connection waits in the backlog.
                log.log(level, "the egress proxy cannot accept a connection of a sandbox: %s", error)
                level = logging.DEBUG
                await asyncio.sleep(0.2)
                continue
            level = logging.WARNING
            sock.setblocking(False)
            task = loop.create_task(self.serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._free.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the egress proxy failed on a connection of a sandbox", exc_info=error)

    async def serve(self, sock: socket.socket) -> None:
        client = ByteStream(sock)
        try:
            with contextlib.suppress(StreamEnded, OSError):  # the client closed or reset the connection
                await self._handle(client)
        finally:
            sock.close()

    async def _handle(self, client: ByteStream) -> None:
        socks = False
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                first = await client.peek()
                socks = first == messages.SOCKS
                if socks:
                    host, port = await self._read_socks_request(client)
                    request = None
                elif bytes((first,)).isalpha():
                    request = messages.parse_request(await client.read_until(b"\r\n\r\n", MAX_HEAD_BYTES))
                    host, port = request.host, request.port
                else:
                    raise messages.BadRequest(400, "this is a proxy for HTTP and SOCKS5")
        except (messages.BadRequest, TimeoutError) as error:
            status, reason = (
                (error.status, str(error))
                if isinstance(error, messages.BadRequest)
                else (408, "no request arrived in time")
            )
            self.log.note("?", 0, "refused", "the request was malformed")
            await self._send_error(client, status, reason, socks=socks)
            return
        try:
            sock, counters = await self._connect(host, port)
        except messages.BadRequest as bad:
            await self._send_error(client, bad.status, str(bad), socks=socks)
            return
        try:
            if request is None or request.method == b"CONNECT":
                await client.send(messages.build_socks_reply(200) if socks else messages.CONNECTED)
                await _tunnel(client, ByteStream(sock), counters)
            else:
                await _forward(client, ByteStream(sock), request, counters)
        finally:
            sock.close()

    async def _send_error(self, client: ByteStream, status: int, reason: str, *, socks: bool) -> None:
        await client.close_gracefully(
            messages.build_socks_reply(status) if socks else messages.build_error(status, reason)
        )

    async def _read_socks_request(self, client: ByteStream) -> tuple[Host, int]:
        _, count = await client.read_exactly(2)
        if 0 not in await client.read_exactly(count):
            await client.send(messages.SOCKS_NO_ACCEPTABLE_METHOD)
            raise StreamEnded
        await client.send(messages.SOCKS_NO_AUTHENTICATION)
        version, what, _, kind = await client.read_exactly(4)
        if version != messages.SOCKS or what != 1 or kind not in (1, 3, 4):
            raise messages.BadRequest(400, "only the SOCKS5 command CONNECT is supported")
        size = (await client.read_exactly(1))[0] if kind == 3 else 4 if kind == 1 else 16
        data = await client.read_exactly(size)
        port = int.from_bytes(await client.read_exactly(2), "big")
        return messages.parse_socks_host(kind, data), port

    # ---- decisions

    async def _connect(self, host: Host, port: int) -> tuple[socket.socket, list[int]]:
        """Connect to a host. Return the socket and the counters of the log record.

        Raise `BadRequest` if the rules do not allow the host or the connection fails.
        """
        if not self._rules.allow(host, port):
            raise self._refusal(host, port, "no rule allows it")
        try:
            addresses = [host] if not isinstance(host, str) else await self._look_up(host, port)
        except (TimeoutError, OSError) as error:
            raise self._failure(host, port, "its name cannot be resolved", error) from None
        usable = [address for address in addresses if self._rules.allow_address(host, address, port)]
        if not usable:
            where = ", ".join(map(str, addresses[:MAX_ADDRESSES]))
            raise self._refusal(host, port, f"its address is not public ({where})")
        try:
            sock = await self._dial(usable, port)
        except (TimeoutError, OSError) as error:
            raise self._failure(host, port, "it cannot be reached", error) from None
        return sock, self.log.note(host, port, "allowed")

    def _refusal(self, host: Host, port: int, reason: str) -> messages.BadRequest:
        self.log.note(host, port, "refused", reason)
        return messages.BadRequest(
            403, f"{host} port {port} is refused: {reason}. Allowed: {self._rules.describe()}"
        )

    def _failure(self, host: Host, port: int, reason: str, error: Exception) -> messages.BadRequest:
        self.log.note(host, port, "failed", reason)
        detail = "timed out" if isinstance(error, TimeoutError) else str(error)
        return messages.BadRequest(
            504 if isinstance(error, TimeoutError) else 502, f"{host} port {port}: {reason} ({detail})"
        )

    async def _look_up(self, name: str, port: int) -> list[Address]:
        async with asyncio.timeout(LOOKUP_SECONDS):
            found = await self._resolver.resolve(name, port, self._lookups)
        if not found:
            raise OSError("the host name has no address")
        return [unwrap_ipv4_mapped(address) for address in dict.fromkeys(found)]

    async def _dial(self, addresses: list[Address], port: int) -> socket.socket:
        last: OSError = OSError("the host name has no address")
        async with asyncio.timeout(CONNECT_SECONDS):
            for address in addresses[:MAX_ADDRESSES]:
                try:
                    return await self._resolver.dial(address, port)
                except OSError as error:
                    last = error
        raise last


def connection_limit(count: int) -> int:
    """Return how many connections each of `count` sandboxes may have.

    Together they may have a quarter of the process's limit of open files. Each sandbox may have at least
    `MIN_CONNECTIONS` and at most `MAX_CONNECTIONS`.
    """
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 1 << 14)
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, most // max(1, count)))


def _make_counter(counters: list[int], at: int, clock: asyncio.Timeout) -> Count:
    """Return a callback that adds a number of bytes to `counters[at]` and restarts the idle timeout `clock`."""
    loop = asyncio.get_running_loop()

    def count(size: int) -> None:
        counters[at] += size
        if not clock.expired():
            clock.reschedule(loop.time() + IDLE_SECONDS)

    return count


async def _cancel_all(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _tunnel(client: ByteStream, host: ByteStream, counters: list[int]) -> None:
    """Copy bytes in both directions until both ends are closed, one is reset, or no data flows for too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(IDLE_SECONDS) as clock:
            out = asyncio.create_task(copy_all(client, host, _make_counter(counters, 1, clock)))
            back = asyncio.create_task(copy_all(host, client, _make_counter(counters, 2, clock)))
            try:
                await asyncio.wait((out, back), return_when=asyncio.FIRST_EXCEPTION)
            finally:
                await _cancel_all(out, back)


async def _forward(
    client: ByteStream, host: ByteStream, request: messages.ProxyRequest, counters: list[int]
) -> None:
    """Forward one HTTP request to the host and its response to the client.

    The response may begin before the request is complete.
    """
    started = asyncio.Event()
    try:
        async with asyncio.timeout(IDLE_SECONDS) as clock:
            head = messages.build_request(request)
            await host.send(head)
            counters[1] += len(head)
            out = asyncio.create_task(copy_body(client, host, request.length, _make_counter(counters, 1, clock)))
            back = asyncio.create_task(
                _forward_response(client, host, request, started, _make_counter(counters, 2, clock))
            )
            try:
                await asyncio.wait((out, back), return_when=asyncio.FIRST_COMPLETED)
                if not back.done() and (out.exception() is None or isinstance(out.exception(), OSError)):
                    await asyncio.wait((back,))  # a server may respond without reading the whole request
                (back if back.done() else out).result()
            finally:
                await _cancel_all(out, back)
    except (messages.BadRequest, StreamEnded, OSError) as error:  # `TimeoutError` is an `OSError`
        if not started.is_set():
            status = 504 if isinstance(error, TimeoutError) else 502
            bad = (
                error
                if isinstance(error, messages.BadRequest)
                else messages.BadRequest(status, "the host sent no response")
            )
            await client.close_gracefully(
                messages.build_error(bad.status, f"{request.host} port {request.port}: {bad}")
            )
    else:
        await client.close_gracefully()


async def _forward_response(
    client: ByteStream, host: ByteStream, request: messages.ProxyRequest, started: asyncio.Event, count: Count
) -> None:
    """Forward the host's response to the client. `started` is set before the final (not interim) head is sent."""
    for _ in range(MAX_INTERIM_RESPONSES):
        answer = messages.parse_response(await host.read_until(b"\r\n\r\n", MAX_HEAD_BYTES), request)
        if answer.status >= 200:
            break
        if request.http_minor:
            await client.send(answer.head)
    else:
        raise messages.BadRequest(502, "the host sent too many interim responses")
    started.set()
    await client.send(answer.head)
    count(len(answer.head))
    await copy_body(host, client, answer.length, count)
