"""What the admin key opens: sessions registered, read, cancelled and deleted; the pause; health and figures.

Promises:
- a session's secret is told once, to whoever registered it;
- reading a record changes nothing; cancelling and deleting twice is fine;
- health never says fine while calls hang or no replica can be reached.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal

import msgspec

from rookery.core import RookeryError, Segment, Turn, UsageError
from rookery.gateway.dialects.chat import ChatDialect
from rookery.gateway.dialects.protocol import ErrorKind
from rookery.gateway.http import JSON, Answer, Request
from rookery.gateway.metrics import Metrics, merged
from rookery.gateway.registration import Registration
from rookery.gateway.registry import ConflictError, Registry
from rookery.gateway.seat import Seat
from rookery.trajectories import build_segments
from rookery.upstreams.pause import ShardPause
from rookery.upstreams.pause.shards import Broadcast

TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
MSGPACK: Final = b"application/msgpack"
_registration = msgspec.json.Decoder(Registration).decode
_encode = msgspec.json.Encoder().encode


class PauseWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /pause`."""

    mode: str = "drain"
    timeout: float = 60.0
    """Seconds for calls under way to end, before they are aborted."""
    deadline: float | None = None
    """Seconds after which a missing resume is an error."""


class ResumeWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /resume`."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """The policy version from now on; as before, where it is not said."""


class Admin:
    """The admin's side of one shard."""

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        *,
        base: Callable[[Request], str],
        everywhere: Callable[[Request], Awaitable[list[bytes]]],
        pause: ShardPause,
        broadcast: Callable[[Request, float], Awaitable[None]],
        trouble: Callable[[], str],
        route: Callable[[str], int | None],
        forward: Callable[[int, Request, Answer], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._base = base
        self._everywhere = everywhere
        self._pause = pause
        self._broadcast = broadcast
        self._trouble = trouble
        self._route = route
        self._forward = forward

    # ---- sessions

    async def register(self, request: Request, out: Answer) -> None:
        try:
            registration = _registration(request.body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            _problem(out, "bad_request", f"this is no registration: {error}")
            return
        if registration.id and (shard := self._route(registration.id)) is not None:
            await self._forward(shard, request, out)
            return
        try:
            seat, secret = self._registry.open(registration)
        except ConflictError as error:
            _problem(out, "conflict", str(error))
            return
        except UsageError as error:
            _problem(out, "bad_request", str(error))
            return
        base = f"{self._base(request)}/v1/rollouts/{seat.id}"
        out.send(201, _encode({"id": seat.id, "base_url": base, "secret": secret}), headers=(_NO_STORE,))

    async def listing(self, request: Request, out: Answer) -> None:
        own = [_shown(seat) for seat in self._registry.seats.values()]
        for answer in await self._everywhere(request):
            own += msgspec.json.decode(answer)["rollouts"]
        out.send(200, _encode({"rollouts": sorted(own, key=lambda one: one["began"])}))

    async def status(self, session: str, request: Request, out: Answer) -> None:
        """How far a session is; with `?examine=1` also whether the servers of its calls under way hang."""
        if (seat := self._seat(session, out)) is None:
            return
        examined = {"evidence": await seat.examine()} if request.query == "examine=1" else {}
        out.send(200, _encode({**_shown(seat), **examined}))

    async def trajectory(self, session: str, request: Request, out: Answer) -> None:
        seat = self._seat(session, out)
        if seat is None:
            return
        binary = MSGPACK.decode() in request.headers.get("accept", "")
        body = await asyncio.to_thread(self._record, seat, list(seat.extents), binary)
        out.send(200, body, MSGPACK if binary else JSON)

    def _record(self, seat: Seat, extents: list[Any], binary: bool) -> bytes:
        """The session's record; in a thread, since it may be large."""
        turns = self._registry.read(extents)
        record = {
            **_shown(seat),
            "turns": [turn if binary else shown_turn(turn) for turn in turns],
            "segments": [part if binary else shown_segment(part) for part in build_segments(turns)],
        }
        return msgspec.msgpack.encode(record) if binary else _encode(record)

    async def cancel(self, session: str, request: Request, out: Answer) -> None:  # noqa: ARG002
        if (seat := self._seat(session, out)) is not None:
            self._registry.end(seat, "cancelled")
            out.send(200, _encode(_shown(seat)))

    async def delete(self, session: str, request: Request, out: Answer) -> None:  # noqa: ARG002
        seat = self._registry.seats.get(session)
        if seat is not None:
            self._registry.end(seat, "deleted")
        elif session not in self._registry.past:
            _problem(out, "not_found", f"there is no rollout {session[:200]!r} here")
            return
        out.send(200, _encode({"id": session, "status": "deleted"}))

    def _seat(self, session: str, out: Answer) -> Seat | None:
        seat = self._registry.seats.get(session)
        if seat is None:
            past = session in self._registry.past
            said = (
                f"rollout {session[:200]!r} was deleted" if past else f"there is no rollout {session[:200]!r} here"
            )
            _problem(out, "gone" if past else "not_found", said)
        return seat

    # ---- the whole gateway

    async def pause(self, request: Request, out: Answer) -> None:
        await self._sync(
            request,
            out,
            PauseWish,
            lambda wish: self._pause.pause(wish.mode, wish.timeout, wish.deadline, self._broadcast_of(request)),
        )

    async def resume(self, request: Request, out: Answer) -> None:
        await self._sync(
            request, out, ResumeWish, lambda wish: self._pause.resume(wish.version, self._broadcast_of(request))
        )

    def _broadcast_of(self, request: Request) -> Broadcast:
        """Return a function that sends this request to the other shards; a failed pause is undone by a resume."""

        async def broadcast(action: Literal["pause", "resume"], seconds: float) -> None:
            sent = request
            if not request.path.endswith(f"/{action}"):
                sent = msgspec.structs.replace(request, path=f"/{action}", body=b"{}")
            await self._broadcast(sent, seconds)

        return broadcast

    async def _sync(
        self, request: Request, out: Answer, kind: type[Any], act: Callable[[Any], Awaitable[dict[str, Any]]]
    ) -> None:
        try:
            wish = msgspec.json.decode(request.body or b"{}", type=kind)
            state = await act(wish)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UsageError) as error:
            _problem(out, "bad_request", str(error))
        except RookeryError as error:
            _problem(out, "unavailable", str(error))
        else:
            out.send(200, _encode(state))

    async def state(self, request: Request, out: Answer) -> None:  # noqa: ARG002
        out.send(200, _encode(self._pause.state()))

    async def health(self, request: Request, out: Answer) -> None:  # noqa: ARG002
        trouble = self._trouble()
        out.send(503 if trouble else 200, _encode({"status": trouble or "ok"}))

    async def metrics(self, request: Request, out: Answer) -> None:
        texts = [self._metrics.text(), *await self._everywhere(request)]
        out.send(200, merged(texts), TEXT)

    async def openapi(self, request: Request, out: Answer) -> None:  # noqa: ARG002
        from rookery.gateway.openapi import described

        out.send(200, _encode(described()))


_NO_STORE: Final = (b"cache-control", b"no-store")
_dialect: Final = ChatDialect()


def _problem(out: Answer, problem: ErrorKind, message: str) -> None:
    status, body = _dialect.format_error(problem, message)
    out.send(status, body)


def _shown(seat: Seat) -> dict[str, Any]:
    return {
        "id": seat.id,
        "status": seat.ended or "open",
        "truncated": seat.truncated,
        "began": seat.began,
        "turns_recorded": len(seat.extents),
        "calls": max(seat.calls, len(seat.extents)),  # a restarted shard knows only the recorded ones
        "failure": seat.failure or None,
        "calls_under_way": seat.session.under_way if seat.session is not None else 0,
        "held": seat.held,
        **(seat.figures() or {"usage": None, "fidelity": None}),
    }


def shown_turn(turn: Turn) -> dict[str, Any]:
    """A turn as plain JSON: arrays instead of bytes."""
    shown: dict[str, Any] = msgspec.to_builtins(turn, builtin_types=(bytes,))
    for name in ("prompt", "sampled"):
        shown[name] = _ints(getattr(turn, name))
    shown["logprobs"] = _floats(turn.logprobs)
    for name in ("extras", "cuts"):
        shown.pop(name, None)
    return shown


def shown_segment(segment: Segment) -> dict[str, Any]:
    """A segment as plain JSON. A token without a logprob has null there."""
    return {
        "tokens": _ints(segment.tokens),
        "mask": list(segment.mask),
        "logprobs": _floats(segment.logprobs),
        "versions": [[span.start, span.end, span.version] for span in segment.versions],
        "turns": list(segment.turns),
    }


def _ints(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist() if data else []


def _floats(data: bytes) -> list[float | None]:
    values = memoryview(data).cast("f").tolist() if data else []
    return [value if value == value else None for value in values]  # noqa: PLR0124  (NaN)
