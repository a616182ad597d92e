"""Handlers of the gateway's admin API: sessions, pause, health and metrics. Runs in gateway shards.

Guarantees:
- a session's secret is returned once, in the response to its registration;
- reading a session's state or turns changes nothing; cancelling and deleting a session are idempotent;
- `/healthz` returns 503 while the shard's event loop is delayed or no inference engine of the policy can be
  reached.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, Literal

import msgspec

from rookery.core import RookeryError, Segment, Turn, UsageError
from rookery.gateway.dialects.chat import ChatDialect
from rookery.gateway.dialects.protocol import ErrorKind
from rookery.gateway.http_messages import FORWARDED_HEADER, JSON, Request, ResponseWriter
from rookery.gateway.registration import Registration
from rookery.gateway.registry import SessionConflictError, SessionRegistry
from rookery.gateway.session_entry import SessionEntry
from rookery.gateway.shard_peers import ShardPeers
from rookery.telemetry import REGISTRY, render
from rookery.telemetry.exposition import CONTENT_TYPE, SNAPSHOT_TYPE
from rookery.telemetry.metrics import decode_snapshot, encode_snapshot
from rookery.trajectories import build_segments
from rookery.upstreams.pause import ShardPause
from rookery.upstreams.pause.shards import Broadcast

TEXT: Final = CONTENT_TYPE.encode()
SNAPSHOT: Final = SNAPSHOT_TYPE.encode()
MSGPACK: Final = b"application/msgpack"
_decode_registration = msgspec.json.Decoder(Registration).decode
_encode = msgspec.json.Encoder().encode


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /pause`.

    `mode` says what happens to calls in flight, for example `drain`: let them end.
    """

    mode: str = "drain"
    timeout: float = 60.0
    """Seconds that calls in flight have to end before they are aborted."""
    deadline: float | None = None
    """Seconds after which the pause ends by itself if no resume arrives; None for the default."""


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /resume`."""

    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    """The policy version after the pause; None keeps the current version."""


class Admin:
    """Request handlers of the admin API."""

    def __init__(
        self,
        registry: SessionRegistry,
        peers: ShardPeers,
        pause: ShardPause,
        *,
        base_url: Callable[[Request], str],
        health_problem: Callable[[], str],
    ) -> None:
        """Create the handlers of one shard.

        `base_url` returns the gateway's URL as the client of a request sees it. `health_problem` returns why model
        calls cannot be answered, or an empty string.
        """
        self._registry = registry
        self._peers = peers
        self._pause = pause
        self._base_url = base_url
        self._health_problem = health_problem

    # ---- sessions

    async def register(self, request: Request, out: ResponseWriter) -> None:
        """`POST /rollouts`: register a session. If another shard owns its ID, the request is forwarded there."""
        try:
            registration = _decode_registration(request.body or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            _send_error(out, "bad_request", f"invalid registration: {error}")
            return
        if registration.id and (shard := self._peers.remote_shard(registration.id)) is not None:
            await self._peers.forward(shard, request, out)
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
        """`GET /rollouts`: list the sessions of all shards that answer in time, in the order of registration."""
        sessions = [_describe(entry) for entry in self._registry.entries.values()]
        for body in await self._peers.collect(request):
            sessions += msgspec.json.decode(body)["rollouts"]
        out.send(200, _encode({"rollouts": sorted(sessions, key=lambda session: session["began"])}))

    async def status(self, session: str, request: Request, out: ResponseWriter) -> None:
        """`GET /rollouts/{id}`: return a session's state.

        With `?examine=1`, it first checks whether the replicas of the session's calls in flight hang.
        """
        if (entry := self._find_entry(session, out)) is None:
            return
        evidence = {"evidence": await entry.examine()} if request.query == "examine=1" else {}
        out.send(200, _encode({**_describe(entry), **evidence}))

    async def trajectory(self, session: str, request: Request, out: ResponseWriter) -> None:
        """`GET /rollouts/{id}/trajectory`: return a session's state, turns and segments (sequences for training).

        The format is JSON, or MessagePack if the `Accept` header requests it.
        """
        if (entry := self._find_entry(session, out)) is None:
            return
        binary = MSGPACK.decode() in request.headers.get("accept", "")
        body = await asyncio.to_thread(self._record, entry, list(entry.extents), binary)
        out.send(200, body, MSGPACK if binary else JSON)

    def _record(self, entry: SessionEntry, extents: list[Any], binary: bool) -> bytes:
        """Return a session's state, turns and segments, encoded. Runs in a thread, because they may be large."""
        turns = self._registry.read_extents(extents)
        record = {
            **_describe(entry),
            "turns": [turn if binary else turn_to_json(turn) for turn in turns],
            "segments": [part if binary else segment_to_json(part) for part in build_segments(turns)],
        }
        return msgspec.msgpack.encode(record) if binary else _encode(record)

    async def cancel(self, session: str, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        """`POST /rollouts/{id}/cancel`: end a session, cancel its calls in flight, and keep its recorded turns."""
        if (entry := self._find_entry(session, out)) is not None:
            self._registry.end(entry, "cancelled")
            out.send(200, _encode(_describe(entry)))

    async def delete(self, session: str, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        """`DELETE /rollouts/{id}`: end a session and delete its recorded turns. Deleting twice is allowed."""
        if session not in self._registry.deleted:
            if (entry := self._find_entry(session, out)) is None:
                return
            self._registry.end(entry, "deleted")
        out.send(200, _encode({"id": session, "status": "deleted"}))

    def _find_entry(self, session: str, out: ResponseWriter) -> SessionEntry | None:
        """Return the entry of a session. If it is unknown or deleted, send an error response and return None."""
        entry = self._registry.entries.get(session)
        if entry is None and session in self._registry.deleted:
            _send_error(out, "gone", f"rollout {session[:200]!r} was deleted")
        elif entry is None:
            _send_error(out, "not_found", f"there is no rollout {session[:200]!r}")
        return entry

    # ---- all shards

    async def pause(self, request: Request, out: ResponseWriter) -> None:
        """`POST /pause`: pause calls of the policy in all shards, for example to update its weights."""
        await self._change_pause(
            request,
            out,
            PauseRequest,
            lambda options: self._pause.pause(
                options.mode, options.timeout, options.deadline, self._broadcast_of(request)
            ),
        )

    async def resume(self, request: Request, out: ResponseWriter) -> None:
        """`POST /resume`: end the pause in all shards, and set the policy version if the body has one."""
        await self._change_pause(
            request,
            out,
            ResumeRequest,
            lambda options: self._pause.resume(options.version, self._broadcast_of(request)),
        )

    def _broadcast_of(self, request: Request) -> Broadcast:
        """Return a function that sends a pause or resume to the other shards.

        It sends this request itself if the action is the same, else an empty `/resume` or `/pause`, which undoes
        it.
        """

        async def broadcast(action: Literal["pause", "resume"], seconds: float) -> None:
            own = request.path.endswith(f"/{action}")
            forwarded = request if own else msgspec.structs.replace(request, path=f"/{action}", body=b"{}")
            await self._peers.broadcast(forwarded, seconds)

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
        """`GET /state`: return whether the policy is paused, and its version."""
        out.send(200, _encode(self._pause.state()))

    async def health(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        """`GET /healthz`: return status 200 if this shard can answer model calls, else 503 with the reason."""
        problem = self._health_problem()
        out.send(503 if problem else 200, _encode({"status": problem or "ok"}))

    async def metrics(self, request: Request, out: ResponseWriter) -> None:
        """`GET /metrics`: return the metrics of all shards that answer in time, in Prometheus text format."""
        if FORWARDED_HEADER in request.headers:
            out.send(200, encode_snapshot(REGISTRY.read()), SNAPSHOT)
            return
        others = await self._peers.collect(request)
        total = REGISTRY.read(*(decode_snapshot(one) for one in others))
        if request.headers.get("accept") == SNAPSHOT_TYPE:  # from the run's supervisor
            out.send(200, encode_snapshot(total), SNAPSHOT)
        else:
            out.send(200, render(REGISTRY, total), TEXT)

    async def openapi(self, request: Request, out: ResponseWriter) -> None:  # noqa: ARG002
        """`GET /openapi.json`: return the OpenAPI document of the gateway."""
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
        "calls": max(entry.calls, len(entry.extents)),  # after a restart, only recorded calls are known
        "failure": entry.failure or None,
        "calls_under_way": entry.session.in_flight if entry.session is not None else 0,
        "waited": entry.waited,
        **(entry.summary() or {"usage": None, "fidelity": None}),
    }


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """Convert a turn to plain JSON data, with token IDs and logprobs as arrays. Per-token extras are left out."""
    data: dict[str, Any] = msgspec.to_builtins(turn, builtin_types=(bytes,))
    for name in ("prompt", "sampled"):
        data[name] = _ints(getattr(turn, name))
    data["logprobs"] = _floats(turn.logprobs)
    for name in ("extras", "cuts"):
        data.pop(name, None)
    return data


def segment_to_json(segment: Segment) -> dict[str, Any]:
    """Convert a segment (a token sequence for training) to plain JSON data. A missing logprob becomes null."""
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
