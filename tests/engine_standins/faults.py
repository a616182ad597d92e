"""Fault injection: a server that dies, stalls, or sends garbage or half an event. Off by default.

Behaviour:
- a fault affects the next `count` requests whose path matches, and no other request;
- bytes are counted from the first byte of the response head, so a response can be cut at any byte;
- events are counted per stream: a fault after `n` events happens before event `n + 1` is sent;
- a fault can kill only a process that was started to be killed, never the process of a test.
"""

import asyncio
import os
import signal
import socket
import struct
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

Then: TypeAlias = Literal["die", "reset", "stall", "garbage", "half_event", "end", "kill"]
GARBAGE: Final = b'data: {"choices": [{"inde\x00\xff\xfe not JSON at all\n\n'
STALL_SECONDS: Final = 600.0
GENERATING: Final = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/generate")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault for the next `count` requests whose path begins with `path`."""

    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    path: str = ""
    """Empty for all endpoints that sample."""
    skip: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of matching requests before them that are served normally."""
    status: Annotated[int, msgspec.Meta(ge=200, le=599)] | None = None
    """Status that is returned at once, without reading the request."""
    body: str = ""
    """Body of the response with `status`; empty for an error object."""
    headers: dict[str, str] = {}
    refuse: bool = False
    """True if the connection is reset instead of answering."""
    after_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    after_events: Annotated[int, msgspec.Meta(ge=0)] | None = None
    then: Then = "die"
    """`die`: close the connection inside the response, as when a server dies. `reset`: the same with a RST, which
    may overtake data that was sent. `stall`: send nothing more. `garbage`: send bytes that are not an event, then
    end. `half_event`: send half of the next event, then end the response cleanly, so that HTTP considers it
    complete. `end`: the same after whole events. `kill`: send SIGKILL to the server."""
    seconds: Annotated[float, msgspec.Meta(gt=0, le=STALL_SECONDS)] = STALL_SECONDS
    """Seconds for which a stall lasts; then the connection ends."""

    def __post_init__(self) -> None:
        if self.after_bytes is not None and self.after_events is not None:
            raise ValueError("a fault has after_bytes or after_events, not both")
        if self.after_bytes is not None and self.then in ("half_event", "end"):
            raise ValueError(f"{self.then} needs after_events")

    def fits(self, path: str) -> bool:
        return path.startswith(self.path) if self.path else path in GENERATING


class FaultPlan:
    """The pending faults, in order of injection."""

    def __init__(self, *, mortal: bool = False) -> None:
        self._mortal = mortal
        self._left: list[tuple[Fault, int, int]] = []
        """Each fault, the number of requests that it still skips, and the number that it still affects."""
        self.happened = 0

    def add(self, fault: Fault) -> None:
        if fault.then == "kill" and not self._mortal:
            raise ValueError("this stand-in runs in the process of the test, which must not be killed")
        self._left.append((fault, fault.skip, fault.count))

    def clear(self) -> None:
        self._left.clear()

    def listed(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(fault) | {"left": left} for fault, _, left in self._left]

    def take(self, path: str) -> Fault | None:
        for index, (fault, skip, left) in enumerate(self._left):
            if not fault.fits(path):
                continue
            if skip:
                self._left[index] = (fault, skip - 1, left)
                return None
            if left == 1:
                del self._left[index]
            else:
                self._left[index] = (fault, 0, left - 1)
            self.happened += 1
            return fault
        return None


class FaultyTransport:
    """A transport that sends a limited number of bytes and forwards everything else to the real one."""

    def __init__(self, transport: asyncio.Transport, fault: Fault) -> None:
        self._transport = transport
        self._fault = fault
        self._left = fault.after_bytes or 0
        self.triggered = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.triggered:
            return
        data = bytes(data)
        if len(data) <= self._left:
            self._left -= len(data)
            self._transport.write(data)
            return
        self.triggered = True
        self._transport.write(data[: self._left])
        strike(self._transport, self._fault)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))


def strike(transport: asyncio.Transport, fault: Fault) -> None:
    """Apply the fault. Bytes written before are sent first, unless the process is killed."""
    if fault.then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.then == "stall":
        return
    elif fault.then == "garbage":
        transport.write(GARBAGE)
        transport.close()
    elif fault.then == "reset":
        reset(transport)
    else:
        transport.close()


def reset(transport: asyncio.Transport) -> None:
    """Reset the connection (RST) instead of closing it after all data was sent."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
