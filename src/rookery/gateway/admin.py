"""What the admin key opens: sessions registered, read, cancelled and deleted; the pause; health and summary.

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
from rookery.gateway.http import JSON, Request, ResponseWriter
from rookery.gateway.metrics import Metrics, merge_texts
from rookery.gateway.registration import Registration
from rookery.gateway.registry import Registry, SessionConflictError
from rookery.gateway.session_entry import SessionEntry
from rookery.trajectories import build_segments
from rookery.upstreams.pause import ShardPause
from rookery.upstreams.pause.shards import Broadcast

TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
MSGPACK: Final = b"application/msgpack"
_registration = msgspec.json.Decoder(Registration).decode
_encode = msgspec.json.Encoder().encode


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /pause`."""

    mode: str = "drain"
    timeout: float = 60.0
    """Seconds for calls under way to end, before they are aborted."""
    deadline: float | None = None
    """Seconds after which a missing resume is an error."""


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
        base_url: Callable[[Request], str],
        collect: Callable[[Request], Awaitable[list[bytes]]],
        pause: ShardPause,
        broadcast: Callable[[Request, float], Awaitable[None]],
        health_problem: Callable[[], str],
        route: Callable[[str], int | None],
        forward: Callable[[int, Request, ResponseWriter], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        self._base_url = base_url
        self._collect = collect
        self._pause = pause
        self._broadcast = broadcast
        self._health_problem = health_problem
        self._route = route
        self._forward = forward

    # ---- sessions

    async def register(self, request: Request, out: ResponseWriter) -> None:
        try:
            registration = _registration(request.body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            _send_error(out, "bad_request", f"this is no registration: {error}")
            return
        if registration.id and (shard := self._route(registration.id)) is not None:
            await self._forward(shard, request, out)
            return
        try:
            entry, secret = self._registry.register(registration)
        except SessionConflictError as error:
            _send_error(out, "conflict", str(error))
            return
        except UsageError as error:
            _send_error(out, "bad_request", str(error))
            return
        base_url = f"{self._base_url(request)}/v1/rollouts/{entry.id}"
        out.send(201, _encode({"id": entry.id, "base_url": base_url, "secret": secret}), headers=(_NO_STORE,))

    async def list_sessions(self, request: Request, out: ResponseWriter) -> None:
        own = [_describe(entry) for entry in self._registry.entries.values()]
        for answer in await self._collect(request):
            own += msgspec.json.decode(answer)["rollouts"]
        out.send(200, _encode({"rollouts": sorted(own, key=lambda one: one["began"])}))

    async def status(self, session: str, request: Request, out: ResponseWriter) -> None:
        """How far a session is; with `?examine=1` also whether the servers of its calls under way hang."""
        if (entry := self._find_entry(session, out)) is None:
            return
        examined = {"evidence": await entry.examine()} if request.query == "examine=1" else {}
        out.send(200, _encode({**_describe(entry), **examined}))

    async def trajectory(self, session: str, request: Request, out: ResponseWriter) -> None:
        entry = self._find_entry(session, out)
        if entry is None:
            return
        binary = MSGPACK.decode() in request.headers.get("accept", "")
        body = await asyncio.to_thread(self._record, entry, list(entry.extents), binary)
        out.send(200, body, MSGPACK if binary else JSON)

    def _record(self, entry: SessionEntry, extents: list[Any], binary: bool) -> bytes:
        """The session's record; in a thread, since it may be large."""
        turns = self._registry.read_extents(extents)
        record = {
            **_describe(entry),
            "turns": [turn if binary else turn_to_json(turn) for turn in turns],
            "segments": [part if binary else segment_to_json(part) for part in build_segments(turns)],
        }
        return msgspec.msgpack.encode(record) if binary else _encode(record)

    async def cancel(self, session: str, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        if (entry := self._find_entry(session, out)) is not None:
            self._registry.end(entry, "cancelled")
            out.send(200, _encode(_describe(entry)))

    async def delete(self, session: str, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        entry = self._registry.entries.get(session)
        if entry is not None:
            self._registry.end(entry, "deleted")
        elif session not in self._registry.deleted:
            _send_error(out, "not_found", f"there is no rollout {session[:200]!r} here")
            return
        out.send(200, _encode({"id": session, "status": "deleted"}))

    def _find_entry(self, session: str, out: ResponseWriter) -> SessionEntry | None:
        entry = self._registry.entries.get(session)
        if entry is None:
            past = session in self._registry.deleted
            said = (
                f"rollout {session[:200]!r} was deleted" if past else f"there is no rollout {session[:200]!r} here"
            )
            _send_error(out, "gone" if past else "not_found", said)
        return entry

    # ---- the whole gateway

    async def pause(self, request: Request, out: ResponseWriter) -> None:
        await self._change_pause(
            request,
            out,
            PauseRequest,
            lambda options: self._pause.pause(
                options.mode, options.timeout, options.deadline, self._broadcast_of(request)
            ),
        )

    async def resume(self, request: Request, out: ResponseWriter) -> None:
        await self._change_pause(
            request,
            out,
            ResumeRequest,
            lambda options: self._pause.resume(options.version, self._broadcast_of(request)),
        )

    def _broadcast_of(self, request: Request) -> Broadcast:
        """Return a function that sends this request to the other shards; a failed pause is undone by a resume."""

        async def broadcast(action: Literal["pause", "resume"], seconds: float) -> None:
            sent = request
            if not request.path.endswith(f"/{action}"):
                sent = msgspec.structs.replace(request, path=f"/{action}", body=b"{}")
            await self._broadcast(sent, seconds)

        return broadcast

    async def _change_pause(
        self,
        request: Request,
        out: ResponseWriter,
        kind: type[Any],
        act: Callable[[Any], Awaitable[dict[str, Any]]],
    ) -> None:
        try:
            options = msgspec.json.decode(request.body or b"{}", type=kind)
            state = await act(options)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UsageError) as error:
            _send_error(out, "bad_request", str(error))
        except RookeryError as error:
            _send_error(out, "unavailable", str(error))
        else:
            out.send(200, _encode(state))

    async def state(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        out.send(200, _encode(self._pause.state()))

    async def health(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        health_problem = self._health_problem()
        out.send(503 if health_problem else 200, _encode({"status": health_problem or "ok"}))

    async def metrics(self, request: Request, out: ResponseWriter) -> None:
        texts = [self._metrics.text(), *await self._collect(request)]
        out.send(200, merge_texts(texts), TEXT)

    async def openapi(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        from rookery.gateway.openapi import build_openapi

        out.send(200, _encode(build_openapi()))


_NO_STORE: Final = (b"cache-control", b"no-store")
_dialect: Final = ChatDialect()


def _send_error(out: ResponseWriter, problem: ErrorKind, message: str) -> None:
    status, body = _dialect.format_error(problem, message)
    out.send(status, body)


def _describe(entry: SessionEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "status": entry.ended or "open",
        "truncated": entry.truncated,
        "began": entry.began,
        "turns_recorded": len(entry.extents),
        "calls": max(entry.calls, len(entry.extents)),  # a restarted shard knows only the recorded ones
        "failure": entry.failure or None,
        "calls_under_way": entry.session.in_flight if entry.session is not None else 0,
        "waited": entry.waited,
        **(entry.summary() or {"usage": None, "fidelity": None}),
    }


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """A turn as plain JSON: arrays instead of bytes."""
    shown: dict[str, Any] = msgspec.to_builtins(turn, builtin_types=(bytes,))
    for name in ("prompt", "sampled"):
        shown[name] = _ints(getattr(turn, name))
    shown["logprobs"] = _floats(turn.logprobs)
    for name in ("extras", "cuts"):
        shown.pop(name, None)
    return shown


def segment_to_json(segment: Segment) -> dict[str, Any]:
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
