"""Client of a gateway's admin API. Runs in the process that started the gateway, and in runners.

Guarantees:
- an error response is raised with the gateway's message; a timeout is raised with the last error before it;
- a gateway that does not answer, fails or lost the session is fault `infra`; a request that it rejects is a bug;
- idempotent requests are repeated while shards restart;
- an attached listener is served until it is detached or this client is closed.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rookery.core import RookeryError, TruncatedReason, Turn
from rookery.gateway.http import read_error_message
from rookery.gateway.registry import owning_shard
from rookery.gateway.session_listeners import ListenerSender
from rookery.upstreams.hang_detector import UpstreamEvidence
from rookery.upstreams.http import Client, HttpClientError, encode_headers

T = TypeVar("T")

MAX_RESPONSE: Final = 1 << 30
MSGPACK: Final = "application/msgpack"
SESSION_LOST: Final = (404, 410)
MIN_RETRY_SECONDS: Final = 0.05
"""Delay before the first retry of an idempotent request; doubled up to a second."""


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address and admin key of a gateway. Passed between processes, but never written to disk."""

    host: str
    port: int
    key: str
    sockets: str
    """Directory of the Unix sockets on which shards receive listeners."""
    shards: int = 1
    public: str = ""
    """Base URL for programs on other machines; empty if they use the same as local ones."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of a session at the gateway, with or without its turns."""

    turns: tuple[Turn, ...] = ()
    truncated: TruncatedReason | None = None
    waited: float = 0.0
    """Seconds excluded from the session's deadline: pauses, and waiting in the upstream's queue."""
    turns_recorded: int = 0
    calls: int = 0
    """Number of model calls that were sent to an upstream, also of those that failed."""
    failure: str | None = None
    """Cause of the failure of the last model call; None if it succeeded."""


class _EvidenceResponse(msgspec.Struct, frozen=True):
    """The gateway's observations of the model servers that a session called."""

    evidence: tuple[UpstreamEvidence, ...] = ()


_examined = msgspec.json.Decoder(_EvidenceResponse).decode
_record = msgspec.msgpack.Decoder(SessionRecord).decode
_status = msgspec.json.Decoder(SessionRecord).decode


class GatewayError(RookeryError):
    """The gateway failed or has lost the session."""

    cause = "engine.gateway"


class NoResponseError(GatewayError):
    """The gateway did not answer, so it is unknown whether the request took effect."""


class GatewayClient:
    """Client of a gateway's admin API. Create and use it in one event loop."""

    def __init__(self, address: GatewayAddress) -> None:
        self.address = address
        self._client = Client(address.host, address.port)
        self._senders: dict[int, ListenerSender] = {}

    async def register(self, registration: dict[str, Any], *, timeout: float = 60.0) -> dict[str, str]:
        """Register a session. Returns its `id`, `base_url` and `secret`."""
        registered: dict[str, str] = await self.request("POST", "/rollouts", registration, timeout=timeout)
        return registered

    async def trajectory(self, session: str) -> dict[str, Any]:
        """Return the session's turns and segments as plain JSON data."""
        trajectory: dict[str, Any] = await self.request("GET", f"/rollouts/{session}/trajectory")
        return trajectory

    async def fetch_record(self, session: str, *, timeout: float = 60.0) -> SessionRecord:
        """Return the session's state with its turns, including token data."""
        body = await self._request_idempotent("GET", f"/rollouts/{session}/trajectory", timeout, accept=MSGPACK)
        return _decode(_record, body, f"record of {session}")

    async def status(self, session: str, *, timeout: float = 60.0) -> SessionRecord:
        """Return the session's state without its turns."""
        return _decode(
            _status, await self._request_idempotent("GET", f"/rollouts/{session}", timeout), f"status of {session}"
        )

    async def examine(self, session: str, *, timeout: float = 60.0) -> tuple[UpstreamEvidence, ...]:
        """Check whether the servers of its calls in flight hang. Returns this and earlier observations."""
        body = await self._request_idempotent("GET", f"/rollouts/{session}?examine=1", timeout)
        return _decode(_examined, body, f"evidence of {session}").evidence

    async def cancel(self, session: str, *, timeout: float = 60.0) -> None:
        """End the session: it accepts no more calls, and calls in flight are cancelled, up to the upstream."""
        await self._request_idempotent("POST", f"/rollouts/{session}/cancel", timeout)

    async def delete(self, session: str, *, timeout: float = 60.0) -> None:
        """End the session and delete its record."""
        await self._request_idempotent("DELETE", f"/rollouts/{session}", timeout)

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
        """Send a request to the admin API and return the decoded response. Raises on an error response."""
        try:
            async with asyncio.timeout(timeout):
                status, data = await self._send(method, path, body)
        except TimeoutError as error:
            raise NoResponseError(
                f"the gateway did not respond to {method} {path} within {timeout:g} s"
            ) from error
        except HttpClientError as error:
            raise NoResponseError(f"the gateway did not respond to {method} {path}: {error}") from error
        return _decode(msgspec.json.decode, _raise_for_status(status, data), f"response to {method} {path}")

    async def _request_idempotent(self, method: str, path: str, timeout: float, accept: str = "") -> bytes:
        """Send a request that may be repeated, and retry while a shard restarts."""
        wait, last = MIN_RETRY_SECONDS, ""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        status, data = await self._send(method, path, accept=accept)
                        if status < 500:
                            return _raise_for_status(status, data)
                        last = f"; last response {status}: {read_error_message(data)}"
                    except HttpClientError as error:
                        last = f"; last error: {error}"
                    await asyncio.sleep(wait)
                    wait = min(1.0, 2 * wait)
        except TimeoutError as error:
            raise NoResponseError(
                f"the gateway did not respond to {method} {path} within {timeout:g} s{last}"
            ) from error

    async def _send(self, method: str, path: str, body: Any = None, accept: str = "") -> tuple[int, bytes]:
        lines = {"Authorization": f"Bearer {self.address.key}", "Content-Type": "application/json"}
        if accept:
            lines["Accept"] = accept
        data = b"" if body is None else msgspec.json.encode(body)
        response = await self._client.send(method, path, encode_headers(lines), data)
        return response.status, await response.read(MAX_RESPONSE)

    async def attach_listener(self, session: str, listener: socket.socket) -> None:
        """Serve a session on its own listener, also after a restart of its shard."""
        shard = owning_shard(session, self.address.shards)
        sender = self._senders.get(shard)
        if sender is None:
            sender = self._senders[shard] = ListenerSender(Path(self.address.sockets), shard)
        await sender.attach(session, listener)

    def detach_listener(self, session: str) -> None:
        """Stop serving the session's listener."""
        sender = self._senders.get(owning_shard(session, self.address.shards))
        if sender is not None:
            sender.detach(session)

    async def close(self) -> None:
        """Detach all listeners and close the connections."""
        for sender in self._senders.values():
            await sender.close()
        self._senders.clear()
        await self._client.close()


def _raise_for_status(status: int, data: bytes) -> bytes:
    """Return the body of a successful response, or raise."""
    if status < 400:
        return data
    message = f"the gateway returned {status}: {read_error_message(data)}"
    raise GatewayError(message) if status >= 500 or status in SESSION_LOST else RookeryError(message)


def _decode(decode: Callable[[bytes], T], data: bytes, what: str) -> T:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RookeryError(f"cannot decode the gateway's {what}: {error}") from error
