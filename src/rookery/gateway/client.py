"""A gateway's admin side, for programs that have its key: the process that started it, and a run's runners.

Promises:
- what the gateway says is wrong is raised, in its words; one that does not answer in time is said to be so, with
  what it said or failed with last;
- a gateway that is silent, fails or lost the session is infra; only a request that it refuses is a bug;
- while shards start again, what can be asked twice is asked again;
- a listener that was handed over is served until it is taken back or this client closes;
- closing takes back every listener.
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

MAX_ANSWER: Final = 1 << 30
MSGPACK: Final = "application/msgpack"
SESSION_LOST: Final = (404, 410)
AGAIN_SECONDS: Final = 0.05
"""Before a gateway that was not reached is asked again; doubled up to a second."""


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway is and what opens it. Holds its key: it is told to processes, and written nowhere."""

    host: str
    port: int
    key: str
    sockets: str
    """The folder where its shards take listeners."""
    shards: int = 1
    public: str = ""
    """As programs on other machines write it, where they have a way of their own."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a session did, as far as it got. What a gateway does not say is what it was before."""

    turns: tuple[Turn, ...] = ()
    truncated: TruncatedReason | None = None
    waited: float = 0.0
    """Seconds that were not the session's own: pauses, and waiting for a place at the upstream."""
    turns_recorded: int = 0
    calls: int = 0
    """Model calls that were sent to an upstream, whether or not they were answered."""
    failure: str | None = None
    """The cause of the last call's failure at the upstream; None if that call was answered."""


class _EvidenceResponse(msgspec.Struct, frozen=True):
    """What the gateway saw of the model servers of a session."""

    evidence: tuple[UpstreamEvidence, ...] = ()


_examined = msgspec.json.Decoder(_EvidenceResponse).decode
_record = msgspec.msgpack.Decoder(SessionRecord).decode
_status = msgspec.json.Decoder(SessionRecord).decode


class GatewayError(RookeryError):
    """The gateway failed, or no longer has the session."""

    cause = "engine.gateway"


class NoResponseError(GatewayError):
    """The gateway did not answer in time: it is not known whether it did what it was asked for."""


class GatewayClient:
    """One process's connections to a gateway. Built and used in one event loop."""

    def __init__(self, address: GatewayAddress) -> None:
        self.address = address
        self._client = Client(address.host, address.port)
        self._senders: dict[int, ListenerSender] = {}

    async def register(self, registration: dict[str, Any], *, timeout: float = 60.0) -> dict[str, str]:
        """A session: its id, base URL and secret."""
        said: dict[str, str] = await self.request("POST", "/rollouts", registration, timeout=timeout)
        return said

    async def trajectory(self, session: str) -> dict[str, Any]:
        said: dict[str, Any] = await self.request("GET", f"/rollouts/{session}/trajectory")
        return said

    async def fetch_record(self, session: str, *, timeout: float = 60.0) -> SessionRecord:
        """The same with token data as it was recorded."""
        body = await self._request_idempotent("GET", f"/rollouts/{session}/trajectory", timeout, accept=MSGPACK)
        return _decode(_record, body, f"record of {session}")

    async def status(self, session: str, *, timeout: float = 60.0) -> SessionRecord:
        """How far it is, without its turns."""
        return _decode(
            _status, await self._request_idempotent("GET", f"/rollouts/{session}", timeout), f"status of {session}"
        )

    async def examine(self, session: str, *, timeout: float = 60.0) -> tuple[UpstreamEvidence, ...]:
        """Whether the servers of its calls under way hang, and what was seen of them before."""
        body = await self._request_idempotent("GET", f"/rollouts/{session}?examine=1", timeout)
        return _decode(_examined, body, f"evidence of {session}").evidence

    async def cancel(self, session: str, *, timeout: float = 60.0) -> None:
        """It takes no more calls; those under way are cancelled, up to the upstream."""
        await self._request_idempotent("POST", f"/rollouts/{session}/cancel", timeout)

    async def delete(self, session: str, *, timeout: float = 60.0) -> None:
        """Its record goes too."""
        await self._request_idempotent("DELETE", f"/rollouts/{session}", timeout)

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
        """One of the admin's addresses; raises what it says is wrong."""
        try:
            async with asyncio.timeout(timeout):
                status, answer = await self._send(method, path, body)
        except TimeoutError as error:
            raise NoResponseError(
                f"the gateway did not respond to {method} {path} within {timeout:g} s"
            ) from error
        except HttpClientError as error:
            raise NoResponseError(f"the gateway did not respond to {method} {path}: {error}") from error
        return _decode(msgspec.json.decode, _raise_for_status(status, answer), f"answer to {method} {path}")

    async def _request_idempotent(self, method: str, path: str, timeout: float, accept: str = "") -> bytes:
        """For what may be asked twice: a shard that starts again is waited for."""
        wait, last = AGAIN_SECONDS, ""
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        status, answer = await self._send(method, path, accept=accept)
                        if status < 500:
                            return _raise_for_status(status, answer)
                        last = f"; it last said {status}: {read_error_message(answer)}"
                    except HttpClientError as error:
                        last = f"; it last failed with: {error}"
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
        return response.status, await response.read(MAX_ANSWER)

    async def attach_listener(self, session: str, listener: socket.socket) -> None:
        """Serves a session at a listener of its own; kept, and handed over again after a restart."""
        shard = owning_shard(session, self.address.shards)
        sender = self._senders.get(shard)
        if sender is None:
            sender = self._senders[shard] = ListenerSender(Path(self.address.sockets), shard)
        await sender.attach(session, listener)

    def detach_listener(self, session: str) -> None:
        """Ends what `hand` began."""
        sender = self._senders.get(owning_shard(session, self.address.shards))
        if sender is not None:
            sender.detach(session)

    async def close(self) -> None:
        for sender in self._senders.values():
            await sender.close()
        self._senders.clear()
        await self._client.close()


def _raise_for_status(status: int, answer: bytes) -> bytes:
    if status < 400:
        return answer
    said = f"the gateway answers {status}: {read_error_message(answer)}"
    raise GatewayError(said) if status >= 500 or status in SESSION_LOST else RookeryError(said)


def _decode(decode: Callable[[bytes], T], answer: bytes, what: str) -> T:
    try:
        return decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RookeryError(f"the gateway's {what} cannot be read: {error}") from error
