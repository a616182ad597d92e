"""Client of a gateway's admin API, which manages sessions. Runs in the process that started the gateway, and in
runners.

Guarantees:
- an error response raises an exception with the gateway's message. The exception for a timeout includes the last
  error before it, if the request was repeated;
- a gateway that does not answer, fails or has lost the session counts as a failure of the infrastructure
  (`GatewayError`); a request that the gateway rejects counts as a bug (`RookeryError`);
- idempotent requests are repeated until their timeout while a shard is being restarted;
- an attached listener (the listening socket of one session) is served until it is detached or this client closes.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from rookery.core import RookeryError, TruncatedReason, Turn
from rookery.gateway.http_messages import read_error_message
from rookery.gateway.listener_forwarder import ForwardTarget, ListenerForwarder
from rookery.gateway.registry import owning_shard
from rookery.gateway.session_listeners import ListenerSender
from rookery.telemetry.exposition import SNAPSHOT_TYPE
from rookery.telemetry.metrics import Snapshot, decode_snapshot
from rookery.upstreams.hang_detector import UpstreamEvidence
from rookery.upstreams.http_client import Client, HttpClientError, encode_headers

T = TypeVar("T")

MAX_RESPONSE: Final = 1 << 30
MSGPACK: Final = "application/msgpack"
SESSION_LOST: Final = (404, 410)
MIN_RETRY_SECONDS: Final = 0.05
"""Delay before the first retry of an idempotent request. It doubles with each retry, up to one second."""


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Address and admin key of a gateway. Passed between processes, but never written to disk."""

    host: str
    port: int
    key: str
    sockets: str
    """Directory of the Unix sockets on which the shards receive listening sockets of sandboxes. Empty if the
    gateway was not started by this run and may be on another machine."""
    tls: bool = False
    prefix: str = ""
    """Path before the paths of the gateway, if a reverse proxy serves it there."""
    shards: int = 1
    public: str = ""
    """URL of the gateway for programs on other machines; empty if they use the same URL as programs on this
    one."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of a session at the gateway. `turns` is empty if only the status was fetched.

    `truncated` says which budget is exhausted (None: no budget is), and `turns_recorded` is the number of turns.
    """

    turns: tuple[Turn, ...] = ()
    truncated: TruncatedReason | None = None
    waited: float = 0.0
    """Seconds that do not count against the session's deadline: pauses, and waits in the inference engine's
    queue."""
    turns_recorded: int = 0
    calls: int = 0
    """Number of model calls that were sent to an inference engine, including those that failed."""
    failure: str | None = None
    """Cause code of the failure of the last model call, such as `upstream.timeout`; None if the call succeeded."""


class _EvidenceResponse(msgspec.Struct, frozen=True):
    """The gateway's observations of replicas that did not answer calls of a session."""

    evidence: tuple[UpstreamEvidence, ...] = ()


_examined = msgspec.json.Decoder(_EvidenceResponse).decode
_record = msgspec.msgpack.Decoder(SessionRecord).decode
_status = msgspec.json.Decoder(SessionRecord).decode


class GatewayError(RookeryError):
    """The gateway failed, did not answer or has lost the session.

    This counts as a failure of the infrastructure, not as a bug of the caller.
    """

    cause = "engine.gateway"


class NoResponseError(GatewayError):
    """The gateway did not answer, so it is unknown whether the request took effect."""


class GatewayClient:
    """Client of a gateway's admin API, which manages sessions. Create and use it in one event loop.

    Methods raise `GatewayError` if the gateway fails, does not answer or has lost the session, and `RookeryError`
    if it rejects the request.
    """

    def __init__(self, address: GatewayAddress) -> None:
        self.address = address
        self._client = Client(address.host, address.port, ssl=address.tls)
        self._senders: dict[int, ListenerSender] = {}
        self._forwarder = ListenerForwarder(
            ForwardTarget(host=address.host, port=address.port, tls=address.tls, prefix=address.prefix)
        )

    async def register(self, registration: dict[str, Any], *, timeout: float = 60.0) -> dict[str, str]:
        """Register a session with these options (`Registration`). Returns its `id`, `base_url` and `secret`."""
        registered: dict[str, str] = await self.request("POST", "/rollouts", registration, timeout=timeout)
        return registered

    async def trajectory(self, session: str) -> dict[str, Any]:
        """Return the session's state, turns and segments (token sequences for training) as plain JSON data."""
        trajectory: dict[str, Any] = await self.request("GET", f"/rollouts/{session}/trajectory")
        return trajectory

    async def fetch_record(self, session: str, *, timeout: float = 60.0) -> SessionRecord:
        """Return the session's state with its turns, including their token IDs and logprobs."""
        body = await self._request_idempotent("GET", f"/rollouts/{session}/trajectory", timeout, accept=MSGPACK)
        return _decode(_record, body, f"record of {session}")

    async def status(self, session: str, *, timeout: float = 60.0) -> SessionRecord:
        """Return the session's state without its turns."""
        return _decode(
            _status, await self._request_idempotent("GET", f"/rollouts/{session}", timeout), f"status of {session}"
        )

    async def examine(self, session: str, *, timeout: float = 60.0) -> tuple[UpstreamEvidence, ...]:
        """Have the gateway check whether the replicas of the session's calls in flight hang.

        Returns the observations of this check and of earlier ones.
        """
        body = await self._request_idempotent("GET", f"/rollouts/{session}?examine=1", timeout)
        return _decode(_examined, body, f"evidence of {session}").evidence

    async def cancel(self, session: str, *, timeout: float = 60.0) -> None:
        """End the session but keep its record. It accepts no more calls; calls in flight are cancelled."""
        await self._request_idempotent("POST", f"/rollouts/{session}/cancel", timeout)

    async def delete(self, session: str, *, timeout: float = 60.0) -> None:
        """End the session, cancel its calls in flight, and delete its record."""
        await self._request_idempotent("DELETE", f"/rollouts/{session}", timeout)

    async def read_metrics(self, *, timeout: float = 10.0) -> Snapshot:
        """Return the metrics of all shards of the gateway."""
        body = await self._request_idempotent("GET", "/metrics", timeout, accept=SNAPSHOT_TYPE)
        return _decode(decode_snapshot, body, "metrics")

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
        """Send one request to the admin API, without retries, and return the decoded JSON response.

        Raises `NoResponseError` if no response arrives within `timeout` seconds, and `GatewayError` or
        `RookeryError` for an error response.
        """
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
        """Send an idempotent request, and return the body of the response.

        After status 5xx or a lost connection, it is repeated until `timeout` seconds have passed. Then
        `NoResponseError` is raised.
        """
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
        response = await self._client.send(method, self.address.prefix + path, encode_headers(lines), data)
        return response.status, await response.read(MAX_RESPONSE)

    async def attach_listener(self, session: str, listener: socket.socket) -> None:
        """Have the gateway serve a session on a listening socket, for example one inside a sandbox.

        A gateway that this run did not start gets the connections forwarded. The socket stays attached when the
        gateway restarts the session's shard. It is closed by `detach_listener`.
        """
        if not self.address.sockets:
            await self._forwarder.attach(session, listener)
            return
        shard = owning_shard(session, self.address.shards)
        sender = self._senders.get(shard)
        if sender is None:
            sender = self._senders[shard] = ListenerSender(Path(self.address.sockets), shard)
        await sender.attach(session, listener)

    def detach_listener(self, session: str) -> None:
        """Stop serving the session on its listening socket, and close the socket. Does nothing if it has none."""
        self._forwarder.detach(session)
        sender = self._senders.get(owning_shard(session, self.address.shards))
        if sender is not None:
            sender.detach(session)

    async def close(self) -> None:
        """Detach all listening sockets and close the connections to the gateway."""
        await self._forwarder.close()
        for sender in self._senders.values():
            await sender.close()
        self._senders.clear()
        await self._client.close()


def _raise_for_status(status: int, data: bytes) -> bytes:
    """Return the body if the status is below 400.

    Otherwise raise `GatewayError` for status 5xx, 404 and 410, and `RookeryError` for any other.
    """
    if status < 400:
        return data
    message = f"the gateway returned {status}: {read_error_message(data)}"
    raise GatewayError(message) if status >= 500 or status in SESSION_LOST else RookeryError(message)


def _decode(decode: Callable[[bytes], T], data: bytes, what: str) -> T:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RookeryError(f"cannot decode the gateway's {what}: {error}") from error
