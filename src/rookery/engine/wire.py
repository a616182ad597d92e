"""What supervisor and runners say to each other: length-prefixed msgpack, one coalesced write per loop tick.

Promises:
- a frame is at most `MAX_FRAME` bytes, and a longer one is refused before it is read;
- messages of one tick leave in one write, in order;
- whatever an environment kept or logged is plain and bounded in the message about it, so that it can be encoded.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec
from msgspec.structs import force_setattr

from rookery.core import CancelledReason, Extent, Limits, Outcome, RookeryError, SandboxSpec, Task, Timing, Usage
from rookery.core.errors import encodable
from rookery.engine.plain import plain_data, plain_numbers
from rookery.environments.loading import EnvironmentRef
from rookery.gateway.client import GatewayAddress
from rookery.gateway.session import Record
from rookery.upstreams.protocol import PauseMode, UpstreamConfig

MAX_FRAME = 256 << 20
NOT_ISOLATED = "sandbox.not_isolated"
"""The event for programs that run without walls; each process tells it, a run keeps it once."""
NO_TOKENS = "upstream.no_tokens"
"""Event: the policy's server returns no token IDs. Each runner process sends it once, a run records it once."""
_HEAD = struct.Struct("<I")


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runner needs to know about its run. Holds no key: `UpstreamConfig.key_env` names where it is."""

    run: str
    folder: str
    environment: EnvironmentRef
    upstreams: dict[str, UpstreamConfig]
    """By model role; always holds `policy`."""
    sandbox: SandboxSpec
    limits: Limits
    share: int = 1
    """One part in so many of each upstream's places is this runner's."""
    warm: int = 0
    """Sandboxes to have ready ahead of need, in all runners together, where making one takes long."""
    block_warning: float = 1.0
    record: Record = "messages"
    rendering: dict[str, Any] = {}
    public: str = ""
    """The gateway's address as other machines write it, or where a tunnel to it leads."""
    gateway_listen: str = ""


# ---- to a runner


class Hello(msgspec.Struct, frozen=True, tag=0, array_like=True):
    settings: RunSettings
    writer: str
    pause: PauseMode | None = None
    """Held back from the start: there is a pause."""
    version: int | None = None
    """Of the policy, as of the last weight sync; None: as the upstream says."""
    gateway: GatewayAddress | None = None
    """The run's own, where its environment opens doors."""


class Start(msgspec.Struct, frozen=True, tag=1, array_like=True):
    attempt: str
    number: int
    seed: int
    task: Task
    queued: float = 0.0
    """Seconds it has waited for a runner."""
    avoid: tuple[str, ...] = ()
    """Model replicas that earlier attempts of this rollout found hung."""


class Cancel(msgspec.Struct, frozen=True, tag=2, array_like=True):
    attempt: str
    reason: CancelledReason


class Pause(msgspec.Struct, frozen=True, tag=3, array_like=True):
    number: int
    mode: PauseMode = "drain"
    timeout: float = 60.0
    """Seconds for calls under way to end, before they are aborted."""


class Resume(msgspec.Struct, frozen=True, tag=4, array_like=True):
    version: int | None = None
    """The policy's from now on; None: as before."""


class Stop(msgspec.Struct, frozen=True, tag=5, array_like=True):
    pass


class Soon(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """What will begin at this runner, the first first; what this does not name will not."""

    wanted: list[tuple[str, int]]
    """Tasks by id, and how many rollouts."""
    tasks: list[Task]
    """Those that the word before this one did not name."""


# ---- from a runner


class Ready(msgspec.Struct, frozen=True, tag=0, array_like=True):
    pid: int


class Unfit(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The environment cannot be loaded, or the disk cannot be written: no rollout can run here."""

    detail: str
    traceback: str
    disk: bool = False

    def __post_init__(self) -> None:
        force_setattr(self, "detail", encodable(self.detail))
        force_setattr(self, "traceback", encodable(self.traceback))


class Done(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """One ended attempt."""

    attempt: str
    outcome: Outcome
    started: float
    ended: float
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    info: dict[str, Any] = {}
    usage: Usage = Usage()
    timing: Timing = Timing()
    tokens: tuple[Extent, ...] = ()
    policy_loss: bool = False
    minimum: float = 0.0
    """The lowest reward of the environment's range."""
    evidence: dict[str, Any] = {}
    """Observations that decided the outcome, as in `Attempt`."""
    tainted: bool = False
    """Work of this attempt could not be stopped: the runner must be replaced when its others are done."""

    def __post_init__(self) -> None:
        for name in ("info", "metrics"):  # an environment may have put anything in their place
            if type(getattr(self, name)) is not dict:
                force_setattr(self, name, plain_data(getattr(self, name)))


class Note(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """An event for the journal."""

    kind: str
    payload: dict[str, Any]


class Beat(msgspec.Struct, frozen=True, tag=4, array_like=True):
    pass


class Paused(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """No model call is under way any more, or why that cannot be."""

    number: int
    trouble: str = ""


class Blocked(msgspec.Struct, frozen=True, tag=6, array_like=True):
    """The watchdog's word, over its own pipe: the loop has not turned for this long."""

    seconds: float
    attempt: str | None
    stack: str


class Image(msgspec.Struct, frozen=True, tag=7, array_like=True):
    """How far the making of an image is, in bytes."""

    image: str
    step: str
    done: int = 0
    total: int = 0


ToRunner: TypeAlias = Hello | Start | Cancel | Pause | Resume | Stop | Soon
FromRunner: TypeAlias = Ready | Unfit | Done | Note | Beat | Paused | Blocked | Image


def plain(done: Done) -> Done:
    """The same with what its environment kept as plain data, so that every encoder takes it."""
    metrics, others = plain_numbers(done.metrics)
    info = plain_data(done.info)
    if others:  # shown where it can be shown, never dropped in silence
        info["metrics that are no numbers"] = others
    return msgspec.structs.replace(done, info=info, metrics=metrics, rewards=plain_numbers(done.rewards)[0])


def plain_event(fields: dict[str, Any]) -> dict[str, Any]:
    """What an event tells, as plain data."""
    return plain_data(fields)


encoder = msgspec.msgpack.Encoder()
to_runner = msgspec.msgpack.Decoder(ToRunner)
from_runner = msgspec.msgpack.Decoder(FromRunner)


class WireError(RookeryError):
    """The other end does not speak our protocol."""


class Wire(asyncio.Protocol):
    """Frames over a transport. `before_write` runs ahead of each write, for what must be on disk first."""

    def __init__(
        self,
        decoder: "msgspec.msgpack.Decoder[Any]",
        on_message: Callable[[Any], None],
        on_lost: Callable[[BaseException | None], None],
        before_write: Callable[[], None] | None = None,
    ) -> None:
        self._decode = decoder.decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._before_write = before_write
        self.limit = MAX_FRAME
        self._in = bytearray()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._scheduled = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, message: object, *, limit: int | None = None) -> None:
        """Send a message with the other messages of this tick; one of more than `limit` bytes is a `WireError`."""
        data = encoder.encode(message)
        if limit is not None and len(data) > limit:
            raise WireError(f"a message of {len(data):,} bytes is longer than the {limit:,} that a frame may have")
        self._out.append(_HEAD.pack(len(data)))
        self._out.append(data)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def unsend(self) -> None:
        """Drops what has not left yet."""
        self._out.clear()

    def flush(self) -> None:
        self._scheduled = False
        if not self._out or self._transport is None or self._transport.is_closing():
            return
        if self._before_write is not None:
            self._before_write()
        out, self._out = self._out, []
        self._transport.write(b"".join(out))

    def data_received(self, data: bytes) -> None:
        buffer = self._in
        buffer += data
        at, size = 0, len(buffer)
        with memoryview(buffer) as view:
            while size - at >= 4:
                (length,) = _HEAD.unpack_from(view, at)
                if length > self.limit:
                    raise WireError(f"a frame of {length} bytes is longer than {self.limit}")
                if size - at - 4 < length:
                    break
                with view[at + 4 : at + 4 + length] as frame:
                    message = self._decode(frame)
                at += 4 + length
                self._on_message(message)
        if at:
            del buffer[:at]

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        self._on_lost(exc)

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()
